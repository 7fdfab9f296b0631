"""Let the audits of a pipeline look at what an attempt staged, and record their votes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from twophase.audits import AuditContext
from twophase.core.errors import AuditFailed
from twophase.core.failpoints import hit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from twophase.committer.record import PostgresTransaction
    from twophase.core.checkpoint import Json, Participant, Revision
    from twophase.core.coordinator import Coordinator
    from twophase.core.ports import Transaction
    from twophase.pipeline import Pipeline

log = logging.getLogger("twophase")


def audit(
    coordinator: Coordinator,
    pipeline: Pipeline,
    attempt: Revision,
    staged: Mapping[str, tuple[Participant, Json]],
    check: Callable[[], None],
) -> None:
    """Run every audit, whatever another one found; raise AuditFailed with all that voted no.

    `staged` has each write's participant and its manifest's summary; `check` raises when another attempt took over.
    """
    refused = []
    voters = pipeline.voters()
    for write in dict.fromkeys(write for write, _ in voters.values()):
        participant, manifest = staged[write]
        context = _context(coordinator, attempt, write, manifest)
        with pipeline.writes[write].staged(attempt.key, participant.handle, manifest) as relation:
            for name, (on, found) in voters.items():
                if on != write:
                    continue
                hit("audit.before")
                verdict = found.check(relation, context)
                check()
                yes = verdict.passed or found.severity == "warn"
                warned = not verdict.passed and yes
                reason = f"warning: {verdict.text}" if warned else verdict.text
                coordinator.vote(attempt, name, yes=yes, manifest=verdict.summary(), reason=reason)
                hit("audit.after")
                log.log(logging.INFO if verdict.passed else logging.WARNING, "%s: audit %s", attempt.key, reason)
                if not yes:
                    refused.append(f"{name}{verdict.text.removeprefix(found.name)}")  # which begins with it
    if refused:
        msg = f"checkpoint {attempt.key}: {'; '.join(refused)}; nothing became visible, correct it and run again"
        raise AuditFailed(msg)


def _context(coordinator: Coordinator, attempt: Revision, write: str, manifest: Json) -> AuditContext:
    from twophase.committer import queries

    def look(tx: Transaction) -> int | None:
        connection = cast("PostgresTransaction", tx).connection
        return queries.rows_before(connection, attempt.key, attempt.slot, write)

    if attempt.created_at is None:
        raise AssertionError  # it is in the record
    return AuditContext(
        pipeline=attempt.key.pipeline,
        checkpoint_id=attempt.checkpoint_id,
        revision=attempt.revision,
        slot=attempt.slot,
        sink=write,
        began=attempt.created_at,
        previous_rows=coordinator.transact(look),
        rows=manifest["rows"],
    )
