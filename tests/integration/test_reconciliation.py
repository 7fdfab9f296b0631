"""A record that was restored from a backup is older than its sinks: nothing runs on it before it knows them again."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import text

from support.crashes import scenarios, several_sinks
from support.crashes.replacement_promises import wait_for_lease
from support.faults.backups import Backups
from support.pipelines.commands import listed, one_line_error, twophase
from support.pipelines.factories import (
    PreStaged,
    Row,
    counted,
    land,
    land_words,
    numbered,
    visible,
    voted,
    words_pipeline,
)
from twophase import Pipeline, sinks, sources
from twophase.cli.manual_decisions import standing
from twophase.committer import queries
from twophase.committer.record import PostgresRecord
from twophase.core import failpoints
from twophase.core.errors import ConfigError, ManifestMismatch, RecordBehind
from twophase.core.failpoints import FailpointError
from twophase.core.next_step import advise
from twophase.core.record_behind import check_known
from twophase.core.settings import data_path
from twophase.core.states import State
from twophase.reconciliation import Survey, reconcile, survey
from twophase.runner import Runner
from twophase.sweep import sweep
from twophase.verification import verify
from twophase.wiring import coordinator_of

#: Sinks of every kind, each holding what it has to.
EVERY = "+".join(kind for kind in several_sinks.LOCAL if kind != "retracted")
#: What `make chaos` tries beside the others.
MORE_KINDS = ("upserted", "attached", "iceberg")


@pytest.fixture
def backups(request: pytest.FixtureRequest, home: Path, dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backups]:
    """Return the backups of a user whose sinks are all on this machine."""
    if "[kafka" in request.node.name:
        several_sinks.serve_kafka(request.getfixturevalue("kafka"))
    plain = dsn.replace("postgresql+psycopg2", "postgres")
    monkeypatch.setenv(several_sinks.TARGET, plain)
    monkeypatch.setenv("AIRFLOW_CONN_DWH", plain)
    found = Backups(dsn)
    yield found
    failpoints.configure("")
    found.engine.dispose()


def run(kinds: str, **more: Any) -> None:
    """Take one checkpoint through."""
    with Runner(several_sinks.pipeline(kinds), PreStaged()) as runner:
        runner.run(**more)


def look(record: PostgresRecord, kinds: str) -> Survey:
    """Ask what the record has forgotten."""
    declared = several_sinks.pipeline(kinds)
    return survey(record, declared, coordinator_of(record, declared))


def apply(record: PostgresRecord, kinds: str) -> Survey:
    """Bring the record up to its sinks."""
    declared = several_sinks.pipeline(kinds)
    return reconcile(record, declared, coordinator_of(record, declared), "restored")[0]


def check(record: PostgresRecord, kinds: str, rows: list[Row]) -> None:
    """Every row is in each sink once, and the record agrees."""
    for kind in several_sinks.split(kinds):
        assert counted(several_sinks.held(kind)) == counted(several_sinks.expected(kind, rows)), kind
    assert [found for found in verify(record, several_sinks.pipeline(kinds)) if found] == []


def states(record: PostgresRecord, pipeline: str = "words") -> list[tuple[int, int, int | None, str]]:
    """Return what the record knows, in the order of checkpoints."""
    with record.engine.connect() as connection:
        found = queries.checkpoints(connection, pipeline)
    return [(r["checkpoint_id"], r["revision"], r["commit_seq"], r["state"]) for r in reversed(found)]


def pending(record: PostgresRecord) -> dict[str, Any]:
    """Return the one revision that has not ended."""
    with record.engine.connect() as connection:
        (found,) = queries.pending(connection, "words")
    return found


def queries_of(record: PostgresRecord, query: str, without: str) -> list[dict[str, Any]]:
    """Return rows, without a column that is another each time."""
    with record.engine.connect() as connection:
        rows = [dict(row._mapping) for row in connection.execute(text(query))]
    return [{name: value for name, value in row.items() if name != without} for row in rows]


@pytest.mark.parametrize("kinds", ["files", "kafka", pytest.param("delta+iceberg", marks=pytest.mark.slow), EVERY])
def test_every_run_is_refused_until_the_record_knows_its_sinks_and_then_goes_on_once(
    backups: Backups, record: PostgresRecord, kinds: str
) -> None:
    """However often it is run: nothing is recorded, staged or doubled before a person has decided."""
    rows = land_words(files=2)
    run(kinds)
    backups.take()
    rows += land_words(files=4, start=2)
    run(kinds)
    run(kinds)
    before = states(record)
    backups.restore()
    for _ in range(2):
        with pytest.raises(RecordBehind, match=r"older than what its sinks hold.*`twophase reconcile words` shows"):
            run(kinds)
        assert states(record) == before[:1]

    found = look(record, kinds)
    assert [(one.key.checkpoint_id, one.becomes, set(one.sinks.values())) for one in found.forgotten] == [
        (2, State.COMMITTED, {None}),
        (3, State.COMMITTED, {None}),
    ]
    assert [path for one in found.told() for path in one["paths"]] == [f"{number:06d}.json" for number in range(2, 6)]
    apply(record, kinds)

    assert states(record) == before
    check(record, kinds, rows)
    assert not apply(record, kinds)
    rows += land_words(files=2, start=6)
    run(kinds)
    run(kinds)
    check(record, kinds, rows)
    assert states(record)[3:] == [(4, 1, 4, "COMMITTED")]


#: Where the run was when the backup was taken, and what the record then says of its checkpoint.
MOMENTS = {
    "begin.after": "OPEN",
    "attempt.after": "OPEN",
    "voted": "PRECOMMITTED",
    "commit.after": "COMMITTING",
    "finish.before": "COMMITTING",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_backup_of_any_moment_is_brought_up_to_all_that_came_after_it(
    backups: Backups, record: PostgresRecord, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the backup has as undecided or half promoted was decided, replaced and followed by others since."""
    monkeypatch.setenv("TWOPHASE_LEASE", "0.2")
    kinds = "files+postgres"
    rows = land_words(files=4)
    run(kinds)
    if moment == "voted":
        with Runner(several_sinks.pipeline(kinds), PreStaged()) as runner:
            voted(runner)
    else:
        failpoints.configure(f"{moment}=raise")
        with pytest.raises(FailpointError):
            run(kinds)
    failpoints.configure("")
    assert states(record)[-1][3] == MOMENTS[moment]
    backups.take()
    run(kinds)
    run(kinds)
    several_sinks.replace(kinds, 2)
    several_sinks.replace(kinds, 2)
    rows = rows[:20] + several_sinks.revised(rows[20:], 3)
    rows += land_words(files=2, start=4)
    run(kinds)
    before = states(record)
    backups.restore()
    with pytest.raises(RecordBehind):
        run(kinds)

    apply(record, kinds)

    assert states(record) == before
    check(record, kinds, rows)
    with record.engine.connect() as connection:
        scenarios.check_story(connection)
    run(kinds)
    assert states(record) == before
    check(record, kinds, rows)


@pytest.mark.parametrize("gone", [False, True], ids=["still staged", "staging lost"])
def test_what_reached_one_sink_reaches_the_other_too(
    backups: Backups, record: PostgresRecord, monkeypatch: pytest.MonkeyPatch, *, gone: bool
) -> None:
    """The decision stands: what is staged is promoted, and what is lost is parked and staged again."""
    monkeypatch.setenv("TWOPHASE_LEASE", "0.2")
    kinds = "files+postgres"
    rows = land_words(files=2)
    backups.take()
    failpoints.configure("promote.before=raise@2")
    with pytest.raises(FailpointError):
        run(kinds)
    failpoints.configure("")
    if gone:
        with record.engine.begin() as connection:
            connection.execute(text("DROP SCHEMA twophase_staging CASCADE"))
    backups.restore()
    with pytest.raises(RecordBehind):
        run(kinds)
    (found,) = look(record, kinds).forgotten
    assert (found.becomes, found.sinks["files"]) == (State.COMMITTING, None)
    assert found.sinks["postgres"]

    apply(record, kinds)

    if gone:
        with record.transaction() as tx:
            (parked,) = tx.unfinished("words")
        assert "staging table" in (parked.parked_reason or "")
        with Runner(several_sinks.pipeline(kinds), PreStaged()) as runner:
            runner.restage(1, "its staging was lost")
    check(record, kinds, rows)


@pytest.mark.parametrize(
    "kind",
    ["files", "postgres", "delta", "sent", *(pytest.param(k, marks=pytest.mark.slow) for k in MORE_KINDS)],
)
def test_what_was_staged_again_after_the_backup_is_found_by_its_later_attempt(
    backups: Backups, record: PostgresRecord, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record knows the decision and not that it was staged again: the sink holds what it did not vote for.

    It is parked, says `reconcile`, and that leads out. What was sent is known by its receipt alone.
    """
    monkeypatch.setenv("TWOPHASE_LEASE", "0.2")
    rows = land_words(files=2)
    failpoints.configure("commit.after=raise")
    with pytest.raises(FailpointError):
        run(kind)
    failpoints.configure("")
    backups.take()
    with Runner(several_sinks.pipeline(kind), PreStaged(change=several_sinks.mended)) as runner:
        runner.restage(1, "mended", [kind])
    backups.restore()
    run(kind)
    if kind != "sent":
        parked = pending(record)
        advice = advise(standing(parked))
        assert advice
        assert advice.command == "twophase reconcile words"
        assert parked["hindrances"] == {kind: "foreign"}

    apply(record, kind)

    assert states(record) == [(1, 1, 1, "COMMITTED")]
    check(record, kind, several_sinks.mended(rows))


def test_what_was_parked_in_the_backup_makes_room_for_what_replaced_it(
    backups: Backups, record: PostgresRecord
) -> None:
    rows = land_words(files=2)
    failpoints.configure("commit.after=raise")
    with pytest.raises(FailpointError):
        run("files")
    failpoints.configure("")
    shutil.rmtree(next(data_path("").rglob("staging")))
    run("files")
    assert pending(record)["hindrances"] == {"files": "lost"}
    backups.take()
    with Runner(several_sinks.pipeline("files"), PreStaged()) as runner:
        runner.restage(1, "its staging was lost")
        runner.replace(1)
    backups.restore()
    wait_for_lease(record)

    apply(record, "files")

    assert states(record) == [(1, 1, 1, "SUPERSEDED"), (1, 2, 2, "COMMITTED")]
    check(record, "files", rows)


def test_a_sink_that_cannot_be_asked_is_told_of_and_takes_back_nothing_that_it_said(
    backups: Backups, record: PostgresRecord, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its silence is no answer: what it holds stays unknown to the record until a person decides."""
    land_words(files=4)
    run("postgres")
    backups.take()
    run("postgres")
    backups.restore()
    with pytest.raises(RecordBehind, match="sink 'postgres' was given commit_seq 2"):
        run("postgres")
    monkeypatch.setenv(several_sinks.TARGET, "postgres://nobody@127.0.0.1:1/nothing")
    declared = several_sinks.pipeline("postgres")

    with pytest.raises(RecordBehind, match="sink 'postgres' was given commit_seq 2"):
        check_known(coordinator_of(record, declared))

    assert "pipeline 'words': not asked whether it holds what the record lacks: sink 'postgres'" in caplog.text


def test_a_sink_that_is_down_holds_up_only_itself(
    backups: Backups, record: PostgresRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the others hold is shown and recorded; until it answers the pipeline is behind, for it may know of more."""
    kinds, up = "files+postgres", several_sinks.TARGET
    there = {name: os.environ[name] for name in (up, "AIRFLOW_CONN_DWH")}
    rows = land_words(files=4)
    run(kinds)
    backups.take()
    run(kinds)
    backups.restore()
    for name in there:
        monkeypatch.setenv(name, "postgres://nobody@127.0.0.1:1/nothing")

    shown = twophase("reconcile", "words")
    applied = twophase("reconcile", "words", "--apply", "--reason", "restored")

    assert (shown.exit_code, applied.exit_code) == (1, 1)
    assert re.search(r"not asked: sink 'postgres'.*once it answers", shown.stderr)
    assert "1 decision recorded again" in applied.stdout
    assert states(record)[-1] == (2, 1, 2, "COMMITTING")
    with record.transaction() as tx:
        assert "not asked: sink 'postgres'" in (tx.reach("words").behind or "")
    for name, value in there.items():
        monkeypatch.setenv(name, value)
    assert not apply(record, kinds)
    check_known(coordinator_of(record, several_sinks.pipeline(kinds)))
    assert states(record)[-1] == (2, 1, 2, "COMMITTED")
    run(kinds)
    check(record, kinds, rows)


def test_what_has_no_receipt_is_shown_and_not_recorded_and_read_again_once_it_is_gone(
    backups: Backups, record: PostgresRecord
) -> None:
    """An older version kept none: the run is refused all the same, and what is taken out by hand is new input."""
    rows = land_words(files=2)
    run("files")
    backups.take()
    rows += land_words(files=2, start=2)
    run("files")
    shutil.rmtree(data_path("lake/words.twophase/receipts"))
    backups.restore()
    with pytest.raises(RecordBehind, match=r"sink 'files' holds checkpoint 2 r1"):
        run("files")

    found = look(record, "files")
    assert found.unreceipted == [("files", 2, 1)]
    with pytest.raises(ConfigError, match=r"words/2 r1 in 'files': a version that kept no receipts promoted it"):
        apply(record, "files")
    data_path("lake/words/checkpoint=00000002").rename(data_path("moved_away"))

    with pytest.raises(ManifestMismatch, match="run again"):  # its manifest is still there: the attempt has its name
        run("files")
    run("files")
    check(record, "files", rows)


def test_a_number_that_was_given_to_other_input_since_is_a_conflict_until_the_backup_is_restored_again(
    backups: Backups, record: PostgresRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is mixed up: the message says what to do, and that helps."""
    monkeypatch.setenv("TWOPHASE_LEASE", "0.2")
    rows = land_words(files=2)
    run("files")
    backups.take()
    rows += land_words(files=2, start=2)
    run("files")
    backups.restore()
    receipts = data_path("lake/words.twophase/receipts")
    receipts.rename(receipts.with_name("hidden"))
    data_path("lake/words/checkpoint=00000002").rename(data_path("hidden"))
    rows += land_words(files=1, start=4)
    data_path("landing/words/000002.json").rename(data_path("landing/later.json"))
    failpoints.configure("begin.after=raise")
    with pytest.raises(FailpointError):
        run("files")
    failpoints.configure("")
    receipts.with_name("hidden").rename(receipts)
    data_path("hidden").rename(data_path("lake/words/checkpoint=00000002"))
    data_path("landing/later.json").rename(data_path("landing/words/000002.json"))

    wait_for_lease(record)
    with pytest.raises(ConfigError, match=r"given number 2 to other input: restore the backup again"):
        apply(record, "files")
    backups.restore()
    apply(record, "files")

    run("files")
    check(record, "files", rows)


@pytest.mark.parametrize("point", ["reconcile.before", "reconcile.inside", "reconcile.after", "promote.after"])
def test_killed_anywhere_it_is_begun_again_and_done_once(backups: Backups, record: PostgresRecord, point: str) -> None:
    """It is one transaction, and then what follows any crash."""
    rows = land_words(files=2)
    run("files")
    backups.take()
    rows += land_words(files=4, start=2)
    run("files")
    run("files")
    before = states(record)
    backups.restore()

    failpoints.configure(f"{point}=raise")
    with pytest.raises(FailpointError):
        apply(record, "files")
    failpoints.configure("")
    apply(record, "files")

    assert states(record) == before
    check(record, "files", rows)


def test_slots_that_were_adopted_run_and_replaced_are_known_again(backups: Backups, record: PostgresRecord) -> None:
    """Also what was in a slot's folder before us: it is revision 0, and was replaced."""
    declared = Pipeline(
        "days",
        reads={"words": sources.Interval("landing/days/dt={start:%Y-%m-%d}", "json")},
        transform="word_count:copy",
        writes={"lake": sinks.Files("lake/days", slot_folder="dt={start:%Y-%m-%d}", adopt=True)},
    )
    rows = several_sinks.land_days(1, 2, 3)
    old = data_path("lake/days/dt=2026-11-01")
    old.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist([{"id": 1, "word": "old", "frequency": 1}]), old / "old.parquet")
    slots = [f"2026-11-{day:02d}/2026-11-{day + 1:02d}" for day in (3, 1, 2)]
    with Runner(declared, PreStaged(), record=record) as runner:
        runner.run(slots[0])
        backups.take()
        for slot in slots[1:]:
            runner.run(slot)
        runner.run(slots[0], reprocess=True)
    before = states(record, "days")
    owned = queries_of(record, "SELECT * FROM twophase.claim ORDER BY checkpoint_id, part", without="shared")
    backups.restore()
    with Runner(declared, PreStaged(), record=record) as runner:
        for slot in slots:
            with pytest.raises(RecordBehind):
                runner.run(slot)

        reconcile(record, declared, coordinator_of(record, declared), "restored")

        assert states(record, "days") == before
        for slot in slots:
            runner.run(slot)
        assert states(record, "days") == before
        rows += several_sinks.land_days(4)
        runner.run("2026-11-04/2026-11-05")
    now = queries_of(record, "SELECT * FROM twophase.claim ORDER BY checkpoint_id, part", without="shared")
    assert now[: len(owned)] == owned  # no other slot gets what one of these came to
    assert counted(visible("lake/days")) == counted(rows)
    assert [found for found in verify(record, declared) if found] == []


def test_a_chain_is_reconciled_upstream_first_and_goes_on_where_it_was(
    backups: Backups, record: PostgresRecord
) -> None:
    """Positions are numbers of the other pipeline's decisions: they are the same ones as before."""
    copies = Pipeline(
        "copies",
        reads={"words": sources.Committed("words", "files")},
        transform="word_count:copy",
        writes={"lake": sinks.Files("lake/copies")},
    )

    def copy() -> None:
        with Runner(copies, PreStaged(), record=record) as runner:
            runner.run()

    rows = land_words(files=2)
    run("files")
    copy()
    backups.take()
    rows += land_words(files=2, start=2)
    run("files")
    copy()
    several_sinks.replace("files", 2)
    rows = rows[:20] + several_sinks.revised(rows[20:], 2)
    stale = queries_of(record, "SELECT * FROM twophase.stale", without="replaced_at")
    assert [(row["pipeline"], row["checkpoint_id"]) for row in stale] == [("copies", 2)]
    backups.restore()
    with pytest.raises(RecordBehind, match="copies"):
        copy()
    with pytest.raises(ConfigError, match=r"it reads words/2 r1, which the record has forgotten, too"):
        reconcile(record, copies, coordinator_of(record, copies), "restored")

    apply(record, "files")
    reconcile(record, copies, coordinator_of(record, copies), "restored")

    assert queries_of(record, "SELECT * FROM twophase.stale", without="replaced_at") == stale
    with Runner(copies, PreStaged(), record=record) as runner:
        runner.replace(2)
    rows += land_words(files=2, start=4)
    run("files")
    copy()
    copy()
    assert counted(visible("lake/copies")) == counted(rows)
    assert [found for found in verify(record, copies) if found] == []


def test_files_that_left_the_landing_folder_are_not_taken_for_new_ones(
    backups: Backups, record: PostgresRecord
) -> None:
    """A name that was free again was taken by a later checkpoint: both have read what they have read."""
    declared = words_pipeline(after_commit="delete")

    def once() -> None:
        with Runner(declared, PreStaged(), record=record) as runner:
            runner.run()

    backups.take()
    rows = numbered(1) + numbered(2) + numbered(3)
    for number in (1, 2):
        land("same.json", numbered(number))
        once()
    backups.restore()
    land("same.json", numbered(3))
    with pytest.raises(RecordBehind):
        once()

    reconcile(record, declared, coordinator_of(record, declared), "restored")

    once()
    assert counted(visible("lake/words")) == counted(rows)
    assert [found for found in verify(record, declared) if found] == []


def test_nothing_is_swept_aborted_or_recovered_on_a_record_that_does_not_know(
    backups: Backups, record: PostgresRecord
) -> None:
    """What it takes for dead may be committed."""
    land_words(files=2)
    run("files")
    backups.take()
    land_words(files=2, start=2)
    run("files")
    backups.restore()
    declared = several_sinks.pipeline("files")

    with pytest.raises(RecordBehind):
        list(sweep(record, declared))
    with pytest.raises(RecordBehind):
        coordinator_of(record, declared).recover()
    assert any(found and "commit_seq 2" in found.difference for found in verify(record, declared))


def test_the_pipeline_says_it_and_the_command_shows_and_records_it(backups: Backups, record: PostgresRecord) -> None:
    """In the listing, at each checkpoint and in the error, until a person has decided; then nowhere any more."""
    land_words(files=2)
    run("files")
    backups.take()
    land_words(files=2, start=2)
    run("files")
    backups.restore()
    with pytest.raises(RecordBehind):
        run("files")

    assert "given commit_seq 2" in listed("pipelines")[0]["behind"]
    for command in (("pipelines",), ("show", "words", "1")):
        assert "twophase reconcile words" in twophase(*command).stderr
    assert "twophase reconcile words" in one_line_error(twophase("abort", "words", "1", "--reason", "no"))
    (shown,) = listed("reconcile", "words", code=1)
    assert (shown["checkpoint_id"], shown["commit_seq"], shown["rows"]) == (2, 2, 20)
    assert (shown["paths"], shown["sinks"]) == (["000002.json", "000003.json"], {"files": None})
    assert (shown["becomes"], shown["problem"]) == ("COMMITTED", None)
    table = twophase("reconcile", "words")
    assert (table.exit_code, "words: 2 files" in table.stdout) == (1, True), table.output
    assert twophase("reconcile", "words", "--apply").exit_code == 2

    applied = twophase("reconcile", "words", "--apply", "--reason", "the disk died")

    assert (applied.exit_code, "1 decision recorded again" in applied.stdout) == (0, True), applied.output
    assert listed("pipelines")[0]["behind"] is None
    events = listed("show", "words", "2")["events"]
    assert {event["why"] for event in events if event["to_state"] == "COMMITTING"} == {"reconcile: the disk died"}
    assert listed("reconcile", "words") == []
    assert "knows all that its sinks hold" in twophase("reconcile", "words").stdout
