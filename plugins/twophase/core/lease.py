"""`Lease` renews a revision's lease, on the record's clock, while a runner or an Airflow task works on it.

It is for liveness only. Losing the lease does not stop a process; an old epoch does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from twophase.core.errors import Fenced, StoreUnavailable

if TYPE_CHECKING:
    from types import TracebackType

    from twophase.core.checkpoint import Revision
    from twophase.core.coordinator import Coordinator

#: Renewals per lease: two may fail before it runs out.
BEATS = 3


class Lease:
    """Renews a revision's lease in a thread, and notices when a newer attempt has taken over."""

    def __init__(
        self, coordinator: Coordinator, revision: Revision, on_lost: Callable[[], None] = lambda: None
    ) -> None:
        """Start renewing when entered; `on_lost` is called when a newer attempt has taken over."""
        self._coordinator = coordinator
        self._revision = revision
        self._stop = threading.Event()
        self._on_lost = on_lost
        self._fenced: Fenced | None = None
        self._thread = threading.Thread(target=self._beat, name=f"lease {revision.key}", daemon=True)

    @property
    def lost(self) -> bool:
        """Return True if a newer attempt owns the revision."""
        return self._fenced is not None

    def check(self) -> None:
        """Raise Fenced if a newer attempt owns the revision."""
        if self._fenced is not None:
            raise self._fenced

    def _beat(self) -> None:
        seconds = self._coordinator.lease
        while not self._stop.wait(seconds / BEATS):
            try:
                with self._coordinator.record.transaction() as tx:
                    tx.renew(self._revision.key, epoch=self._revision.epoch, lease=seconds)
            except StoreUnavailable:
                continue  # the next beat tries again; if none gets through, another process may take over
            except Fenced as error:
                self._fenced = error
                self._on_lost()
                return

    def __enter__(self) -> Self:
        """Start renewing."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop renewing; the lease then runs out, or the next transition changes it."""
        self._stop.set()
        self._thread.join()
