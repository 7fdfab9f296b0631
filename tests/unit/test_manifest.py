"""A manifest says the same for ever, and says what stops one schema from following another."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from twophase.core.checkpoint import Key
from twophase.core.manifest import Column, Manifest, StagedFile, schema_changes, widens, widest
from twophase.storage.disk import digest

MANIFEST = Manifest(
    key=Key("orders", 17, 2),
    sink="lake",
    attempt=3,
    schema=(Column("id", "bigint"), Column("größe", "struct<a:int,b:array<string>>")),
    files=(
        StagedFile("dt=2026-11-15/part-r2-a3-00000.parquet", 1234, 1_763_164_800_123_456_789, 10, "00ff" * 4),
        StagedFile('dt=ä "quoted"\nline/part-00001.parquet', 0, 0, 0, "f" * 16),
    ),
)

EMPTY = replace(MANIFEST, files=(), schema=())


@pytest.mark.parametrize("manifest", [MANIFEST, EMPTY], ids=["two files", "empty"])
def test_a_manifest_reads_back_as_it_was_written(manifest: Manifest) -> None:
    assert Manifest.loads(manifest.dumps()) == manifest


@pytest.mark.parametrize("manifest", [MANIFEST, EMPTY], ids=["two files", "empty"])
def test_a_manifest_is_plain_json(manifest: Manifest) -> None:
    found = json.loads(manifest.dumps())

    assert found["pipeline"] == "orders"
    assert len(found["files"]) == len(manifest.files)


def test_equal_manifests_are_equal_byte_by_byte() -> None:
    again = Manifest.loads(MANIFEST.dumps())

    assert again.dumps() == MANIFEST.dumps()


def test_the_digest_of_a_manifest_does_not_change_between_versions() -> None:
    """Markers on storage carry it: a release that writes the same content differently could not read them back."""
    assert digest(MANIFEST.dumps()) == "981844a59fa9aa5a"
    assert digest(EMPTY.dumps()) == "0679ac017256142c"


@pytest.mark.parametrize(
    "other",
    [
        replace(MANIFEST, key=Key("orders", 17, 1)),
        replace(MANIFEST, key=Key("orders", 18, 2)),
        replace(MANIFEST, sink="dwh"),
        replace(MANIFEST, attempt=4),
        replace(MANIFEST, schema=MANIFEST.schema[::-1]),
        replace(MANIFEST, files=MANIFEST.files[::-1]),
        replace(MANIFEST, files=MANIFEST.files[:1]),
        replace(MANIFEST, files=(MANIFEST.files[0]._replace(rows=11), MANIFEST.files[1])),
        replace(MANIFEST, files=(MANIFEST.files[0]._replace(mtime_ns=1), MANIFEST.files[1])),
        replace(MANIFEST, files=(MANIFEST.files[0]._replace(xxh3="0" * 16), MANIFEST.files[1])),
    ],
)
def test_any_difference_gives_another_digest(other: Manifest) -> None:
    assert digest(other.dumps()) != digest(MANIFEST.dumps())


def test_a_summary_counts_what_the_digest_stands_for() -> None:
    assert MANIFEST.summary("abc") == {
        "digest": "abc",
        "files": 2,
        "rows": 10,
        "bytes": 1234,
        "schema": [["id", "bigint"], ["größe", "struct<a:int,b:array<string>>"]],
    }


BEFORE = [["id", "bigint"], ["word", "string"]]
ORDER = "the order of columns changed, and this format knows columns by position"


@pytest.mark.parametrize(
    ("after", "by_name", "by_position"),
    [
        ([["id", "bigint"], ["word", "string"]], [], []),
        ([["id", "bigint"], ["word", "string"], ["n", "int"]], [], []),
        ([["word", "string"], ["id", "bigint"]], [], [ORDER]),
        ([["id", "bigint"], ["n", "int"], ["word", "string"]], [], [ORDER]),
        ([["id", "bigint"]], ["column 'word' is missing"], ["column 'word' is missing"]),
        (
            [["id", "int"], ["word", "string"]],
            ["column 'id' was bigint and is now int"],
            ["column 'id' was bigint and is now int"],
        ),
        (
            [["word", "binary"]],
            ["column 'id' is missing", "column 'word' was string and is now binary"],
            ["column 'id' is missing", "column 'word' was string and is now binary"],
        ),
        ([["ID", "bigint"], ["word", "string"]], ["column 'id' is missing"], ["column 'id' is missing"]),
        (
            [],
            ["column 'id' is missing", "column 'word' is missing"],
            ["column 'id' is missing", "column 'word' is missing"],
        ),
    ],
)
def test_only_new_columns_may_follow(after: list[list[str]], by_name: list[str], by_position: list[str]) -> None:
    assert schema_changes(BEFORE, after, by_position=False) == by_name
    assert schema_changes(BEFORE, after, by_position=True) == by_position


def test_any_schema_may_follow_none() -> None:
    assert schema_changes([], BEFORE, by_position=True) == []


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        ("tinyint", "smallint"),
        ("tinyint", "bigint"),
        ("int", "bigint"),
        ("float", "double"),
        ("decimal(5,2)", "decimal(12,2)"),
    ],
)
def test_a_type_widens_to_one_that_holds_all_its_values_and_never_back(narrow: str, wide: str) -> None:
    assert widens(narrow, wide)
    assert not widens(wide, narrow)
    assert schema_changes([["n", narrow]], [["n", wide]], by_position=True, may_widen=widens) == []
    assert schema_changes([["n", wide]], [["n", narrow]], by_position=True, may_widen=widens) == [
        f"column 'n' was {wide} and is now {narrow}"
    ]
    assert widest([[["n", narrow], ["x", "string"]], [["n", wide]]]) == [["n", wide], ["x", "string"]]


@pytest.mark.parametrize(
    ("before", "after"),
    [("int", "int"), ("bigint", "double"), ("int", "string"), ("date", "timestamp"), ("decimal(5,2)", "decimal(12,4)")],
)
def test_a_type_that_says_something_else_is_not_wider(before: str, after: str) -> None:
    assert not widens(before, after)
