"""The backfill of a revision in a column of its own; before, the first part of its run's id said it."""

from alembic import op

revision = "0015"
down_revision = "0014"

ADD = """
ALTER TABLE twophase.revision ADD COLUMN backfill text;
UPDATE twophase.revision r SET backfill = b.id FROM twophase.backfill b
    WHERE r.dag_id IS NULL AND r.run_id LIKE 'backfill-%%.%%' AND b.id = split_part(r.run_id, '.', 1);
"""


def upgrade() -> None:
    """Add the column, and fill it for what backfills have made."""
    op.get_bind().exec_driver_sql(ADD)
