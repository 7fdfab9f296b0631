"""The Delta sink: staged below the table, in no log; promoted by one entry of the log that carries its marker."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import deltalake
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

import lake_cases
from factories import SCHEMA, Row, counted, write_attempt
from lake_cases import Staged, rows, stage
from processes import context, start, stopped_at_end
from twophase.core import failpoints
from twophase.core.checkpoint import Key
from twophase.core.errors import ConfigError, ManifestMismatch, Retryable
from twophase.core.failpoints import FailpointError
from twophase.core.manifest import Column
from twophase.core.ports import Outcome
from twophase.sinks import Delta

APP = f"twophase/{lake_cases.PIPELINE}"


@pytest.fixture
def sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Delta:
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    table = Delta("lake/words")
    table.prepare()
    return table


@pytest.fixture(autouse=True)
def _no_failpoints() -> Iterator[None]:
    yield
    failpoints.configure("")


def opened(sink: Delta) -> DeltaTable:
    return DeltaTable(sink.location())


def content(sink: Delta) -> list[Row]:
    """Read the table with polars, which wrote none of it."""
    return pl.read_delta(sink.location()).to_dicts()


def marker(sink: Delta) -> int | None:
    return opened(sink).transaction_version(APP)


def foreign(sink: Delta, number: int = 1) -> list[Row]:
    """Let somebody else append a row."""
    row = {"id": -number, "word": "foreign", "frequency": 0}
    write_deltalake(sink.location(), pa.Table.from_pylist([row]), mode="append")
    return [row]


# --- promote ---------------------------------------------------------------------------------------------------------


def test_staged_output_is_in_no_log_and_below_a_folder_that_readers_and_vacuum_skip(sink: Delta) -> None:
    first = stage(sink, 1)
    first.promote()

    second = stage(sink, 2)

    assert second.folder.relative_to(sink.location()).parts[0] == "_twophase"
    assert counted(content(sink)) == counted(rows(1))


def test_promotion_shows_every_row_in_one_entry_with_its_marker(sink: Delta) -> None:
    staged = stage(sink)

    promotion = staged.promote()

    assert promotion.outcome is Outcome.PROMOTED
    assert counted(content(sink)) == counted(rows(1))
    assert (opened(sink).version(), marker(sink)) == (1, 1)  # created empty, then one entry


def test_promoting_twice_changes_nothing(sink: Delta) -> None:
    staged = stage(sink)
    staged.promote()

    again = staged.promote()

    assert (again.outcome, again.attempt) == (Outcome.ALREADY_PROMOTED, 1)
    assert opened(sink).version() == 1


def test_a_late_promoter_finds_what_came_after_it_and_changes_nothing(sink: Delta) -> None:
    first = stage(sink, 1)
    first.promote()
    stage(sink, 2).promote()
    stage(sink, 1, 3, rows(1, 3, revision=2), revision=2, older=first).promote()
    before = opened(sink).version()

    late = first.promote()

    assert late.outcome is Outcome.ALREADY_PROMOTED
    assert opened(sink).version() == before


def test_an_output_without_rows_is_promoted_with_its_marker(sink: Delta) -> None:
    empty = stage(sink, 1, content=[])

    assert empty.promote().outcome is Outcome.PROMOTED
    assert empty.promote().outcome is Outcome.ALREADY_PROMOTED
    assert content(sink) == []
    assert marker(sink) == 1


def test_an_output_without_files_is_found_by_the_tables_history(sink: Delta) -> None:
    """The high-water mark alone would also say yes of a revision that never came here."""
    table = Delta("lake/parts", partition_by=["word"])
    table.prepare()
    empty, never = stage(table, 1, content=[]), stage(table, 2, content=[])
    assert empty.promote().outcome is Outcome.PROMOTED
    stage(table, 3).promote()

    assert empty.promote().outcome is Outcome.ALREADY_PROMOTED
    assert never.promote().outcome is Outcome.FAILED


def test_staged_output_that_is_gone_is_lost_only_after_the_marker_was_read_again(sink: Delta) -> None:
    staged = stage(sink)
    promoted = stage(sink, 2)
    promoted.promote()
    shutil.rmtree(promoted.folder)
    shutil.rmtree(staged.folder)

    assert promoted.find().outcome is Outcome.ALREADY_PROMOTED
    lost = stage(sink, 3)
    shutil.rmtree(lost.folder)
    assert lost.find().outcome is Outcome.FAILED
    assert "is gone" in (lost.promote().reason or "")
    assert marker(sink) == 2


@pytest.mark.parametrize("damage", ["missing", "truncated", "altered"])
@pytest.mark.parametrize("moment", ["vote", "promotion"])
def test_a_damaged_staged_file_is_named_and_nothing_becomes_visible(sink: Delta, damage: str, moment: str) -> None:
    staged = stage(sink)
    victim = sorted(staged.folder.glob("*.parquet"))[1]
    whole = victim.read_bytes()
    match damage:
        case "missing":
            victim.unlink()
        case "truncated":
            victim.write_bytes(whole[:-1])
        case _:
            victim.write_bytes(whole[:-1] + b"X")

    if moment == "vote":
        with pytest.raises(ManifestMismatch, match=victim.name):
            staged.check()
    else:
        promotion = staged.promote()
        assert promotion.outcome is Outcome.FAILED
        assert victim.name in (promotion.reason or "")
        assert marker(sink) is None


def test_what_a_straggling_task_left_never_becomes_visible(sink: Delta) -> None:
    staged = stage(sink)
    (staged.folder / "part-late.parquet").write_bytes(b"half a file")

    staged.promote()

    assert counted(content(sink)) == counted(rows(1))
    assert not list(sink.verify(staged.output))


def test_a_table_whose_folder_is_away_is_asked_again_later(sink: Delta) -> None:
    staged = stage(sink)
    Path(sink.location()).rename(f"{sink.location()}.away")

    assert staged.promote().outcome is Outcome.RETRY_LATER
    assert "is it mounted" in (staged.find().reason or "")


# --- other writers ---------------------------------------------------------------------------------------------------


def test_rows_of_other_writers_come_between_and_stay(sink: Delta) -> None:
    stage(sink, 1).promote()
    theirs = foreign(sink)

    stage(sink, 2).promote()

    assert counted(content(sink)) == counted([*rows(1), *theirs, *rows(2)])
    assert not list(sink.strangers([]))[2:]  # two attempts of ours, and nothing of theirs


def test_a_writer_that_is_faster_does_not_stop_a_promotion(sink: Delta, monkeypatch: pytest.MonkeyPatch) -> None:
    stage(sink, 1).promote()
    commit = DeltaTable.create_write_transaction
    theirs: list[Row] = []

    def beaten(table: DeltaTable, *args: Any, **kwargs: Any) -> None:
        if len(theirs) < 3:
            theirs.extend(foreign(sink, len(theirs) + 1))
        commit(table, *args, **kwargs)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", beaten)

    assert stage(sink, 2).promote().outcome is Outcome.PROMOTED
    assert counted(content(sink)) == counted([*rows(1), *rows(2), *theirs])


def test_a_commit_whose_reply_was_lost_is_found_by_its_marker(sink: Delta, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = DeltaTable.create_write_transaction

    def lost(table: DeltaTable, *args: Any, **kwargs: Any) -> None:
        commit(table, *args, **kwargs)
        msg = "connection reset"
        raise OSError(msg)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", lost)

    assert stage(sink).promote().outcome is Outcome.ALREADY_PROMOTED
    assert counted(content(sink)) == counted(rows(1))


def test_a_store_that_does_not_answer_is_asked_again_later(sink: Delta, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(*_: Any, **__: Any) -> None:
        msg = "no route to host"
        raise OSError(msg)

    staged = stage(sink)
    with monkeypatch.context() as patched:
        patched.setattr(DeltaTable, "create_write_transaction", down)
        waiting = staged.promote()

    assert (waiting.outcome, waiting.reason) == (Outcome.RETRY_LATER, "no route to host")
    assert staged.promote().outcome is Outcome.PROMOTED


@pytest.mark.parametrize("rounds", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_of_two_promoters_at_once_one_commits(sink: Delta, tmp_path: Path, rounds: int) -> None:
    expected: list[Row] = []
    for number in range(1, rounds + 1):
        staged = stage(sink, number)
        barrier = context.Barrier(2)
        both = [
            start(
                lake_cases.promote,
                sink.declaration(),
                staged.arguments,
                barrier,
                log=tmp_path / f"{number}.{which}.log",
            )
            for which in "ab"
        ]
        with stopped_at_end(*both):
            assert [child.wait() for child in both] == [0, 0], [child.said for child in both]
        expected += rows(number)
        said = sorted(child.said.partition(":")[0] for child in both)
        assert said == ["outcome already promoted", "outcome promoted"]

    assert counted(content(sink)) == counted(expected)
    assert marker(sink) == rounds


# --- crashes ---------------------------------------------------------------------------------------------------------

POINTS = ("table.created", "table.widened", "promote.checked", "promote.visible", "promote.durable")
WIDER = (*SCHEMA, Column("city", "string"))


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_crash_between_any_two_steps_is_finished_by_the_next_promoter(
    sink: Delta, tmp_path: Path, point: str, how: str
) -> None:
    if point != "table.created":
        stage(sink, 1).promote()
    staged = stage(sink, 2, content=[{**row, "city": "Ulm"} for row in rows(2)], schema=WIDER)
    if how == "kill":
        child = start(
            lake_cases.promote, sink.declaration(), staged.arguments, log=tmp_path / "log", failpoints=f"{point}=kill"
        )
        assert child.wait() == -9, child.said
    else:
        failpoints.configure(f"{point}=raise")
        with pytest.raises(FailpointError):
            staged.promote()
        failpoints.configure("")

    promotion = staged.promote()

    done = point in {"promote.visible", "promote.durable"}
    assert promotion.outcome is (Outcome.ALREADY_PROMOTED if done else Outcome.PROMOTED)
    assert sum(row["id"] >= 200 for row in content(sink)) == 4


@pytest.mark.parametrize("point", ["promote.checked", "promote.visible"])
def test_a_promoter_that_wakes_after_another_has_replaced_its_revision_changes_nothing(
    sink: Delta, tmp_path: Path, point: str
) -> None:
    stage(sink, 1).promote()
    staged = stage(sink, 2)
    late = start(
        lake_cases.promote, sink.declaration(), staged.arguments, log=tmp_path / "log", failpoints=f"{point}=stop"
    )
    with stopped_at_end(late):
        assert late.until_stopped(), late.said
        staged.promote()
        stage(sink, 2, 3, rows(2, 2, revision=2), revision=2, older=staged).promote()
        before = opened(sink).version()

        late.wake()
        assert late.wait() == 0, late.said

    assert opened(sink).version() == before
    assert "already promoted" in late.said or point == "promote.visible"
    assert counted(content(sink)) == counted([*rows(1), *rows(2, 2, revision=2)])


# --- replacement -----------------------------------------------------------------------------------------------------


def replaced(sink: Delta) -> tuple[Staged, Staged]:
    old = stage(sink, 1)
    old.promote()
    new = stage(sink, 1, 2, rows(1, 3, revision=2), revision=2, older=old)
    new.check()
    assert new.promote().outcome is Outcome.PROMOTED
    return old, new


def test_a_replacement_takes_the_old_files_out_and_puts_the_new_in_by_one_entry(sink: Delta) -> None:
    old, new = replaced(sink)

    assert opened(sink).version() == 2
    assert counted(content(sink)) == counted(rows(1, 3, revision=2))
    assert not list(sink.verify(new.output))
    assert sink.stands(old.output)
    assert [left.path for left in sink.superseded()] == [str(old.folder)]


def test_what_was_replaced_is_forgotten_when_its_retention_is_over_and_not_before(sink: Delta) -> None:
    old, new = replaced(sink)
    assert len(sink.files(old.output)) == 2

    for left in sink.superseded():
        sink.forget(left)

    assert not old.folder.exists()
    assert not sink.stands(old.output)
    assert counted(content(sink)) == counted(rows(1, 3, revision=2))
    assert not list(sink.verify(new.output))


def test_files_that_another_writer_rewrote_are_not_replaced_blindly(sink: Delta) -> None:
    """The library itself would accept to take out what is not there, and the rows would be there twice."""
    old = stage(sink, 1)
    old.promote()
    new = stage(sink, 1, 2, rows(1, 3, revision=2), revision=2, older=old)
    opened(sink).optimize.compact()

    with pytest.raises(ManifestMismatch, match="rewritten or removed by another writer"):
        new.check()
    refused = new.promote()

    assert refused.outcome is Outcome.FAILED
    assert "cannot be replaced" in (refused.reason or "")
    assert counted(content(sink)) == counted(rows(1))


def test_a_compaction_in_the_instant_of_a_replacement_doubles_nothing(
    sink: Delta, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = stage(sink, 1)
    old.promote()
    new = stage(sink, 1, 2, rows(1, 3, revision=2), revision=2, older=old)
    commit = DeltaTable.create_write_transaction

    def beaten(table: DeltaTable, *args: Any, **kwargs: Any) -> None:
        opened(sink).optimize.compact()
        commit(table, *args, **kwargs)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", beaten)

    assert new.promote().outcome is Outcome.FAILED
    assert counted(content(sink)) == counted(rows(1))


def test_an_append_only_table_gives_nothing_back(sink: Delta) -> None:
    table = Delta("lake/ledger", properties={"delta.appendOnly": "true"})
    table.prepare()
    assert table.objection(latest=True) is None

    stage(table, 1).promote()

    assert "append-only" in (table.objection(latest=True) or "")


# --- restage ---------------------------------------------------------------------------------------------------------


def test_what_was_voted_for_before_a_restage_counts_when_it_is_found_in_the_table(sink: Delta) -> None:
    """R10: the record adopts the attempt that the sink holds."""
    lost = stage(sink, 1, attempt=1)
    again = stage(sink, 1, attempt=2, earlier=[lost])
    lost.promote()

    found = again.promote()

    assert (found.outcome, found.attempt) == (Outcome.ALREADY_PROMOTED, 1)
    assert found.manifest == lost.output.manifest
    assert counted(content(sink)) == counted(rows(1))


def test_a_marker_of_a_newer_record_is_not_taken_for_a_promotion(sink: Delta) -> None:
    """A restored record hands out the same numbers again: its rows must not be dropped in silence."""
    stage(sink, 1, 1).promote()
    stage(sink, 2, 2).promote()
    after_restore = stage(sink, 3, 2, token="beef")

    refused = after_restore.promote()

    assert refused.outcome is Outcome.FAILED
    assert "the record is older than the table" in (refused.reason or "")


# --- schema ----------------------------------------------------------------------------------------------------------


def test_a_new_column_is_added_and_older_rows_have_none(sink: Delta) -> None:
    stage(sink, 1).promote()
    wider = stage(sink, 2, content=[{**row, "city": "Ulm"} for row in rows(2)], schema=WIDER)
    wider.check()

    assert wider.promote().outcome is Outcome.PROMOTED

    found = {row["id"]: row["city"] for row in content(sink)}
    assert (found[100], found[200]) == (None, "Ulm")
    assert stage(sink, 3).promote().outcome is Outcome.PROMOTED  # a narrower one may follow


def test_a_column_of_another_type_is_refused_before_the_vote(sink: Delta) -> None:
    stage(sink, 1).promote()
    other = (Column("id", "string"), *SCHEMA[1:])
    wrong = stage(sink, 2, content=[{**row, "id": "x"} for row in rows(2)], schema=other)

    with pytest.raises(ManifestMismatch, match="column 'id': expected id bigint as in the table, found id string"):
        wrong.check()
    assert wrong.promote().outcome is Outcome.FAILED


def test_partitions_are_folders_and_values_of_the_log(sink: Delta) -> None:
    table = Delta("lake/days", partition_by=["day", "word"])
    table.prepare()
    schema = (*SCHEMA, Column("day", "date"))
    days = [{**row, "day": date(2026, 11, 15 + row["id"] % 2)} for row in rows(1)]
    staged = stage(table, 1, content=days, schema=schema)
    staged.check()

    staged.promote()

    assert counted(content(table)) == counted(days)
    assert opened(table).metadata().partition_columns == ["day", "word"]
    assert {str(part["day"]) for part in opened(table).partitions()} == {"2026-11-15", "2026-11-16"}
    with table.staged(*staged.arguments) as relation:
        assert relation.value("SELECT count(*) FROM staged WHERE day = DATE '2026-11-15' AND word = 'w0'") == 2
    replacement = stage(table, 1, 2, days[:1], revision=2, older=staged, schema=schema)
    replacement.promote()
    assert counted(content(table)) == counted(days[:1])


def test_a_job_of_ones_own_is_sealed_by_what_its_files_and_folders_say(sink: Delta) -> None:
    table = Delta("lake/days", partition_by=["day"])
    table.prepare()
    schema = (*SCHEMA, Column("day", "date"))
    days = [{**row, "day": date(2026, 11, 15)} for row in rows(1)]
    stage(table, 1, content=days, schema=schema).promote()
    key = Key(lake_cases.PIPELINE, 2, 1)
    handle = {**table.place(key, 1, "7c1e"), "commit_seq": 2}
    later = [{**row, "day": date(2026, 11, 16)} for row in rows(2)]
    write_attempt(table, Path(table.staging_path(key, handle)), later, schema, "part", 1)

    manifest = table.inspect(key, 1, "lake", handle)

    assert ["day", "date"] in manifest["schema"]  # as in the table: the folder's name alone would be a text
    assert table.inspect(key, 1, "lake", handle) == manifest
    table.check(key, handle, manifest)
    assert table.promote(key, handle, manifest).outcome is Outcome.PROMOTED
    assert len(content(table)) == 8
    other = table.place(key, 2, "beef")
    with pytest.raises(ManifestMismatch, match="wrote nothing"):
        table.inspect(key, 2, "lake", other)


# --- declaration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"path": "s3://bucket/t"}, "found a URL"),
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
    assert len(content(theirs)) == 5

    with pytest.raises(ConfigError, match=r"partition columns: expected .*word.*, found none"):
        Delta("lake/theirs", partition_by=["word"]).prepare()
    DeltaTable(location).alter.add_constraint({"positive": "id > 0"})
    with pytest.raises(ConfigError, match=r"delta\.constraints\.positive"):
        theirs.prepare()


def test_a_table_with_deletion_vectors_is_refused(sink: Delta) -> None:
    stage(sink, 1).promote()
    opened(sink).alter.add_feature(deltalake.TableFeatures.DeletionVectors, allow_protocol_versions_increase=True)

    with pytest.raises(ConfigError, match="feature deletionVectors"):
        sink.prepare()
    assert stage(sink, 2).promote().outcome is Outcome.FAILED


def test_a_column_that_must_not_be_null_is_refused(sink: Delta) -> None:
    strict = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("word", pa.string())])
    DeltaTable.create(str(Path(sink.location()).parent / "strict"), strict)

    with pytest.raises(ConfigError, match="column 'id' has NOT NULL"):
        Delta("lake/strict").prepare()


def test_a_folder_with_something_else_in_it_is_refused(sink: Delta) -> None:
    other = Path(sink.location()).parent / "other"
    other.mkdir()
    (other / "part.parquet").touch()

    with pytest.raises(ConfigError, match="no Delta log"):
        Delta("lake/other").prepare()


# --- maintenance -----------------------------------------------------------------------------------------------------


def test_the_tables_own_maintenance_eats_neither_staged_files_nor_the_marker(sink: Delta) -> None:
    old, new = replaced(sink)
    stage(sink, 2, 3).promote()
    staged = stage(sink, 3, 4)
    table = opened(sink)
    table.optimize.compact()
    table.create_checkpoint()
    table.cleanup_metadata()
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False, full=True)

    assert marker(sink) == 3
    assert sink.stands(old.output)
    assert new.promote().outcome is Outcome.ALREADY_PROMOTED  # its files were rewritten: the history tells
    staged.check()
    assert staged.promote().outcome is Outcome.PROMOTED
    assert counted(content(sink)) == counted([*rows(1, 3, revision=2), *rows(2), *rows(3)])


def test_the_marker_survives_a_log_that_was_cleaned_up(sink: Delta) -> None:
    for number in range(1, 6):
        stage(sink, number).promote()
    opened(sink).create_checkpoint()
    for entry in Path(sink.location(), "_delta_log").glob("*.json"):
        if int(entry.stem) < 5:
            entry.unlink()

    assert marker(sink) == 5
    assert stage(sink, 6).promote().outcome is Outcome.PROMOTED
    assert len(content(sink)) == 24


def test_discarding_removes_what_every_attempt_of_a_revision_staged_and_nothing_else(sink: Delta) -> None:
    stage(sink, 1).promote()
    first, second, other = stage(sink, 2, attempt=1), stage(sink, 2, attempt=2, token="beef"), stage(sink, 3)

    sink.discard(second.key, second.handle)

    assert not first.folder.exists()
    assert not second.folder.exists()
    assert other.folder.exists()
    assert {left.checkpoint_id for left in sink.attempts()} == {1, 3}
    sink.discard(second.key, second.handle)


def test_what_is_in_the_table_is_never_removed_whatever_a_record_says(sink: Delta) -> None:
    staged = stage(sink, 1)
    staged.promote()

    for left in list(sink.attempts()):
        sink.remove(left)
    for old in list(sink.superseded()):
        sink.forget(old)

    assert counted(content(sink)) == counted(rows(1))
    assert not list(sink.verify(staged.output))


def test_what_a_killed_sweep_left_is_found_by_the_next(sink: Delta) -> None:
    staged = stage(sink, 1)
    staged.folder.rename(staged.folder.with_name(f"{staged.folder.name}.0123.dead"))

    for left in list(sink.attempts()):
        sink.remove(left)

    assert [path.name for path in Path(sink.location(), "_twophase").iterdir()] == ["manifests"]
    assert not list(Path(sink.location(), "_twophase", "manifests").iterdir())


def test_verify_names_what_is_missing_altered_or_not_in_the_log(sink: Delta) -> None:
    staged = stage(sink, 1)
    staged.promote()
    other = stage(sink, 2)
    other.promote()
    opened(sink).delete("id >= 200")
    victim = min(staged.folder.glob("*.parquet"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"X")

    assert ["expected checksum" in difference for difference in sink.verify(staged.output)] == [True]
    assert ["is not in the table" in difference for difference in sink.verify(other.output)] == [True, True]


def test_our_files_that_no_committed_checkpoint_knows_are_strange(sink: Delta) -> None:
    known, unknown = stage(sink, 1), stage(sink, 2)
    known.promote()
    unknown.promote()
    foreign(sink)

    assert [unknown.folder.name in stranger for stranger in sink.strangers([known.output])] == [True]
    assert not list(sink.strangers([known.output, unknown.output]))


def test_a_broken_log_is_an_error_in_words_that_may_be_tried_again(sink: Delta) -> None:
    stage(sink, 1).promote()
    entry = Path(sink.location(), "_delta_log", f"{1:020d}.json")
    entry.write_text("{ half an ent")

    with pytest.raises(Retryable, match=r"sinks\.Delta 'lake/words'"):
        sink.prepare()
    assert stage(sink, 2).promote().outcome is Outcome.RETRY_LATER
