"""Several processes at once want different ends of one revision, or all the same: one of them gets it, once."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest
from sqlalchemy import text

from support.crashes import scenarios
from support.faults.processes import Child, context, start, stopped_at_end
from support.pipelines.factories import land_words
from twophase.committer.record import PostgresRecord

pytestmark = pytest.mark.chaos

CONTENDERS = 8
BEFORE_THE_COMMIT_POINT = scenarios.HERE[: scenarios.HERE.index("commit.after")]
#: No attempt was open yet when it stopped: it begins again, and takes what there is left to take.
NOT_OPENED = {"begin.before", "begin.inside", "attempt.before"}
#: The votes are recorded with the decision: whoever comes promotes that very attempt, and it finds it committed.
VOTED = {"vote.after"}


@pytest.fixture(autouse=True)
def _short_lease(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOPHASE_LEASE", "0.5")


def all_ended_well(children: list[Child], patience: float) -> None:
    for child in children:
        assert child.wait(patience) == 0, child.said


# --- abort against commit ---------------------------------------------------------------------------------------------


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rounds", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_of_an_abort_and_a_commit_exactly_one_wins(rounds: int, record: PostgresRecord, home: Path) -> None:
    rows = land_words(files=2 * rounds)
    barrier, results = context.Barrier(2), context.SimpleQueue()
    racers = [
        start(scenarios.race, role, rounds, barrier, results, log=home / f"{role}.log") for role in ("commit", "abort")
    ]
    with stopped_at_end(*racers):
        all_ended_well(racers, 8 * rounds + 30)

    outcomes: dict[int, dict[str, str]] = defaultdict(dict)
    while not results.empty():
        number, role, state = results.get()
        outcomes[number][role] = state
    won = Counter("abort" if outcome["abort"] == "ABORTED" else "commit" for outcome in outcomes.values())
    assert len(outcomes) == rounds
    for outcome in outcomes.values():
        if outcome["abort"] == "ABORTED":
            assert outcome["commit"] == "fenced"
        else:
            assert outcome["commit"] == "COMMITTED"
            assert outcome["abort"] in {"COMMITTING", "COMMITTED"}
    assert won["abort"], "no abort ever won: this was no race"
    assert won["commit"], "no commit ever won: this was no race"
    check_winners(record, won)
    scenarios.drain()
    scenarios.check_end(record, rows)


def check_winners(record: PostgresRecord, won: Counter[str]) -> None:
    """Both never happened to one revision, and the loser left nothing: no number taken, no folder, no row."""
    with record.engine.connect() as connection:
        states = Counter(connection.execute(text("SELECT state FROM twophase.revision")).scalars())
        both = connection.execute(
            text("""SELECT checkpoint_id, revision FROM twophase.event
                WHERE to_state IN ('COMMITTING', 'ABORTING') GROUP BY 1, 2 HAVING count(*) > 1""")
        ).fetchall()
        promoted = connection.execute(text("SELECT count(*) FROM twophase.committed")).scalar_one()
        undecided = connection.execute(
            text("SELECT count(*) FROM twophase.revision WHERE state = 'ABORTED' AND commit_seq IS NOT NULL")
        ).scalar_one()
    assert states == Counter({"COMMITTED": won["commit"], "ABORTED": won["abort"]})
    assert (both, undecided) == ([], 0)
    assert promoted == won["commit"] * len(scenarios.TABLES)
    with scenarios.looking(record) as connection:
        scenarios.check_once(connection)
        scenarios.check_finished(connection)


# --- everybody at once ------------------------------------------------------------------------------------------------


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rounds", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_eight_processes_with_one_checkpoint_commit_it_once(rounds: int, record: PostgresRecord, home: Path) -> None:
    barrier, results = context.Barrier(CONTENDERS), context.SimpleQueue()
    contenders = [
        start(scenarios.contend, me, rounds, barrier, results, log=home / f"{me}.log") for me in range(CONTENDERS)
    ]
    with stopped_at_end(*contenders):
        all_ended_well(contenders, 15 * rounds + 30)

    outcomes: dict[int, list[str]] = defaultdict(list)
    while not results.empty():
        number, _, outcome = results.get()
        outcomes[number].append(outcome)
    assert len(outcomes) == rounds
    assert all("COMMITTED" in outcome for outcome in outcomes.values())
    with record.engine.connect() as connection:
        committed = "SELECT count(*) FROM twophase.revision WHERE state = 'COMMITTED'"
        assert connection.execute(text(committed)).scalar_one() == rounds
    scenarios.check_end(record, [{"id": i, "word": f"w{i % 10 % 7}", "frequency": i % 10} for i in range(20 * rounds)])


# --- zombies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failpoint", BEFORE_THE_COMMIT_POINT)
def test_a_run_that_wakes_after_another_took_over_stops_and_touches_nothing(
    failpoint: str, record: PostgresRecord, home: Path
) -> None:
    rows = land_words(files=2)
    zombie = start(scenarios.impatiently, scenarios.run, log=home / "zombie.log", failpoints=f"{failpoint}=stop")
    with stopped_at_end(zombie):
        assert zombie.until_stopped(), f"{failpoint} was not reached:\n{zombie.said}"
        other = start(scenarios.impatiently, scenarios.run, log=home / "other.log")
        assert other.wait() == 0, other.said
        scenarios.check_all_there(rows)
        before = scenarios.tables()

        zombie.wake()
        code = zombie.wait()

    if failpoint in NOT_OPENED | VOTED:
        assert code == 0, zombie.said
    else:
        assert code == 1, zombie.said
        assert "twophase.core.errors.Fenced: " in zombie.said
    assert scenarios.tables() == before
    scenarios.check_end(record, rows)


#: One of each kind: nothing staged, at work in its own place, a row locked.
FEW = ("attempt.after", "stage.written", "vote.inside")


@pytest.mark.parametrize(
    "failpoint",
    [
        pytest.param(name, marks=[] if name in FEW else [pytest.mark.slow])
        for name in BEFORE_THE_COMMIT_POINT
        if name not in NOT_OPENED | VOTED
    ],
)
def test_a_run_that_wakes_while_another_is_at_work_stops_and_the_other_commits(
    failpoint: str, record: PostgresRecord, home: Path
) -> None:
    """Both are in the same state of the same revision: only the epoch tells them apart."""
    rows = land_words(files=2)
    zombie = start(scenarios.impatiently, scenarios.run, log=home / "zombie.log", failpoints=f"{failpoint}=stop")
    with stopped_at_end(zombie):
        assert zombie.until_stopped(), f"{failpoint} was not reached:\n{zombie.said}"
        other = start(scenarios.impatiently, scenarios.run, log=home / "other.log", failpoints="vote.checked=stop")
        with stopped_at_end(other):
            assert other.until_stopped(), other.said
            zombie.wake()
            assert zombie.wait() == 1, zombie.said
            other.wake()
            assert other.wait() == 0, other.said

    assert "twophase.core.errors.Fenced: " in zombie.said
    scenarios.check_end(record, rows)
