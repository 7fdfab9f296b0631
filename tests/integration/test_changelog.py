"""Changelogs are made, converted and applied by Spark as the tables themselves say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twophase import changelog
from twophase.core.errors import ConfigError
from twophase.storage import spark_task_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: `case` tells the histories of one run apart: they are all in one frame, since each job of Spark costs its time.
KEY = ["case", "k 1", "added"]
SCHEMA = "case int, `k 1` string, added int, v string, `w.x` double"
LOG = f"{SCHEMA}, _change string"

keys = st.tuples(st.sampled_from([None, "", "a", "b"]), st.sampled_from([None, 1]))
values = st.tuples(st.sampled_from([None, "", "x"]), st.sampled_from([None, 0.0, 1.5, float("nan")]))
tables = st.dictionaries(keys, values, max_size=4)
#: A table before, and after each of some checkpoints.
histories = st.lists(tables, min_size=2, max_size=4)


def rows(case: int, table: dict[Any, Any]) -> list[tuple[Any, ...]]:
    return [(case, *key, *value) for key, value in table.items()]


def frame(spark: SparkSession, found: Sequence[tuple[Any, ...]], schema: str = SCHEMA) -> DataFrame:
    return spark.createDataFrame(list(found), schema)


def collected(found: DataFrame) -> list[str]:
    """Return rows as texts, sorted: NaN equals itself there, and null sorts."""
    return sorted(map(repr, map(tuple, found.collect())))


def shown(found: Iterable[tuple[Any, ...]]) -> list[str]:
    return sorted(map(repr, found))


def said(found: DataFrame) -> str | None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Spark's, of several kinds
        found.collect()
    return spark_task_errors.heard(str(caught.value))


@pytest.mark.parametrize("ordered", [False, True])
def test_a_changelog_applied_as_it_is_retracting_and_upserting_gives_the_final_table(
    spark: SparkSession, *, ordered: bool
) -> None:
    """Whatever comes, goes and comes back in the checkpoints of a changelog, all its forms give the same table."""

    @settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.lists(histories, min_size=80, max_size=80))
    def hold(found: list[list[dict[Any, Any]]]) -> None:
        before = frame(spark, [row for case, history in enumerate(found) for row in rows(case, history[0])])
        after = shown(row for case, history in enumerate(found) for row in rows(case, history[-1]))
        log = None
        for number in range(1, 4):
            steps = [(case, history) for case, history in enumerate(found) if len(history) > number]
            sides = [
                frame(spark, [row for case, history in steps for row in rows(case, history[at])])
                for at in (number - 1, number)
            ]
            step = changelog.changelog(sides[0], sides[1], KEY)
            step = step.selectExpr("*", f"{number} AS _checkpoint") if ordered else step
            log = step if log is None else log.unionByName(step)
        assert log is not None
        log = log.cache()

        retracts, upserts = changelog.to_retract(log, KEY).cache(), changelog.to_upsert(log, KEY).cache()
        assert collected(changelog.apply(before, log, KEY)) == after
        assert collected(changelog.apply(before, retracts, KEY)) == after
        assert collected(changelog.apply(before, upserts, KEY)) == after
        assert upserts.groupBy(*[f"`{name}`" for name in KEY]).count().where("count > 1").isEmpty()
        assert collected(changelog.changelog(before, changelog.apply(before, upserts, KEY), KEY)) == collected(retracts)
        for made in (log, retracts, upserts):
            made.unpersist()

    hold()


def test_a_key_that_goes_and_comes_back_in_one_checkpoint_is_updated(spark: SparkSession) -> None:
    log = frame(spark, [(1, "a", 1, "x", None, "-D"), (1, "a", 1, "y", None, "+I")], LOG)

    assert collected(changelog.to_upsert(log, KEY)) == shown([(1, "a", 1, "y", None, "+U")])
    assert collected(changelog.to_retract(log, KEY)) == shown(
        [(1, "a", 1, "x", None, "-U"), (1, "a", 1, "y", None, "+U")]
    )


def test_an_upsert_changelog_of_several_checkpoints_goes_by_their_order(spark: SparkSession) -> None:
    """Only the key of a -D counts; what comes in a later checkpoint stands, whatever the order of the rows."""
    found = [
        (1, "a", 1, "x", None, "+I", 1), (1, "a", 1, None, None, "-D", 2), (1, "b", 1, None, None, "+I", 3),
        (1, "b", 1, None, None, "-D", 2), (1, "c", 1, "new", None, "+U", 2), (1, "d", 1, None, None, "-D", 9),
    ]  # fmt: skip
    log = frame(spark, list(reversed(found)), f"{LOG}, _checkpoint bigint")
    table = frame(spark, [(1, "b", 1, "old", 2.0), (1, "c", 1, "old", 2.0), (1, "e", 1, "old", 2.0)])

    assert collected(changelog.to_upsert(log, KEY)) == shown(
        [(1, "b", 1, None, None, "+U"), (1, "c", 1, "new", None, "+U"), (1, "d", 1, None, None, "-D")]
    )
    assert collected(changelog.apply(table, log, KEY)) == shown(
        [(1, "b", 1, None, None), (1, "c", 1, "new", None), (1, "e", 1, "old", 2.0)]
    )


def test_nothing_changes_nothing(spark: SparkSession) -> None:
    empty, none = frame(spark, []), frame(spark, [], LOG)
    one = frame(spark, [(1, None, None, None, None)])

    assert collected(changelog.changelog(empty, empty, KEY)) == []
    assert collected(changelog.changelog(one, one, KEY)) == []
    assert collected(changelog.apply(one, none, KEY)) == collected(one)
    assert [convert(none, KEY).count() for convert in CONVERSIONS] == [0, 0, 0]


CONVERSIONS = (changelog.to_append, changelog.to_retract, changelog.to_upsert)


def test_an_append_keeps_new_rows_as_often_as_they_are_there(spark: SparkSession) -> None:
    row = (1, "a", 1, "x", None)
    log = frame(spark, [(*row, "+I"), (*row, "+I")], LOG)

    assert collected(changelog.to_append(log, KEY)) == shown([row, row])


@pytest.mark.parametrize("kind", ["-U", "+U", "-D", None, "I"])
def test_an_append_of_anything_but_new_rows_names_the_key(spark: SparkSession, kind: str | None) -> None:
    log = frame(spark, [(1, None, 7, "x", None, kind)], LOG)

    told = said(changelog.to_append(log, KEY))
    assert told is not None
    assert told.startswith(f"to_append: {kind or 'null'} of case 1, k 1 null, added 7: an append holds new rows only")


def test_what_is_wrong_with_a_row_names_its_key_whatever_is_asked_of_the_frame(spark: SparkSession) -> None:
    """A count needs no column, and stops all the same."""
    old, new = (1, "a", 7, "x", None), (1, "a", 7, "y", None)
    table = frame(spark, [old])
    cases = {
        "to_upsert: column _change: found up of": changelog.to_upsert(frame(spark, [(*old, "up")], LOG), KEY),
        "to_upsert: 2 rows are left of": changelog.to_upsert(frame(spark, [(*old, "+I"), (*new, "+I")], LOG), KEY),
        "apply: 2 rows are left of": changelog.apply(table.union(table), frame(spark, [], LOG), KEY),
        "to_retract: +U of": changelog.to_retract(frame(spark, [(*old, "+U")], LOG), KEY),
        "apply: -U of": changelog.apply(table.limit(0), frame(spark, [(*old, "-U"), (*new, "+U")], LOG), KEY),
        "changelog: several rows of after have": changelog.changelog(table, table.union(table), KEY),
    }
    for expected, wrong in cases.items():
        told = said(wrong.selectExpr("count(1)"))
        assert told is not None
        assert told.startswith(f"{expected} case 1, k 1 a, added 7")


def test_what_cannot_be_a_changelog_is_refused_at_once(spark: SparkSession) -> None:
    table, log = frame(spark, []), frame(spark, [], LOG)
    cases: dict[str, Callable[[], object]] = {
        "expected a column _change string, found none": lambda: changelog.to_upsert(table, KEY),
        "key 'nothing': expected columns": lambda: changelog.to_upsert(log, "nothing"),
        "key \\[\\]: expected columns": lambda: changelog.to_upsert(log, []),
        "column 'm' is map<string,int>": lambda: changelog.to_upsert(log.selectExpr("*", "map('a', 1) AS m"), KEY),
        "column 'v': expected the same type": lambda: changelog.apply(table.withColumn("v", table.case), log, KEY),
        "found none in before": lambda: changelog.changelog(table.drop("v"), table, KEY),
    }
    for expected, refused in cases.items():
        with pytest.raises(ConfigError, match=expected):
            refused()
