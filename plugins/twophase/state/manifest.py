"""`StateManifest`: the sorted runs that together are the state as of one revision. The record keeps it.

Spark's side makes one for each attempt; readers, the sweep and the verification take it from the record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any

from twophase.core.manifest import Column, Schema
from twophase.state.declaration import State
from twophase.storage.disk import digest


@dataclass(frozen=True)
class SortedRun:
    """One immutable file of rows, sorted by the hash of their key."""

    #: Below the folder `runs` of the state.
    path: str
    #: 0 for what a checkpoint changed, 1 and above for merged ones; `levels.BASE` for the base.
    level: int
    rows: int
    bytes: int
    #: The least and the greatest hash.
    low: int
    high: int
    xxh3: str
    #: The checkpoint whose attempt wrote it.
    checkpoint_id: int


@dataclass(frozen=True)
class StateManifest:
    """A state as of one revision: where its rows are, and what the revision changed."""

    key: tuple[str, ...]
    schema: Schema
    #: What a reader reads, newest first; of two rows of one key the one in the earlier run counts.
    runs: tuple[SortedRun, ...] = ()
    #: What this revision changed, also if `runs` has it merged with older ones: the history of a key.
    own: tuple[SortedRun, ...] = ()
    #: Live keys; an expired one counts until a merge removes it.
    keys: int = 0
    changed: int = 0
    deleted: int = 0
    #: The bytes that this attempt wrote, merged runs included.
    bytes: int = 0
    #: The time of the checkpoint, by which rows expire.
    timestamp: datetime | None = None
    watermarks: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def empty(cls, declaration: State) -> StateManifest:
        """Return the state before the first checkpoint."""
        return cls(key=declaration.key, schema=declaration.columns)

    def files(self) -> tuple[SortedRun, ...]:
        """Return every run that is listed, each once."""
        return tuple({run.path: run for run in (*self.runs, *self.own)}.values())

    def to_json(self) -> dict[str, Any]:
        """Return what the record keeps; `digest` is a checksum of the rest."""
        found: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        found |= {
            "key": list(self.key),
            "schema": [list(column) for column in self.schema],
            "runs": [vars(run) for run in self.runs],
            "own": [vars(run) for run in self.own],
            "timestamp": self.timestamp and self.timestamp.isoformat(),
            "watermarks": dict(self.watermarks),
            "rows": self.changed + self.deleted,
            "files": len(self.files()),
        }
        return {**found, "digest": digest(json.dumps(found, sort_keys=True).encode())}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> StateManifest:
        """Read what `to_json` returned."""
        plain = {name: found[name] for name in ("keys", "changed", "deleted", "bytes", "watermarks")}
        return cls(
            key=tuple(found["key"]),
            schema=tuple(Column(*column) for column in found["schema"]),
            runs=tuple(SortedRun(**run) for run in found["runs"]),
            own=tuple(SortedRun(**run) for run in found["own"]),
            timestamp=datetime.fromisoformat(found["timestamp"]) if found["timestamp"] else None,
            **plain,
        )
