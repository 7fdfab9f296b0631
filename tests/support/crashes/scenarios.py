"""What the crash tests do in processes of their own, and what must hold after each of them."""

from __future__ import annotations

import inspect
import os
import signal
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pyarrow as pa
from sqlalchemy import Connection, Engine, Pool, event, text

from support.faults.processes import PATIENCE
from support.pipelines.factories import PreStaged, Row, counted, land_words, visible, words_pipeline
from twophase import audits, sinks
from twophase.committer.record import PostgresRecord
from twophase.core.checkpoint import Json, Revision, Run
from twophase.core.coordinator import Coordinator
from twophase.core.errors import AttemptFailed, Fenced
from twophase.core.failpoints import FAILPOINTS
from twophase.core.settings import data_path
from twophase.core.states import ENDED, ENTERED_FROM, State
from twophase.local.record_access import open_record
from twophase.pipeline import Pipeline
from twophase.runner import Runner, script, stager_for
from twophase.spark.plan import Plan
from twophase.sweep import sweep as sweep_all
from twophase.verification import verify
from twophase.wiring import coordinator_of

TABLES = ("lake/words", "lake/copy")
WRITES = ("lake", "copy")
#: Failpoints of the write-ahead sink: its own tests kill it at each.
SENDING = frozenset(name for name in FAILPOINTS if name.startswith("send."))
#: Failpoints of the Kafka sink.
KAFKA = frozenset(name for name in FAILPOINTS if name.startswith("kafka."))
#: Failpoints of sinks that are no tables of files.
OTHER_SINKS = SENDING | KAFKA | {"vote.tried", "promote.marked", "promote.applied", "table.created", "table.widened"}
#: Failpoints that only sources of offsets come by.
OFFSETS = frozenset({"begin.pinned", "report.before", "report.after"})
#: Failpoints that only a pipeline with state comes by.
STATES = frozenset(name for name in FAILPOINTS if name.startswith("state."))
#: Failpoints that nobody comes by here: nothing is replaced, so nothing is adopted, put away or swept as superseded.
ELSEWHERE = OTHER_SINKS | OFFSETS | STATES | frozenset({
    *("adopt.before", "adopt.after", "promote.gap", "promote.superseded"),
    *("sweep.inside", "sweep.swept", "sweep.forgotten", "reconcile.before", "reconcile.inside", "reconcile.after"),
    *("hand_over.before", "hand_over.inside"),
})  # fmt: skip
HERE = [name for name in FAILPOINTS if name not in ELSEWHERE]

# The fork server imports this module once for all processes: what pyarrow imports lazily is imported here.
pa.Table.from_pylist([{"id": 1}])


def pipeline(transform: str = "word_count:copy") -> Pipeline:
    """Declare one landing folder, two tables, an audit, and input that leaves the folder after the commit."""
    writes = {"lake": sinks.Files(TABLES[0]), "copy": sinks.Files(TABLES[1])}
    declared = words_pipeline(transform=transform, writes=writes, after_commit="archive", max_files=2)
    declared.audits = [audits.row_count(minimum=1, on="lake")]
    return declared


class Failing(PreStaged):
    """Stages everything, then fails: the revision is aborted with its output in place."""

    def __call__(self, plan: Plan, folder: Path, lost: Callable[[], bool]) -> Mapping[str, Json]:
        super().__call__(plan, folder, lost)
        msg = "the transform failed, as it was told to"
        raise AttemptFailed(msg)


# --- what processes do -----------------------------------------------------------------------------------------------


def run() -> None:
    """Take one checkpoint through."""
    with Runner(pipeline(), PreStaged()) as runner:
        runner.run()


def run_in_tasks() -> None:
    """Take one checkpoint through in the transactions of two tasks: each step in its own."""
    with Runner(pipeline(), PreStaged()) as runner:
        taken = runner.coordinator.begin(script())
        if taken is not None:
            attempt = runner.coordinator.attempt(taken)
            runner._stage_and_vote(attempt)
            runner.coordinator.commit(attempt)


def drain() -> None:
    """Take checkpoints through until there is no new input."""
    with Runner(pipeline(), PreStaged()) as runner:
        while runner.run():
            pass


def in_threes(checkpoints: int) -> None:
    """Take some checkpoints through, each with three files per table."""
    with Runner(pipeline(), PreStaged(files=3)) as runner:
        for _ in range(checkpoints):
            assert runner.run()


def spark_drain(transform: str, master: str) -> None:
    """Take checkpoints through by spark-submits of their own until there is no new input."""
    from support.servers.spark import CHEAP

    declared = pipeline(f"chaos_jobs:{transform}")
    with Runner(declared, stager_for(declared, master=master, conf=CHEAP)) as runner:
        while runner.run():
            pass


def fail() -> None:
    """Take one checkpoint up to its vote, and fail."""
    with Runner(pipeline(), Failing()) as runner:
        try:
            runner.run()
        except AttemptFailed as error:
            if "as it was told to" not in str(error):
                raise


def recover() -> None:
    """Finish what a crash left, from the record alone."""
    record = open_record()
    coordinator_of(record, pipeline()).recover()


def restage() -> None:
    """Stage again what the newest checkpoint has lost, as a person asks for; again, if that was killed."""
    with Runner(pipeline(), PreStaged()) as runner:
        newest = runner.coordinator.transact(lambda tx: tx.newest("words", None))
        assert newest is not None
        if newest.state is State.COMMITTING:
            runner.restage(newest.checkpoint_id, "its staged output is gone")


def sweep() -> None:
    """Remove what is dead."""
    record = open_record()
    for _ in sweep_all(record, pipeline()):
        pass


def race(role: str, rounds: int, barrier: Barrier, results: SimpleQueue[tuple[int, str, str]]) -> None:
    """Commit or abort the same pre-committed revision as another process does, round after round.

    Who won has to start a little later next time, so that soon either may win, however fast the machine is.
    """
    handicap = 0.0  # seconds, of the abort; below 0 of the commit
    with Runner(pipeline(), PreStaged()) as runner:
        for number in range(rounds):
            if role == "commit":
                mine = runner.coordinator.begin(Run(None, f"round-{number}"))
                assert mine is not None
                mine = runner.coordinator.attempt(mine)
                runner._stage_and_vote(mine)
            barrier.wait(PATIENCE)
            newest = runner.coordinator.transact(lambda tx: tx.newest("words", None))
            assert newest is not None
            barrier.wait(PATIENCE)
            threading.Event().wait(max(0.0, handicap if role == "abort" else -handicap))
            outcome = _contest(role, runner.coordinator, newest)
            results.put((number, role, outcome))
            handicap += 0.001 if outcome in {"ABORTED", "fenced"} else -0.001
            barrier.wait(PATIENCE)


def _contest(role: str, coordinator: Coordinator, revision: Revision) -> str:
    """Return the state in which one contender saw the revision end; what fences it is the other's."""
    try:
        ended = coordinator.commit(revision) if role == "commit" else coordinator.abort(revision, "the race")
    except Fenced:
        return "fenced"
    return ended.state


def contend(me: int, rounds: int, barrier: Barrier, results: SimpleQueue[tuple[int, int, str]]) -> None:
    """Take the same checkpoint through as other processes do at the same time, round after round.

    In even rounds all are the same run, which takes over from itself at once; in odd ones each is a run of its own.
    """
    with Runner(pipeline(), PreStaged()) as runner:
        for number in range(rounds):
            if me == 0:
                land_words(files=2, start=2 * number)
            barrier.wait(PATIENCE)
            try:
                done = _as_one_run(runner, number) if number % 2 == 0 else runner.run()
                outcome = done.state.value if done else "nothing to do"
            except Fenced:
                outcome = "fenced"
            results.put((number, me, outcome))
            barrier.wait(PATIENCE)


def _as_one_run(runner: Runner, number: int) -> Revision | None:
    taken = runner.coordinator.begin(Run(None, f"round-{number}"))
    if taken is None:
        return None
    attempt = runner.coordinator.attempt(taken)
    runner._stage_and_vote(attempt)
    return runner.coordinator.commit(attempt)


# --- what happens to their database ----------------------------------------------------------------------------------


def run_losing_a_commit(how: str, nth: int, function: Callable[[], None]) -> None:
    """Do something over a proxy that loses the nth COMMIT; say of each COMMIT whose it was."""
    from support.faults.lossy_proxy import LOSE_COMMIT, LOSE_REPLY

    count = 0

    def before(connection: Connection) -> None:
        nonlocal count
        if threading.current_thread() is not threading.main_thread():
            return  # a lease is renewed
        count += 1
        os.write(2, f"commit {count}: {_whose()}\n".encode())
        if count == nth:
            connection.connection.cursor().execute(LOSE_REPLY if how == "reply" else LOSE_COMMIT)

    event.listen(Engine, "commit", before)
    function()


def run_killing_the_database(nth: int, pid: int) -> None:
    """Take one checkpoint through, and kill the database at the nth moment from its begin on.

    A moment is right before or after a statement or a COMMIT. Each says what it was.
    """
    count = 0
    begun = threading.Event()

    def moment(what: str) -> None:
        nonlocal count
        if threading.current_thread() is not threading.main_thread() or not begun.is_set():
            return
        count += 1
        os.write(2, f"moment {count}: {_whose()} {what}\n".encode())
        if count == nth:
            os.kill(pid, signal.SIGKILL)

    event.listen(Engine, "before_cursor_execute", lambda *a: moment(f"before {a[2].split()[0]}"))
    event.listen(Engine, "after_cursor_execute", lambda *a: moment(f"after {a[2].split()[0]}"))
    event.listen(Engine, "commit", lambda *_: moment("before COMMIT"))
    event.listen(Pool, "checkin", lambda *_: moment("after COMMIT"))
    with Runner(pipeline(), PreStaged()) as runner:
        begun.set()
        runner.run()
        begun.clear()


#: The modules whose functions are the steps of a run.
STEPS = {f"twophase.{module}" for module in ("core.coordinator", "core.votes", "core.finish", "runner", "attempt")}


def _whose() -> str:
    """Name the step that the transaction under way belongs to."""
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_code.co_name
        module = frame.f_globals.get("__name__", "")
        if module in STEPS and name not in {"transact", "step", "<lambda>", "<dictcomp>", "<listcomp>"}:
            return name
        frame = frame.f_back
    return "opening"


def impatiently(function: Callable[..., None], *arguments: Any) -> None:
    """Do it with short time limits in the database: whoever waits for a stopped process waits a moment."""
    from twophase.committer import record

    record.SESSION = "-c lock_timeout=5s -c idle_in_transaction_session_timeout=1500ms -c timezone=UTC"
    function(*arguments)


# --- what must hold --------------------------------------------------------------------------------------------------


def check_never_wrong(expected: Iterable[Row], connection: Connection) -> None:
    """At any moment, whatever died: nothing is doubled, partly visible, or visible without being decided."""
    rows = counted(expected)
    by_checkpoint = _files(connection)
    for table in TABLES:
        seen = counted(visible(table))
        assert not seen - rows, f"{table}: doubled or invented: {list(seen - rows)[:3]}"
        for folder in data_path(table).glob("checkpoint=*"):
            checkpoint_id = int(folder.name.partition("=")[2])
            state, inputs = by_checkpoint[checkpoint_id]
            assert state in {"COMMITTING", "COMMITTED"}, f"{folder} is visible, its revision is {state}"
            whole = sum(1 for row in expected if f"{row['id'] // 10:06d}.json" in inputs)
            found = sum(1 for row in visible(f"{table}/{folder.name}") if row)
            assert found == whole, f"{folder}: {found} rows of {whole}"


def check_all_there(expected: Iterable[Row]) -> None:
    """At the end every record is in every table, once."""
    for table in TABLES:
        assert counted(visible(table)) == counted(expected), table


def check_story(connection: Connection) -> None:
    """Follow each revision's whole story in the events: every transition follows the one before and is allowed."""
    events = connection.execute(
        text("SELECT pipeline, checkpoint_id, revision, epoch, from_state, to_state FROM twophase.event ORDER BY id")
    )
    last: dict[tuple[Any, ...], State | None] = defaultdict(lambda: None)
    for row in events:
        if row.to_state is None:
            continue
        key, before, after = tuple(row)[:3], row.from_state, State(row.to_state)
        assert last[key] == (State(before) if before else None), f"{key}: a gap before {after}"
        adopted = row.revision == 0 and last[key] is None and after is State.COMMITTED  # it was there before us
        assert adopted or last[key] in ENTERED_FROM[after], f"{key}: {after} after {last[key]}"
        last[key] = after
    states = connection.execute(text("SELECT pipeline, checkpoint_id, revision, state FROM twophase.revision"))
    assert {tuple(row)[:3]: State(row.state) for row in states} == last


def check_finished(connection: Connection) -> None:
    """Nothing is left undone, and nothing dead is left on disk."""
    states = connection.execute(text("SELECT DISTINCT state FROM twophase.revision")).scalars()
    assert set(map(State, states)) <= ENDED
    committed = connection.execute(text("SELECT checkpoint_id FROM twophase.revision WHERE state = 'COMMITTED'"))
    expected = Counter(f"{checkpoint_id:08d}" for checkpoint_id in committed.scalars())
    for table in TABLES:
        side = data_path(f"{table}.twophase")
        assert not list((side / "staging").iterdir())
        assert not list((side / "taken").iterdir())
        assert Counter(path.name[:8] for path in (side / "manifests").iterdir()) == expected


def check_once(connection: Connection) -> None:
    """Each checkpoint was committed once: one decision, one row and one promotion per sink, one end."""
    decided = connection.execute(
        text("SELECT checkpoint_id, count(*) FROM twophase.revision WHERE commit_seq IS NOT NULL GROUP BY 1")
    )
    once = {(row[0], action): 1 for row in decided for action in ("committing", "committed", *WRITES)}
    counts = connection.execute(
        text("""SELECT checkpoint_id, action, count(*) FROM twophase.event
                WHERE action IN ('committing', 'committed') GROUP BY 1, 2
            UNION ALL SELECT checkpoint_id, split_part(why, ' ', 1), count(*) FROM twophase.event
                WHERE action = 'promoted' GROUP BY 1, 2""")
    )
    assert {(row[0], row[1]): row[2] for row in counts} == once
    rows = connection.execute(text("SELECT checkpoint_id, operator_id FROM twophase.committed"))
    assert Counter(map(tuple, rows)) == Counter(key for key in once if key[1] in WRITES)
    order = list(connection.execute(text("SELECT commit_seq FROM twophase.revision WHERE commit_seq > 0")).scalars())
    assert sorted(order) == list(range(1, len(order) + 1))


def looking(record: PostgresRecord) -> Connection:
    """Connect without a transaction: whoever reads a large table meanwhile would be idle in it for too long."""
    return record.engine.connect().execution_options(isolation_level="AUTOCOMMIT")


def check_end(record: PostgresRecord, expected: Sequence[Row]) -> None:
    """Recover twice and sweep; then everything is there, once, and the record, the tables and the story agree."""
    for _ in range(2):
        coordinator_of(record, pipeline()).recover()
        with looking(record) as connection:
            check_never_wrong(expected, connection)
    list(sweep_all(record, pipeline()))
    check_all_there(expected)
    with looking(record) as connection:
        check_finished(connection)
        check_story(connection)
        check_once(connection)
    assert not [difference for difference in verify(record, pipeline()) if difference]


def tables() -> dict[str, tuple[int, int, int]]:
    """Return every entry of the tables' folders with what changes when anybody touches it."""
    found = {}
    for table in TABLES:
        for path in (data_path(table), *data_path(table).rglob("*")):
            stat = path.stat()
            found[str(path)] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return found


def check_verified() -> None:
    """Each table holds what the record says, byte by byte."""
    record = open_record()
    differences = [difference for difference in verify(record, pipeline()) if difference]
    record.engine.dispose()
    assert not differences


def _files(connection: Connection) -> dict[int, tuple[str, set[str]]]:
    """Return, per checkpoint, the state of its decided revision and the input files it owns."""
    rows = connection.execute(
        text("""SELECT f.checkpoint_id, f.path, coalesce(r.state, 'undecided') AS state FROM twophase.input_file f
            LEFT JOIN twophase.revision r ON r.pipeline = f.pipeline AND r.checkpoint_id = f.checkpoint_id
                AND r.state IN ('COMMITTING', 'COMMITTED')""")
    )
    found: dict[int, tuple[str, set[str]]] = {}
    for row in rows:
        found.setdefault(row.checkpoint_id, (row.state, set()))[1].add(row.path)
    return found
