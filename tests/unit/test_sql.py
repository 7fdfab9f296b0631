"""What is declared of a continuous query, without Spark."""

from __future__ import annotations

from typing import Any

import pytest

from twophase import Pipeline, State, sinks, sources, sql
from twophase.core.errors import ConfigError
from twophase.spark.continuous.declaration import ContinuousQuery

COUNTED = "select word, count(*) n from words group by word"


def declared(text: str = COUNTED, **more: Any) -> Pipeline:
    return Pipeline(
        "counted",
        reads={"words": sources.Files("landing", format="json"), "kinds": sources.Lookup("kinds")},
        transform=sql(text),
        writes={"lake": sinks.Files("lake")},
        **more,
    )


def test_a_query_is_kept_in_the_record_whole() -> None:
    """So recovery and replays need no DAG file; lookup tables are known by their names."""
    pipeline = declared()
    again = Pipeline.from_declaration("counted", pipeline.declaration())

    assert isinstance(again.transform, ContinuousQuery)
    assert again.transform.config() == {**sql(COUNTED).config(), "lookups": ["kinds"]}
    assert again.declaration() == pipeline.declaration()
    assert list(again.states) == ["state"]


@pytest.mark.parametrize(
    ("text", "keeps"),
    [
        (COUNTED, True),
        ("select distinct word from words", True),
        ("select word from words union select word from words", True),
        ("select SUM (n) from words", True),
        ("select word from words union all select word from words", False),
        ("select 'group by' word, `distinct` from words -- count(*)", False),
        ("select /* max(n) */ array_max(n) from words", False),
    ],
)
def test_the_words_of_a_text_say_whether_it_keeps_state(text: str, keeps: bool) -> None:
    assert bool(declared(text).states) == keeps


def test_a_state_beside_that_of_a_query_is_refused() -> None:
    with pytest.raises(ConfigError, match="a continuous query with a state of its own; leave out state"):
        declared(state=State(["word"], "word string, n bigint"))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"mode": "replace"}, "mode 'replace': expected append, retract, upsert"),
        ({"emit": "once"}, "emit 'once': expected final, updates"),
        ({"event_time": {"words": ["at"]}}, r"event_time of 'words': expected \(column, delay\)"),
        ({"event_time": {"words": ["at", "soon"]}}, "delay: 'soon': expected a number and seconds"),
    ],
)
def test_wrong_arguments_are_refused_when_declared(more: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        sql(COUNTED, **more)


def test_another_text_is_a_change_only_where_state_is_kept() -> None:
    plain = declared("select word from words")

    assert declared("select upper(word) from words").changes(plain.declaration(), pending=False) == []
    problems = declared("select word, max(n) n from words group by word").changes(
        declared().declaration(), pending=False
    )
    assert len(problems) == 1
    assert COUNTED in problems[0]
