"""The command `explain`: what a continuous query keeps as state and gives out, or why it cannot go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twophase.cli.output import Json, print_json, say

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from twophase.pipeline import Pipeline

_HELP = "A Python file that declares a pipeline whose transform is twophase.sql(…)."
Target = Annotated[str, typer.Argument(metavar="FILE[:NAME]", help=_HELP, show_default=False)]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Run")(explain)


def explain(target: Target, *, as_json: Json = False) -> None:
    """Say what a continuous query keeps as state and which mode comes out, or why it cannot go on; nothing is run."""
    from twophase.cli.pipeline_files import load
    from twophase.core.errors import ConfigError
    from twophase.spark import submit
    from twophase.spark.continuous.declaration import ContinuousQuery

    pipeline = load(target)
    query = pipeline.transform
    if not isinstance(query, ContinuousQuery):
        msg = f"pipeline {pipeline.name!r}: its transform is no continuous query; expected transform=twophase.sql(…)"
        raise ConfigError(msg)
    submit.require()
    with _session() as spark:
        told = {"query": str(query), **query.compiled(spark, _empty(spark, pipeline)).explanation()}
    if as_json:
        print_json(told)
        return
    for line in lines(told):
        say(line)


def lines(told: Mapping[str, str]) -> list[str]:
    """Return what is told of a query, for people."""
    width = max(map(len, told))
    return [f"{name:<{width}}  {text}" for name, text in told.items()]


@contextmanager
def _session() -> Iterator[SparkSession]:
    """Start a small Spark in this process, or use the one that runs in it: it analyses, and runs nothing."""
    from pyspark.sql import SparkSession

    settings = {"spark.ui.enabled": "false", "spark.sql.session.timeZone": "UTC", "spark.log.level": "OFF"}
    builder = SparkSession.builder.master("local[1]").appName("twophase explain")
    for name, value in settings.items():
        builder = builder.config(name, value)
    running = SparkSession.getActiveSession()
    spark = running or builder.getOrCreate()
    try:
        yield spark
    finally:
        if running is None:
            spark.stop()


def _empty(spark: SparkSession, pipeline: Pipeline) -> dict[str, Any]:
    """Return the reads without rows; ConfigError for one whose columns are known only when it is read."""
    from twophase.core.checkpoint import Input
    from twophase.core.errors import ConfigError, TwophaseError

    found = {}
    for name, source in pipeline.reads.items():
        try:
            found[name] = source.read(spark, Input(unversioned="explain" if source.unversioned else None))
        except TwophaseError as error:
            msg = f"read {name!r}: its columns are not known here: {error}"
            raise ConfigError(msg) from error
    return found
