"""A transform that a test holds or fails from outside, by files in `<TWOPHASE_HOME>/gate`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Longer than any test holds it.
PATIENCE = 240


def transform(words: DataFrame, context: Any) -> DataFrame:
    """Say that Spark is running; go on when nothing holds it, fail if told to."""
    gate = Path(os.environ["TWOPHASE_HOME"], "gate", context.pipeline)
    (gate / "running").touch()
    deadline = time.monotonic() + PATIENCE
    while (gate / "hold").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    if (gate / "fail").exists():
        msg = "the test says so"
        raise ValueError(msg)
    return words.select("id", "word")
