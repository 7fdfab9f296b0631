"""A PostgreSQL server of its own for the target of a sink, to be killed and stopped."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg2
import pytest

from support.crashes import several_sinks
from support.servers.postgres import FASTER, administer, open_folder
from twophase.local import postgres


class Server:
    """A second PostgreSQL, that of the target."""

    def __init__(self) -> None:
        self.home = open_folder("twophase-target-")
        self.databases = 0
        self.dsn = ""
        with self.here():
            administer(postgres.ensure(), *FASTER)

    @contextmanager
    def here(self) -> Iterator[None]:
        """Let what is said about the embedded server be said about this one."""
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("TWOPHASE_HOME", str(self.home))
            yield

    def become_target(self, environment: pytest.MonkeyPatch) -> None:
        """Start unless it runs, make an empty database, and let that be the target of what follows."""
        self.back()
        self.databases += 1
        with self.here():
            self.dsn = postgres.create_database(f"target_{self.databases}")
        for name in (several_sinks.TARGET, "AIRFLOW_CONN_DWH"):
            environment.setenv(name, self.dsn.replace("postgresql+psycopg2", "postgres"))

    def kill(self) -> None:
        """Kill all of its processes at one instant."""
        with self.here():
            postmaster = postgres.pid()
        assert postmaster is not None
        os.kill(postmaster, signal.SIGSTOP)  # nobody new from here on
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        for pid in (postmaster, *map(int, children)):
            os.kill(pid, signal.SIGKILL)

    def back(self) -> None:
        """Start it again, unless it runs."""
        with self.here():
            postgres.ensure()

    def stop(self) -> None:
        """End it in good order."""
        with self.here():
            postgres.stop()

    def remove(self) -> None:
        """End it, and leave nothing of it."""
        self.stop()
        shutil.rmtree(self.home)


@contextmanager
def session() -> Iterator[Any]:
    """Hand out a cursor of somebody else's in the target database; nothing of it stays."""
    with closing(psycopg2.connect(os.environ[several_sinks.TARGET].replace("postgres://", "postgresql://"))) as opened:
        yield opened.cursor()


def asked(query: str) -> list[tuple[Any, ...]]:
    """Ask the target database."""
    with session() as cursor:
        cursor.connection.autocommit = True
        cursor.execute(query)
        return cursor.fetchall() if cursor.description else []
