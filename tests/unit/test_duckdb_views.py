"""Data files as a view in DuckDB: the right columns and types, and nothing but these files."""

from __future__ import annotations

import datetime as dt
import gzip
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from twophase.core.errors import AttemptFailed, ConfigError, ManifestMismatch
from twophase.row_queries import duckdb_rows
from twophase.row_queries.duckdb_rows import DuckDBRows, type_of
from twophase.storage.partition_folders import NULL_PARTITION

SCHEMA = [["id", "bigint"], ["word", "string"]]


def write(path: Path, **columns: Any) -> str:
    """Write a Parquet file; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return str(path)


@pytest.mark.parametrize(
    ("spark", "expected"),
    [
        ("tinyint", "TINYINT"),
        ("decimal(38,18)", "DECIMAL(38,18)"),
        ("timestamp", "TIMESTAMP WITH TIME ZONE"),
        ("timestamp_ntz", "TIMESTAMP"),
        ("binary", "BLOB"),
        ("varchar(10)", "VARCHAR"),
        ("string collate UTF8_LCASE", "VARCHAR"),
        ("array<array<int>>", "INTEGER[][]"),
        ("map<string,decimal(10,2)>", "MAP(VARCHAR, DECIMAL(10,2))"),
        ("struct<a b:int,c:map<int,struct<d:date>>>", 'STRUCT("a b" INTEGER, "c" MAP(INTEGER, STRUCT("d" DATE)))'),
        ("struct<>", None),
        ("interval day to second", None),
        ("array<variant>", None),
    ],
)
def test_sparks_types_have_their_like_in_duckdb(spark: str, expected: str | None) -> None:
    assert type_of(spark) == expected


def test_no_files_are_no_rows_with_the_right_columns_and_types() -> None:
    schema = [
        ["id", "int"],
        ["price", "decimal(10,2)"],
        ["tags", "array<string>"],
        ["at", "timestamp"],
        ["v", "variant"],
    ]

    with DuckDBRows([], schema, partition_by=["dt"], constants={"region": "eu"}) as relation:
        rows, types = relation.rows("SELECT * FROM staged"), relation.types()

    assert rows == []
    assert types == {
        "id": "INTEGER",
        "price": "DECIMAL(10,2)",
        "tags": "VARCHAR[]",
        "at": "TIMESTAMP WITH TIME ZONE",
        "v": "VARCHAR",
        "dt": "VARCHAR",
        "region": "VARCHAR",
    }


def test_columns_have_sparks_types_and_order_whatever_the_file_has(tmp_path: Path) -> None:
    seen = pa.array([dt.date(2026, 11, 15)]).cast(pa.timestamp("us"))
    file = write(tmp_path / "a.parquet", word=["x"], seen=seen, id=pa.array([1], pa.int32()))

    with DuckDBRows([file], [["id", "bigint"], ["seen", "timestamp"], ["word", "string"]]) as relation:
        types = relation.types()
        text = relation.value("SELECT CAST(seen AS VARCHAR) FROM staged")

    assert types == {"id": "BIGINT", "seen": "TIMESTAMP WITH TIME ZONE", "word": "VARCHAR"}
    assert text == "2026-11-15 00:00:00+00"


def test_partition_columns_come_from_the_folders_right_above_the_file(tmp_path: Path) -> None:
    """A folder far above may be named like a column, and means nothing."""
    top = tmp_path / "word=no" / "id=7"
    files = [
        write(top / "dt=2026-11-15" / "shop=a%2Fb%3D+%25" / "1.parquet", id=[1], word=["x"]),
        write(top / f"dt={NULL_PARTITION}" / "shop=NULL" / "2.parquet", id=[2], word=["y"]),
    ]
    schema = [["dt", "date"], ["id", "bigint"], ["Shop", "string"], ["word", "string"]]

    with DuckDBRows(files, schema, partition_by=["dt", "shop"]) as relation:
        rows = relation.rows("SELECT * FROM staged ORDER BY id")

    assert rows == [
        {"dt": dt.date(2026, 11, 15), "id": 1, "Shop": "a/b=+%", "word": "x"},
        {"dt": None, "id": 2, "Shop": "NULL", "word": "y"},
    ]


def test_partition_values_have_the_columns_type(tmp_path: Path) -> None:
    folders = "n=-7/price=1.50/at=2026-11-15 10%3A00%3A00.5/flag=true/raw=ab"
    schema = [["n", "tinyint"], ["price", "decimal(5,2)"], ["at", "timestamp"], ["flag", "boolean"], ["raw", "binary"]]
    file = write(tmp_path / folders / "1.parquet", id=[1])

    with DuckDBRows([file], [["id", "bigint"], *schema], partition_by=[name for name, _ in schema]) as relation:
        rows = relation.sample("SELECT * FROM staged")

    assert rows == [{"id": 1, "n": -7, "price": "1.50", "at": "2026-11-15 10:00:00.5+00", "flag": True, "raw": "6162"}]


def test_a_file_outside_its_partition_folders_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = write(tmp_path / "1.parquet", id=[1])

    with (
        DuckDBRows([file], SCHEMA, partition_by=["dt"]) as relation,
        pytest.raises(ManifestMismatch, match=r"1\.parquet"),
    ):
        relation.rows("SELECT * FROM staged")


def test_constants_are_columns_of_every_row(tmp_path: Path) -> None:
    file = write(tmp_path / "dt=2000-01-01" / "1.parquet", id=[1, 2])
    constants = {"dt": "2026-11-15", "day": dt.date(2026, 11, 15), "hour": 7, "name": "it's"}

    with DuckDBRows([file], [["id", "bigint"], ["dt", "date"]], constants=constants) as relation:
        rows = relation.rows("SELECT DISTINCT dt, day, hour, name FROM staged")

    day = dt.date(2026, 11, 15)
    assert rows == [{"dt": day, "day": day, "hour": 7, "name": "it's"}]


def test_a_path_with_signs_of_a_pattern_is_that_file_only(tmp_path: Path) -> None:
    file = write(tmp_path / "o'dd [ab]*?{x,y}" / "a*.parquet", id=[1])
    write(tmp_path / "o'dd [ab]*?{x,y}" / "ab.parquet", id=[2])

    with DuckDBRows([file], [["id", "bigint"]]) as relation:
        assert relation.rows("SELECT id FROM staged") == [{"id": 1}]


def test_what_sparks_readers_skip_is_skipped(tmp_path: Path) -> None:
    file = write(tmp_path / "_hidden" / "1.parquet", id=[1])
    for name in ("_SUCCESS", ".1.parquet.crc"):
        (tmp_path / name).touch()

    with DuckDBRows([file, f"{tmp_path}/_SUCCESS", f"{tmp_path}/.1.parquet.crc"], [["id", "bigint"]]) as relation:
        assert relation.rows("SELECT id FROM staged") == [{"id": 1}]


def test_files_of_several_writes_may_lack_a_column(tmp_path: Path) -> None:
    files = [write(tmp_path / "1.parquet", id=[1]), write(tmp_path / "2.parquet", id=[2], word=["x"])]

    with DuckDBRows(files, SCHEMA, mixed=True) as relation:
        rows = relation.rows("SELECT * FROM staged ORDER BY id")

    assert rows == [{"id": 1, "word": None}, {"id": 2, "word": "x"}]


def test_a_file_that_is_no_parquet_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "1.parquet").write_text("not Parquet, and long enough to look for a footer")

    with DuckDBRows([f"{tmp_path}/1.parquet"], SCHEMA) as relation, pytest.raises(AttemptFailed, match=r"1\.parquet"):
        relation.rows("SELECT * FROM staged")


def test_a_column_that_the_files_lack_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = write(tmp_path / "1.parquet", id=[1])

    with DuckDBRows([file], SCHEMA) as relation, pytest.raises(ManifestMismatch, match="word"):
        relation.rows("SELECT * FROM staged")


def test_a_file_that_is_gone_is_an_error_that_names_it(tmp_path: Path) -> None:
    with (
        DuckDBRows([f"{tmp_path}/gone"], SCHEMA) as relation,
        pytest.raises(ManifestMismatch, match="/gone is not there"),
    ):
        relation.rows("SELECT * FROM staged")


# --- text formats ----------------------------------------------------------------------------------------------------


def test_csv_is_read_as_spark_writes_it(tmp_path: Path) -> None:
    lines = ["id,word", r'1,"a,b \"q\" \\ x', 'y"', "2,back\\slash", "3,end\\", '4,""', "5,", "6, x ", "7,null"]
    (tmp_path / "1.csv").write_text("\n".join(lines) + "\n")

    with DuckDBRows([f"{tmp_path}/1.csv"], SCHEMA, format="csv") as relation:
        rows = relation.rows("SELECT * FROM staged ORDER BY id")

    words = ['a,b "q" \\ x\ny', "back\\slash", "end\\", "", None, " x ", "null"]
    assert [row["word"] for row in rows] == words


def test_csv_follows_the_writers_options(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "1.csv.gz", "wt") as file:
        file.write("1|'a|b'\n2|-\n")
    options = {"Sep": "|", "quote": "'", "header": "false", "nullValue": "-", "compression": "gzip"}

    with DuckDBRows([f"{tmp_path}/1.csv.gz"], SCHEMA, format="csv", options=options) as relation:
        rows = relation.rows("SELECT * FROM staged ORDER BY id")

    assert rows == [{"id": 1, "word": "a|b"}, {"id": 2, "word": None}]


@pytest.mark.parametrize("option", ["dateFormat", "lineSep", "timestampFormat", "encoding"])
@pytest.mark.parametrize("format", ["csv", "json"])
def test_text_that_would_be_read_wrongly_is_refused(format: str, option: str) -> None:  # noqa: A002 - as in DuckDBRows
    with pytest.raises(ConfigError, match=option.lower()):
        DuckDBRows([], SCHEMA, format=format, options={option: "yyyy"})


def test_json_is_read_as_spark_writes_it(tmp_path: Path) -> None:
    lines = [
        '{"id":1,"word":"x","n":"NaN","raw":"AP9B","at":"2026-11-15T10:00:00.123Z","m":{"1":"a"},"s":{"y":"z"}}',
        '{"id":2}',
    ]
    (tmp_path / "1.json").write_text("\n".join(lines) + "\n")
    (tmp_path / "2.json").write_text("")
    schema = [
        *SCHEMA,
        ["n", "double"],
        ["raw", "binary"],
        ["at", "timestamp"],
        ["m", "map<int,string>"],
        ["s", "struct<x:int,y:string>"],
    ]

    with DuckDBRows([f"{tmp_path}/1.json", f"{tmp_path}/2.json"], schema, format="json") as relation:
        rows = relation.sample("SELECT * FROM staged ORDER BY id")

    assert rows == [
        {
            "id": 1,
            "word": "x",
            "n": "nan",
            "raw": "00ff41",
            "at": "2026-11-15 10:00:00.123+00",
            "m": "{1=a}",
            "s": "{'x': NULL, 'y': z}",
        },
        {"id": 2, "word": None, "n": None, "raw": None, "at": None, "m": None, "s": None},
    ]


def test_files_whose_columns_nobody_knows_are_refused() -> None:
    with pytest.raises(ConfigError, match="not known"):
        DuckDBRows(["/x/1.csv"], [], format="csv")


# --- nothing but these files -----------------------------------------------------------------------------------------


@pytest.fixture
def fenced(tmp_path: Path) -> DuckDBRows:
    """Return a relation over one file, beside another that is none of its business."""
    write(tmp_path / "other.parquet", id=[2])
    return DuckDBRows([write(tmp_path / "1.parquet", id=[1])], [["id", "bigint"]])


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM '{folder}/other.parquet'",
        "SELECT * FROM read_csv('/etc/hosts')",
        "SELECT * FROM read_text('{folder}/other.parquet')",
        "SELECT * FROM glob('/etc/*')",
        "SELECT * FROM read_parquet('{folder}/1.parquet/../other.parquet')",
    ],
)
def test_a_query_can_read_no_other_file(fenced: DuckDBRows, tmp_path: Path, query: str) -> None:
    with fenced, pytest.raises(ConfigError, match="Permission"):
        fenced.rows(f"SELECT * FROM {fenced.query(query.format(folder=tmp_path))}")


@pytest.mark.parametrize(
    "query",
    [
        "COPY (SELECT 9 AS id) TO '{file}' (FORMAT parquet, USE_TMP_FILE false)",
        "SELECT 1; COPY (SELECT 9 AS id) TO '{file}' (FORMAT parquet, USE_TMP_FILE false)",
        "WITH w AS (COPY (SELECT 9 AS id) TO '{file}' (FORMAT parquet, USE_TMP_FILE false)) SELECT * FROM w",
        "SELECT * FROM (WITH w AS (COPY (SELECT 9 AS id) TO '{file}' (FORMAT parquet, USE_TMP_FILE false)) FROM w)",
        "SELECT 1) ; COPY (SELECT 9 AS id) TO '{file}' (FORMAT parquet, USE_TMP_FILE false); SELECT (1",
        "CREATE TABLE t AS SELECT 1",
        "SET enable_external_access = true",
        "ATTACH '{file}.db'",
        "INSTALL httpfs",
        "PRAGMA version",
        "",
        "-- nothing",
    ],
)
def test_a_query_can_change_nothing(fenced: DuckDBRows, tmp_path: Path, query: str) -> None:
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    with fenced, pytest.raises(ConfigError):
        fenced.rows(f"SELECT * FROM {fenced.query(query.format(file=f'{tmp_path}/1.parquet'))}")

    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_even_a_statement_of_ours_can_write_to_no_other_file(fenced: DuckDBRows, tmp_path: Path) -> None:
    with fenced, pytest.raises(ConfigError, match="Permission"):
        fenced.rows(f"COPY (SELECT 1) TO '{tmp_path}/new.csv'")

    assert not (tmp_path / "new.csv").exists()


@pytest.mark.parametrize(
    "query",
    [
        "SELECT 5 AS n;",
        "SELECT 5 AS n -- why; why",
        'SELECT 5 AS "é;"; -- é;',
        "WITH w AS (SELECT 5 AS n) FROM w ; ;",
        "VALUES (5)",
        "SELECT length('; --;') AS n",
    ],
)
def test_a_query_may_end_in_a_semicolon_or_a_comment(fenced: DuckDBRows, query: str) -> None:
    with fenced:
        assert fenced.value(f"SELECT * FROM {fenced.query(query)}") == 5


def test_nothing_is_left_on_disk(fenced: DuckDBRows) -> None:
    with fenced:
        spill = Path(fenced.value("SELECT current_setting('temp_directory')"))

    assert not spill.exists()


def test_a_sample_cuts_long_values_before_they_reach_python(
    fenced: DuckDBRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duckdb_rows, "sample", lambda rows, *_: list(rows))

    with fenced:
        long = "repeat('x', 10_000_000)"
        row = fenced.sample(f"SELECT {long} AS t, encode({long}) AS b, [range(1000)] AS l, id FROM staged")[0]

    assert [len(row[name]) for name in "tbl"] == [201, 400, 201]
    assert row["id"] == 1


def test_no_setting_can_be_changed(fenced: DuckDBRows) -> None:
    with fenced, pytest.raises(ConfigError, match="locked"):
        fenced.rows("SET threads = 1")


def test_times_are_in_utc_wherever_the_machine_is() -> None:
    ask = "SELECT CAST(TIMESTAMPTZ '2026-11-15 00:00:00' AS VARCHAR) FROM range(1)"
    code = f"from twophase.row_queries.duckdb_rows import DuckDBRows as R; print(R([], [['id', 'int']]).value({ask!r}))"
    environment = {**os.environ, "TZ": "Asia/Tokyo", "PYTHONPATH": os.pathsep.join(sys.path)}

    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "2026-11-15 00:00:00+00"
