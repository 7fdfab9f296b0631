"""What the tests of the Spark side share: a landing folder, and a sink that begins empty."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.pipelines.spark_plans import Kept


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Kept.rows, Kept.cached, Kept.then = {}, {}, staticmethod(lambda: None)


@pytest.fixture
def landing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    folder = tmp_path / "data" / "landing"
    folder.mkdir(parents=True)
    return folder
