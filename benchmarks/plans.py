"""Which statements read much to find little: PostgreSQL's plans of all that an action executes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import Connection, Engine, event

#: Rows that one step of a plan may read; a page of a listing is 50.
FEW = 2000


def long_reads(engine: Engine, action: Callable[[], object]) -> tuple[int, list[str]]:
    """Return how many different statements an action executes, and each that reads more than a few rows in one step.

    A SELECT is executed once more to count what it really reads: an index that is read from its end on looks fine in
    a plan. Of others only the plan is looked at. Nothing is changed.
    """
    seen: dict[str, Any] = {}

    def remember(_c: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:  # noqa: ANN401 - DBAPI's
        seen.setdefault(statement, parameters[0] if isinstance(parameters, list) else parameters)

    event.listen(engine, "before_cursor_execute", remember)
    try:
        action()
    finally:
        event.remove(engine, "before_cursor_execute", remember)
    with engine.connect() as connection:
        found = [long for statement, values in seen.items() if (long := _longest(connection, statement, values))]
        connection.rollback()
    return len(seen), found


def _longest(connection: Connection, statement: str, parameters: Any) -> str | None:  # noqa: ANN401 - DBAPI's
    """Describe the step of a statement that reads most, if that is more than a few rows."""
    analyze = ", ANALYZE" if statement.lstrip().startswith("SELECT") else ""
    plan = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON{analyze}) {statement}", parameters).scalar_one()
    rows, node = max(((_rows(node), node) for node in _nodes(plan[0]["Plan"])), key=lambda found: found[0])
    if rows <= FEW:
        return None
    what = f"{node['Node Type']} on {node.get('Relation Name', 'no table')}"
    return f"{what} reads {rows:,.0f} rows: {' '.join(statement.split())[-160:]}"


def _rows(node: dict[str, Any]) -> float:
    """Return how many rows a step of a plan reads, counted if it was executed, else as estimated."""
    if "Actual Rows" not in node:
        return float(node["Plan Rows"])
    return float((node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"])


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for below in plan.get("Plans", ()):
        yield from _nodes(below)
