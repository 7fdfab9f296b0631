"""The sinks that users declare. Each is imported when first used, so a DAG file pays only for what it declares."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twophase.sinks.base import Attempt, Sink
    from twophase.sinks.files.sink import Files
    from twophase.sinks.kafka.sink import Kafka
    from twophase.sinks.log_tables.delta import Delta
    from twophase.sinks.log_tables.iceberg import Iceberg
    from twophase.sinks.postgres.sink import Postgres
    from twophase.sinks.write_ahead.sink import Sender, WriteAhead

__all__ = ["Attempt", "Delta", "Files", "Iceberg", "Kafka", "Postgres", "Sender", "Sink", "WriteAhead"]

_HOMES = {
    "Attempt": "base",
    "Delta": "log_tables.delta",
    "Files": "files.sink",
    "Iceberg": "log_tables.iceberg",
    "Kafka": "kafka.sink",
    "Postgres": "postgres.sink",
    "Sender": "write_ahead.sink",
    "Sink": "base",
    "WriteAhead": "write_ahead.sink",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any public name
    if name in _HOMES:
        return getattr(import_module(f"twophase.sinks.{_HOMES[name]}"), name)
    msg = f"module 'twophase.sinks' has no attribute {name!r}"
    raise AttributeError(msg)
