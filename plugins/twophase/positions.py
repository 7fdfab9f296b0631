"""Show how far a pipeline's sources have been read, and move that deliberately; `twophase positions` calls this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twophase.core.errors import ConfigError, SinkUnavailable
from twophase.core.states import DECIDED, UNDECIDED

if TYPE_CHECKING:
    from twophase.core.checkpoint import Position
    from twophase.core.coordinator import Coordinator
    from twophase.core.ports import Transaction
    from twophase.pipeline import Pipeline


def listed(coordinator: Coordinator, pipeline: Pipeline) -> tuple[list[dict[str, Any]], list[str]]:
    """Return each position with the end of its partition and the lag, and why some ends are not known."""
    found = coordinator.transact(lambda tx: tx.outlook(pipeline.name, None)).look.positions
    rows, problems = [], []
    for source, positions in sorted(found.items()):
        ends: Mapping[str, int] = {}
        try:
            ends = pipeline.reads[source].ends(positions) if source in pipeline.reads else {}
        except (ConfigError, SinkUnavailable) as error:
            problems.append(str(error))
        for partition, at in sorted(positions.items()):
            end = ends.get(partition)
            lag = None if end is None else end - at.offset
            rows.append({"source": source, "partition": partition, "offset": at.offset, "end": end, "lag": lag})
    return rows, problems


def move(
    coordinator: Coordinator, pipeline: Pipeline, wanted: Mapping[str, str], forgotten: Sequence[str], reason: str
) -> dict[str, dict[str, Position | None]]:
    """Move positions, or forget partitions (None), while nothing is undecided; return what was changed, per source.

    What is wanted is `read/partition` → where. The source is asked first: it says which places there are.
    """
    asked: dict[str, dict[str, str | None]] = {}
    for name, told in {**wanted, **dict.fromkeys(forgotten)}.items():
        source, _, place = name.partition("/")
        if source not in pipeline.reads or not place:
            reads = ", ".join(pipeline.reads)
            msg = f"pipeline {pipeline.name!r}: position {name!r}: expected READ/PARTITION, with a read of {reads}"
            raise ConfigError(msg)
        asked.setdefault(source, {})[place] = told
    places = {
        source: pipeline.reads[source].moved({name: told for name, told in parts.items() if told is not None})
        for source, parts in asked.items()
    }

    def step(tx: Transaction) -> dict[str, dict[str, Position | None]]:
        tx.lock(pipeline.name)
        _refuse_undecided(tx, pipeline.name)
        there = tx.outlook(pipeline.name, None).look.positions
        changed: dict[str, dict[str, Position | None]] = {}
        for source, parts in asked.items():
            known = there.get(source, {})
            under = {name for name in known for part in parts if name == part or name.startswith(f"{part}/")}
            changed[source] = {**dict.fromkeys(under), **places[source]}
            tx.reposition(pipeline.name, source, changed[source])
        newest = tx.newest(pipeline.name, None)
        if newest is not None:
            tx.note(newest.key, "positions moved", f"{_told(changed)}: {reason}")
        return changed

    return coordinator.transact(step)


def _refuse_undecided(tx: Transaction, pipeline: str) -> None:
    """Refuse to move what a checkpoint would move at its commit point."""
    newest = tx.newest(pipeline, None)
    undecided = [revision for revision in tx.unfinished(pipeline) if revision.state in UNDECIDED]
    if undecided or (newest is not None and newest.state not in DECIDED):
        held = undecided[0] if undecided else newest
        remedy = f"abort it, then `twophase release {pipeline} {held.checkpoint_id} --reason …`" if held else ""
        msg = f"checkpoint {held.key if held else ''}: it is undecided, and its input is its own; {remedy}"
        raise ConfigError(msg)


def _told(changed: Mapping[str, Mapping[str, Position | None]]) -> str:
    return ", ".join(
        f"{source}/{name} to {at.offset}" if at else f"{source}/{name} forgotten"
        for source, parts in changed.items()
        for name, at in sorted(parts.items())
    )
