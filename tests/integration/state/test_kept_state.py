"""What a transform does with its state inside a real Spark, and what is staged of the new one."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.states.spark_state import SparkState, counting_jobs
from twophase import State
from twophase.core.errors import AttemptFailed, BadValue, ConfigError, SchemaChanged
from twophase.spark.kept_state import KeptState, whole_state
from twophase.state import hashes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

WORDS = State(["word"], "word string, n bigint")


@pytest.fixture
def state(spark: SparkSession, tmp_path: Path) -> SparkState:
    return SparkState(spark, tmp_path, WORDS)


@pytest.fixture(params=[None, 15], ids=["hash", "weak hash"])
def collisions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test again with keys that collide in 4 bits."""
    monkeypatch.setattr(hashes, "WEAK", request.param)


def counted(spark: SparkSession, text: str) -> DataFrame:
    """Return the words of a text and how often each is there, in more than one partition."""
    from pyspark.sql import functions

    words = spark.createDataFrame([(word or None,) for word in text.split(" ")], "word string").repartition(3)
    return words.groupBy("word").agg(functions.count("*").alias("more"))


def added(kept: KeptState, counts: DataFrame) -> DataFrame:
    """Return the new state of a word count."""
    from pyspark.sql import functions

    more = functions.coalesce("n", functions.lit(0)) + functions.col("more")
    return kept.lookup(counts).select("word", more.alias("n"))


@pytest.mark.usefixtures("collisions")
def test_counts_are_kept_from_checkpoint_to_checkpoint(spark: SparkSession, state: SparkState) -> None:
    """Also for the null word; the output that is the new state has its rows."""
    first = state.checkpoint(lambda kept: (new := added(kept, counted(spark, "a b a  ä")), new))
    second = state.checkpoint(lambda kept: (new := added(kept, counted(spark, "b c  ")), new))

    assert first == sorted([("a", 2), ("b", 1), ("ä", 1), (None, 1)], key=repr)
    assert second == sorted([("b", 2), ("c", 1), (None, 3)], key=repr)
    assert state.rows() == sorted([("a", 2), ("b", 2), ("c", 1), ("ä", 1), (None, 3)], key=repr)
    assert (state.manifests[-1].keys, state.manifests[-1].changed) == (5, 3)
    assert state.strays() == set()


def test_the_changelog_says_what_changed_and_equal_rows_are_dropped(spark: SparkSession, state: SparkState) -> None:
    def batch(*rows: tuple[Any, ...]) -> DataFrame:
        return spark.createDataFrame(list(rows), "word string, n bigint, _deleted boolean")

    def checkpoint(*rows: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        new = batch(*rows)
        return state.checkpoint(lambda kept: (kept.changelog(new), new))

    assert checkpoint(("a", 1, None), ("b", 1, False)) == [("a", 1, "+I"), ("b", 1, "+I")]
    changes = checkpoint(("a", 2, False), ("b", 1, False), ("c", 3, False), ("d", None, True))
    assert changes == [("a", 1, "-U"), ("a", 2, "+U"), ("c", 3, "+I")]
    assert (state.manifests[-1].changed, state.manifests[-1].own[0].rows) == (2, 2)
    assert checkpoint(("b", None, True), ("c", 3, True)) == [("b", 1, "-D"), ("c", 3, "-D")]
    assert state.rows() == [("a", 2)]
    assert (state.manifests[-1].keys, state.manifests[-1].deleted) == (1, 2)
    assert state.strays() == set()


def jobs_of(spark: SparkSession, frame: DataFrame, path: Path) -> int:
    with counting_jobs(spark) as jobs:
        frame.write.parquet(str(path))
        spark.read.parquet(str(path)).collect()
    return jobs()


def test_one_job_does_everything_if_the_output_is_the_new_state(
    spark: SparkSession, state: SparkState, tmp_path: Path
) -> None:
    """Or its changelog: as many jobs as writing the frame alone. Otherwise one more, over what is kept."""
    state.checkpoint(lambda kept: (new := added(kept, counted(spark, "a b")), new))
    plain = jobs_of(spark, added(state.kept(), counted(spark, "a c")), tmp_path / "plain")
    state.checkpoint(lambda kept: (new := added(kept, counted(spark, "a c")), new))
    assert state.jobs == plain
    state.checkpoint(lambda kept: (kept.changelog(new := added(kept, counted(spark, "a d"))), new))
    assert state.jobs == plain
    state.checkpoint(lambda kept: ((new := added(kept, counted(spark, "a e"))).where("n > 1"), new))
    assert state.jobs > plain
    assert state.rows() == [("a", 4), ("b", 1), ("c", 1), ("d", 1), ("e", 1)]


def test_an_output_of_its_own_sees_the_same_rows_as_the_state(spark: SparkSession, state: SparkState) -> None:
    """What lookup gave is kept, so both are made from the same values, though they are not the same when read twice."""
    from pyspark.sql import functions

    def transform(kept: KeptState) -> tuple[DataFrame, DataFrame]:
        drawn = kept.lookup(counted(spark, "a b c d").withColumn("drawn", (functions.rand() * 1e9).cast("bigint")))
        return drawn.select("word", "drawn"), drawn.select("word", functions.col("drawn").alias("n"))

    assert state.checkpoint(transform) == state.rows()
    assert not spark.sparkContext._jsc.getPersistentRDDs()


def test_several_sinks_stage_the_same_rows(spark: SparkSession, state: SparkState) -> None:
    from pyspark.sql import functions

    def transform(kept: KeptState) -> tuple[DataFrame, DataFrame]:
        counts = counted(spark, "a b c").withColumn("more", (functions.rand() * 1e9).cast("bigint"))
        return (new := added(kept, counts), new)

    assert state.checkpoint(transform, writes=2) == state.rows()
    assert not spark.sparkContext._jsc.getPersistentRDDs()


def test_of_gives_the_rows_of_a_frames_keys_once_and_whole_all(spark: SparkSession, state: SparkState) -> None:
    state.checkpoint(lambda kept: (new := added(kept, counted(spark, "a b c ")), new))
    kept = state.kept()
    asked = spark.createDataFrame([("a", 1), ("a", 2), (None, 3), ("z", 4)], "word string, x int")

    assert sorted(map(tuple, kept.of(asked).collect()), key=repr) == [("a", 1), (None, 1)]
    assert sorted(map(tuple, kept.whole().collect()), key=repr) == state.rows()
    assert whole_state(spark, state.home, state.manifests[0]).collect() == []
    assert whole_state(spark, state.home, state.manifests[1]).count() == 4


KEYS = "d decimal(20,4), t timestamp, x timestamp_ntz, day date, i bigint, b binary, f boolean"


def test_every_type_goes_to_the_state_and_comes_back(spark: SparkSession, tmp_path: Path) -> None:
    """Keys of seven types, values of nested ones; the time zone of the session does not matter."""
    values = "s struct<a:int,b:array<string>>, m map<string,double>, r float, p decimal(5,2)"
    declaration = State(["d", "t", "x", "day", "i", "b", "f"], f"{KEYS}, {values}")
    state = SparkState(spark, tmp_path, declaration)
    text = (
        "select cast(1.5 as decimal(20,4)) d, timestamp'2026-03-01 12:00:00.123456Z' t, timestamp_ntz'1900-01-01' x,"
        " date'2026-11-18' day, {i} i, X'00ff' b, true f, named_struct('a', 1, 'b', array('x', null)) s,"
        " map('k', double('NaN')) m, float('NaN') r, cast({p} as decimal(5,2)) p"
    )
    state.checkpoint(lambda _: (new := spark.sql(text.format(i="7", p="1.25")), new))
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")
    try:
        asked = spark.sql(text.format(i="7", p="1.25")).drop("s", "m", "r", "p")
        (found,) = state.kept().lookup(asked).collect()
        (whole,) = state.kept().whole().collect()
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")

    assert found.s.asDict() == {"a": 1, "b": ["x", None]}
    assert (found.p, found.day, found.i, whole.d) == (Decimal("1.25"), date(2026, 11, 18), 7, Decimal("1.5000"))
    assert whole.t == found.t
    assert state.checkpoint(lambda kept: (kept.changelog(new := spark.sql(text.format(i="8", p="null"))), new))


def test_an_int_frame_finds_the_keys_of_a_bigint_state(spark: SparkSession, tmp_path: Path) -> None:
    state = SparkState(spark, tmp_path, State(["k"], "k bigint, v bigint"))
    ints = spark.createDataFrame([(1, 10), (2, 20)], "k int, v int")
    state.checkpoint(lambda _: (ints, ints))

    assert state.rows() == [(1, 10), (2, 20)]
    assert sorted(map(tuple, state.kept().lookup(ints.select("k")).collect())) == [(1, 10), (2, 20)]


@pytest.mark.usefixtures("collisions")
def test_two_rows_for_a_key_are_an_error_that_names_it(spark: SparkSession, state: SparkState) -> None:
    """Whether one task has both or two tasks have one each, in the sink's job and in one of its own."""
    rows = spark.createDataFrame([("a", 1), ("b", 1), ("b", 2)], "word string, n bigint")
    for frame in (rows.coalesce(1), rows.repartition(2, "n")):
        for output in (frame, frame.where("n > 0")):
            with pytest.raises(BadValue, match="state 'counts': new_state has two rows for the key word='b'"):
                state.checkpoint(lambda _, frame=frame, output=output: (output, frame))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("columns", "error", "said"),
    [
        ("word string", ConfigError, "new_state: column 'n' is missing"),
        ("n bigint", ConfigError, "new_state: column 'word' is missing"),
        ("word string, n bigint, x int", ConfigError, "column x is not in the state"),
        ("word string, n string", SchemaChanged, "column 'n' is string, expected bigint.*twophase state migrate"),
        ("word int, n bigint", SchemaChanged, "column 'word' is int, expected string"),
        ("word string, n bigint, _deleted int", ConfigError, "column '_deleted' is int, expected boolean"),
    ],
)
def test_a_new_state_that_does_not_fit_is_refused_before_anything_runs(
    spark: SparkSession, state: SparkState, columns: str, error: type[Exception], said: str
) -> None:
    frame = spark.createDataFrame([], columns)

    with pytest.raises(error, match=f"state 'counts': .*{said}"):
        state.checkpoint(lambda _: (frame, frame))


def test_a_state_of_another_key_or_type_is_refused(spark: SparkSession, state: SparkState) -> None:
    state.checkpoint(lambda kept: (new := added(kept, counted(spark, "a")), new))
    for key, columns, said in [
        (["n"], "word string, n bigint", "its key was word and is now n"),
        (["word"], "word string, n int", "column 'n' was bigint and is now int"),
        (["word"], "word string, m bigint", "column 'n' is missing"),
    ]:
        state.declaration = State(key, columns)
        with pytest.raises(SchemaChanged, match=f"{said}.*twophase state migrate"):
            state.kept()
    state.declaration = State(["word"], "word string, n bigint, seen date")
    assert [tuple(row) for row in state.kept().whole().collect()] == [("a", 1, None)]


def test_a_frame_with_a_column_of_that_name_needs_a_prefix(spark: SparkSession, state: SparkState) -> None:
    state.checkpoint(lambda kept: (new := added(kept, counted(spark, "a")), new))
    frame = spark.createDataFrame([("a", 5), ("b", 6)], "word string, N int")

    with pytest.raises(ConfigError, match=r"lookup: the frame has a column n, .*prefix="):
        state.kept().lookup(frame)
    found = state.kept().lookup(frame, prefix="before_")
    assert found.columns == ["word", "N", "before_n"]
    assert sorted(map(tuple, found.collect())) == [("a", 5, 1), ("b", 6, None)]
    with pytest.raises(SchemaChanged, match="of: column 'word' is double, expected string"):
        state.kept().of(spark.createDataFrame([(1.0,)], "word double"))


def test_rows_live_as_long_as_their_ttl_by_the_time_of_the_checkpoints(spark: SparkSession, tmp_path: Path) -> None:
    """An equal row lives on, and is no change."""
    state = SparkState(spark, tmp_path, State(["word"], "word string, n bigint", ttl="2h"))

    def checkpoint(*words: str) -> list[tuple[Any, ...]]:
        new = spark.createDataFrame([(word, 1) for word in words], "word string, n bigint")
        return state.checkpoint(lambda kept: (kept.changelog(new), new))

    assert checkpoint("a", "b") == [("a", 1, "+I"), ("b", 1, "+I")]
    assert checkpoint("a") == []
    assert checkpoint("c") == [("c", 1, "+I")]
    assert state.rows() == [("a", 1), ("c", 1)]
    assert checkpoint("a", "b") == [("a", 1, "+I"), ("b", 1, "+I")]


def test_a_sink_that_staged_other_rows_than_the_tasks_gave_is_seen(spark: SparkSession, state: SparkState) -> None:
    kept = state.kept()
    new = added(kept, counted(spark, "a b"))

    with kept.staging(new, new) as staged:
        assert staged.output is not None
        staged.output.collect()
        with pytest.raises(AttemptFailed, match=r"state 'counts': new_state: the tasks gave out 2 rows, .* staged 3"):
            staged.manifest(3)
        staged.output.collect()
        assert staged.manifest(2).keys == 2, "what was computed twice counts once"
