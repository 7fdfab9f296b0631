"""The command line as a whole: help, exit codes, errors in one line, no secret, no server by surprise."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from sqlalchemy import make_url, text

from support.pipelines.commands import listed, one_line_error, twophase
from support.pipelines.words_runs import commit
from support.servers.postgres import open_folder
from twophase.cli import app
from twophase.committer.record import PostgresRecord

# --- the whole -------------------------------------------------------------------------------------------------------


def commands() -> list[tuple[str, ...]]:
    """List every command there is, so that a new one is covered on its first day."""
    root = typer.main.get_command(app)
    found: list[tuple[str, ...]] = [()]
    for name, command in vars(root)["commands"].items():
        found.append((name,))
        found += [(name, below) for below in getattr(command, "commands", ())]
    return found


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_explains_itself(command: tuple[str, ...]) -> None:
    result = twophase(*command, "--help")

    assert result.exit_code == 0
    assert f"Usage: twophase {' '.join(command)}".strip() in result.stdout


def test_alone_it_shows_its_help() -> None:
    result = twophase()

    assert result.exit_code == 0
    assert "checkpoints" in result.stdout


def test_version_is_the_installed_one() -> None:
    assert re.fullmatch(r"twophase \d+\.\d+\.\d+\n", twophase("--version").stdout)


def test_an_unknown_command_is_a_usage_error() -> None:
    assert twophase("chekpoints").exit_code == 2


def test_help_and_completion_import_nothing_heavy() -> None:
    code = "import sys, twophase.cli; print(sorted({'sqlalchemy', 'pyspark', 'pyarrow', 'alembic'} & set(sys.modules)))"

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_shell_completes_commands() -> None:
    asked = {"_TWOPHASE_COMPLETE": "complete_bash", "COMP_WORDS": "twophase pip", "COMP_CWORD": "1"}

    done = subprocess.run(
        [sys.executable, "-m", "twophase.cli"], env={**os.environ, **asked}, capture_output=True, text=True, check=False
    )

    assert done.stdout.split() == ["pipelines"]


def test_an_unexpected_error_keeps_its_traceback(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("twophase.committer.queries.pipelines", fail)

    assert isinstance(twophase("pipelines").exception, ZeroDivisionError)


def test_an_interrupt_exits_130(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("twophase.committer.queries.pipelines", interrupt)

    assert twophase("pipelines").exit_code == 130


@pytest.mark.parametrize(
    "command",
    [("pipelines",), ("checkpoints", "words"), ("show", "words", "1"), ("recover",), ("sweep",), ("verify", "words")],
    ids=" ".join,
)
def test_a_database_out_of_reach_is_one_line(
    home: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("TWOPHASE_DSN", "postgresql://nobody:hush@127.0.0.1:1/none")

    message = one_line_error(twophase(*command))

    assert "127.0.0.1:1/none" in message
    assert "hush" not in message


def test_no_command_but_up_run_and_demo_starts_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TWOPHASE_DSN", raising=False)
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))

    for command in (
        ["pipelines"],
        ["checkpoints", "words"],
        ["recover"],
        ["sweep"],
        ["verify", "words"],
        ["db", "upgrade"],
    ):
        assert "twophase up" in one_line_error(twophase(*command))
    assert twophase("status").exit_code == 0
    assert twophase("down").stdout == "it was not running\n"
    assert not (tmp_path / "postgres").exists()


def test_no_command_prints_a_password(home: Path, dsn: str) -> None:
    commit()
    secret = make_url(dsn).password or ""
    asked = (
        ["pipelines"],
        ["checkpoints", "words"],
        ["show", "words", "1"],
        ["recover"],
        ["sweep"],
        ["verify", "words"],
        ["status"],
        ["db", "upgrade"],
        ["up", "--no-airflow"],
    )

    assert len(secret) > 10
    for command in asked:
        for form in ([], ["--json"]):
            assert secret not in twophase(*command, *form).output


# --- this machine ----------------------------------------------------------------------------------------------------


def test_db_upgrade_makes_the_record_where_there_is_none(home: Path, record: PostgresRecord) -> None:
    with record.engine.begin() as connection:
        connection.execute(text("DROP SCHEMA twophase CASCADE"))

    assert "run `twophase db upgrade`" in one_line_error(twophase("pipelines"))
    assert "run `twophase db upgrade`" in twophase("status").stdout
    assert "upgraded from none to" in twophase("db", "upgrade").stdout
    assert "already at" in twophase("db", "upgrade").stdout
    assert listed("pipelines") == []


def test_status_says_which_database_is_used_and_why(home: Path, dsn: str) -> None:
    found = listed("status")

    assert not found["running"]
    assert found["origin"] == "TWOPHASE_DSN"
    assert found["committer"].endswith(f"/{make_url(dsn).database}")
    assert found["record_version"] == found["expected_version"]
    assert found["problems"] == []


def test_status_reports_a_database_out_of_reach(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOPHASE_DSN", "postgresql://nobody:hush@127.0.0.1:1/none")

    result = twophase("status")

    assert result.exit_code == 0
    assert "problem" in result.stdout
    assert "hush" not in result.stdout


def test_up_with_a_database_of_ones_own_starts_nothing(home: Path) -> None:
    result = twophase("up", "--no-airflow")

    assert result.stdout.startswith("not needed: the committer database is postgresql://twophase@127.0.0.1:")
    assert not (home / "postgres").exists()


def test_the_embedded_database_comes_up_and_goes_down(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_folder("twophase-cli-")
    monkeypatch.delenv("TWOPHASE_DSN", raising=False)
    monkeypatch.setenv("TWOPHASE_HOME", str(folder))
    try:
        up = twophase("up", "--no-airflow")
        status = listed("status")
        assert re.fullmatch(r"running at postgresql://twophase@127\.0\.0\.1:\d+/twophase\n", up.stdout), up.output
        assert status["running"]
        assert status["origin"] == "embedded"
        assert status["record_version"] == status["expected_version"]
        assert (folder / "postgres" / "password").read_text().strip() not in up.output + json.dumps(status)
        assert listed("pipelines") == []
    finally:
        down = twophase("down")
        shutil.rmtree(folder)

    assert down.stdout == "stopped\n"
