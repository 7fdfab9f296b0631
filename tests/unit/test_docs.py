"""The documents say what is there, all of it, and nothing else."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import twophase
from twophase.cli import app
from twophase.committer import tables
from twophase.core import errors
from twophase.core.failpoints import FAILPOINTS
from twophase.core.states import State

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = {page: str(page.relative_to(ROOT)) for page in PAGES}

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"")

#: `twophase …` where a command begins, perhaps after a prompt and variables.
_COMMAND = re.compile(r"(?:^\s*(?:\$ )?|[;&|] *)(?:[A-Z_]+=\S+ )*twophase ((?:[^;&|]|\[[^]]*\])+)")

#: What the glossary tells us to avoid, as it would appear: as a verb only, where the noun is fine.
AVOIDED = {
    "finalize": r"finali[sz]\w*",
    "publish": r"publish\w*",
    "process, as a verb": r"process(?:ed|ing)|reprocess\w*|to process|(?:will|can|may|must) process",
    "handle, as a verb": r"handle[sd]|handling|to handle",
    "manager": r"managers?",
    "utils": r"utils|utilit(?:y|ies)",
    "campaign": r"campaigns?",
    "lake, table with a log": r"data lakes?|tables? with a log",
}


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """Return a page without its code."""
    return _SPAN.sub("", _FENCE.sub("", page.read_text(encoding="utf-8")))


def code(page: Path) -> Iterator[str]:
    """Yield the lines of a page's code: fenced blocks, indented ones, and spans in the prose."""
    whole = page.read_text(encoding="utf-8")
    for block in _FENCE.findall(whole):
        yield from block.splitlines()[1:-1]
    rest = _FENCE.sub("", whole)
    yield from (line for line in rest.splitlines() if line.startswith("    "))
    yield from _SPAN.findall(rest)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.replace("`", "")) for heading in headings)
    return {heading.lower().replace(" ", "-") for heading in plain}


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Yield (file, anchor) of each link within the repository."""
    for match in _LINK.finditer(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        target = match[1] or match[2]
        if not re.match(r"[a-z]+:", target):
            file, _, anchor = target.partition("#")
            yield file, anchor


# --- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for file, anchor in links(page):
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{file}#{anchor}")

    assert not broken


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, pending = {README}, [README]
    while pending:
        page = pending.pop()
        for file, _ in links(page):
            target = (page.parent / file).resolve()
            if target.suffix == ".md" and target not in reached and target.exists():
                reached.add(target)
                pending.append(target)

    assert set(PAGES) <= reached


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_the_words_that_the_glossary_avoids_appear_nowhere(page: Path) -> None:
    checked = prose(page).partition("## Words to avoid")[0]
    found = [match[0] for word in AVOIDED.values() for match in re.finditer(rf"(?i)\b(?:{word})\b", checked)]

    assert not found


def test_the_glossary_names_every_word_to_avoid() -> None:
    listed = re.findall(r"^\| (.+?) \|", text("docs/glossary.md").partition("## Words to avoid")[2], re.MULTILINE)

    assert set(AVOIDED) == set(listed) - {"Not"}


def test_the_glossary_is_sorted() -> None:
    words = re.findall(r"^\| \*\*`?([\w -]+)", text("docs/glossary.md"), re.MULTILINE)

    assert words == sorted(words, key=lambda word: word.replace("_", " "))


# --- commands --------------------------------------------------------------------------------------------------------


def commands() -> dict[str, Any]:
    """Map each command of the command line, `db upgrade` too, to typer's object for it."""
    found: dict[str, Any] = {}

    def visit(command: Any, name: str) -> None:
        inner = getattr(command, "commands", None)
        if inner is None:
            found[name] = command
        for part, one in (inner or {}).items():
            visit(one, f"{name} {part}".strip())

    visit(typer.main.get_command(app), "")
    return found


COMMANDS = commands()


def shown_commands() -> Iterator[tuple[str, str]]:
    """Yield (page, what follows `twophase`) of each command line that a page shows."""
    for page in PAGES:
        for line in code(page):
            for match in _COMMAND.finditer(line):
                yield NAMES[page], match[1].partition(" #")[0].strip()


def test_every_command_is_documented() -> None:
    documented = [shown for _, shown in shown_commands()]

    missing = [name for name in COMMANDS if not any(f"{shown} ".startswith(f"{name} ") for shown in documented)]
    assert not missing


def test_every_command_in_the_documents_exists_with_its_options() -> None:
    wrong = []
    for page, shown in shown_commands():
        name = next((name for name in COMMANDS if f"{shown} ".startswith(f"{name} ")), None)
        options = set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", shown))
        known = {"--help", "-h", *(option for p in COMMANDS[name].params for option in p.opts)} if name else set()
        if name is None or options - known:
            wrong.append(f"{page}: twophase {shown}")

    assert not wrong


def test_every_option_of_a_command_is_documented() -> None:
    operations = text("docs/operations.md")
    options = {
        option
        for command in COMMANDS.values()
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--") and option != "--help"
    }

    assert not {option for option in options if f"`{option}`" not in operations}


def test_the_readme_has_the_commands_that_everybody_needs() -> None:
    shown = {line.partition("#")[0].strip() for line in code(README)}

    assert {"make demo", "make test", "make lint"} <= shown
    assert "make lint test" in shown
    assert "make lint test" in text(".ci/run")


def test_every_make_target_in_the_documents_exists() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", text("Makefile"), re.MULTILINE))
    shown = {
        target
        for page in PAGES
        for line in code(page)
        for command in re.findall(r"(?:^|\s)make((?: [a-z][a-z0-9-]*)+)", line.partition("#")[0])
        for target in command.split()
    }

    assert shown
    assert shown <= targets


# --- what there is ---------------------------------------------------------------------------------------------------


def test_every_setting_is_documented_and_every_documented_one_is_used() -> None:
    setting = re.compile(r"(?<![A-Z_])TWOPHASE_[A-Z_]*[A-Z]")
    used = {
        name
        for path in (ROOT / "plugins" / "twophase").rglob("*.py")
        for name in setting.findall(path.read_text(encoding="utf-8"))
    }
    table = set(re.findall(r"^\| `(TWOPHASE_\w+)` \|", text("docs/operations.md"), re.MULTILINE))
    named = {name for page in PAGES for name in setting.findall(page.read_text(encoding="utf-8"))}

    assert used == table
    assert named <= used


def test_every_group_of_failpoints_is_in_the_protocol() -> None:
    groups = list(dict.fromkeys(name.partition(".")[0] for name in FAILPOINTS))
    documented = re.findall(r"^\| `(\w+)\.\*` \|", text("docs/protocol.md"), re.MULTILINE)

    assert documented == groups


def test_every_failpoint_in_the_documents_exists() -> None:
    groups = "|".join({name.partition(".")[0] for name in FAILPOINTS})
    named = {
        match
        for page in PAGES
        for line in code(page)
        for match in re.findall(rf"(?<![\w./])((?:{groups})\.[a-z]+)(?==kill|=raise|=stop|$)", line)
        if not match.endswith((".py", ".md"))
    }

    assert named
    assert named <= set(FAILPOINTS)


def test_every_state_is_in_the_protocol() -> None:
    documented = re.findall(r"^\| `([A-Z]+)` \|", text("docs/protocol.md"), re.MULTILINE)

    assert set(State) <= set(documented)


def test_every_rule_is_in_the_protocol() -> None:
    documented = re.findall(r"^\| (R\d+) \|", text("docs/protocol.md"), re.MULTILINE)
    cited = {
        rule
        for path in (ROOT / "plugins" / "twophase").rglob("*.py")
        for rule in re.findall(r"\bR\d+\b", path.read_text(encoding="utf-8"))
    }

    assert documented == [f"R{number}" for number in range(1, 22)]
    assert cited <= set(documented)


def test_the_code_that_the_rules_point_to_exists() -> None:
    rows = re.findall(r"^\| R\d+ \|.*\| (.+) \|$", text("docs/protocol.md"), re.MULTILINE)
    pointers = [pair for row in rows for pair in re.findall(r"((?:`\w+`(?:, )?)+) in `([\w/]+\.py)`", row)]
    missing = [
        f"{name} in {path}"
        for names, path in pointers
        for name in _SPAN.findall(names)
        if name not in defined(ROOT / "plugins" / "twophase" / path)
    ]

    assert pointers
    assert not missing


def defined(path: Path) -> set[str]:
    """Return the functions, classes, methods and top-level names of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assigned = [
        node.targets if isinstance(node, ast.Assign) else [node.target]
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
    ]
    return inner | {target.id for targets in assigned for target in targets if isinstance(target, ast.Name)}


def test_every_error_has_a_row_that_says_what_to_do() -> None:
    documented = re.findall(
        r"^\| (?:\*\*)?`(\w+)`(?:\*\*)? \|", text("docs/operations.md").partition("## Errors")[2], re.MULTILINE
    )
    defined = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.TwophaseError) and value is not errors.TwophaseError
    ]

    assert sorted(documented) == sorted(defined)


def test_every_table_and_view_of_the_record_is_documented() -> None:
    operations = text("docs/operations.md")
    migrations = (ROOT / "plugins/twophase/committer/migrations/versions").glob("*.py")
    views = [view for path in migrations for view in re.findall(r"CREATE VIEW twophase\.(\w+)", path.read_text())]
    documented = re.findall(r"^\| `(\w+)` \|", operations.partition("## The record in SQL")[2], re.MULTILINE)
    recorded = [table.name for table in tables.metadata.sorted_tables]

    assert views
    assert set(recorded) | set(views) <= set(documented)


def test_every_public_name_is_documented() -> None:
    written = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)

    assert not [name for name in twophase.__all__ if not re.search(rf"\b{name}\b", written)]


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads(text("pyproject.toml"))["project"]
    extras = [name for extra in project["optional-dependencies"].values() for name in extra]
    files = ("requirements.in", "requirements-java.txt", "requirements-go.txt")
    lines = [line for file in files for line in text(file).splitlines()]
    pinned = [line for line in lines if line and not line.startswith("#")]
    names = {re.split(r"[<>=\s]", name)[0] for name in [*project["dependencies"], *extras, *pinned]}
    explained = set(_SPAN.findall(text("docs/decisions/0002-dependencies.md")))

    assert not names - explained
