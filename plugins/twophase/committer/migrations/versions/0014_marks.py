"""Marks of positions: what a source notes about an offset, to see later that it still means the same records."""

from alembic import op

revision = "0014"
down_revision = "0013"

ADD = "ALTER TABLE twophase.position ADD COLUMN mark jsonb;"


def upgrade() -> None:
    """Add the column; positions that were decided before have no mark."""
    op.get_bind().exec_driver_sql(ADD)
