"""What the tests of the Kafka sink share."""

from __future__ import annotations

from pathlib import Path

import pytest

from twophase.local.kafka import Broker


@pytest.fixture
def folder(tmp_path: Path, kafka: Broker, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the environment of a user with a run folder and a broker; return the run folder."""
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    return tmp_path
