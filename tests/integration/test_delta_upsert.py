"""The upsert of a Delta table: one merge per checkpoint, which carries the marker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from support.pipelines.factories import Row
from support.sinks.log_table_outputs import Staged, stage
from support.sinks.log_tables import DeltaFormat, opened
from twophase.core.errors import BadValue, ConfigError
from twophase.core.hindrances import Hindrance
from twophase.core.manifest import Column
from twophase.core.ports import Outcome
from twophase.sinks import Delta

SCHEMA = (Column("id", "bigint"), Column("word", "string"))
CHANGES = (*SCHEMA, Column("_change", "string"))
APP = "twophase/words"


@pytest.fixture
def sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Delta:
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    return made()


def made(**more: Any) -> Delta:
    table = Delta("lake/words", mode="upsert", key=["id"], **more)
    table.prepare()
    return table


def changes(*found: tuple[str, int, str | None]) -> list[Row]:
    return [{"id": key, "word": word, "_change": kind} for kind, key, word in found]


def staged(sink: Delta, number: int, content: Sequence[Row], **more: Any) -> Staged:
    return stage(sink, number, content=content, **{"schema": CHANGES, **more})


def content(sink: Delta) -> dict[int, str | None]:
    found = DeltaFormat().content(sink)
    assert all(set(row) == {"id", "word"} for row in found)
    return {row["id"]: row["word"] for row in found}


def test_a_checkpoint_changes_adds_and_deletes_rows_in_one_entry_with_its_marker(sink: Delta) -> None:
    """`_change` is no column of the table, and the keys that are not staged stay as they are."""
    first = staged(sink, 1, changes(("+I", 1, "a"), ("+I", 2, "b"), ("+I", 3, None)))
    first.check()
    first.promote()
    before = opened(sink).version()
    second = staged(sink, 2, changes(("+U", 1, None), ("-D", 2, None), ("+I", 4, "d"), ("-D", 9, None)))
    second.check()

    assert second.promote().outcome is Outcome.PROMOTED
    assert content(sink) == {1: None, 3: None, 4: "d"}
    assert opened(sink).version() == before + 1
    assert opened(sink).transaction_version(APP) == 2
    assert list(sink.verify(second.output)) == []
    assert sorted(sink.markers("words")) == [(1, 1), (2, 1)]


def test_rows_without_changes_are_upserted(sink: Delta) -> None:
    for number, word in ((1, "a"), (2, "b")):
        rows = [{"id": 7, "word": word}, {"id": number, "word": word}]
        staged(sink, number, rows, schema=SCHEMA).promote()

    assert content(sink) == {1: "a", 2: "b", 7: "b"}


@pytest.mark.parametrize("found", [[], [("-D", 9, None)]], ids=["no rows", "nothing to delete"])
def test_a_checkpoint_that_changes_nothing_leaves_its_marker(
    sink: Delta, found: list[tuple[str, int, str | None]]
) -> None:
    """A merge that changes nothing writes no entry by itself; without a marker its promotion would never end."""
    staged(sink, 1, changes(("+I", 1, "a"))).promote()
    nothing = staged(sink, 2, changes(*found))

    assert nothing.promote().outcome is Outcome.PROMOTED
    assert nothing.promote().outcome is Outcome.ALREADY_PROMOTED
    assert opened(sink).transaction_version(APP) == 2
    assert content(sink) == {1: "a"}


def test_a_late_promotion_does_not_bring_an_old_value_back(sink: Delta) -> None:
    """The marker tells, also after the staged rows are gone."""
    first = staged(sink, 1, changes(("+I", 1, "a")))
    first.promote()
    staged(sink, 2, changes(("-D", 1, None))).promote()

    assert first.promote().outcome is Outcome.ALREADY_PROMOTED
    for left in [left for left in sink.attempts() if left.checkpoint_id == 1 and not left.manifest]:
        sink.remove(left)
    assert first.find().outcome is Outcome.ALREADY_PROMOTED
    assert content(sink) == {}


def test_a_merge_that_is_under_way_is_fenced_by_a_restage(sink: Delta, monkeypatch: pytest.MonkeyPatch) -> None:
    """A promoter that has read the old rows is not the next entry any more: what was restaged is promoted (R21)."""
    staged(sink, 1, changes(("+I", 1, "a"))).promote()
    old = staged(sink, 2, changes(("+U", 1, "old")))
    new = staged(sink, 2, changes(("+U", 1, "new")), attempt=2, earlier=[old])
    merge = DeltaTable.merge

    def late(table: DeltaTable, rows: Any, *args: Any, **more: Any) -> Any:
        monkeypatch.setattr(DeltaTable, "merge", merge)
        merger = merge(table, rows.read_all(), *args, **more)
        sink.discard_earlier(new.output, old.output)
        return merger

    monkeypatch.setattr(DeltaTable, "merge", late)
    stopped = old.promote()

    assert (stopped.outcome, stopped.hindrance) == (Outcome.FAILED, Hindrance.LOST)
    assert content(sink) == {1: "a"}
    assert new.promote().outcome is Outcome.PROMOTED
    assert content(sink) == {1: "new"}


def test_an_earlier_attempt_that_was_merged_before_is_found_with_its_number(sink: Delta) -> None:
    """The record learns which attempt is in the table (R10)."""
    old = staged(sink, 1, changes(("+I", 1, "old")))
    old.promote()
    new = staged(sink, 1, changes(("+I", 1, "new")), attempt=2, earlier=[old])

    found = new.find()
    assert (found.outcome, found.attempt) == (Outcome.ALREADY_PROMOTED, 1)
    assert found.manifest is not None
    assert found.manifest["digest"] == old.output.manifest["digest"]


def test_the_files_of_a_merge_are_durable_before_its_marker_counts(
    sink: Delta, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library syncs nothing, so whoever reads the marker does, also if the promoter died before that (R2)."""
    synced: list[str] = []
    first = staged(sink, 1, changes(("+I", 1, "a")))
    first.promote()
    monkeypatch.setattr(type(sink.storage), "sync", lambda _, files: synced.extend(map(str, files)))

    first.find()
    merged = [uri.removeprefix("file://") for uri in opened(sink).file_uris()]
    assert merged
    assert set(merged) <= set(synced)
    assert max(map(synced.index, merged)) < next(at for at, path in enumerate(synced) if "_delta_log" in path)


def test_a_key_that_is_there_twice_or_null_is_refused_before_the_vote(sink: Delta) -> None:
    with pytest.raises(BadValue, match="key id: 2 rows have id 1; keep one row per key"):
        staged(sink, 1, changes(("-D", 1, "a"), ("+I", 1, "b"))).check()
    with pytest.raises(BadValue, match="key id: a row has id None; filter nulls out"):
        staged(sink, 2, [{"id": None, "word": "a", "_change": "+I"}]).check()


def test_what_a_constraint_would_refuse_is_refused_before_the_vote(sink: Delta) -> None:
    """The merge checks constraints by itself, after the commit point; so it is tried before. Deletions are exempt."""
    staged(sink, 1, changes(("+I", 1, "a"))).promote()
    opened(sink).alter.add_constraint({"known": "word <> 'bad'"})
    table = made()

    with pytest.raises(BadValue, match="the table would refuse what is staged"):
        staged(table, 2, changes(("+U", 1, "bad"))).check()
    good = staged(table, 3, changes(("-D", 1, "bad"), ("+I", 2, "b")))
    good.check()
    good.promote()
    assert content(table) == {2: "b"}


def test_a_table_that_an_upsert_cannot_change_is_refused(sink: Delta) -> None:
    staged(sink, 1, changes(("+I", 1, "a"))).promote()
    opened(sink).alter.set_table_properties({"delta.appendOnly": "true"})

    with pytest.raises(ConfigError, match="append-only"):
        made()


def test_the_key_has_to_be_a_column_that_can_be_compared(sink: Delta) -> None:
    output = replace(staged(sink, 1, changes(("+I", 1, "a"))).output)

    for kind in ("double", "array<int>"):
        with pytest.raises(ConfigError, match="key 'id': expected a column of texts"):
            sink._check_schema(output, (Column("id", kind), Column("word", "string")))
    with pytest.raises(ConfigError, match="found no such column"):
        sink._check_schema(output, (Column("word", "string"),))


def test_rows_move_between_partitions_and_new_columns_come(sink: Delta) -> None:
    table = Delta("lake/parts", mode="upsert", key=["id"], partition_by=["word"])
    table.prepare()
    staged(table, 1, changes(("+I", 1, "a"), ("+I", 2, "a"))).promote()
    wider = (*CHANGES, Column("frequency", "bigint"))
    rows = [{"id": 1, "word": "b/ü %", "_change": "+U", "frequency": 5}]
    moved = staged(table, 2, rows, schema=wider)
    moved.check()
    moved.promote()

    found = {row["id"]: (row["word"], row["frequency"]) for row in opened(table).to_pyarrow_table().to_pylist()}
    assert found == {1: ("b/ü %", 5), 2: ("a", None)}


def test_what_a_checkpoint_changed_cannot_be_read_by_the_record(sink: Delta) -> None:
    first = staged(sink, 1, changes(("+I", 1, "a")))
    first.promote()

    for refused in (
        sink.check_readable,
        lambda: sink.check_changes([first.output]),
        lambda: sink.committed(first.output),
    ):
        with pytest.raises(ConfigError, match="upsert"):
            refused()
