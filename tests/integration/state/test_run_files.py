"""Files of a state: written durably under a name of their own, found damaged or gone, and never read wrong."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from support.states.plain import PlainState, random_words
from twophase import State
from twophase.core.errors import AttemptFailed, BadValue, ConfigError, ManifestMismatch
from twophase.state import hashes, merging, next_state, run_files, task_runs, verification
from twophase.state.reader import StateReader, key_rows
from twophase.state.task_runs import TaskReport


@pytest.fixture
def state(tmp_path: Path) -> PlainState:
    kept = PlainState(tmp_path, State(["word"], "word string, n bigint"), least_rows=1 << 60)
    kept.checkpoint({(word,): (1,) for word in random_words(1000, 1)})
    kept.checkpoint({(word,): (2,) for word in random_words(1000, 2)})
    return kept


def test_a_run_is_a_sorted_arrow_file_that_others_can_read(state: PlainState) -> None:
    run = state.manifests[-1].own[0]
    rows = pa.ipc.open_file(run_files.folder(state.home) / run.path).read_all()

    hashed = rows["_hash"].to_pylist()
    assert rows.column_names == ["_hash", "word", "n"]
    assert hashed == sorted(hashed)
    assert (run.low, run.high, run.rows) == (hashed[0], hashed[-1], rows.num_rows)
    assert run.path.startswith("00000002.r1.a1.0002.0.")
    assert run.bytes < 1.5 * (rows.nbytes - 8 * rows.num_rows), "the hash and the headers cost less than half"


def test_a_file_that_is_gone_cut_or_changed_is_seen(state: PlainState) -> None:
    manifest = state.manifests[-1]
    first, second = (run_files.folder(state.home) / run.path for run in manifest.runs)
    assert (verification.missing(state.home, manifest), list(verification.damages(state.home, manifest))) == ([], [])

    content = bytearray(second.read_bytes())
    content[-2000] ^= 1
    second.write_bytes(content)
    assert verification.missing(state.home, manifest) == []
    (damage,) = verification.damages(state.home, manifest)
    assert damage.startswith(f"{second.name}: expected checksum ")

    os.truncate(second, 100)
    first.unlink()
    said = [f"{first.name}: is not there", f"{second.name}: expected {manifest.runs[1].bytes} bytes, found 100"]
    assert verification.missing(state.home, manifest) == said
    assert list(verification.damages(state.home, manifest)) == said
    with pytest.raises(ManifestMismatch, match=first.name):
        state.scanned()


def test_a_reader_goes_on_when_its_files_are_swept(state: PlainState) -> None:
    """What is mapped stays readable, so a sweep never takes rows from under a reader."""
    reader = StateReader(state.home, state.manifests[-1])
    keys = key_rows(state.manifests[-1], [{"word": word} for word in random_words(1000, 1)])
    before = reader.find(keys)
    for run in state.manifests[-1].files():
        (run_files.folder(state.home) / run.path).unlink()

    assert reader.find(keys) == before
    assert sum(batch.num_rows for batch in reader.scan()) == len(state.expected())


def test_rows_that_change_nothing_are_dropped(state: PlainState) -> None:
    """An equal row, and a tombstone for a key that is not there; with a ttl an equal row lives on."""
    word = random_words(1000, 2)[0]
    manifest = state.checkpoint({(word,): (2,), ("nobody",): None, ("new",): (5,)})

    assert (manifest.changed, manifest.deleted, manifest.own[0].rows) == (1, 0, 1)
    assert state.scanned() == state.expected()
    assert len(list(run_files.folder(state.home).iterdir())) == 3, "the keys of unchanged rows were removed"


def test_a_checkpoint_without_changes_lists_what_was_there(state: PlainState) -> None:
    before = state.manifests[-1]
    manifest = state.checkpoint({})

    assert manifest == replace(before, own=(), changed=0, deleted=0, bytes=0)


def test_all_keys_deleted_leave_nothing_after_the_base(tmp_path: Path) -> None:
    state = PlainState(tmp_path, State(["k"], "k int, v int"), fan=2)
    state.checkpoint({(1,): (1,), (2,): (2,)})
    manifest = state.checkpoint({(1,): None, (2,): None})

    assert (manifest.runs, manifest.keys, manifest.deleted) == ((), 0, 2)
    assert state.scanned() == {}
    assert state.checkpoint({(1,): (3,)}).keys == 1
    assert state.scanned() == {(1,): (3,)}


@pytest.mark.parametrize("weak", [None, 15])
def test_two_rows_for_a_key_are_an_error_wherever_they_are(
    state: PlainState, weak: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one task, and in two tasks, of which one found nothing to change."""
    monkeypatch.setattr(hashes, "WEAK", weak)
    kept = PlainState(state.home / "other", state.declaration)
    kept.checkpoint({("a",): (1,), ("b",): (1,)})
    said = r"new_state has two rows for the key word='b'"
    with pytest.raises(BadValue, match=said):
        kept.checkpoint({("a",): (2,), ("b",): (2,)}, {("b",): (3,), ("c",): (1,)})
    with pytest.raises(BadValue, match=said):
        kept.checkpoint({("a",): (2,), ("b",): (1,)}, {("b",): (3,), ("c",): (1,)})
    reader = StateReader(kept.home, kept.manifests[-1])
    task = task_runs.TaskRuns(kept.home, reader, "00000002.r1.a1.0", TaskReport(0))
    task.add(kept.table({("b",): (1,)}))
    task.add(kept.table({("b",): (2,), ("x",): (2,)}))
    with pytest.raises(BadValue, match=said):
        task.finish()


def test_a_partition_computed_twice_counts_once_and_must_be_equal(state: PlainState) -> None:
    run = state.manifests[-1].own[0]
    report = TaskReport(0, 7, [run], changed=1)
    beside = TaskReport(0, 7, changed=5)
    again = TaskReport(0, 8, [replace(run, path="another")], changed=1)

    assert next_state.one_per_partition([report, beside, again, replace(beside, task=8)]) == [report, beside]
    with pytest.raises(AttemptFailed, match="partition 0 twice, with different rows"):
        next_state.one_per_partition([report, replace(again, changed=2)])
    assert TaskReport.of_json(report.to_json()) == report


def test_large_states_are_cut_into_files_by_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a task with many rows writes several runs, each look-up looks into the right ones."""
    monkeypatch.setattr(merging, "FILE_ROWS", 300)
    monkeypatch.setattr(task_runs, "MOST_ROWS", 400)
    monkeypatch.setattr(next_state, "PIECE_ROWS", 200)
    state = PlainState(tmp_path, State(["word"], "word string, n bigint"), fan=3)
    words = random_words(3000, 1)
    for number in range(7):
        state.checkpoint({(word,): (number,) for word in words[number * 300 : 1000 + number * 300]})
        assert state.scanned() == state.expected()
        assert state.found([(word,) for word in words]) == state.expected()
    base = [run for run in state.manifests[-1].runs if run.level == merging.BASE]
    assert len(base) > 5
    assert all(one.high < other.low for one, other in itertools.pairwise(base))


def test_a_column_that_came_later_is_null_in_older_rows(tmp_path: Path) -> None:
    state = PlainState(tmp_path, State(["k"], "k int, v int"))
    state.checkpoint({(1,): (1,), (2,): (2,)})
    wider = State(["k"], "k int, v int, w struct<a:int,b:array<string>>")
    later = PlainState(tmp_path, wider, fan=2)
    later.manifests = [replace(state.manifests[-1], schema=wider.columns)]
    later.rows = [{(1,): ((1, None), 0), (2,): ((2, None), 0)}]

    assert later.scanned() == later.expected()
    later.checkpoint({(2,): (2, {"a": 1, "b": ["x", None]}), (3,): (3, None)})
    assert later.scanned() == later.expected()
    assert later.checkpoint({(1,): (1, None), (3,): (3, None)}).changed == 0, "null is what is there"


def test_keys_come_as_text_from_a_command(state: PlainState) -> None:
    manifest = replace(
        state.manifests[0], key=("d", "n"), schema=State(["d", "n"], "d date, n decimal(5,2), v int").columns
    )

    rows = key_rows(manifest, [{"d": "2026-11-18", "n": "1.50"}, {"d": None, "n": None}])
    assert [str(kind) for kind in rows.schema.types] == ["date32[day]", "decimal128(5, 2)"]
    with pytest.raises(ConfigError, match="expected a value for d, n"):
        key_rows(manifest, [{"d": "2026-11-18"}])
    with pytest.raises(ConfigError, match="key column 'd'"):
        key_rows(manifest, [{"d": "yesterday", "n": "1"}])
