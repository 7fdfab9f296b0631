"""The rules that model checking asked for, one by one: each test goes red when its rule is left out."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from support.pipelines.factories import SCHEMA, land_words, stage_rows, visible, words_pipeline
from twophase import Pipeline
from twophase.committer import queries
from twophase.committer.record import PostgresRecord
from twophase.core import failpoints
from twophase.core.checkpoint import Input, InputFile, Json, Key, Known, Participant, Revision, Run
from twophase.core.coordinator import Coordinator
from twophase.core.errors import (
    Busy,
    Fenced,
    IllegalTransition,
    ManifestMismatch,
    Parked,
    PromotionPending,
    SinkUnavailable,
    TooManyPending,
)
from twophase.core.failpoints import FailpointError
from twophase.core.hindrances import Hindrance
from twophase.core.ports import Outcome, Progress, Promotion
from twophase.core.recovery import recover
from twophase.core.states import State
from twophase.maintenance import sweep, verify
from twophase.runner import enter
from twophase.sinks.files.sink import Files

ME = Run("dag", "run_1")
OTHER = Run("dag", "run_2")


class Flaky(Files):
    """A table that is down, or cannot tell, for the checkpoints it is told."""

    def __init__(self, path: str, **kwargs: Any) -> None:
        super().__init__(path, **kwargs)
        self.down: set[int] = set()
        self.silent: set[int] = set()

    def find(self, key: Key, handle: Json, manifest: Json) -> Promotion:
        if key.checkpoint_id in self.silent:
            return Promotion(Outcome.UNKNOWN)
        return super().find(key, handle, manifest)

    def promote(self, key: Key, handle: Json, manifest: Json) -> Promotion:
        if key.checkpoint_id in self.down:
            return Promotion(Outcome.RETRY_LATER, "the disk is away")
        if key.checkpoint_id in self.silent:
            return Promotion(Outcome.UNKNOWN)
        return super().promote(key, handle, manifest)


class Offsets:
    """A source of one partition that has grown to `end`."""

    settles = False
    per_revision = False

    def __init__(self) -> None:
        self.end = 10

    def discover(self, slot: str | None = None, known: Known | None = None) -> int:
        return self.end

    def fix(self, found: int, progress: Progress) -> Input:
        return Input(ranges={"0": (progress.position().get("0", 0), found)})

    def written_again(self, fixed: Any) -> list[InputFile]:
        return []

    def settle(self, checkpoint_id: int, files: Any) -> None:
        raise AssertionError


class Bench:
    """One pipeline with the tables `lake` and `copy`, and what a test does with it."""

    def __init__(self, record: PostgresRecord) -> None:
        self.record = record
        self.name = f"words_{uuid.uuid4().hex[:8]}"
        self.lake, self.copy = Flaky("lake/words"), Flaky("lake/copy")
        self.pipeline: Pipeline = words_pipeline(self.name, writes={"lake": self.lake, "copy": self.copy})
        self.pipeline.prepare()
        enter(record, self.pipeline)
        self.ended: dict[Run | None, bool | None] = {}
        self.coordinator = self.process()
        self.topic = Offsets()
        self.landed = 0

    def process(self, **kwargs: Any) -> Coordinator:
        """Return a coordinator as another process would have it."""
        parts: dict[str, Any] = {"sources": self.pipeline.reads, "sinks": self.pipeline.writes, "lease": 60.0}
        return Coordinator(self.record, self.name, run_ended=self.ended.get, patience=(), **{**parts, **kwargs})

    def key(self, checkpoint_id: int, revision: int = 1) -> Key:
        return Key(self.name, checkpoint_id, revision)

    def begin(self, run: Run = ME, slot: str | None = None) -> Revision:
        """Land a file if there is nothing to go on with, and take a checkpoint."""
        land_words(start=self.landed, rows=2)
        self.landed += 1
        taken = self.coordinator.begin(run, slot=slot)
        assert taken is not None
        return taken

    def stage(self, revision: Revision) -> Revision:
        """Stage every output that has no vote yet, and vote yes for it."""
        for participant in self.participants(revision.key).values():
            if participant.vote is None:
                self.coordinator.vote(revision, participant.name, yes=True, manifest=self.write(revision, participant))
        return self.read(revision.key)

    def write(self, revision: Revision, participant: Participant) -> Json:
        """Write what Spark would: one row that says which revision and attempt it is from."""
        sink = self.pipeline.writes[participant.name]
        assert isinstance(sink, Files)
        name = f"r{revision.revision}a{participant.attempt}"
        rows = [{"id": revision.checkpoint_id, "word": name, "frequency": 1}]
        stage_rows(sink, participant.handle, f"part-{name}", rows, 1)
        return sink.seal(revision.key, participant.attempt, participant.name, participant.handle, SCHEMA)

    def precommitted(self, revision: Revision | None = None) -> Revision:
        """Take a revision up to where everybody has voted yes."""
        return self.stage(self.coordinator.attempt(revision or self.begin()))

    def committing(self) -> Revision:
        """Take a new checkpoint just past its commit point."""
        revision = self.precommitted()
        self.coordinator.decide_commit(revision)
        return self.read(revision.key)

    def committed(self) -> Revision:
        """Take a new checkpoint all the way."""
        return self.coordinator.commit(self.precommitted())

    def again(self, checkpoint_id: int, kind: str = "backfill") -> Revision:
        """Begin another revision of a checkpoint."""
        with self.record.transaction() as tx:
            return tx.add_revision(self.name, checkpoint_id, kind, ME, 60.0)

    def staged(self, key: Key, name: str) -> Path:
        """Return the staging folder that the record names for a sink."""
        handle = self.participants(key)[name].handle
        return Path(f"{handle['table']}.twophase/staging/{handle['name']}")

    def lose(self, key: Key, name: str) -> Path:
        """Move a staged folder away; return where it is now."""
        staged = self.staged(key, name)
        return staged.rename(staged.parents[2] / f"lost-{staged.name}")

    def expire(self, revision: Revision) -> None:
        """Let the lease of a revision have run out."""
        with self.record.transaction() as tx:
            tx.renew(revision.key, epoch=tx.revision(revision.key).epoch, lease=-1)

    def read(self, key: Key) -> Revision:
        with self.record.transaction() as tx:
            return tx.revision(key)

    def participants(self, key: Key) -> dict[str, Participant]:
        with self.record.transaction() as tx:
            return {participant.name: participant for participant in tx.participants(key)}

    def events(self, key: Key) -> list[str]:
        with self.record.engine.connect() as connection:
            found = queries.show(connection, self.name, key.checkpoint_id)["events"]
        return [event["action"] for event in found if event["revision"] == key.revision]

    def sql(self, statement: str) -> Any:
        """Do something behind the protocol's back; `:p` is the name of the pipeline."""
        with self.record.engine.begin() as connection:
            found = connection.execute(text(statement), {"p": self.name} if ":p" in statement else {})
            return found.scalar() if found.returns_rows else None

    def position(self) -> int | None:
        with self.record.transaction() as tx:
            return tx.position(self.name, "topic").get("0")


@pytest.fixture(scope="module")
def record(shared_record: PostgresRecord) -> PostgresRecord:
    """Return one record for the module: each test has a pipeline of its own in it."""
    return shared_record


@pytest.fixture
def bench(record: PostgresRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Return a pipeline of this test's own, with two tables."""
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    yield Bench(record)
    failpoints.configure("")


@pytest.fixture
def offsets(bench: Bench) -> Bench:
    """Return the same with a source of offsets."""
    bench.coordinator = bench.process(sources={"topic": bench.topic})
    return bench


def words(table: str = "lake/words") -> list[tuple[int, str]]:
    """Return what a reader of a table sees: checkpoint, and the revision and attempt it is from."""
    return sorted((row["id"], row["word"]) for row in visible(table))


# --- R4: the position moves by compare-and-set, and only for the first revision that is decided -----------------------


def test_r4_files_that_went_to_another_checkpoint_refuse_the_commit_point(bench: Bench) -> None:
    revision = bench.precommitted()
    bench.sql("INSERT INTO twophase.checkpoint (pipeline, checkpoint_id, inputs) VALUES (:p, 2, '{}')")
    bench.sql("UPDATE twophase.input_file SET checkpoint_id = 2 WHERE pipeline = :p")

    with pytest.raises(IllegalTransition, match="source 'words': expected 1 files of its own, found 0; refused"):
        bench.coordinator.commit(revision)

    assert bench.read(revision.key).state is State.PRECOMMITTED
    assert words() == []


def test_r4_a_range_that_another_checkpoint_took_is_not_applied_twice(offsets: Bench) -> None:
    """Aborted, taken by the next checkpoint, committed there; then the first run is cleared."""
    first = offsets.begin()
    offsets.coordinator.abort(first, "failed")
    with offsets.record.transaction() as tx:
        number = tx.add_checkpoint(offsets.name, "by hand", {"topic": Input(ranges={"0": (0, 10)})})
    offsets.coordinator.commit(offsets.precommitted(offsets.again(number, "regular")))
    cleared = offsets.precommitted(offsets.again(first.checkpoint_id, "regular"))

    with pytest.raises(IllegalTransition, match="source 'topic' partition 0 is no longer at 0; refused"):
        offsets.coordinator.commit(cleared)

    assert offsets.position() == 10
    assert offsets.read(cleared.key).state is State.PRECOMMITTED
    assert words() == [(number, "r1a1")]


def test_r4_a_replacement_never_touches_the_position(offsets: Bench) -> None:
    offsets.committed()
    offsets.topic.end = 20
    offsets.committed()
    replacement = offsets.precommitted(offsets.again(1))

    offsets.coordinator.decide_commit(replacement)

    assert offsets.position() == 20
    assert offsets.read(replacement.key).state is State.COMMITTING


def test_r4_what_was_never_committed_is_no_replacement_whatever_its_kind(offsets: Bench) -> None:
    first = offsets.begin()
    offsets.coordinator.abort(first, "failed")

    offsets.coordinator.commit(offsets.precommitted(offsets.again(1, "backfill")))

    assert offsets.position() == 10


# --- R5: one live revision --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.OPEN, State.PRECOMMITTED, State.COMMITTING])
def test_r5_no_revision_begins_beside_a_live_one(bench: Bench, state: State) -> None:
    live = bench.begin()
    if state is not State.OPEN:
        live = bench.precommitted(live)
    if state is State.COMMITTING:
        bench.coordinator.decide_commit(live)

    with pytest.raises(IllegalTransition, match="revision_one_live"):
        bench.again(live.checkpoint_id)


def test_r5_an_aborting_revision_does_not_stand_in_the_way(bench: Bench) -> None:
    revision = bench.precommitted()
    failpoints.configure("abort.after=raise")
    with pytest.raises(FailpointError):
        bench.coordinator.abort(revision, "failed")

    second = bench.again(revision.checkpoint_id, "regular")

    assert bench.read(revision.key).state is State.ABORTING
    assert second.key == bench.key(1, 2)


def test_r5_staged_output_that_cannot_be_removed_does_not_stand_in_the_way(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    revision = bench.precommitted()

    def refuse(key: Key, handle: Json) -> None:
        raise PermissionError

    monkeypatch.setattr(bench.lake, "discard", refuse)
    with pytest.raises(SinkUnavailable, match="not discarded yet"):
        bench.coordinator.abort(revision, "failed")

    assert bench.begin().key == bench.key(1, 2)


# --- R6: markers are for ever, and name their revision ----------------------------------------------------------------


def test_r6_every_revision_has_its_own_rows_in_committed(bench: Bench) -> None:
    bench.committed()
    replacement = bench.precommitted(bench.again(1))

    bench.coordinator.commit(replacement)

    rows = bench.sql("SELECT array_agg(operator_id || ' r' || revision) FROM twophase.committed WHERE job_id = :p")
    assert sorted(rows) == ["copy r1", "copy r2", "lake r1", "lake r2"]


def test_r6_the_marker_of_an_older_revision_is_not_this_ones(bench: Bench) -> None:
    bench.committed()
    replacement = bench.precommitted(bench.again(1))
    bench.coordinator.decide_commit(replacement)
    mine = bench.participants(replacement.key)["lake"]

    found = bench.lake.find(replacement.key, mine.handle, mine.manifest)

    assert found.outcome is not Outcome.ALREADY_PROMOTED


# --- R7: votes are for one attempt ------------------------------------------------------------------------------------


def test_r7_a_late_vote_of_an_older_attempt_does_not_count(bench: Bench) -> None:
    first = bench.coordinator.attempt(bench.begin())
    manifest = bench.write(first, bench.participants(first.key)["lake"])
    second = bench.coordinator.attempt(first)

    with pytest.raises(Fenced, match="vote for epoch 1 refused, found open at epoch 2; nothing was changed"):
        bench.coordinator.vote(first, "lake", yes=True, manifest=manifest)

    assert {(p.attempt, p.vote) for p in bench.participants(second.key).values()} == {(2, None)}


def test_r7_opening_an_attempt_clears_every_vote(bench: Bench) -> None:
    first = bench.precommitted()

    second = bench.coordinator.attempt(first)

    assert (second.state, second.epoch) == (State.OPEN, 2)
    assert {(p.attempt, p.vote, len(p.manifest)) for p in bench.participants(first.key).values()} == {(2, None, 0)}


def test_r7_an_older_attempt_cannot_commit_what_a_newer_one_staged(bench: Bench) -> None:
    first = bench.precommitted()
    second = bench.precommitted(first)

    with pytest.raises(Fenced, match="commit for epoch 1 refused, found precommitted at epoch 2"):
        bench.coordinator.commit(first)

    assert bench.read(second.key).state is State.PRECOMMITTED
    assert words() == []


def test_r7_one_missing_vote_refuses_the_commit_point(bench: Bench) -> None:
    revision = bench.coordinator.attempt(bench.begin())
    bench.coordinator.vote(
        revision, "lake", yes=True, manifest=bench.write(revision, bench.participants(revision.key)["lake"])
    )

    with pytest.raises(Fenced):
        bench.coordinator.commit(revision)

    assert bench.read(revision.key).state is State.OPEN


def test_r7_a_vote_is_not_taken_back(bench: Bench) -> None:
    revision = bench.precommitted()

    with pytest.raises(Fenced):
        bench.coordinator.vote(revision, "lake", yes=False, reason="changed my mind")

    assert bench.read(revision.key).state is State.PRECOMMITTED


# --- R8: attempts are opened before the decision only -----------------------------------------------------------------


def test_r8_in_committing_no_attempt_is_opened_and_a_retry_promotes(bench: Bench) -> None:
    revision = bench.committing()

    with pytest.raises(Fenced, match="found committing at epoch 1"):
        bench.coordinator.attempt(revision)
    done = bench.coordinator.commit(revision)

    assert (done.state, done.epoch) == (State.COMMITTED, 1)
    assert words() == [(1, "r1a1")]


@pytest.mark.parametrize("state", [State.COMMITTED, State.ABORTED])
def test_r8_what_has_ended_opens_no_attempt(bench: Bench, state: State) -> None:
    revision = bench.precommitted()
    if state is State.COMMITTED:
        bench.coordinator.commit(revision)
    else:
        bench.coordinator.abort(revision, "failed")

    with pytest.raises(Fenced, match=f"found {state.lower()} at epoch 1"):
        bench.coordinator.attempt(revision)


def test_r8_a_restage_replaces_only_what_is_missing(bench: Bench) -> None:
    revision = bench.committing()
    before = bench.participants(revision.key)
    bench.lose(revision.key, "lake")

    restaged = bench.coordinator.restage(revision.key, "lost")

    after = bench.participants(revision.key)
    assert (restaged.state, restaged.epoch) == (State.COMMITTING, 2)
    assert after["copy"] == before["copy"]
    assert (after["lake"].attempt, after["lake"].vote, after["lake"].manifest) == (2, None, {})
    assert after["lake"].handle != before["lake"].handle


# --- R9: decided is final ---------------------------------------------------------------------------------------------


def test_r9_what_lost_its_output_is_parked_restaged_and_promoted(bench: Bench) -> None:
    revision = bench.committing()
    bench.lose(revision.key, "lake")

    with pytest.raises(
        Parked, match=r"decided, but it cannot be promoted \(lake: .* is gone\); parked: .*twophase restage"
    ):
        bench.coordinator.commit(revision)
    parked = bench.read(revision.key)
    bench.stage(bench.coordinator.restage(revision.key, "lost"))
    done = bench.coordinator.finish(revision.key)

    assert parked.state is State.COMMITTING
    assert "is gone" in (parked.parked_reason or "")
    assert parked.hindrances == {"lake": Hindrance.LOST}
    assert (done.state, done.parked_reason, done.commit_seq) == (State.COMMITTED, None, parked.commit_seq)
    assert words() == [(1, "r1a2")]
    assert words("lake/copy") == [(1, "r1a1")]
    assert [difference for difference in verify(bench.record, bench.pipeline) if difference] == []


def test_r9_what_is_parked_cannot_be_aborted(bench: Bench) -> None:
    """Recovery has promoted the other sink: the one that lost its output holds up itself alone."""
    revision = bench.committing()
    bench.lose(revision.key, "lake")
    recover(bench.coordinator, decided_only=True)

    after = bench.coordinator.abort(revision, "by a person")

    assert (after.state, after.commit_seq) == (State.COMMITTING, 1)
    assert words("lake/copy") == [(1, "r1a1")]


def test_r9_an_output_that_comes_back_is_promoted_and_the_flag_is_gone(bench: Bench) -> None:
    revision = bench.committing()
    lost = bench.lose(revision.key, "lake")
    recover(bench.coordinator, decided_only=True)
    lost.rename(bench.staged(revision.key, "lake"))

    recover(bench.coordinator, decided_only=True)

    done = bench.read(revision.key)
    assert (done.state, done.parked_reason) == (State.COMMITTED, None)


def test_r9_the_marker_is_read_again_before_parking(bench: Bench) -> None:
    """Somebody promoted it and died before saying so: its staged output is gone because it is in the table."""
    revision = bench.committing()
    for name, participant in bench.participants(revision.key).items():
        bench.pipeline.writes[name].promote(revision.key, participant.handle, participant.manifest)

    recover(bench.coordinator, decided_only=True)

    assert bench.read(revision.key).state is State.COMMITTED
    assert "parked" not in bench.events(revision.key)


def test_r9_what_is_not_lost_is_not_restaged(bench: Bench) -> None:
    revision = bench.committing()

    with pytest.raises(IllegalTransition, match="nothing to restage"):
        bench.coordinator.restage(revision.key, "for fun")

    assert bench.read(revision.key).epoch == 1


def test_r9_only_what_is_decided_is_restaged(bench: Bench) -> None:
    revision = bench.precommitted()
    bench.lose(revision.key, "lake")

    with pytest.raises(IllegalTransition, match="expected committing, found precommitted"):
        bench.coordinator.restage(revision.key, "lost")

    assert bench.read(revision.key).epoch == 1


def test_r9_recovery_leaves_alone_what_is_being_restaged(bench: Bench) -> None:
    revision = bench.committing()
    bench.lose(revision.key, "lake")
    restaged = bench.coordinator.restage(revision.key, "lost")

    recover(bench.process(), decided_only=True)

    assert bench.read(revision.key).state is State.COMMITTING
    assert bench.coordinator.finish(bench.stage(restaged).key).state is State.COMMITTED


def test_r9_a_restage_that_died_before_its_vote_can_be_restaged_again(bench: Bench) -> None:
    revision = bench.committing()
    bench.lose(revision.key, "lake")
    bench.coordinator.restage(revision.key, "lost")

    bench.stage(bench.coordinator.restage(revision.key, "again"))

    assert bench.coordinator.finish(revision.key).state is State.COMMITTED
    assert words() == [(1, "r1a3")]


def test_r9_a_table_that_lost_everything_beside_it_is_parked(bench: Bench) -> None:
    revision = bench.committing()
    shutil.rmtree(f"{bench.lake.location()}.twophase")

    recover(bench.coordinator, decided_only=True)

    assert bench.read(revision.key).parked_reason is not None


# --- R10: what the sink holds is what the record says -----------------------------------------------------------------


def test_r10_the_record_adopts_the_attempt_that_the_sink_holds(bench: Bench) -> None:
    """Restaged as attempt 2 and voted for; then attempt 1 comes back and a late promoter of it wins."""
    revision = bench.committing()
    first = bench.participants(revision.key)["lake"]
    lost = bench.lose(revision.key, "lake")
    bench.stage(bench.coordinator.restage(revision.key, "lost"))
    lost.rename(lost.parent / "words.twophase/staging" / first.handle["name"])
    bench.lake.promote(revision.key, first.handle, first.manifest)

    done = bench.coordinator.finish(revision.key)

    found = bench.participants(revision.key)["lake"]
    assert done.state is State.COMMITTED
    assert (found.attempt, found.manifest) == (1, first.manifest)
    assert words() == [(1, "r1a1")]
    assert [difference for difference in verify(bench.record, bench.pipeline) if difference] == []


def test_r10_a_promoter_that_was_overtaken_by_a_restage_says_what_it_promoted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its staged folder was out of sight while somebody restaged, and came back before it went on."""
    revision = bench.committing()
    promote = bench.lake.promote

    def overtaken(key: Key, handle: Json, manifest: Json) -> Promotion:
        staged = bench.staged(key, "lake")
        lost = bench.lose(key, "lake")
        bench.process().restage(key, "lost")
        lost.rename(staged)
        return promote(key, handle, manifest)

    monkeypatch.setattr(bench.lake, "promote", overtaken)

    done = bench.coordinator.finish(revision.key)

    found = bench.participants(revision.key)["lake"]
    assert done.state is State.COMMITTED
    assert words() == [(1, "r1a1")]
    assert (found.attempt, found.manifest.get("rows")) == (1, 1)


def test_r10_in_committing_the_voted_and_the_newest_attempt_are_not_swept(bench: Bench) -> None:
    revision = bench.committing()
    bench.lose(revision.key, "lake")
    restaged = bench.coordinator.restage(revision.key, "lost")
    bench.stage(restaged)
    voted, newest = bench.staged(revision.key, "copy"), bench.staged(revision.key, "lake")

    swept = list(sweep(bench.record, bench.pipeline))

    assert swept == []
    assert (voted.name.split(".")[2], newest.name.split(".")[2]) == ("a1", "a2")
    assert bench.coordinator.finish(revision.key).state is State.COMMITTED


def test_r10_in_committing_an_attempt_that_was_replaced_is_swept(bench: Bench) -> None:
    revision = bench.committing()
    staged = bench.staged(revision.key, "lake")
    lost = bench.lose(revision.key, "lake")
    bench.stage(bench.coordinator.restage(revision.key, "lost"))
    lost.rename(staged)

    swept = list(sweep(bench.record, bench.pipeline))

    assert [found.path for found in swept] == [str(staged)]
    assert not staged.exists()


# --- R11: swept is what the record says is dead, nothing else ---------------------------------------------------------


def leftovers(bench: Bench) -> set[str]:
    """Return what lies beside the table `lake`."""
    side = Path(f"{bench.lake.location()}.twophase")
    return {f"{path.parent.name}/{path.name}" for path in side.glob("*/*")}


def test_r11_only_the_dead_is_swept(bench: Bench) -> None:
    """One of each: committed, aborted with a straggler, replaced by a newer attempt, and unknown to the record."""
    done = bench.committed()
    staging = Path(f"{bench.lake.location()}.twophase/staging")
    aborted = bench.precommitted()
    bench.coordinator.abort(aborted, "failed")
    old = bench.precommitted(bench.coordinator.begin(ME))
    new = bench.stage(bench.coordinator.attempt(old))
    dead = {
        f"00000001.r1.a1.{'0' * 8}",  # of the committed one: a straggling task made its folder again
        f"00000002.r1.a1.{'0' * 8}",  # of the aborted one
        *(path.name for path in staging.iterdir() if ".r2.a1." in path.name),
    }
    alive = {"00000009.r1.a1.00000000", bench.staged(new.key, "lake").name, "notes.txt"}
    for name in (dead | alive) - {path.name for path in staging.iterdir()}:
        (staging / name).mkdir()

    list(sweep(bench.record, bench.pipeline))

    assert {path.name for path in staging.iterdir()} == alive
    assert f"manifests/00000001.r1.a{done.epoch}.json" in leftovers(bench)
    assert "manifests/00000002.r2.a2.json" in leftovers(bench)
    assert "manifests/00000002.r2.a1.json" not in leftovers(bench)
    assert bench.coordinator.commit(new).state is State.COMMITTED


def test_r11_a_dry_run_names_the_dead_and_touches_nothing(bench: Bench) -> None:
    old = bench.precommitted()
    bench.stage(bench.coordinator.attempt(old))
    before = leftovers(bench)

    swept = list(sweep(bench.record, bench.pipeline, dry_run=True))

    assert {found.why for found in swept} == {"attempt 2 took its place"}
    assert leftovers(bench) == before


# --- R12: commit_seq is taken in the decision itself ------------------------------------------------------------------


def test_r12_decisions_at_once_have_no_gaps_and_no_doubles(bench: Bench) -> None:
    bench.coordinator = bench.process(max_pending=9)
    revisions = [bench.precommitted(bench.begin(slot=f"slot {number}")) for number in range(5)]

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(bench.coordinator.decide_commit, revisions))

    assert sorted(bench.read(revision.key).commit_seq or 0 for revision in revisions) == [1, 2, 3, 4, 5]


def test_r12_a_refused_or_crashed_decision_takes_no_number(bench: Bench) -> None:
    revision = bench.precommitted()
    failpoints.configure("commit.inside=raise")
    with pytest.raises(FailpointError):
        bench.coordinator.commit(revision)
    newer = bench.precommitted(revision)
    with pytest.raises(Fenced):
        bench.coordinator.commit(revision)

    done = bench.coordinator.commit(newer)

    assert done.commit_seq == 1
    assert bench.committed().commit_seq == 2


# --- R13: promoted in the order of decisions, at most max_pending undone ----------------------------------------------


def test_r13_a_later_decision_is_not_promoted_before_an_earlier_one(bench: Bench) -> None:
    bench.coordinator = bench.process(max_pending=2)
    bench.lake.down = {1}
    with pytest.raises(PromotionPending, match="the disk is away"):
        bench.committed()

    with pytest.raises(PromotionPending, match=r"/1 r1: decided, not promoted yet \(lake: the disk is away\)"):
        bench.committed()

    assert bench.read(bench.key(2, 1)).state is State.COMMITTING
    assert words() == []
    bench.lake.down = set()
    assert bench.coordinator.finish(bench.key(2, 1)).state is State.COMMITTED
    assert bench.read(bench.key(1, 1)).state is State.COMMITTED
    assert words() == [(1, "r1a1"), (2, "r1a1")]


def test_r13_recovery_keeps_the_order_too(bench: Bench) -> None:
    bench.coordinator = bench.process(max_pending=2)
    bench.lake.down = {1}
    for _ in range(2):
        bench.committing()

    recover(bench.process(), decided_only=True)

    assert [bench.read(bench.key(number, 1)).state for number in (1, 2)] == [State.COMMITTING] * 2
    assert words() == []


def test_r13_more_than_max_pending_are_not_decided(bench: Bench) -> None:
    bench.lake.down = {1}
    with pytest.raises(PromotionPending):
        bench.committed()
    second = bench.precommitted()

    with pytest.raises(TooManyPending, match=r"1 decided before it .*\(words_.*/1 r1\).*; it stays pre-committed"):
        bench.coordinator.decide_commit(second)
    with pytest.raises(PromotionPending):
        bench.coordinator.commit(second)

    assert bench.read(second.key).state is State.PRECOMMITTED
    bench.lake.down = set()
    assert bench.coordinator.commit(second).commit_seq == 2
    assert words() == [(1, "r1a1"), (2, "r1a1")]


def test_r13_a_backfill_is_in_a_lane_of_its_own(bench: Bench) -> None:
    bench.committed()
    bench.lake.down = {2}
    with pytest.raises(PromotionPending):
        bench.committed()
    backfill = bench.precommitted(bench.again(1))

    done = bench.coordinator.commit(backfill)

    assert done.state is State.COMMITTED
    assert words() == [(1, "r2a1")]


def test_what_no_marker_tells_of_is_not_committed(bench: Bench) -> None:
    """Unknown is not promoted, however often it is said."""
    bench.lake.silent.add(1)
    revision = bench.committing()

    with pytest.raises(PromotionPending, match="lake: unknown"):
        bench.coordinator.finish(revision.key)

    assert bench.read(revision.key).state is State.COMMITTING
    bench.lake.silent.clear()
    assert bench.coordinator.finish(revision.key).state is State.COMMITTED


# --- R14: the last step is conditional, and supersedes in one transaction ---------------------------------------------


def test_r14_a_late_finisher_finds_it_done_and_touches_nothing(bench: Bench) -> None:
    """Stopped before its last step; meanwhile somebody finished, and a backfill replaced the result."""
    first = bench.committed()
    replacement = bench.precommitted(bench.again(1))
    bench.coordinator.commit(replacement)
    before = (bench.events(first.key), bench.events(replacement.key))

    bench.coordinator._mark_committed(first.key)
    late = bench.coordinator.finish(first.key)

    assert late.state is State.SUPERSEDED
    assert bench.read(replacement.key).state is State.COMMITTED
    assert (bench.events(first.key), bench.events(replacement.key)) == before
    assert words() == [(1, "r2a1")]


def test_r14_superseding_and_committing_happen_together_or_not_at_all(bench: Bench) -> None:
    first = bench.committed()
    replacement = bench.precommitted(bench.again(1))
    failpoints.configure("finish.inside=raise")
    with pytest.raises(FailpointError):
        bench.coordinator.commit(replacement)
    between = [bench.read(key).state for key in (first.key, replacement.key)]

    bench.coordinator.finish(replacement.key)

    assert between == [State.COMMITTED, State.COMMITTING]
    assert [bench.read(key).state for key in (first.key, replacement.key)] == [State.SUPERSEDED, State.COMMITTED]


def test_r14_finishing_at_once_is_finishing_once(bench: Bench) -> None:
    revision = bench.committing()

    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: bench.process().finish(revision.key), range(4)))

    assert {found.state for found in done} == {State.COMMITTED}
    assert bench.events(revision.key).count("committed") == 1
    assert words() == [(1, "r1a1")]


# --- R15: who is fenced touches nothing -------------------------------------------------------------------------------


def test_r15_a_fenced_abort_leaves_the_newer_attempt_alone(bench: Bench) -> None:
    zombie = bench.coordinator.attempt(bench.begin())
    newer = bench.precommitted(zombie)

    with pytest.raises(Fenced, match="at epoch 1, found precommitted at epoch 2; nothing was changed"):
        bench.coordinator.abort(zombie, "woke up")

    assert bench.read(newer.key).state is State.PRECOMMITTED
    assert bench.coordinator.commit(newer).state is State.COMMITTED
    assert words() == [(1, "r1a2")]


def test_r15_an_abort_after_the_commit_point_changes_nothing(bench: Bench) -> None:
    revision = bench.committing()

    after = bench.coordinator.abort(revision, "too late")

    assert after.state is State.COMMITTING
    assert bench.coordinator.finish(revision.key).state is State.COMMITTED
    assert words() == [(1, "r1a1")]


def test_r15_a_fenced_abort_after_a_restage_changes_nothing(bench: Bench) -> None:
    revision = bench.committing()
    bench.lose(revision.key, "lake")
    restaged = bench.coordinator.restage(revision.key, "lost")

    with pytest.raises(Fenced):
        bench.coordinator.abort(revision, "too late")

    assert bench.coordinator.finish(bench.stage(restaged).key).state is State.COMMITTED


def test_r15_an_abort_leaves_alone_what_another_run_has_taken_over(bench: Bench) -> None:
    zombie = bench.coordinator.attempt(bench.begin(ME))
    bench.expire(zombie)
    bench.ended[ME] = True
    taken = bench.process().begin(OTHER)
    assert taken is not None

    with pytest.raises(Fenced):
        bench.coordinator.abort(zombie, "woke up")

    assert (bench.read(taken.key).state, bench.read(taken.key).run) == (State.OPEN, OTHER)


# --- R16: what waits for its run is left alone until that run has ended -----------------------------------------------


@pytest.mark.parametrize("ended", [None, False], ids=["nobody knows", "it goes on"])
@pytest.mark.parametrize("voted", [False, True], ids=["open", "pre-committed"])
def test_r16_another_run_leaves_alone_what_waits_for_its_own(bench: Bench, ended: bool | None, voted: bool) -> None:
    """An approval may take days: the revision has no lease, and its run has not ended."""
    revision = bench.precommitted() if voted else bench.coordinator.attempt(bench.begin())
    with bench.record.transaction() as tx:
        tx.renew(revision.key, epoch=revision.epoch, lease=None)
    bench.ended[ME] = ended

    with pytest.raises(Busy, match="it waits for run dag/run_1, which has not ended") as busy:
        bench.process().begin(OTHER)
    recover(bench.process())

    after = bench.read(revision.key)
    assert busy.value.lease_left is None
    assert (after.state, after.epoch, after.run) == (revision.state, revision.epoch, ME)


def test_r16_a_lease_is_respected_even_when_its_run_has_ended(bench: Bench) -> None:
    revision = bench.coordinator.attempt(bench.begin())
    bench.ended[ME] = True

    with pytest.raises(Busy, match="run dag/run_1 works on it") as busy:
        bench.process().begin(OTHER)
    recover(bench.process())

    assert 0 < (busy.value.lease_left or 0) <= 60
    assert bench.read(revision.key).state is State.OPEN


def test_r16_once_its_run_has_ended_another_takes_it_over(bench: Bench) -> None:
    revision = bench.precommitted()
    bench.expire(revision)
    bench.ended[ME] = True

    taken = bench.process().begin(OTHER)

    assert taken is not None
    assert (taken.key, taken.state, taken.run) == (revision.key, State.PRECOMMITTED, OTHER)
    assert bench.events(revision.key)[-1] == "taken over"


def test_r16_its_own_run_takes_it_again_at_once(bench: Bench) -> None:
    revision = bench.coordinator.attempt(bench.begin())

    taken = bench.process().begin(ME)

    assert taken is not None
    assert (taken.key, taken.epoch) == (revision.key, 1)


def test_r16_recovery_aborts_it_once_its_run_has_ended(bench: Bench) -> None:
    revision = bench.precommitted()
    bench.expire(revision)
    bench.ended[ME] = True

    recover(bench.process())

    assert bench.read(revision.key).state is State.ABORTED
    assert not list(Path(f"{bench.lake.location()}.twophase/staging").iterdir())


# --- R17: a staging place is never used twice -------------------------------------------------------------------------


def restore(bench: Bench, key: Key) -> Revision:
    """Put the record back to before a revision's first attempt, as from a backup."""
    bench.sql("ALTER TABLE twophase.revision DISABLE TRIGGER guard")
    bench.sql("UPDATE twophase.revision SET state = 'OPEN', epoch = 0 WHERE pipeline = :p")
    bench.sql("ALTER TABLE twophase.revision ENABLE TRIGGER guard")
    bench.sql("DELETE FROM twophase.participant WHERE pipeline = :p")
    return bench.read(key)


def test_r17_an_epoch_that_comes_again_has_another_staging_place(bench: Bench) -> None:
    before = bench.precommitted()
    places = {name: bench.staged(before.key, name) for name in ("lake", "copy")}

    repeated = bench.coordinator.attempt(restore(bench, before.key))

    assert repeated.epoch == before.epoch == 1
    assert all(bench.staged(repeated.key, name) != places[name] for name in places)
    assert all(place.exists() for place in places.values())


def test_r17_an_epoch_that_comes_again_fails_by_name_and_the_next_one_is_committed(bench: Bench) -> None:
    repeated = bench.coordinator.attempt(restore(bench, bench.precommitted().key))

    with pytest.raises(ManifestMismatch, match="the record is older than the table"):
        bench.stage(repeated)
    done = bench.coordinator.commit(bench.stage(bench.coordinator.attempt(repeated)))

    assert done.state is State.COMMITTED
    assert words() == [(1, "r1a2")]


class Frame:
    """As much of a DataFrame as writes one file, under the name that the sink asks for."""

    columns: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.write = self
        self.schema = self
        self.fields: list[Any] = []
        self.asked: dict[str, Any] = {}

    def format(self, _: str) -> Frame:
        return self

    def options(self, **asked: Any) -> Frame:
        self.asked = asked
        return self

    def partitionBy(self, *_: str) -> Frame:  # noqa: N802 - Spark's own word for it
        return self

    def save(self, uri: str) -> None:
        folder = Path(uri.removeprefix("file://"))
        stage_rows(
            Files("unused"),
            {"table": str(folder.parents[1]).removesuffix(".twophase"), "name": folder.name},
            self.asked["mapreduce.output.basename"],
            [{"id": 1, "word": "w", "frequency": 1}],
            1,
        )


def test_r17_the_name_of_a_file_carries_revision_and_attempt(bench: Bench) -> None:
    """A reader across a replacement fails loudly instead of mixing two."""
    key = bench.key(1, 2)
    handle = bench.lake.place(key, 3, "0" * 8)

    bench.lake.stage(Frame(), key, 3, "lake", handle)

    staged = Path(f"{bench.lake.location()}.twophase/staging/{handle['name']}")
    assert [path.name for path in staged.glob("*.parquet")] == ["part-r2-a3-00000.parquet"]


def test_input_of_a_checkpoint_is_the_same_for_every_attempt_and_revision(bench: Bench) -> None:
    """The barrier: what lands later goes to the next checkpoint."""
    revision = bench.precommitted()
    with bench.record.transaction() as tx:
        before = tx.inputs(revision.key)
    bench.coordinator.abort(revision, "failed")

    second = bench.begin()

    with bench.record.transaction() as tx:
        assert tx.inputs(second.key) == before
    assert second.key == bench.key(1, 2)
    assert [file.path for file in before["words"].files] == ["000000.json"]
    assert isinstance(before["words"].files[0], InputFile)
