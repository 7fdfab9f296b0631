"""The value that sinks are given, and participants as the record keeps them."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from twophase.committer.participant_rows import of_row, to_row
from twophase.core.checkpoint import Key, Output, Participant, Revision
from twophase.core.states import State

KEY = Key("orders", 17, 2)
BEGAN = datetime(2026, 11, 15, 10, 30, 0, 7, tzinfo=UTC)
FIRST = Participant("lake", "sink", 1, vote=True, handle={"name": "a1"}, manifest={"digest": "d1"})
SECOND = Participant(
    "lake", "sink", 2, vote=True, handle={"name": "a2"}, manifest={"digest": "d2"}, reason="told", earlier=("d1",)
)
THIRD = Participant("lake", "sink", 3, handle={"name": "a3"}, earlier=("d1", "d2"), voted=SECOND)


@pytest.mark.parametrize(
    "output",
    [
        Output(KEY, 0),
        Output(KEY, 3, {"name": "a3"}, {"digest": "d3"}, sink="lake"),
        Output(KEY, 3, {"name": "a3"}, {"digest": "d3"}, 9, BEGAN, {"epoch": 3}, "lake", ("d1", "d2")),
    ],
)
def test_an_output_comes_to_another_process_as_it_was(output: Output) -> None:
    """Nothing of it is lost or becomes something else in JSON."""
    assert Output.of_json(json.loads(json.dumps(output.to_json()))) == output


def test_a_participants_output_has_what_the_record_knows_of_the_decision() -> None:
    """The handle holds what `place` named, and nothing else."""
    decided = Revision(KEY, State.COMMITTING, 3, commit_seq=9, created_at=BEGAN)

    found = THIRD.output(decided, {"epoch": 3})

    assert found == Output(KEY, 3, {"name": "a3"}, {}, 9, BEGAN, {"epoch": 3}, "lake", ("d1", "d2"))


@pytest.mark.parametrize("participant", [FIRST, SECOND, THIRD, Participant("audit", "audit", 1, vote=False)])
def test_a_participant_comes_back_from_the_record_as_it_was(participant: Participant) -> None:
    """Also in the middle of a restage, with the vote that counts until then."""
    told = of_row(json.loads(json.dumps(to_row(participant))))

    assert (told.attempt, told.vote, told.handle, told.earlier) == (
        participant.attempt, participant.vote, participant.handle, participant.earlier,
    )  # fmt: skip
    if participant.voted is None:
        assert told == participant
    else:
        assert told.standing == Participant(**{**vars(participant.voted), "reason": None})


def test_a_restage_that_an_earlier_version_recorded_is_understood() -> None:
    """It kept the old vote beside what `place` named; receipts in the sinks have the same form."""
    row = {
        "name": "lake", "kind": "sink", "attempt": 3, "vote": None, "manifest": {}, "reason": None,
        "handle": {
            "name": "a3",
            "earlier": ["d1", "d2"],
            "standing": {"attempt": 2, "handle": {"name": "a2", "earlier": ["d1"]}, "manifest": {"digest": "d2"}},
        },
    }  # fmt: skip

    found = of_row(row)

    assert (found.handle, found.earlier) == ({"name": "a3"}, ("d1", "d2"))
    assert found.standing is not None
    assert (found.standing.attempt, found.standing.handle, found.standing.earlier) == (2, {"name": "a2"}, ("d1",))
    assert to_row(found) == row
