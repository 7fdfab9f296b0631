"""Queries over data files that Spark wrote, by a DuckDB that can read these files and nothing else.

Sinks of files return it to audits and comparisons. The view has the columns of the manifest with Spark's types,
partition columns from the names of folders, and the columns of folders further up as constants. Times are in UTC.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import date, datetime
from typing import TYPE_CHECKING, Any, Self

from twophase.core.errors import AttemptFailed, ConfigError, ManifestMismatch, TwophaseError
from twophase.core.manifest import Column
from twophase.core.row_samples import CHARACTERS, ROW_BYTES, ROWS, Row, sample
from twophase.formats.spark_types import split
from twophase.storage.partition_folders import partition_values

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection, DuckDBPyRelation

#: The longest line of CSV in bytes; DuckDB's default is 2 MB.
_LONGEST_LINE = 16_000_000
#: Options of Spark's writer that make text which DuckDB would read as something else.
_UNREADABLE = {
    "csv": {"emptyvalue", "linesep", "dateformat", "timestampformat", "timestampntzformat", "locale"},
    "json": {"linesep", "dateformat", "timestampformat", "timestampntzformat", "locale"},
}
_FILE = "_twophase_file"
_TYPES = {
    "boolean": "BOOLEAN", "tinyint": "TINYINT", "smallint": "SMALLINT", "int": "INTEGER", "bigint": "BIGINT",
    "float": "FLOAT", "double": "DOUBLE", "string": "VARCHAR", "binary": "BLOB", "date": "DATE",
    "timestamp": "TIMESTAMP WITH TIME ZONE", "timestamp_ntz": "TIMESTAMP",
}  # fmt: skip
#: Spark's types of constants that are not in the schema; any other is a string.
_CONSTANTS = {bool: "boolean", int: "bigint", float: "double", date: "date", datetime: "timestamp"}
#: Types whose values are short and have a counterpart in JSON.
_SHOWN = {"BOOLEAN", "TINYINT", "SMALLINT", "INTEGER", "BIGINT", "FLOAT", "DOUBLE"}


class DuckDBRows:
    """The rows of some data files. The first query starts DuckDB, leaving the `with` closes it."""

    def __init__(  # noqa: PLR0913 - what it takes to read a sink's files
        self,
        files: Sequence[str],
        schema: Sequence[Sequence[str]],
        *,
        format: str = "parquet",  # noqa: A002 - Spark's own word for it
        options: Mapping[str, Any] | None = None,
        partition_by: Sequence[str] = (),
        constants: Mapping[str, object] | None = None,
        mixed: bool = False,
        name: str = "staged",
        threads: int | None = None,
        at_hand: Callable[[Sequence[str]], AbstractContextManager[Sequence[str]]] = nullcontext,
    ) -> None:
        """Describe the files: absolute paths, the manifest's schema, and the sink's format, options and partitions.

        Files whose names start with `_` or a dot are skipped, as Spark's readers do. `constants` are columns whose
        value is in no file, such as those of a slot's folder. `mixed` is for files of several writes, some of which may
        lack a column. `at_hand` provides local paths of files that are elsewhere, for as long as DuckDB is open.
        """
        self.files = [file for file in map(str, files) if not file.rpartition("/")[2].startswith(("_", "."))]
        self.format = format
        self.options = {str(key).lower(): value for key, value in (options or {}).items()}
        self.partition_by = list(partition_by)
        self.constants = dict(constants or {})
        self.mixed = mixed
        self.name = name
        self.threads = threads
        self.at_hand = at_hand
        self.schema = self._schema(schema)
        self._connection: DuckDBPyConnection | None = None
        self._stack = ExitStack()
        self._check_options()

    def _schema(self, schema: Sequence[Sequence[str]]) -> tuple[Column, ...]:
        """Return every column; one that is in folders only is a string, or has the type of its constant."""
        found = {name.lower(): Column(name, kind) for name, kind in schema}
        for name in self.partition_by:
            found.setdefault(name.lower(), Column(name, "string"))
        for name, value in self.constants.items():
            found.setdefault(name.lower(), Column(name, _CONSTANTS.get(type(value), "string")))
        if not found:
            msg = f"{self.format} files: their columns are not known, so they cannot be read as a table"
            raise ConfigError(msg)
        return tuple(found.values())

    def nothing(self) -> DuckDBRows:
        """Return an empty set of rows with the same columns."""
        return DuckDBRows([], self.schema, format=self.format, name="nothing")

    def _check_options(self) -> None:
        refused = sorted(_UNREADABLE.get(self.format, set()) & self.options.keys())
        encoding = str(self.options.get("encoding", self.options.get("charset", "utf-8")))
        if self.format != "parquet" and encoding.lower().replace("-", "") != "utf8":
            refused.append("encoding")
        if refused:
            which = f"{self.format} files written with option {', '.join(refused)}"
            msg = f"{which}: they cannot be read back as a table; drop the option, or write Parquet"
            raise ConfigError(msg)

    # --- asking ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Return itself; nothing is opened yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close DuckDB."""
        self.close()

    def close(self) -> None:
        """Close DuckDB, and remove its temporary files."""
        self._connection = None
        self._stack.close()

    @property
    def connection(self) -> DuckDBPyConnection:
        """Return the connection to DuckDB, with the view in it."""
        if self._connection is None:
            self._connection = self._stack.enter_context(opened({self.name: self}, self.threads))
        return self._connection

    @property
    def names(self) -> list[str]:
        """Return the names of the columns."""
        return [column.name for column in self.schema]

    def types(self) -> dict[str, str]:
        """Return DuckDB's type of each column, by its name in lower case."""
        return view_types(self.connection, self.name)

    def rows(self, sql: str) -> list[Row]:
        """Return all rows of a query, as DuckDB gives them to Python."""
        with explained():
            answer = self.connection.execute(sql)
            names = [column[0] for column in answer.description or ()]
            return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]

    def value(self, sql: str) -> Any:  # noqa: ANN401 - whatever the query asks for
        """Return the first column of a query's first row."""
        with explained():
            row = self.connection.execute(sql).fetchone()
        return None if row is None else row[0]

    def sample(self, sql: str, limit: int = ROWS, size: int = ROW_BYTES) -> list[Row]:
        """Return some rows of a query as the record can keep them; values are cut before they reach Python."""
        return cut_rows(self.connection, sql, limit, size)

    def query(self, text: str) -> str:
        """Return a user's query as a subquery; ConfigError unless it is one SELECT.

        As a subquery it cannot write: DuckDB takes `WITH x AS (COPY … TO …)` at the top level only.
        """
        import duckdb

        with explained():
            found = self.connection.extract_statements(text)
        if len(found) != 1 or found[0].type != duckdb.StatementType.SELECT:
            what = ", ".join(statement.type.name for statement in found) or "nothing"
            msg = f"expected one SELECT, found {what}"
            raise ConfigError(msg)
        raw, operator = text.encode(), duckdb.token_type.operator
        ends = (at for at, kind in duckdb.tokenize(text) if kind == operator and raw.startswith(b";", at))
        return f"(\n{raw[: min(ends, default=len(raw))].decode()}\n) AS audited"

    def view(self) -> DuckDBPyRelation:
        """Return the view."""
        return self.connection.view(self.name)

    @contextmanager
    def beside(self, old: DuckDBRows) -> Iterator[DuckDBSession]:
        """Open a session that knows these rows as `new`, and others as `old`."""
        with opened({"old": old, "new": self}, self.threads) as connection, explained():
            yield DuckDBSession(connection)

    # --- reading -----------------------------------------------------------------------------------------------------

    def create(self, connection: DuckDBPyConnection, name: str, files: Sequence[str]) -> None:
        """Create the view over the files, by the local paths that they have now."""
        fixed = {key.lower(): value for key, value in self.constants.items()}
        inner = {key.lower() for key in self.partition_by} if self.files else set()
        select, data = [], []
        for column in self.schema:
            kind, key = type_of(column.type), column.name.lower()
            if key in fixed or not self.files:
                value = f"CAST({literal(fixed.get(key))} AS {kind or 'VARCHAR'})"
            elif key in inner:
                value = f"folders.{quote(key)}"
            else:
                value = self._value(column, kind)
                data.append(column)
            select.append(f"{value} AS {quote(column.name)}")
        source = f"{self._reader(data, files)} AS files" if self.files else "range(0)"
        if inner:
            folders = quote(f"_twophase_{name}")
            self._create_folders(connection, folders, files)
            source += f" JOIN {folders} AS folders ON folders.{_FILE} = files.{_FILE}"
        view = f"CREATE VIEW {quote(name)} AS SELECT {', '.join(select)} FROM {source}"  # noqa: S608 - all is quoted
        connection.execute(view)

    def _value(self, column: Column, kind: str | None) -> str:
        """Return the SQL expression of a column that is in the files."""
        value = f"files.{quote(column.name)}"
        if kind == "BLOB" and self.format != "parquet":
            return f"{'from_base64' if self.format == 'json' else 'encode'}({value})"
        return value if kind is None else f"CAST({value} AS {kind})"

    def _reader(self, data: Sequence[Column], files: Sequence[str]) -> str:
        """Return the table function that reads the files."""
        arguments = [f"[{', '.join(map(literal, files))}]", "hive_partitioning = false"]
        if self.partition_by:
            arguments.append(f"filename = '{_FILE}'")
        if self.format == "parquet":
            arguments += ["union_by_name = true"] if self.mixed else []
            return f"read_parquet({', '.join(arguments)})"
        kinds = {column.name: type_of(column.type) or "VARCHAR" for column in data}
        texts = {name: "VARCHAR" if kind == "BLOB" else kind for name, kind in kinds.items()}
        columns = ", ".join(f"{quote(name)}: {literal(kind)}" for name, kind in texts.items())
        arguments.append(f"columns = {{{columns}}}")
        if self.format == "json":
            arguments.append("format = 'newline_delimited'")
            return f"read_json({', '.join(arguments)})"
        return f"read_csv({', '.join([*arguments, *self._csv()])})"

    def _csv(self) -> list[str]:
        """Return the arguments that match Spark's writer: it escapes with a backslash, and does not quote NULL."""
        get = self.options.get
        settings = {
            "auto_detect": False,
            "header": str(get("header", True)).lower() == "true",
            "delim": get("sep", get("delimiter", ",")),
            "quote": get("quote", '"'),
            "escape": get("escape", "\\"),
            "nullstr": get("nullvalue", ""),
            "allow_quoted_nulls": False,
            "max_line_size": _LONGEST_LINE,
            "buffer_size": 2 * _LONGEST_LINE,
        }
        return [f"{name} = {literal(value)}" for name, value in settings.items()]

    def _create_folders(self, connection: DuckDBPyConnection, name: str, files: Sequence[str]) -> None:
        """Create a table with the values in the folders' names, a row per file.

        DuckDB's own Hive partitioning would also take a folder far above the table for a column.
        """
        kinds = {column.name.lower(): type_of(column.type) or "VARCHAR" for column in self.schema}
        values = [partition_values(file, self.partition_by) for file in files]
        parameters: dict[str, Any] = {"files": list(files)}
        select = [f"unnest($files) AS {_FILE}"]
        for number, key in enumerate(map(str.lower, self.partition_by)):
            parameters[f"p{number}"] = [row[number] for row in values]
            text = f"unnest($p{number}::VARCHAR[])"
            value = f"encode({text})" if kinds[key] == "BLOB" else f"CAST({text} AS {kinds[key]})"
            select.append(f"{value} AS {quote(key)}")
        connection.execute(f"CREATE TEMP TABLE {name} AS SELECT {', '.join(select)}", parameters)


class DuckDBSession:
    """A connection to DuckDB, with the interface that comparisons use."""

    def __init__(self, connection: DuckDBPyConnection) -> None:
        """Wrap a connection that has the views already."""
        self._connection = connection

    def types(self, view: str) -> dict[str, str]:
        """Return DuckDB's type of each column, by its name in lower case."""
        return view_types(self._connection, view)

    def keep(self, name: str, select: str) -> None:
        """Keep the result of a query in a temporary table."""
        self._connection.execute(f"CREATE TEMP TABLE {quote(name)} AS {select}")

    def value(self, query: str) -> Any:  # noqa: ANN401 - whatever the query asks for
        """Return the first column of a query's first row."""
        row = self._connection.execute(query).fetchone()
        return None if row is None else row[0]

    def sample(self, query: str, limit: int, size: int) -> list[Row]:
        """Return some rows of a query as the record can keep them."""
        return cut_rows(self._connection, query, limit, size)


@contextmanager
def opened(views: Mapping[str, DuckDBRows], threads: int | None = None) -> Iterator[DuckDBPyConnection]:
    """Open DuckDB in memory with a view per set of rows; it reads their files only, and writes to its own folder."""
    with ExitStack() as held:
        here = {name: held.enter_context(relation.at_hand(relation.files)) for name, relation in views.items()}
        yield held.enter_context(_opened(views, here, threads))


@contextmanager
def _opened(
    views: Mapping[str, DuckDBRows], here: Mapping[str, Sequence[str]], threads: int | None
) -> Iterator[DuckDBPyConnection]:
    import duckdb

    files = [file for found in here.values() for file in found]
    if gone := next((file for file in files if not os.path.exists(file)), None):  # noqa: PTH110 - there may be many
        msg = f"file {gone} is not there"
        raise ManifestMismatch(msg)
    config: dict[str, Any] = {
        "threads": threads or os.cpu_count() or 1,
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "allow_community_extensions": False,
        "preserve_insertion_order": False,
    }
    with (
        tempfile.TemporaryDirectory(prefix="twophase-duckdb-") as spill,
        duckdb.connect(":memory:", config={**config, "temp_directory": spill}) as connection,
    ):
        with explained(wrong=ManifestMismatch):
            connection.execute("SET TimeZone = 'UTC'")
            connection.execute("SET enable_progress_bar = false")
            connection.execute(f"SET allowed_paths = [{', '.join(map(literal, files))}]")
            connection.execute("SET enable_external_access = false")
            connection.execute("SET lock_configuration = true")
            for name, relation in views.items():
                relation.create(connection, name, here[name])
        yield connection


@contextmanager
def explained(wrong: type[TwophaseError] = ConfigError) -> Iterator[None]:
    """Turn errors of DuckDB into one line: `wrong` for a wrong query, AttemptFailed for anything else."""
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        text = str(error).strip().partition("\n")[0]
        ours = isinstance(error, duckdb.ProgrammingError | duckdb.PermissionException)
        raise (wrong if ours else AttemptFailed)(text) from error


def view_types(connection: DuckDBPyConnection, name: str) -> dict[str, str]:
    """Return DuckDB's type of each column of a view, by the column's name in lower case."""
    view = connection.view(name)
    return {column.lower(): str(kind) for column, kind in zip(view.columns, view.types, strict=True)}


def cut_rows(connection: DuckDBPyConnection, sql: str, limit: int, size: int) -> list[Row]:
    """Return some rows of a query with long values cut: a value of a gigabyte never reaches Python."""
    some = f"SELECT * FROM ({sql}\n) LIMIT {limit}"  # noqa: S608 - the caller's own query
    with explained():
        asked = connection.sql(some)
        names = [f"c{number}" for number in range(len(asked.columns))]
        cells = [
            name
            if str(kind) in _SHOWN
            else f"lower(hex({name}[:{CHARACTERS}]))"
            if str(kind) == "BLOB"
            else f"left(CAST({name} AS VARCHAR), {CHARACTERS + 1})"
            for name, kind in zip(names, asked.types, strict=True)
        ]
        shown = f"SELECT {', '.join(cells)} FROM ({some}) AS asked({', '.join(names)})"  # noqa: S608 - our own names
        found = connection.execute(shown).fetchall()
    return sample((dict(zip(asked.columns, row, strict=True)) for row in found), limit, size)


def quote(identifier: str) -> str:
    """Return an identifier quoted for SQL."""
    return '"' + identifier.replace('"', '""') + '"'


def literal(value: object) -> str:
    """Return a value as an SQL literal."""
    if value is None:
        return "NULL"
    if isinstance(value, bool | int):
        return str(value)
    return "'" + str(value).replace("'", "''") + "'"


def type_of(kind: str) -> str | None:
    """Return DuckDB's type for one of Spark's; None if there is none: the column stays as DuckDB reads it."""
    kind = kind.strip()
    if kind in _TYPES:
        return _TYPES[kind]
    head, _, rest = kind.partition("<")
    inner = split(rest[:-1]) if rest.endswith(">") else []
    if head == "struct" and inner:
        fields = [(name, type_of(of)) for name, _, of in (field.partition(":") for field in inner)]
        known = [f"{quote(name)} {of}" for name, of in fields if name and of]
        return f"STRUCT({', '.join(known)})" if len(known) == len(fields) else None
    types = [of for of in map(type_of, inner) if of]
    if head == "array" and len(types) == len(inner) == 1:
        return f"{types[0]}[]"
    if head == "map" and len(types) == len(inner) == 2:  # noqa: PLR2004 - a key and a value
        return f"MAP({', '.join(types)})"
    if re.fullmatch(r"decimal\(\d+,\d+\)", kind):
        return kind.upper()
    return "VARCHAR" if re.fullmatch(r"(var)?char\(\d+\)|string collate .+", kind) else None
