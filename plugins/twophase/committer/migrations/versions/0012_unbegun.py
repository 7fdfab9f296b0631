"""What could not begin is swept when its retention is over: found by its time."""

from alembic import op

revision = "0012"
down_revision = "0011"

INDEX = "CREATE INDEX unbegun_by_time ON twophase.unbegun (pipeline, at);"


def upgrade() -> None:
    """Add the index."""
    op.get_bind().exec_driver_sql(INDEX)
