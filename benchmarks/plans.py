"""Which statements read a whole table: PostgreSQL's plans of all that an action executes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import Engine, event, text

#: Below this many rows reading a table whole is the right plan.
SMALL = 2000


def table_scans(engine: Engine, action: Callable[[], object]) -> tuple[int, list[str]]:
    """Return how many different statements an action executes, and each that reads a large table whole."""
    seen: dict[str, Any] = {}

    def remember(_c: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:  # noqa: ANN401 - DBAPI's
        seen.setdefault(statement, parameters[0] if isinstance(parameters, list) else parameters)

    event.listen(engine, "before_cursor_execute", remember)
    try:
        action()
    finally:
        event.remove(engine, "before_cursor_execute", remember)
    found = []
    with engine.connect() as connection:
        large = {row.relname for row in connection.execute(text(_LARGE), {"small": SMALL})}
        for statement, parameters in seen.items():
            plan = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {statement}", parameters).scalar_one()
            whole = {node["Relation Name"] for node in _nodes(plan[0]["Plan"]) if node["Node Type"] == "Seq Scan"}
            found += [f"{table}: {' '.join(statement.split())[:160]}" for table in sorted(whole & large)]
    return len(seen), found


_LARGE = """SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
            WHERE n.nspname = 'twophase' AND c.relkind = 'r' AND c.reltuples > :small"""


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for below in plan.get("Plans", ()):
        yield from _nodes(below)
