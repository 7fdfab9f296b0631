"""Read Airflow's connections from environment variables, without Airflow; sinks and submits call this.

`AIRFLOW_CONN_<ID>` holds a connection as a URI (`postgres://login:password@host:5432/schema?sslmode=require`) or as
JSON (`{"conn_type": "postgres", "host": …}`). Both mean here what they mean to Airflow. No error shows a value, because
it may be a password.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from twophase.core import secret_texts
from twophase.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

PREFIX = "AIRFLOW_CONN_"

#: Options of Airflow's own Postgres hook, which the database's client library does not know.
_HOOK_OPTIONS = frozenset(
    {
        "iam",
        "redshift",
        "redshift-serverless",
        "cursor",
        "cluster-identifier",
        "workgroup-name",
        "aws_conn_id",
        "azure_conn_id",
        "sqlalchemy_scheme",
        "sqlalchemy_query",
    }
)
_UNQUOTED = "a login or password with @, /, ? or # in it; write them as %40, %2F, %3F and %23"
_FIELDS = frozenset({"conn_type", "host", "port", "login", "password", "schema", "extra"})
_IGNORED_FIELDS = frozenset({"conn_id", "description"})


@dataclass(frozen=True)
class Connection:
    """One connection; its repr leaves out the password and extra."""

    conn_id: str
    conn_type: str
    host: str | None = None
    port: int | None = None
    login: str | None = None
    password: str | None = field(default=None, repr=False)
    schema: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def url(self, drivername: str = "postgresql+psycopg2") -> str:
        """Return the connection as a SQLAlchemy URL, password included: never show it.

        Plain values of `extra` (sslmode, connect_timeout …) become options of the database's client library.
        """
        login = quote(self.login, safe="") if self.login else ""
        if self.password:
            login += ":" + quote(self.password, safe="")
        host = self.host or ""
        if ":" in host:
            host = f"[{host}]"
        port = f":{self.port}" if self.port else ""
        options = {name: _option(value) for name, value in self.extra.items() if _is_option(name, value)}
        query = "?" + urlencode(options, quote_via=quote) if options else ""
        at = "@" if login else ""
        return f"{drivername}://{login}{at}{quote(host, safe='[]:')}{port}/{quote(self.schema or '', safe='')}{query}"


def variable(conn_id: str) -> str:
    """Return the name of the variable that may hold a connection."""
    return PREFIX + conn_id.upper()


def connection(conn_id: str) -> Connection | None:
    """Return the connection that `AIRFLOW_CONN_<ID>` declares, or None when the variable is not set."""
    name = variable(conn_id)
    value = os.environ.get(name, "").strip()
    if not value:
        return None
    if value.startswith("{"):
        return _from_json(name, conn_id, value)
    return _from_uri(name, conn_id, value)


#: How a connection is found: in the environment, unless this process replaced it (inside Airflow).
lookup: Callable[[str], Connection | None] = connection


#: Where `lookup` looks for a connection, in words, for errors.
where: Callable[[str], str] = variable


def no_committer() -> str:
    """Raise ConfigError: this process does not know where the committer database is."""
    msg = "committer database: not known in a process that has not opened the record; name a connection by conn_id"
    raise ConfigError(msg)


#: Returns how libpq reaches the committer database, password included. `local.committer_database` puts it here: sinks
#: are below `local`, and a Spark job, which must not reach that database, never imports it.
committer_dsn: Callable[[], str] = no_committer


def required(conn_id: str) -> Connection:
    """Return a connection; raise a ConfigError that says where it was looked for if there is none."""
    found = lookup(conn_id)
    if found is None:
        msg = (
            f"connection {conn_id}: not found in {where(conn_id)};"
            f" define it in Airflow (airflow connections add {conn_id}), or set {variable(conn_id)}"
        )
        raise ConfigError(msg)
    _hide(found)
    return found


def hide_declared() -> None:
    """Hide the secrets of all connections in the environment from texts: users' code may look them up by itself."""
    for name in filter(re.compile(f"{PREFIX}.+").fullmatch, os.environ):
        try:
            declared = connection(name.removeprefix(PREFIX))
        except ConfigError:  # it cannot be read, so the whole value may be secret
            secret_texts.hide([os.environ[name]])
        else:
            if declared:
                _hide(declared)


def _hide(found: Connection) -> None:
    secret_texts.hide([found.password])
    secret_texts.hide_named(found.extra.items())


def exported(conn_ids: Iterable[str]) -> dict[str, str]:
    """Return these connections as environment variables; only a Spark driver gets them."""
    return {variable(conn_id): _exported(required(conn_id)) for conn_id in conn_ids}


def _exported(found: Connection) -> str:
    there = {name: getattr(found, name) for name in sorted(_FIELDS)}
    return json.dumps({name: value for name, value in there.items() if value})


def _from_uri(variable: str, conn_id: str, value: str) -> Connection:
    """Read the URI form."""
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError:
        msg = f"{variable}: expected type://login:password@host:port/schema, found a text that cannot be read as one"
        raise ConfigError(msg) from None  # the cause would quote the value
    if "@" in f"{parts.path}{parts.query}" or parts.fragment or ("@" in value and "@" not in parts.netloc):
        # A part of the password would be read as a host, a port or a database, and shown as one.
        msg = f"{variable}: expected type://login:password@host:port/schema, found {_UNQUOTED}"
        raise ConfigError(msg)
    if not parts.scheme or "://" not in value:
        msg = f"{variable}: expected type://login:password@host:port/schema or a json object, found neither"
        raise ConfigError(msg)
    return Connection(
        conn_id=conn_id,
        conn_type=_normal_type(parts.scheme),
        host=_host(parts.netloc),
        port=port,
        login=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        schema=unquote(parts.path[1:]) or None,
        extra=_extra_of_query(variable, parts.query),
    )


def _host(netloc: str) -> str | None:
    """Return the host as it was written; urlsplit's own `hostname` is lower case, which breaks a socket folder."""
    address = netloc.rpartition("@")[2]
    if address.startswith("["):
        return address[1:].partition("]")[0] or None
    return unquote(address.partition(":")[0]) or None


def _extra_of_query(variable: str, query: str) -> dict[str, Any]:
    """Read the extra of a URI: one JSON object in `__extra__`, or each parameter by itself."""
    parameters = dict(parse_qsl(query, keep_blank_values=True))
    if "__extra__" in parameters:
        return _extra(variable, parameters["__extra__"])
    return {name: _json_or_text(value) for name, value in parameters.items()}


def _from_json(variable: str, conn_id: str, value: str) -> Connection:
    """Read the JSON form."""
    try:
        declared: dict[str, Any] = json.loads(value)
    except ValueError:
        msg = f"{variable}: expected a json object, found a text that starts like one but cannot be read"
        raise ConfigError(msg) from None  # the cause would carry the value
    unknown = sorted(declared.keys() - _FIELDS - _IGNORED_FIELDS)
    if unknown:
        msg = f"{variable}: expected the fields {', '.join(sorted(_FIELDS))}, found also {', '.join(unknown)}"
        raise ConfigError(msg)
    texts = {name: _text(variable, name, declared.get(name)) for name in ("host", "login", "password", "schema")}
    return Connection(
        conn_id=conn_id,
        conn_type=_normal_type(_text(variable, "conn_type", declared.get("conn_type")) or ""),
        port=_port(variable, declared.get("port")),
        extra=_extra(variable, declared.get("extra")),
        **texts,
    )


def _text(variable: str, name: str, value: object) -> str | None:
    """Return a field of the JSON form as a text."""
    if value is None or isinstance(value, str):
        return value or None
    msg = f"{variable}: expected a text as {name}, found {type(value).__name__}"
    raise ConfigError(msg)


def _port(variable: str, value: object) -> int | None:
    """Return the port of the JSON form; like Airflow, take a number or its text."""
    if value is None or value == "":
        return None
    if isinstance(value, int | str) and str(value).isdecimal():
        return int(value)
    msg = f"{variable}: expected a whole number as port, found {type(value).__name__}"
    raise ConfigError(msg)


def _extra(variable: str, value: object) -> dict[str, Any]:
    """Return an extra as a dict; it may be an object or the JSON text of one."""
    decoded = _json_or_text(value) if isinstance(value, str) else value
    if not decoded:
        return {}
    if isinstance(decoded, dict):
        return decoded
    msg = f"{variable}: expected a json object as extra, found {type(decoded).__name__}"
    raise ConfigError(msg)


def _json_or_text(value: str) -> Any:  # noqa: ANN401 - a JSON value of any type
    """Return what a JSON text says, or the text itself when it is not JSON: Airflow's rule for parameters."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def _normal_type(conn_type: str) -> str:
    """Return the type as Airflow stores it."""
    return "postgres" if conn_type == "postgresql" else conn_type.replace("-", "_")


def _is_option(name: str, value: object) -> bool:
    """Return True if an item of extra is an option of the database's client library."""
    return name not in _HOOK_OPTIONS and isinstance(value, str | int | float)


def _option(value: object) -> str:
    """Return a plain value as the client library writes it."""
    return str(int(value)) if isinstance(value, bool) else str(value)
