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
import json, sys
from airflow._shared.module_loading import find_path_from_directory
from airflow.configuration import conf
from airflow.settings import PLUGINS_FOLDER

syntax = conf.get_mandatory_value("core", "DAG_IGNORE_FILE_SYNTAX")
listed = sorted(find_path_from_directory(PLUGINS_FOLDER, ".airflowignore", syntax))

from airflow.plugins_manager import _get_plugins
_, errors = _get_plugins()
executed = sorted(
    name for name, module in sys.modules.items()
    if (getattr(module, "__file__", None) or "").startswith(PLUGINS_FOLDER)
)

import twophase
print(json.dumps({
    "folder": PLUGINS_FOLDER, "syntax": syntax, "listed": listed, "executed": executed, "errors": errors,
    "twophase": twophase.__file__,
}))
"""


def ask_airflow(home: Path, **settings: str) -> dict[str, Any]:
    """Let Airflow load its plugins from our folder, and return what it did."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "PYTHONPATH"))}
    done = subprocess.run(
        [sys.executable, "-c", ASK_AIRFLOW],
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
    assert [path for path in answer["listed"] if Path(path).is_relative_to(package)] == []
    assert [name for name in answer["executed"] if name.split(".")[0] not in {"twophase", "twophase_plugin"}] == []
    assert answer["errors"] == {}
    assert answer["twophase"] == str(package / "__init__.py")
