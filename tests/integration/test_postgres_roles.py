"""An account that may only stage: the statements of the how-to, with real roles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg2
import pytest

from support.servers.postgres import administer
from support.sinks import postgres_roles
from support.sinks.postgres_roles import Roles, sink, staged
from twophase import sinks
from twophase.core.checkpoint import Key, Output
from twophase.core.errors import ConfigError
from twophase.core.ports import Outcome
from twophase.sinks.postgres import target_check
from twophase.storage import database


@pytest.fixture
def roles(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Roles]:
    """Give the test both accounts in a database of its own."""
    with postgres_roles.roles(dsn, monkeypatch) as made:
        yield made


def promoted(made: sinks.Postgres, key: Key) -> Output:
    """Take some rows through, loaded by the account that stages."""
    made.prepare()
    output = staged(made, key)
    made.check(output)
    found = made.promote(output)
    assert found.outcome is Outcome.PROMOTED, found.reason
    return output


@pytest.mark.parametrize("options", [{}, {"attach": True}, {"mode": "upsert", "key": ["id"]}], ids=str)
def test_an_account_that_may_only_stage_can_stage_and_nothing_else(
    dsn: str, roles: Roles, options: dict[str, Any]
) -> None:
    made = sink(**options)
    output = promoted(made, Key("orders", 1, 1))
    promoted(made, Key("orders", 2, 1)) if "key" not in options else None

    assert list(made.verify(output)) == []
    assert made.connections() == ("dwh_staging",)
    forbidden = ["SELECT * FROM sales.orders", "INSERT INTO sales.orders VALUES (9)", "TABLE twophase_sinks.promoted"]
    forbidden += ["DELETE FROM twophase_sinks.promoted", "CREATE TABLE public.mine ()", "TABLE twophase.revision"]
    if made.attach:
        with postgres_roles.session(dsn) as cursor:
            cursor.execute("SELECT inhrelid::regclass::text FROM pg_inherits")
            partitions = [row[0] for row in cursor.fetchall()]
        assert len(partitions) == 2
        for partition in partitions:
            forbidden += [f"TABLE {partition}", f"DELETE FROM {partition}", f"DROP TABLE {partition}"]
    for statement in forbidden:
        with pytest.raises(psycopg2.errors.InsufficientPrivilege), database.transaction("dwh_staging") as cursor:
            cursor.execute(statement)


def test_a_table_with_as_many_partitions_as_may_be_is_refused_before_anything_is_recorded(
    roles: Roles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_check, "MOST_PARTITIONS", 2)
    made = sink(attach=True)
    for number in (1, 2):
        promoted(made, Key("orders", number, 1))

    with pytest.raises(ConfigError, match="it has 2 partitions, at most 2 may be; merge old ones"):
        made.prepare()


#: What an account that stages was given → what is said of it, and what helps.
TOO_MUCH = [
    ("REVOKE {stager} FROM {promoter}", "takes over what {stager} staged", "GRANT {stager} TO {promoter}"),
    ("ALTER ROLE {stager} SUPERUSER", "but is a superuser", "ALTER ROLE {stager} NOSUPERUSER"),
    (
        "ALTER SCHEMA twophase_staging OWNER TO {stager}",
        "but twophase_staging belongs to it",
        """ALTER SCHEMA twophase_staging OWNER TO {promoter};
        GRANT USAGE, CREATE ON SCHEMA twophase_staging TO {stager}""",
    ),
    (
        "GRANT CREATE ON SCHEMA twophase_sinks TO {stager}",
        "but can create in schema twophase_sinks",
        "REVOKE CREATE ON SCHEMA twophase_sinks FROM {stager}",
    ),
    (
        "GRANT CREATE ON SCHEMA sales TO {stager}",  # it could make the target, with a trigger, before it is made
        "but can create in schema sales",
        "REVOKE CREATE ON SCHEMA sales FROM {stager}",
    ),
    (
        """CREATE TABLE sales.orders (id bigint, word text, _checkpoint bigint);
        ALTER TABLE sales.orders OWNER TO {stager}""",
        "but sales.orders belongs to it",
        "ALTER TABLE sales.orders OWNER TO {promoter}",
    ),
]


@pytest.mark.parametrize(("given", "refusal", "remedy"), TOO_MUCH, ids=range(len(TOO_MUCH)))
def test_an_account_that_may_do_more_than_stage_is_refused_before_anything_is_recorded(
    dsn: str, roles: Roles, given: str, refusal: str, remedy: str
) -> None:
    """Each refusal names its remedy, and the remedy helps."""
    administer(dsn, given.format(**roles._asdict()))

    with pytest.raises(ConfigError, match=refusal.format(**roles._asdict())):
        sink().prepare()

    administer(dsn, remedy.format(**roles._asdict()))
    promoted(sink(), Key("orders", 1, 1))
