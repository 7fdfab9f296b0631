"""Nothing that the target would refuse passes the vote, and a promotion counts what it moved."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from support.pipelines.factories import PreStaged, land
from support.sinks.postgres_table import COLUMNS, KEYED, Words, words
from twophase import Pipeline, sinks, sources
from twophase.committer.record import PostgresRecord
from twophase.core import failpoints
from twophase.core.errors import BadValue, ConfigError, SinkUnavailable
from twophase.core.failpoints import FailpointError
from twophase.core.manifest import Column
from twophase.core.ports import Outcome
from twophase.core.states import State
from twophase.runner import Runner
from twophase.storage import database

UPSERT = {"mode": "upsert", "key": ["id"]}
RETRACT = {"mode": "retract", "key": ["id"]}
REPLACE = {"mode": "replace"}
ATTACH = {"attach": True}
EVERY_MODE = pytest.mark.parametrize(
    "more", [{}, UPSERT, RETRACT, REPLACE], ids=["append", "upsert", "retract", "replace"]
)


@pytest.fixture(autouse=True)
def _public(target: Any) -> None:
    target.execute("SET search_path = public")


# --- before anything is loaded ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (
            "more bigint NOT NULL",
            "column 'more' of the target is NOT NULL without a default, and the output lacks it; add",
        ),
        (
            "id bigint GENERATED ALWAYS AS IDENTITY",
            "column 'id' of the target is an identity that is always generated;",
        ),
        ("id bigint GENERATED ALWAYS AS (1) STORED", "column 'id' of the target is generated; drop it from the output"),
    ],
)
@pytest.mark.parametrize("more", [{}, REPLACE, ATTACH], ids=str)
def test_a_column_that_the_target_fills_or_needs_is_named_before_anything_is_loaded(
    target: Any, made: str, told: str, more: dict[str, Any]
) -> None:
    """The catalog tells it: no row has to be loaded first."""
    id_column = "" if made.startswith("id") else "id bigint, "
    by = " PARTITION BY LIST (_checkpoint)" if more == ATTACH else ""
    table = Words(target, f"CREATE TABLE words ({made}, {id_column}word text, _checkpoint bigint){by}", **more)

    with pytest.raises(ConfigError, match=re.escape(told)):
        table.stage(words(1))


def test_by_key_a_column_that_the_output_lacks_has_to_be_there_already(target: Any) -> None:
    """A row that is changed keeps its value; one that is added has none."""
    table = Words(target, "CREATE TABLE words (id bigint PRIMARY KEY, word text, more bigint NOT NULL)", **UPSERT)
    target.execute("INSERT INTO words VALUES (1, 'old', 7)")

    table.put(words(1, word="new"))
    table.refuses(words(1, 2), 'null value in column "more" .* violates not-null constraint', 2)

    assert table.rows == [(1, "new")]


# --- NOT NULL and CHECK ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, UPSERT, RETRACT, REPLACE, ATTACH], ids=str)
def test_a_row_that_breaks_a_not_null_or_a_check_is_named_before_the_vote(target: Any, more: dict[str, Any]) -> None:
    """In every mode; afterwards, corrected, it is taken."""
    by = " PARTITION BY LIST (_checkpoint)" if more == ATTACH else ""
    key = "PRIMARY KEY" if "key" in more else ""
    made = f"id bigint {key}, word text NOT NULL, _checkpoint bigint, CONSTRAINT short CHECK (length(word) < 5)"
    table = Words(target, f"CREATE TABLE words ({made}){by}", **more)

    table.refuses(words(1) + words(2, word=None), r"column 'word' is NOT NULL, found the row \(2,.*; correct it in")
    table.refuses(
        words(7, word="longer"), r"constraint 'short' is CHECK \(\(length\(word\) < 5\)\), found the row \(7", 2
    )

    table.put(words(1), 3)
    assert table.rows == [(1, "a")]


def test_a_check_over_columns_that_the_output_lacks_is_tried_with_their_defaults(target: Any) -> None:
    """What the query over staged rows cannot know, the trial does."""
    made = f"{COLUMNS}, more bigint DEFAULT 3, CONSTRAINT enough CHECK (id > more)"
    table = Words(target, f"CREATE TABLE words ({made})")

    table.refuses(words(2, 9), r'violates check constraint "enough" \(Failing row contains \(2, a, 1, 3\)')
    table.put(words(9), 2)


@pytest.mark.parametrize("more", [{}, UPSERT], ids=str)
def test_a_value_that_breaks_a_domain_is_refused_as_it_is_staged(target: Any, more: dict[str, Any]) -> None:
    """A domain is loaded by the type below it, and is one in the staging table; so is a column that is lacking."""
    target.execute("CREATE DOMAIN small AS bigint CHECK (VALUE < 9); CREATE DOMAIN given AS text NOT NULL")
    table = Words(
        target, "CREATE TABLE words (id small PRIMARY KEY, word given, more small, _checkpoint bigint)", **more
    )

    table.put(words(1, 8))
    with pytest.raises(BadValue, match=r'value for domain .*small violates check constraint "small_check"'):
        table.stage(words(9), 2)
    with pytest.raises(BadValue, match=r"domain .*given does not allow null values"):
        table.stage(words(2, word=None), 3)
    table.refuses([{"id": 3}], "domain .*given does not allow null values", 4)

    assert table.rows == [(1, "a"), (8, "a")]


# --- what other rows decide ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deferred", ["", "DEFERRABLE INITIALLY DEFERRED"], ids=["immediate", "deferred"])
@EVERY_MODE
def test_a_row_that_refers_to_nothing_is_refused_before_the_vote(
    target: Any, more: dict[str, Any], deferred: str
) -> None:
    """Also by a key that is looked at by the commit only."""
    target.execute("CREATE TABLE known (id bigint PRIMARY KEY); INSERT INTO known VALUES (1), (2)")
    table = Words(
        target, f"CREATE TABLE words ({KEYED}, CONSTRAINT known FOREIGN KEY (id) REFERENCES known {deferred})", **more
    )

    table.put(words(1))
    table.refuses(words(2, 3), r'foreign key constraint "known" \(Key \(id\)=\(3\) is not present in table "known"', 2)
    target.execute("INSERT INTO known VALUES (3)")

    table.put(words(2, 3), 3)


@EVERY_MODE
def test_a_value_that_is_there_already_is_refused_before_the_vote(target: Any, more: dict[str, Any]) -> None:
    """Within the staged rows and against the target; what the checkpoint takes out or changes is not in its way."""
    table = Words(target, f"CREATE TABLE words ({KEYED}, more bigint UNIQUE)", **more)
    table.put(words(1, more=10))

    table.refuses(words(3, more=7) + words(4, more=7), r"Key \(more\)=\(7\) already exists", 2)
    if more != REPLACE:  # which takes it out
        table.refuses(words(2, more=10), r'"words_more_key" \(Key \(more\)=\(10\) already exists.*\)', 3)
    again = [{"id": 1, "word": "a", "more": 10, "_change": "-U"}, {"id": 1, "word": "b", "more": 10, "_change": "+U"}]
    table.put(again if more == RETRACT else words(1, word="b", more=10), 4 if more else 1, 1 if more else 2)

    assert table.rows == [(1, "b")]


def test_rows_that_exclude_each_other_are_refused_before_the_vote(target: Any) -> None:
    """An exclusion constraint asks every other row."""
    table = Words(target, f"CREATE TABLE words ({COLUMNS}, EXCLUDE USING gist (int8range(id, id + 10) WITH &&))")
    table.put(words(1))

    table.refuses(words(5), "conflicting key value violates exclusion constraint", 2)
    table.put(words(11), 3)


def test_a_row_that_somebody_refers_to_is_not_taken_out(target: Any) -> None:
    """A replacement would leave what refers to it in the air: refused before the vote, and put in again it is taken."""
    table = Words(target, f"CREATE TABLE words ({KEYED})")
    table.put(words(1, 2))
    target.execute("CREATE TABLE uses (word bigint REFERENCES words DEFERRABLE INITIALLY DEFERRED)")
    target.execute("INSERT INTO uses VALUES (2)")

    table.refuses(words(1), r"on table \"uses\" \(Key \(id\)=\(2\) is still referenced", 1, 2)
    table.put(words(2, 3), 1, 3)


def test_a_row_without_a_partition_is_refused_before_the_vote(target: Any) -> None:
    """The remedy that is at hand, a partition, is one."""
    table = Words(
        target,
        f"CREATE TABLE words ({COLUMNS}) PARTITION BY RANGE (id)",
        "CREATE TABLE low PARTITION OF words FOR VALUES FROM (0) TO (9)",
    )
    table.put(words(1, 8))
    staged = table.refuses(words(8, 9), r"no partition of relation \"words\" found for row .*\(id\) = \(9\)", 2)

    target.execute("CREATE TABLE high PARTITION OF words FOR VALUES FROM (9) TO (99)")

    table.check(staged)
    assert table.promote(staged).outcome is Outcome.PROMOTED


def test_what_is_taken_back_has_to_be_there_before_the_vote(target: Any) -> None:
    """In order the target tells, in a replacement the trial."""
    table = Words(target, f"CREATE TABLE words ({KEYED})", **RETRACT)
    table.put(words(1))

    table.refuses(
        [{"id": 9, "word": "z", "_change": "-D"}], "1 rows are retracted from public.words that are not there", 2
    )
    table.refuses(
        [{"id": 9, "word": "z", "_change": "-D"}], "1 rows are retracted from public.words that are not", 1, 2
    )


def test_nothing_can_be_taken_back_from_a_table_that_is_still_to_be_made(target: Any) -> None:
    """The first promotion makes it, and finds nothing in it."""
    table = Words(target, create=True, **RETRACT)
    staged = table.stage([{"id": 9, "word": "z", "_change": "-D"}])

    with pytest.raises(BadValue, match=r"1 rows are retracted from public.words that are not there"):
        table.check(staged)


def test_what_is_taken_back_may_come_with_a_checkpoint_that_is_not_promoted_yet(target: Any) -> None:
    """Two may be decided before the first is promoted; what is promoted by then is no excuse any more."""
    table = Words(target, f"CREATE TABLE words ({KEYED})", **RETRACT)
    first, second = table.stage(words(1, 2)), table.stage([{**row, "_change": "-D"} for row in words(1)], 2)

    table.check(second)

    assert [table.promote(staged).outcome for staged in (first, second)] == [Outcome.PROMOTED] * 2
    assert table.rows == [(2, "a")]
    table.refuses([{**row, "_change": "-D"} for row in words(1)], "1 rows are retracted", 3)


# --- attached partitions ---------------------------------------------------------------------------------------------


def test_an_attached_partition_gets_what_its_table_has(target: Any) -> None:
    """Columns that the output lacks, with their defaults; NOT NULL, CHECK; generated columns and other collations."""
    made = """id bigint NOT NULL CHECK (id > 0), word text, _checkpoint bigint NOT NULL,
        given text NOT NULL DEFAULT 'x' COLLATE "C", doubled bigint GENERATED ALWAYS AS (id * 2) STORED,
        PRIMARY KEY (id, _checkpoint)"""
    table = Words(target, f"CREATE TABLE words ({made}) PARTITION BY LIST (_checkpoint)", **ATTACH)

    table.put(words(1, 2))
    table.put(words(3), 2)
    table.refuses(words(4, 4), r"could not create unique index .* \(Key .*\)=\(4, 3\) is duplicated", 3)
    table.put(words(5), 1, 2)

    target.execute("SELECT id, given, doubled FROM words ORDER BY id")
    assert target.fetchall() == [(3, "x", 6), (5, "x", 10)]


def test_a_table_that_cannot_take_a_partition_says_so_before_the_vote(target: Any) -> None:
    """A default partition has rows of the checkpoint."""
    table = Words(
        target,
        f"CREATE TABLE words ({COLUMNS}) PARTITION BY LIST (_checkpoint)",
        "CREATE TABLE others PARTITION OF words DEFAULT",
        **ATTACH,
    )

    table.put(words(1))
    target.execute("INSERT INTO words VALUES (1, 'strange', 2)")
    table.refuses(words(2), 'updated partition constraint for default partition "others" would be violated', 2)


# --- triggers and rules ----------------------------------------------------------------------------------------------

TRIGGER = """CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} END $$;
    CREATE {constraint} TRIGGER {name} {when} ON words {deferred} FOR EACH ROW EXECUTE FUNCTION {name}()"""


def trigger(body: str, when: str = "BEFORE INSERT OR UPDATE", deferred: str = "") -> str:
    return TRIGGER.format(
        name="watching", body=body, when=when, deferred=deferred, constraint="CONSTRAINT" if deferred else ""
    )


RAISES = "IF NEW.id > 5 THEN RAISE EXCEPTION 'too large: %', NEW.id; END IF; RETURN NEW;"
SWALLOWS = "IF NEW.id > 5 THEN RETURN NULL; END IF; RETURN NEW;"
DELETES = "DELETE FROM public.words WHERE id > 5; RETURN NULL;"


@pytest.mark.parametrize(
    ("watching", "told"),
    [
        (trigger(RAISES), r"too large: 6 \(PL/pgSQL function (public\.)?watching\(\) line 1 at RAISE\)"),
        (trigger(RAISES, "AFTER INSERT OR UPDATE", "INITIALLY DEFERRED"), "too large: 6"),
        (trigger(SWALLOWS), "let no trigger"),
        (trigger(DELETES, "AFTER INSERT OR UPDATE"), "let no trigger"),
        (trigger(DELETES, "AFTER INSERT OR UPDATE", "INITIALLY DEFERRED"), "let no trigger"),
    ],
    ids=["raises", "raises at commit", "swallows", "deletes", "deletes at commit"],
)
@EVERY_MODE
def test_what_a_trigger_refuses_or_swallows_is_refused_before_the_vote(
    target: Any, more: dict[str, Any], watching: str, told: str
) -> None:
    """The trial meets each of them; a promotion that it was not asked for commits nothing either."""
    table = Words(target, f"CREATE TABLE words ({KEYED})", **more)
    target.execute(watching)

    table.put(words(1, 2))
    table.refuses(words(3, 6), told, 2)
    table.put(words(4), 3)


def test_a_change_that_a_trigger_swallows_is_refused_before_the_vote(target: Any) -> None:
    """The key is there, and its row is the old one: in order, and in a replacement."""
    table = Words(target, f"CREATE TABLE words ({KEYED})", **UPSERT)
    table.put(words(6, 7))
    target.execute(trigger(SWALLOWS))

    table.refuses(words(6, word="b"), "1 rows of the checkpoint are not in public.words as they were staged", 2)
    table.refuses(words(6, 7, word="b"), "2 rows of the checkpoint are not in public.words as they were staged", 1, 2)


def test_rows_that_a_rule_sends_elsewhere_are_refused_before_the_vote(target: Any) -> None:
    """The promotion counts what is in the table, not what it was told."""
    table = Words(
        target,
        f"CREATE TABLE words ({COLUMNS})",
        "CREATE TABLE away (id bigint)",
        "CREATE RULE away AS ON INSERT TO words WHERE NEW.id > 5 DO INSTEAD INSERT INTO away VALUES (NEW.id)",
    )

    table.put(words(1))
    table.refuses(words(*range(1, 11)), "expected 10 rows, found 5 of the checkpoint in public.words", 2)


@pytest.mark.parametrize("body", ["NEW.word = upper(NEW.word); RETURN NEW;", None], ids=["changes values", "redundant"])
@pytest.mark.parametrize("more", [{}, UPSERT, RETRACT], ids=str)
def test_a_trigger_that_changes_values_or_leaves_equal_rows_alone_is_no_loss(
    target: Any, more: dict[str, Any], body: str | None
) -> None:
    """As many rows are there as were staged; which values they have is the trigger's."""
    table = Words(target, f"CREATE TABLE words ({KEYED})", **more)
    target.execute(
        trigger(body)
        if body
        else "CREATE TRIGGER z BEFORE UPDATE ON words FOR EACH ROW EXECUTE FUNCTION"
        " suppress_redundant_updates_trigger()"
    )
    table.put(words(1, 2))
    if more == RETRACT:
        table.put([{**row, "_change": "-D"} for row in words(1)], 2)
        return

    table.put(words(1, 2), *((2, 1) if more else (1, 2)))
    if more:
        table.put(words(1, 2), 2, 2)

    assert [number for number, _ in table.rows] == [1, 2]


def test_a_trial_leaves_nothing_and_a_trigger_can_tell_that_it_is_one(target: Any) -> None:
    """What reaches outside of the transaction, here a sequence, can leave the trial out."""
    body = (
        "IF current_setting('twophase.trial', true) IS DISTINCT FROM 'on' THEN PERFORM nextval('public.seen'); END IF;"
    )
    table = Words(target, f"CREATE TABLE words ({COLUMNS})", "CREATE SEQUENCE seen", trigger(f"{body} RETURN NEW;"))
    staged = table.stage(words(1, 2, 3))

    for _ in range(2):
        table.check(staged)

    target.execute("SELECT is_called FROM seen")
    assert (target.fetchall(), table.rows) == ([(False,)], [])
    assert table.promote(staged).outcome is Outcome.PROMOTED
    target.execute("SELECT last_value FROM seen")
    assert (target.fetchall(), len(table.rows)) == ([(3,)], 3)


def test_a_trial_that_is_killed_or_raises_leaves_nothing(target: Any) -> None:
    """It is a transaction that nobody commits."""
    table = Words(target, f"CREATE TABLE words ({KEYED})")
    staged = table.stage(words(1))
    failpoints.configure("vote.tried=raise")
    with pytest.raises(FailpointError):
        table.check(staged)
    failpoints.configure("")

    assert (table.rows, table.promote(staged).outcome) == ([], Outcome.PROMOTED)


def test_a_target_that_nothing_but_its_columns_says_anything_about_is_not_tried(target: Any) -> None:
    """What a plain table costs stays what it was: no row is written twice."""
    made = "id bigint PRIMARY KEY, word text NOT NULL CHECK (word <> ''), made timestamptz NOT NULL DEFAULT now()"
    table = Words(target, f"CREATE TABLE words ({made})", **UPSERT)
    staged = table.stage(words(1))
    failpoints.configure("vote.tried=raise")

    table.check(staged)

    failpoints.configure("")
    assert table.promote(staged).outcome is Outcome.PROMOTED


def test_a_trial_waits_for_a_lock_and_then_lets_it_be(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock on the target does not throw away what was staged at once, and is no refusal."""
    monkeypatch.setattr(database, "LOCK_TIMEOUT", "50ms")
    table = Words(target, f"CREATE TABLE words ({KEYED})")
    staged = table.stage(words(1))
    target.execute("BEGIN; LOCK TABLE words IN SHARE MODE")

    with pytest.raises(SinkUnavailable, match=r"table public.words: .*lock timeout; nothing was changed, try again"):
        table.check(staged)

    target.execute("ROLLBACK")
    table.check(staged)


# --- through the record ----------------------------------------------------------------------------------------------


def test_a_refused_row_votes_no_and_no_sink_has_anything(home: Path, target: Any, record: PostgresRecord) -> None:
    """The revision is aborted with the reason; corrected, the same checkpoint is committed to both sinks."""
    target.execute(f"CREATE TABLE words ({KEYED}, CONSTRAINT low CHECK (id < 5), UNIQUE (word))")
    land("1.json", words(1, word="a") + words(2, word="a"), "landing/words")
    pipeline = Pipeline(
        "words",
        reads={"words": sources.Files("landing/words", format="json", schema="id bigint, word string")},
        transform=lambda words: words,
        writes={"dwh": sinks.Postgres("words", conn_id="dwh"), "lake": sinks.Files("lake/words")},
    )
    schema = (Column("id", "bigint"), Column("word", "string"))

    with Runner(pipeline, PreStaged(schema=schema), record=record) as runner:
        with pytest.raises(BadValue, match=r'"words_word_key" \(Key \(word\)=\(a\) already exists'):
            runner.run()
        target.execute("SELECT count(*) FROM words")
        assert target.fetchall() == [(0,)]
        target.execute("ALTER TABLE words DROP CONSTRAINT words_word_key")
        done = runner.run()

    assert done is not None
    assert (done.checkpoint_id, done.revision, done.state) == (1, 2, State.COMMITTED)
    target.execute("SELECT count(*) FROM words")
    assert target.fetchall() == [(2,)]
