"""Audits vote on staged rows: what they are declared with, what they find, and how much of it the record keeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from twophase import audits
from twophase.audits import Audit, AuditContext, Verdict
from twophase.core.errors import ConfigError
from twophase.row_queries.duckdb_rows import DuckDBRows

BEGAN = datetime(2026, 11, 16, 3, tzinfo=UTC)
DAY = "2026-11-15T00:00:00+00:00/2026-11-16T00:00:00+00:00"
KINDS = {"bigint": pa.int64(), "string": pa.string(), "date": pa.date32(), "timestamp": pa.timestamp("us", "UTC")}


def context(**changes: Any) -> AuditContext:
    """Return what an audit knows, unless said otherwise."""
    given: dict[str, Any] = {
        "pipeline": "words",
        "checkpoint_id": 17,
        "revision": 1,
        "slot": None,
        "sink": "lake",
        "began": BEGAN,
        "previous_rows": None,
        "rows": 3,
    }
    return AuditContext(**{**given, **changes})


@pytest.fixture
def staged(tmp_path: Path) -> Iterator[Callable[..., DuckDBRows]]:
    """Return a function that stages columns, given as `name=(type, values)`."""
    made: list[DuckDBRows] = []

    def stage(**columns: tuple[str, list[Any]]) -> DuckDBRows:
        path = tmp_path / f"part-{len(made)}.parquet"
        pq.write_table(pa.table({n: pa.array(v, KINDS.get(kind)) for n, (kind, v) in columns.items()}), path)
        made.append(DuckDBRows([str(path)], [[name, kind] for name, (kind, _) in columns.items()]))
        return made[-1]

    yield stage
    for relation in made:
        relation.close()


@pytest.fixture
def words(staged: Callable[..., DuckDBRows]) -> DuckDBRows:
    """Return three staged rows with a NULL and a doubled word."""
    return staged(id=("bigint", [1, 2, None]), word=("string", ["a", "b", "a"]))


class Unread(DuckDBRows):
    """A relation that must not be asked."""

    @property
    def connection(self) -> Any:
        pytest.fail("the data was read")


# --- declarations ----------------------------------------------------------------------------------------------------

ALL = [
    audits.row_count(minimum=1, maximum=9, ratio_to_previous=(0.5, 2)),
    audits.not_null("word", "id"),
    audits.unique("id", "word"),
    audits.values_in("word", ["a", 1, 2.5, True, date(2026, 11, 15), Decimal("1.50")]),
    audits.fresh("at", within="2h"),
    audits.sql("SELECT * FROM staged", name="nothing", on="lake", severity="warn"),
    audits.expression("checks:function"),
]


@pytest.mark.parametrize("audit", ALL, ids=lambda audit: audit.name)
def test_the_record_keeps_enough_to_build_an_equal_audit(audit: Audit) -> None:
    kept = json.loads(json.dumps(audit.declaration()))

    again = Audit.load(kept)

    assert type(again) is type(audit)
    assert again.declaration() == kept
    assert (again.name, again.on, again.severity) == (audit.name, audit.on, audit.severity)


@pytest.mark.parametrize(
    ("audit", "name"),
    [
        (audits.row_count(minimum=1), "row_count"),
        (audits.not_null("word"), "not_null(word)"),
        (audits.unique("a", "b"), "unique(a, b)"),
        (audits.values_in("a", [1]), "values_in(a)"),
        (audits.fresh("at", within="2h"), "fresh(at)"),
        (audits.sql("SELECT *\n  FROM staged"), "sql(SELECT * FROM staged)"),
        (audits.sql("SELECT 1", name="no negative price"), "no negative price"),
        (audits.expression("checks:no_gaps"), "expression(checks:no_gaps)"),
    ],
)
def test_an_audit_is_called_after_what_it_checks(audit: Audit, name: str) -> None:
    assert audit.name == name


def test_long_names_are_short_and_still_differ() -> None:
    one, other = (audits.sql(f"SELECT {'x' * 500} {n}") for n in (1, 2))

    assert one.name != other.name
    assert len(one.name) < 100


#: What the type checker would refuse.
WRONG: list[Any] = [1.5, 0.5, ["a", "b"]]


@pytest.mark.parametrize(
    ("declare", "expected"),
    [
        (audits.row_count, "audit row_count: expected one of minimum, maximum"),
        (lambda: audits.row_count(minimum=-1), "minimum -1: expected a number of rows"),
        (lambda: audits.row_count(minimum=WRONG[0]), "minimum 1.5: expected a number of rows"),
        (lambda: audits.row_count(maximum=True), "maximum True: expected a number of rows"),
        (lambda: audits.row_count(minimum=3, maximum=2), "minimum 3 is above maximum 2"),
        (lambda: audits.row_count(ratio_to_previous=WRONG[1]), "ratio_to_previous 0.5: expected a pair"),
        (lambda: audits.row_count(ratio_to_previous=(2, 0.5)), "the lower one first"),
        (lambda: audits.row_count(ratio_to_previous=(0, float("nan"))), "expected a pair"),
        (audits.not_null, "audit not_null: expected names of columns, found none"),
        (lambda: audits.not_null(WRONG[2]), "expected names of columns"),
        (lambda: audits.unique("a", "A"), "audit unique: expected each column once, found a, A"),
        (lambda: audits.values_in("a", "abc"), "values of 'a': expected a list, found 'abc'"),
        (lambda: audits.values_in("a", []), "expected some, found none"),
        (lambda: audits.values_in("a", ["x", None]), "null always passes"),
        (lambda: audits.fresh("at", within="soon"), "within of 'at' 'soon': expected a length of time"),
        (lambda: audits.sql(" "), "expected a query over staged"),
        (lambda: audits.sql("SELECT 1", name=""), "name '': expected a text"),
        (lambda: audits.expression("checks.function"), "expected `module:function`"),
        (lambda: audits.not_null("a", severity="error"), "severity 'error': expected fail or warn"),
        (lambda: audits.not_null("a", on=""), "on='': expected the name of a write"),
    ],
)
def test_a_wrong_declaration_is_an_error_that_says_what_was_expected(declare: Callable[[], Any], expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        declare()

    assert expected in str(refused.value)


# --- row_count -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "before", "passed", "text"),
    [
        ({"minimum": 3}, None, True, "row_count: expected at least 3, found 3 rows"),
        ({"minimum": 4}, None, False, "row_count: expected at least 4, found 3 rows"),
        ({"maximum": 2}, None, False, "row_count: expected at most 2, found 3 rows"),
        ({"minimum": 1, "maximum": 3}, None, True, "row_count: expected at least 1 and at most 3, found 3 rows"),
        (
            {"ratio_to_previous": (0.5, 2.0)},
            6,
            True,
            "row_count: expected 0.5 to 2 times as many as before, found 3 rows; that is 0.5 times the 6 before",
        ),
        (
            {"ratio_to_previous": (0.5, 2.0)},
            7,
            False,
            "row_count: expected 0.5 to 2 times as many as before, found 3 rows; that is 0.429 times the 7 before",
        ),
        (
            {"ratio_to_previous": (0.5, 2.0)},
            None,
            True,
            "row_count: expected 0.5 to 2 times as many as before, found 3 rows; there is nothing to compare with",
        ),
        (
            {"ratio_to_previous": (0.5, 2.0)},
            0,
            True,
            "row_count: expected 0.5 to 2 times as many as before, found 3 rows; before there were 0",
        ),
        ({"minimum": 4, "ratio_to_previous": (0, 9)}, 3, False, None),
    ],
)
def test_rows_are_counted_without_reading_them(
    bounds: dict[str, Any], before: int | None, passed: bool, text: str | None
) -> None:
    verdict = audits.row_count(**bounds).check(Unread([], [["id", "int"]]), context(rows=3, previous_rows=before))

    assert verdict.passed is passed
    assert text in {None, verdict.text}


# --- not_null, unique, values_in -------------------------------------------------------------------------------------


def test_a_null_is_found_and_shown_with_its_column_first(words: DuckDBRows) -> None:
    verdict = audits.not_null("word", "ID").check(words, context())

    assert verdict == Verdict(
        passed=False,
        text="not_null(word, ID): expected no null, found that 'ID' is null in 1 row",
        sample=[{"id": None, "word": "a"}],
    )
    assert audits.not_null("word").check(words, context()) == Verdict(
        passed=True, text="not_null(word): expected no null, found none"
    )


def test_the_column_that_is_null_is_shown_however_wide_the_table(staged: Callable[..., DuckDBRows]) -> None:
    wide = staged(**{f"c{n}": ("string", ["x" * 50]) for n in range(500)}, last=("string", [None]))

    verdict = audits.not_null("last").check(wide, context())

    assert verdict.sample[0]["last"] is None
    assert "more columns" in verdict.sample[0]["…"]


def test_a_doubled_combination_is_found_and_shown_with_how_often(staged: Callable[..., DuckDBRows]) -> None:
    rows = staged(a=("bigint", [1, 1, 1, 2, 2, 3]), b=("string", ["x", "x", "x", "y", "y", None]))

    verdict = audits.unique("a", "b").check(rows, context())

    assert verdict == Verdict(
        passed=False,
        text="unique(a, b): expected nothing twice, found 2 doubled: 3 rows too many of 6",
        sample=[{"a": 1, "b": "x", "rows": 3}, {"a": 2, "b": "y", "rows": 2}],
    )


def test_a_combination_may_share_its_parts(staged: Callable[..., DuckDBRows]) -> None:
    rows = staged(a=("bigint", [1, 1, 2]), b=("string", ["x", "y", "x"]))

    assert audits.unique("a", "b").check(rows, context()).passed
    assert not audits.unique("a").check(rows, context()).passed


def test_two_nulls_are_not_unique(staged: Callable[..., DuckDBRows]) -> None:
    assert audits.unique("a").check(staged(a=("bigint", [1, None])), context()).passed
    assert not audits.unique("a").check(staged(a=("bigint", [1, None, None])), context()).passed


def test_another_value_is_found_and_shown_with_how_often(words: DuckDBRows) -> None:
    verdict = audits.values_in("word", ["b", "it's"]).check(words, context())

    assert verdict == Verdict(
        passed=False,
        text="values_in(word): expected one of b, it's, found another in 2 rows",
        sample=[{"word": "a", "rows": 2}],
    )


def test_null_is_no_other_value(words: DuckDBRows) -> None:
    assert audits.values_in("id", [1, 2]).check(words, context()).passed


def test_values_are_compared_as_the_columns_type(staged: Callable[..., DuckDBRows]) -> None:
    days = staged(day=("date", [date(2026, 11, 15)]))

    assert audits.values_in("day", [date(2026, 11, 15)]).check(days, context()).passed
    assert not audits.values_in("day", ["2026-11-16"]).check(days, context()).passed
    strange = audits.values_in("day", ["monday"]).check(days, context())
    assert not strange.passed
    assert "monday" in strange.text


# --- fresh -----------------------------------------------------------------------------------------------------------


def newest(*hours: int) -> tuple[str, list[datetime]]:
    return "timestamp", [datetime(2026, 11, 15, hour, tzinfo=UTC) for hour in hours]


def test_the_newest_value_is_measured_from_the_end_of_the_slot(staged: Callable[..., DuckDBRows]) -> None:
    rows, here = staged(seen=newest(3, 22)), context(slot=DAY)

    verdict = audits.fresh("seen", within="2h").check(rows, here)

    assert verdict == Verdict(
        passed=True,
        text="fresh(seen): expected 2026-11-15T22:00:00+00:00 or later, 2h before the slot's end,"
        " found 2026-11-15 22:00:00+00",
    )
    assert not audits.fresh("seen", within="119m").check(rows, here).passed


@pytest.mark.parametrize("slot", [None, "2026-11-15", "eu"])
def test_without_an_interval_the_newest_value_is_measured_from_the_begin(
    staged: Callable[..., DuckDBRows], slot: str | None
) -> None:
    rows, here = staged(seen=newest(22)), context(slot=slot)

    assert audits.fresh("seen", within="5h").check(rows, here).passed
    late = audits.fresh("seen", within="4h").check(rows, here)
    assert not late.passed
    assert "2026-11-15T23:00:00+00:00 or later, 4h before the checkpoint began" in late.text


def test_a_date_is_its_first_moment(staged: Callable[..., DuckDBRows]) -> None:
    rows, here = staged(day=("date", [date(2026, 11, 15)])), context(slot=DAY)

    assert audits.fresh("day", within="1d").check(rows, here).passed
    assert not audits.fresh("day", within="23h").check(rows, here).passed


@pytest.mark.parametrize("rows", [[], [None]])
def test_no_value_is_not_fresh(staged: Callable[..., DuckDBRows], rows: list[Any]) -> None:
    verdict = audits.fresh("seen", within="2h").check(staged(seen=("timestamp", rows)), context())

    assert not verdict.passed
    assert verdict.text.endswith("found no value")


def test_what_is_no_time_cannot_be_fresh(words: DuckDBRows) -> None:
    verdict = audits.fresh("word", within="2h").check(words, context())

    assert verdict == Verdict(
        passed=False, text="fresh(word): column 'word' is VARCHAR, expected a date or a timestamp"
    )


# --- sql -------------------------------------------------------------------------------------------------------------


def test_a_query_that_finds_rows_fails_and_shows_them(words: DuckDBRows) -> None:
    verdict = audits.sql("SELECT word, count(*) AS n FROM staged GROUP BY word HAVING n > 1; -- doubled").check(
        words, context()
    )

    assert not verdict.passed
    assert verdict.text.endswith("expected no rows, found 1")
    assert verdict.sample == [{"word": "a", "n": 2}]


def test_a_query_that_finds_nothing_passes(words: DuckDBRows) -> None:
    verdict = audits.sql("SELECT * FROM staged WHERE word = 'z'", name="no z").check(words, context())

    assert verdict == Verdict(passed=True, text="no z: expected no rows, found none")


def test_a_query_that_finds_many_rows_counts_them_and_shows_five(staged: Callable[..., DuckDBRows]) -> None:
    verdict = audits.sql("FROM staged").check(staged(id=("bigint", list(range(1000)))), context())

    assert verdict.text == "sql(FROM staged): expected no rows, found 1000"
    assert len(verdict.sample) == 5


# --- what cannot be checked ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "audit",
    [
        audits.not_null("wrod"),
        audits.unique("id", "wrod"),
        audits.values_in("wrod", [1]),
        audits.fresh("wrod", within="2h"),
    ],
    ids=lambda audit: audit.name,
)
def test_a_column_that_is_not_there_is_a_no_that_names_those_that_are(words: DuckDBRows, audit: Audit) -> None:
    verdict = audit.check(words, context())

    assert verdict == Verdict(passed=False, text=f"{audit.name}: no column 'wrod'; there is id, word")


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("SELECT wrod FROM staged", "wrod"),
        ("SELECT * FROM stagd", "stagd"),
        ("SELEC 1", "syntax error"),
        ("DELETE FROM staged", "expected one SELECT, found DELETE"),
        ("SELECT * FROM read_text('/etc/passwd')", "Permission Error"),
    ],
)
def test_a_query_that_cannot_run_is_a_no_that_says_why_in_one_line(words: DuckDBRows, query: str, said: str) -> None:
    verdict = audits.sql(query).check(words, context())

    assert not verdict.passed
    assert said in verdict.text
    assert verdict.text.endswith("the table is staged, with the columns id, word")
    assert "\n" not in verdict.text


def test_a_value_that_cannot_be_read_is_a_no(words: DuckDBRows) -> None:
    verdict = audits.sql("SELECT CAST(word AS BIGINT) FROM staged").check(words, context())

    assert not verdict.passed
    assert "Conversion Error" in verdict.text


def test_files_that_are_gone_are_a_no(tmp_path: Path) -> None:
    verdict = audits.not_null("id").check(DuckDBRows([f"{tmp_path}/gone"], [["id", "int"]]), context())

    assert verdict == Verdict(passed=False, text=f"not_null(id): file {tmp_path}/gone is not there")


# --- expression ------------------------------------------------------------------------------------------------------


@pytest.fixture
def answer(words: DuckDBRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Verdict]:
    """Return a function that lets a function in spark_jobs/ answer with an expression."""
    made = iter(range(100))
    monkeypatch.setenv("TWOPHASE_SPARK_JOBS", str(tmp_path / "jobs"))
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    (tmp_path / "jobs").mkdir()

    def ask(body: str) -> Verdict:
        module = f"{tmp_path.name}_{next(made)}".replace("-", "_")
        (tmp_path / "jobs" / f"{module}.py").write_text(f"def look(staged, context):\n    {body}\n")
        verdict = audits.expression(f"{module}:look").check(words, context())
        return Verdict(verdict.passed, verdict.text.partition("): ")[2], verdict.sample)

    return ask


@pytest.mark.parametrize(
    "body", ["return None", "return True", "return []", "return staged.filter('id > 5').fetchall()"]
)
def test_a_function_that_finds_nothing_passes(answer: Callable[[str], Verdict], body: str) -> None:
    assert answer(body) == Verdict(passed=True, text="found nothing wrong")


@pytest.mark.parametrize(
    ("body", "text", "sample"),
    [
        ("return False", "returned False", []),
        ("return f'{context.sink} has {len(staged)} rows'", "lake has 3 rows", []),
        ("return [{'id': 1}, {'id': 2}]", "expected no rows, found 2", [{"id": 1}, {"id": 2}]),
        ("return staged.filter('id = 2').fetchall()", "expected no rows, found 1", [{"0": 2, "1": "b"}]),
        ("return 7", "returned int, expected True, None, False, a reason or a list of rows", []),
        ("raise ValueError('two\\nlines')", "raised ValueError: two lines", []),
        ("return staged.filter('wrod = 2').fetchall()", None, []),
    ],
)
def test_a_function_that_finds_something_says_what(
    answer: Callable[[str], Verdict], body: str, text: str | None, sample: list[Any]
) -> None:
    verdict = answer(body)

    assert not verdict.passed
    assert text in {None, verdict.text}
    assert verdict.sample == sample


def test_a_function_that_is_not_there_is_a_no(words: DuckDBRows) -> None:
    verdict = audits.expression("no_such_module:look").check(words, context())

    assert not verdict.passed
    assert "no module 'no_such_module'" in verdict.text


# --- what the record keeps -------------------------------------------------------------------------------------------

NASTY: dict[str, Any] = {
    "long": "x" * 100_000,
    "emoji": "😀" * 1000,
    "nul": "a\0b",
    "half": "\ud800",
    "bytes": b"\xff" * 1000,
    "nan": float("nan"),
    "huge": 10**5000,
    "list": [[1] * 1000] * 1000,
    "map": {"k" * 1000: "v" * 1000},
    "time": datetime(2026, 11, 15, tzinfo=UTC),
    "decimal": Decimal("1.50"),
    "object": object(),
    "n" * 10_000: "x",
}


@pytest.mark.parametrize(
    "rows",
    [
        [NASTY] * 10,
        [{"emoji": "😀" * 1000}] * 10,
        [{f"{n}😀" * 50: "😀" * 1000 for n in range(1000)}] * 10,
        [dict.fromkeys(range(10_000), "x" * 1000)] * 10,
        [tuple(NASTY.values())] * 10,
        ["😀" * 1000] * 10,
    ],
    ids=["nasty", "emoji", "names", "wide", "tuples", "texts"],
)
@pytest.mark.parametrize("text", ["short", "😀" * 5000, "\0\ud800\n" * 5000])
def test_a_verdict_is_json_below_8_kb_whatever_the_data(rows: list[Any], text: str) -> None:
    summary = Verdict(passed=False, text=text, sample=rows).summary()

    kept = json.dumps(summary, allow_nan=False)
    assert len(kept) < 8000
    assert len(summary["sample"]) == 5
    assert all(summary["sample"])
    assert "\\u0000" not in kept
    kept.encode("utf-8")
    json.loads(kept)["text"].encode("utf-8")
    assert all(len(str(value)) <= 200 for row in summary["sample"] for value in row.values())


@pytest.mark.parametrize("value", ["😀" * 1000, "x" * 1000, b"x" * 1000, ["😀" * 1000]])
def test_of_a_long_value_the_beginning_is_kept(value: Any) -> None:
    kept = Verdict(passed=False, text="x", sample=[{"long": value}]).sample[0]["long"]

    assert 50 < len(kept) <= 200
    assert kept.endswith("…")


def test_small_values_are_kept_as_they_are() -> None:
    row = {
        "i": 7,
        "f": 1.5,
        "t": "é",
        "b": True,
        "n": None,
        "raw": b"\x00\xff",
        "d": date(2026, 11, 15),
        "l": [1, None],
    }

    verdict = Verdict(passed=False, text="x", sample=[row])

    assert verdict.sample == [{**row, "raw": "00ff", "d": "2026-11-15", "l": "[1, null]"}]
    assert Verdict(passed=False, text="x", sample=verdict.sample) == verdict
