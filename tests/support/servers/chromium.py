"""Chromium, which walks the pages in the tests: found on the PATH, or installed by `make test` where it may."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = f"no test walks the pages: none of {', '.join(NAMES)} is on the PATH; apt-get install chromium"
#: No question, no recommended extras; another apt that is at work is waited for.
APT = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300")
STEPS = (("update",), ("install", "--yes", "--no-install-recommends", "chromium"))


def find() -> str | None:
    """Return the path of a browser, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def may_install() -> bool:
    """Say whether this account may install the distribution's packages, and the distribution has apt."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def install() -> str:
    """Install the distribution's package; return what apt said if it failed, else nothing."""
    for step in STEPS:
        done = subprocess.run(
            [*APT, *step],
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return f"apt-get {step[0]}: {(done.stderr or done.stdout).strip().rpartition(chr(10))[2]}"
    return ""


def say(line: str) -> None:
    """Tell whoever called make."""
    sys.stdout.write(f"→ {line}\n")
    sys.stdout.flush()


def main() -> None:
    """Have a browser, or say in one line why there is none; a machine without one is no failure."""
    if find():
        return
    reason = ""
    if may_install():
        say("no Chromium here: installing the distribution's package, for the tests of the pages")
        reason = install()
    if not find():
        say(MISSING + (f" ({reason})" if reason else ""))


if __name__ == "__main__":
    main()
