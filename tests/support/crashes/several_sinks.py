"""A pipeline into sinks of several kinds, what processes do with it, and what each sink then holds."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg2

from support.crashes.scenarios import Failing
from support.pipelines.factories import PreStaged, Row, land, numbered, visible, words_pipeline
from support.servers.kafka import make_topic
from support.servers.kafka import produce as send
from support.servers.kafka import read as read_topic
from support.servers.s3 import BUCKET, CONN_ID
from support.sinks.log_tables import CATALOG as IN_A_FILE
from support.sinks.log_tables import DeltaFormat, IcebergFormat
from support.sinks.senders import kept
from twophase import Pipeline, ownership, sinks, sources
from twophase.core.connections import required
from twophase.core.errors import AttemptFailed
from twophase.core.settings import home
from twophase.core.states import State
from twophase.local.kafka import Broker
from twophase.local.record_access import open_record
from twophase.reconciliation import reconcile as reconcile_all
from twophase.runner import Runner
from twophase.sinks.base import Sink
from twophase.sinks.log_tables.base import LogTableSink
from twophase.sinks.write_ahead import delivery
from twophase.spark.plan import Plan
from twophase.storage import database
from twophase.sweep import sweep as sweep_all
from twophase.wiring import coordinator_of

# The fork server imports this module once for all processes: what sinks import only when they need it is imported here.
for needed in (
    *("adbc_driver_postgresql.dbapi", "deltalake", "psycopg2.extras", "psycopg2.sql", "pyiceberg.io.pyarrow"),
    *("rich.table", "sqlalchemy.dialects.sqlite", "twophase.committer.registry", "twophase.sinks.log_tables.delta"),
    *("twophase.sinks.log_tables.iceberg", "xxhash", "confluent_kafka.admin", "twophase.sinks.kafka.sink"),
):
    importlib.import_module(needed)

#: The connection of the target database, as processes of the test get it.
TARGET = "TWOPHASE_TEST_TARGET"

#: The id of the connection that Iceberg's catalog is reached by; default: it is a file.
CATALOG = "TWOPHASE_TEST_CATALOG"

DECLARED: dict[str, Callable[[], Sink]] = {
    "files": lambda: sinks.Files("lake/words"),
    "postgres": lambda: sinks.Postgres("words", conn_id="dwh", create=True),
    "attached": lambda: sinks.Postgres("words_attached", conn_id="dwh", create=True, attach=True),
    "upserted": lambda: sinks.Postgres("words_upserted", conn_id="dwh", create=True, mode="upsert", key=["id"]),
    "retracted": lambda: sinks.Postgres("words_retracted", conn_id="dwh", create=True, mode="retract", key=["id"]),
    "replaced": lambda: sinks.Postgres("words_replaced", conn_id="dwh", create=True, mode="replace"),
    "constrained": lambda: _constrained("words_constrained", _checkpoint="bigint NOT NULL"),
    "constrained_upserted": lambda: _constrained("words_constrained_upserted", mode="upsert", key=["id"]),
    "sent": lambda: sinks.WriteAhead(
        "support.sinks.senders:Keeping", arguments={"path": str(home() / "kept.db")}, idempotent=True
    ),
    "delta": lambda: sinks.Delta("delta/words"),
    "delta_upserted": lambda: sinks.Delta("delta/upserted", mode="upsert", key=["id"]),
    "iceberg": lambda: sinks.Iceberg("db.words", path="iceberg/words", catalog=os.environ.get(CATALOG) or IN_A_FILE),
    "kafka": lambda: sinks.Kafka(f"words-{_mine()}", conn_id="kafka", markers=f"markers-{_mine()}"),
    "delta_s3": lambda: sinks.Delta(f"{_bucket()}/delta/words", conn_id=CONN_ID),
    "iceberg_s3": lambda: sinks.Iceberg(
        "db.remote", path=f"{_bucket()}/iceberg/words", conn_id=CONN_ID, catalog=IN_A_FILE
    ),
}
#: Those on this machine's disk and in its database; what a merge has overwritten cannot be replaced.
LOCAL = tuple(kind for kind in DECLARED if not kind.endswith("_s3") and kind not in {"kafka", "delta_upserted"})
#: The tables of the target database.
TABLES = {
    "postgres": "words",
    **{kind: f"words_{kind}" for kind in ("attached", "upserted", "retracted", "replaced")},
    **{kind: f"words_{kind}" for kind in ("constrained", "constrained_upserted")},
}
#: Those of them with constraints of every kind and a trigger.
CONSTRAINED = frozenset({"constrained", "constrained_upserted"})
#: Those whose promotion is tried out before the vote.
TRIED = CONSTRAINED | {"attached"}
#: Sinks that hold what their last checkpoint brought, and nothing else.
LAST_ONLY = frozenset({"retracted", "replaced"})
#: How many rows a checkpoint has here.
ROWS = 20
#: Behind the kinds of a pipeline whose checkpoints stand for days: the sinks then hold all of them.
BY_SLOTS = " by slots"
#: Behind the kinds of a pipeline that reads a Kafka topic.
FROM_KAFKA = " from kafka"


_MADE = """
    SELECT pg_advisory_xact_lock(16);
    CREATE TABLE IF NOT EXISTS public.known (frequency bigint PRIMARY KEY);
    INSERT INTO public.known SELECT generate_series(0, 9) ON CONFLICT DO NOTHING;
    CREATE TABLE IF NOT EXISTS public.{table} (
        id bigint PRIMARY KEY, word text NOT NULL CHECK (length(word) > 1), {more}
        frequency bigint NOT NULL REFERENCES public.known DEFERRABLE INITIALLY DEFERRED, UNIQUE (word, id));
    CREATE TABLE IF NOT EXISTS public.{table}_seen (id bigint);
    CREATE OR REPLACE FUNCTION public.{table}_see() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN INSERT INTO public.{table}_seen VALUES (NEW.id); RETURN NEW; END $$;
    CREATE OR REPLACE TRIGGER see BEFORE INSERT ON public.{table} FOR EACH ROW EXECUTE FUNCTION public.{table}_see();
"""


def _constrained(table: str, *, _checkpoint: str = "", **more: Any) -> Sink:
    """Declare a table that has constraints of every kind and a trigger; make it, unless it is there."""
    with closing(psycopg2.connect(os.environ[TARGET].replace("postgres://", "postgresql://"))) as session, session:
        marked = f"_checkpoint {_checkpoint}," if _checkpoint else ""
        session.cursor().execute(_MADE.format(table=table, more=marked))
    return sinks.Postgres(table, conn_id="dwh", **more)


def seen(kind: str) -> int:
    """Return how many rows the trigger of a table has seen for good."""
    with closing(psycopg2.connect(os.environ[TARGET].replace("postgres://", "postgresql://"))) as session:
        cursor = session.cursor()
        cursor.execute(f"SELECT count(*) FROM public.{TABLES[kind]}_seen")
        found = cursor.fetchone()
    return found[0] if found else 0


def split(kinds: str) -> list[str]:
    """Return the kinds of `a+b+c`."""
    return kinds.removesuffix(BY_SLOTS).removesuffix(FROM_KAFKA).split("+")


def expected(kind: str, rows: list[Row], *, by_slots: bool = False) -> list[Row]:
    """Return what a reader of a sink must find when checkpoints with these rows are in it."""
    return rows[-ROWS:] if kind in LAST_ONLY and not by_slots else rows


def land_days(*days: int) -> list[Row]:
    """Write the rows of some days, two files each; return all of them."""
    made: list[Row] = []
    for day in days:
        for number in (2 * day, 2 * day + 1):
            batch = numbered(number)
            land(f"{number:06d}.json", batch, f"landing/days/dt=2026-11-{day:02d}")
            made += batch
    return made


def _bucket() -> str:
    """Return a folder of the test's own."""
    return f"s3://{BUCKET}/{_mine()}"


def _mine() -> str:
    """Return a name of the test's own: its run folder has one."""
    return hashlib.sha256(str(home()).encode()).hexdigest()[:8]


def serve_kafka(broker: Broker) -> None:
    """Create the topics that the Kafka sink of this test writes to, and the Kafka source reads."""
    for topic in ("words", "input"):
        make_topic(broker, 2, f"{topic}-{_mine()}")


def produce(broker: Broker, *numbers: int) -> list[Row]:
    """Send the rows of some files to the topic that the Kafka source reads; return them."""
    rows = [row for number in numbers for row in numbered(number)]
    send(broker, f"input-{_mine()}", [json.dumps(row) for row in rows])
    return rows


def group() -> str:
    """Return the consumer group of the Kafka source of this test."""
    return f"group-{_mine()}"


def pipeline(kinds: str) -> Pipeline:
    """Declare a pipeline into `a+b+c`."""
    os.environ["AIRFLOW_CONN_DWH"] = os.environ[TARGET]
    writes = {kind: DECLARED[kind]() for kind in split(kinds)}
    if kinds.endswith(FROM_KAFKA):
        schema = "id bigint, word string, frequency bigint"
        topic: dict[str, Any] = {"conn_id": "kafka", "format": "json", "schema": schema, "max_records": ROWS}
        read = sources.Kafka(f"input-{_mine()}", start="earliest", group=group(), **topic)
        return Pipeline("words", reads={"words": read}, transform="word_count:copy", writes=writes)
    if not kinds.endswith(BY_SLOTS):
        return words_pipeline(writes=writes, max_files=2)
    days = sources.Interval("landing/days/dt={start:%Y-%m-%d}", "json")
    return Pipeline("words", reads={"words": days}, transform="word_count:copy", writes=writes)


def held(kind: str) -> list[Row]:
    """Return the rows that a reader of a sink finds."""
    if kind == "files":
        return visible("lake/words")
    if kind == "sent":
        return kept(home() / "kept.db")
    if kind == "kafka":
        address = required("kafka").extra["bootstrap.servers"]
        return [json.loads(message.value()) for message in read_topic(address, f"words-{_mine()}")]
    if kind.startswith(("delta", "iceberg")):
        form = DeltaFormat() if kind.startswith("delta") else IcebergFormat()
        sink = DECLARED[kind]()
        assert isinstance(sink, LogTableSink)
        return form.content(sink)
    table = TABLES[kind]
    with psycopg2.connect(os.environ[TARGET].replace("postgres://", "postgresql://")) as session:
        cursor = session.cursor()
        cursor.execute("SELECT to_regclass(%s)", (f"public.{table}",))
        there = cursor.fetchone()
        if there is None or there[0] is None:
            return []
        cursor.execute(f"SELECT id, word, frequency FROM public.{table}")
        return [dict(zip(("id", "word", "frequency"), row, strict=True)) for row in cursor.fetchall()]


def run(kinds: str) -> None:
    """Take one checkpoint through."""
    with Runner(pipeline(kinds), PreStaged()) as runner:
        runner.run()


def fail(kinds: str) -> None:
    """Take one checkpoint up to its vote, and fail."""
    with Runner(pipeline(kinds), Failing()) as runner:
        try:
            runner.run()
        except AttemptFailed as error:
            if "as it was told to" not in str(error):
                raise


def drain(kinds: str) -> None:
    """Take checkpoints through until there is no new input."""
    with Runner(pipeline(kinds), PreStaged()) as runner:
        while runner.run():
            pass


def run_days(kinds: str, *days: int) -> None:
    """Take days through."""
    with Runner(pipeline(kinds), PreStaged()) as runner:
        for day in days:
            runner.run(f"2026-11-{day:02d}/2026-11-{day + 1:02d}")


def revised(rows: list[Row], revision: int) -> list[Row]:
    """Let each row say which revision wrote it, unless it is the first."""
    return [{**row, "word": f"{row['word']} r{revision}"} for row in rows] if revision > 1 else rows


def _marked(rows: list[Row], plan: Plan) -> list[Row]:
    return revised(rows, plan.revision)


def replace(kinds: str, checkpoint_id: int) -> None:
    """Take another revision of a committed checkpoint through."""
    with Runner(pipeline(kinds), PreStaged(change=_marked)) as runner:
        runner.replace(checkpoint_id)


def mended(rows: list[Row], _plan: Plan | None = None) -> list[Row]:
    """Return rows as today's transform gives them."""
    return [{**row, "word": "mended"} for row in rows]


def restage(kinds: str) -> None:
    """Stage the second checkpoint again for each sink that has not promoted it, as a person asks for."""
    with Runner(pipeline(kinds), PreStaged(change=mended)) as runner:
        newest = runner.coordinator.transact(lambda tx: tx.newest_of("words", 2))
        if newest.state is State.COMMITTING:
            done = runner.coordinator.transact(lambda tx: tx.committed(newest.key))
            runner.restage(2, "mended", [kind for kind in split(kinds) if kind not in done])


def impatiently(function: Callable[..., None], *arguments: Any) -> None:
    """Do it with short time limits: whoever waits for a stopped process waits a moment."""
    database.LOCK_TIMEOUT, delivery.PATIENCE = "300ms", 0.3
    function(*arguments)


def hand_over(kind: str, to: str) -> None:
    """Give a table to another pipeline."""
    record = open_record()
    ownership.hand_over(record, pipeline(kind), kind, to, "it is theirs")


def recover(kinds: str) -> None:
    """Finish what a crash left."""
    coordinator_of(open_record(), pipeline(kinds)).recover()


def sweep(kinds: str) -> None:
    """Remove what is dead."""
    for _ in sweep_all(open_record(), pipeline(kinds)):
        pass


def reconcile(kinds: str) -> None:
    """Bring a restored record up to its sinks."""
    record, declared = open_record(), pipeline(kinds)
    reconcile_all(record, declared, coordinator_of(record, declared), "restored")
