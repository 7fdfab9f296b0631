"""Delta and Iceberg tables under the record: crashes, order over all lanes, what is lost, staged again, swept."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pyiceberg.catalog.sql import SqlCatalog

from support.pipelines.factories import PreStaged, Row, counted, land_words, visible, words_pipeline
from twophase import Pipeline, sinks
from twophase.committer.record import PostgresRecord
from twophase.core import failpoints
from twophase.core.checkpoint import Key, Output, Run
from twophase.core.errors import AttemptFailed, Parked, PromotionPending
from twophase.core.failpoints import FailpointError
from twophase.core.ports import Outcome, Promotion
from twophase.core.states import State
from twophase.runner import Runner
from twophase.sinks.log_tables.base import LogTableSink
from twophase.spark.plan import Plan
from twophase.sweep import sweep
from twophase.verification import verify

Make = Callable[[], LogTableSink]
CATALOG = {"type": "sql", "uri": "sqlite:///catalog.db"}
MAKERS: dict[str, Make] = {
    "delta": lambda: sinks.Delta("lake/words"),
    "iceberg": lambda: sinks.Iceberg("db.words", path="lake/words", catalog=CATALOG),
}


def load(sink: LogTableSink) -> Any:
    """Load an Iceberg table as somebody else does."""
    assert isinstance(sink, sinks.Iceberg)
    assert isinstance(sink.catalog, dict)
    return SqlCatalog("default", **sink.catalog).load_table(sink.table)


READERS: dict[str, Callable[[LogTableSink], list[Row]]] = {
    "delta": lambda sink: pl.read_delta(sink.location()).to_dicts(),
    "iceberg": lambda sink: load(sink).scan().to_arrow().to_pylist(),
}

#: Where a run may fail whose table is there, has a new column, or is not there yet.
POINTS = (
    *("table.created", "promote.before", "promote.checked", "promote.visible", "promote.durable", "promote.inside"),
    *("promote.after", "finish.before", "finish.inside", "finish.after"),
)


#: What the folder of a table has besides staged output.
KEPT = {"manifests", "owner", "receipts"}


class Bench:
    """One pipeline into a Delta or Iceberg table and into files."""

    def __init__(self, kind: str, record: PostgresRecord) -> None:
        self.kind = kind
        self.record = record
        self.sink = MAKERS[kind]()
        self.pipeline: Pipeline = words_pipeline(
            writes={"lake": self.sink, "copy": sinks.Files("lake/copy")}, max_files=1
        )
        self.rows: list[Row] = []
        self.runner = self.process()

    def process(self, stager: PreStaged | None = None) -> Runner:
        return Runner(self.pipeline, stager or PreStaged(), record=self.record)

    def land(self) -> None:
        self.rows += land_words(rows=4, start=len(self.rows) // 4)

    def content(self) -> list[Row]:
        return READERS[self.kind](self.sink)

    def states(self) -> list[str]:
        with self.record.transaction() as tx:
            return [str(revision.key) for revision in tx.unfinished("words")]

    def differences(self) -> list[Any]:
        return [difference for difference in verify(self.record, self.pipeline) if difference]


@pytest.fixture(params=MAKERS)
def bench(request: pytest.FixtureRequest, home: Path, record: PostgresRecord) -> Iterator[Bench]:
    yield Bench(request.param, record)
    failpoints.configure("")


@pytest.mark.parametrize("point", POINTS)
def test_a_run_that_fails_anywhere_is_finished_by_the_next_and_every_row_is_there_once(
    bench: Bench, point: str
) -> None:
    if point != "table.created":
        bench.land()
        bench.runner.run()
    bench.land()
    failpoints.configure(f"{point}=raise")
    with pytest.raises(FailpointError):
        bench.runner.run()
    failpoints.configure("")
    bench.land()

    while bench.runner.run():
        pass

    assert counted(bench.content()) == counted(bench.rows)
    assert counted(visible("lake/copy")) == counted(bench.rows)
    assert bench.differences() == []


def test_a_table_that_is_down_delays_itself_alone_and_nothing_overtakes_in_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R12: the replacement was decided first. With the later mark in the table its rows would count as promoted."""
    bench.land()
    bench.runner.run()
    promote = type(bench.sink).promote

    def down(self: LogTableSink, output: Output) -> Promotion:
        if output.key == ("words", 1, 2):
            return Promotion(Outcome.RETRY_LATER, "the disk is away")
        return promote(self, output)

    with monkeypatch.context() as patched:
        patched.setattr(type(bench.sink), "promote", down)
        with pytest.raises(PromotionPending, match="lake: the disk is away"):
            bench.process(PreStaged(change=renamed)).replace(1)
        bench.land()
        with pytest.raises(PromotionPending, match="the disk is away"):
            bench.runner.run()
        assert bench.states() == ["words/1 r2", "words/2 r1"]
        assert len(visible("lake/copy")) == 8

    assert len(bench.content()) == 4
    bench.runner.coordinator.finish(Key("words", 2, 1))

    assert bench.states() == []
    assert counted(bench.content()) == counted([*({**row, "word": "new"} for row in bench.rows[:4]), *bench.rows[4:]])
    assert bench.differences() == []


def renamed(rows: list[Row], plan: Plan) -> list[Row]:
    return [{**row, "word": "new"} for row in rows]


def test_decided_output_that_was_destroyed_is_parked_and_staged_again(bench: Bench) -> None:
    bench.land()
    failpoints.configure("commit.after=raise")
    with pytest.raises(FailpointError):
        bench.runner.run()
    failpoints.configure("")
    [folder] = [
        path for path in Path(bench.sink._home).iterdir() if path.name not in {"manifests", "owner", "receipts"}
    ]
    shutil.rmtree(folder)
    with pytest.raises(Parked, match="is gone"):
        bench.runner.coordinator.finish(Key("words", 1, 1))

    done = bench.runner.restage(1, "the folder was removed")

    assert done.state is State.COMMITTED
    assert counted(bench.content()) == counted(bench.rows)
    list(sweep(bench.record, bench.pipeline))
    assert len([path for path in Path(bench.sink._home).iterdir() if path.name not in KEPT]) == 1
    assert bench.differences() == []


class Failing(PreStaged):
    def __call__(self, *arguments: Any) -> Any:
        super().__call__(*arguments)
        msg = "the transform failed, as it was told to"
        raise AttemptFailed(msg)


def test_what_a_failed_attempt_staged_is_discarded_and_the_range_is_staged_again(bench: Bench) -> None:
    bench.land()
    with pytest.raises(AttemptFailed):
        bench.process(Failing()).run()
    assert {path.name for path in Path(bench.sink._home).iterdir()} == {"manifests", "owner"}

    bench.runner.run()

    assert counted(bench.content()) == counted(bench.rows)


def test_an_attempt_that_another_took_the_place_of_is_swept_also_after_the_commit(bench: Bench) -> None:
    bench.land()
    begun = bench.runner.coordinator.begin(Run(None, "dead"))
    assert begun is not None
    opened = bench.runner.coordinator.attempt(begun)
    with bench.record.transaction() as tx:
        stray = Path(bench.sink._home, tx.participants(opened.key)[0].handle["name"])
        tx.renew(opened.key, epoch=opened.epoch, lease=0)
    stray.mkdir(parents=True)
    bench.runner.run()

    removed = [one.path for one in sweep(bench.record, bench.pipeline)]

    assert str(stray) in removed
    assert counted(bench.content()) == counted(bench.rows)
    assert bench.differences() == []
