"""Windows by event time: what is late, what closes, and that only the records decide it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812 - as everywhere

from support.pipelines.continuous_runs import JoinedState, Row, Table, frame, key_of
from twophase import State, windows
from twophase.core.errors import ConfigError
from twophase.spark.continuous.query import CompiledQuery

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

BEGIN = datetime(2026, 1, 1)  # noqa: DTZ001 - as Spark gives it back
SCHEMA = "user string, at timestamp"
TIME = {"clicks": ("at", "10 minutes")}
TUMBLING = "select window.start s, user, count(*) n from clicks group by window(at, '10 minutes'), user"
HOPPING = "select window.end e, user, count(*) n from clicks group by window(at, '10 minutes', '5 minutes'), user"
SESSIONS = (
    "select session_window.start s, session_window.end e, user, count(*) n from clicks"
    " group by session_window(at, '5 minutes'), user"
)


def at(minutes: float) -> datetime:
    return BEGIN + timedelta(minutes=minutes)


def clicks(*told: tuple[str, float]) -> list[Row]:
    return [(user, at(minutes)) for user, minutes in told]


class Stream:
    """A windowed query that goes on."""

    def __init__(self, spark: SparkSession, text: str, **more: Any) -> None:
        self.spark, self.text, self.more = spark, text, {"event_time": TIME, "emit": "final", **more}
        self.state: JoinedState | None = None
        self.table: Table | None = None

    def take(self, rows: Sequence[Row], **others: Sequence[Row]) -> list[Row]:
        """Take one checkpoint; return what it gives out."""
        reads = {name: frame(self.spark, there, SCHEMA) for name, there in {"clicks": rows, **others}.items()}
        query = CompiledQuery(self.spark, self.text, reads, **self.more)
        assert query.state is not None
        self.state = self.state or JoinedState(self.spark, query.state)
        self.table = self.table or Table(query.mode, key_of(query))
        output, new = query.run(self.state)
        made = [tuple(row) for row in output.collect()]
        self.state.keep(new)
        self.table.apply(made)
        return made


def disordered(number: int, seed: int) -> list[Row]:
    """Return records whose times lie at most the delay behind the greatest so far."""
    chance = random.Random(seed)
    minutes = [n * 1.5 - chance.choice([0, 0, 1, 4, 9]) for n in range(number)]
    return [("ab"[n % 2] if n % 5 else None, at(max(0.0, minute))) for n, minute in enumerate(minutes)]


LAST: Row = ("z", at(600))


@pytest.mark.parametrize("text", [TUMBLING, SESSIONS], ids=["tumbling", "sessions"])
def test_the_same_records_close_the_same_windows_however_they_are_cut(spark: SparkSession, text: str) -> None:
    """In one checkpoint or in several; no record is late, so the closed windows are those of Spark over all records."""
    records = disordered(24, seed=7)
    frame(spark, records, SCHEMA).createOrReplaceTempView("clicks")
    expected = Counter(tuple(row) for row in spark.sql(text).collect())
    spark.catalog.dropTempView("clicks")

    for parts in (1, 4):
        stream = Stream(spark, text)
        size = -(-len(records) // parts)
        for begin in range(0, len(records), size):
            stream.take(records[begin : begin + size])
        stream.take([LAST])

        assert stream.table is not None
        assert stream.table.rows == expected


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("text", [TUMBLING, HOPPING, SESSIONS], ids=["tumbling", "hopping", "sessions"])
@pytest.mark.parametrize("seed", range(3))
def test_one_seven_and_fifty_checkpoints_close_the_same_windows(spark: SparkSession, text: str, seed: int) -> None:
    records = disordered(100, seed)
    tables = []
    for parts in (1, 7, 50):
        stream = Stream(spark, text)
        size = -(-len(records) // parts)
        for begin in range(0, len(records), size):
            stream.take(records[begin : begin + size])
        stream.take([LAST])
        assert stream.table is not None
        tables.append(stream.table.rows)

    assert tables[0] == tables[1] == tables[2]


def test_a_record_is_late_by_the_watermark_before_and_a_window_closes_by_the_one_after(spark: SparkSession) -> None:
    """A record that comes with the one that closes its window still counts; the next one is late, and is counted."""
    stream = Stream(spark, TUMBLING)
    first = stream.take(clicks(("a", 1), ("b", 2)))
    closing = stream.take(clicks(("a", 25), ("a", 3)))
    late = stream.take(clicks(("a", 4), ("b", 14)))
    assert stream.state is not None

    assert first == []
    assert sorted(closing) == [(at(0), "a", 2), (at(0), "b", 1)]
    assert late == []
    assert stream.state.watermarks == {"clicks": at(15).isoformat() + "+00:00", "_late": 1}
    assert (at(10), at(20), "b", 1) in stream.state.rows.values()


def test_without_input_nothing_closes(spark: SparkSession) -> None:
    stream = Stream(spark, TUMBLING)
    stream.take(clicks(("a", 1)))
    before = dict(stream.state.watermarks) if stream.state else {}

    assert stream.take([]) == []
    assert stream.state is not None
    assert stream.state.watermarks == before


def test_a_late_comer_bridges_two_sessions(spark: SparkSession) -> None:
    """Both are taken back, and one session with the rows of all takes their place."""
    stream = Stream(spark, SESSIONS, emit="updates", mode="retract")
    stream.take(clicks(("a", 1), ("a", 9), ("b", 9)))
    told = stream.take(clicks(("a", 5)))

    assert sorted(told) == [
        (at(1), at(6), "a", 1, "-D"),
        (at(1), at(14), "a", 3, "+I"),
        (at(9), at(14), "a", 1, "-D"),
    ]


def test_updates_leave_closed_windows_in_the_table_and_out_of_the_state(spark: SparkSession) -> None:
    stream = Stream(spark, TUMBLING, emit="updates")
    stream.take(clicks(("a", 1)))
    stream.take(clicks(("a", 2), ("b", 30)))
    stream.take(clicks(("a", 3)))
    assert stream.state is not None
    assert stream.table is not None

    assert stream.table.rows == {(at(0), "a", 2): 1, (at(30), "b", 1): 1}
    assert list(stream.state.rows.values()) == [(at(30), at(40), "b", 1)]


TWO = (
    "select window.start s, count(*) n from (select * from clicks union all select * from views)"
    " group by window(at, '10 minutes')"
)


def test_a_silent_read_holds_the_watermark(spark: SparkSession) -> None:
    """It is the least of all reads: nothing closes until the silent one has said how far it is."""
    stream = Stream(spark, TWO, event_time={**TIME, "views": ("at", "10 minutes")})
    silent = stream.take(clicks(("a", 1)), views=[])
    still = stream.take(clicks(("a", 90)), views=[])
    heard = stream.take([], views=clicks(("v", 21)))

    assert silent == still == []
    assert heard == [(at(0), 1)]


@pytest.mark.parametrize(
    ("text", "more", "expected"),
    [
        (TUMBLING, {"event_time": None}, "emit 'final': a window closes by the watermark"),
        (TUMBLING, {"emit": "once"}, "emit 'once': expected final or updates"),
        ("select user, count(*) n from clicks group by user", {}, "event_time: there is no window"),
        (TUMBLING, {"event_time": {"views": ("at", "1 hour")}}, "event_time of 'views': expected reads with new input"),
        (TUMBLING, {"event_time": {"clicks": ("user", "1 hour")}}, "column 'user': expected a timestamp or"),
        (
            TUMBLING,
            {"event_time": {"clicks": ("then", "1 hour")}},
            "column 'then': .*no such column; there is user, at",
        ),
    ],
)
def test_event_time_that_does_not_fit_is_refused(
    spark: SparkSession, text: str, more: Mapping[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        CompiledQuery(
            spark, text, {"clicks": frame(spark, [], SCHEMA)}, **{"event_time": TIME, "emit": "final", **more}
        )


def test_a_session_whose_rows_may_be_taken_back_is_refused(spark: SparkSession) -> None:
    with pytest.raises(ConfigError, match="session_window: a row that is taken back"):
        CompiledQuery(spark, SESSIONS, {"clicks": frame(spark, [], f"{SCHEMA}, _change string")})


# --- transforms ------------------------------------------------------------------------------------------------------

COUNTED = State(
    ["user", "window_start", "window_end"], "user string, window_start timestamp, window_end timestamp, n bigint"
)


def by_hand(clicks: DataFrame, state: JoinedState) -> tuple[DataFrame, DataFrame]:
    """Count clicks in windows of ten minutes, as a transform would."""
    rows = windows.tumbling(clicks, "at", "10 minutes")
    time = windows.event_time(state, {"clicks": (clicks, "at", "10 minutes")}, rows=rows)
    counted = time.on_time(rows).groupBy("user", "window_start", "window_end").agg(F.count("*").alias("more"))
    total = F.coalesce("n", F.lit(0)) + F.col("more")
    merged = state.lookup(counted).select("user", "window_start", "window_end", total.alias("n"))
    return time.final(state, merged)


def sessions_by_hand(clicks: DataFrame, state: JoinedState) -> tuple[DataFrame, DataFrame]:
    rows = windows.session(clicks, "at", "5 minutes").withColumn("n", F.lit(1).cast("bigint"))
    time = windows.event_time(state, {"clicks": (clicks, "at", "10 minutes")}, sessions=True)
    return time.final(state, windows.merge_sessions(state, time.on_time(rows), ["user"], {"n": "sum"}))


@pytest.mark.parametrize(
    ("transform", "text"), [(by_hand, TUMBLING), (sessions_by_hand, SESSIONS)], ids=["tumbling", "sessions"]
)
def test_a_transform_closes_the_windows_that_the_text_closes(spark: SparkSession, transform: Any, text: str) -> None:
    state, stream = JoinedState(spark, COUNTED), Stream(spark, text)
    found, expected = [], []
    for rows in (clicks(("a", 1), ("a", 9)), clicks(("a", 5), ("b", 25)), clicks(("a", 4), ("b", 60))):
        output, new = transform(frame(spark, rows, SCHEMA), state)
        found += [(row.user, row.window_start, row.n) for row in output.collect()]
        state.keep(new)
        expected += [(row[-2], row[0], row[-1]) for row in stream.take(rows)]

    assert sorted(found) == sorted(expected)
    assert len(found) == 2
    assert state.watermarks["clicks"] == (stream.state or state).watermarks["clicks"]


def test_hopping_gives_a_row_each_window_that_it_is_in(spark: SparkSession) -> None:
    found = windows.hopping(frame(spark, clicks(("a", 7)), SCHEMA), "at", "10 minutes", "5 minutes").collect()

    assert sorted((row.window_start, row.window_end) for row in found) == [(at(0), at(10)), (at(5), at(15))]


def test_a_size_that_is_none_is_refused(spark: SparkSession) -> None:
    with pytest.raises(ConfigError, match="size: 'a while': expected a number and seconds"):
        windows.tumbling(frame(spark, [], SCHEMA), "at", "a while")
