"""A table in PostgreSQL: staged rows are invisible, one transaction makes them visible, and the marker is in it."""

from __future__ import annotations

import datetime as dt
import decimal
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

import twophase
from support.pipelines.factories import land_words
from twophase import Pipeline, sinks, sources
from twophase.core import failpoints
from twophase.core.checkpoint import Key, Output
from twophase.core.errors import BadValue, ConfigError, ManifestMismatch
from twophase.core.failpoints import FailpointError
from twophase.core.manifest import Column
from twophase.core.ports import Outcome
from twophase.sinks.postgres.staging_table import Loader
from twophase.storage.database import TableName

SCHEMA = (Column("id", "bigint"), Column("word", "string"))
KEY = Key("words", 1, 1)


def declared(**more: Any) -> sinks.Postgres:
    sink = sinks.Postgres("words", conn_id="dwh", **{"create": True, **more})
    sink.prepare()
    return sink


CHANGES = (*SCHEMA, Column("_change", "string"))


class Staged:
    """One staged output; with three values in a row the last says what it means."""

    def __init__(
        self,
        sink: sinks.Postgres,
        rows: Sequence[tuple[Any, ...]],
        key: Key = KEY,
        *,
        attempt: int = 1,
        older: Output | None = None,
    ) -> None:
        output = Output(key, attempt, sink.place(key, attempt, "t0ken", older=older), sink="dwh")
        schema = CHANGES if len(rows[0]) == len(CHANGES) else SCHEMA
        columns = sink.open(output, schema)
        types = [pa.int64(), pa.string(), pa.string()]
        arrays = [pa.array(values, kind) for values, kind in zip(zip(*rows, strict=True), types, strict=False)]
        batch = pa.RecordBatch.from_arrays(arrays, names=[column.name for column in schema])
        loader = Loader(psql_dsn(), TableName(*output.handle["staging"]))
        list(loader(iter([batch])))
        self.sink = sink
        self.output = replace(output, manifest=sink.seal(output, schema, columns))

    def check(self) -> None:
        self.sink.check(self.output)

    def promote(self) -> Outcome:
        return self.sink.promote(self.output).outcome

    def find(self) -> Outcome:
        return self.sink.find(self.output).outcome


def psql_dsn() -> str:
    from twophase.storage import database

    return database.dsn("dwh")


def rows(cursor: Any, query: str = "SELECT id, word FROM public.words ORDER BY id") -> list[tuple[Any, ...]]:
    cursor.execute(query)
    found: list[tuple[Any, ...]] = cursor.fetchall()
    return found


def tables(cursor: Any) -> list[str]:
    return [row[0] for row in rows(cursor, "SELECT tablename FROM pg_tables WHERE schemaname = 'twophase_staging'")]


def test_staged_rows_are_invisible_and_promoted_at_once_with_their_marker(target: Any) -> None:
    staged = Staged(declared(), [(1, "a"), (2, "b")])
    staged.check()
    assert (staged.find(), staged.output.manifest["rows"]) == (Outcome.RETRY_LATER, 2)

    assert staged.promote() is Outcome.PROMOTED

    assert rows(target, "SELECT id, word, _checkpoint FROM public.words ORDER BY id") == [(1, "a", 1), (2, "b", 1)]
    assert rows(target, "SELECT pipeline, target, checkpoint_id, revision, attempt FROM twophase_sinks.promoted") == [
        ("words", "public.words", 1, 1, 1)
    ]
    assert tables(target) == []
    assert list(staged.sink.verify(staged.output)) == []


@pytest.mark.parametrize("mode", ["append", "upsert", "replace"])
def test_a_percent_sign_in_a_name_is_part_of_the_name(target: Any, mode: str) -> None:
    """psycopg2 would take it for the place of a value: in the name of a table, a schema or a column."""
    target.execute('CREATE SCHEMA "s%s"')
    schema = (Column("id%(x)s", "bigint"), Column("w%d", "string"))
    more: dict[str, Any] = {"key": ["id%(x)s"]} if mode == "upsert" else {}
    sink = sinks.Postgres("s%s.100% of %s", conn_id="dwh", create=True, mode=mode, **more)
    sink.prepare()

    def promoted(key: Key, older: Output | None = None) -> Output:
        output = Output(key, 1, sink.place(key, 1, "t0ken", older=older), sink="dwh")
        columns = sink.open(output, schema)
        arrays = [pa.array([1, 2], pa.int64()), pa.array(["a", f"r{key.revision}"])]
        batch = pa.RecordBatch.from_arrays(arrays, names=[column.name for column in schema])
        list(Loader(psql_dsn(), TableName(*output.handle["staging"]))(iter([batch])))
        output = replace(output, manifest=sink.seal(output, schema, columns))
        sink.check(output)
        assert sink.promote(output).outcome is Outcome.PROMOTED
        assert sink.find(output).outcome is Outcome.ALREADY_PROMOTED
        return output

    first = promoted(KEY)
    second = promoted(KEY._replace(revision=2), first)

    assert rows(target, 'SELECT "id%(x)s", "w%d" FROM "s%s"."100% of %s" ORDER BY 1') == [(1, "a"), (2, "r2")]
    assert list(sink.verify(second)) == []
    assert list(sink.strangers([second])) == []
    assert sink.staged(second) is not None
    assert list(sink.attempts()) == []


def test_a_partition_that_spark_runs_twice_is_loaded_once(target: Any) -> None:
    sink = declared()
    staged = Staged(sink, [(1, "a"), (2, "b")])
    loader = Loader(psql_dsn(), TableName(*staged.output.handle["staging"]))
    again = pa.RecordBatch.from_pydict({"id": pa.array([1, 2, 3], pa.int64()), "word": pa.array(["a", "b", "c"])})

    assert loader.load(0, again, iter(())) == 2

    staged.check()
    assert staged.promote() is Outcome.PROMOTED
    assert rows(target) == [(1, "a"), (2, "b")]


def test_a_repeated_promotion_changes_nothing(target: Any) -> None:
    staged = Staged(declared(), [(1, "a")])

    outcomes = [staged.promote() for _ in range(3)]

    assert outcomes == [Outcome.PROMOTED, Outcome.ALREADY_PROMOTED, Outcome.ALREADY_PROMOTED]
    assert (staged.find(), rows(target)) == (Outcome.ALREADY_PROMOTED, [(1, "a")])


def test_a_replacement_takes_the_old_rows_out_and_a_late_promoter_does_not_bring_them_back(target: Any) -> None:
    sink = declared()
    first = Staged(sink, [(1, "old"), (2, "old")])
    first.promote()
    other = Staged(sink, [(9, "other")], Key("words", 2, 1))
    other.promote()
    second = Staged(sink, [(1, "new")], Key("words", 1, 2), older=first.output)

    assert second.promote() is Outcome.PROMOTED

    assert rows(target) == [(1, "new"), (9, "other")]
    assert first.promote() is Outcome.ALREADY_PROMOTED
    assert rows(target) == [(1, "new"), (9, "other")]
    assert (sink.stands(first.output), sink.stands(second.output)) == (False, True)


@pytest.mark.parametrize("failpoint", ["promote.marked", "promote.applied"])
def test_a_promotion_that_dies_before_its_commit_leaves_nothing(target: Any, failpoint: str) -> None:
    sink = declared()
    first = Staged(sink, [(1, "old")])
    first.promote()
    staged = Staged(sink, [(1, "new")], Key("words", 1, 2), older=first.output)
    failpoints.configure(f"{failpoint}=raise")
    with pytest.raises(FailpointError):
        staged.promote()
    failpoints.configure("")

    assert (rows(target), staged.find()) == ([(1, "old")], Outcome.RETRY_LATER)
    assert staged.promote() is Outcome.PROMOTED
    assert rows(target) == [(1, "new")]


def test_an_upsert_changes_what_is_there_and_adds_what_is_not(target: Any) -> None:
    sink = declared(mode="upsert", key=["id"])
    Staged(sink, [(1, "a"), (2, "b")]).promote()
    Staged(sink, [(2, "B"), (3, "C")], Key("words", 2, 1)).promote()

    assert rows(target) == [(1, "a"), (2, "B"), (3, "C")]
    assert sink.ordered
    assert (sink.objection(latest=True), sink.objection(latest=False) is None) == (None, False)


def test_a_changelog_is_applied_by_key_and_cancels_out_within_a_checkpoint(target: Any) -> None:
    sink = declared(mode="retract", key=["id"])
    Staged(sink, [(1, "a", "+I"), (2, "b", "+I"), (3, "c", "+I"), (4, "x", "-D"), (4, "x", "+I")]).promote()
    assert rows(target) == [(1, "a"), (2, "b"), (3, "c")]

    changes = [(1, "A", "+U"), (1, "a", "-U"), (2, "b", "-D"), (5, "e", "+I"), (3, "c", "-U"), (3, "c", "+U")]
    assert Staged(sink, changes, Key("words", 2, 1)).promote() is Outcome.PROMOTED

    assert rows(target) == [(1, "A"), (3, "c"), (5, "e")]
    assert sink.ordered


def test_what_is_not_there_cannot_be_taken_back(target: Any) -> None:
    sink = declared(mode="retract", key=["id"])
    Staged(sink, [(1, "a", "+I")]).promote()

    promoted = Staged(sink, [(9, "z", "-D"), (1, "b", "+U"), (1, "a", "-U")], Key("words", 2, 1))

    found = sink.promote(promoted.output)
    assert (found.outcome, found.reason) == (
        Outcome.FAILED,
        "1 rows are retracted from public.words that are not there",
    )
    assert rows(target) == [(1, "a")]


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ([(1, "a", "+X")], "expected .* found '[+]X'"),
        ([(1, "a", None)], "found None"),
        ([(1, "a", "+I"), (1, "b", "+I")], "2 rows are left of id 1"),
        ([(None, "a", "+I")], "1 rows have a null"),
    ],
)
def test_a_changelog_that_cannot_be_applied_is_refused_before_the_vote(target: Any, found: Any, told: str) -> None:
    with pytest.raises(BadValue, match=told):
        Staged(declared(mode="retract", key=["id"]), found)


def test_a_changelog_without_its_column_is_refused(target: Any) -> None:
    with pytest.raises(ConfigError, match="a retract needs a column _change string"):
        Staged(declared(mode="retract", key=["id"]), [(1, "a")])


def test_a_replaced_table_holds_the_last_checkpoint_only(target: Any) -> None:
    sink = declared(mode="replace")
    Staged(sink, [(1, "a"), (2, "b")]).promote()
    Staged(sink, [(3, "c")], Key("words", 2, 1)).promote()

    assert rows(target) == [(3, "c")]
    assert (sink.objection(latest=True), sink.objection(latest=False) is None) == (None, False)


def test_an_attached_partition_is_the_staging_table_itself_and_is_replaced_in_one_step(target: Any) -> None:
    sink = declared(attach=True)
    first = Staged(sink, [(1, "a")])
    assert first.promote() is Outcome.PROMOTED
    Staged(sink, [(2, "b")], Key("words", 2, 1)).promote()
    second = Staged(sink, [(1, "A")], Key("words", 1, 2), older=first.output)

    assert second.promote() is Outcome.PROMOTED

    assert rows(target, "SELECT id, word, _checkpoint FROM public.words ORDER BY id") == [(1, "A", 1), (2, "b", 2)]
    assert (first.promote(), list(sink.attempts())) == (Outcome.ALREADY_PROMOTED, [])


@pytest.mark.parametrize(
    ("mode", "known"),
    [({}, False), ({"mode": "replace"}, False), ({"attach": True}, True), ({"mode": "upsert", "key": ["id"]}, True)],
    ids=["append", "replace", "attach", "upsert"],
)
def test_what_is_only_inserted_is_not_looked_through_for_statistics(
    target: Any, mode: dict[str, Any], known: bool
) -> None:
    """A merge and the readers of a partition need them; rows that are inserted are read once anyway."""
    staged = Staged(declared(**mode), [(1, "a"), (2, "b")])

    schema, name = staged.output.handle["staging"]
    target.execute("SELECT reltuples FROM pg_class WHERE oid = %s::regclass", (f"{schema}.{name}",))
    assert target.fetchone()[0] == (2 if known else -1)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ([(1, "a"), (1, "b")], "2 rows have id 1"),
        ([(1, "a"), (None, "b")], "1 rows have a null in it"),
    ],
)
def test_a_key_that_is_doubled_or_null_is_refused_before_the_vote(target: Any, found: Any, told: str) -> None:
    sink = declared(mode="upsert", key=["id"])

    with pytest.raises(BadValue, match=told):
        Staged(sink, found)


def test_a_discarded_revision_leaves_no_table(target: Any) -> None:
    sink = declared()
    Staged(sink, [(1, "a")])
    again = Staged(sink, [(1, "a")], attempt=2)
    other = Staged(sink, [(2, "b")], Key("words", 2, 1))
    assert {left.attempt for left in sink.attempts()} == {1, 2}

    sink.discard(again.output)

    assert sorted(tables(target)) == sorted(
        [other.output.handle["staging"][1], f"{other.output.handle['staging'][1]}_parts"]
    )
    with pytest.raises(ManifestMismatch, match="is not there"):
        again.check()
    assert again.find() is Outcome.FAILED


def test_a_marker_that_this_record_did_not_vote_for_is_not_its_own(target: Any) -> None:
    sink = declared()
    first = Staged(sink, [(1, "a")])
    first.promote()

    stranger = Staged(sink, [(2, "b")], attempt=2)

    assert (stranger.find(), stranger.promote()) == (Outcome.FAILED, Outcome.FAILED)
    with pytest.raises(ManifestMismatch, match="has its marker already"):
        stranger.check()
    assert rows(target) == [(1, "a")]


def test_a_revision_is_replaced_by_its_marker_whatever_its_write_was_called(target: Any) -> None:
    sink = declared()
    Staged(sink, [(1, "old"), (2, "old")]).promote()

    again = Staged(sink, [(1, "new")], Key("words", 1, 2))
    again.check()

    assert again.promote() is Outcome.PROMOTED
    assert rows(target) == [(1, "new")]


def test_a_later_revision_that_is_not_in_this_record_is_not_doubled(target: Any) -> None:
    """A newer record had aborted the first one and committed the second; a restored one begins with the first again."""
    sink = declared()
    Staged(sink, [(1, "a")], Key("words", 1, 2)).promote()

    after_restore = Staged(sink, [(1, "b")])

    with pytest.raises(ManifestMismatch, match="has its revision 2 already; it is not in this record"):
        after_restore.check()
    assert after_restore.promote() is Outcome.FAILED
    assert rows(target) == [(1, "a")]


def test_a_locked_target_is_asked_again_later(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twophase.storage.database.LOCK_TIMEOUT", "100ms")
    sink = declared()
    Staged(sink, [(1, "a")]).promote()
    staged = Staged(sink, [(2, "b")], Key("words", 2, 1))
    target.execute("BEGIN")
    target.execute("LOCK TABLE public.words IN ACCESS EXCLUSIVE MODE")

    assert staged.promote() is Outcome.RETRY_LATER

    target.execute("ROLLBACK")
    assert staged.promote() is Outcome.PROMOTED


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"mode": "merge"}, "unknown mode 'merge'"),
        ({"mode": "upsert"}, "upsert and retract need key="),
        ({"mode": "retract"}, "upsert and retract need key="),
        ({"key": ["id"]}, "nothing else has one"),
        ({"mode": "replace", "attach": True}, "only what is appended"),
        ({"mode": "upsert", "key": ["id"], "history": -1}, "history=-1; expected 0, 1, 2"),
        ({"history": 3}, "history=3; expected .* with mode upsert or retract"),
        ({"staging_schema": 'a"b'}, "small letters"),
        ({"conn_id": ""}, "conn_id is missing"),
    ],
)
def test_a_wrong_declaration_is_refused_at_once(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        sinks.Postgres("words", **{"conn_id": "dwh", **arguments})


@pytest.mark.parametrize(
    ("made", "arguments", "told"),
    [
        (None, {}, "declare create=True"),
        ("id bigint, word text", {}, "expected a column _checkpoint bigint, found none"),
        ("id bigint, word text", {"mode": "upsert", "key": ["id"]}, "no primary key or unique index"),
        ("id bigint, word text", {"mode": "upsert", "key": ["ID"]}, "no column of it"),
        ("id bigint, word text, _checkpoint bigint", {"attach": True}, "partitioned by LIST"),
    ],
)
def test_a_target_that_does_not_fit_is_refused_before_anything_is_recorded(
    target: Any, made: str | None, arguments: dict[str, Any], told: str
) -> None:
    if made:
        target.execute(f"CREATE TABLE public.words ({made})")

    with pytest.raises(ConfigError, match=told):
        declared(create=False, **arguments)


def test_a_target_whose_row_security_applies_to_the_promoter_is_refused_until_it_does_not(target: Any) -> None:
    """Its policies would leave out rows in silence; the remedy that is named helps."""
    target.execute("CREATE ROLE careful LOGIN PASSWORD 'careful'")
    target.execute(f"GRANT CREATE ON DATABASE {target.connection.info.dbname} TO careful")
    target.execute("CREATE TABLE public.words (id bigint, word text, _checkpoint bigint)")
    target.execute("ALTER TABLE public.words ENABLE ROW LEVEL SECURITY; GRANT ALL ON public.words TO careful")
    os.environ["AIRFLOW_CONN_DWH"] = re.sub(r"//[^@]*@", "//careful:careful@", os.environ["AIRFLOW_CONN_DWH"])
    try:
        with pytest.raises(
            ConfigError, match="row security applies to careful, who promotes; ALTER ROLE careful BYPASSRLS"
        ):
            declared(create=False)
        target.execute("ALTER ROLE careful BYPASSRLS")
        assert Staged(declared(create=False), [(1, "a")]).promote() is Outcome.PROMOTED
    finally:
        target.execute("DROP OWNED BY careful CASCADE; DROP ROLE careful")


def words(sink: sinks.Postgres) -> Pipeline:
    return Pipeline(
        "words",
        reads={"words": sources.Files("landing/words", format="json", schema="id bigint, word string")},
        transform=lambda words: words,
        writes={"dwh": sink},
    )


@pytest.mark.spark
def test_a_run_commits_to_postgres_and_is_read_back(home: Any, target: Any, spark: Any) -> None:
    pipeline = words(sinks.Postgres("words", conn_id="dwh", create=True))
    for number in (1, 2):
        land_words(start=number)
        done = twophase.run(pipeline, spark=spark)
        assert done is not None
    found = twophase.read_committed(spark, "words", "dwh")

    assert sorted(row["id"] for row in found.collect()) == [row[0] for row in rows(target)]
    assert {row["checkpoint"] for row in found.collect()} == {1, 2}


HARD = """
    SELECT id, cast(id AS int) AS small, cast(id AS decimal(20,4)) / 8 AS amount, cast(id AS double) AS ratio,
        CASE WHEN id % 7 = 0 THEN NULL WHEN id % 7 = 1 THEN '' ELSE concat('ä"''\\\\\\n\\t😀', id) END AS word,
        id % 2 = 0 AS flag, date_add(DATE'2026-01-01', cast(id AS int) % 300) AS day,
        timestamp_micros(1790000000000000 + id) AS at, timestamp_ntz'2026-03-29 02:30:00' AS local,
        array(concat('x', id), NULL) AS tags, named_struct('a', id, 'b', 'é') AS more,
        cast(concat('b', id) AS binary) AS raw
    FROM words
"""


@pytest.mark.spark
def test_every_type_comes_back_equal(home: Any, target: Any, spark: Any) -> None:
    spark.range(1000).createOrReplaceTempView("words")
    frame = spark.sql(HARD)
    sink = sinks.Postgres("hard", conn_id="dwh", create=True)
    sink.prepare()
    output = Output(KEY, 1, sink.place(KEY, 1, "t0ken"), sink="dwh")

    output = replace(output, manifest=sink.stage(frame, output))
    assert sink.promote(output).outcome is Outcome.PROMOTED

    found = {row[0]: row for row in rows(target, "SELECT * FROM public.hard")}
    assert len(found) == output.manifest["rows"] == 1000
    for row in frame.collect():
        mine = found[row["id"]]
        assert mine[1:7] == (row["small"], row["amount"], row["ratio"], row["word"], row["flag"], row["day"])
        assert mine[7] == row["at"].astimezone(dt.UTC)
        assert (mine[8], mine[9], mine[10]) == (row["local"], row["tags"], {"a": row["id"], "b": "é"})
        assert bytes(mine[11]) == bytes(row["raw"])
    assert isinstance(found[0][2], decimal.Decimal)


@pytest.mark.spark
@pytest.mark.parametrize(
    ("made", "select", "told"),
    [
        ("id smallint", "SELECT 70000L AS id", "column 'id': value 70000 does not fit smallint"),
        ("id bigint, word text", "SELECT 1L AS id, concat('a', chr(0)) AS word", "invalid byte sequence"),
        ("id bigint, word varchar(3)", "SELECT 1L AS id, 'long' AS word", "too long"),
        ("id bigint, more uuid", "SELECT 1L AS id, 'no' AS more", "invalid input syntax for type uuid"),
    ],
)
def test_a_value_that_the_target_cannot_hold_is_named_before_the_vote(  # noqa: PLR0917 - a table of cases
    home: Any, target: Any, spark: Any, made: str, select: str, told: str
) -> None:
    target.execute(f"CREATE TABLE public.words ({made}, _checkpoint bigint)")
    sink = declared(create=False)

    with pytest.raises(BadValue, match=told):
        sink.stage(spark.sql(select), Output(KEY, 1, sink.place(KEY, 1, "t0ken"), sink="dwh"))


def test_a_checkpoint_that_cannot_be_taken_back_is_not_run_again(home: Any, target: Any) -> None:
    from support.pipelines.factories import PreStaged
    from twophase.core.checkpoint import Run
    from twophase.runner import Runner

    pipeline = words(sinks.Postgres("words", conn_id="dwh", create=True, mode="replace"))
    land_words(start=1)
    with Runner(pipeline, PreStaged(schema=SCHEMA, change=lambda rows, _: [_two(row) for row in rows])) as runner:
        assert runner.run()
        land_words(start=2)
        assert runner.run()

        with pytest.raises(ConfigError, match="sink 'dwh': a later checkpoint has taken the place"):
            runner.coordinator.replace(Run(None, "again"), 1)
        assert runner.coordinator.replace(Run(None, "again"), 2).revision == 2


def test_a_replacement_that_was_overtaken_is_not_committed(home: Any, target: Any) -> None:
    from support.pipelines.factories import PreStaged
    from twophase.core.checkpoint import Run
    from twophase.core.errors import IllegalTransition
    from twophase.runner import Runner

    pipeline = words(sinks.Postgres("words", conn_id="dwh", create=True, mode="replace"))
    land_words(start=1)
    with Runner(pipeline, PreStaged(schema=SCHEMA, change=lambda rows, _: [_two(row) for row in rows])) as runner:
        assert runner.run()
        again = runner.coordinator.attempt(runner.coordinator.replace(Run(None, "again"), 1))
        runner._stage_and_vote(again)
        land_words(start=2)
        assert runner.run()
        before = rows(target)

        with pytest.raises(IllegalTransition, match="cannot be committed any more: sink 'dwh': a later checkpoint"):
            runner.coordinator.commit(again)

        assert rows(target) == before
        assert runner.coordinator.abort(again, "overtaken").state == "ABORTED"


def _two(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "word": row["word"]}
