"""The records of a Kafka source as Spark reads them: exactly the fixed ranges, values parsed, bad ones told apart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from twophase.core.errors import BadRecord, ConfigError, InputChanged, SinkUnavailable
from twophase.sources.bad_records import text_of
from twophase.sources.base import Sifted
from twophase.sources.quarantine import check_kept
from twophase.storage.kafka import spark_options
from twophase.storage.kafka_cluster import Place

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from twophase.core.checkpoint import Input
    from twophase.sources.kafka import Kafka

COLUMNS = (
    "key binary, value binary, headers array<struct<key: string, value: binary>>, topic string, partition int, "
    "offset bigint, timestamp timestamp"
)
#: The columns of a quarantine.
BAD = "reason string, raw string, topic string, partition int, offset bigint"

_WHY, _BAD = "_twophase_why", "_twophase_bad_record"
_MARKED = re.compile(r"twophase-bad-record (\S+)/(\d+)@(\d+): ([^\n;]*)")
#: A slow broker is waited for this long; an end beyond the log is found before Spark starts.
_OPTIONS = {
    "failOnDataLoss": "true",
    "includeHeaders": "true",
    "kafka.isolation.level": "read_committed",
    "kafkaConsumer.pollTimeoutMs": "15000",
    "fetchOffset.numRetries": "1",
}
_LOST = re.compile(
    r"KAFKA_DATA_LOSS|[Dd]ata may have been lost|OffsetOutOfRange|UnknownTopicOrPartition|UNKNOWN_TOPIC_OR_PARTITION"
)
_AWAY = re.compile(r"org\.apache\.kafka\.common\.errors\.(Timeout|Network|Disconnect|BrokerNotAvailable)\w*Exception")
_REFUSED = re.compile(r"(Sasl|Ssl)?Auth(entication|orization)\w*Exception: ([^\n]*)")
_NO_CONNECTOR = "Failed to find data source: kafka"


def check_pattern(who: str, pattern: str | None) -> None:
    """Raise ConfigError unless a pattern is a regular expression."""
    try:
        re.compile(pattern or "")
    except re.error as error:
        msg = f"{who}: pattern {pattern!r}: {error}; expected a regular expression of whole names of topics"
        raise ConfigError(msg) from error


def matches(pattern: str, topic: str) -> bool:
    """Return True if the pattern matches the topic's whole name."""
    return re.fullmatch(pattern, topic) is not None


def load(source: Kafka, spark: SparkSession, fixed: Input) -> DataFrame:
    """Return a frame over exactly the fixed ranges, with the values as bytes."""
    if not fixed.ranges:
        return spark.createDataFrame([], COLUMNS)
    places = {Place.parse(name): bounds for name, bounds in fixed.ranges.items()}
    topics: dict[str, dict[str, tuple[int, int]]] = {}
    for place, bounds in places.items():
        topics.setdefault(place.topic, {})[str(place.partition)] = bounds
    ends = [{topic: {part: at[n] for part, at in parts.items()} for topic, parts in topics.items()} for n in (0, 1)]
    options = {
        **spark_options(source.conn_id),
        **_OPTIONS,
        "assign": json.dumps({topic: sorted(map(int, parts)) for topic, parts in topics.items()}),
        "startingOffsets": json.dumps(ends[0]),
        "endingOffsets": json.dumps(ends[1]),
    }
    names = ("key", "value", "headers", "topic", "partition", "offset", "timestamp")
    return spark.read.format("kafka").options(**options).load().select(*names)


def _parsed(source: Kafka, frame: DataFrame) -> DataFrame:
    """Return the frame with its values parsed, and a column that says why one is bad; null: it is good."""
    from pyspark.sql import functions as F  # noqa: N812 - its usual name

    if source.format == "binary":
        return frame.withColumn(_WHY, F.lit(None).cast("string"))
    text = F.col("value").cast("string")
    broken = F.col("value").isNotNull() & ~_is_text(F.col("value"))
    if source.format == "text":
        why = F.when(broken, F.lit("its value is no UTF-8"))
        return frame.withColumn(_WHY, why).withColumn("value", text)
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _BAD}
    parsed = F.from_json(text, f"{source.schema}, {_BAD} string", options)
    # An array would be read as its first element.
    wrong = parsed.isNull() | parsed[_BAD].isNotNull() | text.rlike(r"^\s*\[")
    why = F.when(broken, F.lit("its value is no UTF-8")).when(
        F.col("value").isNotNull() & wrong, F.lit("its value is no JSON of the declared schema")
    )
    return frame.withColumn(_WHY, why).withColumn("value", parsed.dropFields(_BAD))


def _is_text(value: Column) -> Column:
    from pyspark.sql import functions as F  # noqa: N812 - its usual name

    if hasattr(F, "is_valid_utf8"):
        return F.is_valid_utf8(value.cast("string"))
    return F.encode(F.decode(value, "UTF-8"), "UTF-8") == value  # Spark 3.5: what is no UTF-8 is replaced


def strict(source: Kafka, frame: DataFrame) -> DataFrame:
    """Return the parsed records; reading a bad one raises an error that names it."""
    from pyspark.sql import functions as F  # noqa: N812 - its usual name

    parsed = _parsed(source, frame)
    if source.format == "binary":
        return parsed.drop(_WHY)
    named = F.concat(
        F.lit("twophase-bad-record "), "topic", F.lit("/"), F.col("partition").cast("string"), F.lit("@"),
        F.col("offset").cast("string"), F.lit(": "), _WHY, F.lit(";"),
    )  # fmt: skip
    kind = parsed.schema["value"].dataType
    value = F.when(F.col(_WHY).isNull(), F.col("value")).otherwise(F.raise_error(named).cast(kind))
    return parsed.withColumn("value", value).drop(_WHY)


@contextmanager
def sift(source: Kafka, frame: DataFrame) -> Iterator[Sifted]:
    """Yield good and bad records as two frames; raise BadRecord if there are too many bad ones."""
    from pyspark import StorageLevel
    from pyspark.sql import functions as F  # noqa: N812 - its usual name

    raw = F.col("value").cast("string").alias("raw")
    whole = _parsed(source, frame.withColumn("raw", raw)).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        records, bad = whole.agg(F.count(F.lit(1)), F.count(_WHY)).first() or (0, 0)
        found = whole.where(F.col(_WHY).isNotNull())
        if source.bad.exceeded(bad, records):
            first = found.orderBy("topic", "partition", "offset").first()
            raise _too_many(source, bad, records, first)
        good = whole.where(F.col(_WHY).isNull()).drop(_WHY, "raw")
        columns = (F.col(_WHY).alias("reason"), _shown(F.col("raw")).alias("raw"), "topic", "partition", "offset")
        yield Sifted(good, found.select(*columns), partial(check_kept, source.who, whole))
    finally:
        whole.unpersist()


def _shown(text: Column) -> Column:
    from pyspark.sql import functions as F  # noqa: N812 - its usual name

    return F.make_valid_utf8(text) if hasattr(F, "make_valid_utf8") else F.encode(text, "UTF-8").cast("string")


def _too_many(source: Kafka, bad: int, records: int, first: Any) -> BadRecord:  # noqa: ANN401 - a row
    where = f"{first['topic']}/{first['partition']}, offset {first['offset']}: {first[_WHY]}"
    return BadRecord(
        f"{source.who}: {bad} of {records} records are bad, more than bad_record_limit {source.bad.limit}; "
        f"the first: {where}; raise the limit"
    )


def explained(who: str, conn_id: str, error: Exception, remedy: str) -> Exception | None:
    """Return the error for a bad record, lost records, or a broker that Spark could not read from; None: another."""
    text = text_of(error)
    if found := _MARKED.search(text):
        topic, partition, offset, why = found.groups()
        ways = "declare on_bad_record='quarantine' to set such records aside"
        return BadRecord(f"{who}: {topic}/{partition}, offset {offset}: {why}; {ways}")
    if _NO_CONNECTOR in text:
        package = "org.apache.spark:spark-sql-kafka-0-10"
        return ConfigError(f"{who}: Spark has no Kafka connector; add {package} to spark.jars.packages")
    if _LOST.search(text):
        msg = f"{who}: records of the fixed ranges were gone while Spark read them; {remedy.format('TOPIC/PARTITION')}"
        return InputChanged(msg)
    if found := _REFUSED.search(text):
        return ConfigError(f"{who}: connection {conn_id}: the broker refused Spark: {found[3]}; correct the connection")
    if _AWAY.search(text):
        return SinkUnavailable(f"{who}: connection {conn_id}: Spark could not reach the broker; run again")
    return None
