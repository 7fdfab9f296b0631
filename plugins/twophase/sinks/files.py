"""A table of files: one folder per checkpoint, made visible by one rename. `layout` draws the folders."""

from __future__ import annotations

import errno
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from twophase.core.checkpoint import Json, Key
from twophase.core.errors import ConfigError, ManifestMismatch, NoSpace
from twophase.core.failpoints import hit
from twophase.core.manifest import Column, Manifest, StagedFile
from twophase.core.ports import Outcome, Promotion
from twophase.core.settings import data_path
from twophase.sinks import disk
from twophase.sinks.base import Attempt, Sink
from twophase.sinks.layout import ATTEMPT, MARKER, Marker, Place
from twophase.sinks.rows import COMPRESSIONS, FORMATS, count_rows

#: Spark would trim spaces off a value, and read one with a line break as two.
CSV = {"header": True, "ignoreLeadingWhiteSpace": False, "ignoreTrailingWhiteSpace": False, "multiLine": True}
#: How often a promoter starts over when others get in its way, before it leaves the work to whoever comes next.
TRIES = 20
THREADS = 4


class Files(Sink):
    """Append each checkpoint to a folder of Parquet, JSON or CSV files."""

    def __init__(
        self,
        path: str,
        *,
        format: str = "parquet",  # noqa: A002 - Spark's own word for it
        partition_by: Iterable[str] = (),
        options: Json | None = None,
    ) -> None:
        """Declare a table at a path; `options` go to Spark's writer."""
        self.path = str(path)
        self.format = format
        self.partition_by = [partition_by] if isinstance(partition_by, str) else list(partition_by)
        self.options = dict(options or {})
        if re.match(r"[a-z][a-z0-9+.-]*://", self.path):
            msg = f"sinks.Files {self.path!r}: it needs atomic folder rename; on object stores use Delta or Iceberg"
            raise ConfigError(msg)
        if format not in FORMATS:
            msg = f"sinks.Files {self.path!r}: unknown format {format!r}, expected {', '.join(FORMATS)}"
            raise ConfigError(msg)
        compression = self.options.get("compression", "none")
        if format != "parquet" and compression not in COMPRESSIONS:
            msg = f"sinks.Files {self.path!r}: compression {compression!r}, expected {', '.join(COMPRESSIONS)}"
            raise ConfigError(msg)

    def config(self) -> dict[str, Any]:
        """Return the arguments that build an equal one."""
        return {
            "path": self.location(),
            "format": self.format,
            "partition_by": self.partition_by,
            "options": self.options,
        }

    def location(self) -> str:
        """Return the table's folder."""
        return str(data_path(self.path))

    def folders(self) -> tuple[str, ...]:
        """Return the table's folder, and the one beside it."""
        return (self.location(), f"{self.location()}.twophase")

    def by_position(self) -> bool:
        """CSV readers know columns by position."""
        return self.format == "csv"

    def prepare(self) -> None:
        """Create the table's folder and the one beside it, on one file system, so that a rename is atomic."""
        table = Path(self.location())
        side = table.with_name(f"{table.name}.twophase")
        try:
            for folder in (table, side, *(side / name for name in ("staging", "taken", "manifests"))):
                if not folder.is_dir():
                    folder.mkdir(parents=True, exist_ok=True)
                    disk.fsync_folder(folder.parent)
        except OSError as error:
            msg = f"sinks.Files {self.path!r}: folder {error.filename} cannot be made: {error.strerror}"
            raise ConfigError(msg) from error
        if not os.access(table, os.W_OK | os.X_OK) or not os.access(side, os.W_OK | os.X_OK):
            msg = f"sinks.Files {self.path!r}: folder {table} or {side.name} beside it is not writable"
            raise ConfigError(msg)
        if table.stat().st_dev != side.stat().st_dev:
            msg = f"sinks.Files {self.path!r}: {table} and {side.name} beside it must be on one file system"
            raise ConfigError(msg)

    # --- stage -------------------------------------------------------------------------------------------------------

    def place(self, key: Key, attempt: int, token: str) -> Json:
        """Name a staging folder beside the table; the token keeps it apart if a restored record repeats epochs."""
        name = f"{key.checkpoint_id:08d}.r{key.revision}.a{attempt}.{token}"
        return {"table": self.location(), "name": name}

    def stage(self, frame: Any, key: Key, attempt: int, sink: str, handle: Json) -> Json:  # noqa: ANN401 - a DataFrame
        """Let Spark write the frame, then seal what it wrote."""
        if any(name.lower() == "checkpoint" for name in frame.columns):
            msg = f"checkpoint {key}: sink {sink!r}: a column cannot be named 'checkpoint': the folder's is; rename it"
            raise ConfigError(msg)
        place = Place(key, handle)
        writer = frame.write.format(self.format).options(
            **{
                **(CSV if self.format == "csv" else {}),
                **self.options,
                "mapreduce.output.basename": f"part-r{key.revision}-a{attempt}",
                "mapreduce.fileoutputcommitter.algorithm.version": 1,
                "mapreduce.fileoutputcommitter.marksuccessfuljobs": False,
            },
        )
        writer.partitionBy(*self.partition_by).save(place.staged.as_uri())
        schema = tuple(Column(field.name, field.dataType.simpleString()) for field in frame.schema.fields)
        return self.seal(key, attempt, sink, handle, schema)

    def seal(self, key: Key, attempt: int, sink: str, handle: Json, schema: tuple[Column, ...]) -> Json:
        """Make what lies in the staging folder durable, describe it in a manifest, and put the marker in."""
        place = Place(key, handle)
        hit("stage.written")
        try:
            self._name_files(place.staged, f"part-r{key.revision}-a{attempt}-")
            manifest = Manifest(key, sink, attempt, schema, tuple(self._seal_files(place.staged)))
            hit("stage.durable")
            content = manifest.dumps()
            checksum = disk.digest(content)
            disk.create(place.manifest(key, attempt), content)
            hit("stage.manifest")
            marker = place.staged / str(Marker(key.revision, attempt, checksum))
            marker.touch()
            disk.fsync_folder(place.staged)
        except FileExistsError as error:
            msg = (
                f"checkpoint {key}: sink {sink!r}: another attempt {attempt} left the manifest"
                f" {place.manifest(key, attempt)}: the record is older than the table; run again"
            )
            raise ManifestMismatch(msg) from error
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                msg = f"checkpoint {key}: sink {sink!r}: no space left for {place.side}; nothing was committed"
                raise NoSpace(msg) from error
            raise
        hit("stage.marked")
        return manifest.summary(checksum)

    def _name_files(self, folder: Path, prefix: str) -> None:
        """Remove what is not data, and put revision and attempt into the names that lack them.

        Then a reader across an exchange of two revisions fails instead of mixing them (R17). Spark 4 writes the names
        so; 3.5 cannot.
        """
        strays = False
        for path, _ in list(disk.walk(folder)):
            below, _, name = path.rpartition("/")
            if any(part.startswith(("_", ".")) for part in path.split("/")):
                (folder / path).unlink()
                strays = True
            elif not name.startswith(prefix):
                (folder / path).rename(folder / below / f"{prefix}{name.removeprefix('part-')}")
        if strays:
            disk.prune(folder)

    def _seal_files(self, folder: Path) -> list[StagedFile]:
        """Make every file durable, and describe it."""
        found = sorted(disk.walk(folder))

        def describe(item: tuple[str, os.stat_result]) -> StagedFile:
            path, stat = item
            full = f"{folder}/{path}"
            checksum = disk.seal_file(full)
            rows = count_rows(full, self.format, self.options)
            return StagedFile(path, stat.st_size, stat.st_mtime_ns, rows, checksum)

        with ThreadPoolExecutor(THREADS) as pool:
            files = list(pool.map(describe, found))
            list(pool.map(disk.fsync_folder, list(disk.folders(folder))))
        disk.fsync_folder(folder.parent)
        return files

    def check(self, key: Key, handle: Json, manifest: Json) -> None:
        """Compare the staged folder with its manifest before the vote, and see that its name in the table is free."""
        place = Place(key, handle)
        marker = self._marker(key, place, manifest)
        if place.visible.exists():
            msg = f"checkpoint {key}: folder {place.visible} is there already, but not in this record; move it away"
            raise ManifestMismatch(msg)
        if not (place.staged / str(marker)).exists():
            msg = f"checkpoint {key}: staged folder {place.staged} has no marker {marker}; stage it again"
            raise ManifestMismatch(msg)
        self._check_files(place.staged, self._manifest(place, key, marker.attempt, marker.digest))

    def _manifest(self, place: Place, key: Key, attempt: int, digest: str) -> Manifest:
        """Load a manifest, if it is the one that the digest stands for."""
        path = place.manifest(key, attempt)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            msg = f"checkpoint {key}: manifest {path} is gone"
            raise ManifestMismatch(msg) from None
        if disk.digest(content) != digest:
            msg = f"checkpoint {key}: manifest {path}: expected checksum {digest}, found {disk.digest(content)}"
            raise ManifestMismatch(msg)
        return Manifest.loads(content)

    def _check_files(self, folder: Path, manifest: Manifest) -> list[str]:
        """Raise ManifestMismatch unless a folder holds all that its manifest says; return what it holds besides.

        Size and modification time tell; a file whose time changed is read again and must still have its checksum.
        """
        found = dict(disk.walk(folder))
        for file in manifest.files:
            stat = found.pop(file.path, None)
            problem = None
            if stat is None:
                problem = "is missing"
            elif stat.st_size != file.size:
                problem = f"was altered: expected {file.size} bytes, found {stat.st_size}"
            elif stat.st_mtime_ns != file.mtime_ns and (now := disk.digest_file(folder / file.path)) != file.xxh3:
                problem = f"was altered: expected checksum {file.xxh3}, found {now}"
            if problem:
                msg = f"checkpoint {manifest.key}: staged file {folder / file.path} {problem}; stage it again"
                raise ManifestMismatch(msg)
        return [path for path in found if not MARKER.fullmatch(path)]

    # --- promote -----------------------------------------------------------------------------------------------------

    def find(self, key: Key, handle: Json, manifest: Json) -> Promotion:
        """Say where the output stands without changing it."""
        place = Place(key, handle)
        if not place.reachable:
            return Promotion(Outcome.RETRY_LATER, f"folder {place.table} is not there; is it mounted?")
        marker = self._marker(key, place, manifest)
        promoted = self._promoted(key, place, marker)
        if promoted is None:
            # In the order in which an output moves, so that one on its way is met somewhere: staging, taken, table.
            whole, problem = self._staged(key, place, marker)
            if whole:
                return Promotion(Outcome.RETRY_LATER, f"staged at {whole}")
            promoted = self._promoted(key, place, marker) or Promotion(Outcome.FAILED, problem)
        return promoted

    def _staged(self, key: Key, place: Place, marker: Marker) -> tuple[Path | None, str]:
        """Return where the staged output is, or why what is there cannot be promoted.

        Promoters may take it from each other meanwhile: only what two listings agree on is missing.
        """
        problem, before = f"staged output {place.staged} is gone", None
        for _ in range(TRIES):
            folders = [place.staged, *place.taken_by_others()] if before is None else before
            for folder in folders:
                if not (folder / str(marker)).exists():
                    continue
                try:
                    self._check_files(folder, self._manifest(place, key, marker.attempt, marker.digest))
                except FileNotFoundError:
                    return folder, ""  # a promoter has just taken it: it is on its way
                except ManifestMismatch as error:
                    problem = str(error)
                    continue
                return folder, ""
            before = [place.staged, *place.taken_by_others()]
            if before == folders:
                break
        return None, problem

    def promote(self, key: Key, handle: Json, manifest: Json) -> Promotion:
        """Take the staged folder, check it, rename it into the table; start over whenever another was faster (R1)."""
        place = Place(key, handle)
        if not place.reachable:
            return self.find(key, handle, manifest)
        marker = self._marker(key, place, manifest)
        for _ in range(TRIES):
            promoted = self._promoted(key, place, marker)
            if promoted:
                return promoted
            mine = self._take(place, marker)
            if mine is None:
                found = self.find(key, handle, manifest)
                if found.outcome is Outcome.RETRY_LATER:
                    continue
                return found
            hit("promote.taken")
            try:
                self._check_taken(key, place, mine, marker)
            except ManifestMismatch as error:
                return Promotion(Outcome.FAILED, str(error))
            hit("promote.checked")
            if self._show(place, mine):
                promoted = self._promoted(key, place, marker)
                return replace(promoted, outcome=Outcome.PROMOTED) if promoted else Promotion(Outcome.UNKNOWN)
        return Promotion(Outcome.RETRY_LATER, "other promoters are at it")

    def _marker(self, key: Key, place: Place, manifest: Json) -> Marker:
        match = ATTEMPT.fullmatch(place.name)
        return Marker(key.revision, int(match[3]) if match else 0, manifest["digest"])

    def _promoted(self, key: Key, place: Place, marker: Marker) -> Promotion | None:
        """Read the marker back; None: nothing is visible under this checkpoint's name."""
        found: Marker | None = marker
        if not (place.visible / str(marker)).exists():
            try:
                names = [entry.name for entry in place.visible.iterdir()]
            except FileNotFoundError:
                return None
            matches = [match for match in map(MARKER.fullmatch, names) if match]
            found = Marker(int(matches[0][1]), int(matches[0][2]), matches[0][3]) if matches else None
        ours = found is not None and (found == marker or found.revision > key.revision or found.digest in place.earlier)
        if found is None or not ours:
            holder = f"the marker {found}" if found else "no marker"
            return Promotion(Outcome.FAILED, f"folder {place.visible} is there already, with {holder}")
        # Whoever counts a marker makes it durable first: its promoter may have died before its own fsync (R2).
        disk.fsync_folder(place.table)
        if place.taken.is_dir():
            disk.fsync_folder(place.taken)
        if found.revision > key.revision:  # it was promoted, and replaced since
            return Promotion(Outcome.ALREADY_PROMOTED)
        summary = None
        if found != marker:
            summary = self._manifest(place, key, found.attempt, found.digest).summary(found.digest)
        hit("promote.durable")
        return Promotion(Outcome.ALREADY_PROMOTED, attempt=found.attempt, manifest=summary)

    def _take(self, place: Place, marker: Marker) -> Path | None:
        """Rename the staged folder to a name that only this call uses; None: it is not there (any more)."""
        for source in (place.staged, *place.taken_by_others()):
            mine = place.taken / f"{place.prefix}.{uuid.uuid4().hex}"
            try:
                source.rename(mine)
            except FileNotFoundError:
                continue
            if (mine / str(marker)).exists():
                return mine
            # Without its marker it is not what was voted for: a straggling task made the folder again. Never promoted.
            mine.rename(mine.with_name(f"{mine.name}.junk"))
        return None

    def _check_taken(self, key: Key, place: Place, mine: Path, marker: Marker) -> None:
        """Check a taken folder against its manifest, and remove what a straggling task left in it."""
        manifest = self._manifest(place, key, marker.attempt, marker.digest)
        try:
            strays = self._check_files(mine, manifest)
            for stray in strays:
                (mine / stray).unlink()
            if strays:
                disk.prune(mine)
        except FileNotFoundError:
            if mine.exists():
                raise
            # another promoter took it from us: `_show` finds it gone and we start over

    def _show(self, place: Place, mine: Path) -> bool:
        """Make a taken folder visible: the one atomic step. False: somebody was faster, start over."""
        try:
            disk.rename_new(mine, place.visible)
        except (FileNotFoundError, FileExistsError):
            return False
        hit("promote.visible")
        return True

    def discard(self, key: Key, handle: Json) -> None:
        """Remove what any attempt of a dead revision staged."""
        place = Place(key, handle)
        for left in self._attempts(place.side):
            if (left.checkpoint_id, left.revision) == (key.checkpoint_id, key.revision):
                self.remove(left)

    # --- sweep, verify, read -----------------------------------------------------------------------------------------

    def attempts(self) -> Iterator[Attempt]:
        """List what attempts left beside the table."""
        table = Path(self.location())
        yield from self._attempts(table.with_name(f"{table.name}.twophase"))

    def _attempts(self, side: Path) -> Iterator[Attempt]:
        for name in ("staging", "taken", "manifests"):
            if not (side / name).is_dir():
                continue
            with os.scandir(side / name) as entries:
                found = [(entry.name, entry.path) for entry in entries]
            for entry, path in found:
                if match := ATTEMPT.fullmatch(entry):
                    yield Attempt(int(match[1]), int(match[2]), int(match[3]), path, manifest=name == "manifests")

    def remove(self, left: Attempt) -> None:
        """Remove one of those, unless it is the manifest of what is visible: then another record knows of it."""
        path = Path(left.path)
        if left.manifest and self._is_visible(left):
            return
        disk.remove(path, path.parent.parent / "taken")

    def _is_visible(self, left: Attempt) -> bool:
        table = Path(left.path).parents[1]
        marker = Marker(left.revision, left.attempt, disk.digest(Path(left.path).read_bytes()))
        visible = table.with_name(table.name.removesuffix(".twophase")) / f"checkpoint={left.checkpoint_id:08d}"
        return (visible / str(marker)).exists()

    def verify(self, key: Key, attempt: int, manifest: Json) -> Iterator[str]:
        """Compare a committed revision with its folder, byte by byte."""
        place = Place(key, self.place(key, attempt, "verify"))
        marker = Marker(key.revision, attempt, manifest["digest"])
        if not (place.visible / str(marker)).exists():
            yield f"{place.visible} has no marker {marker}"
            return
        try:
            expected = self._manifest(place, key, attempt, manifest["digest"])
        except ManifestMismatch as error:
            yield str(error)
            return
        found = dict(disk.walk(place.visible))
        found.pop(str(marker))

        def compare(file: StagedFile) -> str | None:
            path = f"{place.visible}/{file.path}"
            stat = found.get(file.path)
            if stat is None:
                return f"{path} is missing"
            if stat.st_size != file.size:
                return f"{path}: expected {file.size} bytes, found {stat.st_size}"
            checksum = disk.digest_file(path)
            return None if checksum == file.xxh3 else f"{path}: expected checksum {file.xxh3}, found {checksum}"

        with ThreadPoolExecutor(THREADS) as pool:
            yield from filter(None, pool.map(compare, expected.files))
        for stranger in found.keys() - {file.path for file in expected.files}:
            yield f"{place.visible}/{stranger} is not in the manifest"

    def strangers(self, known: Iterable[int]) -> Iterator[str]:
        """Yield what is in the table's folder but is no committed checkpoint's."""
        expected = {f"checkpoint={checkpoint_id:08d}" for checkpoint_id in known}
        if not Path(self.location()).is_dir():
            yield f"folder {self.location()} is not there"
            return
        with os.scandir(self.location()) as entries:
            yield from (f"{entry.path} is no committed checkpoint's" for entry in entries if entry.name not in expected)

    def read_options(self) -> dict[str, Any]:
        """Return what Spark's reader must know to read what its writer wrote."""
        return {**CSV, **self.options} if self.format == "csv" else {}

    def folder(self, key: Key) -> str:
        """Return the visible folder of a committed checkpoint."""
        return f"{self.location()}/checkpoint={key.checkpoint_id:08d}"

    def files(self, key: Key, attempt: int, manifest: Json) -> list[str]:
        """List the files of a committed revision, from its manifest."""
        place = Place(key, self.place(key, attempt, "read"))
        found = self._manifest(place, key, attempt, manifest["digest"])
        return [f"{place.visible}/{file.path}" for file in found.files]
