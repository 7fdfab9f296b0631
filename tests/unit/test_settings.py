"""Settings come from the environment, and a wrong one is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from twophase.core import settings
from twophase.core.errors import ConfigError


@pytest.mark.parametrize("value", [None, ""])
def test_the_run_folder_is_below_the_current_one_unless_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TWOPHASE_HOME", raising=False)
    if value is not None:
        monkeypatch.setenv("TWOPHASE_HOME", value)

    assert settings.home() == tmp_path / ".twophase"


@pytest.mark.parametrize(
    ("variable", "setting"), [("TWOPHASE_HOME", settings.home), ("TWOPHASE_SPARK_JOBS", settings.spark_jobs)]
)
def test_a_relative_folder_is_below_the_current_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, setting: Callable[[], Path]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(variable, "here")

    assert setting() == tmp_path / "here"


def test_transforms_are_below_the_current_folder_unless_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TWOPHASE_SPARK_JOBS", raising=False)

    assert settings.spark_jobs() == tmp_path / "spark_jobs"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("lake/words", "/home/data/lake/words"),
        ("lake/words/", "/home/data/lake/words"),
        ("./lake//words/../orders", "/home/data/lake/orders"),
        ("../elsewhere", "/home/elsewhere"),
        ("/absolute/words/", "/absolute/words"),
        (Path("lake/words"), "/home/data/lake/words"),
    ],
)
def test_a_declared_path_is_below_the_data_folder_and_has_one_spelling(
    monkeypatch: pytest.MonkeyPatch, path: str | Path, expected: str
) -> None:
    monkeypatch.setenv("TWOPHASE_HOME", "/home")

    assert str(settings.data_path(path)) == expected


@pytest.mark.parametrize(("value", "expected"), [(None, 30.0), ("", 30.0), ("3", 3.0), ("0.5", 0.5), (" 7 ", 7.0)])
def test_a_lease_is_thirty_seconds_unless_told(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: float
) -> None:
    monkeypatch.delenv("TWOPHASE_LEASE", raising=False)
    if value is not None:
        monkeypatch.setenv("TWOPHASE_LEASE", value)

    assert settings.lease_seconds() == expected


@pytest.mark.parametrize(
    "value",
    ["0", "-1", "soon", "3 s", "nan", "inf", "1e300"],
)
def test_a_lease_that_is_no_time_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TWOPHASE_LEASE", value)

    with pytest.raises(ConfigError, match=r"^TWOPHASE_LEASE: expected a number of seconds .*found '.+'$"):
        settings.lease_seconds()
