"""What the source of a transform tells before anything is begun; nothing of it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from twophase.core.errors import ConfigError
from twophase.spark import transforms

READS = ("words", "stops")


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOPHASE_SPARK_JOBS", str(tmp_path))
    return tmp_path


def check(jobs: Path, source: str, *, path: str = "counting:transform", here: bool = True) -> None:
    """Check a transform against a module that would say so if it ran."""
    (jobs / "counting.py").write_text(f"open({str(jobs / 'ran')!r}, 'w')\n{source}\n")
    try:
        transforms.check("wc", path, READS, here=here)
    finally:
        assert not (jobs / "ran").exists()


@pytest.mark.parametrize(
    "source",
    [
        "def transform(words): return words",
        "def transform(spark, context, words, *, stops, limit=3): return words",
        "def transform(words, /, **others): return words",
        "def transform(*reads): return reads",
        "from elsewhere import transform",
        "from elsewhere import *",
        "import elsewhere as transform",
        "def copy(x): return x\ntransform = copy",
        "def __getattr__(name): return len",
        "if True:\n    def transform(wrods): return wrods\nelse:\n    def transform(words): return words",
        "try:\n    from fast import transform\nexcept ImportError:\n    transform = None",
        "globals()['transform'] = len",
        "def make():\n    global transform\n    transform = len\nmake()",
        "@decorated\ndef transform(anything): return anything",
        "class transform:\n    def __init__(self, wrods): ...",
    ],
)
def test_what_may_be_right_is_left_to_spark(jobs: Path, source: str) -> None:
    check(jobs, source)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (
            "def transfrom(words): return words",
            r"module 'counting' has no 'transform'; looked in .*TWOPHASE_SPARK_JOBS",
        ),
        (
            "def transform(wrods): return wrods",
            "transform transform: no read named 'wrods'; there is context, spark",
        ),
        ("def transform(words, *, limit): return words", "no read named 'limit'"),
        ("def transform(words, a, b=1): return words", "no read named 'a'"),
        ("def transform(words:", r"import path 'counting:transform': counting\.py:2: .*; correct the file"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_begun(jobs: Path, source: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check(jobs, source)


def test_a_module_that_is_nowhere_is_refused_where_spark_runs_here(jobs: Path) -> None:
    with pytest.raises(ConfigError, match=r"no module 'nowhere_at_all'; .* looked in .*TWOPHASE_SPARK_JOBS"):
        check(jobs, "", path="nowhere_at_all.deep:transform")
    check(jobs, "", path="nowhere_at_all.deep:transform", here=False)
    check(jobs, "def transform(words:", here=False)
    check(jobs, "", path="twophase.examples.word_count:transform")
