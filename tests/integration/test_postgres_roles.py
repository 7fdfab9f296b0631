"""An account that may only stage: the statements of the how-to, with real roles."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psycopg2
import pyarrow as pa
import pytest
from sqlalchemy.engine import make_url

from conftest import administer
from twophase import sinks
from twophase.core.checkpoint import Key, Output
from twophase.core.errors import ConfigError
from twophase.core.manifest import Column
from twophase.core.ports import Outcome
from twophase.sinks.pg import database, fitting, targets
from twophase.sinks.pg.database import Table
from twophase.sinks.pg.staging import Loader

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "postgres.md"
SCHEMA = (Column("id", "bigint"), Column("word", "string"))


class Roles(NamedTuple):
    """The two accounts of this test: a server has one set of names for all of its databases."""

    stager: str
    promoter: str


@pytest.fixture
def roles(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Roles]:
    """Run the how-to's statements, and give each account its connection."""
    made = Roles(*(f"{name}_{uuid.uuid4().hex[:8]}" for name in Roles._fields))
    (statements,) = re.findall(r"```sql\n(CREATE ROLE.*?)```", HOW_TO.read_text(), re.DOTALL)
    for name, its in zip(Roles._fields, made, strict=True):
        statements = re.sub(rf"\b{name}\b", its, statements)
    administer(dsn, statements)
    for conn_id, role, password in (
        ("DWH", made.promoter, "choose another"),
        ("DWH_STAGING", made.stager, "choose one"),
    ):
        url = make_url(dsn).set(drivername="postgres", username=role, password=password)
        monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id}", url.render_as_string(hide_password=False))
    yield made
    for role in reversed(made):
        administer(dsn, f"DROP OWNED BY {role} CASCADE", f"DROP ROLE {role}")


def promoted(sink: sinks.Postgres, key: Key) -> Output:
    """Take some rows through, loaded by the account that stages."""
    sink.prepare()
    handle = sink.place(key, 1, "t0ken")
    columns = sink.open(key, "dwh", handle, SCHEMA)
    batch = pa.RecordBatch.from_pydict({"id": pa.array([1, 2], pa.int64()), "word": pa.array(["a", "b"])})
    list(Loader(database.dsn("dwh_staging"), Table(*handle["staging"]))(iter([batch])))
    manifest = sink.seal(key, "dwh", handle, SCHEMA, columns)
    sink.check(key, handle, manifest)
    found = sink.promote(key, handle, manifest)
    assert found.outcome is Outcome.PROMOTED, found.reason
    return Output(key, 1, handle, manifest)


@pytest.mark.parametrize("options", [{}, {"attach": True}, {"mode": "upsert", "key": ["id"]}], ids=str)
def test_an_account_that_may_only_stage_can_stage_and_nothing_else(roles: Roles, options: dict[str, Any]) -> None:
    sink = sinks.Postgres("sales.orders", conn_id="dwh", staging_conn_id="dwh_staging", create=True, **options)
    output = promoted(sink, Key("orders", 1, 1))
    promoted(sink, Key("orders", 2, 1)) if "key" not in options else None

    assert list(sink.verify(output)) == []
    assert sink.connections() == ("dwh_staging",)
    forbidden = ["SELECT * FROM sales.orders", "INSERT INTO sales.orders VALUES (9)", "TABLE twophase_sinks.promoted"]
    forbidden += ["DELETE FROM twophase_sinks.promoted", "CREATE TABLE public.mine ()", "TABLE twophase.revision"]
    if sink.attach:
        partition = targets.partition_name(Table(*output.handle["staging"]))
        forbidden += [f"TABLE {partition}", f"DELETE FROM {partition}", f"DROP TABLE {partition}"]
    for statement in forbidden:
        with pytest.raises(psycopg2.errors.InsufficientPrivilege), database.committed("dwh_staging") as cursor:
            cursor.execute(statement)


def test_a_table_with_as_many_partitions_as_may_be_is_refused_before_anything_is_recorded(
    roles: Roles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "MOST_PARTITIONS", 2)
    sink = sinks.Postgres("sales.orders", conn_id="dwh", staging_conn_id="dwh_staging", create=True, attach=True)
    for number in (1, 2):
        promoted(sink, Key("orders", number, 1))

    with pytest.raises(ConfigError, match="it has 2 partitions, at most 2 may be; merge old ones"):
        sink.prepare()
