"""Hand secret settings to spark-submit in memory; any account could read them on a command line. Submissions use it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from twophase.core import secret_texts
from twophase.core.errors import ConfigError

#: Settings that become environment variables on a cluster; each may hold a secret, whatever its name.
_ENVIRONMENTS = ("spark.yarn.appMasterEnv.", "spark.kubernetes.driverEnv.", "spark.executorEnv.")


class PrivateSettings:
    """A file in memory that only this process and its children can open, by its descriptor."""

    def __init__(self, descriptor: int | None) -> None:
        """Use an open file; None: this system has no files in memory."""
        self.descriptor = descriptor

    @property
    def passed(self) -> tuple[int, ...]:
        """Return the descriptors that the child has to inherit."""
        return () if self.descriptor is None else (self.descriptor,)

    def taken_from(self, arguments: Sequence[str], defaults: Path) -> list[str]:
        """Return spark-submit's arguments without secret settings, which it then reads from the file in memory.

        `defaults` is the properties file that spark-submit reads if it is given none. Since it is given one, the
        content of `defaults` goes into the file too.
        """
        shown, private = _sorted(arguments)
        if not private:
            return shown
        if self.descriptor is None:
            name = next(iter(private))
            msg = f"spark setting {name}: on this system its value would be on a command line; put it in {defaults}"
            raise ConfigError(msg)
        if "--properties-file" in shown:
            defaults = Path(shown[shown.index("--properties-file") + 1])
        there = defaults.read_bytes() if defaults.exists() else b""
        lines = (f"{_escaped(name)}={_escaped(value)}\n" for name, value in private.items())
        os.truncate(self.descriptor, 0)
        os.pwrite(self.descriptor, there + b"\n" + "".join(lines).encode("ascii"), 0)
        return [*shown, "--properties-file", f"/dev/fd/{self.descriptor}"]


@contextmanager
def opened() -> Iterator[PrivateSettings]:
    """Make an empty file in memory; it is gone when the last process closes it."""
    if sys.platform != "linux":
        yield PrivateSettings(None)
        return
    descriptor = os.memfd_create("spark.properties")
    try:
        yield PrivateSettings(descriptor)
    finally:
        os.close(descriptor)


def default_file(spark_home: Path, environment: Mapping[str, str]) -> Path:
    """Return the properties file that Spark reads unless it is given another."""
    return Path(environment.get("SPARK_CONF_DIR") or spark_home / "conf", "spark-defaults.conf")


def _sorted(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Split arguments into those to show and the secret settings, which are hidden in any text from now on."""
    shown: list[str] = []
    private: dict[str, str] = {}
    left = iter(arguments)
    for argument in left:
        name, _, value = next(left, "").partition("=") if argument == "--conf" else ("", "", "")
        if name and (secret_texts.NAMES.search(name) or name.startswith(_ENVIRONMENTS)):
            private[name] = value
        else:
            shown += [argument, f"{name}={value}"] if argument == "--conf" else [argument]
    secret_texts.hide_named(private.items())
    return shown, private


def _escaped(text: str) -> str:
    """Escape a text for a Java properties file, so that no character in it has a special meaning."""
    units = text.encode("utf-16-be")
    return "".join(
        chr(unit) if unit < 128 and chr(unit).isalnum() else f"\\u{unit:04x}"  # noqa: PLR2004 - ASCII
        for unit in (int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2))
    )
