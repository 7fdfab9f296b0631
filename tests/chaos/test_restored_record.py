"""The record is dumped and restored at random moments, between runs, backfills and kills at random failpoints.

Whatever was forgotten, the sinks know it: in the end every record of the input is in each of them once.
"""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest
from sqlalchemy import text

from support.crashes import several_sinks
from support.crashes.replacement_promises import wait_for_lease
from support.crashes.scenarios import check_story, looking
from support.faults.backups import Backups
from support.faults.processes import call
from support.pipelines.factories import Row, counted, land_words
from twophase.committer.record import PostgresRecord
from twophase.core.failpoints import FAILPOINTS
from twophase.verification import verify

pytestmark = pytest.mark.chaos

#: What is done between two dumps.
STEPS = 6
#: Where a process may die: all that these ways come by.
GROUPS = ("begin", "attempt", "stage", "vote", "commit", "promote", "finish", "recover", "reconcile")
POINTS = [name for name in FAILPOINTS if name.partition(".")[0] in GROUPS]
KINDS = ("files+postgres", "files+delta", "upserted+iceberg")
ROUNDS = 25


class Story:
    """One pipeline, its backups, and what was landed."""

    def __init__(self, seed: int, kinds: str, record: PostgresRecord, dsn: str, home: Path) -> None:
        self.random = Random(seed)
        self.kinds = kinds
        self.record = record
        self.backups = Backups(dsn)
        self.home = home
        self.rows: list[Row] = []
        self.files = 0
        self.steps = 0

    def land(self) -> None:
        self.rows += land_words(files=2, start=self.files)
        self.files += 2

    def go(self, way: object, *arguments: object, dies: bool) -> None:
        """Let a process do something; it may die anywhere, and may be refused."""
        self.steps += 1
        point = self.random.choice(POINTS)
        count = self.random.choice((1, 1, 2))
        armed = f"{point}=kill@{count}" if dies else ""
        log = self.home / f"{self.steps:03d}.log"
        ended = call(way, self.kinds, *arguments, log=log, failpoints=armed)  # type: ignore[arg-type]
        if ended.wait() not in {0, -9}:
            assert re.search(EXPECTED, ended.said), ended.said
        wait_for_lease(self.record)

    def step(self) -> None:
        """Do one thing of a day."""
        what = self.random.choice(("run", "run", "run", "land", "replace", "recover"))
        if what == "land":
            self.land()
        elif what == "replace" and (newest := self.newest()):
            latest = newest if "upserted" in self.kinds else self.random.randint(1, newest)
            self.go(several_sinks.replace, latest, dies=self.random.random() < 0.5)
        else:
            way = several_sinks.recover if what == "recover" else several_sinks.run
            self.go(way, dies=self.random.random() < 0.5)

    def newest(self) -> int | None:
        with looking(self.record) as connection:
            query = "SELECT max(checkpoint_id) FROM twophase.revision WHERE state = 'COMMITTED'"
            found: int | None = connection.execute(text(query)).scalar()
        return found

    def reconcile(self) -> None:
        for dies in (True, False):
            self.go(several_sinks.reconcile, dies=dies and self.random.random() < 0.5)


#: What a process of these may say when it ends: somebody was there before, or a forgotten attempt left its manifest.
EXPECTED = (
    r"RecordBehind|run again|nothing of it is committed|not promoted yet|is decided and not promoted|Parked"
    r"|it is not in this record|PromotionPending|Fenced|it cannot be run again"
)


def cases() -> list[object]:
    few = {0: "files+postgres", 1: "files+delta"}
    return [
        pytest.param(seed, few.get(seed, KINDS[seed % len(KINDS)]), marks=() if seed in few else pytest.mark.slow)
        for seed in range(ROUNDS)
    ]


@pytest.fixture(autouse=True)
def _target(home: Path, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOPHASE_LEASE", "0.3")
    monkeypatch.setenv(several_sinks.TARGET, dsn.replace("postgresql+psycopg2", "postgres"))
    monkeypatch.setenv("AIRFLOW_CONN_DWH", dsn.replace("postgresql+psycopg2", "postgres"))


@pytest.mark.parametrize(("seed", "kinds"), cases())
def test_dumped_killed_and_restored_at_random_every_record_is_there_once(
    seed: int, kinds: str, record: PostgresRecord, dsn: str, home: Path
) -> None:
    story = Story(seed, kinds, record, dsn, home)
    story.land()
    story.go(several_sinks.run, dies=False)
    for _ in range(2):
        for _ in range(story.random.randint(0, STEPS)):
            story.step()
        story.backups.take()
        for _ in range(story.random.randint(1, STEPS)):
            story.step()
        story.backups.restore()
        story.reconcile()
    story.land()

    for _ in range(3):  # a forgotten attempt's manifest may stand in the way of the first
        story.go(several_sinks.drain, dies=False)

    story.backups.engine.dispose()
    for kind in several_sinks.split(kinds):
        found = [{**row, "word": row["word"].partition(" ")[0]} for row in several_sinks.held(kind)]
        assert counted(found) == counted(story.rows), kind
    assert [found for found in verify(record, several_sinks.pipeline(kinds)) if found] == []
    with looking(record) as connection:
        check_story(connection)
        assert connection.execute(text("SELECT behind FROM twophase.pipeline")).scalar() is None
