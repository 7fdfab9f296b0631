"""`Lookup`, the source for a lookup table: no checkpoint fixes it, each attempt reads it as it then is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twophase.core.checkpoint import Input, Known, Position
from twophase.core.errors import ConfigError, InputChanged
from twophase.core.ports import Progress
from twophase.core.settings import data_path
from twophase.sources import bad_records
from twophase.sources.fixed_files import FileFormat
from twophase.storage.listing import finished

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Lookup(FileFormat):
    """A file or folder that is read whole. Two attempts may read different rows. New rows start no checkpoint."""

    identity = ("format",)
    fixed_while_pending = ("path",)

    unversioned = True
    kind = "lookup source"
    to_correct = "correct the file and run again"

    def __init__(
        self,
        path: str | Path,
        format: str = "parquet",  # noqa: A002 - the word that Spark's readers use
        *,
        schema: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Declare where the table is (relative: below the data folder) and its format."""
        super().__init__(path, format, schema, options)

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments; the path in full, so that it means the same everywhere."""
        return {"path": str(self.table), "format": self.format, "schema": self.schema, "options": self.options}

    @property
    def table(self) -> Path:
        """Return the file or folder."""
        return data_path(self.path)

    def folders(self) -> tuple[str, ...]:
        """Return the table: a pipeline that writes into it would read its own output."""
        return (str(self.table),)

    def prepare(self) -> None:
        """Check that the table is there and can be read."""
        if not self.table.exists():
            msg = f"{self.who}: no file or folder {self.table}; create it, or correct the path"
            raise ConfigError(msg)
        if not os.access(self.table, os.R_OK | (os.X_OK if self.table.is_dir() else 0)):
            msg = f"{self.who}: may not read {self.table}; give this user the right to"
            raise ConfigError(msg)

    def discover(
        self,
        slot: str | None = None,
        known: Known | None = None,
        position: Mapping[str, Position] | None = None,
    ) -> None:
        """Do nothing: there is nothing to find, the table is read as it is."""

    def fix(self, found: None, progress: Progress) -> Input:  # noqa: ARG002 - nothing is fixed
        """Return where the table is; nothing is fixed."""
        return Input(unversioned=str(self.table))

    def check(self, fixed: Input) -> None:  # noqa: ARG002 - nothing is fixed
        """Raise InputChanged if the table is gone; its content may change."""
        if not self.table.exists():
            msg = f"{self.who}: expected a file or folder {self.table}, found nothing; put it back and run again"
            raise InputChanged(msg)

    def paths(self, fixed: Input) -> list[str]:  # noqa: ARG002 - nothing is fixed
        """Return the table's file or folder."""
        return [str(self.table)]

    def read(self, spark: SparkSession, fixed: Input, slot: str | None = None) -> DataFrame:  # noqa: ARG002 - nothing is fixed
        """Return the whole table."""
        return self.load_files(spark, [self.table.as_posix()])

    def explain(self, fixed: Input, error: Exception) -> Exception | None:
        """Name the file and the record that Spark could not read."""
        text = bad_records.text_of(error)
        if not bad_records.is_about_input(text):
            return None
        try:
            self.check(fixed)
            below = [""] if self.table.is_file() else [f"/{f.path}" for f in finished(str(self.table), "", self.who)]
        except InputChanged as changed:
            return changed
        return self.blame([(f"{self.path}{file}", f"{self.table}{file}") for file in below], text)
