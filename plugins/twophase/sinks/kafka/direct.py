"""`sinks.Kafka` with `delivery="at_least_once"` or `"none"`: Spark sends the rows while it stages, before any decision.

As Flink's producer offers it, for those who count no duplicates: no transaction, no marker, nothing staged. What an
attempt has sent stays sent, also if it fails, is retried or is aborted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from twophase.core.checkpoint import Json, Output
from twophase.core.declared import public_name
from twophase.core.errors import ConfigError
from twophase.core.ports import Outcome, Promotion
from twophase.sinks.kafka import acceptance
from twophase.sinks.kafka.sink import Kafka
from twophase.storage.kafka import spark_options

if TYPE_CHECKING:
    from twophase.sinks.base import Attempt

#: What Spark's producers wait for; batches as large as those of a promotion.
_BATCHES = {"kafka.linger.ms": "20", "kafka.batch.size": "1000000"}
_ACKNOWLEDGED = {
    "at_least_once": {"kafka.acks": "all", "kafka.enable.idempotence": "true"},
    "none": {"kafka.acks": "0", "kafka.enable.idempotence": "false", "kafka.retries": "0"},
}
_CONNECTOR = "org.apache.spark:spark-sql-kafka-0-10_2.13"


class DirectKafka(Kafka):
    """Sends rows by Spark's own Kafka writer, while they are staged."""

    #: It has no markers, so nothing keeps an order.
    ordered = False

    def _check_arguments(self) -> None:
        super()._check_arguments()
        if self.columns.timestamp is not None:
            msg = f"sinks.Kafka {self.topic!r}: timestamp: Spark's Kafka writer sends none; leave it out"
            raise ConfigError(msg)
        if self.lineage:
            msg = f"sinks.Kafka {self.topic!r}: lineage: only what is sent exactly once has it; leave it out"
            raise ConfigError(msg)

    def declaration(self) -> dict[str, Any]:
        """Return what the record keeps: it is declared as `sinks.Kafka`."""
        return {"class": public_name(Kafka, self.public_module), **self.config()}

    def connections(self) -> tuple[str, ...]:
        """Return the connection: the Spark job sends."""
        return (self.conn_id,)

    def prepare(self, slot: str | None = None) -> None:  # noqa: ARG002 - no slot has a place of its own here
        """Check that the topic is there, and that this account may write to it."""
        acceptance.check_topic(f"sinks.Kafka {self.topic}", self.topic, self._cluster().topic(self.topic))

    def stage(self, frame: Any, output: Output) -> Json:  # noqa: ANN401 - a DataFrame
        """Send the frame; what is staged is only how many rows that were.

        Spark's writer does not tell how many it sent, so the rows are kept until they are counted.
        """
        from pyspark.errors import AnalysisException

        schema = {field.name: field.dataType.simpleString() for field in frame.schema.fields}
        self.columns.check(output.which, schema)
        options = {**spark_options(self.conn_id), **_BATCHES, **_ACKNOWLEDGED[self.delivery], "topic": self.topic}
        records = self._records(frame).persist()
        try:
            records.write.format("kafka").options(**options).save()
            rows = records.count()
        except AnalysisException as error:
            if "kafka" not in str(error).lower() or "find" not in str(error).lower():
                raise
            msg = f"{output.which}: Spark has no Kafka connector; add {_CONNECTOR} to spark.jars.packages"
            raise ConfigError(msg) from error
        finally:
            records.unpersist()
        columns = [list(column) for column in schema.items()]
        return {"digest": self.delivery, "files": 0, "rows": rows, "bytes": 0, "schema": columns}

    def _records(self, frame: Any) -> Any:  # noqa: ANN401 - DataFrames
        """Return the frame with the columns that Spark's writer knows."""
        from pyspark.sql import functions as f

        def column(name: str) -> Any:  # noqa: ANN401 - a Column
            return f.col(f"`{name.replace('`', '``')}`")

        chosen = [column(self.columns.staged_value).alias("value")]
        if self.columns.key:
            chosen.append(column(self.columns.key).alias("key"))
        if self.columns.partition:
            chosen.append(column(self.columns.partition).cast("int").alias("partition"))
        if self.columns.headers:
            given = column(self.columns.headers)
            pairs = f.map_entries(given) if dict(frame.dtypes)[self.columns.headers].startswith("map") else given
            binary = f.transform(
                pairs, lambda one: f.struct(one["key"].alias("key"), one["value"].cast("binary").alias("value"))
            )
            chosen.append(binary.alias("headers"))
        return self.columns.with_value(frame).select(*chosen)

    def check(self, output: Output) -> None:
        """Check nothing: the broker has the rows, or the attempt has failed."""

    def staged(self, output: Output) -> NoReturn:  # noqa: ARG002 - there is nothing
        """Refuse to be audited: what would be looked at is sent already."""
        self._refuse(f"it cannot be audited with delivery={self.delivery!r}; leave it out with on=…")

    def find(self, output: Output) -> Promotion:  # noqa: ARG002 - whichever it is
        """Say that it is promoted: it was sent before the decision."""
        return Promotion(Outcome.ALREADY_PROMOTED)

    def promote(self, output: Output) -> Promotion:  # noqa: ARG002 - whichever it is
        """Do nothing: it was sent before the decision."""
        return Promotion(Outcome.ALREADY_PROMOTED)

    def discard(self, output: Output) -> None:
        """Do nothing: what was sent cannot be taken back."""

    def discard_earlier(self, output: Output, voted: Output) -> None:
        """Do nothing: what was sent cannot be taken back."""

    def attempts(self) -> Iterator[Attempt]:
        """List nothing: nothing is staged."""
        return iter(())

    def newest(self, pipeline: str) -> int | None:  # noqa: ARG002 - it keeps no numbers
        """Return None: it keeps no markers."""
        return None

    def receipts(self, pipeline: str, since: int) -> Iterator[Json]:  # noqa: ARG002 - it keeps none
        """Yield nothing: it keeps no markers."""
        return iter(())

    def markers(self, pipeline: str) -> Iterator[tuple[int, int]]:  # noqa: ARG002 - it keeps none
        """Yield nothing: it keeps no markers."""
        return iter(())

    def verify(self, output: Output) -> Iterator[str]:  # noqa: ARG002 - nobody can tell
        """Yield nothing: nobody can tell which records are of which checkpoint."""
        return iter(())
