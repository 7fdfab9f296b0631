"""The database itself refuses an impossible history: every statement here is raw SQL, past all of our Python."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from twophase.committer.record import PostgresRecord
from twophase.core.states import ENTERED_FROM, LIVE, UNDECIDED, State

#: How a revision gets into each state, step by step.
WAY: dict[State, list[State]] = {
    State.OPEN: [],
    State.PRECOMMITTED: [State.PRECOMMITTED],
    State.COMMITTING: [State.PRECOMMITTED, State.COMMITTING],
    State.COMMITTED: [State.PRECOMMITTED, State.COMMITTING, State.COMMITTED],
    State.SUPERSEDED: [State.PRECOMMITTED, State.COMMITTING, State.COMMITTED, State.SUPERSEDED],
    State.ABORTING: [State.ABORTING],
    State.ABORTED: [State.ABORTING, State.ABORTED],
}
#: What a statement sets beside the state.
WITH = {
    State.COMMITTING: ", commit_seq = checkpoint_id * 10 + revision, decided_at = now()",
    State.COMMITTED: ", committed_at = now()",
    State.SUPERSEDED: ", superseded_at = now()",
    State.ABORTING: ", aborted_at = now()",
}

PAIRS = [(old, new) for old in State for new in State if old is not new]
LEGAL = [(old, new) for old, new in PAIRS if old in ENTERED_FROM[new]]
ILLEGAL = [pair for pair in PAIRS if pair not in LEGAL]


@pytest.fixture(scope="module")
def engine(shared_record: PostgresRecord) -> Engine:
    """Return one database for the module; each test rolls back what it did."""
    return shared_record.engine


@pytest.fixture
def db(engine: Engine) -> Iterator[Connection]:
    """Return a connection in a transaction of this test's own, with pipeline `p` and its checkpoints 1 and 2."""
    with engine.connect() as connection, connection.begin() as transaction:
        do(connection, "INSERT INTO twophase.pipeline (name, declaration) VALUES ('p', '{}')")
        do(
            connection,
            "INSERT INTO twophase.checkpoint (pipeline, checkpoint_id, inputs) VALUES ('p', 1, '{}'), ('p', 2, '{}')",
        )
        yield connection
        transaction.rollback()


def do(db: Connection, statement: str) -> int:
    return db.execute(text(statement)).rowcount


def refused(db: Connection, statement: str, why: str) -> None:
    """Assert that the database refuses a statement, for this reason and not for another."""
    with pytest.raises(DBAPIError, match=why), db.begin_nested():
        do(db, statement)


def this(checkpoint: int = 1, revision: int = 1) -> str:
    return f"pipeline = 'p' AND checkpoint_id = {checkpoint} AND revision = {revision}"


def insert(checkpoint: int = 1, revision: int = 1, state: str = "OPEN") -> str:
    return (
        "INSERT INTO twophase.revision (pipeline, checkpoint_id, revision, state)"
        f" VALUES ('p', {checkpoint}, {revision}, '{state}')"
    )


def participant(checkpoint: int = 1, revision: int = 1, name: str = "lake", rest: str = "'sink', 1, true") -> str:
    return (
        "INSERT INTO twophase.participant (pipeline, checkpoint_id, revision, name, kind, attempt, vote)"
        f" VALUES ('p', {checkpoint}, {revision}, '{name}', {rest})"
    )


def promoted(checkpoint: int = 1, revision: int = 1, sink: str = "lake") -> str:
    return (
        "INSERT INTO twophase.committed (job_id, operator_id, subtask_id, checkpoint_id, revision)"
        f" VALUES ('p', '{sink}', 0, {checkpoint}, {revision})"
    )


def to(state: State, checkpoint: int = 1, revision: int = 1) -> str:
    return f"UPDATE twophase.revision SET state = '{state}'{WITH.get(state, '')} WHERE {this(checkpoint, revision)}"


def reach(db: Connection, state: State, checkpoint: int = 1, revision: int = 1) -> None:
    """Bring a new revision into a state, by the way that the database allows."""
    do(db, insert(checkpoint, revision))
    do(db, f"UPDATE twophase.revision SET epoch = 1 WHERE {this(checkpoint, revision)}")
    do(db, participant(checkpoint, revision))
    for step in WAY[state]:
        if step is State.COMMITTED:
            do(db, promoted(checkpoint, revision))
        assert do(db, to(step, checkpoint, revision)) == 1


# --- transitions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), ILLEGAL, ids=lambda state: state.lower())
def test_no_state_follows_one_that_it_cannot_be_entered_from(db: Connection, old: State, new: State) -> None:
    reach(db, old)

    refused(db, f"UPDATE twophase.revision SET state = '{new}'", f"{new} cannot follow {old}")


@pytest.mark.parametrize(("old", "new"), LEGAL, ids=lambda state: state.lower())
def test_every_transition_of_the_drawing_is_allowed(db: Connection, old: State, new: State) -> None:
    reach(db, old)
    if new is State.COMMITTED:
        do(db, promoted())
    statement = to(new)
    if new is State.OPEN:
        statement = statement.replace(" SET ", " SET epoch = epoch + 1, ")

    assert do(db, statement) == 1


@pytest.mark.parametrize("state", sorted(set(State) - {State.OPEN}))
def test_a_revision_begins_open(db: Connection, state: State) -> None:
    refused(db, insert(state=state), f"it must begin as OPEN, not {state}")


def test_a_state_that_does_not_exist_is_refused(db: Connection) -> None:
    reach(db, State.OPEN)

    refused(db, "UPDATE twophase.revision SET state = 'DONE'", "DONE cannot follow OPEN")


@pytest.mark.parametrize("column", ["commit_seq", "decided_at"])
def test_a_decision_has_a_number_and_a_time(db: Connection, column: str) -> None:
    reach(db, State.PRECOMMITTED)
    given = {"commit_seq": "7", "decided_at": "now()", column: "NULL"}

    refused(
        db,
        "UPDATE twophase.revision SET state = 'COMMITTING',"
        f" commit_seq = {given['commit_seq']}, decided_at = {given['decided_at']}",
        "revision_(decided|commit_seq)_check",
    )


def test_a_decision_keeps_its_number(db: Connection) -> None:
    reach(db, State.COMMITTING)

    refused(db, "UPDATE twophase.revision SET commit_seq = 99", "a decision keeps its commit_seq")
    refused(db, "UPDATE twophase.revision SET commit_seq = NULL", "a decision keeps its commit_seq")


# --- one of each -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", sorted(LIVE))
def test_a_second_live_revision_is_refused(db: Connection, state: State) -> None:
    reach(db, state)

    refused(db, insert(revision=2), "revision_one_live")


@pytest.mark.parametrize("state", sorted(set(State) - LIVE))
def test_a_revision_that_is_not_live_does_not_stand_in_the_way(db: Connection, state: State) -> None:
    reach(db, state)

    assert do(db, insert(revision=2)) == 1


def test_a_second_committed_revision_is_refused(db: Connection) -> None:
    reach(db, State.COMMITTED)
    reach(db, State.COMMITTING, revision=2)
    do(db, promoted(revision=2))

    refused(db, to(State.COMMITTED, revision=2), "revision_one_committed")


def test_a_replacement_is_committed_once_the_old_one_is_superseded(db: Connection) -> None:
    reach(db, State.COMMITTED)
    reach(db, State.COMMITTING, revision=2)
    do(db, promoted(revision=2))
    do(db, to(State.SUPERSEDED))

    assert do(db, to(State.COMMITTED, revision=2)) == 1


def test_two_decisions_cannot_have_one_number(db: Connection) -> None:
    reach(db, State.COMMITTING)
    reach(db, State.PRECOMMITTED, checkpoint=2)

    refused(
        db,
        f"UPDATE twophase.revision SET state = 'COMMITTING', commit_seq = 11, decided_at = now() WHERE {this(2)}",
        "revision_commit_seq",
    )


def test_two_checkpoints_cannot_have_one_slot(db: Connection) -> None:
    do(db, "UPDATE twophase.checkpoint SET slot = '2026-11-15' WHERE checkpoint_id = 1")

    refused(db, "UPDATE twophase.checkpoint SET slot = '2026-11-15' WHERE checkpoint_id = 2", "checkpoint_one_per_slot")


def claim(checkpoint: int) -> str:
    return (
        "INSERT INTO twophase.input_file (pipeline, source, path, size, mtime_ns, checkpoint_id)"
        f" VALUES ('p', 'words', 'a.json', 1, 1, {checkpoint})"
    )


def test_a_file_cannot_be_owned_twice(db: Connection) -> None:
    do(db, claim(1))

    refused(db, claim(2), "input_file_one_owner")
    refused(db, claim(1), "input_file_one_owner")


def test_a_name_is_free_again_once_its_file_is_gone(db: Connection) -> None:
    do(db, claim(1))
    do(db, "UPDATE twophase.input_file SET gone_at = now()")

    assert do(db, claim(2)) == 1


def test_a_location_cannot_be_written_by_two(db: Connection) -> None:
    do(db, "INSERT INTO twophase.output (location, pipeline, sink) VALUES ('/lake', 'p', 'a')")

    refused(db, "INSERT INTO twophase.output (location, pipeline, sink) VALUES ('/lake', 'p', 'b')", "output_pkey")
    refused(db, "INSERT INTO twophase.output (location, pipeline, sink) VALUES ('/x', 'p', 'a')", "output_one_per_sink")


# --- votes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rest",
    [
        "'sink', 2, NULL",
        "'sink', 2, false",
        "'sink', 1, true",
        "'sink', 3, true",
        "'audit', 2, NULL",
        "'audit', 1, true",
    ],
    ids=["not voted", "no", "yes for an older attempt", "yes for a later attempt", "audit not voted", "older audit"],
)
def test_nothing_is_decided_without_every_vote_for_this_attempt(db: Connection, rest: str) -> None:
    do(db, insert())
    do(db, "UPDATE twophase.revision SET epoch = 1")
    do(db, "UPDATE twophase.revision SET epoch = 2")
    do(db, participant(rest="'sink', 2, true"))
    do(db, participant(name="other", rest=rest))
    do(db, to(State.PRECOMMITTED))

    refused(db, to(State.COMMITTING), "not every participant voted yes for attempt 2")


def test_nothing_is_decided_without_participants(db: Connection) -> None:
    reach(db, State.PRECOMMITTED)
    do(db, "DELETE FROM twophase.participant")

    refused(db, to(State.COMMITTING), "not every participant voted yes for attempt 1")


def test_a_decision_opens_no_attempt(db: Connection) -> None:
    """The votes are for the attempt before, so they would not count."""
    reach(db, State.PRECOMMITTED)
    do(db, "UPDATE twophase.participant SET attempt = 2")

    refused(
        db,
        "UPDATE twophase.revision SET state = 'COMMITTING', epoch = 2, commit_seq = 1, decided_at = now()",
        "not every participant voted yes for attempt 2",
    )


# --- committed -------------------------------------------------------------------------------------------------------


def test_nothing_is_committed_before_every_sink_is(db: Connection) -> None:
    do(db, insert())
    do(db, "UPDATE twophase.revision SET epoch = 1")
    do(db, participant())
    do(db, participant(name="dwh"))
    do(db, participant(name="row_count", rest="'audit', 1, true"))
    do(db, to(State.PRECOMMITTED))
    do(db, to(State.COMMITTING))

    refused(db, to(State.COMMITTED), "not every sink is in committed")
    do(db, promoted(sink="lake"))
    refused(db, to(State.COMMITTED), "not every sink is in committed")
    do(db, promoted(sink="dwh"))
    assert do(db, to(State.COMMITTED)) == 1


def test_the_rows_of_another_revision_do_not_count(db: Connection) -> None:
    reach(db, State.COMMITTED)
    reach(db, State.COMMITTING, revision=2)
    do(db, to(State.SUPERSEDED))

    refused(db, to(State.COMMITTED, revision=2), "not every sink is in committed")


@pytest.mark.parametrize("state", sorted(UNDECIDED | {State.ABORTING, State.ABORTED}))
def test_nothing_is_promoted_before_it_is_decided(db: Connection, state: State) -> None:
    reach(db, state)

    refused(db, promoted(), "the revision is not decided")


@pytest.mark.parametrize("state", sorted(UNDECIDED | {State.ABORTING, State.ABORTED}))
def test_an_undecided_revision_cannot_have_a_commit_seq(db: Connection, state: State) -> None:
    """With one, rows in `committed` would be taken for it."""
    reach(db, state)

    refused(db, "UPDATE twophase.revision SET commit_seq = 99", "revision_commit_seq_check")


def test_nothing_is_promoted_that_is_not_in_the_record(db: Connection) -> None:
    refused(db, promoted(revision=7), "the revision is not decided")


def test_a_sink_is_committed_once_per_revision(db: Connection) -> None:
    reach(db, State.COMMITTED)

    refused(db, promoted(), "committed_pkey")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE twophase.committed SET committed_at = now()",
        "UPDATE twophase.committed SET revision = 2",
        "DELETE FROM twophase.committed",
        "DELETE FROM twophase.committed WHERE false",
        "TRUNCATE twophase.committed",
    ],
)
def test_rows_of_committed_are_never_changed(db: Connection, statement: str) -> None:
    reach(db, State.COMMITTED)

    refused(db, statement, "on committed: its rows are never changed")


def test_a_revision_with_committed_rows_cannot_be_deleted(db: Connection) -> None:
    reach(db, State.COMMITTED)
    do(db, "DELETE FROM twophase.participant")

    refused(db, "DELETE FROM twophase.revision", "committed_revision_fkey")


@pytest.mark.parametrize(
    "statement", ["UPDATE twophase.event SET why = 'another'", "UPDATE twophase.event SET who = 'x' WHERE false"]
)
def test_an_event_is_never_changed(db: Connection, statement: str) -> None:
    reach(db, State.OPEN)
    do(
        db,
        "INSERT INTO twophase.event (pipeline, checkpoint_id, revision, epoch, who, action)"
        " VALUES ('p', 1, 1, 0, 'me', 'begin')",
    )

    refused(db, statement, "UPDATE on event: its rows are never changed")


def test_events_cannot_be_emptied_out(db: Connection) -> None:
    refused(db, "TRUNCATE twophase.event", "TRUNCATE on event: its rows are never changed")


# --- epochs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [0, 1, 4, 99, -1])
def test_an_epoch_goes_up_by_one_or_stays(db: Connection, epoch: int) -> None:
    do(db, insert())
    do(db, "UPDATE twophase.revision SET epoch = 1")
    do(db, "UPDATE twophase.revision SET epoch = 2")

    refused(db, f"UPDATE twophase.revision SET epoch = {epoch}", f"epoch {epoch} cannot follow 2")


@pytest.mark.parametrize("state", sorted(set(State) - {State.OPEN, State.COMMITTING}))
def test_no_attempt_is_opened_where_none_can_be(db: Connection, state: State) -> None:
    reach(db, state)

    refused(db, "UPDATE twophase.revision SET epoch = 2", f"no attempt can be opened in {state}")


def test_a_new_attempt_takes_a_pre_committed_revision_back_to_open(db: Connection) -> None:
    reach(db, State.PRECOMMITTED)

    assert do(db, "UPDATE twophase.revision SET state = 'OPEN', epoch = 2") == 1


# --- parked ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", sorted(set(State) - {State.COMMITTING}))
def test_only_what_is_committing_can_be_parked(db: Connection, state: State) -> None:
    reach(db, state)

    refused(db, "UPDATE twophase.revision SET parked_reason = 'lost'", "revision_parked_check")


def test_what_is_committed_is_not_parked_any_more(db: Connection) -> None:
    reach(db, State.COMMITTING)
    do(db, promoted())
    do(db, "UPDATE twophase.revision SET parked_reason = 'lost'")

    refused(db, to(State.COMMITTED), "revision_parked_check")


# --- names and numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "P", "1p", "_p", "p-q", "p q", "p/q", "pé", "p\n"])
def test_a_bad_pipeline_name_is_refused(db: Connection, name: str) -> None:
    refused(db, f"INSERT INTO twophase.pipeline (name, declaration) VALUES ('{name}', '{{}}')", "pipeline_name_check")


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        (
            "INSERT INTO twophase.checkpoint (pipeline, checkpoint_id, inputs) VALUES ('p', 0, '{}')",
            "checkpoint_id_check",
        ),
        (
            "INSERT INTO twophase.checkpoint (pipeline, checkpoint_id, inputs) VALUES ('q', 1, '{}')",
            "checkpoint_pipeline",
        ),
        (insert(checkpoint=9), "revision_checkpoint_fkey"),
        (insert(revision=-1), "revision_numbers_check"),
        ("UPDATE twophase.pipeline SET next_commit_seq = 0", "pipeline_ids_check"),
    ],
)
def test_what_belongs_to_nothing_is_refused(db: Connection, statement: str, why: str) -> None:
    refused(db, statement, why)


@pytest.mark.parametrize(
    ("rest", "why"),
    [("'witness', 1, true", "participant_kind_check"), ("'sink', 0, true", "participant_attempt_check")],
)
def test_a_participant_that_cannot_be_is_refused(db: Connection, rest: str, why: str) -> None:
    reach(db, State.OPEN)

    refused(db, participant(name="other", rest=rest), why)
