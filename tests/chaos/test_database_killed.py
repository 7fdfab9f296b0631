"""The committer database dies, or its replies get lost: a run asks again, finds what happened, and goes on.

Every test has a server of its own to kill. PostgreSQL's server process is killed like a power failure would end it: the
others of its kind notice and end, what was committed is found again at the next start.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import make_url

from support.crashes import replacement_promises, replacements, scenarios
from support.faults.lossy_proxy import proxy
from support.faults.processes import Child, polls, start, stopped_at_end
from support.pipelines.factories import Row, land_words, visible
from support.servers.postgres import open_folder
from twophase.committer.record import PostgresRecord
from twophase.local import postgres
from twophase.local.record_access import open_record

pytestmark = pytest.mark.chaos

#: More than a commit has moments, or a run transactions.
ENOUGH = 1000


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Set the environment of a user without a database: an embedded server of this test's own."""
    home = open_folder("twophase-killed-")
    monkeypatch.setenv("TWOPHASE_HOME", str(home))
    monkeypatch.delenv("TWOPHASE_DSN", raising=False)
    monkeypatch.setenv("TWOPHASE_LEASE", "3")
    open_record(may_start=True).engine.dispose()
    yield home
    postgres.stop()
    shutil.rmtree(home)


def postmaster() -> int:
    pid = postgres.status()["pid"]
    assert pid is not None
    return pid


def check(rows: list[Row], *, end: bool) -> None:
    """Every row is there, once, and the story holds; at the end also every byte, and nothing is left."""
    record = open_record(may_start=True)
    scenarios.check_all_there(rows)
    with scenarios.looking(record) as connection:
        scenarios.check_story(connection)
        scenarios.check_once(connection)
    if end:
        scenarios.check_end(record, rows)
    record.engine.dispose()


# --- killed -----------------------------------------------------------------------------------------------------------


def killed_at(nth: int, number: int, own: Path, *, outside: bool) -> tuple[Child, list[Row]]:
    """Take one checkpoint through while the database is killed at its nth moment; return what it said."""
    rows = land_words(files=2, start=2 * number)
    env = {"TWOPHASE_DSN": postgres.ensure()} if outside else {}
    pid = postmaster()
    child = start(scenarios.run_killing_the_database, nth, pid, log=own / f"killed {number}.log", env=env)
    with stopped_at_end(child):
        if outside and nth < ENOUGH:
            for _ in polls(60):
                if postgres.status()["pid"] != pid or child.process.exitcode is not None:
                    break
            postgres.ensure()
        assert child.wait() == 0, child.said
    return child, rows


def moments(child: Child) -> list[str]:
    return re.findall(r"^moment \d+: (.*)$", child.said, re.MULTILINE)


def kill_everywhere(own: Path, chosen: Callable[[list[str]], list[int]], *, outside: bool) -> None:
    child, rows = killed_at(ENOUGH, 0, own, outside=outside)
    known = moments(child)
    assert {name.split()[0] for name in known} >= {"_begin", "vote_and_commit", "_record_all"}
    for number, nth in enumerate(chosen(known), start=1):
        child, more = killed_at(nth, number, own, outside=outside)
        rows += more
        assert len(moments(child)) > nth, f"moment {nth} {known[nth - 1]}: not reached\n{child.said}"
        check(rows, end=False)
    check(rows, end=True)


def every(known: list[str]) -> list[int]:
    return list(range(1, len(known)))


def some(known: list[str]) -> list[int]:
    """Choose the three COMMITs that matter most, on either side, and one statement in the middle of a transaction."""
    wanted = [
        f"{step} {when}"
        for step in ("_begin", "vote_and_commit", "_record_all")
        for when in ("before COMMIT", "after COMMIT")
    ]
    inside = len(known) - known[::-1].index("vote_and_commit after EXECUTE")  # all its changes are sent by then
    return [inside, *(known.index(name) + 1 for name in wanted)]


@pytest.mark.parametrize("outside", [False, True], ids=["embedded", "outside"])
def test_a_commit_survives_the_death_of_the_database(outside: bool, own: Path) -> None:
    """An embedded server is started again by whoever needs it; another one by those who look after it."""
    kill_everywhere(own, (lambda known: some(known)[::3]) if outside else some, outside=outside)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("outside", [False, True], ids=["embedded", "outside"])
def test_a_commit_survives_the_death_of_the_database_at_any_statement(outside: bool, own: Path) -> None:
    kill_everywhere(own, every, outside=outside)


# --- lost -------------------------------------------------------------------------------------------------------------

#: The transactions of a run, and of a failed one, by the function that has them: each is resolved by asking again.
RUN = ("_begin", "vote_and_commit", "_record_all", "_settle")
TASKS = ("_begin", "attempt", "vote_all", "decide_commit", "_record_all")
FAILED = ("abort", "finish_abort")


@pytest.fixture
def through(dsn: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the DSN of this test's database behind a proxy that loses what it is told to lose."""
    url = make_url(dsn)
    assert url.port is not None
    with proxy(url.port) as port:
        yield url.set(port=port).render_as_string(hide_password=False)


def losing(how: str, nth: int, function: Callable[[], None], log: Path, dsn: str) -> Child:
    child = start(scenarios.run_losing_a_commit, how, nth, function, log=log, env={"TWOPHASE_DSN": dsn})
    with stopped_at_end(child):
        child.wait()
    return child


def transactions(child: Child) -> list[str]:
    return re.findall(r"^commit \d+: (.*)$", child.said, re.MULTILINE)


def lose_everywhere(
    how: str, function: Callable[[], None], wanted: tuple[str, ...], home: Path, dsn: str, *, once: bool
) -> list[Row]:
    """Lose the last COMMIT of each wanted kind, or every single one, in a run of its own; return what was landed."""
    rows = land_words(files=2, start=2)
    known = transactions(losing(how, ENOUGH, function, home / "known.log", dsn))
    assert set(known) >= set(wanted)
    last = {name: index for index, name in enumerate(known)}
    chosen = [last[name] for name in wanted] if once else list(range(len(known) - 1))
    for number, index in enumerate(chosen, start=2):
        rows += land_words(files=2, start=2 * number)
        child = losing(how, index + 1, function, home / f"lost {index}.log", dsn)
        assert transactions(child)[index] == known[index]
        assert child.process.exitcode == 0, f"{how} of {known[index]}:\n{child.said}"
        assert len(transactions(child)) > index + 1, f"{how} of {known[index]}: it was not asked again"
    return rows


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("once", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["some", "every"])
@pytest.mark.parametrize("how", ["reply", "commit"])
@pytest.mark.parametrize(("function", "wanted"), [(scenarios.run, RUN), (scenarios.run_in_tasks, TASKS)])
def test_a_lost_commit_or_reply_is_found_out_and_the_run_goes_on(  # noqa: PLR0917 - what is lost, and where
    how: str,
    once: bool,
    function: Callable[[], None],
    wanted: tuple[str, ...],
    through: str,
    record: PostgresRecord,
    home: Path,
) -> None:
    rows = land_words(files=2)
    scenarios.run()

    rows += lose_everywhere(how, function, wanted, home, through, once=once)

    scenarios.drain()
    scenarios.check_end(record, rows)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("once", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["some", "every"])
@pytest.mark.parametrize("how", ["reply", "commit"])
def test_a_lost_commit_or_reply_of_an_abort_is_found_out(
    how: str, once: bool, through: str, record: PostgresRecord, home: Path
) -> None:
    rows = land_words(files=2)
    scenarios.fail()

    rows += lose_everywhere(how, scenarios.fail, FAILED, home, through, once=once)

    with scenarios.looking(record) as connection:
        scenarios.check_story(connection)
        scenarios.check_finished(connection)
    assert not visible(scenarios.TABLES[0])
    scenarios.drain()
    scenarios.check_end(record, rows)


#: The transactions of a replacement.
REPLACEMENT = ("_replace", "vote_and_commit", "_record_all")


def lose_of_each(how: str, function: Callable[[], None], home: Path, dsn: str, chosen: list[int]) -> None:
    """Lose some COMMITs of the same thing, in a run of its own each."""
    for index in chosen:
        child = losing(how, index + 1, function, home / f"lost {index}.log", dsn)
        assert child.process.exitcode == 0, f"{how} of transaction {index + 1}:\n{child.said}"
        assert len(transactions(child)) > index + 1, f"{how} of transaction {index + 1}: it was not asked again"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("once", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["some", "every"])
@pytest.mark.parametrize("how", ["reply", "commit"])
def test_a_lost_commit_or_reply_of_a_replacement_is_found_out(
    how: str, once: bool, through: str, record: PostgresRecord, home: Path
) -> None:
    replacements.land("words", 1)
    replacements.run("words")
    known = transactions(losing(how, ENOUGH, replacements.replace_first, home / "known.log", through))
    assert set(known) >= set(REPLACEMENT)
    last = {name: index for index, name in enumerate(known)}
    chosen = [last[name] for name in REPLACEMENT] if once else list(range(len(known) - 1))

    lose_of_each(how, replacements.replace_first, home, through, chosen)

    assert replacement_promises.Recorded(record).decided == 2 + len(chosen)
    replacement_promises.check_end(record)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", ["reply", "commit"])
def test_a_lost_commit_or_reply_of_an_adoption_is_found_out(
    how: str, through: str, record: PostgresRecord, home: Path
) -> None:
    index = 0
    while True:
        number = index + 1
        replacements.land("days", number)
        replacements.leave_a_folder(number)
        child = losing(how, number, partial(replacements.run, "days", number), home / f"lost {index}.log", through)
        assert child.process.exitcode == 0, f"{how} of transaction {number}:\n{child.said}"
        index += 1
        if len(transactions(child)) <= number:
            break

    assert index > len(REPLACEMENT)
    replacement_promises.check_end(record)
