"""A Spark script that knows nothing of Twophase joins by its output path."""

from datetime import datetime
from pathlib import Path

from twophase import Pipeline, sinks, sources
from twophase.airflow import TwophaseDag

invoices = Pipeline(
    "invoices",
    reads={"invoices": sources.Interval("landing/invoices/dt={start:%Y-%m-%d}", format="csv", on_missing="wait")},
    writes={"invoices": sinks.Files("lake/invoices", slot_folder="dt={start:%Y-%m-%d}")},
)

dag = TwophaseDag(
    invoices,
    spark={
        "application": str(Path(__file__).parents[1] / "spark_jobs" / "invoice_totals.py"),
        "application_args": ["--in", "{{ inputs('invoices') }}", "--out", "{{ staging('invoices') }}"],
    },
    schedule="@daily",
    start_date=datetime(2026, 11, 1),  # noqa: DTZ001 - UTC
    tags=["example"],
)
