"""Checksums of input files: the same bytes written again are no change."""

from alembic import op

revision = "0013"
down_revision = "0012"

ADD = "ALTER TABLE twophase.input_file ADD COLUMN xxh3 text;"


def upgrade() -> None:
    """Add the column; files that were fixed before have none, and are known by size and time."""
    op.get_bind().exec_driver_sql(ADD)
