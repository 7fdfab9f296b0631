"""How tests declare Delta and Iceberg tables, look at them, and write to them as somebody else."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyiceberg.table import Table, Transaction

from support.pipelines.factories import Row
from twophase.formats import iceberg_catalogs
from twophase.sinks import Delta, Iceberg
from twophase.sinks.log_tables.base import LogTableSink

if TYPE_CHECKING:
    import pytest


PAGE = Path(__file__).parents[3] / "docs/how-to/delta.md"


def opened(sink: LogTableSink) -> DeltaTable:
    return DeltaTable(sink.location(), storage_options=sink.storage.for_delta())


def restored_as_the_page_says(found: DeltaTable, version: int) -> None:
    """Run the function that the page on Delta tables gives its readers."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    [block] = [block for block in blocks if "def restore(" in block]
    given: dict[str, Any] = {}
    exec(block, given)
    given["restore"](found, version)


class DeltaFormat:
    """Delta, read by polars."""

    def make(self, path: str, **options: Any) -> Delta:
        return Delta(path, **options)

    def content(self, sink: LogTableSink) -> list[Row]:
        keys = {name: value for name, value in sink.storage.for_delta().items() if name.startswith("AWS_")}
        return pl.read_delta(sink.location(), storage_options=keys or None).to_dicts()

    def commits(self, sink: LogTableSink) -> object:
        return opened(sink).version()

    def marker(self, sink: LogTableSink) -> int | None:
        return opened(sink).transaction_version("twophase/words")

    def append(self, sink: LogTableSink, row: Row) -> None:
        write_deltalake(opened(sink), pa.Table.from_pylist([row]), mode="append")

    def rewrite(self, sink: LogTableSink) -> None:
        opened(sink).optimize.compact()

    def restore(self, sink: LogTableSink) -> None:
        found = opened(sink)
        rewritten = next(entry for entry in found.history() if entry["operation"] == "OPTIMIZE")
        restored_as_the_page_says(found, rewritten["version"] - 1)

    def committing(self, monkeypatch: pytest.MonkeyPatch, around: Callable[[Callable[[], object]], None]) -> None:
        commit = DeltaTable.create_write_transaction

        def wrapped(table: DeltaTable, *args: Any, **kwargs: Any) -> None:
            around(lambda: commit(table, *args, **kwargs))

        monkeypatch.setattr(DeltaTable, "create_write_transaction", wrapped)


CATALOG = {"type": "sql", "uri": "sqlite:///catalog.db"}


def table(sink: LogTableSink) -> Table:
    """Load the table as somebody else does, with a catalog of one's own."""
    assert isinstance(sink, Iceberg)
    return iceberg_catalogs.client("a test", sink.catalog, sink.storage).load_table(sink.table)


def set_back(found: Table, snapshot_id: int) -> None:
    """Let an earlier snapshot be the current one, and append the rows that came after it."""
    before = _rows(found)
    found.manage_snapshots().set_current_snapshot(snapshot_id).commit()
    lacking = before - _rows(found)
    found.append(pa.Table.from_pylist([dict(row) for row in lacking.elements()], schema=found.schema().as_arrow()))


def _rows(found: Table) -> Counter[tuple[tuple[str, Any], ...]]:
    return Counter(tuple(row.items()) for row in found.scan().to_arrow().to_pylist())


class IcebergFormat:
    """Iceberg in a catalog in SQLite, read by pyiceberg."""

    def make(self, path: str, **options: Any) -> Iceberg:
        return Iceberg(f"db.{Path(path).name}", path=path, catalog=CATALOG, **options)

    def content(self, sink: LogTableSink) -> list[Row]:
        found: list[Row] = table(sink).scan().to_arrow().to_pylist()
        return found

    def commits(self, sink: LogTableSink) -> object:
        return table(sink).metadata_location

    def marker(self, sink: LogTableSink) -> int | None:
        value = table(sink).properties.get("twophase.words.words")
        return int(value.split()[0]) if value else None

    def append(self, sink: LogTableSink, row: Row) -> None:
        table(sink).append(pa.Table.from_pylist([row]))

    def rewrite(self, sink: LogTableSink) -> None:
        found = table(sink)
        found.overwrite(found.scan().to_arrow())

    def restore(self, sink: LogTableSink) -> None:
        found = table(sink)
        ours = next(entry for entry in reversed(found.snapshots()) if entry.summary and entry.summary.get("twophase"))
        set_back(found, ours.snapshot_id)

    def committing(self, monkeypatch: pytest.MonkeyPatch, around: Callable[[Callable[[], object]], None]) -> None:
        commit = Transaction.commit_transaction

        def wrapped(transaction: Transaction) -> Table:
            ours = any(getattr(update, "updates", {}).get("twophase.words.words") for update in transaction._updates)
            if ours:
                around(lambda: commit(transaction))
                return transaction._table
            return commit(transaction)

        monkeypatch.setattr(Transaction, "commit_transaction", wrapped)
