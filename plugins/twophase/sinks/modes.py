"""The modes of sinks: what rows a write holds, and which sinks hold which. Sinks ask here when declared and staged.

append     new rows only
retract    a changelog: rows with `_change`, and what they take back as it was
upsert     by key: one row per key, with what the key has now; with `_change`, -D deletes it
replace    all rows of the table, or of the slot
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twophase.changelog import BEFORE, CHANGE, CHECKPOINT, INSERT, KINDS
from twophase.core.errors import BadValue, ConfigError
from twophase.storage import spark_task_errors
from twophase.storage.spark_paths import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twophase.core.checkpoint import Output
    from twophase.row_queries.duckdb_rows import DuckDBRows

#: The modes of each sink; the first is the default.
HELD = {
    "Delta": ("append", "retract", "upsert"),
    "Files": ("append", "retract"),
    "Iceberg": ("append", "retract"),
    "Kafka": ("append", "retract", "upsert"),
    "Postgres": ("append", "upsert", "retract", "replace"),
}
#: The modes whose rows may have `_change`.
_CHANGELOGS = ("retract", "upsert")
#: Why slots and an upsert do not go together where nothing that was overwritten is kept.
NO_SLOTS = (
    "slots come in any order and an upsert goes by it; sinks.Postgres keeps what it overwrites, and can hold both"
)


def check_declared(who: str, kind: str, mode: str) -> None:
    """Raise ConfigError unless sinks of this kind hold a mode; it names those that do."""
    if mode in HELD[kind]:
        return
    others = [f"sinks.{other}" for other, modes in HELD.items() if mode in modes]
    instead = f"; {', '.join(others)} can hold it" if others else ""
    msg = f"{who}: unknown mode {mode!r}, expected {', '.join(HELD[kind])}{instead}"
    raise ConfigError(msg)


def check_columns(which: str, mode: str, schema: Sequence[Sequence[str]]) -> bool:
    """Say whether the rows are a changelog; ConfigError unless their columns fit the mode."""
    kinds = {name: kind for name, kind in schema}  # noqa: C416 - pairs come as lists, too
    if CHECKPOINT in kinds and CHANGE in kinds:
        msg = (
            f"{which}: column {CHECKPOINT} says the order of another pipeline's checkpoints; make one changelog of them"
            " by changelog.to_retract or to_upsert"
        )
        raise ConfigError(msg)
    if mode not in _CHANGELOGS and CHANGE in kinds:
        msg = (
            f"{which}: column {CHANGE}: with mode {mode!r} every row is a new one; declare another mode, or convert the"
            " changelog by changelog.to_append"
        )
        raise ConfigError(msg)
    found = kinds.get(CHANGE)
    if found not in {None, "string"} or (found is None and mode == "retract"):
        msg = (
            f"{which}: a {mode} needs a column {CHANGE} string with {', '.join(KINDS)}, found {found or 'none'}; add it"
            " in the transform"
        )
        raise ConfigError(msg)
    return found is not None


def rows(which: str, mode: str, frame: Any) -> Any:  # noqa: ANN401 - DataFrames
    """Return the rows to stage: those of an upsert without -U. A strange `_change` stops the job that writes them."""
    if not check_columns(which, mode, frame.dtypes):
        return frame
    from pyspark.sql import functions as f

    kind = f.col(CHANGE)
    known = f.coalesce(kind.isin(*KINDS), f.lit(False))  # noqa: FBT003 - a value
    shown = f.coalesce(kind, f.lit("null"))
    stop = spark_task_errors.stop(f"column {CHANGE}: found ", shown, f", expected {', '.join(KINDS)}")
    guarded = frame.where(f.when(known, f.lit(True)).otherwise(stop.cast("boolean")))  # noqa: FBT003 - a value
    return guarded if mode == "retract" else guarded.where(kind != BEFORE)


def check_keys(which: str, key: Sequence[str], staged: DuckDBRows) -> None:
    """Raise BadValue if a staged row of an upsert has a null in its key, or another row has the same one."""
    from twophase.row_queries.duckdb_rows import quote

    names = [quote(name) for name in key]
    nulls = " OR ".join(f"{name} IS NULL" for name in names)
    with staged as opened:
        found = opened.rows(
            f"SELECT {', '.join(names)}, count(*) AS _twophase_times FROM {opened.name} GROUP BY ALL"  # noqa: S608 - all is quoted
            f" HAVING count(*) > 1 OR {nulls} LIMIT 1"
        )
    for row in found:
        *values, times = row.values()
        shown = ", ".join(f"{name} {value!r}"[:100] for name, value in zip(key, values, strict=True))
        if None in values:
            msg = f"{which}: key {', '.join(key)}: a row has {shown}; filter nulls out, or choose another key"
            raise BadValue(msg)
        msg = f"{which}: key {', '.join(key)}: {times} rows have {shown}; keep one row per key: changelog.to_upsert"
        raise BadValue(msg)


def changes_of(frame: Any, outputs: Sequence[Output], read: Callable[[Output], Any]) -> Any:  # noqa: ANN401 - DataFrames
    """Return what was read of decided revisions as a changelog, with the number of each row's checkpoint.

    `frame` are all rows, `read` reads those of one revision: for tables whose rows do not say their checkpoint.
    """
    from functools import reduce

    from pyspark.sql import functions as f

    if "checkpoint" in frame.columns:
        numbered = frame.withColumnRenamed("checkpoint", CHECKPOINT)
    else:
        parts = [read(output).withColumn(CHECKPOINT, f.lit(output.key.checkpoint_id)) for output in outputs]
        numbered = reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), parts)
    told = numbered if CHANGE in numbered.columns else numbered.withColumn(CHANGE, f.lit(INSERT))
    others = [f.col(quoted(name)) for name in told.columns if name not in {CHANGE, CHECKPOINT}]
    return told.select(*others, CHANGE, f.col(CHECKPOINT).cast("bigint").alias(CHECKPOINT))
