"""A Spark of which two versions share one folder is refused in one line, before anything is begun."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.pipelines.commands import one_line_error, twophase
from twophase import Pipeline, constraints, sinks, sources
from twophase.core.errors import ConfigError
from twophase.spark import installed, submit

PINS = constraints.tested()
REMEDY = (
    "`pip uninstall -y pyspark pyspark-client`, then "
    f"`pip install pyspark=={PINS['pyspark']} pyspark-client=={PINS['pyspark-client']}`"
)


@pytest.fixture(autouse=True)
def _ask_anew() -> Iterator[None]:
    submit.find_spark_home.cache_clear()
    yield
    submit.find_spark_home.cache_clear()


def install(folder: Path, name: str, version: str, *, worker: str = "run()\n") -> Path:
    """Put into a folder what pip leaves of a small pyspark: its modules, and its notes of them."""
    home = folder / "pyspark"
    files = {"__init__.py": "", "version.py": f"__version__ = {version!r}\n", "worker.py": worker}
    for file, text in files.items():
        home.mkdir(parents=True, exist_ok=True)
        (home / file).write_text(text)
    notes = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    notes.mkdir()
    (notes / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")
    noted = [f"pyspark/{file},sha256=x,{len(text)}\n" for file, text in files.items()]
    (notes / "RECORD").write_text("".join([*noted, f"{notes.name}/RECORD,,\n"]))
    return home


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give Spark jobs an interpreter whose pyspark and pyspark-client differ; return their folder."""
    site = tmp_path / "site"
    home = install(site, "pyspark", "4.3.0")
    install(site, "pyspark-client", "4.2.0")
    (home / "bin").mkdir()
    (home / "bin" / "spark-submit").touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("TWOPHASE_SPARK_PYTHON", str(python))
    return home


def test_the_spark_of_this_environment_is_of_one_version() -> None:
    installed.check(submit.find_spark_home(sys.executable))


def test_one_version_of_both_is_accepted(tmp_path: Path) -> None:
    install(tmp_path, "pyspark", "4.2.0")
    installed.check(install(tmp_path, "pyspark-client", "4.2.0"))


def test_a_spark_that_pip_did_not_install_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "pyspark").mkdir()
    installed.check(tmp_path / "pyspark")


def test_two_versions_in_one_folder_are_refused_with_the_remedy(mixed: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        installed.check(mixed)

    assert str(refused.value) == (
        f"spark: expected one version in {mixed}, found pyspark 4.3.0 and pyspark-client 4.2.0, "
        f"which overwrite each other; {REMEDY}"
    )


def test_files_that_another_version_left_are_refused_though_the_versions_agree(tmp_path: Path) -> None:
    """As after an upgrade of one and then of the other, or when one of them was uninstalled."""
    home = install(tmp_path, "pyspark", "4.2.0")
    (home / "worker.py").write_text("run_otherwise()\n")
    with pytest.raises(ConfigError, match=r"worker\.py: expected the file of pyspark 4\.2\.0, found another or none"):
        installed.check(home)

    (home / "worker.py").unlink()
    with pytest.raises(ConfigError, match="pip uninstall -y pyspark pyspark-client"):
        installed.check(home)


def test_run_refuses_a_mixed_spark_before_anything_is_begun(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path / "home"))
    file = tmp_path / "pipeline.py"
    file.write_text(
        "from twophase import Pipeline, sinks, sources\n"
        "p = Pipeline('p', reads={'r': sources.Files('r', format='json', schema='a int')}, transform='m:t',"
        " writes={'w': sinks.Files('w')})\n"
    )

    assert "found pyspark 4.3.0 and pyspark-client 4.2.0" in one_line_error(twophase("run", str(file)))
    assert not (tmp_path / "home").exists()


def test_the_stage_task_refuses_a_mixed_spark_before_it_opens_the_record(mixed: Path) -> None:
    from twophase.airflow import StageOperator

    pipeline = Pipeline(
        "p",
        reads={"r": sources.Files("r", format="json", schema="a int")},
        transform="m:t",
        writes={"w": sinks.Files("w")},
    )
    task = StageOperator(task_id="stage", pipeline=pipeline)

    with pytest.raises(ConfigError, match=r"found pyspark 4\.3\.0 and pyspark-client 4\.2\.0"):
        task.execute({})  # it gets no further than that
