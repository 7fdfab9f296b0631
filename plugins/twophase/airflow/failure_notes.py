"""What a task leaves in the record when it does not come to its end: why, for whoever ends the revision."""

from __future__ import annotations

import logging
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Self

from twophase.airflow import task_context
from twophase.core.errors import Fenced, TwophaseError, in_one_line

if TYPE_CHECKING:
    from types import TracebackType

    from airflow.sdk import Context

    from twophase.core.checkpoint import Revision
    from twophase.core.coordinator import Coordinator

log = logging.getLogger("twophase")

#: Seconds that a task which is being stopped may take to say so: Airflow kills it after five.
PATIENCE = 3


class Failing:
    """Keeps why a task failed, while it works on one revision."""

    def __init__(self, protocol: Coordinator, revision: Revision, context: Context) -> None:
        """Look after a task's work on a revision; set `revision` anew when another attempt is opened."""
        self.protocol = protocol
        self.revision = revision
        self.context = context
        self._stopped = False

    def __enter__(self) -> Self:
        """Begin to look."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Keep what the task fails with; one that was fenced touches nothing (R15)."""
        if isinstance(error, Exception) and not isinstance(error, Fenced) and not self._stopped:
            self._keep(in_one_line(error))

    def stopped(self) -> None:
        """Say that Airflow stops this task, and why as far as can be known: another thread may hold what this needs."""
        self._stopped = True
        telling = threading.Thread(target=self._keep, args=(self._why(),), daemon=True)
        telling.start()
        telling.join(PATIENCE)

    def _why(self) -> str:
        ti, run = self.context["ti"], task_context.run_of(self.context)
        timeout, began = self.context["dag"].dagrun_timeout, self.context["dag_run"].start_date
        if timeout and began and datetime.now(UTC) >= began + timeout:
            return f"run {run} timed out: it may take {timeout} (dagrun_timeout)"
        return f"task {ti.task_id} of run {run} was stopped by Airflow: it, or its run, was marked or cleared"

    def _keep(self, why: str) -> None:
        why = f"{why} (try {self.context['ti'].try_number})"
        try:
            self.protocol.fail(self.revision, why)
        except TwophaseError as error:  # what the task fails with counts for more than this
            log.warning("%s: the record could not be told why it failed: %s", self.revision.key, error)
