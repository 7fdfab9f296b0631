"""The owner file of a table: it names the one pipeline that may write there. Called by the files and log table sinks.

    <table>.twophase/owner      the pipeline's name (of a Delta table <table>/_twophase/owner)

The first pipeline that prepares to write there creates it. Folders and files are named by checkpoint numbers only, so
nobody could tell apart what two pipelines put into one table. The file lies beside the manifests, so it is found by
whichever path the table is reached.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from twophase.core.errors import ConfigError
from twophase.sinks.base import two_owners

if TYPE_CHECKING:
    from twophase.storage.base import Storage

OWNER = "owner"


def owner_of(storage: Storage, home: str) -> str | None:
    """Return the pipeline that the owner file names; None if there is no file."""
    try:
        return storage.read(f"{home}/{OWNER}").decode().strip()
    except FileNotFoundError:
        return None


def objection(storage: Storage, home: str, pipeline: str) -> str | None:
    """Say that a table belongs to another pipeline; None if it belongs to this one, or to nobody yet."""
    owner = owner_of(storage, home)
    return None if owner in {None, pipeline} else two_owners("the table", str(owner))


def claim(storage: Storage, home: str, who: str, pipeline: str | None) -> None:
    """Make a pipeline the owner of a table; ConfigError if the owner file or a manifest names another one."""
    if pipeline is None:
        return
    owner = owner_of(storage, home)
    if owner is None and (owner := _by_manifests(storage, home)) in {None, pipeline}:
        try:
            storage.create(f"{home}/{OWNER}", f"{pipeline}\n".encode())
        except FileExistsError:  # another was faster
            owner = owner_of(storage, home)
    if owner not in {None, pipeline}:
        msg = f"{who}: {two_owners('the table', str(owner))}"
        raise ConfigError(msg)


def _by_manifests(storage: Storage, home: str) -> str | None:
    """Return the pipeline that the first manifest names, for a table without an owner file; None if there is none."""
    for name, path in storage.entries(f"{home}/manifests"):
        if name.endswith(".json"):
            return str(json.loads(storage.read(path))["pipeline"])
    return None


def hand_over(storage: Storage, home: str, to: str) -> str | None:
    """Make another pipeline the owner, and return None; if the table has a checkpoint, return why that cannot be."""
    if owner := _by_manifests(storage, home):
        return f"what it holds is known by the checkpoints of pipeline {owner!r}; let {to!r} write to another table"
    storage.replace(f"{home}/{OWNER}", f"{to}\n".encode())
    return None
