"""Alembic's entry: run the migrations on the connection that the caller holds."""

from alembic import context

from twophase.committer.tables import SCHEMA, metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table="schema_version",
    version_table_schema=SCHEMA,
    include_schemas=True,
)
context.run_migrations()
