"""Restage a decided revision: one more attempt for the sinks that cannot promote; the coordinator calls this.

The decision stands, so the state stays COMMITTING (R8, R9). The old vote counts until the new attempt votes, so a
restage that fails or is killed changes nothing. Before the new vote, everything that earlier attempts staged is
destroyed, wherever a promoter may have it, and then the marker is read (R21). After that nobody can add old rows to the
new ones. A sink that takes staged files in as they lie cannot do that: there the old rows may still win, and then the
record names them.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from twophase.core.checkpoint import Json, Key, Participant, Revision
from twophase.core.errors import ConfigError, IllegalTransition, ManifestMismatch
from twophase.core.failpoints import hit
from twophase.core.hindrances import Hindrance, ways_out
from twophase.core.ports import VISIBLE, Outcome, Promotion
from twophase.core.states import State

if TYPE_CHECKING:
    from twophase.core.finish import Finish
    from twophase.core.ports import Transaction


@dataclass(frozen=True)
class Restaging:
    """One restage of a decided revision."""

    coordinator: Finish
    key: Key

    # --- open --------------------------------------------------------------------------------------------------------

    def open(self, why: str, named: Collection[str] = ()) -> Revision:
        """Open an attempt for the sinks that are named, or for those that lost their staged output.

        Only these sinks are prepared; another one may be down.
        """
        token = secrets.token_hex(4)
        decided = self.coordinator.transact(lambda tx: tx.revision(self.key))
        chosen = self._chosen(decided, named)
        for name in sorted(chosen):
            self.coordinator.sinks[name].prepare(decided.slot)

        def step(tx: Transaction) -> Revision:
            held = tx.hold(self.key)
            self._check_state(held)
            epoch = held.epoch + 1
            places = self.coordinator.steps.places(tx, held, epoch, token)
            again = [
                _opened_again(p, epoch, places[p.name])
                for p in tx.participants(self.key)
                if p.name in chosen and p.name not in tx.committed(self.key)
            ]
            self._check_lineage(tx, [p.name for p in again])
            if not again:
                msg = f"checkpoint {self.key}: nothing to restage: {self._instead(held)}"
                raise IllegalTransition(msg)
            tx.move(
                self.key, State.COMMITTING, epoch=held.epoch, why=f"restage: {why}", bump=True,
                lease=self.coordinator.lease,
            )  # fmt: skip
            for participant in again:
                tx.put_participant(self.key, participant)
            return tx.revision(self.key)

        opened = self.coordinator.transact(step)
        hit("restage.opened")
        return opened

    def _chosen(self, decided: Revision, named: Collection[str]) -> set[str]:
        """Return the sinks to stage again; raise ConfigError for a named sink that a restage cannot help."""
        self._check_state(decided)
        done = self.coordinator.transact(lambda tx: tx.committed(self.key))
        everybody = self.coordinator.transact(lambda tx: tx.participants(self.key))
        sinks = {p.name: p for p in everybody if p.stages}
        if unknown := sorted(set(named) - sinks.keys()):
            msg = f"checkpoint {self.key}: it has no sink {unknown[0]!r}; expected one of {', '.join(sorted(sinks))}"
            raise ConfigError(msg)
        if promoted := sorted(set(named) & done):
            msg = f"checkpoint {self.key}: sink {promoted[0]!r} has promoted it; backfill it to replace what is there"
            raise ConfigError(msg)
        found = {name: self.coordinator.find(decided, p) for name, p in sinks.items() if name not in done}
        for name in sorted(named):
            self._check_named(name, found[name])
        if named:
            return set(named)
        return {name for name, p in sinks.items() if name in found and (not p.vote or _is_lost(found[name]))}

    def _check_lineage(self, tx: Transaction, names: Collection[str]) -> None:
        """Refuse to stage a state again once a later checkpoint may have read it (S4)."""
        steps = self.coordinator.steps
        if steps.lineage and not set(names).isdisjoint(steps.states):
            steps.lineage.check_restage(tx, self.key)

    def _check_state(self, found: Revision) -> None:
        if found.state is not State.COMMITTING:
            msg = f"checkpoint {self.key}: expected committing, found {found.state.lower()}; it cannot be restaged"
            raise IllegalTransition(msg)

    def _check_named(self, name: str, found: Promotion) -> None:
        if found.outcome in VISIBLE:
            msg = (
                f"checkpoint {self.key}: sink {name!r} has promoted it, its marker is there;"
                f" `twophase recover {self.key.pipeline}` records that"
            )
            raise ConfigError(msg)
        if found.hindrance is Hindrance.FOREIGN:
            ways = ways_out(self.key.pipeline, self.key.checkpoint_id, {name: Hindrance.FOREIGN})
            msg = f"checkpoint {self.key}: sink {name!r}: {found.reason}; a restage does not help: {ways}"
            raise ConfigError(msg)

    def _instead(self, held: Revision) -> str:
        """Say what helps instead if no sink has lost its staged output."""
        if held.hindrances:
            return f"{held.parked_reason}; {ways_out(self.key.pipeline, self.key.checkpoint_id, held.hindrances)}"
        return f"no sink has lost its staged output; `twophase recover {self.key.pipeline}` promotes it"

    # --- before the vote ---------------------------------------------------------------------------------------------

    def is_superfluous(self, attempt: Revision, name: str, manifest: Json) -> bool:
        """Destroy what earlier attempts staged, then read the marker; True: one of them is promoted and counts (R21).

        Raise ManifestMismatch if the new attempt cannot be promoted either.
        """
        mine = self._participant(name)
        self.coordinator.transact(lambda tx: self._check_lineage(tx, [name]))
        if mine.attempt != attempt.epoch:
            return False  # another restage took its place; the vote will be fenced
        sink = self.coordinator.sinks[name]
        if sink.copies:
            sink.discard_earlier(mine.output(attempt), (mine.standing or mine).output(attempt))
        hit("restage.discarded")
        return self.is_promoted(attempt, mine, manifest)

    def is_promoted(self, attempt: Revision, mine: Participant, manifest: Json) -> bool:
        """Read the marker; if the sink holds an attempt of the revision, record that one and return True (R10)."""
        name = mine.name
        promotion = self.coordinator.find(attempt, replace(mine, vote=True, manifest=manifest))
        if promotion.outcome in VISIBLE:
            self.coordinator.record_promotion(self.key, replace(mine, manifest=manifest), promotion)
            return True
        if promotion.outcome is Outcome.FAILED:
            msg = f"checkpoint {self.key}: sink {name!r}: {promotion.reason}"
            raise ManifestMismatch(msg)
        return False

    def _participant(self, name: str) -> Participant:
        found = self.coordinator.transact(lambda tx: tx.participants(self.key))
        return next(p for p in found if p.name == name)


def _is_lost(found: Promotion) -> bool:
    return found.outcome is Outcome.FAILED and found.hindrance is not Hindrance.FOREIGN


def _opened_again(before: Participant, epoch: int, place: Json) -> Participant:
    """Return a sink's new attempt, with the old vote, which counts until there is a new one.

    The digest of what was voted for is kept for ever, in case that output turns up in the sink (R10).
    """
    voted = before.standing
    earlier = before.earlier if voted is None else (*voted.earlier, voted.manifest["digest"])
    return Participant(before.name, before.kind, epoch, handle=place, earlier=earlier, voted=voted)
