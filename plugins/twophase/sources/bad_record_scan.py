"""Find what is wrong with a record and on which line it is, which Spark does not say.

`bad_records` and the quarantine call it.

It uses the standard library alone (except for Parquet): the quarantine ships this module by value to workers that may
lack the package.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TextIO

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_OTHER_COMPRESSIONS = (".zst", ".snappy", ".lz4", ".deflate")
UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)

#: The characters that Java trims before it calls a line empty; Python would trim more.
_BLANK = "".join(map(chr, range(33)))
_LINE_ENDS = ("\n", "\r", "\r\n")

_INTEGERS = {"byte": 8, "tinyint": 8, "short": 16, "smallint": 16, "int": 32, "integer": 32, "long": 64, "bigint": 64}
_FLOATS = frozenset({"float", "real", "double"})
_NOT_A_NUMBER = frozenset({"nan", "inf", "+inf", "-inf", "infinity", "+infinity", "-infinity"})
#: Types that any text or JSON value fits.
_TEXTS = frozenset({"string", "varchar", "char"})
_CHECKED = _INTEGERS.keys() | _FLOATS | _TEXTS | {"boolean"}


class Reading(NamedTuple):
    """How a file is to be read."""

    options: Mapping[str, str]
    #: column → type, as declared; empty when Spark inferred them
    types: Mapping[str, str]
    #: Whether bad records are allowed: then only an unreadable file is a problem.
    lenient: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any], schema: str | None, *, lenient: bool = False) -> Reading:
        """Build it from Spark's options, whose names ignore letter case, and a DDL string."""
        plain = {
            name.lower(): str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in options.items()
        }
        return cls(plain, declared_types(schema or ""), lenient)

    def flag(self, name: str) -> bool:
        """Return True if an option is on."""
        return self.options.get(name.lower(), "false").lower() == "true"


class Problem(NamedTuple):
    """What is wrong with a file, and where."""

    line: int | None
    reason: str


def declared_types(schema: str) -> dict[str, str]:
    """Return the columns of a DDL string with the first word of their types, without parameters."""
    types = {}
    flat = re.sub(r"\([^()]*\)", "", schema)
    while "<" in (flatter := re.sub(r"<[^<>]*>", "", flat)) and flatter != flat:
        flat = flatter
    for column in flatter.split(","):
        if found := re.match(r"\s*(?:`(?P<quoted>[^`]+)`|(?P<name>[^\s:]+))\s*:?\s*(?P<type>\w+)", column):
            types[found["quoted"] or found["name"]] = found["type"].lower()
    return types


# --- lines -----------------------------------------------------------------------------------------------------------


def is_text(path: str, reading: Reading) -> bool:
    """Return True if Python can read the lines of a file as Spark does."""
    return not path.endswith(_OTHER_COMPRESSIONS) and reading.options.get("linesep", "\n") in _LINE_ENDS


def open_text(path: str, reading: Reading) -> TextIO:
    """Open a file, compressed or not; bytes that are invalid in its encoding are replaced, as Spark does."""
    opener = _OPENERS.get(os.path.splitext(path)[1], open)  # noqa: PTH122 - a string suffices
    encoding = reading.options.get("encoding") or reading.options.get("charset") or "utf-8"
    encoding = "utf-8-sig" if encoding.lower().replace("-", "") == "utf8" else encoding
    file: TextIO = opener(path, "rt", encoding=encoding, errors="replace", newline=reading.options.get("linesep"))
    return file


def lines(file: TextIO, reading: Reading) -> Iterator[tuple[int, str]]:
    """Yield each line that is not empty and no comment, numbered from 1."""
    comment = reading.options.get("comment", "")
    end = reading.options.get("linesep", "\n")
    for number, line in enumerate(file, 1):
        if line.strip(_BLANK) and not (comment and line.startswith(comment)):
            yield number, line.removesuffix(end)


def records(path: str, kind: str, reading: Reading) -> Iterator[tuple[int, str]]:
    """Yield the numbered records of a file of lines, without a CSV header."""
    if not is_text(path, reading):
        return
    with open_text(path, reading) as file:
        found = lines(file, reading)
        if kind == "csv" and reading.flag("header"):
            next(found, None)
        yield from found


def numbered(work: tuple[str, str, set[int] | None], kind: str, reading: Reading) -> Iterator[tuple[str, str, int]]:
    """Yield (name, text, line) of a file's records; `work` is (name, path, checksums of the wanted texts, None: all).

    A file that is gone since Spark read it yields nothing; the vote will find that it has changed.
    """
    name, path, wanted = work
    try:
        for line, text in records(path, kind, reading):
            if wanted is None or zlib.crc32(text.encode()) in wanted:
                yield name, text, line
    except UNREADABLE:
        return


# --- one record ------------------------------------------------------------------------------------------------------


def reason(raw: str, kind: str, reading: Reading) -> str:
    """Say in one line why Spark could not read a record, as far as that can be found out."""
    words = _why_json(raw, reading) if kind == "json" else _why_csv(raw, reading)
    if words is None and "\ufffd" in raw:
        words = "not a text in its encoding"
    plain = " ".join((words or "cannot be read with the declared schema").split())[:300]
    return plain.encode("utf-8", "replace").decode()  # JSON may escape half a surrogate pair, which UTF-8 cannot hold


def _why_json(raw: str, reading: Reading) -> str | None:
    try:
        problem = _bad_json(raw, None, reading) or _doubtful_json(raw, reading)
    except RecursionError:
        return "nested too deep"
    return problem.reason if problem else None


def _why_csv(raw: str, reading: Reading) -> str | None:
    row = _split(raw, _csv_form(reading))
    return _bad_row(row, list(reading.types), reading) or _doubtful_row(row, reading)


def _bad_json(text: str, number: int | None, reading: Reading) -> Problem | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Problem(number or getattr(error, "lineno", None), f"not JSON ({error})")
    for record in value if isinstance(value, list) else [value]:
        if not isinstance(record, dict):
            return Problem(number, f"expected a JSON object, found {_short(record)}")
        for name, kind in reading.types.items():
            if not _json_fits(record.get(name), kind):
                return Problem(number, f"column {name!r}: expected {kind}, found {_short(record[name])}")
    return None


def _doubtful_json(text: str, reading: Reading) -> Problem | None:
    """Name the one column of a bad record whose type is not checked here: if there is only one, it is the cause."""
    value = json.loads(text)
    found = {
        (name, kind, _short(record[name]))
        for record in (value if isinstance(value, list) else [value])
        for name, kind in reading.types.items()
        if record.get(name) is not None and kind not in _CHECKED
    }
    return Problem(None, "column {!r}: expected {}, found {}".format(*found.pop())) if len(found) == 1 else None


def _short(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)[:80]


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


def _csv_form(reading: Reading) -> dict[str, Any] | None:
    """Return how Python's CSV reader splits a line; None: it cannot split it as Spark does."""
    form = {
        "delimiter": reading.options.get("sep") or reading.options.get("delimiter") or ",",
        "quotechar": reading.options.get("quote") or '"',
    }
    return form if all(len(one) == 1 for one in form.values()) else None


def _split(line: str, form: Mapping[str, Any] | None) -> list[str] | None:
    """Return the fields of a line; None: Python's CSV reader cannot split it."""
    if form is None:
        return None
    try:
        return next(csv.reader([line.replace("\r", " ").replace("\n", " ")], **form), [])
    except (csv.Error, ValueError, TypeError):  # a field of more than 128 kB, or a separator that it refuses
        return None


def _bad_row(row: list[str] | None, columns: list[str], reading: Reading) -> str | None:
    if row is None:
        return None
    if len(row) != len(columns):
        return f"expected {len(columns)} fields, found {len(row)}"
    for name, text in zip(columns, row, strict=True):
        if _is_value(text, reading) and not _csv_fits(text.strip(), reading.types.get(name, "string")):
            return f"column {name!r}: expected {reading.types[name]}, found {text[:80]!r}"
    return None


def _doubtful_row(row: list[str] | None, reading: Reading) -> str | None:
    """Name the one column that may be the cause: spaces around a number, or a type that is not checked here."""
    found = [
        f"column {name!r}: expected {kind}, found {text[:80]!r}"
        for (name, kind), text in zip(reading.types.items(), row or (), strict=False)
        if _is_value(text, reading) and (kind not in _CHECKED or not _csv_fits(text, kind))
    ]
    return found[0] if len(found) == 1 else None


def _is_value(text: str, reading: Reading) -> bool:
    return text not in {"", reading.options.get("nullvalue", "")}


def _csv_fits(text: str, kind: str) -> bool:
    if kind in _INTEGERS:
        return re.fullmatch(r"[+-]?[0-9]{1,30}", text) is not None and _in_range(int(text), kind)
    if kind in _FLOATS:
        return text.lower() in _NOT_A_NUMBER or re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text) is not None
    return kind != "boolean" or text.lower() in {"true", "false"}


# --- one file --------------------------------------------------------------------------------------------------------


def scan_text(path: str, _reading: Reading) -> Problem | None:
    """Raise if a file cannot be read at all."""
    with open(path, "rb") as file:  # noqa: PTH123 - a string suffices
        file.read(1)
    return None


def _scan_json(path: str, reading: Reading) -> Problem | None:
    if not is_text(path, reading):
        return scan_text(path, reading)
    with open_text(path, reading) as file:
        if reading.flag("multiLine"):
            return _bad_json(file.read(), None, reading)
        for number, line in lines(file, reading):
            if not reading.lenient and (problem := _bad_json(line, number, reading)):
                return problem
    return None


def _scan_csv(path: str, reading: Reading) -> Problem | None:
    form = _csv_form(reading)
    if form is None or not is_text(path, reading):
        return scan_text(path, reading)
    columns = list(reading.types)
    header = reading.flag("header")
    with open_text(path, reading) as file:
        for number, row in _csv_rows(file, form, reading):
            if header:
                header = False
                if columns and not reading.flag("enforceSchema") and _folded(row) != _folded(columns):
                    return Problem(number, f"expected the header {','.join(columns)}, found {','.join(row)}")
                columns = columns or row
            elif not reading.lenient and (problem := _bad_row(row, columns or row, reading)):
                return Problem(number, problem)
    return None


def _folded(names: list[str]) -> list[str]:
    return [name.strip().casefold() for name in names]


def _csv_rows(file: TextIO, form: Mapping[str, Any], reading: Reading) -> Iterator[tuple[int, list[str]]]:
    if reading.flag("multiLine"):
        rows = csv.reader(file, **form)
        yield from ((rows.line_num, row) for row in rows if row)
        return
    for number, line in lines(file, reading):
        if (row := _split(line, form)) is not None:
            yield number, row


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
    "text": scan_text,
}
