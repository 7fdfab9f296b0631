"""The command line against a real record: what it prints, what it exits with, what it never prints."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import typer.main
from sqlalchemy import make_url, text

from support.pipelines.commands import listed, one_line_error, twophase
from support.pipelines.factories import PreStaged, land_words, words_pipeline
from support.servers.postgres import open_folder
from twophase.cli import app
from twophase.cli.run import tail
from twophase.committer.queries import COLUMNS
from twophase.committer.record import PostgresRecord
from twophase.core import failpoints
from twophase.core.checkpoint import Run
from twophase.core.errors import AttemptFailed
from twophase.core.failpoints import FailpointError
from twophase.core.settings import data_path
from twophase.runner import Runner, coordinator, enter

DECLARATION = """
from twophase import Pipeline, sinks, sources

words = Pipeline(
    "words",
    reads={"words": sources.Files("landing/words", format="json", max_files=1)},
    transform="word_count:copy",
    writes={"lake": sinks.Files("lake/words")},
)
"""


def commit(checkpoints: int = 1, *, start: int = 0) -> None:
    with Runner(words_pipeline(), PreStaged()) as runner:
        for number in range(start, start + checkpoints):
            land_words(start=number)
            assert runner.run() is not None


@pytest.fixture
def _no_failpoints() -> Iterator[None]:
    yield
    failpoints.configure("")


def crash(failpoint: str, *, start: int) -> None:
    """Leave a checkpoint as a process does that dies at a failpoint; its lease stays."""
    failpoints.configure(f"{failpoint}=raise")
    land_words(start=start)
    with pytest.raises(FailpointError), Runner(words_pipeline(), PreStaged()) as runner:
        runner.run()
    failpoints.configure("")


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


# --- looking ---------------------------------------------------------------------------------------------------------


def test_pipelines_says_what_was_committed_last(home: Path) -> None:
    assert twophase("pipelines").stdout == ""
    assert listed("pipelines") == []
    commit(2)

    (found,) = listed("pipelines")

    assert found["pipeline"] == "words"
    assert found["last_checkpoint"] == found["last_commit_seq"] == 2
    assert datetime.fromisoformat(found["last_committed_at"]).tzinfo
    assert found["since_last_commit"] >= 0
    assert found["pending"] == 0
    assert "words" in twophase("pipelines").stdout


def test_checkpoints_lists_the_records_own_columns(home: Path) -> None:
    commit(3)

    found = listed("checkpoints", "words")

    assert [row["checkpoint_id"] for row in found] == [3, 2, 1]
    assert all(tuple(row) == COLUMNS for row in found)
    assert {row["state"] for row in found} == {"COMMITTED"}
    assert datetime.fromisoformat(found[0]["committed_at"]).tzinfo
    assert "COMMITTED" in twophase("checkpoints", "words").stdout


def test_checkpoints_come_in_pages(home: Path) -> None:
    commit(3)

    first = twophase("checkpoints", "words", "--limit", "2")

    assert "--before 2" in first.stderr
    assert [row["checkpoint_id"] for row in listed("checkpoints", "words", "--before", "2")] == [1]


def test_checkpoints_are_filtered_by_state_in_any_case(home: Path) -> None:
    commit()

    assert len(listed("checkpoints", "words", "--state", "committed")) == 1
    assert listed("checkpoints", "words", "--state", "ABORTED") == []


def test_an_unknown_state_is_a_usage_error_that_lists_them(home: Path) -> None:
    result = twophase("checkpoints", "words", "--state", "done")

    assert result.exit_code == 2
    assert all(name in result.stderr.upper() for name in ("OPEN", "PRECOMMITTED", "SUPERSEDED", "ABORTED"))


def test_show_tells_all_of_a_checkpoint(home: Path) -> None:
    commit()

    found = listed("show", "words", "1")

    told = ("failed", "inputs", "participants", "events", "lacking", "behind", "advice", "command")
    assert tuple(found) == (*COLUMNS, *told)
    assert found["inputs"]["words"]["files"] == 1
    assert [p["name"] for p in found["participants"]] == ["lake"]
    assert [event["to_state"] for event in found["events"] if event["to_state"]][-1] == "COMMITTED"
    shown = twophase("show", "words", "1", "--revision", "1").stdout
    for word in ("words/1 r1", "COMMITTED", "000000.json", "lake", "the commit point"):
        assert word in shown


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("show", "words", "9"), "checkpoint words/9: it is not in the record"),
        (("show", "words", "1", "--revision", "7"), "checkpoint words/1 r7: it is not in the record"),
        (("show", "orders", "1"), "pipeline 'orders': it is not in the record"),
        (("checkpoints", "orders"), "pipeline 'orders': it is not in the record"),
        (("verify", "orders"), "pipeline 'orders': it is not in the record"),
        (("recover", "orders"), "pipeline 'orders': it is not in the record"),
        (("sweep", "orders"), "pipeline 'orders': it is not in the record"),
    ],
)
def test_what_is_not_in_the_record_is_one_line(home: Path, command: tuple[str, ...], message: str) -> None:
    commit()

    assert one_line_error(twophase(*command)).startswith(message)


@pytest.mark.parametrize(
    "command", [("show", "words", "zero"), ("show", "words"), ("checkpoints", "w", "--limit", "0")]
)
def test_wrong_arguments_are_usage_errors(home: Path, command: tuple[str, ...]) -> None:
    assert twophase(*command).exit_code == 2


def test_failpoints_are_listed_with_what_they_mean() -> None:
    found = listed("failpoints")

    assert {"name": "commit.after", "description": failpoints.FAILPOINTS["commit.after"]} in found
    assert "commit.after" in twophase("failpoints").stdout


def test_nothing_is_cut_off_when_it_is_piped(home: Path, record: PostgresRecord) -> None:
    commit()
    reason = "because " * 100 + "of this"
    with record.engine.begin() as connection:
        connection.execute(text("UPDATE twophase.revision SET error = :reason"), {"reason": reason})

    assert reason in twophase("checkpoints", "words").stdout
    assert reason in twophase("show", "words", "1").stdout


def test_colours_are_for_terminals_and_can_be_turned_off(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit()
    green = "\x1b[32mCOMMITTED"

    assert "\x1b" not in twophase("checkpoints", "words").stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert green in twophase("checkpoints", "words").stdout
    monkeypatch.setenv("NO_COLOR", "1")
    assert green not in twophase("checkpoints", "words").stdout


# --- run -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Declare a pipeline in a file; its Spark work is done by a stager without Spark."""
    data_path("landing/words").mkdir(parents=True)
    monkeypatch.setattr("twophase.runner.stager_for", lambda *_, **__: PreStaged())
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = home / "declaration.py"
    path.write_text(DECLARATION)
    return str(path)


def test_run_commits_one_checkpoint_and_tells_it(file: str) -> None:
    land_words(files=2)

    result = twophase("run", file)

    assert result.exit_code == 0
    assert re.search(r"words +1 +1 +COMMITTED +1 +10 ", result.stdout)
    assert "words/1 r1: attempt 1, staging" in result.stderr
    assert "words/1 r1: committed, rows 10" in result.stderr


def test_run_gives_what_was_committed_as_json(file: str) -> None:
    land_words(files=2)

    (done,) = listed("run", f"{file}:words")

    assert tuple(done) == COLUMNS
    assert done["rows"] == 10
    assert [done] == listed("checkpoints", "words")


def test_run_drains_until_there_is_no_new_input(file: str) -> None:
    land_words(files=3)

    assert [row["checkpoint_id"] for row in listed("run", file, "--drain")] == [1, 2, 3]
    result = twophase("run", file)
    assert result.exit_code == 0
    assert result.stderr == "words: no new input\n"
    assert listed("run", file) == []


def test_run_hands_spark_settings_on(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def remember(*_: object, **settings: Any) -> PreStaged:
        given.update(settings)
        return PreStaged()

    monkeypatch.setattr("twophase.runner.stager_for", remember)

    twophase("run", file, "--master", "local[1]", "--conf", "a.b=c=d", "--conf", "e=")

    assert given == {"master": "local[1]", "conf": {"a.b": "c=d", "e": ""}}


@pytest.mark.parametrize("conf", ["nonsense", "=x"])
def test_a_setting_without_a_name_or_a_value_is_a_usage_error(file: str, conf: str) -> None:
    assert twophase("run", file, "--conf", conf).exit_code == 2


def test_run_of_a_missing_file_is_one_line(home: Path) -> None:
    assert one_line_error(twophase("run", str(home / "none.py"))) == f"{home / 'none.py'}: no such file"


def test_a_transform_that_raised_is_one_line_with_the_log_and_the_users_traceback(
    file: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = home / "spark.log"
    log.write_text(LOG)
    jobs = home / "spark_jobs"
    jobs.mkdir()
    (jobs / "jobs.py").touch()
    monkeypatch.setenv("TWOPHASE_SPARK_JOBS", str(jobs))

    def fail(*_: object) -> None:
        msg = f"checkpoint words/1 r1: attempt 1: ValueError: no (jobs.py:7); the log is {log}"
        raise AttemptFailed(msg)

    monkeypatch.setattr("twophase.runner.stager_for", lambda *_, **__: fail)
    land_words()

    result = twophase("run", file)

    assert result.exit_code == 1
    *shown, last = result.stderr.splitlines()
    assert last == f"error: checkpoint words/1 r1: attempt 1: ValueError: no (jobs.py:7); the log is {log}"
    assert f'  File "{jobs}/jobs.py", line 7, in transform' in shown
    assert "ValueError: no" in shown
    assert not any("pyspark" in line for line in shown)


LOG = """26/11/16 WARN Utils: something
Traceback (most recent call last):
  File "/x/twophase/spark/main.py", line 50, in main
    writes = stage(session(plan), plan)
  File "/x/pyspark/sql/dataframe.py", line 1, in show
    self._jdf.show()
  File "/tmp/localPyFiles-1f/jobs.py", line 7, in transform
    raise ValueError("no")
ValueError: no
26/11/16 INFO ShutdownHookManager: bye
"""


def test_a_log_without_a_traceback_ends_with_its_last_lines() -> None:
    assert tail("\n".join(map(str, range(100))))[-1] == "99"
    assert tail(LOG)[0] == "Traceback (most recent call last):"


# --- care ------------------------------------------------------------------------------------------------------------


def test_recover_with_nothing_to_do_says_so(home: Path) -> None:
    commit()

    assert twophase("recover").stdout == "nothing to recover\n"
    assert listed("recover") == []


@pytest.mark.usefixtures("_no_failpoints")
def test_recover_respects_a_lease_and_waits_for_it_when_asked_to(home: Path) -> None:
    crash("commit.after", start=0)

    (left,) = listed("recover")
    result = twophase("recover", "--wait")

    assert (left["decision"], left["state"]) == ("left", "COMMITTING")
    assert "its lease lasts" in left["why"]
    assert result.exit_code == 0
    assert "waiting for it" in result.stderr
    assert result.stdout == "words/1 r1: promoted, the commit point was passed (now COMMITTED)\n"
    assert twophase("verify", "words").exit_code == 0


def test_recover_aborts_what_a_dead_run_left_undecided(home: Path, record: PostgresRecord) -> None:
    land_words()
    pipeline = words_pipeline()
    pipeline.prepare()
    enter(record, pipeline)
    coordinator(record, pipeline).begin(Run(None, "dead"))
    expire(record)

    (found,) = listed("recover", "words")

    assert (found["decision"], found["state"]) == ("aborted", "ABORTED")
    assert found["why"] == "its run dead ended before the commit point"


def expire(record: PostgresRecord) -> None:
    with record.engine.begin() as connection:
        connection.execute(text("UPDATE twophase.revision SET lease_until = clock_timestamp() - interval '1 second'"))


@pytest.mark.usefixtures("_no_failpoints")
def test_recover_exits_1_when_something_is_parked(home: Path, record: PostgresRecord) -> None:
    crash("commit.after", start=0)
    expire(record)
    shutil.rmtree(data_path("lake/words.twophase/staging"))

    result = twophase("recover")
    again = twophase("recover", "--json")

    assert result.exit_code == again.exit_code == 1
    assert "parked" in result.stdout
    assert json.loads(again.stdout)[0]["parked_reason"]
    assert "parked" in twophase("show", "words", "1").stdout


@pytest.mark.usefixtures("_no_failpoints")
def test_recover_goes_on_past_a_sink_that_is_down(home: Path, record: PostgresRecord) -> None:
    crash("commit.after", start=0)
    expire(record)
    data_path("lake").rename(home / "elsewhere")

    down = twophase("recover")
    (home / "elsewhere").rename(data_path("lake"))
    back = twophase("recover")

    assert down.exit_code == 0
    assert "is it mounted?" in down.stdout
    assert "promoted" in back.stdout


def test_sweep_lists_what_it_removes_and_why(home: Path) -> None:
    commit()
    dead = home / "runs" / "words" / "00000001.r1.a1.abcd"
    dead.mkdir(parents=True)
    expected = {"pipeline": "words", "sink": "", "path": str(dead), "why": "its revision is committed"}

    assert listed("sweep", "--dry-run") == [expected]
    assert dead.exists()
    assert twophase("sweep", "words").stdout == f"removed {dead}: its revision is committed\n"
    assert not dead.exists()
    assert listed("sweep") == []
    assert twophase("sweep").stdout == "nothing to sweep\n"


def test_verify_passes_what_is_as_recorded(home: Path) -> None:
    commit(2)

    assert listed("verify", "words") == []
    assert twophase("verify", "words").stdout == "words: 2 checkpoints verified in lake: all as recorded\n"


def test_verify_names_checkpoint_sink_and_difference(home: Path) -> None:
    commit(2)
    altered = next(data_path("lake/words/checkpoint=00000002").glob("*.parquet"))
    altered.write_bytes(altered.read_bytes()[:-1] + b"?")

    result = twophase("verify", "words")
    found = twophase("verify", "words", "--json")

    assert result.exit_code == found.exit_code == 1
    (difference,) = json.loads(found.stdout)
    assert (difference["pipeline"], difference["checkpoint_id"], difference["sink"]) == ("words", 2, "lake")
    assert str(altered) in difference["difference"]
    assert difference["difference"] in result.stdout


def test_verify_of_a_table_that_is_gone_says_so(home: Path) -> None:
    commit()
    shutil.rmtree(data_path("lake/words"))

    result = twophase("verify", "words")

    assert result.exit_code == 1
    assert "has no marker" in result.stdout
    assert result.exception is None or isinstance(result.exception, SystemExit)


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
