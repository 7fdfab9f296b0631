"""A write says its mode, and a sink that cannot hold it names those that can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from twophase import Pipeline, sinks, sources
from twophase.core.errors import ConfigError
from twophase.sinks import modes
from twophase.sinks.base import Sink

MAKE: dict[str, Callable[..., Sink]] = {
    "Delta": lambda **more: sinks.Delta("lake/t", **more),
    "Files": lambda **more: sinks.Files("lake/t", **more),
    "Iceberg": lambda **more: sinks.Iceberg("db.t", path="lake/t", catalog={"type": "sql", "uri": "sqlite://"}, **more),
    "Kafka": lambda **more: sinks.Kafka("t", **more),
    "Postgres": lambda **more: sinks.Postgres("t", conn_id="dwh", **more),
}
KEYS: dict[tuple[str, str], dict[str, Any]] = {
    ("Delta", "upsert"): {"key": ["id"]},
    ("Kafka", "upsert"): {"key": "id", "path": "kafka/t"},
    ("Postgres", "upsert"): {"key": ["id"]},
    ("Postgres", "retract"): {"key": ["id"]},
}


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("mode", ["append", "retract", "upsert", "replace"])
def test_a_sink_holds_its_modes_and_names_those_that_hold_the_others(kind: str, mode: str) -> None:
    """What is declared comes back from the record; an append is declared as it was before there were modes."""
    if mode not in modes.HELD[kind]:
        able = [f"sinks.{other}" for other, held in modes.HELD.items() if mode in held]
        with pytest.raises(ConfigError, match=f"mode '{mode}', expected .*; {', '.join(able)} can hold it"):
            MAKE[kind](mode=mode, **KEYS.get((kind, mode), {}))
        return
    made = MAKE[kind](mode=mode, **({"path": "kafka/t"} if kind == "Kafka" else {}) | KEYS.get((kind, mode), {}))

    assert Sink.load(made.declaration()).declaration() == made.declaration()
    assert Sink.load(made.declaration()).mode == mode
    if kind != "Postgres":
        assert ("mode" in made.config()) == (mode != "append")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: sinks.Delta("lake/t", mode="upsert"), "without a key; an upsert needs key="),
        (lambda: sinks.Delta("lake/t", key=["id"]), "with a key; an upsert needs key="),
        (lambda: sinks.Kafka("t", mode="upsert"), "a record is known by its key"),
        (lambda: sinks.Kafka("t", mode="retract", value="v"), "_change is part of the value"),
        (lambda: sinks.Kafka("t", mode="upsert", key="k", delivery="none"), "may send a change twice"),
        (lambda: sinks.Files("lake/t", mode="changes"), "unknown mode 'changes', expected append, retract$"),
        (lambda: sources.Committed("a", "b", changes="yes"), "changes: expected True or False"),  # type: ignore[arg-type]
    ],
)
def test_arguments_that_do_not_go_with_a_mode_are_refused(made: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made()


@pytest.mark.parametrize("kind", ["Delta", "Kafka"])
def test_an_upsert_by_slots_is_refused_where_nothing_overwritten_is_kept(kind: str) -> None:
    """Slots come in any order, and an upsert goes by it."""
    with pytest.raises(ConfigError, match=r"slots come in any order.*sinks\.Postgres keeps what it overwrites"):
        Pipeline(
            "daily",
            reads={"rows": sources.Interval("landing/dt={start:%Y-%m-%d}", format="json")},
            transform="daily:transform",
            writes={"out": MAKE[kind](mode="upsert", **KEYS[kind, "upsert"])},
        )


def test_an_upsert_that_keeps_nothing_cannot_be_run_again() -> None:
    """A Delta table forgets what it overwrites; a topic may get values again, but only the latest."""
    topic = sinks.Kafka("t", mode="upsert", key="id", republish=True)

    assert "not kept" in (MAKE["Delta"](mode="upsert", key=["id"]).objection(latest=True) or "")
    assert topic.objection(latest=True) is None
    assert "later checkpoints" in (topic.objection(latest=False) or "")


def test_a_changed_mode_is_refused_once_there_are_checkpoints() -> None:
    """Rows with and without `_change` cannot be in one table; an old declaration says nothing of a mode."""
    before = sinks.Files("lake/t").declaration()

    assert "mode" not in before
    assert sinks.Files("lake/t").changes(before, pending=False) == []
    assert sinks.Files("lake/t", mode="retract").changes(before, pending=False) == [
        "mode was None and is now 'retract'"
    ]


@pytest.mark.parametrize(
    ("mode", "columns", "said"),
    [
        ("append", {"_change": "string"}, "every row is a new one"),
        ("retract", {}, "a retract needs a column _change string with"),
        ("retract", {"_change": "int"}, "found int"),
        ("upsert", {"_change": "int"}, "found int"),
        ("retract", {"_change": "string", "_checkpoint": "bigint"}, "make one changelog of them"),
    ],
)
def test_columns_that_do_not_fit_the_mode_are_refused(mode: str, columns: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        modes.check_columns("sink 'lake'", mode, [("id", "bigint"), *columns.items()])
