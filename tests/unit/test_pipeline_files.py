"""The pipelines of a file that a command is given: found by name, alone, or refused in one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from twophase.cli.pipeline_files import load
from twophase.core.errors import ConfigError

ONE = """
from twophase import Pipeline, sinks, sources

{variable} = Pipeline(
    "{name}",
    reads={{"words": sources.Files("landing/{name}", format="json")}},
    transform="jobs:copy",
    writes={{"lake": sinks.Files("lake/{name}")}},
)
"""


@pytest.fixture(autouse=True)
def _path_and_modules() -> Iterator[None]:
    """Undo what executing a file does to this process, as Python does it: its folder is on the path."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("twophase_file_"):
            del sys.modules[name]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "pipelines.py"


def declare(file: Path, **pipelines: str) -> str:
    file.write_text("".join(ONE.format(variable=variable, name=name) for variable, name in pipelines.items()))
    return str(file)


def refused(target: str) -> str:
    """Return the one line that says why."""
    with pytest.raises(ConfigError) as caught:
        load(target)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_only_pipeline_of_a_file_needs_no_name(file: Path) -> None:
    assert load(declare(file, orders="orders")).name == "orders"


def test_a_pipeline_under_two_names_is_still_the_only_one(file: Path) -> None:
    declare(file, orders="orders")
    file.write_text(file.read_text() + "\nalias = orders\n")

    assert load(str(file)).name == "orders"


@pytest.mark.parametrize("name", ["second", "payments"])
def test_one_of_several_is_chosen_by_variable_or_by_its_own_name(file: Path, name: str) -> None:
    declare(file, first="orders", second="payments")

    assert load(f"{file}:{name}").name == "payments"


def test_a_variable_comes_before_another_pipelines_name(file: Path) -> None:
    declare(file, payments="orders", other="payments")

    assert load(f"{file}:payments").name == "orders"


def test_several_without_a_name_are_listed(file: Path) -> None:
    message = refused(declare(file, orders="orders", second="payments"))

    assert "found orders, second (payments)" in message
    assert f"{file}:orders" in message


def test_an_unknown_name_is_answered_with_those_there_are(file: Path) -> None:
    assert refused(declare(file, orders="orders") + ":order") == f"{file}: no pipeline 'order', found orders"


def test_two_pipelines_of_one_name_need_the_variable(file: Path) -> None:
    declare(file, one="orders", two="orders")

    assert "2 pipelines are named 'orders'" in refused(f"{file}:orders")
    assert load(f"{file}:two").name == "orders"


def test_a_file_without_a_pipeline_is_refused(file: Path) -> None:
    file.write_text("x = 1\n")

    assert refused(str(file)) == f"{file}: no pipeline in it; assign one to a variable of the module"


def test_a_missing_file_is_named(file: Path) -> None:
    assert refused(str(file)) == f"{file}: no such file"
    assert refused(f"{file}:orders") == f"{file}: no such file"


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert refused(str(tmp_path)) == f"{tmp_path}: it is a folder, expected a Python file"


def test_an_error_in_the_file_is_told_with_its_line(file: Path) -> None:
    file.write_text("import os\n\n\nos.nonsense()\n")

    assert refused(str(file)).startswith(f"{file}:4: AttributeError: module 'os' has no attribute 'nonsense'")


def test_an_error_in_a_helper_is_told_with_the_line_that_called_it(file: Path) -> None:
    (file.parent / "helper_of_it.py").write_text("def fail():\n    raise ValueError('first\\nsecond')\n")
    file.write_text("from helper_of_it import fail\nfail()\n")

    assert refused(str(file)) == f"{file}:2: ValueError: first second"
    sys.modules.pop("helper_of_it")


def test_a_missing_import_is_told_with_its_line(file: Path) -> None:
    file.write_text("\nimport nothing_of_the_kind\n")

    assert refused(str(file)) == f"{file}:2: ModuleNotFoundError: No module named 'nothing_of_the_kind'"


def test_a_syntax_error_is_told_with_its_line(file: Path) -> None:
    file.write_text("x = 1\ny = (\n")

    assert refused(str(file)) == f"{file}:2: SyntaxError: '(' was never closed"


def test_a_wrong_declaration_is_told_with_its_line_in_our_own_words(file: Path) -> None:
    message = refused(declare(file, orders="Orders"))

    assert message.startswith(f"{file}:4: pipeline name 'Orders': expected lower-case letters")


def test_a_file_that_exits_is_an_error_not_an_exit(file: Path) -> None:
    file.write_text("raise SystemExit(0)\n")

    assert refused(str(file)) == f"{file}:1: SystemExit: 0"


def test_a_file_imports_what_lies_beside_it(file: Path) -> None:
    (file.parent / "names_beside_it.py").write_text("NAME = 'orders'\n")
    declare(file, orders="orders")
    file.write_text("from names_beside_it import NAME\n" + file.read_text())

    assert load(str(file)).name == "orders"
    sys.modules.pop("names_beside_it")


def test_a_file_with_a_colon_in_its_name_is_found(tmp_path: Path) -> None:
    file = tmp_path / "a:b.py"
    declare(file, orders="orders")

    assert load(str(file)).name == "orders"
    assert load(f"{file}:orders").name == "orders"


def test_nothing_is_written_beside_the_file(file: Path) -> None:
    load(declare(file, orders="orders"))

    assert [path.name for path in file.parent.iterdir()] == ["pipelines.py"]
