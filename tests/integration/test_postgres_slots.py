"""A table that is replaced slot by slot: a run takes the place of its slot's rows, and leaves every other row alone."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg2
import pytest

import twophase
from support.pipelines.factories import PreStaged, land, voted
from support.pipelines.factories import Row as Landed
from support.sinks.staged_rows import Rows, prestage
from twophase import Pipeline, sinks, sources
from twophase.committer.record import PostgresRecord
from twophase.core import failpoints
from twophase.core.checkpoint import Key, Output
from twophase.core.errors import BadValue, ConfigError
from twophase.core.failpoints import FailpointError
from twophase.core.manifest import Column
from twophase.core.ports import Outcome
from twophase.core.settings import data_path
from twophase.core.slots import Slot
from twophase.core.states import State
from twophase.revision_diff import diff
from twophase.runner import Runner
from twophase.spark.plan import Plan
from twophase.verification import verify

Row = tuple[Any, ...]


def day(number: int, hours: int = 24) -> str:
    start = dt.datetime(2026, 11, number, tzinfo=dt.UTC)
    return Slot.between(start, start + dt.timedelta(hours=hours)).text


def date(number: int) -> dt.date:
    return dt.date(2026, 11, number)


class Daily:
    """A table of days; each slot is one checkpoint."""

    def __init__(self, *, kind: str = "date", slot_column: str | None = "day", **more: Any) -> None:
        self.kind = kind
        self.sink = sinks.Postgres(
            "daily", conn_id="dwh", mode="replace", **{"slot_column": slot_column, "create": True, **more}
        )
        self.outputs: dict[str, Output] = {}

    def stage(self, slot: str, rows: Sequence[Row], revision: int | None = None) -> Output:
        """Stage the next revision of a slot, or a given one."""
        self.sink.prepare(slot)
        older = self.outputs.get(slot)
        number = older.key.checkpoint_id if older else len(self.outputs) + 1
        key = Key("daily", number, revision or (older.key.revision + 1 if older else 1))
        output = Output(key, 1, self.sink.place(key, 1, "t0ken", slot=slot, older=older), sink="dwh")
        schema = [Column("id", "bigint"), Column("day", self.kind)]
        found = [dict(zip(("id", "day"), row, strict=True)) for row in rows]
        manifest = prestage(self.sink, output, Rows(found, 1, schema))
        staged = self.outputs[slot] = replace(output, manifest=manifest)
        return staged

    def check(self, staged: Output) -> None:
        self.sink.check(staged)

    def promote(self, staged: Output) -> Outcome:
        return self.sink.promote(staged).outcome

    def put(self, slot: str, rows: Sequence[Row]) -> Output:
        """Stage and promote the next revision of a slot."""
        staged = self.stage(slot, rows)
        self.check(staged)
        assert self.promote(staged) is Outcome.PROMOTED
        return staged


def rows(cursor: Any, columns: str = "id, day") -> list[Row]:
    cursor.execute(f"SELECT {columns} FROM public.daily ORDER BY id")
    found: list[Row] = cursor.fetchall()
    return found


def far_away(cursor: Any) -> None:
    """Let sessions of the database begin in another time zone."""
    cursor.execute(f"ALTER DATABASE {cursor.connection.info.dbname} SET timezone TO 'Pacific/Auckland'")


# --- rows that carry their checkpoint --------------------------------------------------------------------------------


def test_a_slot_takes_the_place_of_its_own_rows_by_their_checkpoint(target: Any) -> None:
    daily = Daily(slot_column=None)
    first = daily.put(day(15), [(1, date(15)), (2, date(15))])
    other = daily.put(day(14), [(3, date(14))])

    second = daily.put(day(15), [(4, date(15))])

    assert rows(target, "id, _checkpoint") == [(3, 2), (4, 1)]
    assert daily.promote(first) is Outcome.ALREADY_PROMOTED
    assert rows(target, "id, _checkpoint") == [(3, 2), (4, 1)]
    assert [daily.sink.stands(output) for output in (first, other, second)] == [False, True, True]
    assert [list(daily.sink.verify(output)) for output in (other, second)] == [[], []]
    assert list(daily.sink.strangers([other])) == [
        "table public.daily has rows of checkpoint 1, which is not committed"
    ]
    assert first.handle["slot"] == day(15)
    with daily.sink.committed(second) as found:
        assert found.rows("SELECT id FROM committed") == [{"id": 4}]


def test_a_table_without_checkpoints_is_refused_unless_a_column_tells_slots_apart(target: Any) -> None:
    target.execute("CREATE TABLE public.daily (id bigint, day date)")

    with pytest.raises(ConfigError, match="expected a column _checkpoint bigint, found none"):
        Daily(slot_column=None).sink.prepare(day(15))
    Daily().sink.prepare(day(15))


# --- rows that a column tells apart ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "made", "inside", "outside"),
    [
        ("date", "date", [date(15)], [date(14), date(16)]),
        (
            "timestamp",
            "timestamptz",
            [dt.datetime(2026, 11, 15, tzinfo=dt.UTC), dt.datetime(2026, 11, 15, 23, 59, 59, 999999, tzinfo=dt.UTC)],
            [dt.datetime(2026, 11, 14, 23, 59, tzinfo=dt.UTC), dt.datetime(2026, 11, 16, tzinfo=dt.UTC)],
        ),
        (
            "timestamp_ntz",
            "timestamp",
            [dt.datetime(2026, 11, 15), dt.datetime(2026, 11, 15, 23, 59)],  # noqa: DTZ001 - without a zone
            [dt.datetime(2026, 11, 14, 23, 59), dt.datetime(2026, 11, 16)],  # noqa: DTZ001 - likewise
        ),
    ],
)
def test_a_run_takes_out_what_was_in_the_interval_before_twophase_and_nothing_else(
    target: Any, kind: str, made: str, inside: list[Any], outside: list[Any]
) -> None:
    target.execute(f"CREATE TABLE public.daily (id bigint, day {made})")
    far_away(target)
    for number, value in enumerate([*inside, *outside]):
        target.execute("INSERT INTO public.daily VALUES (%s, %s)", (number, value))
    daily = Daily(kind=kind, create=False)

    first = daily.put(day(15), [(100 + number, value) for number, value in enumerate(inside)])

    ours = [(100 + number,) for number in range(len(inside))]
    theirs = [(len(inside) + number,) for number in range(len(outside))]
    assert rows(target, "id") == sorted(theirs + ours)
    assert list(daily.sink.verify(first)) == []
    daily.put(day(15), [(200, inside[0])])
    assert rows(target, "id") == [*theirs, (200,)]
    target.execute("INSERT INTO public.daily VALUES (300, %s)", (inside[-1],))
    assert list(daily.sink.verify(daily.outputs[day(15)])) == [
        "table public.daily: expected 1 rows of checkpoint, found 2"
    ]
    assert list(daily.sink.strangers([])) == []


@pytest.mark.parametrize(("key", "kind", "made"), [("eu", "string", "text"), ("7", "bigint", "bigint")])
def test_a_partition_key_owns_the_rows_whose_column_equals_it(target: Any, key: str, kind: str, made: str) -> None:
    target.execute(f"CREATE TABLE public.daily (id bigint, day {made})")
    target.execute("INSERT INTO public.daily VALUES (1, %s), (2, '9'), (3, NULL)", (key,))
    daily = Daily(kind=kind)
    mine = int(key) if kind == "bigint" else key

    daily.put(key, [(4, mine)])
    again = daily.put(key, [(5, mine)])

    assert rows(target, "id") == [(2,), (3,), (5,)]
    assert list(daily.sink.verify(again)) == []
    with pytest.raises(BadValue, match=f"column 'day': expected '{key}', found 9 in 1 rows"):
        daily.stage(key, [(6, 9 if kind == "bigint" else "9")])


def test_a_key_that_is_a_day_owns_that_day_in_utc(target: Any) -> None:
    daily = Daily(kind="timestamp")
    far_away(target)
    midnight = dt.datetime(2026, 11, 15, tzinfo=dt.UTC)

    daily.put("2026-11-15", [(1, midnight)])
    daily.put("2026-11-15", [(2, midnight)])

    assert rows(target) == [(2, midnight)]
    same = daily.stage("2026-11-15T00:00", [(3, midnight)])
    with pytest.raises(ConfigError, match="slot '2026-11-15T00:00' overlaps '2026-11-15', which is in"):
        daily.check(same)


@pytest.mark.parametrize(
    ("found", "told"), [(date(16), "2026-11-16"), (date(1), "2026-11-01"), (None, "null")], ids=str
)
def test_a_row_outside_of_the_slot_is_refused_before_the_vote(target: Any, found: Any, told: str) -> None:
    daily = Daily()
    inside = "2026-11-15T00:00:00[+]00:00 or later, before 2026-11-16T00:00:00[+]00:00"

    with pytest.raises(BadValue, match=f"column 'day': expected {inside}, found {told} in 1 rows"):
        daily.stage(day(15), [(1, date(15)), (2, found)])


@pytest.mark.parametrize(
    ("slot", "made", "told"),
    [
        (day(15), "text", "is text, and the slot is '2026-11-15.*': expected a date or a timestamp for an interval"),
        (day(15, hours=1), "date", "expected midnight in UTC for a date"),
        ("eu", "date", "expected a date, a time or an interval"),
        ("2026-11-15T01:00", "date", "expected midnight in UTC for a date"),
        ("07", "bigint", "expected a key as the column spells it, '7'"),
        ("x", "bigint", "invalid input syntax for type bigint"),
        ("x", "json", "invalid input syntax for type json|operator does not exist"),
    ],
)
def test_a_column_that_cannot_tell_the_slot_is_refused_before_anything_is_recorded(
    target: Any, slot: str, made: str, told: str
) -> None:
    target.execute(f"CREATE TABLE public.daily (id bigint, day {made})")

    with pytest.raises(ConfigError, match=told):
        Daily().sink.prepare(slot)


def test_a_table_or_a_transform_without_the_column_is_refused(target: Any) -> None:
    daily = Daily(slot_column="dag")
    with pytest.raises(ConfigError, match="slot_column 'dag': there is no such column"):
        daily.stage(day(15), [(1, date(15))])
    target.execute("CREATE TABLE public.daily (id bigint, day date, _checkpoint text)")
    with pytest.raises(ConfigError, match="slot_column 'dag': there is no such column"):
        daily.sink.prepare(day(15))
    with pytest.raises(ConfigError, match="expected a column _checkpoint bigint, found text"):
        Daily().sink.prepare(day(15))


@pytest.mark.parametrize("arguments", [{}, {"mode": "upsert", "key": ["id"]}, {"mode": "retract", "key": ["id"]}])
def test_other_modes_have_no_slot_column(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"slot_column='day' with mode '.*'; only what is replaced has one"):
        sinks.Postgres("daily", conn_id="dwh", slot_column="day", **arguments)


def test_a_slot_column_needs_slots(home: Path, target: Any) -> None:
    sink = Daily().sink
    with pytest.raises(ConfigError, match="slot_column='day', but there is no slot"):
        sink.place(Key("daily", 1, 1), 1, "t0ken")
    with pytest.raises(ConfigError, match="write 'dwh' has places for slots, but no read goes by intervals"):
        Pipeline("daily", reads={"days": sources.Files("landing", "json")}, transform="m:f", writes={"dwh": sink})


def test_the_made_table_is_indexed_by_the_slot_column_and_has_no_checkpoints(target: Any) -> None:
    Daily().put(day(15), [(1, date(15))])

    target.execute("SELECT indexdef FROM pg_indexes WHERE tablename = 'daily'")
    assert [row[0].partition(" USING ")[2] for row in target.fetchall()] == ["btree (day)"]
    target.execute("SELECT to_jsonb(d) FROM public.daily d")
    assert target.fetchall() == [({"id": 1, "day": "2026-11-15"},)]


# --- repeated, late, racing, interrupted -----------------------------------------------------------------------------


def test_an_older_revision_that_comes_late_does_not_take_the_slot_back(target: Any) -> None:
    daily = Daily()
    first = daily.put(day(15), [(1, date(15))])
    second = daily.stage(day(15), [(2, date(15))])
    third = daily.put(day(15), [(3, date(15))])

    assert [daily.promote(one) for one in (second, first)] == [Outcome.FAILED, Outcome.ALREADY_PROMOTED]

    assert rows(target) == [(3, date(15))]
    assert [daily.sink.stands(one) for one in (first, second, third)] == [False, False, True]


@pytest.mark.parametrize("slot_column", [None, "day"])
@pytest.mark.parametrize("failpoint", ["promote.marked", "promote.applied"])
def test_a_promotion_that_dies_before_its_commit_leaves_the_slot_as_it_was(
    target: Any, failpoint: str, slot_column: str | None
) -> None:
    daily = Daily(slot_column=slot_column)
    daily.put(day(15), [(1, date(15))])
    staged = daily.stage(day(15), [(2, date(15))])
    failpoints.configure(f"{failpoint}=raise")
    with pytest.raises(FailpointError):
        daily.promote(staged)
    failpoints.configure("")

    assert rows(target) == [(1, date(15))]
    assert [daily.promote(staged) for _ in range(2)] == [Outcome.PROMOTED, Outcome.ALREADY_PROMOTED]
    assert rows(target) == [(2, date(15))]


@pytest.mark.parametrize("slot_column", [None, "day"])
def test_slots_that_are_promoted_at_once_are_all_there_and_each_once(target: Any, slot_column: str | None) -> None:
    daily = Daily(slot_column=slot_column)
    numbers = range(1, 9)
    staged = [daily.stage(day(number), [(number, date(number))]) for number in numbers]

    with ThreadPoolExecutor(16) as promoters:
        outcomes = list(promoters.map(daily.promote, [*staged, *staged]))
    finished = [daily.promote(one) for one in staged]

    assert outcomes.count(Outcome.PROMOTED) == 8
    assert finished == [Outcome.ALREADY_PROMOTED] * 8
    assert rows(target) == [(number, date(number)) for number in numbers]


def test_a_slot_is_promoted_while_another_one_still_applies_its_rows(target: Any) -> None:
    daily = Daily()
    daily.put(day(1), [(1, date(1))])
    slow = daily.stage(day(15), [(2, date(15))])
    session = psycopg2.connect(target.connection.dsn, password=target.connection.info.password)
    with session, session.cursor() as cursor:
        cursor.execute("DELETE FROM public.daily WHERE day = '2026-11-15'")
        cursor.execute("INSERT INTO public.daily SELECT * FROM twophase_staging.{}".format(slow.handle["staging"][1]))

        daily.put(day(16), [(3, date(16))])

        assert rows(target, "id") == [(1,), (3,)]
    session.close()


def test_a_slot_that_overlaps_another_is_refused_before_its_vote_and_by_its_promotion(target: Any) -> None:
    daily = Daily(kind="timestamp")
    noon = dt.datetime(2026, 11, 15, 12, tzinfo=dt.UTC)
    slots = [day(15, hours=hours) for hours in (13, 48)]
    early = [daily.stage(slot, [(1, noon)]) for slot in slots]
    daily.put(day(17), [(17, noon + dt.timedelta(days=2))])
    daily.put(day(15), [(2, noon)])
    told = "overlaps '2026-11-15T00:00:00[+]00:00/2026-11-16T00:00:00[+]00:00', which is in public.daily"

    for staged in early:
        with pytest.raises(ConfigError, match=told):
            daily.check(staged)
        assert daily.promote(staged) is Outcome.FAILED
    for slot in (day(14, hours=25), day(16, hours=25)):
        with pytest.raises(ConfigError, match="a row must be one slot's"):
            daily.check(daily.stage(slot, []))

    assert rows(target, "id") == [(2,), (17,)]
    daily.put(day(14), [(14, noon - dt.timedelta(days=1))])
    daily.put(day(16), [(16, noon + dt.timedelta(days=1))])
    assert rows(target, "id") == [(2,), (14,), (16,), (17,)]


def test_of_two_overlapping_slots_that_are_promoted_at_once_one_is_refused(target: Any) -> None:
    daily = Daily(kind="timestamp")
    daily.put(day(1), [(0, dt.datetime(2026, 11, 1, tzinfo=dt.UTC))])
    for number in range(5, 25, 2):
        noon = dt.datetime(2026, 11, number, 12, tzinfo=dt.UTC)
        pair = [daily.stage(day(number, hours=hours), [(number, noon)]) for hours in (24, 25)]
        for staged in pair:
            daily.check(staged)

        with ThreadPoolExecutor(2) as promoters:
            outcomes = list(promoters.map(daily.promote, pair))

        assert sorted(outcomes) == sorted([Outcome.PROMOTED, Outcome.FAILED])
        target.execute("SELECT count(*) FROM public.daily WHERE id = %s", (number,))
        assert target.fetchone() == (1,)


def test_a_discarded_revision_of_a_slot_leaves_what_stands(target: Any) -> None:
    daily = Daily()
    daily.put(day(15), [(1, date(15))])
    staged = daily.stage(day(15), [(2, date(15))])

    daily.sink.discard(staged)

    assert (daily.promote(staged), rows(target)) == (Outcome.FAILED, [(1, date(15))])
    assert list(daily.sink.attempts()) == []


# --- in a pipeline ---------------------------------------------------------------------------------------------------


def days(sink: sinks.Postgres) -> Pipeline:
    return Pipeline(
        "daily",
        reads={"days": sources.Interval("landing/dt={start:%Y-%m-%d}", "json")},
        transform="m:f",
        writes={"dwh": sink},
    )


def dated(found: list[Landed], plan: Plan) -> list[Landed]:
    start = Slot.parse(plan.slot or "").start
    assert start is not None
    return [{"id": row["id"] + 100 * plan.revision, "day": start.date()} for row in found]


def running(sink: sinks.Postgres, record: PostgresRecord) -> Runner:
    data_path("landing").mkdir(parents=True, exist_ok=True)
    for number in (14, 15):
        land("a.json", [{"id": number}], f"landing/dt=2026-11-{number}")
    return Runner(days(sink), PreStaged(1, [Column("id", "bigint"), Column("day", "date")], dated), record=record)


@pytest.mark.parametrize("slot_column", [None, "day"])
def test_slots_are_run_in_any_order_again_and_verified(
    home: Path, target: Any, record: PostgresRecord, slot_column: str | None
) -> None:
    sink = Daily(slot_column=slot_column).sink
    runner = running(sink, record)
    assert not sink.ordered
    assert Daily(slot_column=None).sink.ordered

    runner.run(day(15))
    runner.run(day(14))
    again = runner.run(day(15), reprocess=True)

    assert again is not None
    assert (again.revision, again.state) == (2, State.COMMITTED)
    assert rows(target) == [(114, date(14)), (215, date(15))]
    assert not [difference for difference in verify(record, runner.pipeline) if difference]
    target.execute("DELETE FROM public.daily WHERE id = 215")
    assert [found.difference for found in verify(record, runner.pipeline) if found] == [
        "table public.daily: expected 1 rows of checkpoint, found 0"
    ]


def test_a_slot_that_waits_holds_up_no_other_slot(home: Path, target: Any, record: PostgresRecord) -> None:
    runner = running(Daily().sink, record)
    failpoints.configure("promote.before=raise")
    with pytest.raises(FailpointError):
        runner.run(day(15))
    failpoints.configure("")
    target.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'twophase_staging' AND tablename !~ 'parts'")
    target.execute("ALTER TABLE twophase_staging.{} RENAME TO away".format(*target.fetchone()))

    done = runner.run(day(14))

    assert done is not None
    assert (done.state, rows(target)) == (State.COMMITTED, [(114, date(14))])


def test_what_a_slot_would_take_out_is_compared_before_it_is_decided(
    home: Path, target: Any, record: PostgresRecord
) -> None:
    target.execute("CREATE TABLE public.daily (id bigint, day date)")
    target.execute("INSERT INTO public.daily VALUES (1, '2026-11-15'), (2, '2026-11-15'), (3, '2026-11-16')")
    runner = running(Daily().sink, record)
    voted(runner, day(15))

    (found,) = diff(record, runner.pipeline, 1)

    assert (found.comparison.old_rows, found.comparison.new_rows) == (2, 1)
    assert (found.comparison.added, found.comparison.removed) == (1, 2)


def test_the_slot_column_stays_what_it_is_once_there_are_checkpoints(home: Path) -> None:
    before = days(Daily(slot_column=None).sink).declaration()

    assert days(Daily().sink).changes(before, pending=False) == ["write 'dwh': slot_column was None and is now 'day'"]


@pytest.mark.spark
@pytest.mark.parametrize("slot_column", [None, "day"])
def test_slots_are_read_by_the_record_where_rows_carry_their_checkpoint(
    home: Path, target: Any, record: PostgresRecord, spark: Any, slot_column: str | None
) -> None:
    target.execute("CREATE TABLE public.daily (id bigint, day date, _checkpoint bigint)")
    target.execute("INSERT INTO public.daily VALUES (1, '2026-11-01')")
    runner = running(Daily(slot_column=slot_column).sink, record)
    runner.run(day(15))
    runner.run(day(14))
    runner.run(day(15), reprocess=True)

    found = twophase.read_committed(spark, "daily", "dwh")

    assert sorted(map(tuple, found.collect())) == [(114, date(14), 2), (215, date(15), 1)]


def test_slots_whose_rows_do_not_say_whose_they_are_are_not_read_by_the_record(target: Any) -> None:
    daily = Daily()
    staged = daily.put(day(15), [(1, date(15))])

    with pytest.raises(ConfigError, match="rows do not say whose they are; read the table itself, or add a column"):
        daily.sink.check_readable([staged])
    target.execute("ALTER TABLE public.daily ADD COLUMN _checkpoint bigint")
    daily.sink.check_readable([staged])
