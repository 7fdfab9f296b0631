"""A browser for the tests of the pages: there, installed where that is allowed, or told in one line to be missing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.servers import chromium

#: Stands for apt, which a test must not let loose on the machine.
APT = """#!/bin/sh
echo "$@" >> {folder}/asked
{then}
"""
INSTALLS = "case $4 in install) : > {folder}/chromium; chmod +x {folder}/chromium ;; esac"
FAILS = "echo E: something else >&2; echo E: no network >&2; exit 100"


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Leave the shell's own tools and one folder on the PATH, and be root."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "chmod"):
        (tools / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", f"{tmp_path}:{tools}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return tmp_path


def apt(folder: Path, then: str) -> None:
    (folder / "apt-get").write_text(APT.format(folder=folder, then=then.format(folder=folder)))
    (folder / "apt-get").chmod(0o755)


def asked(folder: Path) -> list[str]:
    path = folder / "asked"
    return [line.split()[3] for line in path.read_text().splitlines()] if path.exists() else []


def test_a_missing_browser_is_installed_by_one_update_and_one_package(
    bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    apt(bare, INSTALLS)
    chromium.main()
    (line,) = capsys.readouterr().out.splitlines()

    assert "installing" in line
    assert asked(bare) == ["update", "install"]
    assert chromium.find() == str(bare / "chromium")


def test_a_browser_that_is_there_is_left_as_it_is(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    apt(bare, INSTALLS)
    (bare / "google-chrome").touch(0o755)
    chromium.main()

    assert capsys.readouterr().out == ""
    assert asked(bare) == []


@pytest.mark.parametrize("why", ["no root", "no apt"])
def test_where_it_may_not_be_installed_one_line_says_what_is_missing_and_how_to_get_it(
    bare: Path, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if why == "no root":
        apt(bare, INSTALLS)
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    chromium.main()

    assert capsys.readouterr().out == f"→ {chromium.MISSING}\n"
    assert "apt-get install chromium" in chromium.MISSING
    assert asked(bare) == []


def test_an_installation_that_fails_is_said_in_apts_last_words(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    apt(bare, FAILS)
    chromium.main()
    _, line = capsys.readouterr().out.splitlines()

    assert line == f"→ {chromium.MISSING} (apt-get update: E: no network)"
    assert asked(bare) == ["update"]
