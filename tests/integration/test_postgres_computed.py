"""Nothing passes the vote that fails for what a row is computed to, or for what a promotion makes and drops."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from support.sinks.postgres_table import COLUMNS, Row, Words, words
from twophase.core.errors import BadValue, ConfigError
from twophase.core.ports import Outcome


@pytest.fixture(autouse=True)
def _public(target: Any) -> None:
    target.execute("SET search_path = public")


# --- what a row is computed to ---------------------------------------------------------------------------------------


#: Random enough that no compression gets it into a page of an index.
LONG = "".join(hashlib.sha512(bytes([number])).hexdigest() for number in range(64))
FAILS = """CREATE FUNCTION fail() RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN RAISE 'never'; END $$"""


@pytest.mark.parametrize(
    ("made", "row", "told"),
    [
        ("CREATE INDEX ON words (word)", {"id": 1, "word": LONG}, "index row .*8191"),
        ("CREATE INDEX ON words (id) INCLUDE (word)", {"id": 1, "word": LONG}, "index row .*8191"),
        ("CREATE INDEX ON words ((1 / id))", {"id": 0, "word": "a"}, "division by zero"),
        ("CREATE INDEX ON words (id) WHERE 1 / id > 0", {"id": 0, "word": "a"}, "division by zero"),
        (
            "ALTER TABLE words ADD part bigint GENERATED ALWAYS AS (1 / id) STORED",
            {"id": 0, "word": "a"},
            "division by zero",
        ),
        (
            "ALTER TABLE words ADD loud text NOT NULL GENERATED ALWAYS AS (upper(word)) STORED",
            {"id": 1, "word": None},
            'null value in column "loud"',
        ),
        (
            f"{FAILS}; ALTER TABLE words ADD more bigint; ALTER TABLE words ALTER more SET DEFAULT fail()",
            {"id": 1, "word": "a"},
            r"never \(PL/pgSQL function public.fail\(\)",
        ),
    ],
    ids=["long", "included", "index", "predicate", "generated", "generated null", "default"],
)
def test_what_a_row_is_computed_to_is_tried_before_the_vote(target: Any, made: str, row: Row, told: str) -> None:
    """An index that has no room for it, and an expression that fails for it, refuse a row as a constraint does."""
    table = Words(target, f"CREATE TABLE words ({COLUMNS})", made)

    table.refuses([row], told)


def test_a_key_that_no_index_has_room_for_is_refused_before_the_vote(target: Any) -> None:
    """By the index of the staging table, and where there is none by a trial; of a table that is made, too."""
    made, by = "CREATE TABLE words (id bigint, word text PRIMARY KEY)", {"key": ["word"]}
    rows = [{"id": 1, "word": LONG}]

    with pytest.raises(BadValue, match=r"refuses a value: index row .*; correct it in the transform"):
        Words(target, made, mode="upsert", **by).stage(rows)
    Words(target, mode="retract", **by).refuses(rows, "index row .*8191", 2)
    target.execute("DROP TABLE words")
    staged = Words(target, mode="retract", create=True, **by).stage(rows, 3)
    with pytest.raises(BadValue, match=r"index row .*8191"):
        Words(target, mode="retract", create=True, **by).check(staged)


def test_a_changelog_says_which_type_it_cannot_compare(target: Any) -> None:
    """What is added and taken back cancels out by comparison; the type that is named helps."""
    table = Words(target, "CREATE TABLE words (id bigint PRIMARY KEY, word json)", mode="retract", key=["id"])

    with pytest.raises(ConfigError, match=r"operator for type json, and a retract compares whole rows; .*: jsonb, or"):
        table.stage(words(1, word="{}"))
    target.execute("ALTER TABLE words ALTER word TYPE jsonb")
    table.put(words(1, word="{}"), 2)


@pytest.mark.parametrize(
    ("made", "needed"),
    [
        ("number bigint DEFAULT nextval('few')", 2),
        ("number smallint DEFAULT nextval('many')", 2),
        ("number bigint GENERATED ALWAYS AS IDENTITY (MAXVALUE 3)", 2),
        ("number bigint DEFAULT nextval('few'), UNIQUE (number)", 4),
    ],
    ids=["sequence", "column", "identity", "tried"],
)
def test_a_sequence_that_runs_out_is_named_before_the_vote(target: Any, made: str, needed: int) -> None:
    """It has as many numbers left as there are rows, and as many again if they are tried first."""
    target.execute("CREATE SEQUENCE few MAXVALUE 3; CREATE SEQUENCE many START 32765")
    table = Words(target, f"CREATE TABLE words ({COLUMNS}, {made})")
    if needed == 2:
        table.put(words(1, 2))

    staged = table.stage(words(3, 4), 2)
    with pytest.raises(
        BadValue, match=rf"sequence public\.\w+, .* has [13] numbers left, expected {needed} for 2 rows"
    ):
        table.check(staged)


# --- what is made and dropped ----------------------------------------------------------------------------------------


def test_a_table_that_cannot_be_made_is_told_before_the_vote(target: Any) -> None:
    """A type has the name that the table is to have: each table is a type, too."""
    target.execute("CREATE TYPE words AS ENUM ('a')")
    table = Words(target, create=True)
    staged = table.stage(words(1))

    with pytest.raises(BadValue, match='type "words" already exists'):
        table.check(staged)
    target.execute("DROP TYPE words")
    table.check(staged)
    assert table.promote(staged).outcome is Outcome.PROMOTED


def test_a_column_that_only_another_table_can_be_given_is_told_before_the_vote(target: Any) -> None:
    """A partition has the columns of its table; the remedy that is named is one."""
    table = Words(
        target,
        f"CREATE TABLE whole ({COLUMNS}) PARTITION BY LIST (_checkpoint)",
        "CREATE TABLE words PARTITION OF whole DEFAULT",
        create=True,
    )
    staged = table.stage(words(1, more=7))

    with pytest.raises(ConfigError, match=r"column 'more' is new, .* those of table public.whole; add it there"):
        table.check(staged)
    target.execute("ALTER TABLE whole ADD more bigint")
    table.check(staged)
    assert table.promote(staged).outcome is Outcome.PROMOTED


def test_what_an_event_trigger_forbids_is_told_before_the_vote(target: Any) -> None:
    """A promotion drops what was staged: who may not has to hear it before the decision. No row is written for that."""
    table = Words(target, f"CREATE TABLE words ({COLUMNS})")
    target.execute(
        "CREATE FUNCTION keep() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no drops here'; END $$;"
        " CREATE EVENT TRIGGER keep ON sql_drop EXECUTE FUNCTION keep()"
    )
    staged = table.refuses(words(1), "no drops here")

    target.execute("DROP EVENT TRIGGER keep")
    table.check(staged)
    assert table.promote(staged).outcome is Outcome.PROMOTED
