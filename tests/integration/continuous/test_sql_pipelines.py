"""Pipelines whose transform is a continuous query: checkpoints on a real Spark, state in the record."""

from __future__ import annotations

import json
import re
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import twophase
from support.pipelines.commands import listed, one_line_error
from support.pipelines.commands import twophase as twophase_command
from support.pipelines.continuous_runs import JoinedState, frame
from twophase import Pipeline, State, sinks, sources, sql
from twophase.cli.explain import lines
from twophase.core.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

TEXT = "select word, sum(frequency) as frequency from words group by word"
SCHEMA = "word string, frequency bigint"
HOURS = "page string, window_start timestamp, window_end timestamp, clicks bigint"


def at(minutes: int) -> datetime:
    return datetime(2026, 1, 1) + timedelta(minutes=minutes)  # noqa: DTZ001 - as Spark gives it back


def declared(text: str = TEXT, **more: Any) -> Pipeline:
    return Pipeline(
        "counted",
        reads={"words": sources.Files("landing", format="json", schema=SCHEMA)},
        transform=sql(text, **more),
        writes={"lake": sinks.Files("lake/counted", mode=more.get("mode", "append"))},
    )


def land(home: Path, number: int, rows: list[tuple[str, int]]) -> None:
    folder = home / "data" / "landing"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"word": word, "frequency": frequency}) for word, frequency in rows]
    (folder / f"{number}.json").write_text("\n".join(lines))


def test_a_query_goes_on_from_checkpoint_to_checkpoint(spark: SparkSession, home: Path) -> None:
    """The changes of all checkpoints make the table of the text over all input; the state has the parts."""
    pipeline = declared(mode="retract")
    for number, rows in enumerate(([("a", 1), ("b", 2)], [("a", 5)], [("c", 1), ("b", -2)]), 1):
        land(home, number, rows)
        twophase.run(pipeline, spark=spark)
    table: Counter[tuple[str, int]] = Counter()
    for row in twophase.read_committed(spark, "counted", "lake").collect():
        table[row.word, row.frequency] += 1 if row["_change"] in {"+I", "+U"} else -1
    kept = {tuple(row) for row in twophase.read_state(spark, "counted").collect()}
    early = {tuple(row) for row in twophase.read_state(spark, "counted", as_of=1).collect()}

    assert +table == {("a", 6): 1, ("b", 0): 1, ("c", 1): 1}
    assert kept == {("a", 2, 6, 2), ("b", 2, 0, 2), ("c", 1, 1, 1)}
    assert early == {("a", 1, 1, 1), ("b", 1, 2, 1)}


def test_another_text_over_old_state_is_refused_with_both(spark: SparkSession, home: Path) -> None:
    """Its parts would mean something else; white space is no change."""
    land(home, 1, [("a", 1)])
    twophase.run(declared(mode="retract"), spark=spark)
    land(home, 2, [("a", 1)])
    twophase.run(declared(TEXT.replace(" from", "\n  from"), mode="retract"), spark=spark)

    with pytest.raises(ConfigError, match=r"text was 'select word, sum\(.* and is now 'select word, max\("):
        twophase.run(declared(TEXT.replace("sum", "max"), mode="retract"), spark=spark)


def test_a_query_without_an_aggregate_needs_no_state(spark: SparkSession, home: Path) -> None:
    pipeline = declared("select upper(word) word, frequency from words where frequency > 1")
    land(home, 1, [("a", 1), ("b", 2)])
    twophase.run(pipeline, spark=spark)

    assert pipeline.states == {}
    rows = twophase.read_committed(spark, "counted", "lake").select("word", "frequency").collect()
    assert [tuple(row) for row in rows] == [("B", 2)]


def test_a_query_that_cannot_go_on_fails_before_anything_is_staged(spark: SparkSession, home: Path) -> None:
    land(home, 1, [("a", 1)])

    with pytest.raises(ConfigError, match="ORDER BY: a table has no order"):
        twophase.run(declared("select word from words order by word"), spark=spark)


PAGES = Path(__file__).parents[3] / "docs" / "how-to"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)


def test_explain_says_what_the_page_shows(spark: SparkSession) -> None:
    names: dict[str, Any] = {}
    exec(blocks("continuous-sql.md", "python")[0], names)
    query = names["word_count"].transform
    told = query.compiled(spark, {"words": spark.createDataFrame([], SCHEMA)}).explanation()

    assert lines({"query": str(query), **told}) == blocks("continuous-sql.md", "console")[0].splitlines()[1:]


def test_the_transform_of_the_page_on_windows_closes_the_windows_of_its_text(spark: SparkSession) -> None:
    """Two clicks in an hour that a later click closes."""
    declared_there: dict[str, Any] = {}
    by_hand: dict[str, Any] = {}
    for code, names in zip(blocks("windows.md", "python"), (declared_there, by_hand), strict=True):
        exec(code, names)
    state = JoinedState(spark, State(["page", "window_start", "window_end"], HOURS))
    query = declared_there["clicks_per_hour"].transform
    found: list[Any] = []
    text_state = None
    for rows in ([("a", at(9)), ("a", at(50))], [("b", at(75))]):
        clicks = frame(spark, rows, "page string, at timestamp")
        output, new = by_hand["transform"](clicks, state)
        found.append([(row.window_start, row.page, row.clicks) for row in output.collect()])
        state.keep(new)
        compiled = query.compiled(spark, {"clicks": clicks})
        text_state = text_state or JoinedState(spark, compiled.state)
        output, new = compiled.run(text_state)
        assert [tuple(row) for row in output.collect()] == found[-1]
        text_state.keep(new)

    assert found == [[], [(at(0), "a", 2)]]


@pytest.mark.usefixtures("spark")
def test_the_command_explains_and_refuses(home: Path) -> None:
    code = blocks("continuous-sql.md", "python")[0]
    pipeline = home / "pipeline.py"
    pipeline.write_text(code)
    shown = listed("explain", str(pipeline), "--json")
    pipeline.write_text(code.replace("group by word", "group by word order by word"))
    refused = one_line_error(twophase_command("explain", str(pipeline)))
    pipeline.write_text(code.replace(', schema="word string, frequency bigint"', ""))
    unknown = one_line_error(twophase_command("explain", str(pipeline)))

    assert shown["key"] == "word string"
    assert "ORDER BY: a table has no order" in refused
    assert "read 'words': its columns are not known here" in unknown
