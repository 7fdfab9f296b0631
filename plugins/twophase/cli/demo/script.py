"""The demo without Airflow: `twophase run`, killed at the three worst moments."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from twophase.cli.demo.story import CONF, PATIENCE, TWOPHASE, DemoFailed, Story
from twophase.cli.output import busy


class Kill(NamedTuple):
    """Where a run is killed, and what that means."""

    failpoint: str
    when: str
    then: str


KILLS = (
    Kill("vote.before", "before the vote", "Spark has staged everything, nobody has voted for it."),
    Kill("commit.after", "right after the commit point", "It is decided, and nothing is promoted."),
    Kill("promote.visible", "in the middle of promotion", "The data is visible, and the record does not know it."),
)


class ScriptStory(Story):
    """Runs a script, which kills itself at a failpoint, and runs it again."""

    def play(self) -> bool:
        """Play it; say whether the proof holds."""
        from twophase.cli.record_access import opened

        self.say.print("[bold]Twophase demo[/]: word count, from JSON files to a Parquet table, killed three times")
        with busy(self.say, "starting PostgreSQL"), opened(may_start=True):
            pass
        for number, kill in enumerate(KILLS, start=1):
            self.head(f"{number}. Killed {kill.when}")
            self.land()
            self._run(kill)
            self.tell(kill.then)
            self.look()
            self._run()
            self.look()
        return self.prove()

    def _run(self, kill: Kill | None = None) -> None:
        """Run the pipeline in a process of its own; it must be killed just where it should, or end well."""
        from twophase.examples import word_count

        file = Path(word_count.__file__)
        environment = {"TWOPHASE_FAILPOINTS": f"{kill.failpoint}=kill"} if kill else {}
        shown = "".join(f"{name}={value} " for name, value in environment.items())
        arguments = ["run", str(file), *(part for item in CONF.items() for part in ("--conf", "=".join(item)))]
        self.say.print(f"   [bold]$[/] {shown}twophase run {file.name}", soft_wrap=True)
        code, told = self._child(arguments, environment)
        if code != (-signal.SIGKILL if kill else 0):
            msg = f"the run ended with {code}, expected {'to be killed' if kill else '0'}: {' / '.join(told[-3:])}"
            raise DemoFailed(msg)

    def _child(self, arguments: list[str], environment: Mapping[str, str]) -> tuple[int, list[str]]:
        """Run `twophase` and pass on what it tells; return its exit code and its last words."""
        told: list[str] = []
        with (
            busy(self.say, "working"),
            subprocess.Popen(
                [*TWOPHASE, *arguments],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            ) as child,
        ):
            watchdog = threading.Timer(PATIENCE, child.kill)
            watchdog.start()
            try:
                for line in child.stderr or ():
                    told.append(line.rstrip())
                    self.tell(f"  {told[-1]}", "red" if "failpoint" in line else "dim")
                return child.wait(), told
            finally:
                watchdog.cancel()
                child.kill()
