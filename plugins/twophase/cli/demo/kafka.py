"""The demo on Kafka: runner, PostgreSQL and broker are killed at random, and a Java consumer never stops reading."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from twophase.cli.demo import proof
from twophase.cli.demo.story import CONF, PATIENCE, TWOPHASE, DemoFailed, Story
from twophase.cli.output import busy
from twophase.core import settings
from twophase.core.connections import variable
from twophase.core.errors import StoreUnavailable
from twophase.local import kafka, kafka_component, postgres
from twophase.local.committer_database import DRIVER

if TYPE_CHECKING:
    from rich.console import Console

LINES, COUNTS, TABLE = "lines", "word-counts", "word_counts"
#: How many words there are, and how many are in a line.
WORDS, PER_LINE = 500, 3
_PARTITIONS = 2
_POLL = 0.05
#: How many runs may fail after the last kill: what was killed may still be coming back.
_FAILURES = 5
#: What is killed, in words.
VICTIMS = {
    "runner": "the run, and its Spark with it",
    "postgres": "PostgreSQL: the record is in it, and one of the outputs",
    "broker": "the broker: the input is in it, and one of the outputs",
}


class Row(NamedTuple):
    """One count of a checkpoint."""

    word: str
    frequency: int


class KafkaStory(Story):
    """Lets `twophase run` count words from a topic, and kills whatever it stands on."""

    pipeline = "kafka_word_count"

    def __init__(self, say: Console, records: int, kills: int) -> None:
        """Say how many records go in, and how often something is killed."""
        from twophase.examples import kafka_word_count

        super().__init__(say)
        self.file = Path(kafka_word_count.__file__)
        self.table = Path(kafka_word_count.kafka_word_count.writes["lake"].location())
        self.records, self.kills = records, kills
        self.sent: Counter[str] = Counter()
        self._left = records
        self._runner: subprocess.Popen[bytes] | None = None
        #: Seconds that a run of one checkpoint takes here.
        self._usual = 1.0

    def play(self) -> bool:
        """Play it; say whether the proof holds."""
        self.say.print(
            f"[bold]Twophase demo on Kafka[/]: {self.records:,} lines, counted from a topic into a topic, PostgreSQL"
            f" and files at once; {self.kills} kills at random moments",
            soft_wrap=True,
        )
        with self._broker() as broker, self._producer(broker) as producer, JavaReader(broker) as reader:
            self.head("1. Nothing is killed")
            self._send(producer, self.records // (self.kills + 2))
            began = time.monotonic()
            self._finish()
            self._usual = time.monotonic() - began
            self._told(reader)
            self.head(f"2. {self.kills} kills, while new lines come in")
            self._rounds(broker, producer, reader)
            self.head("3. What is left is finished")
            self._send(producer, self._left)
            self._finish()
            self._told(reader)
            return self._prove(reader)

    # --- the servers -------------------------------------------------------------------------------------------------

    @contextmanager
    def _broker(self) -> Iterator[kafka.Broker]:
        """Start PostgreSQL and a broker with two topics, and tell the runs where they are."""
        from twophase.cli.record_access import opened
        from twophase.storage.kafka_cluster import KafkaCluster

        with busy(self.say, "starting PostgreSQL and Kafka"), opened(may_start=True):
            target = postgres.create_database(kafka_component.DATABASE)
            broker = kafka.Broker(settings.home() / "kafka").start()
        try:
            os.environ |= {
                variable(kafka_component.CONNECTION): kafka_component.connection(broker.address()),
                variable(kafka_component.TARGET): target.replace(DRIVER, "postgres", 1),
                "SPARK_CONF_DIR": str(kafka_component.write_spark_defaults()),
            }
            cluster = KafkaCluster(kafka_component.CONNECTION, "demo")
            cluster.create(LINES, _PARTITIONS)
            cluster.create(COUNTS, 1)  # the reader follows one partition, without a group that could move it
            self.tell(f"PostgreSQL and Apache Kafka {kafka.VERSION} run ({broker.address()})", "dim")
            yield broker
        finally:
            self._end_runner()
            broker.stop()

    @contextmanager
    def _producer(self, broker: kafka.Broker) -> Iterator[Any]:
        """Yield a producer that sends each line once, though the broker dies."""
        from confluent_kafka import Producer

        producer = Producer(
            {
                "bootstrap.servers": broker.address(),
                "enable.idempotence": True,
                "message.timeout.ms": round(PATIENCE * 1000),
                "linger.ms": 20,
                "log_level": 0,
            }
        )
        yield producer
        producer.purge()

    def _send(self, producer: Any, count: int) -> None:  # noqa: ANN401 - a Producer
        """Send some more lines; they need not have arrived yet."""
        for _ in range(count):
            words = [f"w{self._random.randrange(WORDS)}" for _ in range(PER_LINE)]
            self.sent.update(words)
            while True:
                try:
                    producer.produce(LINES, " ".join(words))
                    break
                except BufferError:
                    producer.poll(_POLL)
        self._left -= count
        producer.poll(0)
        self._producing = producer
        self.tell(f"new input: {count:,} lines", "dim")

    # --- the runs ----------------------------------------------------------------------------------------------------

    def _run(self) -> subprocess.Popen[bytes]:
        """Return the run that is under way, or start one."""
        if self._runner is None or self._runner.poll() is not None:
            conf = [part for item in CONF.items() for part in ("--conf", "=".join(item))]
            with (settings.home() / "runs.log").open("ab") as log:
                self._runner = subprocess.Popen(
                    [*TWOPHASE, "run", str(self.file), "--drain", "--master", "local[2]", *conf],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        return self._runner

    def _end_runner(self) -> None:
        if self._runner is not None:
            self._runner.kill()
            self._runner.wait()

    def _finish(self) -> None:
        """Run until a run has found nothing new, and everything that was sent is read."""
        log, failures = settings.home() / "runs.log", 0
        with busy(self.say, "running") as update:
            if left := self._producing.flush(PATIENCE):
                msg = f"{left} lines did not reach the broker"
                raise DemoFailed(msg)
            while True:
                if self._run().wait() == 0:
                    return
                failures += 1
                if failures > _FAILURES:
                    msg = f"nothing is killed, and runs go on failing: {log.read_text().splitlines()[-1]}; see {log}"
                    raise DemoFailed(msg)
                update(f"running again after {failures} failures")

    # --- killing -----------------------------------------------------------------------------------------------------

    def _rounds(self, broker: kafka.Broker, producer: Any, reader: JavaReader) -> None:  # noqa: ANN401 - a Producer
        share = self._left // (self.kills + 1)
        order = random.Random()  # noqa: S311 - when and whom to kill
        first = order.sample(list(VICTIMS), len(VICTIMS))
        for number in range(self.kills):
            self._send(producer, share)
            self._run()
            with busy(self.say, "running"):
                self._wait(order.uniform(0.05, 1.3) * self._usual, producer)
            victim = first[number] if number < len(first) else order.choice(list(VICTIMS))
            self._told(reader)
            self._kill(victim, broker)
            with busy(self.say, f"{victim} is down"):
                self._wait(order.uniform(0, 2), producer)
                self._bring_back(victim, broker)

    def _wait(self, seconds: float, producer: Any) -> None:  # noqa: ANN401 - a Producer
        """Let time pass, or until there is nothing left to do; a run that fails is run again, as a scheduler does."""
        began, run = time.monotonic(), self._run()
        while time.monotonic() < began + seconds:
            producer.poll(_POLL)
            if run.poll() == 0:
                self._usual = min(self._usual, time.monotonic() - began)
                return
            run = self._run()

    def _kill(self, victim: str, broker: kafka.Broker) -> None:
        from rich.text import Text

        pid = {
            "runner": self._run().pid,
            "postgres": postgres.pid(),
            "broker": broker.process.pid if broker.process else None,
        }[victim]
        if pid is None:
            self.tell(f"{victim} was down already")
            return
        if victim == "broker":
            broker.kill()
        else:
            os.kill(pid, signal.SIGKILL)
        self.say.print(Text.assemble("   ", (f"kill -9 {pid}", "bold red"), f": {VICTIMS[victim]}"), soft_wrap=True)

    @staticmethod
    def _bring_back(victim: str, broker: kafka.Broker) -> None:
        if victim == "broker":
            broker.start()
        if victim == "postgres":
            postgres.ensure()

    # --- looking -----------------------------------------------------------------------------------------------------

    def _told(self, reader: JavaReader) -> None:
        """Say in one line what the record says of the last checkpoint, and what the reader has seen."""
        from rich.text import Text

        rows = reader.rows()
        found = f"{len(rows):,} counts, {sum(row.frequency for row in rows):,} words in all"
        line = Text("   record: ").append(self._recorded(None)).append("   reader: ").append(found, style="bold")
        self.say.print(line, soft_wrap=True)

    # --- the proof ---------------------------------------------------------------------------------------------------

    def _prove(self, reader: JavaReader) -> bool:
        record = self.commit_table()
        self.head("The proof", ": the words that were sent, counted in plain Python, against the three outputs")
        lake = [Row(row.word, row.frequency) for row in proof.read(self.table)]
        dwh = _of_postgres()
        topic = reader.until(len(lake))
        checkpoints = [row["checkpoint_id"] for row in record if row["state"] == "COMMITTED"]
        checks = [
            _totals("the topic, by a Java consumer that never stopped,", self.sent, topic),
            _totals("the PostgreSQL table", self.sent, dwh),
            _totals("the files", self.sent, lake),
            proof.Finding(
                "all three outputs have the same rows, each as often",
                Counter(topic) == Counter(dwh) == Counter(lake),
                f"{len(topic):,}, {len(dwh):,} and {len(lake):,} rows",
            ),
            proof.Finding(
                "every checkpoint is committed once",
                sorted(checkpoints) == list(range(1, len(checkpoints) + 1)) and len(record) == len(checkpoints),
                f"{len(checkpoints)} checkpoints",
            ),
            reader.check(),
            self.verified(),
        ]
        return self.conclude(checks)


def _totals(which: str, sent: Counter[str], rows: list[Row]) -> proof.Finding:
    """Compare the totals of each word with what was sent."""
    found: Counter[str] = Counter()
    for row in rows:
        found[row.word] += row.frequency
    lost, extra = (sent - found).total(), (found - sent).total()
    told = f", {lost:,} lost, {extra:,} too many" if lost or extra else ""
    claim = f"{which} has every word as often as it was sent"
    return proof.Finding(claim, not lost and not extra, f"{found.total():,} of {sent.total():,} words{told}")


def _of_postgres() -> list[Row]:
    import psycopg2

    connection = psycopg2.connect(postgres.create_database(kafka_component.DATABASE).replace(DRIVER, "postgresql", 1))
    try:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT word, frequency FROM {TABLE}")  # noqa: S608 - a constant
            return [Row(*row) for row in cursor.fetchall()]
    finally:
        connection.close()


class JavaReader:
    """Kafka's own consumer, in Java: it prints each committed record as it comes, from before the first one on."""

    def __init__(self, broker: kafka.Broker) -> None:
        """Name the broker."""
        self._command = kafka.console_consumer(broker.address(), COUNTS, partition=0)
        self._output = settings.home() / "reader.txt"

    def __enter__(self) -> Self:
        """Begin to read."""
        with self._output.open("wb") as output, (settings.home() / "reader.log").open("wb") as errors:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop reading."""
        self._process.kill()
        self._process.wait()

    def _lines(self) -> list[list[str]]:
        whole = self._output.read_text().rpartition("\n")[0]
        return [line.split("\t") for line in whole.splitlines()]

    def rows(self) -> list[Row]:
        """Return what it has printed so far."""
        return [Row(word, json.loads(value)["frequency"]) for _, word, value in self._lines()]

    def until(self, count: int) -> list[Row]:
        """Wait until it has printed so many rows, or for a while; return what it has printed."""
        deadline = time.monotonic() + PATIENCE
        while len(rows := self.rows()) < count and time.monotonic() < deadline:
            if self._process.poll() is not None:
                msg = f"the Java consumer has ended; see {settings.home() / 'reader.log'}"
                raise StoreUnavailable(msg)
            time.sleep(_POLL)
        return rows

    def check(self) -> proof.Finding:
        """Return the claim that it has read everything in one go."""
        offsets = [int(offset.partition(":")[2]) for offset, *_ in self._lines()]
        once = len(set(offsets)) == len(offsets) and offsets == sorted(offsets)
        runs = self._process.poll() is None
        return proof.Finding(
            "the Java consumer was never restarted, and read each offset once",
            once and runs,
            f"pid {self._process.pid}, offsets up to {max(offsets, default=0):,}",
        )
