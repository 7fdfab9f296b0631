"""Backfill committed checkpoints by number, or intervals by date, and refresh what was made from them.

`twophase backfill` calls it. Each checkpoint gets a new revision in a lane of its own, so regular runs go on meanwhile.
The record says what is done: a backfill that was killed goes on where it stopped when the same selection is asked for
again.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from twophase.attempt import Stager
from twophase.core.checkpoint import Json, Revision, Run
from twophase.core.errors import ConfigError, TwophaseError
from twophase.core.lineage import Lineage
from twophase.core.slots import Slot, between, duration, length_of, moment
from twophase.runner import Runner
from twophase.wiring import coordinator_of, load

if TYPE_CHECKING:
    from concurrent.futures import Future

    from twophase.committer.record import PostgresRecord, PostgresTransaction
    from twophase.pipeline import Pipeline

#: More than this in parallel gain nothing: they would wait for connections to the record.
MOST_PARALLEL = 16

#: The end of a range that goes through the latest checkpoint.
LATEST = 1 << 62


@dataclass(frozen=True)
class Selection:
    """Which checkpoints of a pipeline: a range of numbers, the intervals in a range of time, or the stale ones."""

    checkpoints: tuple[int, int] | None = None
    start: str | None = None
    end: str | None = None
    every: str | None = None
    stale: bool = False

    def config(self) -> Json:
        """Return what the record keeps; an unended backfill with the same value is continued."""
        if self.stale:
            return {"stale": True}
        if self.checkpoints:
            return {"checkpoints": list(self.checkpoints)}
        return {"from": self.start, "to": self.end, "every": self.every}


def ranges(text: str) -> list[tuple[int, int]]:
    """Parse numbers of checkpoints: `17`, `17..20`, `17..20,25`, `17..latest`; both ends of a range are included."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\.\.(\d+|latest))?", part.strip())
        first = int(match[1]) if match else 0
        last = first if not match or match[2] is None else LATEST if match[2] == "latest" else int(match[2])
        if first < 1 or last < first:
            expected = "a number or a range such as 17..20 or 17..latest"
            msg = f"checkpoints {text!r}: expected {expected}, found {part.strip()!r}"
            raise ConfigError(msg)
        found.append((first, last))
    return found


class Item(NamedTuple):
    """One checkpoint or slot to run again."""

    pipeline: str
    checkpoint_id: int | None
    slot: str | None

    def __str__(self) -> str:
        """Read as `orders/17`, or the slot when there is no checkpoint for it yet."""
        return f"{self.pipeline}/{self.checkpoint_id}" if self.checkpoint_id else f"{self.pipeline} {self.slot}"


class Done(NamedTuple):
    """How one item ended."""

    item: Item
    revision: Revision | None
    #: Why it failed; None: it did not.
    failed: str | None = None


class Backfill:
    """One backfill: its items, and how they are run."""

    def __init__(  # noqa: PLR0913 - what a person asks for
        self,
        record: PostgresRecord,
        pipeline: str,
        selection: Selection,
        stager: Callable[[Pipeline], Stager],
        *,
        why: str | None = None,
        anew: bool = False,
    ) -> None:
        """Start it, or go on with an unended one of the same selection; with `anew` end that one first."""
        from twophase.committer import backfills

        self.record = record
        self.pipeline = load(record, pipeline)
        self.selection = self._ended(selection)
        self._stager = stager
        self._runners: dict[str, Runner] = {}
        self.items = self._select()
        replays = self.pipeline.state is not None and self.selection.checkpoints is not None
        if replays:
            coordinator_of(record, self.pipeline).recover(decided_only=True)
        with record.transaction() as tx:
            chosen = self.selection.config()
            if anew:
                backfills.give_up(tx.connection, pipeline, chosen)
            if replays:
                tx.lock(pipeline)
                self._check_replay(tx)
                backfills.take_lane(tx.connection, pipeline, chosen)
            self.started = backfills.start(tx.connection, pipeline, chosen, record.who, why)
        self._me = Run(None, f"{self.started.id}.{secrets.token_hex(4)}")

    def _ended(self, selection: Selection) -> Selection:
        """Return a selection whose end is a number: `latest` is the last decided checkpoint."""
        from twophase.committer import backfills

        if selection.checkpoints is None or selection.checkpoints[1] != LATEST:
            return selection
        with self.record.engine.connect() as connection:
            last = backfills.latest(connection, self.pipeline.name)
        first = selection.checkpoints[0]
        return replace(selection, checkpoints=(first, max(first, last)))

    def _check_replay(self, tx: PostgresTransaction) -> None:
        """Refuse, before anything is recorded, a replay that stops in the middle or has no state to start from."""
        from twophase.committer import backfills

        name, (first, last) = self.pipeline.name, self.selection.checkpoints or (0, 0)
        if last < (latest := backfills.latest(tx.connection, name)):
            msg = (
                f"pipeline {name!r}: checkpoints after {last} were computed from its state, so a replay has to go on"
                f" through the latest one, {latest}: `twophase backfill {name} --checkpoints {first}..latest`"
            )
            raise ConfigError(msg)
        lineage = Lineage(name)
        lineage.check_idle(tx, f"pipeline {name!r}")
        lineage.check_kept(tx, first)

    def _select(self) -> list[Item]:
        from twophase.committer import backfills

        name = self.pipeline.name
        if self.selection.stale:
            return self._stale([name])
        if self.selection.checkpoints:
            first, last = self.selection.checkpoints
            with self.record.engine.connect() as connection:
                found = backfills.checkpoints(connection, name, first, last)
            if not found:
                msg = (
                    f"pipeline {name!r}: no checkpoint from {first} to {last}; `twophase checkpoints {name}` lists them"
                )
                raise ConfigError(msg)
            return [Item(name, checkpoint_id, slot) for checkpoint_id, slot in found]
        if not self.pipeline.slotted:
            msg = f"pipeline {name!r}: it has no intervals; say which checkpoints: --checkpoints 17..20"
            raise ConfigError(msg)
        return [Item(name, None, slot.text) for slot in self._slots()]

    def _slots(self) -> Iterable[Slot]:
        zone = self.pipeline.zone
        first, last = (
            moment(str(found), what, zone)
            for found, what in ((self.selection.start, "from"), (self.selection.end, "to"))
        )
        if first > last:
            msg = f"from {self.selection.start} to {self.selection.end}: expected the first one first"
            raise ConfigError(msg)
        if self.selection.every:
            return between(first, last, duration(self.selection.every, "every"))
        from twophase.committer import backfills

        with self.record.engine.connect() as connection:
            text = backfills.last_slot(connection, self.pipeline.name)
        known = length_of(Slot.parse(text, zone)) if text else None
        return between(first, last, known or duration("1d", "every"))

    def run(self, *, parallel: int = 1) -> Iterator[Done]:
        """Run the items that are not done yet, `parallel` at a time; yield each as it ends.

        A failure does not stop the others. But if a sink can replace only the latest checkpoint, they run in their
        order, one by one, and a failure stops the rest.
        """
        if self.selection.stale:
            yield from self._refresh(lambda: [self.pipeline.name], parallel)
            return
        if self._in_order(self.pipeline.name):
            yield from self._one_by_one()
        else:
            yield from self._each(self.items, self._do, parallel)

    def _in_order(self, pipeline: str) -> bool:
        """Return True if a sink of the pipeline cannot replace a checkpoint once a later one is decided."""
        runner = self._runner(pipeline)
        return not runner.pipeline.slotted and runner.coordinator.objection(latest=False) is not None

    def _one_by_one(self) -> Iterator[Done]:
        failed: Item | None = None
        for item in self.items:
            done = Done(item, None, f"{failed} comes first, and is not done") if failed else self._do(item)
            failed = failed or (item if done.failed else None)
            yield done

    def end(self) -> None:
        """Record that all of it is done; the same selection is then a new backfill."""
        from twophase.committer import backfills, writes

        with self.record.transaction() as tx:
            backfills.end(tx.connection, self.started.id)
            writes.settle(tx.connection, self.pipeline.name)

    def downstream(self, *, parallel: int = 1) -> Iterator[Done]:
        """Run again what is stale in the pipelines that read this one, pipeline after pipeline, upstream first."""
        yield from self._refresh(self._reading, parallel)

    def _refresh(self, pipelines: Callable[[], list[str]], parallel: int) -> Iterator[Done]:
        """Run again what is stale in these pipelines, in their order, until nothing is; each failed item only once."""
        given_up: set[Item] = set()
        while True:
            items = [item for item in self._stale(pipelines()) if item not in given_up]
            if not items:
                return
            if self._in_order(items[0].pipeline):
                given_up.update(items)
                yield from self._replay(items)
                continue
            for done in self._each(items, self._do_again, parallel):
                if done.failed is not None:
                    given_up.add(done.item)
                yield done

    def _replay(self, stale: list[Item]) -> Iterator[Done]:
        """Run again every checkpoint of a pipeline from the first stale one through the latest."""
        from twophase.committer import backfills

        name = stale[0].pipeline
        with self.record.engine.connect() as connection:
            last = backfills.latest(connection, name)
        first = min(int(item.checkpoint_id or 0) for item in stale)
        replay = Backfill(self.record, name, Selection((first, last)), self._stager, why=f"after {self.started.id}")
        failed = False
        for done in replay.run():
            failed = failed or done.failed is not None
            yield done
        if not failed:
            replay.end()

    def _reading(self) -> list[str]:
        """Return the pipelines that read this one's commits, directly or not, each after those that it reads."""
        from twophase.committer import backfills

        with self.record.engine.connect() as connection:
            return _downstream(self.pipeline.name, backfills.reads(connection))

    def _stale(self, pipelines: Iterable[str]) -> list[Item]:
        """Return the stale checkpoints of the first of these pipelines that has some."""
        from twophase.committer import queries

        with self.record.engine.connect() as connection:
            rows = queries.stale(connection)
        stale: dict[str, list[Item]] = {}
        for row in rows:
            item = Item(row["pipeline"], row["checkpoint_id"], row["slot"])
            if item not in stale.setdefault(row["pipeline"], []):
                stale[row["pipeline"]].append(item)
        for name in pipelines:
            if name in stale:
                return stale[name]
        return []

    def _each(self, items: list[Item], work: Callable[[Item], Done], parallel: int) -> Iterator[Done]:
        for item in items:  # before the threads start, so that each declaration is entered in the record once
            self._runner(item.pipeline)
        with ThreadPoolExecutor(min(parallel, MOST_PARALLEL)) as pool:
            futures: list[Future[Done]] = [pool.submit(work, item) for item in items]
            try:
                for future in as_completed(futures):
                    yield future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _runner(self, pipeline: str) -> Runner:
        if pipeline not in self._runners:
            declared = load(self.record, pipeline)
            self._runners[pipeline] = Runner(declared, self._stager(declared), record=self.record, waits=False)
        return self._runners[pipeline]

    def _do(self, item: Item) -> Done:
        """Run one item, unless this backfill has done it already."""
        runner = self._runner(item.pipeline)
        try:
            if item.checkpoint_id is not None:
                return Done(item, runner.replace(item.checkpoint_id, me=self._me, backfill=self.started.id))
            return Done(
                item, runner.run(item.slot, reprocess=True, kind="backfill", me=self._me, backfill=self.started.id)
            )
        except (TwophaseError, OSError) as error:
            return Done(item, None, " ".join(str(error).split()))

    def _do_again(self, item: Item) -> Done:
        """Run one stale item again."""
        try:
            return Done(item, self._runner(item.pipeline).replace(int(item.checkpoint_id or 0), me=self._me))
        except (TwophaseError, OSError) as error:
            return Done(item, None, " ".join(str(error).split()))


def _downstream(pipeline: str, reads: dict[str, set[str]]) -> list[str]:
    """Return the pipelines that read a pipeline's commits, directly or not, each after those that it reads."""
    reached: set[str] = {pipeline}
    while more := {name for name, upstream in reads.items() if upstream & reached} - reached:
        reached |= more
    ordered: list[str] = []
    waiting = sorted(reached - {pipeline})
    while waiting:
        ready = [name for name in waiting if not (reads[name] & set(waiting)) - {name}]
        ordered += ready or waiting
        waiting = [name for name in waiting if name not in ordered]
    return ordered
