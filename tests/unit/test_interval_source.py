"""The files of an interval: which folder is its own, what is found there, what it means if nothing is. No Spark."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from twophase.core.checkpoint import Input, InputFile
from twophase.core.errors import ConfigError, InputChanged, InputMissing, NotYet, Retryable
from twophase.sources import Interval
from twophase.sources.base import Source

DAY = "2026-11-15T00:00:00+00:00/2026-11-16T00:00:00+00:00"
DAILY = "landing/dt={start:%Y-%m-%d}/"


class Nobody:
    """A record that is never asked: no file of an interval is owned."""

    def __getattr__(self, name: str) -> Any:
        msg = f"asked for {name}"
        raise AssertionError(msg)


@pytest.fixture
def landing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    folder = tmp_path / "data" / "landing"
    folder.mkdir(parents=True)
    return folder


def put(folder: Path, path: str, content: str = "{}\n", *, mtime: int = 1) -> Path:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    os.utime(file, ns=(mtime * 10**9, mtime * 10**9))
    return file


def source(path: str = DAILY, **arguments: Any) -> Interval:
    return Interval(path, **{"format": "json", **arguments})


def fixed(interval: Interval, slot: str = DAY) -> Input:
    return interval.fix(interval.discover(slot), Nobody())


def paths(found: Input) -> list[str]:
    return [file.path for file in found.files]


# --- declared ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [DAILY, "landing", "landing/{key}/a/"])
def test_the_declaration_builds_an_equal_source(landing: Path, path: str) -> None:
    interval = source(path, column="ts", schema="ts timestamp", options={"a": "b"}, on_missing="empty")

    again = Source.load(json.loads(json.dumps(interval.declaration())))

    assert isinstance(again, Interval)
    assert again.config() == interval.config()
    assert again.path == f"{landing.parent}/{path}".rstrip("/")
    assert (again.place, again.folders()) == (str(landing), (str(landing),))


def test_it_goes_by_slots_and_each_revision_fixes_anew() -> None:
    assert (Interval.slotted, Interval.per_revision, source().settles) == (True, True, False)


@pytest.mark.parametrize(
    ("path", "arguments", "words"),
    [
        ("landing", {}, "every slot would read the same; put a field into the path"),
        ("landing/{day}", {}, r"unknown \{day\}, expected one of start, end, key"),
        ("landing/{start.year}", {}, r"unknown \{start.year\}"),
        ("landing/{start:%Y", {}, "expected for example"),
        ("landing/{key:%Y}", {}, "Invalid format specifier"),
        ("landing/{{key}}", {"column": "ts"}, "expected braces around start, end or key only"),
        ("landing/{start:{end}}", {}, "expected braces around start, end or key only"),
        ("{key}/landing", {}, "expected a folder before the first field"),
        ("/{key}", {}, "expected a folder before the first field"),
        ("landing/{key}/../..", {}, r"cannot lead out of its folder by '\.\.'"),
        ("landing/{start:%Y/../..}", {}, r"cannot lead out of its folder by '\.\.'"),
        (DAILY, {"format": "orc"}, "format 'orc': expected one of"),
        (DAILY, {"on_missing": "skip"}, "on_missing 'skip': expected one of error, wait, empty"),
        (DAILY, {"on_missing": "empty"}, "on_missing='empty': without files there is no schema to go by"),
        (
            "landing",
            {"column": "ts", "schema": "ts string"},
            "column 'ts': expected a date or a timestamp, found string",
        ),
        ("landing", {"column": "ts", "schema": "n int"}, "found none in the schema"),
        (
            "landing",
            {"column": "ts", "schema": "ts date", "on_bad_record": "quarantine"},
            "a bad record has no ts to go by",
        ),
    ],
)
def test_a_wrong_declaration_is_refused(path: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        source(path, **arguments)


def test_a_text_needs_no_schema_to_be_empty(landing: Path) -> None:
    assert fixed(source(format="text", on_missing="empty")) == Input()


def test_bad_records_go_beside_the_folder_that_all_intervals_share(landing: Path) -> None:
    sink = source(schema="n int", on_bad_record="quarantine").quarantine()

    assert sink is not None
    assert sink.location() == f"{landing}.quarantine"


# --- found and fixed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "slot", "there"),
    [
        (DAILY, DAY, "dt=2026-11-15/a.json"),
        (DAILY, "2026-11-15/2026-11-16", "dt=2026-11-15/a.json"),
        (DAILY, "2026-11-15T02:00:00+02:00/2026-11-16T02:00:00+02:00", "dt=2026-11-15/a.json"),
        ("landing/{start:%Y/%m/%d}", DAY, "2026/11/15/a.json"),
        ("landing/{end:%Y%m%d}/x", DAY, "20261116/x/a.json"),
        ("landing/{key}/", "berlin", "berlin/a.json"),
        ("landing/p-{key}", "2026-11-15", "p-2026-11-15/a.json"),
        ("landing/{start:%j}-{key}/", "2026-11-15", "319-2026-11-15/a.json"),
        ("landing/{key}", "2026:11", "2026:11/below/a.json"),
        ("landing/{start:%Y-%m-%d}.json", DAY, "2026-11-15.json"),
    ],
)
def test_a_slot_reads_what_is_below_its_own_folder(landing: Path, path: str, slot: str, there: str) -> None:
    """Paths are relative to the folder that all slots share."""
    put(landing, there, "12345", mtime=7)
    put(landing, "another/a.json")
    put(landing, "a.json")

    assert fixed(source(path), slot).files == (InputFile(there, 5, 7 * 10**9),)


def test_by_column_alone_every_slot_takes_all_files(landing: Path) -> None:
    put(landing, "b.json", mtime=1)
    put(landing, "a.json", mtime=2)

    assert paths(fixed(source("landing", column="ts"))) == ["a.json", "b.json"]


def test_unfinished_files_are_not_found(landing: Path) -> None:
    put(landing, "dt=2026-11-15/a.json")
    for hidden in ("_b.json", ".c.json", "d.tmp", "e._COPYING_", "_tmp/f.json"):
        put(landing, f"dt=2026-11-15/{hidden}")

    assert paths(fixed(source())) == ["dt=2026-11-15/a.json"]


def test_files_may_be_read_for_a_slot_again(landing: Path) -> None:
    """The list is the revision's, not the checkpoint's."""
    put(landing, "dt=2026-11-15/a.json")
    before = fixed(source())
    put(landing, "dt=2026-11-15/b.json")

    assert paths(before) == ["dt=2026-11-15/a.json"]
    assert paths(fixed(source())) == ["dt=2026-11-15/a.json", "dt=2026-11-15/b.json"]


def test_without_a_slot_nothing_is_looked_for() -> None:
    with pytest.raises(ConfigError, match="it goes by slots, found none; say which one"):
        source().discover()


@pytest.mark.parametrize(
    ("path", "slot", "words"),
    [
        ("landing/{key}", DAY, "it has no key"),
        (DAILY, "berlin", "it has no start"),
        (DAILY, "2026-11-16/2026-11-15", "the start before the end"),
    ],
)
def test_a_slot_that_does_not_fit_the_pattern_is_refused(path: str, slot: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        source(path).discover(slot)


def test_a_column_needs_an_interval() -> None:
    with pytest.raises(ConfigError, match="column 'ts' needs an interval, expected `start/end`"):
        source("landing/{key}", column="ts").discover("2026-11-15")


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("landing/{key}", ".."),
        ("landing/{key}", "."),
        ("landing/{key}", "a/../../secret"),
        ("landing/{key}", "_tmp"),
        ("landing/{key}", ".hidden"),
        ("landing/{key}", "a.tmp"),
        ("landing/{key:.2}", "..secret"),
        ("landing/{key:.1}", ".secret"),
    ],
)
def test_no_key_leads_out_of_the_folder_or_to_something_unfinished(landing: Path, path: str, key: str) -> None:
    for there in ("secret", "landing/_tmp", "landing/.hidden", "landing/a.tmp", "landing", "."):
        put(landing.parent, f"{there}/a.json")

    with pytest.raises(ConfigError):
        source(path).discover(key)


def test_a_symbolic_link_does_not_lead_out_of_the_folder(landing: Path) -> None:
    put(landing.parent, "secret/below/a.json")
    (landing / "link").symlink_to(landing.parent / "secret")

    for path in ("landing/{key}", "landing/{key}/below"):
        with pytest.raises(ConfigError, match="link is a symbolic link, which is not followed"):
            source(path).discover("link")


# --- not there --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ([], "expected finished files in .*landing/dt=2026-11-15, found no such folder"),
        (["dt=2026-11-15/_a.json"], "expected finished files in .*landing/dt=2026-11-15, found none"),
    ],
)
def test_nothing_there_is_an_error_or_worth_waiting_for_or_an_empty_interval(
    landing: Path, there: list[str], words: str
) -> None:
    for path in there:
        put(landing, path)

    with pytest.raises(InputMissing, match=f"{words}; land them, or declare on_missing"):
        source().discover(DAY)
    with pytest.raises(NotYet, match=f"{words}; run it again when they have landed"):
        source(on_missing="wait").discover(DAY)
    assert issubclass(NotYet, Retryable)
    assert fixed(source(on_missing="empty", schema="n int")) == Input()


def test_nothing_there_is_the_same_when_the_whole_folder_is_missing(landing: Path) -> None:
    landing.rmdir()
    interval = source(on_missing="wait")

    interval.prepare()

    with pytest.raises(NotYet, match="found no such folder"):
        interval.discover(DAY)
    with pytest.raises(InputMissing, match="found no such folder"):
        source("landing", column="ts").discover(DAY)


def test_a_file_in_the_folders_place_is_named(landing: Path) -> None:
    landing.rmdir()
    landing.touch()

    with pytest.raises(ConfigError, match="is a file, expected a folder"):
        source().prepare()


# --- checked and explained --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["grown", "gone"])
def test_a_changed_file_is_named_with_the_remedy(landing: Path, change: str) -> None:
    file = put(landing, "dt=2026-11-15/a.json", "123")
    found = fixed(source())
    source().check(found)
    if change == "grown":
        put(landing, "dt=2026-11-15/a.json", "1234", mtime=2)
    else:
        file.unlink()

    with pytest.raises(
        InputChanged, match=r"file dt=2026-11-15/a\.json: expected 3 bytes .*; run the interval again, which lists"
    ):
        source().check(found)


def test_a_file_that_comes_later_changes_nothing(landing: Path) -> None:
    put(landing, "dt=2026-11-15/a.json")
    found = fixed(source())
    put(landing, "dt=2026-11-15/b.json")

    source().check(found)


def test_a_bad_record_is_named_by_file_and_line_with_the_remedy(landing: Path) -> None:
    put(landing, "dt=2026-11-15/a.json", '{"n": 1}\n{"n": \n')

    found = source().explain(fixed(source()), RuntimeError("[MALFORMED_RECORD_IN_PARSING]"))

    assert "file landing/dt=2026-11-15/a.json, line 2: not JSON" in str(found)
    assert str(found).endswith("; correct the file and run the interval again")
