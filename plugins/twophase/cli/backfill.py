"""The commands `backfill`, which runs committed checkpoints again, and `stale`, which lists those that need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twophase.cli.output import Json, by_sink, complain, listing, print_json, progress, say
from twophase.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress
    from sqlalchemy import Connection

    from twophase.attempt import Stager
    from twophase.backfill import Backfill, Done
    from twophase.pipeline import Pipeline

RESULT = (
    ("pipeline", "pipeline"),
    ("checkpoint", "checkpoint_id"),
    ("slot", "slot"),
    ("rev", "revision"),
    ("state", "state"),
    ("rows", "rows"),
    ("by sink", "by_sink"),
    ("failed", "failed"),
)


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(rich_help_panel="Run")(backfill)
    app.command(rich_help_panel="Look")(stale)


def _range(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    from twophase.backfill import ranges

    try:
        (found,) = ranges(text)
    except (ConfigError, ValueError):
        msg = f"expected a number or a range such as 17..20, found {text!r}"
        raise typer.BadParameter(msg) from None
    return found


def backfill(  # noqa: PLR0913 - what a person may ask for
    pipeline: Annotated[str, typer.Argument(metavar="PIPELINE", show_default=False)],
    *,
    checkpoints: Annotated[
        str | None,
        typer.Option(
            metavar="N[..M]", help="These checkpoints, both ends included; M may be `latest`.", show_default=False
        ),
    ] = None,
    start: Annotated[
        str | None, typer.Option("--from", metavar="DATE", help="Intervals from this start on.", show_default=False)
    ] = None,
    end: Annotated[
        str | None, typer.Option("--to", metavar="DATE", help="Up to this start, included.", show_default=False)
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(metavar="LENGTH", help="Length of an interval, such as 1h or 1d.", show_default="as the last one"),
    ] = None,
    only_stale: Annotated[
        bool, typer.Option("--stale", help="What was made from revisions that were replaced since.")
    ] = False,
    parallel: Annotated[int, typer.Option(min=1, max=16, help="So many at a time.")] = 1,
    downstream: Annotated[
        bool, typer.Option("--downstream", help="Then all that was made from them, upstream first.")
    ] = False,
    give_up: Annotated[
        bool, typer.Option("--give-up", help="End the backfills that are under way, without doing the rest.")
    ] = False,
    anew: Annotated[bool, typer.Option("--anew", help="Do everything, also if one was under way.")] = False,
    reason: Annotated[str | None, typer.Option(help="Why; it is kept in the record.", show_default=False)] = None,
    master: Annotated[
        str | None, typer.Option(help="Where Spark runs, as for spark-submit.", show_default="local[*]")
    ] = None,
    warm: Annotated[bool, typer.Option("--warm", help="One Spark session in this process for all of them.")] = False,
    as_json: Json = False,
) -> None:
    """Run committed checkpoints again, each as a new revision; after a kill, the same command goes on from there."""
    from twophase.backfill import Backfill, Selection
    from twophase.cli.record_access import opened

    wanted = _range(checkpoints)
    if give_up:
        _give_up(pipeline)
        return
    if [wanted is not None, start is not None, only_stale].count(True) != 1 or (start is None) != (end is None):
        msg = "expected one of --checkpoints N..M, --from DATE --to DATE, and --stale"
        raise typer.BadParameter(msg)
    selection = Selection(wanted, start, end, every, only_stale)
    done: list[Done] = []
    with opened() as record:
        work = Backfill(record, pipeline, selection, _stager(master, warm=warm), why=reason, anew=anew)
        if work.started.goes_on:
            complain(
                f"going on with {work.started.id} of {work.started.created_at:%Y-%m-%d %H:%M} UTC; --anew starts over"
            )
        try:
            _work(work, done, parallel=parallel, downstream=downstream)
            if not any(one.failed for one in done):
                work.end()
        finally:
            with record.engine.connect() as connection:
                rows = [_row(connection, one) for one in done]
            if as_json:
                print_json(rows)
            elif rows:
                listing(rows, RESULT)
    failed = sum(one.failed is not None for one in done)
    if failed:
        complain(f"{failed} of {len(done)} not done; the same command tries them again", style="yellow")
        raise typer.Exit(1)
    if not as_json:
        say(f"{pipeline}: {len(done)} done")


def _give_up(pipeline: str) -> None:
    from twophase.cli.record_access import opened
    from twophase.committer import backfills

    with opened() as record, record.transaction() as tx:
        tx.lock(pipeline)
        ended = backfills.lay_down(tx.connection, pipeline)
    say(f"{pipeline}: given up: {', '.join(ended)}" if ended else f"{pipeline}: no backfill is under way")


def _work(work: Backfill, done: list[Done], *, parallel: int, downstream: bool) -> None:
    with progress() as bar:
        task = bar.add_task(f"backfilling {work.pipeline.name}", total=len(work.items))
        for one in work.run(parallel=parallel):
            done.append(one)
            bar.advance(task)
            _tell(one, bar, f"{len(done)} of {len(work.items)}")
        if not downstream:
            return
        task = bar.add_task("downstream", total=None)
        for one in work.downstream(parallel=parallel):
            done.append(one)
            bar.update(task, description=f"downstream: {one.item.pipeline}")
            bar.advance(task)
            _tell(one, bar, "downstream")


def _tell(one: Done, bar: Progress, where: str) -> None:
    """Print how one item ended, if no progress bar shows it."""
    if bar.disable:
        ended = f"failed: {one.failed}" if one.failed else str(one.revision and one.revision.state.lower())
        complain(f"{one.item}: {ended} ({where})", style="yellow" if one.failed else "")


def _stager(master: str | None, *, warm: bool) -> Callable[[Pipeline], Stager]:
    from twophase.runner import stager_for

    if not warm:
        return lambda pipeline: stager_for(pipeline, master=master)
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master(master or "local[*]")
        .appName("twophase backfill")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    return lambda pipeline: stager_for(pipeline, session)


def _row(connection: Connection, one: Done) -> dict[str, Any]:
    from twophase.committer import queries

    if one.revision is None:
        item = one.item
        row: dict[str, Any] = dict.fromkeys([*queries.COLUMNS, "by_sink"])
        row |= {"pipeline": item.pipeline, "checkpoint_id": item.checkpoint_id, "slot": item.slot}
    else:
        row = queries.row_of(connection, one.revision.key)
        row["by_sink"] = by_sink(row)
    return {**row, "failed": one.failed}


def stale(
    pipeline: Annotated[
        str | None, typer.Argument(metavar="PIPELINE", help="Only this pipeline.", show_default=False)
    ] = None,
    *,
    as_json: Json = False,
) -> None:
    """List committed checkpoints that were made from revisions which were replaced since."""
    from twophase.cli.record_access import connected
    from twophase.committer import queries

    with connected() as connection:
        found = queries.stale(connection, pipeline)
    if as_json:
        print_json(found)
    elif not found:
        say("nothing is stale")
    else:
        names = {
            "checkpoint_id": "checkpoint",
            "revision": "rev",
            "upstream_checkpoint_id": "its checkpoint",
            "read_revision": "read",
            "committed_revision": "now",
        }
        shown = ("pipeline", "checkpoint_id", "revision", "slot", "upstream", *list(names)[2:])
        listing(found, [(names.get(column, column), column) for column in shown])
        complain("`twophase backfill PIPELINE --stale` makes them again, --downstream what reads them too", style="dim")
