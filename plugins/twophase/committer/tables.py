"""The tables of the record (schema `twophase`), for the queries of this package.

Migrations create them; a test proves that both agree. The database repeats the rules of the protocol, so that a bug in
Python cannot record an impossible history: with CHECKs and partial unique indexes here, and with triggers in the
migrations where a rule compares two rows, or a row with its earlier value.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB, TSTZRANGE, ExcludeConstraint

SCHEMA = "twophase"

metadata = MetaData(
    schema=SCHEMA,
    naming_convention={
        "pk": "%(table_name)s_pkey",
        "fk": "%(table_name)s_%(referred_table_name)s_fkey",
        "ck": "%(table_name)s_%(constraint_name)s_check",
    },
)


def _time(name: str, **kwargs: object) -> Column[object]:
    return Column(name, DateTime(timezone=True), **kwargs)  # type: ignore[arg-type]


def _now(name: str) -> Column[object]:
    return _time(name, nullable=False, server_default=func.now())


_REVISION_KEY = ("pipeline", "checkpoint_id", "revision")

#: One row per pipeline; its lock serialises begin and the commit point (R12).
pipeline = Table(
    "pipeline",
    metadata,
    Column("name", Text, primary_key=True),
    Column("declaration", JSONB, nullable=False),
    Column("next_checkpoint_id", BigInteger, nullable=False, server_default=text("1")),
    Column("next_commit_seq", BigInteger, nullable=False, server_default=text("1")),
    _now("created_at"),
    _now("updated_at"),
    #: Whether the slots that began before claims were recorded have theirs.
    Column("claimed", Boolean, nullable=False, server_default=text("false")),
    #: Which sinks hold what this record has forgotten; no run begins before a person has reconciled them.
    Column("behind", Text),
    #: The first checkpoint whose state was computed from one that was replaced since; NULL: there is none.
    Column("stale_from", BigInteger),
    CheckConstraint("name ~ '^[a-z][a-z0-9_]*$'", name="name"),
    CheckConstraint("next_checkpoint_id > 0 AND next_commit_seq > 0", name="ids"),
)

#: Which pipeline writes where: one location belongs to one sink of one pipeline.
output = Table(
    "output",
    metadata,
    Column("location", Text, primary_key=True),
    Column("pipeline", Text, nullable=False),
    Column("sink", Text, nullable=False),
    ForeignKeyConstraint(["pipeline"], [pipeline.c.name]),
    Index("output_one_per_sink", "pipeline", "sink", unique=True),
)

#: Since which checkpoint a write takes part; a dropped write stays, because older checkpoints have it.
write = Table(
    "write",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    #: The next checkpoint and commit_seq at the time when it was added or moved; 1: it lacks nothing.
    Column("since", BigInteger, nullable=False),
    Column("since_seq", BigInteger, nullable=False),
    #: The last checkpoint before it was dropped.
    Column("until", BigInteger),
    ForeignKeyConstraint(["pipeline"], [pipeline.c.name]),
)

#: Which DAGs run a pipeline; whoever may read one of them may see the pipeline's commits.
pipeline_dag = Table(
    "pipeline_dag",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("dag_id", Text, primary_key=True),
    _now("linked_at"),
    ForeignKeyConstraint(["pipeline"], [pipeline.c.name]),
    # finds the pipelines of one DAG, or of the DAGs that a user may read
    Index("pipeline_dag_by_dag", "dag_id", "pipeline"),
)

checkpoint = Table(
    "checkpoint",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("checkpoint_id", BigInteger, primary_key=True, autoincrement=False),
    Column("slot", Text),
    Column("inputs", JSONB, nullable=False),
    _now("created_at"),
    _time("released_at"),
    ForeignKeyConstraint(["pipeline"], [pipeline.c.name]),
    CheckConstraint("checkpoint_id > 0", name="id"),
    # prevents two checkpoints for one interval
    Index(
        "checkpoint_one_per_slot",
        "pipeline",
        "slot",
        unique=True,
        postgresql_where=text("slot IS NOT NULL AND released_at IS NULL"),
    ),
    # finds the last checkpoint without a slot, however many slots there are
    Index("checkpoint_without_slot", "pipeline", "checkpoint_id", postgresql_where=text("slot IS NULL")),
)

#: A place as a range of one number, its hash: GiST alone cannot compare texts.
_PLACE_HASH = "hashtextextended((pipeline || '/' || part || '/' || place), 0)"
CLAIM_KEY = f"int8range({_PLACE_HASH}, {_PLACE_HASH}, '[]')"

#: Which places belong to a checkpoint's slot, for its reads and writes.
claim = Table(
    "claim",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("checkpoint_id", BigInteger, primary_key=True, autoincrement=False),
    Column("part", Text, primary_key=True),
    Column("place", Text, primary_key=True),
    #: Which times of the place; without bounds the whole place.
    Column("span", TSTZRANGE, primary_key=True),
    #: Another checkpoint has the same place, since before claims were recorded.
    Column("shared", Boolean, nullable=False, server_default=text("false")),
    ForeignKeyConstraint(["pipeline", "checkpoint_id"], [checkpoint.c.pipeline, checkpoint.c.checkpoint_id]),
    # prevents two slots from reading or writing the same place
    ExcludeConstraint(
        (text(CLAIM_KEY), "&&"), ("span", "&&"), where=text("NOT shared"), using="gist", name="claim_one_owner"
    ),
)

input_file = Table(
    "input_file",
    metadata,
    Column("pipeline", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("path", Text, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("mtime_ns", BigInteger, nullable=False),
    Column("checkpoint_id", BigInteger, nullable=False),
    _time("gone_at"),
    # NULL: the checkpoint owns the file for ever; otherwise this revision alone found it in its interval
    Column("revision", Integer),
    # the checksum of its bytes, if an attempt computed it: the same bytes written again are no change
    Column("xxh3", Text),
    ForeignKeyConstraint(["pipeline", "checkpoint_id"], [checkpoint.c.pipeline, checkpoint.c.checkpoint_id]),
    # prevents a file from being read by two checkpoints; a name is free again once its file was archived or deleted
    Index(
        "input_file_one_owner",
        "pipeline",
        "source",
        "path",
        unique=True,
        postgresql_where=text("gone_at IS NULL AND revision IS NULL"),
    ),
    # prevents a revision from reading a file of its interval twice
    Index(
        "input_file_once",
        "pipeline",
        "checkpoint_id",
        "revision",
        "source",
        "path",
        unique=True,
        postgresql_where=text("revision IS NOT NULL"),
    ),
    Index("input_file_by_checkpoint", "pipeline", "checkpoint_id", "source"),
    # finds what has left its folder since a source looked
    Index("input_file_gone", "pipeline", "source", "gone_at", postgresql_where=text("gone_at IS NOT NULL")),
)

#: What a source remembers of files that checkpoints own; it compares a listing of its folder with that first.
known_files = Table(
    "known_files",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("source", Text, primary_key=True),
    Column("newest", BigInteger, nullable=False),
    Column("sums", LargeBinary, nullable=False),
    ForeignKeyConstraint(["pipeline"], [pipeline.c.name]),
)

revision = Table(
    "revision",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("checkpoint_id", BigInteger, primary_key=True, autoincrement=False),
    Column("revision", Integer, primary_key=True, autoincrement=False),
    Column("state", Text, nullable=False),
    Column("epoch", Integer, nullable=False, server_default=text("0")),
    _time("lease_until"),
    Column("parked_reason", Text),
    Column("kind", Text, nullable=False, server_default="regular"),
    Column("commit_seq", BigInteger),
    Column("rows", BigInteger),
    Column("bytes", BigInteger),
    _now("created_at"),
    _time("decided_at"),
    _time("committed_at"),
    _time("superseded_at"),
    _time("acknowledged_at"),
    Column("error", Text),
    Column("dag_id", Text),
    Column("run_id", Text),
    #: What this revision alone reads: an interval's files, another pipeline's revisions.
    Column("inputs", JSONB),
    #: When its output was removed, because its retention was over; only if it is SUPERSEDED.
    _time("swept_at"),
    #: What is needed to find the Spark job of an attempt again, if the job can outlive the task that submitted it.
    Column("job", JSONB),
    #: If it is parked: sink → its hindrance.
    Column("hindrances", JSONB(none_as_null=True)),
    _time("aborted_at"),
    #: Aborted, and its checkpoint has no committed and no later revision, and was not released.
    Column("failed", Boolean, nullable=False, server_default=text("false")),
    #: Whether a sweep still has to look for what its attempts left.
    Column("leftovers", Boolean, nullable=False, server_default=text("true")),
    #: Whether a revision of another pipeline that it reads was replaced since; a trigger sets it.
    Column("outdated", Boolean, nullable=False, server_default=text("false")),
    #: The backfill that made it; not a key, for a backfill may be forgotten before what it made.
    Column("backfill", Text),
    #: The state that it reads: checkpoint, revision, the attempt of each; NULL: its pipeline has none.
    Column("base", JSONB(none_as_null=True)),
    #: When the retention of the state that it left was over; files of it may be gone.
    _time("state_swept_at"),
    #: Whether a sweep still has to remove files of that state.
    Column("state_left", Boolean, nullable=False, server_default=text("false")),
    ForeignKeyConstraint(["pipeline", "checkpoint_id"], [checkpoint.c.pipeline, checkpoint.c.checkpoint_id]),
    CheckConstraint(
        "state IN ('OPEN', 'PRECOMMITTED', 'COMMITTING', 'COMMITTED', 'SUPERSEDED', 'ABORTING', 'ABORTED')",
        name="state",
    ),
    CheckConstraint("kind IN ('regular', 'backfill', 'replay')", name="kind"),
    CheckConstraint("revision >= 0 AND epoch >= 0", name="numbers"),
    CheckConstraint(
        "(commit_seq IS NOT NULL) = (state IN ('COMMITTING', 'COMMITTED', 'SUPERSEDED'))", name="commit_seq"
    ),
    CheckConstraint("(decided_at IS NOT NULL) = (state IN ('COMMITTING', 'COMMITTED', 'SUPERSEDED'))", name="decided"),
    CheckConstraint("(committed_at IS NOT NULL) = (state IN ('COMMITTED', 'SUPERSEDED'))", name="committed"),
    CheckConstraint("(superseded_at IS NOT NULL) = (state = 'SUPERSEDED')", name="superseded"),
    CheckConstraint("parked_reason IS NULL OR state = 'COMMITTING'", name="parked"),
    CheckConstraint("hindrances IS NULL OR parked_reason IS NOT NULL", name="hindrances"),
    CheckConstraint("swept_at IS NULL OR state = 'SUPERSEDED'", name="swept"),
    CheckConstraint("(aborted_at IS NOT NULL) = (state IN ('ABORTING', 'ABORTED'))", name="aborted"),
    CheckConstraint("NOT failed OR state = 'ABORTED'", name="failed"),
    # prevents revision 2 from beginning while revision 1 may still be promoted (R5)
    Index(
        "revision_one_live",
        "pipeline",
        "checkpoint_id",
        unique=True,
        postgresql_where=text("state IN ('OPEN', 'PRECOMMITTED', 'COMMITTING')"),
    ),
    # prevents two visible revisions of one checkpoint
    Index(
        "revision_one_committed",
        "pipeline",
        "checkpoint_id",
        unique=True,
        postgresql_where=text("state = 'COMMITTED'"),
    ),
    # prevents two decisions with one number; also finds what a table held "as of", and its newest schema
    Index(
        "revision_commit_seq", "pipeline", "commit_seq", unique=True, postgresql_where=text("commit_seq IS NOT NULL")
    ),
    # finds what recovery looks at: a few rows, however long the history is
    Index(
        "revision_unfinished",
        "pipeline",
        "commit_seq",
        "checkpoint_id",
        postgresql_where=text("state IN ('OPEN', 'PRECOMMITTED', 'COMMITTING', 'ABORTING')"),
    ),
    Index("revision_by_state", "pipeline", "state", "checkpoint_id", "revision"),
    Index("revision_by_run", "dag_id", "run_id", postgresql_where=text("dag_id IS NOT NULL")),
    # finds what retention looks at: superseded revisions that are not swept, the oldest first
    Index(
        "revision_unswept",
        "pipeline",
        "superseded_at",
        postgresql_where=text("state = 'SUPERSEDED' AND swept_at IS NULL"),
    ),
    # finds what a sweep looks at: neither revisions promoted from their first attempt, nor those swept clean before
    Index(
        "revision_leftovers",
        "pipeline",
        "checkpoint_id",
        "revision",
        postgresql_where=text("leftovers AND (epoch > 1 OR state IN ('ABORTING', 'ABORTED') OR swept_at IS NOT NULL)"),
    ),
    # finds stale checkpoints
    Index(
        "revision_outdated",
        "pipeline",
        "checkpoint_id",
        postgresql_where=text("outdated AND state = 'COMMITTED'"),
    ),
    # finds what failed since the last commit, and what failed last
    Index("revision_aborted", "pipeline", "aborted_at", postgresql_where=text("aborted_at IS NOT NULL")),
    # finds the states that are kept, the oldest first
    Index(
        "revision_with_state",
        "pipeline",
        "checkpoint_id",
        postgresql_where=text("base IS NOT NULL AND commit_seq IS NOT NULL AND state_swept_at IS NULL"),
    ),
    # finds the states whose files a sweep has to remove
    Index("revision_state_left", "pipeline", "checkpoint_id", postgresql_where=text("state_left")),
    # finds the checkpoints whose last revision failed, however many failed and succeeded later
    Index("revision_failed", "pipeline", "checkpoint_id", postgresql_where=text("failed")),
)

#: Slots that a run could not begin: it waits for input (no failures), or it failed. The row goes when the slot begins.
unbegun = Table(
    "unbegun",
    metadata,
    Column("pipeline", Text, primary_key=True),
    #: Empty: the pipeline has no slots.
    Column("slot", Text, primary_key=True),
    Column("why", Text, nullable=False),
    Column("failures", Integer, nullable=False),
    _now("since"),
    _now("at"),
    Column("who", Text, nullable=False),
    Column("dag_id", Text),
    Column("run_id", Text),
    ForeignKeyConstraint(["pipeline"], [pipeline.c.name]),
    # finds what retention is over for
    Index("unbegun_by_time", "pipeline", "at"),
)

#: Which revisions of another pipeline a revision reads: replacing one makes it stale; while it is live none is swept.
input_revision = Table(
    "input_revision",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("checkpoint_id", BigInteger, primary_key=True, autoincrement=False),
    Column("revision", Integer, primary_key=True, autoincrement=False),
    Column("source", Text, primary_key=True),
    Column("upstream", Text, primary_key=True),
    Column("upstream_checkpoint_id", BigInteger, primary_key=True, autoincrement=False),
    Column("upstream_revision", Integer, nullable=False),
    ForeignKeyConstraint(_REVISION_KEY, [revision.c.pipeline, revision.c.checkpoint_id, revision.c.revision]),
    ForeignKeyConstraint(
        ["upstream", "upstream_checkpoint_id", "upstream_revision"],
        [revision.c.pipeline, revision.c.checkpoint_id, revision.c.revision],
        name="input_revision_upstream_fkey",
    ),
    Index("input_revision_by_upstream", "upstream", "upstream_checkpoint_id", "upstream_revision"),
)

participant = Table(
    "participant",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("checkpoint_id", BigInteger, primary_key=True, autoincrement=False),
    Column("revision", Integer, primary_key=True, autoincrement=False),
    Column("name", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("vote", Boolean),
    Column("handle", JSONB, nullable=False, server_default="{}"),
    Column("manifest", JSONB, nullable=False, server_default="{}"),
    Column("reason", Text),
    ForeignKeyConstraint(_REVISION_KEY, [revision.c.pipeline, revision.c.checkpoint_id, revision.c.revision]),
    CheckConstraint("kind IN ('sink', 'audit', 'state', 'approval')", name="kind"),
    CheckConstraint("attempt > 0", name="attempt"),
)

#: The committer table, with Flink's columns. Only a row here says that a sink has promoted; none is ever deleted (R6).
committed = Table(
    "committed",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("operator_id", Text, primary_key=True),
    Column("subtask_id", Integer, primary_key=True, autoincrement=False),
    Column("checkpoint_id", BigInteger, primary_key=True, autoincrement=False),
    Column("revision", Integer, primary_key=True, autoincrement=False),
    _now("committed_at"),
    ForeignKeyConstraint(
        ["job_id", "checkpoint_id", "revision"],
        [revision.c.pipeline, revision.c.checkpoint_id, revision.c.revision],
    ),
    Index("committed_by_revision", "job_id", "checkpoint_id", "revision"),
)

position = Table(
    "position",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("source", Text, primary_key=True),
    Column("partition", Text, primary_key=True),
    Column("off", BigInteger, nullable=False),
    #: What the source noted about the offset; NULL: nothing.
    Column("mark", JSONB),
    ForeignKeyConstraint(["pipeline"], [pipeline.c.name]),
)

event = Table(
    "event",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("pipeline", Text, nullable=False),
    Column("checkpoint_id", BigInteger, nullable=False),
    Column("revision", Integer, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    Column("who", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("from_state", Text),
    Column("to_state", Text),
    Column("why", Text),
    ForeignKeyConstraint(_REVISION_KEY, [revision.c.pipeline, revision.c.checkpoint_id, revision.c.revision]),
    Index("event_by_revision", "pipeline", "checkpoint_id", "id"),
    # finds what retention looks at
    Index("event_by_age", "pipeline", "at"),
)

#: Backfills; who asks for the same selection again goes on with the one that has not ended.
backfill = Table(
    "backfill",
    metadata,
    Column("id", Text, primary_key=True),
    Column("pipeline", Text, nullable=False),
    Column("selection", JSONB, nullable=False),
    Column("who", Text, nullable=False),
    Column("why", Text),
    _now("created_at"),
    _time("ended_at"),
    ForeignKeyConstraint(["pipeline"], [pipeline.c.name]),
    # prevents two backfills of one selection at the same time
    Index(
        "backfill_one_under_way",
        "pipeline",
        "selection",
        unique=True,
        postgresql_where=text("ended_at IS NULL"),
    ),
)
