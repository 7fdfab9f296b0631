"""A record that earlier code wrote, with its tables: shown, finished, verified, read and run on by the code of today.

`record_0011/` was written by the last code that kept the module of each part in the record. Checkpoint 1 was replaced,
3 took a second attempt, and 4 was decided when its promoter was killed: its folder is taken, not yet visible.
"""

from __future__ import annotations

import json
import os
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import Connection, create_engine, text

from support.pipelines.commands import listed, twophase
from twophase import Pipeline, sinks
from twophase.committer.record import connect
from twophase.committer.upgrade import alembic_config, upgrade

KEPT = Path(__file__).parent / "record_0011"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str) -> Iterator[Path]:
    """Put record and tables back as they were kept, and bring the record to the version of today."""
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    kept = json.loads((KEPT / "record.json").read_text().replace("@HOME@", str(tmp_path)))
    _unpack(tmp_path, kept["modified"])
    base, name = server.rpartition("/")[0], f"test_{uuid.uuid4().hex}"
    admin = create_engine(f"{base}/postgres", isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine = connect(f"{base}/{name}")
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA twophase"))
        config = alembic_config()
        config.attributes["connection"] = connection
        command.upgrade(config, kept["version"])
    with engine.begin() as connection:
        _fill(connection, kept["tables"])
    upgrade(engine)
    engine.dispose()
    monkeypatch.setenv("TWOPHASE_DSN", f"{base}/{name}")
    yield tmp_path
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


def _unpack(home: Path, modified: dict[str, int]) -> None:
    with tarfile.open(KEPT / "data.tar.gz") as tar:
        tar.extractall(home, filter="data")
    for file in (home / "data").rglob("*.json"):
        file.write_text(file.read_text().replace("@HOME@", str(home)))
    for name, when in modified.items():
        os.utime(home / name, ns=(when, when))


def _fill(connection: Connection, tables: dict[str, list[object]]) -> None:
    """Put rows back past the record's own guards, as a restored dump does."""
    connection.execute(text("SET LOCAL session_replication_role = replica"))
    for table, rows in tables.items():
        connection.execute(
            text(
                f"INSERT INTO twophase.{table} OVERRIDING SYSTEM VALUE"
                f" SELECT * FROM jsonb_populate_recordset(NULL::twophase.{table}, :rows)"
            ),
            {"rows": json.dumps(rows)},
        )
    newest = "SELECT setval(pg_get_serial_sequence('twophase.event', 'id'), max(id)) FROM twophase.event"
    connection.execute(text(newest))


def test_it_is_shown_finished_and_verified(home: Path) -> None:
    """What was decided before the upgrade is promoted after it, once."""
    assert "twophase.sinks.files:Files" in (KEPT / "record.json").read_text()
    states = {(row["checkpoint_id"], row["revision"]): row["state"] for row in listed("checkpoints", "words")}
    assert states == {
        (4, 1): "COMMITTING",
        (3, 1): "COMMITTED",
        (2, 1): "COMMITTED",
        (1, 2): "COMMITTED",
        (1, 1): "SUPERSEDED",
    }
    assert twophase("show", "words", "4").exit_code == 0

    recovered = twophase("recover")
    assert recovered.exit_code == 0, recovered.output
    assert twophase("recover").exit_code == 0

    assert listed("checkpoints", "words")[0]["state"] == "COMMITTED"
    assert sorted(path.name for path in (home / "data/lake/words").iterdir()) == [
        f"checkpoint=0000000{number}" for number in (1, 2, 3, 4)
    ]
    verified = twophase("verify", "words")
    assert verified.exit_code == 0, verified.output
    assert "4 checkpoints verified in lake, table: all as recorded" in " ".join(verified.output.split())


def test_its_declaration_is_followed_by_the_same_one_of_today(tmp_path: Path) -> None:
    """A DAG that did not change is not refused because names in the record did, also while a checkpoint is pending."""
    (row,) = json.loads((KEPT / "record.json").read_text().replace("@HOME@", str(tmp_path)))["tables"]["pipeline"]

    pipeline = Pipeline.from_declaration("words", row["declaration"])

    assert isinstance(pipeline.writes["lake"], sinks.Files)
    assert pipeline.changes(row["declaration"], pending=True) == []
    assert pipeline.declaration()["writes"]["lake"]["class"] == "twophase.sinks:Files"
