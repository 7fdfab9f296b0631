"""One whole checkpoint without Spark: beside the code before, beside a durable Delta commit, and many at once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
import pyarrow as pa

from benchmarks import code_before
from benchmarks.harness import Figure, Findings, Measure, Series, interleave, medians, number, step, timed
from benchmarks.place import Place, administer
from twophase.core.settings import data_path
from twophase.local import postgres
from twophase.storage import disk

CHILD = Path(__file__).with_name("commit_child.py")
#: What the server's log says of each message that asks it for something.
_SENT = re.compile(r"^\S+ \S+ UTC \[(\d+)\] LOG:  (?:statement|execute [^:]*): (.*)", re.MULTILINE)
_FRAME = re.compile(r"(BEGIN|COMMIT|ROLLBACK|START TRANSACTION)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Sizes:
    """How many commits each table has, how often one is measured, and how many pipelines run at once."""

    commits: int
    rounds: int
    processes: int
    pipelines: int
    #: Checkpoints of each pipeline in one turn of those that run at once.
    each: int
    turns: int


class Child:
    """A process that takes checkpoints through, by the code in a folder."""

    def __init__(self, code: Path, dsn: str, checkpoints: int, names: Sequence[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(code / "plugins"), str(code)])}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-P", str(CHILD), dsn, str(checkpoints), *names]
        self._process = subprocess.Popen(
            command, env=environment, cwd=code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._pipelines = len(names)
        self.answer()

    def ask(self, times: int) -> None:
        """Have some checkpoints of each pipeline taken through."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{times}\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, float]:
        """Wait until that is done."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            msg = f"the process of {self._pipelines} pipelines ended with {self._process.wait()}"
            raise RuntimeError(msg)
        answer: dict[str, float] = json.loads(line)
        return answer

    def __call__(self) -> Mapping[str, float]:
        """Take one checkpoint through."""
        self.ask(1)
        found = self.answer()
        return {"whole": found["seconds"], "cpu": found["cpu"]}

    def close(self) -> None:
        """End it."""
        self._process.communicate()


class Plain:
    """A Delta table that a user without us appends to, and makes durable."""

    def __init__(self, commits: int) -> None:
        self.folder = data_path("lake/plain")
        self.rows = pa.table({"id": pa.array([1], pa.int64()), "word": ["w"]})
        self._version = -1
        for _ in range(commits):
            self._write()

    def _write(self) -> None:
        from deltalake import write_deltalake

        write_deltalake(str(self.folder), self.rows, mode="append")
        self._version += 1

    def _sync(self) -> None:
        """Make the commit durable: the file that it adds, its entry in the log, and the names of both."""
        entry = self.folder / "_delta_log" / f"{self._version:020d}.json"
        actions = [json.loads(line) for line in entry.read_text().splitlines()]
        added = [self.folder / action["add"]["path"] for action in actions if "add" in action]
        for path in (*added, entry):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        disk.fsync_folder(self.folder)
        disk.fsync_folder(entry.parent)

    def __call__(self) -> Mapping[str, float]:
        """Append one row."""
        written = timed(self._write)
        return {"whole": written + timed(self._sync), "write": written}


def run(place: Place, sizes: Sizes) -> Findings:
    """Measure."""
    postgres.ensure()
    errors = []
    with ExitStack() as held:
        sides: dict[str, Callable[[], Mapping[str, float]]] = {}
        sides["ours"] = ours = _child(held, code_before.ROOT, "ours", sizes.commits)
        try:
            sides["before"] = _child(held, code_before.tree(), "before", sizes.commits)
        except code_before.NotHere as missing:
            errors.append(str(missing))
        with step(f"{sizes.commits:,} commits by write_deltalake"):
            sides["plain"] = Plain(sizes.commits)
        found = interleave(sides, rounds=sizes.rounds, warmup=5)
        sent = {name: _traffic(place, side) for name, side in sides.items() if isinstance(side, Child)}
        at_once = _at_once(held, ours, sizes)
    whole = {name: parts["whole"] for name, parts in found.items()}
    figures = []
    if "before" in whole:
        figures.append(Figure("a checkpoint ÷ the same by the code before", whole["ours"], whole["before"], goal=0.25))
    figures.append(Figure("a checkpoint ÷ write_deltalake, made durable", whole["ours"], whole["plain"], goal=1.0))
    figures.append(Figure("transactions of a checkpoint", _series(sent["ours"][0]), goal=4, unit="transactions"))
    figures.append(Figure("statements of a checkpoint", _series(sent["ours"][1]), goal=20, unit="statements"))
    name = f"a checkpoint of {sizes.pipelines} pipelines at once in {sizes.processes} processes ÷ of one alone"
    figures.append(Figure(name, at_once.many, at_once.one, goal=0.333))
    return Findings(
        compared=f"one checkpoint without Spark, one source, one sink, after {sizes.commits:,} of them",
        figures=figures,
        profile={name: medians(parts) for name, parts in found.items()},
        notes=[
            *(f"{name}: {count[0]:.0f} transactions, {count[1]:.0f} statements" for name, count in sent.items()),
            "statements are those that the server's log has, but for BEGIN and COMMIT",
            "write_deltalake opens its table each time, and makes nothing durable by itself: what does is timed, too",
            *at_once.notes,
        ],
        errors=errors,
    )


def _series(value: float) -> Series:
    return Series((value,))


def _child(held: ExitStack, code: Path, name: str, commits: int, pipelines: Sequence[str] = ()) -> Child:
    with step(f"{commits:,} checkpoints of {name} in a record and in a table"):
        child = Child(code, postgres.create_database(f"commit_{name}"), commits, pipelines or [name])
    held.callback(child.close)
    return child


# --- what reaches the server -----------------------------------------------------------------------------------------


def _traffic(place: Place, side: Child, times: int = 10) -> tuple[float, float]:
    """Count the transactions and the statements of one checkpoint, in the server's log."""
    log = place.home / "postgres" / "log"
    with _logging():
        side()  # its sessions have heard of it by now
        before = log.stat().st_size
        for _ in range(times):
            side()
        with log.open("rb") as file:
            file.seek(before)
            said = file.read().decode(errors="replace")
    sent = [text for _, text in _SENT.findall(said)]
    begun = sum(text.upper().startswith(("BEGIN", "START TRANSACTION")) for text in sent)
    return begun / times, sum(not _FRAME.match(text) for text in sent) / times


@contextmanager
def _logging() -> Iterator[None]:
    """Have the server log what it is asked."""
    dsn = postgres.ensure()
    administer(dsn, "ALTER SYSTEM SET log_statement = 'all'", "SELECT pg_reload_conf()")
    try:
        yield
    finally:
        administer(dsn, "ALTER SYSTEM RESET log_statement", "SELECT pg_reload_conf()")


# --- many at once ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AtOnce:
    """Seconds a checkpoint of many pipelines at once, and of one alone; what else is worth a line."""

    many: Series
    one: Series
    notes: list[str]


def _at_once(held: ExitStack, alone: Child, sizes: Sizes) -> AtOnce:
    """Let many pipelines run at once, and one alone, by turns."""
    dsn = postgres.create_database("commit_many")
    children = []
    share = sizes.pipelines // sizes.processes
    with step(f"{sizes.processes} processes of {share} pipelines each"):
        for process in range(sizes.processes):
            names = [f"many_{process}_{pipeline}" for pipeline in range(share)]
            child = Child(code_before.ROOT, dsn, 10, names)
            held.callback(child.close)
            children.append(child)
    total = sizes.pipelines * sizes.each
    many = {"many": lambda: _turn(children, sizes.each, total), "one": lambda: _turn([alone], sizes.each, sizes.each)}
    found = interleave(many, rounds=sizes.turns, warmup=1)
    busy = {name: {part: median(values.values) for part, values in parts.items()} for name, parts in found.items()}
    rates = {name: 1 / parts["each"] for name, parts in busy.items()}
    cores = os.cpu_count() or 1
    more = rates["many"] / rates["one"]
    notes = [
        f"checkpoints a second: {rates['many']:.0f} at once, {rates['one']:.0f} alone, {more:.2f} times as many",
        *(
            f"CPU of a checkpoint, {name}: {number(parts['cpu'])} s in its process, {number(parts['server'])} s in the"
            f" server, of {number(parts['each'] * cores)} s that {cores} cores have meanwhile"
            for name, parts in busy.items()
        ),
    ]
    return AtOnce(found["many"]["each"], found["one"]["each"], notes)


def _turn(children: Sequence[Child], each: int, total: int) -> Mapping[str, float]:
    """Take checkpoints through in some processes at once; return the seconds of one, and the CPU that it took where."""
    answers: list[dict[str, float]] = []

    def all_of_them() -> None:
        for child in children:
            child.ask(each)
        answers.extend(child.answer() for child in children)

    before = _cpu_of_server()
    seconds = timed(all_of_them)
    server = _cpu_of_server() - before
    cpu = sum(answer["cpu"] for answer in answers)
    return {"each": seconds / total, "cpu": cpu / total, "server": server / total}


def _cpu_of_server() -> float:
    """Return the CPU seconds of the server's processes that are there, and of those that have ended."""
    pid = postgres.pid()
    if pid is None:
        return 0.0
    server = psutil.Process(pid)
    times = [process.cpu_times() for process in server.children(recursive=True)]
    ended = server.cpu_times()
    seconds: float = sum(one.user + one.system for one in times) + ended.children_user + ended.children_system
    return seconds


MEASURE = Measure(
    "commit",
    "What does a checkpoint cost besides Spark's work, and how many go through at once?",
    full=Sizes(commits=1_000, rounds=60, processes=4, pipelines=16, each=20, turns=5),
    quick=Sizes(commits=100, rounds=20, processes=4, pipelines=16, each=5, turns=3),
    tiny=Sizes(commits=3, rounds=1, processes=2, pipelines=4, each=1, turns=1),
    run=run,
)
