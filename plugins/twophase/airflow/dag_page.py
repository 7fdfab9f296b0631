"""The text on a DAG's page about its pipeline; `TwophaseDag` puts it there."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twophase.core.declared import Declared
    from twophase.pipeline import Pipeline

_PROMISE = (
    "**Promise**: each record of a committed checkpoint is in each table exactly once, whatever dies; readers see whole"
    " checkpoints only. A run that fails before its commit point changes nothing; after it, the checkpoint is finished"
    " by whoever comes next."
)


def doc(pipeline: Pipeline) -> str:
    """Say in Markdown what a pipeline reads, writes and promises."""
    reads = [f"- `{name}`: {_words(source)}" for name, source in pipeline.reads.items()]
    writes = [f"- `{name}`: {_words(sink)}" for name, sink in pipeline.sinks.items()]
    audits = [f"- {name}" for name in pipeline.voters()]
    unit = "one interval" if pipeline.slotted else "what has come since the checkpoint before"
    order = "in any order" if pipeline.slotted else "in order"
    work = f"`{pipeline.transform}`" if pipeline.transform else "a Spark job of its own"
    parts = [
        f"**{pipeline.name}** runs {work} on {unit}, a checkpoint a run, committed {order}.",
        "**Reads**\n" + "\n".join(reads),
        "**Writes**\n" + "\n".join(writes),
        *(["**Audits** before anything becomes visible\n" + "\n".join(audits)] if audits else []),
        _PROMISE,
        f"[Commit table](/twophase/pipelines/{pipeline.name})",
    ]
    return "\n\n".join(parts)


def _words(part: Declared) -> str:
    config = part.config()
    kind = type(part).__name__
    where = config.get("path") or "/".join(str(config[name]) for name in ("pipeline", "sink") if name in config)
    return f"{kind} `{where}`" if where else kind
