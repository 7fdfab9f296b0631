"""A replay from a checkpoint through the latest ends as if all had been computed at once; one in the middle is none."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg2
import pytest

import twophase as library
from support.faults.processes import start
from support.pipelines.commands import listed, twophase
from support.pipelines.factories import PreStaged, land, words_pipeline
from support.pipelines.rows_by_key import Staging, by_key, folded, meanwhile, replay, rows_of
from twophase import Pipeline, sinks, sources
from twophase.backfill import Backfill, Selection
from twophase.committer.record import PostgresRecord
from twophase.core.checkpoint import Run
from twophase.core.errors import ConfigError, IllegalTransition
from twophase.runner import Runner

CHECKPOINTS = 5


class World:
    """A pipeline that writes by key, its target, and the commands."""

    def __init__(self, mode: str, cursor: Any, **more: Any) -> None:
        self.cursor = cursor
        self.pipeline = by_key(mode, **more)
        self.landed = 0

    def commit(self, count: int = 1) -> None:
        """Land and run so many checkpoints."""
        for _ in range(count):
            self.landed += 1
            land(f"{self.landed}.json", [{"id": self.landed}])
            assert library.run(self.pipeline)

    def rows(self) -> dict[int, str]:
        self.cursor.execute("SELECT id, word FROM public.words")
        return dict(self.cursor.fetchall())

    def replay(self, text: str, code: int = 0) -> list[tuple[int, int | None, str | None]]:
        found = listed("backfill", "words", "--checkpoints", text, "--parallel", "3", code=code)
        return [(row["checkpoint_id"], row["revision"], row["failed"]) for row in found]


@pytest.fixture
def world(home: Path, dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    """Return what makes a pipeline over a database of the test's own."""
    monkeypatch.setenv("AIRFLOW_CONN_DWH", dsn.replace("postgresql+psycopg2", "postgres"))
    session = psycopg2.connect(dsn.replace("+psycopg2", ""))
    session.autocommit = True

    def make(mode: str = "upsert", **more: Any) -> World:
        stagers = {"words": Staging(mode), "upstream": PreStaged()}
        monkeypatch.setattr("twophase.runner.stager_for", lambda declared, *_, **__: stagers[declared.name])
        return World(mode, session.cursor(), **more)

    yield make
    meanwhile.clear()
    session.close()


@pytest.mark.parametrize("mode", ["upsert", "retract"])
def test_a_replay_through_the_latest_equals_a_straight_recomputation(world: Any, mode: str) -> None:
    words = world(mode)
    words.commit(CHECKPOINTS)
    assert words.rows() == folded(dict.fromkeys(range(1, 6), 1))

    # The changelog of a later revision knows its own predecessors only, so it is replayed from the start.
    first = 1 if mode == "retract" else 2
    done = words.replay(f"{first}..{CHECKPOINTS}")

    assert done == [(number, 2, None) for number in range(first, CHECKPOINTS + 1)]
    assert words.rows() == folded({number: 1 if number < first else 2 for number in range(1, 6)})
    assert twophase("verify", "words").exit_code == 0


def test_one_in_the_middle_is_refused_and_the_latest_alone_is_not(world: Any) -> None:
    words = world()
    words.commit(3)
    before = words.rows()

    ((_, _, alone),) = words.replay("2", code=1)
    short = words.replay("1..2", code=1)

    assert "sink 'dwh': an upsert comes after what was there before, and later checkpoints came after this" in alone
    assert "`twophase backfill` from this one through the latest" in short[0][2]
    assert short[1] == (2, None, "words/1 comes first, and is not done")
    assert words.rows() == before
    assert words.replay("3") == [(3, 2, None)]
    assert words.rows() == folded({1: 1, 2: 1, 3: 2})


def test_a_checkpoint_that_commits_meanwhile_stays_on_top(world: Any) -> None:
    words = world()
    words.commit(3)
    meanwhile[1, 2] = words.commit  # before the first commit point of the replay
    meanwhile[3, 2] = words.commit

    done = words.replay("1..3")

    assert [number for number, _, _ in done] == [1, 2, 3]
    assert words.rows() == folded({1: 2, 2: 2, 3: 2, 4: 1, 5: 1})


@pytest.mark.parametrize("failpoint", ["submit.before", "commit.before", "commit.after", "promote.applied"])
def test_a_replay_that_is_killed_goes_on_where_it_was(world: Any, home: Path, failpoint: str) -> None:
    words = world()
    words.commit(3)
    env = {"AIRFLOW_CONN_DWH": os.environ["AIRFLOW_CONN_DWH"]}
    killed = start(replay, 1, 3, log=home / "killed.log", failpoints=f"{failpoint}=kill@2", env=env)
    assert killed.wait() == -signal.SIGKILL, killed.said
    words.commit()

    done = words.replay("1..3")

    assert done == [(1, 2, None), (2, 2, None), (3, 2, None)]
    assert words.rows() == folded({1: 2, 2: 2, 3: 2, 4: 1})


def test_a_revision_that_was_the_latest_when_it_began_is_not_committed_in_the_middle(
    world: Any, record: PostgresRecord
) -> None:
    words = world()
    words.commit(2)
    with Runner(words.pipeline, Staging("upsert"), record=record) as runner:
        again = runner.coordinator.attempt(runner.coordinator.replace(Run(None, "again"), 2))
        runner._stage_and_vote(again)
        words.commit()
        before = words.rows()

        with pytest.raises(IllegalTransition, match="cannot be committed any more: sink 'dwh': an upsert"):
            runner.coordinator.commit(again)

        assert words.rows() == before
        with pytest.raises(ConfigError, match="it cannot be run again"):
            runner.coordinator.replace(Run(None, "other"), 1, backfill="backfill-12345678")


def test_a_replay_takes_its_checkpoints_in_order(world: Any, record: PostgresRecord) -> None:
    words = world()
    words.commit(3)
    work = Backfill(record, "words", Selection((1, 3)), lambda _: Staging("upsert"))
    mine = Run(None, f"{work.started.id}.mine")
    with Runner(words.pipeline, Staging("upsert"), record=record) as runner:
        with pytest.raises(ConfigError, match="it cannot be run again"):
            runner.coordinator.replace(mine, 2, backfill=work.started.id)
        assert runner.replace(1, me=mine, backfill=work.started.id).revision == 2

        assert runner.coordinator.replace(mine, 2, backfill=work.started.id).revision == 2


def test_a_table_that_is_replaced_as_a_whole_shows_its_latest_after_a_replay(world: Any) -> None:
    words = world("replace")
    words.commit(3)
    meanwhile[2, 2] = words.commit

    assert len(words.replay("1..3")) == 3

    assert words.rows() == {row["id"]: row["word"] for row in rows_of(4, 1)}
    assert words.replay("4") == [(4, 2, None)]
    assert words.rows() == {row["id"]: row["word"] for row in rows_of(4, 2)}


def test_a_month_that_comes_late_stays_below_the_later_one_and_can_be_run_again(world: Any) -> None:
    words = world()
    words.pipeline = Pipeline(
        "words",
        reads={"words": sources.Interval("landing/{start:%Y-%m}", "json")},
        transform="word_count:copy",
        writes={"dwh": words.pipeline.sinks["dwh"]},
    )
    for month in ("06", "05"):  # June is checkpoint 1, May 2: both change 100 and 2
        land("a.json", [{"id": 1}], f"landing/2026-{month}")
        assert library.run(words.pipeline, slot=f"2026-{month}-01/2026-{month}-02")
    late = words.rows()

    listed("backfill", "words", "--from", "2026-05-01", "--to", "2026-05-01")

    assert late == {1: "1 r1", 2: "1 r1", 3: "2 r1", 100: "1 r1"}
    assert words.rows() == {1: "1 r1", 2: "1 r1", 4: "2 r2", 100: "1 r1"}
    assert twophase("verify", "words").exit_code == 0


def test_what_was_made_from_a_replaced_checkpoint_is_replayed_through_the_latest(
    world: Any, record: PostgresRecord
) -> None:
    words = world()
    target = words.pipeline.sinks["dwh"]
    lake = words_pipeline("upstream", writes={"lake": sinks.Files("lake/upstream")}, max_files=1)
    words.pipeline = Pipeline(
        "words",
        reads={"rows": sources.Committed("upstream", "lake")},
        transform="word_count:copy",
        writes={"dwh": target},
    )
    for number in range(1, 4):
        land(f"{number}.json", [{"id": number, "word": "w", "frequency": 1}])
        assert Runner(lake, PreStaged(), record=record).run()
        assert library.run(words.pipeline)

    done = listed("backfill", "upstream", "--checkpoints", "2", "--downstream")

    assert [(one["pipeline"], one["checkpoint_id"], one["revision"]) for one in done] == [
        ("upstream", 2, 2),
        ("words", 2, 2),
        ("words", 3, 2),
    ]
    assert words.rows() == folded({1: 1, 2: 2, 3: 2})
