"""What runs inside Spark also runs on Spark 3.5 with Java 17, in an environment of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

import twophase
from support.pipelines.factories import land_words, visible, words_pipeline
from support.servers.spark import CHEAP
from twophase import sinks
from twophase.core.errors import AttemptFailed, ConfigError
from twophase.core.settings import data_path
from twophase.runner import Runner, stager_for

pytestmark = [pytest.mark.spark35, pytest.mark.spark]


@pytest.fixture(autouse=True)
def _jobs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOPHASE_SPARK_JOBS", str(Path(__file__).parents[1] / "jobs"))


def test_a_checkpoint_is_staged_by_spark_35_and_committed(home: Path) -> None:
    rows = land_words(files=2)
    pipeline = words_pipeline(transform="versions:transform")
    with Runner(pipeline, stager_for(pipeline, conf=CHEAP)) as runner:
        done = runner.run()

    assert done is not None
    assert done.rows == len(rows)
    found = visible("lake/words")
    assert {row["spark"][:4] for row in found} == {"3.5."}
    assert {row["java"] for row in found} == {"17"}
    assert all(Path(path).name.startswith("part-r1-a1-") for path in twophase.committed_files("words", "lake"))


@pytest.mark.parametrize("format_", ["json", "csv"])
def test_partitioned_text_formats_are_staged_by_spark_35(home: Path, format_: str) -> None:
    land_words(files=1)
    lake = sinks.Files("lake/words", format=format_, partition_by=["word"])
    pipeline = words_pipeline(transform="versions:transform", writes={"lake": lake})
    with Runner(pipeline, stager_for(pipeline, conf=CHEAP)) as runner:
        done = runner.run()

    assert done is not None
    assert done.rows == 10
    assert len(list(data_path("lake/words").glob("checkpoint=00000001/word=*"))) == 7


def test_a_failing_transform_is_one_line_on_spark_35_too(home: Path) -> None:
    land_words()
    pipeline = words_pipeline(transform="versions:broken")

    with (
        Runner(pipeline, stager_for(pipeline, conf=CHEAP)) as runner,
        pytest.raises((AttemptFailed, ConfigError), match="no_such_column"),
    ):
        runner.run()

    assert visible("lake/words") == []


def test_three_writes_of_one_frame_are_as_many_files_as_one_on_spark_35(home: Path) -> None:
    """Spark 3.5 keeps a frame in as many partitions as were planned, 200 by default, of which some have a row."""
    land_words(files=2)
    writes = {name: sinks.Files(f"lake/{name}") for name in ("one", "two", "three")}
    pipeline = words_pipeline(transform="versions:counted", writes=writes)
    with Runner(pipeline, stager_for(pipeline, conf={**CHEAP, "spark.sql.shuffle.partitions": "20"})) as runner:
        runner.run()

    assert [len(twophase.committed_files("words", name)) for name in writes] == [1, 1, 1]
