"""Read what `clicks` commits, exactly once: its asset wakes this up, the record says what is new."""

from twophase import Pipeline, sinks, sources
from twophase.airflow import TwophaseDag, asset

visits = Pipeline(
    "visits",
    reads={"clicks": sources.Committed("clicks", "lake")},
    transform="visits:transform",
    writes={"lake": sinks.Files("lake/visits")},
)

dag = TwophaseDag(visits, schedule=[asset("clicks", "lake")], tags=["example"])
