"""Is the installed Spark of one version? pip does not ask: `pyspark` and `pyspark-client` write into one folder."""

from __future__ import annotations

import csv
from importlib.metadata import Distribution, distributions
from pathlib import Path

from twophase.constraints import CLIENT, SPARK, tested
from twophase.core.errors import ConfigError


def check(home: Path) -> None:
    """Refuse a folder of pyspark that holds files of two versions: whichever came last has overwritten the other's.

    Such a Spark starts and fails later, in the first Python function. Every file that pip has noted is compared by its
    size, which takes some milliseconds; a Spark that pip did not install is taken as it is.
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
    """Return the first module of the shared folder that is not as long as pip has noted."""
    for path, _, size in csv.reader((found.read_text("RECORD") or "").splitlines()):
        if path.startswith("pyspark/") and path.endswith(".py") and size:
            place = Path(str(found.locate_file(path)))
            if not place.is_file() or place.stat().st_size != int(size):
                return place
    return None


def _remedy() -> str:
    """Say how to get one version: both have to go first, for each takes files of the other with it."""
    pins = " ".join(f"{name}=={tested()[name]}" for name in (SPARK, CLIENT))
    return f"`pip uninstall -y {SPARK} {CLIENT}`, then `pip install {pins}`"
