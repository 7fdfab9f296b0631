"""The receipt: all that the record knows of one decision, as JSON. `record` builds it, and each sink keeps it.

`reconciliation` reads the receipts back when the record was restored from a backup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, select, text

from twophase.committer import tables as t
from twophase.committer.participant_rows import COLUMNS, to_row
from twophase.committer.statement import Statement
from twophase.core.checkpoint import Json, Key, Participant, Revision

r = t.revision.c

#: How many checkpoints and revisions one statement looks up.
BATCH = 10_000

#: The files that a revision reads; the last column says which revision alone reads one, null: the checkpoint does.
_FILES = """
    SELECT coalesce(json_agg(json_build_array(f.source, f.path, f.size, f.mtime_ns, f.xxh3, f.revision)
        ORDER BY f.source, f.path), '[]') AS files
    FROM twophase.input_file f WHERE f.pipeline = :pipeline AND f.checkpoint_id = :checkpoint_id
        AND (f.revision IS NULL OR f.revision = :revision)"""
_ONLY_FILES = Statement(_FILES)
_READ = Statement(f"""
    SELECT k.inputs, r.inputs AS own, r.decided_at, r.base, ({_FILES})
    FROM twophase.revision r JOIN twophase.checkpoint k USING (pipeline, checkpoint_id)
    WHERE pipeline = :pipeline AND checkpoint_id = :checkpoint_id AND r.revision = :revision""")  # noqa: S608 - no user's text


def receipt(connection: Connection, revision: Revision, participants: Sequence[Participant]) -> Json:
    """Return the receipt of a decided revision: its run, its times, its input, what each participant voted for."""
    key = revision.key
    found = _READ(connection, **key._asdict()).one()
    return {
        **key._asdict(),
        "commit_seq": revision.commit_seq,
        "epoch": revision.epoch,
        "kind": revision.kind,
        "slot": revision.slot,
        "dag_id": revision.run.dag_id if revision.run else None,
        "run_id": revision.run.run_id if revision.run else None,
        "backfill": revision.backfill,
        **({} if found.base is None else {"base": found.base}),
        "created_at": revision.created_at.isoformat() if revision.created_at else None,
        "decided_at": found.decided_at.isoformat() if found.decided_at else None,
        "rows": revision.rows,
        "bytes": revision.bytes,
        **_described(connection, key, found.inputs, found.own, found.files),
        "participants": [to_row(participant) for participant in participants],
        "adopted": None if revision.slot is None else _adopted(connection, key),
    }


def _adopted(connection: Connection, key: Key) -> Json | None:
    """Return the adopted revision 0 of a checkpoint; it has no receipt itself, so it goes into those of later ones."""
    p = t.participant.c
    mine = (r.pipeline == key.pipeline) & (r.checkpoint_id == key.checkpoint_id) & (r.revision == 0)
    row = connection.execute(select(r.commit_seq, r.epoch, r.rows, r.bytes, r.committed_at).where(mine)).first()
    if row is None:
        return None
    theirs = (p.pipeline == key.pipeline) & (p.checkpoint_id == key.checkpoint_id) & (p.revision == 0)
    query = select(*COLUMNS).where(theirs)
    found = [dict(one._mapping) for one in connection.execute(query)]
    return {**row._mapping, "committed_at": row.committed_at.isoformat(), "participants": found}


def read(connection: Connection, key: Key, inputs: Json, own: Json | None) -> dict[str, Any]:
    """Return what a revision reads: the checkpoint's input, and the input of this revision alone."""
    files = _ONLY_FILES(connection, **key._asdict()).scalar_one()
    return _described(connection, key, inputs, own, files)


def _described(
    connection: Connection, key: Key, inputs: Json, own: Json | None, found: Sequence[list[Any]]
) -> dict[str, Any]:
    i = t.input_revision.c
    if own is None:  # this revision has no input of its own
        return {
            "inputs": inputs,
            "own_inputs": None,
            "files": [row[:5] for row in found],
            "own_files": [],
            "upstream": [],
        }
    upstream = select(i.source, i.upstream, i.upstream_checkpoint_id, i.upstream_revision).where(
        (i.pipeline == key.pipeline) & (i.checkpoint_id == key.checkpoint_id) & (i.revision == key.revision)
    )
    return {
        "inputs": inputs,
        "own_inputs": own,
        "files": [row[:5] for row in found if row[5] is None],
        "own_files": [row[:5] for row in found if row[5] is not None],
        "upstream": sorted(list(row) for row in connection.execute(upstream)),
    }


def lacks(connection: Connection, pipeline: str, held: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return those of the held checkpoints and revisions that are not decided in the record."""
    query = text("""
        SELECT h.checkpoint_id, h.revision
        FROM unnest(CAST(:checkpoints AS bigint[]), CAST(:revisions AS integer[])) AS h (checkpoint_id, revision)
        LEFT JOIN twophase.revision r ON r.pipeline = :pipeline AND r.checkpoint_id = h.checkpoint_id
            AND r.revision = h.revision AND r.commit_seq IS NOT NULL
        WHERE r.pipeline IS NULL ORDER BY 1, 2""")
    pairs = list(held)
    missing: list[tuple[int, int]] = []
    for start in range(0, len(pairs), BATCH):
        some = pairs[start : start + BATCH]
        values = {"checkpoints": [one for one, _ in some], "revisions": [one for _, one in some], "pipeline": pipeline}
        missing += [(row[0], row[1]) for row in connection.execute(query, values)]
    return missing
