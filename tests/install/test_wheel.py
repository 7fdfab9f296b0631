"""The wheel: it has everything, pip gets one Spark by it, and the page on existing Airflows does what it shows."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.servers.postgres import open_folder
from twophase import constraints

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/existing-airflow.md"
UV = Path(sys.executable).with_name("uv")
OUTSIDE = ("AIRFLOW", "TWOPHASE", "PYTHONPATH", "VIRTUAL_ENV", "PIP_CONSTRAINT")

_BLOCK = re.compile(r"<!-- (run|file)(?:: (\S+))? -->\n^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: What stands in the page for a reader's own places.
_DATABASE = "postgres://twophase:choose%20one@db.example.org:5432/twophase"
_FOLDERS = {"/var/lib/twophase": "state", "/opt/airflow/spark_jobs": "spark_jobs"}


def run(*command: str | Path, folder: Path, **environment: str) -> str:
    """Run a command that knows nothing of this checkout, and return what it says."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(OUTSIDE)}
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={**inherited, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel() -> Iterator[Path]:
    """Build the wheel as `make wheel` does, from a copy of what it is built from; return it, in a folder of its own."""
    folder = open_folder("twophase-wheel-")
    source = folder / "source"
    source.mkdir()
    for name in ("plugins", "pyproject.toml", "README.md"):
        copied = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copied(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, folder=source)
    (built,) = folder.glob("*.whl")
    yield built
    shutil.rmtree(folder)


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    """Templates, migrations and constraints included; nothing that a build or a run has left behind."""
    package = ROOT / "plugins" / "twophase"
    ours = [file for file in package.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        entries = archive.read(f"twophase-{wheel.name.split('-')[1]}.dist-info/entry_points.txt").decode()

    assert packed == {f"twophase/{file.relative_to(package)}" for file in ours}
    assert {"twophase/constraints.txt", "twophase/web/templates/base.html"} <= packed
    assert re.findall(r"^\[(.+)\]$", entries, re.MULTILINE) == [
        "airflow.plugins", "apache_airflow_provider", "console_scripts",
    ]  # fmt: skip


def chosen(python: Path, *arguments: str | Path) -> dict[str, str]:
    """Return what an installation would put into an empty environment."""
    said = run(UV, "pip", "install", "--dry-run", "--python", python, *arguments, folder=python.parent)
    return dict(re.findall(r"^ \+ ([\w.-]+)==(\S+)", said, re.MULTILINE))


@pytest.mark.timeout(600)
def test_an_installation_gets_one_version_of_spark_with_and_without_the_constraints(wheel: Path) -> None:
    """By its bounds alone the newest of both is the same; by the constraints everything is what was tested."""
    python = wheel.parent / "empty" / "bin" / "python"
    run(UV, "venv", "-q", "--python", sys.executable, python.parents[1], folder=wheel.parent)
    pins = wheel.parent / "constraints.txt"
    pins.write_text(run(python, "-m", "twophase.constraints", folder=wheel.parent, PYTHONPATH=str(wheel)))
    everything = f"{wheel}[airflow,delta,embedded,iceberg,java,postgres]"
    free, bound = chosen(python, f"{wheel}[airflow]"), chosen(python, "--constraint", pins, everything)

    assert free["pyspark"] == free["pyspark-client"] == constraints.tested()["pyspark"]
    assert bound.items() - {("twophase", wheel.name.split("-")[1])} <= constraints.tested().items()


@pytest.mark.spark
def test_the_wheel_alone_is_enough_for_a_dag_and_a_committed_checkpoint(wheel: Path, dsn: str) -> None:
    """The wheel beside the libraries of this environment, without this checkout: `make test-install` does it whole."""
    folder = wheel.parent
    run(UV, "venv", "-q", "--python", sys.executable, "beside", folder=folder)
    python = folder / "beside" / "bin" / "python"
    run(UV, "pip", "install", "-q", "--no-deps", "--python", python, wheel, folder=folder)
    packages = next((folder / "beside" / "lib").glob("python*/site-packages"))
    (packages / "libraries.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    files, commands = blocks(PAGE.read_text(encoding="utf-8"))
    (folder / "spark_jobs").mkdir()
    (folder / "word_count.py").write_text(files["dags/word_count.py"])
    (folder / "spark_jobs" / "word_count.py").write_text(files["spark_jobs/word_count.py"])
    settled = {"AIRFLOW_HOME": str(folder / "airflow"), "TWOPHASE_HOME": str(folder / "state"), "TWOPHASE_DSN": dsn}
    land = [line for line in commands[-1].splitlines() if line.startswith(("mkdir", "echo"))]
    status = json.loads(run(python.with_name("twophase"), "status", "--json", folder=folder, **settled))
    code = (
        "import word_count, twophase; print(twophase.__file__, word_count.dag.dag_id, sorted(word_count.dag.task_ids))"
    )
    said = run(python, "-W", "ignore", "-c", code, folder=folder, **settled).splitlines()[-1]
    run("bash", "-ec", "\n".join(land), folder=folder, **settled)
    committed = run(python.with_name("twophase"), "run", "word_count.py", folder=folder, **settled)

    assert status["versions"]["twophase"] == wheel.name.split("-")[1]
    assert status["spark"]["spark_home"]
    assert said == f"{packages / 'twophase' / '__init__.py'} word_count ['abort', 'commit', 'stage']"
    assert re.search(r"^word_count +1 +1 COMMITTED +1 +1 ", committed, re.MULTILINE), committed


def blocks(page: str) -> tuple[dict[str, str], list[str]]:
    """Return the files that a page shows, and the commands that it runs."""
    found = _BLOCK.findall(page)
    return {name: text for kind, name, text in found if kind == "file"}, [t for kind, _, t in found if kind == "run"]


@pytest.fixture
def place(wheel: Path) -> Iterator[Path]:
    """Return an empty folder with the wheel in it, that the embedded PostgreSQL of the tests can work in."""
    folder = open_folder("twophase-install-")
    shutil.copy2(wheel, folder)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.install
@pytest.mark.timeout(1800)
def test_the_page_on_existing_airflows_does_what_it_shows(place: Path, dsn: str) -> None:
    """From an empty environment to a committed checkpoint, by the commands of the page, with pip."""
    run(sys.executable, "-m", "venv", "venv", folder=place)
    text = PAGE.read_text(encoding="utf-8").replace(_DATABASE, dsn.replace("postgresql+psycopg2", "postgres"))
    for shown, own in _FOLDERS.items():
        text = text.replace(shown, str(place / own))
    files, commands = blocks(text)
    for name, content in files.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(content, encoding="utf-8")
    install, *rest = commands
    script = ["set -euo pipefail", f"cd {place}", install, "airflow db migrate", *rest]  # an existing one was migrated
    said = run(
        "bash", "-c", "\n".join(script),
        folder=place,
        PATH=os.pathsep.join([str(place / "venv" / "bin"), os.environ["PATH"]]),
        AIRFLOW_HOME=str(place),
        AIRFLOW__CORE__LOAD_EXAMPLES="False",
    )  # fmt: skip

    assert re.search(r"^ +1 +1 COMMITTED +1 +1 ", said, re.MULTILINE), said
    assert "(connection twophase_committer)" in said
    assert re.search(rf"^airflow +3\.\d+\.\d+ in {place}, LocalExecutor$", said, re.MULTILINE)
    assert re.search(r"^plugin +loaded$", said, re.MULTILINE)
    assert not re.findall(r"^problem .*", said, re.MULTILINE)
    assert list((place / "state" / "data" / "lake" / "word_count" / "checkpoint=00000001").glob("*.parquet"))
