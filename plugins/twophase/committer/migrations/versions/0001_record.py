"""The record: pipelines, checkpoints, revisions, participants, the committer table, positions, events."""

from alembic import op

revision = "0001"
down_revision = None

TABLES = """
CREATE TABLE twophase.pipeline (
    name text NOT NULL CONSTRAINT pipeline_pkey PRIMARY KEY,
    declaration jsonb NOT NULL,
    next_checkpoint_id bigint NOT NULL DEFAULT 1,
    next_commit_seq bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pipeline_name_check CHECK (name ~ '^[a-z][a-z0-9_]*$'),
    CONSTRAINT pipeline_ids_check CHECK (next_checkpoint_id > 0 AND next_commit_seq > 0)
);

CREATE TABLE twophase.output (
    location text NOT NULL CONSTRAINT output_pkey PRIMARY KEY,
    pipeline text NOT NULL CONSTRAINT output_pipeline_fkey REFERENCES twophase.pipeline (name),
    sink text NOT NULL
);
CREATE UNIQUE INDEX output_one_per_sink ON twophase.output (pipeline, sink);

CREATE TABLE twophase.checkpoint (
    pipeline text NOT NULL CONSTRAINT checkpoint_pipeline_fkey REFERENCES twophase.pipeline (name),
    checkpoint_id bigint NOT NULL,
    slot text,
    inputs jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    released_at timestamptz,
    CONSTRAINT checkpoint_pkey PRIMARY KEY (pipeline, checkpoint_id),
    CONSTRAINT checkpoint_id_check CHECK (checkpoint_id > 0)
);
CREATE UNIQUE INDEX checkpoint_one_per_slot ON twophase.checkpoint (pipeline, slot) WHERE slot IS NOT NULL;

CREATE TABLE twophase.input_file (
    pipeline text NOT NULL,
    source text NOT NULL,
    path text NOT NULL,
    size bigint NOT NULL,
    mtime_ns bigint NOT NULL,
    checkpoint_id bigint NOT NULL,
    gone_at timestamptz,
    CONSTRAINT input_file_checkpoint_fkey
        FOREIGN KEY (pipeline, checkpoint_id) REFERENCES twophase.checkpoint (pipeline, checkpoint_id)
);
CREATE UNIQUE INDEX input_file_one_owner ON twophase.input_file (pipeline, source, path) WHERE gone_at IS NULL;
CREATE INDEX input_file_by_checkpoint ON twophase.input_file (pipeline, checkpoint_id, source);

CREATE TABLE twophase.revision (
    pipeline text NOT NULL,
    checkpoint_id bigint NOT NULL,
    revision integer NOT NULL,
    state text NOT NULL,
    epoch integer NOT NULL DEFAULT 0,
    lease_until timestamptz,
    parked_reason text,
    kind text NOT NULL DEFAULT 'regular',
    commit_seq bigint,
    rows bigint,
    bytes bigint,
    created_at timestamptz NOT NULL DEFAULT now(),
    decided_at timestamptz,
    committed_at timestamptz,
    superseded_at timestamptz,
    acknowledged_at timestamptz,
    error text,
    dag_id text,
    run_id text,
    CONSTRAINT revision_pkey PRIMARY KEY (pipeline, checkpoint_id, revision),
    CONSTRAINT revision_checkpoint_fkey
        FOREIGN KEY (pipeline, checkpoint_id) REFERENCES twophase.checkpoint (pipeline, checkpoint_id),
    CONSTRAINT revision_state_check CHECK (state IN
        ('OPEN', 'PRECOMMITTED', 'COMMITTING', 'COMMITTED', 'SUPERSEDED', 'ABORTING', 'ABORTED')),
    CONSTRAINT revision_kind_check CHECK (kind IN ('regular', 'backfill', 'replay')),
    CONSTRAINT revision_numbers_check CHECK (revision > 0 AND epoch >= 0),
    CONSTRAINT revision_commit_seq_check
        CHECK ((commit_seq IS NOT NULL) = (state IN ('COMMITTING', 'COMMITTED', 'SUPERSEDED'))),
    CONSTRAINT revision_decided_check
        CHECK ((decided_at IS NOT NULL) = (state IN ('COMMITTING', 'COMMITTED', 'SUPERSEDED'))),
    CONSTRAINT revision_committed_check CHECK ((committed_at IS NOT NULL) = (state IN ('COMMITTED', 'SUPERSEDED'))),
    CONSTRAINT revision_superseded_check CHECK ((superseded_at IS NOT NULL) = (state = 'SUPERSEDED')),
    CONSTRAINT revision_parked_check CHECK (parked_reason IS NULL OR state = 'COMMITTING')
);
CREATE UNIQUE INDEX revision_one_live ON twophase.revision (pipeline, checkpoint_id)
    WHERE state IN ('OPEN', 'PRECOMMITTED', 'COMMITTING');
CREATE UNIQUE INDEX revision_one_committed ON twophase.revision (pipeline, checkpoint_id) WHERE state = 'COMMITTED';
CREATE UNIQUE INDEX revision_commit_seq ON twophase.revision (pipeline, commit_seq) WHERE commit_seq IS NOT NULL;
CREATE INDEX revision_unfinished ON twophase.revision (pipeline, commit_seq, checkpoint_id)
    WHERE state IN ('OPEN', 'PRECOMMITTED', 'COMMITTING', 'ABORTING');
CREATE INDEX revision_by_state ON twophase.revision (pipeline, state, checkpoint_id, revision);
CREATE INDEX revision_by_run ON twophase.revision (dag_id, run_id) WHERE dag_id IS NOT NULL;

CREATE TABLE twophase.participant (
    pipeline text NOT NULL,
    checkpoint_id bigint NOT NULL,
    revision integer NOT NULL,
    name text NOT NULL,
    kind text NOT NULL,
    attempt integer NOT NULL,
    vote boolean,
    handle jsonb NOT NULL DEFAULT '{}',
    manifest jsonb NOT NULL DEFAULT '{}',
    reason text,
    CONSTRAINT participant_pkey PRIMARY KEY (pipeline, checkpoint_id, revision, name),
    CONSTRAINT participant_revision_fkey FOREIGN KEY (pipeline, checkpoint_id, revision)
        REFERENCES twophase.revision (pipeline, checkpoint_id, revision),
    CONSTRAINT participant_kind_check CHECK (kind IN ('sink', 'audit', 'state', 'approval')),
    CONSTRAINT participant_attempt_check CHECK (attempt > 0)
);

CREATE TABLE twophase.committed (
    job_id text NOT NULL,
    operator_id text NOT NULL,
    subtask_id integer NOT NULL,
    checkpoint_id bigint NOT NULL,
    revision integer NOT NULL,
    committed_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT committed_pkey PRIMARY KEY (job_id, operator_id, subtask_id, checkpoint_id, revision),
    CONSTRAINT committed_revision_fkey FOREIGN KEY (job_id, checkpoint_id, revision)
        REFERENCES twophase.revision (pipeline, checkpoint_id, revision)
);
CREATE INDEX committed_by_revision ON twophase.committed (job_id, checkpoint_id, revision);

CREATE TABLE twophase.position (
    pipeline text NOT NULL CONSTRAINT position_pipeline_fkey REFERENCES twophase.pipeline (name),
    source text NOT NULL,
    partition text NOT NULL,
    off bigint NOT NULL,
    CONSTRAINT position_pkey PRIMARY KEY (pipeline, source, partition)
);

CREATE TABLE twophase.event (
    id bigint GENERATED BY DEFAULT AS IDENTITY CONSTRAINT event_pkey PRIMARY KEY,
    pipeline text NOT NULL,
    checkpoint_id bigint NOT NULL,
    revision integer NOT NULL,
    epoch integer NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    who text NOT NULL,
    action text NOT NULL,
    from_state text,
    to_state text,
    why text,
    CONSTRAINT event_revision_fkey FOREIGN KEY (pipeline, checkpoint_id, revision)
        REFERENCES twophase.revision (pipeline, checkpoint_id, revision)
);
CREATE INDEX event_by_revision ON twophase.event (pipeline, checkpoint_id, id);
"""

#: What a CHECK cannot say, because it looks at the row before or at other rows.
GUARDS = """
CREATE FUNCTION twophase.guard_revision() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        IF NEW.state <> 'OPEN' THEN
            RAISE EXCEPTION 'revision %/% r%: it must begin as OPEN, not %',
                NEW.pipeline, NEW.checkpoint_id, NEW.revision, NEW.state;
        END IF;
        RETURN NEW;
    END IF;
    IF NEW.epoch < OLD.epoch OR NEW.epoch > OLD.epoch + 1 THEN
        RAISE EXCEPTION 'revision %/% r%: epoch % cannot follow %',
            OLD.pipeline, OLD.checkpoint_id, OLD.revision, NEW.epoch, OLD.epoch;
    END IF;
    IF OLD.commit_seq IS NOT NULL AND NEW.commit_seq IS DISTINCT FROM OLD.commit_seq THEN
        RAISE EXCEPTION 'revision %/% r%: a decision keeps its commit_seq',
            OLD.pipeline, OLD.checkpoint_id, OLD.revision;
    END IF;
    IF NEW.state <> OLD.state AND (OLD.state, NEW.state) NOT IN (
        ('OPEN', 'PRECOMMITTED'), ('PRECOMMITTED', 'OPEN'), ('PRECOMMITTED', 'COMMITTING'), ('COMMITTING', 'COMMITTED'),
        ('COMMITTED', 'SUPERSEDED'), ('OPEN', 'ABORTING'), ('PRECOMMITTED', 'ABORTING'), ('ABORTING', 'ABORTED'))
    THEN
        RAISE EXCEPTION 'revision %/% r%: % cannot follow %',
            OLD.pipeline, OLD.checkpoint_id, OLD.revision, NEW.state, OLD.state;
    END IF;
    IF NEW.state = 'OPEN' AND OLD.state <> 'OPEN' AND NEW.epoch = OLD.epoch THEN
        RAISE EXCEPTION 'revision %/% r%: only a new attempt opens it again',
            OLD.pipeline, OLD.checkpoint_id, OLD.revision;
    END IF;
    IF NEW.epoch <> OLD.epoch AND NEW.state NOT IN ('OPEN', 'COMMITTING') THEN
        RAISE EXCEPTION 'revision %/% r%: no attempt can be opened in %',
            OLD.pipeline, OLD.checkpoint_id, OLD.revision, NEW.state;
    END IF;
    IF NEW.state = 'COMMITTING' AND OLD.state = 'PRECOMMITTED' AND (
        NEW.epoch <> OLD.epoch
        OR NOT EXISTS (SELECT FROM twophase.participant p WHERE p.pipeline = NEW.pipeline
            AND p.checkpoint_id = NEW.checkpoint_id AND p.revision = NEW.revision)
        OR EXISTS (SELECT FROM twophase.participant p WHERE p.pipeline = NEW.pipeline
            AND p.checkpoint_id = NEW.checkpoint_id AND p.revision = NEW.revision
            AND (p.vote IS DISTINCT FROM true OR p.attempt <> NEW.epoch)))
    THEN
        RAISE EXCEPTION 'revision %/% r%: not every participant voted yes for attempt %',
            OLD.pipeline, OLD.checkpoint_id, OLD.revision, NEW.epoch;
    END IF;
    IF NEW.state = 'COMMITTED' AND OLD.state = 'COMMITTING' AND EXISTS (
        SELECT FROM twophase.participant p WHERE p.pipeline = NEW.pipeline AND p.checkpoint_id = NEW.checkpoint_id
            AND p.revision = NEW.revision AND p.kind = 'sink' AND NOT EXISTS (
                SELECT FROM twophase.committed c WHERE c.job_id = p.pipeline AND c.operator_id = p.name
                    AND c.checkpoint_id = p.checkpoint_id AND c.revision = p.revision))
    THEN
        RAISE EXCEPTION 'revision %/% r%: not every sink is in committed',
            OLD.pipeline, OLD.checkpoint_id, OLD.revision;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER guard BEFORE INSERT OR UPDATE ON twophase.revision
    FOR EACH ROW EXECUTE FUNCTION twophase.guard_revision();

CREATE FUNCTION twophase.guard_committed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM twophase.revision r WHERE r.pipeline = NEW.job_id
        AND r.checkpoint_id = NEW.checkpoint_id AND r.revision = NEW.revision AND r.commit_seq IS NOT NULL)
    THEN
        RAISE EXCEPTION 'committed %/% r%: the revision is not decided', NEW.job_id, NEW.checkpoint_id, NEW.revision;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER guard BEFORE INSERT ON twophase.committed
    FOR EACH ROW EXECUTE FUNCTION twophase.guard_committed();

CREATE FUNCTION twophase.refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% on %: its rows are never changed', TG_OP, TG_TABLE_NAME;
END $$;
CREATE TRIGGER keep BEFORE UPDATE OR DELETE OR TRUNCATE ON twophase.committed
    FOR EACH STATEMENT EXECUTE FUNCTION twophase.refuse_change();
CREATE TRIGGER keep BEFORE UPDATE OR TRUNCATE ON twophase.event
    FOR EACH STATEMENT EXECUTE FUNCTION twophase.refuse_change();
"""

#: For people with psql.
VIEWS = """
CREATE VIEW twophase.commit_log AS
    SELECT r.pipeline, r.commit_seq, r.checkpoint_id, r.revision, r.state, r.kind, c.slot, r.rows, r.bytes,
           r.created_at, r.decided_at, r.committed_at, r.committed_at - r.created_at AS took, r.dag_id, r.run_id
    FROM twophase.revision r JOIN twophase.checkpoint c USING (pipeline, checkpoint_id)
    WHERE r.commit_seq IS NOT NULL
    ORDER BY r.pipeline, r.commit_seq DESC;

CREATE VIEW twophase.pending AS
    SELECT r.pipeline, r.checkpoint_id, r.revision, r.state, r.epoch, r.kind, c.slot, r.parked_reason, r.error,
           r.lease_until > now() AS leased, now() - r.created_at AS age, r.dag_id, r.run_id,
           (SELECT string_agg(p.name, ', ' ORDER BY p.name) FROM twophase.participant p
            WHERE (p.pipeline, p.checkpoint_id, p.revision) = (r.pipeline, r.checkpoint_id, r.revision)
              AND p.kind = 'sink' AND NOT EXISTS (SELECT FROM twophase.committed d
                WHERE (d.job_id, d.operator_id, d.checkpoint_id, d.revision)
                    = (p.pipeline, p.name, p.checkpoint_id, p.revision))) AS not_promoted
    FROM twophase.revision r JOIN twophase.checkpoint c USING (pipeline, checkpoint_id)
    WHERE r.state IN ('OPEN', 'PRECOMMITTED', 'COMMITTING', 'ABORTING')
    ORDER BY r.pipeline, r.checkpoint_id, r.revision;

CREATE VIEW twophase.lag AS
    SELECT p.name AS pipeline, last.checkpoint_id AS last_checkpoint, last.commit_seq AS last_commit_seq,
           last.committed_at AS last_committed_at, now() - last.committed_at AS since_last_commit,
           (SELECT count(*) FROM twophase.revision r WHERE r.pipeline = p.name
              AND r.state IN ('OPEN', 'PRECOMMITTED', 'COMMITTING', 'ABORTING')) AS pending
    FROM twophase.pipeline p
    LEFT JOIN LATERAL (SELECT r.checkpoint_id, r.commit_seq, r.committed_at FROM twophase.revision r
        WHERE r.pipeline = p.name AND r.commit_seq IS NOT NULL AND r.state IN ('COMMITTED', 'SUPERSEDED')
        ORDER BY r.commit_seq DESC LIMIT 1) last ON true
    ORDER BY p.name;
"""


def upgrade() -> None:
    """Create the record."""
    connection = op.get_bind().execution_options(no_parameters=True)  # the % in messages are plpgsql's
    for part in (TABLES, GUARDS, VIEWS):
        connection.exec_driver_sql(part)
