"""How a transform is called and what it may return; how an error becomes one line. No Spark runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import types as T  # noqa: N812 - Spark's own habit

from twophase.core.errors import BadRecord, ConfigError
from twophase.core.manifest import Column
from twophase.spark.main import one_line
from twophase.spark.stage import Context, call, columns, outputs
from twophase.spark.submit import child_environment

READS = {"words": "the words", "stops": "the stops"}
EXTRA = {"spark": "the session", "context": Context("wc", 17, 1, None)}


def frame() -> Any:
    """Return something of the class DataFrame, without a Spark behind it."""
    from pyspark.sql import DataFrame

    return object.__new__(DataFrame)


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda words: words, "the words"),
        (lambda stops, words: (stops, words), ("the stops", "the words")),
        (lambda words, /, *, stops: (words, stops), ("the words", "the stops")),
        (lambda spark, words: (spark, words), ("the session", "the words")),
        (lambda context: context.checkpoint_id, 17),
        (lambda **reads: reads, READS),
        (lambda words, **others: (words, others), ("the words", {"stops": "the stops"})),
        (lambda words, limit=3: (words, limit), ("the words", 3)),
    ],
)
def test_a_transform_gets_what_its_parameters_name(function: Callable[..., Any], got: Any) -> None:
    assert call(function, READS, EXTRA) == got


def test_an_unknown_parameter_is_named_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match="no read named 'wrods'; there is context, spark, stops, words"):
        call(lambda wrods: wrods, READS, EXTRA)


def test_a_read_may_not_take_a_reserved_name() -> None:
    with pytest.raises(ConfigError, match="a read may not be named spark"):
        call(lambda spark: spark, {"spark": 1}, EXTRA)


def test_one_frame_goes_to_every_write() -> None:
    one = frame()

    assert outputs(one, ["lake", "dwh"], "wc") == {"lake": one, "dwh": one}


def test_a_dict_goes_by_name() -> None:
    lake, dwh = frame(), frame()

    found = outputs({"dwh": dwh, "lake": lake}, ["lake", "dwh"], "wc")

    assert (found["lake"], found["dwh"]) == (lake, dwh)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "returned NoneType, expected a DataFrame or a dict"),
        ([1], "returned list"),
        ({"lake": None}, "a dict without dwh; expected dwh, lake"),
        ({"lake": None, "dwh": None, "mart": None}, "a dict with unknown mart; expected dwh, lake"),
        ({"lake": 1, "dwh": 2}, "returned int for lake, expected a DataFrame"),
    ],
)
def test_anything_else_is_refused_by_name(returned: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        outputs(returned, ["lake", "dwh"], "wc")


def test_columns_are_named_by_spark_type_without_nullability() -> None:
    schema = T.StructType(
        [
            T.StructField("a", T.LongType(), nullable=False),
            T.StructField(
                "b", T.ArrayType(T.StructType([T.StructField("c", T.DecimalType(10, 2))]), containsNull=False)
            ),
        ]
    )

    assert columns(schema) == (Column("a", "bigint"), Column("b", "array<struct<c:decimal(10,2)>>"))


def test_a_users_exception_is_one_line_with_its_place() -> None:
    with pytest.raises(ValueError, match="nine") as caught:
        int("nine\nlives")

    line = one_line(caught.value)
    assert line.startswith("ValueError: invalid literal for int()")
    assert line.rstrip(")").rpartition("(")[2].startswith("test_transform_call.py:")


def test_our_own_error_is_its_message() -> None:
    assert one_line(BadRecord("file landing/a.json, line 3: not JSON")) == "file landing/a.json, line 3: not JSON"


def test_a_long_error_is_cut_to_fit_the_record() -> None:
    assert len(one_line(ValueError("x" * 5000))) == 500


def test_an_exception_of_a_python_worker_is_found_in_sparks_text() -> None:
    text = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/x/pyspark/worker.py", line 3602, in main
    process()
  File "/x/spark_jobs/word_count.py", line 12, in half
    return 1 / n
ZeroDivisionError: division by zero
"""

    assert one_line(RuntimeError(text)) == "ZeroDivisionError: division by zero (word_count.py:12)"


def test_the_deepest_cause_of_a_java_error_is_shown() -> None:
    text = "An error occurred while calling o7.x.\n: org.X: no\n\tat a.b\nCaused by: java.io.IOException: No space left"

    assert one_line(RuntimeError(text)) == "RuntimeError: java.io.IOException: No space left"


def test_the_spark_job_gets_no_credentials_of_the_committer() -> None:
    from pathlib import Path

    parent = {
        "AIRFLOW_CONN_DWH": "postgres://u:p@h/d",
        "AIRFLOW__CORE__FERNET_KEY": "k",
        "HOME": "/h",
        "PGPASSWORD": "p",
        "PYTHONPATH": "/mine",
        "TWOPHASE_DSN": "postgresql://u:p@h/d",
        "TWOPHASE_FAILPOINTS": "stage.before=kill",
    }

    child = child_environment(parent, "/py", Path("/spark"), Path("/java/bin/java"))

    assert not {"AIRFLOW_CONN_DWH", "AIRFLOW__CORE__FERNET_KEY", "PGPASSWORD", "TWOPHASE_DSN"} & set(child)
    assert (child["HOME"], child["TWOPHASE_FAILPOINTS"]) == ("/h", "stage.before=kill")
    assert child["PYTHONPATH"].endswith("/mine")
