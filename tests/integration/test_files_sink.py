"""The files sink: staged beside the table, checked before the vote and before the rename, visible in one step."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.pipelines.factories import SCHEMA, stage_rows, visible
from twophase.core.checkpoint import Key, Output
from twophase.core.errors import ConfigError, ManifestMismatch
from twophase.core.ports import Outcome
from twophase.sinks import Files
from twophase.sinks.staged_files.receipts import Receipts
from twophase.storage import disk
from twophase.storage.base import DISK

KEY = Key("words", 17, 1)
ROWS = [{"id": i, "word": "w", "frequency": i} for i in range(10)]


@pytest.fixture
def sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    table = Files("lake/words")
    table.prepare()
    return table


def staged(sink: Files, attempt: int = 1, token: str = "7c1e") -> Output:
    output = Output(KEY, attempt, sink.place(KEY, attempt, token), sink="lake")
    stage_rows(sink, output.handle, f"part-r1-a{attempt}", ROWS, files=3)
    return replace(output, manifest=sink.seal(output, SCHEMA))


def folder(output: Output, kind: str = "staging") -> Path:
    return Path(f"{output.handle['table']}.twophase", kind, output.handle["name"])


def table(output: Output) -> Path:
    return Path(output.handle["table"]) / "checkpoint=00000017"


def test_staged_output_is_not_inside_the_table(sink: Files) -> None:
    output = staged(sink)

    assert list(Path(output.handle["table"]).iterdir()) == []
    assert output.manifest["rows"] == 10
    assert output.manifest["files"] == 3


def test_promotion_shows_every_row_under_an_empty_marker(sink: Files) -> None:
    output = staged(sink)

    promotion = sink.promote(output)

    assert promotion.outcome is Outcome.PROMOTED
    marker = table(output) / f"_manifest.r1.a1.{output.manifest['digest']}"
    assert marker.stat().st_size == 0
    assert sorted(row["id"] for row in visible("lake/words")) == list(range(10))


def test_promoting_twice_changes_nothing(sink: Files) -> None:
    output = staged(sink)
    sink.promote(output)
    before = {path: path.stat().st_ino for path in table(output).iterdir()}

    again = sink.promote(output)

    assert again.outcome is Outcome.ALREADY_PROMOTED
    assert {path: path.stat().st_ino for path in table(output).iterdir()} == before


def test_a_late_promoter_whose_revision_was_replaced_touches_nothing(sink: Files) -> None:
    output = staged(sink)
    sink.promote(output)
    later = KEY._replace(revision=2)
    second = Output(later, 1, sink.place(later, 1, "bbbb", older=output), sink="lake")
    stage_rows(sink, second.handle, "part-r2-a1", [], 1)
    sink.promote(replace(second, manifest=sink.seal(second, SCHEMA)))

    late = sink.promote(output)

    assert late.outcome is Outcome.ALREADY_PROMOTED
    assert [path.name for path in table(output).glob("part-*")] == ["part-r2-a1-00000.parquet"]


def test_a_folder_that_is_not_ours_is_never_replaced(sink: Files) -> None:
    """One rename onto a name that must not exist: not even an empty folder there is replaced."""
    output = staged(sink)
    table(output).mkdir()

    refused = sink.promote(output)

    assert refused.outcome is Outcome.FAILED
    assert "is there already" in (refused.reason or "")
    assert list(table(output).iterdir()) == []


def test_what_a_straggling_task_left_is_removed_before_the_rename(sink: Files) -> None:
    """R1: files that are not in the manifest never become visible."""
    output = staged(sink)
    (folder(output) / "part-late.parquet").write_bytes(b"half a file")
    (folder(output) / "_temporary").mkdir()
    (folder(output) / "_temporary" / "part.parquet").write_bytes(b"more")

    sink.promote(output)

    assert not list(table(output).rglob("*late*"))
    assert not (table(output) / "_temporary").exists()
    assert len(visible("lake/words")) == 10


def test_a_folder_without_its_marker_is_junk_and_never_promoted(sink: Files) -> None:
    """R1: a straggler that makes the staging folder again after it was taken cannot have its output promoted."""
    output = staged(sink)
    taken = folder(output).rename(folder(output, "taken").with_name("00000017.r1.a1.other"))
    folder(output).mkdir()
    (folder(output) / "part-late.parquet").write_bytes(b"half a file")

    sink.promote(output)

    assert not taken.exists()
    assert len(visible("lake/words")) == 10


def test_what_another_promoter_took_and_left_is_taken_again(sink: Files) -> None:
    output = staged(sink)
    folder(output).rename(folder(output, "taken").with_name("00000017.r1.a1.dead-promoter"))

    promotion = sink.promote(output)

    assert promotion.outcome is Outcome.PROMOTED
    assert len(visible("lake/words")) == 10


def test_whoever_reads_a_marker_back_makes_both_parents_durable(sink: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """R2: the promoter may have died between its rename and its fsync; then the reader's counts."""
    output = staged(sink)
    sink.promote(output)
    durable: list[str] = []
    monkeypatch.setattr(disk, "fsync_folder", lambda path: durable.append(str(path)))

    sink.find(output)

    assert {output.handle["table"], str(folder(output, "taken").parent)} <= set(durable)


def test_staged_output_that_is_gone_is_lost_only_after_the_marker_was_read_again(sink: Files) -> None:
    output = staged(sink)
    disk.remove(folder(output), folder(output, "taken").parent)

    assert sink.promote(output).outcome is Outcome.FAILED
    assert "is gone" in (sink.find(output).reason or "")


@pytest.mark.parametrize("damage", ["missing", "truncated", "altered", "unmarked"])
@pytest.mark.parametrize("moment", ["vote", "promotion"])
def test_a_damaged_staged_file_is_named_and_nothing_becomes_visible(sink: Files, damage: str, moment: str) -> None:
    output = staged(sink)
    victim = sorted(folder(output).glob("*.parquet"))[1]
    content = victim.read_bytes()
    match damage:
        case "missing":
            victim.unlink()
        case "truncated":
            victim.write_bytes(content[:-1])
        case "altered":
            victim.write_bytes(content[:-1] + b"X")
        case _:
            (folder(output) / f"_manifest.r1.a1.{output.manifest['digest']}").unlink()
            victim = folder(output)

    if moment == "vote":
        with pytest.raises(ManifestMismatch) as refused:
            sink.check(output)
        assert victim.name in str(refused.value)
    else:
        promotion = sink.promote(output)
        assert promotion.outcome is Outcome.FAILED
        assert victim.name in (promotion.reason or "")
    assert not table(output).exists()


def test_a_file_that_was_only_touched_is_still_the_same(sink: Files) -> None:
    output = staged(sink)
    os.utime(next(folder(output).glob("*.parquet")))

    sink.check(output)

    assert sink.promote(output).outcome is Outcome.PROMOTED


def test_two_attempts_never_share_a_place_even_with_the_same_number(sink: Files) -> None:
    """R17: a record restored from a backup repeats epochs; the staging places still differ, as do manifests."""
    first = staged(sink, token="aaaa")
    second = Output(KEY, 1, sink.place(KEY, 1, "bbbb"), sink="lake")
    stage_rows(sink, second.handle, "part-r1-a1", ROWS[:5], files=1)

    with pytest.raises(ManifestMismatch, match="the record is older than the table"):
        sink.seal(second, SCHEMA)

    assert folder(first) != folder(second)
    assert sink.promote(first).outcome is Outcome.PROMOTED


def test_discarding_removes_every_attempt_of_the_revision_and_nothing_else(sink: Files) -> None:
    first = staged(sink, attempt=1)
    staged(sink, attempt=2)
    other = sink.place(Key("words", 17, 2), 1, "cccc")
    stage_rows(sink, other, "part-r2-a1", ROWS, files=1)

    sink.discard(first)

    side = Path(first.handle["table"] + ".twophase")
    assert [path.name for path in (side / "staging").iterdir()] == [other["name"]]
    assert list((side / "manifests").iterdir()) == []
    assert list((side / "taken").iterdir()) == []


def test_discarding_goes_by_the_table_that_was_written_to_wherever_the_sink_is_now(sink: Files) -> None:
    output = staged(sink)
    sink.promote(output)

    Files("elsewhere/words").discard(output)

    assert list(sink.verify(output)) == []


def test_verify_finds_each_kind_of_damage(sink: Files) -> None:
    output = staged(sink)
    sink.promote(output)
    assert list(sink.verify(output)) == []
    missing, altered, _ = sorted(table(output).glob("*.parquet"))

    missing.unlink()
    content = altered.read_bytes()
    altered.write_bytes(content[:-1] + b"X")
    (table(output) / "part-foreign.parquet").write_bytes(b"x")
    found = "\n".join(sink.verify(output))

    assert f"{missing.name} is missing" in found
    assert f"{altered.name}: expected checksum" in found
    assert "part-foreign.parquet is not in the manifest" in found
    assert list(sink.strangers([output])) == []
    assert "checkpoint=00000017" in next(sink.strangers([]))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"path": "lake/t", "format": "orc"}, "'orc'"),
        ({"path": "s3://bucket/t"}, "Delta or Iceberg"),
        ({"path": "lake/t", "format": "json", "options": {"compression": "zstd"}}, "'zstd'"),
    ],
)
def test_a_table_that_cannot_be_written_atomically_is_refused_when_declared(
    arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        Files(**arguments)


def test_a_table_path_that_is_a_file_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "lake").write_text("a file")

    with pytest.raises(ConfigError, match="lake"):
        Files("lake/words").prepare()


FULL = """
import os, sys
sys.path[:0] = {path!r}
os.environ["TWOPHASE_HOME"] = sys.argv[1]
import test_files_sink as t
from twophase.core.errors import NoSpace
sink = t.Files("lake/words"); sink.prepare()
output = t.Output(t.KEY, 1, sink.place(t.KEY, 1, "aaaa"), sink="lake")
t.stage_rows(sink, output.handle, "part", t.ROWS, files=3)
try:
    with open(sys.argv[1] + "/filler", "wb", buffering=0) as filler:
        while filler.write(b"x" * 4096): pass
except OSError: pass
try:
    sink.seal(output, t.SCHEMA)
except NoSpace as error:
    print(error)
print(os.listdir(output.handle["table"]))
"""


def test_no_space_left_is_a_clear_error_and_nothing_becomes_visible(tmp_path: Path) -> None:
    """A real full file system, in a mount namespace of its own."""
    path = [str(Path(__file__).parent), *sys.path]
    script = tmp_path / "full.py"
    script.write_text(FULL.format(path=path))
    disk_folder = tmp_path / "small"
    disk_folder.mkdir()
    mount = f"mount -t tmpfs -o size=200k tmpfs {disk_folder} && {sys.executable} {script} {disk_folder}"
    if subprocess.run(["unshare", "-Urm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this system lets nobody make a mount namespace")

    done = subprocess.run(["unshare", "-Urm", "sh", "-c", mount], check=False, capture_output=True, text=True)

    assert "no space left" in done.stdout, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_newest_receipt_is_found_without_reading_the_history(tmp_path: Path) -> None:
    """Ten thousand decisions cost two short listings, like ten."""
    found = Receipts(DISK, tmp_path)
    for seq in (*range(1, 10_000, 997), 9_999):
        receipt = {"pipeline": "words", "checkpoint_id": seq, "revision": 1, "commit_seq": seq, "epoch": 1}
        assert found.keep(receipt) is None
    listed: list[object] = []

    class Counting(type(DISK)):  # type: ignore[misc]
        def entries(self, folder: object) -> list[tuple[str, str]]:
            listed.append(folder)
            return list(super().entries(folder))

    assert Receipts(Counting(), tmp_path).newest("words") == 9_999
    assert len(listed) == 2
    assert found.keep({"pipeline": "words", "checkpoint_id": 7, "revision": 1, "commit_seq": 9_999, "epoch": 1})


def test_of_the_receipts_of_one_decision_the_latest_epoch_counts(tmp_path: Path) -> None:
    """A promoter of an attempt before a restage may come late, and its receipt after that of the new attempt."""
    found = Receipts(DISK, tmp_path)
    first = {"pipeline": "words", "checkpoint_id": 7, "revision": 1, "commit_seq": 12, "epoch": 2}
    for epoch in (2, 4, 3, 2, 4):
        assert found.keep({**first, "epoch": epoch}) is None

    assert found.of("words", 12) == {**first, "epoch": 4}
    assert list(found.since("words", 1)) == [{**first, "epoch": 4}]
    assert found.newest("words") == 12
    assert found.keep({**first, "checkpoint_id": 8, "epoch": 9}), "the number of another decision"


def test_a_late_receipt_cannot_take_the_place_of_a_later_one(tmp_path: Path) -> None:
    """Two promoters have both seen the first receipt before either writes its own."""
    first = {"pipeline": "words", "checkpoint_id": 7, "revision": 1, "commit_seq": 12, "epoch": 2}
    found = Receipts(DISK, tmp_path)
    found.keep(first)

    class Late(type(DISK)):  # type: ignore[misc]
        """Lets the promoter of epoch 4 go ahead when that of epoch 3 has looked."""

        def read(self, path: object) -> bytes:
            content: bytes = super().read(path)
            found.keep({**first, "epoch": 4})
            return content

    assert Receipts(Late(), tmp_path).keep({**first, "epoch": 3}) is None
    assert found.of("words", 12) == {**first, "epoch": 4}


def test_an_output_is_durable_with_all_its_names_before_its_vote(sink: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and manifest by content, then every folder that names one of them, after the last name was added."""
    last: dict[Path, set[Path]] = {}

    def note(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        last[path] = set(path.iterdir()) if path.is_dir() else set()

    monkeypatch.setattr(os, "fsync", note)
    output = staged(sink)

    here, side = folder(output), folder(output).parent.parent
    data = set(here.glob("*.parquet"))
    assert data <= last.keys()
    assert any(path.name.startswith(".00000017.r1.a1.json.") for path in last), "the manifest, before its name"
    assert last[here] == {*data, here / f"_manifest.r1.a1.{output.manifest['digest']}"}
    assert side / "manifests/00000017.r1.a1.json" in last[side / "manifests"]
    assert here in last[side / "staging"]


def test_what_is_found_sealed_is_made_durable_again(sink: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sealed it may have died before its names were durable; whoever goes on votes for it."""
    output = staged(sink)
    durable: list[str] = []
    monkeypatch.setattr(disk, "fsync_folder", lambda path: durable.append(str(path)))

    found = sink.inspect(replace(output, manifest={}))

    assert found == output.manifest
    assert {str(folder(output)), str(folder(output).parent), str(folder(output, "manifests").parent)} == set(durable)
