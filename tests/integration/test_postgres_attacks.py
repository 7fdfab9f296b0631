"""The account that stages as an attacker: whatever it makes of its tables, none of its code runs as the promoter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import psycopg2
import pytest

from support.servers import postgres
from support.sinks import postgres_roles
from support.sinks.postgres_roles import Roles, session, sink, staged, url
from twophase.core.checkpoint import Key
from twophase.core.errors import ManifestMismatch, SinkUnavailable
from twophase.core.ports import Outcome
from twophase.storage import database
from twophase.storage.database import TableName

#: Functions that say when somebody else runs them, and take the chance. The planner evaluates a function that changes
#: nothing, by its own word; this one calls another that does.
ARMS = """
    CREATE TABLE twophase_staging.caught (who text);
    GRANT ALL ON twophase_staging.caught TO PUBLIC;
    CREATE FUNCTION twophase_staging.act() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
        IF current_user <> '{stager}' THEN
            INSERT INTO twophase_staging.caught VALUES (current_user);
            DELETE FROM sales.orders;
        END IF;
        RETURN true;
    END $$;
    CREATE FUNCTION twophase_staging.evil(anyelement DEFAULT 1) RETURNS boolean IMMUTABLE LANGUAGE plpgsql
        AS $$ BEGIN PERFORM twophase_staging.act(); RETURN true; END $$;
    CREATE FUNCTION twophase_staging.fires() RETURNS trigger LANGUAGE plpgsql
        AS $$ BEGIN PERFORM twophase_staging.act(); RETURN NEW; END $$;
    CREATE TYPE twophase_staging.own AS ENUM ('a', 'b');
    CREATE FUNCTION twophase_staging.shown(twophase_staging.own) RETURNS text LANGUAGE plpgsql
        AS $$ BEGIN PERFORM twophase_staging.act(); RETURN 'a'; END $$;
    CREATE CAST (twophase_staging.own AS text) WITH FUNCTION twophase_staging.shown AS ASSIGNMENT;
    CREATE DOMAIN twophase_staging.checked AS text CHECK (twophase_staging.evil(VALUE));
    CREATE COLLATION twophase_staging.sorted FROM "C";
"""
#: What is done to a staging table {0} with its parts {1} → what the refusal says.
ATTACKS = {
    "a policy": (
        """CREATE POLICY p ON {0} USING (twophase_staging.act());
        ALTER TABLE {0} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY""",
        "row security",
    ),
    "a policy on the parts": (
        """CREATE POLICY p ON {1} USING (twophase_staging.act());
        ALTER TABLE {1} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY""",
        "row security",
    ),
    "a sleeping policy": ("CREATE POLICY p ON {0} USING (twophase_staging.act())", "a policy"),
    "a view": (
        """ALTER TABLE {0} RENAME TO hidden;
        CREATE VIEW {0} AS SELECT * FROM twophase_staging.hidden WHERE twophase_staging.act()""",
        "something else than a table",
    ),
    "a view as the parts": (
        """ALTER TABLE {1} RENAME TO hidden_parts;
        CREATE VIEW {1} AS SELECT * FROM twophase_staging.hidden_parts WHERE twophase_staging.act()""",
        "something else than a table",
    ),
    "a rule": ("CREATE RULE r AS ON DELETE TO {0} DO ALSO SELECT twophase_staging.act()", "a rule"),
    "a trigger": (
        "CREATE TRIGGER t BEFORE TRUNCATE ON {0} EXECUTE FUNCTION twophase_staging.fires()",
        "a trigger",
    ),
    "a foreign key": (
        """CREATE TABLE twophase_staging.referenced (id bigint PRIMARY KEY);
        ALTER TABLE {0} ADD FOREIGN KEY (id) REFERENCES twophase_staging.referenced NOT VALID""",
        "a foreign key",
    ),
    "a child": ("CREATE TABLE twophase_staging.child () INHERITS ({0})", "a child"),
    "partitions": (
        "DROP TABLE {0}; CREATE TABLE {0} (id bigint, word text) PARTITION BY LIST ((twophase_staging.evil(id)))",
        "something else than a table",
    ),
    "an index": ("CREATE INDEX ON {0} ((twophase_staging.evil(1)))", "an index by an expression"),
    "an index on some rows": ("CREATE INDEX ON {0} (id) WHERE twophase_staging.evil(1)", "on some rows"),
    "statistics": ("CREATE STATISTICS twophase_staging.st ON (twophase_staging.evil(1)), id FROM {0}", "statistics"),
    "a check": ("ALTER TABLE {0} ADD CHECK (twophase_staging.evil(1)) NOT VALID", "a check twophase_staging.evil"),
    "a default": ("ALTER TABLE {0} ALTER id SET DEFAULT twophase_staging.act()::int", "a default"),
    "a generated column": (
        """ALTER TABLE {0} DROP COLUMN word,
        ADD COLUMN word text GENERATED ALWAYS AS (twophase_staging.evil(id)::text) STORED""",
        "a generated",
    ),
    "a domain": ("ALTER TABLE {0} ALTER word TYPE twophase_staging.checked", "column 'word' of type twophase_staging"),
    "a type with a cast": (
        "ALTER TABLE {0} ALTER word TYPE twophase_staging.own USING word::twophase_staging.own",
        "column 'word' of type twophase_staging.own",
    ),
    "a cast of its rows": (
        """CREATE FUNCTION twophase_staging.told({0}) RETURNS text LANGUAGE plpgsql
        AS $$ BEGIN PERFORM twophase_staging.act(); RETURN 'a'; END $$;
        CREATE CAST ({0} AS text) WITH FUNCTION twophase_staging.told AS ASSIGNMENT""",
        "a cast of its rows",
    ),
    "a cast to its rows": (
        """CREATE FUNCTION twophase_staging.made(text) RETURNS {0} LANGUAGE plpgsql
        AS $$ BEGIN PERFORM twophase_staging.act(); RETURN NULL; END $$;
        CREATE CAST (text AS {0}) WITH FUNCTION twophase_staging.made AS ASSIGNMENT""",
        "a cast of its rows",
    ),
    "a collation": ("ALTER TABLE {0} ALTER word TYPE text COLLATE twophase_staging.sorted", "a collation"),
    "rows that go": ("ALTER TABLE {0} SET UNLOGGED", "rows that do not outlive a crash"),
}  # fmt: skip


class Site(NamedTuple):
    """A target with a committed checkpoint, and the two accounts."""

    dsn: str
    roles: Roles
    numbers: Iterator[int]

    def attack(self, *statements: str) -> None:
        """Do something by the account that stages."""
        with session(url(self.dsn, self.roles, "stager")) as cursor:
            for statement in statements:
                cursor.execute(statement)

    def ask(self, query: str) -> Any:
        """Ask as the server's owner."""
        with session(self.dsn) as cursor:
            cursor.execute(query)
            return cursor.fetchall()


@pytest.fixture(
    scope="module",
    params=["18", *(pytest.param(version, marks=pytest.mark.slow) for version in postgres_roles.PLACES)],
)
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """Give the module a target with one committed checkpoint of two rows, on each version of the server."""
    with pytest.MonkeyPatch.context() as environment:
        if request.param == "18":
            with postgres.database(request.getfixturevalue("server")) as dsn:
                yield from _site(dsn, environment)
        else:
            with postgres_roles.server(request.param) as dsn:
                yield from _site(dsn, environment)


def _site(dsn: str, environment: pytest.MonkeyPatch) -> Iterator[Site]:
    with postgres_roles.roles(dsn, environment) as made:
        found = Site(dsn, made, itertools.count(2))
        found.attack(ARMS.format(**made._asdict()))
        sink().prepare()
        key = Key("orders", 1, 1)
        output = staged(sink(), key)
        sink().check(output)
        assert sink().promote(output).outcome is Outcome.PROMOTED
        yield found


def unharmed(site: Site) -> None:
    """See that nobody ran the attacker's code, and what was committed is there."""
    assert site.ask("SELECT who FROM twophase_staging.caught") == []
    assert site.ask("SELECT count(*) FROM sales.orders WHERE _checkpoint = 1") == [(2,)]


@pytest.mark.parametrize("name", ATTACKS)
def test_a_staging_table_that_is_more_than_a_table_is_refused_and_runs_nothing(site: Site, name: str) -> None:
    """Before the vote, in the promotion itself if there was no such look, and wherever else it is looked at."""
    attack, refusal = ATTACKS[name]
    made, key = sink(), Key("orders", next(site.numbers), 1)
    output = staged(made, key)
    table = TableName(*output.handle["staging"])
    site.attack(attack.format(table, f"{table}_parts"))

    found = made.find(output)
    promoted = made.promote(output)
    with pytest.raises(ManifestMismatch, match=refusal):
        made.check(output)

    assert (found.outcome, promoted.outcome) == (Outcome.FAILED, Outcome.FAILED)
    assert refusal in str(promoted.reason)
    unharmed(site)
    site.attack("DROP TABLE IF EXISTS twophase_staging.hidden, twophase_staging.hidden_parts CASCADE")


def test_what_was_sealed_its_account_cannot_change_any_more(site: Site) -> None:
    """Neither as its owner, nor by what it has granted to everybody, nor by what it keeps from being dropped."""
    made, key = sink(), Key("orders", next(site.numbers), 1)
    output = staged(made, key)
    table = TableName(*output.handle["staging"])
    site.attack(f"GRANT ALL ON {table}, {table}_parts TO PUBLIC", f"GRANT UPDATE (id) ON {table} TO PUBLIC")
    made.check(output)
    for statement in (
        f"DELETE FROM {table}",
        f"UPDATE {table} SET id = 9",
        f"DROP TABLE {table}",
        f"ALTER TABLE {table} DISABLE TRIGGER ALL",
        f"CREATE INDEX ON {table} (id)",
        f"INSERT INTO {table}_parts VALUES (9, 9)",
        f"TABLE {table}",
    ):
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            site.attack(statement)
    site.attack(f"CREATE VIEW twophase_staging.dependent AS SELECT * FROM {table}")

    made.check(output)
    assert made.promote(output).outcome is Outcome.PROMOTED
    unharmed(site)


def test_a_stager_that_keeps_a_transaction_open_is_waited_for_and_looked_at_afterwards(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is under way in a staging table cannot slip in behind the look."""
    monkeypatch.setattr(database, "LOCK_TIMEOUT", "200ms")
    made, key = sink(), Key("orders", next(site.numbers), 1)
    output = staged(made, key)
    table = TableName(*output.handle["staging"])
    with session(url(site.dsn, site.roles, "stager")) as cursor:
        cursor.execute(f"BEGIN; CREATE RULE r AS ON DELETE TO {table} DO ALSO SELECT twophase_staging.act()")
        with pytest.raises(SinkUnavailable, match="lock timeout"):
            made.check(output)
        assert made.promote(output).outcome is Outcome.RETRY_LATER
        cursor.execute("COMMIT")

    with pytest.raises(ManifestMismatch, match="a rule"):
        made.check(output)
    unharmed(site)


def test_a_function_or_operator_that_fits_better_than_postgresqls_own_is_not_called(site: Site) -> None:
    """A promoter looks for names in pg_catalog only, though everybody may create in public, as in older servers."""
    site.ask(f"GRANT CREATE ON SCHEMA public TO {site.roles.stager}; SELECT 1")
    site.attack(
        "CREATE FUNCTION public.starts_with(name, text) RETURNS boolean LANGUAGE sql"
        " AS 'SELECT twophase_staging.act()'",
        "CREATE FUNCTION public.same(name, text) RETURNS boolean LANGUAGE sql AS 'SELECT twophase_staging.act()'",
        "CREATE OPERATOR public.= (leftarg = name, rightarg = text, function = public.same)",
    )
    made, key = sink(), Key("orders", next(site.numbers), 1)
    made.prepare()
    output = staged(made, key)

    assert [left.checkpoint_id for left in made.attempts()].count(key.checkpoint_id) == 1
    made.check(output)
    assert made.promote(output).outcome is Outcome.PROMOTED
    unharmed(site)


def test_a_key_of_a_type_that_is_not_postgresqls_own_is_compared_by_its_own_operator(site: Site) -> None:
    """By PostgreSQL's own operators, the only ones that are looked for, a `citext` would be compared as a text."""
    if site.ask("SELECT 1 FROM pg_available_extensions WHERE name = 'citext'") == []:
        pytest.skip("this server has no citext")
    site.ask("CREATE EXTENSION citext SCHEMA public; SELECT 1")
    site.ask("CREATE TABLE sales.words (id bigint, word public.citext PRIMARY KEY); SELECT 1")
    site.ask(
        f"ALTER TABLE sales.words OWNER TO {site.roles.promoter}; INSERT INTO sales.words VALUES (7, 'A'); SELECT 1"
    )
    made = sink(table="sales.words", mode="upsert", key=["word"])
    made.prepare()
    key = Key("words", 1, 1)
    output = staged(made, key)
    made.check(output)

    found = made.changing(output)
    assert found is not None
    with found[0] as before, found[1] as after:
        assert (before.value("SELECT count(*) FROM before"), after.value("SELECT count(*) FROM after")) == (1, 2)
    assert made.promote(output).outcome is Outcome.PROMOTED
    assert site.ask("SELECT id, word::text FROM sales.words ORDER BY id") == [(1, "A"), (2, "b")]
