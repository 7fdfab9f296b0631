"""The shape of a query: stateless parts over new input, at most one aggregate over them, filters and columns over that.

`query` asks for it. Whatever has another shape is refused here, with the expression and the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NoReturn

from twophase.core.errors import ConfigError
from twophase.spark.continuous.catalyst import CHANGE, Catalyst, Node, below, items, kind_of, plan_of, replaced

#: Nodes that only give another name or a hint.
NAMES = frozenset({"SubqueryAlias", "ResolvedHint"})
#: Nodes that work on each row by itself.
ROW_BY_ROW = NAMES | {"Project", "Filter", "Generate", "Expand"}
#: Tables that are written in the text itself.
CONSTANTS = frozenset({"LocalRelation", "OneRowRelation", "Range"})
#: The sides of a join whose rows each lead to rows of the result: there new input may stand.
KEPT_SIDES = {
    "Inner": (0, 1),
    "Cross": (0, 1),
    "LeftOuter": (0,),
    "LeftSemi": (0,),
    "LeftAnti": (0,),
    "RightOuter": (1,),
}
#: Expressions that read a clock, which a replay would see differently.
CLOCKS = frozenset({
    *("CurrentTimestamp", "CurrentDate", "CurrentTime", "Now", "LocalTimestamp", "CurrentBatchTimestamp"),
})  # fmt: skip
#: What an Expand of ROLLUP, CUBE and GROUPING SETS adds.
GROUPING = "spark_grouping_id"

#: Nodes that are refused: what they are in SQL, and why.
_WHOLE = "it needs all rows at once, and new ones come with each checkpoint"
REFUSED = {
    "Sort": ("ORDER BY", "a table has no order; sort when it is read"),
    "GlobalLimit": ("LIMIT", _WHOLE),
    "LocalLimit": ("LIMIT", _WHOLE),
    "Offset": ("OFFSET", _WHOLE),
    "Tail": ("LIMIT", _WHOLE),
    "Window": ("a window function", _WHOLE),
    "Sample": ("TABLESAMPLE", "a replay would take other rows"),
    "Intersect": ("INTERSECT", _WHOLE),
    "Except": ("EXCEPT", _WHOLE),
    "LateralJoin": ("LATERAL", "a query for each row is not supported; join a Lookup read instead"),
}


@dataclass(frozen=True)
class Shape:
    """A query that can go on."""

    #: The plan of the stateless parts.
    rows: Node
    #: The column of `rows` with the changes of the input; None: rows are only added.
    change: Node | None
    #: What the aggregate groups by; None: there is no aggregate. A DISTINCT groups by all columns.
    groups: tuple[Node, ...] | None
    #: The result's columns by name, over columns of `rows` or, with an aggregate, over groups and aggregates.
    outputs: tuple[tuple[str, Node], ...]
    #: The conditions on rows of the result: HAVING.
    conditions: tuple[Node, ...] = ()
    distinct: bool = False


def refuse(what: str, why: str) -> NoReturn:
    """Raise the error for something that cannot go on: the expression and the reason."""
    msg = f"sql: {what}: {why}"
    raise ConfigError(msg)


class ShapeReader:
    """Reads the shape of an analysed plan."""

    def __init__(self, catalyst: Catalyst, fresh: Collection[str], lookups: Collection[str]) -> None:
        """Take the names of the reads: those with new input, and lookup tables."""
        self.catalyst = catalyst
        self.fresh = frozenset(fresh)
        self.lookups = frozenset(lookups)

    def shape(self, plan: Node) -> Shape:
        """Return the shape of a plan; raise ConfigError for one that cannot go on."""
        if not self._reads_new(plan):
            refuse("the query", f"it reads no new input; expected one of {', '.join(sorted(self.fresh))}")
        over, top = [], plan
        while kind_of(top) in NAMES | {"Project", "Filter"}:
            over.append(top)
            top = below(top)[0]
        if kind_of(top) not in {"Aggregate", "Distinct"}:
            rows, change = self._rows(plan)
            return Shape(rows, change, None, _columns(plan))
        for node in over:
            self._check_expressions(node)
        self._check_expressions(top)
        child = below(top)[0]
        rows, change = self._rows(child, inside="an aggregate")
        if kind_of(top) == "Distinct":
            groups = tuple(items(child.output()))
            known = {one.exprId().id(): one for one in groups}
        else:
            groups = tuple(items(top.groupingExpressions()))
            made = items(top.aggregateExpressions())
            known = {one.exprId().id(): below(one)[0] if kind_of(one) == "Alias" else one for one in made}
        conditions = []
        for node in reversed(over):
            if kind_of(node) == "Filter":
                conditions.append(replaced(node.condition(), known, self.catalyst))
            elif kind_of(node) == "Project":
                known = {one.exprId().id(): self._inlined(one, known) for one in items(node.projectList())}
        outputs = tuple((str(one.name()), known[one.exprId().id()]) for one in items(plan.output()))
        return Shape(rows, change, groups, outputs, tuple(conditions), kind_of(top) == "Distinct")

    def _inlined(self, named: Node, known: Mapping[int, Node]) -> Node:
        made = replaced(named, known, self.catalyst)
        return below(made)[0] if kind_of(made) == "Alias" else made

    # --- the stateless parts -----------------------------------------------------------------------------------------

    def _reads_new(self, plan: Node) -> bool:
        return self._read(plan) in self.fresh or any(self._reads_new(child) for child in below(plan))

    def _read(self, node: Node) -> str | None:
        """Return the name of the read that a node is."""
        if kind_of(node) != "View" or not node.isTempView():
            return None
        name = str(node.desc().identifier().table())
        return name if name in self.fresh | self.lookups else None

    def _rows(self, plan: Node, inside: str = "it") -> tuple[Node, Node | None]:
        """Return the plan with the column of changes passed through it, and that column; refuse any other part."""
        read = self._read(plan)
        if read is not None:
            return self._read_rows(below(plan)[0]) if read in self.fresh else (plan, None)
        if not self._reads_new(plan):
            self._check_constant(plan)
            return plan, None
        self._check_expressions(plan)
        kind, children = kind_of(plan), below(plan)
        if kind in {"Aggregate", "Distinct"}:
            what = "an aggregate" if inside == "an aggregate" else "a join or a union"
            refuse(
                _named(plan),
                f"an aggregate below {what} changes rows that were given on; give each a pipeline of its own",
            )
        if kind == "Join":
            return self._join(plan, inside)
        if kind == "Union":
            return self._union(plan, inside)
        if kind == "Expand" and any(str(one.name()) == GROUPING for one in items(plan.output())):
            refuse("ROLLUP, CUBE or GROUPING SETS", "one aggregate is kept; write one query for each set of columns")
        if kind not in ROW_BY_ROW:
            refuse(*REFUSED.get(kind, (_named(plan), "it is not known to work row by row")))
        made, change = self._rows(children[0], inside)
        return self._with(plan, made, change), change

    def _with(self, plan: Node, made: Node, change: Node | None) -> Node:
        """Return a node over another child, whose column of changes it passes on."""
        if change is not None and kind_of(plan) == "Project":
            return self.catalyst.project([*items(plan.projectList()), change], made)
        if change is not None and kind_of(plan) == "Expand":
            return self.catalyst.expand(plan, change, made)
        return plan.withNewChildren(self.catalyst.listed([made]))

    def _read_rows(self, plan: Node) -> tuple[Node, Node | None]:
        """Return the rows of a read; a changelog was registered without the column of changes, which is put back."""
        if kind_of(plan) == "Project":
            under = below(plan)[0]
            there = [one for one in items(under.output()) if str(one.name()) == CHANGE]
            kept = items(plan.projectList())
            if there and not any(str(one.name()) == CHANGE for one in kept):
                return self.catalyst.project([*kept, there[0]], under), there[0]
        return plan, None

    def _join(self, plan: Node, inside: str) -> tuple[Node, Node | None]:
        children = below(plan)
        new = [side for side, child in enumerate(children) if self._reads_new(child)]
        kind = str(plan.joinType().toString()).partition("(")[0]
        condition = plan.condition()
        on = f"{kind} JOIN" + (f" ON {condition.get().sql()}" if condition.isDefined() else "")
        if len(new) > 1:
            refuse(
                on, "both sides are new input, and a row may find its partner in any later checkpoint; join a Lookup"
            )
        if kind not in KEPT_SIDES or new[0] not in KEPT_SIDES[kind]:
            refuse(on, "it keeps rows of the lookup table until a partner comes; put the new input on the kept side")
        made = [self._rows(child, inside) for child in children]
        change = next((one for _, one in made if one is not None), None)
        return plan.withNewChildren(self.catalyst.listed([rows for rows, _ in made])), change

    def _union(self, plan: Node, inside: str) -> tuple[Node, Node | None]:
        children = below(plan)
        if old := next((child for child in children if not self._reads_new(child)), None):
            refuse(_named(old), "its rows would come again with each checkpoint; UNION ALL takes new input only")
        made = [self._rows(child, inside) for child in children]
        if all(change is None for _, change in made):
            return plan.withNewChildren(self.catalyst.listed([rows for rows, _ in made])), None
        added = self.catalyst.column(self.catalyst.parsed("'+I'")).alias(CHANGE)
        wide = [
            self.catalyst.project([*items(child.output()), change], rows)
            if change is not None
            else plan_of(self.catalyst.frame(rows).select("*", added))
            for child, (rows, change) in zip(children, made, strict=True)
        ]
        both = plan.withNewChildren(self.catalyst.listed(wide))
        return both, items(both.output())[-1]

    # --- what no part may contain ------------------------------------------------------------------------------------

    def _check_constant(self, plan: Node) -> None:
        """Check a part that reads no new input: it may be anything that every attempt sees alike."""
        self._check_expressions(plan)
        if self._read(plan) is not None:
            return
        children = below(plan)
        if not children and kind_of(plan) not in CONSTANTS:
            refuse(_named(plan), f"it is no read; declare it as sources.Lookup. There is {self._there()}")
        if kind_of(plan) == "View":
            refuse(_named(plan), f"it is no read; there is {self._there()}")
        if kind_of(plan) == "Sample":
            refuse(*REFUSED["Sample"])
        for child in children:
            self._check_constant(child)

    def _there(self) -> str:
        return ", ".join(sorted(self.fresh | self.lookups))

    def _check_expressions(self, plan: Node) -> None:
        for expression in items(plan.expressions()):
            self._check(expression)

    def _check(self, expression: Node) -> None:
        """Refuse what another attempt would see differently, and queries inside of expressions."""
        if self.catalyst.is_subquery(expression):
            refuse(_sql(expression), "a subquery in an expression is asked anew each time; join a Lookup read instead")
        for child in below(expression):
            self._check(child)
        if kind_of(expression) in CLOCKS:
            refuse(_sql(expression), "a replay would see another time; use a column of the input")
        if not expression.deterministic():
            refuse(_sql(expression), "a replay would give another value; it is not deterministic")


def _columns(plan: Node) -> tuple[tuple[str, Node], ...]:
    return tuple((str(one.name()), one) for one in items(plan.output()))


def _sql(expression: Node) -> str:
    kind = kind_of(expression)
    return (
        "a subquery" if kind in {"ScalarSubquery", "ListQuery", "Exists", "LateralSubquery"} else str(expression.sql())
    )


def _named(plan: Node) -> str:
    """Return what a node is, as its author wrote it if that can be said."""
    kind = kind_of(plan)
    if kind == "Aggregate":
        groups = ", ".join(str(one.sql()) for one in items(plan.groupingExpressions()))
        return f"GROUP BY {groups}" if groups else "an aggregate"
    if kind == "View":
        return f"view {plan.desc().identifier().unquotedString()}"
    return {"Distinct": "DISTINCT"}.get(kind, f"{plan.nodeName()} {plan.simpleString(25)}"[:120])
