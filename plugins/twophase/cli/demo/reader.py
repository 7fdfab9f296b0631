"""The demo's reader: it reads the table again and again, and must see whole checkpoints at any moment."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from twophase.cli.demo import proof

_EVERY = 0.2


class PollingReader:
    """Reads the table again and again while everything else goes on."""

    def __init__(self, table: Path, inputs: Mapping[int, Sequence[Path]]) -> None:
        """Name the table, and the input of each checkpoint."""
        self._table = table
        self._inputs = inputs
        self._looks = 0
        self._wrong: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, name="reader", daemon=True)

    def check(self) -> proof.Finding:
        """Return the claim that no look has seen a part of a checkpoint, or a row twice."""
        found = f"{len(self._wrong)} times something else: {self._wrong[0]}; " if self._wrong else ""
        return proof.Finding(
            "a reader saw whole checkpoints only, all the time",
            bool(self._looks) and not self._wrong,
            f"{found}it looked {self._looks:,} times",
        )

    def _read(self) -> None:
        while not self._stop.wait(_EVERY):
            try:
                seen = proof.read(self._table)
            except FileNotFoundError:
                continue  # listed before a replacement and opened after it: a reader looks again
            self._looks += 1
            there = {row.checkpoint_id for row in seen}
            wanted = proof.expected({number: files for number, files in dict(self._inputs).items() if number in there})
            if sorted(seen) != sorted(wanted):
                self._wrong.append(f"{len(seen)} rows of checkpoints {sorted(there)}, expected {len(wanted)}")

    def __enter__(self) -> Self:
        """Begin to read."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop reading."""
        self._stop.set()
        self._thread.join()
