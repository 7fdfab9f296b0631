"""What stands in the way of a parked revision, by sink: the way out depends on it."""

from alembic import op

revision = "0004"
down_revision = "0003"

TABLES = """
ALTER TABLE twophase.revision ADD COLUMN hindrances jsonb,
    ADD CONSTRAINT revision_hindrances_check CHECK (hindrances IS NULL OR parked_reason IS NOT NULL);
"""

VIEWS = """
CREATE OR REPLACE VIEW twophase.pending AS
    SELECT r.pipeline, r.checkpoint_id, r.revision, r.state, r.epoch, r.kind, c.slot, r.parked_reason, r.error,
           r.lease_until > now() AS leased, now() - r.created_at AS age, r.dag_id, r.run_id,
           (SELECT string_agg(p.name, ', ' ORDER BY p.name) FROM twophase.participant p
            WHERE (p.pipeline, p.checkpoint_id, p.revision) = (r.pipeline, r.checkpoint_id, r.revision)
              AND p.kind = 'sink' AND NOT EXISTS (SELECT FROM twophase.committed d
                WHERE (d.job_id, d.operator_id, d.checkpoint_id, d.revision)
                    = (p.pipeline, p.name, p.checkpoint_id, p.revision))) AS not_promoted,
           r.hindrances
    FROM twophase.revision r JOIN twophase.checkpoint c USING (pipeline, checkpoint_id)
    WHERE r.state IN ('OPEN', 'PRECOMMITTED', 'COMMITTING', 'ABORTING')
    ORDER BY r.pipeline, r.checkpoint_id, r.revision;
"""


def upgrade() -> None:
    """Add the column, and show it where people look for what is pending."""
    for part in (TABLES, VIEWS):
        op.get_bind().exec_driver_sql(part)
