"""Backfills from the command line: every checkpoint of a selection once more, whatever dies on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.pipelines.commands import listed, one_line_error, twophase
from support.pipelines.factories import PreStaged, Row, land, land_words, visible, words_pipeline
from twophase import Pipeline, sinks, sources
from twophase.committer.record import PostgresRecord
from twophase.core.errors import AttemptFailed
from twophase.core.settings import data_path
from twophase.runner import Runner
from twophase.spark.plan import Plan

#: Checkpoints whose transform fails.
broken: set[int] = set()


def marked(rows: list[Row], plan: Plan) -> list[Row]:
    if plan.checkpoint_id in broken:
        msg = "as it was told to"
        raise AttemptFailed(msg)
    return [{**row, "word": f"r{plan.revision}"} for row in rows]


@pytest.fixture(autouse=True)
def _without_spark(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twophase.runner.stager_for", lambda *_, **__: PreStaged(change=marked))
    broken.clear()


def commit(record: PostgresRecord, checkpoints: int) -> None:
    land_words(files=checkpoints, rows=1)
    runner = Runner(words_pipeline(max_files=1), PreStaged(change=marked), record=record)
    while runner.run():
        pass


def daily() -> Pipeline:
    return Pipeline(
        "daily",
        reads={"words": sources.Interval("landing/dt={start:%Y-%m-%d}", "json")},
        transform="word_count:copy",
        writes={"lake": sinks.Files("lake/daily", slot_folder="dt={start:%Y-%m-%d}")},
    )


def land_days(*days: int) -> None:
    for day in days:
        land("a.json", [{"id": day, "word": "w", "frequency": 1}], f"landing/dt=2026-11-{day:02d}")


def words(table: str = "lake/words") -> list[tuple[int, str]]:
    return sorted((row["id"], row["word"]) for row in visible(table))


def revisions(rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return sorted((row["checkpoint_id"], row["revision"]) for row in rows)


def test_checkpoints_of_a_range_get_a_new_revision(record: PostgresRecord) -> None:
    commit(record, 4)

    done = listed("backfill", "words", "--checkpoints", "2..3", "--reason", "a bug")

    assert revisions(done) == [(2, 2), (3, 2)]
    assert {row["kind"] for row in done} == {"backfill"}
    assert words() == [(0, "r1"), (1, "r2"), (2, "r2"), (3, "r1")]


def test_the_same_again_is_a_new_backfill(record: PostgresRecord) -> None:
    commit(record, 1)

    for revision in (2, 3):
        assert revisions(listed("backfill", "words", "--checkpoints", "1")) == [(1, revision)]


def test_what_failed_does_not_stop_the_others_and_is_tried_by_the_same_command(record: PostgresRecord) -> None:
    commit(record, 3)
    broken.add(2)

    first = twophase("backfill", "words", "--checkpoints", "1..3")
    between = words()
    broken.clear()
    second = twophase("backfill", "words", "--checkpoints", "1..3")

    assert first.exit_code == 1
    assert "1 of 3 not done; the same command tries them again" in first.stderr
    assert "as it was told to" in first.stdout
    assert between == [(0, "r2"), (1, "r1"), (2, "r2")]
    assert second.exit_code == 0
    assert "going on with backfill-" in second.stderr
    assert words() == [(0, "r2"), (1, "r3"), (2, "r2")]


def test_anew_does_everything(record: PostgresRecord) -> None:
    commit(record, 2)
    broken.add(2)
    twophase("backfill", "words", "--checkpoints", "1..2")
    broken.clear()

    done = listed("backfill", "words", "--checkpoints", "1..2", "--anew")

    assert revisions(done) == [(1, 3), (2, 3)]


def test_several_at_a_time(record: PostgresRecord) -> None:
    commit(record, 6)

    done = listed("backfill", "words", "--checkpoints", "1..6", "--parallel", "3")

    assert revisions(done) == [(number, 2) for number in range(1, 7)]
    assert words() == [(number, "r2") for number in range(6)]


def test_intervals_from_one_day_to_another_both_included(record: PostgresRecord) -> None:
    land_days(1, 2, 3, 4)
    Runner(daily(), PreStaged(change=marked), record=record).run("2026-11-02/2026-11-03")

    done = listed("backfill", "daily", "--from", "2026-11-01", "--to", "2026-11-03")

    assert [(row["slot"][:10], row["revision"]) for row in sorted(done, key=lambda row: row["slot"])] == [
        ("2026-11-01", 1),
        ("2026-11-02", 2),
        ("2026-11-03", 1),
    ]
    assert words("lake/daily") == [(1, "r1"), (2, "r2"), (3, "r1")]


def test_an_interval_whose_input_is_missing_is_told_and_the_others_are_done(record: PostgresRecord) -> None:
    land_days(1, 3)
    with Runner(daily(), PreStaged(), record=record):
        pass

    result = twophase("backfill", "daily", "--from", "2026-11-01", "--to", "2026-11-03")

    assert result.exit_code == 1
    assert "2026-11-02" in result.stdout
    assert "no such folder" in result.stdout
    assert words("lake/daily") == [(1, "r1"), (3, "r1")]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--checkpoints", "3..1"),
        ("--checkpoints", "x"),
        ("--from", "2026-11-01"),
        ("--stale", "--checkpoints", "1"),
        ("--stale", "--from", "2026-11-01", "--to", "2026-11-02"),
        ("--checkpoints", "1", "--from", "2026-11-01", "--to", "2026-11-02"),
    ],
)
def test_a_selection_that_is_none_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    assert twophase("backfill", "words", *arguments).exit_code == 2


def test_a_selection_with_nothing_in_it_is_named(record: PostgresRecord) -> None:
    commit(record, 1)

    assert "no checkpoint from 7 to 9" in one_line_error(twophase("backfill", "words", "--checkpoints", "7..9"))
    days = ("--from", "2026-11-01", "--to", "2026-11-02")
    assert "it has no intervals" in one_line_error(twophase("backfill", "words", *days))


def test_stale_lists_what_was_made_from_replaced_revisions(record: PostgresRecord) -> None:
    commit(record, 2)
    counts = Pipeline(
        "counts",
        reads={"rows": sources.Committed("words", "lake")},
        transform="word_count:copy",
        writes={"lake": sinks.Files("lake/counts")},
    )
    Runner(counts, PreStaged(), record=record).run()
    fresh = twophase("stale")
    listed("backfill", "words", "--checkpoints", "1")

    (row,) = listed("stale")
    done = listed("backfill", "words", "--checkpoints", "1", "--downstream")

    assert fresh.stdout == "nothing is stale\n"
    assert (row["pipeline"], row["checkpoint_id"], row["upstream"], row["upstream_checkpoint_id"]) == (
        *("counts", 1),
        *("words", 1),
    )
    assert (row["read_revision"], row["committed_revision"]) == (1, 2)
    assert [(one["pipeline"], one["revision"]) for one in done] == [("words", 3), ("counts", 2)]
    assert listed("stale") == []
    assert data_path("lake/counts").is_dir()


def chain(record: PostgresRecord) -> list[Runner]:
    """Commit a chain of three pipelines, two checkpoints each."""
    commit(record, 2)
    runners = []
    for name, upstream in (("counts", "words"), ("sums", "counts")):
        pipeline = Pipeline(
            name,
            reads={"rows": sources.Committed(upstream, "lake", max_checkpoints=1)},
            transform="word_count:copy",
            writes={"lake": sinks.Files(f"lake/{name}")},
        )
        runners.append(Runner(pipeline, PreStaged(change=marked), record=record))
        while runners[-1].run():
            pass
    return runners


def done(rows: list[Row]) -> list[tuple[str, int, int]]:
    return sorted((row["pipeline"], row["checkpoint_id"], row["revision"]) for row in rows)


def test_what_is_stale_is_made_again_without_anything_upstream(record: PostgresRecord) -> None:
    chain(record)
    listed("backfill", "words", "--checkpoints", "1")

    made = done(listed("backfill", "counts", "--stale"))
    left = [(row["pipeline"], row["checkpoint_id"]) for row in listed("stale")]
    rest = done(listed("backfill", "sums", "--stale"))

    assert made == [("counts", 1, 2)]
    assert left == [("sums", 1)]
    assert rest == [("sums", 1, 2)]
    assert listed("stale") == []
    assert words("lake/sums") == [(0, "r2"), (1, "r1")]
    assert words() == [(0, "r2"), (1, "r1")]
    again = twophase("backfill", "counts", "--stale")
    assert (again.exit_code, again.stdout) == (0, "counts: 0 done\n")


def test_what_is_stale_is_made_again_along_the_chain(record: PostgresRecord) -> None:
    """Asked of the first pipeline, it is all that reads it; nothing of its own."""
    chain(record)
    listed("backfill", "words", "--checkpoints", "1..2")

    made = done(listed("backfill", "words", "--stale", "--downstream"))

    assert made == [("counts", 1, 2), ("counts", 2, 2), ("sums", 1, 2), ("sums", 2, 2)]
    assert listed("stale") == []


def test_what_is_stale_and_failed_is_tried_by_the_same_command(record: PostgresRecord) -> None:
    chain(record)
    listed("backfill", "words", "--checkpoints", "1..2")
    broken.add(2)

    first = twophase("backfill", "counts", "--stale")
    broken.clear()
    second = twophase("backfill", "counts", "--stale")

    assert first.exit_code == 1
    assert "1 of 2 not done; the same command tries them again" in first.stderr
    assert second.exit_code == 0
    assert [row["pipeline"] for row in listed("stale")] == ["sums", "sums"]
