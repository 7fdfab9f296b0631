"""Checkpoints of one pipeline for the tests of the command line: each of some words."""

from __future__ import annotations

from support.pipelines.factories import PreStaged, land_words, words_pipeline
from twophase.runner import Runner


def commit(checkpoints: int = 1, *, start: int = 0) -> None:
    with Runner(words_pipeline(), PreStaged()) as runner:
        for number in range(start, start + checkpoints):
            land_words(start=number)
            assert runner.run() is not None
