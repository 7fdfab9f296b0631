"""What the libraries of Delta and Iceberg raise, sorted by what promoters and sources should do about it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from twophase.core.hindrances import Refused
from twophase.core.secret_texts import without_secrets

_DECORATION = re.compile(r"\x1b\[\d*m|↳")


class Conflict(Exception):
    """Another writer was faster: nothing was changed, look again."""


class Trouble(Exception):
    """The table did not answer, or not well: only the marker tells what happened."""


@contextmanager
def delta_explained() -> Iterator[None]:
    """Sort what the library raises by what a promoter should do about it."""
    from deltalake.exceptions import (
        CommitFailedError,
        DeltaError,
        DeltaProtocolError,
        SchemaMismatchError,
        TableNotFoundError,
    )

    try:
        yield
    except TableNotFoundError:
        raise
    except CommitFailedError as error:
        raise Conflict(delta_line(error)) from error
    except (DeltaProtocolError, SchemaMismatchError) as error:
        raise Refused(delta_line(error)) from error
    except (DeltaError, OSError) as error:
        raise Trouble(delta_line(error)) from error


def delta_line(error: Exception) -> str:
    """Return what went wrong, and the cause of its causes: the library writes a line for each, in colours."""
    first, *causes = [_DECORATION.sub("", line).strip() for line in str(error).strip().split("\n")]
    return f"{first}: {causes[-1]}" if causes else first


@contextmanager
def iceberg_explained() -> Iterator[None]:
    """Sort what the library raises by what a promoter should do about it."""
    from pyiceberg import exceptions
    from sqlalchemy.exc import IntegrityError, SQLAlchemyError

    try:
        yield
    except (exceptions.CommitFailedException, IntegrityError) as error:  # the latter: two make one namespace at once
        raise Conflict(iceberg_line(error)) from _cause(error)
    except (exceptions.ValidationError, exceptions.ValidationException) as error:
        raise Refused(iceberg_line(error)) from _cause(error)
    except (exceptions.RESTError, exceptions.WaitingForLockException, SQLAlchemyError, OSError) as error:
        raise Trouble(iceberg_line(error)) from _cause(error)


def iceberg_line(error: Exception) -> str:
    """Return what went wrong: the first line, without a secret that a catalog repeats."""
    return without_secrets(str(error).strip().partition("\n")[0])


def _cause(error: Exception) -> Exception | None:
    """Return an error, unless a catalog has repeated a secret in it: who prints the causes would show it."""
    text = str(error)
    return error if without_secrets(text) == text else None
