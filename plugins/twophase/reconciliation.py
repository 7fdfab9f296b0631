"""Reconcile a record that was restored from a backup with what its sinks hold; `twophase reconcile` calls it.

Each sink keeps a receipt of every decision before it shows anything of it. A decision with a receipt that is not in the
record was made, and stays: it goes back into the record. Then recovery finds its markers, or promotes what is still
staged. A revision that was never decided is not restored; nothing is lost, because its input is new input again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twophase.core.checkpoint import Json, Key
from twophase.core.errors import ConfigError, RecordBehind
from twophase.core.failpoints import hit
from twophase.core.isolation import alone
from twophase.core.ports import Outcome
from twophase.core.states import State

if TYPE_CHECKING:
    from twophase.committer.record import PostgresRecord, PostgresTransaction
    from twophase.core.checkpoint import Revision
    from twophase.core.coordinator import Coordinator
    from twophase.core.recovery import Decision
    from twophase.pipeline import Pipeline

#: The problem of output without a receipt: nothing says what it was made from.
NO_RECEIPT = (
    "a version that kept no receipts promoted it, so its input is not known: restore a newer backup, or take it out of"
    " every sink by hand, and its input is read again"
)


@dataclass(frozen=True)
class Forgotten:
    """One decision that a sink has a receipt of and the record does not know."""

    receipt: Json
    #: Sink → None if it holds the output, else how that stands.
    sinks: Mapping[str, str | None]
    #: The state that it gets in the record.
    becomes: State
    #: Why it cannot be recorded; None: it can.
    problem: str | None = None

    @property
    def key(self) -> Key:
        """Return the revision that was decided."""
        return Key(self.receipt["pipeline"], self.receipt["checkpoint_id"], self.receipt["revision"])

    def told(self) -> dict[str, Any]:
        """Return it for display, under the record's own names."""
        names = ("pipeline", "checkpoint_id", "revision", "commit_seq", "slot", "kind", "run_id", "decided_at", "rows")
        return {
            **{name: self.receipt[name] for name in names},
            "inputs": {**self.receipt["inputs"], **(self.receipt["own_inputs"] or {})},
            "paths": [row[1] for row in (*self.receipt["files"], *self.receipt["own_files"])],
            "read": [f"{Key(*row[1:])}" for row in self.receipt["upstream"]],
            "sinks": dict(self.sinks),
            "becomes": self.becomes,
            "problem": self.problem,
        }


@dataclass(frozen=True)
class Survey:
    """What the sinks of a pipeline hold and its record does not know."""

    pipeline: str
    #: The first commit_seq that the record did not know when it was read.
    next_commit_seq: int
    forgotten: list[Forgotten] = field(default_factory=list)
    #: What a sink shows without a receipt: sink, checkpoint, revision.
    unreceipted: list[tuple[str, int, int]] = field(default_factory=list)
    #: Which sinks could not be asked, and why; they may hold more.
    silent: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Return True if anything is missing in the record."""
        return bool(self.forgotten or self.unreceipted)

    def told(self) -> list[dict[str, Any]]:
        """Return all of it for display."""
        strange: dict[tuple[int, int], dict[str, None]] = {}
        for sink, checkpoint_id, revision in self.unreceipted:
            strange.setdefault((checkpoint_id, revision), {})[sink] = None
        return [
            *(one.told() for one in self.forgotten),
            *(
                {
                    "pipeline": self.pipeline,
                    "checkpoint_id": checkpoint_id,
                    "revision": revision,
                    "commit_seq": None,
                    "sinks": sinks,
                    "becomes": None,
                    "problem": NO_RECEIPT,
                }
                for (checkpoint_id, revision), sinks in strange.items()
            ),
        ]


def survey(record: PostgresRecord, pipeline: Pipeline, coordinator: Coordinator) -> Survey:
    """Ask every sink what it holds beyond the record; changes nothing. A sink that is down is noted in `silent`."""
    from twophase.committer import restoration

    name = pipeline.name
    with record.transaction() as tx:
        known = tx.reach(name)
        committing = {one.commit_seq: one for one in tx.unfinished(name) if one.state is State.COMMITTING}
    since = min([known.next_commit_seq, *(seq for seq in committing if seq is not None)])
    silent: list[str] = []
    found, torn = _receipts(pipeline, since, silent)
    # Keep unknown decisions, and known ones that were restaged later than the record knows.
    found = [
        one
        for one in found
        if one["commit_seq"] >= known.next_commit_seq
        or (one["commit_seq"] in committing and one["epoch"] > committing[one["commit_seq"]].epoch)
    ]
    last = {one["checkpoint_id"]: one["commit_seq"] for one in found}
    forgotten = []
    shown = _markers(pipeline, silent)
    with record.transaction() as tx:
        problems = {one["commit_seq"]: torn.get(one["commit_seq"]) or restoration.objection(tx, one) for one in found}
        held = [(sink, *key) for sink, keys in shown.items() for key in tx.lacks(name, keys)]
    for one in found:
        replaced = last[one["checkpoint_id"]] != one["commit_seq"]
        sinks, problem = ({}, None) if replaced else _standing(coordinator, one)
        whole = State.COMMITTED if not any(sinks.values()) else State.COMMITTING
        becomes = State.SUPERSEDED if replaced else whole
        forgotten.append(Forgotten(one, sinks, becomes, problems[one["commit_seq"]] or problem))
    keys = {one.key[1:] for one in forgotten}
    strange = [one for one in held if one[1:] not in keys]
    return Survey(name, known.next_commit_seq, forgotten, strange, list(dict.fromkeys(silent)))


def _markers(pipeline: Pipeline, silent: list[str]) -> dict[str, list[tuple[int, int]]]:
    """Return the checkpoints and revisions that each sink shows."""
    shown: dict[str, list[tuple[int, int]]] = {}
    for name, sink in pipeline.sinks.items():
        with alone(f"sink {name!r}", silent):
            shown[name] = list(sink.markers(pipeline.name))
    return shown


def _receipts(pipeline: Pipeline, since: int, silent: list[str]) -> tuple[list[Json], dict[int, str]]:
    """Return the receipts of all sinks by commit_seq, of each the one of the highest epoch; and the contradictions.

    Two receipts contradict each other if they have one commit_seq and different revisions.
    """
    found: dict[int, Json] = {}
    torn: dict[int, str] = {}
    for name, sink in pipeline.sinks.items():
        kept: list[Json] = []
        with alone(f"sink {name!r}", silent):
            kept = list(sink.receipts(pipeline.name, since))
        for receipt in kept:
            seq = receipt["commit_seq"]
            there = found.setdefault(seq, receipt)
            if (there["checkpoint_id"], there["revision"]) != (receipt["checkpoint_id"], receipt["revision"]):
                other = Key(pipeline.name, receipt["checkpoint_id"], receipt["revision"])
                torn[seq] = f"sink {name!r} has commit_seq {seq} as {other}: two records wrote here"
            elif there["epoch"] < receipt["epoch"]:
                found[seq] = receipt
    return [found[seq] for seq in sorted(found)], torn


def _standing(coordinator: Coordinator, receipt: Json) -> tuple[dict[str, str | None], str | None]:
    """Ask each sink of a decision whether it holds the output; also return a problem if a sink is not declared."""
    from twophase.committer import participant_rows

    key = Key(receipt["pipeline"], receipt["checkpoint_id"], receipt["revision"])
    sinks: dict[str, str | None] = {}
    staged = [one for one in receipt["participants"] if participant_rows.of_row(one).stages]
    for output in (participant_rows.output(key, one, receipt["commit_seq"]) for one in staged):
        sink = coordinator.sinks.get(output.sink)
        if sink is None:
            problem = (
                f"it was also written to {output.sink!r}, which the record does not know: run the pipeline once,"
                " which is refused and declares it, then reconcile"
            )
            return sinks, problem
        problems: list[str] = []
        with alone("it cannot be asked", problems):
            promotion = sink.find(output)
            there = promotion.outcome is Outcome.ALREADY_PROMOTED
            sinks[output.sink] = None if there else promotion.reason or str(promotion.outcome)
        if problems:
            sinks[output.sink] = problems[0]
    return sinks, None


def reconcile(
    record: PostgresRecord, pipeline: Pipeline, coordinator: Coordinator, reason: str
) -> tuple[Survey, list[tuple[Revision, Decision]]]:
    """Record the decisions that the record has forgotten, then finish them; a second call changes nothing.

    They are recorded in one transaction, all or none, and only if no run has committed since the sinks were asked. If a
    sink could not be asked it may hold more: then the pipeline stays marked as behind, and nothing runs or is promoted.
    """
    from twophase.committer import restoration

    found = survey(record, pipeline, coordinator)
    _refuse(found)
    hit("reconcile.before")

    def step(tx: PostgresTransaction) -> None:
        tx.lock(pipeline.name)
        now = tx.reach(pipeline.name).next_commit_seq
        if now != found.next_commit_seq:
            msg = f"pipeline {pipeline.name!r}: a run has committed meanwhile; nothing was changed, reconcile again"
            raise RecordBehind(msg)
        restoration.restore(tx, pipeline.name, [one.receipt for one in found.forgotten], f"reconcile: {reason}")
        if found.silent:  # stay behind until every sink has answered
            tx.say_behind(pipeline.name, f"not asked: {'; '.join(found.silent)}")

    if found:
        coordinator.transact(step)  # type: ignore[arg-type]  # a record of PostgreSQL has these transactions
    hit("reconcile.after")
    return found, [] if found.silent else coordinator.recover(decided_only=True)


def _refuse(found: Survey) -> None:
    """Raise ConfigError unless all of it can be recorded."""
    problems = [f"{one.key}: {one.problem}" for one in found.forgotten if one.problem]
    problems += [
        f"{found.pipeline}/{ck} r{revision} in {sink!r}: {NO_RECEIPT}" for sink, ck, revision in found.unreceipted
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        msg = f"pipeline {found.pipeline!r}: it cannot be reconciled: {problems[0]}{more}; nothing was changed"
        raise ConfigError(msg)
