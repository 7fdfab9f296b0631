"""The quarantine: split an input into good and bad records, each record in exactly one; sources of files use it.

Spark parses only the columns that a query asks for, so a record may be bad in one query and good in another. So all
columns are read once and cached, and good and bad are decided there, the same for every write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import unquote

from twophase.core.errors import BadRecord, ConfigError
from twophase.core.settings import data_path
from twophase.sources import bad_record_scan
from twophase.sources.bad_record_scan import Reading
from twophase.sources.base import Sifted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from twophase.core.checkpoint import Input
    from twophase.sinks.files.sink import Files as FilesSink
    from twophase.sources.fixed_files import FixedFiles

T = TypeVar("T")

ON_BAD_RECORD = ("fail", "quarantine")
#: The columns of a quarantine.
COLUMNS = "reason string, raw string, file string, line bigint"

_RAW, _FILE = "_twophase_bad_record", "_twophase_file"
#: Up to this many bad records, the tasks that look for their lines are told which ones to look for.
_FEW = 100_000
_SET_BY_US = ("mode", "columnnameofcorruptrecord", "columnpruning")


@dataclass(frozen=True)
class Quarantine:
    """What a source's declaration says about bad records."""

    on_bad_record: str = "fail"
    limit: float | None = None
    path: str | None = None

    @property
    def wanted(self) -> bool:
        """Return True if bad records go to a quarantine."""
        return self.on_bad_record == "quarantine"

    def config(self) -> dict[str, Any]:
        """Return the arguments of the source's constructor; the path in full."""
        return {
            "on_bad_record": self.on_bad_record,
            "bad_record_limit": self.limit,
            "quarantine_path": None if self.path is None else str(data_path(self.path)),
        }

    def sink(self, folder: str) -> FilesSink:
        """Return the quarantine's table: `<folder>.quarantine` unless a path is declared."""
        from twophase.sinks.files.sink import Files

        return Files(self.path or f"{folder}.quarantine")

    def check(self, who: str, kind: str, schema: str | None, options: Mapping[str, Any]) -> None:
        """Raise ConfigError if with this declaration bad records could not be told from good ones."""
        if self.on_bad_record not in ON_BAD_RECORD:
            msg = f"{who}: on_bad_record {self.on_bad_record!r}: expected one of {', '.join(ON_BAD_RECORD)}"
            raise ConfigError(msg)
        if not self.wanted:
            for name, value in (("bad_record_limit", self.limit), ("quarantine_path", self.path)):
                if value is not None:
                    msg = f"{who}: {name} is of use with on_bad_record='quarantine' only"
                    raise ConfigError(msg)
            return
        if problem := self._problem(kind, schema, {name.lower(): value for name, value in options.items()}):
            msg = f"{who}: on_bad_record='quarantine': {problem}"
            raise ConfigError(msg)

    def _problem(self, kind: str, schema: str | None, options: Mapping[str, Any]) -> str | None:
        if kind not in {"json", "csv"}:
            return f"format {kind!r} has no bad records, only bad files; expected json or csv"
        if not schema:
            return "without a schema Spark would fit the types to the bad records; declare schema=…"
        if str(options.get("multiline", "false")).lower() == "true":
            return "with multiLine a record has no line to go by; land one record per line"
        if given := [name for name in _SET_BY_US if name in options]:
            return f"option {given[0]!r} cannot be set: the quarantine needs it"
        limit: Any = self.limit
        share, count = isinstance(limit, float) and 0 < limit < 1, type(limit) is int and limit >= 0
        if limit is not None and not (share or count):
            return f"bad_record_limit {limit!r}: expected a whole number, or a share above 0 and below 1"
        return None

    def exceeded(self, bad: int, records: int) -> bool:
        """Return True if there are more bad records than the limit allows."""
        if self.limit is None:
            return False
        return bad > (self.limit * records if 0 < self.limit < 1 else self.limit)


class _BadFile(NamedTuple):
    """A file with bad records: as Spark names it, as it is on disk, and how many there are."""

    uri: str
    path: str
    bad: int


@contextmanager
def sift(source: FixedFiles, spark: SparkSession, fixed: Input) -> Iterator[Sifted]:
    """Yield good and bad records as two frames; raise BadRecord if there are too many bad ones."""
    from pyspark import StorageLevel
    from pyspark.sql import functions as F  # noqa: N812 - its usual name

    if not fixed.files:
        yield Sifted(source.no_files(spark), spark.createDataFrame([], COLUMNS))
        return
    whole = _whole(source, spark, fixed).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        good = whole.where(F.col(_RAW).isNull()).drop(_RAW, _FILE)
        yield Sifted(good, _bad(source, spark, whole, fixed), partial(check_kept, source.who, whole))
    finally:
        whole.unpersist()


def check_kept(who: str, whole: DataFrame) -> None:
    """Raise ConfigError if the cached input is gone: each query would then decide again, by its own columns."""
    kept = whole.storageLevel
    if not (kept.useMemory or kept.useDisk):
        msg = (
            f"{who}: the transform cleared Spark's cache, by which good and bad records are told apart; "
            f"let it unpersist its own frames only"
        )
        raise ConfigError(msg)


def _whole(source: FixedFiles, spark: SparkSession, fixed: Input) -> DataFrame:
    """Return every record with its columns, its text if it is bad, and its file."""
    from pyspark.sql import functions as F  # noqa: N812 - its usual name

    schema = source.no_files(spark).schema.add(_RAW, "string")
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _RAW, "columnPruning": "false"}
    return source.load_files(spark, source.paths(fixed), schema, **options).withColumn(_FILE, F.input_file_name())


def _bad(source: FixedFiles, spark: SparkSession, whole: DataFrame, fixed: Input) -> DataFrame:
    """Count the records, which reads the input; return the bad ones with reason and line."""
    from pyspark.sql import functions as F  # noqa: N812 - its usual name

    counts = whole.groupBy(_FILE).agg(F.count(F.lit(1)), F.count(_RAW)).collect()
    order = {path: number for number, path in enumerate(source.paths(fixed))}
    files = [_BadFile(uri, unquote(uri.removeprefix("file://")), bad) for uri, _, bad in counts if bad]
    files.sort(key=lambda file: order.get(file.path, len(order)))
    if not files:
        return spark.createDataFrame([], COLUMNS)
    records, bad = sum(row[1] for row in counts), sum(file.bad for file in files)
    if source.bad.exceeded(bad, records):
        found = _placed(source, spark, whole.where(F.col(_FILE) == files[0].uri), files[:1])
        first = found.orderBy(F.col("line").asc_nulls_last()).first()
        raise _too_many(source, bad, records, first.asDict() if first else {})
    return _placed(source, spark, whole, files).repartition(1 + bad // _FEW)


def _too_many(source: FixedFiles, bad: int, records: int, first: Mapping[str, Any]) -> BadRecord:
    line = f", line {first['line']}" if first.get("line") else ""
    return BadRecord(
        f"{source.who}: {bad} of {records} records are bad, more than bad_record_limit {source.bad.limit}; the first: "
        f"file {first.get('file')}{line}: {first.get('reason')}; raise the limit, or {source.to_correct}"
    )


def _placed(source: FixedFiles, spark: SparkSession, whole: DataFrame, files: list[_BadFile]) -> DataFrame:
    """Return the bad records with reason, text, file and line.

    Records of equal text in one file are all bad or all good, so every line with that text is a bad record's. If the
    number of lines is not the number of records, the records get no line number.
    """
    from pyspark.sql import functions as F  # noqa: N812 - its usual name

    reading, kind = Reading.of(source.reader_options(()), source.schema), source.format
    bad = whole.where(F.col(_RAW).isNotNull()).select(_FILE, _valid(F.col(_RAW)).alias("raw"))
    texts = bad.groupBy(_FILE, "raw").agg(F.count(F.lit(1)).cast("int").alias("count"))
    lines = _lines(spark, texts, files, kind, reading).groupBy(_FILE, "raw").agg(F.collect_list("line").alias("lines"))
    names = spark.createDataFrame([(file.uri, file.path) for file in files], f"{_FILE} string, file string")
    size = F.size("lines")
    # An array on one line of JSON gives one row per element, all bad if one is; it goes into the table once, whole.
    array = F.lit(kind == "json") & F.col("raw").rlike(r"^\s*\[") & (F.col("count") % size == 0)
    adds_up = F.col("lines").isNotNull() & ((size == F.col("count")) | array)
    unknown = F.expr("array_repeat(cast(null as bigint), count)")
    reason = F.udf(partial(_by_value(bad_record_scan.reason), kind=kind, reading=reading), "string", useArrow=False)
    return (
        texts.join(names, _FILE)
        .join(lines, [_FILE, "raw"], "left")
        .select(
            reason("raw").alias("reason"),
            "raw",
            "file",
            F.explode(F.when(adds_up, F.col("lines")).otherwise(unknown)).alias("line"),
        )
    )


def _valid(text: Column) -> Column:
    """Return a text as valid UTF-8: Spark keeps a JSON record's bytes as they are, and readers fail on invalid ones."""
    from pyspark.sql import functions as F  # noqa: N812 - its usual name

    if hasattr(F, "make_valid_utf8"):
        return F.make_valid_utf8(text)
    return F.encode(text, "UTF-8").cast("string")  # Spark 3.5: by way of Java's strings


def _lines(spark: SparkSession, texts: DataFrame, files: list[_BadFile], kind: str, reading: Reading) -> DataFrame:
    """Return numbered lines of the files with bad records; if bad records are few, only lines with their checksums."""
    from pyspark.sql import functions as F  # noqa: N812 - its usual name

    wanted: dict[str, set[int]] = {}
    few = sum(file.bad for file in files) <= _FEW
    for uri, checksum in texts.select(_FILE, F.crc32("raw")).collect() if few else ():
        wanted.setdefault(uri, set()).add(checksum)
    work = [(file.uri, file.path, wanted.get(file.uri)) for file in files]
    tasks = min(len(work), 4 * spark.sparkContext.defaultParallelism)
    numbered = spark.sparkContext.parallelize(work, tasks).flatMap(
        partial(_by_value(bad_record_scan.numbered), kind=kind, reading=reading)
    )
    return spark.createDataFrame(numbered, f"{_FILE} string, raw string, line bigint", verifySchema=False)


def _by_value(function: Callable[..., T]) -> Callable[..., T]:
    """Make a function of the scanning module pickle with all that it needs: workers may lack the package."""
    from pyspark.cloudpickle.cloudpickle import register_pickle_by_value

    register_pickle_by_value(bad_record_scan)  # type: ignore[no-untyped-call]
    return function
