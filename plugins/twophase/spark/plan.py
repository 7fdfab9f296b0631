"""The plan: all that a Spark job is told about its attempt; `attempt` writes it, `spark.main` and `stage` read it.

It holds no secrets and no way to the committer database.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from twophase.core import private_files
from twophase.core.checkpoint import Input, InputFile, Key, Output


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
    #: name → {"source": declaration, "files": [[path, size, mtime_ns, xxh3], …], "ranges": {partition: [start, end]},
    #: "marks": {partition: what the source noted about the end},
    #: "outputs": [[checkpoint_id, revision, attempt, handle, manifest], …] with "upstream": the sink's declaration and
    #: "upstream_pipeline", "unversioned": path, "table": a version and its columns}; what a source has no use for may
    #: be left out
    reads: Mapping[str, Mapping[str, Any]]
    #: name → {"sink": declaration, "handle": …, "schema": the schema of the checkpoint before or None,
    #: "quarantine": the read whose bad records it takes; not there or None: what the transform returns}
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
            marks=read.get("marks", {}),
            outputs=tuple(
                Output(Key(read["upstream_pipeline"], checkpoint_id, revision), attempt, handle, manifest)
                for checkpoint_id, revision, attempt, handle, manifest in read.get("outputs", ())
            ),
            upstream=read.get("upstream"),
            unversioned=read.get("unversioned"),
            table=read.get("table"),
            checkpoint_id=self.checkpoint_id,
        )

    def with_files(self, name: str, files: Sequence[InputFile]) -> Plan:
        """Return the plan with newer entries for some files of a read."""
        known = {file.path: file for file in files}
        fixed = [known.get(file.path, file) for file in self.fixed(name).files]
        return replace(self, reads={**self.reads, name: {**self.reads[name], "files": fixed}})

    def output(self, name: str) -> Output:
        """Return what this attempt puts into one write."""
        return Output(self.key, self.attempt, self.writes[name]["handle"], sink=name)

    def quarantines(self) -> dict[str, str]:
        """Return the writes that take a read's bad records: write → read."""
        return {name: write["quarantine"] for name, write in self.writes.items() if write.get("quarantine")}

    def connections(self) -> list[str]:
        """Return the ids of the connections that the driver needs to read and to stage."""
        from twophase.sinks.base import Sink
        from twophase.sources.base import Source

        staged = [Sink.load(write["sink"]) for write in self.writes.values() if write["handle"] is not None]
        read = [Source.load(dict(read["source"])).connections(self.fixed(name)) for name, read in self.reads.items()]
        return sorted({conn_id for found in (*read, *(sink.connections() for sink in staged)) for conn_id in found})

    def write(self, path: Path) -> None:
        """Write the plan to a file."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a plan from a file."""
        return cls(**json.loads(path.read_bytes()))


def write_json(path: Path, content: Any) -> None:  # noqa: ANN401 - anything JSON
    """Write a JSON file that only this account can read; a reader finds all of it or no file."""
    new = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with private_files.open_file(new, "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
