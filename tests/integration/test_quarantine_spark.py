"""Bad records on a real Spark: each record is in the good ones or in the quarantine, with its file, line and reason."""

from __future__ import annotations

import bz2
import gzip
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import duckdb
import pytest

from twophase import sinks
from twophase.core.checkpoint import Input, Json, Key, Output
from twophase.core.errors import BadRecord, ConfigError
from twophase.sinks.base import Sink
from twophase.sources import Files, Interval
from twophase.sources.fixed_files import FixedFiles
from twophase.spark.plan import Plan, PlannedRead, PlannedWrite
from twophase.spark.stage import stage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

COLUMNS = ["reason", "raw", "file", "line"]
DAY = "2026-11-15T00:00:00+00:00/2026-11-16T00:00:00+00:00"


class Kept(Sink):
    """A sink that keeps the rows in this process, and may do something as soon as it has them."""

    rows: ClassVar[dict[str, list[dict[str, Any]]]] = {}
    then: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    def config(self) -> dict[str, Any]:
        return {}

    def stage(self, frame: Any, output: Output) -> Json:
        Kept.rows[output.sink] = [row.asDict() for row in frame.collect()]
        Kept.then()
        return {"rows": len(Kept.rows[output.sink])}

    def _outside_spark(self, *_: Any, **__: Any) -> Any:
        msg = "only the coordinator calls this, and there is none here"
        raise AssertionError(msg)

    location = place = check = find = promote = discard = attempts = remove = verify = strangers = _outside_spark
    files = _outside_spark


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Kept.rows, Kept.then = {}, staticmethod(lambda: None)


@pytest.fixture
def landing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    folder = tmp_path / "data" / "landing"
    folder.mkdir(parents=True)
    return folder


def put(folder: Path, path: str, content: str | bytes) -> Path:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    raw = content.encode() if isinstance(content, str) else content
    compressed = {".gz": gzip.compress(raw), ".bz2": bz2.compress(raw)}
    file.write_bytes(compressed.get(file.suffix, raw))
    return file


def words(kind: str = "json", **arguments: Any) -> Files:
    return Files("landing", kind, **{"schema": "n int, w string", "on_bad_record": "quarantine", **arguments})


def plan(source: FixedFiles, writes: Mapping[str, Sink | None] | None = None, slot: str | None = None) -> Plan:
    """Plan one attempt: its writes, and the quarantine. None: a write that this attempt does not stage."""
    every = {"lake": Kept()} if writes is None else dict(writes)
    every.setdefault("words_quarantine", Kept())
    key = Key("wc", 17, 1)
    found = source.discover(slot)
    return Plan(
        *key,
        attempt=3,
        slot=slot,
        transform=None,
        reads={"words": PlannedRead(source.declaration(), Input(files=tuple(sorted(found.files))))},
        writes={
            name: PlannedWrite(
                (sink or Kept()).declaration(),
                None if sink is None else {} if isinstance(sink, Kept) else sink.place(key, 3, "7c1e"),
                quarantine="words" if name == "words_quarantine" else None,
            )
            for name, sink in every.items()
        },
    )


def same(words: DataFrame) -> DataFrame:
    return words


def bad() -> list[tuple[Any, ...]]:
    """Return the quarantine, without the reasons, by file and line."""
    found = [(Path(row["file"]).name, row["line"], row["raw"]) for row in Kept.rows["words_quarantine"]]
    return sorted(found, key=lambda row: (row[0], row[1] or 0, row[2]))


def nothing_is_kept(spark: SparkSession) -> bool:
    return bool(spark.sparkContext._jsc.getPersistentRDDs().isEmpty())


# --- apart ------------------------------------------------------------------------------------------------------------


def test_bad_json_is_set_aside_with_reason_text_file_and_line(spark: SparkSession, landing: Path) -> None:
    lines = ['{"n": 1, "w": "a"}', "", '{"n": "x", "w": "b"}', "   ", '{"n": 3', '{"n": 4}', "17"]
    put(landing, "a.json", "\n".join(lines))

    stage(spark, plan(words()), same)

    assert Kept.rows["lake"] == [{"n": 1, "w": "a"}, {"n": 4, "w": None}]
    assert bad() == [("a.json", 3, lines[2]), ("a.json", 5, lines[4]), ("a.json", 7, "17")]
    found = {row["line"]: row for row in Kept.rows["words_quarantine"]}
    assert list(found[3]) == COLUMNS
    assert found[3]["reason"] == "column 'n': expected int, found \"x\""
    assert found[3]["file"] == str(landing / "a.json")
    assert found[5]["reason"].startswith("not JSON")
    assert found[7]["reason"] == "expected a JSON object, found 17"


def test_bad_csv_is_set_aside_and_a_header_is_no_record(spark: SparkSession, landing: Path) -> None:
    """A header in the middle, of files put together, is a bad record."""
    content = '\nn,w\n1,a\n\nx,b\n2\n3,c,d\nn,w\n4,"q, r"\n 5,e\n'
    put(landing, "a.csv", content)
    put(landing, "b.csv.gz", "n,w\ny,z\n6,f\n")

    stage(spark, plan(words("csv")), same)

    assert sorted(row["n"] for row in Kept.rows["lake"]) == [1, 4, 6]
    assert bad() == [
        ("a.csv", 5, "x,b"),
        ("a.csv", 6, "2"),
        ("a.csv", 7, "3,c,d"),
        ("a.csv", 8, "n,w"),
        ("a.csv", 10, " 5,e"),
        ("b.csv.gz", 2, "y,z"),
    ]
    reasons = [row["reason"] for row in sorted(Kept.rows["words_quarantine"], key=lambda r: (r["file"], r["line"]))]
    assert reasons == [
        "column 'n': expected int, found 'x'",
        "expected 2 fields, found 1",
        "expected 2 fields, found 3",
        "column 'n': expected int, found 'n'",
        "column 'n': expected int, found ' 5'",
        "column 'n': expected int, found 'y'",
    ]


def test_an_interval_sets_aside_too(spark: SparkSession, landing: Path) -> None:
    put(landing, "dt=2026-11-15/a.json", '{"n": 1}\n{"n": "x"}\n')
    put(landing, "dt=2026-11-16/a.json", '{"n": "not this one"}\n')
    source = Interval("landing/dt={start:%Y-%m-%d}", "json", schema="n int, w string", on_bad_record="quarantine")

    stage(spark, plan(source, slot=DAY), same)

    assert Kept.rows["lake"] == [{"n": 1, "w": None}]
    assert bad() == [("a.json", 2, '{"n": "x"}')]


def test_a_record_is_bad_also_where_its_bad_column_is_not_selected(spark: SparkSession, landing: Path) -> None:
    """Spark alone would parse only what each query asks for, and call the record good in one and bad in another."""
    put(landing, "a.json", '{"n": 1, "w": "a"}\n{"n": "x", "w": "b"}\n')

    def transform(words: DataFrame) -> dict[str, DataFrame]:
        return {"lake": words.select("w"), "counted": words.groupBy().count(), "numbers": words.select("n")}

    stage(spark, plan(words(), {"lake": Kept(), "counted": Kept(), "numbers": Kept()}), transform)

    assert Kept.rows["lake"] == [{"w": "a"}]
    assert Kept.rows["counted"] == [{"count": 1}]
    assert Kept.rows["numbers"] == [{"n": 1}]
    assert bad() == [("a.json", 2, '{"n": "x", "w": "b"}')]
    assert nothing_is_kept(spark)


def test_good_and_bad_are_decided_once(spark: SparkSession, landing: Path) -> None:
    """The file is not read again for the second write, nor for the bad records; only their lines are lost with it."""
    file = put(landing, "a.json", '{"n": 1, "w": "a"}\n{"n": "x", "w": "b"}\n')
    Kept.then = staticmethod(lambda: file.unlink(missing_ok=True))

    stage(spark, plan(words(), {"lake": Kept(), "other": Kept()}), lambda words: words.select("w"))

    assert Kept.rows["other"] == [{"w": "a"}]
    assert bad() == [("a.json", None, '{"n": "x", "w": "b"}')]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["json", "csv"])
def test_every_record_of_a_random_mix_is_in_one_of_both_once(
    spark: SparkSession, landing: Path, kind: str, seed: int
) -> None:
    rng = random.Random(f"{kind}{seed}")
    good, expected = Counter[int](), Counter[tuple[str, int, str]]()
    for number in range(6):
        name = f"{number}.{kind}{rng.choice(['', '.gz', '.bz2'])}"
        lines = ["n,w,d"] if kind == "csv" else []
        for _ in range(rng.randrange(400)):
            id_ = rng.randrange(150)  # so that equal records come several times
            record = good_record(rng, kind, id_)
            if (fate := rng.random()) < 0.3:
                record = bad_record(rng, kind, id_)
                expected[name, len(lines) + 1, record] += 1
            elif fate < 0.4:
                record = rng.choice(["", " ", "\t "])
            else:
                good[id_] += 1
            lines.append(record)
        put(landing, name, rng.choice(["\n", "\r\n"]).join(lines) + rng.choice(["", "\n"]))
    source = words(kind, schema="n int, w string, d date")

    def transform(words: DataFrame) -> dict[str, DataFrame]:
        return {"lake": words.select("n"), "other": words.select("w")}

    stage(spark, plan(source, {"lake": Kept(), "other": Kept()}), transform)

    assert Counter(row["n"] for row in Kept.rows["lake"]) == good
    assert len(Kept.rows["other"]) == good.total()
    assert Counter(bad()) == expected
    assert all(row["reason"] != "cannot be read with the declared schema" for row in Kept.rows["words_quarantine"])


def good_record(rng: random.Random, kind: str, id_: int) -> str:
    text, day = rng.choice(["a", "ü,ö", "x y"]), rng.choice([None, "2026-11-15"])
    return json.dumps({"n": id_, "w": text, "d": day}) if kind == "json" else f'{id_},"{text}",{day or ""}'


def bad_record(rng: random.Random, kind: str, id_: int) -> str:
    if kind == "json":
        forms = ['{{"n": "{}"}}', '{{"n": {}', "{}", '{{"n": {}.5, "w": "ü"}}', '{{"n": {}, "d": "someday"}}', "[{}]"]
    else:
        forms = ["{}", "x{},ü,", "{},a,2026-11-15,b", "{}.5,a,", '{},"a",someday', '{} ,"b,c",']
    return rng.choice(forms).format(id_)


def test_a_file_of_any_name_is_named(spark: SparkSession, landing: Path) -> None:
    names = ["a b%20.json", "2026-11-16T03:00:00.json", "ü [1].json", "dt=1/k#l+m&n?.json"]
    for name in names:
        put(landing, name, '{"n": 1}\n{"n": "x"}\n')

    stage(spark, plan(words()), same)

    assert sorted(row["file"] for row in Kept.rows["words_quarantine"]) == sorted(str(landing / n) for n in names)
    assert {row["line"] for row in Kept.rows["words_quarantine"]} == {2}


def test_many_bad_records_are_placed_as_well(
    spark: SparkSession, landing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twophase.sources.quarantine._FEW", 10)
    put(landing, "a.json", "".join(f'{{"n": "{number % 20}"}}\n' for number in range(50)))

    stage(spark, plan(words()), same)

    assert [line for _, line, _ in bad()] == list(range(1, 51))


def test_an_array_on_one_line_goes_as_a_whole(spark: SparkSession, landing: Path) -> None:
    line = '[{"n": 1}, {"n": "x"}, {"n": 3}]'
    put(landing, "a.json", f'{line}\n[{{"n": 4}}, {{"n": 5}}]\n{line}\n')

    stage(spark, plan(words()), same)

    assert sorted(row["n"] for row in Kept.rows["lake"]) == [4, 5]
    assert bad() == [("a.json", 1, line), ("a.json", 3, line)]


def test_a_record_that_cannot_be_placed_is_set_aside_without_a_line(spark: SparkSession, landing: Path) -> None:
    put(landing, "a.json", '{"n": 1}|{"n": "x"}|{"n": "x"}|')

    stage(spark, plan(words(options={"lineSep": "|"})), same)

    assert bad() == [("a.json", None, '{"n": "x"}')] * 2


def test_bytes_that_are_no_text_do_not_make_the_table_unreadable(spark: SparkSession, landing: Path) -> None:
    put(landing, "a.json", b'{"n": 1}\n{"n": 2, "w": "\xff\xfe\xe2\x82"}\n')
    table = sinks.Files("landing.quarantine")
    table.prepare()
    attempt = plan(words(), {"lake": Kept(), "words_quarantine": table})

    summary = stage(spark, attempt, same)["words_quarantine"]

    found = duckdb.read_parquet(staged_files(landing)).fetchall()
    assert summary["rows"] == 1
    assert found[0][0] == "not a text in its encoding"
    assert found[0][1].startswith('{"n": 2, "w": "\ufffd')
    assert found[0][3] == 2


def staged_files(landing: Path) -> list[str]:
    return [str(path) for path in landing.with_name("landing.quarantine.twophase").rglob("part-*.parquet")]


def test_without_bad_records_an_empty_table_of_the_same_columns_is_staged(spark: SparkSession, landing: Path) -> None:
    put(landing, "a.json", '{"n": 1}\n')
    table = sinks.Files("landing.quarantine")
    table.prepare()

    summary = stage(spark, plan(words(), {"lake": Kept(), "words_quarantine": table}), same)["words_quarantine"]

    assert summary["rows"] == 0
    assert [name for name, _ in summary["schema"]] == COLUMNS
    assert duckdb.read_parquet(staged_files(landing)).columns == COLUMNS


def test_no_files_give_two_empty_frames(spark: SparkSession, landing: Path) -> None:
    with words().sifted(spark, Input()) as read:
        assert (read.good.columns, read.good.count()) == (["n", "w"], 0)
        assert (read.bad.columns, read.bad.count()) == (COLUMNS, 0)


def test_a_restage_of_the_quarantine_alone_needs_no_other_write(spark: SparkSession, landing: Path) -> None:
    put(landing, "a.json", '{"n": 1}\n{"n": "x"}\n')

    assert stage(spark, plan(words(), {"lake": None}), same) == {"words_quarantine": {"rows": 1}}


def test_the_transform_does_not_return_the_quarantine(spark: SparkSession, landing: Path) -> None:
    put(landing, "a.json", '{"n": 1}\n')

    with pytest.raises(ConfigError, match="a dict with unknown words_quarantine; expected lake"):
        stage(spark, plan(words()), lambda words: {"lake": words, "words_quarantine": words})


def test_a_transform_that_clears_the_cache_is_refused(spark: SparkSession, landing: Path) -> None:
    """Without it Spark would decide anew in each query, by the columns of that query."""
    put(landing, "a.json", '{"n": "x", "w": "a"}\n')

    def transform(words: DataFrame, spark: SparkSession) -> DataFrame:
        spark.catalog.clearCache()
        return words.select("w")

    with pytest.raises(ConfigError, match="the transform cleared Spark's cache"):
        stage(spark, plan(words()), transform)


# --- too many ---------------------------------------------------------------------------------------------------------


def three_of_ten(landing: Path) -> None:
    put(landing, "a.json", '{"n": 1}\n' * 4)
    put(landing, "b.json", '{"n": 1}\n{"n": 1}\n{"n": "x"}\n{"n": 1}\n{"n": "y"}\n')
    put(landing, "c.json", '{"n": "z"}\n')


@pytest.mark.parametrize("limit", [3, 0.3, 0.5, 100, None])
def test_as_many_as_the_limit_may_be_bad(spark: SparkSession, landing: Path, limit: float | None) -> None:
    three_of_ten(landing)

    stage(spark, plan(words(bad_record_limit=limit)), same)

    assert len(Kept.rows["lake"]) == 7
    assert len(Kept.rows["words_quarantine"]) == 3


@pytest.mark.parametrize("limit", [0, 2, 0.29])
def test_more_than_the_limit_fail_the_attempt_by_count_limit_and_first_record(
    spark: SparkSession, landing: Path, limit: float
) -> None:
    three_of_ten(landing)

    with pytest.raises(
        BadRecord,
        match=rf"3 of 10 records are bad, more than bad_record_limit {limit}; the first: "
        rf"file {landing}/b\.json, line 3: column 'n': expected int, found \"x\"",
    ):
        stage(spark, plan(words(bad_record_limit=limit)), same)

    assert Kept.rows == {}
    assert nothing_is_kept(spark)


# --- files, not records -----------------------------------------------------------------------------------------------


def test_a_torn_file_fails_the_attempt_whatever_records_are_in_it(spark: SparkSession, landing: Path) -> None:
    lines = '{"n": "x"}\n' + "".join(f'{{"n": {number}}}\n' for number in range(20_000))
    torn = gzip.compress(lines.encode())[:-20]
    (landing / "a.json.gz").write_bytes(torn)

    with pytest.raises(BadRecord, match=r"landing/a\.json\.gz: cannot be read"):
        stage(spark, plan(words()), same)


@pytest.mark.parametrize("header", ["w,n", "n"])
def test_a_wrong_header_fails_the_attempt(spark: SparkSession, landing: Path, header: str) -> None:
    put(landing, "a.csv", f"{header}\nx,1\n")

    with pytest.raises(BadRecord, match=rf"landing/a\.csv, line 1: expected the header n,w, found {header}"):
        stage(spark, plan(words("csv")), same)
