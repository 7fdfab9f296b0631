"""Run the audits of a pipeline on what an attempt staged, and return their votes; `attempt` calls it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from twophase.audits import AuditContext
from twophase.core.checkpoint import Json, Participant
from twophase.core.errors import AuditFailed
from twophase.core.failpoints import hit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twophase.core.checkpoint import Revision
    from twophase.core.coordinator import Coordinator
    from twophase.pipeline import Pipeline

log = logging.getLogger("twophase")


class AuditVote(NamedTuple):
    """One audit's answer about one write."""

    write: str
    #: The audit as a participant, with its vote.
    voter: Participant
    #: Why it votes no; None: it votes yes.
    objection: str | None


#: Write → its participant and the summary of its manifest.
Staged = Mapping[str, tuple[Participant, Json]]


def audit(
    coordinator: Coordinator, pipeline: Pipeline, attempt: Revision, staged: Staged, check: Callable[[], None]
) -> tuple[list[Participant], AuditFailed | None]:
    """Run every audit, also after one said no; return the votes, and the error to raise once they are recorded.

    `check` raises if another attempt has taken over.
    """
    votes, refused = [], []
    for vote in _votes(coordinator, pipeline, attempt, staged, check):
        votes.append(vote.voter)
        hit("audit.after")
        if vote.objection:
            refused.append(vote.objection)
    if not refused:
        return votes, None
    msg = f"checkpoint {attempt.key}: {'; '.join(refused)}; nothing became visible, correct it and run again"
    return votes, AuditFailed(msg)


def audit_again(
    coordinator: Coordinator, pipeline: Pipeline, attempt: Revision, staged: Staged, check: Callable[[], None]
) -> dict[str, list[Participant]]:
    """Run the audits of the writes that a restage staged; return their votes, by write.

    The caller records them together with the vote of their write. If an audit says no, its write votes no, AuditFailed
    is raised, and the old vote stands. Audits of other writes are not run: they check nothing new.
    """
    found: dict[str, list[Participant]] = {write: [] for write in staged}
    refused: dict[str, list[str]] = {}
    for vote in _votes(coordinator, pipeline, attempt, staged, check):
        found[vote.write].append(vote.voter)
        if vote.objection:
            refused.setdefault(vote.write, []).append(vote.objection)
    for write, objections in refused.items():
        coordinator.vote(attempt, write, yes=False, reason="; ".join(objections))
    if refused:
        said = "; ".join(objection for objections in refused.values() for objection in objections)
        msg = f"checkpoint {attempt.key}: {said}; what was voted for before stands, correct it and restage again"
        raise AuditFailed(msg)
    return found


def _votes(
    coordinator: Coordinator, pipeline: Pipeline, attempt: Revision, staged: Staged, check: Callable[[], None]
) -> Iterator[AuditVote]:
    """Run every audit of what is staged."""
    voters = {name: (write, found) for name, (write, found) in pipeline.voters().items() if write in staged}
    for write in dict.fromkeys(write for write, _ in voters.values()):
        participant, manifest = staged[write]
        context = _context(coordinator, attempt, write, manifest)
        with pipeline.writes[write].staged(replace(participant, manifest=manifest).output(attempt)) as relation:
            for name, (on, found) in voters.items():
                if on != write:
                    continue
                hit("audit.before")
                verdict = found.check(relation, context)
                check()
                yes = verdict.passed or found.severity == "warn"
                reason = f"warning: {verdict.text}" if yes and not verdict.passed else verdict.text
                log.log(logging.INFO if verdict.passed else logging.WARNING, "%s: audit %s", attempt.key, reason)
                voter = Participant(name, "audit", attempt.epoch, yes, manifest=verdict.summary(), reason=reason)
                objection = None if yes else f"{name}{verdict.text.removeprefix(found.name)}"  # which begins with it
                yield AuditVote(write, voter, objection)


def _context(coordinator: Coordinator, attempt: Revision, write: str, manifest: Json) -> AuditContext:
    if attempt.created_at is None:
        raise AssertionError  # it is in the record
    return AuditContext(
        pipeline=attempt.key.pipeline,
        checkpoint_id=attempt.checkpoint_id,
        revision=attempt.revision,
        slot=attempt.slot,
        sink=write,
        began=attempt.created_at,
        previous_rows=coordinator.transact(lambda tx: tx.rows_before(attempt.key, attempt.slot, write)),
        rows=manifest["rows"],
    )
