"""What lies in dags/ is a declaration that loads, and names a transform that is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from twophase.cli.pipeline_files import load

ROOT = Path(__file__).parents[2]
DAGS = sorted((ROOT / "dags").glob("*.py"))
PIPELINES = [path for path in DAGS if path.stem != "twophase_maintenance"]


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.stem)
def test_every_file_declares_a_pipeline_whose_job_is_in_spark_jobs(path: Path) -> None:
    pipeline = load(str(path))

    if pipeline.transform is None:
        assert "spark_jobs" in path.read_text()
        return
    assert isinstance(pipeline.transform, str)
    module, _, function = pipeline.transform.partition(":")
    assert f"def {function}(" in (ROOT / "spark_jobs" / f"{module}.py").read_text()


@pytest.mark.parametrize("path", DAGS, ids=lambda path: path.stem)
def test_every_file_is_a_short_declaration_that_airflow_looks_into(path: Path) -> None:
    text = path.read_text()

    assert len(text.splitlines()) < 40
    assert "airflow" in text.lower()
    assert "dag" in text.lower()
