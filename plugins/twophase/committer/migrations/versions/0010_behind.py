"""A pipeline says when its sinks hold what the record has forgotten."""

from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Add the column."""
    op.get_bind().exec_driver_sql("ALTER TABLE twophase.pipeline ADD COLUMN behind text")
