"""`Declared`, the base of sources, sinks, audits and checkpoint committers: parts that the record can build again.

The record keeps the class by name and its arguments, so recovery needs no DAG file. A shipped part is kept under the
name that users import it by (`twophase.sinks:Files`), so modules may move. A user's own part is kept under its own
import path.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

from twophase.core.errors import ConfigError

#: Names that records of earlier versions keep (module and class) → the public names of today.
MOVED = {
    "twophase.airflow.stage:StageOperator": "twophase.airflow:StageOperator",
    "twophase.sinks.committers:File": "twophase.committers:File",
    "twophase.sinks.delta:Delta": "twophase.sinks:Delta",
    "twophase.sinks.files:Files": "twophase.sinks:Files",
    "twophase.sinks.iceberg:Iceberg": "twophase.sinks:Iceberg",
    "twophase.sinks.pg.committer:Postgres": "twophase.committers:Postgres",
    "twophase.sinks.postgres:Postgres": "twophase.sinks:Postgres",
    "twophase.sinks.write_ahead:WriteAhead": "twophase.sinks:WriteAhead",
    "twophase.sources.committed:Committed": "twophase.sources:Committed",
    "twophase.sources.files:Files": "twophase.sources:Files",
    "twophase.sources.interval:Interval": "twophase.sources:Interval",
    "twophase.sources.lookup:Lookup": "twophase.sources:Lookup",
}


class Declared(ABC):
    """A part of a pipeline, built from JSON-able arguments; the record keeps its class and those arguments."""

    #: The module that users import the shipped ones from.
    public_module: ClassVar[str] = ""
    #: Arguments that may not change once there are checkpoints, because those were read or written by them.
    identity: ClassVar[tuple[str, ...]] = ()
    #: Arguments that may not change while a checkpoint is pending, because they say where and how it is promoted.
    fixed_while_pending: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the arguments that build an equal part, without secrets."""

    def declaration(self) -> dict[str, Any]:
        """Return what the record keeps: the class by its name, and its arguments."""
        return {"class": public_name(type(self), self.public_module), **self.config()}

    def changes(self, old: dict[str, Any], *, pending: bool) -> list[str]:
        """Say in words which changes from an older declaration to this one are not allowed."""
        before, after = current(old), self.declaration()
        moved = [name for name in self.fixed_while_pending if pending]
        return [
            f"{part} was {before.get(part)!r} and is now {after.get(part)!r}"
            + (" while a checkpoint is pending" if part in moved else "")
            for part in ("class", *self.identity, *moved)
            if before.get(part) != after.get(part)
        ]

    @classmethod
    def load(cls, declaration: dict[str, Any]) -> Self:
        """Build the part that a declaration describes."""
        config = current(declaration)
        path = config.pop("class", None)
        found = import_path(str(path))
        if not (isinstance(found, type) and issubclass(found, cls)):
            msg = f"{path}: expected a subclass of {cls.__module__}.{cls.__qualname__}"
            raise ConfigError(msg)
        return found(**config)


def public_name(cls: type, module: str) -> str:
    """Return the name that the record keeps of a class: the public one if `module` exports it, else its import path."""
    public = module and getattr(importlib.import_module(module), cls.__qualname__, None) is cls
    return f"{module if public else cls.__module__}:{cls.__qualname__}"


def current(declaration: dict[str, Any]) -> dict[str, Any]:
    """Return a declaration with the class names of today, also in the declarations inside it."""
    return {
        name: current(value)
        if isinstance(value, dict)
        else current_name(value)
        if name == "class" and isinstance(value, str)
        else value
        for name, value in declaration.items()
    }


def current_name(name: str) -> str:
    """Return the name of today for a name from a record; the class need not exist any more."""
    return MOVED.get(name, name)


def import_path(path: str) -> Any:  # noqa: ANN401 - whatever the path names
    """Import what `module:name` names, also if the name is one that an earlier version kept."""
    module, _, name = current_name(path).partition(":")
    if not module or not name:
        msg = f"import path {path!r}: expected `module:name`"
        raise ConfigError(msg)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(error.name + ".")):
            msg = f"import path {path!r}: no module {error.name!r}; is its folder on the path?"
            raise ConfigError(msg) from error
        raise
    for part in name.split("."):
        if not hasattr(found, part):
            msg = f"import path {path!r}: module {module!r} has no {name!r}"
            raise ConfigError(msg)
        found = getattr(found, part)
    return found
