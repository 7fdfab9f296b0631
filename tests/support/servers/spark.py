"""A Spark for tests: in this process, small, quick to start."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Start-up matters more than peak speed; nobody looks at a page.
CHEAP = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


def local_session() -> SparkSession:
    """Start Spark with two threads, or return the one that runs; its Python workers are this interpreter.

    It has the Kafka connector, so that no test of Kafka needs a Spark of its own for it.
    """
    from pyspark.sql import SparkSession

    from twophase.local.kafka import connector

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").appName("tests")
    for name, value in {**CHEAP, "spark.jars": ",".join(map(str, connector()))}.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    return session
