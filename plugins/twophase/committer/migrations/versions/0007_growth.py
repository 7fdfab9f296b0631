"""What a sweep has yet to look for, and what may be stale: marked when it happens, so that nobody reads the history."""

from alembic import op

revision = "0007"
down_revision = "0006"

TABLES = """
ALTER TABLE twophase.revision ADD COLUMN leftovers boolean NOT NULL DEFAULT true;
ALTER TABLE twophase.revision ADD COLUMN outdated boolean NOT NULL DEFAULT false;

CREATE INDEX revision_leftovers ON twophase.revision (pipeline, checkpoint_id, revision)
    WHERE leftovers AND (epoch > 1 OR state IN ('ABORTING', 'ABORTED') OR swept_at IS NOT NULL);
CREATE INDEX revision_outdated ON twophase.revision (pipeline, checkpoint_id) WHERE outdated AND state = 'COMMITTED';
DROP INDEX twophase.revision_superseded;
DROP INDEX twophase.revision_unswept;
CREATE INDEX revision_unswept ON twophase.revision (pipeline, superseded_at)
    WHERE state = 'SUPERSEDED' AND swept_at IS NULL;

UPDATE twophase.revision d SET outdated = true
    FROM twophase.input_revision i JOIN twophase.revision old ON (old.pipeline, old.checkpoint_id, old.revision)
        = (i.upstream, i.upstream_checkpoint_id, i.upstream_revision)
    WHERE (d.pipeline, d.checkpoint_id, d.revision) = (i.pipeline, i.checkpoint_id, i.revision)
        AND old.state = 'SUPERSEDED';
"""

#: Whoever reads a revision recorded that while it held its row, so whoever replaces it later sees the reader.
MARK = """
CREATE FUNCTION twophase.mark_readers() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE twophase.revision d SET outdated = true FROM twophase.input_revision i
        WHERE (i.upstream, i.upstream_checkpoint_id, i.upstream_revision)
            = (NEW.pipeline, NEW.checkpoint_id, NEW.revision)
          AND (d.pipeline, d.checkpoint_id, d.revision) = (i.pipeline, i.checkpoint_id, i.revision)
          AND NOT d.outdated;
    RETURN NULL;
END $$;
CREATE TRIGGER mark_readers AFTER UPDATE OF state ON twophase.revision
    FOR EACH ROW WHEN (NEW.state = 'SUPERSEDED' AND OLD.state <> 'SUPERSEDED')
    EXECUTE FUNCTION twophase.mark_readers();
"""

#: As before, from what is marked; each found by itself (OFFSET 0), for a plan that joins would read all that was read.
VIEWS = """
CREATE OR REPLACE VIEW twophase.stale AS
    SELECT d.pipeline, d.checkpoint_id, d.revision, c.slot, i.source, i.upstream, i.upstream_checkpoint_id,
           i.upstream_revision AS read_revision, now_.revision AS committed_revision, now_.committed_at AS replaced_at
    FROM twophase.revision d
    CROSS JOIN LATERAL (SELECT * FROM twophase.input_revision i
        WHERE (i.pipeline, i.checkpoint_id, i.revision) = (d.pipeline, d.checkpoint_id, d.revision) OFFSET 0) i
    CROSS JOIN LATERAL (SELECT * FROM twophase.revision u WHERE u.state = 'SUPERSEDED'
        AND (u.pipeline, u.checkpoint_id, u.revision) = (i.upstream, i.upstream_checkpoint_id, i.upstream_revision)
        OFFSET 0) old
    CROSS JOIN LATERAL (SELECT * FROM twophase.revision u WHERE u.state = 'COMMITTED'
        AND (u.pipeline, u.checkpoint_id) = (i.upstream, i.upstream_checkpoint_id) OFFSET 0) now_
    CROSS JOIN LATERAL (SELECT * FROM twophase.checkpoint c
        WHERE (c.pipeline, c.checkpoint_id) = (d.pipeline, d.checkpoint_id) OFFSET 0) c
    WHERE d.outdated AND d.state = 'COMMITTED'
    ORDER BY d.pipeline, d.checkpoint_id, i.upstream, i.upstream_checkpoint_id;
"""


def upgrade() -> None:
    """Add the marks, those of the history so far included."""
    connection = op.get_bind().execution_options(no_parameters=True)
    for part in (TABLES, MARK, VIEWS):
        connection.exec_driver_sql(part)
