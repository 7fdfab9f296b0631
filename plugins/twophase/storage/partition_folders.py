"""Reads the values in partition folders such as `dt=2026-11-15`, as Spark writes them. For all that read such files."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote

from twophase.core.errors import ManifestMismatch

#: The value that Spark writes in the folder's name for null.
NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


def partition_values(file: str, partition_by: Sequence[str]) -> list[str | None]:
    """Return the values that the folders right above a file say; ManifestMismatch if they are others.

    Spark escapes letters that a path cannot have.
    """
    folders = file.split("/")[-1 - len(partition_by) : -1]
    found: list[str | None] = []
    for name, folder in zip(partition_by, folders, strict=False):
        key, equals, value = folder.partition("=")
        if not equals or unquote(key).lower() != name.lower():
            break
        found.append(None if value == NULL_PARTITION else unquote(value))
    if len(found) != len(partition_by):
        msg = f"file {file}: expected it in folders of {', '.join(partition_by)}, found {'/'.join(folders) or 'none'}"
        raise ManifestMismatch(msg)
    return found
