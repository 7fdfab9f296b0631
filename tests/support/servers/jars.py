"""Jars of servers that only tests start: fetched once by Maven, checked, and kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import uuid
from pathlib import Path

import pytest

_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
<modelVersion>4.0.0</modelVersion><groupId>twophase</groupId><artifactId>tests</artifactId><version>1</version>
<dependencies>{}</dependencies></project>"""


def jars(name: str, pinned: str) -> Path:
    """Return the folder of some jars; `pinned` has what Maven calls each, and its sha256."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "twophase", name)
    words = pinned.split()
    expected = {_file(jar): (jar, digest) for jar, digest in zip(words[::2], words[1::2], strict=True)}
    missing = {file: found for file, found in expected.items() if not (folder / file).exists()}
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="twophase-jars-") as fetched:
            _fetch(Path(fetched), [jar for jar, _ in missing.values()])
            for file, (jar, digest) in missing.items():
                found = hashlib.sha256((Path(fetched) / file).read_bytes()).hexdigest()
                assert found == digest, f"{jar}: expected sha256 {digest}, found {found}"
                new = folder / f"{file}.{uuid.uuid4().hex}"
                shutil.copyfile(Path(fetched) / file, new)
                new.replace(folder / file)
    return folder


def _file(jar: str) -> str:
    _, *named = jar.split(":")
    return f"{'-'.join(named)}.jar"


def _fetch(folder: Path, wanted: list[str]) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        pytest.skip("Maven (mvn) is not there to fetch the jars of a server")
    (folder / "pom.xml").write_text(_POM.format("".join(map(_dependency, wanted))))
    copy = ["dependency:copy-dependencies", "-DexcludeTransitive=true", f"-DoutputDirectory={folder}"]
    done = subprocess.run([maven, "-q", "-B", *copy], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def _dependency(jar: str) -> str:
    group, artifact, version, *classifier = jar.split(":")
    extra = f"<classifier>{classifier[0]}</classifier>" if classifier else ""
    return (
        f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version>"
        f"{extra}</dependency>"
    )
