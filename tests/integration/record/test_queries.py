"""What is asked of the record: listings, one checkpoint whole, the past."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from support.pipelines.record_steps import FILES, MANIFEST, STEPS, again, bring, make, read, sql
from twophase.committer import queries
from twophase.committer.record import PostgresRecord
from twophase.core.checkpoint import Input, Key, Output
from twophase.core.errors import ConfigError
from twophase.core.states import State


def listed(rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(row["checkpoint_id"], row["revision"]) for row in rows]


def test_a_listing_pages_by_key_and_by_state(record: PostgresRecord, pipeline: str) -> None:
    for number in range(1, 8):
        bring(record, make(record, pipeline), State.COMMITTED if number % 2 else State.ABORTED)

    with record.engine.connect() as connection:
        first = queries.checkpoints(connection, pipeline, limit=3)
        second = queries.checkpoints(connection, pipeline, limit=3, before=first[-1]["checkpoint_id"])
        aborted = queries.checkpoints(connection, pipeline, state=State.ABORTED, before=6)

    assert listed(first) == [(7, 1), (6, 1), (5, 1)]
    assert listed(second) == [(4, 1), (3, 1), (2, 1)]
    assert listed(aborted) == [(4, 1), (2, 1)]
    assert tuple(first[0]) == queries.COLUMNS


def test_paging_through_a_listing_shows_every_revision_once(record: PostgresRecord, pipeline: str) -> None:
    first = make(record, pipeline)
    for _ in range(3):
        bring(record, first, State.ABORTED)
        first = again(record, first)
    make(record, pipeline)
    seen: list[tuple[int, int]] = []

    with record.engine.connect() as connection:
        while page := queries.checkpoints(connection, pipeline, limit=2, before=seen[-1] if seen else None):
            seen += listed(page)

    assert seen == [(2, 1), (1, 4), (1, 3), (1, 2), (1, 1)]


def test_show_gives_one_checkpoint_whole(record: PostgresRecord, pipeline: str) -> None:
    key = bring(record, make(record, pipeline, inputs={"words": Input(files=FILES)}), State.COMMITTED)

    with record.engine.connect() as connection:
        found = queries.show(connection, pipeline, key.checkpoint_id)

    assert {name: found[name] for name in ("pipeline", "revision", "state", "epoch", "commit_seq", "rows")} == {
        "pipeline": pipeline,
        "revision": 1,
        "state": "COMMITTED",
        "epoch": 1,
        "commit_seq": 1,
        "rows": 10,
    }
    assert found["inputs"]["words"]["files"] == 2
    assert [file["path"] for file in found["inputs"]["words"]["paths"]] == ["a.json", FILES[1].path]
    assert [(p["name"], p["vote"], p["promoted_at"] is not None) for p in found["participants"]] == [
        ("lake", True, True)
    ]
    assert [event["action"] for event in found["events"]] == [
        "begin",
        "attempt",
        "precommitted",
        "committing",
        "committed",
    ]


def test_show_gives_the_newest_revision_unless_told(record: PostgresRecord, pipeline: str) -> None:
    first = bring(record, make(record, pipeline), State.ABORTED)
    again(record, first)

    with record.engine.connect() as connection:
        assert queries.show(connection, pipeline, 1)["revision"] == 2
        assert queries.show(connection, pipeline, 1, 1)["state"] == "ABORTED"
        with pytest.raises(ConfigError, match=f"checkpoint {pipeline}/1 r3: it is not in the record"):
            queries.show(connection, pipeline, 1, 3)
        with pytest.raises(
            ConfigError, match=f"checkpoint {pipeline}/2: it is not in the record; `twophase checkpoints"
        ):
            queries.show(connection, pipeline, 2)


@pytest.mark.parametrize(
    "ask",
    [
        lambda connection: queries.checkpoints(connection, "nobody"),
        lambda connection: queries.show(connection, "nobody", 1),
        lambda connection: queries.declaration(connection, "nobody"),
    ],
)
def test_a_pipeline_that_is_not_in_the_record_is_named(record: PostgresRecord, ask: Callable[[Any], Any]) -> None:
    with record.engine.connect() as connection, pytest.raises(ConfigError, match="pipeline 'nobody': it is not in"):
        ask(connection)


def test_the_list_of_pipelines_says_what_was_last_and_what_is_pending(record: PostgresRecord, pipeline: str) -> None:
    bring(record, make(record, pipeline), State.COMMITTED)
    bring(record, make(record, pipeline), State.COMMITTING)
    make(record, pipeline)

    with record.engine.connect() as connection:
        found = next(row for row in queries.pipelines(connection) if row["pipeline"] == pipeline)
        assert pipeline in queries.names(connection)

    assert (found["last_checkpoint"], found["last_commit_seq"], found["pending"]) == (1, 1, 2)


def held(record: PostgresRecord, pipeline: str, as_of: datetime | int | None = None) -> list[tuple[int, int, int]]:
    """Return what the sink held: checkpoint, revision, commit_seq."""
    found = queries.promoted(record.engine, pipeline, "lake", as_of)
    return [(*p.output.key[1:], p.output.commit_seq or 0) for p in found]


def test_as_of_gives_what_was_committed_then_replaced_revisions_included(record: PostgresRecord, pipeline: str) -> None:
    """Checkpoint 1 is replaced twice, checkpoint 3 is decided and not promoted; by time and by commit_seq."""
    times = [sql(record, "SELECT clock_timestamp()")]
    one = make(record, pipeline)
    for key in (one, lambda: make(record, pipeline), lambda: again(record, one), lambda: again(record, one)):
        bring(record, key if isinstance(key, Key) else key(), State.COMMITTED)
        times.append(sql(record, "SELECT clock_timestamp()"))
    bring(record, make(record, pipeline), State.COMMITTING)
    expected = [
        [],
        [(1, 1, 1)],
        [(1, 1, 1), (2, 1, 2)],
        [(2, 1, 2), (1, 2, 3)],
        [(2, 1, 2), (1, 3, 4)],
    ]

    assert [held(record, pipeline, seq) for seq in range(5)] == expected
    assert [held(record, pipeline, time) for time in times] == expected
    assert held(record, pipeline, 5) == held(record, pipeline) == expected[-1]


def test_as_of_the_very_moment_of_a_replacement_is_the_new_one(record: PostgresRecord, pipeline: str) -> None:
    first = bring(record, make(record, pipeline), State.COMMITTED)
    second = bring(record, again(record, first), State.COMMITTED)
    moment = read(record, second).committed_at

    assert held(record, pipeline, moment) == [(1, 2, 2)]


def test_what_was_promoted_carries_the_attempt_and_its_manifest(record: PostgresRecord, pipeline: str) -> None:
    key = bring(record, make(record, pipeline), State.COMMITTED)

    found = list(queries.promoted(record.engine, pipeline, "lake"))

    assert found == [queries.Promoted(Output(key, 1, {}, MANIFEST, commit_seq=1, sink="lake"), None)]
    assert held(record, pipeline) == [(1, 1, 1)]


def test_the_last_schema_is_the_one_of_the_last_decision(record: PostgresRecord, pipeline: str) -> None:
    key = make(record, pipeline)
    found = []

    for step in STEPS[State.COMMITTED]:
        with record.transaction() as tx:
            found.append(queries.last_schema(tx.connection, pipeline, "lake"))
            step(tx, key)
    with record.transaction() as tx:
        found.append(queries.last_schema(tx.connection, pipeline, "lake"))
        other = queries.last_schema(tx.connection, pipeline, "dwh")

    assert found == [None, None, None, MANIFEST["schema"], MANIFEST["schema"]]
    assert other is None
