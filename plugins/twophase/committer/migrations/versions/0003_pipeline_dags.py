"""Airflow: which DAGs run a pipeline (who may read one of them may see its commits), and jobs that outlive tasks."""

from alembic import op

revision = "0003"
down_revision = "0002"

TABLES = """
ALTER TABLE twophase.revision ADD COLUMN job jsonb;

CREATE TABLE twophase.pipeline_dag (
    pipeline text NOT NULL CONSTRAINT pipeline_dag_pipeline_fkey REFERENCES twophase.pipeline (name),
    dag_id text NOT NULL,
    linked_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pipeline_dag_pkey PRIMARY KEY (pipeline, dag_id)
);
CREATE INDEX pipeline_dag_by_dag ON twophase.pipeline_dag (dag_id, pipeline);

INSERT INTO twophase.pipeline_dag (pipeline, dag_id)
    SELECT DISTINCT pipeline, dag_id FROM twophase.revision WHERE dag_id IS NOT NULL;
"""


def upgrade() -> None:
    """Add the column and the links, those of the runs so far included."""
    op.get_bind().exec_driver_sql(TABLES)
