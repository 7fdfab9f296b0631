"""Airflow executes every .py file below its plugins folder; the package in there must only ever be imported.

Executed file by file, each class would exist twice and a module's bare name could shadow the standard library's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PLUGINS = Path(__file__).parents[2] / "plugins"

#: Run in a fresh interpreter, for importing Airflow writes its configuration and changes sys.path.
ASK_AIRFLOW = """
import importlib.metadata, json, sys
import importlib_metadata

if "--not-installed" in sys.argv:
    for module in (importlib.metadata, importlib_metadata):
        def others(real=module.distributions, **wanted):
            return (found for found in real(**wanted) if found.metadata["Name"] != "twophase")
        module.distributions = others

from airflow._shared.module_loading import find_path_from_directory
from airflow.configuration import conf
from airflow.settings import PLUGINS_FOLDER

syntax = conf.get_mandatory_value("core", "DAG_IGNORE_FILE_SYNTAX")
listed = sorted(find_path_from_directory(PLUGINS_FOLDER, ".airflowignore", syntax))

from airflow.plugins_manager import _get_plugins, get_fastapi_plugins
plugins, errors = _get_plugins()
sources = [str(plugin.source) for plugin in plugins if plugin.name == "twophase"]
pages = ["twophase.web.app" in sys.modules]
executed = sorted(
    name for name, module in sys.modules.items()
    if (getattr(module, "__file__", None) or "").startswith(PLUGINS_FOLDER)
)

prefixes = [app["url_prefix"] for app in get_fastapi_plugins()[0]]
pages.append("twophase.web.app" in sys.modules)

import twophase
print(json.dumps({
    "folder": PLUGINS_FOLDER, "syntax": syntax, "listed": listed, "executed": executed, "errors": errors,
    "twophase": twophase.__file__, "sources": sources, "pages": pages, "prefixes": prefixes,
}))
"""


def ask_airflow(home: Path, *arguments: str, **settings: str) -> dict[str, Any]:
    """Let Airflow load its plugins from our folder, and return what it did."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "PYTHONPATH"))}
    done = subprocess.run(
        [sys.executable, "-c", ASK_AIRFLOW, *arguments],
        env={
            **environment,
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__PLUGINS_FOLDER": str(PLUGINS),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            **settings,
        },
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("syntax", [None, "regexp"], ids=["default", "regexp"])
def test_airflow_never_executes_a_file_of_the_package(tmp_path: Path, syntax: str | None) -> None:
    settings = {"AIRFLOW__CORE__DAG_IGNORE_FILE_SYNTAX": syntax} if syntax else {}

    answer = ask_airflow(tmp_path, **settings)

    assert answer["folder"] == str(PLUGINS)
    assert answer["syntax"] == (syntax or "glob")
    package = PLUGINS / "twophase"
    assert answer["listed"] == [str(PLUGINS / "twophase_plugin.py")]
    assert [name for name in answer["executed"] if name.split(".")[0] not in {"twophase", "twophase_plugin"}] == []
    assert answer["errors"] == {}
    assert answer["twophase"] == str(package / "__init__.py")


@pytest.mark.parametrize(
    ("arguments", "source"),
    [((), "twophase=="), (("--not-installed",), "$PLUGINS_FOLDER/twophase_plugin.py")],
    ids=["installed", "folder alone"],
)
def test_the_plugin_is_registered_once_however_it_is_found(
    tmp_path: Path, arguments: tuple[str, ...], source: str
) -> None:
    """By its entry point where the distribution is installed, which a checkout of ours also is; else by the folder."""
    answer = ask_airflow(tmp_path, *arguments)

    assert [found.startswith(source) for found in answer["sources"]] == [True]
    assert answer["errors"] == {}


def test_the_pages_are_imported_only_where_they_are_served(tmp_path: Path) -> None:
    """Every component and every task loads the plugin; only the api-server asks for its apps."""
    answer = ask_airflow(tmp_path)

    assert answer["pages"] == [False, True]
    assert "/twophase" in answer["prefixes"]
