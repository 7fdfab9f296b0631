"""Migrations make what the tables say, once, whoever asks; a record of another version is refused in words."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, Engine, create_engine, text

from twophase.committer import upgrade as versions
from twophase.committer.record import PostgresRecord, connect
from twophase.committer.tables import SCHEMA, metadata
from twophase.core.errors import ConfigError

PROCESSES = 6


@pytest.fixture
def empty(server: str) -> Iterator[str]:
    """Return a database with nothing in it."""
    name = f"test_{uuid.uuid4().hex}"
    base = server.rpartition("/")[0]
    admin = create_engine(f"{base}/postgres", isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    yield f"{base}/{name}"
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


@pytest.fixture
def engine(empty: str) -> Iterator[Engine]:
    """Return an engine for the empty database."""
    made = connect(empty)
    yield made
    made.dispose()


@pytest.fixture
def later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the code be the release after this one, with one more migration; return that one's version."""
    scripts = tmp_path / "migrations"
    shutil.copytree(
        Path(versions.__file__).parent / "migrations", scripts, ignore=shutil.ignore_patterns("__pycache__")
    )
    (scripts / "versions" / "9999_later.py").write_text(
        f'from alembic import op\n\nrevision = "9999"\ndown_revision = "{versions.HEAD}"\n\n\n'
        f'def upgrade() -> None:\n    op.execute("CREATE TABLE {SCHEMA}.later ()")\n'
    )
    config = Config()
    config.set_main_option("script_location", str(scripts))
    monkeypatch.setattr(versions, "alembic_config", lambda: config)
    monkeypatch.setattr(versions, "VERSIONS", (*versions.VERSIONS, "9999"))
    monkeypatch.setattr(versions, "HEAD", "9999")
    return "9999"


# --- tables and migrations -------------------------------------------------------------------------------------------

COLUMNS = """
    SELECT c.relname, a.attname, a.attnum, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity,
           pg_get_expr(d.adbin, d.adrelid)
    FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
    LEFT JOIN pg_attrdef d ON (d.adrelid, d.adnum) = (a.attrelid, a.attnum)
    WHERE c.relnamespace = 'twophase'::regnamespace AND c.relkind = 'r' AND a.attnum > 0 AND NOT a.attisdropped
      AND c.relname <> 'schema_version'"""
CONSTRAINTS = """
    SELECT c.relname, k.conname, k.contype, pg_get_constraintdef(k.oid)
    FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid
    WHERE k.connamespace = 'twophase'::regnamespace AND c.relname <> 'schema_version'"""
INDEXES = """
    SELECT tablename, indexname, indexdef FROM pg_indexes
    WHERE schemaname = 'twophase' AND tablename <> 'schema_version'"""


def catalog(engine: Engine, query: str) -> set[tuple[Any, ...]]:
    """Read one part of the catalogs; a default of 1 may be written as '1'."""
    with engine.connect() as connection:
        found = {tuple(row) for row in connection.execute(text(query))}
    return {
        tuple(re.sub(r"^'(\d+)'::\w+$", r"\1", part) if isinstance(part, str) else part for part in row)
        for row in found
    }


def test_migrations_and_tables_make_the_same_record(dsn: str, engine: Engine) -> None:
    """By name and definition: every column, constraint and index; triggers and views are the migrations' own."""
    with engine.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {SCHEMA}"))
        metadata.create_all(connection)
    migrated = connect(dsn)

    differences = {
        query: catalog(migrated, query) ^ catalog(engine, query) for query in (COLUMNS, CONSTRAINTS, INDEXES)
    }
    sizes = [len(catalog(migrated, query)) for query in (COLUMNS, CONSTRAINTS, INDEXES)]
    migrated.dispose()

    assert differences == {COLUMNS: set(), CONSTRAINTS: set(), INDEXES: set()}
    assert all(size > 10 for size in sizes)


def test_alembic_would_not_write_another_migration(dsn: str) -> None:
    # The embedded server's role is named as the schema, which Alembic would then take for the default one.
    engine = create_engine(dsn, connect_args={"options": "-c search_path=public"})

    def ours(name: str | None, kind: str, _: object) -> bool:
        return name == SCHEMA if kind == "schema" else name != "schema_version"

    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection,
            opts={
                "include_schemas": True,
                "include_name": ours,
                "compare_server_default": True,
                "version_table": "schema_version",
                "version_table_schema": SCHEMA,
            },
        )
        found = compare_metadata(context, metadata)
    engine.dispose()

    assert found == []


# --- upgrade ---------------------------------------------------------------------------------------------------------


def tables(connection: Connection) -> dict[str, int]:
    """Return what is in the record's schema, by identity: what is made again is another one."""
    query = "SELECT relname, oid FROM pg_class WHERE relnamespace = 'twophase'::regnamespace"
    return {row.relname: row.oid for row in connection.execute(text(query))}


def test_upgrading_an_empty_database_makes_the_record(engine: Engine) -> None:
    assert versions.upgrade(engine) == (None, versions.HEAD)

    with engine.connect() as connection:
        versions.check(connection)
        assert {"commit_log", "pending", "lag", "committed", "revision"} <= set(tables(connection))


def test_upgrading_twice_changes_nothing(engine: Engine) -> None:
    versions.upgrade(engine)
    with engine.connect() as connection:
        before = tables(connection)

    again = versions.upgrade(engine)

    with engine.connect() as connection:
        assert tables(connection) == before
    assert again == (versions.HEAD, versions.HEAD)


def test_the_version_is_in_a_table_of_the_records_own(engine: Engine) -> None:
    """A database that is shared with Airflow, say, has an `alembic_version` already, and keeps it."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE public.alembic_version (version_num text)"))
        connection.execute(text("INSERT INTO public.alembic_version VALUES ('somebody elses')"))

    versions.upgrade(engine)

    with engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM twophase.schema_version")).scalars().all() == [
            versions.HEAD
        ]
        theirs = connection.execute(text("SELECT version_num FROM public.alembic_version")).scalars().all()
        assert theirs == ["somebody elses"]


def test_a_migration_that_fails_leaves_nothing_behind(engine: Engine, later: str, tmp_path: Path) -> None:
    script = tmp_path / "migrations" / "versions" / "9999_later.py"
    script.write_text(script.read_text().replace("CREATE TABLE twophase.later ()", "SELECT 1 / 0"))

    with pytest.raises(Exception, match="division by zero"):
        versions.upgrade(engine)

    with engine.connect() as connection:
        assert versions.current(connection) is None
        assert connection.execute(text("SELECT to_regnamespace('twophase')")).scalar() is None


def waiting(connection: Connection) -> int:
    query = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    return int(connection.execute(text(query)).scalar_one())


FORKS = """
import os, sys
from alembic import command
from twophase.committer.record import connect
from twophase.committer.upgrade import upgrade
children = []
for _ in range(int(sys.argv[2])):
    if not (child := os.fork()):
        os.write(1, f"{upgrade(connect(sys.argv[1]))}\\n".encode())
        os._exit(0)
    children.append(child)
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""


def test_six_processes_upgrading_at_once_migrate_it_once(empty: str, engine: Engine) -> None:
    """All of them have seen the empty database before the first one may go on."""
    with engine.connect() as connection:
        connection.execute(text("SELECT pg_advisory_lock(:lock)"), {"lock": versions.LOCK})
        forking = [sys.executable, "-c", FORKS, empty, str(PROCESSES)]
        with subprocess.Popen(forking, stdout=subprocess.PIPE, text=True) as started:
            deadline = time.monotonic() + 60
            while waiting(connection) < PROCESSES and time.monotonic() < deadline:
                time.sleep(0.05)
            together = waiting(connection)
            connection.execute(text("SELECT pg_advisory_unlock(:lock)"), {"lock": versions.LOCK})
            said, _ = started.communicate(timeout=60)

    assert together == PROCESSES
    assert started.returncode == 0
    assert len(said.splitlines()) == PROCESSES
    with engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM twophase.schema_version")).scalars().all() == [
            versions.HEAD
        ]


def test_who_waited_for_another_sees_what_it_did(engine: Engine) -> None:
    """The second look, after the lock, is in the transaction of the first one."""
    with engine.begin() as connection:
        before = versions.current(connection)
        versions.upgrade(engine)

        assert (before, versions.current(connection)) == (None, versions.HEAD)


def test_dags_of_the_runs_before_are_linked_to_their_pipelines(engine: Engine) -> None:
    """Who could run a pipeline before 0003 sees it after; what was run without Airflow belongs to no DAG."""
    with engine.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {SCHEMA}"))
        config = versions.alembic_config()
        config.attributes["connection"] = connection
        command.upgrade(config, "0002")
        connection.execute(text("INSERT INTO twophase.pipeline (name, declaration) VALUES ('orders', '{}')"))
        for number, dag_id in enumerate(("nightly", "nightly", None), 1):
            values = {"id": number, "dag_id": dag_id}
            checkpoint = (
                "INSERT INTO twophase.checkpoint (pipeline, checkpoint_id, inputs) VALUES ('orders', :id, '{}')"
            )
            revision = """INSERT INTO twophase.revision (pipeline, checkpoint_id, revision, state, dag_id, run_id)
                VALUES ('orders', :id, 1, 'OPEN', :dag_id, 'run')"""
            connection.execute(text(checkpoint), values)
            connection.execute(text(revision), values)

    versions.upgrade(engine)

    with engine.connect() as connection:
        links = connection.execute(text("SELECT pipeline, dag_id FROM twophase.pipeline_dag")).all()
    assert [tuple(row) for row in links] == [("orders", "nightly")]


def test_what_a_backfill_made_before_is_still_its_own(engine: Engine) -> None:
    """Before 0015 the id of a script's run began with it; neither a DAG's run nor another's name is taken for one."""
    runs = {1: (None, "backfill-1a.77"), 2: ("nightly", "backfill-1a.77"), 3: (None, "backfill-1.77"), 4: (None, "me")}
    with engine.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {SCHEMA}"))
        config = versions.alembic_config()
        config.attributes["connection"] = connection
        command.upgrade(config, "0014")
        connection.execute(text("INSERT INTO twophase.pipeline (name, declaration) VALUES ('orders', '{}')"))
        backfill = "INSERT INTO twophase.backfill (id, pipeline, selection, who) VALUES (:id, 'orders', '[]', 'me')"
        connection.execute(text(backfill), {"id": "backfill-1a"})
        for number, (dag_id, run_id) in runs.items():
            values = {"id": number, "dag_id": dag_id, "run_id": run_id}
            checkpoint = (
                "INSERT INTO twophase.checkpoint (pipeline, checkpoint_id, inputs) VALUES ('orders', :id, '{}')"
            )
            revision = """INSERT INTO twophase.revision (pipeline, checkpoint_id, revision, state, dag_id, run_id)
                VALUES ('orders', :id, 1, 'OPEN', :dag_id, :run_id)"""
            connection.execute(text(checkpoint), values)
            connection.execute(text(revision), values)

    versions.upgrade(engine)

    with engine.connect() as connection:
        query = text("SELECT checkpoint_id FROM twophase.revision WHERE backfill = 'backfill-1a'")
        assert list(connection.execute(query).scalars()) == [1]


def test_what_was_stale_before_is_stale_after(engine: Engine) -> None:
    """Since 0007 the database notes it when a revision is replaced; what was replaced before is noted then."""
    with engine.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {SCHEMA}"))
        config = versions.alembic_config()
        config.attributes["connection"] = connection
        command.upgrade(config, "0006")
        connection.execute(text("SET LOCAL session_replication_role = replica"))
        for name in ("orders", "daily"):
            connection.execute(text("INSERT INTO twophase.pipeline (name, declaration) VALUES (:n, '{}')"), {"n": name})
            connection.execute(
                text(
                    """INSERT INTO twophase.checkpoint (pipeline, checkpoint_id, inputs)
                    SELECT :n, i, '{}' FROM generate_series(1, 2) i"""
                ),
                {"n": name},
            )
        made = """INSERT INTO twophase.revision (pipeline, checkpoint_id, revision, state, commit_seq, decided_at,
                committed_at, superseded_at) VALUES (:p, :c, :r, :s, :seq, now(), now(),
                CASE WHEN :s = 'SUPERSEDED' THEN now() END)"""
        for seq, (name, number, revision, state) in enumerate(
            [
                ("orders", 1, 1, "SUPERSEDED"),
                ("orders", 1, 2, "COMMITTED"),
                ("orders", 2, 1, "COMMITTED"),
                ("daily", 1, 1, "COMMITTED"),
                ("daily", 2, 1, "COMMITTED"),
            ],
            1,
        ):
            connection.execute(text(made), {"p": name, "c": number, "r": revision, "s": state, "seq": seq})
        connection.execute(
            text("""INSERT INTO twophase.input_revision SELECT 'daily', n, 1, 'orders', 'orders', n, 1
                FROM generate_series(1, 2) n""")
        )
        before = connection.execute(text("SELECT pipeline, checkpoint_id FROM twophase.stale")).all()

    versions.upgrade(engine)

    with engine.connect() as connection:
        after = connection.execute(text("SELECT pipeline, checkpoint_id FROM twophase.stale")).all()
    assert [tuple(row) for row in before] == [tuple(row) for row in after] == [("daily", 1)]


# --- another version -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [{}, {"create": True}, {"upgrade": True}, {"create": True, "upgrade": True}])
def test_a_record_newer_than_the_code_is_refused(dsn: str, flags: dict[str, Any]) -> None:
    engine = connect(dsn)
    with engine.begin() as connection:
        connection.execute(text("UPDATE twophase.schema_version SET version_num = '9999'"))
    expected = f"^committer database: its record 9999 is newer than this code's {versions.HEAD};"

    with pytest.raises(ConfigError, match=expected):
        versions.upgrade(engine)
    with pytest.raises(ConfigError, match=expected):
        PostgresRecord.open(dsn, **flags)

    with engine.connect() as connection:
        assert versions.current(connection) == "9999"
    engine.dispose()


def test_a_database_without_a_record_is_refused_with_the_command_that_makes_one(empty: str, engine: Engine) -> None:
    with pytest.raises(ConfigError, match=r"found none; run `twophase db upgrade`$"):
        PostgresRecord.open(empty)
    with pytest.raises(ConfigError, match=r"found none; run `twophase db upgrade`$"):
        PostgresRecord.open(empty, upgrade=True)

    with engine.connect() as connection:
        assert connection.execute(text("SELECT to_regnamespace('twophase')")).scalar() is None


def test_a_record_is_created_where_that_is_allowed(empty: str) -> None:
    opened = PostgresRecord.open(empty, create=True)

    with opened.engine.connect() as connection:
        assert versions.current(connection) == versions.HEAD
    opened.engine.dispose()


@pytest.mark.parametrize("flags", [{}, {"create": True}])
def test_an_older_record_is_refused_with_the_command_that_upgrades_it(
    dsn: str, later: str, flags: dict[str, Any]
) -> None:
    """Who may create a record may still not upgrade somebody's."""
    with pytest.raises(ConfigError, match=r"expected record version 9999, found \d+; run `twophase db upgrade`$"):
        PostgresRecord.open(dsn, **flags)


def test_an_older_record_is_upgraded_where_that_is_allowed(dsn: str, later: str) -> None:
    opened = PostgresRecord.open(dsn, upgrade=True)

    with opened.engine.connect() as connection:
        assert versions.current(connection) == later
        assert "later" in tables(connection)
    opened.engine.dispose()
