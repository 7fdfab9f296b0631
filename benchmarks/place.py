"""Where a measure works: a home and a PostgreSQL of its own, gone at the end however it ends."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import create_engine, text

from twophase.committer.record import connect
from twophase.committer.upgrade import upgrade
from twophase.local import postgres

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Settings of whoever starts the benchmarks that must not reach them.
FOREIGN = ("TWOPHASE_DSN", "TWOPHASE_LEASE", "TWOPHASE_FAILPOINTS", "AIRFLOW_CONN_TWOPHASE_COMMITTER")


class Place:
    """A home folder, and databases in the embedded server below it: durable, with the settings it ships with."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._spark: SparkSession | None = None

    def database(self, name: str) -> str:
        """Return the DSN of a new database with an empty record."""
        postgres.ensure()
        dsn = postgres.create_database(name)
        engine = connect(dsn)
        upgrade(engine)
        engine.dispose()
        return dsn

    def spark(self, more: Mapping[str, str] | None = None) -> SparkSession:
        """Return the session, which is started first if need be: Spark as it comes, but for its pages and its voice.

        `more` settings are for its start, in a Java of its own: packages, for one.
        """
        from pyspark.sql import SparkSession

        if self._spark is None:
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
            builder = SparkSession.builder.master("local[*]").appName("benchmarks")
            settings = {
                "spark.driver.bindAddress": "127.0.0.1",
                "spark.driver.host": "127.0.0.1",
                "spark.driver.memory": "2g",
                "spark.local.dir": str(self.home / "spark"),
                "spark.sql.warehouse.dir": str(self.home / "warehouse"),
                "spark.sql.session.timeZone": "UTC",
                "spark.ui.enabled": "false",
                "spark.ui.showConsoleProgress": "false",
            }
            for name, value in {**settings, **(more or {})}.items():
                builder = builder.config(name, value)
            self._spark = builder.getOrCreate()
            self._spark.sparkContext.setLogLevel("OFF")
        return self._spark

    def close(self) -> None:
        """Stop what runs."""
        if self._spark is not None:
            self._spark.stop()
            _stop_java()
        postgres.stop()


def _stop_java() -> None:
    """End the Java behind Spark: the next measure may want other packages in it."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway  # noqa: SLF001 - Spark has no other way to end it
    if gateway is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(timeout=60)
        SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001 - likewise


def administer(dsn: str, *statements: str) -> None:
    """Run statements that want no transaction."""
    engine = create_engine(dsn, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


@contextmanager
def opened() -> Iterator[Place]:
    """Make a home in the system's folder for temporary files (`TMPDIR`); stop and remove everything at the end."""
    home = Path(tempfile.mkdtemp(prefix="twophase-benchmarks-"))
    home.chmod(0o755)  # run as root, PostgreSQL works as another account, which must be able to enter
    before = {name: os.environ.pop(name, None) for name in (*FOREIGN, "TWOPHASE_HOME")}
    os.environ["TWOPHASE_HOME"] = str(home)
    terminate = signal.signal(signal.SIGTERM, _interrupt)
    place = Place(home)
    try:
        yield place
    finally:
        try:
            place.close()
        finally:
            shutil.rmtree(home, ignore_errors=True)
            signal.signal(signal.SIGTERM, terminate)
            del os.environ["TWOPHASE_HOME"]
            os.environ.update({name: value for name, value in before.items() if value is not None})


def _interrupt(*_: object) -> None:
    """End as after Ctrl-C, so that everything is cleaned up."""
    raise KeyboardInterrupt
