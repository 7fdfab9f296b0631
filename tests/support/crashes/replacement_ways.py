"""Every way through the protocol on which something is replaced, adopted, passed on, set aside or swept.

A new failpoint is on all of these ways until it is said that it is not: a case that does not meet it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from support.crashes import replacements, scenarios
from support.crashes.replacement_promises import let_retention_be_over, wait_for_lease
from twophase.core.failpoints import FAILPOINTS
from twophase.local.record_access import open_record

_NAMES = [name for name in FAILPOINTS if name not in scenarios.OTHER_SINKS | scenarios.OFFSETS]


def _between(first: str, last: str, *, without: Collection[str] = ()) -> tuple[str, ...]:
    found = _NAMES[_NAMES.index(first) : _NAMES.index(last) + 1]
    return tuple(name for name in found if name not in without and name.partition(".")[0] not in without)


@dataclass(frozen=True)
class Way:
    """What was there before, who goes this way, and what it comes by."""

    name: str
    #: Makes what is there before a round, in the test's own process; rounds count from 1.
    prepare: Callable[[int], None]
    #: Goes the way, in a process that dies; asked again it goes to the end.
    go: Callable[[int], None]
    points: tuple[str, ...]
    #: How many commit points are passed in a round, by whoever.
    decisions: int = 1
    #: Whether it is decided before anybody goes this way.
    decided: bool = False
    #: Whether asking again, when all is done, does it all again.
    anew: bool = False
    #: Whether folders can change places in one step.
    exchanges: bool = True


def _first_two(number: int) -> None:
    if number == 1:
        for checkpoint_id in (1, 2):
            replacements.land("words", checkpoint_id)
            replacements.run("words")


def _replace(number: int) -> None:
    replacements.replace("words")


def _replace_with_a_gap(number: int) -> None:
    replacements.without_exchange(_replace, number)


def _run_slot(number: int) -> None:
    replacements.run("days", number)


def _land_day(number: int) -> None:
    replacements.land("days", number)


def _first_day(number: int) -> None:
    if number == 1:
        replacements.land("days", 1)
        replacements.run("days", 1)


def _rerun(number: int) -> None:
    replacements.rerun(1)


def _day_with_a_folder(number: int) -> None:
    replacements.land("days", number)
    replacements.leave_a_folder(number)


def _commit_upstream(number: int) -> None:
    """Let the other pipeline commit another checkpoint, and replace its first one: that is not to be read again."""
    replacements.land("words", number)
    replacements.run("words")
    if number > 1:
        replacements.replace("words")


def _hop(number: int) -> None:
    replacements.run("hop")


def _replace_upstream(number: int) -> None:
    if number == 1:
        _commit_upstream(1)
        _hop(1)
    replacements.replace("words")


def _replace_hop(number: int) -> None:
    replacements.replace("hop")


def _land_sifted(number: int) -> None:
    replacements.land("sifted", number)


def _sift(number: int) -> None:
    replacements.run("sifted")


def _first_sifted(number: int) -> None:
    if number == 1:
        _land_sifted(1)
        _sift(1)


def _replace_sifted(number: int) -> None:
    replacements.replace("sifted")


def _refused(number: int) -> None:
    replacements.refused()


def _decide(number: int) -> None:
    """Let a replacement be decided by a run that has died since."""
    _first_two(number)
    replacements.decided_only(_replace, number)
    record = open_record()
    wait_for_lease(record)
    record.engine.dispose()


def _recover(number: int) -> None:
    replacements.recover()


def _supersede(number: int) -> None:
    """Let two checkpoints have a superseded revision each whose retention is over."""
    _first_two(number)
    for checkpoint_id in (1, 2):
        replacements.replace("words", checkpoint_id)
    record = open_record()
    let_retention_be_over(record)
    record.engine.dispose()


def _sweep(number: int) -> None:
    replacements.sweep()


def _sweep_with_tombstones(number: int) -> None:
    replacements.without_exchange(_sweep, number)


_TO_THE_END = ("begin.before", "finish.after")
_PROMOTED = ("promote.before", "finish.after")
_FIRST = ("promote.gap", "promote.superseded")

WAYS = [
    Way("replacement", _first_two, _replace, _between(*_TO_THE_END, without=("adopt", "promote.gap")), anew=True),
    Way(
        "gap", _first_two, _replace_with_a_gap, _between(*_TO_THE_END, without=("adopt", "promote.superseded")),
        anew=True, exchanges=False,
    ),
    Way("slot", _land_day, _run_slot, _between(*_TO_THE_END, without=("adopt", *_FIRST))),
    Way("slot again", _first_day, _rerun, _between(*_TO_THE_END, without=("adopt", "promote.gap")), anew=True),
    Way("adopted", _day_with_a_folder, _run_slot, _between(*_TO_THE_END, without=("promote.gap",))),
    Way("hop", _commit_upstream, _hop, _between(*_TO_THE_END, without=("adopt", *_FIRST))),
    Way(
        "hop again", _replace_upstream, _replace_hop, _between(*_TO_THE_END, without=("adopt", "promote.gap")),
        anew=True,
    ),
    Way("quarantine", _land_sifted, _sift, _between(*_TO_THE_END, without=("adopt", *_FIRST))),
    Way(
        "quarantine again", _first_sifted, _replace_sifted,
        _between(*_TO_THE_END, without=("adopt", "promote.gap")), anew=True,
    ),
    Way(
        "refused", _first_two, _refused,
        (*_between("begin.before", "audit.after", without=("adopt",)), *_between("abort.before", "abort.end")),
        decisions=0,
    ),
    Way(
        "recovery", _decide, _recover,
        ("recover.before", *_between(*_PROMOTED, without=("promote.gap",))), decisions=0, decided=True,
    ),
    Way("sweep", _supersede, _sweep, _between("sweep.before", "sweep.clean"), decisions=0),
    Way(
        "sweep with tombstones", _supersede, _sweep_with_tombstones, _between("sweep.before", "sweep.clean"),
        decisions=0, exchanges=False,
    ),
]  # fmt: skip
