"""What a source remembers of a folder whose files all have an owner, so that a look at it is compared in one step."""

from alembic import op

revision = "0008"
down_revision = "0007"

TABLES = """
CREATE TABLE twophase.known_files (
    pipeline text NOT NULL CONSTRAINT known_files_pipeline_fkey REFERENCES twophase.pipeline (name),
    source text NOT NULL,
    newest bigint NOT NULL,
    sums bytea NOT NULL,
    CONSTRAINT known_files_pkey PRIMARY KEY (pipeline, source)
);

CREATE INDEX input_file_gone ON twophase.input_file (pipeline, source, gone_at) WHERE gone_at IS NOT NULL;
"""


def upgrade() -> None:
    """Add the table, and the way to what has left its folder."""
    op.get_bind().exec_driver_sql(TABLES)
