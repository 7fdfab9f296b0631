"""What stands under a target's name, and what whoever promotes may do there, is known before anything is recorded."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url

from support.servers.postgres import administer
from support.sinks.postgres_table import Words, words
from support.sinks.staged_rows import Rows, prestage
from twophase import sinks
from twophase.core.checkpoint import Key, Output
from twophase.core.errors import ConfigError, SinkUnavailable
from twophase.core.manifest import Column
from twophase.core.ports import Outcome
from twophase.storage.session_pool import POOL

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "postgres.md"
SCHEMA = (Column("id", "bigint"), Column("word", "string"))
UPSERT: dict[str, Any] = {"mode": "upsert", "key": ["id"]}


@pytest.fixture(autouse=True)
def _public(target: Any) -> None:
    target.execute("SET search_path = public")


def take(sink: sinks.Postgres, key: Key) -> None:
    """Take two rows through."""
    sink.prepare()
    output = Output(key, 1, sink.place(key, 1, "t0ken"), sink="dwh")
    rows = Rows([{"id": 1, "word": "a"}, {"id": 2, "word": "b"}], 1, SCHEMA)
    output = replace(output, manifest=prestage(sink, output, rows))
    sink.check(output)
    found = sink.promote(output)
    assert found.outcome is Outcome.PROMOTED, found.reason


def test_the_first_example_of_the_page_works_in_a_database_where_nothing_is(target: Any) -> None:
    """A schema that is not there is made with the table, before anything is decided."""
    (example,) = re.findall(r"```python\n(.*?)```", HOW_TO.read_text(encoding="utf-8"), re.DOTALL)[:1]
    named: dict[str, Any] = {}
    exec(example, named)

    take(named["orders"].writes["dwh"], Key("orders", 1, 1))

    target.execute("SELECT count(*) FROM sales.orders")
    assert target.fetchall() == [(2,)]


@pytest.mark.parametrize(
    ("made", "more", "told"),
    [
        ("CREATE VIEW words AS SELECT 1 AS id", {}, "expected a table, found a view; name the table itself"),
        ("CREATE MATERIALIZED VIEW words AS SELECT 1 AS id", {}, "expected a table, found a materialized view"),
        ("CREATE SEQUENCE words", {}, "expected a table, found a sequence"),
        (
            """CREATE FOREIGN DATA WRAPPER far; CREATE SERVER far FOREIGN DATA WRAPPER far;
            CREATE FOREIGN TABLE words (id bigint, _checkpoint bigint) SERVER far""",
            {},
            "expected a table, found a foreign table",
        ),
        (
            "CREATE UNLOGGED TABLE words (id bigint, _checkpoint bigint)",
            {},
            'public.words is UNLOGGED, .*: ALTER TABLE "public"."words" SET LOGGED',
        ),
        (
            """CREATE TABLE words (id bigint, _checkpoint bigint) PARTITION BY RANGE (id);
            CREATE TABLE low PARTITION OF words FOR VALUES FROM (0) TO (9) PARTITION BY RANGE (id);
            CREATE UNLOGGED TABLE lower PARTITION OF low FOR VALUES FROM (0) TO (5)""",
            {},
            'public.lower is UNLOGGED, .*: ALTER TABLE "public"."lower" SET LOGGED',
        ),
        ("CREATE TABLE words (id bigint); CREATE UNIQUE INDEX ON words ((id + 1))", UPSERT, "no primary key or unique"),
        ("CREATE TABLE words (id bigint); CREATE UNIQUE INDEX ON words (id, (id + 1))", UPSERT, "no primary key"),
        ("CREATE TABLE words (id bigint); CREATE UNIQUE INDEX ON words (id) WHERE id > 0", UPSERT, "over all rows"),
        ("CREATE TABLE words (id bigint UNIQUE DEFERRABLE)", UPSERT, "no primary key .* not deferrable"),
        (
            """CREATE TABLE words (id bigint); CREATE UNIQUE INDEX made ON words (id);
            UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'made'::regclass""",  # as CONCURRENTLY leaves one
            UPSERT,
            "no primary key or unique index on just id that is valid",
        ),
        (
            "CREATE TABLE words (id bigint, word text); CREATE UNIQUE INDEX ON words (id) INCLUDE (word)",
            {"mode": "upsert", "key": ["id", "word"]},
            "no primary key or unique index on just id, word",
        ),
    ],
)
def test_what_is_no_lasting_table_or_has_no_key_is_refused_before_anything_is_recorded(
    target: Any, made: str, more: dict[str, Any], told: str
) -> None:
    """Rows in it would be lost, or could not be changed by key; each message says what is expected instead."""
    target.execute(made)

    for create in (False, True):
        with pytest.raises(ConfigError, match=told):
            sinks.Postgres("words", conn_id="dwh", create=create, **more).prepare()
    target.execute("SELECT to_regclass('twophase_sinks.promoted')")
    assert target.fetchall() == [(None,)]


def test_a_table_that_was_unlogged_is_taken_once_it_is_logged(target: Any) -> None:
    """The remedy that the refusal names is one; an index that includes more columns is on just its key."""
    target.execute("CREATE UNLOGGED TABLE words (id bigint, word text)")
    target.execute("CREATE UNIQUE INDEX ON words (id) INCLUDE (word)")
    sink = sinks.Postgres("words", conn_id="dwh", mode="upsert", key=["id"])
    with pytest.raises(ConfigError, match="UNLOGGED") as refused:
        sink.prepare()

    target.execute(str(refused.value).rpartition(": ")[2])

    take(sink, Key("words", 1, 1))


@pytest.mark.parametrize("schema", ["pg_temp", "pg_catalog", "information_schema"])
def test_a_table_in_a_schema_of_the_servers_own_is_not_made(target: Any, schema: str) -> None:
    """What is made in pg_temp is gone with the session that promoted it."""
    with pytest.raises(ConfigError, match=f"schema '{schema}' is the server's own; expected one of yours"):
        sinks.Postgres(f"{schema}.words", conn_id="dwh", create=True).prepare()


@pytest.fixture
def promoter(target: Any, dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Let the connection `dwh` be an account with rights on the places of ours, and no others."""
    name = f"promoter_{uuid.uuid4().hex[:8]}"
    sinks.Postgres("first", conn_id="dwh", create=True).prepare()  # as the owner of the database
    database = make_url(dsn).database
    administer(
        dsn,
        f"CREATE ROLE {name} LOGIN PASSWORD 'choose one'",
        f"GRANT USAGE, CREATE ON SCHEMA twophase_sinks, twophase_staging TO {name}",
        f"GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA twophase_sinks TO {name}",
        f"REVOKE CREATE ON DATABASE {database} FROM {name}",
    )
    url = make_url(dsn).set(drivername="postgres", username=name, password="choose one")
    monkeypatch.setenv("AIRFLOW_CONN_DWH", url.render_as_string(hide_password=False))
    yield name
    administer(dsn, f"DROP OWNED BY {name} CASCADE", f"DROP ROLE {name}")


RIGHTS: list[tuple[str, dict[str, Any], list[tuple[str, str]]]] = [
    (
        "words (id bigint PRIMARY KEY, word text, _checkpoint bigint)",
        {},
        [
            ("has no INSERT on public.words", "GRANT INSERT ON words TO {}"),
            ("has no SELECT on public.words", "GRANT SELECT ON words TO {}"),
            ("has no DELETE on public.words", "GRANT DELETE ON words TO {}"),
        ],
    ),
    (
        "words (id bigint PRIMARY KEY, word text)",
        UPSERT,
        [
            ("has no INSERT on public.words", "GRANT INSERT, SELECT ON words TO {}"),
            ("has no UPDATE on public.words", "GRANT UPDATE ON words TO {}"),
        ],
    ),
    (  # what is overwritten is read
        "words (id bigint PRIMARY KEY, word text)",
        UPSERT,
        [
            ("has no INSERT", "GRANT INSERT, UPDATE, SELECT (id) ON words TO {}"),
            ("has no SELECT on column 'word'; grant it", "GRANT SELECT (word) ON words TO {}"),
        ],
    ),
    (
        "words (id bigint, word text, _checkpoint bigint)",
        {},
        [
            ("has no INSERT", "GRANT INSERT, DELETE, SELECT (id) ON words TO {}"),
            ("has no SELECT on column '_checkpoint'; grant it", "GRANT SELECT (_checkpoint) ON words TO {}"),
        ],
    ),
    (
        """words (id bigint, word text, _checkpoint bigint); GRANT ALL ON words TO {0};
        REVOKE INSERT ON ALL TABLES IN SCHEMA twophase_sinks FROM {0}""",
        {},
        [
            (
                f"has no INSERT on twophase_sinks.{table}, where the {what} are; grant it",
                f"GRANT INSERT ON twophase_sinks.{table} TO {{}}",
            )
            for table, what in (("promoted", "markers"), ("receipt", "receipts"))
        ],
    ),
    (
        "words (id bigint, word text, _checkpoint bigint) PARTITION BY LIST (_checkpoint)",
        {"attach": True},
        [("does not own public.words, and only its owner may attach", "ALTER TABLE words OWNER TO {}")],
    ),
    (
        """words (id bigint, word text, _checkpoint bigint); ALTER TABLE words ENABLE ROW LEVEL SECURITY;
        CREATE POLICY mine ON words USING (id < 2)""",
        {},
        [
            ("its row security applies to", "ALTER TABLE words DISABLE ROW LEVEL SECURITY"),
            ("has no INSERT", "GRANT ALL ON words TO {}"),
        ],
    ),
    (
        "words (id bigint, word text, _checkpoint bigint, more bigserial)",
        {},
        [
            ("has no INSERT", "GRANT SELECT, DELETE, INSERT (id, _checkpoint) ON words TO {}"),
            ("has no INSERT on column 'word'; grant it", "GRANT INSERT (word) ON words TO {}"),
            ("has no USAGE on sequence .*words_more_seq", "GRANT USAGE ON SEQUENCE words_more_seq TO {}"),
        ],
    ),
]


@pytest.mark.parametrize(("made", "more", "lacking"), RIGHTS)
def test_a_right_that_is_missing_is_named_before_the_vote_and_granting_it_helps(
    target: Any, promoter: str, made: str, more: dict[str, Any], lacking: list[tuple[str, str]]
) -> None:
    """Each refusal says what to grant, and once all is granted the checkpoint is promoted."""
    target.execute(f"CREATE TABLE {made.format(promoter)}")
    sink = sinks.Postgres("words", conn_id="dwh", **more)

    for number, (told, remedy) in enumerate(lacking, 1):
        with pytest.raises(ConfigError, match=told):
            take(sink, Key("words", number, 1))
        target.execute(remedy.format(promoter))

    take(sink, Key("words", 9, 1))


def test_a_right_that_only_a_replacement_needs_is_named_before_its_vote(target: Any, promoter: str) -> None:
    """An upsert that is run again takes out what it put in and does not any more."""
    target.execute("CREATE TABLE words (id bigint PRIMARY KEY, word text)")
    target.execute(f"GRANT SELECT, INSERT, UPDATE ON words TO {promoter}")
    sink = sinks.Postgres("words", conn_id="dwh", **UPSERT)
    take(sink, Key("words", 1, 1))

    with pytest.raises(ConfigError, match="has no DELETE, by which a checkpoint is replaced; grant it"):
        take(sink, Key("words", 1, 2))
    target.execute(f"GRANT DELETE ON words TO {promoter}")
    take(sink, Key("words", 1, 3))


def test_what_can_only_be_read_is_named_before_anything_is_recorded_and_waited_for_after_the_decision(
    target: Any, dsn: str
) -> None:
    """A standby is a primary again in a moment: nobody has to decide anything."""
    table = Words(target, "CREATE TABLE words (id bigint, word text, _checkpoint bigint)")
    staged = table.stage(words(1))
    table.check(staged)
    administer(dsn, f"ALTER DATABASE {make_url(dsn).database} SET default_transaction_read_only = on")
    POOL.close()  # only a new session has the setting

    with pytest.raises(SinkUnavailable, match="can be written to, found default_transaction_read_only = on; turn it"):
        table.sink.prepare()
    assert table.promote(staged).outcome is Outcome.RETRY_LATER

    administer(
        dsn,
        "SET default_transaction_read_only = off",
        f"ALTER DATABASE {make_url(dsn).database} RESET default_transaction_read_only",
    )
    POOL.close()
    assert table.promote(staged).outcome is Outcome.PROMOTED


def test_what_is_voted_for_and_what_is_promoted_outlive_the_server_whatever_is_usual_there(
    target: Any, dsn: str
) -> None:
    """With synchronous_commit off a commit is acknowledged before it is on disk: a crash takes it back."""
    administer(dsn, f"ALTER DATABASE {make_url(dsn).database} SET synchronous_commit = off")
    table = Words(
        target,
        "CREATE TABLE words (id bigint, word text, _checkpoint bigint)",
        "CREATE TABLE seen (usual text)",
        """CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO public.seen VALUES (current_setting('synchronous_commit')); RETURN NEW; END $$""",
        "CREATE TRIGGER look BEFORE INSERT ON words FOR EACH ROW EXECUTE FUNCTION look()",
    )
    staged = table.stage(words(1))
    target.execute("SELECT pg_current_wal_insert_lsn()")
    (loaded,) = target.fetchone()

    table.check(staged)
    target.execute("SELECT pg_current_wal_flush_lsn() >= %s", (loaded,))
    assert target.fetchone() == (True,)
    assert table.promote(staged).outcome is Outcome.PROMOTED
    target.execute("SELECT usual FROM seen")
    assert target.fetchall() == [("on",)]


def test_markers_that_a_crash_empties_are_refused_before_anything_is_recorded(target: Any) -> None:
    """Whatever is promoted would be promoted again."""
    sink = sinks.Postgres("words", conn_id="dwh", create=True)
    sink.prepare()
    target.execute("ALTER TABLE twophase_sinks.promoted SET UNLOGGED")

    with pytest.raises(ConfigError, match=r"twophase_sinks.promoted is UNLOGGED, .*; ALTER TABLE .* SET LOGGED"):
        sink.prepare()
    target.execute('ALTER TABLE "twophase_sinks"."promoted" SET LOGGED')
    sink.prepare()


def test_a_promotion_that_somebody_ends_is_tried_again(target: Any, dsn: str) -> None:
    """A limit on statements, or a person who cancels one, says nothing against the rows: nobody is asked about them."""
    table = Words(
        target,
        "CREATE TABLE words (id bigint, word text, _checkpoint bigint)",
        "CREATE TABLE blockade (on_ boolean)",
        """CREATE FUNCTION ended() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        PERFORM pg_cancel_backend(pg_backend_pid()) FROM public.blockade; PERFORM pg_sleep(0); RETURN NEW; END $$""",
        "CREATE TRIGGER ended BEFORE INSERT ON words FOR EACH ROW EXECUTE FUNCTION ended()",
    )
    staged = table.stage(words(1))
    table.check(staged)
    target.execute("INSERT INTO blockade VALUES (true)")

    assert table.promote(staged).outcome is Outcome.RETRY_LATER
    with pytest.raises(
        SinkUnavailable, match="canceling statement due to user request; nothing was changed, try again"
    ):
        table.check(staged)

    target.execute("TRUNCATE blockade")
    assert table.promote(staged).outcome is Outcome.PROMOTED


@pytest.mark.parametrize(
    ("table", "told", "remedy"),
    [
        ("far.words", "schema 'far' is not there, and promoter_.* may not create one", "CREATE SCHEMA far"),
        ("far.words", "has no USAGE on schema far; grant it", "GRANT USAGE ON SCHEMA far TO {}"),
        ("far.words", "may not create tables in schema far; grant CREATE on it", "GRANT CREATE ON SCHEMA far TO {}"),
    ],
)
def test_a_table_that_cannot_be_made_is_refused_before_anything_is_recorded(
    target: Any, promoter: str, table: str, told: str, remedy: str
) -> None:
    """A schema that may not be made or used is named, with what to do."""
    steps = ("CREATE SCHEMA far", "GRANT USAGE ON SCHEMA far TO {}")
    for done in steps[: (*steps, "GRANT CREATE ON SCHEMA far TO {}").index(remedy)]:
        target.execute(done.format(promoter))

    with pytest.raises(ConfigError, match=told):
        sinks.Postgres(table, conn_id="dwh", create=True).prepare()


@pytest.mark.parametrize(
    "names",
    [
        ("s1.orders", "s2.orders"),
        (f"public.{'o' * 45}_one", f"public.{'o' * 45}_two"),
        ("public.顧客注文明細履歴テーブル二〇二六", "public.顧客注文明細履歴テーブル二〇二七"),
    ],
    ids=["two schemas", "long", "of three bytes each"],
)
def test_partitions_of_any_two_tables_have_names_of_their_own(target: Any, names: tuple[str, ...]) -> None:
    """Names that are equal up to where PostgreSQL cuts them, or but for the schema, stand in nobody's way."""
    made = [sinks.Postgres(name, conn_id="dwh", create=True, attach=True) for name in names]

    for checkpoint in (1, 2):
        for sink in made:
            take(sink, Key("orders", checkpoint, 1))
    for sink in made:  # and what is replaced
        take(sink, Key("orders", 2, 2))

    for sink in made:
        schema, name = sink.target
        target.execute(f'SELECT _checkpoint, count(*) FROM "{schema}"."{name}" GROUP BY 1 ORDER BY 1')
        assert target.fetchall() == [(1, 2), (2, 2)]
    target.execute("SELECT c.relname FROM pg_class c JOIN pg_inherits i ON i.inhrelid = c.oid WHERE c.relkind = 'r'")
    partitions = [name for (name,) in target.fetchall()]
    assert len(set(partitions)) == 4
    assert all(name.isascii() and len(name) <= 63 for name in partitions)


def test_a_name_that_postgresql_would_cut_is_refused(target: Any) -> None:
    """Cut, it is found under no name that is declared: the second checkpoint would make the table again."""
    for name in ("o" * 64, f"{'s' * 64}.orders", "表" * 22):
        with pytest.raises(ConfigError, match=r"has 6[46] bytes, and PostgreSQL cuts names after 63; choose a shorter"):
            sinks.Postgres(name, conn_id="dwh", create=True)
    sink = sinks.Postgres("o" * 63, conn_id="dwh", create=True, attach=True)
    sink.prepare()
    key, wide = Key("orders", 1, 1), (Column("列" * 22, "string"),)

    with pytest.raises(ConfigError, match="has a name of 66 bytes, and PostgreSQL cuts names after 63; rename it"):
        sink.open(Output(key, 1, sink.place(key, 1, "t0ken"), sink="dwh"), wide)
