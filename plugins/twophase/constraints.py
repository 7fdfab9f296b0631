"""The versions that were tested together, for pip: `python -m twophase.constraints > constraints.txt`.

It runs from an installed package and from the wheel itself (`PYTHONPATH=twophase-….whl`), so that there is a file for
`pip install --constraint` before anything is installed.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files

#: Both write into one folder, so that their versions must be equal. Airflow's provider for Spark wants the second.
SPARK, CLIENT = "pyspark", "pyspark-client"


def tested() -> dict[str, str]:
    """Return the version of each distribution that was tested with the others."""
    text = files("twophase").joinpath("constraints.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


def fitting() -> dict[str, str]:
    """Return the versions for this environment: what is installed in it stays as it is, and Spark is one version.

    pip leaves an installed distribution alone as long as it fits; an Airflow that is there must not be changed by a
    constraint either. Only `pyspark` follows what is installed: it has to be as old as the client beside it.
    """
    pins = {name: pin for name, pin in tested().items() if name in {SPARK, CLIENT} or _installed(name) is None}
    if client := _installed(CLIENT):
        pins |= {SPARK: client, CLIENT: client}
    return pins


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    for name, pin in fitting().items():
        print(f"{name}=={pin}")  # noqa: T201 - this is its product
