"""What a slot reads and writes is its own: no two slots of a pipeline come to one place, whatever they are called."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from support.pipelines.factories import PreStaged, land, visible
from twophase import Pipeline, sinks, sources
from twophase.committer.record import PostgresRecord
from twophase.core.claims import Claim
from twophase.core.errors import AttemptFailed, ConfigError, IllegalTransition, ManifestMismatch
from twophase.core.settings import data_path
from twophase.core.states import State
from twophase.runner import Runner
from twophase.verification import verify

KEY = "2026-03-30"
DAY = "2026-03-30/2026-03-31"
BY_DAY = "dt={start:%Y-%m-%d}"

RunnerOf = Callable[..., Runner]


def words(path: str = f"landing/{BY_DAY}", folder: str | None = BY_DAY, name: str = "daily", **source: Any) -> Pipeline:
    """Declare a pipeline from one place per slot to another."""
    return Pipeline(
        name,
        reads={"words": sources.Interval(path, "json", **source)},
        transform="word_count:copy",
        writes={"lake": sinks.Files(f"lake/{name}", slot_folder=folder)},
    )


@pytest.fixture
def runner_of(home: Path, record: PostgresRecord) -> RunnerOf:
    for day in (29, 30, 31):
        land("a.json", [{"id": day, "word": "w", "frequency": 1}], f"landing/dt=2026-03-{day}")
    return lambda pipeline=None: Runner(pipeline or words(), PreStaged(), record=record)


def ids(table: str = "lake/daily") -> list[int]:
    return sorted(row["id"] for row in visible(table))


def checkpoints(record: PostgresRecord) -> int:
    with record.engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM twophase.checkpoint")).scalar_one())


@pytest.mark.parametrize("folder", [BY_DAY, None], ids=["slot folder", "folder per checkpoint"])
def test_two_names_of_one_day_read_it_once(runner_of: RunnerOf, record: PostgresRecord, folder: str | None) -> None:
    """A key and an interval that come to one folder would commit it twice: the second is refused, and says why."""
    runner = runner_of(words(folder=folder))
    runner.run(KEY)

    with pytest.raises(ConfigError) as refused:
        runner.run(DAY)
    again = runner.run(KEY, reprocess=True)

    assert str(refused.value) == (
        "pipeline 'daily': slot '2026-03-30T00:00:00+00:00/2026-03-31T00:00:00+00:00': its read words comes to"
        " dt=2026-03-30, which checkpoint daily/1 (slot '2026-03-30') has; run that slot with --reprocess to replace"
        " what it holds"
    )
    assert again is not None
    assert (again.checkpoint_id, again.revision) == (1, 2)
    assert ids() == [30]
    assert checkpoints(record) == 1


@pytest.mark.parametrize(("first", "second"), [(DAY, KEY), (KEY, f"{KEY}T00:00"), (KEY, DAY)])
def test_slots_that_begin_at_one_moment_are_not_called_apart(runner_of: RunnerOf, first: str, second: str) -> None:
    """No folder by times could tell them apart; the remedy is the one that helps."""
    runner = runner_of(words())
    runner.run(first)

    with pytest.raises(ConfigError, match=r"; run that slot with --reprocess to replace what it holds$"):
        runner.run(second)
    runner.run(first, reprocess=True)

    assert ids() == [30]


def test_hours_in_a_folder_per_day_are_refused_before_anything_is_recorded(
    runner_of: RunnerOf, record: PostgresRecord
) -> None:
    """The second hour would be parked for ever: its folder is the first one's."""
    hours = [f"2026-03-30T{hour:02d}:00/2026-03-30T{hour + 1:02d}:00" for hour in (0, 1)]
    for hour in (0, 1):
        land("a.json", [{"id": hour, "word": "w", "frequency": 1}], f"hours/{hour:02d}")
    runner = runner_of(words("hours/{start:%H}"))
    runner.run(hours[0])

    with pytest.raises(ConfigError, match=r"its write lake comes to dt=2026-03-30, which checkpoint daily/1 .* has"):
        runner.run(hours[1])
    told_apart = runner_of(words("hours/{start:%H}", f"{BY_DAY}/h={{start:%H}}", name="hourly"))
    for slot in hours:
        told_apart.run(slot)

    assert ids("lake/daily") == [0]
    assert ids("lake/hourly") == [0, 1]
    with pytest.raises(ConfigError, match=r"give a pipeline of another name a slot_folder that tells such slots apart"):
        runner.run(hours[1])


def test_hours_that_read_a_folder_per_day_are_told_to_read_one_per_hour(runner_of: RunnerOf) -> None:
    pipeline = words(folder=None)
    runner = runner_of(pipeline)
    runner.run("2026-03-30T00:00/2026-03-30T01:00")

    with pytest.raises(ConfigError, match=r"its read words comes to dt=2026-03-30.*; declare a path that tells such"):
        runner.run("2026-03-30T01:00/2026-03-30T02:00")
    land("a.json", [{"id": 1, "word": "w", "frequency": 1}], "landing/dt=2026-03-30T01")
    runner_of(words("landing/dt={start:%Y-%m-%dT%H}", None)).run("2026-03-30T01:00/2026-03-30T02:00")

    assert ids() == [1, 30]


def test_intervals_that_overlap_in_a_column_are_refused_and_those_that_meet_are_not(runner_of: RunnerOf) -> None:
    """[a, b) and [a, c) have rows in common; [a, b) and [b, c) have none."""
    pipeline = words("landing", None, column="ts", schema="id bigint, word string, frequency bigint, ts timestamp")
    runner = runner_of(pipeline)
    runner.run("2026-03-30/2026-03-31")

    for overlapping in ("2026-03-30/2026-04-01", "2026-03-29/2026-04-02", "2026-03-30T23:59/2026-03-31T01:00"):
        with pytest.raises(ConfigError, match=r"comes to the times from .* which checkpoint daily/1 .* has"):
            runner.run(overlapping)
    done = [runner.run(meeting) for meeting in ("2026-03-29/2026-03-30", "2026-03-31/2026-04-01")]

    assert [one.checkpoint_id for one in done if one] == [2, 3]


def test_what_an_aborted_slot_came_to_stays_its_own_until_it_is_released(runner_of: RunnerOf) -> None:
    runner = runner_of()

    def fail(*_: object) -> list[dict[str, Any]]:
        msg = "as it was told to"
        raise AttemptFailed(msg)

    runner.stager = PreStaged(change=fail)
    with pytest.raises(AttemptFailed):
        runner.run(KEY)
    runner.stager = PreStaged()

    with pytest.raises(ConfigError, match=r"run that slot, or free what it has: `twophase abort daily 1`, then"):
        runner.run(DAY)
    runner.coordinator.release(1, "it has two names")
    done = runner.run(DAY)

    assert done is not None
    assert (done.checkpoint_id, done.state) == (2, State.COMMITTED)
    assert ids() == [30]
    with pytest.raises(ConfigError, match=r"which checkpoint daily/2 .* has"):
        runner.run(KEY)


def test_slots_that_began_before_there_were_claims_have_theirs_at_the_next_begin(
    runner_of: RunnerOf, record: PostgresRecord
) -> None:
    """What was committed twice then can still be run again; nothing is committed a third time."""
    runner = runner_of(words(folder=None))
    runner.run(KEY)
    forget_claims(record)
    with record.transaction() as tx:
        tx.claim_earlier("daily", [])  # as a release that knew of no claims would go on
    runner.run(DAY)
    forget_claims(record)

    runner.run("2026-03-29/2026-03-30")

    with record.engine.connect() as connection:
        held = connection.execute(text("SELECT checkpoint_id, place, shared FROM twophase.claim ORDER BY 1")).all()
    assert [tuple(row) for row in held] == [
        (1, "dt=2026-03-30", False),
        (2, "dt=2026-03-30", True),
        (3, "dt=2026-03-29", False),
    ]
    for slot in (KEY, DAY):
        again = runner.run(slot, reprocess=True)
        assert again is not None
        assert again.revision == 2
    with pytest.raises(ConfigError, match="which checkpoint daily/1 "):
        runner.run("2026-03-30T00:00/2026-03-30T12:00")


def forget_claims(record: PostgresRecord) -> None:
    with record.engine.begin() as connection:
        connection.execute(text("DELETE FROM twophase.claim; UPDATE twophase.pipeline SET claimed = false"))


def test_the_first_slot_after_an_upgrade_is_held_to_what_is_committed(
    runner_of: RunnerOf, record: PostgresRecord
) -> None:
    runner = runner_of(words(folder=None))
    runner.run(KEY)
    forget_claims(record)

    with pytest.raises(ConfigError, match="which checkpoint daily/1 "):
        runner.run(DAY)

    assert ids() == [30]
    assert checkpoints(record) == 1


def test_of_slots_from_before_there_were_claims_the_committed_one_has_the_place(
    runner_of: RunnerOf, record: PostgresRecord
) -> None:
    """An older one that was aborted would read the same again: it is refused when it is run."""
    runner = runner_of(words(folder=None))

    def fail(*_: object) -> list[dict[str, Any]]:
        msg = "as it was told to"
        raise AttemptFailed(msg)

    runner.stager = PreStaged(change=fail)
    with pytest.raises(AttemptFailed):
        runner.run(KEY)
    runner.stager = PreStaged()
    forget_claims(record)
    with record.transaction() as tx:
        tx.claim_earlier("daily", [])  # as a release that knew of no claims would go on
    runner.run(DAY)
    forget_claims(record)

    with pytest.raises(ConfigError, match="which checkpoint daily/2 "):
        runner.run(KEY)

    assert ids() == [30]


def test_of_slots_that_begin_at_once_one_gets_the_place(runner_of: RunnerOf, record: PostgresRecord) -> None:
    slots = [KEY, DAY, "2026-03-30T00:00", "2026-03-30/2026-04-01"]
    runners = [runner_of() for _ in slots]

    def run(which: int) -> bool:
        try:
            return runners[which].run(slots[which]) is not None
        except ConfigError:
            return False

    with ThreadPoolExecutor(len(slots)) as pool:
        done = list(pool.map(run, range(len(slots))))

    assert sum(done) == 1
    assert checkpoints(record) == 1
    assert ids() == [30]


def test_the_database_itself_refuses_a_second_owner(runner_of: RunnerOf, record: PostgresRecord) -> None:
    runner = runner_of()
    runner.run(KEY)
    runner.run("2026-03-29")

    steal = "UPDATE twophase.claim SET place = 'dt=2026-03-30' WHERE checkpoint_id = 2 AND part = 'read words'"
    with pytest.raises(IllegalTransition, match="claim_one_owner"), record.transaction() as tx:
        tx.connection.execute(text(steal))


def test_a_moved_folder_is_the_same_place(runner_of: RunnerOf) -> None:
    runner_of().run(KEY)
    data_path("landing").rename(data_path("moved"))

    with pytest.raises(ConfigError, match=r"comes to dt=2026-03-30, which checkpoint daily/1 "):
        runner_of(words(f"moved/{BY_DAY}")).run(DAY)


def test_rows_that_a_column_tells_apart_are_claimed_as_times_or_by_key() -> None:
    """Two slots at once whose rows overlap were both decided; the second one's promotion was then refused for good."""
    sink = sinks.Postgres("orders", conn_id="warehouse", mode="replace", slot_column="day")

    assert sink.claim(DAY) == Claim("", datetime(2026, 3, 30, tzinfo=UTC), datetime(2026, 3, 31, tzinfo=UTC))
    assert sink.claim("berlin") == Claim("berlin")
    assert sinks.Postgres("orders", conn_id="warehouse", mode="replace").claim(DAY) is None


def test_a_folder_that_another_checkpoint_has_committed_is_not_called_nobodys(
    runner_of: RunnerOf, record: PostgresRecord
) -> None:
    """Whoever moved it away, as they were told, lost what is committed."""
    runner = runner_of()
    runner.run(KEY)
    with record.engine.begin() as connection:  # as if both had begun before there were claims
        connection.execute(text("DELETE FROM twophase.claim"))

    with pytest.raises(ManifestMismatch, match=r"found the marker \S+ of checkpoint 1; leave it there if `twophase ve"):
        runner.run(DAY)

    assert ids() == [30]
    assert not [difference for difference in verify(record, runner.pipeline) if difference]
