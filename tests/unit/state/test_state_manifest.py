"""The list of runs that the record keeps of a state."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime

from twophase import State
from twophase.state.manifest import SortedRun, StateManifest

RUN = SortedRun("00000018.r1.a3.7c1e.0.0.arrow", 0, 3, 512, -5, 7, "00ff", 18)
MANIFEST = StateManifest(
    key=("k",),
    schema=State(["k"], "k int, v decimal(12,2)").columns,
    runs=(RUN, replace(RUN, path="old", level=9, checkpoint_id=3)),
    own=(RUN,),
    keys=12,
    changed=2,
    deleted=1,
    bytes=512,
    timestamp=datetime(2026, 11, 18, 12, tzinfo=UTC),
    watermarks={"clicks": "2026-11-18T11:00:00+00:00"},
)


def test_a_manifest_comes_back_from_the_record_as_it_was() -> None:
    kept = json.loads(json.dumps(MANIFEST.to_json()))

    assert StateManifest.of_json(kept) == MANIFEST
    assert StateManifest.of_json(kept).to_json() == kept


def test_a_manifest_says_what_other_participants_say() -> None:
    kept = MANIFEST.to_json()

    assert (kept["rows"], kept["bytes"], kept["files"]) == (3, 512, 2)
    assert kept["schema"] == [["k", "int"], ["v", "decimal(12,2)"]]


def test_the_digest_changes_with_any_part() -> None:
    assert replace(MANIFEST, keys=13).to_json()["digest"] != MANIFEST.to_json()["digest"]
    assert replace(MANIFEST, own=()).to_json()["digest"] != MANIFEST.to_json()["digest"]


def test_the_first_state_is_empty() -> None:
    empty = StateManifest.empty(State(["k"], "k int, v int"))

    assert (empty.files(), empty.keys, empty.to_json()["rows"]) == ((), 0, 0)
