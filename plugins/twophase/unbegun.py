"""Record why a run could not begin; the runner and Airflow's stage task begin inside `beginning`.

There is no revision yet that could keep the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from twophase.core.errors import Busy, Fenced, NotYet, PromotionPending, StoreUnavailable, TwophaseError, in_one_line

if TYPE_CHECKING:
    from twophase.committer.record import PostgresRecord
    from twophase.core.checkpoint import Run

log = logging.getLogger("twophase")

#: Not failures of this pipeline: another run is at work, or the record is away.
_NO_FAILURE = (Busy, Fenced, PromotionPending, StoreUnavailable)


@contextmanager
def beginning(record: PostgresRecord, pipeline: str, slot: str | None, run: Run) -> Iterator[None]:
    """Record why a run could not begin, one row per slot, until the slot begins; re-raise the error."""
    try:
        yield
    except _NO_FAILURE:
        raise
    except NotYet as missing:
        _keep(record, pipeline, slot, run, missing, failed=False)
        raise
    except Exception as error:
        _keep(record, pipeline, slot, run, error, failed=True)
        raise


def _keep(  # noqa: PLR0913 - what is kept
    record: PostgresRecord, pipeline: str, slot: str | None, run: Run, error: Exception, *, failed: bool
) -> None:
    why = in_one_line(error) if failed else f"waiting for input: {' '.join(str(error).split())}"
    try:
        with record.transaction() as tx:
            tx.not_begun(pipeline, slot, run, why, failed=failed)
    except TwophaseError as untold:  # the caller raises the first error, which matters more
        log.warning("%s: the record could not be told why it did not begin: %s", pipeline, untold)
