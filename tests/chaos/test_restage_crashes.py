"""A restage that dies anywhere, and a promoter that slept through one: into sinks of each kind, and into two at once.

What was decided is in each sink once, whole: as it was voted for first, or as it was staged again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.test_sink_crashes import expect_in_order, recover
from support.crashes import replacements, several_sinks
from support.crashes.replacement_promises import wait_for_lease
from support.crashes.sink_matrix import parameters
from support.faults.processes import Child, call, start, stopped_at_end
from support.pipelines.factories import Row, counted, land_words
from twophase.committer.record import PostgresRecord

pytestmark = pytest.mark.chaos

#: Between the last look at what is visible and the step that replaces it: no failpoint is there, the test stops it.
EXCHANGE = "exchange"
#: Where a promoter of what was voted for first is stopped: before it has anything, with it in hand, at work on it.
STOPS = {
    "files": ("promote.before", "promote.receipt", "promote.taken", "promote.checked"),
    "postgres": ("promote.before", "promote.marked", "promote.applied"),
    "attached": ("promote.before", "promote.marked", "promote.applied"),
    "upserted": ("promote.before", "promote.marked"),
    "delta": ("promote.before", "promote.receipt", "promote.checked"),
    "iceberg": ("promote.before", "promote.receipt", "promote.checked"),
    "sent": ("promote.before", "promote.receipt", "send.before", "send.row"),
}
#: What `make test` meets of them.
FEW_STOPS = {"attached": "promote.before", "sent": "promote.before"}
#: The same where a committed revision stands: before the two change places, and after.
STOPS_REPLACING = {
    "files": ("promote.taken", "promote.checked", EXCHANGE, "promote.visible", "promote.superseded"),
    "postgres": ("promote.before", "promote.marked"),
    "delta": ("promote.checked",),
    "iceberg": ("promote.checked",),
}
FEW_STOPS_REPLACING = {"files": EXCHANGE}
#: Where a promoter is stopped that wakes when the restage has voted and has not promoted; what it has is destroyed.
STOPS_OF_THE_VOTED = {
    "files": ("promote.before", "promote.taken", "promote.checked"),
    "postgres": ("promote.before",),
    "upserted": ("promote.before",),
    "sent": ("promote.before",),
    "attached": ("promote.before",),
    "delta": ("promote.before", "promote.checked"),
    "iceberg": ("promote.before", "promote.checked"),
}
FEW_STOPS_OF_THE_VOTED = {"files": "promote.checked", "postgres": "promote.before"}
SHOWN = frozenset({"promote.visible", "promote.superseded"})
#: Their promotion takes the staged output over as it is, so that the first rows may still come in.
ADOPTING = frozenset({"attached", "delta", "iceberg"})


@pytest.fixture(autouse=True)
def _target(home: Path, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOPHASE_LEASE", "0.5")
    monkeypatch.setenv(several_sinks.TARGET, dsn.replace("postgresql+psycopg2", "postgres"))
    monkeypatch.setenv("AIRFLOW_CONN_DWH", dsn.replace("postgresql+psycopg2", "postgres"))


class Decided:
    """A committed checkpoint, and a second one, or its replacement, that is decided and promoted nowhere."""

    def __init__(self, kinds: str, record: PostgresRecord, home: Path, *, again: bool = False) -> None:
        self.kinds, self.record, self.home = kinds, record, home
        self.first, log = land_words(files=2), home / "decided.log"
        assert call(several_sinks.run, kinds, log=home / "first.log").wait() == 0
        second = land_words(files=2, start=2)
        if again:
            assert call(several_sinks.run, kinds, log=home / "second.log").wait() == 0
            assert call(several_sinks.replace, kinds, 2, log=log, failpoints="commit.after=kill").wait() == -9
        else:
            assert call(several_sinks.run, kinds, log=log, failpoints="commit.after=kill").wait() == -9
        wait_for_lease(record)
        #: What a sink may show of the second one: nothing of what is decided, that, or what is staged again.
        self.possible: dict[str, list[Row]] = {
            "nothing": second if again else [],
            "old": several_sinks.revised(second, 2) if again else second,
            "mended": several_sinks.mended(second),
        }

    def shown(self) -> dict[str, str]:
        """Return what each sink shows of the second one, whole."""
        return {kind: self._shown(kind) for kind in several_sinks.split(self.kinds)}

    def _shown(self, kind: str) -> str:
        there = counted(several_sinks.held(kind))
        for name, rows in self.possible.items():
            if there == counted(several_sinks.expected(kind, [*self.first, *rows])):
                return name
        return f"neither: {sorted(there)}"

    def end(self) -> None:
        """Recover; then stage again what is lost, if anything; then all is there, and in order."""
        wait_for_lease(self.record)
        recover(self.kinds, self.home)
        again = call(several_sinks.restage, self.kinds, log=self.home / "again.log")
        assert again.wait() == 0, again.said
        assert set(self.shown().values()) <= {"old", "mended"}
        expect_in_order(self.kinds, self.record, self.home)


@pytest.mark.parametrize(("kinds", "failpoint", "action"), list(parameters("restage")))
def test_a_restage_that_dies_anywhere_leaves_the_old_rows_or_the_new_whole_and_once(
    kinds: str, failpoint: str, action: str, record: PostgresRecord, home: Path
) -> None:
    one = Decided(kinds, record, home)

    crashed = call(several_sinks.restage, kinds, log=home / "crash.log", failpoints=f"{failpoint}={action}")

    assert crashed.hit(failpoint), f"{failpoint} was not reached:\n{crashed.said}"
    assert crashed.wait() == (-9 if action == "kill" else 1), crashed.said
    if "sent" not in kinds:  # which becomes visible subtask by subtask
        assert set(one.shown().values()) <= {"nothing", "mended"}
    one.end()


def zombie_of(kind: str, at: str, log: Path, then: str = "") -> Child:
    """Start a promoter of what was voted for first, which stops at a point."""
    recovery: tuple[object, ...] = (several_sinks.recover, kind)
    if at == EXCHANGE:
        recovery = (replacements.stopping_before_the_exchange, *recovery)
    told = ",".join(filter(None, ["" if at == EXCHANGE else f"{at}=stop", then]))
    zombie = start(several_sinks.impatiently, *recovery, log=log, failpoints=told)
    assert zombie.until_stopped(), f"{at} was not reached:\n{zombie.said}"
    return zombie


def stops() -> Iterator[object]:
    for again, found, few in ((False, STOPS, FEW_STOPS), (True, STOPS_REPLACING, FEW_STOPS_REPLACING)):
        for kind, names in found.items():
            for point in names:
                yield pytest.param(kind, point, again, marks=() if point == few.get(kind) else pytest.mark.slow)


@pytest.mark.parametrize(("kind", "failpoint", "again"), list(stops()))
def test_a_promoter_that_wakes_after_a_restage_brings_nothing_in_beside_it(
    kind: str, failpoint: str, again: bool, record: PostgresRecord, home: Path
) -> None:
    """R21 and R10: a sink that copies shows the new rows once there is a vote for them; one that adopts, either."""
    one = Decided(kind, record, home, again=again)
    # One that gets further than it should dies there: nobody takes back what it has shown.
    then = "" if failpoint in SHOWN else "promote.visible=kill"
    zombie = zombie_of(kind, failpoint, home / "zombie.log", then)
    with stopped_at_end(zombie):
        restaged = call(several_sinks.impatiently, several_sinks.restage, kind, log=home / "restage.log")
        before = one.shown()[kind]
        voted = is_voted_for(record, kind, attempt=2)

        zombie.wake()
        zombie.wait()

    assert (before == "mended") == (restaged.wait() == 0), restaged.said
    assert before == "nothing" or one.shown()[kind] == before
    one.end()
    assert one.shown()[kind] == "mended" or not voted or kind in ADOPTING


def stops_of_the_voted() -> Iterator[object]:
    for kind, names in STOPS_OF_THE_VOTED.items():
        for point in names:
            few = point == FEW_STOPS_OF_THE_VOTED.get(kind)
            yield pytest.param(kind, point, marks=() if few else pytest.mark.slow)


@pytest.mark.parametrize(("kind", "failpoint"), list(stops_of_the_voted()))
def test_once_a_restage_has_voted_nobody_can_bring_the_old_rows_in(
    kind: str, failpoint: str, record: PostgresRecord, home: Path
) -> None:
    """R21: the vote is for the new rows, so the old ones are destroyed before it; where they are adopted, R10."""
    one = Decided(kind, record, home)
    with stopped_at_end(zombie := zombie_of(kind, failpoint, home / "zombie.log")):
        log, dies = home / "restage.log", "vote.after=kill"
        restaged = call(several_sinks.impatiently, several_sinks.restage, kind, log=log, failpoints=dies)
        assert restaged.wait() == -9, restaged.said
        assert is_voted_for(record, kind, attempt=2)

        zombie.wake()
        zombie.wait()

    assert one.shown()[kind] in {"nothing", "mended", *(["old"] if kind in ADOPTING else [])}
    one.end()
    assert one.shown()[kind] == "mended" or kind in ADOPTING


@pytest.mark.parametrize(
    "kind", ["files", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("postgres", "attached", "delta"))]
)
def test_a_promotion_while_a_restage_is_staged_counts_and_the_restage_ends_well(
    kind: str, record: PostgresRecord, home: Path
) -> None:
    """R10: the marker names the attempt before, whose digest the restage remembers; the record keeps what is shown."""
    one = Decided(kind, record, home)
    with stopped_at_end(zombie := zombie_of(kind, "promote.before", home / "zombie.log", "promote.inside=kill")):
        restaging = start(several_sinks.restage, kind, log=home / "restage.log", failpoints="vote.checked=stop")
        with stopped_at_end(restaging):
            assert restaging.until_stopped(), restaging.said
            zombie.wake()
            zombie.wait()
            assert one.shown()[kind] == "old"

            restaging.wake()
            assert restaging.wait() == 0, restaging.said

    assert one.shown()[kind] == "old"
    one.end()


def is_voted_for(record: PostgresRecord, sink: str, *, attempt: int) -> bool:
    """Say whether an attempt of the second checkpoint was voted for."""
    with record.transaction() as tx:
        mine = next(p for p in tx.participants(tx.newest_of("words", 2).key) if p.name == sink)
    return bool(mine.vote) and mine.attempt == attempt
