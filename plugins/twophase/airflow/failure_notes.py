"""Record why a task failed or was stopped, so that an abort can name the cause; stage, approve and commit use it."""

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

#: Seconds that a stopped task may take to record why: Airflow kills it after five.
PATIENCE = 3


class Failing:
    """A block of a task's work on one revision; if it fails, the record keeps why."""

    def __init__(self, coordinator: Coordinator, revision: Revision, context: Context) -> None:
        """Name the revision; set `revision` again when another attempt is opened."""
        self.coordinator = coordinator
        self.revision = revision
        self.context = context
        self._stopped = False

    def __enter__(self) -> Self:
        """Return itself, so that `revision` can be set."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Record the error that the task fails with; a fenced task touches nothing (R15)."""
        if isinstance(error, Exception) and not isinstance(error, Fenced) and not self._stopped:
            self._keep(in_one_line(error))

    def stopped(self) -> None:
        """Record that Airflow stops this task, and why as far as that is known.

        It does so in a thread with a time limit: the interrupted thread may hold a lock that this needs.
        """
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
            self.coordinator.fail(self.revision, why)
        except TwophaseError as error:  # the error that the task fails with matters more
            log.warning("%s: the record could not be told why it failed: %s", self.revision.key, error)
