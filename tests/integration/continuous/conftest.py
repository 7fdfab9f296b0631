"""What the tests of continuous queries share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module", autouse=True)
def _small(spark: SparkSession) -> Iterator[None]:
    """Leave out what only helps large inputs."""
    quick = {"spark.sql.adaptive.enabled": "false", "spark.sql.shuffle.partitions": "1"}
    before = {name: spark.conf.get(name) for name in quick}
    for name, value in quick.items():
        spark.conf.set(name, value)
    yield
    for name, old in before.items():
        spark.conf.set(name, str(old))
