"""The matrix of crashes on the way into sinks: kinds of sinks, failpoints, ways to die, and what a process is about."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from itertools import product

import pytest

from support.crashes import scenarios, several_sinks
from support.crashes.combinations import Case, covering, marks
from twophase.core.failpoints import FAILPOINTS

#: Nobody comes by these on the way of a checkpoint: nothing is replaced, audited or settled.
NOT_HERE = scenarios.OFFSETS | scenarios.STATES | frozenset({
    *("adopt.before", "adopt.after", "audit.before", "audit.after", "promote.gap", "promote.superseded"),
    *("settle.before", "settle.moved", "settle.after", "sweep.inside", "sweep.swept", "sweep.forgotten"),
    *("table.created", "table.widened", "reconcile.before", "reconcile.inside", "reconcile.after"),
    *("restage.opened", "restage.discarded", "hand_over.before", "hand_over.inside"),
})  # fmt: skip
STAGED_AS_FILES = frozenset({"stage.manifest", "stage.marked"})
CHECKED = frozenset({"promote.checked", "promote.visible"})
TAKEN = frozenset({"promote.taken"})
RECEIPTED = frozenset({"promote.receipt"})
POSTGRES_ONLY = frozenset({"promote.marked", "promote.applied"})
LAKES = ("delta", "delta_upserted", "iceberg", "delta_s3", "iceberg_s3")
ALL = "+".join(several_sinks.LOCAL)
TWO = ("files+postgres", "postgres+delta", "files+iceberg", "files+sent", "kafka+files", "postgres+kafka")
#: A table of files alone has a matrix of its own; what is staged again for one is here.
KINDS = {
    "checkpoint": (*(kind for kind in several_sinks.DECLARED if kind != "files"), *TWO, ALL),
    # What was sent cannot be taken back, nor what was merged.
    "replacement": (
        *(kind for kind in several_sinks.DECLARED if kind not in {"files", "sent", "kafka", "delta_upserted"}),
        *(kinds for kinds in TWO if {"sent", "kafka"}.isdisjoint(several_sinks.split(kinds))),
        "+".join(kind for kind in several_sinks.LOCAL if kind != "sent"),
        *(f"{kinds}{several_sinks.BY_SLOTS}" for kinds in ("replaced", "upserted", "files+replaced")),
    ),
    "restage": (
        *(
            "files",
            "postgres",
            "attached",
            "upserted",
            "retracted",
            "constrained",
            "delta",
            "delta_upserted",
            "iceberg",
            "sent",
        ),
        *("files+postgres", "postgres+delta", "files+sent"),
    ),
}
#: Where a process has to go another way than that of its checkpoint.
ASIDE = frozenset({"abort", "recover", "sweep"})
#: The parts of a restage.
OF_A_RESTAGE = frozenset({"submit", "stage", "restage", "vote", "promote", "send", "finish"})
#: What `make test` meets of each, killed: that in which they differ.
FEW: dict[str, dict[str, tuple[str, ...]]] = {
    "checkpoint": {
        "postgres": ("stage.durable", "promote.marked", "promote.applied"),
        "attached": ("promote.applied",),
        "constrained": ("vote.tried", "promote.applied"),
        "delta": ("promote.checked", "promote.visible"),
        "delta_upserted": ("promote.visible",),
        "iceberg": ("promote.visible",),
        "kafka": ("kafka.marked", "kafka.committed"),
        "kafka+files": ("kafka.sent",),
        "sent": ("send.row", "send.sent"),
        "delta_s3": ("promote.visible",),
        "files+postgres": ("commit.after", "promote.applied"),
        "postgres+delta": ("promote.visible",),
        "files+sent": ("send.committed",),
        ALL: ("promote.after",),
    },
    "replacement": {"postgres": ("promote.applied",), "delta": ("promote.visible",)},
    # Of a table of files there is more elsewhere.
    "restage": dict.fromkeys(("upserted", "delta", "sent"), ("restage.discarded",)),
}
#: Where a sink is at work: what it does there is not the same in a checkpoint, a replacement and a restage.
OF_SINKS = (
    *("vote.tried", "restage.discarded", "promote.receipt", "promote.taken", "promote.checked", "promote.marked"),
    *("promote.applied", "promote.visible", "promote.durable", *scenarios.SENDING, *scenarios.KAFKA),
)


def points(kinds: str) -> list[str]:
    """Return what a checkpoint of a pipeline into these comes by."""
    parts = set(several_sinks.split(kinds))
    met = {
        STAGED_AS_FILES: parts & {"files", "sent", "kafka", *LAKES},
        CHECKED: parts & {"files", *LAKES},
        TAKEN: parts & {"files"},
        RECEIPTED: parts & {"files", "sent", *LAKES},
        POSTGRES_ONLY: parts & set(several_sinks.TABLES),
        frozenset({"vote.tried"}): parts & several_sinks.TRIED,
        frozenset({"promote.durable"}): parts - {"sent", "kafka"},
        scenarios.SENDING: parts & {"sent"},
        scenarios.KAFKA: parts & {"kafka"},
    }
    left_out = NOT_HERE.union(*(names for names, by in met.items() if not by))
    return [name for name in FAILPOINTS if name not in left_out]


def points_about(about: str, kinds: str) -> list[str]:
    """Return what a process comes by that is about a checkpoint, a replacement or a restage."""
    if about == "checkpoint":
        return points(kinds)
    if about == "replacement":
        return [name for name in points(kinds) if name.partition(".")[0] not in ASIDE]
    found = (*points(kinds), "restage.opened", "restage.discarded")
    return [name for name in found if name.partition(".")[0] in OF_A_RESTAGE]


def combined(case: Case) -> Iterator[Hashable]:
    """Return what must occur of a case, with whatever else.

    Every failpoint with every way to die, whatever the process is about; every kind of sinks with each of the three.
    Every failpoint with every sink; where the sink is at work, in each of the three. Several sinks at once are new only
    where one of them is at work while another is not: elsewhere a failpoint of each part of the protocol is enough.
    """
    about, kinds, point, action = case
    yield from ((about, point, action), (about, kinds), (kinds, action))
    if point in OF_SINKS:
        yield about, kinds, point
    yield kinds, point.partition(".")[0] if "+" in kinds and point not in OF_SINKS else point


def _cases() -> Iterator[Case]:
    for about, every in KINDS.items():
        for kinds in every:
            for point, action in product(points_about(about, kinds), ("kill", "raise")):
                yield about, kinds, point, action


CASES = list(_cases())
USUAL = [case for case in CASES if case[3] == "kill" and case[2] in FEW[case[0]].get(case[1], ())]
CHOSEN = covering(CASES, combined, USUAL)


def parameters(wanted: str) -> Iterable[object]:
    """Return kinds, failpoint and way to die of each case that is about something."""
    for about, *rest in CASES:
        if about == wanted:
            yield pytest.param(*rest, marks=marks((about, *rest), CHOSEN, USUAL))
