"""Slots: what each of them has for its own, so that no two read or write the same."""

from alembic import op

revision = "0006"
down_revision = "0005"

TABLES = """
ALTER TABLE twophase.pipeline ADD COLUMN claimed boolean NOT NULL DEFAULT false;

CREATE TABLE twophase.claim (
    pipeline text NOT NULL,
    checkpoint_id bigint NOT NULL,
    part text NOT NULL,
    place text NOT NULL,
    span tstzrange NOT NULL,
    shared boolean NOT NULL DEFAULT false,
    CONSTRAINT claim_pkey PRIMARY KEY (pipeline, checkpoint_id, part, place, span),
    CONSTRAINT claim_checkpoint_fkey FOREIGN KEY (pipeline, checkpoint_id)
        REFERENCES twophase.checkpoint (pipeline, checkpoint_id),
    CONSTRAINT claim_one_owner EXCLUDE USING gist (
        int8range(hashtextextended((pipeline || '/' || part || '/' || place), 0),
                  hashtextextended((pipeline || '/' || part || '/' || place), 0), '[]') WITH &&,
        span WITH &&) WHERE (NOT shared)
);
"""


def upgrade() -> None:
    """Add the table; a pipeline claims for the slots that it has at its next begin, for only it can read patterns."""
    op.get_bind().exec_driver_sql(TABLES)
