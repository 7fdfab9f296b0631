"""`twophase recover`, `sweep` and `verify`: what they do, say and exit with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from support.pipelines.commands import listed, twophase
from support.pipelines.factories import PreStaged, land_words, words_pipeline
from support.pipelines.words_runs import commit
from twophase.committer.record import PostgresRecord
from twophase.core import failpoints
from twophase.core.checkpoint import Run
from twophase.core.failpoints import FailpointError
from twophase.core.settings import data_path
from twophase.runner import Runner
from twophase.wiring import coordinator_of, enter


@pytest.fixture
def _no_failpoints() -> Iterator[None]:
    yield
    failpoints.configure("")


def crash(failpoint: str, *, start: int) -> None:
    """Leave a checkpoint as a process does that dies at a failpoint; its lease stays."""
    failpoints.configure(f"{failpoint}=raise")
    land_words(start=start)
    with pytest.raises(FailpointError), Runner(words_pipeline(), PreStaged()) as runner:
        runner.run()
    failpoints.configure("")


def test_recover_with_nothing_to_do_says_so(home: Path) -> None:
    commit()

    assert twophase("recover").stdout == "nothing to recover\n"
    assert listed("recover") == []


@pytest.mark.usefixtures("_no_failpoints")
def test_recover_respects_a_lease_and_waits_for_it_when_asked_to(home: Path) -> None:
    crash("commit.after", start=0)

    (left,) = listed("recover")
    result = twophase("recover", "--wait")

    assert (left["decision"], left["state"]) == ("left", "COMMITTING")
    assert "its lease lasts" in left["why"]
    assert result.exit_code == 0
    assert "waiting for it" in result.stderr
    assert result.stdout == "words/1 r1: promoted, the commit point was passed (now COMMITTED)\n"
    assert twophase("verify", "words").exit_code == 0


def test_recover_aborts_what_a_dead_run_left_undecided(home: Path, record: PostgresRecord) -> None:
    land_words()
    pipeline = words_pipeline()
    pipeline.prepare()
    enter(record, pipeline)
    coordinator_of(record, pipeline).begin(Run(None, "dead"))
    expire(record)

    (found,) = listed("recover", "words")

    assert (found["decision"], found["state"]) == ("aborted", "ABORTED")
    assert found["why"] == "its run dead ended before the commit point"


def expire(record: PostgresRecord) -> None:
    with record.engine.begin() as connection:
        connection.execute(text("UPDATE twophase.revision SET lease_until = clock_timestamp() - interval '1 second'"))


@pytest.mark.usefixtures("_no_failpoints")
def test_recover_exits_1_when_something_is_parked(home: Path, record: PostgresRecord) -> None:
    crash("commit.after", start=0)
    expire(record)
    shutil.rmtree(data_path("lake/words.twophase/staging"))

    result = twophase("recover")
    again = twophase("recover", "--json")

    assert result.exit_code == again.exit_code == 1
    assert "parked" in result.stdout
    assert json.loads(again.stdout)[0]["parked_reason"]
    assert "parked" in twophase("show", "words", "1").stdout


@pytest.mark.usefixtures("_no_failpoints")
def test_recover_goes_on_past_a_sink_that_is_down(home: Path, record: PostgresRecord) -> None:
    crash("commit.after", start=0)
    expire(record)
    data_path("lake").rename(home / "elsewhere")

    down = twophase("recover")
    (home / "elsewhere").rename(data_path("lake"))
    back = twophase("recover")

    assert down.exit_code == 0
    assert "is it mounted?" in down.stdout
    assert "promoted" in back.stdout


def test_sweep_lists_what_it_removes_and_why(home: Path) -> None:
    commit()
    dead = home / "runs" / "words" / "00000001.r1.a1.abcd"
    dead.mkdir(parents=True)
    expected = {"pipeline": "words", "sink": "", "path": str(dead), "why": "its revision is committed"}

    assert listed("sweep", "--dry-run") == [expected]
    assert dead.exists()
    assert twophase("sweep", "words").stdout == f"removed {dead}: its revision is committed\n"
    assert not dead.exists()
    assert listed("sweep") == []
    assert twophase("sweep").stdout == "nothing to sweep\n"


def test_verify_passes_what_is_as_recorded(home: Path) -> None:
    commit(2)

    assert listed("verify", "words") == []
    assert twophase("verify", "words").stdout == "words: 2 checkpoints verified in lake: all as recorded\n"


def test_verify_names_checkpoint_sink_and_difference(home: Path) -> None:
    commit(2)
    altered = next(data_path("lake/words/checkpoint=00000002").glob("*.parquet"))
    altered.write_bytes(altered.read_bytes()[:-1] + b"?")

    result = twophase("verify", "words")
    found = twophase("verify", "words", "--json")

    assert result.exit_code == found.exit_code == 1
    (difference,) = json.loads(found.stdout)
    assert (difference["pipeline"], difference["checkpoint_id"], difference["sink"]) == ("words", 2, "lake")
    assert str(altered) in difference["difference"]
    assert difference["difference"] in result.stdout


def test_verify_of_a_table_that_is_gone_says_so(home: Path) -> None:
    commit()
    shutil.rmtree(data_path("lake/words"))

    result = twophase("verify", "words")

    assert result.exit_code == 1
    assert "has no marker" in result.stdout
    assert result.exception is None or isinstance(result.exception, SystemExit)
