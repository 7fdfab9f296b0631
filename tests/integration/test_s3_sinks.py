"""Delta and Iceberg tables in an object store keep what they promise on a disk, and what only a store can break."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.pipelines.factories import SCHEMA, Row, counted
from support.servers.s3 import CONN_ID, SECRET, S3Server, local, losing_reply
from support.sinks.log_table_format import Format
from support.sinks.log_table_outputs import PIPELINE, rows, stage
from support.sinks.log_table_promises import Promises
from support.sinks.log_tables import CATALOG, DeltaFormat, IcebergFormat
from twophase.core.checkpoint import Json, Key, Output
from twophase.core.errors import ConfigError, ManifestMismatch, SinkUnavailable
from twophase.core.ports import Outcome
from twophase.sinks import Delta, Iceberg
from twophase.sinks.log_tables.base import LogTableSink
from twophase.sinks.log_tables.commits import LogTable
from twophase.sinks.staged_files import owner
from twophase.storage.arrow_files import Writer
from twophase.storage.base import FileFacts, Target
from twophase.storage.s3 import S3, Access


class DeltaOnS3(DeltaFormat):
    """Delta in the bucket."""

    def __init__(self) -> None:
        self.place = S3Server.place()

    def make(self, path: str, **options: Any) -> Delta:
        return Delta(f"{self.place}/{path}", conn_id=CONN_ID, **options)


class IcebergOnS3(IcebergFormat):
    """Iceberg in the bucket; its catalog is in SQLite."""

    def __init__(self) -> None:
        self.place = S3Server.place()

    def make(self, path: str, **options: Any) -> Iceberg:
        name = f"db.{Path(path).name}"
        return Iceberg(name, path=f"{self.place}/{path}", conn_id=CONN_ID, catalog=CATALOG, **options)


FORMATS: dict[str, Callable[[], Format]] = {"delta": DeltaOnS3, "iceberg": IcebergOnS3}


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest, s3: S3Server) -> Format:
    return FORMATS[request.param]()


@pytest.fixture
def sink(form: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LogTableSink:
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    table = form.make("lake/words")
    table.prepare()
    return table


class TestSome:
    """Of the promises those in which a store differs from a disk."""

    _no_failpoints = Promises._no_failpoints
    test_promotion_shows_every_row_with_its_marker = Promises.test_promotion_shows_every_row_with_its_marker
    test_an_output_without_files = Promises.test_an_output_without_files_is_found_by_the_tables_history
    test_staged_output_that_is_gone = (
        Promises.test_staged_output_that_is_gone_is_lost_only_after_the_marker_was_read_again
    )
    test_a_damaged_staged_file = Promises.test_a_damaged_staged_file_is_named_and_nothing_becomes_visible
    test_what_was_replaced_is_forgotten = (
        Promises.test_what_was_replaced_is_forgotten_when_its_retention_is_over_and_not_before
    )
    replaced = Promises.replaced
    test_a_partitioned_table = Promises.test_a_partitioned_table_is_written_read_and_replaced
    test_a_job_of_ones_own = Promises.test_a_job_of_ones_own_is_sealed_by_what_its_files_and_folders_say
    test_discarding = Promises.test_discarding_removes_what_every_attempt_of_a_revision_staged_and_nothing_else
    test_verify = Promises.test_verify_names_what_is_altered_or_not_in_the_table


@pytest.mark.slow
class TestAll(Promises):
    """All of them."""

    @pytest.fixture
    def form(self, form: Format) -> Format:
        return form

    def test_a_table_whose_folder_is_away_is_asked_again_later(self, sink: LogTableSink) -> None:
        """A folder of a store is never away: the store is, see below."""

    def test_what_a_killed_sweep_left_is_found_by_the_next(self, sink: LogTableSink) -> None:
        staged = stage(sink, 1)
        min(staged.folder.iterdir()).unlink()

        for left in list(sink.attempts()):
            sink.remove(left)

        assert not list(sink.attempts())


def test_of_two_promoters_at_once_one_commits(form: Format, sink: LogTableSink, tmp_path: Path) -> None:
    Promises.test_of_two_promoters_at_once_one_commits(Promises(), form, sink, tmp_path, rounds=2)


# --- a store that does not answer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_store_that_is_down_while_rows_are_promoted_is_asked_again_later(
    form: Format, sink: LogTableSink, s3: S3Server, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_LAKE_S3", s3.connection(connect_timeout=1, read_timeout=1))
    impatient = form.make("lake/words")
    stage(sink, 1).promote()
    staged = stage(impatient, 2)

    getattr(s3, how)()
    promoted, found = staged.promote(), staged.find()
    s3.restore()

    assert (promoted.outcome, found.outcome) == (Outcome.RETRY_LATER, Outcome.RETRY_LATER)
    assert SECRET not in f"{promoted.reason} {found.reason}"
    # A request that waited in the stopped server may have been carried out since: then it is found by its marker.
    assert staged.promote().outcome in {Outcome.PROMOTED, Outcome.ALREADY_PROMOTED}
    assert counted(form.content(sink)) == counted([*rows(1), *rows(2)])


@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_store_that_goes_down_when_the_marker_was_read_is_asked_again_later(
    form: Format, sink: LogTableSink, s3: S3Server, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_LAKE_S3", s3.connection(connect_timeout=1, read_timeout=1))
    stage(sink, 1).promote()
    impatient = form.make("lake/words")
    staged = stage(impatient, 2)
    look = impatient.open

    def opened_and_down(handle: Json) -> LogTable | None:
        table = look(handle)
        getattr(s3, how)()
        return table

    with monkeypatch.context() as patched:
        patched.setattr(impatient, "open", opened_and_down)
        outcome = staged.promote().outcome
    s3.restore()

    assert outcome is Outcome.RETRY_LATER
    assert staged.promote().outcome is Outcome.PROMOTED
    assert counted(form.content(sink)) == counted([*rows(1), *rows(2)])


@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_store_that_goes_down_in_the_middle_of_a_promotion_settles(
    form: Format, sink: LogTableSink, s3: S3Server, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_LAKE_S3", s3.connection(connect_timeout=1, read_timeout=1))
    stage(sink, 1).promote()
    staged = stage(form.make("lake/words"), 2)

    def down(commit: Callable[[], object]) -> None:
        getattr(s3, how)()
        commit()

    with monkeypatch.context() as patched:
        form.committing(patched, down)
        outcome = staged.promote().outcome
    s3.restore()

    # Iceberg's commit is the catalog's; what it says of the store it may have read before.
    assert outcome in {Outcome.RETRY_LATER, Outcome.UNKNOWN, Outcome.PROMOTED}
    assert staged.promote().outcome in {Outcome.PROMOTED, Outcome.ALREADY_PROMOTED}
    assert counted(form.content(sink)) == counted([*rows(1), *rows(2)])
    assert form.marker(sink) == 2


def test_an_entry_of_the_log_whose_reply_was_lost_is_found_by_its_marker(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library tries again, and finds an entry there that it does not know for its own."""
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    form = DeltaOnS3()
    sink = form.make("lake/words")
    stage(sink, 1).promote()
    entry = f"_delta_log/{2:020d}.json".encode()
    with losing_reply(s3.port, entry) as (port, lost):
        monkeypatch.setenv("AIRFLOW_CONN_LAKE_S3", s3.connection(port))
        staged = stage(form.make("lake/words"), 2)

        outcome = staged.promote().outcome

        assert lost.is_set()
    assert outcome is Outcome.ALREADY_PROMOTED
    assert counted(form.content(sink)) == counted([*rows(1), *rows(2)])
    assert form.commits(sink) == 2


# --- what tasks of Spark leave ---------------------------------------------------------------------------------------


def written(storage: S3, target: Target, task: str, content: list[Row]) -> dict[str, FileFacts]:
    writer = Writer(storage.access.open, str(target.folder).removeprefix("s3://"), target)
    batch = pa.RecordBatch.from_pylist(content)
    return {path: FileFacts(size, count, xxh3) for path, size, count, xxh3 in writer.write(task, iter([batch]))}


def test_of_a_task_that_ran_twice_the_files_of_the_one_that_counts_are_staged(form: Format, sink: LogTableSink) -> None:
    key = Key(PIPELINE, 1, 1)
    output = Output(key, 1, sink.place(key, 1, "7c1e"), commit_seq=1, sink="lake")
    assert isinstance(sink.storage, S3)
    target = Target(sink.staging_path(output), "part-r1-a1", "parquet", {})
    written(sink.storage, target, "part-r1-a1-00000-7", rows(1))
    counts = written(sink.storage, target, "part-r1-a1-00000-8", rows(1))
    half = local(sink.staging_path(output)) / "part-r1-a1-00000-9-00000.parquet"
    half.write_bytes(b"half a file")

    output = replace(output, manifest=sink.seal(output, tuple(SCHEMA), counts))

    sink.check(output)
    assert sink.promote(output).outcome is Outcome.PROMOTED
    assert counted(form.content(sink)) == counted(rows(1))
    assert [path.name for path in half.parent.iterdir()] == ["part-r1-a1-00000-8-00000.parquet"]


def test_a_file_that_is_not_what_its_task_said_is_not_voted_for(sink: LogTableSink) -> None:
    key = Key(PIPELINE, 1, 1)
    output = Output(key, 1, sink.place(key, 1, "7c1e"), sink="lake")
    assert isinstance(sink.storage, S3)
    target = Target(sink.staging_path(output), "part-r1-a1", "parquet", {})
    counts = written(sink.storage, target, "part-r1-a1-00000-7", rows(1))
    [path] = counts

    wrong = {path: counts[path]._replace(size=counts[path].size + 1)}
    with pytest.raises(ManifestMismatch, match=r"expected \d+ bytes, found \d+"):
        sink.seal(output, tuple(SCHEMA), wrong)
    with pytest.raises(ManifestMismatch, match="is missing"):
        sink.seal(output, tuple(SCHEMA), {f"{path}.gone": counts[path]})


def test_a_task_writes_large_groups_of_rows_and_one_value_to_a_file(s3: S3Server) -> None:
    place = S3Server.place()
    storage = S3("a test", f"{place}/t", CONN_ID)
    target = Target(f"{place}/t", "part", "parquet", {"compression": "zstd"}, ["word"], in_folders=True)
    values = ["a b%c:ü/=", "", "x"]
    content = [{"id": number, "word": values[number // 2000]} for number in range(6000)]
    writer = Writer(storage.access.open, f"{place}/t".removeprefix("s3://"), target)
    batches = pa.Table.from_pylist(content).to_batches(max_chunksize=500)

    found = list(writer.write("part", iter(batches)))

    assert [path.partition("/")[0] for path, *_ in found] == [
        *("word=a%20b%25c%3A%C3%BC%2F%3D", "word=__HIVE_DEFAULT_PARTITION__", "word=x"),
    ]
    for path, size, count, checksum in found:
        metadata = pq.read_metadata(local(f"{place}/t/{path}"))
        assert (metadata.num_rows, metadata.num_row_groups) == (count, 1)
        assert metadata.row_group(0).column(0).compression == "ZSTD"
        assert storage.digest_file(f"{place}/t/{path}") == checksum
        assert local(f"{place}/t/{path}").stat().st_size == size


# --- declaration -----------------------------------------------------------------------------------------------------


def test_a_declaration_names_the_connection_and_builds_an_equal_sink(sink: LogTableSink) -> None:
    declared = sink.declaration()

    assert SECRET not in str(declared)
    assert type(sink).load(declared).declaration() == declared
    assert sink.connections() == (CONN_ID,)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"path": "s3://lake"}, "expected a folder on a disk, or s3://bucket/folder"),
        ({"path": "s3://lake/a b"}, "expected a folder on a disk, or s3://bucket/folder"),
        ({"path": "s3://lake/a/"}, "expected a folder on a disk, or s3://bucket/folder"),
        ({"path": "s3://lake/a", "options": {"parquet.block.size": 1}}, "option 'parquet.block.size'"),
    ],
)
def test_what_a_store_cannot_have_is_refused_when_declared(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Delta(**arguments, conn_id=CONN_ID)


def test_a_bucket_that_is_not_there_is_told_from_a_store_that_is_down_and_from_wrong_keys(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="there is no bucket 'puddle'"):
        Delta("s3://puddle/t", conn_id=CONN_ID).prepare()
    monkeypatch.setenv("AIRFLOW_CONN_LAKE_S3", s3.connection().replace('"twophase"', '"somebody"'))
    with pytest.raises(SinkUnavailable, match=r"sinks\.Delta 's3://lake/t': .*AWS Error") as refused:
        Delta("s3://lake/t", conn_id=CONN_ID).prepare()
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("connection", "says"),
    [
        ("postgres://me:canary@host/db", "expected type aws or s3, found 'postgres'"),
        ('{"conn_type": "aws", "password": "canary", "extra": {"role_arn": "x"}}', "its extra has role_arn"),
        ('{"conn_type": "aws", "extra": {"config_kwargs": {"proxies": "canary"}}}', "its extra has proxies"),
    ],
)
def test_a_connection_that_means_another_identity_is_refused(
    monkeypatch: pytest.MonkeyPatch, connection: str, says: str
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_LAKE_S3", connection)

    with pytest.raises(ConfigError, match=says) as refused:
        Access.of(CONN_ID)
    assert "canary" not in str(refused.value)


def test_the_text_of_an_access_shows_no_secret(s3: S3Server) -> None:
    assert SECRET not in repr(Access.of(CONN_ID))


def test_a_table_is_one_pipelines_by_whichever_connection_it_is_reached(
    s3: S3Server, sink: LogTableSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket itself says whose it is."""
    monkeypatch.setenv("AIRFLOW_CONN_OTHER", s3.connection())
    sink.join("words", "lake")
    sink.prepare()
    other = type(sink)(**{**sink.config(), "conn_id": "other"})
    other.join("others", "lake")

    with pytest.raises(ConfigError, match="belongs to pipeline 'words'"):
        other.prepare()
    sink.prepare()
    assert (sink.owner(), other.owner()) == ("words", "words")


# --- one of several at once ------------------------------------------------------------------------------------------

AT_ONCE = 8


def at_once(act: Callable[[int], None]) -> list[int]:
    """Let several act at the same moment; return those that were not refused."""
    start = threading.Barrier(AT_ONCE)

    def one(number: int) -> bool:
        start.wait()
        try:
            act(number)
        except (FileExistsError, ConfigError):
            return False
        return True

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [number for number, done in enumerate(pool.map(one, range(AT_ONCE))) if done]


@pytest.mark.parametrize("conn_id", [CONN_ID, "bare"], ids=["keys of the connection", "keys of the environment"])
def test_of_several_that_create_one_object_at_once_one_does(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, conn_id: str
) -> None:
    """Owners and receipts are created so. Creating the same again changes nothing."""
    access = Access.of(CONN_ID)
    bare = {"conn_type": "aws", "extra": {"endpoint_url": access.endpoint}}
    monkeypatch.setenv("AIRFLOW_CONN_BARE", json.dumps(bare))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", access.key if conn_id == "bare" and access.key else "")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", access.secret if conn_id == "bare" and access.secret else "")
    stores = [S3("sink", None, conn_id) for _ in range(AT_ONCE)]
    place = f"{S3Server.place()}/some where=1/ü"

    [winner] = at_once(lambda number: stores[number].create(place, f"{number}".encode()))

    assert stores[0].read(place) == f"{winner}".encode()
    stores[0].create(place, f"{winner}".encode())
    with pytest.raises(FileExistsError):
        stores[0].create(place, b"other")


def test_of_several_pipelines_that_claim_one_table_at_once_one_gets_it(s3: S3Server) -> None:
    home = S3Server.place()
    stores = [S3("sink", None, CONN_ID) for _ in range(AT_ONCE)]

    [winner] = at_once(lambda number: owner.claim(stores[number], home, "sink", f"pipeline_{number}"))

    assert owner.owner_of(stores[0], home) == f"pipeline_{winner}"


def test_a_store_that_refuses_a_conditional_write_is_told_without_its_keys(s3: S3Server) -> None:
    wrong = S3("sink", None, CONN_ID)
    wrong.access = replace(wrong.access, secret="canary-of-nobody")

    with pytest.raises(
        SinkUnavailable, match=r"sink: the object store answered 403 .*conditional PUT of s3://"
    ) as told:
        wrong.create(f"{S3Server.place()}/mine", b"")

    assert "canary" not in f"{told.value}{told.value.__cause__}"
