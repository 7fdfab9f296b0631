"""The command `status`: what is installed, what runs, and what to do about what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from twophase.cli.local import health, place, unreachable
from twophase.cli.output import Json, moment, print_json, say, table
from twophase.core.errors import ConfigError

if TYPE_CHECKING:
    import typer
    from rich.text import Text

    from twophase.local.committer_database import Committer
    from twophase.local.stack import ComponentStatus, Stack


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="This machine")(status)


def status(*, as_json: Json = False) -> None:
    """Say what is here and what runs, which committer database is used, and what to do about what is missing."""
    from twophase.core import settings
    from twophase.local import airflow as settled
    from twophase.local import readiness, stack

    airflow = stack.describe()
    spark, problems = readiness.spark()
    committer, wrong = _committer()
    existing, missing = _existing()
    found = {
        **_embedded(),
        **committer,
        "airflow": airflow,
        "kafka": _kafka(airflow),
        "existing": existing,
        "home": str(settings.home()),
        "spark_jobs": str(settings.spark_jobs()),
        "spark": spark,
        "extras": {extra: readiness.installed(package) for extra, package in readiness.EXTRAS.items()},
        "logs": str(settled.logs()),
        "problems": [*problems, *missing, *wrong],
    }
    found["versions"] = _versions(found["version"])
    if as_json:
        print_json(found)
        return
    _show(_facts(found))
    if airflow:
        _show_components(airflow["components"])
    _tell(found["problems"])


def _kafka(airflow: Stack | None) -> str | None:
    """Return where the local broker listens, if there is one."""
    from twophase.local import kafka_component

    running = {part["name"] for part in airflow["components"] if part["pid"]} if airflow else set()
    return kafka_component.address() if kafka_component.KafkaComponent.name in running else None


def _existing() -> tuple[dict[str, Any] | None, list[str]]:
    """Describe an Airflow that `up` did not start, and say what it needs; the local one shows its health instead."""
    from twophase.local import existing_airflow, readiness

    airflow = existing_airflow.there()
    problems = readiness.folders(airflow)
    if airflow is None or airflow.local:
        return None, problems
    try:
        described = existing_airflow.describe(airflow, readiness.SPARK_CONNECTION)
    except ConfigError as problem:
        return None, [*problems, str(problem)]
    return described, [*problems, *readiness.airflow(airflow, described)]


def _facts(found: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that are printed one per line, in plain words."""
    from rich.text import Text

    record = found["record_version"]
    if found["committer"] and record != found["expected_version"] and found["answers"]:
        record = f"{record or 'none'}, expected {found['expected_version']}: run `twophase db upgrade`"
    running = "running" if found["running"] else "not running" if found["version"] else "not installed"
    versions, extras = found["versions"], found["extras"]
    return {
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "extras": ", ".join(name for name, version in extras.items() if version) or "none",
        **_airflow_facts(found),
        "kafka": found["kafka"] or "no local broker; twophase up --kafka starts one",
        "run folder": found["home"],
        "transforms": found["spark_jobs"],
        "spark": found["spark"]["spark_home"],
        "java": found["spark"]["java"],
        "embedded postgres": Text(running, style="green" if found["running"] else "yellow"),
        "port": found["port"],
        "data folder": found["data"],
        "committer database": found["committer"],
        "named by": found["origin"],
        "record version": record,
        "logs": found["logs"],
    }


def _airflow_facts(found: dict[str, Any]) -> dict[str, Any]:
    """Return the Airflow that is there: the local one by its address, another by its set-up."""
    from rich.text import Text

    existing = found["existing"]
    if found["airflow"]:
        return {"airflow": found["airflow"]["url"]}
    if existing is None:
        return {"airflow": Text("not running" if found["versions"]["airflow"] else "not installed", style="yellow")}
    return {
        "airflow": f"{existing['version']} in {existing['home']}, {existing['executor']}",
        "airflow's database": existing["database"] or Text("not made yet: airflow db migrate", style="yellow"),
        "dag folder": existing["dags"],
        "plugin": Text("loaded", style="green") if existing["plugin"] else Text("not loaded", style="red"),
    }


def _show(facts: dict[str, Any]) -> None:
    from rich.text import Text

    for name, value in facts.items():
        if value is not None:
            say(Text.assemble((f"{name:<18}  ", "dim"), value if isinstance(value, Text) else str(value)))


def _tell(problems: list[str]) -> None:
    from rich.text import Text

    for problem in problems:
        say(Text.assemble((f"{'problem':<18}  ", "red"), problem))


def _show_components(parts: list[ComponentStatus]) -> None:
    rows: list[Sequence[str | Text]] = [
        [
            part["name"],
            health(part["health"]),
            str(part["pid"] or ""),
            moment(datetime.fromisoformat(part["since"]) if part["since"] else None),
            str(part["restarts"]),
        ]
        for part in parts
    ]
    table(["component", "health", "pid", "since", "restarts"], rows, right=["pid", "restarts"])


def _versions(postgres: str | None) -> dict[str, str | None]:
    """Return the version of each part that is installed."""
    from twophase.local.readiness import installed

    packages = {"twophase": "twophase", "airflow": "apache-airflow", "spark": "pyspark"}
    return {"postgres": postgres, **{name: installed(package) for name, package in packages.items()}}


def _embedded() -> dict[str, Any]:
    from twophase.local import postgres

    try:
        return dict(postgres.status())
    except ConfigError:  # it is not installed, which is no problem by itself
        return {"running": False, "pid": None, "port": None, "version": None, "data": None}


def _committer() -> tuple[dict[str, Any], list[str]]:
    """Look for the committer database and its record, and say what is wrong with it."""
    from twophase.committer.upgrade import HEAD
    from twophase.local.committer_database import resolve

    found: dict[str, Any] = dict.fromkeys(("committer", "origin", "record_version"))
    found |= {"expected_version": HEAD, "answers": False}
    try:
        committer = resolve()
        found |= {"committer": place(committer.dsn), "origin": committer.origin}
        found |= {"record_version": _version(committer), "answers": True}
    except ConfigError as problem:
        return found, [str(problem)]
    return found, []


def _version(committer: Committer) -> str | None:
    from sqlalchemy.exc import DBAPIError

    from twophase.committer import upgrade as versions
    from twophase.committer.record import connect

    engine = connect(committer.dsn)
    try:
        with engine.connect() as connection:
            found = versions.current(connection)
    except DBAPIError as error:
        raise unreachable(committer, error) from None
    finally:
        engine.dispose()
    return found
