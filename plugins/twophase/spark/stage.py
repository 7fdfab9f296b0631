"""Stage one attempt inside Spark: read the input, call the transform, check the schemas, stage every write.

`spark.main` calls it in a submitted driver, and the runner in the user's own session.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from math import ceil
from typing import TYPE_CHECKING, Any

from twophase.core.checkpoint import Json
from twophase.core.connections import hide_declared
from twophase.core.declared import import_path
from twophase.core.errors import BadValue, ConfigError, NoSpace, SchemaChanged, TwophaseError
from twophase.core.failpoints import hit
from twophase.core.manifest import Column, Schema, schema_changes
from twophase.core.secret_texts import hide_named
from twophase.core.settings import spark_jobs
from twophase.sinks.base import Sink
from twophase.sources.bad_records import text_of
from twophase.sources.base import Sifted, Source
from twophase.spark import stateful
from twophase.spark.continuous.declaration import ContinuousQuery
from twophase.spark.plan import Plan
from twophase.spark.transforms import RESERVED, no_such_read
from twophase.storage import spark_task_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

#: Spark's setting that lets the number of partitions of a cached frame follow from its rows; read when it is cached.
COALESCED = "spark.sql.optimizer.canChangeCachedPlanOutputPartitioning"

#: The first major version of Spark that coalesces a cached frame.
COALESCES = 4

#: Spark's defaults: the advised size of a partition, and the smallest that it makes to use all cores.
ADVISED = 64 << 20
LEAST = 1 << 20

#: Linux's message, which is somewhere in the error.
NO_SPACE = "No space left on device"

_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY
_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Context:
    """What a transform that asks for `context` is told about its checkpoint."""

    pipeline: str
    checkpoint_id: int
    revision: int
    slot: str | None
    #: When the checkpoint first began: the same for every revision and attempt, so a replay sees it again.
    timestamp: datetime | None = None


def stage(spark: SparkSession, plan: Plan, transform: Callable[..., Any] | None = None) -> dict[str, Json]:
    """Stage every write of an attempt; return each sink's summary. Nothing is written unless every schema fits."""
    sources = {name: Source.load(dict(read.source)) for name, read in plan.reads.items()}
    sinks = {name: Sink.load(dict(write.sink)) for name, write in plan.staged.items()}
    function = _function(plan, transform)
    with _explained(spark, plan, sources), ExitStack() as held:
        sifted = {
            name: held.enter_context(source.sifted(spark, plan.fixed(name), plan.slot))
            for name, source in sources.items()
        }
        reads = {name: frames.good for name, frames in sifted.items()}
        began = datetime.fromisoformat(plan.timestamp) if plan.timestamp else None
        context = Context(plan.pipeline, plan.checkpoint_id, plan.revision, plan.slot, began)
        query = function.compiled(spark, reads) if isinstance(function, ContinuousQuery) else None
        kept = stateful.kept(spark, plan, began, query)
        extra = {"spark": spark, "context": context, **stateful.given(kept)}
        returned = call(function, reads, extra) if query is None else query.run(extra.get("state"))
        returned, changed = stateful.split(plan.pipeline, kept, returned)
        frames = outputs(returned, [name for name in plan.writes if name not in plan.quarantines()], plan.pipeline)
        for read in sifted.values():
            read.check()
        held.enter_context(_read_once(frames, [read.good for read in sifted.values() if read.bad is None]))
        frames |= {name: _bad_records(plan, name, sifted[read]) for name, read in plan.quarantines().items()}
        for name, sink in sinks.items():
            _check_schema(plan, name, sink, columns(frames[name].schema))
        hit("stage.before")
        if int(spark.version.partition(".")[0]) < COALESCES:
            frames = _coalesced(frames)

        def staged(written: Mapping[str, DataFrame]) -> dict[str, Json]:
            return {name: sink.stage(written[name], plan.output(name)) for name, sink in sinks.items()}

        return stateful.staged(plan, kept, changed, frames, staged)


def _bad_records(plan: Plan, name: str, read: Sifted) -> DataFrame:
    if read.bad is None:
        msg = f"pipeline {plan.pipeline}: write {name!r} takes bad records, but its read has no quarantine"
        raise ConfigError(msg)
    return read.bad  # type: ignore[no-any-return]


def _function(plan: Plan, given: Callable[..., Any] | None) -> Callable[..., Any]:
    if given is not None:
        return given
    if plan.transform is None:
        msg = f"pipeline {plan.pipeline}: no transform; declare one as 'module:function'"
        raise ConfigError(msg)
    if not isinstance(plan.transform, str):
        return ContinuousQuery.load(dict(plan.transform))
    try:
        found = import_path(plan.transform)
    except ConfigError as error:
        msg = f"pipeline {plan.pipeline}: {error}; looked in {spark_jobs()} (TWOPHASE_SPARK_JOBS) and on Python's path"
        raise ConfigError(msg) from error
    if not callable(found):
        kind = type(found).__name__
        msg = f"pipeline {plan.pipeline}: transform {plan.transform!r}: expected a function, found {kind}"
        raise ConfigError(msg)
    return found  # type: ignore[no-any-return]


def call(function: Callable[..., Any], reads: Mapping[str, Any], extra: Mapping[str, Any]) -> Any:  # noqa: ANN401 - the user's
    """Call a transform with the reads and extras that its parameters name; `**reads` gets every other read."""
    called = str(getattr(function, "__name__", function))
    if clash := sorted(set(reads) & RESERVED):
        msg = f"transform {called}: a read may not be named {', '.join(clash)}; rename it"
        raise ConfigError(msg)
    there = {**reads, **extra}
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in _ANY_NUMBER:
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                named |= {read: frame for read, frame in reads.items() if read not in named}
        elif parameter.name in there:
            if parameter.kind is _POSITIONAL:
                positional.append(there[parameter.name])
            else:
                named[parameter.name] = there[parameter.name]
        elif parameter.default is inspect.Parameter.empty:
            raise no_such_read(called, parameter.name, there)
    return function(*positional, **named)


def outputs(returned: object, writes: list[str], pipeline: str) -> dict[str, DataFrame]:
    """Return the frame for each write: one frame goes to every write; a dict must have exactly the writes' names."""
    if _is_frame(returned):
        return dict.fromkeys(writes, returned)  # type: ignore[arg-type]
    if not isinstance(returned, Mapping):
        kind = type(returned).__name__
        msg = f"pipeline {pipeline}: the transform returned {kind}, expected a DataFrame or a dict of them"
        raise ConfigError(msg)
    missing, extra = sorted(set(writes) - set(returned)), sorted(map(str, set(returned) - set(writes)))
    if missing or extra:
        differs = (("without", missing), ("with unknown", extra))
        found = " and ".join(f"{word} {', '.join(names)}" for word, names in differs if names)
        msg = f"pipeline {pipeline}: the transform returned a dict {found}; expected {', '.join(sorted(writes))}"
        raise ConfigError(msg)
    for name, frame in returned.items():
        if not _is_frame(frame):
            msg = f"pipeline {pipeline}: the transform returned {type(frame).__name__} for {name}, expected a DataFrame"
            raise ConfigError(msg)
    return {name: returned[name] for name in writes}


def _is_frame(value: object) -> bool:
    """Return True for any DataFrame: Classic and Connect have different classes, unrelated ones in Spark 3.5."""
    return any(cls.__name__ == "DataFrame" and cls.__module__.startswith("pyspark.") for cls in type(value).__mro__)


def columns(schema: StructType) -> Schema:
    """Return a frame's columns in the form that the record keeps."""
    return tuple(Column(field.name, field.dataType.simpleString()) for field in schema.fields)


def _check_schema(plan: Plan, name: str, sink: Sink, found: Schema) -> None:
    """Refuse a schema that may not follow the earlier one in this sink, or that no sink can keep."""
    which = f"checkpoint {plan.key}: sink {name!r}"
    if not found:
        msg = f"{which}: the output has no columns"
        raise ConfigError(msg)
    counts = Counter(column.name.lower() for column in found)
    if twice := sorted(column for column, count in counts.items() if count > 1):
        msg = f"{which}: more than one column is named {', '.join(twice)} (letter case does not count); rename one"
        raise ConfigError(msg)
    before = [column for column in plan.writes[name].schema or () if column[0] not in sink.added_columns]
    if not before:
        return
    problems = schema_changes(before, found, by_position=sink.by_position(), may_widen=sink.widens)
    if problems:
        msg = f"{which}: {'; '.join(problems)}; only new columns may come: keep the old ones, or declare another sink"
        raise SchemaChanged(msg)


@contextmanager
def _read_once(frames: Mapping[str, DataFrame], reads: Iterable[DataFrame]) -> Iterator[None]:
    """Cache what several writes share, so that the input is read once and every write sees the same rows."""
    several = len(frames) > 1
    distinct = {id(frame): frame for frame in frames.values()}
    shared = distinct.values() if len(distinct) == 1 else reads
    kept = [_kept(frame) for frame in shared] if several else []
    try:
        yield
    finally:
        for frame in kept:
            frame.unpersist()


def _kept(frame: DataFrame) -> DataFrame:
    """Cache a frame in as few partitions as its rows need, so that each write makes as few files as a single one would.

    By default Spark caches as many partitions as were planned before it knew the rows: 200 after any shuffle. Spark 3.5
    does so whatever the setting says: see `_coalesced`.
    """
    from pyspark import StorageLevel

    conf = frame.sparkSession.conf
    before = conf.get(COALESCED, "false")
    conf.set(COALESCED, "true")
    try:
        return frame.persist(StorageLevel.MEMORY_AND_DISK)
    finally:
        conf.set(COALESCED, before or "false")


def _coalesced(frames: Mapping[str, DataFrame]) -> dict[str, DataFrame]:
    """Coalesce frames that Spark 3.5 has cached to the number of partitions that it would choose for a single write.

    The number follows from the size of the cached frame, by Spark's own limits.
    """
    few: dict[int, DataFrame] = {}
    for frame in frames.values():
        if frame.is_cached and id(frame) not in few:
            frame.count()  # fills the cache
            size = int(str(frame._jdf.queryExecution().optimizedPlan().stats().sizeInBytes()))  # noqa: SLF001 - not in the API
            parallel = frame.sparkSession.sparkContext.defaultParallelism
            few[id(frame)] = frame.coalesce(max(1, ceil(size / ADVISED), min(parallel, size // LEAST)))
    return {name: few.get(id(frame), frame) for name, frame in frames.items()}


@contextmanager
def _explained(spark: SparkSession, plan: Plan, sources: Mapping[str, Source]) -> Iterator[None]:
    """Replace an error of Spark by one that says the cause, a full disk or bad input; re-raise any other as it is."""
    try:
        yield
    except TwophaseError:
        raise
    except Exception as error:
        hide_declared()
        _hide_settings(spark)
        if NO_SPACE in text_of(error):
            msg = (
                f"checkpoint {plan.key}: attempt {plan.attempt}: {NO_SPACE}, where a sink stages or below "
                f"spark.local.dir; make room (`twophase sweep` removes what is dead), and run again"
            )
            raise NoSpace(msg) from error
        if said := spark_task_errors.heard(text_of(error)):
            msg = f"checkpoint {plan.key}: {said}; correct it in the transform"
            raise BadValue(msg) from error
        for name, source in sources.items():
            if explanation := source.explain(plan.fixed(name), error):
                msg = f"checkpoint {plan.key}: {explanation}"
                raise type(explanation)(msg) from error
        raise


def _hide_settings(spark: SparkSession) -> None:
    """Hide the secrets in a session's settings, which its errors may repeat; nothing if the session is dead."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # it has no types

    context = getattr(spark, "sparkContext", None)  # Connect has none
    with suppress(Py4JError, OSError):
        hide_named(context.getConf().getAll() if context else ())
