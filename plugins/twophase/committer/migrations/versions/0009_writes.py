"""Writes: from which checkpoint on each of them takes part, so that nobody has to find out what it lacks."""

from alembic import op

revision = "0009"
down_revision = "0008"

TABLES = """
CREATE TABLE twophase.write (
    pipeline text NOT NULL CONSTRAINT write_pipeline_fkey REFERENCES twophase.pipeline (name),
    name text NOT NULL,
    since bigint NOT NULL,
    since_seq bigint NOT NULL,
    until bigint,
    CONSTRAINT write_pkey PRIMARY KEY (pipeline, name)
);

INSERT INTO twophase.write (pipeline, name, since, since_seq)
    SELECT o.pipeline, o.sink, 1 + coalesce((
        SELECT max(r.checkpoint_id) FROM twophase.revision r
        WHERE r.pipeline = o.pipeline AND r.state = 'COMMITTED' AND r.revision > 0 AND NOT EXISTS (
            SELECT FROM twophase.participant p WHERE (p.pipeline, p.checkpoint_id, p.revision, p.name)
                = (r.pipeline, r.checkpoint_id, r.revision, o.sink))), 0), 1
    FROM twophase.output o;
"""


def upgrade() -> None:
    """Add the table, with the writes that there are: what each lacks today is before its first full checkpoint."""
    op.get_bind().exec_driver_sql(TABLES)
