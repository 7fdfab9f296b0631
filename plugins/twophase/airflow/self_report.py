"""A program that reports an Airflow's connections and how it is set up; `twophase.local.existing_airflow` starts it.

Importing Airflow takes seconds and changes the logging, so no command does it itself. The answer is the last line of
the output, as JSON. It goes only into a pipe, because it holds secrets.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.configuration import AIRFLOW_CONFIG, AIRFLOW_HOME, conf, ensure_secrets_loaded
from airflow.secrets.metastore import MetastoreBackend

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

#: Airflow's own secrets backends in plain words; another one is named by its class.
_WORDS = {"EnvironmentVariablesBackend": "environment", "MetastoreBackend": "metadata database"}
#: The error by which a backend forbids looking in the next ones.
_DENIED = "AirflowSecretsBackendAccessDenied"


def connection(conn_id: str) -> dict[str, Any]:
    """Look for a connection as Airflow does; return it, where was looked, and which backends failed."""
    looked: list[str] = []
    failed: dict[str, str] = {}
    for backend in ensure_secrets_loaded():
        if isinstance(backend, MetastoreBackend) and not _has_database():
            continue
        name = _WORDS.get(type(backend).__name__, type(backend).__name__)
        looked.append(name)
        try:
            found = backend.get_connection(conn_id=conn_id)
        except Exception as error:  # noqa: BLE001 - a backend of anybody's; its text may hold a secret
            failed[name] = type(error).__name__
            if failed[name] == _DENIED:
                break
        else:
            if found is not None:
                return {"found": _fields(found), "looked": looked, "failed": {}}
    return {"found": None, "looked": looked, "failed": failed}


def _database() -> URL:
    from sqlalchemy.engine import make_url

    return make_url(conf.get_mandatory_value("database", "sql_alchemy_conn"))


def _has_database() -> bool:
    """Return True if there is a metadata database; asking SQLite would create a file that is not there."""
    url = _database()
    place = Path(url.database or "")
    return url.get_backend_name() != "sqlite" or (place.is_file() and place.stat().st_size > 0)


def _fields(found: Any) -> dict[str, Any]:
    names = ("conn_type", "host", "port", "login", "password", "schema")
    return {**{name: getattr(found, name) for name in names}, "extra": found.extra_dejson}


def description() -> dict[str, Any]:
    """Return how this Airflow is set up, without secrets."""
    from airflow import plugins_manager

    found, errors = _plugins(plugins_manager)
    url = _database()
    return {
        "home": AIRFLOW_HOME,
        "config": AIRFLOW_CONFIG if Path(AIRFLOW_CONFIG).is_file() else None,
        "executor": conf.get("core", "executor"),
        "dags": conf.get("core", "dags_folder"),
        "database": url.set(query={}).render_as_string(hide_password=True) if _has_database() else None,
        "plugin": "twophase" in found,
        "plugin_errors": [text.splitlines()[0] for source, text in errors.items() if "twophase" in source],
    }


def _plugins(plugins_manager: Any) -> tuple[set[str], dict[str, str]]:
    """Let Airflow load its plugins; return their names, and what could not be loaded."""
    if hasattr(plugins_manager, "_get_plugins"):
        plugins, errors = plugins_manager._get_plugins()  # noqa: SLF001 - what `airflow plugins` shows, with its errors
    else:  # before Airflow 3.2
        plugins_manager.ensure_plugins_loaded()
        plugins, errors = plugins_manager.plugins or [], plugins_manager.import_errors
    return {plugin.name for plugin in plugins}, errors


def main(wanted: list[str]) -> None:
    """Print the connections that are asked for and, with `--all`, the description."""
    answer: dict[str, Any] = {"connections": {conn_id: connection(conn_id) for conn_id in wanted if conn_id != "--all"}}
    if "--all" in wanted:
        answer["description"] = description()
    os.write(1, f"\n{json.dumps(answer)}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
