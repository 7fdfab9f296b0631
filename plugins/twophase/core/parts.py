"""`Parts`: what a coordinator is made of, and how it reaches the record; `core.finish` and others build on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from twophase.core.checkpoint import Run
from twophase.core.errors import (
    StoreUnavailable,
)
from twophase.core.ports import Record, Sink, Source, Transaction
from twophase.core.steps import Steps

T = TypeVar("T")

#: Seconds to wait before each retry when the committer database went away: about half a minute in all.
PATIENCE = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 10.0)


def script_run_ended(run: Run | None) -> str | bool | None:
    """Return True if a run is over: a script's run ends with its lease. None for an Airflow run: only Airflow knows."""
    return True if run is None or run.dag_id is None else None


class Parts:
    """A record, a pipeline's sources and sinks, and the steps over them; holds no state of its own between calls."""

    def __init__(  # noqa: PLR0913 - the parts of the protocol, by name
        self,
        record: Record,
        pipeline: str,
        *,
        sources: Mapping[str, Source],
        sinks: Mapping[str, Sink],
        audits: Sequence[str] = (),
        approvals: Sequence[str] = (),
        quarantines: Collection[str] = (),
        states: Collection[str] = (),
        lease: float = 30.0,
        max_pending: int = 1,
        run_ended: Callable[[Run | None], str | bool | None] = script_run_ended,
        patience: Sequence[float] = PATIENCE,
    ) -> None:
        """Bring together a record, a pipeline's sources and sinks, and the names of its audits and approvals.

        `quarantines` names the sinks that bad records go to, and `states` those that keep the pipeline's state; their
        rows do not count as output.
        """
        self.record = record
        self.pipeline = pipeline
        self.sources = sources
        self.sinks = sinks
        self.audits = audits
        self.approvals = approvals
        self.quarantines = quarantines
        self.states = states
        self.lease = lease
        self.max_pending = max_pending
        self.run_ended = run_ended
        self.patience = patience

    @property
    def steps(self) -> Steps:
        """Return the steps of the pipeline."""
        return Steps(
            self.pipeline,
            self.sources,
            self.sinks,
            self.audits,
            self.approvals,
            self.quarantines,
            self.lease,
            self.max_pending,
            self.states,
        )

    def objection(self, *, latest: bool) -> str | None:
        """Say which sink cannot replace a committed checkpoint, and why; None: all can."""
        for name, sink in self.sinks.items():
            if why := sink.objection(latest=latest):
                return f"sink {name!r}: {why}"
        return None

    def transact(self, step: Callable[[Transaction], T], *, reads: bool = False) -> T:
        """Run a step in one transaction; when the database goes away, wait and run it again: steps may be repeated."""
        for pause in (*self.patience, None):
            try:
                with self.record.transaction(reads=reads) as tx:
                    return step(tx)
            except StoreUnavailable:
                if pause is None:
                    raise
                threading.Event().wait(pause)
        raise AssertionError  # the last pause is None: it returned or raised
