"""`Pipeline`, what a user declares in a DAG file or a script: reads, a transform, writes, audits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import tzinfo
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from twophase.core import slots
from twophase.core.declared import Declared
from twophase.core.errors import ConfigError
from twophase.core.retention import Retention
from twophase.sinks.base import Sink
from twophase.sources.base import Source
from twophase.spark.continuous.declaration import ContinuousQuery
from twophase.spark.transforms import RESERVED

if TYPE_CHECKING:
    from twophase.audits import Audit
    from twophase.state.declaration import State
    from twophase.state.participant import StateRuns

_NAME = re.compile(r"[a-z][a-z0-9_]*")

Transform = str | Callable[..., Any] | ContinuousQuery


class Pipeline:
    """One pipeline, identified by its name and the names of its reads and writes, not by their paths."""

    def __init__(  # noqa: PLR0913 - what a user may declare
        self,
        name: str,
        *,
        reads: Mapping[str, Source],
        transform: Transform | None = None,
        writes: Mapping[str, Sink],
        state: State | Mapping[str, State] | None = None,
        audits: Iterable[Audit] = (),
        retention: Retention | None = None,
        max_pending: int = 1,
    ) -> None:
        """Declare a pipeline; raise ConfigError for a mistake in it, before anything is touched.

        Without a transform the user's own Spark job writes the output, submitted by Airflow's stage task. With a
        `state` the transform returns its output and the new rows of the state; a dict declares several by name.
        """
        self.name = name
        self.reads = dict(reads)
        self.transform = transform
        if isinstance(transform, ContinuousQuery):
            self.transform = transform.over([name for name, source in self.reads.items() if source.unversioned])
        self.writes = dict(writes)
        self.state = state
        if isinstance(self.transform, ContinuousQuery) and self.transform.keeps_state:
            self.state = self._derived(self.transform, state)
        self.audits = list(audits)
        self.retention = retention or Retention()
        self.max_pending = max_pending
        self._check()

    def _check(self) -> None:
        if not _NAME.fullmatch(str(self.name)):
            msg = f"pipeline name {self.name!r}: expected lower-case letters, digits and _, a letter first"
            raise ConfigError(msg)
        self._check_parts("read", self.reads, Source)
        self._check_parts("write", self.writes, Sink)
        for name, sink in self.writes.items():
            sink.join(self.name, name, slotted=self.slotted)
        for reserved in sorted(RESERVED):
            if reserved in self.reads:
                msg = (
                    f"pipeline {self.name!r}: a read cannot be named {reserved!r}: transforms get something else by it"
                )
                raise ConfigError(msg)
        if isinstance(self.transform, str) and not re.fullmatch(r"[\w.]+:[\w.]+", self.transform):
            msg = f"pipeline {self.name!r}: transform {self.transform!r}: expected `module:function`"
            raise ConfigError(msg)
        if not isinstance(self.transform, str) and not callable(self.transform) and self.transform is not None:
            msg = f"pipeline {self.name!r}: transform {self.transform!r}: expected `module:function` or a function"
            raise ConfigError(msg)
        if self.max_pending < 1:
            msg = f"pipeline {self.name!r}: max_pending: expected a number above 0, found {self.max_pending!r}"
            raise ConfigError(msg)
        self._check_slots()
        self._check_states()
        self._check_audits()
        self._check_locations()

    def _derived(self, query: ContinuousQuery, state: object) -> State:
        """Return the state that a continuous query brings; refuse another one beside it."""
        from twophase.state.declaration import DerivedState

        if state is not None and not isinstance(state, DerivedState):
            msg = (
                f"pipeline {self.name!r}: its transform is a continuous query with a state of its own; leave out state"
            )
            raise ConfigError(msg)
        return DerivedState(retain=query.retain)

    @property
    def shipped_transform(self) -> str | dict[str, Any] | None:
        """Return the transform as a submitted job is told of it; None: it has none, or a function of this process."""
        if isinstance(self.transform, ContinuousQuery):
            return self.transform.declaration()
        return self.transform if isinstance(self.transform, str) else None

    @property
    def slotted(self) -> bool:
        """Return True if each of its checkpoints stands for a slot: an interval or a partition key."""
        return any(source.slotted for source in self.reads.values())

    @property
    def zone(self) -> tzinfo:
        """Return the time zone of its slots, which its reads declare; UTC if none does."""
        named = [source.timezone for source in self.reads.values() if source.timezone]
        return slots.zone(named[0] if named else None, f"pipeline {self.name!r}")

    @property
    def sinks(self) -> dict[str, Sink]:
        """Return all that it stages: its writes, the quarantines of its reads, its states."""
        side = {quarantine_of(name): source.quarantine() for name, source in self.reads.items()}
        return {**self.writes, **{name: sink for name, sink in side.items() if sink is not None}, **self.states}

    @property
    def states(self) -> dict[str, StateRuns]:
        """Return its states, by their names in the record: `state`, or `state.NAME` for each of several."""
        if self.state is None:
            return {}
        from twophase.state.participant import (
            StateRuns,
        )  # only if there is state: every parse of a DAG file pays for it

        if isinstance(self.state, Mapping):
            return {f"state.{name}": StateRuns(one, self.name, name) for name, one in self.state.items()}
        return {"state": StateRuns(self.state, self.name)}

    def voters(self) -> dict[str, tuple[str, Audit]]:
        """Return its audits by their names in the record, each with the write that it checks."""
        found: dict[str, tuple[str, Audit]] = {}
        for audit in self.audits:
            for write in self.writes if audit.on is None else [audit.on]:
                name = f"{write}: {audit.name}"
                again = sum(other == name or other.startswith(f"{name} #") for other in found)
                found[f"{name} #{again + 1}" if again else name] = (write, audit)
        return found

    def _check_states(self) -> None:
        """Refuse a state that cannot be kept: in slots, without a transform, or under a name that is not one."""
        if self.state is None:
            return
        from twophase.state.declaration import State

        several = self.state if isinstance(self.state, Mapping) else {"state": self.state}
        for name, one in several.items():
            if not _NAME.fullmatch(str(name)) or not isinstance(one, State):
                msg = (
                    f"pipeline {self.name!r}: state: expected twophase.State, or a dict of them by name, found {one!r}"
                )
                raise ConfigError(msg)
        if not several:
            msg = f"pipeline {self.name!r}: state: expected at least one, found none"
            raise ConfigError(msg)
        if self.slotted:
            msg = (
                f"pipeline {self.name!r}: it has state, and reads intervals, which run in any order: no slot has a"
                " state before it; read what arrives in order, or chain a pipeline that reads this one's commits"
            )
            raise ConfigError(msg)
        if self.transform is None:
            msg = f"pipeline {self.name!r}: it has state and no transform; only a transform returns a new state"
            raise ConfigError(msg)
        if "state" in self.writes:
            msg = f"pipeline {self.name!r}: a write cannot be named 'state': the record knows its state by that name"
            raise ConfigError(msg)

    def _check_slots(self) -> None:
        """Refuse reads that cannot be in one checkpoint, and writes with slot places if no read has slots."""
        versioned = {name: source for name, source in self.reads.items() if not source.unversioned}
        if not versioned:
            msg = f"pipeline {self.name!r}: every read is a lookup table; expected one that brings new input"
            raise ConfigError(msg)
        ordered = [name for name, source in versioned.items() if not source.slotted]
        if self.slotted and ordered:
            msg = (
                f"pipeline {self.name!r}: read {ordered[0]!r} goes in order and others by intervals, which run in any"
                " order; give them pipelines of their own"
            )
            raise ConfigError(msg)
        for name, sink in self.writes.items():
            if sink.slotted and not self.slotted:
                msg = f"pipeline {self.name!r}: write {name!r} has places for slots, but no read goes by intervals"
                raise ConfigError(msg)
        self._check_zones()

    def _check_zones(self) -> None:
        """Refuse a time zone that one part declares and another leaves out: their days would differ."""
        reads = {f"read {name!r}": source.timezone for name, source in self.reads.items() if source.zoned}
        writes = {f"write {name!r}": sink.timezone for name, sink in self.writes.items() if sink.zoned}
        said = {part: zone for part, zone in {**reads, **writes}.items() if zone}
        if len(set(filter(None, reads.values()))) > 1:
            msg = f"pipeline {self.name!r}: its reads go by several time zones; expected one, found {said}"
            raise ConfigError(msg)
        for part, zone in {**reads, **writes}.items():
            if said and zone is None:
                other, there = next(iter(said.items()))
                msg = (
                    f"pipeline {self.name!r}: {part} says no timezone and {other} goes by {there!r}; say it for both,"
                    " 'UTC' if that is meant"
                )
                raise ConfigError(msg)

    def _check_audits(self) -> None:
        for audit in self.audits:
            from twophase.audits import Audit  # only if there are audits: every parse of a DAG file pays for the import

            if not isinstance(audit, Audit):
                msg = f"pipeline {self.name!r}: audits: expected some of twophase.audits, found {audit!r}"
                raise ConfigError(msg)
            if audit.on is not None and audit.on not in self.writes:
                there = ", ".join(self.writes)
                msg = f"pipeline {self.name!r}: audit {audit.name}: no write {audit.on!r}, expected {there}"
                raise ConfigError(msg)
        for name, source in self.reads.items():
            if self.transform is None and source.quarantine() is not None:
                msg = f"pipeline {self.name!r}: read {name!r}: a quarantine needs a transform: only our job can sift"
                raise ConfigError(msg)
            if quarantine_of(name) in self.writes and self.reads[name].quarantine() is not None:
                msg = f"pipeline {self.name!r}: write {quarantine_of(name)!r}: bad records of {name!r} have that name"
                raise ConfigError(msg)

    def _check_parts(self, what: str, parts: Mapping[str, Any], kind: type[Any]) -> None:
        if not parts:
            msg = f"pipeline {self.name!r}: expected at least one {what}, found none"
            raise ConfigError(msg)
        for name, part in parts.items():
            if not _NAME.fullmatch(name):
                msg = f"pipeline {self.name!r}: {what} name {name!r}: expected lower-case letters, digits and _"
                raise ConfigError(msg)
            if not isinstance(part, kind):
                msg = f"pipeline {self.name!r}: {what} {name!r}: expected one of twophase.{what}s, found {part!r}"
                raise ConfigError(msg)

    def _check_locations(self) -> None:
        """Refuse overlapping folders: an output inside another, or inside an input, would be read as part of it."""
        places = [(f"write {name!r}", where) for name, sink in self.sinks.items() for where in sink.folders()]
        places += [(f"read {name!r}", where) for name, source in self.reads.items() for where in source.folders()]
        for number, (one, here) in enumerate(places):
            for other, there in places[number + 1 :]:
                if one == other or (one.startswith("read") and other.startswith("read")):
                    continue
                if PurePath(here).is_relative_to(there) or PurePath(there).is_relative_to(here):
                    where = here if here == there else f"{here} and {there}"
                    msg = f"pipeline {self.name!r}: {one} and {other} overlap at {where}; give each a folder of its own"
                    raise ConfigError(msg)

    # --- the record --------------------------------------------------------------------------------------------------

    def declaration(self) -> dict[str, Any]:
        """Return what the record keeps: enough to recover without the file that declares the pipeline."""
        transform: Any = self.shipped_transform
        if transform is None and self.transform is not None:
            transform = self.transform
            module = getattr(transform, "__module__", type(transform).__module__)
            transform = f"{module}:{getattr(transform, '__qualname__', type(transform).__qualname__)}"
        declared = {
            "reads": {name: source.declaration() for name, source in self.reads.items()},
            "transform": transform,
            "writes": {name: sink.declaration() for name, sink in self.writes.items()},
            "audits": [audit.declaration() for audit in self.audits],
            "retention": self.retention.config(),
            "max_pending": self.max_pending,
        }
        if isinstance(self.state, Mapping):
            return {**declared, "states": {name: one.declaration() for name, one in self.state.items()}}
        return declared if self.state is None else {**declared, "state": self.state.declaration()}

    @classmethod
    def from_declaration(cls, name: str, declaration: Mapping[str, Any]) -> Pipeline:
        """Build the pipeline that a record describes."""
        from twophase.audits import Audit

        return cls(
            name,
            reads={read: Source.load(source) for read, source in declaration["reads"].items()},
            transform=_loaded_transform(declaration["transform"]),
            writes={write: Sink.load(sink) for write, sink in declaration["writes"].items()},
            audits=[Audit.load(audit) for audit in declaration.get("audits", ())],
            retention=Retention(**declaration.get("retention", {})),
            max_pending=declaration["max_pending"],
            state=_loaded_state(declaration),
        )

    def changes(self, old: Mapping[str, Any], pending: bool) -> list[str]:  # noqa: FBT001 - asked by the registry
        """Say in words which changes from an older declaration are not allowed once there are checkpoints."""
        problems = self._changes_of_state(old, pending=pending)
        before, now = old.get("transform"), self.transform
        if isinstance(now, ContinuousQuery) and isinstance(before, dict):
            problems += [f"transform: {change}" for change in now.changes(before, pending=pending)]
        parts: tuple[tuple[str, Mapping[str, Declared]], ...] = (("read", self.reads), ("write", self.writes))
        for what, mine in parts:
            for name, before in old[f"{what}s"].items():
                if name in mine:
                    changed = mine[name].changes(before, pending=pending)
                    problems += [f"{what} {name!r}: {change}" for change in changed]
                elif what == "read" or pending:
                    why = "its input would be read again" if what == "read" else "a checkpoint is pending in it"
                    problems.append(f"{what} {name!r} is gone ({why})")
        return problems

    def _changes_of_state(self, old: Mapping[str, Any], *, pending: bool) -> list[str]:
        """Say which changes of the state are not allowed: what it keeps would be lost, or read as something else."""
        before = {f"state.{name}": one for name, one in old.get("states", {}).items()}
        before |= {"state": old["state"]} if "state" in old else {}
        problems = []
        for name, declared in before.items():
            if name not in self.states:
                problems.append(f"{name} is gone (what it keeps would be lost)")
            else:
                changes = self.states[name].declared.changes(declared, pending=pending)
                problems += [f"{name}: {change}" for change in changes]
        return problems

    def prepare(self, slot: str | None = None, *, writes: bool = True) -> None:
        """Check, before anything is recorded, that every read can be read and, with `writes`, every write written."""
        for source in self.reads.values():
            source.prepare()
        for sink in self.sinks.values() if writes else ():
            sink.prepare(slot)


def quarantine_of(read: str) -> str:
    """Return the name of the write that a read's bad records go to."""
    return f"{read}_quarantine"


def _loaded_state(declaration: Mapping[str, Any]) -> State | dict[str, State] | None:
    """Return the state that a declaration has."""
    if "states" not in declaration and "state" not in declaration:
        return None
    from twophase.state.declaration import State

    if "state" in declaration:
        return State.load(declaration["state"])
    return {name: State.load(one) for name, one in declaration["states"].items()}


def _loaded_transform(path: str | dict[str, Any] | None) -> Transform | None:
    """Return a transform from the record: its import path, or a function that refuses to run if it has none."""
    if isinstance(path, dict):
        return ContinuousQuery.load(path)
    return path if path is None or re.fullmatch(r"[\w.]+:[\w.]+", path) else _not_importable


def _not_importable(*_: object) -> None:
    msg = "this transform was a function inside another; only the process that declared it can run it"
    raise ConfigError(msg)
