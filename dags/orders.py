"""One day of orders owns one folder of a Hive-style table; clearing or backfilling a day replaces it in one step."""

from datetime import datetime

from twophase import Pipeline, audits, sinks, sources
from twophase.airflow import TwophaseDag

orders = Pipeline(
    "orders",
    reads={
        "orders": sources.Interval(
            "landing/orders/dt={start:%Y-%m-%d}",
            format="json",
            schema="order_id bigint, customer string, amount double",
            on_missing="wait",
        )
    },
    transform="orders:transform",
    writes={"lake": sinks.Files("lake/orders", slot_folder="dt={start:%Y-%m-%d}")},
    audits=[audits.not_null("order_id"), audits.unique("order_id")],
)

dag = TwophaseDag(orders, schedule="@daily", start_date=datetime(2026, 11, 1), tags=["example"])  # noqa: DTZ001 - UTC
