"""The plan: all that a Spark job is told about its attempt; `attempt` writes it, `spark.main` and `stage` read it.

It holds no secrets and no way to the committer database.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from twophase.core import private_files
from twophase.core.checkpoint import Input, InputFile, Json, Key, Output


@dataclass(frozen=True)
class PlannedRead:
    """One read of an attempt."""

    #: The source's declaration.
    source: Json
    fixed: Input


@dataclass(frozen=True)
class PlannedWrite:
    """One write of an attempt."""

    #: The sink's declaration.
    sink: Json
    #: What the sink's `place` named; None: this attempt does not stage it, since it is a restage of others.
    handle: Json | None
    #: The columns of what was last decided there; None: nothing was.
    schema: list[list[str]] | None = None
    #: The read whose bad records it takes; None: it takes what the transform returns.
    quarantine: str | None = None


@dataclass(frozen=True)
class PlannedState:
    """One state of an attempt."""

    #: The state's declaration, and the folder of its runs.
    state: Json
    home: str
    #: What its `place` named: how the names of this attempt's runs begin; None: this attempt does not stage it.
    handle: Json | None
    #: The manifest of what it starts from; empty: nothing is kept yet.
    base: Json


@dataclass(frozen=True)
class Plan:
    """One attempt, as its Spark job sees it."""

    pipeline: str
    checkpoint_id: int
    revision: int
    attempt: int
    slot: str | None
    #: `module:function`, or the declaration of a continuous query; None: the stager was handed a function.
    transform: str | Json | None
    reads: Mapping[str, PlannedRead]
    writes: Mapping[str, PlannedWrite]
    #: When the checkpoint first began, in ISO 8601: the same for every revision and attempt.
    timestamp: str | None = None
    #: State → what it starts from, by their names in the record.
    states: Mapping[str, PlannedState] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """Return the revision this attempt belongs to."""
        return Key(self.pipeline, self.checkpoint_id, self.revision)

    @property
    def staged(self) -> dict[str, PlannedWrite]:
        """Return the writes that this attempt stages."""
        return {name: write for name, write in self.writes.items() if write.handle is not None}

    def fixed(self, name: str) -> Input:
        """Return the fixed input of one read."""
        return replace(self.reads[name].fixed, checkpoint_id=self.checkpoint_id)

    def with_files(self, name: str, files: Sequence[InputFile]) -> Plan:
        """Return the plan with newer entries for some files of a read."""
        known, read = {file.path: file for file in files}, self.reads[name]
        fixed = replace(read.fixed, files=tuple(known.get(file.path, file) for file in read.fixed.files))
        return replace(self, reads={**self.reads, name: replace(read, fixed=fixed)})

    def output(self, name: str) -> Output:
        """Return what this attempt puts into one write."""
        return Output(self.key, self.attempt, self.writes[name].handle or {}, sink=name)

    def quarantines(self) -> dict[str, str]:
        """Return the writes that take a read's bad records: write → read."""
        return {name: write.quarantine for name, write in self.writes.items() if write.quarantine is not None}

    def connections(self) -> list[str]:
        """Return the ids of the connections that the driver needs to read and to stage."""
        from twophase.sinks.base import Sink
        from twophase.sources.base import Source

        staged = [Sink.load(dict(write.sink)) for write in self.staged.values()]
        read = [Source.load(dict(read.source)).connections(self.fixed(name)) for name, read in self.reads.items()]
        return sorted({conn_id for found in (*read, *(sink.connections() for sink in staged)) for conn_id in found})

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON."""
        reads = {name: {"source": read.source, "fixed": read.fixed.to_json()} for name, read in self.reads.items()}
        writes = {name: vars(write) for name, write in self.writes.items()}
        states = {name: vars(state) for name, state in self.states.items()}
        return {**vars(self), "reads": reads, "writes": writes, "states": states}

    @classmethod
    def of_json(cls, told: Json) -> Plan:
        """Read a plan from what `to_json` returned."""
        reads = {
            name: PlannedRead(read["source"], Input.of_json(read["fixed"])) for name, read in told["reads"].items()
        }
        writes = {name: PlannedWrite(**write) for name, write in told["writes"].items()}
        states = {name: PlannedState(**state) for name, state in told.get("states", {}).items()}
        return cls(**{**told, "reads": reads, "writes": writes, "states": states})

    def write(self, path: Path) -> None:
        """Write the plan to a file."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a plan from a file."""
        return cls.of_json(json.loads(path.read_bytes()))


def write_json(path: Path, content: Any) -> None:  # noqa: ANN401 - anything JSON
    """Write a JSON file that only this account can read; a reader finds all of it or no file."""
    new = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with private_files.open_file(new, "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
