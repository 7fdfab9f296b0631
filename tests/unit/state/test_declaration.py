"""What a user declares of a state, and how the record keeps it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from twophase import State
from twophase.core.declared import Declared
from twophase.core.errors import ConfigError
from twophase.formats import ddl


def test_a_state_is_built_again_from_its_declaration() -> None:
    state = State(["word", "day"], "word string, `day` DATE, n: long, p decimal(12, 2)", ttl="7d", retain="2w")
    again = Declared.load(state.declaration())

    assert state.declaration()["class"] == "twophase:State"
    assert isinstance(again, State)
    assert again.config() == state.config()
    assert [tuple(column) for column in again.columns] == [
        ("word", "string"), ("day", "date"), ("n", "bigint"), ("p", "decimal(12,2)"),
    ]  # fmt: skip
    assert [column.name for column in again.values] == ["n", "p"]
    assert again.lives_for == timedelta(days=7)


def test_the_key_columns_come_in_the_order_of_the_key() -> None:
    assert [column.name for column in State(["b", "a"], "a int, b string, c int").keys] == ["b", "a"]


def test_the_folder_follows_from_the_pipeline_unless_a_path_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOPHASE_HOME", "/h")

    assert State(["k"], "k int, v int").home("p") == Path("/h/data/state/p.twophase")
    assert State(["k"], "k int, v int").home("p", "counts") == Path("/h/data/state/p.counts.twophase")
    assert State(["k"], "k int, v int", path="kept/x").home("p") == Path("/h/data/kept/x.twophase")
    assert State(["k"], "k int, v int", path="/mnt/x").home("p") == Path("/mnt/x.twophase")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("BYTE", "tinyint"), ("short", "smallint"), ("integer", "int"), ("Long", "bigint"), ("real", "float"),
        ("dec", "decimal(10,0)"), ("numeric(5)", "decimal(5,0)"), ("decimal( 38 , 18 )", "decimal(38,18)"),
        ("timestamp_ltz", "timestamp"), ("timestamp_ntz", "timestamp_ntz"),
        ("array<struct<a: integer, `b`: map<string, long>>>", "array<struct<a:int,b:map<string,bigint>>>"),
        ("STRUCT<a INT, b STRING>", "struct<a:int,b:string>"),
    ],
)  # fmt: skip
def test_types_get_the_names_that_spark_gives_them(kind: str, name: str) -> None:
    assert ddl.columns(f"x {kind}") == (("x", name),)


@pytest.mark.parametrize(
    ("key", "schema", "said"),
    [
        ([], "k int, v int", "no key"),
        (["x"], "k int, v int", "key column 'x' is not in the schema; there is k, v"),
        (["k", "k"], "k int, v int", "each column once"),
        (["k"], "k int", "every column is a key"),
        (["k"], "k float, v int", "key column 'k' is float"),
        (["k"], "k double, v int", "key column 'k' is double"),
        (["k"], "k map<int,int>, v int", "key column 'k' is map<int,int>"),
        (["k"], "k array<int>, v int", "key column 'k' is array<int>"),
        (["k"], "k struct<a:int>, v int", "key column 'k' is struct<a:int>"),
        (["k"], "k variant, v int", "type variant is not known"),
        (["k"], "k string collate UNICODE, v int", "collate"),
        (["k"], "k int not null, v int", "not null"),
        (["k"], "k int, K int", "more than one column is named k"),
        (["k"], "k int, _v int", "column _v"),
        (["k"], "k int, v", "expected a name and a type"),
        (["k"], "k int, v decimal(40,2)", "decimal"),
        (["k"], "", "expected a name and a type"),
    ],
)
def test_a_state_that_cannot_be_kept_is_refused_when_it_is_declared(key: list[str], schema: str, said: str) -> None:
    with pytest.raises(ConfigError, match="state: ") as error:
        State(key, schema)

    assert said in str(error.value)


def test_lengths_of_time_and_the_path_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="state: ttl 'soon'"):
        State(["k"], "k int, v int", ttl="soon")
    with pytest.raises(ConfigError, match="state: retain '0d'"):
        State(["k"], "k int, v int", retain="0d")
    with pytest.raises(ConfigError, match="mapped into memory from shared POSIX storage"):
        State(["k"], "k int, v int", path="s3://bucket/x")
