"""The commands for this machine: `up`, `down`, `db upgrade`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twophase.cli.output import console, say
from twophase.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from twophase.local.committer_database import Committer
    from twophase.local.stack import ComponentStatus, Stack


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (up, down):
        app.command(rich_help_panel="This machine")(command)
    db = typer.Typer(help="The record's database.", no_args_is_help=True)
    db.command(name="upgrade")(upgrade)
    app.add_typer(db, name="db", rich_help_panel="This machine")


def place(dsn: str) -> str:
    """Return where a database is, without the password and without the options, which may hold one too."""
    from sqlalchemy.engine import URL, make_url

    url = make_url(dsn)
    return URL.create("postgresql", url.username, None, url.host, url.port, url.database).render_as_string()


def up(
    *,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of Airflow on 127.0.0.1; 8080 unless said.")
    ] = None,
    no_airflow: Annotated[bool, typer.Option("--no-airflow", help="Start PostgreSQL only.")] = False,
    kafka: Annotated[bool, typer.Option("--kafka", help="Start a Kafka broker, too, for the example.")] = False,
    topic: Annotated[list[str] | None, typer.Option(help="With --kafka: create this topic unless it is there.")] = None,
) -> None:
    """Start PostgreSQL, the record in it, and an Airflow under a supervisor; wait until all is healthy."""
    from twophase.cli.record_access import opened
    from twophase.local import stack
    from twophase.local.committer_database import resolve

    if no_airflow and kafka:
        msg = "up: expected --no-airflow or --kafka, found both; the broker is a part of the local Airflow"
        raise ConfigError(msg)
    if topic and not kafka:
        msg = f"up: --topic {topic[0]} needs --kafka; topics of your own broker are yours to create"
        raise ConfigError(msg)
    started = None if no_airflow else stack.start(port, (topic or []) if kafka else None)
    with opened(may_start=True):
        committer = resolve(may_start=True)
    if no_airflow:
        needed = f"running at {place(committer.dsn)}"
        say(needed if committer.embedded else f"not needed: {_named(committer)}")
        return
    with watch(console(stderr=True)) as on_change:
        found = stack.wait(started, on_change)
    _greet(found)


def _named(committer: Committer) -> str:
    return f"the committer database is {place(committer.dsn)} ({committer.origin})"


@contextmanager
def watch(target: Console) -> Iterator[Callable[[list[ComponentStatus]], None]]:
    """Show how the components start: on a terminal in place, elsewhere a line for each that is healthy."""
    if target.is_terminal:
        from rich.live import Live

        with Live(_table([]), console=target, transient=True) as live:
            yield lambda parts: live.update(_table(parts))
        return
    told: set[str] = set()

    def tell(parts: list[ComponentStatus]) -> None:
        for part in parts:
            if part["health"] == "healthy" and part["name"] not in told:
                told.add(part["name"])
                target.print(f"{part['name']} is healthy")

    yield tell


def _table(parts: list[ComponentStatus]) -> Table:
    from rich.spinner import Spinner
    from rich.table import Table

    shown = Table.grid(padding=(0, 1))
    shown.add_row(Spinner("dots"), "starting PostgreSQL and Airflow", "")
    for part in parts:
        shown.add_row("", part["name"], health(part["health"]))
    return shown


def health(word: str) -> Text:
    """Return a component's health in its colour."""
    from rich.text import Text

    return Text(word, style={"healthy": "green", "starting": "yellow"}.get(word, "red"))


def _greet(found: Stack) -> None:
    from twophase.core import settings
    from twophase.local import airflow, kafka_component

    broker = any(part["name"] == kafka_component.KafkaComponent.name for part in found["components"])
    shown = {
        "airflow": found["url"],
        "user": airflow.ADMIN,
        "password": airflow.passwords().get(airflow.ADMIN, "as your auth manager has it"),
        "dags": settings.dags() if settings.dags().is_dir() else f"none at {settings.dags()}; set TWOPHASE_DAGS",
        "logs": airflow.logs(),
        **({"kafka": kafka_component.address()} if broker else {}),
    }
    for name, value in shown.items():
        say(f"{name:<9} {value}")


def down() -> None:
    """Stop what `up` started: Airflow and the embedded PostgreSQL."""
    from twophase.local import postgres, stack

    stopped = stack.stop()
    say("stopped" if postgres.stop() or stopped else "it was not running")


def unreachable(committer: Committer, error: Any) -> ConfigError:  # noqa: ANN401 - SQLAlchemy's
    """Say in one line why the committer database cannot be used."""
    lines = str(error.orig).strip().splitlines() or ["no reason given"]
    return ConfigError(f"committer database {place(committer.dsn)} ({committer.origin}): {lines[0]}")


def upgrade() -> None:
    """Bring the record in the committer database to the version of this code; make it where there is none."""
    from sqlalchemy.exc import DBAPIError

    from twophase.committer import upgrade as versions
    from twophase.committer.record import connect
    from twophase.local.committer_database import resolve

    committer = resolve()
    engine = connect(committer.dsn)
    try:
        before, after = versions.upgrade(engine)
    except DBAPIError as error:
        raise unreachable(committer, error) from None
    finally:
        engine.dispose()
    where = f"{place(committer.dsn)} ({committer.origin})"
    done = f"already at {after}" if before == after else f"upgraded from {before or 'none'} to {after}"
    say(f"{where}: {done}")
