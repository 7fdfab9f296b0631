"""What an attempt staged: every file, what is in it, and the schema of the whole."""

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
    """The whole of an attempt's output in one sink."""

    key: Key
    sink: str
    attempt: int
    schema: Schema
    files: tuple[StagedFile, ...]
    #: The folder it is for, where that does not follow from the checkpoint.
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
        """Write it as JSON, always the same for the same content."""
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
        """Return what the record keeps: everything but the list of files, which the digest stands for."""
        return {
            "digest": digest,
            "files": len(self.files),
            "rows": self.rows,
            "bytes": self.bytes,
            "schema": [list(column) for column in self.schema],
        }


#: Types that hold every value of the one before them, exactly.
_WIDER = (("tinyint", "smallint", "int", "bigint"), ("float", "double"))
_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")


def widens(before: str, after: str) -> bool:
    """Say whether one type is another one with room for more, in Spark's words: every value stays what it was."""
    if (old := _DECIMAL.fullmatch(before)) and (new := _DECIMAL.fullmatch(after)):
        return int(old[1]) < int(new[1]) and old[2] == new[2]
    return any(before in kinds and after in kinds[kinds.index(before) + 1 :] for kinds in _WIDER)


def widest(schemas: Iterable[Sequence[Sequence[str]]]) -> list[list[str]]:
    """Return the schema that fits all of those that followed each other: the most columns, each of its widest type."""
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
    """Say in words what stops `after` from following `before`.

    New columns are fine, if by position at the end, and so are wider types where a sink can have them.
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
