"""A pipeline's state is one more participant: each checkpoint goes on from the state of the one before it, once."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from support.pipelines.factories import land_words
from support.pipelines.kept_counts import Counted, counting_pipeline, runner, state_of
from support.pipelines.rules_bench import Flaky
from twophase import Pipeline, State
from twophase.backfill import Backfill, Selection
from twophase.committer.record import PostgresRecord
from twophase.core import failpoints
from twophase.core.checkpoint import Base, Key
from twophase.core.errors import Busy, ConfigError, IllegalTransition, PromotionPending
from twophase.core.failpoints import FailpointError
from twophase.core.states import State as Life
from twophase.sweep import sweep
from twophase.verification import verify
from twophase.wiring import coordinator_of, enter

Rows = list[dict[str, object]]


@pytest.fixture(scope="module")
def record(shared_record: PostgresRecord) -> PostgresRecord:
    """Return one record for the module: each test has a pipeline of its own in it."""
    return shared_record


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give each test a home of its own."""
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    yield tmp_path
    failpoints.configure("")


@pytest.fixture
def name() -> str:
    """Return a pipeline name of the test's own."""
    return f"counts_{uuid.uuid4().hex[:8]}"


def counted(rows: Rows, weight: int = 1) -> dict[str, int]:
    """Count the words of rows."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts[str(row["word"])] += weight * int(str(row["frequency"]))
    return dict(counts)


def run_all(record: PostgresRecord, pipeline: Pipeline, stager: Counted | None = None) -> int:
    """Run until there is no new input; return how many checkpoints that took."""
    with_state, done = runner(record, pipeline, stager), 0
    while with_state.run() is not None:
        done += 1
    return done


def replay(record: PostgresRecord, pipeline: Pipeline, first: int, last: int, stager: Counted) -> list[str | None]:
    """Replay checkpoints; return why each failed, None where it did not."""
    work = Backfill(record, pipeline.name, Selection((first, last)), lambda _: stager)
    failures = [done.failed for done in work.run()]
    if not any(failures):
        work.end()
    return failures


def test_each_checkpoint_goes_on_from_the_state_of_the_one_before(record: PostgresRecord, name: str) -> None:
    """The state after checkpoint N is what all records up to N give, and the record names what N+1 read."""
    rows = land_words(files=3)
    pipeline, stager = counting_pipeline(name), Counted()

    assert run_all(record, pipeline, stager) == 3

    assert state_of(record, pipeline) == counted(rows)
    assert stager.read_counts == [{}, counted(rows[:10]), counted(rows[:20])]
    with record.transaction() as tx:
        assert tx.base(Key(name, 1, 1)) == Base()
        assert tx.base(Key(name, 3, 1)) == Base(2, 1, {"state": 1})
    assert not [found for found in verify(record, pipeline) if found]


def test_an_aborted_revision_leaves_no_state(record: PostgresRecord, name: str) -> None:
    """What an aborted revision wrote is removed, and the next revision starts from the same state."""
    rows = land_words(files=2)
    pipeline, stager = counting_pipeline(name), Counted()
    runner(record, pipeline, stager).run()
    failpoints.configure("vote.checked=raise")
    with pytest.raises(FailpointError):
        runner(record, pipeline, stager).run()

    failpoints.configure("")
    runner(record, pipeline, stager).run()

    assert stager.read_counts[1:] == [counted(rows[:10])] * 2
    assert state_of(record, pipeline) == counted(rows)
    runs = pipeline.states["state"].home / "runs"
    assert sorted(path.name[:15] for path in runs.iterdir()) == ["00000001.r1.a1.", "00000002.r2.a1."]


def test_the_next_checkpoint_reads_a_decided_state_before_it_is_promoted_everywhere(
    record: PostgresRecord, name: str
) -> None:
    """N+1 stages on the state of N as soon as N is decided, while a sink of N is still down (S2)."""
    rows = land_words(files=3)
    lake = Flaky(f"lake/{name}")
    pipeline, stager = counting_pipeline(name, writes={"lake": lake}, max_pending=2), Counted()
    runner(record, pipeline, stager).run()
    lake.down = {2, 3}
    for _ in range(2):
        with pytest.raises(PromotionPending):
            runner(record, pipeline, stager).run()

    assert stager.read_counts == [{}, counted(rows[:10]), counted(rows[:20])]
    lake.down.clear()
    coordinator_of(record, pipeline).recover()
    assert state_of(record, pipeline) == counted(rows)
    with record.transaction() as tx:
        assert tx.revision(Key(name, 3, 1)).state is Life.COMMITTED


@pytest.mark.parametrize("base", [Base(), Base(1, 2, {"state": 1}), Base(1, 1, {"state": 2})], ids=str)
def test_a_state_that_no_longer_stands_cannot_be_committed(record: PostgresRecord, name: str, base: Base) -> None:
    """The commit point compares checkpoint, revision and attempt of the state that was read with what stands (S1)."""
    rows = land_words(files=2)
    pipeline = counting_pipeline(name)
    run = runner(record, pipeline)
    run.run()
    failpoints.configure("begin.after=raise")
    with pytest.raises(FailpointError):
        run.run()
    failpoints.configure("")
    with record.transaction() as tx:
        tx.fix_base(Key(name, 2, 1), base)
    expire(record, Key(name, 2, 1))

    with pytest.raises(IllegalTransition, match="stands now; abort it"):
        run.run()

    expire(record, Key(name, 2, 1))
    coordinator_of(record, pipeline).recover()
    run.run()
    assert state_of(record, pipeline) == counted(rows)


def test_a_replay_starts_from_the_state_before_its_first_checkpoint(record: PostgresRecord, name: str) -> None:
    """Checkpoints k to the latest are computed again, each from the new state before it (S4)."""
    rows = land_words(files=4)
    pipeline = counting_pipeline(name)
    run_all(record, pipeline)
    again = Counted(weight=100)

    assert replay(record, pipeline, 2, 4, again) == [None] * 3

    before = Counter(counted(rows[:10]))
    assert again.read_counts[0] == before
    assert state_of(record, pipeline) == before + Counter(counted(rows[10:], weight=100))
    with record.transaction() as tx:
        assert tx.lane(name).stale_from is None
    land_words(start=4)
    assert run_all(record, pipeline) == 1


def test_a_replay_holds_the_regular_lane_to_its_end(record: PostgresRecord, name: str) -> None:
    """While later states come from a replaced one, no regular checkpoint begins; the same command goes on (R20)."""
    rows = land_words(files=4)
    pipeline = counting_pipeline(name)
    run_all(record, pipeline)
    failpoints.configure("vote.checked=raise@3")  # two participants each: in the second checkpoint
    assert [bool(why) for why in replay(record, pipeline, 2, 4, Counted(2))] == [False, True, True]
    failpoints.configure("")
    land_words(start=4)

    with pytest.raises(Busy, match=rf"backfill {name} --checkpoints 2\.\.latest"):
        run_all(record, pipeline)
    with pytest.raises(ConfigError, match=r"checkpoint 2 on is under way"):
        replay(record, pipeline, 3, 4, Counted(2))
    assert replay(record, pipeline, 2, 4, Counted(2)) == [None] * 3

    assert run_all(record, pipeline) == 1
    later = land_words(start=4)
    expected = Counter(counted(rows[:10])) + Counter(counted(rows[10:], 2)) + Counter(counted(later))
    assert state_of(record, pipeline) == expected


def test_a_replay_from_the_middle_alone_is_refused_with_what_is_possible(record: PostgresRecord, name: str) -> None:
    """Later checkpoints were computed from the state of the middle one; nothing is begun, and no lane is held."""
    land_words(files=3)
    pipeline = counting_pipeline(name)
    run_all(record, pipeline)

    with pytest.raises(ConfigError, match=rf"through the latest one, 3: .*backfill {name} --checkpoints 2\.\.latest"):
        replay(record, pipeline, 2, 2, Counted(2))
    with pytest.raises(ConfigError, match="later checkpoints were computed from its state"):
        runner(record, pipeline).replace(2)

    land_words(start=3)
    assert run_all(record, pipeline) == 1


def test_a_replay_can_be_given_up_before_its_first_commit_only(record: PostgresRecord, name: str) -> None:
    """Before its first commit point nothing has changed; after it only a replay to the end makes up for it (R20)."""
    from twophase.committer import backfills

    land_words(files=3)
    pipeline = counting_pipeline(name)
    run_all(record, pipeline)
    failpoints.configure("vote.checked=raise")
    replay(record, pipeline, 2, 3, Counted(2))
    failpoints.configure("")
    with record.transaction() as tx:
        assert len(backfills.lay_down(tx.connection, name)) == 1
    land_words(start=3)
    assert run_all(record, pipeline) == 1

    failpoints.configure("vote.checked=raise@3")
    replay(record, pipeline, 2, 4, Counted(2))
    failpoints.configure("")
    with pytest.raises(ConfigError, match="has to go on"), record.transaction() as tx:
        backfills.lay_down(tx.connection, name)
    assert replay(record, pipeline, 1, 4, Counted(3)) == [None] * 4  # an earlier one takes the lane over


def test_a_replay_waits_for_the_regular_lane(record: PostgresRecord, name: str) -> None:
    """A replay begins only while no regular revision is undecided or waits for its promotion (S4)."""
    land_words(files=3)
    lake = Flaky(f"lake/{name}")
    pipeline = counting_pipeline(name, writes={"lake": lake}, max_pending=2)
    runner(record, pipeline).run()
    lake.down = {2}
    with pytest.raises(PromotionPending):
        runner(record, pipeline).run()
    with pytest.raises(PromotionPending):
        runner(record, pipeline).replace(2)
    lake.down.clear()
    failpoints.configure("begin.after=raise")
    with pytest.raises(FailpointError):
        runner(record, pipeline).run()
    failpoints.configure("")

    with pytest.raises(Busy, match=f"{name}/3 r1 is open; a replay begins when it is done"):
        replay(record, pipeline, 1, 2, Counted(2))

    expire(record, Key(name, 3, 1))
    coordinator_of(record, pipeline).recover()
    assert replay(record, pipeline, 1, 2, Counted(2)) == [None] * 2


def lose_decided_state(record: PostgresRecord, pipeline: Pipeline) -> Path:
    """Decide checkpoint 2, and lose the file of its state before anybody promotes it; return the file."""
    run = runner(record, pipeline)
    run.run()
    failpoints.configure("commit.after=raise")
    with pytest.raises(FailpointError):
        run.run()
    failpoints.configure("")
    expire(record, Key(pipeline.name, 2, 1))
    lost = next((pipeline.states["state"].home / "runs").glob("00000002.*"))
    lost.unlink()
    coordinator_of(record, pipeline).recover()
    return lost


def expire(record: PostgresRecord, key: Key) -> None:
    """Let the lease of a revision have run out."""
    with record.transaction() as tx:
        tx.renew(key, epoch=tx.revision(key).epoch, lease=-1)


def test_a_lost_file_of_a_decided_state_parks_it_until_it_is_staged_again(record: PostgresRecord, name: str) -> None:
    """Nothing expires silently: a decided state whose file is gone needs a person, and a restage brings it back."""
    rows = land_words(files=2)
    pipeline = counting_pipeline(name)

    lost = lose_decided_state(record, pipeline)

    with record.transaction() as tx:
        assert tx.revision(Key(name, 2, 1)).parked_reason == f"state: {lost.name}: is not there"
    assert runner(record, pipeline).restage(2, "its file was lost").state is Life.COMMITTED
    assert state_of(record, pipeline) == counted(rows)


def test_a_state_is_not_staged_again_while_a_later_checkpoint_may_have_read_it(
    record: PostgresRecord, name: str
) -> None:
    """A restage may give other rows than the later checkpoint has read; once that one is aborted, it may come (S4)."""
    rows = land_words(files=3)
    pipeline = counting_pipeline(name, max_pending=2)
    lose_decided_state(record, pipeline)
    failpoints.configure("begin.after=raise")
    with pytest.raises(FailpointError):
        runner(record, pipeline).run()
    failpoints.configure("")

    with pytest.raises(ConfigError, match=f"{name}/3 r1 was computed from its state"):
        runner(record, pipeline).restage(2, "its file was lost")

    expire(record, Key(name, 3, 1))
    coordinator_of(record, pipeline).recover()
    runner(record, pipeline).restage(2, "its file was lost")
    runner(record, pipeline).run()
    assert state_of(record, pipeline) == counted(rows)


def test_old_states_are_swept_by_their_manifests(record: PostgresRecord, name: str) -> None:
    """A file goes when no kept state lists it; a replay from before what is kept is refused with the first possible."""
    rows = land_words(files=14)
    pipeline = counting_pipeline(name, state=State(key=["word"], schema="word string, frequency bigint", retain="1m"))
    run_all(record, pipeline)
    with record.engine.begin() as connection:
        connection.execute(
            text("UPDATE twophase.revision SET decided_at = decided_at - interval '1 hour' WHERE pipeline = :p"),
            {"p": name},
        )

    gone = [one for one in sweep(record, pipeline) if one.sink == "state"]

    assert len(gone) == 3  # of the four oldest; the fourth wrote a file that the fifth lists
    assert state_of(record, pipeline) == counted(rows)
    assert len(list((pipeline.states["state"].home / "runs").iterdir())) == 11
    assert not [found for found in verify(record, pipeline) if found]
    with pytest.raises(ConfigError, match="a replay can start from 6 at the earliest"):
        replay(record, pipeline, 5, 14, Counted(2))
    assert replay(record, pipeline, 6, 14, Counted(2)) == [None] * 9
    assert not [one for one in sweep(record, pipeline) if one.sink == "state"]


def test_state_cannot_go_and_its_key_cannot_change(record: PostgresRecord, name: str) -> None:
    """What a state keeps would be lost in silence, or found under another key."""
    land_words()
    pipeline = counting_pipeline(name)
    run_all(record, pipeline)

    with pytest.raises(ConfigError, match="state is gone"):
        enter(record, counting_pipeline(name, state=None))
    other = counting_pipeline(name, state=State(key=["frequency"], schema="word string, frequency bigint"))
    with pytest.raises(ConfigError, match="state: key was"):
        enter(record, other)
