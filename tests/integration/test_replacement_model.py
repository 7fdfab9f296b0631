"""Random histories of one table: runs, backfills, kills, aborts, sweeps, against a table in Python.

All of it is the shipped code on a real server and a real file system, but for Spark. A failpoint that raises stands for
the end of a process; what it held is let go by letting its lease run out. Each row says which revision and attempt it
is from, so what readers see tells the whole story.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import duckdb
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from sqlalchemy import text

from support.pipelines.factories import PreStaged, Row, land_words, words_pipeline
from twophase import committed_reads
from twophase.committer.record import PostgresRecord
from twophase.core import failpoints
from twophase.core.checkpoint import Key
from twophase.core.errors import ConfigError, IllegalTransition, Swept
from twophase.core.failpoints import FailpointError
from twophase.core.settings import data_path
from twophase.core.states import ENDED, LIVE, State
from twophase.runner import Runner
from twophase.sinks.files.sink import Files
from twophase.spark.plan import Plan
from twophase.storage import disk
from twophase.sweep import sweep
from twophase.verification import verify

FILES = 3
ROWS = 2
#: As many of the last states of the table are read again after each step.
TRAVELS = 3

WORKING = (
    "recover.before", "begin.before", "begin.inside", "begin.after", "attempt.before", "attempt.after", "attempt.known",
    "submit.before", "submit.planned", "stage.before", "stage.written", "stage.durable", "stage.manifest",
    "stage.marked", "stage.after",
    "vote.before", "vote.checked", "vote.inside", "vote.after", "commit.before", "commit.inside", "commit.after",
    "promote.before", "promote.taken", "promote.checked", "promote.gap", "promote.visible", "promote.superseded",
    "promote.durable", "promote.inside", "promote.after", "finish.before", "finish.inside", "finish.after",
)  # fmt: skip
ABORTING = ("abort.before", "abort.inside", "abort.after", "abort.discarded", "abort.end")
SWEEPING = ("sweep.before", "sweep.after", "sweep.inside", "sweep.swept", "sweep.forgotten", "sweep.clean")

PROMOTING = tuple(point for point in WORKING if point.startswith(("commit.", "promote.", "finish.")))

checkpoints = st.integers(1, FILES)
working, promoting = st.sampled_from(WORKING), st.sampled_from(PROMOTING)
Action = tuple[Any, ...]


def action(verb: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Action]:
    return st.tuples(st.just(verb), *arguments)


#: What may happen, the interesting parts more often.
ACTIONS = st.one_of(
    action("run"),
    action("killed_run", working, st.booleans()),
    action("backfill", checkpoints),
    action("backfill", checkpoints),
    action("killed_backfill", checkpoints, working, st.booleans()),
    action("killed_backfill", checkpoints, promoting, st.just(value=True)),
    action("twice_killed_backfill", checkpoints, promoting, promoting),
    action("abort", checkpoints),
    action("killed_abort", checkpoints, st.sampled_from(ABORTING)),
    action("release", checkpoints),
    action("sweep", st.booleans()),
    action("killed_sweep", st.sampled_from(SWEEPING), st.integers(1, 3)),
    action("recover"),
    action("killed_recover", working),
)


def marked(rows: list[Row], plan: Plan) -> list[Row]:
    """Let each row say which revision and attempt it is from."""
    return [{**row, "word": f"r{plan.revision}a{plan.attempt}"} for row in rows]


def named(key: Key) -> str:
    """Return the name of a revision beside its table."""
    return f"{key.checkpoint_id:08d}.r{key.revision}"


class Told(NamedTuple):
    """What the record says of one revision."""

    state: State
    commit_seq: int | None
    swept: bool
    #: What its rows say, if it was decided.
    word: str


@dataclass(frozen=True)
class Place:
    """Where the examples of one test happen."""

    record: PostgresRecord
    #: Makes a home of its own for each example.
    move_in: Callable[[str], Path]
    exchanges: bool = True


class Histories(RuleBasedStateMachine):
    """One pipeline with three files to read, and what a test may do to it."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place
        self.name = f"m_{uuid.uuid4().hex[:12]}"
        self.home = place.move_in(self.name)
        self.duck = duckdb.connect()
        self.words: dict[tuple[str, int], str] = {}
        self.rows = {row["id"]: row for row in land_words(files=FILES, rows=ROWS)}
        pipeline = words_pipeline(self.name, max_files=1)
        self.runner = Runner(pipeline, PreStaged(files=1, change=marked), record=place.record)
        #: The model: what readers should see of each checkpoint, and what was decided when.
        self.table: dict[int, str] = {}
        self.decided: dict[int, tuple[int, str]] = {}
        #: What was replaced so long ago that it may be swept.
        self.old: set[Key] = set()
        for _ in range(FILES - 1):
            self.run()

    @rule(action=ACTIONS)
    def act(self, action: Action) -> None:
        """Let one thing happen."""
        verb, *arguments = action
        getattr(self, verb)(*arguments)

    # --- what happens ------------------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Take one checkpoint through; say whether there was one."""
        with self.step(set(range(1, 99)) - self.table.keys()):
            done = self.runner.run()
        if done is None:
            assert sorted(self.ids()) == sorted(self.rows), "no new input, but not everything was read"
        else:
            assert done.state is State.COMMITTED
            assert self.table[done.checkpoint_id] == f"r{done.revision}a{done.epoch}"
        return done is not None

    def killed_run(self, point: str, dies: bool) -> None:
        """Begin one, and let it end somewhere; or let only what it does fail there, so that it aborts."""
        with self.step(set(range(1, 99)) - self.table.keys()), self.killed(point, dies=dies):
            self.runner.run()

    def backfill(self, checkpoint_id: int) -> None:
        """Replace a checkpoint, if it is committed."""
        if not self.can_be_replaced(checkpoint_id):
            with self.step(set()), pytest.raises(ConfigError):
                self.runner.replace(checkpoint_id)
            return
        with self.step({checkpoint_id}):
            done = self.runner.replace(checkpoint_id)
        assert done.state is State.COMMITTED
        assert self.table[checkpoint_id] == f"r{done.revision}a{done.epoch}"

    def killed_backfill(self, checkpoint_id: int, point: str, dies: bool) -> None:
        """Begin to replace one, and let that end somewhere."""
        if self.can_be_replaced(checkpoint_id):
            with self.step({checkpoint_id}), self.killed(point, dies=dies):
                self.runner.replace(checkpoint_id)

    def twice_killed_backfill(self, checkpoint_id: int, point: str, again: str) -> None:
        """Let whoever comes to finish it end somewhere too."""
        self.killed_backfill(checkpoint_id, point, dies=True)
        self.killed_recover(again)

    def abort(self, checkpoint_id: int) -> None:
        """Let a person abort what is live of a checkpoint; what is decided goes on."""
        self._abort(checkpoint_id)

    def killed_abort(self, checkpoint_id: int, point: str) -> None:
        with self.killed(point):
            self._abort(checkpoint_id)

    def _abort(self, checkpoint_id: int) -> None:
        with self.step(set()):
            live = self.runner.coordinator.transact(lambda tx: tx.live_revision(self.name, checkpoint_id))
            if live is not None:
                after = self.runner.coordinator.abort(live, "by a person").state
                assert after is (State.COMMITTING if live.state is State.COMMITTING else State.ABORTED)

    def release(self, checkpoint_id: int) -> None:
        """Free the input of a checkpoint, if nothing of it was ever decided and nothing is live."""
        states = {told.state for key, told in self.told().items() if key.checkpoint_id == checkpoint_id}
        with self.step(set()):
            try:
                self.runner.coordinator.release(checkpoint_id, "to be read elsewhere")
            except IllegalTransition:
                assert states != {State.ABORTED}
            else:
                assert states == {State.ABORTED}

    def sweep(self, over: bool) -> None:
        """Sweep, with the retention of what was replaced over or not."""
        self._sweep(over)
        told = self.told()
        kept = {named(key) for key, one in told.items() if one.state is State.SUPERSEDED and not one.swept}
        assert self.beside("superseded") >= kept
        assert not (over and kept)

    def killed_sweep(self, point: str, nth: int) -> None:
        with self.killed(point, nth):
            self._sweep(over=True)

    def _sweep(self, over: bool) -> None:
        if over:
            older = "superseded_at - interval '8 days'"
            self.sql(f"UPDATE twophase.revision SET superseded_at = {older} WHERE pipeline = :p")
            self.old.update(self.replaced())
        with self.step(set()):
            list(sweep(self.runner.record, self.runner.pipeline))

    def recover(self) -> None:
        """Finish what others left; nothing is live or being aborted afterwards."""
        with self.step(set()):
            self.runner.coordinator.recover()
        assert {told.state for told in self.told().values()} <= ENDED

    def killed_recover(self, point: str) -> None:
        with self.step(set()), self.killed(point):
            self.runner.coordinator.recover()

    # --- the model ---------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, mine: set[int]) -> Iterator[None]:
        """Let something happen that may change what is to be seen of some checkpoints, and of those on their way.

        What was decided before may be promoted by anybody; what is aborted, refused or cut off changes nothing.
        """
        before = dict(self.table)
        on_the_way = {key.checkpoint_id: t.word for key, t in self.told().items() if t.state is State.COMMITTING}
        try:
            yield
        finally:
            self.expire()
            told = self.told()
            seen = self.seen()
            for checkpoint_id in before.keys() | seen.keys():
                was, now = before.get(checkpoint_id), seen.get(checkpoint_id)
                words = {one.state: one.word for key, one in told.items() if key.checkpoint_id == checkpoint_id}
                standing, coming = words.get(State.COMMITTED), words.get(State.COMMITTING)
                expected = {standing, coming} if coming else {standing}
                if coming and not self.place.exchanges:
                    expected.add(None)  # the gap
                assert now in expected, f"checkpoint {checkpoint_id}: {now} is seen, the record has {expected}"
                may = {was, on_the_way.get(checkpoint_id, was), None if not self.place.exchanges else was}
                if checkpoint_id not in mine:
                    assert now in may, f"checkpoint {checkpoint_id}: {now} is seen, the model has {may}"
            self.table = {checkpoint_id: word for checkpoint_id, word in seen.items() if word}
            self.travel(told)

    @contextmanager
    def killed(self, point: str, nth: int = 1, *, dies: bool = True) -> Iterator[None]:
        """Let the process end at a failpoint, if it gets there; one that dies does not even abort."""
        also = ",abort.before=raise" if dies and point not in ABORTING else ""
        failpoints.configure(f"{point}=raise@{nth}{also}")
        try:
            yield
        except FailpointError:
            pass
        finally:
            failpoints.configure("")
            self.expire()

    def travel(self, told: dict[Key, Told]) -> None:
        """Read the table as it was at the last few decisions: what it was then, or an error that says it was swept."""
        for key, one in told.items():
            if one.state in {State.COMMITTED, State.SUPERSEDED}:
                assert one.commit_seq is not None
                seen = self.decided.setdefault(one.commit_seq, (key.checkpoint_id, one.word))
                assert seen == (key.checkpoint_id, one.word), f"the decision {one.commit_seq} is another one now"
        gone = {key for key, one in told.items() if one.swept}
        assert gone <= self.old, f"{gone - self.old}: swept before its retention was over"
        swept = {(key.checkpoint_id, told[key].word) for key in gone}
        for seq in sorted(self.decided)[-TRAVELS:]:
            then = dict(self.decided[number] for number in sorted(self.decided) if number <= seq)
            if swept & then.items():
                with pytest.raises(Swept):
                    self.as_of(seq)
            else:
                assert self.as_of(seq) == then, f"as of {seq}"

    def as_of(self, seq: int) -> dict[int, str]:
        """Return what each checkpoint says as of a decision, read from the files that the record names."""
        sink = self.runner.pipeline.writes["lake"]
        assert isinstance(sink, Files)
        found: dict[int, str] = {}
        for output in committed_reads._promoted(self.runner.record, self.name, "lake", seq):
            (path,) = sink.files(output)
            found[output.key.checkpoint_id] = self.word(Path(path))
        return found

    def word(self, path: Path) -> str:
        """Return what all rows of a file say; its name is its revision's and attempt's own, so once is enough."""
        inode = (path.name, path.stat().st_ino)
        if inode not in self.words:
            rows = pq.ParquetFile(path).read().to_pylist()
            assert len(rows) == ROWS
            (self.words[inode],) = {row["word"] for row in rows}
        return self.words[inode]

    # --- what is there -----------------------------------------------------------------------------------------------

    def visible(self) -> list[tuple[int, str, int]]:
        """Return the rows that DuckDB finds in the table: id, which revision and attempt it is from, frequency."""
        table = data_path(f"lake/{self.name}")
        if not any(table.iterdir()):
            return []
        query = "SELECT id, word, frequency FROM read_parquet(?, hive_partitioning = false)"
        return self.duck.execute(query, [f"{table}/**/*.parquet"]).fetchall()

    def ids(self) -> list[int]:
        return [row[0] for row in self.visible()]

    def seen(self) -> dict[int, str]:
        """Return what readers see of each checkpoint: each row of its file once, all from one revision."""
        by_checkpoint: dict[int, list[tuple[int, str, int]]] = {}
        owners = self.owners()
        for row in self.visible():
            by_checkpoint.setdefault(owners[row[0] // ROWS], []).append(row)
        found = {}
        for checkpoint_id, mine in by_checkpoint.items():
            assert len(mine) == len({row[0] for row in mine}) == ROWS, f"checkpoint {checkpoint_id}: {mine}"
            assert all(self.rows[row[0]]["frequency"] == row[2] for row in mine)
            (found[checkpoint_id],) = {row[1] for row in mine}
        return found

    def owners(self) -> dict[int, int]:
        """Return the checkpoint that each file belongs to."""
        found = self.query("SELECT path, checkpoint_id FROM twophase.input_file WHERE pipeline = :p")
        return {int(path.removesuffix(".json")): checkpoint_id for path, checkpoint_id in found}

    def told(self) -> dict[Key, Told]:
        found = self.query(
            """SELECT r.checkpoint_id, r.revision, r.state, r.commit_seq, r.swept_at IS NOT NULL, p.attempt
            FROM twophase.revision r LEFT JOIN twophase.participant p USING (pipeline, checkpoint_id, revision)
            WHERE r.pipeline = :p ORDER BY 1, 2"""
        )
        return {
            Key(self.name, checkpoint_id, revision): Told(State(state), seq, swept, f"r{revision}a{attempt}")
            for checkpoint_id, revision, state, seq, swept, attempt in found
        }

    def replaced(self) -> list[Key]:
        return [key for key, told in self.told().items() if told.state is State.SUPERSEDED]

    def can_be_replaced(self, checkpoint_id: int) -> bool:
        """Say whether a checkpoint is committed, or will be: what is live of it is gone on with."""
        states = {told.state for key, told in self.told().items() if key.checkpoint_id == checkpoint_id}
        return bool(states & (LIVE | {State.COMMITTED}))

    def beside(self, kind: str) -> set[str]:
        return {path.name for path in data_path(f"lake/{self.name}.twophase/{kind}").iterdir()}

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        with self.runner.record.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(statement), {"p": self.name})]

    def sql(self, statement: str) -> None:
        with self.runner.record.engine.begin() as connection:
            connection.execute(text(statement), {"p": self.name})

    def expire(self) -> None:
        """Let every lease have run out."""
        self.sql("UPDATE twophase.revision SET lease_until = now() WHERE pipeline = :p AND lease_until > now()")

    # --- the end -----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Recover and run until there is no new input: everything is there once, and nothing is left over."""
        failpoints.configure("")
        self.expire()
        self.recover()
        while self.run():
            pass
        assert sorted(self.ids()) == sorted(self.rows)
        assert not [difference for difference in verify(self.runner.record, self.runner.pipeline) if difference]
        self._sweep(over=False)
        self._sweep(over=True)
        self._sweep(over=True)
        assert self.beside("staging") | self.beside("taken") == set()
        tombstones = set() if self.place.exchanges else set(map(named, self.replaced()))
        assert self.beside("superseded") == tombstones
        standing = {named(key) for key, told in self.told().items() if told.state is State.COMMITTED}
        assert {name.partition(".a")[0] for name in self.beside("manifests")} == standing


@pytest.fixture(scope="module")
def record(shared_record: PostgresRecord) -> PostgresRecord:
    """Return one record for the module: each example has a pipeline of its own in it."""
    return shared_record


@pytest.fixture
def place(record: PostgresRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Return where examples happen: a record for all, a home for each."""

    def move_in(name: str) -> Path:
        monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path / name))
        return tmp_path / name

    monkeypatch.setenv("TWOPHASE_LEASE", "60")
    yield Place(record, move_in)
    failpoints.configure("")


@pytest.fixture
def renaming(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Return the same on a file system that cannot exchange two folders."""
    monkeypatch.setattr(disk, "_renameat2", None)
    return Place(place.record, place.move_in, exchanges=False)


def play(place: Place, examples: int, steps: int) -> None:
    """Play some random histories."""
    run_state_machine_as_test(
        cast("type[Histories]", lambda: Histories(place)),  # it is only called
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_history_of_replacements_shows_what_the_record_says(place: Place) -> None:
    play(place, examples=25, steps=10)


def test_without_an_exchange_any_history_shows_what_the_record_says_or_a_gap(renaming: Place) -> None:
    play(renaming, examples=10, steps=10)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("steps", [20, 40])
def test_many_more_and_longer_histories_show_what_the_record_says(place: Place, steps: int) -> None:
    play(place, examples=150, steps=steps)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_more_histories_without_an_exchange_show_what_the_record_says_or_a_gap(renaming: Place) -> None:
    play(renaming, examples=150, steps=20)
