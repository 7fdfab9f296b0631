"""Imports go one way, and what is shipped to Spark needs neither Airflow nor SQLAlchemy.

These tests read the files, so a new module is covered on the day it appears.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2] / "plugins"
PACKAGE = ROOT / "twophase"
#: Draws the layers, and names the modules that a checkpoint passes.
PAGE = ROOT.parent / "docs" / "architecture.md"

#: From bottom to top; a part may import what is in its own layer or below. `__init__` is the package's own file.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"constraints", "core"}),
    frozenset({"storage"}),
    frozenset({"formats"}),
    frozenset({"changelog", "row_queries"}),
    frozenset({"committers", "sinks", "sources", "state"}),
    frozenset({"spark", "committer"}),
    frozenset({"local"}),
    frozenset({"audits", "comparison"}),
    frozenset({"__init__", "attempt", "audit_votes", "backfill", "committed_reads", "examples"})
    | frozenset({"run_folders", "state_reads", "state_sweep", "sweep", "verification", "wiring"})
    | {
        "ownership",
        "pipeline",
        "reconciliation",
        "revision_diff",
        "restart",
        "runner",
        "testing",
        "positions",
        "unbegun",
        "windows",
    },
    frozenset({"airflow", "cli", "web"}),
)
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}

#: What is heavy, or not there everywhere, and the parts that may import it when they are imported themselves.
AT_HOME: dict[str, frozenset[str]] = {
    "airflow": frozenset({"airflow", "web"}),
    "alembic": frozenset({"committer"}),
    "fastapi": frozenset({"web"}),
    "psycopg2": frozenset({"committer"}),
    "pyspark": frozenset({"spark"}),
    "sqlalchemy": frozenset({"committer", "web"}),
    "typer": frozenset({"cli"}),
}

#: What runs in the driver and the executors.
SHIPPED = ("core", "storage", "formats", "changelog", "row_queries", "sinks", "sources", "state", "spark")

#: What these parts must not import even inside a function.
NEVER: dict[str, frozenset[str]] = {
    "core": frozenset({"airflow", "sqlalchemy"}),
    "sources": frozenset({"airflow", "sqlalchemy"}),
    "state": frozenset({"airflow", "sqlalchemy"}),
    "spark": frozenset({"airflow", "sqlalchemy", "twophase.airflow", "twophase.committer", "twophase.local"}),
}


class Import(NamedTuple):
    """One imported name, and when it is imported."""

    name: str
    line: int
    #: Executed when the module is imported: not inside a function, not for the type checker only.
    at_import: bool

    def is_in(self, module: str) -> bool:
        return self.name == module or self.name.startswith(f"{module}.")


def modules() -> dict[str, Path]:
    """Map each module's dotted name to its file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def part_of(module: str) -> str:
    """Return the folder or file right below the package."""
    return module.split(".")[1] if "." in module else "__init__"


def imports_of(source: str, package: str) -> Iterator[Import]:
    """Yield every import of a file; `from a import b` counts as `a.b`."""

    def visit(node: ast.AST, *, at_import: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (Import(f"{base}.{alias.name}", node.lineno, at_import) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.body:
                yield from visit(statement, at_import=False)
            for statement in node.orelse:
                yield from visit(statement, at_import=at_import)
        else:
            deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, at_import=at_import and not deferred)

    yield from visit(ast.parse(source), at_import=True)


def imports(module: str) -> list[Import]:
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return list(imports_of(path.read_text(), package))


def own_module(name: str) -> str | None:
    """Return the module of ours that an imported name is, or is in."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def shown(module: str, imported: Import) -> str:
    return f"{MODULES[module].relative_to(ROOT)}:{imported.line} imports {imported.name}"


@pytest.mark.parametrize("module", MODULES)
def test_imports_never_go_up(module: str) -> None:
    """Neither when a module is imported nor later, inside a function."""
    assert part_of(module) in RANK, f"{module}: give {part_of(module)!r} a place in LAYERS"
    upward = [
        shown(module, imported)
        for imported in imports(module)
        if (target := own_module(imported.name))
        and target != "twophase"
        and RANK.get(part_of(target), 0) > RANK[part_of(module)]
    ]

    assert not upward


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {
        module: {
            target
            for imported in imports(module)
            if imported.at_import and (target := own_module(imported.name)) and target != module
        }
        for module in MODULES
    }

    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


@pytest.mark.parametrize("module", [module for module in MODULES if part_of(module) == "core"])
def test_core_imports_the_standard_library_and_itself_only(module: str) -> None:
    foreign = [
        shown(module, imported)
        for imported in imports(module)
        if imported.name.split(".")[0] not in sys.stdlib_module_names and not imported.is_in("twophase.core")
    ]

    assert not foreign


@pytest.mark.parametrize("module", MODULES)
def test_heavy_modules_are_imported_at_the_top_only_where_they_belong(module: str) -> None:
    misplaced = [
        shown(module, imported)
        for imported in imports(module)
        for heavy, homes in AT_HOME.items()
        if imported.at_import and imported.is_in(heavy) and part_of(module) not in homes
    ]

    assert not misplaced


#: What statements are made with.
STATEMENTS = frozenset({"select", "insert", "update", "delete", "text", "func"})
#: The one other database that is asked by SQLAlchemy: Airflow's own.
ASKS_AIRFLOW = "twophase.web.airflow_runs"


@pytest.mark.parametrize("module", [module for module in MODULES if part_of(module) != "committer"])
def test_the_record_is_asked_in_sql_by_the_committer_only(module: str) -> None:
    asked = [
        shown(module, imported)
        for imported in imports(module)
        if imported.name in {f"sqlalchemy.{name}" for name in STATEMENTS}
        or imported.name in {"twophase.committer.revision_rows.r", "twophase.committer.revision_rows.REVISION"}
        or imported.is_in("twophase.committer.tables")
    ]

    assert not asked or module == ASKS_AIRFLOW


@pytest.mark.parametrize("module", [module for module in MODULES if part_of(module) in NEVER])
def test_what_runs_in_spark_never_asks_for_airflow_or_the_database(module: str) -> None:
    forbidden = [
        shown(module, imported)
        for imported in imports(module)
        for name in NEVER[part_of(module)]
        if imported.is_in(name)
    ]

    assert not forbidden


#: Run in a fresh interpreter: imports the modules named on the command line where two packages cannot be found.
WITHOUT = """
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"airflow", "sqlalchemy"}:
            raise ModuleNotFoundError(f"No module named {name!r} (kept away by this test)", name=name)

sys.meta_path.insert(0, Absent())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_what_is_shipped_to_spark_imports_without_airflow_and_sqlalchemy() -> None:
    shipped = [module for module in MODULES if part_of(module) in SHIPPED]

    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *shipped],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import a.b", [("a.b", True)]),
        ("from a import b, c", [("a.b", True), ("a.c", True)]),
        ("from . import b", [("p.q.b", True)]),
        ("from ..r import b", [("p.r.b", True)]),
        ("def f():\n    import a", [("a", False)]),
        ("try:\n    import a\nexcept ImportError:\n    pass", [("a", True)]),
        ("class C:\n    import a", [("a", True)]),
        ("if TYPE_CHECKING:\n    import a\nelse:\n    import b", [("a", False), ("b", True)]),
    ],
)
def test_the_reader_of_imports_sees_every_kind(source: str, expected: list[tuple[str, bool]]) -> None:
    assert [(imported.name, imported.at_import) for imported in imports_of(source, "p.q")] == expected


#: Public classes that share a name, and why: users import each from a module that tells them apart.
SAME_NAME = {
    "Files": "twophase.sources.Files is read, twophase.sinks.Files is written",
    "Kafka": "twophase.sources.Kafka reads topics, twophase.sinks.Kafka writes them",
    "Postgres": "twophase.sinks.Postgres is a target, twophase.committers.Postgres remembers what was sent",
    "Sink": "the port that the coordinator knows, and the base class of those that users write",
    "State": "twophase.State is keyed state, core.states.State is where a revision stands",
    "Source": "the port that the coordinator knows, and the base class of those that are shipped",
}


def classes() -> dict[str, list[str]]:
    """Map each public class to the modules that define one of that name."""
    found: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module)
    return found


def test_no_two_public_classes_have_the_same_name() -> None:
    """A name in a traceback or a search leads to one class; the exceptions are listed with their reason."""
    shared = {name: modules for name, modules in classes().items() if len(modules) > 1}

    assert {name: modules for name, modules in shared.items() if name not in SAME_NAME} == {}
    assert shared.keys() >= SAME_NAME.keys(), "remove what is no exception any more"


def drawn_layers() -> tuple[frozenset[str], ...]:
    """Return the layers of the drawing, from bottom to top: its lines divide them."""
    drawing = PAGE.read_text(encoding="utf-8").partition("```text\n")[2].partition("```")[0]
    layers = re.split(r"^─.*$", drawing, flags=re.MULTILINE)
    names = (re.findall(r"\w+", " ".join(line.partition("│")[0] for line in layer.splitlines())) for layer in layers)
    return tuple(frozenset(found) for found in names)[::-1]


def test_the_page_on_architecture_draws_the_layers_as_they_are() -> None:
    """Who reads the drawing knows what may import what, and no part of the package is missing there."""
    assert drawn_layers() == LAYERS
    assert {part_of(module) for module in MODULES} == RANK.keys()


def test_the_page_on_architecture_names_modules_that_are_there() -> None:
    """The walk of a checkpoint leads from module to module: each can be opened."""
    named = set(re.findall(r"`([a-z_/]+\.py)`", PAGE.read_text(encoding="utf-8")))

    assert {name for name in named if not any((folder / name).is_file() for folder in (PACKAGE, ROOT.parent))} == set()
    assert len(named) > 20
