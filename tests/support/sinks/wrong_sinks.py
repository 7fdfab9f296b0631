"""Sinks that each break one promise; the contract has to find them out. Built on the how-to's SQLite sink."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from sqlite_sink import COUNT, MARKER, SQLite  # type: ignore[import-not-found]

from twophase.core.checkpoint import Key, Output
from twophase.core.ports import Outcome, Promotion


class Applying(SQLite):  # type: ignore[misc]
    """Does in `apply` what it pleases, inside one transaction that begins with a look at the marker."""

    def promote(self, output: Output) -> Promotion:
        try:
            with sqlite3.connect(self.path, timeout=2) as db:
                db.execute("BEGIN IMMEDIATE")
                there = db.execute(COUNT, (output.handle["place"],)).fetchone() == (output.manifest["rows"],)
                if self.is_marked(db, output.key) or not there:
                    return self.find(output)  # type: ignore[no-any-return]
                self.apply(db, output)
            self.after(output.key)
            return Promotion(Outcome.PROMOTED)
        except sqlite3.OperationalError as error:
            return Promotion(Outcome.UNKNOWN, str(error))

    def is_marked(self, db: Any, key: Key) -> bool:
        return db.execute(MARKER, key[1:]).fetchone() is not None

    def apply(self, db: Any, output: Output) -> None:
        self.mark(db, output.key)
        self.take_out(db, output.key)
        place = output.handle["place"]
        db.execute("INSERT INTO words SELECT id, word, ? FROM staged WHERE place = ?", (output.key[1], place))

    def mark(self, db: Any, key: Key) -> None:
        db.execute("INSERT INTO marker VALUES (?, ?)", key[1:])

    def take_out(self, db: Any, key: Key) -> None:
        db.execute("DELETE FROM words WHERE checkpoint = ?", key[1:2])

    def after(self, key: Key) -> None:
        """Do nothing more."""


class Appending(Applying):
    """Takes nothing out, so that what is promoted twice is seen twice."""

    def take_out(self, db: Any, key: Key) -> None:
        if key.revision > 1:
            super().take_out(db, key)


class MarkerInMemory(Appending):
    """Remembers what it promoted as long as it lives."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.seen: set[Key] = set()

    def is_marked(self, db: Any, key: Key) -> bool:
        return key in self.seen

    def mark(self, db: Any, key: Key) -> None:
        self.seen.add(key)

    def find(self, output: Output) -> Promotion:
        return Promotion(Outcome.ALREADY_PROMOTED if output.key in self.seen else Outcome.RETRY_LATER)


class MarkerInASecondStep(Appending):
    """Marks in a transaction of its own, after the rows are visible."""

    def mark(self, db: Any, key: Key) -> None:
        """Later."""

    def after(self, key: Key) -> None:
        self._run(["INSERT INTO marker VALUES (?, ?)", *key[1:]])


class MarkerInAnEarlierStep(Appending):
    """Marks in a transaction of its own, before the rows are visible."""

    def promote(self, output: Output) -> Promotion:
        key, place = output.key, output.handle["place"]
        if self._run([MARKER, *key[1:]]):
            return Promotion(Outcome.ALREADY_PROMOTED)
        self._run(["INSERT INTO marker VALUES (?, ?)", *key[1:]])
        self._run(["INSERT INTO words SELECT id, word, ? FROM staged WHERE place = ?", key.checkpoint_id, place])
        return Promotion(Outcome.PROMOTED)


class HighWaterMark(Appending):
    """Knows the highest checkpoint only, and is not declared as ordered."""

    def is_marked(self, db: Any, key: Key) -> bool:
        return db.execute("SELECT 1 FROM marker WHERE checkpoint >= ?", key[1:2]).fetchone() is not None

    def find(self, output: Output) -> Promotion:
        if self._run(["SELECT 1 FROM marker WHERE checkpoint >= ?", output.key.checkpoint_id]):
            return Promotion(Outcome.ALREADY_PROMOTED)
        return super().find(output)  # type: ignore[no-any-return]


class LookingBeforehand(Appending):
    """Looks at the marker, and then does its work in a transaction that does not look again."""

    def promote(self, output: Output) -> Promotion:
        found: Promotion = self.find(output)
        if found.outcome is not Outcome.RETRY_LATER:
            return found
        with sqlite3.connect(self.path, timeout=10) as db:
            db.execute("BEGIN IMMEDIATE")
            self.apply(db, output)
        return Promotion(Outcome.PROMOTED)


class VisibleAtOnce(Applying):
    """Stages where everybody looks."""

    def stage(self, frame: Any, output: Output) -> Any:
        manifest, place = super().stage(frame, output), output.handle["place"]
        self._run(["INSERT INTO words SELECT id, word, ? FROM staged WHERE place = ?", output.key[1], place])
        return manifest


class OneRowAfterTheOther(Applying):
    """Makes rows visible one by one."""

    def promote(self, output: Output) -> Promotion:
        key = output.key
        if self._run([MARKER, *key[1:]]):
            return Promotion(Outcome.ALREADY_PROMOTED)
        self._run(["DELETE FROM words WHERE checkpoint = ?", key.checkpoint_id])
        for number, word in self._run(["SELECT id, word FROM staged WHERE place = ?", output.handle["place"]]):
            self._run(["INSERT INTO words VALUES (?, ?, ?)", number, word, key.checkpoint_id])
        self._run(["INSERT INTO marker VALUES (?, ?)", *key[1:]])
        return Promotion(Outcome.PROMOTED)


class NeverTakingOut(Applying):
    """Lets an older revision's rows be."""

    def take_out(self, db: Any, key: Key) -> None:
        """Leave them."""


class NeverDiscarding(Applying):
    """Keeps what it should discard, and promotes it when asked."""

    def discard(self, output: Output) -> None:
        """Keep it."""


class EmptyIsNothing(Applying):
    """Takes an output without rows for one that is not there yet."""

    def promote(self, output: Output) -> Promotion:
        return super().promote(output) if output.manifest["rows"] else Promotion(Outcome.RETRY_LATER)


class EveryAttempt(Applying):
    """Promotes whatever was staged for the revision."""

    def apply(self, db: Any, output: Output) -> None:
        key = output.key
        self.mark(db, key)
        self.take_out(db, key)
        place = f"{key.checkpoint_id}.{key.revision}.%"
        db.execute("INSERT INTO words SELECT id, word, ? FROM staged WHERE place LIKE ?", (key[1], place))


class SilentVerify(Applying):
    """Finds everything well."""

    def verify(self, output: Any) -> Any:
        return iter(())


class LastMarkerOnly(Appending):
    """Knows what it promoted last."""

    def mark(self, db: Any, key: Key) -> None:
        db.execute("DELETE FROM marker")
        super().mark(db, key)


class ReplacingInTwoSteps(Applying):
    """Takes the older revision out before it puts the newer one in."""

    def promote(self, output: Output) -> Promotion:
        key = output.key
        if key.revision > 1 and not self._run([MARKER, *key[1:]]):
            self._run(["DELETE FROM words WHERE checkpoint = ?", key.checkpoint_id])
        return super().promote(output)


class BringingBack(Applying):
    """Looks at the marker, and puts its revision in the place of whatever is there by then."""

    def promote(self, output: Output) -> Promotion:
        return LookingBeforehand.promote(self, output)


class DiscardingTheCheckpoint(Applying):
    """Discards what is promoted, too."""

    def discard(self, output: Output) -> None:
        super().discard(output)
        self._run(["DELETE FROM words WHERE checkpoint = ?", output.key.checkpoint_id])


class DiscardingEveryRevision(Applying):
    """Discards what a later revision has staged, too."""

    def discard(self, output: Output) -> None:
        self._run(["DELETE FROM staged WHERE place LIKE ?", f"{output.key.checkpoint_id}.%"])


class SweepingEveryAttempt(Applying):
    """Removes what the other attempts of a revision staged, too."""

    def remove(self, left: Any) -> None:
        self._run(["DELETE FROM staged WHERE place LIKE ?", f"{left.checkpoint_id}.{left.revision}.%"])


class KeepingEarlierAttempts(Applying):
    """Leaves what was staged before a restage to whoever comes."""

    def discard_earlier(self, output: Output, voted: Output) -> None:
        """Do nothing."""


class PromotingAgain(Applying):
    """Knows what it promoted by its attempt, and so not the earlier one of a restage."""

    def is_marked(self, db: Any, key: Key) -> bool:
        return False

    def mark(self, db: Any, key: Key) -> None:
        db.execute("DELETE FROM marker WHERE checkpoint = ? AND revision = ?", key[1:])
        super().mark(db, key)


class Receipted(Applying):
    """Keeps the receipts of decisions."""

    def promote(self, output: Output) -> Promotion:
        try:
            refused = self.keep(output)
        except sqlite3.OperationalError as error:
            return Promotion(Outcome.UNKNOWN, str(error))
        return refused or super().promote(output)

    def keep(self, output: Output) -> Promotion | None:
        """Keep a receipt; say that its number is another's."""
        receipt = output.receipt
        with self._receipts() as db:
            insert = "INSERT INTO receipt VALUES (?, ?) ON CONFLICT DO NOTHING"
            db.execute(insert, (receipt["commit_seq"], json.dumps(receipt)))
        (there,) = self.receipts(output.key.pipeline, receipt["commit_seq"])[:1]
        other = (there["checkpoint_id"], there["revision"]) != output.key[1:]
        return Promotion(Outcome.FAILED, "the number is another's") if other else None

    def _receipts(self) -> Any:
        db = sqlite3.connect(self.path, timeout=2)
        db.execute("CREATE TABLE IF NOT EXISTS receipt (number INTEGER PRIMARY KEY, document TEXT)")
        return db

    def newest(self, pipeline: str) -> int | None:
        with self._receipts() as db:
            (found,) = db.execute("SELECT max(number) FROM receipt").fetchone()
            return found  # type: ignore[no-any-return]

    def receipts(self, pipeline: str, since: int) -> Any:
        with self._receipts() as db:
            found = db.execute("SELECT document FROM receipt WHERE number >= ? ORDER BY number", (since,))
            return [json.loads(document) for (document,) in found]


class ReceiptAfterwards(Receipted):
    """Keeps a receipt once everything is shown."""

    def promote(self, output: Output) -> Promotion:
        done = Applying.promote(self, output)
        return self.keep(output) or done


class LastReceiptOnly(Receipted):
    """Knows the receipt that it was given last."""

    def keep(self, output: Output) -> Promotion | None:
        with self._receipts() as db:
            db.execute("DELETE FROM receipt WHERE number < ?", (output.commit_seq,))
        return super().keep(output)


class AnyNumber(Receipted):
    """Takes a number that is another decision's."""

    def keep(self, output: Output) -> Promotion | None:
        super().keep(output)
        return None
