"""Rows: those of one write, not the sum over all that hold the same ones; what is set aside is counted apart."""

from alembic import op

revision = "0011"
down_revision = "0010"

COUNT = """
UPDATE twophase.revision r SET rows = counted.rows, bytes = counted.bytes
FROM (SELECT p.pipeline, p.checkpoint_id, p.revision, max((p.manifest ->> 'rows')::bigint) AS rows,
             sum((p.manifest ->> 'bytes')::bigint)::bigint AS bytes
      FROM twophase.participant p JOIN twophase.checkpoint c USING (pipeline, checkpoint_id)
      WHERE p.kind = 'sink' AND p.name NOT IN (SELECT k || '_quarantine' FROM jsonb_object_keys(c.inputs) k)
      GROUP BY p.pipeline, p.checkpoint_id, p.revision) counted
WHERE (r.pipeline, r.checkpoint_id, r.revision) = (counted.pipeline, counted.checkpoint_id, counted.revision)
  AND r.commit_seq IS NOT NULL AND (r.rows, r.bytes) IS DISTINCT FROM (counted.rows, counted.bytes);
"""


def upgrade() -> None:
    """Count what was committed so far in the same way."""
    op.get_bind().exec_driver_sql(COUNT)
