"""Slots by the clock of a time zone, all the way: the timetables of Airflow, the command line, the folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.pipelines.commands import listed
from support.pipelines.factories import PreStaged, land, visible
from twophase import Pipeline, sinks, sources
from twophase.committer.record import PostgresRecord
from twophase.core.errors import ConfigError
from twophase.core.settings import data_path
from twophase.runner import Runner

BERLIN = "Europe/Berlin"
BY_DAY = "dt={start:%Y-%m-%d}"
#: Both days of 2026 on which the clock is changed, each between two others.
CHANGES = ["2026-03-28", "2026-03-29", "2026-03-30", "2026-10-24", "2026-10-25", "2026-10-26"]


@pytest.fixture(autouse=True)
def _without_spark(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twophase.runner.stager_for", lambda *_, **__: PreStaged())


def by(pattern: str = BY_DAY, name: str = "daily") -> Pipeline:
    return Pipeline(
        name,
        reads={"words": sources.Interval(f"{name}/{pattern}", "json", timezone=BERLIN)},
        transform="word_count:copy",
        writes={"lake": sinks.Files(f"lake/{name}", slot_folder=pattern, timezone=BERLIN)},
    )


def land_each(name: str, *folders: str) -> None:
    for number, folder in enumerate(folders):
        land("a.json", [{"id": number, "word": "w", "frequency": 1}], f"{name}/{folder}")


def written(table: str) -> list[tuple[str, int]]:
    """Return the folder and the number of each row."""
    folders = sorted(path for path in data_path(table).iterdir())
    return [(folder.name, row["id"]) for folder in folders for row in visible(f"{table}/{folder.name}")]


def test_a_backfill_of_days_in_a_zone_reads_and_writes_the_folder_of_each_day(record: PostgresRecord) -> None:
    """A Berlin day read and wrote the folder of the day before, where it begins in UTC."""
    land_each("daily", *(f"dt={day}" for day in CHANGES))
    runner = Runner(by(), PreStaged(), record=record)

    listed("backfill", "daily", "--from", CHANGES[0], "--to", CHANGES[2])
    listed("backfill", "daily", "--from", CHANGES[3], "--to", CHANGES[5])  # as long as the last one, of 24 hours
    listed("backfill", "daily", "--from", CHANGES[1], "--to", CHANGES[1])
    again = runner.run(f"{CHANGES[4]}/{CHANGES[5]}")

    assert written("lake/daily") == [(f"dt={day}", number) for number, day in enumerate(CHANGES)]
    assert again is not None
    assert again.slot == "2026-10-24T22:00:00+00:00/2026-10-25T23:00:00+00:00"
    with record.engine.connect() as connection:
        slots = connection.exec_driver_sql("SELECT count(*) FROM twophase.checkpoint").scalar()
    assert slots == len(CHANGES)


def test_the_hour_that_comes_twice_needs_a_pattern_that_says_which(record: PostgresRecord) -> None:
    """Both would be hour 02: the second is refused and told so; with the offset each has a folder of its own."""
    hours = [f"2026-10-25T0{hour}:00Z/2026-10-25T0{hour + 1}:00Z" for hour in (0, 1)]
    land_each("hourly", "h=02")
    runner = Runner(by("h={start:%H}", "hourly"), PreStaged(), record=record)
    runner.run(hours[0])
    with pytest.raises(ConfigError, match=r"comes to h=02, which checkpoint hourly/1 .*in a zone with summer time by"):
        runner.run(hours[1])

    land_each("offset", "h=02+0200", "h=02+0100")
    told_apart = Runner(by("h={start:%H%z}", "offset"), PreStaged(), record=record)
    for slot in hours:
        told_apart.run(slot)

    assert written("lake/hourly") == [("h=02", 0)]
    assert written("lake/offset") == [("h=02+0100", 1), ("h=02+0200", 0)]


TIMETABLES = """
import json
from types import SimpleNamespace
import pendulum
from airflow.sdk import CronDataIntervalTimetable as Declared
from airflow.timetables.base import TimeRestriction
from airflow.timetables.interval import CronDataIntervalTimetable
from airflow.timetables.trigger import CronPartitionTimetable
from twophase import Pipeline, sinks, sources
from twophase.airflow import TwophaseDag
from twophase.airflow.task_context import slot_of
from twophase.core.slots import Slot

zone = "Europe/Berlin"
pattern = "dt={start:%Y-%m-%d}"
pipeline = Pipeline(
    "daily",
    reads={"words": sources.Interval(f"landing/{pattern}", "json", timezone=zone)},
    transform="word_count:copy",
    writes={"lake": sinks.Files("lake/daily", slot_folder=pattern, timezone=zone)},
)
scheduled = TwophaseDag(pipeline, schedule="@daily").timetable
assert isinstance(scheduled, Declared) and str(scheduled.timezone) == zone, vars(scheduled)

def slot(**context):
    ti = SimpleNamespace(dag_id="daily", run_id="run")
    text = slot_of({"params": {}, "ti": ti, **context}, pipeline)
    return [text, pipeline.reads["words"].claim(text).place, pipeline.writes["lake"].claim(text).place]

intervals, keys = [], []
by_interval = CronDataIntervalTimetable("0 0 * * *", timezone=zone)
by_key = CronPartitionTimetable("0 0 * * *", timezone=zone)
for first, last in (("2026-03-28", "2026-03-30"), ("2026-10-24", "2026-10-26")):
    first, last = (pendulum.parse(day, tz=zone) for day in (first, last))
    given, asked = None, TimeRestriction(earliest=first, latest=last, catchup=True)
    while info := by_interval.next_dagrun_info(last_automated_data_interval=given, restriction=asked):
        given = info.data_interval
        intervals.append(slot(data_interval_start=given.start, data_interval_end=given.end))
    for info in by_key.iter_partition_dagrun_infos(earliest=first, latest=last):
        keys.append(slot(partition_key=info.partition_key))
print(json.dumps({"intervals": intervals, "keys": keys}))
"""


def test_the_timetables_of_airflow_lead_to_the_folders_of_their_days(tmp_path: Path) -> None:
    """Data intervals and partition keys in a zone, over both days on which its clock is changed."""
    env = {**os.environ, "AIRFLOW_HOME": str(tmp_path), "AIRFLOW__CORE__LOAD_EXAMPLES": "false"}
    done = subprocess.run(
        [sys.executable, "-c", TIMETABLES], env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])

    expected = [f"dt={day}" for day in CHANGES]
    assert [row[1:] for row in found["intervals"]] == [[day, day] for day in expected]
    assert [row[1:] for row in found["keys"]] == [[day, day] for day in expected]
    assert [row[0] for row in found["keys"]] == [f"{day}T00:00:00" for day in CHANGES]
    assert len({row[0] for row in found["intervals"]}) == len(CHANGES)
