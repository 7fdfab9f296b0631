"""Which Java Spark runs on is read from the file beside it; a Java without one is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from twophase.core.errors import ConfigError
from twophase.spark import submit


@pytest.fixture(autouse=True)
def _ask_anew() -> Iterator[None]:
    submit.find_java.cache_clear()
    yield
    submit.find_java.cache_clear()


def java(folder: Path, script: str = "exit 1", release: str | None = None) -> Path:
    """Make a Java that says what it is told, and may have a file beside it."""
    program = folder / "bin" / "java"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    if release is not None:
        (folder / "release").write_text(release)
    return program


def test_the_file_beside_a_java_tells_its_version_without_a_process(tmp_path: Path) -> None:
    assert submit.java_version(java(tmp_path, release='IMPLEMENTOR="x"\nJAVA_VERSION="17.0.15"\n')) == 17


def test_an_old_java_counts_from_its_second_number(tmp_path: Path) -> None:
    assert submit.java_version(java(tmp_path, release='JAVA_VERSION="1.8.0_402"\n')) == 8


def test_a_java_without_the_file_is_asked(tmp_path: Path) -> None:
    assert submit.java_version(java(tmp_path, """echo 'openjdk version "21.0.2" 2024-01-16' >&2""")) == 21


def test_what_is_no_program_is_no_java(tmp_path: Path) -> None:
    program = java(tmp_path, release='JAVA_VERSION="17.0.15"\n')
    program.chmod(0o644)

    assert submit.java_version(program) == 0


@pytest.mark.parametrize(("modules", "whole"), [("java.base jdk.incubator.vector", True), ("java.base", False)])
def test_the_stock_spark_submit_is_used_if_the_java_has_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules: str, *, whole: bool
) -> None:
    program = java(tmp_path, release=f'JAVA_VERSION="17.0.15"\nMODULES="{modules}"\n')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))

    assert submit.find_java("python") == (program, whole)


def test_a_java_that_is_too_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java(tmp_path, release='JAVA_VERSION="11.0.2"\n')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr(submit, "_ask", lambda *_: None)

    with pytest.raises(ConfigError, match=r"expected version 17 or newer .*/bin/java is version 11"):
        submit.find_java("python")
