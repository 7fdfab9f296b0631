"""The Spark side of an attempt, on a real Spark: reading, calling, checking, staging, and the child process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from zoneinfo import ZoneInfo

import psutil
import pyarrow as pa
import pytest
from pyarrow import parquet

from support.servers.spark import CHEAP
from twophase import sinks
from twophase.core import failpoints
from twophase.core.checkpoint import Input, Json, Key
from twophase.core.errors import AttemptFailed, BadRecord, ConfigError, InputChanged, NoSpace, SchemaChanged
from twophase.core.slots import Slot, between
from twophase.sinks.base import Sink
from twophase.sources import Files, Interval, Lookup
from twophase.spark.plan import Plan
from twophase.spark.stage import COALESCED, Context, stage
from twophase.spark.submit import MAIN, ROOT, SparkSubmit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

Transform = Callable[..., Any]


class Kept(Sink):
    """A sink that keeps the rows in this process, and can remove the input as soon as it has them."""

    rows: ClassVar[dict[str, list[dict[str, Any]]]] = {}
    cached: ClassVar[dict[str, bool]] = {}
    then: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    def __init__(self, *, by_position: bool = False) -> None:
        self._by_position = by_position

    def config(self) -> dict[str, Any]:
        return {"by_position": self._by_position}

    def by_position(self) -> bool:
        return self._by_position

    def stage(self, frame: Any, key: Key, attempt: int, sink: str, handle: Json) -> Json:
        Kept.rows[sink] = [row.asDict() for row in frame.collect()]
        Kept.cached[sink] = frame.storageLevel.useMemory
        Kept.then()
        return {"rows": len(Kept.rows[sink]), "attempt": attempt, **handle}

    def _outside_spark(self, *_: Any, **__: Any) -> Any:
        msg = "only the coordinator calls this, and there is none here"
        raise AssertionError(msg)

    location = place = check = find = promote = discard = attempts = remove = verify = strangers = _outside_spark


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Kept.rows, Kept.cached, Kept.then = {}, {}, staticmethod(lambda: None)


@pytest.fixture
def landing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    folder = tmp_path / "data" / "landing"
    folder.mkdir(parents=True)
    return folder


def put(folder: Path, path: str, content: str) -> Path:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    return file


def words(**arguments: Any) -> Files:
    return Files("landing", **{"format": "json", **arguments})


def everything(source: Files | Interval, slot: str | None = None) -> Input:
    found = source.discover(slot)
    return found if isinstance(found, Input) else Input(files=tuple(sorted(found.files)))


def plan(
    source: Files | Interval,
    writes: Mapping[str, Sink] | None = None,
    *,
    transform: str | None = None,
    schema: list[list[str]] | None = None,
    slot: str | None = None,
) -> Plan:
    key = Key("wc", 17, 1)
    files = [list(file) for file in everything(source, slot).files]
    return Plan(
        *key,
        attempt=3,
        slot=slot,
        transform=transform,
        reads={"words": {"source": source.declaration(), "files": files}},
        writes={
            name: {
                "sink": sink.declaration(),
                "handle": {} if isinstance(sink, Kept) else sink.place(key, 3, "7c1e"),
                "schema": schema,
            }
            for name, sink in (writes or {"lake": make()}).items()
        },
    )


def make(**arguments: Any) -> Kept:
    return Kept(**arguments)


def same(words: DataFrame) -> DataFrame:
    return words


# --- reading ----------------------------------------------------------------------------------------------------------

ODD = (
    "a[1]",
    "b{x,y}",
    "c*",
    "d?",
    "e f",
    "2026-11-16T03:00:00",
    "i%20j",
    "k#l",
    "m\\n",
    "ü",
    "dt=1/o+p&q=r",
    "[x]y",
    "'",
)


@pytest.mark.parametrize("kind", ["json", "csv", "parquet", "text"])
def test_exactly_the_fixed_files_are_read_whatever_their_names(spark: SparkSession, landing: Path, kind: str) -> None:
    """A name is a name, never a pattern; a file that came later is not read."""
    for number, name in enumerate(ODD):
        path = put(
            landing, f"{name}.{kind}", {"json": f'{{"n": {number}}}', "csv": f"n\n{number}"}.get(kind, str(number))
        )
        if kind == "parquet":
            parquet.write_table(pa.table({"n": [number]}), path)
    source = words(format=kind, schema=None if kind in {"parquet", "text"} else "n int")
    fixed = everything(source)
    put(landing, "a1.json", '{"n": 100}')

    found = sorted(int(row[0]) for row in source.read(spark, fixed).collect())

    assert found == list(range(len(ODD)))


def test_looking_at_many_paths_leaves_the_session_as_it_was(spark: SparkSession, landing: Path) -> None:
    name = "spark.sql.sources.parallelPartitionDiscovery.threshold"
    before = spark.conf.get(name)
    for number in range(100):
        put(landing, f"{number}.json", '{"n": 1}')

    assert words(schema="n int").read(spark, everything(words())).count() == 100
    assert spark.conf.get(name) == before


def test_csv_has_a_header_and_options_pass_through(spark: SparkSession, landing: Path) -> None:
    put(landing, "a.csv", "w;n\nx;1\n")
    source = words(format="csv", options={"sep": ";", "inferSchema": True})

    assert [row.asDict() for row in source.read(spark, everything(source)).collect()] == [{"w": "x", "n": 1}]


def test_no_files_give_an_empty_frame_of_the_declared_schema(spark: SparkSession, landing: Path) -> None:
    frame = words(schema="w string, n int").read(spark, Input())

    assert frame.columns == ["w", "n"]
    assert frame.count() == 0


def test_no_files_and_no_schema_is_a_clear_error(spark: SparkSession, landing: Path) -> None:
    with pytest.raises(ConfigError, match="declare schema="):
        words().read(spark, Input())


DAY = "2026-11-15T00:00:00+00:00/2026-11-16T00:00:00+00:00"
TIMES = {
    "before": "2026-11-14T23:59:59.999999Z",
    "first": "2026-11-15T00:00:00Z",
    "elsewhere": "2026-11-16T01:30:00+02:00",
    "no zone": "2026-11-15T23:30:00",
    "next": "2026-11-16T00:00:00Z",
}


@pytest.fixture
def far_away(spark: SparkSession) -> Iterator[None]:
    """Set a session's time zone that is not ours."""
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    yield
    spark.conf.set("spark.sql.session.timeZone", "UTC")


@pytest.mark.usefixtures("far_away")
@pytest.mark.parametrize("path", ["landing", "landing/{start:%Y-%m}"])
def test_only_rows_of_the_interval_are_read_in_utc(spark: SparkSession, landing: Path, path: str) -> None:
    """The start belongs to it and the end does not; a row without a time is in no interval."""
    rows = [{"name": name, "ts": ts} for name, ts in TIMES.items()] + [{"name": "null", "ts": None}]
    put(landing, "2026-11/a.json", "\n".join(map(json.dumps, rows)))
    source = Interval(path, "json", column="TS", schema="name string, ts timestamp")
    fixed = everything(source, DAY)

    found = {row["name"] for row in source.read(spark, fixed, DAY).collect()}

    assert found == {"first", "elsewhere", "no zone"}


@pytest.mark.usefixtures("far_away")
@pytest.mark.parametrize(
    ("slot", "days"),
    [
        (DAY, {15}),
        ("2026-11-14/2026-11-17", {14, 15, 16}),
        ("2026-11-15T00:00/2026-11-15T01:00", {15}),
        ("2026-11-15T01:00/2026-11-15T02:00", set()),
        ("2026-11-15T01:00/2026-11-16T01:00", {16}),
    ],
)
@pytest.mark.parametrize("kind", ["date", "timestamp_ntz"])
def test_a_date_is_its_midnight_and_a_time_without_zone_is_utc(
    spark: SparkSession, landing: Path, kind: str, slot: str, days: set[int]
) -> None:
    put(landing, "a.csv", "day\n" + "\n".join(f"2026-11-{day}" for day in range(13, 19)))
    source = Interval("landing", "csv", column="day", schema=f"day {kind}")

    found = source.read(spark, everything(source, slot), slot).collect()

    assert {row["day"].day for row in found} == days


@pytest.mark.usefixtures("far_away")
def test_every_row_is_in_one_interval_of_a_zone_also_in_the_hour_that_comes_twice(
    spark: SparkSession, landing: Path
) -> None:
    """A date is a midnight there, and a time without zone is what the clock shows there."""
    clock = [f"2026-10-25 {half // 2:02d}:{half % 2 * 30:02d}:00" for half in range(48)]
    put(landing, "a.csv", "at,shown,day\n" + "\n".join(f"{time},{time},2026-10-25" for time in clock))
    schema = "at timestamp, shown timestamp_ntz, day date"
    berlin = ZoneInfo("Europe/Berlin")
    first, last = (datetime(2026, 10, day, tzinfo=berlin) for day in (25, 26))
    halves = between(first, last, timedelta(minutes=30))
    whole, morning = (Slot.parse(f"2026-10-25/{end}", berlin) for end in ("2026-10-26", "2026-10-25T12"))
    slots = [whole, *list(halves)[4:8], morning]

    found = {}
    for column in ("at", "shown", "day"):
        source = Interval("landing", "csv", column=column, schema=schema, timezone="Europe/Berlin")
        fixed = everything(source, slots[0].text)
        found[column] = [source.read(spark, fixed, slot.text).count() for slot in slots]

    assert found == {"at": [48, 1, 1, 0, 0, 24], "shown": [48, 1, 1, 0, 0, 24], "day": [48, 0, 0, 0, 0, 48]}


def test_an_interval_column_that_is_no_time_is_named(spark: SparkSession, landing: Path) -> None:
    put(landing, "a.json", '{"ts": "2026-11-15"}')

    for column, words in (("ts", "found string"), ("day", "found no such column among ts")):
        source = Interval("landing", "json", column=column)
        with pytest.raises(ConfigError, match=f"expected a date or a timestamp, {words}; declare schema="):
            source.read(spark, everything(source, DAY), DAY)


@pytest.mark.parametrize("pattern", ["dt={start:%Y-%m-%d}", "{start:%Y-%m-%dT%H:%M}", "{start} x"])
def test_an_interval_reads_its_folder_whatever_its_name(spark: SparkSession, landing: Path, pattern: str) -> None:
    source = Interval(f"landing/{pattern}", "json", schema="n int")
    for number, day in enumerate((14, 15, 16)):
        folder = pattern.format(start=datetime(2026, 11, day, tzinfo=UTC))
        put(landing, f"{folder}/{number}.json", f'{{"n": {day}}}')
    attempt = plan(source, slot=DAY)

    stage(spark, attempt, same)

    assert Kept.rows["lake"] == [{"n": 15}]


def test_an_interval_without_files_is_an_empty_frame(spark: SparkSession, landing: Path) -> None:
    source = Interval("landing/{key}", "json", column=None, schema="n int", on_missing="empty")

    stage(spark, plan(source, slot="berlin"), same)

    assert Kept.rows["lake"] == []


@pytest.mark.parametrize("alone", [True, False])
def test_a_lookup_table_is_read_whole_as_it_stands(spark: SparkSession, landing: Path, alone: bool) -> None:
    table = Lookup("names [1].parquet" if alone else "names")
    place = table.table if alone else table.table / "part-0.parquet"
    place.parent.mkdir(exist_ok=True)
    found = []
    for name in ("one", "uno"):
        parquet.write_table(pa.table({"n": [1], "name": [name]}), place)
        found.append([row["name"] for row in table.read(spark, Input()).collect()])

    assert found == [["one"], ["uno"]]


def test_a_lookup_table_joins_what_is_read(spark: SparkSession, landing: Path) -> None:
    put(landing, "a.json", '{"n": 1}\n{"n": 2}')
    put(landing.parent, "names.csv", "n,name\n1,one\n2,two\n")
    names = Lookup("names.csv", "csv", schema="n int, name string")
    attempt = plan(words(schema="n int"))
    attempt = replace(attempt, reads={**attempt.reads, "names": {"source": names.declaration()}})

    stage(spark, attempt, lambda words, names: words.join(names, "n").select("name"))

    assert sorted(row["name"] for row in Kept.rows["lake"]) == ["one", "two"]


# --- bad input --------------------------------------------------------------------------------------------------------

BAD = [
    ({"format": "json"}, '{"n": 1}\n{"n": \n', "landing/bad, line 2: not JSON"),
    ({"format": "json", "schema": "n int"}, '{"n": 1}\n{"n": "x"}\n', "line 2: column 'n': expected int, found"),
    ({"format": "json", "schema": "d date"}, '{"d": "someday"}\n', "landing/bad: .*someday"),
    ({"format": "csv", "schema": "n int"}, "n\n1\nx\n", "line 3: column 'n': expected int, found 'x'"),
    ({"format": "csv", "schema": "n int, m int"}, "m,n\n1,2\n", "line 1: expected the header n,m, found m,n"),
    ({"format": "csv", "schema": "n int"}, "1\n2\n", "line 1: expected the header n, found 1"),
    ({"format": "csv"}, "n,m\n1,2\n3\n", "line 3: expected 2 fields, found 1"),
    ({"format": "parquet"}, "no parquet", "landing/bad: not a whole Parquet file"),
    ({"format": "parquet", "schema": "n int"}, "no parquet", "landing/bad: not a whole Parquet file"),
]


@pytest.mark.parametrize(("arguments", "content", "message"), BAD)
def test_a_bad_record_is_named_by_file_and_line(
    spark: SparkSession, landing: Path, arguments: dict[str, Any], content: str, message: str
) -> None:
    """Spark's own error names the file at best."""
    put(landing, "bad", content)

    with pytest.raises(BadRecord, match=message):
        stage(spark, plan(words(**arguments)), same)


def test_a_file_that_vanished_is_named(spark: SparkSession, landing: Path) -> None:
    file = put(landing, "a.json", '{"n": 1}')
    attempt = plan(words(schema="n int"))
    file.unlink()

    with pytest.raises(InputChanged, match=r"file a\.json: .* found nothing"):
        stage(spark, attempt, same)


def test_a_users_own_error_goes_through(spark: SparkSession, landing: Path) -> None:
    put(landing, "a.json", '{"n": 1}')

    def transform(words: DataFrame) -> DataFrame:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stage(spark, plan(words()), transform)


def test_a_full_disk_is_told_as_such_and_not_as_an_error_of_java(spark: SparkSession, landing: Path) -> None:
    """Wherever in Spark it was met: a person has to make room, not to read a stack."""
    put(landing, "a.json", '{"n": 1}')

    def transform(words: DataFrame) -> DataFrame:
        java: Any = spark._jvm
        java.java.io.FileOutputStream("/dev/full").write(1)
        return words

    with pytest.raises(NoSpace, match=r"checkpoint wc/17 r1: attempt 3: No space left on device, .*; make room"):
        stage(spark, plan(words()), transform)


# --- staging ----------------------------------------------------------------------------------------------------------


def test_every_write_is_staged_and_summed_up(spark: SparkSession, landing: Path) -> None:
    put(landing, "a.json", '{"n": 1}\n{"n": 2}')

    def transform(words: DataFrame, context: Context) -> DataFrame:
        assert context == Context("wc", 17, 1, None)
        return words

    assert stage(spark, plan(words()), transform) == {"lake": {"rows": 2, "attempt": 3}}


@pytest.mark.parametrize("shape", ["one frame", "a dict of one frame", "a dict of different frames"])
def test_the_input_is_read_once_for_several_writes(spark: SparkSession, landing: Path, shape: str) -> None:
    file = put(landing, "a.json", '{"n": 1}\n{"n": 2}')
    Kept.then = staticmethod(lambda: file.unlink(missing_ok=True))

    def transform(words: DataFrame) -> Any:
        twice = words.selectExpr("n * 2 as n")
        other = words.selectExpr("n * 3 as n") if shape == "a dict of different frames" else twice
        return twice if shape == "one frame" else {"lake": twice, "dwh": other}

    stage(spark, plan(words(schema="n int"), {"lake": make(), "dwh": make()}), transform)

    assert [row["n"] for row in Kept.rows["lake"]] == [2, 4]
    assert [row["n"] for row in Kept.rows["dwh"]] == ([3, 6] if "different" in shape else [2, 4])
    assert spark.sparkContext._jsc.getPersistentRDDs().isEmpty()


def test_several_writes_are_as_many_files_as_one(spark: SparkSession, landing: Path) -> None:
    """What they share is kept in as few partitions as its rows need, not in as many as a shuffle was planned with."""
    put(landing, "a.json", "\n".join(f'{{"n": {number % 5}}}' for number in range(20)))
    before = {name: spark.conf.get(name) for name in ("spark.sql.shuffle.partitions", COALESCED)}
    spark.conf.set("spark.sql.shuffle.partitions", "20")

    def files(*names: str) -> set[tuple[int, int]]:
        tables = {name: sinks.Files(f"lake/{name}") for name in names}
        for table in tables.values():
            table.prepare()
        staged = stage(spark, plan(words(schema="n int"), tables), lambda words: words.groupBy("n").count())
        return {(manifest["files"], manifest["rows"]) for manifest in staged.values()}

    try:
        assert files("alone") == files("one", "two", "three") == {(1, 5)}
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", before["spark.sql.shuffle.partitions"] or "2")
    assert spark.conf.get(COALESCED) == before[COALESCED]


def test_a_single_write_is_not_cached(spark: SparkSession, landing: Path) -> None:
    put(landing, "a.json", '{"n": 1}')

    stage(spark, plan(words()), same)

    assert Kept.cached == {"lake": False}


@pytest.mark.parametrize(
    ("before", "by_position", "message"),
    [
        ([["n", "int"]], False, "column 'n' was int and is now bigint"),
        ([["n", "bigint"], ["gone", "string"]], False, "column 'gone' is missing"),
        ([["z", "string"], ["n", "bigint"]], True, "the order of columns changed"),
    ],
)
def test_a_schema_that_does_not_follow_is_refused_before_anything_is_written(
    spark: SparkSession, landing: Path, before: list[list[str]], by_position: bool, message: str
) -> None:
    put(landing, "a.json", '{"n": 1, "z": "x"}')
    writes = {"first": make(), "lake": make(by_position=by_position)}
    attempt = plan(words(), writes, schema=before)

    with pytest.raises(SchemaChanged, match=rf"checkpoint wc/17 r1: sink '\w+': {message}"):
        stage(spark, attempt, same)

    assert Kept.rows == {}


def test_a_new_column_may_come(spark: SparkSession, landing: Path) -> None:
    put(landing, "a.json", '{"n": 1, "z": "x"}')

    stage(spark, plan(words(), schema=[["n", "bigint"]]), same)

    assert Kept.rows["lake"] == [{"n": 1, "z": "x"}]


def test_two_columns_of_one_name_are_refused(spark: SparkSession, landing: Path) -> None:
    put(landing, "a.json", '{"n": 1}')

    with pytest.raises(ConfigError, match="more than one column is named n "):
        stage(spark, plan(words()), lambda words: words.selectExpr("n", "n as N"))


def test_the_failpoint_lies_before_the_first_write(spark: SparkSession, landing: Path) -> None:
    put(landing, "a.json", '{"n": 1}')
    failpoints.configure("stage.before=raise")

    try:
        with pytest.raises(failpoints.FailpointError):
            stage(spark, plan(words()), same)
    finally:
        failpoints.configure("")

    assert Kept.rows == {}


# --- the child process ------------------------------------------------------------------------------------------------

JOBS = {
    "plan.py": "VALUE = 'not the package'\n",
    "job.py": """
import os, time
from pathlib import Path

def works(words, spark):
    import plan
    assert plan.VALUE == 'not the package'
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    return words.groupBy("word").sum("n").withColumnRenamed("sum(n)", "n")

def fails(words):
    raise ValueError(f"dsn is {os.environ.get('TWOPHASE_DSN')}")

def hangs(words):
    Path(os.environ["TWOPHASE_HOME"], "pids").write_text(f"{os.getpid()} {os.getppid()}")
    time.sleep(600)
""",
}


@pytest.fixture
def jobs(tmp_path: Path, landing: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "spark_jobs"
    for name, text in JOBS.items():
        put(folder, name, text)
    put(landing, "a [1].json", '{"word": "ü", "n": 1}\n{"word": "ü", "n": 2}\n')
    monkeypatch.setenv("TWOPHASE_SPARK_JOBS", str(folder))
    monkeypatch.setenv("TWOPHASE_DSN", "postgresql://secret")
    monkeypatch.setenv("LC_ALL", "C")
    return folder


def written_plan(tmp_path: Path, function: str) -> Path:
    lake = sinks.Files("lake/wc")
    lake.prepare()
    path = tmp_path / "attempt" / "plan.json"
    plan(words(), {"lake": lake}, transform=f"job:{function}").write(path)
    return path


def submitted(tmp_path: Path, function: str) -> tuple[int, dict[str, Any], str]:
    path = written_plan(tmp_path, function)
    result, log = path.with_name("result.json"), path.with_name("log.txt")
    code = SparkSubmit().submit(path, result, log, master="local[2]", conf=SUBMIT).wait(timeout=200)
    return code, json.loads(result.read_text()), log.read_text()


SUBMIT = {name: value for name, value in CHEAP.items() if name != "spark.sql.session.timeZone"}


def test_a_submitted_plan_is_staged(tmp_path: Path, jobs: Path) -> None:
    """The transform comes from spark_jobs, and no module of the package hides the user's."""
    code, result, log = submitted(tmp_path, "works")

    assert code == 0, log[-3000:]
    assert result["status"] == "staged"
    assert "process" in (tmp_path / "attempt" / "started").read_text()
    assert (result["writes"]["lake"]["rows"], result["writes"]["lake"]["schema"]) == (
        1,
        [["word", "string"], ["n", "bigint"]],
    )


def test_a_driver_that_a_cluster_starts_again_ends_and_writes_nothing(tmp_path: Path, jobs: Path) -> None:
    """Two drivers of one attempt would share a staging place; the second is no retry of the first."""
    path = written_plan(tmp_path, "works")
    path.with_name("started").write_text("container_17_0001_01_000001 on another machine")

    done = subprocess.run(
        [sys.executable, str(MAIN), str(path), str(path.with_name("result.json"))],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert "started before, as container_17_0001_01_000001 on another machine" in done.stderr
    assert sorted(file.name for file in path.parent.iterdir()) == ["plan.json", "started"]
    assert list((tmp_path / "data" / "lake").rglob("*.parquet")) == []


def test_a_failed_transform_is_reported_in_one_line(tmp_path: Path, jobs: Path) -> None:
    """And the job held no way to the committer database."""
    code, result, log = submitted(tmp_path, "fails")

    assert code == 1
    assert result == {"status": "failed", "type": "ValueError", "error": "ValueError: dsn is None (job.py:12)"}
    assert "Traceback (most recent call last)" in log


SUBMITTER = """
import sys
from pathlib import Path
from twophase.spark.submit import SparkSubmit

folder = Path(sys.argv[1])
conf = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
paths = [folder / name for name in ("plan.json", "result.json", "log.txt")]
job = SparkSubmit().submit(*paths, master="local[2]", conf=conf)
job.wait(should_stop=(folder / "stop").exists)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
@pytest.mark.parametrize("how", ["killed", "asked to stop"])
def test_nothing_of_a_job_outlives_its_submitter(tmp_path: Path, jobs: Path, how: str) -> None:
    """Neither the JVM nor the Python driver turns into a zombie writer."""
    folder = written_plan(tmp_path, "hangs").parent
    submitter = subprocess.Popen(
        [sys.executable, "-c", SUBMITTER, str(folder)], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    pids = tmp_path / "pids"
    while not pids.exists() or len(pids.read_text().split()) != 2:
        with pytest.raises(subprocess.TimeoutExpired):
            submitter.wait(0.2)
    running = [psutil.Process(int(pid)) for pid in pids.read_text().split()]

    if how == "killed":
        submitter.send_signal(signal.SIGKILL)
    else:
        (folder / "stop").touch()
    submitter.wait(30)

    _, alive = psutil.wait_procs(running, timeout=10)
    assert alive == []
    assert not (folder / "result.json").exists()


def test_a_job_that_takes_too_long_is_killed(tmp_path: Path, jobs: Path) -> None:
    path = written_plan(tmp_path, "hangs")
    job = SparkSubmit().submit(path, path.with_name("result.json"), path.with_name("log.txt"), master="local[2]")

    with pytest.raises(AttemptFailed, match=r"expected to end within 1 s, was killed; its output is in .*log\.txt"):
        job.wait(timeout=1)

    assert job.process.poll() is not None
