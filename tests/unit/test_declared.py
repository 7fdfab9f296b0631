"""Parts are kept by name and arguments, and come back equal or with a clear error."""

from __future__ import annotations

import os.path
from pathlib import Path
from typing import Any

import pytest

from twophase import audits, committers, sinks, sources
from twophase.core.declared import MOVED, Declared, current, current_name, import_path, public_name
from twophase.core.errors import ConfigError
from twophase.sinks.base import Sink
from twophase.sources.base import Source


class Part(Declared):
    """A part of a user's own."""

    def __init__(self, path: str, limit: int | None = None) -> None:
        self.path = path
        self.limit = limit

    def config(self) -> dict[str, Any]:
        return {"path": self.path, "limit": self.limit}


def test_a_part_comes_back_from_its_declaration() -> None:
    declaration = sinks.Files("/lake/words", format="csv", partition_by=["dt"], options={"sep": ";"}).declaration()

    again = Sink.load(declaration)

    assert isinstance(again, sinks.Files)
    assert again.declaration() == declaration
    assert declaration["class"] == "twophase.sinks:Files"


def test_loading_leaves_the_declaration_as_it_was() -> None:
    declaration = sinks.Files("/lake/words").declaration()
    before = dict(declaration)

    Sink.load(declaration)

    assert declaration == before


def test_a_relative_path_is_kept_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Recovery may run with another run folder: the record says where the table was."""
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    declaration = sinks.Files("lake/words").declaration()
    monkeypatch.setenv("TWOPHASE_HOME", "/elsewhere")

    assert Sink.load(declaration).location() == f"{tmp_path}/data/lake/words"


def test_a_part_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"twophase.sinks:Files: expected a subclass of twophase.sources.base"):
        Source.load(sinks.Files("/lake/words").declaration())


def test_what_is_no_class_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"os.path:join: expected a subclass of"):
        Declared.load({"class": "os.path:join"})


def test_import_path_names_anything_in_a_module() -> None:
    assert import_path("os.path:join") is os.path.join
    assert import_path("pathlib:Path.joinpath") is Path.joinpath


@pytest.mark.parametrize("path", ["", ":", "os", "os:", ":join", "None"])
def test_an_import_path_without_module_or_name_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"^import path '.*': expected `module:name`$"):
        import_path(path)


@pytest.mark.parametrize(("path", "missing"), [("no_such:x", "no_such"), ("os.no_such:x", "os.no_such")])
def test_a_module_that_is_not_there_is_named(path: str, missing: str) -> None:
    with pytest.raises(ConfigError, match=rf"no module '{missing}'; is its folder on the path\?"):
        import_path(path)


@pytest.mark.parametrize("path", ["os.path:no_such", "os.path:join.no_such"])
def test_a_name_that_is_not_in_its_module_is_named(path: str) -> None:
    with pytest.raises(ConfigError, match=r"module 'os.path' has no '"):
        import_path(path)


def test_a_module_that_cannot_import_something_else_says_so_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise the user's module would seem to be missing while it is one of its own imports that is."""
    (tmp_path / "broken_part.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        import_path("broken_part:Part")


def test_a_declaration_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected `module:name`"):
        Declared.load({})


def test_a_part_of_a_users_own_is_kept_by_its_import_path() -> None:
    declaration = Part("here", limit=3).declaration()

    assert declaration == {"class": f"{__name__}:Part", "path": "here", "limit": 3}


# --- names that survive a move ---------------------------------------------------------------------------------------

SHIPPED = [
    *(getattr(sinks, name) for name in ("Delta", "Files", "Iceberg", "Postgres", "WriteAhead")),
    *(getattr(sources, name) for name in ("Committed", "Files", "Interval", "Kafka", "Lookup")),
    *(getattr(committers, name) for name in ("File", "Postgres")),
    *(getattr(audits, name) for name in ("Expression", "Fresh", "NotNull", "RowCount", "Sql", "Unique", "ValuesIn")),
]


@pytest.mark.parametrize("cls", SHIPPED, ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_a_shipped_part_is_kept_by_the_name_that_users_import_it_by(cls: type[Declared]) -> None:
    """Modules may move then: no record has to be told."""
    name = public_name(cls, cls.public_module)

    assert name == f"{cls.public_module}:{cls.__qualname__}"
    assert cls.public_module.count(".") == 1
    assert import_path(name) is cls


def test_a_part_of_a_users_own_is_not_taken_for_the_shipped_one_of_its_name() -> None:
    class Files(sinks.Files):
        pass

    assert public_name(Files, Files.public_module) == f"{__name__}:{Files.__qualname__}"


@pytest.mark.parametrize("old", MOVED)
def test_a_name_in_a_record_of_an_earlier_version_is_still_understood(old: str) -> None:
    assert import_path(old) is import_path(MOVED[old])


def test_a_name_is_brought_to_today_without_what_it_names() -> None:
    """A job that an operator of a user's own submitted is compared by name after that operator is gone."""
    assert current_name("twophase.airflow.stage:StageOperator") == "twophase.airflow:StageOperator"
    assert current_name("gone.with.its:Operator") == "gone.with.its:Operator"


def test_a_declaration_with_old_names_is_one_with_the_names_of_today() -> None:
    """Its parts too: a write-ahead sink keeps the declaration of its committer inside its own."""
    sink = sinks.WriteAhead("support.sinks.senders:Http", committer=committers.File(), path="/log")
    new = sink.declaration()
    old = {**new, "class": "twophase.sinks.write_ahead:WriteAhead"}
    old["committer"] = {**new["committer"], "class": "twophase.sinks.committers:File"}

    assert current(old) == new
    assert Sink.load(old).declaration() == new
    assert sink.changes(old, pending=True) == []


def test_a_read_of_another_pipelines_table_stays_with_that_pipeline() -> None:
    """Its position is a commit_seq of that pipeline: in another one it would mean something else."""
    old = sources.Committed("orders", "lake").declaration()

    assert sources.Committed("orders", "lake", max_checkpoints=3).changes(old, pending=True) == []
    assert sources.Committed("bills", "lake").changes(old, pending=False) == [
        "pipeline was 'orders' and is now 'bills'",
    ]
