"""Replacements race with writers and readers who know nothing of them: nobody ever sees part of a checkpoint."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from support.crashes import several_sinks, strangers
from support.faults.processes import start, stopped_at_end
from support.pipelines.factories import land_words
from twophase.committer.record import PostgresRecord
from twophase.verification import verify

pytestmark = pytest.mark.chaos

#: A reader that opened a version whose files a vacuum took away says so; nothing else may fail.
GONE = re.compile(r"No such file|not found|NotFound|os error 2")


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("rounds", [4, pytest.param(500, marks=pytest.mark.slow)])
def test_checkpoints_stay_whole_among_strangers(
    rounds: int, record: PostgresRecord, dsn: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upserts, Delta and Iceberg with replacements, while others append, delete, optimize, vacuum and read."""
    monkeypatch.setenv(several_sinks.TARGET, dsn.replace("postgresql+psycopg2", "postgres"))
    land_words(files=2)
    several_sinks.run(strangers.KINDS)  # then every table is there
    flag = home / "enough"
    others = [
        start(strangers.assist, flag, log=home / "assist.log"),
        *(start(strangers.disturb, kind, flag, 7, log=home / f"{kind}.log") for kind in strangers.DEEDS),
        start(strangers.read, flag, log=home / "read.log"),
    ]
    worker = start(strangers.work, rounds, 11, log=home / "work.log")
    with stopped_at_end(worker, *others):
        assert worker.wait(20 * rounds + 120) == 0, worker.said[-3000:]
        flag.touch()
        for other in others:
            assert other.wait(120) == 0, other.said[-3000:]

    done = Counter(worker.said.split())
    assert sum(done[what] for what in ("committed", "replaced", "restored", "refused")) == rounds - 1
    said = others[-1].said.splitlines()
    assert [line for line in said if line.startswith("wrong")] == []
    assert [line for line in said if line.startswith("failed") and not GONE.search(line)] == []
    told = Counter(line.partition(":")[0] for line in said)
    assert [name for name in strangers.READERS if told[f"read {name}"] <= told[f"failed {name}"]] == []
    pipeline = several_sinks.pipeline(strangers.KINDS)
    assert [found for found in verify(record, pipeline) if found and "rewritten or removed" not in str(found)] == []
    for kind in strangers.DEEDS:
        found = [(row["id"], row["word"]) for row in several_sinks.held(kind)]
        assert strangers.wrong(found) == []
        assert len({number for number, _ in found if number >= 0}) == (1 + done["committed"]) * several_sinks.ROWS
