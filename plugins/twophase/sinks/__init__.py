"""What a checkpoint writes. Each sink is loaded when it is first asked for: a DAG's file pays for what it declares."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twophase.sinks.base import Attempt, Sink
    from twophase.sinks.delta import Delta
    from twophase.sinks.files import Files
    from twophase.sinks.iceberg import Iceberg
    from twophase.sinks.postgres import Postgres
    from twophase.sinks.write_ahead import Sender, WriteAhead

__all__ = ["Attempt", "Delta", "Files", "Iceberg", "Postgres", "Sender", "Sink", "WriteAhead"]

_HOMES = {
    "Attempt": "base",
    "Delta": "delta",
    "Files": "files",
    "Iceberg": "iceberg",
    "Postgres": "postgres",
    "Sender": "write_ahead",
    "Sink": "base",
    "WriteAhead": "write_ahead",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any public name
    if name in _HOMES:
        return getattr(import_module(f"twophase.sinks.{_HOMES[name]}"), name)
    msg = f"module 'twophase.sinks' has no attribute {name!r}"
    raise AttributeError(msg)
