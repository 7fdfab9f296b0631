"""One table, one pipeline: what the target itself says, by whatever way it is reached."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.pipelines.commands import one_line_error, twophase
from support.pipelines.factories import PreStaged, land_words, words_pipeline
from support.sinks.log_tables import CATALOG
from twophase import sinks
from twophase.committer.record import PostgresRecord
from twophase.core import failpoints
from twophase.core.errors import ConfigError
from twophase.core.failpoints import FailpointError
from twophase.core.settings import data_path
from twophase.runner import Runner
from twophase.sinks.base import Sink
from twophase.sinks.log_tables.base import LogTableSink
from twophase.verification import verify

WHY = ("--reason", "its pipeline has another name now")


#: One table by two ways: another connection, a folder by a link, another path of a table in a catalog.
WAYS: dict[str, tuple[Callable[[], Sink], Callable[[], Sink]]] = {
    "postgres": (
        lambda: sinks.Postgres("words", conn_id="dwh", create=True),
        lambda: sinks.Postgres("public.words", conn_id="other", create=True),
    ),
    "files": (lambda: sinks.Files("lake/words"), lambda: sinks.Files("linked/words")),
    "delta": (lambda: sinks.Delta("lake/words"), lambda: sinks.Delta("linked/words")),
    "iceberg": (
        lambda: sinks.Iceberg("db.words", path="lake/words", catalog=CATALOG),
        lambda: sinks.Iceberg("db.words", path="lake/others", catalog=CATALOG),
    ),
}


@pytest.fixture(params=WAYS)
def ways(
    request: pytest.FixtureRequest, home: Path, target: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Callable[[], Sink], Callable[[], Sink]]]:
    """Give the test two ways to one table, and files to read."""
    monkeypatch.setenv("AIRFLOW_CONN_OTHER", os.environ["AIRFLOW_CONN_DWH"])
    data_path("lake").mkdir(parents=True)
    data_path("linked").symlink_to(data_path("lake"))
    land_words(files=1)
    yield WAYS[request.param]
    failpoints.configure("")


def runner(record: PostgresRecord, name: str, sink: Sink) -> Runner:
    return Runner(words_pipeline(name, writes={"out": sink}), PreStaged(), record=record)


def let_belong(sink: Sink, target: Any, to: str | None) -> None:
    """Let a table belong to a pipeline, or to none, as if that one had come first."""
    if isinstance(sink, sinks.Postgres):
        target.execute("DELETE FROM twophase_sinks.owner")
        if to:
            target.execute("INSERT INTO twophase_sinks.owner VALUES ('public.words', %s)", (to,))
        return
    home = sink._home if isinstance(sink, LogTableSink) else f"{sink.location()}.twophase"  # where it says so
    (Path(home) / "owner").unlink()
    if to:
        (Path(home) / "owner").write_text(f"{to}\n")


def test_a_second_pipeline_is_refused_by_whatever_way_it_comes(record: PostgresRecord, ways: Any) -> None:
    """Before anything is recorded, and with the name of the owner."""
    first, second = ways
    assert runner(record, "words", first()).run() is not None

    with pytest.raises(ConfigError, match="belongs to pipeline 'words', and two cannot share one"):
        runner(record, "others", second()).run()

    assert runner(record, "words", first()).run() is None
    assert "others" in one_line_error(twophase("checkpoints", "others"))  # it is unknown
    assert [found for found in verify(record, words_pipeline(writes={"out": first()})) if found] == []
    told = [found for found in verify(record, words_pipeline("others", writes={"out": second()})) if found]
    assert any("belongs to pipeline 'words'" in found.difference for found in told)


@pytest.mark.parametrize(
    "made",
    [
        """CREATE TABLE public.words (id int8, word text, frequency bigint, _checkpoint bigint) PARTITION BY LIST (id);
        CREATE TABLE public.some PARTITION OF public.words DEFAULT; CREATE TABLE public.others (LIKE public.words)""",
        """CREATE TABLE public.words (id bigint, word text, frequency bigint, _checkpoint bigint);
        CREATE TABLE public.some () INHERITS (public.words); CREATE TABLE public.others () INHERITS (public.words)""",
    ],
    ids=["partition", "inheritance"],
)
@pytest.mark.parametrize("names", [("words", "some"), ("some", "words")], ids="→".join)
def test_a_table_whose_rows_are_those_of_anothers_is_refused(
    record: PostgresRecord, home: Path, target: Any, made: str, names: tuple[str, str]
) -> None:
    """A partition and the table that it is of have one owner; what is beside it has its own."""
    target.execute(made)
    first, second = (sinks.Postgres(name, conn_id="dwh") for name in names)
    land_words(files=1)
    runner(record, "first", first).run()

    told = f"table public.{names[1]} shares rows with public.{names[0]}, which belongs to pipeline 'first', and two"
    with pytest.raises(ConfigError, match=told):
        runner(record, "second", second)

    if names[0] == "some":
        runner(record, "third", sinks.Postgres("others", conn_id="dwh"))


def test_a_table_of_before_there_were_owners_is_its_writers(record: PostgresRecord, ways: Any, target: Any) -> None:
    """Markers and manifests say whose it is; its own pipeline takes it, another does not."""
    first, second = ways
    runner(record, "words", first()).run()
    let_belong(first(), target, None)
    land_words(files=1, start=1)

    with pytest.raises(ConfigError, match="belongs to pipeline 'words'"):
        runner(record, "others", second()).run()
    assert runner(record, "words", first()).run() is not None
    assert words_pipeline(writes={"out": first()}).sinks["out"].owner() == "words"


@pytest.mark.parametrize("name", ["words", "others"])
def test_a_table_that_had_another_name_is_refused_with_the_rows_in_it(
    record: PostgresRecord, home: Path, target: Any, name: str
) -> None:
    """Its rows have numbers that the new pipeline gives away, too: a replacement would delete them."""
    rows = land_words(files=1)
    runner(record, "words", sinks.Postgres("words", conn_id="dwh", create=True)).run()
    target.execute("ALTER TABLE public.words RENAME TO moved")
    again = sinks.Postgres("moved", conn_id="dwh", create=True)

    told = r"table public\.moved holds rows with checkpoints.*rename its column _checkpoint and add a new one"
    with pytest.raises(ConfigError, match=told):
        runner(record, name, again)

    target.execute("ALTER TABLE public.moved RENAME _checkpoint TO old_checkpoint")
    target.execute("ALTER TABLE public.moved ALTER old_checkpoint DROP NOT NULL, ADD _checkpoint bigint")
    land_words(files=1, start=1)
    assert runner(record, name, again).run() is not None
    target.execute("SELECT count(old_checkpoint) FROM public.moved")
    assert target.fetchone() == (len(rows),)


def test_an_iceberg_table_by_two_catalogs_is_one_pipelines(record: PostgresRecord, home: Path) -> None:
    """A catalog says where a table is, and its folder whose it is: another pipeline's catalog leads to a refusal."""
    land_words(files=1)
    first = sinks.Iceberg("db.words", path="lake/words", catalog=CATALOG)
    runner(record, "words", first).run()
    second = sinks.Iceberg("db.words", path="lake/words", catalog={"type": "sql", "uri": "sqlite:///other.db"})

    with pytest.raises(ConfigError, match="belongs to pipeline 'words', and two cannot share one"):
        runner(record, "others", second)

    assert [found for found in verify(record, words_pipeline(writes={"out": first})) if found] == []


def test_a_promotion_to_a_table_that_became_anothers_changes_nothing(
    record: PostgresRecord, ways: Any, target: Any
) -> None:
    """It parks and says whose the table is; handed back, it is promoted."""
    first, _ = ways
    failpoints.configure("commit.after=raise")
    with pytest.raises(FailpointError):
        runner(record, "words", first()).run()
    failpoints.configure("")
    let_belong(first(), target, "others")

    done = twophase("recover", "--wait")
    assert done.exit_code == 1, done.output
    assert "belongs to pipeline 'others'" in twophase("pending").stdout.replace("\n", " ")

    let_belong(first(), target, "words")
    assert twophase("recover", "--wait").exit_code == 0
    assert [found for found in verify(record, words_pipeline(writes={"out": first()})) if found] == []


def test_of_pipelines_that_come_at_once_one_gets_the_table(record: PostgresRecord, ways: Any) -> None:
    first, _ = ways
    names = [f"words{number}" for number in range(4)]
    declared = [words_pipeline(name, writes={"out": first()}) for name in names]

    def tried(number: int) -> str | None:
        try:
            declared[number].prepare()
        except ConfigError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(4) as pool:
        refusals = list(pool.map(tried, range(4)))

    (winner,) = [name for name, refusal in zip(names, refusals, strict=True) if refusal is None]
    assert all(f"belongs to pipeline {winner!r}" in refusal for refusal in refusals if refusal)
    assert declared[0].sinks["out"].owner() == winner


def test_a_table_that_is_a_link_itself_is_refused(home: Path) -> None:
    """The folder beside it would be another one by each of its names."""
    data_path("lake/real").mkdir(parents=True)
    data_path("lake/words").symlink_to(data_path("lake/real"))

    with pytest.raises(ConfigError, match=r"lake/words is a link; name \S+lake/real itself, and move words.twophase"):
        words_pipeline(writes={"out": sinks.Files("lake/words")}).prepare()

    data_path("lake/circle").symlink_to(data_path("lake/circle"))
    with pytest.raises(ConfigError, match=r"lake/circle is a link"):
        words_pipeline(writes={"out": sinks.Files("lake/circle")}).prepare()


# --- handing over ----------------------------------------------------------------------------------------------------


def test_a_table_whose_rows_carry_no_checkpoint_is_handed_over(record: PostgresRecord, home: Path, target: Any) -> None:
    """The new pipeline goes on with it, the old one is refused; said again, or killed in between, it is done once."""
    land_words(files=1)
    upsert: dict[str, Any] = {"mode": "upsert", "key": ["id"], "create": True}
    runner(record, "words", sinks.Postgres("words", conn_id="dwh", **upsert)).run()
    land_words(files=1, start=1)

    words_pipeline(writes={"out": sinks.Postgres("words", conn_id="dwh", **upsert)}).sinks["out"].hand_over("terms")
    for _ in range(2):
        assert twophase("hand-over", "words", "out", "--to", "terms", *WHY).exit_code == 0

    assert runner(record, "terms", sinks.Postgres("words", conn_id="dwh", **upsert)).run() is not None
    with pytest.raises(ConfigError, match="belongs to pipeline 'terms'"):
        runner(record, "words", sinks.Postgres("words", conn_id="dwh", **upsert)).run()
    assert WHY[1] in twophase("show", "words", "1").stdout


def test_rows_that_carry_checkpoints_are_handed_over_without_their_numbers(
    record: PostgresRecord, home: Path, target: Any
) -> None:
    """The refusal says what to do, and that helps: the old rows are nobody's, and no replacement touches them."""
    rows = land_words(files=1)
    runner(record, "words", sinks.Postgres("words", conn_id="dwh", create=True)).run()

    refused = one_line_error(twophase("hand-over", "words", "out", "--to", "terms", *WHY))
    assert "rename the column _checkpoint and add a new one" in refused
    target.execute("ALTER TABLE public.words RENAME _checkpoint TO old_checkpoint")
    target.execute("ALTER TABLE public.words ALTER old_checkpoint DROP NOT NULL, ADD _checkpoint bigint")
    assert twophase("hand-over", "words", "out", "--to", "terms", *WHY).exit_code == 0

    terms = runner(record, "terms", sinks.Postgres("words", conn_id="dwh", create=True))
    assert terms.run() is not None
    terms.replace(1)
    target.execute("SELECT count(old_checkpoint), count(_checkpoint) FROM public.words")
    assert target.fetchone() == (len(rows), len(rows))
    assert [found for found in verify(record, terms.pipeline) if found] == []


def test_a_table_of_files_is_handed_over_as_long_as_it_has_no_checkpoint(record: PostgresRecord, home: Path) -> None:
    words_pipeline(writes={"out": sinks.Files("lake/words")}).prepare()
    Runner(words_pipeline(writes={"out": sinks.Files("lake/words")}), PreStaged(), record=record).run()

    assert twophase("hand-over", "words", "out", "--to", "terms", *WHY).exit_code == 0
    land_words(files=1)
    assert runner(record, "terms", sinks.Files("lake/words")).run() is not None
    refused = one_line_error(twophase("hand-over", "terms", "out", "--to", "words", *WHY))
    assert "known by the checkpoints of pipeline 'terms'; let 'words' write to another table" in refused


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nothing", "--to", "terms"), "expected one of its writes, out; found 'nothing'"),
        (("out", "--to", "words"), "expected the name of another pipeline, found 'words'"),
        (("out", "--to", "No Name"), "expected the name of another pipeline, found 'No Name'"),
        (("out", "--to", "terms"), "it has revisions that have not ended; finish them first, see `twophase pending"),
    ],
)  # fmt: skip
def test_what_cannot_be_handed_over_is_said(
    record: PostgresRecord, home: Path, arguments: tuple[str, ...], told: str
) -> None:
    land_words(files=1)
    failpoints.configure("commit.before=raise")
    with pytest.raises(FailpointError):
        runner(record, "words", sinks.Files("lake/words")).run()
    failpoints.configure("")

    assert told in one_line_error(twophase("hand-over", "words", *arguments, *WHY))
