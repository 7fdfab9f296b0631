"""A mistake in a declaration is an error where it is declared; a declaration survives the record."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from twophase import Pipeline, sinks, sources
from twophase.core.declared import import_path
from twophase.core.errors import ConfigError
from twophase.runner import stager_for


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))


def copy(words: Any) -> Any:
    return words


def declare(name: str = "words", **changed: Any) -> Pipeline:
    """Declare a pipeline that is right but for what the test changes."""
    parts: dict[str, Any] = {
        "reads": {"words": sources.Files("landing/words", format="json")},
        "transform": "word_count:transform",
        "writes": {"lake": sinks.Files("lake/words")},
    }
    return Pipeline(name, **{**parts, **changed})


def read(path: str = "landing/words", **kwargs: Any) -> sources.Files:
    return sources.Files(path, **{"format": "json", **kwargs})


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["w", "words", "word_count_2", "a" * 200])
def test_a_plain_name_is_taken(name: str) -> None:
    assert declare(name).name == name


@pytest.mark.parametrize(
    "name", ["", "Words", "2words", "_words", "word-count", "word count", "wörds", "words\n", "../words", None, 7]
)
def test_a_name_that_the_record_could_not_keep_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"^pipeline name .*: expected lower-case letters, digits and _"):
        declare(name)


@pytest.mark.parametrize("part", ["reads", "writes"])
def test_a_pipeline_without_a_part_is_refused(part: str) -> None:
    with pytest.raises(ConfigError, match=rf"expected at least one {part[:-1]}, found none"):
        declare("words", **{part: {}})


@pytest.mark.parametrize("name", ["", "Lake", "la-ke", "1lake", "lake\n"])
def test_a_part_with_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"read name .*: expected lower-case letters"):
        declare(reads={name: read()})
    with pytest.raises(ConfigError, match=r"write name .*: expected lower-case letters"):
        declare(writes={name: sinks.Files("lake/words")})


def test_a_part_of_the_wrong_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"read 'words': expected one of .*, found 'landing'"):
        declare(reads={"words": "landing"})
    with pytest.raises(ConfigError, match=r"write 'lake': expected one of"):
        declare(writes={"lake": read()})


@pytest.mark.parametrize("name", ["spark", "state", "context"])
def test_a_read_cannot_take_a_name_that_transforms_get_something_else_by(name: str) -> None:
    with pytest.raises(ConfigError, match=f"a read cannot be named '{name}'"):
        declare(reads={name: read()})


@pytest.mark.parametrize("transform", ["", "word_count", "word_count:", ":transform", "word-count:f", "a:b:c", "a: b"])
def test_a_transform_that_is_no_import_path_is_refused(transform: str) -> None:
    with pytest.raises(ConfigError, match=r"transform '.*': expected `module:function`"):
        declare(transform=transform)


@pytest.mark.parametrize("transform", [7, ["word_count:transform"]])
def test_a_transform_that_cannot_be_called_is_refused(transform: Any) -> None:
    with pytest.raises(ConfigError, match=r"transform.*expected `module:function` or a function"):
        declare(transform=transform)


def test_a_pipeline_without_a_transform_is_for_a_job_of_ones_own_and_cannot_be_run_here() -> None:
    declared = declare(transform=None)

    assert Pipeline.from_declaration("orders", declared.declaration()).transform is None
    with pytest.raises(ConfigError, match="only the stage task of Airflow can submit its job"):
        stager_for(declared)


@pytest.mark.parametrize("max_pending", [0, -1])
def test_max_pending_below_one_is_refused(max_pending: int) -> None:
    with pytest.raises(ConfigError, match=r"max_pending: expected a number above 0, found"):
        declare(max_pending=max_pending)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("lake/words", "lake/words"),
        ("lake/words", "lake/words/"),
        ("lake/words", "./lake/../lake/words"),
        ("lake/words", "lake/words/deeper/still"),
        ("lake/words/deeper", "lake/words"),
        ("lake", "lake/words"),
    ],
)
def test_two_writes_cannot_share_a_folder(one: str, other: str) -> None:
    with pytest.raises(ConfigError, match=r"write 'a' and write 'b' overlap at .*; give each a folder of its own"):
        declare(writes={"a": sinks.Files(one), "b": sinks.Files(other)})


@pytest.mark.parametrize("path", ["landing/words", "landing/words/out", "landing"])
def test_a_write_cannot_share_a_folder_with_a_read(path: str) -> None:
    with pytest.raises(ConfigError, match=r"write 'lake' and read 'words' overlap at"):
        declare(writes={"lake": sinks.Files(path)})


def test_an_absolute_path_is_the_same_folder_as_its_relative_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"overlap"):
        declare(writes={"lake": sinks.Files(f"{tmp_path}/data/landing/words")})


def test_folders_side_by_side_do_not_overlap() -> None:
    writes = {"a": sinks.Files("lake/words"), "b": sinks.Files("lake/words_2"), "c": sinks.Files("lake/words.old")}

    assert list(declare(writes=writes).writes) == ["a", "b", "c"]


def test_two_reads_may_share_a_folder() -> None:
    reads = {"words": read("landing"), "again": read("landing/words")}

    assert list(declare(reads=reads).reads) == ["words", "again"]


@pytest.mark.parametrize("path", ["lake/words.twophase", "lake/words.twophase/staging"])
def test_a_write_cannot_share_the_folder_beside_another_table(path: str) -> None:
    """What is staged there would be read as part of the other table, and swept with it."""
    with pytest.raises(ConfigError, match=r"overlap"):
        declare(writes={"a": sinks.Files("lake/words"), "b": sinks.Files(path)})


def test_the_run_folder_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is `.twophase`, the ending of the folders beside tables."""
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path / ".twophase"))

    assert declare(writes={"a": sinks.Files("lake/a"), "b": sinks.Files("lake/b")}).name


def test_a_write_cannot_share_the_archive_of_a_read() -> None:
    reads = {"words": read(after_commit="archive")}

    with pytest.raises(ConfigError, match=r"overlap"):
        declare(reads=reads, writes={"lake": sinks.Files("landing/words.archive")})


# --- the record ------------------------------------------------------------------------------------------------------


def test_a_declaration_survives_the_record() -> None:
    pipeline = declare(
        reads={"words": read(max_files=3, options={"multiLine": True}), "more": read("landing/more", format="csv")},
        writes={"lake": sinks.Files("lake/words", partition_by=["dt"]), "csv": sinks.Files("lake/csv", format="csv")},
        max_pending=4,
    )

    kept = json.loads(json.dumps(pipeline.declaration()))
    again = Pipeline.from_declaration("words", kept)

    assert again.declaration() == kept == pipeline.declaration()
    assert again.changes(kept, pending=True) == []


def test_a_function_is_kept_by_its_import_path() -> None:
    transform = declare(transform=copy).declaration()["transform"]

    assert transform == f"{__name__}:copy"


def test_a_function_inside_another_is_kept_by_name_and_refuses_to_run() -> None:
    declaration = declare(transform=lambda words: words).declaration()

    again = Pipeline.from_declaration("words", declaration)

    assert callable(again.transform)
    with pytest.raises(ConfigError, match=r"only the process that declared it can run it"):
        again.transform("words")


def test_a_transform_that_is_callable_but_no_function_can_be_declared() -> None:
    assert declare(transform=functools.partial(copy)).declaration()


def test_a_declaration_is_importable() -> None:
    declaration = declare().declaration()

    assert import_path(declaration["reads"]["words"]["class"]) is sources.Files
    assert import_path(declaration["writes"]["lake"]["class"]) is sinks.Files


# --- changes ---------------------------------------------------------------------------------------------------------


OLD: dict[str, Any] = {
    "reads": {"words": read("landing/words"), "more": read("landing/more")},
    "writes": {"lake": sinks.Files("lake/words", partition_by=["dt"]), "copy": sinks.Files("lake/copy")},
}


@pytest.mark.parametrize(
    ("changed", "at_rest", "pending"),
    [
        ({}, [], []),
        ({"transform": "other:transform"}, [], []),
        ({"max_pending": 3}, [], []),
        ({"reads": {**OLD["reads"], "third": read("landing/third")}}, [], []),
        ({"writes": {**OLD["writes"], "third": sinks.Files("lake/third")}}, [], []),
        ({"reads": {"words": read(max_files=1, after_commit="delete"), "more": read("landing/more")}}, [], []),
        (
            {"reads": {"words": read()}},
            ["read 'more' is gone (its input would be read again)"],
            ["read 'more' is gone (its input would be read again)"],
        ),
        (
            {"reads": {"words": read(format="csv"), "more": read("landing/more")}},
            ["read 'words': format was 'json' and is now 'csv'"],
            ["read 'words': format was 'json' and is now 'csv'"],
        ),
        (
            {"reads": {"words": read("landing/moved"), "more": read("landing/more")}},
            [],
            ["read 'words': path was '@/landing/words' and is now '@/landing/moved' while a checkpoint is pending"],
        ),
        (
            {"writes": {"lake": OLD["writes"]["lake"]}},
            [],
            ["write 'copy' is gone (a checkpoint is pending in it)"],
        ),
        (
            {"writes": {**OLD["writes"], "copy": sinks.Files("lake/moved")}},
            [],
            ["write 'copy': path was '@/lake/copy' and is now '@/lake/moved' while a checkpoint is pending"],
        ),
        (
            {"writes": {**OLD["writes"], "copy": sinks.Files("lake/copy", format="json")}},
            ["write 'copy': format was 'parquet' and is now 'json'"],
            ["write 'copy': format was 'parquet' and is now 'json'"],
        ),
        (
            {"writes": {**OLD["writes"], "lake": sinks.Files("lake/words")}},
            ["write 'lake': partition_by was ['dt'] and is now []"],
            ["write 'lake': partition_by was ['dt'] and is now []"],
        ),
    ],
)
def test_what_cannot_follow_an_older_declaration_is_said_in_words(
    tmp_path: Path, changed: dict[str, Any], at_rest: list[str], pending: list[str]
) -> None:
    old = declare(**OLD).declaration()
    new = declare(**{**OLD, **changed})

    assert new.changes(old, pending=False) == at_rest
    assert new.changes(old, pending=True) == [problem.replace("@", f"{tmp_path}/data") for problem in pending]


def test_what_is_staged_for_one_mode_is_not_promoted_in_another() -> None:
    """Staged in the place of the whole table, and applied by key, rows would stay that are gone."""
    old = declare(writes={"dwh": sinks.Postgres("words", conn_id="dwh", mode="replace")}).declaration()
    new = declare(writes={"dwh": sinks.Postgres("words", conn_id="dwh", mode="upsert", key=["id"])})

    assert new.changes(old, pending=False) == []
    assert new.changes(old, pending=True) == [
        "write 'dwh': mode was 'replace' and is now 'upsert' while a checkpoint is pending",
        "write 'dwh': key was [] and is now ['id'] while a checkpoint is pending",
    ]


def test_a_schema_for_staging_stays_while_something_is_staged_there() -> None:
    """A restage has to find what earlier attempts staged."""
    old = declare(writes={"dwh": sinks.Postgres("words", conn_id="dwh")}).declaration()
    new = declare(writes={"dwh": sinks.Postgres("words", conn_id="dwh", staging_schema="elsewhere")})

    assert new.changes(old, pending=False) == []
    (problem,) = new.changes(old, pending=True)
    assert problem.startswith("write 'dwh': staging_schema was ")


def test_another_class_under_an_old_name_is_refused() -> None:
    old = declare().declaration()
    old["writes"]["lake"]["class"] = "elsewhere:Sink"

    assert declare().changes(old, pending=False) == [
        "write 'lake': class was 'elsewhere:Sink' and is now 'twophase.sinks:Files'"
    ]


# --- prepare ---------------------------------------------------------------------------------------------------------


def test_preparing_makes_the_folders_of_every_write(tmp_path: Path) -> None:
    (tmp_path / "data/landing/words").mkdir(parents=True)

    declare().prepare()

    assert (tmp_path / "data/lake/words").is_dir()
    assert sorted(path.name for path in (tmp_path / "data/lake/words.twophase").iterdir()) == [
        "manifests",
        "owner",
        "staging",
        "superseded",
        "taken",
    ]


def test_a_read_that_is_not_there_is_found_before_any_write_is_touched(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no folder"):
        declare().prepare()

    assert not (tmp_path / "data/lake").exists()
