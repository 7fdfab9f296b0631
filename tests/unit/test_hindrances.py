"""What a parked revision needs is said in one place, for each thing that may stand in its way."""

from __future__ import annotations

import pytest

from twophase.core.hindrances import Hindrance, command, ways_out

LOST, REFUSED, FOREIGN, REWRITTEN = Hindrance.LOST, Hindrance.REFUSED, Hindrance.FOREIGN, Hindrance.REWRITTEN
RECOVER = "then `twophase recover orders`"


RESTAGE = "stage again: `twophase restage orders 9"
LOST_ONLY = f"put back what is missing, {RECOVER}; or {RESTAGE} --reason …`"
REFUSED_ONLY = (
    f"alter the target of dwh so that it takes the rows, {RECOVER};"
    f" or mend the transform and {RESTAGE} --sink dwh --reason …`"
)
BOTH = (
    f"put back what is missing and alter the target of dwh so that it takes the rows, {RECOVER};"
    f" or mend the transform and {RESTAGE} --sink dwh --sink lake --reason …`"
)
RESTORED = (
    "restore the table of dwh to before another writer rewrote what is replaced, with the rows that came later,"
    f" {RECOVER}"
)
NOT_OURS = (
    f"move away what dwh holds in its place (was the record restored? `twophase reconcile orders` shows it), {RECOVER}"
)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        pytest.param({"lake": LOST}, LOST_ONLY, id="lost"),
        pytest.param({"dwh": REFUSED}, REFUSED_ONLY, id="refused"),
        pytest.param({"dwh": FOREIGN}, NOT_OURS, id="foreign"),
        pytest.param({"dwh": REWRITTEN}, RESTORED, id="rewritten"),
        pytest.param({"dwh": REFUSED, "lake": LOST}, BOTH, id="one of each"),
        pytest.param({}, LOST_ONLY, id="parked before kinds were kept"),
    ],
)
def test_the_ways_out_fit_what_stands_in_the_way(found: dict[str, Hindrance], said: str) -> None:
    assert ways_out("orders", 9, found) == said


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"lake": LOST}, "twophase restage orders 9 --reason …"),
        ({"dwh": REFUSED}, "twophase restage orders 9 --sink dwh --reason …"),
        ({"dwh": FOREIGN, "lake": LOST}, "twophase reconcile orders"),
        ({"dwh": REWRITTEN}, "twophase verify orders"),
    ],
)
def test_one_command_stands_for_them_in_a_listing(found: dict[str, Hindrance], said: str) -> None:
    assert command("orders", 9, found) == said
