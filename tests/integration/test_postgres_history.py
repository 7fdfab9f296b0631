"""Rows by key are what a fold of the committed revisions in their order makes, whatever is replaced or comes late."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import psycopg2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.faults.processes import polls
from support.sinks.staged_rows import Rows, prestage
from twophase import sinks
from twophase.core import failpoints
from twophase.core.checkpoint import Key, Output
from twophase.core.errors import ConfigError
from twophase.core.failpoints import FailpointError
from twophase.core.manifest import Column
from twophase.core.ports import Outcome
from twophase.sinks.postgres import changes
from twophase.sinks.postgres.history import order_of

COLUMNS = {"id": "bigint", "word": "string", "more": "string", "_change": "string"}
Row = Mapping[str, Any]
MAY, JUNE, JULY = (f"2026-0{n}-01T00:00:00+00:00/2026-0{n + 1}-01T00:00:00+00:00" for n in (5, 6, 7))


class Table:
    """A target by key, and what a fold in Python makes of the same checkpoints."""

    def __init__(self, mode: str = "upsert", **more: Any) -> None:
        self.mode = mode
        self.sink = sinks.Postgres("words", conn_id="dwh", mode=mode, key=["id"], create=True, **more)
        self.sink.prepare()
        self.slots: dict[int, str | None] = {}
        self.outputs: dict[int, Output] = {}
        self.rows: dict[int, list[Row]] = {}

    def stage(self, checkpoint: int, rows: Sequence[Row], slot: str | None = None) -> Output:
        """Stage the next revision of a checkpoint."""
        self.slots[checkpoint] = slot
        older = self.outputs.get(checkpoint)
        key = Key("words", checkpoint, older.key.revision + 1 if older else 1)
        output = Output(key, 1, self.sink.place(key, 1, "t0ken", slot=slot, older=older), sink="dwh")
        names = [name for name in COLUMNS if any(name in row for row in rows)] if rows else ["id", "word"]
        if self.mode == "retract" and "_change" not in names:
            names.append("_change")
        schema = [Column(name, COLUMNS[name]) for name in names]
        manifest = prestage(self.sink, output, Rows([dict(row) for row in rows], 1, schema))
        return replace(output, manifest=manifest)

    def promote(self, staged: Output, rows: Sequence[Row]) -> Outcome:
        outcome = self.sink.promote(staged).outcome
        if outcome is Outcome.PROMOTED:
            self.outputs[staged.key.checkpoint_id] = staged
            self.rows[staged.key.checkpoint_id] = list(rows)
        return outcome

    def put(self, checkpoint: int, rows: Sequence[Row], slot: str | None = None) -> None:
        """Stage and promote the next revision of a checkpoint."""
        staged = self.stage(checkpoint, rows, slot)
        self.sink.check(staged)
        assert self.promote(staged, rows) is Outcome.PROMOTED

    def folded(self, *, before: int = 1000) -> dict[int, Row]:
        """Return what the checkpoints make in their order, one after the other, on nothing."""
        found: dict[int, dict[str, Any]] = {}
        numbers = [number for number in self.rows if number < before]
        for checkpoint in sorted(numbers, key=lambda one: order_of(one, self.slots[one])):
            for row in self.rows[checkpoint]:
                values = {name: value for name, value in row.items() if name != "_change"}
                if row.get("_change", "+I") in {"-U", "-D"}:
                    found.pop(row["id"], None)
                else:
                    found[row["id"]] = {**found.get(row["id"], {}), **values}
        return {key: {"word": None, "more": None, **row} for key, row in found.items()}


def there(cursor: Any) -> dict[int, Row]:
    cursor.execute("SELECT to_jsonb(w) FROM public.words w")
    return {row["id"]: {"word": None, "more": None, **row} for (row,) in cursor.fetchall()}


def w(*pairs: tuple[Any, ...]) -> list[Row]:
    """Return rows of a number and a word, and what a changelog says."""
    return [dict(zip(("id", "word", "_change"), pair, strict=False)) for pair in pairs]


def short(cursor: Any) -> dict[int, str]:
    return {key: row["word"] for key, row in sorted(there(cursor).items())}


def history(cursor: Any) -> list[tuple[Any, ...]]:
    cursor.execute(
        "SELECT tablename FROM pg_tables WHERE schemaname = 'twophase_sinks' AND tablename LIKE 'h!_%' ESCAPE '!'"
    )
    found = cursor.fetchall()
    if not found:
        return []
    cursor.execute(f"SELECT _twophase_order, id, word, _twophase_there FROM twophase_sinks.{found[0][0]} ORDER BY 1, 2")
    return list(cursor.fetchall())


# --- one after the other ---------------------------------------------------------------------------------------------


def test_the_latest_checkpoint_alone_is_replaced_and_what_it_overwrote_comes_back(target: Any) -> None:
    table = Table()
    table.put(1, w((1, "a"), (2, "b")))
    table.put(2, w((2, "B"), (3, "C")))
    assert history(target) == [(1, 1, None, False), (1, 2, None, False), (2, 2, "b", True), (2, 3, None, False)]

    table.put(2, w((1, "A"), (3, "c")))

    assert short(target) == {1: "A", 2: "b", 3: "c"}
    assert history(target) == [(1, 1, None, False), (1, 2, None, False), (2, 1, "a", True), (2, 3, None, False)]


def test_a_replaced_checkpoint_stays_below_those_that_came_after_it(target: Any) -> None:
    table = Table()
    table.put(1, w((1, "a1"), (2, "b1")))
    table.put(2, w((2, "b2"), (3, "c2"), (4, "d2")))
    table.put(3, w((3, "c3"), (5, "e3")))

    table.put(2, w((1, "A2"), (3, "C2"), (5, "E2"), (6, "F2")))

    assert (
        short(target)
        == {1: "A2", 2: "b1", 3: "c3", 5: "e3", 6: "F2"}
        == {k: v["word"] for k, v in table.folded().items()}
    )
    table.put(3, w((6, "f3")))
    assert short(target) == {1: "A2", 2: "b1", 3: "C2", 5: "E2", 6: "f3"}


def test_may_that_comes_after_june_changes_what_june_found_and_not_what_june_made(target: Any) -> None:
    table = Table()
    table.put(1, w((1, "june"), (2, "june")), JUNE)
    table.put(2, w((1, "july")), JULY)

    table.put(3, w((1, "may"), (3, "may")), MAY)

    assert short(target) == {1: "july", 2: "june", 3: "may"}
    table.put(2, w((9, "july")), JULY)
    assert short(target) == {1: "june", 2: "june", 3: "may", 9: "july"}
    table.put(1, w((2, "june")), JUNE)
    assert short(target) == {1: "may", 2: "june", 3: "may", 9: "july"}


def test_a_deleted_key_keeps_its_tombstone(target: Any) -> None:
    table = Table("retract")
    table.put(1, w((1, "june", "+I"), (2, "june", "+I")), JUNE)
    table.put(2, w((1, "june", "-D")), JULY)

    table.put(3, w((1, "may", "+I"), (3, "may", "+I")), MAY)

    assert short(target) == {2: "june", 3: "may"}
    table.put(2, w((3, "may", "-U"), (3, "july", "+U")), JULY)
    assert short(target) == {1: "june", 2: "june", 3: "july"}


def test_what_is_taken_back_has_to_be_there_at_that_point_of_the_order(target: Any) -> None:
    table = Table("retract")
    table.put(1, w((1, "june", "+I")), JUNE)
    before = there(target)
    rows = w((1, "june", "-D"))
    staged = table.stage(2, rows, MAY)

    found = table.sink.promote(staged)

    assert (found.outcome, found.reason) == (
        Outcome.FAILED,
        "1 rows are retracted from public.words that are not there",
    )
    assert there(target) == before


def test_a_replaced_column_shows_through_checkpoints_that_leave_it_alone(target: Any) -> None:
    table = Table()
    table.put(1, [{"id": 1, "word": "a", "more": "x"}, {"id": 2, "word": "b", "more": "y"}])
    table.put(2, w((1, "A"), (2, "B")))
    table.put(3, w((1, "AA")))

    table.put(1, [{"id": 1, "word": "-", "more": "X"}])

    assert there(target) == table.folded()
    assert there(target)[1] == {"id": 1, "word": "AA", "more": "X"}
    assert there(target)[2] == {"id": 2, "word": "B", "more": None}


def test_a_late_promoter_of_a_replaced_revision_changes_nothing(target: Any) -> None:
    table = Table()
    table.put(1, w((1, "a")))
    first = table.outputs[1]
    table.put(1, w((2, "b")))
    before = (there(target), history(target))

    assert table.promote(first, []) is Outcome.ALREADY_PROMOTED

    assert (there(target), history(target)) == before


def test_rows_that_were_there_before_us_come_back(target: Any) -> None:
    target.execute("CREATE TABLE public.words (id bigint PRIMARY KEY, word text, mine text DEFAULT 'd')")
    target.execute("INSERT INTO public.words VALUES (1, 'old', 'kept'), (2, 'old', 'kept')")
    table = Table()
    table.put(1, w((1, "new"), (3, "new")))

    table.put(1, w((2, "newer")))

    target.execute("SELECT * FROM public.words ORDER BY id")
    assert target.fetchall() == [(1, "old", "kept"), (2, "newer", "kept")]


def test_a_column_that_was_given_another_type_is_kept_as_that(target: Any) -> None:
    target.execute("CREATE TABLE public.words (id bigint PRIMARY KEY, word varchar(3))")
    table = Table()
    table.put(1, w((1, "abc")))
    target.execute("ALTER TABLE public.words ALTER word TYPE text")
    table.put(2, w((2, "a long one"), (1, "another long one")))
    table.put(3, w((2, "b")))

    table.put(3, w((1, "c")))

    assert there(target) == table.folded()


# --- the index by key ------------------------------------------------------------------------------------------------


def indexed(cursor: Any) -> int:
    """Count the indexes that the history has by key."""
    cursor.execute(
        "SELECT count(*) FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid"
        " WHERE c.relnamespace = 'twophase_sinks'::regnamespace AND starts_with(c.relname, 'h_') AND i.indisunique"
    )
    found: int = cursor.fetchone()[0]
    return found


@pytest.mark.parametrize("again", [2, 1])
def test_a_history_has_no_index_by_key_before_something_is_replaced(target: Any, again: int) -> None:
    table = Table()
    table.put(1, w((1, "a"), (2, "b")))
    table.put(2, w((2, "B"), (3, "C")))
    assert indexed(target) == 0

    table.put(again, w((2, "X"), (4, "Y")))

    assert (indexed(target), there(target)) == (1, table.folded())
    for number in (3, 1, 3):
        table.put(number, w((2, f"v{number}"), (number * 10, "own")))
    assert (indexed(target), there(target)) == (1, table.folded())


def test_a_history_has_no_index_by_key_before_something_comes_late(target: Any) -> None:
    table = Table("retract")
    table.put(1, w((1, "june", "+I"), (2, "june", "+I")), JUNE)
    table.put(2, w((1, "june", "-U"), (1, "july", "+U"), (2, "june", "-D")), JULY)
    assert indexed(target) == 0

    table.put(3, w((2, "may", "+I"), (3, "may", "+I")), MAY)

    assert (indexed(target), short(target)) == (1, {1: "july", 3: "may"})


def test_a_history_that_has_its_primary_key_keeps_it_and_gets_no_other_index(target: Any) -> None:
    table = Table()
    table.put(1, w((1, "a")))
    target.execute("SELECT relname FROM pg_class WHERE starts_with(relname, 'h_') AND relkind = 'r'")
    target.execute(f"ALTER TABLE twophase_sinks.{target.fetchone()[0]} ADD PRIMARY KEY (id, _twophase_order)")

    for number in (2, 1):
        table.put(number, w((1, f"v{number}")))

    assert (indexed(target), there(target)) == (1, table.folded())


def test_a_replacement_that_dies_leaves_no_index_and_is_done_by_the_next_promoter(target: Any) -> None:
    table = Table()
    table.put(1, w((1, "a"), (2, "b")))
    rows = w((2, "c"))
    staged = table.stage(1, rows)
    failpoints.configure("promote.applied=raise")
    with pytest.raises(FailpointError):
        table.promote(staged, rows)
    failpoints.configure("")
    assert (indexed(target), there(target)) == (0, table.folded())

    assert table.promote(staged, rows) is Outcome.PROMOTED

    assert (indexed(target), there(target)) == (1, table.folded())


# --- beside others ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["upsert", "retract"])
def test_a_key_that_somebody_else_adds_during_a_promotion_is_changed_all_the_same(target: Any, mode: str) -> None:
    table = Table(mode)
    table.put(1, w((1, "a", "+I"), (2, "b", "+I")) if mode == "retract" else w((1, "a"), (2, "b")))
    rows = w((2, "b", "-D"), (3, "ours", "+I")) if mode == "retract" else w((2, "B"), (3, "ours"))
    staged = table.stage(2, rows)
    with closing(psycopg2.connect(target.connection.dsn, password=target.connection.info.password)) as other:
        other.cursor().execute("INSERT INTO public.words (id, word) VALUES (3, 'theirs')")
        with ThreadPoolExecutor(1) as pool:
            promoting = pool.submit(table.promote, staged, rows)
            waits_for_a_lock(target)
            other.commit()

            assert promoting.result() is Outcome.PROMOTED

    assert there(target) == table.folded()


def waits_for_a_lock(cursor: Any) -> None:
    """Wait until somebody waits for a lock in this database."""
    for _ in polls(30):
        cursor.execute("SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)"
                       " WHERE NOT l.granted AND a.datname = current_database()")  # fmt: skip
        if cursor.fetchone()[0]:
            return
    pytest.fail("expected a promotion that waits for a lock, found none")


def test_a_server_without_merge_gets_the_same_rows(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_MERGES", target.connection.server_version + 1)
    table = Table("retract")
    table.put(1, w((1, "a", "+I"), (2, "b", "+I")))
    table.put(2, w((1, "a", "-D"), (2, "b", "-U"), (2, "B", "+U"), (3, "c", "+I")))

    assert there(target) == table.folded()


@pytest.mark.parametrize("order", ["n", "md5(n::text)"], ids=["in order", "in no order"])
def test_rows_are_merged_alike_into_a_target_that_lies_in_the_order_of_its_key_or_in_none(
    target: Any, order: str
) -> None:
    target.execute("CREATE TABLE public.words (id bigint PRIMARY KEY, word text)")
    target.execute(f"INSERT INTO public.words SELECT n, 'old' FROM generate_series(2, 600, 2) n ORDER BY {order}")
    target.execute("ANALYZE public.words")
    table = Table()

    table.put(1, w(*((n, "new") for n in range(600, 0, -1))))

    assert there(target) == table.folded()


def test_a_trigger_is_told_of_an_update_where_the_key_is_there_and_of_an_insert_where_it_is_not(target: Any) -> None:
    target.execute("CREATE TABLE public.words (id bigint PRIMARY KEY, word text); CREATE TABLE public.told (what text)")
    target.execute("CREATE FUNCTION public.tell() RETURNS trigger LANGUAGE plpgsql AS"
                   " 'BEGIN INSERT INTO public.told VALUES (TG_OP || NEW.id); RETURN NEW; END'")  # fmt: skip
    target.execute("INSERT INTO public.words VALUES (1, 'old')")
    target.execute("CREATE TRIGGER tell BEFORE INSERT OR UPDATE ON public.words"
                   " FOR EACH ROW EXECUTE FUNCTION public.tell()")  # fmt: skip

    Table().put(1, w((1, "a"), (2, "b")))

    target.execute("SELECT what FROM public.told ORDER BY 1")
    assert target.fetchall() == [("INSERT2",), ("UPDATE1",)]


# --- the limit -------------------------------------------------------------------------------------------------------


def test_a_history_of_two_checkpoints_keeps_two_and_refuses_what_is_older_before_the_vote(target: Any) -> None:
    table = Table(history=2)
    for number in range(1, 5):
        table.put(number, w((1, f"v{number}"), (number * 10, "own")))
    assert {order for order, *_ in history(target)} == {3, 4}

    table.put(3, w((1, "V3")))

    assert short(target) == {1: "v4", 10: "own", 20: "own", 40: "own"}
    staged = table.stage(2, w((1, "V2")))
    with pytest.raises(ConfigError, match="what checkpoint 2 overwrote in"):
        table.sink.check(staged)


def test_what_is_staged_keeps_its_place_in_a_short_history(target: Any) -> None:
    table = Table(history=1)
    table.put(1, w((1, "a")))
    rows = w((2, "b"))
    staged = table.stage(1, rows)
    table.sink.check(staged)
    for number in (2, 3):
        table.put(number, w((1, f"v{number}")))

    assert table.promote(staged, rows) is Outcome.PROMOTED

    assert there(target) == table.folded()
    table.put(4, w((4, "d")))
    assert {order for order, *_ in history(target)} == {4}


def test_a_history_of_nothing_keeps_nothing_and_has_no_slots(target: Any) -> None:
    table = Table(history=0)
    table.put(1, w((1, "a")))
    table.put(2, w((1, "b")))

    assert (short(target), history(target)) == ({1: "b"}, [])
    assert "history=0" in (table.sink.objection(latest=True) or "")
    with pytest.raises(ConfigError, match="no order between slots"):
        table.sink.prepare(MAY)


def test_a_checkpoint_from_before_there_was_a_history_is_not_replaced(target: Any) -> None:
    old = Table(history=0)
    old.put(1, w((1, "a")))
    table = Table()
    table.outputs = old.outputs
    table.put(2, w((1, "b")))
    staged = table.stage(1, w((1, "c")))

    with pytest.raises(ConfigError, match="what checkpoint 1 overwrote in"):
        table.sink.check(staged)
    assert table.promote(staged, []) is Outcome.FAILED
    assert short(target) == {1: "b"}


# --- verify ----------------------------------------------------------------------------------------------------------


def test_verify_counts_the_keys_of_an_upsert_and_finds_what_is_gone(target: Any) -> None:
    table = Table()
    table.put(1, w((1, "a"), (2, "b")))
    table.put(2, w((2, "c")))
    assert [list(table.sink.verify(one)) for one in table.outputs.values()] == [[], []]

    target.execute("DELETE FROM public.words WHERE id = 1")

    assert list(table.sink.verify(table.outputs[1])) == [
        "table public.words: 1 keys of checkpoint are not there any more"
    ]


# --- anything --------------------------------------------------------------------------------------------------------

keys = st.integers(1, 4)
word = st.sampled_from(["a", "b", "c", None])


@st.composite
def upserts(draw: st.DrawFn) -> list[Row]:
    names = draw(st.sampled_from([["word"], ["more"], ["word", "more"], []]))
    return [{"id": key, **{name: draw(word) for name in names}} for key in draw(st.sets(keys, max_size=4))]


@st.composite
def changelogs(draw: st.DrawFn) -> list[Row]:
    """Return insertions and deletions; a deletion of what is not there is left out when it is known."""
    return [
        {"id": key, "word": draw(word), "_change": draw(st.sampled_from(["+I", "+I", "-D"]))}
        for key in draw(st.sets(keys, max_size=4))
    ]


@contextmanager
def emptied(cursor: Any) -> Iterator[None]:
    """Let each example begin with nothing."""
    try:
        yield
    finally:
        cursor.execute("DROP SCHEMA IF EXISTS twophase_sinks, twophase_staging CASCADE")
        cursor.execute("DROP TABLE IF EXISTS public.words")


steps = st.lists(st.integers(1, 4), min_size=2, max_size=7)
ANY = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], print_blob=True
)


@ANY
@given(data=st.data(), checkpoints=steps, slotted=st.booleans())
def test_upserts_in_any_order_and_revision_are_the_fold_of_them(
    target: Any, data: st.DataObject, checkpoints: list[int], slotted: bool
) -> None:
    with emptied(target):
        table = Table()
        for checkpoint in checkpoints:
            slot = f"2026-11-{checkpoint:02d}" if slotted else None
            table.put(checkpoint, data.draw(upserts()), slot)

            assert there(target) == table.folded()


@ANY
@given(data=st.data(), checkpoints=steps)
def test_changelogs_in_any_order_and_revision_are_the_fold_of_them(
    target: Any, data: st.DataObject, checkpoints: list[int]
) -> None:
    with emptied(target):
        table = Table("retract")
        for checkpoint in checkpoints:
            rows = data.draw(changelogs())
            earlier = table.folded(before=checkpoint)
            rows = [row for row in rows if row["_change"] == "+I" or row["id"] in earlier]
            table.put(checkpoint, rows, f"2026-11-{checkpoint:02d}")

            assert {key: row["word"] for key, row in there(target).items()} == {
                key: row["word"] for key, row in table.folded().items()
            }
