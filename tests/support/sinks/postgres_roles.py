"""Two accounts in PostgreSQL, by the statements of the how-to: one that may only stage, one that promotes."""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psycopg2
import pyarrow as pa
import pytest
from sqlalchemy.engine import make_url

from support.servers.postgres import FASTER, administer, open_folder
from twophase import sinks
from twophase.core.checkpoint import Key, Output
from twophase.core.manifest import Column
from twophase.local import postgres, postgres_programs
from twophase.sinks.postgres.staging_table import Loader
from twophase.storage import database
from twophase.storage.database import TableName

HOW_TO = Path(__file__).parents[3] / "docs" / "how-to" / "postgres.md"
SCHEMA = (Column("id", "bigint"), Column("word", "string"))
PASSWORDS = {"stager": "choose one", "promoter": "choose another"}
#: Where the programs of other versions are: in the wheel beside those that are used, and where Debian puts them.
PLACES = {
    "16": Path(str(postgres_programs.program("postgres"))).parents[2] / "pginstall" / "bin",
    "15": Path("/usr/lib/postgresql/15/bin"),
}


class Roles(NamedTuple):
    """The two accounts: a server has one set of names for all of its databases."""

    stager: str
    promoter: str


@contextmanager
def roles(dsn: str, environment: pytest.MonkeyPatch) -> Iterator[Roles]:
    """Run the how-to's statements, and give each account its connection."""
    made = Roles(*(f"{name}_{uuid.uuid4().hex[:8]}" for name in Roles._fields))
    (statements,) = re.findall(r"```sql\n(CREATE ROLE.*?)```", HOW_TO.read_text(), re.DOTALL)
    for name, its in zip(Roles._fields, made, strict=True):
        statements = re.sub(rf"\b{name}\b", its, statements)
    administer(dsn, statements)
    environment.setenv("AIRFLOW_CONN_DWH", url(dsn, made, "promoter"))
    environment.setenv("AIRFLOW_CONN_DWH_STAGING", url(dsn, made, "stager"))
    yield made
    for role in reversed(made):
        administer(dsn, f"DROP OWNED BY {role} CASCADE", f"DROP ROLE {role}")


def url(dsn: str, made: Roles, role: str) -> str:
    """Return how an account reaches a database."""
    found = make_url(dsn).set(drivername="postgres", username=getattr(made, role), password=PASSWORDS[role])
    return found.render_as_string(hide_password=False)


def _run_older(run: Any, command: list[str], *args: Any, **more: Any) -> Any:
    """Run a program of an older version, which knows no builtin locales."""
    return run([each for each in command if "builtin" not in each], *args, **more)


@contextmanager
def server(version: str) -> Iterator[str]:
    """Start a server of another version; yield the DSN of its database."""
    place = PLACES[version]
    if not (place / "postgres").exists():
        pytest.skip(f"PostgreSQL {version} is not installed")
    home = open_folder(f"twophase-server-{version}-")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TWOPHASE_HOME", str(home))
        environment.setattr(postgres_programs, "MAJOR", version)
        environment.setattr(postgres_programs, "program", lambda name: place / name)
        environment.setattr(postgres_programs, "run", partial(_run_older, postgres_programs.run))
        dsn = postgres.ensure()
        administer(dsn, *FASTER)
        yield dsn
        postgres.stop()
    shutil.rmtree(home)


def sink(table: str = "sales.orders", **options: Any) -> sinks.Postgres:
    """Return a sink that is staged by the one account and promoted by the other."""
    return sinks.Postgres(table, **{"conn_id": "dwh", "staging_conn_id": "dwh_staging", "create": True, **options})


def staged(made: sinks.Postgres, key: Key) -> Output:
    """Stage two rows by the account that stages."""
    output = Output(key, 1, made.place(key, 1, "t0ken"), sink="dwh")
    columns = made.open(output, SCHEMA)
    batch = pa.RecordBatch.from_pydict({"id": pa.array([1, 2], pa.int64()), "word": pa.array(["a", "b"])})
    list(Loader(database.dsn("dwh_staging"), TableName(*output.handle["staging"]))(iter([batch])))
    return replace(output, manifest=made.seal(output, SCHEMA, columns))


@contextmanager
def session(dsn: str) -> Iterator[Any]:
    """Open a session as anybody would, without our settings."""
    opened = psycopg2.connect(dsn.replace("postgresql+psycopg2", "postgresql"))
    opened.autocommit = True
    try:
        with opened.cursor() as cursor:
            yield cursor
    finally:
        opened.close()
