"""What every log table promises about its columns, and about what is swept, verified or discarded."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import pytest

from support.pipelines.factories import SCHEMA, counted, write_attempt
from support.servers.s3 import local
from support.sinks import log_table_outputs
from support.sinks.log_table_format import DAYS, WIDER, Format, GivenTable, alter, foreign
from support.sinks.log_table_outputs import rows, stage
from twophase.core.checkpoint import Key, Output
from twophase.core.errors import ManifestMismatch
from twophase.core.manifest import Column
from twophase.core.ports import Outcome
from twophase.sinks.log_tables.base import LogTableSink


class Upkeep(GivenTable):
    """Part of the promises: schema and maintenance."""

    # --- schema ------------------------------------------------------------------------------------------------------

    def test_a_new_column_is_added_and_older_rows_have_none(self, form: Format, sink: LogTableSink) -> None:
        stage(sink, 1).promote()
        wider = stage(sink, 2, content=[{**row, "city": "Ulm"} for row in rows(2)], schema=WIDER)
        wider.check()

        assert wider.promote().outcome is Outcome.PROMOTED

        found = {row["id"]: row["city"] for row in form.content(sink)}
        assert (found[100], found[200]) == (None, "Ulm")
        assert stage(sink, 3).promote().outcome is Outcome.PROMOTED  # a narrower one may follow

    def test_a_column_of_another_type_is_refused_before_the_vote(self, sink: LogTableSink) -> None:
        stage(sink, 1).promote()
        other = (Column("id", "string"), *SCHEMA[1:])
        wrong = stage(sink, 2, content=[{**row, "id": "x"} for row in rows(2)], schema=other)

        with pytest.raises(ManifestMismatch, match="column 'id': expected id bigint as in the table, found id string"):
            wrong.check()
        assert wrong.promote().outcome is Outcome.FAILED

    def test_a_partitioned_table_is_written_read_and_replaced(self, form: Format, sink: LogTableSink) -> None:
        table = form.make("lake/days", partition_by=["day", "word"])
        table.prepare()
        days = [{**row, "day": date(2026, 11, 15 + row["id"] % 2)} for row in rows(1)]
        staged = stage(table, 1, content=days, schema=DAYS)
        staged.check()

        staged.promote()

        assert counted(form.content(table)) == counted(days)
        with table.staged(staged.output) as relation:
            assert relation.value("SELECT count(*) FROM staged WHERE day = DATE '2026-11-15' AND word = 'w0'") == 2
        replacement = stage(table, 1, 2, days[:1], revision=2, older=staged, schema=DAYS)
        replacement.promote()
        assert counted(form.content(table)) == counted(days[:1])

    def test_a_job_of_ones_own_is_sealed_by_what_its_files_and_folders_say(
        self, form: Format, sink: LogTableSink
    ) -> None:
        table = form.make("lake/days", partition_by=["day"])
        table.prepare()
        stage(table, 1, content=[{**row, "day": date(2026, 11, 15)} for row in rows(1)], schema=DAYS).promote()
        key = Key(log_table_outputs.PIPELINE, 2, 1)
        output = Output(key, 1, table.place(key, 1, "7c1e"), commit_seq=2, sink="lake")
        later = [{**row, "day": date(2026, 11, 16)} for row in rows(2)]
        write_attempt(table, local(table.staging_path(output)), later, DAYS, "part", 1)

        manifest = table.inspect(output)

        assert ["day", "date"] in manifest["schema"]  # as in the table: the folder's name alone would be a text
        assert table.inspect(output) == manifest
        table.check(replace(output, manifest=manifest))
        assert table.promote(replace(output, manifest=manifest)).outcome is Outcome.PROMOTED
        assert len(form.content(table)) == 8
        with pytest.raises(ManifestMismatch, match="wrote nothing"):
            table.inspect(Output(key, 2, table.place(key, 2, "beef"), sink="lake"))

    # --- maintenance -------------------------------------------------------------------------------------------------

    def test_discarding_removes_what_every_attempt_of_a_revision_staged_and_nothing_else(
        self, sink: LogTableSink
    ) -> None:
        stage(sink, 1).promote()
        first, second, other = stage(sink, 2, attempt=1), stage(sink, 2, attempt=2, token="beef"), stage(sink, 3)

        sink.discard(second.output)

        assert not first.folder.exists()
        assert not second.folder.exists()
        assert other.folder.exists()
        assert {left.checkpoint_id for left in sink.attempts()} == {1, 3}
        sink.discard(second.output)

    def test_what_is_in_the_table_is_never_removed_whatever_a_record_says(
        self, form: Format, sink: LogTableSink
    ) -> None:
        staged = stage(sink, 1)
        staged.promote()

        for left in list(sink.attempts()):
            sink.remove(left)
        for old in list(sink.superseded()):
            sink.forget(old)

        assert counted(form.content(sink)) == counted(rows(1))
        assert not list(sink.verify(staged.output))

    def test_what_a_killed_sweep_left_is_found_by_the_next(self, sink: LogTableSink) -> None:
        staged = stage(sink, 1)
        staged.folder.rename(staged.folder.with_name(f"{staged.folder.name}.0123.dead"))

        for left in list(sink.attempts()):
            sink.remove(left)

        assert [path.name for path in local(sink._home).iterdir()] == ["manifests"]
        assert not list(local(f"{sink._home}/manifests").iterdir())

    def test_verify_names_what_is_altered_or_not_in_the_table(self, form: Format, sink: LogTableSink) -> None:
        staged = stage(sink, 1)
        staged.promote()
        form.rewrite(sink)
        other = stage(sink, 2)
        other.promote()
        victim = min(other.folder.glob("*.parquet"))
        alter(victim)

        assert ["is not in the table" in difference for difference in sink.verify(staged.output)] == [True, True]
        assert ["expected checksum" in difference for difference in sink.verify(other.output)] == [True]

    def test_our_files_that_no_committed_checkpoint_knows_are_strange(self, form: Format, sink: LogTableSink) -> None:
        known, unknown = stage(sink, 1), stage(sink, 2)
        known.promote()
        unknown.promote()
        foreign(form, sink)

        assert [unknown.folder.name in stranger for stranger in sink.strangers([known.output])] == [True]
        assert not list(sink.strangers([known.output, unknown.output]))
