"""This machine: `up`, `down`, `status`, `db upgrade`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twophase.cli.output import Json, console, moment, print_json, say, table
from twophase.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from twophase.local.resolver import Committer
    from twophase.local.stack import Part


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (up, down, status):
        app.command(rich_help_panel="This machine")(command)
    db = typer.Typer(help="The record's database.", no_args_is_help=True)
    db.command(name="upgrade")(upgrade)
    app.add_typer(db, name="db", rich_help_panel="This machine")


def place(dsn: str) -> str:
    """Return where a database is, without the password and the options, where one could be too."""
    from sqlalchemy.engine import URL, make_url

    url = make_url(dsn)
    return URL.create("postgresql", url.username, None, url.host, url.port, url.database).render_as_string()


def up(
    *,
    port: Annotated[int | None, typer.Option(help="Port of Airflow on 127.0.0.1; 8080 unless said.")] = None,
    no_airflow: Annotated[bool, typer.Option("--no-airflow", help="Start PostgreSQL only.")] = False,
) -> None:
    """Start PostgreSQL, the record in it, and an Airflow under a supervisor; wait until all is healthy."""
    from twophase.cli.opening import opened
    from twophase.local import stack
    from twophase.local.resolver import resolve

    started = None if no_airflow else stack.start(port)
    with opened(may_start=True):
        committer = resolve(may_start=True)
    if no_airflow:
        needed = f"running at {place(committer.dsn)}"
        say(needed if committer.embedded else f"not needed: {_named(committer)}")
        return
    with watch(console(stderr=True)) as on_change:
        found = stack.wait(started, on_change)
    _greet(found["url"])


def _named(committer: Committer) -> str:
    return f"the committer database is {place(committer.dsn)} ({committer.origin})"


@contextmanager
def watch(target: Console) -> Iterator[Callable[[list[Part]], None]]:
    """Show the components on their way: on a terminal in place, elsewhere a line for each that is healthy."""
    if target.is_terminal:
        from rich.live import Live

        with Live(_table([]), console=target, transient=True) as live:
            yield lambda parts: live.update(_table(parts))
        return
    told: set[str] = set()

    def tell(parts: list[Part]) -> None:
        for part in parts:
            if part["health"] == "healthy" and part["name"] not in told:
                told.add(part["name"])
                target.print(f"{part['name']} is healthy")

    yield tell


def _table(parts: list[Part]) -> Table:
    from rich.spinner import Spinner
    from rich.table import Table

    shown = Table.grid(padding=(0, 1))
    shown.add_row(Spinner("dots"), "starting PostgreSQL and Airflow", "")
    for part in parts:
        shown.add_row("", part["name"], _health(part["health"]))
    return shown


def _health(word: str) -> Text:
    from rich.text import Text

    return Text(word, style={"healthy": "green", "starting": "yellow"}.get(word, "red"))


def _greet(url: str) -> None:
    from twophase.core import settings
    from twophase.local import airflow

    shown = {
        "airflow": url,
        "user": airflow.ADMIN,
        "password": airflow.passwords().get(airflow.ADMIN, "as your auth manager has it"),
        "dags": settings.dags() if settings.dags().is_dir() else f"none at {settings.dags()}; set TWOPHASE_DAGS",
        "logs": airflow.logs(),
    }
    for name, value in shown.items():
        say(f"{name:<9} {value}")


def down() -> None:
    """Stop what `up` started: Airflow and the embedded PostgreSQL."""
    from twophase.local import postgres, stack

    stopped = stack.stop()
    say("stopped" if postgres.stop() or stopped else "it was not running")


def status(*, as_json: Json = False) -> None:
    """Say what runs here, which committer database is used, and which version its record has."""
    from twophase.local import airflow as settled
    from twophase.local import stack

    airflow = stack.describe()
    found = {**_embedded(), **_committer(), "airflow": airflow, "logs": str(settled.logs())}
    found["versions"] = _versions(found["version"])
    if as_json:
        print_json(found)
        return
    _show(_facts(found))
    if airflow:
        _show_components(airflow["components"])


def _facts(found: dict[str, Any]) -> dict[str, Any]:
    """Return what is told one line each, in the words of people."""
    from rich.text import Text

    record = found["record_version"]
    if found["committer"] and record != found["expected_version"] and not found["problem"]:
        record = f"{record or 'none'}, expected {found['expected_version']}: run `twophase db upgrade`"
    running = "running" if found["running"] else "not running" if found["version"] else "not installed"
    airflow, versions = found["airflow"], found["versions"]
    without = Text("not running" if versions["airflow"] else "not installed", style="yellow")
    return {
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "airflow": airflow["url"] if airflow else without,
        "embedded postgres": Text(running, style="green" if found["running"] else "yellow"),
        "port": found["port"],
        "data folder": found["data"],
        "committer database": found["committer"],
        "named by": found["origin"],
        "record version": record,
        "logs": found["logs"],
        "problem": found["problem"],
    }


def _show(facts: dict[str, Any]) -> None:
    from rich.text import Text

    for name, value in facts.items():
        if value is not None:
            say(Text.assemble((f"{name:<18}  ", "dim"), value if isinstance(value, Text) else str(value)))


def _show_components(parts: list[Part]) -> None:
    rows: list[Sequence[str | Text]] = [
        [
            part["name"],
            _health(part["health"]),
            str(part["pid"] or ""),
            moment(datetime.fromisoformat(part["since"]) if part["since"] else None),
            str(part["restarts"]),
        ]
        for part in parts
    ]
    table(["component", "health", "pid", "since", "restarts"], rows, right=["pid", "restarts"])


def _versions(postgres: str | None) -> dict[str, str | None]:
    """Return the version of each part that is installed."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {"postgres": postgres}
    for name, package in {"twophase": "twophase", "airflow": "apache-airflow", "spark": "pyspark"}.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            found[name] = None
    return found


def _embedded() -> dict[str, Any]:
    from twophase.local import postgres

    try:
        return dict(postgres.status())
    except ConfigError:  # it is not installed, which matters only to those who use it
        return {"running": False, "pid": None, "port": None, "version": None, "data": None}


def _committer() -> dict[str, Any]:
    """Look for the committer database and its record; what is wrong with it is part of the answer."""
    from twophase.committer.upgrade import HEAD
    from twophase.local.resolver import resolve

    found: dict[str, Any] = dict.fromkeys(("committer", "origin", "record_version", "expected_version", "problem"))
    found["expected_version"] = HEAD
    try:
        committer = resolve()
        found |= {"committer": place(committer.dsn), "origin": committer.origin}
        found["record_version"] = _version(committer)
    except ConfigError as problem:
        found["problem"] = str(problem)
    return found


def _version(committer: Committer) -> str | None:
    from sqlalchemy.exc import DBAPIError

    from twophase.committer import upgrade as versions
    from twophase.committer.record import connect

    engine = connect(committer.dsn)
    try:
        with engine.connect() as connection:
            found = versions.current(connection)
    except DBAPIError as error:
        raise _unreachable(committer, error) from None
    finally:
        engine.dispose()
    return found


def _unreachable(committer: Committer, error: Any) -> ConfigError:  # noqa: ANN401 - SQLAlchemy's
    lines = str(error.orig).strip().splitlines() or ["no reason given"]
    return ConfigError(f"committer database {place(committer.dsn)} ({committer.origin}): {lines[0]}")


def upgrade() -> None:
    """Bring the record in the committer database to the version of this code; make it where there is none."""
    from sqlalchemy.exc import DBAPIError

    from twophase.committer import upgrade as versions
    from twophase.committer.record import connect
    from twophase.local.resolver import resolve

    committer = resolve()
    engine = connect(committer.dsn)
    try:
        before, after = versions.upgrade(engine)
    except DBAPIError as error:
        raise _unreachable(committer, error) from None
    finally:
        engine.dispose()
    where = f"{place(committer.dsn)} ({committer.origin})"
    done = f"already at {after}" if before == after else f"upgraded from {before or 'none'} to {after}"
    say(f"{where}: {done}")
