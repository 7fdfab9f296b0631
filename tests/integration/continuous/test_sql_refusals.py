"""What a continuous query cannot do is refused with the expression and the reason, before anything is staged."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from support.pipelines.continuous_runs import frame
from twophase.core.errors import ConfigError
from twophase.spark.continuous.query import CompiledQuery

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

SCHEMA = "word string, amount bigint, price double, at timestamp"


def compiled(spark: SparkSession, text: str, *, mode: str | None = None, changes: bool = False) -> CompiledQuery:
    words = frame(spark, [], SCHEMA + (", _change string" if changes else ""))
    kinds = frame(spark, [], "word string, kind string")
    return CompiledQuery(spark, text, {"words": words, "other": words, "kinds": kinds}, lookups={"kinds"}, mode=mode)


def refusal(spark: SparkSession, text: str, *, mode: str | None = None, changes: bool = False) -> str:
    """Return what is said of a query that is refused, with columns by their own names."""
    with pytest.raises(ConfigError) as caught:
        compiled(spark, text, mode=mode, changes=changes)
    return str(caught.value).replace("words.", "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("select word from words order by word", "ORDER BY: a table has no order"),
        ("select word, count(*) n from words group by word order by n", "ORDER BY"),
        ("select word from words limit 3", "LIMIT: it needs all rows at once"),
        ("select word, row_number() over (partition by word order by amount) r from words", "a window function: "),
        ("select word, sum(sum(amount)) over (order by word) s from words group by word", "a window function: "),
        ("select w.word from words w join other o on w.word = o.word", "both sides are new input"),
        (
            "select k.kind from kinds k left join words w on k.word = w.word",
            "LeftOuter JOIN ON .*keeps rows of the lookup",
        ),
        ("select k.kind from words w right join kinds k on k.word = w.word", "RightOuter JOIN ON .*keeps rows"),
        ("select k.kind from words w full join kinds k on k.word = w.word", "FullOuter JOIN ON .*keeps rows"),
        ("select k.kind from kinds k left anti join words w on k.word = w.word", "LeftAnti JOIN ON .*keeps rows"),
        (
            "select max(n) m from (select word, count(*) n from words group by word)",
            "GROUP BY word: an aggregate below",
        ),
        ("select distinct word, count(*) n from words group by word", "GROUP BY word: an aggregate below"),
        ("select count(*) n from (select distinct word from words)", "DISTINCT: an aggregate below"),
        ("select word from words union select word from other union all select word from words", "DISTINCT: an agg"),
        (
            "select word, count(distinct amount) n from words group by word",
            r"count\(DISTINCT amount\): distinct values",
        ),
        ("select word, sum(distinct amount) n from words group by word", r"sum\(DISTINCT amount\): distinct values"),
        ("select percentile(amount, 0.5) p from words", r"percentile\(amount.*: it has no parts"),
        ("select word, collect_list(amount) p from words group by word", "collect_list.*: it has no parts"),
        ("select word, first(amount) p from words group by word", "first.*: it has no parts|not deterministic"),
        ("select word, try_sum(amount) p from words group by word", "try_sum.*: it has no parts"),
        ("select word, stddev(amount) p from words group by word", "stddev.*: it has no parts"),
        ("select word from words where word in (select word from kinds)", "a subquery: .*join a Lookup"),
        ("select word, (select max(kind) from kinds) k from words", "a subquery: "),
        ("select word from words where exists (select 1 from kinds k where k.word = words.word)", "a subquery: "),
        ("select word, rand() r from words", r"rand\(.*: a replay would give another value"),
        ("select word, uuid() r from words", r"uuid\(\): a replay"),
        ("select word, monotonically_increasing_id() r from words", r"monotonically_increasing_id\(\): a replay"),
        ("select word, current_timestamp() r from words", r"current_timestamp\(\): a replay would see another time"),
        ("select word, count(*) n from words where at > now() - interval 1 hour group by word", r"now\(\): a replay"),
        ("select word, current_date r from words", "current_date.*: a replay would see another time"),
        ("select word, unix_timestamp() r from words", "current_timestamp.*: a replay would see another time"),
        ("select word, count(*) n from words group by rollup(word)", "ROLLUP, CUBE or GROUPING SETS: "),
        ("select word, count(*) n from words group by cube(word)", "ROLLUP, CUBE or GROUPING SETS: "),
        ("select word from words tablesample (10 percent)", "TABLESAMPLE: |not deterministic"),
        ("select word from words intersect select word from other", "INTERSECT: "),
        ("select word from words except select word from kinds", "EXCEPT: "),
        ("select word from words union all select word from kinds", "its rows would come again with each checkpoint"),
        ("select price, count(*) n from words group by price", "GROUP BY price: it is double"),
        ("select word, count(*) n from words group by word, array(amount)", r"GROUP BY array\(amount\): it is array"),
        ("select kind from kinds", "the query: it reads no new input; expected one of other, words"),
        ("select word from nowhere", "nowhere.* cannot be found.*there is kinds, other, words"),
        ("select wrong from words", "wrong"),
        (
            "select word from words join text.`/etc/passwd` on value = word",
            "it is no read; declare it as sources.Lookup",
        ),
        ("drop table if exists words", "it is a statement, expected a query"),
        ("create table t as select word from words", "it is a statement, expected a query"),
        ("insert into words select * from other", "it is a statement, expected a query"),
        ("with w as (select word from words) insert into other select * from w", "it is a statement, expected a query"),
        ("select word, from words", "sql: select word, from words: "),
    ],
)
def test_what_cannot_go_on_is_refused_with_the_expression_and_the_reason(
    spark: SparkSession, text: str, expected: str
) -> None:
    told = refusal(spark, text)

    assert re.search(expected, told), told
    assert "\n" not in told


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("select word, min(amount) m from words group by word", r"min\(amount\): a row that is taken back"),
        ("select word, max(amount) m from words group by word", r"max\(amount\): a row that is taken back"),
        ("select word, sum(price) m from words group by word", r"sum\(price\): a double that is taken back"),
        ("select word, avg(price) m from words group by word", r"avg\(price\): a double that is taken back"),
    ],
)
def test_what_cannot_be_taken_back_is_refused_over_a_changelog(spark: SparkSession, text: str, expected: str) -> None:
    compiled(spark, text)

    assert re.search(expected, refusal(spark, text, changes=True))


COUNTED = "select word, count(*) n from words group by word"
HIDDEN = "select count(*) n from words group by word"
PLAIN = "select word from words"
ONCE = "select distinct word from words"


@pytest.mark.parametrize(
    ("text", "changes", "mode", "comes_out"),
    [
        (COUNTED, False, None, "upsert"),
        (COUNTED, True, None, "upsert"),
        (COUNTED, False, "retract", "retract"),
        (HIDDEN, False, None, "retract"),
        ("select count(*) n from words", False, None, "upsert"),
        (PLAIN, False, None, "append"),
        (PLAIN, False, "retract", "retract"),
        (PLAIN, True, None, "retract"),
        (ONCE, False, None, "append"),
        (ONCE, False, "upsert", "upsert"),
        (ONCE, True, None, "upsert"),
    ],
)
def test_a_query_says_which_mode_comes_out(
    spark: SparkSession, text: str, changes: bool, mode: str | None, comes_out: str
) -> None:
    assert compiled(spark, text, mode=mode, changes=changes).mode == comes_out


@pytest.mark.parametrize(
    ("text", "changes", "mode", "expected"),
    [
        (COUNTED, False, "append", "mode 'append': a group changes whenever rows of it come"),
        (ONCE, True, "append", "mode 'append': its input takes rows back"),
        (PLAIN, True, "append", "mode 'append': its input takes rows back"),
        (PLAIN, False, "upsert", "mode 'upsert': without an aggregate the rows have no key"),
        (HIDDEN, False, "upsert", "mode 'upsert': .*add word to the SELECT"),
        (COUNTED, False, "replace", "mode 'replace': expected append, retract, upsert"),
    ],
)
def test_a_mode_that_a_query_cannot_have_is_refused(
    spark: SparkSession, text: str, changes: bool, mode: str, expected: str
) -> None:
    assert re.search(expected, refusal(spark, text, mode=mode, changes=changes))


def test_views_of_the_session_keep_their_names_and_rows(spark: SparkSession) -> None:
    spark.sql("select 'mine' as word").createOrReplaceTempView("words")
    try:
        compiled(spark, COUNTED)

        assert spark.sql("select * from words").collect() == [("mine",)]
    finally:
        spark.catalog.dropTempView("words")
