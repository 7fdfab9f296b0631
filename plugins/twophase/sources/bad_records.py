"""Which record made Spark fail: Spark names the file at best, a person wants the line and the reason."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO
from urllib.parse import unquote

from twophase.core.errors import BadRecord

_ABOUT_INPUT = re.compile(
    "FAILED_READ_FILE|Encountered error while reading file|MALFORMED_RECORD_IN_PARSING|Malformed records are detected|"
    "MALFORMED_CSV_RECORD|CANNOT_READ_FILE_FOOTER|Could not read footer|is not a Parquet file|"
    "CSV header does not conform|UNABLE_TO_INFER_SCHEMA|PATH_NOT_FOUND|Permission denied"
)
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_OTHER_COMPRESSIONS = (".zst", ".snappy", ".lz4", ".deflate")
_UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)

_INTEGERS = {"byte": 8, "tinyint": 8, "short": 16, "smallint": 16, "int": 32, "integer": 32, "long": 64, "bigint": 64}
_FLOATS = frozenset({"float", "real", "double"})
_NOT_A_NUMBER = frozenset({"nan", "inf", "+inf", "-inf", "infinity", "+infinity", "-infinity"})


class Reading(NamedTuple):
    """How a file is to be read."""

    options: Mapping[str, str]
    #: column → type, as declared; empty when Spark inferred them
    types: Mapping[str, str]

    def flag(self, name: str) -> bool:
        """Say whether an option is on."""
        return self.options.get(name.lower(), "false") == "true"


class Problem(NamedTuple):
    """What is wrong with a file, and where."""

    line: int | None
    reason: str


def text_of(error: BaseException) -> str:
    """Return all that an error of Spark says: its message, the Java stack, and the causes."""
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(parts) < 20:  # noqa: PLR2004 - a chain of causes, not a loop of them
        parts += [str(cause), str(getattr(cause, "_stackTrace", None) or "")]
        cause = cause.__cause__
    return "\n".join(parts)


def is_about_input(text: str) -> bool:
    """Say whether an error may come from a file that cannot be read."""
    return _ABOUT_INPUT.search(text) is not None


def find(
    files: Sequence[tuple[str, str]], kind: str, options: Mapping[str, Any], schema: str | None, text: str
) -> BadRecord | None:
    """Look through the files (as shown, as on disk), those that Spark named first; None: nothing is wrong with them."""
    plain = text + unquote(text)
    named = [file for file in files if file[1] in plain]
    if not named and "reading file file:" in text:
        return None
    reading = Reading(
        {
            name.lower(): str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in options.items()
        },
        declared_types(schema or ""),
    )
    denied = set(_ABOUT_INPUT.findall(text)) == {"Permission denied"}  # perhaps on the way out: say so only if it is so
    scan = _scan_text if denied else SCANNERS[kind]
    for shown, path in named or files:
        if problem := _look_at(path, scan, reading):
            return _bad(shown, problem)
    if named and not denied:
        return _bad(named[0][0], Problem(None, _last_cause(text)))
    return None


def _bad(shown: str, problem: Problem) -> BadRecord:
    where = f", line {problem.line}" if problem.line else ""
    reason = " ".join(problem.reason.split())[:300]
    remedy = "abort the checkpoint and `twophase release` it, then correct the file"
    return BadRecord(f"file {shown}{where}: {reason}; {remedy}")


def _last_cause(text: str) -> str:
    causes = [line for line in text.splitlines() if line.startswith("Caused by: ")]
    return causes[-1].removeprefix("Caused by: ") if causes else text.strip().splitlines()[0]


def _look_at(path: str, scan: Callable[[str, Reading], Problem | None], reading: Reading) -> Problem | None:
    try:
        return scan(path, reading)
    except _UNREADABLE as error:
        return Problem(None, f"cannot be read: {getattr(error, 'strerror', None) or error}")


def _open(path: str, reading: Reading) -> TextIO:
    opener = _OPENERS.get(os.path.splitext(path)[1], open)  # noqa: PTH122 - a string suffices
    encoding = reading.options.get("encoding") or reading.options.get("charset") or "utf-8"
    file: TextIO = opener(path, "rt", encoding=encoding, errors="replace", newline=None)
    return file


# --- one scanner per format ------------------------------------------------------------------------------------------


def _scan_text(path: str, _reading: Reading) -> Problem | None:
    with open(path, "rb") as file:  # noqa: PTH123 - a string suffices
        file.read(1)
    return None


def _scan_json(path: str, reading: Reading) -> Problem | None:
    if path.endswith(_OTHER_COMPRESSIONS):
        return _scan_text(path, reading)
    with _open(path, reading) as file:
        if reading.flag("multiLine"):
            return _bad_json(file.read(), None, reading)
        for number, line in enumerate(file, 1):
            if line.strip() and (problem := _bad_json(line, number, reading)):
                return problem
    return None


def _bad_json(text: str, number: int | None, reading: Reading) -> Problem | None:
    try:
        value = json.loads(text)
    except ValueError as error:
        return Problem(number or getattr(error, "lineno", None), f"not JSON ({error})")
    for record in value if isinstance(value, list) else [value]:
        if not isinstance(record, dict):
            return Problem(number, f"expected a JSON object, found {json.dumps(record)[:80]}")
        for name, kind in reading.types.items():
            if not _json_fits(record.get(name), kind):
                found = json.dumps(record[name])[:80]
                return Problem(number, f"column {name!r}: expected {kind}, found {found}")
    return None


def _json_fits(value: object, kind: str) -> bool:
    if value is None:
        return True
    if kind in _INTEGERS:
        return isinstance(value, int) and not isinstance(value, bool) and _in_range(value, kind)
    if kind in _FLOATS:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number or (isinstance(value, str) and value.lower() in _NOT_A_NUMBER)
    return kind != "boolean" or isinstance(value, bool)


def _in_range(value: int, kind: str) -> bool:
    bound: int = 2 ** (_INTEGERS[kind] - 1)
    return -bound <= value < bound


def _scan_csv(path: str, reading: Reading) -> Problem | None:
    if path.endswith(_OTHER_COMPRESSIONS):
        return _scan_text(path, reading)
    options = reading.options
    form: dict[str, Any] = {
        "delimiter": options.get("sep") or options.get("delimiter") or ",",
        "quotechar": options.get("quote") or '"',
    }
    if len(form["delimiter"]) != 1 or len(form["quotechar"]) != 1:
        return _scan_text(path, reading)
    columns = list(reading.types)
    with _open(path, reading) as file:
        for number, row in _csv_rows(file, form, multi_line=reading.flag("multiLine")):
            if number == 1 and reading.flag("header"):
                if columns and not reading.flag("enforceSchema") and _folded(row) != _folded(columns):
                    return Problem(1, f"expected the header {','.join(columns)}, found {','.join(row)}")
                columns = columns or row
            elif problem := _bad_row(row, columns or row, reading.types):
                return Problem(number, problem)
    return None


def _folded(names: list[str]) -> list[str]:
    return [name.strip().casefold() for name in names]


def _csv_rows(file: TextIO, form: Mapping[str, Any], *, multi_line: bool) -> Iterator[tuple[int, list[str]]]:
    if multi_line:
        rows = csv.reader(file, **form)
        yield from ((rows.line_num, row) for row in rows if row)
        return
    for number, line in enumerate(file, 1):
        if line.strip():
            yield number, next(csv.reader([line], **form))


def _bad_row(row: list[str], columns: list[str], types: Mapping[str, str]) -> str | None:
    if len(row) != len(columns):
        return f"expected {len(columns)} fields, found {len(row)}"
    for name, text in zip(columns, row, strict=True):
        if text and not _csv_fits(text.strip(), types.get(name, "string")):
            return f"column {name!r}: expected {types[name]}, found {text[:80]!r}"
    return None


def _csv_fits(text: str, kind: str) -> bool:
    if kind in _INTEGERS:
        return re.fullmatch(r"[+-]?\d+", text) is not None and _in_range(int(text), kind)
    if kind in _FLOATS:
        return text.lower() in _NOT_A_NUMBER or re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text) is not None
    return kind != "boolean" or text.lower() in {"true", "false"}


def _scan_parquet(path: str, _reading: Reading) -> Problem | None:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path):
            return None
    except pa.ArrowException as error:
        return Problem(None, f"not a whole Parquet file ({error})")


SCANNERS: dict[str, Callable[[str, Reading], Problem | None]] = {
    "json": _scan_json,
    "csv": _scan_csv,
    "parquet": _scan_parquet,
    "text": _scan_text,
}


def declared_types(schema: str) -> dict[str, str]:
    """Read the columns of a DDL string; types only as far as a text can be held against them."""
    types = {}
    flat = re.sub(r"\([^()]*\)", "", schema)
    while "<" in (flatter := re.sub(r"<[^<>]*>", "", flat)) and flatter != flat:
        flat = flatter
    for column in flatter.split(","):
        if found := re.match(r"\s*(?:`(?P<quoted>[^`]+)`|(?P<name>[^\s:]+))\s*:?\s*(?P<type>\w+)", column):
            types[found["quoted"] or found["name"]] = found["type"].lower()
    return types
