"""Two sets of rows: what was added, removed and changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from twophase.comparison import Comparison, compare
from twophase.core.errors import ConfigError
from twophase.row_queries.duckdb_rows import DuckDBRows

SCHEMA = [["id", "bigint"], ["word", "string"]]
TYPES = {"bigint": pa.int64(), "int": pa.int32(), "string": pa.string(), "double": pa.float64()}


@pytest.fixture
def side(tmp_path: Path) -> Any:
    """Return a function that makes one side of a comparison of rows."""
    made = iter(range(10))

    def make(*rows: tuple[Any, ...], schema: list[list[str]] = SCHEMA) -> DuckDBRows:
        path = tmp_path / f"{next(made)}.parquet"
        columns = zip(*rows, strict=True) if rows else [[] for _ in schema]
        arrays = {
            name: pa.array(list(values), TYPES.get(kind)) for (name, kind), values in zip(schema, columns, strict=True)
        }
        pq.write_table(pa.table(arrays), path)
        return DuckDBRows([str(path)], schema)

    return make


def counts(found: Comparison) -> tuple[int, int, int | None]:
    return found.added, found.removed, found.changed


# --- without a key ---------------------------------------------------------------------------------------------------


def test_the_same_rows_in_another_order_are_the_same(side: Any) -> None:
    found = compare(side((1, "a"), (2, None), (2, None)), side((2, None), (1, "a"), (2, None)))

    assert found.same
    assert counts(found) == (0, 0, None)
    assert (found.old_rows, found.new_rows) == (3, 3)


def test_a_row_that_is_there_once_more_is_added(side: Any) -> None:
    found = compare(side((1, "a"), (2, "b")), side((1, "a"), (1, "a"), (1, "a")))

    assert counts(found) == (2, 1, None)
    assert not found.same


def test_nulls_equal_nulls_and_nothing_else(side: Any) -> None:
    found = compare(side((None, None), (None, "")), side((None, None), (None, "x")))

    assert counts(found) == (1, 1, None)


def test_not_a_number_equals_itself(side: Any) -> None:
    schema = [["x", "double"]]

    assert compare(side((float("nan"),), schema=schema), side((float("nan"),), schema=schema)).same


def test_two_empty_sides_are_the_same() -> None:

    assert compare(DuckDBRows([], SCHEMA), DuckDBRows([], SCHEMA)).same


def test_rows_may_come_from_no_file_on_one_side(side: Any) -> None:
    found = compare(side((1, "a"), (2, "b")), DuckDBRows([], SCHEMA), samples=1)

    assert counts(found) == (0, 2, None)
    assert found.samples == {"removed": [{"id": 1, "word": "a"}]}


# --- with a key ------------------------------------------------------------------------------------------------------


def test_with_a_key_changed_rows_are_told_from_added_and_removed_ones(side: Any) -> None:
    old = side((1, "same"), (2, "old"), (3, "gone"), (None, "old"))
    new = side((1, "same"), (2, "new"), (4, "come"), (None, None))

    found = compare(old, new, key=["ID"], samples=5)

    assert counts(found) == (1, 1, 2)
    assert found.samples == {
        "added": [{"id": 4, "word": "come"}],
        "removed": [{"id": 3, "word": "gone"}],
        "changed": [
            {"key": {"id": 2}, "old": {"word": "old"}, "new": {"word": "new"}},
            {"key": {"id": None}, "old": {"word": "old"}, "new": {"word": None}},
        ],
    }


def test_a_key_may_be_several_columns(side: Any) -> None:
    schema = [["v", "bigint"], ["a", "bigint"], ["b", "bigint"]]

    found = compare(
        side((1, 1, 1), (2, 1, 2), schema=schema), side((1, 1, 1), (3, 1, 2), schema=schema), key=["a", "b"]
    )

    assert counts(found) == (0, 0, 1)


def test_a_key_of_all_columns_changes_nothing(side: Any) -> None:
    found = compare(side((1, "a")), side((1, "b")), key=["id", "word"])

    assert counts(found) == (1, 1, 0)


@pytest.mark.parametrize("doubled", ["old", "new"])
def test_a_doubled_key_is_an_error_that_shows_one(side: Any, doubled: str) -> None:
    """Also where both sides are equal: the user believes something that is not so."""
    sides = {"old": side((7, "a")), "new": side((7, "a")), doubled: side((7, "a"), (7, "a"))}

    with pytest.raises(ConfigError, match=rf"key id: in the {doubled} rows 1 of its values.*id=7"):
        compare(**sides, key=["id"])


def test_a_key_that_is_no_column_is_an_error_that_names_the_columns(side: Any) -> None:
    with pytest.raises(ConfigError, match="key nr: no such column on both sides, expected some of id, word"):
        compare(side((1, "a")), side((1, "a")), key=["id", "nr"])


# --- schemas ---------------------------------------------------------------------------------------------------------


def test_a_column_of_one_side_is_told_and_not_compared(side: Any) -> None:
    old = side((1, "a", 5), schema=[*SCHEMA, ["gone", "bigint"]])
    new = side((1, "a", "x"), schema=[*SCHEMA, ["come", "string"]])

    found = compare(old, new)

    assert counts(found) == (0, 0, None)
    assert not found.same
    assert found.schema == ("column 'gone' (bigint) was removed", "column 'come' (string) was added")
    assert found.ignored == ("gone", "come")
    assert found.lines()[-1] == "not compared, since only one side has it: gone, come"


def test_columns_are_compared_by_name_whatever_their_order_and_letter_case(side: Any) -> None:
    assert compare(side((1, "a")), side(("a", 1), schema=[["WORD", "string"], ["id", "bigint"]])).same


@pytest.mark.parametrize(("kind", "value"), [("int", 1), ("string", "1"), ("double", 1.0)])
def test_a_column_of_another_type_is_told_and_compared_by_value(side: Any, kind: str, value: Any) -> None:
    found = compare(side((1,), schema=[["id", "bigint"]]), side((value,), schema=[["id", kind]]))

    assert counts(found) == (0, 0, None)
    assert found.schema == (f"column 'id' was bigint and is now {kind}",)


def test_types_that_have_nothing_in_common_are_compared_as_text(side: Any) -> None:
    found = compare(side((1,), schema=[["id", "bigint"]]), side(([1],), schema=[["id", "array<bigint>"]]))

    assert counts(found) == (1, 1, None)


def test_sides_without_a_common_column_are_an_error(side: Any) -> None:
    with pytest.raises(ConfigError, match="nothing to compare: old has a, new has b"):
        compare(side((1,), schema=[["a", "bigint"]]), side((1,), schema=[["b", "bigint"]]))


def test_the_order_of_a_maps_entries_means_nothing(tmp_path: Path) -> None:
    sides: list[DuckDBRows] = []
    for number, entries in enumerate([[("a", 1), ("b", 2)], [("b", 2), ("a", 1)]]):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({"m": pa.array([entries], pa.map_(pa.string(), pa.int64()))}), path)
        sides.append(DuckDBRows([str(path)], [["m", "map<string,bigint>"]]))

    assert compare(sides[0], sides[1]).same


# --- samples ---------------------------------------------------------------------------------------------------------


def test_no_samples_unless_asked_for(side: Any) -> None:
    assert compare(side((1, "a")), side((1, "b"))).samples == {}


def test_samples_are_json_and_cut(side: Any) -> None:
    schema = [["id", "bigint"], ["raw", "binary"], ["word", "string"]]
    new = side(*((n, b"\xff" * 1000, "x" * 10_000) for n in range(20)), schema=schema)

    found = compare(DuckDBRows([], schema), new, samples=3)

    rows = json.loads(json.dumps(found.summary()))["samples"]["added"]
    assert [row["id"] for row in rows] == [0, 1, 2]
    assert all(len(row["raw"]) == len(row["word"]) == 200 for row in rows)


def test_of_a_changed_row_only_what_differs_is_shown_even_at_the_end_of_a_long_value(side: Any) -> None:
    schema = [["id", "bigint"], *([f"c{n}", "string"] for n in range(300))]
    old = side((1, *("x" * 500 for _ in range(300))), schema=schema)
    new = side((1, *("x" * 500 for _ in range(299)), "x" * 499 + "y"), schema=schema)

    found = compare(old, new, key=["id"], samples=1).samples["changed"][0]

    assert found["key"] == {"id": 1}
    assert list(found["old"]) == list(found["new"]) == ["c299"]


def test_a_column_may_be_named_like_ours(side: Any) -> None:
    schema = [["n", "bigint"], ["c1", "bigint"], ["c0", "bigint"]]

    found = compare(side((1, 2, 3), schema=schema), side((1, 2, 4), schema=schema), key=["c1"], samples=1)

    assert found.samples["changed"] == [{"key": {"c1": 2}, "old": {"c0": 3}, "new": {"c0": 4}}]


def test_it_says_in_words_what_it_found(side: Any) -> None:
    assert compare(side((1, "a")), side((1, "b"), (2, "c")), key=["id"]).lines() == [
        "rows: 1 before, 2 now: 1 added, 0 removed, 1 changed"
    ]
    assert compare(side((1, "a")), side()).lines() == ["rows: 1 before, 0 now: 0 added, 1 removed"]
