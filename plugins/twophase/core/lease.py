"""`Lease` has a revision's lease renewed, on the record's clock, while a runner or an Airflow task works on it.

It is for liveness only. Losing the lease does not stop a process; an old epoch does. One thread renews all leases of a
process, so a checkpoint starts none.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from twophase.core.errors import Fenced, Parked, PromotionPending, StoreUnavailable
from twophase.core.isolation import alone
from twophase.core.states import State

if TYPE_CHECKING:
    from types import TracebackType

    from twophase.core.checkpoint import Revision
    from twophase.core.parts import Parts

log = logging.getLogger("twophase")

#: Renewals per lease: two may fail before it runs out.
BEATS = 3


class Lease:
    """Has a revision's lease renewed, and notices when a newer attempt has taken over."""

    def __init__(self, coordinator: Parts, revision: Revision, on_lost: Callable[[], None] = lambda: None) -> None:
        """Be renewed from `with` on; `on_lost` is called when a newer attempt has taken over."""
        self._coordinator = coordinator
        self._revision = revision
        self._on_lost = on_lost
        self._fenced: Fenced | None = None
        #: Held while it is renewed, so that nothing is renewed after the end.
        self._renewing = threading.Lock()
        self._ended = False

    @property
    def lost(self) -> bool:
        """Return True if a newer attempt owns the revision."""
        return self._fenced is not None

    @property
    def pause(self) -> float:
        """Return the seconds between two renewals."""
        return self._coordinator.lease / BEATS

    def check(self) -> None:
        """Raise Fenced if a newer attempt owns the revision."""
        if self._fenced is not None:
            raise self._fenced

    def renew(self) -> bool:
        """Renew it once; return False if it has ended or is lost."""
        with self._renewing:
            if self._ended:
                return False
            problems: list[str] = []
            with alone(f"checkpoint {self._revision.key}: its lease is not renewed", problems):
                self._renew()
        for problem in problems:  # it must not end the thread that renews the others
            log.warning("%s", problem)
        if not self.lost:
            return True
        # In a thread of its own: it may take long, and other leases must not wait for it.
        threading.Thread(target=self._on_lost, name=f"lost lease {self._revision.key}", daemon=True).start()
        return False

    def _renew(self) -> None:
        try:
            with self._coordinator.record.transaction() as tx:
                tx.renew(self._revision.key, epoch=self._revision.epoch, lease=self._coordinator.lease)
        except StoreUnavailable:
            pass  # the next beat tries again; if none gets through, another process may take over
        except Fenced as error:
            self._fenced = error

    def __enter__(self) -> Self:
        """Have it renewed."""
        _RENEWER.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Have it renewed no more; the lease then runs out, or the next transition changes it.

        If a decided revision could not be promoted now, nobody works on it any more, and the lease is given up. So a
        person may restage it at once.
        """
        _RENEWER.remove(self)
        with self._renewing:
            self._ended = True
        if isinstance(error, Parked | PromotionPending):
            with suppress(Fenced, StoreUnavailable), self._coordinator.record.transaction() as tx:
                if tx.revision(self._revision.key).state is State.COMMITTING:
                    tx.renew(self._revision.key, epoch=self._revision.epoch, lease=None)


class _Renewer:
    """Renews the leases of this process, each when it is due, in one thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: dict[Lease, float] = {}
        self._thread: threading.Thread | None = None
        #: When the thread looks again by itself.
        self._looks_at = math.inf

    def add(self, lease: Lease) -> None:
        """Renew a lease from now on."""
        with self._changed:
            due = self._due[lease] = time.monotonic() + lease.pause
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="leases", daemon=True)
                self._thread.start()
            elif due < self._looks_at:
                self._changed.notify()

    def remove(self, lease: Lease) -> None:
        """Renew a lease no more; a renewal that is under way is not waited for."""
        with self._changed:
            self._due.pop(lease, None)

    def _work(self) -> None:
        while True:
            for lease in self._wait():
                goes_on = lease.renew()
                with self._changed:
                    if goes_on and lease in self._due:
                        self._due[lease] = time.monotonic() + lease.pause
                    else:
                        self._due.pop(lease, None)

    def _wait(self) -> list[Lease]:
        """Wait until some leases are due, and return them."""
        with self._changed:
            while not (found := [lease for lease, at in self._due.items() if at <= time.monotonic()]):
                self._looks_at = min(self._due.values(), default=math.inf)
                rest = self._looks_at - time.monotonic()
                self._changed.wait(None if rest == math.inf else max(rest, 0))
            return found


_RENEWER = _Renewer()


def _after_fork() -> None:
    """Begin anew in a process that was forked: the thread is the parent's, and so are its leases."""
    global _RENEWER  # noqa: PLW0603 - one per process
    _RENEWER = _Renewer()


os.register_at_fork(after_in_child=_after_fork)
