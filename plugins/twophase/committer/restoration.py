"""Put forgotten decisions back into a restored record, from the receipts in the sinks; `reconciliation` calls it.

Each one goes from OPEN to COMMITTING like every revision, under the guards of the database and with an event for each
step. A revision that a later one replaced was promoted everywhere, because only then could the later one begin; so it
becomes COMMITTED and then SUPERSEDED. The last one of a checkpoint is left COMMITTING, and recovery finishes it.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import delete, func, insert, select, text, update

from twophase.committer import receipts
from twophase.committer import tables as t
from twophase.committer.participant_rows import of_row
from twophase.committer.record import PostgresTransaction
from twophase.committer.revision_rows import is_this, r
from twophase.core.checkpoint import Input, InputFile, Json, Key, Participant, Revision
from twophase.core.errors import IllegalTransition
from twophase.core.failpoints import hit
from twophase.core.ports import moves_of
from twophase.core.states import DECIDED, UNDECIDED, State

c, f = t.checkpoint.c, t.input_file.c

#: Mark a restored revision as stale if another pipeline has replaced what it read: the trigger could not mark it then.
_OUTDATED = text("""
    UPDATE twophase.revision d SET outdated = true FROM twophase.input_revision i
        JOIN twophase.revision old ON (old.pipeline, old.checkpoint_id, old.revision)
            = (i.upstream, i.upstream_checkpoint_id, i.upstream_revision) AND old.state = 'SUPERSEDED'
    WHERE (d.pipeline, d.checkpoint_id, d.revision) = (:pipeline, :checkpoint_id, :revision)
        AND (i.pipeline, i.checkpoint_id, i.revision) = (d.pipeline, d.checkpoint_id, d.revision)""")


def restore(tx: PostgresTransaction, pipeline: str, found: list[Json], why: str) -> None:
    """Record forgotten decisions again, in the order of their receipts, in the caller's transaction."""
    for receipt in found:
        key = _key(receipt)
        _put_checkpoint(tx, receipt, why)
        _make_room(tx, key, why)
        _put_revision(tx, receipt, why)
        _decide(tx, receipt, why)
    adopted = [receipt["adopted"]["commit_seq"] for receipt in found if receipt["adopted"]]
    # claimed=False: only the pipeline's declaration says which places its slots have; its next begin claims them.
    p = t.pipeline.c
    numbers = {
        "next_commit_seq": max([0, *adopted, *(receipt["commit_seq"] for receipt in found)]) + 1,
        "next_checkpoint_id": max([0, *(receipt["checkpoint_id"] for receipt in found)]) + 1,
    }
    tx.connection.execute(
        update(t.pipeline)
        .where(p.name == pipeline)
        .values(behind=None, claimed=False, **{name: func.greatest(p[name], value) for name, value in numbers.items()})
    )
    # What the sources remember belongs to the owners of files as they were before.
    tx.connection.execute(delete(t.known_files).where(t.known_files.c.pipeline == pipeline))
    if any("base" in receipt for receipt in found):
        tx.find_stale(pipeline)
    hit("reconcile.inside")


def objection(tx: PostgresTransaction, receipt: Json) -> str | None:
    """Say why a decision cannot be put back, for example because its number was used again; None: it can."""
    key = _key(receipt)
    there = tx.connection.execute(select(t.revision).where(is_this(key))).first()
    if there is not None and there.commit_seq is not None:
        return None if there.commit_seq == receipt["commit_seq"] else f"the record has it as {there.commit_seq}"
    if there is not None and there.state not in UNDECIDED:
        return f"the record says that it is {there.state.lower()}: restore the backup again, and reconcile first"
    live = tx.live_revision(key.pipeline, key.checkpoint_id)
    if live is not None and live.leased:
        return f"run {live.run} works on {live.key}: stop it, or wait"
    return _other_input(tx, receipt, begun=there is not None) or _other_slot(tx, receipt) or _lacking(tx, receipt)


def _other_input(tx: PostgresTransaction, receipt: Json, *, begun: bool) -> str | None:
    """Say if the record has given the checkpoint's number to other input since; None: it has not."""
    key = _key(receipt)
    mine = (c.pipeline == key.pipeline) & (c.checkpoint_id == key.checkpoint_id)
    there = tx.connection.execute(select(c.inputs, c.slot).where(mine)).first()
    if there is None:
        return None
    own = tx.connection.execute(select(r.inputs).where(is_this(key))).scalar()
    read = {"slot": there.slot, **receipts.read(tx.connection, key, there.inputs, own)}
    compared = ("slot", "inputs", *(("own_inputs", "upstream") if begun else ()))
    files = ("files", *(("own_files",) if begun else ()))
    same = all(_same_files(read[name], receipt[name]) for name in files)
    if same and all(read[name] == receipt[name] for name in compared):
        return None
    return f"the record has given number {key.checkpoint_id} to other input: restore the backup again, reconcile first"


def _other_slot(tx: PostgresTransaction, receipt: Json) -> str | None:
    """Say if the record has begun the slot under another number since; None: it has not."""
    mine = (c.pipeline == receipt["pipeline"]) & (c.slot == receipt["slot"]) & c.released_at.is_(None)
    other = select(c.checkpoint_id).where(mine & (c.checkpoint_id != receipt["checkpoint_id"]))
    found = tx.connection.execute(other).scalar() if receipt["slot"] is not None else None
    if found is None:
        return None
    return (
        f"the record has begun slot {receipt['slot']} as checkpoint {found}: restore the backup again, reconcile first"
    )


def _lacking(tx: PostgresTransaction, receipt: Json) -> str | None:
    """Say which revision of another pipeline that it reads is forgotten too; None: none is."""
    for _, upstream, checkpoint_id, revision in receipt["upstream"]:
        key = Key(upstream, checkpoint_id, revision)
        if tx.connection.execute(select(r.state).where(is_this(key))).first() is None:
            return f"it reads {key}, which the record has forgotten, too: reconcile {upstream} first"
    return None


# --- one decision ----------------------------------------------------------------------------------------------------


def _key(receipt: Json) -> Key:
    return Key(receipt["pipeline"], receipt["checkpoint_id"], receipt["revision"])


def _put_checkpoint(tx: PostgresTransaction, receipt: Json, why: str) -> None:
    """Add the checkpoint and its input files, unless it is there; earlier owners of those file names give them up."""
    key = _key(receipt)
    mine = (c.pipeline == key.pipeline) & (c.checkpoint_id == key.checkpoint_id)
    if tx.connection.execute(select(c.slot).where(mine)).first() is None:
        _free_names(tx, receipt, why)
        values = {"pipeline": key.pipeline, "checkpoint_id": key.checkpoint_id, "slot": receipt["slot"]}
        tx.connection.execute(
            insert(t.checkpoint).values(**values, inputs=receipt["inputs"], created_at=receipt["created_at"])
        )
        tx.copy_files(key, _inputs(receipt["files"]), None)
    if receipt["adopted"]:
        _put_adopted(tx, key._replace(revision=0), receipt["adopted"], why)


def _free_names(tx: PostgresTransaction, receipt: Json, why: str) -> None:
    """Free the file names that a forgotten checkpoint read: their earlier owner was settled or released by then."""
    pipeline = receipt["pipeline"]
    for source, fixed in _inputs(receipt["files"]).items():
        paths = [file.path for file in fixed.files]
        taken = (f.pipeline == pipeline) & (f.source == source) & f.gone_at.is_(None) & f.revision.is_(None)
        taken &= f.path == func.any(paths)
        for owner in tx.connection.execute(select(f.checkpoint_id).where(taken).distinct()).scalars().all():
            decided = (r.pipeline == pipeline) & (r.checkpoint_id == owner) & r.commit_seq.is_not(None)
            if tx.connection.execute(select(r.revision).where(decided).limit(1)).first():
                gone = update(t.input_file).where(taken & (f.checkpoint_id == owner)).values(gone_at=func.now())
                tx.connection.execute(gone)
                continue
            if live := tx.live_revision(pipeline, owner):
                _abort(tx, live, why)
            if not tx.release(pipeline, owner, f"{why}; checkpoint {receipt['checkpoint_id']} has read its input"):
                msg = f"checkpoint {pipeline}/{owner}: it cannot be released for {_key(receipt)}; recover it first"
                raise IllegalTransition(msg)


def _put_adopted(tx: PostgresTransaction, key: Key, adopted: Json, why: str) -> None:
    """Add the adopted revision 0 of a slot, unless the checkpoint has a decided revision."""
    mine = (r.pipeline == key.pipeline) & (r.checkpoint_id == key.checkpoint_id) & r.commit_seq.is_not(None)
    if tx.connection.execute(select(r.revision).where(mine).limit(1)).first():
        return
    at = adopted["committed_at"]
    values = {name: adopted[name] for name in ("commit_seq", "epoch", "rows", "bytes")}
    tx.connection.execute(
        insert(t.revision).values(**key._asdict(), **values, state=State.COMMITTED, decided_at=at, committed_at=at)
    )
    for participant in adopted["participants"]:
        tx.put_participant(key, of_row(participant))
        tx.mark_committed(key, participant["name"])
    tx.event(key, adopted["epoch"], "adopted", to=State.COMMITTED, why=why)


def _make_room(tx: PostgresTransaction, key: Key, why: str) -> None:
    """End an earlier revision of the checkpoint that is live in the record; it had ended before this one began."""
    live = tx.live_revision(key.pipeline, key.checkpoint_id)
    if live is None or live.key == key:
        return
    if live.state in UNDECIDED:
        _abort(tx, live, why)
        return
    for participant in tx.participants(live.key):
        if participant.stages:
            tx.mark_committed(live.key, participant.name)
    older = tx.committed_revision(key.pipeline, key.checkpoint_id)
    if older is not None:
        tx.move(older.key, State.SUPERSEDED, epoch=older.epoch, why=f"revision {live.revision}; {why}")
    tx.move(live.key, State.COMMITTED, epoch=live.epoch, why=f"revision {key.revision} came after it; {why}",
            parked_reason=None, hindrances=None, lease=None)  # fmt: skip


def _abort(tx: PostgresTransaction, live: Revision, why: str) -> None:
    """Record that an undecided revision was aborted; a sweep removes what it staged."""
    tx.move(live.key, State.ABORTING, epoch=live.epoch, why=why, unleased=True, error=why[:1000], lease=None)
    tx.move(live.key, State.ABORTED, epoch=live.epoch, why=why)


def _put_revision(tx: PostgresTransaction, receipt: Json, why: str) -> None:
    """Add the revision as it began, unless it is there."""
    key = _key(receipt)
    if tx.connection.execute(select(r.state).where(is_this(key))).first() is not None:
        return
    kept = {name: receipt[name] for name in ("kind", "dag_id", "run_id", "created_at")}
    kept["backfill"] = receipt.get("backfill")  # not in receipts of earlier versions
    kept["base"] = receipt.get("base")  # only if the pipeline has state
    tx.connection.execute(
        insert(t.revision).values(**key._asdict(), **kept, state=State.OPEN, inputs=receipt["own_inputs"])
    )
    tx.event(key, 0, "begin", to=State.OPEN, why=why)
    tx.copy_files(key, _inputs(receipt["own_files"]), key.revision)
    rows = [
        dict(zip(("source", "upstream", "upstream_checkpoint_id", "upstream_revision"), row, strict=True))
        for row in receipt["upstream"]
    ]
    if rows:
        tx.connection.execute(insert(t.input_revision), [{**key._asdict(), **row} for row in rows])
        tx.connection.execute(_OUTDATED, key._asdict())


def _decide(tx: PostgresTransaction, receipt: Json, why: str) -> None:
    """Move the revision to COMMITTING, with the votes, the commit_seq and the positions of its receipt."""
    key = _key(receipt)
    held = tx.hold(key)
    voters = [of_row(participant) for participant in receipt["participants"]]
    epoch = max(held.epoch, receipt["epoch"])
    state = held.state if held.state in DECIDED else State.OPEN
    for number in range(held.epoch, epoch):
        tx.move(key, state, epoch=number, why=why, bump=True)
    if held.state not in DECIDED:
        # After a restage the votes are for several attempts; the commit point needs all of them for one.
        tx.replace_participants(key, [Participant(v.name, v.kind, epoch, vote=True) for v in voters])
        if tx.hold(key).state is State.OPEN:
            tx.move(key, State.PRECOMMITTED, epoch=epoch, why=why)
        moved = {name: receipt[name] for name in ("commit_seq", "rows", "bytes")}
        tx.move(key, State.COMMITTING, epoch=epoch, why=why, lease=None, **moved)
        decided = update(t.revision).where(is_this(key)).values(decided_at=receipt["decided_at"])
        tx.connection.execute(decided)
        _advance(tx, receipt)
    tx.replace_participants(key, voters)


def _advance(tx: PostgresTransaction, receipt: Json) -> None:
    """Move the positions over the checkpoint's input, as the commit point of its first decision did (R4)."""
    key = _key(receipt)
    committed = tx.committed_revision(key.pipeline, key.checkpoint_id)
    if committed is not None and committed.revision > 0:
        return
    moves = moves_of(tx.ranges(key.pipeline, key.checkpoint_id))
    for move in tx.advance(key.pipeline, moves) if moves else ():
        where = f"source {move.source!r} partition {move.partition}"
        msg = f"checkpoint {key}: {where} is not at {move.start}; nothing was changed"
        raise IllegalTransition(msg)


def _same_files(these: list[list[Any]], those: list[list[Any]]) -> bool:
    """Return True if two lists name the same files; a file's time may differ if its checksum is known and the same."""
    if len(these) != len(those):
        return False
    pairs = [[InputFile(*row[1:]) for row in pair] for pair in zip(these, those, strict=True)]
    sources = all(one[0] == other[0] for one, other in zip(these, those, strict=True))
    return sources and all(
        one[:3] == other[:3] or (one[:2] == other[:2] and one.xxh3 is not None and one.xxh3 == other.xxh3)
        for one, other in pairs
    )


def _inputs(rows: list[list[Any]]) -> dict[str, Input]:
    """Group files by source."""
    files: dict[str, list[InputFile]] = {}
    for source, *file in rows:
        files.setdefault(source, []).append(InputFile(*file))
    return {source: Input(files=tuple(found)) for source, found in files.items()}
