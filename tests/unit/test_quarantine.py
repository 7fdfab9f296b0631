"""What a quarantine may be declared with, and how the lines and reasons of bad records are found. No Spark."""

from __future__ import annotations

import bz2
import gzip
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twophase.core.errors import ConfigError
from twophase.sources import Files, bad_record_scan
from twophase.sources.bad_record_scan import Reading
from twophase.sources.base import Source
from twophase.sources.quarantine import Quarantine, _by_value

CSV = {"header": "true", "enforceSchema": "false"}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))


def source(**arguments: Any) -> Files:
    return Files("landing/words", **{"format": "json", "schema": "n int", "on_bad_record": "quarantine", **arguments})


# --- declared ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [{}, {"bad_record_limit": 0.05, "quarantine_path": "aside"}, {"bad_record_limit": 0}]
)
def test_the_declaration_builds_an_equal_source(arguments: dict[str, Any]) -> None:
    files = source(**arguments)

    again = Source.load(json.loads(json.dumps(files.declaration())))

    assert again.config() == files.config()
    assert again.quarantine().declaration() == files.quarantine().declaration()  # type: ignore[union-attr]


def test_a_source_without_a_quarantine_has_none() -> None:
    assert Files("landing/words", format="json").quarantine() is None


@pytest.mark.parametrize(
    ("arguments", "place"), [({}, "landing/words.quarantine"), ({"quarantine_path": "aside/words"}, "aside/words")]
)
def test_the_table_lies_beside_the_landing_folder_unless_declared_otherwise(
    tmp_path: Path, arguments: dict[str, Any], place: str
) -> None:
    sink = source(**arguments).quarantine()

    assert sink is not None
    assert sink.location() == str(tmp_path / "data" / place)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"on_bad_record": "drop"}, "on_bad_record 'drop': expected one of fail, quarantine"),
        (
            {"on_bad_record": "fail", "bad_record_limit": 3},
            "bad_record_limit is of use with on_bad_record='quar",
        ),
        (
            {"on_bad_record": "fail", "quarantine_path": "x"},
            "quarantine_path is of use with on_bad_record='quar",
        ),
        ({"format": "parquet"}, "format 'parquet' has no bad records, only bad files; expected json or csv"),
        ({"format": "text"}, "format 'text' has no bad records"),
        ({"schema": None}, "without a schema Spark would fit the types to the bad records; declare schema="),
        ({"options": {"multiline": True}}, "with multiLine a record has no line to go by"),
        ({"options": {"Mode": "DROPMALFORMED"}}, "option 'mode' cannot be set"),
        ({"options": {"columnNameOfCorruptRecord": "x"}}, "option 'columnnameofcorruptrecord' cannot be set"),
        ({"bad_record_limit": -1}, "bad_record_limit -1: expected a whole number, or a share above 0 and below 1"),
        ({"bad_record_limit": 1.0}, "bad_record_limit 1.0: expected"),
        ({"bad_record_limit": 0.0}, "bad_record_limit 0.0: expected"),
        ({"bad_record_limit": True}, "bad_record_limit True: expected"),
        ({"bad_record_limit": "5%"}, "bad_record_limit '5%': expected"),
    ],
)
def test_a_declaration_under_which_records_cannot_be_told_apart_is_refused(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"files source landing/words: .*{words}"):
        source(**arguments)


@pytest.mark.parametrize(
    ("limit", "bad", "records", "exceeded"),
    [
        (None, 10, 10, False),
        (0, 0, 10, False),
        (0, 1, 10, True),
        (3, 3, 10, False),
        (3, 4, 10, True),
        (0.1, 1, 10, False),
        (0.1, 2, 10, True),
        (0.5, 1, 1, True),
    ],
)
def test_the_limit_is_a_number_or_a_share(limit: float | None, bad: int, records: int, exceeded: bool) -> None:
    assert Quarantine("quarantine", limit).exceeded(bad, records) == exceeded


# --- lines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "content", "expected"),
    [
        ("json", {}, "a\n\n  \nb", [(1, "a"), (4, "b")]),
        ("json", {}, "a\r\nb\rc\n", [(1, "a"), (2, "b"), (3, "c")]),
        ("json", {}, "\ufeffa\nb\n", [(1, "a"), (2, "b")]),
        ("json", {"lineSep": "\n"}, "a\rb\nc", [(1, "a\rb"), (2, "c")]),
        ("json", {"lineSep": "|"}, "a|b", []),
        ("csv", CSV, "\nh\n\na\nh\n", [(4, "a"), (5, "h")]),
        ("csv", {"header": "false"}, "h\na\n", [(1, "h"), (2, "a")]),
        ("csv", CSV | {"comment": "#"}, "#x\nh\n#y\na\n", [(4, "a")]),
        ("csv", CSV | {"encoding": "latin-1"}, "h\n\u00fc\n".encode("latin-1"), [(2, "\u00fc")]),
        ("csv", CSV, "h\n\u2028\n\x01\n", [(2, "\u2028")]),
    ],
)
def test_records_have_the_lines_that_spark_counts(
    tmp_path: Path, kind: str, options: dict[str, str], content: str | bytes, expected: list[tuple[int, str]]
) -> None:
    """Blank lines and comments are no records, a header is none, and a file may begin with a byte order mark."""
    file = tmp_path / "a"
    file.write_bytes(content.encode() if isinstance(content, str) else content)

    assert list(bad_record_scan.records(str(file), kind, Reading.of(options, "n int"))) == expected


@pytest.mark.parametrize("suffix", [".gz", ".bz2"])
def test_compressed_files_have_lines_too(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"a.json{suffix}"
    file.write_bytes({".gz": gzip.compress(b"a\nb\n"), ".bz2": bz2.compress(b"a\nb\n")}[suffix])

    assert list(bad_record_scan.records(str(file), "json", Reading.of({}, None))) == [(1, "a"), (2, "b")]


def test_a_file_that_python_cannot_open_has_no_lines(tmp_path: Path) -> None:
    assert list(bad_record_scan.numbered(("a", str(tmp_path / "a.json.zst"), None), "json", Reading.of({}, None))) == []
    assert list(bad_record_scan.numbered(("a", str(tmp_path / "gone.json"), None), "json", Reading.of({}, None))) == []


# --- reasons ----------------------------------------------------------------------------------------------------------

SCHEMA = "n int, w string, d date, s struct<x: int>"
GENERIC = "cannot be read with the declared schema"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ('{"n": 1', "not JSON (Expecting"),
        ("17", "expected a JSON object, found 17"),
        ('{"n": "ü"}', "column 'n': expected int, found \"ü\""),
        ('{"n": 1, "d": "someday"}', "column 'd': expected date, found \"someday\""),
        ('[{"n": 1}, {"s": 5}]', "column 's': expected struct, found 5"),
        ('{"d": "2026-11-15", "s": {"x": "y"}}', GENERIC),
        ('{"n": 1, "w": "\ufffd"}', "not a text in its encoding"),
        ('{"n": 1}', GENERIC),
        ("[" * 100_000, "not JSON ("),
        ("[" * 900 + "]" * 900, "expected a JSON object, found [["),
    ],
)
def test_a_bad_json_record_has_a_reason(raw: str, words: str) -> None:
    assert bad_record_scan.reason(raw, "json", Reading.of({}, SCHEMA)).startswith(words)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("1,a", "expected 3 fields, found 2"),
        ("x,a,", "column 'n': expected int, found 'x'"),
        (" 1,a,", "column 'n': expected int, found ' 1'"),
        ("1,a,someday", "column 'd': expected date, found 'someday'"),
        ("NULL,a,someday", "column 'd': expected date, found 'someday'"),
        ("1,a,", GENERIC),
        ("1,\ufffd,", "not a text in its encoding"),
        ("1,a," + "x" * 200_000, GENERIC),
    ],
)
def test_a_bad_csv_record_has_a_reason(raw: str, words: str) -> None:
    reading = Reading.of(CSV | {"nullValue": "NULL"}, "n int, w string, d date")

    assert bad_record_scan.reason(raw, "csv", reading) == words


def test_a_separator_that_python_cannot_read_leaves_the_reason_open() -> None:
    assert bad_record_scan.reason("a||b", "csv", Reading.of({"sep": "||"}, "n int")) == GENERIC


@given(raw=st.text(max_size=40) | st.text('{}[]:,"\\\\nud8001.e-tfals', max_size=40))
def test_any_text_has_a_reason_that_is_one_line_of_utf8(raw: str) -> None:
    """A reason that could not be found or written would fail the attempt for the sake of one bad record."""
    for kind, options in (("json", {}), ("csv", CSV), ("csv", CSV | {"sep": "\t", "quote": "'"})):
        words = bad_record_scan.reason(raw, kind, Reading.of(options, SCHEMA))

        assert words
        assert words.encode().decode().splitlines() == [words]


def test_half_a_character_in_json_does_not_get_into_the_reason() -> None:
    raw = '{"n": "' + chr(92) + 'ud800"}'

    assert bad_record_scan.reason(raw, "json", Reading.of({}, SCHEMA)) == "column 'n': expected int, found \"?\""


# --- shipped ----------------------------------------------------------------------------------------------------------


def test_the_workers_need_not_have_the_package(tmp_path: Path) -> None:
    """On a cluster only pyspark is there: the functions travel with all that they need."""
    import pyspark
    from pyspark.cloudpickle.cloudpickle import dumps

    file = tmp_path / "a.json"
    file.write_text('{"n": 1}\n{"n": "x"}\n')
    reading = Reading.of({}, "n int")
    numbered = partial(_by_value(bad_record_scan.numbered), ("a", str(file), None), kind="json", reading=reading)
    reason = partial(_by_value(bad_record_scan.reason), '{"n": "x"}', kind="json", reading=reading)
    (tmp_path / "pickled").write_bytes(dumps((numbered, reason)))  # type: ignore[no-untyped-call]
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "cloudpickle").symlink_to(Path(pyspark.__file__).with_name("cloudpickle"))

    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", WORKER, str(tmp_path)], capture_output=True, text=True, check=False
    )

    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert found["lines"] == [["a", '{"n": 1}', 1], ["a", '{"n": "x"}', 2]]
    assert found["reason"] == "column 'n': expected int, found \"x\""
    assert found["ours"] == []


WORKER = """
import json, pathlib, sys
sys.path.append(sys.argv[1])
from pyspark.cloudpickle import cloudpickle
numbered, reason = cloudpickle.loads(pathlib.Path(sys.argv[1], "pickled").read_bytes())
found = {"lines": list(numbered()), "reason": reason()}
print(json.dumps({**found, "ours": [name for name in sys.modules if name.startswith("twophase")]}))
"""
