"""What lies in dags/ is a declaration that loads, and names a transform that is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from twophase.cli.loading import load

ROOT = Path(__file__).parents[2]
DAGS = sorted((ROOT / "dags").glob("*.py"))


@pytest.mark.parametrize("path", DAGS, ids=lambda path: path.stem)
def test_every_file_declares_a_pipeline_whose_transform_is_in_spark_jobs(path: Path) -> None:
    pipeline = load(str(path))

    assert isinstance(pipeline.transform, str)
    module, _, function = pipeline.transform.partition(":")
    assert f"def {function}(" in (ROOT / "spark_jobs" / f"{module}.py").read_text()
    assert len(path.read_text().splitlines()) < 40
