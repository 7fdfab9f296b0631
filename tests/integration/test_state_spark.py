"""Pipelines with state and a real Spark: what a transform reads and returns, and what stands after a checkpoint."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import twophase
from support.pipelines.factories import land, visible
from twophase import Pipeline, State, sinks, sources
from twophase.committer.record import PostgresRecord
from twophase.core.errors import ConfigError, TwophaseError
from twophase.core.settings import data_path
from twophase.verification import verify

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

COUNTS = State(key=["word"], schema="word string, frequency bigint")


def count(words: DataFrame, state: Any) -> tuple[DataFrame, DataFrame]:
    """Add the words of a batch to what is kept; the output is the new state."""
    from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

    batch = words.groupBy("word").agg(F.sum("frequency").alias("added"))
    total = F.coalesce(F.col("frequency"), F.lit(0)) + F.col("added")
    new = state.lookup(batch).select("word", total.alias("frequency"))
    return new, new


def changes(words: DataFrame, state: Any) -> tuple[DataFrame, DataFrame]:
    """Count as above, but put out what changed."""
    _, new = count(words, state)
    return state.changelog(new), new


def other(words: DataFrame, state: Any) -> tuple[DataFrame, DataFrame]:
    """Count as above, but put out another frame."""
    _, new = count(words, state)
    return words, new


def pipeline(transform: Any, **arguments: Any) -> Pipeline:
    data_path("landing/words").mkdir(parents=True, exist_ok=True)
    return Pipeline(
        "counts",
        reads={
            "words": sources.Files("landing/words", format="json", schema="word string, frequency bigint", max_files=1)
        },
        transform=transform,
        writes=arguments.pop("writes", None) or {"lake": sinks.Files("lake/counts")},
        state=arguments.pop("state", COUNTS),
        **arguments,
    )


BATCHES = [{"a": 1, "c": 1}, {"a": 2, "b": 5, "": 7}, {"c": 10, "a": 1}]


def land_batches() -> None:
    for number, batch in enumerate(BATCHES):
        land(f"{number}.json", [{"word": word, "frequency": n} for word, n in batch.items()])


def after(checkpoints: int) -> dict[str, int]:
    """Return the counts of the first batches."""
    total: Counter[str] = Counter()
    for batch in BATCHES[:checkpoints]:
        total.update(batch)
    return dict(total)


def kept(spark: SparkSession, as_of: int | None = None) -> dict[str, int]:
    rows = twophase.read_state(spark, "counts", as_of=as_of).collect()
    assert len(rows) == len({row.word for row in rows})
    return {row.word: row.frequency for row in rows}


@pytest.mark.parametrize("transform", [count, changes, other])
def test_each_checkpoint_adds_to_what_is_kept(
    spark: SparkSession, home: Path, record: PostgresRecord, transform: Any
) -> None:
    """The state after each checkpoint is the count over all input so far, whatever the output is."""
    land_batches()
    mode = "retract" if transform is changes else "append"
    declared = pipeline(transform, writes={"lake": sinks.Files("lake/counts", mode=mode)})
    for _ in BATCHES:
        assert twophase.run(declared, spark) is not None
    assert twophase.run(declared, spark) is None

    for number in range(1, len(BATCHES) + 1):
        assert kept(spark, as_of=number) == after(number)
    assert kept(spark) == after(3)
    assert not [found for found in verify(record, declared) if found]
    if transform is count:
        seen = [(row["word"], row["frequency"]) for row in visible("lake/counts")]
        assert sorted(seen) == sorted([("a", 1), ("c", 1), ("a", 3), ("b", 5), ("", 7), ("c", 11), ("a", 4)])
    if transform is changes:
        told = [(row["word"], row["frequency"], row["_change"]) for row in visible("lake/counts") if row["word"] == "a"]
        assert sorted(told, key=str) == sorted(
            [("a", 1, "+I"), ("a", 1, "-U"), ("a", 3, "+U"), ("a", 3, "-U"), ("a", 4, "+U")], key=str
        )


def test_several_sinks_and_several_states_commit_together(
    spark: SparkSession, home: Path, record: PostgresRecord
) -> None:
    """Each of several states is kept under its name, beside any number of writes."""

    def transform(words: DataFrame, state: Any) -> tuple[Any, Any]:
        new, _ = count(words, state["counts"])
        seen = words.selectExpr("word", "true AS seen").distinct()
        return {"lake": new, "copy": words}, {"counts": new, "words": seen}

    land_batches()
    declared = pipeline(
        transform,
        writes={"lake": sinks.Files("lake/counts"), "copy": sinks.Files("lake/copy")},
        state={"counts": COUNTS, "words": State(key=["word"], schema="word string, seen boolean")},
    )
    for _ in BATCHES:
        twophase.run(declared, spark)

    counts = twophase.read_state(spark, "counts", state="counts").collect()
    assert {row.word: row.frequency for row in counts} == after(3)
    words = twophase.read_state(spark, "counts", state="words").collect()
    assert {row.word for row in words} == set(after(3))
    assert len(visible("lake/copy")) == sum(map(len, BATCHES))


def test_deleted_keys_are_gone_and_changes_tell_of_it(spark: SparkSession, home: Path, record: PostgresRecord) -> None:
    """A row with `_deleted` removes its key; `state_changes` says what happened between two checkpoints."""

    def transform(words: DataFrame, state: Any) -> tuple[DataFrame, DataFrame]:
        new, _ = count(words, state)
        marked = new.selectExpr("word", "frequency", "frequency > 2 AS _deleted")
        return words, marked

    land_batches()
    declared = pipeline(transform)
    for _ in BATCHES:
        twophase.run(declared, spark)

    assert kept(spark, as_of=2) == {"c": 1}
    found = twophase.state_changes(spark, "counts", 1, 2).collect()
    assert [(row.word, row.frequency, row._change) for row in found] == [("a", 1, "-D")]
    assert kept(spark) == {"a": 1}


@pytest.mark.parametrize(
    ("transform", "said"),
    [
        (lambda words: words, r"returned DataFrame; expected \(output, new_state\)"),
        (lambda words: (words, words.union(words)), "word"),
        (lambda words: (words, words.selectExpr("word")), "'frequency' is missing"),
    ],
    ids=["no pair", "a key twice", "a column too few"],
)
def test_a_wrong_new_state_is_refused_and_nothing_is_kept(
    spark: SparkSession, home: Path, record: PostgresRecord, transform: Any, said: str
) -> None:
    """The attempt fails with an error that names what is wrong, and the state stays as it was."""
    land_batches()
    twophase.run(pipeline(count), spark)

    with pytest.raises(TwophaseError, match=said):
        twophase.run(pipeline(transform), spark)

    assert kept(spark) == after(1)


def test_state_needs_order(home: Path) -> None:
    """Slots run in any order, so no slot has a state before it."""
    with pytest.raises(ConfigError, match="no slot has a state before it"):
        Pipeline(
            "counts",
            reads={"days": sources.Interval("days/{start:%Y-%m-%d}", format="json")},
            transform=count,
            writes={"lake": sinks.Files("lake/counts")},
            state=COUNTS,
        )
