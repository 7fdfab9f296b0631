"""The sources that users declare. Each is loaded when it is first used, so a DAG file imports only what it declares."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twophase.sources.committed import Committed
    from twophase.sources.files import Files
    from twophase.sources.interval import Interval
    from twophase.sources.kafka import Kafka
    from twophase.sources.lookup import Lookup

__all__ = ["Committed", "Files", "Interval", "Kafka", "Lookup"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any public name
    if name in __all__:
        return getattr(import_module(f"twophase.sources.{name.lower()}"), name)
    msg = f"module 'twophase.sources' has no attribute {name!r}"
    raise AttributeError(msg)
