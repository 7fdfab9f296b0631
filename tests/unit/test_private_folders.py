"""Folders and files of runs: for their own account alone."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from twophase.core import private_files
from twophase.spark.plan import write_json


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set what a process leaves out of the rights of whatever it makes."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_plans_results_and_logs_are_their_accounts_alone_whatever_the_umask_is(
    umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run folder itself stays its owner's to open: tables may be below it."""
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "runs" / "orders" / "00000001.r1.a1.t0ken"

    write_json(folder / "plan.json", {})
    with private_files.open_file(folder / "spark.log", "ab") as log:
        log.write(b"started")
    with private_files.open_file(folder / "words.inputs", "w") as file:
        file.write("ü")

    made = [folder, folder.parent, folder.parent.parent]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o777 & ~umask
