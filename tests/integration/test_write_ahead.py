"""The write-ahead sink: nothing is sent before the commit point, nothing is lost after it, and nothing overtakes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from sqlalchemy import text

import senders
from factories import SCHEMA, PreStaged, Row, land, stage_rows, words_pipeline
from processes import call, context, start, stopped_at_end
from twophase import Pipeline, committers, sinks
from twophase.committer.record import PostgresRecord
from twophase.committers import CheckpointCommitter
from twophase.core import failpoints
from twophase.core.checkpoint import Key, Output, Participant, Revision, Run
from twophase.core.errors import ConfigError, Parked, PromotionPending
from twophase.core.failpoints import FAILPOINTS, FailpointError
from twophase.core.ports import Outcome, Promotion
from twophase.core.recovery import recover
from twophase.core.states import State
from twophase.maintenance import load, sweep, verify
from twophase.running import Runner, coordinator
from twophase.sinks import sending

KINDS: dict[str, Callable[[], CheckpointCommitter]] = {"postgres": committers.Postgres, "file": committers.File}
WINDOWS = {"send.row", "send.sent"}
SENDING = [name for name in FAILPOINTS if name.startswith("send.")]


class Bench:
    """One pipeline with the write `out`, the system it sends to, and what a test does with them."""

    def __init__(self, home: Path, record: PostgresRecord) -> None:
        self.home = home
        self.record = record
        self.received = home / "received.jsonl"
        self.landed: list[Row] = []
        self.pipeline = self.declare()

    def declare(self, *, sender: str = "senders:Appending", max_pending: int = 1, **options: Any) -> Pipeline:
        """Declare the pipeline; the tests after this one use it."""
        arguments = options.pop("arguments", {"path": str(self.received)} if "Appending" in sender else {})
        sink = sinks.WriteAhead(sender, arguments=arguments, **options)
        self.pipeline = words_pipeline(writes={"out": sink}, max_files=1)
        self.pipeline.max_pending = max_pending
        return self.pipeline

    @property
    def sink(self) -> sinks.WriteAhead:
        found = self.pipeline.writes["out"]
        assert isinstance(found, sinks.WriteAhead)
        return found

    def land(self, rows: int = 4) -> None:
        """Land the input of one checkpoint."""
        start = len(self.landed)
        made = [{"id": start + i, "word": "w", "frequency": 1} for i in range(rows)]
        land(f"{start:06d}.json", made)
        self.landed += made

    def run(self, files: int = 2, rows: int = 4) -> Revision:
        """Land input, and take a checkpoint through."""
        self.land(rows)
        with Runner(self.pipeline, PreStaged(files=files), record=self.record) as runner:
            done = runner.run()
        assert done is not None
        return done

    def pending(self, files: int = 2) -> PromotionPending:
        """Do the same while the system is down."""
        with pytest.raises(PromotionPending) as waiting:
            self.run(files)
        return waiting.value

    def decided(self, files: int = 2, *, at: str = "commit.after") -> None:
        """Take a checkpoint just past its commit point, and crash."""
        failpoints.configure(f"{at}=raise")
        with pytest.raises(FailpointError):
            self.run(files)
        failpoints.configure("")

    def recover(self) -> None:
        """Finish what is decided, as a process that knows the record alone."""
        recover(coordinator(self.record, load(self.record, "words")), decided_only=True)

    def key(self, checkpoint_id: int, revision: int = 1) -> Key:
        return Key("words", checkpoint_id, revision)

    def state(self, checkpoint_id: int, revision: int = 1) -> State:
        with self.record.transaction() as tx:
            return tx.revision(self.key(checkpoint_id, revision)).state

    def output(self, checkpoint_id: int, revision: int = 1) -> Output:
        with self.record.transaction() as tx:
            mine: Participant = tx.participants(self.key(checkpoint_id, revision))[0]
        return Output(self.key(checkpoint_id, revision), mine.attempt, mine.handle, mine.manifest)

    def promote(self, checkpoint_id: int, revision: int = 1) -> Promotion:
        output = self.output(checkpoint_id, revision)
        return self.sink.promote(output.key, output.handle, output.manifest)

    def find(self, checkpoint_id: int) -> Promotion:
        output = self.output(checkpoint_id)
        return self.sink.find(output.key, output.handle, output.manifest)

    def staged(self, checkpoint_id: int) -> Path:
        return Path(self.sink.staging_path(self.key(checkpoint_id), self.output(checkpoint_id).handle))

    def down(self, how: str | None) -> None:
        """Let the system be down: `2` after two rows of a subtask, `2 text` with an exception; None: it is back."""
        path = self.home / "down"
        if how is None:
            path.unlink()
        else:
            path.write_text(how)

    def sent(self) -> list[tuple[int, int]]:
        """Return what the system has received, in order: checkpoint and row."""
        return [(said["checkpoint"], said["row"]["id"]) for said in senders.received(self.received)]

    def ids(self) -> list[int]:
        return sorted(row for _, row in self.sent())


@pytest.fixture
def bench(home: Path, record: PostgresRecord) -> Iterator[Bench]:
    yield Bench(home, record)
    failpoints.configure("")


@pytest.fixture(params=list(KINDS))
def committer(request: pytest.FixtureRequest) -> CheckpointCommitter:
    return KINDS[request.param]()


@pytest.fixture
def service(home: Path) -> Iterator[tuple[senders.Service, str]]:
    with senders.serving(home / "service.db") as found:
        yield found


# --- what is sent, and when ------------------------------------------------------------------------------------------


def test_nothing_is_sent_before_the_commit_point(bench: Bench) -> None:
    bench.decided(at="commit.before")

    assert bench.sent() == []
    assert bench.state(1) is State.PRECOMMITTED


def test_every_subtask_is_sent_once_in_order_with_its_checkpoint_and_time(
    bench: Bench, committer: CheckpointCommitter
) -> None:
    bench.declare(committer=committer)

    done = bench.run(files=3, rows=7)

    assert done.state is State.COMMITTED
    assert bench.sent() == [(1, row) for row in (0, 3, 6, 1, 4, 2, 5)]
    assert done.created_at is not None
    assert {said["at"] for said in senders.received(bench.received)} == {done.created_at.isoformat()}
    assert (bench.home / "closed").read_text() == "closed\n"


def test_rows_are_not_held_in_memory(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the rows take about the same memory: a batch, and a page of each column."""
    held: list[int] = []
    give = sending.Rows.__next__

    def look(given: sending.Rows) -> Row:
        held.append(pa.total_allocated_bytes())
        return give(given)

    monkeypatch.setattr(sending.Rows, "__next__", look)
    peaks = []
    for checkpoint_id, count in enumerate((100_000, 400_000), 1):
        bench.declare(sender="senders:Careless", arguments={"returns": True, "takes": count})
        bench.sink.prepare()
        rows = [{"id": number, "word": f"word number {number} of many", "frequency": 1} for number in range(count)]
        output = _staged(bench, checkpoint_id, rows, files=1)
        held.clear()
        before = pa.total_allocated_bytes()
        assert bench.sink.promote(output.key, output.handle, output.manifest).outcome is Outcome.PROMOTED
        assert len(held) == count
        peaks.append(max(held) - before)

    assert peaks[1] < 2 * peaks[0]


def test_a_subtask_without_rows_is_committed_without_a_call(bench: Bench) -> None:
    bench.declare(sender="senders:Careless", arguments={"returns": False})

    done = bench.run(files=1, rows=0)

    assert done.state is State.COMMITTED


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"returns": None}, r"Careless\.send_values returned None, expected True or False"),
        ({"returns": True, "takes": 1}, r"returned True and has taken 1 of 2 rows; expected all of them"),
        ({"returns": False, "takes": 2}, r"subtask 0: Careless\.send_values returned False: not now"),
        ({"returns": True, "takes": 3}, r"Careless\.send_values raised StopIteration"),
    ],
)
def test_a_sender_is_believed_only_when_it_says_true_and_took_every_row(
    bench: Bench, arguments: dict[str, Any], reason: str
) -> None:
    bench.declare(sender="senders:Careless", arguments=arguments)

    with pytest.raises(PromotionPending, match=reason):
        bench.run()

    assert bench.state(1) is State.COMMITTING


def test_a_sender_that_cannot_be_built_any_more_is_asked_for_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.decided()

    with monkeypatch.context() as broken:
        broken.delattr(senders, "Appending")
        promotion = bench.promote(1)

    assert promotion.outcome is Outcome.RETRY_LATER
    assert "the sender could not be built: import path 'senders:Appending'" in (promotion.reason or "")
    assert bench.promote(1).outcome is Outcome.PROMOTED


# --- not now ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["1", "1 connection refused"])
def test_a_system_that_is_down_leaves_the_checkpoint_decided_and_says_why(
    bench: Bench, how: str, committer: CheckpointCommitter
) -> None:
    bench.declare(committer=committer)
    bench.down(how)

    waiting = bench.pending()

    assert bench.state(1) is State.COMMITTING
    why = "raised ConnectionError: connection refused" if " " in how else "returned False: not now"
    assert f"out: subtask 0: Appending.send_values {why}" in str(waiting)
    assert bench.find(1).outcome is Outcome.RETRY_LATER
    assert "2 of 2 subtasks to be sent" in (bench.find(1).reason or "")


def test_later_checkpoints_queue_behind_it_and_the_next_success_sends_all_in_order(bench: Bench) -> None:
    bench.declare(max_pending=3)
    bench.down("0")
    for _ in range(3):
        bench.pending()
    bench.down(None)

    bench.run()

    assert [checkpoint for checkpoint, _ in bench.sent()] == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    assert bench.ids() == list(range(16))
    assert {bench.state(number) for number in (1, 2, 3, 4)} == {State.COMMITTED}


def test_no_more_than_max_pending_are_decided(bench: Bench) -> None:
    bench.declare(max_pending=1)
    bench.down("0")
    bench.pending()

    bench.pending()

    assert [bench.state(number) for number in (1, 2)] == [State.COMMITTING, State.PRECOMMITTED]


def test_a_promotion_that_was_cut_short_goes_on_after_the_subtasks_that_arrived(
    bench: Bench, committer: CheckpointCommitter
) -> None:
    bench.declare(committer=committer)
    failpoints.configure("send.before=raise@2")
    bench.pending()
    failpoints.configure("")
    assert "1 of 2 subtasks to be sent" in (bench.find(1).reason or "")

    bench.recover()

    assert bench.sent() == [(1, row) for row in (0, 2, 1, 3)]


# --- Flink's write-ahead cases ---------------------------------------------------------------------------------------


def test_rows_persist_when_a_notification_is_missed_and_go_with_the_next(bench: Bench) -> None:
    bench.decided()
    assert bench.sent() == []

    bench.run()

    assert bench.sent() == [(1, 0), (1, 2), (1, 1), (1, 3), (2, 4), (2, 6), (2, 5), (2, 7)]


@pytest.mark.parametrize("at", ["vote.after", "stage.after"])
def test_work_that_was_never_decided_is_discarded_on_restore(bench: Bench, at: str) -> None:
    """The script's own abort does it at once; its rows are sent by the next take of the same input, once."""
    bench.run()
    failpoints.configure(f"{at}=raise")
    with pytest.raises(FailpointError):
        bench.run()
    failpoints.configure("")

    assert bench.state(2) is State.ABORTED
    assert not list(Path(f"{bench.sink.location()}.twophase/staging").glob("00000002.r1*"))
    assert bench.ids() == [0, 1, 2, 3]
    bench.run()
    assert bench.ids() == list(range(8))


def test_a_committer_that_fails_loses_nothing_and_nothing_overtakes(bench: Bench) -> None:
    """The original has 43 of 33 values here: what was sent and not committed is sent again. So has this without ids."""
    own = senders.Sqlite(path=str(bench.home / "own.db"))
    bench.declare(committer=own, max_pending=5)
    bench.run(files=1, rows=10)
    (bench.home / "broken").touch()
    with pytest.raises(PromotionPending, match="ConnectionError: the committer is broken"):
        bench.run(files=1, rows=10)
    with pytest.raises(PromotionPending):
        bench.run(files=1, rows=5)
    assert 3 not in dict(bench.sent())
    (bench.home / "broken").unlink()

    bench.run(files=1, rows=8)

    order = [checkpoint for checkpoint, _ in bench.sent()]
    assert order == sorted(order)
    assert set(bench.ids()) == set(range(33))
    assert len(bench.ids()) > 33


def test_a_committer_that_fails_leads_to_exactly_33_of_33_values_where_the_marker_is_with_the_data(
    bench: Bench, service: tuple[senders.Service, str]
) -> None:
    kept, url = service
    own = senders.Sqlite(path=str(bench.home / "own.db"))
    http = "twophase.examples.http_sender:HttpSender"
    bench.declare(sender=http, arguments={"url": url, "batch": 3}, committer=own, idempotent=True, max_pending=5)
    bench.run(files=2, rows=10)
    (bench.home / "broken").touch()
    with pytest.raises(PromotionPending):
        bench.run(files=2, rows=10)
    with pytest.raises(PromotionPending):
        bench.run(files=2, rows=5)
    (bench.home / "broken").unlink()

    bench.run(files=2, rows=8)

    assert sorted(row["id"] for row in kept.rows()) == list(range(33))
    bounds = [row["id"] for row in kept.rows()]
    assert all(max(bounds[:end]) < min(bounds[end:]) for end in (10, 20, 25))


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4)], ids=["fewer", "more"])
def test_fewer_or_more_subtasks_after_a_restart_commit_each_pending_one_once(
    bench: Bench, before: int, after: int, committer: CheckpointCommitter
) -> None:
    bench.declare(committer=committer, max_pending=3)
    bench.decided(files=before)

    bench.run(files=after)

    assert bench.ids() == list(range(8))
    assert [checkpoint for checkpoint, _ in bench.sent()] == [1] * 4 + [2] * 4
    output = bench.output(1)
    with committer.of("words", "out") as asked:
        assert [asked.is_committed(number, 1, 1) for number in range(5)] == [number < before for number in range(5)]
    assert output.manifest["files"] == before


# --- Flink's two-phase cases -----------------------------------------------------------------------------------------


def test_a_notification_of_2_before_1_sends_1_first(bench: Bench) -> None:
    bench.declare(max_pending=2)
    bench.down("0")
    bench.pending()
    bench.pending()
    bench.down(None)

    with Runner(bench.pipeline, PreStaged(), record=bench.record) as runner:
        runner.coordinator.finish(bench.key(2))

    assert [checkpoint for checkpoint, _ in bench.sent()] == [1] * 4 + [2] * 4
    assert {bench.state(1), bench.state(2)} == {State.COMMITTED}


def test_a_crash_before_the_notification_is_rolled_forward_from_the_record_alone(bench: Bench) -> None:
    bench.decided()

    bench.recover()

    assert bench.state(1) is State.COMMITTED
    assert bench.ids() == [0, 1, 2, 3]


def test_recovered_work_is_committed_again_harmlessly(bench: Bench, committer: CheckpointCommitter) -> None:
    """All was sent, and the process died before it could say so."""
    bench.declare(committer=committer)
    bench.decided(at="promote.inside")
    assert bench.find(1).outcome is Outcome.ALREADY_PROMOTED

    bench.recover()
    again = bench.promote(1)

    assert again.outcome is Outcome.ALREADY_PROMOTED
    assert bench.ids() == [0, 1, 2, 3]


# --- killed while sending --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", SENDING)
def test_killed_anywhere_nothing_is_lost_and_only_the_two_windows_double(
    bench: Bench, point: str, committer: CheckpointCommitter
) -> None:
    """In the middle of send_values, and between it and the commit: there it is at least once, and nowhere else."""
    bench.declare(committer=committer)
    bench.land()

    crashed = call(
        senders.take, bench.pipeline.declaration(), log=bench.home / "crash.log", failpoints=f"{point}=kill@2"
    )
    recovered = call(senders.recover, log=bench.home / "recover.log")

    assert crashed.hit(point), crashed.said
    assert (crashed.wait(), recovered.wait()) == (-9, 0), recovered.said
    counts = Counter(bench.ids())
    assert set(counts) == {0, 1, 2, 3}
    assert (max(counts.values()) > 1) == (point in WINDOWS)
    assert bench.state(1) is State.COMMITTED


@pytest.mark.parametrize("action", ["kill", "raise"])
@pytest.mark.parametrize("point", SENDING)
def test_killed_anywhere_each_row_takes_effect_once_where_its_id_is_kept(
    bench: Bench, point: str, action: str, service: tuple[senders.Service, str]
) -> None:
    kept, url = service
    http = "twophase.examples.http_sender:HttpSender"
    bench.declare(sender=http, arguments={"url": url, "batch": 1}, idempotent=True)
    bench.land(rows=6)

    crashed = call(
        senders.take, bench.pipeline.declaration(), log=bench.home / "crash.log", failpoints=f"{point}={action}@2"
    )
    recovered = call(senders.recover, log=bench.home / "recover.log")

    assert crashed.hit(point), crashed.said
    assert recovered.wait() == 0, recovered.said
    assert sorted(row["id"] for row in kept.rows()) == list(range(6))
    assert bench.state(1) is State.COMMITTED


def test_an_answer_that_was_lost_and_a_service_that_is_down_double_nothing(
    bench: Bench, service: tuple[senders.Service, str]
) -> None:
    kept, url = service
    http = "twophase.examples.http_sender:HttpSender"
    bench.declare(sender=http, arguments={"url": url, "batch": 2}, idempotent=True)
    kept.trouble = ["lose"]
    with pytest.raises(PromotionPending, match=r"RemoteDisconnected"):
        bench.run(files=1, rows=6)
    kept.trouble = ["", "down"]
    bench.recover()
    assert bench.state(1) is State.COMMITTING

    bench.recover()

    assert bench.state(1) is State.COMMITTED
    assert [row["id"] for row in kept.rows()] == list(range(6))


def test_a_sender_gets_its_credentials_by_the_id_of_a_connection(
    bench: Bench, service: tuple[senders.Service, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, url = service
    monkeypatch.setenv("AIRFLOW_CONN_CARRIER", "http://me:canary@carrier.example.org")
    http = "twophase.examples.http_sender:HttpSender"
    bench.declare(sender=http, arguments={"url": url, "conn_id": "carrier"}, idempotent=True)

    bench.run()

    assert kept.authorization == "Basic bWU6Y2FuYXJ5"
    with bench.record.engine.connect() as connection:
        recorded = connection.execute(text("SELECT declaration::text FROM twophase.pipeline")).scalar_one()
    assert "carrier" in recorded
    assert "canary" not in recorded


def test_ids_are_the_same_however_often_a_row_is_sent(bench: Bench) -> None:
    bench.declare(idempotent=True)
    bench.down("1")
    bench.pending()
    bench.down(None)
    bench.recover()

    said = [said["row"] for said in senders.received(bench.received)]

    assert {row["_twophase_id"]: row["id"] for row in said} == {
        "words/out/1/r1/0/0": 0,
        "words/out/1/r1/0/1": 2,
        "words/out/1/r1/1/0": 1,
        "words/out/1/r1/1/1": 3,
    }
    assert len(said) == 5


# --- several promoters -----------------------------------------------------------------------------------------------


ROUNDS = 25


def test_two_racing_promoters_send_each_row_once(bench: Bench, committer: CheckpointCommitter) -> None:
    bench.declare(committer=committer)
    bench.sink.prepare()
    outputs = [_staged(bench, number) for number in range(1, ROUNDS + 1)]
    barrier, results = context.Barrier(2), context.SimpleQueue()

    both = [
        start(senders.race, bench.sink.declaration(), outputs, barrier, results, log=bench.home / f"{number}.log")
        for number in range(2)
    ]
    with stopped_at_end(*both):
        assert [child.wait() for child in both] == [0, 0], both[0].said + both[1].said

    assert Counter(results.get() for _ in range(2 * ROUNDS)) == {"promoted": ROUNDS, "already promoted": ROUNDS}
    assert bench.sent() == [(number, row) for number in range(1, ROUNDS + 1) for row in (0, 2, 1, 3)]


FOUR = [{"id": number, "word": "w", "frequency": 1} for number in range(4)]


def _staged(
    bench: Bench,
    checkpoint_id: int,
    rows: list[Row] = FOUR,
    *,
    files: int = 2,
    attempt: int = 1,
    earlier: Sequence[str] = (),
) -> Output:
    """Stage rows as a decided checkpoint has them."""
    key = bench.key(checkpoint_id)
    handle = bench.sink.place(key, attempt, "7c1e")
    stage_rows(bench.sink, handle, f"part-r1-a{attempt}", rows, files)
    manifest = bench.sink.seal(key, attempt, "out", handle, SCHEMA)
    bench.sink.check(key, handle, manifest)
    decided = {"commit_seq": checkpoint_id, "timestamp": "2026-11-15T00:00:00+00:00", "earlier": list(earlier)}
    return Output(key, attempt, {**handle, **decided}, manifest)


def test_a_stopped_promoter_keeps_the_others_from_sending_and_goes_on_when_it_wakes(
    bench: Bench, committer: CheckpointCommitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.declare(committer=committer)
    bench.sink.prepare()
    output, results = _staged(bench, 1), context.SimpleQueue()
    arguments = (bench.sink.declaration(), output.key, output.handle, output.manifest, results)
    stopped = start(senders.promote, *arguments, log=bench.home / "stopped.log", failpoints="send.row=stop@2")
    with stopped_at_end(stopped):
        assert stopped.until_stopped(), stopped.said
        monkeypatch.setattr(sending, "PATIENCE", 0.2)

        waits = bench.sink.promote(output.key, output.handle, output.manifest)
        stopped.wake()
        assert stopped.wait() == 0

    assert waits.outcome is Outcome.RETRY_LATER
    assert f":{stopped.process.pid}" in (waits.reason or "")
    assert results.get() == "promoted"
    assert bench.sink.promote(output.key, output.handle, output.manifest).outcome is Outcome.ALREADY_PROMOTED
    assert [row for _, row in bench.sent()] == [0, 2, 1, 3]


def test_a_committer_that_cannot_be_reached_stops_the_sending_before_it_begins(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.decided()
    output = bench.output(1)

    monkeypatch.setenv("TWOPHASE_DSN", "postgresql://nobody@127.0.0.1:1/nothing")
    found = bench.sink.find(output.key, output.handle, output.manifest)
    promotion = bench.sink.promote(output.key, output.handle, output.manifest)

    assert {found.outcome, promotion.outcome} == {Outcome.RETRY_LATER}
    assert "refused" in (promotion.reason or "")
    assert bench.sent() == []


def test_a_committer_that_is_away_delays_the_sending_and_not_the_decision(
    bench: Bench, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", "postgres://nobody@127.0.0.1:1/nothing")
    bench.declare(committer=committers.Postgres(conn_id="shop"), max_pending=2)
    for _ in range(2):
        assert "refused" in str(bench.pending())
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", dsn.replace("postgresql+psycopg2", "postgres"))

    bench.run()

    assert [checkpoint for checkpoint, _ in bench.sent()] == [1] * 4 + [2] * 4 + [3] * 4


# --- lost, restaged --------------------------------------------------------------------------------------------------


def test_staged_rows_that_are_gone_are_parked_and_restaged(bench: Bench) -> None:
    bench.decided()
    bench.staged(1).rename(bench.home / "lost")
    assert bench.find(1).outcome is Outcome.FAILED
    assert "is gone" in (bench.promote(1).reason or "")

    with Runner(bench.pipeline, PreStaged(files=3), record=bench.record) as runner:
        runner.restage(1, "the disk was lost")

    assert bench.ids() == [0, 1, 2, 3]
    assert bench.state(1) is State.COMMITTED


def test_what_was_lost_half_sent_is_not_sent_again_without_a_person(bench: Bench) -> None:
    """The rows of the next attempt may be split in another way: no number tells which of them have arrived."""
    bench.down("1")
    bench.pending(files=2)
    bench.staged(1).rename(bench.home / "lost")
    bench.down(None)

    with (
        Runner(bench.pipeline, PreStaged(files=3), record=bench.record) as runner,
        pytest.raises(Parked, match="attempt 1 had begun to send before it was lost"),
    ):
        runner.restage(1, "the disk was lost")
    assert bench.ids() == [0]

    bench.declare(republish=True)
    with Runner(bench.pipeline, PreStaged(), record=bench.record) as runner:
        recover(runner.coordinator, decided_only=True)
    assert bench.ids() == [0, 0, 1, 2, 3]
    assert bench.state(1) is State.COMMITTED


def test_what_was_thought_to_be_lost_and_was_sent_after_all_counts(bench: Bench) -> None:
    """R10: a promoter of the first attempt was slow, and has sent all of it before the second one is asked."""
    bench.sink.prepare()
    first = _staged(bench, 1)
    second = _staged(bench, 1, FOUR, files=3, attempt=2, earlier=[first.manifest["digest"]])
    bench.sink.promote(first.key, first.handle, first.manifest)

    found = bench.sink.find(second.key, second.handle, second.manifest)
    promotion = bench.sink.promote(second.key, second.handle, second.manifest)

    assert found == promotion
    assert promotion == Promotion(Outcome.ALREADY_PROMOTED, attempt=1, manifest=first.manifest)
    assert [row for _, row in bench.sent()] == [0, 2, 1, 3]
    adopted = Output(second.key, 1, second.handle, first.manifest)
    assert list(bench.sink.verify(adopted)) == []


def test_what_was_lost_and_came_back_is_not_sent_beside_what_was_staged_again(bench: Bench) -> None:
    """A promoter that slept since before the loss finds other rows under its numbers, and some not sent."""
    bench.sink.prepare()
    first = _staged(bench, 1, files=3)
    second = _staged(bench, 1, attempt=2, earlier=[first.manifest["digest"]])
    bench.sink.promote(second.key, second.handle, second.manifest)

    late = bench.sink.promote(first.key, first.handle, first.manifest)

    assert late == Promotion(Outcome.RETRY_LATER, "it was staged again, and another attempt has begun to send since")
    assert [row for _, row in bench.sent()] == [0, 2, 1, 3]


def test_an_older_checkpoint_that_was_decided_later_is_sent_too(bench: Bench, committer: CheckpointCommitter) -> None:
    """Intervals run in any order: what was sent is known by membership."""
    bench.declare(committer=committer)
    bench.sink.prepare()

    for number in (6, 5):
        output = _staged(bench, number)
        assert bench.sink.promote(output.key, output.handle, output.manifest).outcome is Outcome.PROMOTED

    assert Counter(checkpoint for checkpoint, _ in bench.sent()) == {5: 4, 6: 4}


@pytest.mark.parametrize("damage", ["altered", "unmounted"])
def test_staged_rows_that_are_not_what_was_voted_for_are_not_sent(bench: Bench, damage: str) -> None:
    bench.decided()
    if damage == "altered":
        file = next(bench.staged(1).glob("*.parquet"))
        file.write_bytes(file.read_bytes()[:-1] + b"X")
    else:
        Path(bench.sink.location()).rename(bench.home / "away")

    promotion = bench.promote(1)

    assert promotion.outcome is (Outcome.FAILED if damage == "altered" else Outcome.RETRY_LATER)
    assert bench.sent() == []


# --- again -----------------------------------------------------------------------------------------------------------


def test_a_committed_checkpoint_is_not_run_again(bench: Bench) -> None:
    bench.run()

    with (
        Runner(bench.pipeline, PreStaged(), record=bench.record) as runner,
        pytest.raises(ConfigError, match="sink 'out': what was sent cannot be taken back; declare republish=True"),
    ):
        runner.replace(1)

    assert bench.ids() == [0, 1, 2, 3]


def test_republished_rows_bear_their_revision(bench: Bench) -> None:
    bench.declare(republish=True, idempotent=True)
    bench.run()

    with Runner(bench.pipeline, PreStaged(files=1), record=bench.record) as runner:
        again = runner.replace(1)

    said = [said["row"] for said in senders.received(bench.received)]
    assert again.state is State.COMMITTED
    assert [row["_twophase_revision"] for row in said] == [1] * 4 + [2] * 4
    assert len({row["_twophase_id"] for row in said}) == 8
    assert said[4]["_twophase_id"] == "words/out/1/r2/0/0"


# --- sweep, verify ---------------------------------------------------------------------------------------------------


def test_the_sweeper_removes_sent_rows_and_what_the_committer_need_not_remember(bench: Bench) -> None:
    bench.declare(committer=committers.File(), max_pending=2)
    bench.run()
    bench.down("0")
    bench.pending()
    late = bench.output(1)
    folder = bench.home / "data/committers/words/out"

    list(sweep(bench.record, load(bench.record, "words")))

    assert not bench.staged(1).exists()
    assert bench.staged(2).exists()
    left = {path.name: path.read_text() for path in folder.glob("subtask.*")}
    assert left == dict.fromkeys(["subtask.-1", f"subtask.{sending.BEGUN}"], "2 1\n")
    bench.down(None)
    assert bench.sink.promote(late.key, late.handle, late.manifest).outcome is Outcome.FAILED
    assert bench.ids() == [0, 1, 2, 3]
    assert [difference for difference in verify(bench.record, bench.pipeline) if difference] == []
    assert list(sweep(bench.record, bench.pipeline)) == []


def test_what_a_late_promoter_finds_finished_and_forgotten_it_leaves_alone(bench: Bench) -> None:
    bench.declare(committer=committers.File())
    bench.run()
    list(sweep(bench.record, bench.pipeline))

    with Runner(bench.pipeline, PreStaged(), record=bench.record) as runner:
        done = runner.coordinator.finish(bench.key(1))

    assert done.state is State.COMMITTED
    assert done.parked_reason is None
    assert bench.ids() == [0, 1, 2, 3]


def test_verify_tells_what_the_committer_does_not_know(bench: Bench) -> None:
    bench.run()
    with bench.record.engine.begin() as connection:
        connection.execute(text("DELETE FROM twophase_write_ahead.committed WHERE subtask_id = 1"))

    found = [difference for difference in verify(bench.record, bench.pipeline) if difference]

    assert [difference.difference for difference in found] == ["subtask 1 is not in committers.Postgres of words/out"]


def test_an_aborted_attempt_is_discarded(bench: Bench) -> None:
    bench.land()
    with Runner(bench.pipeline, PreStaged(), record=bench.record) as runner:
        taken = runner.coordinator.begin(Run(None, "me"))
        assert taken is not None
        attempt = runner.coordinator.attempt(taken)
        runner._stage_and_vote(attempt)
        runner.coordinator.abort(attempt, "no more")

    assert not list(Path(f"{bench.sink.location()}.twophase/staging").iterdir())
    assert bench.sent() == []


# --- changes ---------------------------------------------------------------------------------------------------------


def test_the_memory_of_what_was_sent_cannot_be_changed_while_something_is_pending(bench: Bench) -> None:
    bench.decided()
    bench.declare(committer=committers.File())

    with pytest.raises(ConfigError, match=r"write 'out': committer was .* while a checkpoint is pending"):
        Runner(bench.pipeline, PreStaged(), record=bench.record)
