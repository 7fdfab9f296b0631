"""Find the record that made Spark fail; sources call it from `explain`.

Spark names the file at best. A person wants the line and the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from urllib.parse import unquote

from twophase.core.errors import BadRecord, InputChanged, SinkUnavailable
from twophase.sources.bad_record_scan import SCANNERS, UNREADABLE, Problem, Reading, scan_text
from twophase.storage.arrow_files import UNREAD

_ABOUT_INPUT = re.compile(
    "FAILED_READ_FILE|Encountered error while reading file|MALFORMED_RECORD_IN_PARSING|Malformed records are detected|"
    "MALFORMED_CSV_RECORD|CANNOT_READ_FILE_FOOTER|Could not read footer|is not a Parquet file|"
    "CSV header does not conform|Number of column in CSV header|UNABLE_TO_INFER_SCHEMA|PATH_NOT_FOUND|"
    r"Permission denied|org\.apache\.hadoop\.io\.compress"
)


def text_of(error: BaseException) -> str:
    """Return all texts of an error from Spark: its message, the Java stack, and its causes."""
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(parts) < 20:  # noqa: PLR2004 - a chain of causes, not a loop of them
        parts += [str(cause), str(getattr(cause, "_stackTrace", None) or "")]
        cause = cause.__cause__
    return "\n".join(parts)


def is_about_input(text: str) -> bool:
    """Return True if an error may come from an input file that cannot be read."""
    return _ABOUT_INPUT.search(text) is not None


def unread(who: str, text: str, check: Callable[[], None], remedy: str) -> Exception | None:
    """Return the error for a file of an object store that the executors could not read; None: that was not the cause.

    `check` raises InputChanged if the input is not what it was.
    """
    found = UNREAD.search(text)
    if found is None:
        return None
    try:
        check()
    except InputChanged as changed:
        return changed
    if found[1] == "ArrowInvalid":
        return BadRecord(f"{who}: file {found[2]}; {remedy}")
    return SinkUnavailable(f"{who}: the object store failed in a task of Spark: {found[2]}; nothing was committed")


def find(files: Sequence[tuple[str, str]], kind: str, reading: Reading, text: str, remedy: str) -> BadRecord | None:
    """Look for a bad record in the files that Spark named, or in all; `files` are (shown path, path on disk)."""
    plain = text + unquote(text)
    named = [file for file in files if file[1] in plain]
    if not named and "reading file file:" in text:
        return None
    denied = set(_ABOUT_INPUT.findall(text)) == {"Permission denied"}  # perhaps of an output: blame a file only if true
    scan = scan_text if denied else SCANNERS[kind]
    for shown, path in named or files:
        if problem := _look_at(path, scan, reading):
            return _bad(shown, problem, remedy)
    if named and not denied:
        return _bad(named[0][0], Problem(None, _last_cause(text)), remedy)
    return None


def _bad(shown: str, problem: Problem, remedy: str) -> BadRecord:
    where = f", line {problem.line}" if problem.line else ""
    reason = " ".join(problem.reason.split())[:300]
    return BadRecord(f"file {shown}{where}: {reason}; {remedy}")


def _last_cause(text: str) -> str:
    causes = [line for line in text.splitlines() if line.startswith("Caused by: ")]
    return causes[-1].removeprefix("Caused by: ") if causes else text.strip().splitlines()[0]


def _look_at(path: str, scan: Callable[[str, Reading], Problem | None], reading: Reading) -> Problem | None:
    try:
        return scan(path, reading)
    except UNREADABLE as error:
        return Problem(None, f"cannot be read: {getattr(error, 'strerror', None) or error}")
