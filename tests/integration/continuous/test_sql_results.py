"""A continuous query over batches gives the rows and the types that Spark gives for the same text over all input."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from support.pipelines.continuous_runs import JoinedState, Row, at_once, frame, run
from twophase.spark.continuous.query import CompiledQuery

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

SCHEMA = "word string, part int, amount bigint, price decimal(12,3), level smallint"
CHANGES = f"{SCHEMA}, _change string"
PLACES = 5

#: Texts that only add up, so rows may be taken back as well.
ADDING = (
    "select word, sum(amount) as amount, count(*) n, count(price) p, avg(level) a, avg(price) b from words group by 1",
    (
        "select word, part % 2 odd, sum(price) filter (where amount > 0) s, sum(level) / count(amount) r from words"
        " group by word, part % 2 having count(*) > 1 and (word is null or word <> 'b')"
    ),
    (
        "with big as (select word, amount + part total from words where part is not null)"
        " select sum(total) s, count_if(total > 2) c from big"
    ),
    (
        "select upper(kind) k, part, count(amount, price) c, sum(price * 2) s from words left join kinds using (word)"
        " group by kind, part"
    ),
    "select distinct word, part from words where amount is not null",
    (
        "select letter, count(*) + 1 n from (select explode(split(word, '')) letter, part from words"
        " union all select 'x', part from words) group by letter"
    ),
    "select word, amount * 2 twice from words where part > 0",
)
#: Texts for input that only adds rows.
GROWING = (
    (
        "select word, min(amount) lo, max(price) hi, max(distinct level) - min(level) s, every(part > 0) e from words"
        " group by word having max(amount) > -2"
    ),
    "select max(word) w, min(price) filter (where part = 1) p, sum(cast(level as double)) d from words",
)

rows = st.tuples(
    st.sampled_from(["a", "b", "ab", "", None]),
    st.sampled_from([0, 1, 2, None]),
    st.sampled_from([-3, 0, 1, 4, None]),
    st.sampled_from([Decimal("-1.500"), Decimal("0.333"), Decimal("99999.999"), None]),
    st.sampled_from([-1, 0, 7, None]),
)
batches = st.lists(st.lists(rows, max_size=6), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def kinds(spark: SparkSession) -> DataFrame:
    """Return a lookup table: one word has two kinds, another none."""
    return frame(spark, [("a", "x"), ("a", "y"), ("b", "x"), (None, "z")], "word string, kind string")


def check(kinds: DataFrame, text: str, schema: str, cut: list[list[Row]], mode: str | None) -> None:
    """Compare the query over batches with Spark's own result over what is there at the end."""
    spark = kinds.sparkSession
    lookups = {"kinds": kinds} if "kinds" in text else {}
    found, types = run(spark, text, schema, cut, lookups=lookups, mode=mode)
    left: Counter[Row] = Counter()
    for row in (row for batch in cut for row in batch):
        left[row[:PLACES]] += -1 if row[-1] in {"-U", "-D"} else 1
    whole = frame(spark, list(left.elements()), SCHEMA)
    expected, expected_types = at_once(spark, text, {"words": whole, **lookups})

    assert found == expected
    assert types == expected_types


def with_changes(cut: list[list[Row]], data: Any) -> list[list[Row]]:
    """Mark rows as added, and take some of them back in their own checkpoint or in a later one."""
    made: list[list[Row]] = []
    there: list[Row] = []
    for batch in cut:
        added = [(*row, data.draw(st.sampled_from(["+I", "+U"]))) for row in batch]
        there += batch
        gone = data.draw(st.lists(st.sampled_from(range(len(there))), unique=True, max_size=4)) if there else []
        taken = [(*there[n], data.draw(st.sampled_from(["-U", "-D"]))) for n in gone]
        there = [row for n, row in enumerate(there) if n not in gone]
        made.append(added + taken)
    return made


FEW = settings(
    deadline=None,
    max_examples=1,
    phases=[Phase.explicit, Phase.generate],
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
MANY = settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
#: A null group, a group without values, one that comes again, and an empty batch.
SEVERAL: list[list[Row]] = [
    [("a", 1, 1, Decimal("0.333"), 7), (None, 1, None, None, None), ("b", 2, 4, None, -1)],
    [],
    [("a", 2, -3, Decimal("99999.999"), None), (None, None, 4, Decimal("-1.500"), 0), ("ab", 1, 1, None, 7)],
]


@pytest.mark.parametrize("text", ADDING + GROWING)
@given(cut=batches)
@example(cut=SEVERAL)
@FEW
def test_rows_and_types_equal_sparks_over_all_input(
    spark: SparkSession, kinds: DataFrame, text: str, cut: list[list[Row]]
) -> None:
    """Whatever rows come and however they are cut into checkpoints."""
    check(kinds, text, SCHEMA, cut, None)


@pytest.mark.parametrize("text", ADDING)
@given(cut=batches, data=st.data())
@FEW
def test_rows_that_are_taken_back_leave_nothing(
    spark: SparkSession, kinds: DataFrame, text: str, cut: list[list[Row]], data: Any
) -> None:
    """The result is Spark's over the rows that are left, and each change takes back a row that was there."""
    check(kinds, text, CHANGES, with_changes([SEVERAL[0], *cut], data), "retract")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", [None, "retract"])
@pytest.mark.parametrize("text", ADDING + GROWING)
@given(cut=batches)
@MANY
def test_any_rows_and_cuts_give_sparks_result(
    spark: SparkSession, kinds: DataFrame, text: str, mode: str | None, cut: list[list[Row]]
) -> None:
    check(kinds, text, SCHEMA, cut, mode)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("text", ADDING)
@given(cut=batches, data=st.data())
@MANY
def test_any_rows_taken_back_leave_nothing(
    spark: SparkSession, kinds: DataFrame, text: str, cut: list[list[Row]], data: Any
) -> None:
    check(kinds, text, CHANGES, with_changes(cut, data), "retract")


def test_a_group_whose_rows_are_all_taken_back_is_deleted_from_the_state(spark: SparkSession) -> None:
    text = "select word, sum(amount) as amount from words group by word"
    first = frame(spark, [("a", 1, "+I"), ("b", 2, "+I")], "word string, amount bigint, _change string")
    query = CompiledQuery(spark, text, {"words": first})
    assert query.state is not None
    state = JoinedState(spark, query.state)
    state.keep(query.run(state)[1])
    gone = frame(spark, [("a", 1, "-D")], "word string, amount bigint, _change string")
    output, new = CompiledQuery(spark, text, {"words": gone}).run(state)
    told = [tuple(row) for row in output.collect()]
    state.keep(new)

    assert told == [("a", 1, "-D")]
    assert state.rows == {("b",): ("b", 1, 2, 1)}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [([("a", 1, "-D")], "more rows are taken back than were added; the group is a"), ([("a", 1, "x")], "found x")],
)
def test_wrong_changes_fail_the_attempt(spark: SparkSession, rows: list[Row], expected: str) -> None:
    wrong = frame(spark, rows, "word string, amount bigint, _change string")
    query = CompiledQuery(spark, "select word, sum(amount) s from words group by word", {"words": wrong})
    assert query.state is not None

    with pytest.raises(Exception, match=expected):
        query.run(JoinedState(spark, query.state))[1].collect()


def test_a_long_decimal_loses_no_digit_in_a_merge(spark: SparkSession) -> None:
    """A sum of decimal(38,12) stays decimal(38,12), as Spark's own; `+` would drop a digit."""
    value = Decimal("0.123456789012")
    text = "select word, sum(amount) s, avg(amount) a from words group by word"
    cut: list[list[Row]] = [[("a", value)], [("a", value)], [("a", value)]]
    found, types = run(spark, text, "word string, amount decimal(38,12)", cut)
    whole = frame(spark, [row for batch in cut for row in batch], "word string, amount decimal(38,12)")

    assert (found, types) == at_once(spark, text, {"words": whole})
