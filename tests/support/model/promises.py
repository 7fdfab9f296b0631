"""What must hold after every step of every process, whoever was killed or stopped wherever."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from support.model.memory_ports import Folder, Marker, MemorySink, MemorySource
from support.model.memory_record import Row
from twophase.core.checkpoint import Key, Revision
from twophase.core.states import DECIDED, LIVE, UNDECIDED, State

if TYPE_CHECKING:
    from support.model.schedules import Process, World

PIPELINE = "p"


class Violation(AssertionError):
    """A promise was broken."""


@dataclass
class Seen:
    """What was true before, and must stay so."""

    version: int = 0
    revisions: dict[Key, Revision] = field(default_factory=dict)
    leases: dict[Key, float] = field(default_factory=dict)
    highest_seq: int = 0
    checkpoints_committed: set[int] = field(default_factory=set)


def visible_folders(sink: MemorySink) -> dict[int, Folder]:
    """Return what readers see, by checkpoint."""
    return sink.shown()


def first_decisions(revisions: dict[Key, Revision]) -> list[Revision]:
    """Return the first decided revision of each checkpoint, in the order of their decisions."""
    decided = sorted((r for r in revisions.values() if r.commit_seq is not None), key=lambda r: r.commit_seq or 0)
    first: dict[int, Revision] = {}
    for revision in decided:
        first.setdefault(revision.checkpoint_id, revision)
    return list(first.values())


def visible_rows(sink: MemorySink) -> list[Row]:
    """Return the rows that readers see."""
    return [row for folder in visible_folders(sink).values() for row in folder.rows()]


def must(promise: bool, what: str, *details: object) -> None:
    """Raise Violation unless a promise holds; the words are put together only then."""
    if not promise:
        raise Violation(what.format(*details))


def check_promises(world: World, process: Process | None) -> None:
    """Check everything that must hold at every step, whoever was killed or stopped wherever."""
    revisions = world.record.revisions()
    inputs = {key[1]: row["inputs"]["events"] for key, row in sorted(world.record.table("checkpoint").items())}
    if world.seen.version != world.record.version:
        _check_history(world, revisions, process)
        _check_one_each(revisions)
        _check_input(world, revisions, inputs)
    whole = {checkpoint_id: sorted(MemorySource.read(fixed)) for checkpoint_id, fixed in inputs.items()}
    for name, sink in world.sinks.items():
        _check_sink(world, name, sink, revisions, whole)
    world.seen.version = world.record.version
    world.seen.revisions = revisions
    world.seen.leases = {key: row["lease_until"] or 0.0 for key, row in world.record.table("revision").items()}


def _check_history(world: World, revisions: dict[Key, Revision], process: Process | None) -> None:
    """See that decided is final, epochs and commit_seq only grow, and nobody's work is taken away."""
    seen = world.seen
    for key, before in seen.revisions.items():
        now = revisions.get(key)
        must(now is not None, "{} vanished", key)
        assert now
        must(now.epoch >= before.epoch, "{}: epoch went from {} to {}", key, before.epoch, now.epoch)
        must(before.state not in DECIDED or now.state in DECIDED, "{}: decided, and now {}", key, now.state)
        must(before.commit_seq in {None, now.commit_seq}, "{}: commit_seq changed", key)
        if not world.limits.owners:
            continue
        if (before.state in UNDECIDED and now.state is State.ABORTING) or now.run != before.run:
            own = process is not None and process.run == before.run
            must(own or world.run_ended(before.run) is True, "{}: taken from {}, which goes on", key, before.run)
            must(
                own or seen.leases.get(key, 0.0) <= world.record.now,
                "{}: taken from {} under its lease",
                key,
                before.run,
            )
        if before.state in UNDECIDED and now.epoch > before.epoch:
            must(
                process is not None and process.run == before.run, "{}: an attempt by another than {}", key, before.run
            )
    new = sorted(r.commit_seq for key, r in revisions.items() if r.commit_seq and not _had_seq(seen, key))
    must(all(seq > seen.highest_seq for seq in new), "commit_seq {} after {}", new, seen.highest_seq)
    seen.highest_seq = max([seen.highest_seq, *new])
    committed = {key.checkpoint_id for key, r in revisions.items() if r.state is State.COMMITTED}
    must(committed >= seen.checkpoints_committed, "{}: no longer committed", seen.checkpoints_committed - committed)
    seen.checkpoints_committed = committed


def _had_seq(seen: Seen, key: Key) -> bool:
    return key in seen.revisions and seen.revisions[key].commit_seq is not None


def _check_one_each(revisions: dict[Key, Revision]) -> None:
    """See that there is at most one live and one COMMITTED revision per checkpoint."""
    for what, states in (("live", LIVE), ("committed", {State.COMMITTED})):
        counts = Counter(key.checkpoint_id for key, r in revisions.items() if r.state in states)
        must(all(count == 1 for count in counts.values()), "{} revisions: {}", what, counts)
    taken = Counter(r.commit_seq for r in revisions.values() if r.commit_seq is not None)
    must(all(count == 1 for count in taken.values()), "commit_seq taken twice: {}", taken)


def _check_input(world: World, revisions: dict[Key, Revision], inputs: dict[int, Any]) -> None:
    """See that ranges follow each other without gap or overlap, and the position is where the decided ones end."""
    decided = {key.checkpoint_id for key, r in revisions.items() if r.state in DECIDED}
    must(decided == set(range(1, len(decided) + 1)), "decided out of order: {}", decided)
    waiting = [r for r in first_decisions(revisions) if r.state is State.COMMITTING]
    must(len(waiting) <= world.limits.max_pending, "too many pending: {}", [str(r.key) for r in waiting])
    ends: Counter[str] = Counter()
    position: Counter[str] = Counter()
    for checkpoint_id, fixed in inputs.items():
        for partition, (start, end) in fixed.ranges.items():
            must(
                start == ends[partition] and end >= start,
                "checkpoint {}: {} after {}",
                checkpoint_id,
                fixed.ranges,
                ends,
            )
            ends[partition] = end
            if checkpoint_id in decided:
                position[partition] = end
    found = {key[2]: at for key, at in world.record.table("position").items()}
    offsets = {p: at.offset for p, at in found.items() if at.offset}  # pinned at 0 before anything is read
    must(offsets == {p: off for p, off in position.items() if off}, "position {}, decided up to {}", found, position)
    must(all(at.mark == {"end": at.offset} for at in found.values()), "a mark of another offset: {}", found)


def _check_sink(
    world: World, name: str, sink: MemorySink, revisions: dict[Key, Revision], whole: dict[int, list[Row]]
) -> None:
    """See that what is visible is whole, decided and there once, and that what is COMMITTED is visible.

    Which revision it is that readers see whole is not promised where staged output of a replacement was destroyed,
    staged again, and came back: an exchange cannot ask what it brings out.
    """
    visible = visible_folders(sink)
    counts = Counter(row for folder in visible.values() for row in folder.rows())
    must(all(count == 1 for count in counts.values()), "{}: visible more than once: {}", name, counts)
    rows = world.record.table("committed")
    for checkpoint_id, folder in visible.items():
        must(folder.marker is not None, "{}: checkpoint {} is visible without a marker", name, checkpoint_id)
        assert folder.marker
        shown = revisions[Key(PIPELINE, checkpoint_id, folder.marker.revision)]
        must(shown.state in DECIDED, "{}: {} is visible and {}", name, shown.key, shown.state)
        found = sorted(folder.rows())
        must(found == whole[checkpoint_id], "{}: {} is not whole: {}", name, shown.key, found)
    for key, revision in revisions.items():
        if (key.checkpoint_id, name) in world.returned:
            continue
        marker = visible[key.checkpoint_id].marker if key.checkpoint_id in visible else None
        promoted = marker is not None and marker.revision >= key.revision
        recorded = (key, name) in rows
        must(
            promoted or not recorded or _in_the_gap(sink, revision, revisions),
            "{}: {} is in committed, its marker is not there",
            name,
            key,
        )
        if revision.state in {State.COMMITTED, State.SUPERSEDED}:
            must(recorded, "{}: {} is {} without its row in committed", name, key, revision.state)
        if recorded and not revision.swept:
            _check_kept(world, name, sink, key, whole)
            other = marker is not None and marker.revision == key.revision and marker != _voted(world, name, key)
            must(not other, "{}: {}: the sink holds {}, which the record does not name", name, key, marker)
        restaged = world.record.table("participant")[key, name].vote is None if revision.state in DECIDED else False
        if revision.state is State.COMMITTING and not promoted and not restaged and (key, name) not in world.destroyed:
            _check_not_lost(world, name, sink, key)
    _check_order(name, revisions, visible)


def _in_the_gap(sink: MemorySink, revision: Revision, revisions: dict[Key, Revision]) -> bool:
    """Say whether a committed revision is on its way out where folders cannot be exchanged: readers may see a gap."""
    key = revision.key
    later = [r for r in revisions.values() if r.checkpoint_id == key.checkpoint_id and r.state is State.COMMITTING]
    return not sink.exchanges and bool(later) and f"superseded/{key.checkpoint_id}.r{key.revision}" in sink.folders


def _voted(world: World, name: str, key: Key) -> Marker:
    """Return what was last voted for: a restage that has not come to its vote takes nothing's place."""
    found = world.record.table("participant")[key, name]
    voted = found.standing or found
    return Marker(key.revision, voted.attempt, voted.manifest.get("digest"))


def _check_kept(world: World, name: str, sink: MemorySink, key: Key, whole: dict[int, list[Row]]) -> None:
    """See that what was promoted is somewhere whole until retention takes it away, in the table or beside it."""
    marker = _voted(world, name, key)
    kept = sink.kept(marker)
    must(
        [sorted(rows) for rows in kept] == [whole[key.checkpoint_id]],
        "{}: {}: expected {} whole, once, found {}",
        name,
        key,
        marker,
        kept,
    )


def _check_not_lost(world: World, name: str, sink: MemorySink, key: Key) -> None:
    """See that what was decided can still be promoted."""
    marker = _voted(world, name, key)
    kept = [path for path, folder in sink.folders.items() if folder.marker == marker]
    must(
        any(not path.endswith((".junk", ".dead")) for path in kept),
        "{}: {} is decided, what was voted for is gone: {}",
        name,
        key,
        marker,
    )


def _check_order(name: str, revisions: dict[Key, Revision], visible: dict[int, Folder]) -> None:
    """See that a sink shows the checkpoints in the order in which they were first decided."""
    first = first_decisions(revisions)
    order = [r.checkpoint_id for r in first]
    shown = [r.checkpoint_id in visible or r.state is not State.COMMITTING for r in first]
    must(shown == sorted(shown, reverse=True), "{}: decided in the order {}, visible {}", name, order, shown)
