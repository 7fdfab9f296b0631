"""Sorts errors of the libraries of Delta and Iceberg by what the caller, a promoter or a source, should do next."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from twophase.core.hindrances import Refused
from twophase.core.secret_texts import without_secrets

_DECORATION = re.compile(r"\x1b\[\d*m|↳")


class Conflict(Exception):
    """Another writer was faster: nothing was changed, start over."""


class Trouble(Exception):
    """The table did not answer, or not properly: only the marker tells what happened."""


@contextmanager
def delta_explained() -> Iterator[None]:
    """Turn errors of deltalake into Conflict, Refused or Trouble."""
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
    """Return the first and the last line of an error: the library writes one for each cause, in colours."""
    first, *causes = [_DECORATION.sub("", line).strip() for line in str(error).strip().split("\n")]
    return f"{first}: {causes[-1]}" if causes else first


@contextmanager
def iceberg_explained() -> Iterator[None]:
    """Turn errors of pyiceberg and its catalogs into Conflict, Refused or Trouble."""
    from pyiceberg import exceptions
    from sqlalchemy.exc import IntegrityError, SQLAlchemyError

    try:
        yield
    except (exceptions.CommitFailedException, IntegrityError) as error:  # the latter: two create one namespace at once
        raise Conflict(iceberg_line(error)) from _cause(error)
    except (exceptions.ValidationError, exceptions.ValidationException) as error:
        raise Refused(iceberg_line(error)) from _cause(error)
    except (exceptions.RESTError, exceptions.WaitingForLockException, SQLAlchemyError, OSError) as error:
        raise Trouble(iceberg_line(error)) from _cause(error)


def iceberg_line(error: Exception) -> str:
    """Return the first line of an error, without secrets that a catalog repeats in it."""
    return without_secrets(str(error).strip().partition("\n")[0])


def _cause(error: Exception) -> Exception | None:
    """Return the error, or None if a catalog repeats a secret in it: a printed traceback would show it."""
    text = str(error)
    return error if without_secrets(text) == text else None
