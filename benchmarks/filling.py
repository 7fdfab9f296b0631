"""A record with a long history, written by SQL: what as many checkpoints would have left, in a fraction of the time."""

from __future__ import annotations

import json
from pathlib import Path

from sqlalchemy import text

from benchmarks.place import administer
from benchmarks.workload import link_files, pipeline
from twophase.committer.record import PostgresRecord
from twophase.core.checkpoint import Key
from twophase.core.manifest import Column, Manifest
from twophase.core.settings import data_path
from twophase.sinks.staged_files.receipts import SHARE
from twophase.wiring import enter

#: Every so many checkpoints one was replayed (its first revision is superseded) …
REPLAYED = 100
#: … and one failed first (its first revision is aborted).
FAILED = 200
SCHEMA = (Column("id", "bigint"), Column("word", "string"))

#: Triggers and foreign keys are off while this runs, so each statement writes what the protocol would have.
_FILL = (
    """INSERT INTO twophase.checkpoint (pipeline, checkpoint_id, inputs, created_at)
       SELECT :name, n, '{"words": {"files": 1, "bytes": 27}}', now() - (:count - n) * interval '1 minute'
       FROM generate_series(1, :count) n""",
    """INSERT INTO twophase.input_file (pipeline, source, path, size, mtime_ns, checkpoint_id)
       SELECT :name, 'words', 'done-' || lpad(n::text, 8, '0') || '.json', 27, 1700000000000000000 + n, n
       FROM generate_series(1, :count) n""",
    """INSERT INTO twophase.revision (pipeline, checkpoint_id, revision, state, epoch, commit_seq, rows, bytes,
           created_at, decided_at, committed_at, superseded_at, aborted_at, error, run_id)
       SELECT :name, n, 1, state, 1, CASE WHEN decided THEN n END, 1, 700, at, CASE WHEN decided THEN at END,
           CASE WHEN decided THEN at END, CASE WHEN state = 'SUPERSEDED' THEN at END,
           CASE WHEN NOT decided THEN at END,
           CASE WHEN NOT decided THEN 'AttemptFailed: out of memory' END, 'script-' || substr(md5(n::text), 1, 12)
       FROM (SELECT n, state, state <> 'ABORTED' AS decided, now() - (:count - n) * interval '1 minute' AS at
             FROM generate_series(1, :count) n, LATERAL (SELECT CASE WHEN n % :replayed = 0 THEN 'SUPERSEDED'
                 WHEN n % :failed = 1 THEN 'ABORTED' ELSE 'COMMITTED' END AS state) s) made""",
    """INSERT INTO twophase.revision (pipeline, checkpoint_id, revision, state, epoch, kind, commit_seq, rows, bytes,
           created_at, decided_at, committed_at, run_id)
       SELECT :name, n, 2, 'COMMITTED', 1, CASE WHEN n % :replayed = 0 THEN 'replay' ELSE 'regular' END,
           CASE WHEN n % :replayed = 0 THEN :count + n / :replayed ELSE n END, 1, 700, at, at, at, 'script-again'
       FROM (SELECT n, now() - (:count - n) * interval '1 minute' AS at FROM generate_series(1, :count) n
             WHERE n % :replayed = 0 OR n % :failed = 1) made""",
    """INSERT INTO twophase.participant (pipeline, checkpoint_id, revision, name, kind, attempt, vote, handle, manifest)
       SELECT pipeline, checkpoint_id, revision, 'lake', 'sink', 1, true,
           jsonb_build_object('table', :table, 'name',
               lpad(checkpoint_id::text, 8, '0') || '.r' || revision || '.a1.7c1e09ab'),
           jsonb_build_object('digest', lpad(to_hex(checkpoint_id), 16, '0'), 'files', 1, 'rows', 1, 'bytes', 700,
               'schema', '[["id", "bigint"], ["word", "string"]]'::jsonb)
       FROM twophase.revision WHERE pipeline = :name ORDER BY checkpoint_id""",
    """INSERT INTO twophase.committed (job_id, operator_id, subtask_id, checkpoint_id, revision, committed_at)
       SELECT pipeline, 'lake', 0, checkpoint_id, revision, committed_at
       FROM twophase.revision WHERE pipeline = :name AND commit_seq IS NOT NULL ORDER BY checkpoint_id""",
    """INSERT INTO twophase.event (pipeline, checkpoint_id, revision, epoch, at, who, action, from_state, to_state, why)
       SELECT :name, (k - 1) / 7 + 1, 1, least((k - 1) % 7, 1), now(), 'benchmark@host:1',
           (ARRAY['begin', 'attempt', 'voted yes', 'precommitted', 'committing', 'promoted', 'committed'])[m],
           (ARRAY[NULL, 'OPEN', NULL, 'OPEN', 'PRECOMMITTED', NULL, 'COMMITTING'])[m],
           (ARRAY['OPEN', 'OPEN', NULL, 'PRECOMMITTED', 'COMMITTING', NULL, 'COMMITTED'])[m], 'as it was'
       FROM generate_series(1, :count * 7) k, LATERAL (SELECT ((k - 1) % 7 + 1)::int AS m) s""",
    """UPDATE twophase.pipeline SET next_checkpoint_id = :count + 1, next_commit_seq = :count + :count / :replayed + 1
       WHERE name = :name""",
)


def fill(name: str, dsn: str, checkpoints: int) -> None:
    """Enter a pipeline into a record and give it so many finished checkpoints."""
    record = PostgresRecord.open(dsn)
    enter(record, pipeline(name))
    values = {
        "name": name,
        "count": checkpoints,
        "replayed": REPLAYED,
        "failed": FAILED,
        "table": str(data_path(f"lake/{name}")),
    }
    with record.engine.begin() as connection:
        connection.execute(text("SET LOCAL session_replication_role = replica"))
        connection.execute(text("SET LOCAL synchronous_commit = off"))
        for statement in _FILL:
            wanted = {key: value for key, value in values.items() if f":{key}" in statement}
            connection.execute(text(statement), wanted)
    record.engine.dispose()
    administer(dsn, "VACUUM ANALYZE", "CHECKPOINT")


def fill_table(name: str, checkpoints: int, *, data: bool = True) -> None:
    """Put as many checkpoint folders into the table, with or without a file in each, and what lies beside it."""
    sink = pipeline(name).writes["lake"]
    sink.prepare()
    table = Path(sink.location())
    beside = table.with_name(f"{table.name}.twophase")
    for seq in range(1, checkpoints + checkpoints // REPLAYED + 1):
        share = beside / "receipts" / name / f"{seq // SHARE:09d}"
        share.mkdir(parents=True, exist_ok=True)
        (share / f"{seq:012d}.json").write_text(json.dumps({"pipeline": name, "commit_seq": seq, "epoch": 1}))
    for checkpoint_id in range(1, checkpoints + 1):
        folder = table / f"checkpoint={checkpoint_id:08d}"
        folder.mkdir()
        if data:
            link_files(folder, "part-r1-a1", 1)
        revision = 2 if checkpoint_id % REPLAYED == 0 or checkpoint_id % FAILED == 1 else 1
        (folder / f"_manifest.r{revision}.a1.{checkpoint_id:016x}").touch()
        manifest = Manifest(Key(name, checkpoint_id, revision), "lake", 1, SCHEMA, ())
        (beside / "manifests" / f"{checkpoint_id:08d}.r{revision}.a1.json").write_bytes(manifest.dumps())
