"""`python -m benchmarks [NAME…]`: measure, print a table, keep the figures. A goal that is missed is not an error."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import (
    audits,
    commit,
    delta,
    files,
    growth,
    history,
    importing,
    kafka_promotion,
    kafka_read,
    kafka_send,
    landing,
    log_tables,
    machine,
    memory,
    million,
    partitions,
    place,
    postgres,
    promotion,
    report,
    scheduling,
    state,
    verifying,
)
from benchmarks.harness import Measure

MEASURES: dict[str, Measure[Any]] = {
    measure.name: measure
    for measure in (
        files.MEASURE,
        delta.MEASURE,
        promotion.MEASURE,
        promotion.REPLACEMENT,
        commit.MEASURE,
        history.MEASURE,
        growth.MEASURE,
        log_tables.MEASURE,
        million.MEASURE,
        memory.MEASURE,
        landing.MEASURE,
        audits.MEASURE,
        verifying.MEASURE,
        postgres.ATTACH,
        postgres.APPEND,
        postgres.UPSERT,
        partitions.MEASURE,
        kafka_send.MEASURE,
        kafka_promotion.MEASURE,
        kafka_read.MEASURE,
        kafka_read.BEGIN,
        importing.MEASURE,
        scheduling.CHECKPOINT,
        scheduling.RECOVERY,
        state.MEASURE,
    )
}
RESULTS = Path(__file__).parent / "results"


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Which measures; all if none is named.")] = None,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: a few minutes for all.")] = False,
    tiny: Annotated[bool, typer.Option("--tiny", hidden=True)] = False,
    list_: Annotated[bool, typer.Option("--list", help="Say what is measured, and measure nothing.")] = False,
    results: Annotated[Path, typer.Option(help="Where the figures go.")] = RESULTS,
) -> None:
    """Measure Twophase and its peers side by side."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    if list_:
        for measure in MEASURES.values():
            console.print(f"{measure.name:<10} {measure.question}", highlight=False)
        return
    if unknown := [name for name in names or () if name not in MEASURES]:
        msg = f"{', '.join(unknown)}: expected some of {', '.join(MEASURES)}"
        raise typer.BadParameter(msg)
    scale = "tiny" if tiny else "quick" if quick else "full"
    found = []
    failed = []
    for name in names or MEASURES:
        try:
            found.append(take(MEASURES[name], scale))
        except Exception:  # noqa: BLE001 - the others are still worth measuring
            traceback.print_exc()
            failed.append(name)
        else:
            failed += [name] if found[-1]["errors"] else []
            report.save(results, found[-1])
            report.write_latest(results)
    report.show(console, found)
    if failed:
        console.print(f"errors, so not everything was measured: {', '.join(failed)}", style="red")
        raise typer.Exit(1)


def take(measure: Measure[Any], scale: str) -> dict[str, Any]:
    """Take one measure in a place of its own."""
    print(f"{measure.name}: {measure.question}", file=sys.stderr)
    with place.opened() as here:
        described = machine.describe(here.home)
        findings = measure.run(here, getattr(measure, scale))
        return report.as_json(measure, scale, described, findings)


if __name__ == "__main__":
    typer.run(main)
