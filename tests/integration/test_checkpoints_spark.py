"""Whole checkpoints with a real Spark: what is written, read back, refused, and said in the record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import duckdb
import pandas as pd
import polars as pl
import pytest
from sqlalchemy import text

import twophase
from support.pipelines.factories import PreStaged, counted, land, land_words, visible, words_pipeline
from twophase import Pipeline, sinks, sources
from twophase.attempt import Stager
from twophase.committer import queries
from twophase.committer.record import PostgresRecord
from twophase.core.errors import (
    AttemptFailed,
    BadRecord,
    ConfigError,
    IllegalTransition,
    InputChanged,
    NothingCommitted,
    Parked,
    RecordBehind,
    SchemaChanged,
)
from twophase.core.settings import data_path
from twophase.core.states import State
from twophase.runner import Runner

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


def copy(words: DataFrame) -> DataFrame:
    return words


def column(name: str, kind: str = "string") -> Callable[..., Any]:
    def transform(words: DataFrame) -> DataFrame:
        from pyspark.sql import functions

        return words.withColumn(name, functions.lit(None).cast(kind))

    return transform


def shown(record: PostgresRecord, checkpoint_id: int, revision: int | None = None) -> dict[str, Any]:
    with record.engine.connect() as connection:
        return queries.show(connection, "words", checkpoint_id, revision)


def test_a_run_commits_what_landed_and_says_so(spark: SparkSession, home: Path, record: PostgresRecord) -> None:
    rows = land_words(files=2)

    done = twophase.run(words_pipeline(transform=copy), spark)

    assert done is not None
    assert (done.checkpoint_id, done.revision, done.state, done.rows) == (1, 1, State.COMMITTED, 20)
    assert counted(visible("lake/words")) == counted(rows)
    assert [event["action"] for event in shown(record, 1)["events"]] == [
        *("begin", "attempt", "voted yes", "precommitted", "committing", "promoted", "committed"),
    ]


def test_a_transform_is_found_in_spark_jobs_in_this_process_too(
    spark: SparkSession, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A string names the same function with `spark=` as in a submission, and its functions reach the executors."""
    monkeypatch.setenv("TWOPHASE_SPARK_JOBS", str(Path(__file__).parents[1] / "jobs"))
    land_words()

    done = twophase.run(words_pipeline(transform="versions:with_function"), spark)

    assert done is not None
    assert {row["shout"] for row in visible("lake/words")} == {f"W{i}" for i in range(7)}


def test_a_run_without_new_input_records_nothing(spark: SparkSession, home: Path, record: PostgresRecord) -> None:
    assert twophase.run(words_pipeline(transform=copy), spark) is None

    with record.engine.connect() as connection:
        assert queries.checkpoints(connection, "words") == []


def test_file_names_carry_revision_and_attempt(spark: SparkSession, home: Path) -> None:
    """R17: a reader across an exchange of two revisions fails loudly instead of mixing them."""
    land_words()
    twophase.run(words_pipeline(transform=copy), spark)

    names = [path.name for path in data_path("lake/words").rglob("*.parquet")]
    assert names
    assert all(name.startswith("part-r1-a1-") for name in names)


@pytest.mark.parametrize("format_", ["parquet", "json", "csv"])
def test_every_format_is_read_back_as_it_was_written(spark: SparkSession, home: Path, format_: str) -> None:
    texts = ['plain, with "quotes"', "two\nlines", "ünïcode", "back\\slash", " spaces "]
    land("a.json", [{"id": i, "text": text, "dt": f"2026-11-{15 + i % 2}"} for i, text in enumerate(texts)])
    lake = sinks.Files("lake/words", format=format_, partition_by=["dt"])

    done = twophase.run(words_pipeline(transform=copy, writes={"lake": lake}), spark)

    assert done is not None
    assert done.rows == 5
    back = twophase.read_committed(spark, "words", "lake").collect()
    assert sorted((row.id, row.text) for row in back) == list(enumerate(texts))
    assert {(row.dt, row.checkpoint) for row in back} == {("2026-11-15", 1), ("2026-11-16", 1)}


def test_one_frame_goes_to_every_write_and_the_input_is_read_once(spark: SparkSession, home: Path) -> None:
    """Rows of a transform that is not deterministic are the same in both tables: nothing was computed twice."""
    land_words(files=3)

    def transform(words: DataFrame) -> DataFrame:
        from pyspark.sql import functions

        return words.withColumn("luck", functions.rand())

    writes = {"lake": sinks.Files("lake/words"), "copy": sinks.Files("lake/copy")}
    twophase.run(words_pipeline(transform=transform, writes=writes), spark)

    assert counted(visible("lake/words")) == counted(visible("lake/copy"))


def test_a_dict_goes_to_the_writes_it_names(spark: SparkSession, home: Path) -> None:
    rows = land_words(files=2)

    def transform(words: DataFrame) -> dict[str, DataFrame]:
        return {"lake": words, "totals": words.groupBy("word").count()}

    writes = {"lake": sinks.Files("lake/words"), "totals": sinks.Files("lake/totals")}
    done = twophase.run(words_pipeline(transform=transform, writes=writes), spark)

    assert done is not None
    assert counted(visible("lake/words")) == counted(rows)
    assert sum(row["count"] for row in visible("lake/totals")) == len(rows)


def test_the_table_is_read_by_every_engine_as_a_folder(spark: SparkSession, home: Path) -> None:
    rows = land_words(files=2)
    twophase.run(words_pipeline(transform=copy), spark)
    folder = str(data_path("lake/words"))
    files = twophase.committed_files("words", "lake")

    counts = {
        "duckdb folder": duckdb.read_parquet(f"{folder}/**/*.parquet").shape[0],
        "duckdb files": duckdb.read_parquet(files).shape[0],
        "polars folder": pl.read_parquet(folder).height,
        "polars glob": pl.read_parquet(f"{folder}/**/*.parquet").height,
        "polars files": pl.read_parquet(files).height,
        "pandas folder": len(pd.read_parquet(folder)),
        "pandas files": len(pd.read_parquet(files)),
        "spark folder": spark.read.parquet(folder).count(),
    }

    assert set(counts.values()) == {len(rows)}, counts


def test_as_of_reads_the_table_as_it_was(spark: SparkSession, home: Path) -> None:
    pipeline = words_pipeline(transform=copy)
    land_words(files=1)
    first = twophase.run(pipeline, spark)
    land_words(files=1, start=1)
    second = twophase.run(pipeline, spark)
    assert first is not None
    assert second is not None

    assert twophase.read_committed(spark, "words", "lake").count() == 20
    assert twophase.read_committed(spark, "words", "lake", as_of=first.commit_seq).count() == 10
    assert twophase.read_committed(spark, "words", "lake", as_of=first.committed_at).count() == 10
    assert len(twophase.committed_files("words", "lake", as_of="2")) >= 2
    with pytest.raises(NothingCommitted, match="nothing is committed"):
        twophase.read_committed(spark, "words", "lake", as_of=first.created_at)
    with pytest.raises(ConfigError, match="as_of"):
        twophase.committed_files("words", "lake", as_of="yesterday")
    with pytest.raises(ConfigError, match="no write 'dwh'"):
        twophase.committed_files("words", "dwh")


def test_new_columns_are_fine_and_older_checkpoints_read_as_null(spark: SparkSession, home: Path) -> None:
    land_words()
    twophase.run(words_pipeline(transform=copy), spark)
    land_words(start=1)
    twophase.run(words_pipeline(transform=column("extra")), spark)

    back = twophase.read_committed(spark, "words", "lake")

    assert "extra" in back.columns
    assert back.count() == 20


@pytest.mark.parametrize(
    ("transform", "said"),
    [
        (column("frequency", "string"), "column 'frequency' was bigint and is now string"),
        (lambda words: words.drop("frequency"), "column 'frequency' is missing"),
    ],
)
def test_any_other_schema_change_fails_before_the_vote(
    spark: SparkSession, home: Path, record: PostgresRecord, transform: Callable[..., Any], said: str
) -> None:
    land_words()
    twophase.run(words_pipeline(transform=copy), spark)
    land_words(start=1)

    with pytest.raises(SchemaChanged, match=said):
        twophase.run(words_pipeline(transform=transform), spark)

    found = shown(record, 2)
    assert found["state"] == "ABORTED"
    assert said in found["error"]
    assert "voted yes" not in [event["action"] for event in found["events"]]
    assert len(visible("lake/words")) == 10


def test_a_transform_that_raises_leaves_one_line_in_the_record_and_the_range_to_the_next_run(
    spark: SparkSession, home: Path, record: PostgresRecord
) -> None:
    """A failed checkpoint is dropped, a later try may succeed: nothing is lost, and its id stays."""
    rows = land_words()

    def broken(words: DataFrame) -> DataFrame:
        msg = "the first line\nand a second one"
        raise ValueError(msg)

    with pytest.raises(ValueError, match="the first line"):
        twophase.run(words_pipeline(transform=broken), spark)
    assert visible("lake/words") == []
    assert shown(record, 1)["error"] == "ValueError: the first line and a second one"

    done = twophase.run(words_pipeline(transform=copy), spark)

    assert done is not None
    assert (done.checkpoint_id, done.revision) == (1, 2)
    assert counted(visible("lake/words")) == counted(rows)


def test_a_corrupt_line_is_named_with_its_file(spark: SparkSession, home: Path) -> None:
    land_words()
    bad = land("bad.json", [{"id": 1}])
    bad.write_text('{"id": 1, "word": "w", "frequency": 1}\n{"id": 2, "word"\n')

    with pytest.raises(BadRecord, match=r"bad\.json.*line 2"):
        twophase.run(words_pipeline(transform=copy), spark)

    assert visible("lake/words") == []


def test_an_input_that_changed_after_it_was_fixed_is_named(home: Path, record: PostgresRecord) -> None:
    land_words(files=2)

    class Late(PreStaged):
        def __call__(self, *arguments: Any) -> Any:
            staged = super().__call__(*arguments)
            data_path("landing/words/000001.json").write_text('{"id": 99}\n')
            return staged

    with Runner(words_pipeline(), cast("Stager", Late())) as runner, pytest.raises(InputChanged, match=r"000001\.json"):
        runner.run()

    found = shown(record, 1)
    assert found["state"] == "ABORTED"
    assert [event["action"] for event in found["events"]].count("voted no") == 1
    assert visible("lake/words") == []


def test_an_input_that_vanished_is_named_and_nothing_is_staged(home: Path) -> None:
    land_words(files=2)

    with Runner(words_pipeline(), PreStaged()) as runner:
        fixed = runner.coordinator.begin(twophase_run("one"))
        assert fixed is not None
        data_path("landing/words/000000.json").unlink()
        runner.coordinator.transact(lambda tx: tx.renew(fixed.key, epoch=0, lease=None))
        with pytest.raises(InputChanged, match=r"000000\.json"):
            runner.run()


def twophase_run(name: str) -> Any:
    from twophase.core.checkpoint import Run

    return Run(None, name)


def test_a_known_file_with_other_content_is_a_loud_error(home: Path) -> None:
    land_words()
    with Runner(words_pipeline(), PreStaged()) as runner:
        runner.run()
        land("000000.json", [{"id": 5, "word": "w", "frequency": 1}] * 3)

        with pytest.raises(InputChanged, match=r"checkpoint words/1: .* its file '000000\.json' has changed"):
            runner.run()


def test_an_archived_name_may_come_again(home: Path) -> None:
    first = land_words()
    with Runner(words_pipeline(after_commit="archive"), PreStaged()) as runner:
        runner.run()
        second = [{"id": 77, "word": "w", "frequency": 1}]
        land("000000.json", second)
        runner.run()

    assert counted(visible("lake/words")) == counted([*first, *second])
    assert sorted(path.name for path in data_path("landing/words.archive").rglob("*.json")) == ["000000.json"] * 2


def test_max_files_splits_the_input_into_checkpoints(home: Path) -> None:
    rows = land_words(files=5)
    with Runner(words_pipeline(max_files=2), PreStaged()) as runner:
        done = [runner.run(), runner.run(), runner.run(), runner.run()]

    assert [d.rows if d else None for d in done] == [20, 20, 10, None]
    assert counted(visible("lake/words")) == counted(rows)


def test_a_parked_revision_is_promoted_after_a_restage(home: Path, record: PostgresRecord) -> None:
    """R9: staged output that is lost after the commit point never loses the range."""
    rows = land_words()
    with Runner(words_pipeline(), PreStaged()) as runner:
        lose_after_the_commit_point(runner)
        with pytest.raises(Parked, match="restage"):
            runner.coordinator.finish(twophase_key())
        assert shown(record, 1)["parked_reason"]

        done = runner.restage(1, "the disk was cleaned by mistake")

    assert (done.state, done.parked_reason) == (State.COMMITTED, None)
    assert counted(visible("lake/words")) == counted(rows)


def decide(runner: Runner) -> None:
    begun = runner.coordinator.begin(twophase_run("loser"))
    assert begun is not None
    attempt = runner.coordinator.attempt(begun)
    runner._stage_and_vote(attempt)
    runner.coordinator.decide_commit(attempt)


def lose_after_the_commit_point(runner: Runner) -> None:
    import shutil

    decide(runner)
    shutil.rmtree(data_path("lake/words.twophase/staging"))
    data_path("lake/words.twophase/staging").mkdir()


def twophase_key() -> Any:
    from twophase.core.checkpoint import Key

    return Key("words", 1, 1)


def test_a_damaged_staged_file_parks_and_a_restage_is_the_way_out(home: Path, record: PostgresRecord) -> None:
    rows = land_words()
    with Runner(words_pipeline(), PreStaged()) as runner:
        decide(runner)
        victim = next(data_path("lake/words.twophase/staging").glob("*/*.parquet"))
        victim.write_bytes(victim.read_bytes()[:-1] + b"X")
        with pytest.raises(Parked, match="altered"):
            runner.coordinator.finish(twophase_key())

        done = runner.restage(1, "a file was altered")

    assert done.state is State.COMMITTED
    assert counted(visible("lake/words")) == counted(rows)


def test_a_table_that_another_record_wrote_is_never_taken_for_ours(home: Path, record: PostgresRecord) -> None:
    """An emptied or restored record meets its own earlier output: nothing is counted as committed, nothing is lost."""
    land_words()
    with Runner(words_pipeline(), PreStaged()) as runner:
        runner.run()
    with record.engine.begin() as connection:
        connection.execute(text("DROP SCHEMA twophase CASCADE"))
    before = counted(visible("lake/words"))
    land_words(start=1)

    for _ in range(2):
        with Runner(words_pipeline(), PreStaged()) as runner, pytest.raises(RecordBehind):
            runner.run()

    assert counted(visible("lake/words")) == before
    assert list(data_path("lake/words.twophase/manifests").iterdir())


def test_a_released_range_is_taken_by_the_next_checkpoint_and_never_by_the_old_one(
    home: Path, record: PostgresRecord
) -> None:
    """R4: what was released belongs to whoever takes it next; its old revision cannot come back."""
    rows = land_words()

    def broken(*_: object) -> Any:
        msg = "it fails"
        raise AttemptFailed(msg)

    with Runner(words_pipeline(), cast("Stager", broken)) as runner:
        with pytest.raises(AttemptFailed):
            runner.run()
        runner.coordinator.release(1, "the file had to be mended")
        runner.coordinator.release(1, "twice is once")
    with Runner(words_pipeline(), PreStaged()) as runner:
        done = runner.run()
        assert done is not None
        with pytest.raises(IllegalTransition, match="only one whose revisions are all aborted"):
            runner.coordinator.release(2, "it is committed")

    assert (done.checkpoint_id, done.revision) == (2, 1)
    assert counted(visible("lake/words")) == counted(rows)
    assert [event["action"] for event in shown(record, 1)["events"]].count("released") == 1


def test_two_pipelines_on_one_table_are_refused_before_anything_changes(home: Path, record: PostgresRecord) -> None:
    land_words()
    with Runner(words_pipeline(), PreStaged()) as runner:
        runner.run()
    thief = words_pipeline("thief", writes={"lake": sinks.Files("lake/words")})

    with pytest.raises(ConfigError, match=r"belongs to pipeline 'words'"):
        Runner(thief, PreStaged())

    with record.engine.connect() as connection:
        assert queries.names(connection) == ["words"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"writes": {"lake": sinks.Files("lake/words", format="json")}}, "format was 'parquet' and is now 'json'"),
        ({"writes": {"lake": sinks.Files("lake/words", partition_by=["word"])}}, "partition_by"),
    ],
)
def test_a_declaration_that_changed_incompatibly_is_refused(home: Path, changed: dict[str, Any], said: str) -> None:
    land_words()
    with Runner(words_pipeline(), PreStaged()) as runner:
        runner.run()

    with pytest.raises(ConfigError, match=said):
        Runner(words_pipeline(**changed), PreStaged())


def test_a_source_that_was_renamed_is_refused_since_its_input_would_be_read_again(home: Path) -> None:
    land_words()
    with Runner(words_pipeline(), PreStaged()) as runner:
        runner.run()
    renamed = Pipeline(
        "words",
        reads={"lines": sources.Files("landing/words", format="json")},
        transform="word_count:copy",
        writes={"lake": sinks.Files("lake/words")},
    )

    with pytest.raises(ConfigError, match="read 'words' is gone"):
        Runner(renamed, PreStaged())


def test_a_function_as_transform_needs_a_session(home: Path) -> None:
    with pytest.raises(ConfigError, match="spark="):
        twophase.run(words_pipeline(transform=copy))


def test_a_missing_landing_folder_is_an_error_before_anything_is_recorded(home: Path, record: PostgresRecord) -> None:
    pipeline = words_pipeline()
    data_path("landing/words").rmdir()

    with pytest.raises(ConfigError, match="landing/words"):
        Runner(pipeline, PreStaged())

    with record.engine.connect() as connection:
        assert queries.names(connection) == []


def test_an_attempt_that_fails_to_stage_anything_is_aborted(home: Path, record: PostgresRecord) -> None:
    land_words()

    def nothing(*_: object) -> Any:
        msg = "Spark ended with code 1"
        raise AttemptFailed(msg)

    with Runner(words_pipeline(), cast("Stager", nothing)) as runner, pytest.raises(AttemptFailed):
        runner.run()

    assert shown(record, 1)["state"] == "ABORTED"
    assert "Spark ended with code 1" in shown(record, 1)["error"]
