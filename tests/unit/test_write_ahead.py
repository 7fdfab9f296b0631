"""A write-ahead sink that cannot work is refused when it is declared, or before anything is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.sinks.senders import Sqlite
from twophase import Pipeline, committers, sinks, sources
from twophase.core.checkpoint import Key, Output
from twophase.core.errors import ConfigError
from twophase.core.ports import Outcome
from twophase.sinks import Sink, WriteAhead

APPENDING = "support.sinks.senders:Appending"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))


def declare(sink: Sink, name: str = "orders") -> Pipeline:
    reads = {"orders": sources.Files("landing/orders", format="json")}
    return Pipeline(name, reads=reads, transform="orders:transform", writes={"mail": sink})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"sender": "senders"}, "expected `module:Class`"),
        ({"sender": APPENDING, "arguments": ["x"]}, "arguments: expected a dict"),
        ({"sender": APPENDING, "arguments": {"path": Path("x")}}, "expected what JSON can say"),
        ({"sender": APPENDING, "committer": Sqlite(path=Path("x"))}, "committer: expected what JSON can say"),  # type: ignore[arg-type]
        ({"sender": APPENDING, "arguments": {"api_key": "x"}}, "'api_key': it would be in the record"),
        ({"sender": APPENDING, "arguments": {"db_password": "x"}}, "pass the connection's id"),
        ({"sender": APPENDING, "idempotent": "yes"}, "idempotent: expected True or False, found 'yes'"),
        ({"sender": APPENDING, "republish": 1}, "republish: expected True or False, found 1"),
        ({"sender": APPENDING, "path": "s3://bucket/rows"}, "atomic folder rename"),
        ({"sender": APPENDING, "committer": "support.sinks.senders:NoSender"}, "expected a subclass"),
        ({"sender": APPENDING, "committer": "nowhere:Memory"}, "no module 'nowhere'"),
    ],
)
def test_options_are_checked_when_it_is_declared(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        WriteAhead(**arguments)


@pytest.mark.parametrize(
    ("sender", "arguments", "named"),
    [
        ("nowhere:Sender", {}, "no module 'nowhere'"),
        ("support.sinks.senders:Nobody", {}, "has no 'Nobody'"),
        ("support.sinks.senders:NoSender", {}, r"expected a class with send_values\(rows, checkpoint_id, timestamp\)"),
        (APPENDING, {}, "missing a required argument: 'path'"),
        (APPENDING, {"path": "x", "mode": "w"}, "unexpected keyword argument 'mode'"),
    ],
)
def test_a_sender_that_cannot_be_built_is_refused_before_anything_is_recorded(
    sender: str, arguments: dict[str, Any], named: str
) -> None:
    pipeline = declare(WriteAhead(sender, arguments=arguments, committer=committers.File()))

    with pytest.raises(ConfigError, match=named):
        pipeline.writes["mail"].prepare()


def test_its_folder_follows_from_its_names(tmp_path: Path) -> None:
    sink = WriteAhead(APPENDING, arguments={"path": "x"})

    declare(sink)

    assert sink.location() == f"{tmp_path}/data/write_ahead/orders/mail"


def test_without_a_pipeline_it_needs_a_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="declare it in a pipeline, or give it a path"):
        WriteAhead(APPENDING).location()

    assert WriteAhead(APPENDING, path="rows").location() == f"{tmp_path}/data/rows"


def test_one_sink_cannot_be_two_writes() -> None:
    sink = WriteAhead(APPENDING, arguments={"path": "x"})
    declare(sink)
    declare(sink)

    with pytest.raises(ConfigError, match="it is orders/mail already"):
        declare(sink, "other")


def test_the_record_keeps_all_that_builds_an_equal_one() -> None:
    sink = WriteAhead(
        APPENDING, arguments={"path": "x"}, committer=committers.File(path="memory"), idempotent=True, republish=True
    )
    pipeline = declare(sink)

    again = Pipeline.from_declaration("orders", pipeline.declaration())

    assert again.declaration() == pipeline.declaration()
    assert isinstance(again.writes["mail"], WriteAhead)
    assert isinstance(again.writes["mail"].committer, committers.File)


def test_the_spark_job_needs_neither_the_sender_nor_a_committer_of_ones_own() -> None:
    """Only the submitter and the promoter have their modules."""
    declaration = {
        **declare(WriteAhead(APPENDING, arguments={"path": "x"})).writes["mail"].declaration(),
        "sender": "only_there:Sender",
        "committer": {"class": "only_there:Memory"},
    }

    sink = Sink.load(declaration)

    key = Key("orders", 1, 1)
    output = Output(key, 1, sink.place(key, 1, "7c1e"), {"files": 1, "digest": ""})
    assert "only_there" in (sink.promote(output).reason or "")
    assert sink.find(output).outcome is Outcome.RETRY_LATER


def test_what_cannot_be_taken_back_is_sent_again_only_where_that_was_declared() -> None:
    assert "republish=True" in (WriteAhead(APPENDING).objection(latest=True) or "")
    assert WriteAhead(APPENDING, republish=True).objection(latest=False) is None


def test_it_keeps_the_order() -> None:
    assert sinks.WriteAhead.ordered
