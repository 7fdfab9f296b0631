"""The Iceberg sink: staged beside the table, in no snapshot; promoted by one commit to the catalog with its marker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform
from pyiceberg.typedef import Record
from pyiceberg.types import LongType, NestedField, StringType, TimestampType

from support.pipelines.factories import SCHEMA, counted, write_attempt
from support.sinks.iceberg_deletes import delete_positions, delete_values
from support.sinks.log_table_format import DAYS
from support.sinks.log_table_outputs import Staged, rows, stage
from support.sinks.log_table_promises import Promises
from support.sinks.log_tables import CATALOG, IcebergFormat, table
from twophase.core.checkpoint import Key, Output
from twophase.core.errors import ConfigError, ManifestMismatch
from twophase.core.manifest import Column
from twophase.core.ports import Outcome
from twophase.sinks import Iceberg

FORM = IcebergFormat()
#: Manifests are merged by every second promotion.
MERGED = {"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "2"}


class TestIceberg(Promises):
    @pytest.fixture
    def form(self) -> IcebergFormat:
        return FORM


@pytest.fixture
def sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iceberg:
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    made = FORM.make("lake/words")
    made.prepare()
    return made


def catalog(sink: Iceberg) -> SqlCatalog:
    assert isinstance(sink.catalog, dict)
    found = SqlCatalog("default", **sink.catalog)
    found.create_namespace_if_not_exists("db")
    return found


def test_staged_output_is_beside_the_tables_folder_where_nobody_looks_for_orphans(sink: Iceberg) -> None:
    assert not stage(sink).folder.is_relative_to(sink.location())


def test_polars_reads_the_table(sink: Iceberg, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    stage(sink, 1).promote()

    assert counted(pl.scan_iceberg(table(sink)).collect().to_dicts()) == counted(rows(1))


def test_the_marker_and_the_data_are_in_one_commit(sink: Iceberg) -> None:
    stage(sink, 1).promote()
    before = len(table(sink).metadata.metadata_log)

    stage(sink, 2).promote()

    after = table(sink)
    assert len(after.metadata.metadata_log) == before + 1
    assert after.properties["twophase.words.words"].startswith("2 words/2 r1 a1 ")
    assert "commit.retry.num-retries" not in after.properties


def test_two_tables_of_one_pipeline_have_markers_of_their_own(sink: Iceberg) -> None:
    other = Iceberg("db.words", path="lake/more", catalog=CATALOG)
    other.prepare()
    stage(sink, 1).promote()

    assert stage(other, 1).promote().outcome is Outcome.PROMOTED
    assert len(FORM.content(sink)) == 8


def test_expired_snapshots_take_neither_the_marker_nor_what_was_replaced(sink: Iceberg) -> None:
    old = stage(sink, 1)
    old.promote()
    new = stage(sink, 1, 2, rows(1, 3, revision=2), revision=2, older=old)
    new.promote()
    empty = stage(sink, 2, 3, [])
    empty.promote()
    staged = stage(sink, 3, 4)
    found = table(sink)
    found.maintenance.expire_snapshots().older_than(datetime.now(UTC) + timedelta(days=1)).commit()

    assert len(table(sink).snapshots()) == 1
    assert FORM.marker(sink) == 3
    assert [one.promote().outcome for one in (new, empty)] == [Outcome.ALREADY_PROMOTED] * 2
    assert old.promote().outcome is Outcome.FAILED  # nothing tells it from another record's, and nothing is changed
    assert sink.stands(old.output)
    assert staged.promote().outcome is Outcome.PROMOTED
    assert counted(FORM.content(sink)) == counted([*rows(1, 3, revision=2), *rows(3)])


# --- delete files of other writers -----------------------------------------------------------------------------------


def paths(staged: Staged) -> list[str]:
    """Return the data files of an attempt as the table knows them."""
    return sorted(f"file://{path}" for path in map(str, staged.folder.glob("*.parquet")))


@pytest.mark.parametrize("properties", [{}, {"commit.manifest-merge.enabled": "false"}, MERGED], ids=str)
def test_rows_that_delete_files_took_out_stay_out_whatever_is_promoted_later(
    sink: Iceberg, properties: dict[str, str]
) -> None:
    sink = Iceberg("db.words", path="lake/words", catalog=CATALOG, properties=properties)
    first, other = stage(sink, 1), stage(sink, 2)
    first.promote()
    other.promote()
    delete_positions(table(sink), {paths(first)[0]: [0]})
    left = counted(FORM.content(sink))
    assert len(left) == 7

    assert stage(sink, 3).promote().outcome is Outcome.PROMOTED
    assert counted(FORM.content(sink)) == left + counted(rows(3))

    new = stage(sink, 2, 4, rows(2, 3, revision=2), revision=2, older=other)
    new.check()
    assert new.promote().outcome is Outcome.PROMOTED
    assert counted(FORM.content(sink)) == left - counted(rows(2)) + counted(rows(3)) + counted(rows(2, 3, revision=2))
    assert not list(sink.verify(new.output))


@pytest.mark.parametrize("how", ["position", "value"])
def test_a_checkpoint_that_delete_files_took_rows_out_of_is_not_replaced_blindly(sink: Iceberg, how: str) -> None:
    """The rows that somebody had to take out would be back."""
    old, other = stage(sink, 1), stage(sink, 2)
    old.promote()
    other.promote()
    new = stage(sink, 1, 3, rows(1, 3, revision=2), revision=2, older=old)
    victim = paths(old)[0]
    if how == "position":
        delete_positions(table(sink), {victim: [0]})
    else:
        delete_values(table(sink), "id", [rows(1)[0]["id"]])
    before = FORM.commits(sink)

    with pytest.raises(ManifestMismatch, match="has rows that delete files of another writer take out"):
        new.check()
    refused = new.promote()
    named = [Path(problem.split()[0]).name for problem in sink.verify(old.output)]

    assert refused.outcome is Outcome.FAILED
    assert "cannot be replaced" in (refused.reason or "")
    assert FORM.commits(sink) == before
    assert named == [Path(victim).name] if how == "position" else len(named) == 2


def test_a_delete_file_in_the_instant_of_a_replacement_is_not_lost(
    sink: Iceberg, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = stage(sink, 1)
    old.promote()
    new = stage(sink, 1, 2, rows(1, 3, revision=2), revision=2, older=old)
    deleted: list[str] = []

    def beaten(commit: Callable[[], object]) -> None:
        if not deleted:
            deleted.append(delete_positions(table(sink), {paths(old)[0]: [0]}))
        commit()

    FORM.committing(monkeypatch, beaten)

    assert new.promote().outcome is Outcome.FAILED
    assert len(FORM.content(sink)) == 3


def test_delete_files_that_are_older_than_a_checkpoint_are_no_matter_of_its(sink: Iceberg) -> None:
    stage(sink, 1).promote()
    delete_values(table(sink), "id", [rows(2)[0]["id"]])
    old = stage(sink, 2)
    old.promote()
    new = stage(sink, 2, 3, rows(2, 3, revision=2), revision=2, older=old)

    new.check()
    assert new.promote().outcome is Outcome.PROMOTED
    assert not list(sink.verify(new.output))


def test_values_that_are_taken_out_of_one_partition_leave_the_others_alone(sink: Iceberg) -> None:
    sink = Iceberg("db.parts", path="lake/parts", catalog=CATALOG, partition_by=["word"])
    sink.prepare()
    old = stage(sink, 1, content=[row for row in rows(1) if row["word"] == "w0"])
    other = stage(sink, 2, content=[row for row in rows(2) if row["word"] == "w1"])
    old.promote()
    other.promote()
    delete_values(table(sink), "id", [101], Record("w1"))

    assert not list(sink.verify(old.output))
    assert list(sink.verify(other.output))


MOST = "history.twophase.max-snapshots"


def limited(most: str) -> Iceberg:
    made = Iceberg("db.words", path="lake/words", catalog=CATALOG, properties={MOST: most})
    made.prepare()
    return made


def test_a_promotion_leaves_so_many_snapshots_as_the_table_says(sink: Iceberg) -> None:
    sink = limited("3")
    staged = [stage(sink, number) for number in range(1, 6)]

    left = []
    for one in staged:
        assert one.promote().outcome is Outcome.PROMOTED
        left.append(len(table(sink).snapshots()))

    assert left == [1, 2, 3, 3, 3]
    assert counted(FORM.content(sink)) == counted([row for number in range(1, 6) for row in rows(number)])
    assert [one.promote().outcome for one in staged] == [Outcome.ALREADY_PROMOTED] * 5


def test_a_limit_of_one_snapshot_keeps_the_one_before_too(sink: Iceberg) -> None:
    sink = limited("1")

    assert [stage(sink, number).promote().outcome for number in (1, 2, 3)] == [Outcome.PROMOTED] * 3
    assert len(table(sink).snapshots()) == 2


def test_a_snapshot_that_another_writer_expires_meanwhile_does_not_stop_a_promotion(
    sink: Iceberg, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = limited("2")
    for number in (1, 2):
        stage(sink, number).promote()

    def expired(commit: Callable[[], object]) -> None:
        table(sink).maintenance.expire_snapshots().older_than(datetime.now(UTC) + timedelta(days=1)).commit()
        commit()

    FORM.committing(monkeypatch, expired)

    assert stage(sink, 3).promote().outcome is Outcome.PROMOTED
    assert counted(FORM.content(sink)) == counted([row for number in (1, 2, 3) for row in rows(number)])


def test_a_commit_that_was_sent_twice_on_its_way_is_found_and_can_be_read(
    sink: Iceberg, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a proxy that lost the first reply: the second one says that the commit conflicts, with itself."""
    stage(sink, 1).promote()
    commit = SqlCatalog.commit_table

    def sent_twice(catalog: SqlCatalog, *arguments: Any) -> object:
        commit(catalog, *arguments)
        return commit(catalog, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(SqlCatalog, "commit_table", sent_twice)
        found = stage(sink, 2).promote()

    assert found.outcome is Outcome.ALREADY_PROMOTED
    assert counted(FORM.content(sink)) == counted([*rows(1), *rows(2)])


def test_a_long_history_that_gets_a_limit_goes_by_and_by(sink: Iceberg, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twophase.sinks.log_tables.iceberg._EXPIRED_AT_ONCE", 2)
    for number in range(1, 8):
        stage(sink, number).promote()
    with table(sink).transaction() as change:
        change.set_properties({MOST: "3"})

    left = []
    for number in range(8, 13):
        stage(sink, number).promote()
        left.append(len(table(sink).snapshots()))

    assert left == [6, 5, 4, 3, 3]


def test_the_snapshots_of_a_table_with_a_tag_or_without_a_limit_are_its_owners_matter(sink: Iceberg) -> None:
    sink = limited("2")
    stage(sink, 1).promote()
    first = table(sink).current_snapshot()
    assert first is not None
    table(sink).manage_snapshots().create_tag(first.snapshot_id, "audited").commit()
    for number in range(2, 5):
        stage(sink, number).promote()

    assert len(table(sink).snapshots()) == 4

    table(sink).manage_snapshots().remove_tag("audited").commit()
    with table(sink).transaction() as change:
        change.remove_properties(MOST)
    stage(sink, 5).promote()
    assert len(table(sink).snapshots()) == 5


def test_a_limit_of_snapshots_is_a_number(sink: Iceberg) -> None:
    with pytest.raises(ConfigError, match=f"property {MOST}: expected a number, found '-1'"):
        limited("-1")
    stage(sink, 1).promote()
    with table(sink).transaction() as change:
        change.set_properties({MOST: "many"})

    with pytest.raises(ConfigError, match=f"property {MOST}: expected a number, found 'many'"):
        sink.prepare()


def test_two_values_of_a_partition_column_in_one_file_are_refused(sink: Iceberg) -> None:
    parts = FORM.make("lake/parts", partition_by=["word"])
    parts.prepare()
    key = Key("words", 1, 1)
    output = Output(key, 1, parts.place(key, 1, "7c1e"), commit_seq=1, sink="lake")
    plain = FORM.make("lake/plain")
    write_attempt(plain, Path(parts.staging_path(output)), rows(1), DAYS[:3], "part", 1)

    refused = parts.promote(replace(output, manifest=parts.inspect(output)))

    assert refused.outcome is Outcome.FAILED
    assert "more than one partition values" in (refused.reason or "")


# --- declaration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"table": "words"}, "expected namespace.table"),
        ({"path": "lake/50%"}, "cannot have #, . or % in it"),
        ({"path": "s3://bucket/t"}, "conn_id is missing"),
        ({"properties": {"format-version": "3"}}, "format-version 3 cannot be honoured"),
        ({"catalog": {"type": "rest", "token": "canary"}}, "'token' is a secret"),
        ({"catalog": {"type": "sql", "uri": "postgresql://me:canary@host/db"}}, "'uri' is a secret"),
    ],
)
def test_what_cannot_be_honoured_or_kept_secret_is_refused_when_declared(
    sink: Iceberg, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        Iceberg(**{"table": "db.t", "path": "t", "catalog": CATALOG, **arguments})
    assert "canary" not in str(refused.value)


def test_a_declaration_builds_an_equal_sink(sink: Iceberg) -> None:
    made = FORM.make("t", partition_by="day", options={"compression": "zstd"}, properties={"owner": "me"})

    assert Iceberg.load(made.declaration()).declaration() == made.declaration()


@pytest.mark.parametrize(
    ("partition", "schema", "says"),
    [
        (BucketTransform(4), LongType(), r"partition bucket\[4\] of x cannot be honoured"),
        (DayTransform(), TimestampType(), "partition day of x cannot be honoured"),
        (IdentityTransform(), StringType(), r"partition columns: expected none, found \['x'\]"),
    ],
)
def test_a_table_with_other_partitions_is_refused(sink: Iceberg, partition: Any, schema: Any, says: str) -> None:
    fields = Schema(NestedField(1, "x", schema, required=False))
    spec = PartitionSpec(PartitionField(source_id=1, field_id=1000, transform=partition, name="p"))
    catalog(sink).create_table("db.other", fields, location=f"file://{sink.location()}-other", partition_spec=spec)

    with pytest.raises(ConfigError, match=says):
        Iceberg("db.other", path="lake/other", catalog=CATALOG).prepare()


def test_a_catalog_in_postgres_comes_from_a_connection_that_only_promoters_see(
    sink: Iceberg, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = dsn.replace("postgresql+psycopg2://", "postgres://")
    monkeypatch.setenv("AIRFLOW_CONN_LAKE_CATALOG", address)
    made = Iceberg("db.words", path="lake/words", catalog="lake_catalog")
    made.prepare()

    first = stage(made, 1)
    assert first.promote().outcome is Outcome.PROMOTED
    assert first.promote().outcome is Outcome.ALREADY_PROMOTED

    kept = f"{made.declaration()} {first.handle} {first.output.manifest}"
    assert "lake_catalog" in kept
    assert address.partition("://")[2] not in kept
    assert made.connections() == ()


def test_a_catalog_whose_connection_is_missing_or_of_another_kind_is_an_error_in_words(
    sink: Iceberg, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Iceberg("db.words", path="lake/words", catalog="lake_catalog")
    with pytest.raises(ConfigError, match="set AIRFLOW_CONN_LAKE_CATALOG"):
        made.prepare()
    monkeypatch.setenv("AIRFLOW_CONN_LAKE_CATALOG", "mysql://me:canary@host/db")
    with pytest.raises(ConfigError, match="expected type postgres or iceberg, found 'mysql'") as refused:
        made.prepare()
    assert "canary" not in str(refused.value)


def test_what_was_voted_for_before_a_column_was_widened_is_promoted_after_it(sink: Iceberg) -> None:
    """A replacement may be decided with the narrow type and come after the wide one: it fits, as older files do."""
    narrow, wide = ((Column("id", kind), *SCHEMA[1:]) for kind in ("int", "bigint"))
    first = stage(sink, 1, schema=narrow)
    first.promote()
    voted = stage(sink, 1, 3, schema=narrow, revision=2, older=first)
    voted.check()
    wider = stage(sink, 2, schema=wide, content=[{**row, "id": row["id"] + 2**40} for row in rows(2)])
    wider.check()

    assert wider.promote().outcome is Outcome.PROMOTED
    assert voted.promote().outcome is Outcome.PROMOTED

    found = sorted(row["id"] for row in FORM.content(sink))
    assert found == [100, 101, 102, 103, *(2**40 + number for number in (200, 201, 202, 203))]
    with pytest.raises(ManifestMismatch, match="expected id bigint as in the table, found id int; cast it"):
        stage(sink, 3, schema=narrow).check()
