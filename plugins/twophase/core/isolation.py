"""Let a part that fails hold up only itself: a sink, a source, whatever it raises."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from twophase.core.errors import Fenced, StoreUnavailable, TwophaseError, in_one_line
from twophase.core.failpoints import FailpointError
from twophase.core.secret_texts import without_secrets

log = logging.getLogger("twophase")

#: What is not the part's own trouble: this process has to stop, the record is away, or a test says so.
NOT_ITS_OWN = (Fenced, StoreUnavailable, FailpointError)


def one_line(error: BaseException) -> str:
    """Say what went wrong in one line: of an error that is not ours, which kind it is."""
    if isinstance(error, TwophaseError):
        return " ".join(without_secrets(str(error)).split())
    return in_one_line(error)


@contextmanager
def alone(which: str, problems: list[str]) -> Iterator[None]:
    """Keep what one part raises from the others: it becomes one more problem, in one line."""
    try:
        yield
    except NOT_ITS_OWN:
        raise
    except Exception as error:
        log.debug("%s failed", which, exc_info=True)
        problems.append(f"{which}: {one_line(error)}")
