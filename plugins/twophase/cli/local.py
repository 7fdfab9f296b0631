"""This machine: `up`, `down`, `status`, `db upgrade`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from twophase.cli.output import Json, print_json, say
from twophase.core.errors import ConfigError

if TYPE_CHECKING:
    from twophase.local.resolver import Committer


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


def up() -> None:
    """Start the embedded PostgreSQL, and make or upgrade the record in it."""
    from twophase.cli.opening import opened
    from twophase.local.resolver import resolve

    with opened(may_start=True):
        committer = resolve(may_start=True)
    if committer.embedded:
        say(f"running at {place(committer.dsn)}")
    else:
        say(f"not needed: the committer database is {place(committer.dsn)} ({committer.origin})")


def down() -> None:
    """Stop the embedded PostgreSQL."""
    from twophase.local import postgres

    say("stopped" if postgres.stop() else "it was not running")


def status(*, as_json: Json = False) -> None:
    """Say what runs here, which committer database is used, and which version its record has."""
    found = {**_embedded(), **_committer()}
    if as_json:
        print_json(found)
        return
    from rich.text import Text

    version = found["record_version"]
    if found["committer"] and version != found["expected_version"] and not found["problem"]:
        version = f"{version or 'none'}, expected {found['expected_version']}: run `twophase db upgrade`"
    running = "running" if found["running"] else "not running" if found["version"] else "not installed"
    facts = {
        "embedded postgres": Text(running, style="green" if found["running"] else "yellow"),
        "port": found["port"],
        "version": found["version"],
        "data folder": found["data"],
        "committer database": found["committer"],
        "named by": found["origin"],
        "record version": version,
        "problem": found["problem"],
    }
    for name, value in facts.items():
        if value is not None:
            say(Text.assemble((f"{name:<18}  ", "dim"), value if isinstance(value, Text) else str(value)))


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
