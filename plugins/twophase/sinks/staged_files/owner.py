"""Which pipeline a table of files belongs to: a file beside its manifests says so, whichever path leads there.

    <table>.twophase/owner      the pipeline's name (of a Delta table <table>/_twophase/owner)

It is made once, by the first pipeline that prepares to write there. Folders and files are named by the numbers of
checkpoints: what two pipelines put into one table nobody could tell apart.
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
    """Return what the file says; None: there is none."""
    try:
        return storage.read(f"{home}/{OWNER}").decode().strip()
    except FileNotFoundError:
        return None


def objection(storage: Storage, home: str, pipeline: str) -> str | None:
    """Say that a table is another pipeline's; None: it is this one's, or nobody has taken it yet."""
    owner = owner_of(storage, home)
    return None if owner in {None, pipeline} else two_owners("the table", str(owner))


def claim(storage: Storage, home: str, who: str, pipeline: str | None) -> None:
    """Take a table for a pipeline; ConfigError if it is another's, by its file or by a manifest that is there."""
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
    """Return whose the manifests are, in a table that nobody has taken yet; None: there are none."""
    for name, path in storage.entries(f"{home}/manifests"):
        if name.endswith(".json"):
            return str(json.loads(storage.read(path))["pipeline"])
    return None


def hand_over(storage: Storage, home: str, to: str) -> str | None:
    """Let a table without any checkpoint belong to another pipeline; say why not, if it has one."""
    if owner := _by_manifests(storage, home):
        return f"what it holds is known by the checkpoints of pipeline {owner!r}; let {to!r} write to another table"
    storage.replace(f"{home}/{OWNER}", f"{to}\n".encode())
    return None
