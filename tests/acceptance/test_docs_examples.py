"""The examples of the README and the quickstart do what they show.

A comment above a block says what it is: `file: PATH` (its content), `run` (commands and what they print, and with
`run: 137` how the last one ends), `not run: REASON`. In what a command prints, `…` stands for anything.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from sqlalchemy import text

from support.servers.postgres import open_folder
from twophase import Pipeline, audits
from twophase.committer.record import PostgresRecord

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/quickstart.md")
#: Pages whose Python blocks each stand for themselves.
DECLARING = (
    "docs/operations.md",
    *(f"docs/how-to/{name}.md" for name in ("airflow", "audits", "bad-records", "chains", "changelogs")),
    *(f"docs/how-to/{name}.md" for name in ("delta", "iceberg", "intervals", "kafka-source", "write-ahead")),
    *(f"docs/how-to/{name}.md" for name in ("continuous-sql", "windows")),
)

_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<content>.*?)^```$", re.MULTILINE | re.DOTALL
)
#: Settings of whoever runs the tests that must not reach into the example.
NOT_OURS = re.compile(r"TWOPHASE_.*|AIRFLOW_.*")


class Block(NamedTuple):
    """One fenced block, and what its comment says that it is."""

    mark: str
    language: str
    content: str


class Command(NamedTuple):
    """One command, the lines that it must print, in order, and its exit code."""

    line: str
    prints: list[str]
    code: int


def blocks(page: str) -> list[Block]:
    found = _BLOCK.finditer((ROOT / page).read_text(encoding="utf-8"))
    return [Block(match["mark"] or "", match["language"], match["content"]) for match in found]


def commands(block: Block) -> list[Command]:
    """Split a console block; only its last command may end with another code than 0."""
    parts = re.split(r"^\$ ", block.content, flags=re.MULTILINE)[1:]
    split = [part.splitlines() for part in parts]
    code = int(block.mark.partition(":")[2] or 0)
    return [
        Command(line, prints, code if number == len(split) else 0) for number, (line, *prints) in enumerate(split, 1)
    ]


def missing(expected: list[str], printed: str) -> str | None:
    """Return the first expected line that is not there, after those before it; spaces do not count."""
    lines = iter([" ".join(line.split()) for line in printed.splitlines()])
    for line in filter(str.strip, expected):
        pattern = ".*".join(re.escape(part) for part in " ".join(line.split()).split("…"))
        if not any(re.fullmatch(pattern, printed_line) for printed_line in lines):
            return line
    return None


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_whether_it_is_run(page: str) -> None:
    unmarked = [block for block in blocks(page) if not re.match(r"(file|not run): \S|run(: \d+)?$", block.mark)]

    assert not unmarked


def test_the_readme_shows_the_quickstarts_example() -> None:
    """Then the quickstart's run is the README's, too."""
    quickstart = [block for block in blocks("docs/quickstart.md") if not block.mark.startswith("not run")]

    assert [block for block in blocks("README.md") if block in quickstart] == blocks("README.md")
    assert blocks("README.md") == quickstart[: len(blocks("README.md"))]


def test_every_query_of_the_operations_page_runs(record: PostgresRecord) -> None:
    queries = [
        query
        for block in blocks("docs/operations.md")
        if block.language == "sql"
        for query in filter(str.strip, block.content.split(";"))
    ]

    assert queries
    with record.engine.connect() as connection:
        for query in queries:
            connection.execute(text(query))


@pytest.mark.parametrize("page", DECLARING)
def test_every_declaration_in_the_documents_can_be_declared(
    page: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    found = [
        block
        for block in blocks(page)
        if (block.language, block.mark) == ("python", "")
        and not re.search(r"^import (duckdb|polars)", block.content, re.MULTILINE)
    ]

    for block in found:
        names: dict[str, object] = {"audits": audits}
        exec(compile(block.content, page, "exec"), names)
        for pipeline in (value for value in names.values() if isinstance(value, Pipeline)):
            assert Pipeline.from_declaration(pipeline.name, pipeline.declaration()).name == pipeline.name

    assert found


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return an empty folder that the embedded PostgreSQL can work in; nothing runs in it afterwards."""
    made = open_folder("twophase-docs-")
    yield made
    shell("twophase down", made)
    shutil.rmtree(made)


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run one line as a user would who has the environment on the PATH."""
    environment = {name: value for name, value in os.environ.items() if not NOT_OURS.fullmatch(name)}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    return subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )


def exit_code(done: subprocess.CompletedProcess[str]) -> int:
    """Return the exit code as a shell shows it: bash may have become the command that was killed."""
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", ["docs/quickstart.md", "docs/how-to/restarts.md", "docs/how-to/state.md"])
def test_a_page_that_is_run_does_what_it_shows(folder: Path, page: str) -> None:
    for block in blocks(page):
        kind, _, name = block.mark.partition(": ")
        if kind == "file":
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.content, encoding="utf-8")
        elif kind == "run":
            for command in commands(block):
                done = shell(command.line, folder)
                where = f"$ {command.line}\n{done.stdout}"
                assert exit_code(done) == command.code, where
                assert missing(command.prints, done.stdout) is None, where
