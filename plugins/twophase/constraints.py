"""Print the versions that were tested together, for pip: `python -m twophase.constraints > constraints.txt`.

It runs from an installed package and from the wheel itself (`PYTHONPATH=twophase-….whl`), so `pip install --constraint`
can use its output before anything is installed.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files

#: Both install into one folder, so their versions must be equal. Airflow's Spark provider requires the second.
SPARK, CLIENT = "pyspark", "pyspark-client"


def tested() -> dict[str, str]:
    """Return the version of each distribution that was tested with the others."""
    text = files("twophase").joinpath("constraints.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


def fitting() -> dict[str, str]:
    """Return the versions for this environment: installed distributions stay as they are, and Spark has one version.

    pip leaves an installed distribution alone as long as it fits, and a constraint must not change an installed Airflow
    either. So what is installed is left out. Only `pyspark` must have the version of the installed `pyspark-client`.
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
