"""Failures: when a revision was aborted, which checkpoints stand failed, and what could not begin at all."""

from alembic import op

revision = "0005"
down_revision = "0004"

TABLES = """
ALTER TABLE twophase.revision ADD COLUMN aborted_at timestamptz, ADD COLUMN failed boolean NOT NULL DEFAULT false;
UPDATE twophase.revision SET aborted_at = created_at WHERE state IN ('ABORTING', 'ABORTED');
UPDATE twophase.revision r SET failed = true
    WHERE r.state = 'ABORTED'
      AND NOT EXISTS (SELECT FROM twophase.checkpoint c WHERE (c.pipeline, c.checkpoint_id)
          = (r.pipeline, r.checkpoint_id) AND c.released_at IS NOT NULL)
      AND NOT EXISTS (SELECT FROM twophase.revision o WHERE (o.pipeline, o.checkpoint_id)
          = (r.pipeline, r.checkpoint_id) AND o.revision > 0 AND (o.revision > r.revision OR o.state = 'COMMITTED'));
ALTER TABLE twophase.revision
    ADD CONSTRAINT revision_aborted_check CHECK ((aborted_at IS NOT NULL) = (state IN ('ABORTING', 'ABORTED'))),
    ADD CONSTRAINT revision_failed_check CHECK (NOT failed OR state = 'ABORTED');
CREATE INDEX revision_aborted ON twophase.revision (pipeline, aborted_at) WHERE aborted_at IS NOT NULL;
CREATE INDEX revision_failed ON twophase.revision (pipeline, checkpoint_id) WHERE failed;

CREATE TABLE twophase.unbegun (
    pipeline text NOT NULL CONSTRAINT unbegun_pipeline_fkey REFERENCES twophase.pipeline (name),
    slot text NOT NULL,
    why text NOT NULL,
    failures integer NOT NULL,
    since timestamptz NOT NULL DEFAULT now(),
    at timestamptz NOT NULL DEFAULT now(),
    who text NOT NULL,
    dag_id text,
    run_id text,
    CONSTRAINT unbegun_pkey PRIMARY KEY (pipeline, slot)
);
"""

#: For people with psql: a pipeline that fails every run must not look healthy. Each part has an index behind it, and
#: what is missing is looked for among the newest hundred intervals.
VIEWS = """
CREATE OR REPLACE VIEW twophase.lag AS
    SELECT p.name AS pipeline, last.checkpoint_id AS last_checkpoint, last.commit_seq AS last_commit_seq,
           last.committed_at AS last_committed_at, now() - last.committed_at AS since_last_commit,
           (SELECT count(*) FROM twophase.revision r WHERE r.pipeline = p.name
              AND r.state IN ('OPEN', 'PRECOMMITTED', 'COMMITTING', 'ABORTING')) AS pending,
           newest.checkpoint_id AS newest_checkpoint, newest.state AS newest_state,
           (SELECT count(*) FROM twophase.revision r WHERE r.pipeline = p.name
              AND r.state = 'COMMITTING' AND r.parked_reason IS NOT NULL) AS parked,
           since.aborted + since.refused AS failures, failed.at AS last_failed_at, failed.why AS last_failure,
           (SELECT count(*) FROM twophase.revision r JOIN twophase.checkpoint c USING (pipeline, checkpoint_id)
              WHERE r.pipeline = p.name AND r.failed AND c.slot IS NOT NULL)
           + (SELECT count(*) FROM twophase.unbegun u
              WHERE u.pipeline = p.name AND u.slot <> '' AND u.failures > 0) AS failed_slots,
           (SELECT coalesce(sum(greatest(1, round(extract(epoch FROM starts - before)
                / nullif(extract(epoch FROM ends - starts), 0)))), 0)::bigint
              FROM (SELECT starts, ends, max(ends) OVER (ORDER BY starts, ends
                        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
                    FROM (SELECT split_part(slot, '/', 1)::timestamptz AS starts,
                                 split_part(slot, '/', 2)::timestamptz AS ends
                          FROM ((SELECT c.slot FROM twophase.checkpoint c
                                 WHERE c.pipeline = p.name AND c.slot IS NOT NULL AND c.released_at IS NULL
                                 ORDER BY c.slot DESC LIMIT 100)
                                UNION ALL
                                (SELECT u.slot FROM twophase.unbegun u WHERE u.pipeline = p.name
                                 ORDER BY u.slot DESC LIMIT 100)) newest
                          WHERE slot ~ '^\\d{4}-\\d\\d-\\d\\dT[^/]+/\\d{4}-\\d\\d-\\d\\dT[^/]+$') intervals) gaps
              WHERE starts > before) AS missing_slots,
           (SELECT u.why FROM twophase.unbegun u WHERE u.pipeline = p.name AND u.failures = 0
              ORDER BY u.since LIMIT 1) AS waiting
    FROM twophase.pipeline p
    LEFT JOIN LATERAL (SELECT r.checkpoint_id, r.commit_seq, r.committed_at FROM twophase.revision r
        WHERE r.pipeline = p.name AND r.commit_seq IS NOT NULL AND r.state IN ('COMMITTED', 'SUPERSEDED')
        ORDER BY r.commit_seq DESC LIMIT 1) last ON true
    LEFT JOIN LATERAL (SELECT r.checkpoint_id, r.state FROM twophase.revision r
        WHERE r.pipeline = p.name ORDER BY r.checkpoint_id DESC, r.revision DESC LIMIT 1) newest ON true
    CROSS JOIN LATERAL (SELECT
        (SELECT count(*) FROM twophase.revision r WHERE r.pipeline = p.name
            AND r.aborted_at > coalesce(last.committed_at, '-infinity')) AS aborted,
        (SELECT coalesce(sum(u.failures), 0)::bigint FROM twophase.unbegun u WHERE u.pipeline = p.name
            AND u.at > coalesce(last.committed_at, '-infinity')) AS refused) since
    LEFT JOIN LATERAL (SELECT at, why FROM (
            (SELECT r.aborted_at AS at, r.error AS why FROM twophase.revision r
             WHERE r.pipeline = p.name AND r.aborted_at IS NOT NULL ORDER BY r.aborted_at DESC LIMIT 1)
            UNION ALL
            (SELECT u.at, u.why FROM twophase.unbegun u WHERE u.pipeline = p.name AND u.failures > 0
             ORDER BY u.at DESC LIMIT 1)) both_
        ORDER BY at DESC LIMIT 1) failed ON true
    ORDER BY p.name;

CREATE OR REPLACE VIEW twophase.pending AS
    SELECT r.pipeline, r.checkpoint_id, r.revision, r.state, r.epoch, r.kind, c.slot, r.parked_reason, r.error,
           r.lease_until > now() AS leased, now() - r.created_at AS age, r.dag_id, r.run_id,
           (SELECT string_agg(p.name, ', ' ORDER BY p.name) FROM twophase.participant p
            WHERE (p.pipeline, p.checkpoint_id, p.revision) = (r.pipeline, r.checkpoint_id, r.revision)
              AND p.kind = 'sink' AND NOT EXISTS (SELECT FROM twophase.committed d
                WHERE (d.job_id, d.operator_id, d.checkpoint_id, d.revision)
                    = (p.pipeline, p.name, p.checkpoint_id, p.revision))) AS not_promoted,
           r.hindrances,
           (SELECT string_agg(p.name, ', ' ORDER BY p.name) FROM twophase.participant p
            WHERE (p.pipeline, p.checkpoint_id, p.revision) = (r.pipeline, r.checkpoint_id, r.revision)
              AND p.vote IS NULL) AS no_vote
    FROM twophase.revision r JOIN twophase.checkpoint c USING (pipeline, checkpoint_id)
    WHERE r.state IN ('OPEN', 'PRECOMMITTED', 'COMMITTING', 'ABORTING')
    ORDER BY r.pipeline, r.checkpoint_id, r.revision;
"""


def upgrade() -> None:
    """Add what tells of failures, those so far included."""
    connection = op.get_bind().execution_options(no_parameters=True)
    for part in (TABLES, VIEWS):
        connection.exec_driver_sql(part)
