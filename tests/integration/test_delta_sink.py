"""The Delta sink: staged below the table, in no log; promoted by one entry of the log that carries its marker."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError

from support.pipelines.factories import counted
from support.sinks.log_table_outputs import rows, stage
from support.sinks.log_table_promises import Promises
from support.sinks.log_tables import DeltaFormat, opened
from twophase.core.errors import ConfigError, Retryable
from twophase.core.hindrances import Hindrance
from twophase.core.ports import Outcome
from twophase.sinks import Delta

FORM = DeltaFormat()
STRANGERS = [{"id": -number, "word": "stranger", "frequency": 0} for number in (1, 2)]


class TestDelta(Promises):
    @pytest.fixture
    def form(self) -> DeltaFormat:
        return FORM


@pytest.fixture
def sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Delta:
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    table = Delta("lake/words")
    table.prepare()
    return table


def test_staged_output_is_below_a_folder_that_vacuum_skips(sink: Delta) -> None:
    assert stage(sink).folder.relative_to(sink.location()).parts[0] == "_twophase"


def test_a_promotion_and_a_replacement_are_one_entry_each(sink: Delta) -> None:
    old = stage(sink, 1)
    old.promote()
    assert opened(sink).version() == 1  # created empty, then one entry

    stage(sink, 1, 2, rows(1, 3, revision=2), revision=2, older=old).promote()

    assert opened(sink).version() == 2


def test_deltalake_itself_reads_partitions_as_the_log_has_them(sink: Delta) -> None:
    table = Delta("lake/parts", partition_by=["word"])
    table.prepare()
    odd = [{**row, "word": "a b%c:ü" if row["id"] % 2 else "__HIVE_DEFAULT_PARTITION__"} for row in rows(1)]
    names = {"a b%c:ü": "a b%25c%3Aü"}
    staged = stage(table, 1, content=[{**row, "word": names.get(row["word"], row["word"])} for row in odd])

    staged.promote()

    found = opened(table).to_pyarrow_table().to_pylist()
    assert {row["word"] for row in found} == {"a b%c:ü", None}
    assert opened(table).metadata().partition_columns == ["word"]


def test_an_append_only_table_gives_nothing_back(sink: Delta) -> None:
    table = Delta("lake/ledger", properties={"delta.appendOnly": "true"})
    table.prepare()
    assert table.objection(latest=True) is None

    stage(table, 1).promote()

    assert "append-only" in (table.objection(latest=True) or "")


# --- declaration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"path": "s3://bucket/t"}, "conn_id is missing"),
        ({"path": "hdfs://host/t"}, "expected a folder on a disk, or s3://"),
        ({"path": "t", "conn_id": "lake_s3"}, "with a path on a disk"),
        ({"path": "t", "partition_by": ["_day"]}, "cannot have this name"),
        ({"path": "t", "partition_by": ["a", "A"]}, "named twice"),
        ({"path": "t", "properties": {"delta.enableDeletionVectors": "true"}}, "enableDeletionVectors=true"),
        ({"path": "t", "properties": {"delta.columnMapping.mode": "name"}}, "columnMapping.mode=name"),
        ({"path": "t", "properties": {"delta.setTransactionRetentionDuration": "interval 1 day"}}, "RetentionDuration"),
        ({"path": "t", "properties": {"delta.constraints.positive": "id > 0"}}, "constraints.positive"),
    ],
)
def test_what_cannot_be_honoured_is_refused_when_declared(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Delta(**arguments)


def test_a_declaration_builds_an_equal_sink(sink: Delta) -> None:
    table = Delta("t", partition_by="day", options={"compression": "zstd"}, properties={"delta.appendOnly": "true"})

    assert Delta.load(table.declaration()).declaration() == table.declaration()


def test_a_table_of_others_is_written_to_unless_it_asks_for_what_cannot_be_honoured(sink: Delta) -> None:
    location = str(Path(sink.location()).parent / "theirs")
    table = pa.table({"id": [1], "word": ["x"], "frequency": [1]})
    write_deltalake(location, table)
    theirs = Delta("lake/theirs")
    theirs.prepare()
    stage(theirs, 1).promote()
    assert len(FORM.content(theirs)) == 5

    with pytest.raises(ConfigError, match=r"partition columns: expected .*word.*, found none"):
        Delta("lake/theirs", partition_by=["word"]).prepare()


def test_a_table_with_deletion_vectors_is_refused(sink: Delta) -> None:
    stage(sink, 1).promote()
    opened(sink).alter.add_feature(deltalake.TableFeatures.DeletionVectors, allow_protocol_versions_increase=True)

    with pytest.raises(ConfigError, match="feature deletionVectors"):
        sink.prepare()
    assert stage(sink, 2).promote().outcome is Outcome.FAILED


def test_a_library_that_is_lacking_is_named_with_its_interpreter(sink: Delta, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)

    with pytest.raises(ConfigError, match=f"it needs deltalake, which {sys.executable} lacks; install"):
        sink.prepare()


def test_a_folder_with_something_else_in_it_is_refused(sink: Delta) -> None:
    other = Path(sink.location()).parent / "other"
    other.mkdir()
    (other / "part.parquet").touch()

    with pytest.raises(ConfigError, match="no Delta log"):
        Delta("lake/other").prepare()


# --- maintenance -----------------------------------------------------------------------------------------------------


def test_the_tables_own_maintenance_eats_neither_staged_files_nor_the_marker(sink: Delta) -> None:
    old = stage(sink, 1)
    old.promote()
    new = stage(sink, 1, 2, rows(1, 3, revision=2), revision=2, older=old)
    new.promote()
    stage(sink, 2, 3).promote()
    staged = stage(sink, 3, 4)
    table = opened(sink)
    table.optimize.compact()
    table.create_checkpoint()
    table.cleanup_metadata()
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False, full=True)

    assert FORM.marker(sink) == 3
    assert sink.stands(old.output)
    assert new.promote().outcome is Outcome.ALREADY_PROMOTED  # its files were rewritten: the history tells
    staged.check()
    assert staged.promote().outcome is Outcome.PROMOTED
    assert counted(FORM.content(sink)) == counted([*rows(1, 3, revision=2), *rows(2), *rows(3)])


def test_a_table_whose_old_files_were_vacuumed_is_restored_without_losing_a_row(sink: Delta) -> None:
    """What the page says: a plain restore is refused then, and one that ignores missing files breaks every reader."""
    old = stage(sink, 1)
    old.promote()
    FORM.append(sink, STRANGERS[0])
    new = stage(sink, 1, 2, rows(1, 3, revision=2), revision=2, older=old)
    new.check()
    FORM.rewrite(sink)
    rewritten = opened(sink).version()
    opened(sink).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    FORM.append(sink, STRANGERS[1])
    assert new.promote().hindrance is Hindrance.REWRITTEN
    with pytest.raises(DeltaError, match="missing file"):
        opened(sink).restore(rewritten - 1)

    FORM.restore(sink)

    assert counted(FORM.content(sink)) == counted([*rows(1), *STRANGERS])
    assert new.promote().outcome is Outcome.PROMOTED
    assert counted(FORM.content(sink)) == counted([*rows(1, 3, revision=2), *STRANGERS])


def test_the_marker_survives_a_log_that_was_cleaned_up(sink: Delta) -> None:
    for number in range(1, 6):
        stage(sink, number).promote()
    opened(sink).create_checkpoint()
    for entry in Path(sink.location(), "_delta_log").glob("*.json"):
        if int(entry.stem) < 5:
            entry.unlink()

    assert FORM.marker(sink) == 5
    assert stage(sink, 6).promote().outcome is Outcome.PROMOTED
    assert len(FORM.content(sink)) == 24


def test_a_broken_log_is_an_error_in_words_that_may_be_tried_again(sink: Delta) -> None:
    stage(sink, 1).promote()
    entry = Path(sink.location(), "_delta_log", f"{1:020d}.json")
    entry.write_text("{ half an ent")

    with pytest.raises(Retryable, match=r"sinks\.Delta 'lake/words'"):
        sink.prepare()
    assert stage(sink, 2).promote().outcome is Outcome.RETRY_LATER


@pytest.mark.usefixtures("home")
def test_the_log_says_what_readers_skip_files_by() -> None:
    sink = Delta("lake/words")
    sink.prepare()
    stage(sink, files=1).promote()

    found = pa.table(DeltaTable(sink.location()).get_add_actions(flatten=True)).to_pylist()

    assert [(one["num_records"], one["min.id"], one["max.id"], one["null_count.word"]) for one in found] == [
        (4, 100, 103, 0)
    ]
