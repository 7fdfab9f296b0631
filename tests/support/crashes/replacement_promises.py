"""What must hold of pipelines whose checkpoints are replaced, at any moment and at the end, by the record alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path

import duckdb
import pytest
from sqlalchemy import text

from support.crashes import replacements, scenarios
from support.faults.processes import polls
from twophase import committed_reads
from twophase.committer.record import PostgresRecord
from twophase.core.checkpoint import Key
from twophase.core.errors import Swept
from twophase.core.settings import data_path
from twophase.core.states import ENDED, State
from twophase.sinks.staged_files.layout import TOMBSTONE
from twophase.verification import verify

#: Each record, and which revision it says it is from.
Contents = Counter[tuple[str, str]]

QUARANTINE = "words_quarantine"


class Recorded:
    """What the record says, at one moment."""

    def __init__(self, record: PostgresRecord) -> None:
        with record.engine.begin() as connection:
            found = connection.execute(text("SELECT * FROM twophase.revision ORDER BY commit_seq, revision")).all()
            self.revisions = {Key(row.pipeline, row.checkpoint_id, row.revision): row for row in found}
            #: The attempt of each output.
            self.outputs = {
                (Key(*row[:3]), row.name): row.attempt
                for row in connection.execute(
                    text("SELECT pipeline, checkpoint_id, revision, name, attempt FROM twophase.participant"
                         " WHERE kind = 'sink'")
                )
            }  # fmt: skip
            self.reads: dict[Key, list[Key]] = defaultdict(list)
            for row in connection.execute(
                text("SELECT pipeline, checkpoint_id, revision, upstream, upstream_checkpoint_id, upstream_revision"
                     " FROM twophase.input_revision")
            ):  # fmt: skip
                self.reads[Key(*row[:3])].append(Key(*row[3:]))
        self.declared = replacements.known(record)

    def sinks(self) -> Iterator[tuple[str, str, Path]]:
        """Yield every table: whose it is, its name there, its folder."""
        for pipeline in self.declared:
            for name, sink in pipeline.sinks.items():
                yield pipeline.name, name, Path(sink.location())

    def of(self, pipeline: str, *states: State) -> dict[int, Key]:
        """Return the revision of each checkpoint of a pipeline that is in one of some states."""
        mine = {key: row for key, row in self.revisions.items() if key.pipeline == pipeline}
        return {key.checkpoint_id: key for key, row in mine.items() if row.state in states}

    def contents(self, key: Key | None, sink: str) -> Contents:
        """Return what a revision put into a sink."""
        if key is None or (key, sink) not in self.outputs:
            return Counter()
        if sink == QUARANTINE:
            return Counter((line, f"r{key.revision}") for line in replacements.bad_lines(key.checkpoint_id))
        origins = [(up.checkpoint_id, f"r{up.revision} r{key.revision}") for up in self.reads.get(key, ())]
        return Counter(
            (str(number), mark)
            for checkpoint_id, mark in origins or [(key.checkpoint_id, f"r{key.revision}")]
            for number in replacements.ids(checkpoint_id)
        )

    def as_of(self, pipeline: str, seq: int | None) -> list[Key]:
        """Return the revisions that a table held after a commit, or holds now."""
        if seq is None:
            return list(self.of(pipeline, State.COMMITTED).values())
        found: dict[int, Key] = {}
        for key, row in self.revisions.items():  # by commit_seq
            if key.pipeline == pipeline and row.committed_at is not None and row.commit_seq <= seq:
                found[key.checkpoint_id] = key
        return list(found.values())

    @property
    def decided(self) -> int:
        """Count the commit points that were passed."""
        return sum(row.commit_seq is not None and key.revision > 0 for key, row in self.revisions.items())


@cache
def _duckdb() -> duckdb.DuckDBPyConnection:
    """Open DuckDB once: it reads thousands of small tables here, and must remember nothing of them."""
    return duckdb.connect(config={"threads": 1, "enable_external_file_cache": False})


def contents(files: Sequence[str], sink: str) -> Contents:
    """Read files with DuckDB, which wrote none of them."""
    if not files:
        return Counter()
    columns = r"raw, 'r' || regexp_extract(filename, 'part-r(\d+)-', 1)" if sink == QUARANTINE else "id::VARCHAR, word"
    query = f"SELECT {columns} FROM read_parquet(?, hive_partitioning = false, filename = true)"
    return Counter((row[0], row[1]) for row in _duckdb().execute(query, [list(files)]).fetchall())


def visible(table: Path, sink: str) -> dict[int, Contents]:
    """Read a table as anybody would; return what it shows of each checkpoint, going by the records alone."""
    shown: dict[int, Contents] = defaultdict(Counter)
    for (what, mark), count in contents(sorted(map(str, table.glob("**/*.parquet"))), sink).items():
        checkpoint_id = int(what.split()[1].partition(".")[0]) if sink == QUARANTINE else int(what) // 100
        shown[checkpoint_id][what, mark] += count
    return shown


def was_there(pipeline: str, sink: str, checkpoint_id: int) -> Contents:
    """Return what somebody else had put in a checkpoint's place: it stays until it is replaced, recorded or not."""
    if (pipeline, sink) == ("days", "lake") and replacements.left(checkpoint_id):
        return Counter((str(number), "r0") for number in replacements.ids(checkpoint_id))
    return Counter()


# --- at any moment ---------------------------------------------------------------------------------------------------


def check_never_wrong(record: PostgresRecord, *, gap: bool = False) -> None:
    """Of each checkpoint a table shows the committed revision or the one being promoted, whole, and nothing else.

    With `gap`, where folders cannot change places, it may show nothing while one is being promoted.
    """
    found = Recorded(record)
    for pipeline, sink, table in found.sinks():
        committed, committing = found.of(pipeline, State.COMMITTED), found.of(pipeline, State.COMMITTING)
        shown = visible(table, sink)
        for checkpoint_id in {*shown, *committed, *committing}:
            old, new = committed.get(checkpoint_id), committing.get(checkpoint_id)
            allowed = [found.contents(old, sink) if old else was_there(pipeline, sink, checkpoint_id)]
            if new is not None:
                allowed += [found.contents(new, sink), *([Counter()] if gap else [])]
            now = shown.get(checkpoint_id, Counter())
            assert now in allowed, f"{table} shows of checkpoint {checkpoint_id}: {now}, expected one of {allowed}"


def check_as_of(record: PostgresRecord) -> None:
    """Now, and after each commit that ever was, the record leads to the revisions that stood then, whole."""
    found = Recorded(record)
    for pipeline, sink, _ in found.sinks():
        committed = [row.commit_seq for key, row in found.revisions.items() if key.pipeline == pipeline]
        for seq in (None, *range(1, max((seq or 0 for seq in committed), default=0) + 1)):
            standing = found.as_of(pipeline, seq)
            if any(found.revisions[key].swept_at is not None and (key, sink) in found.outputs for key in standing):
                with pytest.raises(Swept):
                    committed_files(record, pipeline, sink, seq)
                continue
            expected: Contents = Counter()
            for key in standing:
                expected += found.contents(key, sink)
            files = committed_files(record, pipeline, sink, seq)
            assert contents(files, sink) == expected, f"{pipeline}.{sink} as of {seq}"


def committed_files(record: PostgresRecord, pipeline: str, sink: str, as_of: int | None) -> list[str]:
    """List files as `twophase.committed_files` does, over a connection that is there already."""
    table = committed_reads._sink(record, pipeline, sink)
    return [path for output in committed_reads._promoted(record, pipeline, sink, as_of) for path in table.files(output)]


def check_story(record: PostgresRecord) -> None:
    """Every transition follows the one before, and each decision was carried out once."""
    with scenarios.looking(record) as connection:
        scenarios.check_story(connection)
    check_once(record)


def check_once(record: PostgresRecord) -> None:
    """No commit point was passed twice, nothing was promoted, ended or superseded twice, and no number is missing."""
    found = Recorded(record)
    with scenarios.looking(record) as connection:
        told = connection.execute(
            text("SELECT pipeline, checkpoint_id, revision, action, split_part(why, ' ', 1) AS what FROM twophase.event"
                 " WHERE action IN ('committing', 'committed', 'superseded', 'promoted')")
        ).all()  # fmt: skip
        held = connection.execute(text("SELECT job_id, checkpoint_id, revision, operator_id FROM twophase.committed"))
        promoted = Counter((Key(*row[:3]), row.operator_id) for row in held)
    events = Counter((Key(*row[:3]), row.what if row.action == "promoted" else row.action) for row in told)
    expected: Counter[tuple[Key, str]] = Counter()
    for key, row in found.revisions.items():
        state = State(row.state)
        if state is State.SUPERSEDED:
            expected[key, "superseded"] += 1
        if key.revision and row.commit_seq is not None:
            expected[key, "committing"] += 1
            expected[key, "committed"] += state is not State.COMMITTING
            expected.update((key, sink) for (of, sink) in promoted if of == key)
    assert events == +expected
    assert set(promoted.values()) <= {1}
    for pipeline in found.declared:
        order = [row.commit_seq for key, row in found.revisions.items() if key.pipeline == pipeline.name]
        assert sorted(filter(None, order)) == list(range(1, len(list(filter(None, order))) + 1))


# --- at the end ------------------------------------------------------------------------------------------------------


def check_finished(record: PostgresRecord, *, tombstones: bool = False) -> None:
    """Nothing is left undone; beside the tables lies what was superseded and not swept, whole, and nothing else.

    With `tombstones`, where folders cannot change places, the names of what was swept are still taken.
    """
    found = Recorded(record)
    assert {State(row.state) for row in found.revisions.values()} <= ENDED
    for pipeline, sink, table in found.sinks():
        side = table.with_name(f"{table.name}.twophase")
        assert not list((side / "staging").iterdir())
        assert not list((side / "taken").iterdir())
        outputs = {key: attempt for (key, name), attempt in found.outputs.items() if name == sink}
        ended = {key: found.revisions[key] for key in outputs if key.pipeline == pipeline}
        kept = {key for key, row in ended.items() if row.commit_seq is not None and row.swept_at is None}
        manifests = {f"{key.checkpoint_id:08d}.r{key.revision}.a{outputs[key]}.json" for key in kept}
        assert {path.name for path in (side / "manifests").iterdir()} == manifests
        lying = {path.name: sorted(entry.name for entry in path.iterdir()) for path in (side / "superseded").iterdir()}
        superseded = [key for key, row in ended.items() if row.state == State.SUPERSEDED]
        swept = {f"{key.checkpoint_id:08d}.r{key.revision}" for key in superseded if key not in kept}
        whole = {f"{key.checkpoint_id:08d}.r{key.revision}" for key in superseded if key in kept}
        assert {name for name, entries in lying.items() if entries != [TOMBSTONE]} == whole
        assert lying.keys() - whole == (swept if tombstones else set())


def check_put_away(record: PostgresRecord) -> None:
    """See that what was superseded lies where it is kept: it needs no sweep to get there."""
    found = Recorded(record)
    for pipeline, sink, table in found.sinks():
        kept = table.with_name(f"{table.name}.twophase") / "superseded"
        for key, row in found.revisions.items():
            if key.pipeline == pipeline and (key, sink) in found.outputs and row.state == State.SUPERSEDED:
                there = (kept / f"{key.checkpoint_id:08d}.r{key.revision}").exists()
                assert there or row.swept_at is not None, f"{table}: {key} is not under superseded/"


def check_verified(record: PostgresRecord) -> None:
    """Each table holds what the record says, byte by byte."""
    for pipeline in replacements.known(record):
        assert not [difference for difference in verify(record, pipeline) if difference]


def check_end(record: PostgresRecord, *, tombstones: bool = False) -> None:
    """Recover twice and sweep: the record, the tables, their past and the story agree, byte by byte."""
    wait_for_lease(record)
    for _ in range(2):
        replacements.recover()
    replacements.sweep()
    check_never_wrong(record)
    check_as_of(record)
    check_story(record)
    check_finished(record, tombstones=tombstones)
    check_verified(record)


# --- meanwhile -------------------------------------------------------------------------------------------------------


def wait_for_lease(record: PostgresRecord) -> None:
    """Wait until nobody has a lease on anything."""
    for _ in polls(30):
        with record.engine.connect() as connection:
            leased = "SELECT count(*) FROM twophase.revision WHERE lease_until > clock_timestamp()"
            if not connection.execute(text(leased)).scalar_one():
                return


def let_retention_be_over(record: PostgresRecord) -> None:
    """Let everything that was superseded have been so for long."""
    with record.engine.begin() as connection:
        connection.execute(text("UPDATE twophase.revision SET superseded_at = superseded_at - interval '30 days'"))


def everything(*, but: Collection[str] = ()) -> dict[str, tuple[int, int, int]]:
    """Return every entry of the tables' folders, and of those beside them, with what changes when one is touched.

    A run that was stopped goes on in its own staging place until it is told that it has lost: leave that out by name.
    """
    found = {}
    for path in data_path("lake").rglob("*"):
        if not set(but) & set(path.relative_to(data_path("lake")).parts):
            stat = path.stat()
            found[str(path)] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return found
