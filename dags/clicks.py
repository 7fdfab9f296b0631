"""Take whatever has landed since the checkpoint before; bad records go to a table of their own."""

from datetime import timedelta

from twophase import Pipeline, sinks, sources
from twophase.airflow import TwophaseDag

clicks = Pipeline(
    "clicks",
    reads={
        "clicks": sources.Files(
            "landing/clicks",
            format="json",
            schema="page string, visitor string, at timestamp",
            after_commit="archive",
            on_bad_record="quarantine",
        )
    },
    transform="clicks:transform",
    writes={"lake": sinks.Files("lake/clicks", partition_by=["day"])},
)

dag = TwophaseDag(clicks, schedule=timedelta(minutes=10), tags=["example"])
