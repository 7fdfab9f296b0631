"""Parts that a user declares and the record keeps by import path, so that recovery needs no DAG file."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import Any, Self

from twophase.core.errors import ConfigError


class Declared(ABC):
    """A source or sink: built from JSON-able arguments, which are all that the record keeps of it."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the arguments that build an equal one; no secrets."""

    def declaration(self) -> dict[str, Any]:
        """Return what the record keeps: the class by import path, and its arguments."""
        cls = type(self)
        return {"class": f"{cls.__module__}:{cls.__qualname__}", **self.config()}

    @classmethod
    def load(cls, declaration: dict[str, Any]) -> Self:
        """Build the part that a declaration describes."""
        config = dict(declaration)
        path = config.pop("class", None)
        found = import_path(str(path))
        if not (isinstance(found, type) and issubclass(found, cls)):
            msg = f"{path}: expected a subclass of {cls.__module__}.{cls.__qualname__}"
            raise ConfigError(msg)
        return found(**config)


def import_path(path: str) -> Any:  # noqa: ANN401 - whatever the path names
    """Return what `module:name` names."""
    module, _, name = path.partition(":")
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
