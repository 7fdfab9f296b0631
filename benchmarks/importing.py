"""A DAG file is parsed again and again: what ours costs beside one that has a SparkSubmitOperator only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.harness import Figure, Findings, Measure, interleave, medians
from benchmarks.place import Place

PLAIN = """
from datetime import datetime
from airflow.sdk import DAG
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator

with DAG("plain", schedule="@daily", start_date=datetime(2026, 11, 1)):
    SparkSubmitOperator(task_id="spark", application="job.py")
"""
OURS = """
from datetime import datetime
from twophase import Pipeline, sinks, sources
from twophase.airflow import TwophaseDag

orders = Pipeline(
    "orders",
    reads={"orders": sources.Interval("landing/dt={start:%Y-%m-%d}", format="json")},
    transform="orders:transform",
    writes={"lake": sinks.Files("lake/orders", slot_folder="dt={start:%Y-%m-%d}")},
)
dag = TwophaseDag(orders, schedule="@daily", start_date=datetime(2026, 11, 1))
"""
#: Parsed as the dag-processor does it: an interpreter that has Airflow's own parser loaded, and frozen what it has.
PARSE = """
import gc, os, resource, runpy, sys
if sys.argv[2] == "warm":
    import airflow.dag_processing.dagbag
    gc.freeze()
before = resource.getrusage(resource.RUSAGE_SELF)
runpy.run_path(sys.argv[1])
after = resource.getrusage(resource.RUSAGE_SELF)
print(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
"""


@dataclass(frozen=True)
class Sizes:
    """How often."""

    rounds: int


def run(place: Place, sizes: Sizes) -> Findings:
    """Measure."""
    files = {"ours": place.home / "ours.py", "plain": place.home / "plain.py"}
    files["ours"].write_text(OURS)
    files["plain"].write_text(PLAIN)

    def parse(path: Path) -> Mapping[str, float]:
        return {how: parsed(path, how, place.home) for how in ("cold", "warm")}

    found = interleave({name: partial(parse, path) for name, path in files.items()}, rounds=sizes.rounds)
    return Findings(
        compared="CPU time of importing a DAG file with one TwophaseDag ÷ one with a SparkSubmitOperator only",
        figures=[
            Figure("a new interpreter", found["ours"]["cold"], found["plain"]["cold"], goal=1.2),
            Figure("one that has loaded Airflow's parser", found["ours"]["warm"], found["plain"]["warm"], goal=2.0),
        ],
        profile={side: medians(parts) for side, parts in found.items()},
        notes=[
            "ours declares two DAGs: the pipeline's own and its replay",
            "both sides have their bytecode, as what pip installs has; the warm-up wrote what was missing",
            "the parser has frozen what it loaded (gc.freeze), as the dag-processor does before its first file",
        ],
    )


def parsed(path: Path, how: str, home: Path) -> float:
    """Return the seconds of CPU that importing a file takes in a process of its own."""
    environment = {**os.environ, "AIRFLOW_HOME": str(home / "airflow"), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # with it a checkout would be compiled each time, Airflow not
    command = [sys.executable, "-c", PARSE, str(path), how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


MEASURE = Measure(
    "import",
    "What does a DAG file with a pipeline cost to import?",
    full=Sizes(rounds=15),
    quick=Sizes(rounds=5),
    tiny=Sizes(rounds=1),
    run=run,
)
