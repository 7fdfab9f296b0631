"""A backup of the record, and its restore: schema `twophase` copied by SQL, as a dump of it would be."""

from __future__ import annotations

from sqlalchemy import Connection, create_engine, text

#: Where the committer database keeps what a pipeline knows: the record, and what its write-ahead sinks have sent.
SCHEMAS = ("twophase", "twophase_write_ahead")


class Backups:
    """The backups of one committer database, by name."""

    def __init__(self, dsn: str) -> None:
        self.engine = create_engine(dsn)

    def take(self, name: str = "backup") -> None:
        """Copy every table, all as of one moment."""
        with self.engine.begin() as connection:
            connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
            connection.execute(text(f"DROP SCHEMA IF EXISTS {name} CASCADE"))
            connection.execute(text(f"CREATE SCHEMA {name}"))
            for schema, table in _tables(connection):
                connection.execute(text(f"CREATE TABLE {name}.{schema}__{table} AS TABLE {schema}.{table}"))

    def restore(self, name: str = "backup") -> None:
        """Put every table back to what it was; what came after is forgotten."""
        with self.engine.begin() as connection:
            connection.execute(text("SET LOCAL session_replication_role = replica"))
            for schema, table in _tables(connection):
                connection.execute(text(f"DELETE FROM {schema}.{table}"))
                there = connection.execute(text(f"SELECT to_regclass('{name}.{schema}__{table}')")).scalar()
                if there is not None:
                    columns = _columns(connection, schema, table)
                    connection.execute(
                        text(f"INSERT INTO {schema}.{table} ({columns}) OVERRIDING SYSTEM VALUE"
                             f" SELECT {columns} FROM {name}.{schema}__{table}")
                    )  # fmt: skip


def _tables(connection: Connection) -> list[tuple[str, str]]:
    query = "SELECT schemaname, tablename FROM pg_tables WHERE schemaname = ANY(:schemas) AND tablename <> :version"
    found = connection.execute(text(query), {"schemas": list(SCHEMAS), "version": "alembic_version"})
    return [(row[0], row[1]) for row in found]


def _columns(connection: Connection, schema: str, table: str) -> str:
    query = "SELECT attname FROM pg_attribute WHERE attrelid = CAST(:name AS regclass) AND attnum > 0"
    return ", ".join(connection.execute(text(query), {"name": f"{schema}.{table}"}).scalars())
