"""What a person decides from the command line: once is enough, twice is the same, and the record says why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from support.pipelines.commands import listed, one_line_error, twophase
from support.pipelines.factories import PreStaged, Row, land_words, visible, voted, words_pipeline
from twophase.committer.record import PostgresRecord
from twophase.core import failpoints
from twophase.core.errors import PromotionPending
from twophase.core.failpoints import FailpointError
from twophase.core.settings import data_path
from twophase.runner import Runner

pytestmark = pytest.mark.usefixtures("home")

WHY = ("--reason", "looked at it")


@pytest.fixture(autouse=True)
def _no_failpoints(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("twophase.runner.stager_for", lambda *_, **__: PreStaged())
    yield
    failpoints.configure("")


def leave(record: PostgresRecord, failpoint: str) -> None:
    """Leave a checkpoint as a process does that died at a failpoint, or once everybody had voted, some time ago."""
    land_words()
    runner = Runner(words_pipeline(), PreStaged(), record=record)
    if failpoint == "voted":
        voted(runner)
    else:
        failpoints.configure(f"{failpoint}=raise")
        with pytest.raises(FailpointError):
            runner.run()
    failpoints.configure("")
    forget_leases(record)


def forget_leases(record: PostgresRecord) -> None:
    with record.engine.begin() as connection:
        connection.execute(text("UPDATE twophase.revision SET lease_until = NULL"))


def reasons(record: PostgresRecord) -> list[str]:
    with record.engine.connect() as connection:
        return [row.why or "" for row in connection.execute(text("SELECT why FROM twophase.event ORDER BY id"))]


def state() -> str:
    found: str = listed("show", "words", "1")["state"]
    return found


def test_commit_carries_out_what_everybody_voted_for(record: PostgresRecord) -> None:
    leave(record, "voted")

    first, second = twophase("commit", "words", "1", *WHY), twophase("commit", "words", "1", *WHY)

    assert (first.exit_code, first.stdout) == (0, "words/1 r1: committed, rows 10\n")
    assert (second.exit_code, second.stdout) == (0, "words/1 r1: it is committed already\n")
    assert len(visible("lake/words")) == 10
    assert [why for why in reasons(record) if "looked at it" in why] == ["the commit point, by a person: looked at it"]


def test_commit_promotes_what_is_decided(record: PostgresRecord) -> None:
    leave(record, "commit.after")

    result = twophase("commit", "words", "1", *WHY)

    assert result.exit_code == 0
    assert state() == "COMMITTED"
    assert "looked at it" in reasons(record)


def test_commit_refuses_what_nobody_voted_for(record: PostgresRecord) -> None:
    leave(record, "attempt.after")

    error = one_line_error(twophase("commit", "words", "1", *WHY))

    assert "expected precommitted, found open; no yes from lake; its run has ended. " in error
    assert error.endswith("to end it now, `twophase abort words 1 --reason …`")
    assert state() == "OPEN"


def test_commit_refuses_when_the_staged_output_is_not_there_any_more(record: PostgresRecord) -> None:
    leave(record, "voted")
    (staged,) = data_path("lake/words.twophase/staging").iterdir()
    staged.rename(data_path("elsewhere"))

    assert "has no marker" in one_line_error(twophase("commit", "words", "1", *WHY))
    assert state() == "PRECOMMITTED"


@pytest.mark.parametrize("failpoint", ["begin.after", "attempt.after", "voted", "abort.after"])
def test_abort_ends_what_is_undecided(record: PostgresRecord, failpoint: str) -> None:
    if failpoint == "abort.after":
        leave(record, "voted")
        failpoints.configure("abort.after=raise")
        assert isinstance(twophase("abort", "words", "1", *WHY).exception, SystemExit | FailpointError)
        failpoints.configure("")
        forget_leases(record)
    else:
        leave(record, failpoint)

    first, second = twophase("abort", "words", "1", *WHY), twophase("abort", "words", "1", *WHY)

    assert (first.exit_code, first.stdout) == (0, "words/1 r1: aborted\n")
    assert (second.exit_code, second.stdout) == (0, "words/1 r1: it is aborted already\n")
    assert "by a person: looked at it" in reasons(record)
    assert list(data_path("lake/words.twophase/staging").iterdir()) == []


@pytest.mark.parametrize(
    ("failpoint", "remedy"),
    [
        ("commit.after", "so does `twophase recover words`"),
        ("finish.after", "`twophase backfill words --checkpoints 1`"),
    ],
)
def test_a_decision_is_final_also_for_people(record: PostgresRecord, failpoint: str, remedy: str) -> None:
    leave(record, failpoint)
    before = state()

    error = one_line_error(twophase("abort", "words", "1", *WHY))

    assert "a decision is final" in error
    assert error.endswith(remedy)
    assert state() == before


@pytest.mark.parametrize(("command", "failpoint"), [("commit", "voted"), ("abort", "attempt.after")])
def test_nobody_decides_over_the_head_of_a_run_that_works(record: PostgresRecord, command: str, failpoint: str) -> None:
    leave(record, failpoint)
    with record.engine.begin() as connection:
        connection.execute(text("UPDATE twophase.revision SET lease_until = now() + interval '1 hour'"))
    before = state()

    error = one_line_error(twophase(command, "words", "1", *WHY))

    assert re.search(r"run script-\w+ works on it, \d+ s of lease left", error)
    assert state() == before


def test_a_parked_revision_is_listed_with_the_command_that_fits_and_that_gets_it_further(
    record: PostgresRecord, home: Path
) -> None:
    leave(record, "commit.after")
    (staged,) = data_path("lake/words.twophase/staging").iterdir()
    staged.rename(home / "lost")
    assert twophase("recover").exit_code == 1

    (row,) = listed("pending")
    again = twophase("restage", "words", "1", *WHY)
    twice = twophase("restage", "words", "1", *WHY)

    assert row["command"] == "twophase restage words 1 --reason …"
    assert "is gone" in row["parked_reason"]
    assert (again.exit_code, again.stdout) == (0, "words/1 r1: committed, rows 10\n")
    assert (twice.exit_code, twice.stdout) == (0, "words/1 r1: it is committed already\n")
    assert "restage: looked at it" in reasons(record)
    assert twophase("pending").stdout == "nothing is pending\n"


def test_release_twice_is_release_once(record: PostgresRecord) -> None:
    leave(record, "attempt.after")
    twophase("abort", "words", "1", *WHY)

    first, second = twophase("release", "words", "1", *WHY), twophase("release", "words", "1", *WHY)

    assert (first.exit_code, second.exit_code) == (0, 0)
    assert reasons(record).count("looked at it") == 1


@pytest.mark.parametrize("command", ["commit", "abort", "restage", "release"])
def test_every_decision_wants_a_reason(command: str) -> None:
    assert twophase(command, "words", "1").exit_code == 2


@pytest.mark.parametrize("command", ["commit", "abort"])
def test_an_unknown_checkpoint_is_named(record: PostgresRecord, command: str) -> None:
    leave(record, "attempt.after")

    assert "words/7: it is not in the record" in one_line_error(twophase(command, "words", "7", *WHY))


# --- restage ---------------------------------------------------------------------------------------------------------


def lost(record: PostgresRecord) -> None:
    """Leave a decided checkpoint whose staged output is gone."""
    leave(record, "commit.after")
    (staged,) = data_path("lake/words.twophase/staging").iterdir()
    staged.rename(data_path("elsewhere"))


def test_restage_is_refused_while_a_run_promotes_and_not_because_of_the_one_that_parked(
    record: PostgresRecord,
) -> None:
    lost(record)
    with record.engine.begin() as connection:
        connection.execute(text("UPDATE twophase.revision SET lease_until = clock_timestamp() + interval '1 hour'"))

    error = one_line_error(twophase("restage", "words", "1", *WHY))
    assert re.search(r"checkpoint words/1 r1: run script-\w+ works on it, 3\d\d\d s of lease left; stop that", error)
    assert listed("show", "words", "1")["epoch"] == 1

    assert twophase("commit", "words", "1", *WHY).exit_code == 1
    assert listed("show", "words", "1")["hindrances"] == {"lake": "lost"}
    assert twophase("restage", "words", "1", *WHY).exit_code == 0
    assert state() == "COMMITTED"


def test_a_run_that_could_not_promote_holds_no_lease_any_more(record: PostgresRecord) -> None:
    """Whoever reads its error may act on it at once."""
    land_words()
    taken = data_path("lake/words.twophase/taken")

    def meanwhile(rows: list[Row], _plan: object) -> list[Row]:
        taken.rmdir()
        taken.touch()  # a promoter needs a folder
        return rows

    with pytest.raises(PromotionPending):
        Runner(words_pipeline(), PreStaged(change=meanwhile), record=record).run()

    assert (state(), listed("pending")[0]["leased"]) == ("COMMITTING", None)


def test_restage_is_refused_while_another_one_stages_and_may_follow_one_that_failed(
    record: PostgresRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost(record)
    assert twophase("commit", "words", "1", *WHY).exit_code == 1  # now it is parked
    seen: list[str] = []

    def staging(*_: object) -> None:
        seen.append(one_line_error(twophase("restage", "words", "1", *WHY)))
        msg = "no memory left"
        raise MemoryError(msg)

    with monkeypatch.context() as broken:
        broken.setattr(PreStaged, "__call__", staging)
        assert twophase("restage", "words", "1", *WHY).exit_code == 1

    assert "it is being staged again" in seen[0]
    assert "`twophase show words 1` says by whom; stop that, or wait" in seen[0]
    assert listed("show", "words", "1")["epoch"] == 2
    assert twophase("restage", "words", "1", *WHY).exit_code == 0
    assert state() == "COMMITTED"
