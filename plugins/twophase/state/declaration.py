"""`State`: what a user declares of keyed state. The pipeline keeps it in the record, and Spark reads it in the plan."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from twophase.core.declared import Declared
from twophase.core.errors import ConfigError
from twophase.core.manifest import Schema
from twophase.core.settings import data_path
from twophase.core.slots import duration
from twophase.formats import ddl

#: Types whose equal values always have equal bytes, so a hash of the bytes finds them.
KEYS = frozenset({
    *("boolean", "tinyint", "smallint", "int", "bigint", "string", "binary", "date", "timestamp", "timestamp_ntz"),
})  # fmt: skip
#: Each key column has a bit in an int that says whether it is null.
MOST_KEYS = 31

_STORE = re.compile(r"[a-z][a-z0-9+.-]*://")


class State(Declared):
    """Keyed rows that a pipeline keeps between checkpoints, as one more participant of each of them."""

    public_module = "twophase"
    identity: ClassVar[tuple[str, ...]] = ("key",)
    fixed_while_pending = ("path",)

    def __init__(
        self, key: Sequence[str], schema: str, *, ttl: str | None = None, retain: str = "7d", path: str | None = None
    ) -> None:
        """Declare the key columns, and all columns as Spark's DDL: `word string, frequency bigint`.

        A row that is not written again for `ttl` is forgotten, by the time of the checkpoints. States as of earlier
        checkpoints can be read for `retain`. `path` is the folder of its files, `state/<pipeline>` by default.
        """
        self.key = (key,) if isinstance(key, str) else tuple(key)
        self.ttl = ttl
        self.retain = retain
        self.path = path
        self.columns = self._parsed(schema)
        self._check_key()
        if path is not None and _STORE.match(path):
            msg = (
                f"state {path!r}: sorted runs are mapped into memory from shared POSIX storage, which an object store"
                " is not; give a folder that all machines have"
            )
            raise ConfigError(msg)
        duration(retain, "state: retain")
        if ttl is not None:
            duration(ttl, "state: ttl")

    def _parsed(self, schema: str) -> Schema:
        try:
            columns = ddl.columns(schema)
        except ValueError as error:
            msg = (
                f"state: schema {schema!r}: {error} is not known; expected names and types such as"
                " `word string, frequency bigint` (NOT NULL and comments are left out)"
            )
            raise ConfigError(msg) from error
        counts = Counter(column.name.lower() for column in columns)
        if twice := sorted(name for name, count in counts.items() if count > 1):
            msg = f"state: more than one column is named {', '.join(twice)} (letter case does not count); rename one"
            raise ConfigError(msg)
        if ours := [column.name for column in columns if column.name.startswith("_")]:
            msg = f"state: column {', '.join(ours)}: names that start with `_` are for Twophase; rename it"
            raise ConfigError(msg)
        return columns

    def _check_key(self) -> None:
        kinds = {column.name: column.type for column in self.columns}
        if not self.key:
            msg = "state: no key; name the columns by which a row is found, such as key=['word']"
            raise ConfigError(msg)
        if len(set(self.key)) < len(self.key) or len(self.key) > MOST_KEYS:
            msg = f"state: key {list(self.key)}: expected each column once, and {MOST_KEYS} at most"
            raise ConfigError(msg)
        for name in self.key:
            if name not in kinds:
                msg = f"state: key column {name!r} is not in the schema; there is {', '.join(kinds)}"
                raise ConfigError(msg)
            if kinds[name] not in KEYS and not kinds[name].startswith("decimal("):
                msg = (
                    f"state: key column {name!r} is {kinds[name]}, whose equal values may differ in their bytes;"
                    " cast it to string, an integer, a decimal, a date or a timestamp"
                )
                raise ConfigError(msg)
        if len(self.key) == len(self.columns):
            msg = "state: every column is a key; add a value column, such as `seen boolean`"
            raise ConfigError(msg)

    @property
    def keys(self) -> Schema:
        """Return the key columns, in the order of the key."""
        kinds = {column.name: column for column in self.columns}
        return tuple(kinds[name] for name in self.key)

    @property
    def values(self) -> Schema:
        """Return the columns that are no key."""
        return tuple(column for column in self.columns if column.name not in self.key)

    @property
    def lives_for(self) -> timedelta | None:
        """Return how long a row lives after it was written; None: for ever."""
        return None if self.ttl is None else duration(self.ttl, "state: ttl")

    def config(self) -> dict[str, Any]:
        """Return the arguments that build an equal one."""
        return {
            "key": list(self.key),
            "schema": ", ".join(f"`{column.name}` {column.type}" for column in self.columns),
            "ttl": self.ttl,
            "retain": self.retain,
            "path": None if self.path is None else str(data_path(self.path)),
        }

    def home(self, pipeline: str, name: str | None = None) -> Path:
        """Return the folder that its `runs` are in; `name` is its own among several states of a pipeline."""
        default = f"state/{pipeline}.{name}" if name else f"state/{pipeline}"
        folder = data_path(self.path or default)
        return folder.with_name(f"{folder.name}.twophase")


class DerivedState(State):
    """The state of a continuous query, whose columns are known when Spark has analysed its text."""

    public_module = ""
    identity = ()

    def __init__(self, *, retain: str = "7d", path: str | None = None) -> None:
        """Declare how long earlier states are kept."""
        super().__init__(["total"], "total boolean, rows bigint", retain=retain, path=path)

    def config(self) -> dict[str, Any]:
        """Return the arguments that build an equal one."""
        return {name: value for name, value in super().config().items() if name in {"retain", "path"}}

    def of(self, found: State | None) -> State:
        """Return the state with the columns that a query keeps; one without an aggregate keeps no row."""
        columns = super().config() if found is None else found.config()
        return State(columns["key"], columns["schema"], **self.config())
