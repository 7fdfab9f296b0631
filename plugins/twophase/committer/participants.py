"""The participants of revisions, their votes, and the rows of `committed`, as the record's transactions keep them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psycopg2.extras import Json

from twophase.committer.participant_rows import of_row, to_row
from twophase.committer.revision_rows import Revisions
from twophase.committer.statement import Statement
from twophase.core.checkpoint import Key, Participant

_HERE = "pipeline = :pipeline AND checkpoint_id = :checkpoint_id AND revision = :revision"
_COLUMNS = "kind, attempt, vote, handle, manifest, reason"
#: Puts the participants in a JSON array where they belong; those of the same names are replaced.
PUT = """
    INSERT INTO twophase.participant
        (pipeline, checkpoint_id, revision, name, kind, attempt, vote, handle, manifest, reason)
    SELECT :pipeline, :checkpoint_id, :revision, n.* FROM jsonb_to_recordset(CAST(:participants AS jsonb))
        AS n (name text, kind text, attempt int, vote bool, handle jsonb, manifest jsonb, reason text)
    WHERE {condition}
    ON CONFLICT ON CONSTRAINT participant_pkey DO UPDATE SET (kind, attempt, vote, handle, manifest, reason)
        = (excluded.kind, excluded.attempt, excluded.vote, excluded.handle, excluded.manifest, excluded.reason)"""
_PUT_ALL = PUT.format(condition="true")
_READ = Statement(f"SELECT name, {_COLUMNS} FROM twophase.participant WHERE {_HERE} ORDER BY name")  # noqa: S608 - as above
_REPLACE = Statement(
    f"WITH gone AS (DELETE FROM twophase.participant WHERE {_HERE} AND name <> ALL (CAST(:names AS text[]))) {_PUT_ALL}"  # noqa: S608 - as above
)
_PUT = Statement(_PUT_ALL)
_VOTE = Statement(f"""
    WITH put AS ({_PUT_ALL})
    INSERT INTO twophase.event (pipeline, checkpoint_id, revision, epoch, who, action, why)
    SELECT :pipeline, :checkpoint_id, :revision, :epoch, :who, n.action, n.why
    FROM unnest(CAST(:actions AS text[]), CAST(:reasons AS text[])) AS n (action, why)""")  # noqa: S608 - as above
_PROMOTED = Statement("""
    WITH new AS (
        INSERT INTO twophase.committed (job_id, operator_id, subtask_id, checkpoint_id, revision)
        SELECT :pipeline, sink, 0, :checkpoint_id, :revision FROM unnest(CAST(:sinks AS text[])) AS n (sink)
        ON CONFLICT DO NOTHING RETURNING operator_id),
    told AS (
        INSERT INTO twophase.event (pipeline, checkpoint_id, revision, epoch, who, action, why)
        SELECT :pipeline, :checkpoint_id, :revision, :epoch, :who, 'promoted', said.why FROM new
        JOIN unnest(CAST(:sinks AS text[]), CAST(:whys AS text[])) AS said (sink, why) ON said.sink = new.operator_id)
    SELECT operator_id FROM new""")
_COMMITTED = Statement("""
    SELECT operator_id FROM twophase.committed
    WHERE job_id = :pipeline AND checkpoint_id = :checkpoint_id AND revision = :revision""")
_MARK = Statement("""
    INSERT INTO twophase.committed (job_id, operator_id, subtask_id, checkpoint_id, revision)
    VALUES (:pipeline, :sink, 0, :checkpoint_id, :revision) ON CONFLICT DO NOTHING""")


def as_json(participants: Sequence[Participant]) -> Json:
    """Return participants as one value of a statement."""
    return Json([to_row(participant) for participant in participants])


class Participants(Revisions):
    """The methods of a transaction that are about participants."""

    def participants(self, key: Key) -> list[Participant]:
        """Return the participants of a revision, by name."""
        if key in self._votes:
            return self._votes[key]
        found = [of_row(row._mapping) for row in _READ(self.connection, **key._asdict())]
        if key in self._held:  # only who holds the revision's row changes its participants
            self._votes[key] = found
        return found

    def replace_participants(self, key: Key, participants: Sequence[Participant]) -> None:
        """Replace all participants of a revision by these."""
        names = [participant.name for participant in participants]
        _REPLACE(self.connection, **key._asdict(), names=names, participants=as_json(participants))
        self._votes[key] = sorted(participants, key=_name)

    def put_participant(self, key: Key, participant: Participant) -> None:
        """Replace the participant of the same name by this one, or add it."""
        _PUT(self.connection, **key._asdict(), participants=as_json([participant]))
        self._know(key, [participant])

    def put_votes(self, key: Key, votes: Sequence[Participant], *, epoch: int) -> None:
        """Replace the participants of these names by these, with one event for each."""
        told: dict[str, Any] = {
            "actions": [f"voted {'yes' if one.vote else 'no'}" for one in votes],
            "reasons": [f"{one.name} a{epoch} {one.reason or ''}".strip()[:1000] for one in votes],
        }
        _VOTE(self.connection, **key._asdict(), participants=as_json(votes), epoch=epoch, who=self.who, **told)
        self._know(key, votes)

    def _know(self, key: Key, participants: Sequence[Participant]) -> None:
        """Keep the copy of the participants true."""
        if key in self._votes:
            found = {p.name: p for p in (*self._votes[key], *participants)}
            self._votes[key] = sorted(found.values(), key=_name)

    def committed(self, key: Key) -> set[str]:
        """Return the names of the sinks whose rows are in `committed`."""
        return set(_COMMITTED(self.connection, **key._asdict()).scalars())

    def mark_promoted(self, key: Key, attempts: Mapping[str, int], *, epoch: int) -> set[str]:
        """Add the rows of sinks to `committed`, and tell of each and its attempt in the events; return the new ones."""
        whys = [f"{sink} a{attempt}" for sink, attempt in attempts.items()]
        rows = _PROMOTED(self.connection, **key._asdict(), sinks=list(attempts), whys=whys, epoch=epoch, who=self.who)
        return set(rows.scalars())

    def mark_committed(self, key: Key, sink: str) -> bool:
        """Add a sink's row to `committed` without an event; False: it is there already."""
        return bool(_MARK(self.connection, **key._asdict(), sink=sink).rowcount)


def _name(participant: Participant) -> str:
    return participant.name
