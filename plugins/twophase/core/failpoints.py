"""Failpoints: named places where a test may stop, kill or fail a process.

`TWOPHASE_FAILPOINTS="name=kill|raise|stop[@n]"` sets them; every module with a durable step calls `hit` on either side.
Unset, a failpoint costs nothing. A hit writes a line to stderr first, so a test can tell "survived it" from
"never got there".
"""

from __future__ import annotations

import os
import signal

from twophase.core.errors import ConfigError, TwophaseError

#: Every failpoint, in the order in which a checkpoint meets them, and how things stand there.
FAILPOINTS: dict[str, str] = {
    "begin.before": "nothing recorded",
    "begin.pinned": "where the partitions of a source begin is written, not yet committed to the database",
    "begin.inside": "checkpoint and claims written, not yet committed to the database",
    "adopt.before": "a folder that was there bears the marker of revision 0, which is not recorded",
    "adopt.after": "revision 0 recorded, nothing staged",
    "begin.after": "input fixed, its first attempt open; of a slot: no attempt",
    "attempt.before": "input fixed, epoch not bumped; with a new revision: neither committed to the database yet",
    "attempt.after": "attempt open, nothing staged",
    "attempt.known": "attempt open, the checksums of its input recorded, nothing staged",
    "submit.before": "attempt open, plan not written",
    "submit.planned": "plan written, Spark not started",
    "stage.before": "in Spark: nothing written",
    "stage.written": "in Spark: data files written, not durable",
    "stage.durable": "in Spark: files fsynced, no manifest",
    "stage.manifest": "in Spark: manifest written, its name not durable, no marker",
    "stage.marked": "in Spark: marker in the staged folder, result not reported",
    "stage.after": "in Spark: result reported",
    "vote.before": "staged, not checked",
    "vote.tried": "in Postgres: the promotion tried out in the target database, not yet rolled back",
    "vote.checked": "manifest checked against storage, vote not recorded",
    "vote.inside": "vote written, not yet committed to the database",
    "vote.after": "votes recorded; in `twophase run` the commit point is passed too",
    "audit.before": "staged and checked, an audit not run",
    "audit.after": "an audit has looked, its vote not recorded",
    "commit.before": "nothing decided; pre-committed, or in `twophase run` staged and checked without votes",
    "commit.inside": "decision written, not yet committed to the database",
    "commit.after": "the commit point is passed, nothing promoted",
    "promote.before": "decided, staged folder in its place",
    "promote.receipt": "the sink keeps the receipt of the decision, nothing visible",
    "promote.taken": "staged folder taken, not checked",
    "promote.checked": "taken folder checked, not visible; in a log table: staged files checked, no commit",
    "promote.marked": "in Postgres: marker written, nothing applied, not yet committed to the target database",
    "promote.applied": "in Postgres: staged rows applied, not yet committed to the target database",
    "promote.gap": "without RENAME_EXCHANGE: the old revision put away, nothing visible in its place",
    "promote.visible": "visible, not durable; when a folder was exchanged: what it replaced is in taken/",
    "promote.superseded": "in a replacement: what it replaced was put away",
    "promote.durable": "output visible and durable, not recorded",
    "promote.inside": "row in committed written, not yet committed to the database",
    "promote.after": "row in committed; if no sink has to wait: COMMITTED",
    "send.before": "write-ahead: alone with what is left to send, a subtask not sent",
    "send.row": "write-ahead: in the middle of send_values, a row handed over",
    "send.sent": "write-ahead: a subtask sent, its commit not kept",
    "send.committed": "write-ahead: a subtask sent, its commit kept",
    "send.closed": "write-ahead: everything sent, and noted beside the staged rows",
    "kafka.fenced": "in Kafka: earlier producers of the write fenced, no transaction begun",
    "kafka.begun": "in Kafka: transaction begun, nothing sent",
    "kafka.sent": "in Kafka: every row sent, no marker, not committed",
    "kafka.marked": "in Kafka: rows and marker sent, not committed",
    "kafka.committed": "in Kafka: committed, the marker not read back",
    "finish.before": "every sink promoted, revision still committing",
    "finish.inside": "COMMITTED written, not yet committed to the database",
    "finish.after": "COMMITTED",
    "report.before": "COMMITTED, the offsets not reported to the source",
    "report.after": "COMMITTED, the offsets reported, or a warning logged",
    "settle.before": "committed, input files in the landing folder",
    "settle.moved": "input files archived or deleted, names not freed",
    "settle.after": "input settled",
    "abort.before": "undecided",
    "abort.inside": "ABORTING written, not yet committed to the database",
    "abort.after": "ABORTING, staged output in place",
    "abort.discarded": "staged output removed, still ABORTING",
    "abort.end": "ABORTED",
    "recover.before": "nothing looked at",
    "restage.opened": "decided, another attempt open for a sink that cannot promote, nothing staged",
    "restage.discarded": "restaged and checked, what earlier attempts staged removed, no vote",
    "reconcile.before": "what the sinks hold was compared with the record, nothing changed",
    "reconcile.inside": "forgotten decisions written, not yet committed to the database",
    "reconcile.after": "forgotten decisions recorded, not finished",
    "hand_over.before": "nothing is on its way to a table, which still names its pipeline",
    "hand_over.inside": "the table names another pipeline, the record not yet committed to the database",
    "sweep.before": "a dead folder found, not removed",
    "sweep.after": "a dead folder removed",
    "sweep.inside": "a superseded revision written as swept, not yet committed to the database",
    "sweep.swept": "a superseded revision recorded as swept, its folder in place",
    "sweep.forgotten": "the folder of a swept revision removed",
    "sweep.clean": "nothing dead is left of a pipeline's attempts, and that is recorded",
    "table.created": "in a first promotion to a log table: it exists, empty",
    "table.widened": "in a promotion with new columns: the table has them, without rows",
    "state.staged": "in Spark, with state: its runs may be written, the output is not",
    "state.merged": "in Spark, with state: runs written and merged, result not reported",
    "state.expired": "states recorded as swept, their files in place",
    "state.removed": "a file of a swept state removed, its list not forgotten",
}

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class FailpointError(TwophaseError):
    """A failpoint was set to `raise`."""


def parse(text: str) -> dict[str, tuple[str, int]]:
    """Read `name=action[@n],…` into name → (action, n)."""
    active = {}
    for part in filter(None, (part.strip() for part in text.replace(";", ",").split(","))):
        name, _, rest = part.partition("=")
        action, _, nth = rest.partition("@")
        if name not in FAILPOINTS:
            msg = f"TWOPHASE_FAILPOINTS: no failpoint {name!r}; `twophase failpoints` lists them"
            raise ConfigError(msg)
        if action not in {"kill", "raise", "stop"} or (nth and not (nth.isdecimal() and int(nth) > 0)):
            msg = f"TWOPHASE_FAILPOINTS: {part!r}: expected name=kill|raise|stop[@n]"
            raise ConfigError(msg)
        active[name] = (action, int(nth or 1))
    return active


_active = parse(os.environ.get("TWOPHASE_FAILPOINTS", ""))
_hits: dict[str, int] = {}


def configure(text: str) -> None:
    """Replace the active failpoints of this process."""
    global _active  # noqa: PLW0603 - one process, one set of failpoints
    _active = parse(text)
    _hits.clear()


def hit(name: str) -> None:
    """Do what this failpoint is set to do, at its nth hit; nothing if it is not set."""
    if not _active or name not in _active:
        return
    action, nth = _active[name]
    _hits[name] = _hits.get(name, 0) + 1
    if _hits[name] != nth:
        return
    os.write(2, f"failpoint {name}: {action}\n".encode())
    if action == "raise":
        msg = f"failpoint {name} ({FAILPOINTS[name]})"
        raise FailpointError(msg)
    os.kill(os.getpid(), _SIGNALS[action])
