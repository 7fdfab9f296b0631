"""Failpoints do what they are told, nothing when told nothing, and every one of them is somewhere in the source."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from twophase.core import failpoints
from twophase.core.errors import ConfigError, TwophaseError
from twophase.core.failpoints import FAILPOINTS, FailpointError, configure, hit, parse

PLUGINS = Path(__file__).parents[2] / "plugins"


@pytest.fixture(autouse=True)
def _unset() -> Iterator[None]:
    before = dict(failpoints._active)
    configure("")
    yield
    failpoints._active = before
    failpoints._hits.clear()


# --- what a failpoint is told ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        (" , ;", {}),
        ("begin.before=kill", {"begin.before": ("kill", 1)}),
        ("begin.before=stop@3", {"begin.before": ("stop", 3)}),
        (
            " begin.before=raise@2 , commit.after=kill ",
            {"begin.before": ("raise", 2), "commit.after": ("kill", 1)},
        ),
        ("begin.before=raise;commit.after=stop", {"begin.before": ("raise", 1), "commit.after": ("stop", 1)}),
    ],
)
def test_a_specification_is_read(text: str, expected: dict[str, tuple[str, int]]) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize("text", ["begin.befor=kill", "kill", "=kill", "BEGIN.BEFORE=kill"])
def test_a_failpoint_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^TWOPHASE_FAILPOINTS: no failpoint '.*'; `twophase failpoints` lists them$"
    ):
        parse(text)


@pytest.mark.parametrize(
    "spec",
    ["", "explode", "kill@0", "kill@-1", "kill@x", "kill@1.5", "KILL", "raise=1", "raise@1@2", "kill now"],
)
def test_an_action_that_does_not_exist_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"^TWOPHASE_FAILPOINTS: 'begin.before=.*': expected name=kill\|raise\|stop"):
        parse(f"begin.before={spec}")


def test_a_count_in_strange_digits_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected name="):
        parse("begin.before=kill@²")


# --- what it does ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAILPOINTS)
def test_a_failpoint_does_nothing_when_told_nothing(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    hit(name)

    assert capfd.readouterr() == ("", "")


def test_a_failpoint_leaves_the_others_alone() -> None:
    configure("begin.before=raise")

    hit("begin.after")


def test_raise_says_where_and_what_has_just_happened(capfd: pytest.CaptureFixture[str]) -> None:
    configure("commit.after=raise")

    with pytest.raises(FailpointError) as raised:
        hit("commit.after")

    assert str(raised.value) == "failpoint commit.after (the commit point is passed, nothing promoted)"
    assert isinstance(raised.value, TwophaseError)
    assert capfd.readouterr().err == "failpoint commit.after: raise\n"


def test_a_failpoint_acts_on_its_nth_hit_only() -> None:
    configure("vote.after=raise@3")

    hit("vote.after")
    hit("vote.after")
    with pytest.raises(FailpointError):
        hit("vote.after")
    hit("vote.after")


def test_configuring_again_counts_from_the_start() -> None:
    configure("vote.after=raise@2")
    hit("vote.after")

    configure("vote.after=raise@2")

    hit("vote.after")
    with pytest.raises(FailpointError):
        hit("vote.after")


def start(action: str) -> subprocess.Popen[bytes]:
    code = "from twophase.core.failpoints import hit; print('in', flush=True); hit('begin.before'); print('out')"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "TWOPHASE_FAILPOINTS": f"begin.before={action}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_kill_ends_the_process_on_the_spot() -> None:
    with start("kill") as process:
        out, err = process.communicate(timeout=30)

    assert process.returncode == -signal.SIGKILL
    assert (out, err) == (b"in\n", b"failpoint begin.before: kill\n")


def test_stop_halts_the_process_until_it_is_told_to_go_on() -> None:
    with start("stop") as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        stopped = os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        out, err = process.communicate(timeout=30)

    assert stopped
    assert process.returncode == 0
    assert (out, err) == (b"in\nout\n", b"failpoint begin.before: stop\n")


def test_a_wrong_specification_in_the_environment_stops_the_process_at_once() -> None:
    with start("explode") as process:
        out, err = process.communicate(timeout=30)

    assert process.returncode == 1
    assert out == b""
    assert b"TWOPHASE_FAILPOINTS: 'begin.before=explode'" in err


# --- where they are --------------------------------------------------------------------------------------------------


def hits() -> Iterator[tuple[str, ast.expr]]:
    """Yield the argument of every call of `hit` in what is shipped, and where it is."""
    for path in sorted(PLUGINS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (
                (isinstance(node.func, ast.Name) and node.func.id == "hit")
                or (isinstance(node.func, ast.Attribute) and node.func.attr == "hit")
            ):
                yield f"{path.relative_to(PLUGINS)}:{node.lineno}", node.args[0]


def named() -> dict[str, str]:
    return {where: str(found.value) for where, found in hits() if isinstance(found, ast.Constant)}


def test_every_hit_names_its_failpoint_in_plain_text() -> None:
    """Otherwise nobody could find a failpoint by its name, this test included."""
    assert [where for where, found in hits() if not isinstance(found, ast.Constant)] == []


def test_every_hit_in_the_source_is_listed() -> None:
    assert {where: name for where, name in named().items() if name not in FAILPOINTS} == {}


def test_every_listed_failpoint_is_hit_somewhere_in_the_source() -> None:
    assert sorted(set(FAILPOINTS) - set(named().values())) == []


def test_every_failpoint_says_where_it_is() -> None:
    assert all(FAILPOINTS.values())
