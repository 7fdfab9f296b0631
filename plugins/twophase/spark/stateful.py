"""What `stage` does for a pipeline with state: give it to the transform, and stage the new one beside the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twophase.core.checkpoint import Json
from twophase.core.errors import ConfigError
from twophase.core.failpoints import hit
from twophase.spark.plan import Plan
from twophase.spark.transforms import STATE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from twophase.spark.continuous.query import CompiledQuery
    from twophase.spark.kept_state import KeptState

#: The name in the record of a pipeline's only state; each of several is `state.NAME`.
ONLY = "state"


def kept(
    spark: SparkSession, plan: Plan, began: datetime | None, query: CompiledQuery | None = None
) -> dict[str, KeptState]:
    """Return each state as this attempt reads it, by its name in the record; a query says what columns its own has."""
    if query is not None and query.state is not None and not plan.states:
        msg = (
            f"pipeline {plan.pipeline}: sql: {' '.join(query.text.split())}: it keeps state, which its words do not say"
        )
        raise ConfigError(msg)
    if not plan.states:
        return {}
    from twophase.spark.kept_state import KeptState
    from twophase.state.declaration import DerivedState, State
    from twophase.state.manifest import StateManifest

    if began is None:
        raise AssertionError  # the record says when a checkpoint began
    found = {}
    for name, planned in plan.states.items():
        declared = State.load(dict(planned.state))
        if isinstance(declared, DerivedState):
            declared = declared.of(query.state if query else None)
        base = StateManifest.of_json(planned.base) if planned.base else StateManifest.empty(declared)
        run_name = planned.handle["name"] if planned.handle else ""
        found[name] = KeptState(
            spark, declared, Path(planned.home), base, name=_short(name), run_name=run_name, timestamp=began
        )
    return found


def given(states: Mapping[str, KeptState]) -> dict[str, Any]:
    """Return what a transform that asks for `state` gets: the only one, or a dict of them."""
    if not states:
        return {}
    return {STATE: states[ONLY] if ONLY in states else {_short(name): one for name, one in states.items()}}


def split(pipeline: str, states: Mapping[str, KeptState], returned: Any) -> tuple[Any, dict[str, DataFrame]]:  # noqa: ANN401 - the user's
    """Return the output and the new rows of each state, of what a transform returned."""
    if not states:
        return returned, {}
    expected = "(output, new_state)" if ONLY in states else "(output, {name: new_state})"
    if not isinstance(returned, tuple) or len(returned) != 2:  # noqa: PLR2004 - a pair
        kind = type(returned).__name__
        msg = f"pipeline {pipeline}: it has state, and its transform returned {kind}; expected {expected}"
        raise ConfigError(msg)
    output, new = returned
    if ONLY in states:
        return output, {ONLY: new}
    names = {_short(name): name for name in states}
    if not isinstance(new, Mapping) or set(new) != set(names):
        found = ", ".join(map(str, new)) if isinstance(new, Mapping) else type(new).__name__
        msg = f"pipeline {pipeline}: the transform returned new states {found}; expected {', '.join(names)}"
        raise ConfigError(msg)
    return output, {names[name]: frame for name, frame in new.items()}


def staged(
    plan: Plan,
    states: Mapping[str, KeptState],
    changed: Mapping[str, DataFrame],
    frames: Mapping[str, DataFrame],
    stage: Callable[[Mapping[str, DataFrame]], dict[str, Json]],
) -> dict[str, Json]:
    """Stage the output by `stage`, and every new state; return each summary.

    One job does both if there is one state, and the only frame that is written is its new rows or their changelog.
    """
    mine = {name: frame for name, frame in changed.items() if plan.states[name].handle is not None}
    if not mine:
        return stage(frames)
    staged_writes = {name: frames[name] for name in plan.staged}
    alone = len(mine) == 1 and len(staged_writes) == 1
    with ExitStack() as held:
        staging = {}
        output = next(iter(staged_writes.values()), None)
        for name, frame in mine.items():
            staging[name] = held.enter_context(states[name].staging(frame, output, writes=1 if alone else 2))
        hit("state.staged")
        only = next(iter(staging.values())).output if alone else None
        found = stage(frames if only is None else dict.fromkeys(staged_writes, only))
        rows = next(iter(found.values()))["rows"] if only is not None else None
        summaries = {name: one.manifest(rows).to_json() for name, one in staging.items()}
        hit("state.merged")
        return {**found, **summaries}


def _short(name: str) -> str:
    """Return the name that users know a state by."""
    return name.removeprefix(f"{ONLY}.")
