"""Check that the installed Spark is of one version; the runner and `submit` call it before they use Spark.

`pyspark` and `pyspark-client` install into one folder, and pip does not check that their versions agree.
"""

from __future__ import annotations

import csv
from importlib.metadata import Distribution, distributions
from pathlib import Path

from twophase.constraints import CLIENT, SPARK, tested
from twophase.core.errors import ConfigError


def check(home: Path) -> None:
    """Refuse a folder of pyspark that holds files of two versions: the last one installed has overwritten the other.

    Such a Spark starts and fails later, in the first Python function. The size of every Python file is compared with
    pip's RECORD, which takes some milliseconds. A Spark that pip did not install is not checked.
    """
    noted = {name: found for name in (SPARK, CLIENT) if (found := _distribution(name, home.parent))}
    versions = {name: found.version for name, found in noted.items()}
    if len(set(versions.values())) > 1:
        both = " and ".join(f"{name} {version}" for name, version in versions.items())
        msg = f"spark: expected one version in {home}, found {both}, which overwrite each other; {_remedy()}"
        raise ConfigError(msg)
    for name, found in noted.items():
        if (wrong := _foreign(found)) is not None:
            msg = f"spark: {wrong}: expected the file of {name} {found.version}, found another or none; {_remedy()}"
            raise ConfigError(msg)


def _distribution(name: str, folder: Path) -> Distribution | None:
    return next(iter(distributions(name=name, path=[str(folder)])), None)


def _foreign(found: Distribution) -> Path | None:
    """Return the first module of the shared folder whose size differs from pip's RECORD."""
    for path, _, size in csv.reader((found.read_text("RECORD") or "").splitlines()):
        if path.startswith("pyspark/") and path.endswith(".py") and size:
            place = Path(str(found.locate_file(path)))
            if not place.is_file() or place.stat().st_size != int(size):
                return place
    return None


def _remedy() -> str:
    """Say how to get one version: uninstall both first, because each removes files of the other."""
    pins = " ".join(f"{name}=={tested()[name]}" for name in (SPARK, CLIENT))
    return f"`pip uninstall -y {SPARK} {CLIENT}`, then `pip install {pins}`"
