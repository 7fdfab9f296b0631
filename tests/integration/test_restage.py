"""A decided revision that a target refuses: what is said, and that each way out works, for each that can refuse."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog.sql import SqlCatalog

from support.crashes.replacement_promises import wait_for_lease
from support.pipelines.commands import twophase
from support.pipelines.factories import PreStaged, Row, counted, land_words, visible, words_pipeline
from support.sinks import senders
from twophase import Pipeline, audits, sinks
from twophase.committer.record import PostgresRecord
from twophase.core import failpoints
from twophase.core.checkpoint import Key, Participant, Revision
from twophase.core.errors import AttemptFailed, AuditFailed, BadValue, ConfigError, Parked
from twophase.core.failpoints import FailpointError
from twophase.core.hindrances import Hindrance
from twophase.core.recovery import Park
from twophase.core.settings import data_path
from twophase.core.states import State
from twophase.runner import Runner
from twophase.sinks.base import Sink
from twophase.sinks.postgres import target
from twophase.spark.plan import Plan
from twophase.storage.database import TableName
from twophase.sweep import sweep
from twophase.verification import verify

WHY = ("--reason", "looked at it")
CATALOG = {"type": "sql", "uri": "sqlite:///catalog.db"}


def mended(rows: list[Row], _plan: Plan | None = None) -> list[Row]:
    """Be today's transform."""
    return [{**row, "word": "mended"} for row in rows]


class Target:
    """A table that somebody alters after the vote, and may alter back."""

    def __init__(self, cursor: Any) -> None:
        self.cursor = cursor

    def sink(self) -> Sink:
        raise NotImplementedError

    def refuse(self) -> None:
        raise NotImplementedError

    def take(self) -> None:
        raise NotImplementedError

    def content(self) -> list[Row]:
        raise NotImplementedError


class InPostgres(Target):
    """Its rows must be mended ones from now on."""

    def sink(self) -> Sink:
        return sinks.Postgres("words", conn_id="dwh", create=True)

    def refuse(self) -> None:
        self.cursor.execute("ALTER TABLE words ADD CONSTRAINT strict CHECK (word = 'mended') NOT VALID")

    def take(self) -> None:
        self.cursor.execute("ALTER TABLE words DROP CONSTRAINT strict")

    def content(self) -> list[Row]:
        self.cursor.execute("SELECT id, word, frequency FROM words")
        return [dict(zip(("id", "word", "frequency"), row, strict=True)) for row in self.cursor.fetchall()]


class Attached(InPostgres):
    """Somebody who may stage has taken the name that the staging table is to have as a partition."""

    def sink(self) -> Sink:
        return sinks.Postgres("words", conn_id="dwh", create=True, attach=True)

    def refuse(self) -> None:
        self.cursor.execute("SELECT min(tablename) FROM pg_tables WHERE tablename LIKE 's\\_%'")  # not its parts
        (staged,) = self.cursor.fetchone()
        self.taken = str(target.partition_name(TableName("twophase_staging", staged)))
        self.cursor.execute(f"CREATE TABLE {self.taken} ()")

    def take(self) -> None:
        self.cursor.execute(f"DROP TABLE {self.taken}")


class InDelta(Target):
    """It has a constraint that the staged rows were not held to."""

    def sink(self) -> Sink:
        return sinks.Delta("lake/delta")

    @property
    def table(self) -> DeltaTable:
        return DeltaTable(self.sink().location())

    def refuse(self) -> None:
        self.table.alter.add_constraint({"strict": "frequency >= 0"})

    def take(self) -> None:
        self.table.alter.drop_constraint("strict")

    def content(self) -> list[Row]:
        return pl.read_delta(self.sink().location()).to_dicts()


class InIceberg(Target):
    """One of its columns is required now."""

    def sink(self) -> Sink:
        return sinks.Iceberg("db.words", path="lake/iceberg", catalog=CATALOG)

    @property
    def table(self) -> Any:
        sink = self.sink()
        assert isinstance(sink, sinks.Iceberg)
        assert isinstance(sink.catalog, dict)
        return SqlCatalog("default", **sink.catalog).load_table(sink.table)

    def _require(self, required: bool) -> None:
        with self.table.update_schema(allow_incompatible_changes=True) as update:
            update.update_column("frequency", required=required)

    def refuse(self) -> None:
        self._require(True)

    def take(self) -> None:
        self._require(False)

    def content(self) -> list[Row]:
        rows: list[Row] = self.table.scan().to_arrow().to_pylist()
        return rows


class Losing(Target):
    """It has nothing to refuse rows by; what is staged for it is lost, and found again."""

    def _staged(self) -> Path:
        return Path(f"{self.sink().location()}.twophase", "staging")

    def refuse(self) -> None:
        lost = max(self._staged().iterdir())  # that of the newest checkpoint
        self.lost = lost.rename(data_path("lost")), lost

    def take(self) -> None:
        found, place = self.lost
        found.rename(place)


class InFiles(Losing):
    """A table of files."""

    def sink(self) -> Sink:
        return sinks.Files("lake/other")

    def content(self) -> list[Row]:
        return visible("lake/other")


class Sent(Losing):
    """A system that rows are sent to."""

    def sink(self) -> Sink:
        kept = str(data_path("kept.db"))
        return sinks.WriteAhead(
            "support.sinks.senders:Keeping", arguments={"path": kept}, idempotent=True, path="ahead/words"
        )

    def content(self) -> list[Row]:
        return senders.kept(data_path("kept.db"))


TARGETS: dict[str, Callable[[Any], Target]] = {
    "postgres": InPostgres,
    "attached": Attached,
    "delta": InDelta,
    "iceberg": InIceberg,
}
#: No constraint is in a folder; and a system that does not take its rows is asked again, and never parked.
LOSING: dict[str, Callable[[Any], Target]] = {"files": InFiles, "sent": Sent}


class Bench:
    """One pipeline into files and into a target that may refuse."""

    def __init__(self, record: PostgresRecord, target: Target, *, audited: str | None = None) -> None:
        self.record = record
        self.target = target
        self.pipeline: Pipeline = words_pipeline(
            writes={"dwh": target.sink(), "lake": sinks.Files("lake/words")}, max_files=1
        )
        self.pipeline.audits = [audits.not_null("word", on=audited)]
        self.rows: list[Row] = []

    def process(self, stager: PreStaged | None = None) -> Runner:
        return Runner(self.pipeline, stager or PreStaged(), record=self.record)

    def land(self) -> list[Row]:
        landed = land_words(rows=4, start=len(self.rows) // 4)
        self.rows += landed
        return landed

    def refused(self) -> Key:
        """Commit a checkpoint, decide the next one, and let its target refuse it."""
        self.land()
        self.process().run()
        self.land()
        failpoints.configure("commit.after=raise")
        with pytest.raises(FailpointError):
            self.process().run()
        failpoints.configure("")
        self.target.refuse()
        return Key("words", 2, 1)

    def parked(self) -> Key:
        key = self.refused()
        with pytest.raises(Parked, match=r"parked: alter the target of dwh .*twophase restage words 2 --sink dwh"):
            self.process().coordinator.finish(key)
        return key

    def read(self, key: Key) -> Revision:
        with self.record.transaction() as tx:
            return tx.revision(key)

    def participants(self, key: Key) -> dict[str, Participant]:
        with self.record.transaction() as tx:
            return {p.name: p for p in tx.participants(key)}

    def differences(self) -> list[Any]:
        return [difference for difference in verify(self.record, self.pipeline) if difference]


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name == "attached")) for name in TARGETS])
def bench(request: pytest.FixtureRequest, home: Path, record: PostgresRecord, target: Any) -> Iterator[Bench]:
    yield Bench(record, TARGETS[request.param](target))
    failpoints.configure("")


@pytest.fixture(params=LOSING)
def losing(request: pytest.FixtureRequest, home: Path, record: PostgresRecord, target: Any) -> Iterator[Bench]:
    yield Bench(record, LOSING[request.param](target), audited="lake")
    failpoints.configure("")


@pytest.fixture
def in_postgres(home: Path, record: PostgresRecord, target: Any) -> Iterator[Bench]:
    yield Bench(record, InPostgres(target))
    failpoints.configure("")


def test_a_target_that_refuses_holds_up_itself_and_once_altered_recovery_promotes_to_it(bench: Bench) -> None:
    key = bench.parked()
    parked = bench.read(key)
    coordinator = bench.process().coordinator
    assert (parked.state, parked.hindrances) == (State.COMMITTING, {"dwh": Hindrance.REFUSED})
    assert counted(visible("lake/words")) == counted(bench.rows)
    assert not isinstance(coordinator.recover(decided_only=True)[0][1], Park)  # it is that already

    bench.target.take()
    coordinator.recover(decided_only=True)

    done = bench.read(key)
    assert (done.state, done.parked_reason, done.hindrances) == (State.COMMITTED, None, {})
    assert counted(bench.target.content()) == counted(bench.rows)
    assert bench.differences() == []


def test_a_restage_of_the_sink_that_is_named_lets_it_take_what_the_transform_gives_today(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other sink keeps what it has; a backfill brings both to one transform."""
    bench.parked()
    monkeypatch.setattr("twophase.runner.stager_for", lambda *_, **__: PreStaged(change=mended))
    row = json.loads(twophase("pending", "--json").stdout)[0]

    unnamed = twophase("restage", "words", "2", *WHY)
    named = twophase("restage", "words", "2", "--sink", "dwh", *WHY)

    assert row["command"] == "twophase restage words 2 --sink dwh --reason …"
    assert unnamed.exit_code == 1
    assert "nothing to restage: dwh: " in unnamed.stderr
    assert "--sink dwh --reason" in unnamed.stderr
    assert named.exit_code == 0, named.stderr
    new = mended(bench.rows[4:])
    assert counted(bench.target.content()) == counted([*bench.rows[:4], *new])
    assert counted(visible("lake/words")) == counted(bench.rows)
    assert bench.differences() == []
    bench.process(PreStaged(change=mended)).replace(2)
    assert counted(visible("lake/words")) == counted([*bench.rows[:4], *new]) == counted(bench.target.content())
    list(sweep(bench.record, bench.pipeline))
    assert bench.differences() == []


def test_what_is_lost_is_restaged_by_the_name_of_its_sink_alone(losing: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other sink keeps what it has, and what comes to light later is not shown beside it."""
    key = losing.refused()
    with pytest.raises(Parked, match=r"parked: put back what is missing, .*twophase restage words 2 --reason"):
        losing.process().coordinator.finish(key)
    assert losing.read(key).hindrances == {"dwh": Hindrance.LOST}
    monkeypatch.setattr("twophase.runner.stager_for", lambda *_, **__: PreStaged(change=mended))

    named = twophase("restage", "words", "2", "--sink", "dwh", *WHY)
    losing.target.take()
    losing.process().coordinator.recover(decided_only=True)
    list(sweep(losing.record, losing.pipeline))

    assert named.exit_code == 0, named.stderr
    assert counted(losing.target.content()) == counted([*losing.rows[:4], *mended(losing.rows[4:])])
    assert counted(visible("lake/words")) == counted(losing.rows)
    assert losing.differences() == []


def test_what_was_lost_and_is_put_back_is_promoted_though_a_restage_failed_meanwhile(losing: Bench) -> None:
    key = losing.refused()
    with pytest.raises(AttemptFailed):
        losing.process(Failing()).restage(2, "try", ["dwh"])
    losing.process().coordinator.recover(decided_only=True)
    assert losing.read(key).state is State.COMMITTING

    losing.target.take()
    losing.process().coordinator.recover(decided_only=True)

    assert losing.read(key).state is State.COMMITTED
    assert counted(losing.target.content()) == counted(losing.rows)
    assert losing.differences() == []


class Failing(PreStaged):
    """Has staged everything when it fails."""

    def __call__(self, *arguments: Any) -> Any:
        super().__call__(*arguments)
        msg = "the transform failed, as it was told to"
        raise AttemptFailed(msg)


def test_a_restage_that_fails_leaves_what_was_voted_for_as_it_was(bench: Bench) -> None:
    """A sweep keeps it, and once the target is altered recovery promotes it."""
    key = bench.parked()
    with pytest.raises(AttemptFailed):
        bench.process(Failing()).restage(2, "try", ["dwh"])
    list(sweep(bench.record, bench.pipeline))
    bench.process().coordinator.recover(decided_only=True)
    assert bench.read(key).hindrances == {"dwh": Hindrance.REFUSED}

    bench.target.take()
    bench.process().coordinator.recover(decided_only=True)

    assert bench.read(key).state is State.COMMITTED
    assert counted(bench.target.content()) == counted(bench.rows)
    assert bench.differences() == []


def test_a_partition_name_that_is_taken_before_the_vote_is_refused_there_and_the_next_run_has_another(
    home: Path, record: PostgresRecord, target: Any
) -> None:
    bench = Bench(record, Attached(target))
    bench.land()

    class Occupied(PreStaged):
        def __call__(self, *arguments: Any) -> Any:
            staged = super().__call__(*arguments)
            bench.target.refuse()
            return staged

    with pytest.raises(BadValue, match=r"table public.words refuses what is staged: relation .* already exists"):
        bench.process(Occupied()).run()

    assert bench.process().run() is not None
    assert counted(bench.target.content()) == counted(bench.rows)
    assert bench.differences() == []


def without_words(rows: list[Row], _plan: Plan | None = None) -> list[Row]:
    """Be a transform that an audit refuses."""
    return [{**row, "word": None} for row in rows]


def test_a_restage_whose_rows_an_audit_refuses_leaves_what_was_voted_for_as_it_was(bench: Bench) -> None:
    """It is refused before its vote, and once the target is altered recovery promotes the old rows."""
    key = bench.parked()
    refused = r"dwh: not_null\(word\): expected .*; what was voted for before stands, correct it and restage again"
    with pytest.raises(AuditFailed, match=refused):
        bench.process(PreStaged(change=without_words)).restage(2, "try", ["dwh"])
    mine = bench.participants(key)
    assert (mine["dwh"].vote, mine["dwh"].attempt) == (False, 2)
    assert "dwh: not_null(word): expected" in str(mine["dwh"].reason)
    assert {(mine[audit].vote, mine[audit].attempt) for audit in mine if "not_null" in audit} == {(True, 1)}

    bench.target.take()
    bench.process().coordinator.recover(decided_only=True)

    assert bench.read(key).state is State.COMMITTED
    assert counted(bench.target.content()) == counted(bench.rows)
    assert bench.differences() == []


def test_the_audits_of_what_is_restaged_vote_with_it_and_those_of_other_sinks_stand(in_postgres: Bench) -> None:
    """An audit looks at one write: of one that is not staged again there is nothing new to be said."""
    key = in_postgres.parked()

    in_postgres.process(PreStaged(change=mended)).restage(2, "mended", ["dwh"])

    found = {name: (p.vote, p.attempt) for name, p in in_postgres.participants(key).items() if p.kind == "audit"}
    assert found == {"dwh: not_null(word)": (True, 2), "lake: not_null(word)": (True, 1)}


def test_what_two_sinks_restage_is_checked_for_both_before_either_votes(in_postgres: Bench) -> None:
    """Otherwise a no of the second would come when the first has given up what it had voted for."""
    bench = in_postgres
    key = bench.refused()
    bench.pipeline.audits = [audits.not_null("word", on="lake")]

    with pytest.raises(AuditFailed, match=r"lake: not_null\(word\)"):
        bench.process(PreStaged(change=without_words)).restage(2, "both", ["dwh", "lake"])

    votes = {name: p.vote for name, p in bench.participants(key).items() if p.kind == "sink"}
    assert votes == {"dwh": None, "lake": False}
    bench.target.take()
    bench.process().coordinator.recover(decided_only=True)
    assert counted(bench.target.content()) == counted(bench.rows) == counted(visible("lake/words"))
    assert bench.differences() == []


def test_a_sink_that_is_down_does_not_keep_another_one_from_being_restaged(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what is staged again has to be ready; the other one is promoted to when it is back."""
    key = bench.refused()
    monkeypatch.setattr("twophase.runner.stager_for", lambda *_, **__: PreStaged(change=mended))
    table = Path(bench.pipeline.writes["lake"].location())
    away = table.rename(table.with_name("away"))
    table.touch()
    wait_for_lease(bench.record)

    said = twophase("restage", "words", "2", "--sink", "dwh", *WHY)

    assert said.exit_code == 1
    assert "decided, but it cannot be promoted" not in said.stderr
    assert "lake: " in said.stderr
    assert counted(bench.target.content()) == counted([*bench.rows[:4], *mended(bench.rows[4:])])
    table.unlink()
    away.rename(table)
    bench.process().coordinator.recover(decided_only=True)
    assert bench.read(key).state is State.COMMITTED
    assert counted(visible("lake/words")) == counted(bench.rows)
    assert bench.differences() == []


def test_what_a_promoter_of_the_old_attempt_brought_in_meanwhile_is_adopted(bench: Bench) -> None:
    """It comes after everything is staged anew: the record names what the target holds, and nothing comes twice."""
    key = bench.parked()
    runner = bench.process(PreStaged(change=mended))
    attempt = runner.coordinator.restage(key, "mended", ["dwh"])
    bench.target.take()
    assert bench.process().coordinator.finish(key).state is State.COMMITTED

    runner._stage_and_vote(attempt)

    assert counted(bench.target.content()) == counted(bench.rows)
    assert bench.differences() == []
    list(sweep(bench.record, bench.pipeline))
    assert bench.differences() == []


def test_a_promoter_in_the_middle_of_the_old_attempt_cannot_bring_it_in_after_the_vote(
    in_postgres: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R21: its staging table is gone before the marker is read and the new attempt is voted for."""
    bench = in_postgres
    done: list[str] = []
    key = bench.refused()

    def overtaken(name: str) -> None:
        if name == "promote.marked" and not done:
            done.append(name)
            runner = bench.process(PreStaged(change=mended))
            runner._stage_and_vote(runner.coordinator.restage(key, "mended", ["dwh"]))

    monkeypatch.setattr("twophase.sinks.postgres.promotion.hit", overtaken)
    with pytest.raises(Parked):
        bench.process().coordinator.finish(key)
    bench.process().coordinator.recover(decided_only=True)

    assert bench.read(key).state is State.COMMITTED
    assert [row["word"] for row in bench.target.content()].count("mended") == 4
    assert len(bench.target.content()) == 8
    assert bench.differences() == []


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("nothing", r"it has no sink 'nothing'; expected one of dwh, lake"),
        ("lake", r"sink 'lake' has promoted it; backfill it to replace what is there"),
    ],
)
def test_a_sink_that_a_restage_does_nothing_for_is_refused(in_postgres: Bench, named: str, said: str) -> None:
    key = in_postgres.parked()

    with pytest.raises(ConfigError, match=said):
        in_postgres.process().restage(2, "for fun", [named])

    assert in_postgres.read(key).epoch == 1


def test_a_folder_that_is_not_ours_is_moved_away_and_recovery_promotes(in_postgres: Bench) -> None:
    """Staging again would not help, and is refused before anything is changed."""
    bench = in_postgres
    key = bench.refused()
    bench.target.take()
    strange = Path(bench.pipeline.writes["lake"].location(), "checkpoint=00000002")
    strange.mkdir()

    with pytest.raises(Parked, match=r"00000002 is there already, .*parked: move away what lake holds"):
        bench.process().coordinator.finish(key)
    with pytest.raises(ConfigError, match=r"is there already, with no marker; a restage does not help: move away"):
        bench.process().restage(2, "try", ["lake"])
    assert bench.read(key).hindrances == {"lake": Hindrance.FOREIGN}
    assert bench.read(key).epoch == 1
    assert str(strange) in "".join(twophase("show", "words", "2").output.split())

    strange.rmdir()
    bench.process().coordinator.recover(decided_only=True)

    assert bench.read(key).state is State.COMMITTED
    assert counted(visible("lake/words")) == counted(bench.rows)
