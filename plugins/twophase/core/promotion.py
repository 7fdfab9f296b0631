"""How the coordinator asks one sink to promote or to find its output; no transaction is open meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from twophase.core.checkpoint import Json, Output, Participant, Revision
from twophase.core.hindrances import Hindrance
from twophase.core.isolation import alone
from twophase.core.ports import Outcome, Promotion, Sink


def promote(sinks: Mapping[str, Sink], revision: Revision, participant: Participant, receipt: Json) -> Promotion:
    """Let one sink promote what it voted for; if the outcome is unknown, ask it for the marker."""
    voted = participant.standing
    if voted is None:
        return _unvoted(revision, participant)
    sink, output = sinks[participant.name], voted.output(revision, receipt)
    promotion = _asked(output, lambda: sink.promote(output))
    if promotion.outcome is Outcome.UNKNOWN:
        promotion = find(sinks, revision, voted)
    if promotion.outcome is Outcome.FAILED and voted is not participant and revision.leased:
        return _unvoted(revision, participant)
    if promotion.outcome is Outcome.FAILED and promotion.hindrance is None:  # a sink that tells no kinds
        staged = find(sinks, revision, voted).outcome is not Outcome.FAILED
        return replace(promotion, hindrance=Hindrance.REFUSED if staged else Hindrance.LOST)
    return promotion


def find(sinks: Mapping[str, Sink], revision: Revision, participant: Participant) -> Promotion:
    """Ask one sink where a decided revision's output stands; changes nothing."""
    voted = participant.standing
    if voted is None:
        return _unvoted(revision, participant)
    sink, output = sinks[participant.name], voted.output(revision)
    return _asked(output, lambda: sink.find(output))


def hindered(promotion: Promotion) -> tuple[str, Hindrance]:
    """Return why a sink cannot promote, and the hindrance; LOST if the sink named none."""
    return promotion.reason or "no reason given", promotion.hindrance or Hindrance.LOST


def _asked(output: Output, question: Callable[[], Promotion]) -> Promotion:
    """Ask a sink, which may be a user's own; whatever it raises becomes RETRY_LATER, so other sinks go on."""
    which, problems = output.which, list[str]()
    with alone(which, problems):
        return question()
    return Promotion(Outcome.RETRY_LATER, problems[0].removeprefix(f"{which}: "))  # the caller names the sink


def _unvoted(revision: Revision, participant: Participant) -> Promotion:
    """Answer for an attempt without a vote: its restage is under way, or ended before the vote."""
    if revision.leased:
        return Promotion(Outcome.RETRY_LATER, f"attempt {participant.attempt} is being restaged")
    reason = f"attempt {participant.attempt} was never voted for: its restage ended before"
    return Promotion(Outcome.FAILED, reason, Hindrance.LOST)
