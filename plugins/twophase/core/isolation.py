"""`alone`: run one sink or source so that its failure does not stop the others; the coordinator and upkeep use it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from twophase.core.errors import Fenced, StoreUnavailable, TwophaseError, in_one_line
from twophase.core.failpoints import FailpointError
from twophase.core.secret_texts import without_secrets

log = logging.getLogger("twophase")

#: Errors that are not the part's own fault: this process is fenced, the record is away, or a failpoint raised.
NOT_ITS_OWN = (Fenced, StoreUnavailable, FailpointError)


def one_line(error: BaseException) -> str:
    """Return an error in one line, without secrets; if it is not one of Twophase's, with its type."""
    if isinstance(error, TwophaseError):
        return " ".join(without_secrets(str(error)).split())
    return in_one_line(error)


@contextmanager
def alone(which: str, problems: list[str]) -> Iterator[None]:
    """Catch what one part raises, and append it to `problems` in one line; let `NOT_ITS_OWN` through."""
    try:
        yield
    except NOT_ITS_OWN:
        raise
    except Exception as error:
        log.debug("%s failed", which, exc_info=True)
        problems.append(f"{which}: {one_line(error)}")
