"""What pip is told: bounds that keep the two halves of Spark together, and pins that were tested together."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from twophase import constraints

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WANTED = [*PROJECT["dependencies"], *(one for extra in PROJECT["optional-dependencies"].values() for one in extra)]


def bound(requirement: str, sign: str) -> str | None:
    """Return what follows a sign in a requirement."""
    found = re.search(rf"(?<![<>=]){sign}([\w.]+)", requirement)
    return found[1] if found else None


@pytest.mark.parametrize("requirement", WANTED)
def test_every_dependency_ends_before_the_next_version_that_may_break_it(requirement: str) -> None:
    assert bound(requirement, "<=?")
    assert bound(requirement, ">=")


@pytest.mark.parametrize("name", [constraints.SPARK, constraints.CLIENT])
def test_both_halves_of_spark_end_at_the_version_that_was_tested(name: str) -> None:
    """Pip takes the newest of each that it may: bounds that differ would mix two versions in one folder."""
    (requirement,) = [one for one in WANTED if re.match(rf"{name}(?![\w-])", one)]

    assert bound(requirement, "<=") == constraints.tested()[name]


def test_every_pin_is_one_that_the_tests_run_with() -> None:
    lines = "".join((ROOT / file).read_text() for file in ("requirements.txt", "requirements-java.txt")).splitlines()
    pins = {f"{name}=={version}" for name, version in constraints.tested().items()}

    assert pins <= {line.partition(";")[0].strip() for line in lines}


def test_everything_that_the_package_and_its_extras_want_is_pinned() -> None:
    assert {re.split(r"[\[<>=]", one)[0] for one in WANTED} <= constraints.tested().keys()


def printed(*options: str) -> dict[str, str]:
    """Return what the module prints in an interpreter of its own."""
    command = [sys.executable, *options, "-m", "twophase.constraints"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "plugins")}
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return dict(line.split("==") for line in said.splitlines())


def test_in_an_empty_environment_everything_is_pinned() -> None:
    assert printed("-S") == constraints.tested()


def test_what_is_installed_stays_as_it_is() -> None:
    """An Airflow that is there is not to be changed; Spark is pinned all the same."""
    pins = printed()

    assert {constraints.SPARK, constraints.CLIENT} <= pins.keys()
    assert not {name for name in pins if name.startswith("apache-airflow")}


def test_pyspark_follows_the_client_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Airflow's provider has brought the client, of some version; a pyspark beside it has to be the same."""
    monkeypatch.setattr(constraints, "version", {constraints.CLIENT: "4.1.3"}.__getitem__)
    monkeypatch.setattr(constraints, "PackageNotFoundError", KeyError)

    assert constraints.fitting() == {**constraints.tested(), "pyspark": "4.1.3", "pyspark-client": "4.1.3"}
