"""Keyed state: which one a revision reads, whether it is still kept, and from which checkpoint on it is stale."""

from alembic import op

revision = "0016"
down_revision = "0015"

ADD = """
ALTER TABLE twophase.revision ADD COLUMN base jsonb, ADD COLUMN state_swept_at timestamptz,
    ADD COLUMN state_left boolean NOT NULL DEFAULT false;
ALTER TABLE twophase.pipeline ADD COLUMN stale_from bigint;
CREATE INDEX revision_with_state ON twophase.revision (pipeline, checkpoint_id)
    WHERE base IS NOT NULL AND commit_seq IS NOT NULL AND state_swept_at IS NULL;
CREATE INDEX revision_state_left ON twophase.revision (pipeline, checkpoint_id) WHERE state_left;
"""


def upgrade() -> None:
    """Add the columns; no pipeline had state before."""
    op.get_bind().exec_driver_sql(ADD)
