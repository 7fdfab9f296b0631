"""How commands print: tables and colours on a terminal, plain and untruncated text elsewhere, JSON when asked for."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from twophase.core.secret_texts import without_secrets

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.progress import Progress
    from rich.segment import Segment
    from rich.text import Text

Json = Annotated[bool, typer.Option("--json", help="Print JSON, with the record's column names.")]

#: The width if the output is no terminal: nothing is cut off.
_WIDE = 100_000

#: Headings of columns that may take several lines on a terminal.
LONG = frozenset({
    *("advice", "by sink", "command", "dag", "difference", "error", "failed", "lacking", "last failure", "parked"),
    *("promoted", "reason", "run", "slot", "waiting", "what has happened", "who", "why"),
})  # fmt: skip
#: Headings of columns that a narrow terminal leaves out; `show` has them.
_SPARE = frozenset({"dag", "run"})
_NARROW = 100

STYLES = {
    "OPEN": "blue",
    "PRECOMMITTED": "cyan",
    "COMMITTING": "yellow",
    "COMMITTED": "green",
    "SUPERSEDED": "dim",
    "ABORTING": "magenta",
    "ABORTED": "red",
}


#: Control character → a visible one. File names, values and errors may hold any text, also commands to a terminal.
_PICTURES = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
#: The same for JSON, by escapes that read back as they were.
_JSON_PICTURES = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}


def console(*, stderr: bool = False) -> Console:
    """Return a console for what is asked for, or for what is told on the way (stderr).

    Whatever is printed, only its own colours and movements reach a terminal as such.
    """
    from rich.console import Console

    class Safe(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            """Show control characters instead of sending them."""
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=segment.text.translate(_PICTURES))

    found = Safe(stderr=stderr, highlight=False, emoji=False)
    if not found.is_terminal:
        found.width = _WIDE
    return found


def say(text: str | Text) -> None:
    """Print one line of the answer, to stdout."""
    console().print(text, soft_wrap=True, markup=False)


def complain(text: str | Text, style: str = "") -> None:
    """Print one line beside the answer, to stderr."""
    console(stderr=True).print(text, soft_wrap=True, markup=False, style=style)


class Complaints(logging.Handler):
    """Prints warnings of the log, for commands that do not print progress themselves."""

    def emit(self, entry: logging.LogRecord) -> None:
        """Print one entry."""
        complain(self.format(entry))


def print_error(caught: BaseException) -> None:
    """Print an error as one line."""
    from rich.text import Text

    complain(Text.assemble(("error:", "bold red"), " ", " ".join(without_secrets(str(caught)).split())))


def print_json(value: Any) -> None:  # noqa: ANN401 - whatever is shown
    """Print JSON; times are ISO 8601, intervals seconds."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=_plain)
    sys.stdout.write(text.translate(_JSON_PICTURES) + "\n")


def _plain(value: object) -> str | float:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value)


def progress() -> Progress:
    """Show a progress bar, on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    target = console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=target,
        transient=True,
        disable=not target.is_terminal,
    )


@contextmanager
def busy(target: Console, what: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner, on a terminal; call what is yielded to change the words beside it."""
    if not target.is_terminal:
        yield lambda _: None
        return
    with target.status(f"[dim]{what} …[/]") as status:
        yield lambda text: status.update(f"[dim]{text} …[/]")


# --- tables ----------------------------------------------------------------------------------------------------------


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, right: Sequence[str] = (), title: str = ""
) -> None:
    """Print a table: `right` names the columns of numbers."""
    from rich import box
    from rich.table import Table

    target = console()
    made = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD if target.is_terminal else None,
        header_style="bold",
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        made.add_column(column, justify=justify, no_wrap=column not in LONG, overflow="fold")
    for row in rows:
        made.add_row(*map(_pictured, row))
    target.print(made)


def _pictured(text: str | Text) -> str | Text:
    """Make control characters visible: they have no width, but a cell is cut by its width."""
    if isinstance(text, str):
        return text.translate(_PICTURES)
    found = text.copy()
    found.plain = text.plain.translate(_PICTURES)
    return found


def listing(found: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, str]], *, title: str = "") -> None:
    """Print rows of the record; `columns` are (heading, name). Empty columns are left out."""
    spare = _SPARE if console().width < _NARROW else ()
    shown = [
        (heading, name)
        for heading, name in columns
        if heading not in spare and any(row[name] not in (None, "") for row in found)
    ]
    numbers = [heading for heading, name in shown if any(type(row[name]) is int for row in found)]
    table(
        [heading for heading, _ in shown],
        ([cell(name, row[name]) for _, name in shown] for row in found),
        right=numbers,
        title=title,
    )


def cell(name: str, value: Any) -> str | Text:  # noqa: ANN401 - a column of the record
    """Return a value of the record for display."""
    from rich.text import Text

    if value is None:
        return ""
    if name in {"state", "newest_state", "from_state", "to_state"}:
        return state(value)
    if name in {"bytes", "size"}:
        return size(value)
    if isinstance(value, datetime):
        return moment(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (
        Text(str(value))
        if not isinstance(value, int)
        else f"{value:,}"
        if name in {"rows", "last_rows"}
        else str(value)
    )


def state(value: str, parked: object = None) -> Text:
    """Return a state in its colour."""
    from rich.text import Text

    found = Text(str(value), style=STYLES.get(str(value), ""))
    return found.append(" parked", style="bold red") if parked else found


def size(value: int | None) -> str:
    """Return a number of bytes as people read it."""
    from rich.filesize import decimal

    return "" if value is None else decimal(value).replace("bytes", "B").replace("byte", "B")


def by_sink(row: Mapping[str, Any]) -> str | None:
    """Return what each sink got, if that says more than the totals."""
    sinks, aside = row["sinks"] or {}, row["quarantine"] or {}
    if len(sinks) == 1 and not any(one["rows"] for one in aside.values()):
        return None
    given = [f"{name}: {_figures(one)}" for name, one in sorted(sinks.items())]
    return "; ".join([*given, *(f"set aside in {name}: {_figures(one)}" for name, one in sorted(aside.items()))])


def _figures(one: Mapping[str, Any]) -> str:
    counted = {name: one[name] for name in ("rows", "files") if one[name] is not None}
    said = [f"{count:,} {name if count != 1 else name[:-1]}" for name, count in counted.items()]
    return ", ".join([*said, *([size(one["bytes"])] if one["bytes"] is not None else [])])


def moment(value: datetime | None) -> str:
    """Return a time in this machine's zone; on a terminal without what is clear from today's date."""
    if value is None:
        return ""
    local = value.astimezone()
    if not console().is_terminal:
        return f"{local:%Y-%m-%d %H:%M:%S}"
    now = datetime.now().astimezone()
    if local.date() == now.date():
        return f"{local:%H:%M:%S}"
    return f"{local:%b %d %H:%M}" if local.year == now.year else f"{local:%Y-%m-%d}"
