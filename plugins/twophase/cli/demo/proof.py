"""The demo's proof: a reader finds what plain Python computes from the input, each checkpoint once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Counted(NamedTuple):
    """One row of the word count table, and the checkpoint that it is in."""

    checkpoint_id: int
    word: str
    frequency: int


class Finding(NamedTuple):
    """One claim, whether it holds, and what was found."""

    claim: str
    holds: bool
    found: str


def expected(inputs: Mapping[int, Sequence[Path]]) -> list[Counted]:
    """Count the words of each checkpoint's input files in plain Python."""
    rows = []
    for checkpoint_id, files in inputs.items():
        totals: Counter[str] = Counter()
        for file in files:
            for line in file.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                totals[record["word"]] += record["frequency"]
        rows += [Counted(checkpoint_id, word, total) for word, total in totals.items()]
    return rows


def read(table: Path) -> list[Counted]:
    """Read what any reader of the table's folder sees: with pyarrow, without Spark and without the record."""
    import pyarrow.parquet as pq

    rows = []
    for file in sorted(table.glob("**/*.parquet")):
        checkpoint_id = int(file.relative_to(table).parts[0].partition("=")[2])
        found = pq.read_table(file, columns=["word", "frequency"], partitioning=None).to_pylist()
        rows += [Counted(checkpoint_id, row["word"], row["frequency"]) for row in found]
    return rows


def totals(rows: Iterable[Counted]) -> Counter[str]:
    """Sum the frequencies per word."""
    found: Counter[str] = Counter()
    for row in rows:
        found[row.word] += row.frequency
    return found


def prove(made: Sequence[Counted], seen: Sequence[Counted], committed: Sequence[int]) -> list[Finding]:
    """Compare what the input makes with what a reader sees and what the record says is committed."""
    want, have = Counter(made), Counter(seen)
    lost, extra = (want - have).total(), (have - want).total()
    wanted_totals, seen_totals = totals(made), totals(seen)
    words = f"{len(wanted_totals)} words, {wanted_totals.total():,} in all"
    differ = sorted(word for word in wanted_totals | seen_totals if wanted_totals[word] != seen_totals[word])
    checkpoints = sorted({row.checkpoint_id for row in made})
    return [
        Finding(
            "totals per word equal those of the input",
            not differ,
            f"differ: {', '.join(differ)}" if differ else words,
        ),
        Finding(
            "every row is there once: none lost, none doubled",
            not lost and not extra,
            f"{len(seen)} rows" + (f", {lost} lost, {extra} too many" if lost or extra else ""),
        ),
        Finding(
            "every checkpoint is committed once",
            sorted(committed) == checkpoints,
            f"committed: {', '.join(map(str, sorted(committed))) or 'none'}",
        ),
    ]
