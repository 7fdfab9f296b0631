"""Who writes where: a table has one pipeline, and what of a declaration may change."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.pipelines.record_steps import bring, make, put, sql
from twophase.committer import queries
from twophase.committer.record import PostgresRecord
from twophase.core.errors import ConfigError
from twophase.core.states import State


@pytest.fixture
def place() -> str:
    """Return a location that no other test uses."""
    return f"/lake/{uuid.uuid4().hex}"


def fresh() -> str:
    return f"p_{uuid.uuid4().hex[:12]}"


def owner(record: PostgresRecord, location: str) -> str | None:
    found: str | None = sql(record, "SELECT pipeline FROM twophase.output WHERE location = :l", l=location)
    return found


def test_registering_again_changes_nothing(record: PostgresRecord, place: str) -> None:
    name = fresh()
    query = "SELECT updated_at FROM twophase.pipeline WHERE name = :n"

    put(record, name, {"lake": place}, {"a": 1})
    before = sql(record, query, n=name)
    put(record, name, {"lake": place}, {"a": 1})

    assert sql(record, query, n=name) == before
    assert owner(record, place) == name


@pytest.mark.parametrize("suffix", ["", "/inside", "/deeper/inside", ".twophase", ".twophase/staging"])
def test_two_pipelines_cannot_share_a_table(record: PostgresRecord, place: str, suffix: str) -> None:
    first, second = fresh(), fresh()
    put(record, first, {"lake": place})

    with pytest.raises(ConfigError, match=rf"belongs to pipeline '{first}' \(write 'lake'\); two cannot share a table"):
        put(record, second, {"out": place + suffix})

    with record.engine.connect() as connection:
        assert second not in queries.names(connection)


def test_a_table_cannot_be_put_around_another(record: PostgresRecord, place: str) -> None:
    first, second = fresh(), fresh()
    put(record, first, {"lake": f"{place}/deeper/inside"})

    with pytest.raises(ConfigError, match=f"but {place}/deeper/inside belongs to pipeline '{first}'"):
        put(record, second, {"out": place})


@pytest.mark.parametrize("sibling", ["_2", "%", "2/inside", ".archive"])
def test_a_table_beside_another_is_fine(record: PostgresRecord, place: str, sibling: str) -> None:
    first, second = fresh(), fresh()
    put(record, first, {"lake": place})

    put(record, second, {"out": place + sibling})

    assert owner(record, place + sibling) == second


def test_a_sign_with_a_meaning_in_patterns_is_only_a_sign(record: PostgresRecord, place: str) -> None:
    put(record, fresh(), {"lake": f"{place}/aXb/inside"})
    name = fresh()

    put(record, name, {"out": f"{place}/a_b"})

    assert owner(record, f"{place}/a_b") == name


def test_a_moved_path_frees_the_old_one(record: PostgresRecord, place: str) -> None:
    first, second = fresh(), fresh()
    put(record, first, {"lake": place}, {"path": place})

    put(record, first, {"lake": f"{place}_moved"}, {"path": f"{place}_moved"})
    put(record, second, {"out": place})

    assert (owner(record, place), owner(record, f"{place}_moved")) == (second, first)


def test_a_write_keeps_its_name_once_there_is_a_checkpoint(record: PostgresRecord, place: str) -> None:
    """By the name the record knows what is in the table, and what another revision replaces there."""
    name = fresh()
    put(record, name, {"lake": place})
    put(record, name, {"words": place})
    make(record, name)

    with pytest.raises(ConfigError, match=f"write 'table' goes to {place}, which is that of write 'words'"):
        put(record, name, {"table": place})

    put(record, name, {"words": place, "table": f"{place}_2"})
    assert owner(record, f"{place}_2") == name


def test_incompatible_changes_are_refused_once_there_is_a_checkpoint(record: PostgresRecord, place: str) -> None:
    name = fresh()
    put(record, name, {"lake": place}, {"a": 1})
    put(record, name, {"lake": place}, {"a": 2}, lambda _old, _pending: ["never asked"])
    make(record, name)

    with pytest.raises(ConfigError) as raised:
        put(
            record, name, {"lake": f"{place}_moved"}, {"a": 3}, lambda old, pending: [f"a was {old['a']}", str(pending)]
        )

    assert str(raised.value) == (
        f"pipeline {name!r}: its declaration changed incompatibly since checkpoint 1: a was 2; True;"
        " put it back, or give the pipeline a new name"
    )
    assert owner(record, place) == name
    with record.engine.connect() as connection:
        assert queries.declaration(connection, name) == {"a": 2}


@pytest.mark.parametrize("state", State)
def test_changes_are_asked_with_whether_a_checkpoint_is_pending(record: PostgresRecord, state: State) -> None:
    name = fresh()
    put(record, name, {}, {"a": 1})
    bring(record, make(record, name), state)
    asked: list[bool] = []

    def changes(_: Any, pending: bool) -> list[str]:
        asked.append(pending)
        return []

    put(record, name, {}, {"a": 2}, changes)

    assert asked == [state not in {State.COMMITTED, State.SUPERSEDED, State.ABORTED}]
    with record.engine.connect() as connection:
        assert queries.declaration(connection, name) == {"a": 2}


def test_of_many_that_register_one_location_at_once_one_wins(record: PostgresRecord, place: str) -> None:
    """One inside another counts as the same: no unique index could tell."""
    start = threading.Barrier(6)
    candidates = {fresh(): place + "/inside" * (number % 2) for number in range(6)}

    def enter(name: str) -> str | None:
        start.wait()
        try:
            put(record, name, {"out": candidates[name]})
        except ConfigError:
            return None
        return name

    with ThreadPoolExecutor(6) as pool:
        won = [name for name in pool.map(enter, candidates) if name]

    assert len(won) == 1
    assert owner(record, candidates[won[0]]) == won[0]
    with record.engine.connect() as connection:
        assert set(candidates) & set(queries.names(connection)) == set(won)


def test_one_pipeline_may_be_registered_by_many_at_once(record: PostgresRecord, place: str) -> None:
    name = fresh()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: put(record, name, {"out": place}, {"a": 1}), range(6)))

    assert owner(record, place) == name
