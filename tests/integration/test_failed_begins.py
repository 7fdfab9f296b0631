"""A pipeline that fails every run does not look healthy: what could not begin is in the record, and goes with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from support.pipelines.commands import listed
from support.pipelines.factories import PreStaged, land, land_words, words_pipeline
from twophase import Pipeline, sinks, sources
from twophase.committer import queries
from twophase.committer.record import PostgresRecord
from twophase.core.errors import ConfigError, InputMissing, NotYet
from twophase.core.settings import data_path
from twophase.runner import Runner, Submitted
from twophase.sweep import sweep

pytestmark = pytest.mark.usefixtures("home")

ROW = [{"id": 1, "word": "a", "frequency": 1}]


def daily(**source: Any) -> Pipeline:
    """Declare a pipeline of one folder a day."""
    return Pipeline(
        "daily",
        reads={"words": sources.Interval("landing/dt={start:%Y-%m-%d}", format="json", **source)},
        transform="word_count:copy",
        writes={"lake": sinks.Files("lake/daily")},
    )


def slot(day: int) -> str:
    return f"2026-11-{day:02}/2026-11-{day + 1:02}"


def of(pipeline: str) -> dict[str, Any]:
    (found,) = [row for row in listed("pipelines") if row["pipeline"] == pipeline]
    return dict(found)


def runs(record: PostgresRecord, *days: int, **source: Any) -> None:
    runner = Runner(daily(**source), PreStaged(), record=record, waits=False)
    for day in days:
        runner.run(slot(day))


def test_missing_input_is_told_until_it_has_landed(record: PostgresRecord) -> None:
    """Nothing was recorded of it before: a pipeline whose every run fails so had no row to be seen by."""
    land("1.json", ROW, "landing/dt=2026-11-01")
    runs(record, 1)
    for _ in range(2):
        with pytest.raises(InputMissing):
            runs(record, 2)

    found = of("daily")
    assert found["last_failure"].startswith("InputMissing: ")
    assert str(data_path("landing/dt=2026-11-02")) in found["last_failure"]
    assert (found["failures"], found["failed_slots"], found["missing_slots"]) == (2, 1, 0)

    land("2.json", ROW, "landing/dt=2026-11-02")
    runs(record, 2)

    found = of("daily")
    assert (found["failures"], found["failed_slots"], found["last_failure"]) == (0, 0, None)


def test_what_waits_for_input_says_for_which_and_is_no_failure(record: PostgresRecord) -> None:
    data_path("landing").mkdir(parents=True)
    with pytest.raises(NotYet):
        runs(record, 1, on_missing="wait")

    found = of("daily")

    assert found["waiting"].startswith("waiting for input: ")
    assert str(data_path("landing/dt=2026-11-01")) in found["waiting"]
    assert (found["failures"], found["failed_slots"], found["last_failure"]) == (0, 0, None)
    land("1.json", ROW, "landing/dt=2026-11-01")
    runs(record, 1, on_missing="wait")
    assert of("daily")["waiting"] is None


def test_what_could_not_begin_goes_with_any_run_that_begins(record: PostgresRecord) -> None:
    """Also with one that has nothing to do, replaces what is committed, or goes on with what another left."""
    land("1.json", ROW, "landing/dt=2026-11-01")
    runner = Runner(daily(), PreStaged(), record=record)
    runner.run(slot(1))
    text = "2026-11-01T00:00:00+00:00/2026-11-02T00:00:00+00:00"
    begins: list[Callable[[], object]] = [
        partial(runner.run, slot(1)),
        partial(runner.run, slot(1), reprocess=True),
        partial(runner.replace, 1),
    ]
    for again in begins:
        with record.transaction() as tx:
            tx.not_begun("daily", text, None, "ConfigError: no right to write", failed=True)
        assert of("daily")["failures"] == 1
        again()
        assert (of("daily")["failures"], of("daily")["last_failure"]) == (0, None)


def test_intervals_that_nobody_ran_are_missing(record: PostgresRecord) -> None:
    for day in (1, 2, 5, 9):
        land("1.json", ROW, f"landing/dt=2026-11-{day:02}")
    runs(record, 1, 2, 5, 9)

    assert of("daily")["missing_slots"] == 5


def test_partition_keys_have_no_order_in_which_one_could_be_missing(record: PostgresRecord) -> None:
    by_key = Pipeline(
        "daily",
        reads={"words": sources.Interval("landing/{key}", format="json")},
        transform="word_count:copy",
        writes={"lake": sinks.Files("lake/daily")},
    )
    for key in ("a", "z"):
        land("1.json", ROW, f"landing/{key}")
        Runner(by_key, PreStaged(), record=record).run(key)

    assert of("daily")["missing_slots"] == 0


def test_a_slot_that_failed_stays_told_beside_others_that_commit(record: PostgresRecord) -> None:
    """Failures in a row begin anew with each commit; a slot stands failed until it is committed itself."""
    for day in (1, 2):
        land("1.json", ROW, f"landing/dt=2026-11-{day:02}")

    def fails(*_: object) -> Any:
        msg = "no such column"
        raise ValueError(msg)

    failing = Runner(daily(), PreStaged(change=fails), record=record)
    for _ in range(2):
        with pytest.raises(ValueError, match="no such column"):
            failing.run(slot(1))
    assert (of("daily")["failures"], of("daily")["failed_slots"]) == (2, 1)

    runs(record, 2)
    found = of("daily")
    assert (found["failures"], found["failed_slots"]) == (0, 1)
    assert found["last_failure"] == "ValueError: no such column"

    runs(record, 1)
    assert of("daily")["failed_slots"] == 0


def test_a_declaration_that_cannot_follow_is_told_of_the_pipeline(record: PostgresRecord) -> None:
    land_words()
    Runner(words_pipeline(), PreStaged(), record=record).run()
    moved = words_pipeline(writes={"other": sinks.Files("lake/words")})

    with pytest.raises(ConfigError):
        Runner(moved, PreStaged(), record=record)

    found = of("words")
    assert found["last_failure"].startswith("ConfigError: pipeline 'words': ")
    assert found["failures"] == 1
    assert Runner(words_pipeline(), PreStaged(), record=record).run() is None
    assert (of("words")["failures"], of("words")["last_failure"]) == (0, None)


def test_the_newest_checkpoint_is_told_beside_the_last_that_was_committed(record: PostgresRecord) -> None:
    land_words()
    Runner(words_pipeline(), PreStaged(), record=record).run()
    land_words(start=1)
    with pytest.raises(ZeroDivisionError):
        Runner(words_pipeline(), PreStaged(change=lambda *_: [1 // 0]), record=record).run()

    found = of("words")

    assert (found["last_checkpoint"], found["newest_checkpoint"], found["newest_state"]) == (1, 2, "ABORTED")
    assert (found["failures"], found["last_failure"].split(":")[0]) == (1, "ZeroDivisionError")


def test_what_could_not_begin_is_swept_when_its_retention_is_over(record: PostgresRecord) -> None:
    """A slot that nobody tried again; one that was tried since stays."""
    land("1.json", ROW, "landing/dt=2026-11-01")
    runs(record, 1)
    with pytest.raises(InputMissing):
        runs(record, 2)
    with record.transaction() as tx:
        tx.connection.execute(text("UPDATE twophase.unbegun SET at = at - interval '401 days'"))
    with pytest.raises(InputMissing):
        runs(record, 3)

    would_go = [one.path for one in sweep(record, daily(), dry_run=True)]
    gone = [(one.path, one.why) for one in sweep(record, daily())]

    assert would_go == ["1 slots that could not begin"]
    assert gone == [("1 slots that could not begin", "not tried again for 400d")]
    with record.engine.connect() as connection:
        (left,) = queries.unbegun(connection)
    assert left["slot"].startswith("2026-11-03")


def test_a_transform_that_cannot_be_called_adds_no_revision(
    record: PostgresRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does Spark start for it; the record tells why, until a run begins."""
    monkeypatch.setenv("TWOPHASE_SPARK_JOBS", str(tmp_path))
    (tmp_path / "counting.py").write_text("def transform(wrods): return wrods\n")
    land_words(files=1, rows=1)
    pipeline = words_pipeline(transform="counting:transform")
    runner = Runner(pipeline, Submitted("local[1]", {}), record=record)

    for _ in range(2):
        with pytest.raises(ConfigError, match="no read named 'wrods'"):
            runner.run()

    found = of("words")
    assert found["failures"] == 2
    with record.transaction() as tx:
        assert tx.newest("words", None) is None
    assert found["last_failure"].startswith("ConfigError: transform transform: no read named 'wrods'")
