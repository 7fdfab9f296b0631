"""Records of Kafka from staged Parquet files: which column is key, value, headers, partition and time.

`stage` adds the value as a column of text where it is made of several columns, so that promotion only copies bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from twophase.changelog import CHANGE, DELETE
from twophase.core.checkpoint import Json
from twophase.core.errors import ConfigError
from twophase.storage.spark_paths import quoted

if TYPE_CHECKING:
    import pyarrow as pa

#: The column that `stage` adds if the value is made of several columns.
VALUE = "_twophase_value"
_BATCH = 10_000
_BYTES = ("string", "binary")
_HEADERS = (
    *(f"map<string,{kind}>" for kind in _BYTES),
    *(f"array<struct<key:string,value:{kind}>>" for kind in _BYTES),
)
_TYPES = {
    "key": _BYTES,
    "headers": _HEADERS,
    "partition": ("int", "smallint", "tinyint"),
    "timestamp": ("timestamp",),
}


@dataclass(frozen=True)
class RecordColumns:
    """The columns that make a record; None: the record has none of it."""

    key: str | None = None
    #: One column of text or bytes, several that become JSON, or None: all that the others do not name, as JSON.
    value: str | list[str] | None = None
    headers: str | None = None
    partition: str | None = None
    timestamp: str | None = None
    #: "upsert": the value of a deletion is null. "retract": the value says by `_change` what it means.
    mode: str | None = None

    def to_json(self) -> Json:
        """Return it as JSON; what is not declared is left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def staged_value(self) -> str:
        """Return the column of the staged files that holds the value."""
        return self.value if isinstance(self.value, str) and self.mode != "upsert" else VALUE

    @property
    def needed(self) -> list[str]:
        """Return the columns that promotion reads."""
        others = (self.key, self.headers, self.partition, self.timestamp)
        return list(dict.fromkeys([self.staged_value, *(name for name in others if name)]))

    def check(self, which: str, schema: Json) -> None:
        """Raise ConfigError unless the rows have the declared columns, of types that a record can take."""
        declared = {name: getattr(self, name) for name in _TYPES}
        if isinstance(self.value, str):
            declared["value"] = self.value
        for role, column in declared.items():
            if column is not None and column not in schema:
                msg = f"{which}: {role}={column!r}: expected a column of that name, found {', '.join(schema)}"
                raise ConfigError(msg)
            allowed = _TYPES.get(role, _BYTES)
            if column is not None and schema[column] not in allowed:
                msg = f"{which}: {role}={column!r}: expected {' or '.join(allowed)}, found {schema[column]}; cast it"
                raise ConfigError(msg)
        if VALUE in schema:
            msg = f"{which}: a column cannot be named {VALUE!r}: the value is staged under that name"
            raise ConfigError(msg)
        if isinstance(self.value, list) and (missing := [name for name in self.value if name not in schema]):
            msg = f"{which}: value: expected a column {missing[0]!r}, found {', '.join(schema)}"
            raise ConfigError(msg)
        if not isinstance(self.value, str) and not self._of_value(list(schema)):
            msg = f"{which}: no column is left for the value; declare value=[…]"
            raise ConfigError(msg)

    def _of_value(self, names: list[str]) -> list[str]:
        """Return the columns that the JSON of the value is made of."""
        if isinstance(self.value, list):
            told = [CHANGE] if self.mode == "retract" and CHANGE not in self.value else []
            return [*self.value, *told]
        others = {self.key, self.headers, self.partition, self.timestamp, *([CHANGE] if self.mode == "upsert" else [])}
        return [name for name in names if name not in others]

    def with_value(self, frame: Any) -> Any:  # noqa: ANN401 - DataFrames
        """Return the frame with its value as a column of text, unless one of its columns is the value."""
        if self.staged_value != VALUE:
            return frame
        from pyspark.sql import functions as f

        parts = [f.col(quoted(name)) for name in self._of_value(frame.columns)]
        made = f.to_json(f.struct(*parts), {"ignoreNullFields": "false", "timeZone": "UTC"})
        value = f.col(quoted(self.value)) if isinstance(self.value, str) else made
        if self.mode == "upsert" and CHANGE in frame.columns:
            value = f.when(f.col(CHANGE) != DELETE, value)
        return frame.withColumn(VALUE, value)


class Batch(NamedTuple):
    """Some records, column by column; None: these records have none of it."""

    values: list[bytes | None]
    keys: list[bytes | None] | None
    headers: list[list[tuple[str, bytes | None]]] | None
    partitions: list[int | None] | None
    #: Milliseconds since 1970.
    times: list[int | None] | None


def arrow_batches(path: Path, columns: RecordColumns) -> Iterator[pa.RecordBatch]:
    """Yield what promotion needs of a staged file, with one batch in memory at a time."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as opened:
        yield from opened.iter_batches(_BATCH, columns=columns.needed)


def batch_of(batch: pa.RecordBatch, columns: RecordColumns) -> Batch:
    """Return the records of a batch as Python's values, in their order."""
    return Batch(
        _bytes(batch[columns.staged_value]),
        _bytes(batch[columns.key]) if columns.key else None,
        [_pairs(one) for one in batch[columns.headers].to_pylist()] if columns.headers else None,
        batch[columns.partition].to_pylist() if columns.partition else None,
        milliseconds(batch[columns.timestamp]).to_pylist() if columns.timestamp else None,
    )


def _bytes(column: pa.Array) -> list[bytes | None]:
    import pyarrow as pa

    found: list[bytes | None] = column.cast(pa.binary()).to_pylist()
    return found


def milliseconds(column: pa.Array) -> pa.Array:
    """Return times as Kafka counts them; what is finer is cut off."""
    import pyarrow as pa

    return column.cast(pa.timestamp("ms", column.type.tz), safe=False).cast(pa.int64())


def _pairs(headers: Any) -> list[tuple[str, bytes | None]]:  # noqa: ANN401 - a map, or a list of structs
    pairs = [(one["key"], one["value"]) if isinstance(one, dict) else one for one in headers or ()]
    return [(name, value.encode() if isinstance(value, str) else value) for name, value in pairs]
