"""What was found: as a table, as JSON with the machine that it was found on, and as a page of the latest figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.harness import Figure, Findings, Measure, Series, number

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = ("measure", "ours", "peer", "ratio", "goal", "reached")


def as_json(measure: Measure[Any], scale: str, machine: Mapping[str, str], findings: Findings) -> dict[str, Any]:
    """Return everything, raw values included."""
    return {
        "name": measure.name,
        "question": measure.question,
        "compared": findings.compared,
        "scale": scale,
        "sizes": asdict(getattr(measure, scale)),
        "machine": dict(machine),
        "figures": [_figure(figure) for figure in findings.figures],
        "profile": findings.profile,
        "notes": findings.notes,
        "errors": findings.errors,
    }


def _figure(figure: Figure) -> dict[str, Any]:
    return {
        "what": figure.what,
        "unit": figure.unit,
        "ours": _series(figure.ours),
        "peer": _series(figure.peer) if figure.peer else None,
        "ratio": figure.ratio,
        "goal": figure.goal,
        "reached": figure.reached,
        "cells": _cells(figure),
    }


def _series(series: Series) -> dict[str, Any]:
    return {
        "median": series.median,
        "min": min(series.values),
        "max": max(series.values),
        "values": list(series.values),
    }


def _cells(figure: Figure) -> list[str]:
    """Return a line of the table: medians, with the least and the most behind them."""
    ratio, reached = figure.ratio, figure.reached
    goal = "" if figure.goal is None else f"≤ {figure.goal:g}" + (f" {figure.unit}" if figure.peer is None else "")
    return [
        figure.what,
        f"{figure.ours} {figure.unit}",
        f"{figure.peer} {figure.unit}" if figure.peer else "",
        "" if ratio is None else f"{ratio:.2f}",
        goal,
        "" if reached is None else "yes" if reached else "NO",
    ]


def save(folder: Path, found: Mapping[str, Any]) -> Path:
    """Write one measure's JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    date = found["machine"]["date"][:16].replace(":", "")
    path = folder / f"{date}-{found['name']}{'' if found['scale'] == 'full' else '-' + found['scale']}.json"
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return path


def show(console: Console, found: list[dict[str, Any]]) -> None:
    """Print the figures, and where the time went."""
    table = Table(*COLUMNS)
    for result in found:
        table.add_row(f"{result['name']}: {result['compared']}", style="bold")
        for figure in result["figures"]:
            style = "red" if figure["reached"] is False else None
            table.add_row(f"  {figure['cells'][0]}", *figure["cells"][1:], style=style)
        table.add_section()
    console.print(table)
    for result in found:
        for line in _details(result):
            console.print(f"{result['name']}: {line}", style="dim", highlight=False)


def _details(result: Mapping[str, Any]) -> list[str]:
    profile = [
        f"{side}: {', '.join(f'{part} {number(seconds)} s' for part, seconds in parts.items())}"
        for side, parts in result["profile"].items()
    ]
    return [*profile, *result["notes"], *(f"NOT MEASURED: {error}" for error in result.get("errors", ()))]


def write_latest(folder: Path) -> None:
    """Write the page of each measure's latest figures; those of quick runs only where there are no others."""
    latest: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        if found["scale"] == "full" or latest.get(found["name"], {}).get("scale") != "full":
            latest[found["name"]] = found
    lines = ["# The latest figures", "", "Written by `make bench`; what they mean is in docs/benchmarks.md.", ""]
    for found in latest.values():
        lines += _section(found)
    (folder / "latest.md").write_text("\n".join(lines).rstrip() + "\n")


def _section(found: Mapping[str, Any]) -> list[str]:
    sizes = ", ".join(f"{name} {value:,}" for name, value in found["sizes"].items())
    machine = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    quick = "" if found["scale"] == "full" else f" ({found['scale']} sizes)"
    rows = [figure["cells"] for figure in found["figures"]]
    return [
        f"## {found['name']}{quick}",
        "",
        f"{found['question']} Compared: {found['compared']}.",
        "",
        *(f"| {' | '.join(row)} |" for row in [list(COLUMNS), ["---"] * len(COLUMNS), *rows]),
        "",
        *(f"- {line}" for line in _details(found)),
        f"- sizes: {sizes}",
        f"- machine: {machine}",
        "",
    ]
