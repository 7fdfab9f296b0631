"""What a long history costs in all that is done again and again: 100,000 checkpoints beside 1,000."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sqlalchemy import text

from benchmarks.filling import fill, fill_table
from benchmarks.harness import Figure, Findings, Measure, interleave, medians, step, timed
from benchmarks.place import Place, administer
from benchmarks.plans import FEW, long_reads
from benchmarks.workload import Checkpoints
from twophase.committer import queries
from twophase.sweep import sweep

#: What may grow: nothing, but for the depth of an index.
GOAL = 1.2
#: How many checkpoints are stale in either record.
STALE = 3

#: The second pipeline was made from the first: each of its revisions reads what was committed then; of the newest that
#: were replaced it was not made again.
_CHAIN = (
    """INSERT INTO twophase.input_revision
           (pipeline, checkpoint_id, revision, source, upstream, upstream_checkpoint_id, upstream_revision)
       SELECT r.pipeline, r.checkpoint_id, r.revision, 'words', :before, u.checkpoint_id, u.revision
       FROM twophase.revision r JOIN twophase.revision u ON u.pipeline = :before AND u.checkpoint_id = r.checkpoint_id
           AND u.commit_seq IS NOT NULL
           AND (u.revision = r.revision OR u.state = 'COMMITTED' AND r.state <> 'SUPERSEDED')
       WHERE r.pipeline = :after AND NOT (r.state = 'COMMITTED' AND u.state = 'COMMITTED' AND r.revision = 2
           AND r.checkpoint_id IN (SELECT checkpoint_id FROM twophase.revision WHERE pipeline = :before
               AND state = 'SUPERSEDED' ORDER BY checkpoint_id DESC LIMIT :stale))""",
    """INSERT INTO twophase.input_revision
           (pipeline, checkpoint_id, revision, source, upstream, upstream_checkpoint_id, upstream_revision)
       SELECT :after, checkpoint_id, 2, 'words', :before, checkpoint_id, 1 FROM twophase.revision
       WHERE pipeline = :before AND state = 'SUPERSEDED' ORDER BY checkpoint_id DESC LIMIT :stale""",
    """UPDATE twophase.revision d SET outdated = true
       FROM twophase.input_revision i JOIN twophase.revision u ON (u.pipeline, u.checkpoint_id, u.revision)
           = (i.upstream, i.upstream_checkpoint_id, i.upstream_revision) AND u.state = 'SUPERSEDED'
       WHERE d.pipeline = :after
           AND (d.pipeline, d.checkpoint_id, d.revision) = (i.pipeline, i.checkpoint_id, i.revision)""",
)


@dataclass(frozen=True)
class Sizes:
    """How many checkpoints each record has, and how often everything is done."""

    many: int
    few: int
    rounds: int


def run(place: Place, sizes: Sizes) -> Findings:
    """Measure."""
    sides: dict[str, Callable[[], Mapping[str, float]]] = {}
    runs: dict[str, Checkpoints] = {}
    for name, checkpoints in (("many", sizes.many), ("few", sizes.few)):
        dsn = place.database(f"growth_{name}")
        with step(f"{checkpoints:,} checkpoints of two pipelines in a record, and in a table"):
            fill(name, dsn, checkpoints)
            fill(f"{name}_after", dsn, checkpoints)
            fill_table(name, checkpoints, data=False)
        runs[name] = Checkpoints(name, dsn)
        with runs[name].runner.record.engine.begin() as connection:
            for statement in _CHAIN:
                values = {"before": name, "after": f"{name}_after", "stale": STALE}
                wanted = {key: value for key, value in values.items() if f":{key}" in statement}
                connection.execute(text(statement), wanted)
        with step("the first sweep of it"):
            list(sweep(runs[name].runner.record, runs[name].runner.pipeline))
        administer(dsn, "VACUUM ANALYZE", "CHECKPOINT")
        sides[name] = _everything(runs[name])
    with step("doing everything again and again"):
        found = interleave(sides, rounds=sizes.rounds, warmup=5)
    count, reads = long_reads(runs["many"].runner.record.engine, sides["many"])
    for one in runs.values():
        one.close()
    many, few = found["many"], found["few"]
    parts = ("begin", "commit path", "recover", "sweep", "stale", "overview")
    return Findings(
        compared=f"{sizes.many:,} checkpoints in the record ÷ {sizes.few:,}",
        figures=[Figure(part, many[part], few[part], goal=GOAL) for part in parts],
        profile={name: medians(parts) for name, parts in found.items()},
        notes=[
            f"{count} different statements explained, {len(reads)} of them read more than {FEW:,} rows in one step",
            *reads,
        ],
    )


def _everything(side: Checkpoints) -> Callable[[], Mapping[str, float]]:
    """Return what does everything once."""
    record, pipeline = side.runner.record, side.runner.pipeline

    def asked(question: Callable[..., object], *arguments: object) -> float:
        with record.engine.connect() as connection:
            return timed(lambda: question(connection, *arguments))

    def turn() -> Mapping[str, float]:
        return {
            **side(),
            "recover": timed(side.runner.coordinator.recover),
            "sweep": timed(lambda: list(sweep(record, pipeline))),
            "stale": asked(queries.stale),
            "overview": asked(queries.overview, [side.name, f"{side.name}_after"]),
        }

    return turn


MEASURE = Measure(
    "growth",
    "Does anything that is done again and again take longer after 100,000 checkpoints than after 1,000?",
    full=Sizes(many=100_000, few=1000, rounds=60),
    quick=Sizes(many=5000, few=500, rounds=20),
    tiny=Sizes(many=400, few=200, rounds=1),
    run=run,
)
