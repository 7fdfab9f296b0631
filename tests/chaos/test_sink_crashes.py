"""Every failpoint, killed and raised, on the way into sinks of each kind and into several at once.

Nothing is lost, doubled or half visible in any of them; what is decided reaches all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import text

from support.crashes import several_sinks
from support.crashes.replacement_promises import let_retention_be_over, wait_for_lease
from support.crashes.sink_matrix import parameters
from support.faults.processes import call
from support.pipelines.factories import Row, counted, land_words
from twophase.committer.record import PostgresRecord
from twophase.core.states import ENDED
from twophase.sinks.log_tables.base import LogTableSink
from twophase.verification import verify

pytestmark = pytest.mark.chaos

#: Sinks that become visible subtask by subtask.
BIT_BY_BIT = frozenset({"sent"})
HANDING_OVER = ("hand_over.before", "hand_over.inside")
#: More than a checkpoint comes to here.
REVISIONS = 4
WAYS = {"abort": several_sinks.fail, "recover": several_sinks.recover, "sweep": several_sinks.sweep}


@pytest.fixture(autouse=True)
def _target(request: pytest.FixtureRequest, home: Path, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "s3" in request.node.callspec.params["kinds"]:
        request.getfixturevalue("s3")
    if "kafka" in request.node.callspec.params["kinds"]:
        several_sinks.serve_kafka(request.getfixturevalue("kafka"))
    monkeypatch.setenv("TWOPHASE_LEASE", "0.5")
    monkeypatch.setenv(several_sinks.TARGET, dsn.replace("postgresql+psycopg2", "postgres"))
    monkeypatch.setenv("AIRFLOW_CONN_DWH", dsn.replace("postgresql+psycopg2", "postgres"))


@pytest.mark.parametrize(("kinds", "failpoint", "action"), list(parameters("checkpoint")))
def test_a_crash_anywhere_loses_doubles_and_shows_nothing_in_any_sink(
    kinds: str, failpoint: str, action: str, record: PostgresRecord, home: Path
) -> None:
    rows = land_words(files=2)
    assert call(several_sinks.run, kinds, log=home / "first.log").wait() == 0
    first = list(rows)
    rows += land_words(files=2, start=2)
    victim = WAYS.get(failpoint.partition(".")[0], several_sinks.run)
    if victim is several_sinks.sweep:  # something dead to sweep: an attempt that another one replaced
        call(several_sinks.run, kinds, log=home / "dead.log", failpoints="vote.before=kill")
        call(several_sinks.run, kinds, log=home / "second.log")

    crashed = call(victim, kinds, log=home / "crash.log", failpoints=f"{failpoint}={action}")

    assert crashed.hit(failpoint), f"{failpoint} was not reached:\n{crashed.said}"
    assert crashed.wait() == (-9 if action == "kill" else 1), crashed.said
    for kind in kinds.split("+"):
        there = counted(several_sinks.held(kind))
        before, after = (counted(several_sinks.expected(kind, some)) for some in (first, rows))
        assert before <= there <= after if kind in BIT_BY_BIT else there in (before, after), kind
    recover(kinds, home)
    drained = call(several_sinks.drain, kinds, log=home / "drain.log")
    assert drained.wait() == 0, drained.said
    for kind in kinds.split("+"):
        assert counted(several_sinks.held(kind)) == counted(several_sinks.expected(kind, rows)), kind
        assert kind not in several_sinks.CONSTRAINED or several_sinks.seen(kind) == len(
            rows
        )  # of a trial nothing is left
    expect_in_order(kinds, record, home)


@pytest.mark.parametrize(("kinds", "failpoint", "action"), list(parameters("replacement")))
def test_a_crash_anywhere_in_a_replacement_shows_one_revision_whole_in_every_sink(
    kinds: str, failpoint: str, action: str, record: PostgresRecord, home: Path
) -> None:
    by_slots = kinds.endswith(several_sinks.BY_SLOTS)
    if by_slots:
        first, second = several_sinks.land_days(1), several_sinks.land_days(2)
        assert call(several_sinks.run_days, kinds, 1, 2, log=home / "days.log").wait() == 0
    else:
        first, second = land_words(files=2), land_words(files=2, start=2)
        assert call(several_sinks.drain, kinds, log=home / "drain.log").wait() == 0

    def shown() -> set[int]:
        return {revision_shown(kind, first, second, by_slots=by_slots) for kind in several_sinks.split(kinds)}

    crashed = call(several_sinks.replace, kinds, 2, log=home / "crash.log", failpoints=f"{failpoint}={action}")

    assert crashed.hit(failpoint), f"{failpoint} was not reached:\n{crashed.said}"
    assert crashed.wait() == (-9 if action == "kill" else 1), crashed.said
    assert shown() <= {1, 2}
    wait_for_lease(record)
    recover(kinds, home)
    decided = committed_revision(record)
    assert shown() == {decided}
    again = call(several_sinks.replace, kinds, 2, log=home / "again.log")
    assert again.wait() == 0, again.said
    latest = committed_revision(record)
    assert latest > decided
    assert shown() == {latest}
    expect_in_order(kinds, record, home)


@pytest.mark.parametrize("failpoint", HANDING_OVER)
@pytest.mark.parametrize("kinds", ["files", "upserted"])
def test_a_table_whose_handing_over_is_killed_is_one_pipelines_and_said_again_it_is_handed_over(
    kinds: str, failpoint: str, record: PostgresRecord, home: Path
) -> None:
    if kinds == "upserted":  # a table of files that has checkpoints stays where it is
        land_words(files=2)
    assert call(several_sinks.run, kinds, log=home / "first.log").wait() == 0
    sink = several_sinks.pipeline(kinds).sinks[kinds]

    killed = call(several_sinks.hand_over, kinds, "terms", log=home / "killed.log", failpoints=f"{failpoint}=kill")

    assert killed.hit(failpoint), killed.said
    named = "words" if failpoint == "hand_over.before" else "terms"
    assert sink.owner() == named
    old = call(several_sinks.run, kinds, log=home / "old.log")
    assert old.wait() == (0 if named == "words" else 1)
    assert ("belongs to pipeline 'terms'" in old.said) == (named == "terms")
    again = call(several_sinks.hand_over, kinds, "terms", log=home / "again.log")
    assert again.wait() == 0, again.said
    assert sink.owner() == "terms"
    with record.engine.connect() as connection:
        told = connection.execute(text("SELECT why FROM twophase.event WHERE action LIKE '%handed over%'")).scalars()
        assert list(told) == (["it is theirs"] if kinds == "upserted" else [])


def revision_shown(kind: str, first: list[Row], second: list[Row], *, by_slots: bool) -> int:
    """Return which revision of the second checkpoint a reader of a sink finds: whole, and beside the first one."""
    there = counted(several_sinks.held(kind))
    for revision in range(1, REVISIONS + 1):
        rows = first + several_sinks.revised(second, revision)
        if there == counted(several_sinks.expected(kind, rows, by_slots=by_slots)):
            return revision
    pytest.fail(f"{kind} shows no revision whole: {sorted(there)}")


def committed_revision(record: PostgresRecord) -> int:
    """Return which revision of the second checkpoint the record says is committed."""
    with record.transaction() as tx:
        found = tx.committed_revision("words", 2)
    assert found is not None
    return found.key.revision


def recover(kinds: str, home: Path) -> None:
    """Finish what is left; once more finds nothing to do."""
    for number in (1, 2):
        assert call(several_sinks.recover, kinds, log=home / f"recover{number}.log").wait() == 0


def expect_in_order(kinds: str, record: PostgresRecord, home: Path) -> None:
    """Expect that all has ended, is as it was recorded, and that nothing dead is left when retention is over."""
    let_retention_be_over(record)
    assert call(several_sinks.sweep, kinds, log=home / "sweep.log").wait() == 0
    declared = several_sinks.pipeline(kinds)
    with record.transaction() as tx:
        assert {revision.state for revision in tx.unfinished("words")} <= ENDED
    assert not any(verify(record, declared))
    for sink in declared.writes.values():
        standing = sink._standing() if isinstance(sink, LogTableSink) else ()
        assert not [left for left in sink.attempts() if not left.manifest and Path(left.path).name not in standing]
