"""Words for the measure of a state: batches as files, a state that has them all, and many batches."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from twophase import State
from twophase.state import hashes, run_files
from twophase.state.manifest import StateManifest
from twophase.state.merging import BASE
from twophase.state.next_state import next_state
from twophase.state.reader import StateReader
from twophase.state.run_files import HASH
from twophase.state.task_runs import TaskReport, TaskRuns

DECLARATION = State(["word"], "word string, n bigint")
#: What a row of it takes in Arrow: 14 letters and where they end, and a count.
ROW_BYTES = 26
CHUNK = 250_000


def words(numbers: np.ndarray[tuple[int], np.dtype[np.int64]]) -> pa.Array:
    """Return a word of 14 letters for each number."""
    digits = (numbers[:, None] // 10 ** np.arange(8, -1, -1) % 10 + ord("0")).astype(np.uint8)
    letters = np.hstack([np.broadcast_to(np.frombuffer(b"word-", np.uint8), (len(numbers), 5)), digits])
    offsets = np.arange(0, letters.size + 1, letters.shape[1], dtype=np.int32)
    return pa.StringArray.from_buffers(len(numbers), pa.py_buffer(offsets), pa.py_buffer(letters.tobytes()))


def batch_file(path: Path, keys: int, touched: int, seed: int) -> Path:
    """Write a file with so many words, each once, of all that there are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(seed).choice(keys, touched, replace=False)
    hidden = path.with_name(f".{path.name}")
    pq.write_table(pa.table({"word": words(numbers)}), hidden)
    hidden.rename(path)
    return path


def filled(home: Path, keys: int) -> StateManifest:
    """Return a state with all words, each counted once, in its base."""
    empty = StateManifest.empty(DECLARATION)
    task = TaskRuns(home, StateReader(home, empty), "00000000.r1.a1.fill", TaskReport(0))
    for start in range(0, keys, CHUNK):
        task.add(_rows(np.arange(start, min(start + CHUNK, keys)), 1))
    made = next_state(home, empty, DECLARATION.columns, [task.finish()], begin="00000000.r1.a1.fill", least_rows=0)
    for run in made.own:
        if run not in made.runs:
            (run_files.folder(home) / run.path).unlink()
    assert all(run.level == BASE for run in made.runs)
    return made


def _rows(numbers: np.ndarray[tuple[int], np.dtype[np.int64]], count: int) -> pa.RecordBatch:
    found = words(numbers)
    counts = pa.array(np.full(len(numbers), count, dtype=np.int64))
    return pa.record_batch({"word": found, "n": counts, HASH: pa.array(hashes.of([found]))})


@dataclass
class LibraryRun:
    """What many batches took without Spark, CPU seconds and bytes."""

    looked_up: list[float] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    own_bytes: int = 0
    all_bytes: int = 0
    #: Rows that were merged and CPU seconds of each merge, and whether it was into the base.
    merges: list[tuple[int, float, bool]] = field(default_factory=list)


def library_run(home: Path, state: StateManifest, batches: int, touched: int) -> LibraryRun:
    """Take so many batches through a state; what no manifest lists any more is removed."""
    found = LibraryRun()
    for number, rows in enumerate(_batches(state.keys, batches, touched), start=1):
        begin = f"{number:08}.r1.a1.bench"
        start = time.process_time()
        task = TaskRuns(home, StateReader(home, state), begin, TaskReport(0))
        task.add(rows)
        found.looked_up.append(time.process_time() - start)
        report = task.finish()
        start = time.process_time()
        after = next_state(home, state, DECLARATION.columns, [report], begin=begin)
        merged = [run for run in after.runs if run.checkpoint_id == number and run.level > 0]
        if merged:
            took = time.process_time() - start
            before = sum(run.rows for run in (*after.own, *state.runs) if run not in after.runs)
            found.merges.append((before, took, merged[0].level == BASE))
        found.runs.append(len(after.runs))
        found.own_bytes += sum(run.bytes for run in after.own)
        found.all_bytes += after.bytes
        listed = {run.path for run in after.runs}
        for run in (*state.runs, *after.own):
            if run.path not in listed:
                (run_files.folder(home) / run.path).unlink(missing_ok=True)
        state = after
    return found


def _batches(keys: int, batches: int, touched: int) -> Iterator[pa.RecordBatch]:
    random = np.random.default_rng(5)
    for number in range(batches):
        yield _rows(random.choice(keys, touched, replace=False), number + 2)


def cold_look_up(home: Path, state: StateManifest, touched: int) -> float:
    """Return how long a look-up takes when the system has none of the files in memory."""
    (rows,) = _batches(state.keys, 1, touched)
    for run in state.runs:
        file = os.open(run_files.folder(home) / run.path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
    reader = StateReader(home, state)
    start = time.perf_counter()
    reader.look_up(rows.column(HASH).to_numpy(), reader.key_columns(rows), ["n"])
    return time.perf_counter() - start
