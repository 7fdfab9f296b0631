"""What must hold after every step of every process, whoever was killed or stopped wherever."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memory import Folder, Marker, MemorySink, MemorySource, Row
from twophase.core.checkpoint import Key, Revision
from twophase.core.states import DECIDED, LIVE, UNDECIDED, State

if TYPE_CHECKING:
    from model import Process, World

PIPELINE = "p"


class Violation(AssertionError):
    """A promise was broken."""


@dataclass
class Seen:
    """What was true before, and must stay so."""

    revisions: dict[Key, Revision] = field(default_factory=dict)
    leases: dict[Key, float] = field(default_factory=dict)
    highest_seq: int = 0
    checkpoints_committed: set[int] = field(default_factory=set)


def visible_folders(sink: MemorySink) -> dict[int, Folder]:
    """Return what readers see, by checkpoint."""
    return {int(path[8:]): folder for path, folder in sink.folders.items() if path.startswith("visible/")}


def visible_rows(sink: MemorySink) -> list[Row]:
    """Return the rows that readers see."""
    return [row for folder in visible_folders(sink).values() for row in folder.rows()]


def must(promise: bool, what: str) -> None:
    """Raise Violation unless a promise holds."""
    if not promise:
        raise Violation(what)


def check_promises(world: World, process: Process | None) -> None:
    """Check everything that must hold at every step, whoever was killed or stopped wherever."""
    revisions = world.record.revisions()
    inputs = {key[1]: row["inputs"]["events"] for key, row in sorted(world.record.table("checkpoint").items())}
    _check_history(world, revisions, process)
    _check_one_each(revisions)
    _check_input(world, revisions, inputs)
    for name, sink in world.sinks.items():
        _check_sink(world, name, sink, revisions, inputs)
    world.seen.revisions = revisions
    world.seen.leases = {key: row["lease_until"] or 0.0 for key, row in world.record.table("revision").items()}


def _check_history(world: World, revisions: dict[Key, Revision], process: Process | None) -> None:
    """See that decided is final, epochs and commit_seq only grow, and nobody's work is taken away."""
    seen = world.seen
    for key, before in seen.revisions.items():
        now = revisions.get(key)
        must(now is not None, f"{key} vanished")
        assert now
        must(now.epoch >= before.epoch, f"{key}: epoch went from {before.epoch} to {now.epoch}")
        must(before.state not in DECIDED or now.state in DECIDED, f"{key}: decided, and now {now.state}")
        must(before.commit_seq in {None, now.commit_seq}, f"{key}: commit_seq changed")
        if not world.limits.owners:
            continue
        if (before.state in UNDECIDED and now.state is State.ABORTING) or now.run != before.run:
            own = process is not None and process.run == before.run
            must(own or world.run_ended(before.run) is True, f"{key}: taken from {before.run}, which goes on")
            must(
                own or seen.leases.get(key, 0.0) <= world.record.now, f"{key}: taken from {before.run} under its lease"
            )
        if before.state in UNDECIDED and now.epoch > before.epoch:
            must(process is not None and process.run == before.run, f"{key}: an attempt by another than {before.run}")
    new = sorted(r.commit_seq for key, r in revisions.items() if r.commit_seq and not _had_seq(seen, key))
    must(all(seq > seen.highest_seq for seq in new), f"commit_seq {new} after {seen.highest_seq}")
    seen.highest_seq = max([seen.highest_seq, *new])
    committed = {key.checkpoint_id for key, r in revisions.items() if r.state is State.COMMITTED}
    must(committed >= seen.checkpoints_committed, f"{seen.checkpoints_committed - committed}: no longer committed")
    seen.checkpoints_committed = committed


def _had_seq(seen: Seen, key: Key) -> bool:
    return key in seen.revisions and seen.revisions[key].commit_seq is not None


def _check_one_each(revisions: dict[Key, Revision]) -> None:
    """See that there is at most one live and one COMMITTED revision per checkpoint."""
    for what, states in (("live", LIVE), ("committed", {State.COMMITTED})):
        counts = Counter(key.checkpoint_id for key, r in revisions.items() if r.state in states)
        must(all(count == 1 for count in counts.values()), f"{what} revisions: {counts}")
    taken = Counter(r.commit_seq for r in revisions.values() if r.commit_seq is not None)
    must(all(count == 1 for count in taken.values()), f"commit_seq taken twice: {taken}")


def _check_input(world: World, revisions: dict[Key, Revision], inputs: dict[int, Any]) -> None:
    """See that ranges follow each other without gap or overlap, and the position is where the decided ones end."""
    decided = {key.checkpoint_id for key, r in revisions.items() if r.state in DECIDED}
    must(decided == set(range(1, len(decided) + 1)), f"decided out of order: {decided}")
    waiting = [r for r in revisions.values() if r.state is State.COMMITTING and r.kind == "regular"]
    must(len(waiting) <= world.limits.max_pending, f"too many pending: {[str(r.key) for r in waiting]}")
    ends: Counter[str] = Counter()
    position: Counter[str] = Counter()
    for checkpoint_id, fixed in inputs.items():
        for partition, (start, end) in fixed.ranges.items():
            must(start == ends[partition] and end >= start, f"checkpoint {checkpoint_id}: {fixed.ranges} after {ends}")
            ends[partition] = end
            if checkpoint_id in decided:
                position[partition] = end
    found = {key[2]: off for key, off in world.record.table("position").items()}
    must(found == {p: off for p, off in position.items() if off}, f"position {found}, decided up to {position}")


def _check_sink(
    world: World, name: str, sink: MemorySink, revisions: dict[Key, Revision], inputs: dict[int, Any]
) -> None:
    """See that what is visible is whole, decided and there once, and that what is COMMITTED is visible."""
    counts = Counter(visible_rows(sink))
    must(all(count == 1 for count in counts.values()), f"{name}: visible more than once: {counts}")
    visible = visible_folders(sink)
    rows = world.record.table("committed")
    for checkpoint_id, folder in visible.items():
        must(folder.marker is not None, f"{name}: checkpoint {checkpoint_id} is visible without a marker")
        assert folder.marker
        shown = revisions[Key(PIPELINE, checkpoint_id, folder.marker.revision)]
        must(shown.state in DECIDED, f"{name}: {shown.key} is visible and {shown.state}")
        whole = sorted(MemorySource.read(inputs[checkpoint_id]))
        must(sorted(folder.rows()) == whole, f"{name}: {shown.key} is not whole: {folder.rows()} of {whole}")
    for key, revision in revisions.items():
        found = visible.get(key.checkpoint_id)
        marker = found.marker if found else None
        promoted = marker is not None and marker.revision >= key.revision
        recorded = (key, name) in rows
        must(promoted or not recorded, f"{name}: {key} is in committed, its marker is not there")
        if revision.state in {State.COMMITTED, State.SUPERSEDED}:
            must(recorded, f"{name}: {key} is {revision.state} without its row in committed")
        if marker is not None and marker.revision == key.revision and recorded:
            voted = world.record.table("participant")[key, name]
            must(
                (voted.attempt, voted.manifest.get("digest")) == (marker.attempt, marker.digest),
                f"{name}: {key}: the record names attempt {voted.attempt}, the sink holds {marker}",
            )
        if revision.state is State.COMMITTING and not promoted and (key, name) not in world.destroyed:
            _check_not_lost(world, name, sink, key)
    _check_order(name, revisions, visible)


def _check_not_lost(world: World, name: str, sink: MemorySink, key: Key) -> None:
    """See that what was decided can still be promoted."""
    voted = world.record.table("participant")[key, name]
    marker = Marker(key.revision, voted.attempt, voted.manifest.get("digest"))
    kept = {folder.marker for path, folder in sink.folders.items() if not path.endswith((".junk", ".dead"))}
    must(marker in kept, f"{name}: {key} is decided, what was voted for is gone: {marker}")


def _check_order(name: str, revisions: dict[Key, Revision], visible: dict[int, Folder]) -> None:
    """See that a sink shows the regular checkpoints in the order of their decisions."""
    regular = [r for r in revisions.values() if r.state in DECIDED and r.kind == "regular"]
    order = [r.checkpoint_id for r in sorted(regular, key=lambda r: r.commit_seq or 0)]
    shown = [checkpoint_id in visible for checkpoint_id in order]
    must(shown == sorted(shown, reverse=True), f"{name}: decided in the order {order}, visible {shown}")
