"""Replacement: inputs of a revision, adopted revisions, what reads what, retention, backfills under way."""

from alembic import op

revision = "0002"
down_revision = "0001"

TABLES = """
ALTER TABLE twophase.revision ADD COLUMN inputs jsonb, ADD COLUMN swept_at timestamptz;
ALTER TABLE twophase.revision DROP CONSTRAINT revision_numbers_check;
ALTER TABLE twophase.revision ADD CONSTRAINT revision_numbers_check CHECK (revision >= 0 AND epoch >= 0);
ALTER TABLE twophase.revision
    ADD CONSTRAINT revision_swept_check CHECK (swept_at IS NULL OR state = 'SUPERSEDED');
CREATE INDEX revision_superseded ON twophase.revision (pipeline, checkpoint_id, revision) WHERE state = 'SUPERSEDED';
CREATE INDEX revision_unswept ON twophase.revision (pipeline, checkpoint_id, revision)
    WHERE state = 'SUPERSEDED' AND swept_at IS NULL;

DROP INDEX twophase.checkpoint_one_per_slot;
CREATE UNIQUE INDEX checkpoint_one_per_slot ON twophase.checkpoint (pipeline, slot)
    WHERE slot IS NOT NULL AND released_at IS NULL;
CREATE INDEX checkpoint_without_slot ON twophase.checkpoint (pipeline, checkpoint_id) WHERE slot IS NULL;

ALTER TABLE twophase.input_file ADD COLUMN revision integer;
DROP INDEX twophase.input_file_one_owner;
CREATE UNIQUE INDEX input_file_one_owner ON twophase.input_file (pipeline, source, path)
    WHERE gone_at IS NULL AND revision IS NULL;
CREATE UNIQUE INDEX input_file_once ON twophase.input_file (pipeline, checkpoint_id, revision, source, path)
    WHERE revision IS NOT NULL;

CREATE TABLE twophase.input_revision (
    pipeline text NOT NULL,
    checkpoint_id bigint NOT NULL,
    revision integer NOT NULL,
    source text NOT NULL,
    upstream text NOT NULL,
    upstream_checkpoint_id bigint NOT NULL,
    upstream_revision integer NOT NULL,
    CONSTRAINT input_revision_pkey
        PRIMARY KEY (pipeline, checkpoint_id, revision, source, upstream, upstream_checkpoint_id),
    CONSTRAINT input_revision_revision_fkey FOREIGN KEY (pipeline, checkpoint_id, revision)
        REFERENCES twophase.revision (pipeline, checkpoint_id, revision),
    CONSTRAINT input_revision_upstream_fkey FOREIGN KEY (upstream, upstream_checkpoint_id, upstream_revision)
        REFERENCES twophase.revision (pipeline, checkpoint_id, revision)
);
CREATE INDEX input_revision_by_upstream
    ON twophase.input_revision (upstream, upstream_checkpoint_id, upstream_revision);

CREATE INDEX event_by_age ON twophase.event (pipeline, at);

CREATE TABLE twophase.backfill (
    id text NOT NULL CONSTRAINT backfill_pkey PRIMARY KEY,
    pipeline text NOT NULL CONSTRAINT backfill_pipeline_fkey REFERENCES twophase.pipeline (name),
    selection jsonb NOT NULL,
    who text NOT NULL,
    why text,
    created_at timestamptz NOT NULL DEFAULT now(),
    ended_at timestamptz
);
CREATE UNIQUE INDEX backfill_one_under_way ON twophase.backfill (pipeline, selection) WHERE ended_at IS NULL;
"""

#: As before, but for what an adopted folder begins as.
GUARD = """
CREATE OR REPLACE FUNCTION twophase.guard_revision() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        IF (NEW.revision = 0, NEW.state) NOT IN ((false, 'OPEN'), (true, 'COMMITTED')) THEN
            RAISE EXCEPTION 'revision %/% r%: it must begin as OPEN, not % (an adopted one, r0: COMMITTED)',
                NEW.pipeline, NEW.checkpoint_id, NEW.revision, NEW.state;
        END IF;
        RETURN NEW;
    END IF;
    IF NEW.epoch < OLD.epoch OR NEW.epoch > OLD.epoch + 1 THEN
        RAISE EXCEPTION 'revision %/% r%: epoch % cannot follow %',
            OLD.pipeline, OLD.checkpoint_id, OLD.revision, NEW.epoch, OLD.epoch;
    END IF;
    IF OLD.commit_seq IS NOT NULL AND NEW.commit_seq IS DISTINCT FROM OLD.commit_seq THEN
        RAISE EXCEPTION 'revision %/% r%: a decision keeps its commit_seq',
            OLD.pipeline, OLD.checkpoint_id, OLD.revision;
    END IF;
    IF NEW.state <> OLD.state AND (OLD.state, NEW.state) NOT IN (
        ('OPEN', 'PRECOMMITTED'), ('PRECOMMITTED', 'OPEN'), ('PRECOMMITTED', 'COMMITTING'), ('COMMITTING', 'COMMITTED'),
        ('COMMITTED', 'SUPERSEDED'), ('OPEN', 'ABORTING'), ('PRECOMMITTED', 'ABORTING'), ('ABORTING', 'ABORTED'))
    THEN
        RAISE EXCEPTION 'revision %/% r%: % cannot follow %',
            OLD.pipeline, OLD.checkpoint_id, OLD.revision, NEW.state, OLD.state;
    END IF;
    IF NEW.state = 'OPEN' AND OLD.state <> 'OPEN' AND NEW.epoch = OLD.epoch THEN
        RAISE EXCEPTION 'revision %/% r%: only a new attempt opens it again',
            OLD.pipeline, OLD.checkpoint_id, OLD.revision;
    END IF;
    IF NEW.epoch <> OLD.epoch AND NEW.state NOT IN ('OPEN', 'COMMITTING') THEN
        RAISE EXCEPTION 'revision %/% r%: no attempt can be opened in %',
            OLD.pipeline, OLD.checkpoint_id, OLD.revision, NEW.state;
    END IF;
    IF NEW.state = 'COMMITTING' AND OLD.state = 'PRECOMMITTED' AND (
        NEW.epoch <> OLD.epoch
        OR NOT EXISTS (SELECT FROM twophase.participant p WHERE p.pipeline = NEW.pipeline
            AND p.checkpoint_id = NEW.checkpoint_id AND p.revision = NEW.revision)
        OR EXISTS (SELECT FROM twophase.participant p WHERE p.pipeline = NEW.pipeline
            AND p.checkpoint_id = NEW.checkpoint_id AND p.revision = NEW.revision
            AND (p.vote IS DISTINCT FROM true OR p.attempt <> NEW.epoch)))
    THEN
        RAISE EXCEPTION 'revision %/% r%: not every participant voted yes for attempt %',
            OLD.pipeline, OLD.checkpoint_id, OLD.revision, NEW.epoch;
    END IF;
    IF NEW.state = 'COMMITTED' AND OLD.state = 'COMMITTING' AND EXISTS (
        SELECT FROM twophase.participant p WHERE p.pipeline = NEW.pipeline AND p.checkpoint_id = NEW.checkpoint_id
            AND p.revision = NEW.revision AND p.kind = 'sink' AND NOT EXISTS (
                SELECT FROM twophase.committed c WHERE c.job_id = p.pipeline AND c.operator_id = p.name
                    AND c.checkpoint_id = p.checkpoint_id AND c.revision = p.revision))
    THEN
        RAISE EXCEPTION 'revision %/% r%: not every sink is in committed',
            OLD.pipeline, OLD.checkpoint_id, OLD.revision;
    END IF;
    RETURN NEW;
END $$;
"""

#: For people with psql: what was made from revisions that were replaced since.
VIEWS = """
CREATE VIEW twophase.stale AS
    SELECT d.pipeline, d.checkpoint_id, d.revision, c.slot, i.source, i.upstream, i.upstream_checkpoint_id,
           i.upstream_revision AS read_revision, now_.revision AS committed_revision, now_.committed_at AS replaced_at
    FROM twophase.revision old
    JOIN twophase.input_revision i ON (i.upstream, i.upstream_checkpoint_id, i.upstream_revision)
        = (old.pipeline, old.checkpoint_id, old.revision)
    JOIN twophase.revision d ON (d.pipeline, d.checkpoint_id, d.revision)
        = (i.pipeline, i.checkpoint_id, i.revision) AND d.state = 'COMMITTED'
    JOIN twophase.revision now_ ON (now_.pipeline, now_.checkpoint_id)
        = (old.pipeline, old.checkpoint_id) AND now_.state = 'COMMITTED'
    JOIN twophase.checkpoint c ON (c.pipeline, c.checkpoint_id) = (d.pipeline, d.checkpoint_id)
    WHERE old.state = 'SUPERSEDED'
    ORDER BY d.pipeline, d.checkpoint_id, i.upstream, i.upstream_checkpoint_id;
"""


def upgrade() -> None:
    """Add what replacement needs."""
    connection = op.get_bind().execution_options(no_parameters=True)  # the % in messages are plpgsql's
    for part in (TABLES, GUARD, VIEWS):
        connection.exec_driver_sql(part)
