"""A Delta or Iceberg table as the input of intervals: each revision reads one version of it, whatever comes later."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, TableFeatures, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.manifest import DataFile, DataFileContent
from pyiceberg.types import LongType

from support.servers.s3 import CONN_ID, SECRET, S3Server, local
from support.sinks.iceberg_deletes import delete_positions, delete_values
from twophase import Pipeline, run, sinks, sources
from twophase.committer.record import PostgresRecord
from twophase.core.checkpoint import Input, Run
from twophase.core.errors import BadRecord, ConfigError, InputChanged, InputMissing, NotYet, SinkUnavailable
from twophase.core.settings import data_path
from twophase.runner import InProcess, Runner
from twophase.sources.base import Source
from twophase.storage.base import DISK, Storage
from twophase.storage.s3 import S3, Access

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.usefixtures("home")

DAY = "2026-11-15T00:00:00+00:00/2026-11-16T00:00:00+00:00"
CATALOG = {"type": "sql", "uri": "sqlite:///catalog.db"}
KINDS = ["delta", "iceberg", "delta in s3", "iceberg in s3"]
IN_S3 = " in s3"


@pytest.fixture(autouse=True)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the S3 server for a table that is there; each test has a folder of its own."""
    if "s3" in request.fixturenames or str(getattr(request.node, "callspec", "")).find(IN_S3) >= 0:
        request.getfixturevalue("s3")
        monkeypatch.setenv("TEST_PLACE", S3Server.place())


def storage(kind: str) -> Storage:
    return S3("a test", None, CONN_ID) if kind.endswith(IN_S3) else DISK


def lake(kind: str) -> str:
    return os.environ["TEST_PLACE"] if kind.endswith(IN_S3) else str(data_path("lake"))


def rows(*ids: int, day: int = 15, hour: int = 0, **more: Any) -> pa.Table:
    """Make rows of one day, one text each."""
    count = len(ids)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "ts": pa.array([datetime(2026, 11, day, hour, tzinfo=UTC)] * count, pa.timestamp("us", "UTC")),
            "dt": pa.array([date(2026, 11, day)] * count, pa.date32()),
            "city": pa.array(["Köln a/b:c=d%20"] * count, pa.string()),
            **{name: [value] * count for name, value in more.items()},
        }
    )


def catalog(kind: str = "iceberg") -> SqlCatalog:
    data_path("lake").mkdir(parents=True, exist_ok=True)
    warehouse = storage(kind).url(lake(kind))
    uri = f"sqlite:///{data_path('catalog.db')}"
    found = SqlCatalog("default", uri=uri, warehouse=warehouse, **storage(kind).for_iceberg())
    found.create_namespace_if_not_exists("db")
    return found


def append(kind: str, table: pa.Table, *, by: tuple[str, ...] = (), widen: bool = False) -> None:
    """Write rows as somebody does who knows nothing of us."""
    data_path("lake").mkdir(parents=True, exist_ok=True)
    if kind.startswith("delta"):
        more: Any = {"schema_mode": "merge"} if widen else {}
        options = storage(kind).for_delta() or None
        path = f"{lake(kind)}/clicks"
        write_deltalake(path, table, mode="append", partition_by=list(by) or None, storage_options=options, **more)
        return
    if not catalog(kind).table_exists("db.clicks"):
        made = catalog(kind).create_table("db.clicks", table.schema)
        with made.update_spec() as update:
            for name in by:
                update.add_identity(name)
    found = catalog(kind).load_table("db.clicks")
    if widen:
        with found.update_schema() as update_schema:
            update_schema.union_by_name(table.schema)
    found.append(table)


def clicks(kind: str, column: str = "ts", **more: Any) -> sources.Interval:
    if kind.endswith(IN_S3):
        more["conn_id"] = CONN_ID
    if kind.startswith("delta"):
        return sources.Interval(f"{lake(kind)}/clicks", "delta", column=column, **more)
    return sources.Interval("db.clicks", "iceberg", column=column, catalog=CATALOG, **more)


def fixed(source: sources.Interval, slot: str = DAY) -> Input:
    return source.fix(source.discover(slot), None)  # type: ignore[arg-type]


def named(file: DataFile, path: str) -> DataFile:
    """Return a data file as another writer would call it."""
    return DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=path,
        file_format=file.file_format,
        partition=file.partition,
        record_count=file.record_count,
        file_size_in_bytes=file.file_size_in_bytes,
    )


def ids(frame: DataFrame) -> list[int]:
    return sorted(row["id"] for row in frame.collect())


@pytest.mark.spark
@pytest.mark.parametrize("kind", KINDS)
def test_an_attempt_reads_the_version_that_was_fixed_although_the_table_moved_on(
    kind: str, spark: SparkSession
) -> None:
    append(kind, rows(1, 2))
    append(kind, rows(3, day=16))
    source = clicks(kind)
    found = fixed(source)
    append(kind, rows(4))

    assert ids(source.read(spark, found, DAY)) == [1, 2]
    assert ids(source.read(spark, fixed(source), DAY)) == [1, 2, 4]


@pytest.mark.spark
@pytest.mark.parametrize("kind", KINDS)
def test_columns_are_the_tables_whatever_the_files_have(kind: str, spark: SparkSession) -> None:
    append(kind, rows(1), by=("dt", "city"))
    append(kind, rows(2, day=16, note="new"), by=("dt", "city"), widen=True)
    source = clicks(kind)

    frame = source.read(spark, fixed(source, "2026-11-15/2026-11-17"), "2026-11-15/2026-11-17")

    expected = ["bigint", "timestamp", "date", "string", "string"]
    assert [field.dataType.simpleString() for field in frame.schema.fields] == expected
    assert frame.columns == ["id", "ts", "dt", "city", "note"]
    found = sorted((row["id"], row["dt"].day, row["city"], row["note"]) for row in frame.collect())
    assert found == [(1, 15, "Köln a/b:c=d%20", None), (2, 16, "Köln a/b:c=d%20", "new")]


@pytest.mark.spark
@pytest.mark.parametrize("kind", KINDS)
def test_of_a_table_with_a_folder_a_day_only_the_days_of_the_interval_are_listed(
    kind: str, spark: SparkSession
) -> None:
    for day in (14, 15, 16):
        append(kind, rows(day, day=day), by=("dt",))
    source = clicks(kind, column="dt")
    found = fixed(source)

    assert len(found.files) == 1
    assert ids(source.read(spark, found, DAY)) == [15]


@pytest.mark.spark
@pytest.mark.parametrize("kind", KINDS)
def test_a_retry_reads_the_version_that_the_record_keeps(
    kind: str, spark: SparkSession, record: PostgresRecord
) -> None:
    append(kind, rows(1, 2), by=("dt",))
    seen: list[list[int]] = []

    def transform(clicks: DataFrame) -> DataFrame:
        seen.append(ids(clicks))
        return clicks

    pipeline = Pipeline(
        "clicks", reads={"clicks": clicks(kind)}, transform=transform, writes={"lake": sinks.Files("lake/out")}
    )
    runner = Runner(pipeline, InProcess(spark, transform), record=record)
    begun = runner.coordinator.begin(Run(None, "first"), slot=DAY)
    assert begun is not None
    append(kind, rows(3), by=("dt",))

    with record.transaction() as tx:
        kept = tx.inputs(begun.key)["clicks"]
    done = runner.run(DAY)

    assert done is not None
    assert kept.table is not None
    assert kept.table["partition_by"] == ["dt"]
    assert ids(clicks(kind).read(spark, kept, DAY)) == [1, 2]
    assert seen == [[1, 2]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_declared_table_is_built_again_from_the_record(kind: str) -> None:
    source = clicks(kind)

    assert Source.load(source.declaration()).config() == source.config()


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_a_fixed_version_that_is_gone_is_an_error_that_names_it(kind: str) -> None:
    append(kind, rows(1))
    source = clicks(kind)
    found = fixed(source)
    gone = local(source.paths(found)[0])
    gone.unlink()

    with pytest.raises(InputChanged, match=f"{gone.name}: expected .* found nothing"):
        source.check(found)
    with pytest.raises(InputMissing, match="vacuumed or expired"):
        source.discover(DAY)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_a_fixed_version_that_was_written_over_is_an_error_that_names_it(kind: str) -> None:
    append(kind, rows(1))
    source = clicks(kind)
    found = fixed(source)
    source.check(found)
    changed = local(source.paths(found)[0])
    changed.write_bytes(changed.read_bytes() + b"!")

    with pytest.raises(InputChanged, match=changed.name):
        source.check(found)


@pytest.mark.spark
@pytest.mark.parametrize("kind", ["delta in s3", "iceberg in s3"])
def test_an_object_that_goes_away_while_it_is_read_is_an_error_that_names_it(
    kind: str, spark: SparkSession, record: PostgresRecord
) -> None:
    append(kind, rows(1))

    def transform(clicks: DataFrame) -> DataFrame:
        for path in Path(local(lake(kind))).rglob("*.parquet"):
            path.unlink()
        return clicks

    out = sinks.Delta(f"{lake(kind)}/out", conn_id=CONN_ID)  # which does not take it for its own failure
    pipeline = Pipeline("clicks", reads={"clicks": clicks(kind)}, transform=transform, writes={"lake": out})

    with pytest.raises(InputChanged, match=r"interval source .*\.parquet: expected .* found nothing"):
        run(pipeline, spark=spark, slot=DAY)


@pytest.mark.spark
@pytest.mark.parametrize("kind", ["delta in s3"])
def test_a_store_that_goes_down_while_it_is_read_costs_an_attempt(
    kind: str, spark: SparkSession, record: PostgresRecord, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(kind, rows(1))
    monkeypatch.setenv("AIRFLOW_CONN_LAKE_S3", s3.connection(connect_timeout=1, read_timeout=1))

    def failing(clicks: DataFrame) -> DataFrame:
        s3.kill()
        return clicks

    def pipeline(transform: Callable[..., Any]) -> Pipeline:
        writes = {"lake": sinks.Files("lake/out")}
        return Pipeline("clicks", reads={"clicks": clicks(kind)}, transform=transform, writes=writes)

    with pytest.raises(SinkUnavailable, match="interval source") as down:
        run(pipeline(failing), spark=spark, slot=DAY)
    with pytest.raises(SinkUnavailable, match="interval source"):
        clicks(kind).discover(DAY)
    s3.restore()
    done = run(pipeline(lambda clicks: clicks), spark=spark, slot=DAY)

    assert SECRET not in "".join(traceback.format_exception(down.value))
    assert done is not None
    assert done.rows == 1


@pytest.mark.spark
def test_a_file_in_a_store_that_is_no_parquet_is_a_bad_record(spark: SparkSession, s3: S3Server) -> None:
    kind = "delta in s3"
    append(kind, rows(1))
    source = clicks(kind)
    broken = source.paths(fixed(source))[0].removeprefix("s3://")
    with Access.of(CONN_ID).open().open_output_stream(broken) as stream:
        stream.write(b"no parquet at all")
    found = fixed(source)

    with pytest.raises(Exception, match="twophase unread") as failed:
        source.read(spark, found, DAY).collect()
    explained = source.explain(found, failed.value)

    assert isinstance(explained, BadRecord)
    assert broken in str(explained)


@pytest.mark.parametrize(
    ("kind", "conn_id", "message"),
    [
        ("iceberg in s3", None, r"file s3://.* expected it on a disk; name the connection of its store by conn_id"),
        ("iceberg", CONN_ID, r"file file://.* expected it in an object store"),
    ],
)
def test_files_that_are_elsewhere_than_the_connection_leads_are_refused(
    kind: str, conn_id: str | None, message: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(kind, rows(1))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "twophase")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    reached = {**CATALOG, "s3.endpoint": f"http://127.0.0.1:{s3.port}", "s3.region": "us-east-1"}
    given = CATALOG if conn_id else reached

    with pytest.raises(ConfigError, match=message):
        sources.Interval("db.clicks", "iceberg", column="ts", catalog=given, conn_id=conn_id).discover(DAY)


@pytest.mark.spark
def test_names_of_other_engines_for_the_same_store_are_understood(spark: SparkSession, s3: S3Server) -> None:
    kind = "iceberg in s3"
    append(kind, rows(1))
    table = catalog(kind).load_table("db.clicks")
    [task] = table.scan().plan_files()
    with table.transaction() as transaction, transaction.update_snapshot().overwrite() as update:
        update.delete_data_file(task.file)
        update.append_data_file(named(task.file, str(task.file.file_path).replace("s3://", "s3a://")))
    source = clicks(kind)

    assert ids(source.read(spark, fixed(source), DAY)) == [1]


def test_a_bucket_that_is_not_there_is_named_before_anything_is_recorded(s3: S3Server) -> None:
    source = sources.Interval("s3://nowhere/clicks", "delta", column="ts", conn_id=CONN_ID)

    with pytest.raises(ConfigError, match="no bucket 'nowhere'"):
        source.prepare()


def test_delta_features_that_plain_files_do_not_have_are_refused() -> None:
    append("delta", rows(1))
    table = DeltaTable(str(data_path("lake/clicks")))
    table.alter.add_feature(TableFeatures.DeletionVectors, allow_protocol_versions_increase=True)

    with pytest.raises(ConfigError, match="deletionVectors"):
        clicks("delta").discover(DAY)


def test_iceberg_rows_that_a_delete_file_takes_out_by_position_are_refused() -> None:
    append("iceberg", rows(1, 2))
    table = catalog().load_table("db.clicks")
    [task] = table.scan().plan_files()
    path = str(task.file.file_path)
    deleted = delete_positions(table, {path: [0]})

    assert catalog().load_table("db.clicks").scan().to_arrow()["id"].to_pylist() == [2]
    with pytest.raises(ConfigError, match=f"file {path} has rows that delete file {deleted} takes out"):
        clicks("iceberg").discover(DAY)


def test_iceberg_rows_that_a_delete_file_takes_out_by_value_are_refused() -> None:
    append("iceberg", rows(1, 2))
    deleted = delete_values(catalog().load_table("db.clicks"), "id", [1])

    with pytest.raises(ConfigError, match=f"delete file {deleted} takes out rows by their values"):
        clicks("iceberg").discover(DAY)


@pytest.mark.parametrize(
    "change",
    [
        lambda update: update.rename_column("city", "town"),
        lambda update: update.update_column("n", LongType()),
    ],
    ids=["renamed", "promoted"],
)
def test_an_iceberg_column_that_older_files_have_otherwise_is_refused(change: Callable[[Any], Any]) -> None:
    append("iceberg", rows(1).append_column("n", pa.array([1], pa.int32())))
    with catalog().load_table("db.clicks").update_schema() as update:
        change(update)

    with pytest.raises(ConfigError, match=r"was (city string|n int) before"):
        clicks("iceberg").discover(DAY)


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_that_is_not_there_is_missing_or_waited_for(kind: str) -> None:
    data_path("lake").mkdir(parents=True)

    with pytest.raises(InputMissing, match=f"{kind.split(maxsplit=1)[0]} table"):
        clicks(kind).discover(DAY)
    with pytest.raises(NotYet):
        clicks(kind, on_missing="wait").discover(DAY)


@pytest.mark.parametrize(
    "arguments",
    [
        {"format": "delta"},
        {"format": "delta", "column": "ts", "schema": "id bigint, ts timestamp"},
        {"format": "delta", "column": "ts", "on_missing": "empty"},
        {"format": "delta", "column": "ts", "catalog": CATALOG},
        {"format": "iceberg", "column": "ts"},
        {"format": "iceberg", "column": "ts", "catalog": {"uri": "x", "token": "secret"}},
        {"format": "delta", "column": "ts", "conn_id": CONN_ID},
        {"format": "delta", "column": "ts", "path": "s3://lake/clicks"},
        {"format": "delta", "column": "ts", "path": "gs://lake/clicks", "conn_id": CONN_ID},
        {"format": "delta", "column": "ts", "path": "s3://lake", "conn_id": CONN_ID},
        {
            "format": "delta",
            "column": "ts",
            "path": "s3://lake/c",
            "conn_id": CONN_ID,
            "options": {"a": 1},
        },
        {"format": "parquet", "column": "ts", "path": "s3://lake/clicks", "conn_id": CONN_ID},
        {"format": "json", "path": "s3://lake/dt={start:%Y-%m-%d}"},
    ],
    ids=str,
)
def test_what_a_table_cannot_be_declared_with_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        sources.Interval(**{"path": "db.clicks", **arguments})


@pytest.mark.spark
@pytest.mark.parametrize("kind", KINDS)
def test_a_table_that_a_pipeline_wrote_is_read_by_the_intervals_of_another(
    kind: str, spark: SparkSession, record: PostgresRecord
) -> None:
    append(kind, rows(1, 2), by=("dt",))
    where: Any = {"path": f"{lake(kind)}/copied", "conn_id": CONN_ID if kind.endswith(IN_S3) else None}
    copied = sinks.Delta(**where, partition_by=["dt"])
    first = Pipeline("first", reads={"clicks": clicks(kind)}, transform=lambda clicks: clicks, writes={"lake": copied})
    last = Pipeline(
        "last",
        reads={"clicks": sources.Interval(**where, format="delta", column="ts")},
        transform=lambda clicks: clicks,
        writes={"lake": sinks.Files("lake/last")},
    )

    run(first, spark=spark, slot=DAY)
    done = run(last, spark=spark, slot=DAY)

    assert done is not None
    assert done.rows == 2
