"""The command `demo`: a pipeline and its database are killed, and a reader never sees it."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twophase.core.errors import ConfigError
from twophase.core.settings import home

if TYPE_CHECKING:
    from rich.console import Console

    from twophase.cli.demo.story import Story

#: Settings of the caller's that must not reach into the demo: those, and all of Airflow's.
_NOT_OURS = ("TWOPHASE_DSN", "TWOPHASE_FAILPOINTS")
_AIRFLOWS = ("AIRFLOW", "_AIRFLOW")
#: Ctrl-C, a polite kill, and a terminal that is closed.
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Run")(demo)


def demo(
    *,
    no_airflow: Annotated[
        bool, typer.Option("--no-airflow", help="Without Airflow: `twophase run`, killed at three failpoints.")
    ] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="On a Spark cluster of two workers, one of which is killed, too.")
    ] = False,
    kafka: Annotated[
        bool, typer.Option("--kafka", help="Kafka to Kafka, files and PostgreSQL; a Java consumer looks on.")
    ] = False,
    records: Annotated[int, typer.Option(min=100, help="With --kafka: how many records go in.")] = 20_000,
    kills: Annotated[int, typer.Option(min=3, help="With --kafka: how often something is killed.")] = 6,
) -> None:
    """Show a pipeline on a real Airflow survive the kill of a task and of the database; under five minutes."""
    from twophase.cli.output import console
    from twophase.local import airflow

    asked = [name for name, given in (("no-airflow", no_airflow), ("cluster", cluster), ("kafka", kafka)) if given]
    if len(asked) > 1:
        msg = (
            f"demo: expected one of --no-airflow, --cluster, --kafka, found {' and '.join(f'--{one}' for one in asked)}"
        )
        raise ConfigError(msg)
    if not no_airflow and not kafka:
        airflow.installed()
    started, say = time.monotonic(), console()
    with _own_home() as folder, _own_processes(folder, say):
        story = _kafka_story(say, records, kills) if kafka else _story(say, no_airflow=no_airflow, on_cluster=cluster)
        holds = story.play()
    told = (
        f"{time.monotonic() - started:.0f} s in all. Nothing of it runs any more; what it wrote is in {folder}:",
        f"  export TWOPHASE_HOME={shlex.quote(str(folder))}",
        f"  twophase up --no-airflow; twophase show {story.pipeline} 2; twophase down",
    )
    for line in told:
        say.print(line, style="dim", soft_wrap=True, markup=False)
    if not holds:
        raise typer.Exit(1)


def _kafka_story(say: Console, records: int, kills: int) -> Story:
    from twophase.cli.demo.kafka import KafkaStory

    return KafkaStory(say, records, kills)


def _story(say: Console, *, no_airflow: bool, on_cluster: bool) -> Story:
    if on_cluster:
        from twophase.cli.demo.cluster import ClusterStory

        return ClusterStory(say)
    if not no_airflow:
        from twophase.cli.demo.airflow import AirflowStory

        return AirflowStory(say)
    from twophase.cli.demo.script import ScriptStory

    return ScriptStory(say)


@contextmanager
def _own_home() -> Iterator[Path]:
    """Work in `<TWOPHASE_HOME>/demo`, with no setting of the caller's but that, and with short time-outs."""
    from twophase.local.airflow import QUICK

    before = dict(os.environ)
    folder = home() / "demo"
    for name in before:
        if name in _NOT_OURS or name.startswith(_AIRFLOWS):
            del os.environ[name]
    os.environ |= {
        **QUICK,
        "TWOPHASE_DAGS": str(folder / "dags"),
        "TWOPHASE_HOME": str(folder),
        "TWOPHASE_LEASE": "3",
        "TWOPHASE_SPARK_JOBS": str(folder / "spark_jobs"),
    }
    try:
        yield folder
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _own_processes(folder: Path, say: Console) -> Iterator[None]:
    """Start from nothing, and leave no process behind, however it ends; once it ends, nothing cuts that short."""
    from twophase.cli.output import busy

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    mine = _ENDINGS if threading.current_thread() is threading.main_thread() else ()
    heard = [signum for signum in mine if signal.getsignal(signum) is not signal.SIG_IGN]  # nohup, say
    before = {signum: signal.signal(signum, end) for signum in heard}
    try:
        _stop()  # what a demo that was killed has left
        if folder.exists():
            shutil.rmtree(folder)
        yield
    finally:
        for signum in before:
            signal.signal(signum, signal.SIG_IGN)
        with busy(say, "stopping everything"):
            _stop()
        for signum, action in before.items():
            signal.signal(signum, action)


def _stop() -> None:
    from twophase.local import postgres, stack

    stack.stop()
    postgres.stop()
