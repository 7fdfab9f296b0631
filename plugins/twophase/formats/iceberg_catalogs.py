"""Catalogs of Iceberg tables: how one is declared, and how it is reached. For the Iceberg sink and sources."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from twophase.core import connections, secret_texts
from twophase.core.errors import ConfigError
from twophase.core.settings import data_path

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog

    from twophase.storage.base import Storage

_SQLITE = "sqlite:///"


def declared(who: str, table: str, catalog: str | Mapping[str, str]) -> str | dict[str, str]:
    """Return a catalog as the record keeps it: a connection's id, or properties; ConfigError if one is a secret.

    ConfigError, too, if the table's name has no namespace.
    """
    if not re.fullmatch(r"\w+(\.\w+)+", table):
        msg = f"{who}: expected namespace.table"
        raise ConfigError(msg)
    if isinstance(catalog, str):
        return catalog
    for name, value in catalog.items():
        # A secret in a property would be in the record for everybody to read.
        if secret_texts.NAMES.search(name) or urlsplit(str(value)).password:
            msg = f"{who}: catalog property {name!r} is a secret; give the catalog as a connection's id"
            raise ConfigError(msg)
    found = dict(catalog)
    uri = found.get("uri", "")
    if uri.startswith(_SQLITE):
        found["uri"] = f"{_SQLITE}{data_path(uri.removeprefix(_SQLITE))}"
    return found


def client(who: str, catalog: str | Mapping[str, str], storage: Storage) -> Catalog:
    """Return the client of a catalog, with the options of the storage that its tables are in."""
    from pyiceberg.catalog import load_catalog

    found = _connected(who, catalog) if isinstance(catalog, str) else dict(catalog)
    if str(found.get("uri", "")).startswith(_SQLITE):
        Path(found["uri"].removeprefix(_SQLITE)).parent.mkdir(parents=True, exist_ok=True)
    return load_catalog(found.pop("name", "default"), **found, **storage.for_iceberg())


def _connected(who: str, conn_id: str) -> dict[str, str]:
    """Return a catalog's properties from its connection, secrets included."""
    found = connections.required(conn_id)
    extra = {name: str(value) for name, value in found.extra.items()}
    if found.conn_type == "postgres":
        own = {name: extra.pop(name) for name in list(extra) if name in {"name", "warehouse"}}
        return {"type": "sql", "uri": replace(found, extra=extra).url(), **own}
    if found.conn_type == "iceberg":
        credential = {"credential": f"{found.login}:{found.password}"} if found.login else {}
        return {"type": "rest", "uri": found.host or "", **credential, **extra}
    msg = f"{who}: connection {conn_id!r}: expected type postgres or iceberg, found {found.conn_type!r}"
    raise ConfigError(msg)
