"""Slots by the clock of a time zone: its days have 23, 24 or 25 hours, and one hour a year comes twice."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from twophase import Pipeline, sinks, sources
from twophase.core import slots
from twophase.core.errors import ConfigError
from twophase.core.slots import Slot, between, duration, length_of, moment

BERLIN = ZoneInfo("Europe/Berlin")
BY_DAY = "dt={start:%Y-%m-%d}"


def declared(read: dict[str, Any], write: dict[str, Any]) -> Pipeline:
    return Pipeline(
        "daily",
        reads={"words": sources.Interval(f"landing/{BY_DAY}", "json", **read)},
        transform="word_count:copy",
        writes={"lake": sinks.Files("lake/daily", slot_folder=BY_DAY, **write)},
    )


def slots_of(first: str, last: str, every: str, zone: ZoneInfo = BERLIN) -> list[Slot]:
    return list(between(moment(first, "from", zone), moment(last, "to", zone), duration(every, "every")))


@pytest.mark.parametrize(
    ("first", "hours"), [("2026-03-28", [24, 23, 24]), ("2026-10-24", [24, 25, 24])], ids=["spring", "autumn"]
)
def test_days_of_a_zone_follow_each_other_where_the_clock_is_changed(first: str, hours: list[int]) -> None:
    last = f"{first[:-2]}{int(first[-2:]) + 2}"

    days = slots_of(first, last, "1d")

    lengths = [(day.end - day.start.astimezone(UTC)).total_seconds() / 3600 for day in days if day.start and day.end]
    assert lengths == hours
    assert [one.end for one in days[:-1]] == [other.start for other in days[1:]]
    assert [Slot.parse(day.text, BERLIN).format(BY_DAY) for day in days] == [
        f"dt={first[:-2]}{int(first[-2:]) + more}" for more in range(3)
    ]
    assert {length_of(Slot.parse(day.text, BERLIN)) for day in days} == {duration("1d", "every")}


def test_hours_go_by_length_also_where_one_comes_twice() -> None:
    hours = slots_of("2026-10-25T01:00", "2026-10-25T03:00", "1h")

    assert [hour.format("{start:%H}") for hour in hours] == ["01", "02", "02", "03"]
    assert [hour.format("{start:%H%z}") for hour in hours] == ["01+0200", "02+0200", "02+0100", "03+0100"]
    assert len({hour.text for hour in hours}) == len(hours)
    assert {length_of(hour) for hour in hours} == {duration("1h", "every")}


def test_a_slot_without_a_zone_is_one_of_its_pipelines() -> None:
    """A partition key as Airflow writes it, and what a person types, are what the clock shows there."""
    day = Slot.parse("2026-03-30/2026-03-31", BERLIN)
    key = Slot.parse("2026-03-30T00:00:00", ZoneInfo("America/New_York"))

    assert day.text == "2026-03-29T22:00:00+00:00/2026-03-30T22:00:00+00:00"
    assert Slot.parse(day.text, BERLIN) == day
    assert day.format(BY_DAY) == key.format(BY_DAY) == "dt=2026-03-30"
    assert key.start == datetime(2026, 3, 30, 4, tzinfo=UTC)


@pytest.mark.parametrize(
    ("zone", "begins", "day"),
    [
        ("Europe/Berlin", "2026-03-29T22:00+00:00", "2026-03-30"),
        ("America/New_York", "2026-03-30T04:00+00:00", "2026-03-30"),
        ("America/Santiago", "2026-09-06T04:00+00:00", "2026-09-06"),  # from midnight the clock goes to one
        ("America/Havana", "2026-11-01T04:00+00:00", "2026-11-01"),  # from one it goes back to midnight
        ("America/Havana", "2026-11-01T05:00+00:00", "2026-11-02"),  # the second midnight of that day begins none
    ],
)
def test_a_date_is_the_midnight_of_its_zone(zone: str, begins: str, day: str) -> None:
    assert slots.midnight(datetime.fromisoformat(begins).astimezone(ZoneInfo(zone))).isoformat() == day


@pytest.mark.parametrize("name", ["Europe", "Berlin", "", "../UTC", 3])
def test_a_zone_that_is_none_is_refused_when_it_is_declared(name: Any) -> None:
    for part in (
        lambda: sources.Interval(f"landing/{BY_DAY}", "json", timezone=name),
        lambda: sinks.Files("lake/daily", slot_folder=BY_DAY, timezone=name),
    ):
        with pytest.raises(ConfigError, match=r"timezone=.*: expected the name of a time zone that is known here"):
            part()


def test_a_zone_without_slot_folders_is_refused() -> None:
    with pytest.raises(ConfigError, match="is for slot folders"):
        sinks.Files("lake/daily", timezone="Europe/Berlin")


def test_a_zone_that_is_said_for_one_part_is_said_for_all() -> None:
    """A Berlin day that is written to the folder of a day in UTC is found by nobody."""
    berlin = {"timezone": "Europe/Berlin"}

    for read, write in ((berlin, {}), ({}, berlin)):
        with pytest.raises(ConfigError, match=r"says no timezone and .* goes by 'Europe/Berlin'; say it for both"):
            declared(read, write)

    assert str(declared(berlin, berlin).zone) == "Europe/Berlin"
    assert str(declared(berlin, {"timezone": "UTC"}).zone) == "Europe/Berlin"
    assert str(declared({}, {}).zone) == "UTC"


def test_a_zone_cannot_change_once_there_are_checkpoints() -> None:
    """The folders of its slots would be those of other days."""
    before, after = declared({}, {}), declared({"timezone": "Europe/Berlin"}, {"timezone": "Europe/Berlin"})

    assert after.changes(before.declaration(), pending=False) == [
        "read 'words': timezone was None and is now 'Europe/Berlin'",
        "write 'lake': timezone was None and is now 'Europe/Berlin'",
    ]
    assert not after.changes(Pipeline.from_declaration("daily", after.declaration()).declaration(), pending=False)
