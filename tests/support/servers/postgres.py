"""The embedded PostgreSQL as tests use it: a folder it may enter, statements without a transaction, a database each."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import create_engine, text


def open_folder(prefix: str) -> Path:
    """Make a temporary folder that other accounts may enter: run as root, PostgreSQL works as one of them."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    folder.chmod(0o755)
    return folder


#: What is written survives the death of any process all the same; only the machine's own must not happen.
FASTER = ("ALTER SYSTEM SET fsync = off", "ALTER SYSTEM SET full_page_writes = off", "SELECT pg_reload_conf()")


def administer(dsn: str, *statements: str) -> None:
    """Run statements that want no transaction."""
    engine = create_engine(dsn, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


@contextmanager
def database(server: str) -> Iterator[str]:
    """Make a database with an empty record; drop it at the end."""
    name = f"test_{uuid.uuid4().hex}"
    place = server.rpartition("/")[0]
    administer(f"{place}/postgres", f"CREATE DATABASE {name} TEMPLATE template_record STRATEGY file_copy")
    yield f"{place}/{name}"
    administer(f"{place}/postgres", f"DROP DATABASE {name} WITH (FORCE)")
