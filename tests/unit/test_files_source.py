"""The landing folder: what is found, taken, checked, explained and settled. No Spark."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash

from twophase.core import failpoints
from twophase.core.checkpoint import Input, InputFile, Known, Position
from twophase.core.errors import BadRecord, ConfigError, InputChanged
from twophase.sources import Files, bad_record_scan
from twophase.sources.base import Source

MALFORMED = "[MALFORMED_RECORD_IN_PARSING.WITHOUT_SUGGESTION] Malformed records are detected in record parsing"


class Owned:
    """A record in which some paths belong to earlier checkpoints."""

    def __init__(self, *paths: str) -> None:
        self.paths = set(paths)

    def new_files(self, found: Sequence[InputFile]) -> list[InputFile]:
        return [file for file in found if file.path not in self.paths]

    def remember(self, before: Known | None, after: Known) -> None:
        """Not needed here."""

    def position(self) -> Mapping[str, int]:
        return {}

    def pin(self, positions: Mapping[str, Position]) -> None:
        msg = "a landing folder has no offsets"
        raise AssertionError(msg)

    def fixed(self) -> Mapping[str, tuple[int, int]]:
        return {}

    def committed(self, *_: Any) -> Any:
        msg = "a landing folder knows of no other pipeline"
        raise AssertionError(msg)


@pytest.fixture
def landing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    folder = tmp_path / "data" / "landing"
    folder.mkdir(parents=True)
    return folder


def put(folder: Path, path: str, content: str | bytes = "{}\n", *, mtime: int = 1) -> Path:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    os.utime(file, ns=(mtime * 10**9, mtime * 10**9))
    return file


def source(**arguments: Any) -> Files:
    return Files("landing", **{"format": "json", **arguments})


def everything(files: Files) -> Input:
    return files.fix(files.discover(), Owned())


def paths(fixed: Input) -> list[str]:
    return [file.path for file in fixed.files]


# --- declared ---------------------------------------------------------------------------------------------------------


def test_the_declaration_builds_an_equal_source() -> None:
    """What the record keeps is JSON and is enough."""
    files = source(schema="a int", options={"multiLine": True}, max_files=3, max_bytes=9, after_commit="archive")

    again = Source.load(json.loads(json.dumps(files.declaration())))

    assert again.config() == files.config()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"format": "orc"}, "format 'orc': expected one of json, csv, parquet, text"),
        ({"after_commit": "move"}, "after_commit 'move': expected one of keep, archive, delete"),
        ({"max_files": 0}, "max_files 0: expected a whole number above 0"),
        ({"max_bytes": "1g"}, "max_bytes '1g': expected a whole number above 0"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        source(**arguments)


def test_a_missing_folder_is_named(landing: Path) -> None:
    landing.rmdir()

    with pytest.raises(ConfigError, match=f"no folder {landing}; create it"):
        source().prepare()
    with pytest.raises(ConfigError, match="no folder"):
        source().discover()


def test_a_file_in_the_folders_place_is_named(landing: Path) -> None:
    landing.rmdir()
    landing.touch()

    with pytest.raises(ConfigError, match="is a file, expected a folder"):
        source().prepare()


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable for root")
def test_an_unreadable_folder_is_named(landing: Path) -> None:
    put(landing, "below/a.json")
    (landing / "below").chmod(0)

    with pytest.raises(ConfigError, match=r"may not list .*below"):
        source().discover()
    (landing / "below").chmod(0o700)


# --- found and fixed --------------------------------------------------------------------------------------------------


def test_unfinished_files_and_hidden_folders_are_not_found(landing: Path) -> None:
    put(landing, "a.json")
    put(landing, "below/deep/b.json")
    for hidden in ("_c.json", ".d.json", "e.json.tmp", "f._COPYING_", "_tmp/g.json", ".h/i.json", "below/_x/j.json"):
        put(landing, hidden)

    assert sorted(file.path for file in source().discover().files) == ["a.json", "below/deep/b.json"]


def test_a_file_is_fixed_with_its_size_its_time_and_its_checksum(landing: Path) -> None:
    put(landing, "a.json", "12345", mtime=7)

    checksum = xxhash.xxh3_64_hexdigest(b"12345")
    assert everything(source()).files == (InputFile("a.json", 5, 7 * 10**9, checksum),)


def test_a_name_that_is_not_utf8_is_refused(landing: Path) -> None:
    Path(os.fsdecode(os.fsencode(landing) + b"/\xff.json")).touch()

    with pytest.raises(ConfigError, match="is not UTF-8; rename the file"):
        source().discover()


def test_a_name_that_spark_cannot_read_is_refused(landing: Path) -> None:
    put(landing, "03:00.json")
    put(landing, "[1].json")
    source().discover()
    put(landing, "[1] 03:00.json")

    with pytest.raises(ConfigError, match=r"a path with both ':' and '\['; rename the file"):
        source().discover()


def test_files_come_in_the_order_of_their_time_then_name(landing: Path) -> None:
    for name, mtime in (("c", 1), ("b", 2), ("a", 2), ("d", 1)):
        put(landing, name, mtime=mtime)

    assert paths(everything(source())) == ["c", "d", "a", "b"]


def test_owned_files_are_not_taken_again(landing: Path) -> None:
    put(landing, "a")
    put(landing, "b")

    files = source()

    assert paths(files.fix(files.discover(), Owned("a"))) == ["b"]


@pytest.mark.parametrize(
    ("limits", "taken"),
    [
        ({"max_files": 2}, ["a", "b"]),
        ({"max_bytes": 6}, ["a", "b"]),
        ({"max_bytes": 5}, ["a"]),
        ({"max_bytes": 1}, ["a"]),
        ({"max_files": 9, "max_bytes": 900}, ["a", "b", "c"]),
    ],
)
def test_limits_hold_but_the_oldest_file_is_always_taken(
    landing: Path, limits: dict[str, int], taken: list[str]
) -> None:
    """A file above max_bytes goes alone, so nothing starves."""
    for mtime, name in enumerate("abc"):
        put(landing, name, "123", mtime=mtime)

    assert paths(everything(source(**limits))) == taken


# --- checked ----------------------------------------------------------------------------------------------------------


def test_an_unchanged_input_passes(landing: Path) -> None:
    put(landing, "a")

    source().check(everything(source()))


def test_a_grown_file_is_named_with_what_was_expected_and_found(landing: Path) -> None:
    put(landing, "a", "123")
    fixed = everything(source())
    put(landing, "a", "1234", mtime=2)

    with pytest.raises(
        InputChanged,
        match=r"source landing: file a: expected 3 bytes of 1970-01-01 00:00:01\.0+ UTC, found 4 bytes",
    ):
        source().check(fixed)


def test_a_vanished_file_is_named(landing: Path) -> None:
    put(landing, "below/a")
    fixed = everything(source())
    (landing / "below/a").unlink()
    (landing / "below").rmdir()

    with pytest.raises(InputChanged, match=r"file below/a: expected .*, found nothing"):
        source().check(fixed)


# --- explained --------------------------------------------------------------------------------------------------------


def explained(files: Files, text: str = MALFORMED) -> Exception | None:
    return files.explain(everything(files), RuntimeError(text))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"a": 1}\n\n{"a": \n{"a": 3}\n', "file landing/x.json, line 3: not JSON"),
        ('{"a": 1}\n17\n', "line 2: expected a JSON object, found 17"),
        ('{"a": 1}\n{"a": "one"}\n', "line 2: column 'a': expected int, found \"one\""),
        ('{"a": 4294967296}\n', "line 1: column 'a': expected int, found 4294967296"),
    ],
)
def test_a_malformed_json_record_is_named_by_file_and_line(landing: Path, content: str, words: str) -> None:
    put(landing, "good.json", '{"a": 1}\n{"a": null}\n[{"a": 2}]\n')
    put(landing, "x.json", content)

    found = explained(source(schema="a int"))

    assert isinstance(found, BadRecord)
    assert words in str(found)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("w,n\na,1\nb\n", "line 3: expected 2 fields, found 1"),
        ("w,n\na,1\nb,x\n", "line 3: column 'n': expected int, found 'x'"),
        ("n,w\n1,a\n", "line 1: expected the header w,n, found n,w"),
    ],
)
def test_a_malformed_csv_record_is_named_by_file_and_line(landing: Path, content: str, words: str) -> None:
    put(landing, "good.csv", 'W,n\n"a,b",1\n\nc,\n')
    put(landing, "x.csv", content)

    found = explained(source(format="csv", schema="w string, n int"))

    assert isinstance(found, BadRecord)
    assert f"file landing/x.csv, {words}" in str(found)


def test_a_torn_parquet_file_is_named(landing: Path) -> None:
    put(landing, "x.parquet", b"PAR1 and no more")

    found = explained(source(format="parquet"), "java.lang.RuntimeException: x is not a Parquet file")

    assert isinstance(found, BadRecord)
    assert "file landing/x.parquet: not a whole Parquet file" in str(found)


def test_a_torn_compressed_file_is_named(landing: Path) -> None:
    put(landing, "x.json.gz", gzip.compress(b'{"a": 1}\n' * 1000)[:-20])

    found = explained(source())

    assert isinstance(found, BadRecord)
    assert "file landing/x.json.gz: cannot be read" in str(found)


def test_the_file_that_spark_names_is_blamed_with_its_words_when_no_line_is_found(landing: Path) -> None:
    put(landing, "odd [1].json", '{"day": "someday"}\n')
    put(landing, "other.json", "not json but not it either\n")
    url = f"file://{landing}/odd%20%5B1%5D.json"

    text = (
        f"[FAILED_READ_FILE.NO_HINT] Encountered error while reading file {url}.\nCaused by: DateTimeException: someday"
    )

    assert "file landing/odd [1].json: DateTimeException: someday" in str(explained(source(schema="day date"), text))


def test_another_sources_file_is_not_explained_here(landing: Path) -> None:
    put(landing, "a.json", "broken as well")

    assert explained(source(), "Encountered error while reading file file:///elsewhere/b.json.") is None


@pytest.mark.parametrize(
    "text", ["division by zero", "[USER_RAISED_EXCEPTION] no", "java.io.IOException: Permission denied"]
)
def test_an_error_that_is_not_about_input_is_not_explained(landing: Path, text: str) -> None:
    put(landing, "a.json", "broken")

    assert explained(source(), text) is None


def test_a_file_that_changed_while_spark_read_it_explains_the_error(landing: Path) -> None:
    put(landing, "a.json", "{}")
    fixed = everything(source())
    put(landing, "a.json", "{", mtime=2)

    assert isinstance(source().explain(fixed, RuntimeError(MALFORMED)), InputChanged)


def test_types_are_read_from_a_ddl_string() -> None:
    ddl = (
        "a INT, `b c` map<string,array<int>> COMMENT 'x', d: struct<e: int, f: decimal(3,2)>, g decimal(10,2), h STRING"
    )

    assert bad_record_scan.declared_types(ddl) == {
        "a": "int",
        "b c": "map",
        "d": "struct",
        "g": "decimal",
        "h": "string",
    }


# --- settled ----------------------------------------------------------------------------------------------------------


def content(folder: Path) -> dict[str, str]:
    return {file.relative_to(folder).as_posix(): file.read_text() for file in folder.rglob("*") if file.is_file()}


def test_kept_files_stay(landing: Path) -> None:
    put(landing, "a", "1")

    source().settle(17, everything(source()).files)

    assert not source().settles
    assert content(landing) == {"a": "1"}


def test_archived_files_lie_beside_the_folder_under_their_checkpoint(landing: Path) -> None:
    put(landing, "a", "1")
    put(landing, "below/b", "2")
    files = source(after_commit="archive")

    files.settle(17, everything(files).files)

    assert files.settles
    assert content(landing) == {}
    assert content(landing.parent / "landing.archive") == {
        "checkpoint=00000017/a": "1",
        "checkpoint=00000017/below/b": "2",
    }


def test_deleted_files_are_gone(landing: Path) -> None:
    put(landing, "a", "1")
    put(landing, "below/b", "2")
    files = source(after_commit="delete")

    files.settle(17, everything(files).files)

    assert content(landing.parent) == {}
    assert not (landing.parent / "landing.archive").exists()


@pytest.mark.parametrize("after_commit", ["archive", "delete"])
def test_settling_twice_changes_nothing(landing: Path, after_commit: str) -> None:
    put(landing, "a", "1")
    files = source(after_commit=after_commit)
    fixed = everything(files)
    files.settle(17, fixed.files)
    before = content(landing.parent)

    files.settle(17, fixed.files)

    assert content(landing.parent) == before


@pytest.mark.parametrize("after_commit", ["archive", "delete"])
def test_a_crash_in_the_middle_is_finished_by_the_next_call(
    landing: Path, after_commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        put(landing, name, name)
    files = source(after_commit=after_commit)
    fixed = everything(files)

    def failing(source: Path, target: Path) -> None:
        if source.name == "b":
            raise KeyboardInterrupt
        source.rename(target)

    with monkeypatch.context() as patch:
        patch.setattr("twophase.storage.disk.rename_new", failing)
        with pytest.raises(KeyboardInterrupt):
            files.settle(17, fixed.files)

    files.settle(17, fixed.files)

    archived = {f"checkpoint=00000017/{name}": name for name in "abc"} if after_commit == "archive" else {}
    assert content(landing) == {}
    assert content(landing.parent / "landing.archive") == archived


@pytest.mark.parametrize("after_commit", ["archive", "delete"])
def test_a_new_file_of_the_same_name_stays(landing: Path, after_commit: str) -> None:
    put(landing, "a", "old")
    files = source(after_commit=after_commit)
    fixed = everything(files)
    put(landing, "a", "new", mtime=2)

    files.settle(17, fixed.files)

    assert content(landing) == {"a": "new"}


@pytest.mark.parametrize("after_commit", ["archive", "delete"])
def test_a_new_file_that_comes_between_the_look_and_the_move_is_put_back(
    landing: Path, after_commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is stopped between two system calls does no harm when it wakes up."""
    from twophase.storage import disk

    put(landing, "a", "old")
    files = source(after_commit=after_commit)
    fixed = everything(files)
    rename = disk.rename_new

    def late(source: Path, target: Path) -> None:
        if source.parent == landing:
            put(landing, "a", "new", mtime=2)
        rename(source, target)

    monkeypatch.setattr("twophase.storage.disk.rename_new", late)
    files.settle(17, fixed.files)

    assert content(landing) == {"a": "new"}


def test_a_folder_that_another_process_removes_meanwhile_is_made_again(
    landing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes may settle at once; a file left behind would be read a second time."""
    from twophase.storage import disk

    put(landing, "below/a", "1")
    files = source(after_commit="delete")
    fixed = everything(files)
    rename, calls = disk.rename_new, []

    def hindered(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            target.parent.rmdir()
        rename(source, target)

    monkeypatch.setattr("twophase.storage.disk.rename_new", hindered)
    files.settle(17, fixed.files)

    assert len(calls) == 3
    assert content(landing) == {}


def test_nothing_in_the_archive_is_overwritten(landing: Path) -> None:
    put(landing, "a", "1")
    files = source(after_commit="archive")
    there = put(files.archive, "checkpoint=00000017/a", "something else")

    with pytest.raises(ConfigError, match=f"{landing}/a cannot go to {there}, which holds 14 bytes"):
        files.settle(17, everything(files).files)

    assert there.read_text() == "something else"
    assert content(landing) == {"a": "1"}


def test_the_failpoint_lies_between_the_move_and_the_return(landing: Path) -> None:
    put(landing, "a", "1")
    files = source(after_commit="archive")
    fixed = everything(files)
    failpoints.configure("settle.moved=raise")

    try:
        with pytest.raises(failpoints.FailpointError):
            files.settle(17, fixed.files)
    finally:
        failpoints.configure("")

    assert content(landing) == {}
