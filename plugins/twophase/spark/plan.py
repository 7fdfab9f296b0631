"""The plan: all that a Spark job is told of its attempt. It holds no secrets and no way to the committer database."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from twophase.core.checkpoint import Input, InputFile, Key


@dataclass(frozen=True)
class Plan:
    """One attempt, as its Spark job sees it."""

    pipeline: str
    checkpoint_id: int
    revision: int
    attempt: int
    slot: str | None
    #: `module:function`; None when the caller hands a function to the stager in its own process.
    transform: str | None
    #: name → {"source": declaration, "files": [[path, size, mtime_ns], …], "ranges": {partition: [start, end]}}
    reads: Mapping[str, Mapping[str, Any]]
    #: name → {"sink": declaration, "handle": …, "schema": the schema of the checkpoint before or None}
    #: A write without a handle is not staged by this attempt: it is a restage of others.
    writes: Mapping[str, Mapping[str, Any]]

    @property
    def key(self) -> Key:
        """Return the revision this attempt belongs to."""
        return Key(self.pipeline, self.checkpoint_id, self.revision)

    def fixed(self, name: str) -> Input:
        """Return the fixed input of one read."""
        read = self.reads[name]
        return Input(
            files=tuple(InputFile(*file) for file in read.get("files", ())),
            ranges={part: (start, end) for part, (start, end) in read.get("ranges", {}).items()},
        )

    def write(self, path: Path) -> None:
        """Write the plan to a file."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a plan from a file."""
        return cls(**json.loads(path.read_bytes()))


def write_json(path: Path, content: Any) -> None:  # noqa: ANN401 - anything JSON
    """Write a JSON file so that a reader finds all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with new.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
