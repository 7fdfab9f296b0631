"""Installing into an existing Airflow: the wheel alone registers plugin, provider and command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
UV = Path(sys.executable).with_name("uv")


def run(*command: str | Path, **environment: str) -> str:
    """Run a command that knows nothing of this checkout, and return what it says."""
    outside = ("AIRFLOW", "TWOPHASE", "PYTHONPATH", "VIRTUAL_ENV")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
    done = subprocess.run(
        list(map(str, command)), env={**inherited, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Build the wheel and install it into an environment of its own; return that environment's programs."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("plugins", "pyproject.toml", "README.md"):
        copied = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copied(ROOT / name, source / name)  # a build leaves folders beside what it builds
    run(UV, "build", "-q", "--wheel", "--out-dir", folder, source)
    (wheel,) = folder.glob("twophase-*.whl")
    run(UV, "venv", "-q", "--python", sys.executable, folder / "venv")
    programs = folder / "venv" / "bin"
    pins = ("-c", ROOT / "requirements.txt")
    run(UV, "pip", "install", "-q", "--python", programs / "python", *pins, f"{wheel}[airflow]")
    yield programs
    shutil.rmtree(folder)


def airflow(installed: Path, home: Path, *arguments: str) -> list[dict[str, Any]]:
    said = run(
        installed / "airflow", *arguments, "--output", "json",
        AIRFLOW_HOME=str(home), AIRFLOW__CORE__LOAD_EXAMPLES="False",
    )  # fmt: skip
    found: list[dict[str, Any]] = json.loads(said[said.index("[") :])
    return found


def test_airflow_lists_the_provider(installed: Path, tmp_path: Path) -> None:
    listed = {row["package_name"]: row for row in airflow(installed, tmp_path, "providers", "list")}

    assert listed["twophase"]["version"] == PROJECT["version"]
    assert listed["twophase"]["description"].strip() == PROJECT["description"]


def test_airflow_lists_the_plugin_with_its_pages(installed: Path, tmp_path: Path) -> None:
    (plugin,) = [row for row in airflow(installed, tmp_path, "plugins") if row["name"] == "twophase"]

    assert plugin["source"].startswith(f"twophase=={PROJECT['version']}: ")
    assert "/twophase" in str(plugin["fastapi_apps"])
    assert "twophase/dags/{DAG_ID}" in str(plugin["external_views"])


def test_the_command_line_is_there(installed: Path) -> None:
    assert run(installed / "twophase", "--version") == f"twophase {PROJECT['version']}\n"


def test_the_pages_are_in_the_wheel(installed: Path) -> None:
    package = next((installed.parent / "lib").glob("python*/site-packages/twophase/web/templates"))

    assert {file.name for file in package.iterdir()} == {
        file.name for file in (ROOT / "plugins/twophase/web/templates").iterdir()
    }
