"""The manifest: what an attempt staged in one sink, file by file, and its schema; which schema may follow which.

Sinks write it inside Spark and read it at the vote and at promotion.
"""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from twophase.core.checkpoint import Key


class StagedFile(NamedTuple):
    """One staged file: its path below the staged folder, and how to recognise it."""

    path: str
    size: int
    mtime_ns: int
    rows: int
    xxh3: str


class Column(NamedTuple):
    """One column of an output; the type is Spark's name for it, without nullability."""

    name: str
    type: str


Schema = tuple[Column, ...]


@dataclass(frozen=True)
class Manifest:
    """All of an attempt's output in one sink."""

    key: Key
    sink: str
    attempt: int
    schema: Schema
    files: tuple[StagedFile, ...]
    #: The folder in the table that it is for, if its name does not follow from the checkpoint.
    folder: str | None = None

    @property
    def rows(self) -> int:
        """Return how many rows were staged."""
        return sum(file.rows for file in self.files)

    @property
    def bytes(self) -> int:
        """Return how many bytes were staged."""
        return sum(file.size for file in self.files)

    def dumps(self) -> builtins.bytes:
        """Return it as JSON; the same content always gives the same bytes."""
        head = {
            "pipeline": self.key.pipeline,
            "checkpoint_id": self.key.checkpoint_id,
            "revision": self.key.revision,
            "sink": self.sink,
            "attempt": self.attempt,
            "schema": [list(column) for column in self.schema],
            **({"folder": self.folder} if self.folder else {}),
        }
        lines = ",\n".join(json.dumps(file) for file in self.files)
        return (json.dumps(head)[:-1] + ', "files": [\n' + lines + "\n]}\n").encode()

    @classmethod
    def loads(cls, content: builtins.bytes) -> Manifest:
        """Read what `dumps` wrote."""
        found = json.loads(content)
        return cls(
            key=Key(found["pipeline"], found["checkpoint_id"], found["revision"]),
            sink=found["sink"],
            attempt=found["attempt"],
            schema=tuple(Column(*column) for column in found["schema"]),
            files=tuple(StagedFile(*file) for file in found["files"]),
            folder=found.get("folder"),
        )

    def summary(self, digest: str) -> dict[str, Any]:
        """Return what the record keeps: the digest instead of the list of files, totals and the schema."""
        return {
            "digest": digest,
            "files": len(self.files),
            "rows": self.rows,
            "bytes": self.bytes,
            "schema": [list(column) for column in self.schema],
        }


#: Each type here holds every value of the types before it exactly.
_WIDER = (("tinyint", "smallint", "int", "bigint"), ("float", "double"))
_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")


def widens(before: str, after: str) -> bool:
    """Return True if `after` is a wider type that holds every value of `before` exactly; both are Spark's names."""
    if (old := _DECIMAL.fullmatch(before)) and (new := _DECIMAL.fullmatch(after)):
        return int(old[1]) < int(new[1]) and old[2] == new[2]
    return any(before in kinds and after in kinds[kinds.index(before) + 1 :] for kinds in _WIDER)


def widest(schemas: Iterable[Sequence[Sequence[str]]]) -> list[list[str]]:
    """Return one schema that fits all of a table's schemas: the one with the most columns, each of its widest type."""
    every = list(schemas)
    found = [list(column) for column in max(every, key=len)]
    for column in found:
        for schema in every:
            column[1] = next(
                (kind for name, kind in schema if name == column[0] and widens(column[1], kind)), column[1]
            )
    return found


def schema_changes(
    before: Sequence[Sequence[str]],
    after: Sequence[Sequence[str]],
    *,
    by_position: bool,
    may_widen: Callable[[str, str], bool] = lambda _before, _after: False,
) -> list[str]:
    """Say in words why a schema `after` may not follow `before`; an empty list: it may.

    New columns are allowed, at the end if the format knows columns by position. `may_widen` says which wider types are.
    """
    found = dict((name, kind) for name, kind in after)  # noqa: C402 - pairs come as lists, too
    problems = [
        f"column {name!r} is missing" if name not in found else f"column {name!r} was {kind} and is now {found[name]}"
        for name, kind in before
        if found.get(name) != kind and not may_widen(kind, found.get(name, ""))
    ]
    if by_position and not problems and [name for name, _ in after][: len(before)] != [name for name, _ in before]:
        problems.append("the order of columns changed, and this format knows columns by position")
    return problems
