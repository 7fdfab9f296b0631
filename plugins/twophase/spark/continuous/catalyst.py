"""Spark's own trees of a query, plans and expressions, through py4j; the only module that knows their classes.

`shape`, `parts` and `query` call it. A tree is asked for its class by name, and rebuilt by `withNewChildren`: no text
of a query is put together by us, so types and settings stay Spark's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twophase.core.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

#: A node of a plan or of an expression, an object in the JVM.
Node = Any

#: The column of a changelog that says what became of a row.
CHANGE = "_change"

#: The first major version of Spark whose classic session has a package of its own.
_CLASSIC = 4
_EXPRESSIONS = "org.apache.spark.sql.catalyst.expressions"
_PLANS = "org.apache.spark.sql.catalyst.plans.logical"


class Catalyst:
    """Analyses texts in a session, and turns trees into frames and columns of it."""

    def __init__(self, spark: SparkSession) -> None:
        """Take a classic session; Connect does not show its plans."""
        self.spark = spark
        self.session: Any = getattr(spark, "_jsparkSession", None) if "connect" not in type(spark).__module__ else None
        if self.session is None:
            msg = "sql: a Spark Connect session does not show how it understood a text; use a classic session"
            raise ConfigError(msg)
        jvm: Any = spark._jvm  # noqa: SLF001 - not in the API
        self.jvm = jvm
        sql = self.jvm.org.apache.spark.sql
        self._new = int(spark.version.partition(".")[0]) >= _CLASSIC
        self._dataset = sql.classic.Dataset if self._new else sql.Dataset
        self.expressions = self.jvm.org.apache.spark.sql.catalyst.expressions
        self.plans = self.jvm.org.apache.spark.sql.catalyst.plans.logical

    # --- from a text to a tree ---------------------------------------------------------------------------------------

    def analysed(self, text: str, frames: Mapping[str, DataFrame]) -> Node:
        """Return the plan of a query over frames by their names, CTEs inlined; nothing is run.

        The names are given in a copy of the session, so views of the same name in the user's own are left alone.
        """
        from pyspark.errors import PySparkException

        copy = self.session.cloneSession()
        for name, frame in frames.items():
            self._dataset.ofRows(copy, plan_of(frame)).createOrReplaceTempView(name)
        try:
            parsed = copy.sessionState().sqlParser().parsePlan(text)
            if any(self._is_command(node) for node in nodes(parsed)):
                msg = f"sql: {_shortened(text)}: it is a statement, expected a query"
                raise ConfigError(msg)
            plan = self._dataset.ofRows(copy, parsed).queryExecution().analyzed()
        except PySparkException as error:
            said = str(error).partition("\n")[0]
            msg = f"sql: {_shortened(text)}: {said}; there is {', '.join(sorted(frames))}"
            raise ConfigError(msg) from error
        return self.jvm.org.apache.spark.sql.catalyst.optimizer.InlineCTE(True, False).apply(plan)  # noqa: FBT003 - Spark's own

    def _is_command(self, node: Node) -> bool:
        return self.is_a(node, f"{_PLANS}.Command") or self.is_a(node, f"{_PLANS}.ParsedStatement")

    def is_a(self, node: Node, name: str) -> bool:
        """Return True if a node is of a class of that full name."""
        from py4j.java_gateway import is_instance_of  # type: ignore[import-untyped]  # it has no types

        return bool(is_instance_of(self.spark.sparkContext._gateway, node, name))  # noqa: SLF001 - not in the API

    def is_subquery(self, expression: Node) -> bool:
        """Return True for an expression with a query inside."""
        return self.is_a(expression, f"{_EXPRESSIONS}.SubqueryExpression")

    def is_replaced(self, expression: Node) -> bool:
        """Return True for an expression that Spark replaces by others before it runs a query."""
        return self.is_a(expression, f"{_EXPRESSIONS}.RuntimeReplaceable")

    # --- from trees to frames and columns ----------------------------------------------------------------------------

    def frame(self, plan: Node) -> DataFrame:
        """Return a plan as a frame of the session."""
        from pyspark.sql import DataFrame

        made = self._dataset.ofRows(self.session, plan)
        if self._new:
            from pyspark.sql.classic.dataframe import DataFrame as Classic

            return Classic(made, self.spark)
        return DataFrame(made, self.spark)

    def column(self, expression: Node) -> Column:
        """Return an expression as a column."""
        if self._new:
            from pyspark.sql.classic.column import Column as Classic

            return Classic(self.jvm.org.apache.spark.sql.classic.ExpressionUtils.column(expression))
        from pyspark.sql import Column

        return Column(self.jvm.org.apache.spark.sql.Column(expression))

    def parsed(self, expression: str) -> Node:
        """Return an expression of a text of ours; its names are found when it is put into a frame."""
        return self.session.sessionState().sqlParser().parseExpression(expression)

    def listed(self, found: Sequence[Node]) -> Node:
        """Return a list as Scala's Seq."""
        return self.jvm.org.apache.spark.api.python.PythonUtils.toSeq(list(found))

    def project(self, columns: Sequence[Node], below: Node) -> Node:
        """Return a plan that keeps these columns of another."""
        return self.plans.Project(self.listed(columns), below)

    def expand(self, node: Node, extra: Node, below: Node) -> Node:
        """Return an Expand that keeps one more column of what is below it."""
        rows = [self.listed([*items(row), extra]) for row in items(node.projections())]
        return self.plans.Expand(self.listed(rows), self.listed([*items(node.output()), extra]), below)

    def decimal_sum(self, one: str, other: str, kind: str) -> Column:
        """Return the sum of two columns of a decimal type in that type, as Spark's own `sum` adds up."""
        kept = self.jvm.org.apache.spark.sql.types.DataType.fromDDL(kind)
        added = self.expressions.DecimalAddNoOverflowCheck(self.parsed(one), self.parsed(other), kept)
        null_on_overflow = not self.session.sessionState().conf().ansiEnabled()
        return self.column(self.expressions.CheckOverflow(added, kept, null_on_overflow))


def plan_of(frame: DataFrame) -> Node:
    """Return the analysed plan of a frame."""
    return frame._jdf.queryExecution().analyzed()  # noqa: SLF001 - not in the API


def items(found: Node) -> list[Node]:
    """Return what a Scala Seq holds."""
    return [found.apply(number) for number in range(found.size())]


def option(found: Node) -> Node | None:
    """Return what a Scala Option holds."""
    return found.get() if found.isDefined() else None


def kind_of(node: Node) -> str:
    """Return the name of a node's class."""
    return str(node.getClass().getSimpleName())


def below(node: Node) -> list[Node]:
    """Return a node's children."""
    return items(node.children())


def nodes(top: Node) -> Iterator[Node]:
    """Yield a node and all below it."""
    yield top
    for child in below(top):
        yield from nodes(child)


def replaced(expression: Node, by: Mapping[int, Node], catalyst: Catalyst) -> Node:
    """Return an expression with some attributes, known by their ids, replaced."""
    if kind_of(expression) == "AttributeReference":
        return by.get(expression.exprId().id(), expression)
    children = below(expression)
    if not children:
        return expression
    return expression.withNewChildren(catalyst.listed([replaced(child, by, catalyst) for child in children]))


def _shortened(text: str, longest: int = 120) -> str:
    line = " ".join(text.split())
    return line if len(line) <= longest else line[: longest - 1] + "…"
