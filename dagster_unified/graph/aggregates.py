"""Local-global column aggregates: partial aggregates before the exchange, and one merge behind it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from types import NoneType
from typing import Any, get_args

import msgspec
import pyarrow as pa

from dagster_unified.errors import PipelineError, RecordTypeError, UnsupportedError
from dagster_unified.graph.expressions import Column, alias_of
from dagster_unified.graph.fingerprint import digest
from dagster_unified.graph.mode import Execution
from dagster_unified.graph.nodes import BOUNDS, Edge, Graph, IterationNode, Naming, Node, SelectNode
from dagster_unified.graph.nodes.base import ExchangeKind, Partitioning
from dagster_unified.graph.nodes.native import (
    MergeNode,
    MergeWindowsNode,
    NativeKeyedNode,
    PartialsNode,
    WindowAggregateNode,
)
from dagster_unified.operators.partials import WIDE, MergePartials, Partial, WindowResult
from dagster_unified.operators.windows.contents import Windowing
from dagster_unified.records import RecordType, record_type, type_name
from dagster_unified.values import TOO_LARGE

MEANS = ("avg", "mean")


@dataclass(frozen=True)
class Purpose:
    """Why aggregates are taken apart, as errors name it."""

    name: str
    """The option that asks for it, such as `carry_state`."""

    refusal: str
    """The words for what it cannot do with an aggregate; `{}` stands for the aggregate."""

    merged_by: Mapping[str, str]
    """The aggregates that have partials, each with the one that merges its results over subsets."""


@dataclass
class Parts:
    """The partial aggregates of some columns, each by a name of its own, and the columns in terms of them."""

    partials: dict[str, tuple[Column, str]] = field(default_factory=dict)
    """The aggregate, and the one that merges its results over subsets."""

    results: list[Column] = field(default_factory=list)


def take_apart(where: str, columns: Sequence[object], purpose: Purpose, named: Callable[[Column], str] = repr) -> Parts:
    """Return the partial aggregates of some columns; raises `UnsupportedError` naming an aggregate that has none."""
    parts = Parts()
    splitting = _Splitting(where, purpose, named, parts)
    parts.results += [splitting.split(column) for column in columns]
    return parts


def fields_of(columns: Sequence[object]) -> list[str]:
    """Return the names of an operator's columns."""
    return [alias_of(column) or repr(column) for column in columns]


def too_large(where: str, fields: Sequence[str]) -> RecordTypeError:
    """Return the error for a number that its column does not hold, such as a sum. `where` names the operator."""
    shown = ", ".join(f"'{field}'" for field in fields)
    subject = f"field {shown}" if len(fields) == 1 else f"one of the fields {shown}"
    return RecordTypeError(f"{where}: {subject} {TOO_LARGE}")


@dataclass
class _Splitting:
    where: str
    purpose: Purpose
    named: Callable[[Column], str]
    parts: Parts

    def split(self, expression: object) -> Column:
        """Return the expression over merged partials."""
        if not isinstance(expression, Column):
            raise UnsupportedError(
                f"{self.where}: {self.purpose.name} cannot take apart {expression!r}; write it with"
                " dagster_unified.api.functions"
            )
        merged_by = self.purpose.merged_by
        if expression.target is None and expression.name in merged_by:
            return self._partial(expression, merged_by[expression.name])
        if expression.target is None and expression.name in MEANS:
            total, count = (
                Column(None, name, expression.arguments, names=expression.names) for name in ("sum", "count")
            )
            return Column(
                self._partial(total, merged_by["sum"]), "__truediv__", (self._partial(count, merged_by["count"]),)
            )
        if expression.target is None and expression.name in ("lit", "expr", "col", "column"):
            if expression.name == "lit":
                return expression
            raise UnsupportedError(
                f"{self.where}: {self.purpose.name} cannot take apart {expression!r}, which stands outside of an"
                " aggregate"
            )
        if expression.target is None and not any(
            isinstance(a, Column) and self._aggregates(a) for a in expression.arguments
        ):
            known = ", ".join(sorted({*merged_by, *MEANS}))
            raise UnsupportedError(
                f"{self.where}: {self.purpose.name} {self.purpose.refusal.format(repr(expression))}; it can {known}, or"
                " use reduce or process"
            )
        target = None if expression.target is None else self.split(expression.target)
        arguments = tuple(self.split(a) if isinstance(a, Column) else a for a in expression.arguments)
        return Column(target, expression.name, arguments, expression.options)

    def _aggregates(self, expression: Column) -> bool:
        """Return whether it contains an aggregate that has partials."""
        if expression.target is None and expression.name in (*self.purpose.merged_by, *MEANS):
            return True
        return any(self._aggregates(e) for e in (expression.target, *expression.arguments) if isinstance(e, Column))

    def _partial(self, expression: Column, by: str) -> Column:
        name = self.named(expression)
        self.parts.partials.setdefault(name, (expression, by))
        return Column(None, "col", (f"`{name.replace('`', '``')}`",), names=(name,))


MERGED_BY = {
    "count": "count", "count_if": "count", "sum": "sum", "min": "min", "max": "max", "bool_and": "min", "every": "min",
    "bool_or": "max", "some": "max",
}  # fmt: skip
"""The aggregates that have a local and a global part, and how partials merge."""

LOCAL_GLOBAL = Purpose("local-global aggregation", "cannot merge {}", MERGED_BY)


def with_local_global(graph: Graph, execution: Execution, carry_state: bool) -> tuple[Graph, dict[int, int]]:
    """The graph in which the aggregates that have to be local-global are taken apart, and the new number of each node.

    Raises `UnsupportedError` for an aggregate that cannot be.
    """
    chosen = _chosen(graph, execution, carry_state)
    if not chosen:
        return graph, {node.id: node.id for node in graph.nodes}
    return _Rewriting(graph, chosen).run()


def _chosen(graph: Graph, execution: Execution, carry_state: bool) -> set[int]:
    """Return the native aggregates that have to be local-global."""
    natives = {node.id for node in graph.nodes if node.aggregates_natively}
    if execution.native_aggregates == "SPARK" or not natives:
        return set()
    streaming, asked_for = execution.mode == "STREAMING", execution.native_aggregates == "PORTABLE"
    if execution.has_savepoint or (streaming and execution.savepoint.interval is not None):
        return natives
    if asked_for and (streaming or carry_state):
        return natives
    if not streaming:  # partitions hand on Catalyst's own form, where it has one that can be handed on
        return {number for number in natives if carry_state and graph.node(number).not_carried is not None}
    chosen: set[int] = set()
    for sink in graph.sinks:
        upstream = graph.upstream(sink.id)
        upstream_natives = natives & upstream
        if upstream_natives and not alone(graph, upstream):
            chosen |= upstream_natives
    return chosen


def alone(graph: Graph, upstream: set[int]) -> bool:
    """Return whether one native aggregate leads to a sink, and nothing with state precedes, follows or joins it.

    An iteration has state.
    """
    natives = [n for n in upstream if graph.node(n).aggregates_natively]
    others = any(graph.node(n).runs_by_key or isinstance(graph.node(n), IterationNode) for n in upstream)
    sources = {source.id for source in graph.sources} & upstream
    return len(natives) == 1 and not others and sources <= graph.upstream(natives[0])


class _Rewriting:
    """A copy of a graph in the making, with some aggregates taken apart."""

    def __init__(self, graph: Graph, chosen: set[int]) -> None:
        self._graph, self._chosen = graph, chosen
        self._nodes: list[Node] = []
        self._edges: list[Edge] = []
        self._leaves: dict[int, int] = {}
        """The new node that emits what a node did."""

        self._numbers: dict[int, int] = {}
        """The new number of each node, and of an aggregate that of its merge."""

    def run(self) -> tuple[Graph, dict[int, int]]:
        for node in self._graph.nodes:
            edges = self._graph.inputs(node.id)
            if isinstance(node, NativeKeyedNode) and node.id in self._chosen:
                self._leaves[node.id] = self._taken_apart(node, edges)
            else:
                self._leaves[node.id] = self._numbers[node.id] = self._add(node)
                self._edges += [replace(e, source=self._leaves[e.source], target=self._leaves[e.target]) for e in edges]
        return replace(self._graph, nodes=tuple(self._nodes), edges=tuple(self._edges)), self._numbers

    def _add(self, node: Node) -> int:
        self._nodes.append(replace(node, id=len(self._nodes)))
        return len(self._nodes) - 1

    def _taken_apart(self, node: NativeKeyedNode, edges: Sequence[Edge]) -> int:
        """Add the nodes that an aggregate becomes; return the last of them."""
        first = edges[0]
        records = self._graph.records_of(first)
        assert records is not None
        apart = _Apart(f"{self._graph.name}: operator '{node.name}'", node, records)
        timed = any(self._graph.node(e.source).timestamped for e in edges)
        first_made = len(self._nodes)
        self._edges += [Edge(self._leaves[e.source], first_made, Partitioning(), e.tag) for e in edges]
        for part in apart.nodes(timed):
            number = self._add(part)
            merges = isinstance(part, (MergeNode, MergeWindowsNode))
            if merges:
                self._numbers[node.id] = number
            if number > first_made:
                by_key = Partitioning(ExchangeKind.HASH, node.key)
                self._edges.append(Edge(number - 1, number, by_key if merges else Partitioning()))
        return len(self._nodes) - 1


class _Apart:
    """One aggregate, taken apart."""

    def __init__(self, where: str, node: NativeKeyedNode, records: RecordType) -> None:
        assert node.records is not None
        self.where, self.node, self.records, self.result = where, node, records, node.records
        self.keys = node.key.fields
        self._names: dict[str, str] = {}
        self.parts: Parts = take_apart(where, node.columns, LOCAL_GLOBAL, self._named)
        self._hints = {repr(_bare(c)): name for c in node.columns if (name := alias_of(c)) in self.result.names}
        self.computed: dict[str, tuple[Column, Any]] = {}
        """The inputs that are no columns yet, by the name of their column, with their types."""

        self.types: dict[str, Any] = {}
        self.partials = [self._partial(name, *part) for name, part in self.parts.partials.items()]
        self.plain = {name: _plain(python) for name, python in self.types.items()}
        """The types of the partials, without None."""

        if isinstance(node, WindowAggregateNode):
            self.partials = list(map(self._with_carry, self.partials))

    def nodes(self, timed: bool) -> list[Node]:
        """Return the nodes that the aggregate becomes, in order."""
        node, nodes = self.node, list[Node]()
        records = self.records
        if self.computed:
            records = self._inputs()
            columns = [_column(name) for name in records.names if name not in self.computed]
            columns += [expression for expression, _ in self.computed.values()]
            select: Any = SelectNode
            nodes.append(self._helper(select, "inputs", records=records, timestamped=timed, columns=tuple(columns)))
        merged = self._record("Partials", {**self._key_types(), **self.types})
        windows = node if isinstance(node, WindowAggregateNode) else None
        panes = None if windows is None else windows.assigner.panes() or (1, 0)
        nodes.append(
            self._helper(
                PartialsNode, "partials", records=merged, timestamped=windows is not None, keys=self.keys,
                partials=tuple(self.partials), panes=panes,
            )
        )  # fmt: skip
        merge = MergePartials(merged.python, merged.names, self.partials, self.plain)
        same: dict[str, Any] = {
            "id": 0, "name": node.name, "naming": node.naming, "uid": node.uid, "given_uid": node.given_uid, "location":
            node.location, "parallelism": node.parallelism, "chaining": node.chaining, "key": node.key,
        }  # fmt: skip
        if windows is None:
            nodes.append(MergeNode(**same, records=merged, function=merge))
        else:
            nodes.append(self._windows(windows, merged, merge, same))
        nodes.append(
            self._helper(
                SelectNode, "results", records=self.result, timestamped=node.timestamped, parallelism=node.parallelism,
                columns=tuple(self._results()),
            )
        )  # fmt: skip
        return nodes

    def _helper(self, kind: type[Node], what: str, **attributes: Any) -> Node:
        """Return a node beside the one with state."""
        node = self.node
        return kind(
            id=0,
            name=f"{node.name} {what}",
            naming=Naming.HELPER,
            uid=f"{node.uid}.{what}",
            location=node.location,
            **attributes,
        )

    def _windows(
        self, node: WindowAggregateNode, merged: RecordType, merge: MergePartials, same: dict[str, Any]
    ) -> Node:
        bounds = [name for name in BOUNDS if name in self.result.names]
        sums = [(p.shown, p.name, p.carry, WIDE[self.plain[p.name]]) for p in self.partials if p.carry is not None]
        function, records = None, merged
        if bounds or sums:
            fields = {name: self.result.type_of(name) for name in bounds}
            partials = {p.name: self.types[p.name] for p in self.partials}
            records = self._record("Windowed", {**self._key_types(), **fields, **partials})
            kinds = {name: self.result.schema.field(name).type for name in bounds}
            bounds_of = [(n, pa.types.is_timestamp(k), getattr(k, "tz", None) is not None) for n, k in kinds.items()]
            function = WindowResult(records.python, merged.names, len(self.keys), bounds_of, sums)
        trigger = node.assigner.get_default_trigger()
        spec = Windowing(node.assigner, trigger, merged.python, reduce=merge, function=function)
        return MergeWindowsNode(**same, records=records, function=spec, timestamped=True)

    def _results(self) -> list[Column]:
        """Return the columns of the result, in its order, over merged partials."""
        results = {}
        for written, result in zip(self.node.columns, self.parts.results, strict=True):
            results[alias_of(written) or repr(written)] = result
        for name in self.result.names:
            if name not in results and name not in self.keys and name not in BOUNDS:
                raise PipelineError(
                    f"{self.where}: no column '{name}'; it gives {', '.join([*self.keys, *results])}, and output_type"
                    f" is {self.result.describe()}"
                )
        return [results[name] if name in results else _column(name) for name in self.result.names]

    # Partials

    def _named(self, expression: Column) -> str:
        """Return a name for an aggregate that can be a field's, and that stays while the aggregate does."""
        shown = _shown(expression)
        if shown not in self._names:
            name = re.sub(r"\W+", "_", shown, flags=re.ASCII).strip("_").lower()
            if not re.fullmatch(r"\w+\((\w+|\*)\)", shown, re.ASCII):  # its words alone may be those of another
                name = f"{name[:40].rstrip('_')}_{digest(shown)[:6]}"
            while name in {*self._names.values(), *self.records.names, *BOUNDS}:
                name += "_"
            self._names[shown] = name
        return self._names[shown]

    def _partial(self, name: str, aggregate: Column, kind: str) -> Partial:
        operands = [*aggregate.arguments, *aggregate.options.values()]
        shown = _shown(aggregate)
        if len(operands) != 1:
            raise UnsupportedError(
                f"{self.where}: local-global aggregation cannot merge {aggregate!r}, an aggregate of"
                f" {len(operands)} columns; use reduce or process"
            )
        read = _as_column(operands[0])
        if kind == "count" and aggregate.name == "count" and (read is None or _is_constant(read)):
            self.types[name] = int
            return Partial(name, kind, None, shown)
        assert read is not None
        if aggregate.name == "count_if":
            read = Column(None, "when", (read, Column(None, "lit", (1,))))
        python = int if kind == "count" else self._type(aggregate, read, kind)
        self.types[name] = python if kind == "count" else python | None
        column = _column_name(read)
        if column in self.records.names:
            return Partial(name, kind, column, shown)
        computed_type = int if aggregate.name == "count_if" else python
        if kind == "count" and aggregate.name != "count_if":
            read, computed_type = Column(None, "when", (Column(read, "isNotNull"), Column(None, "lit", (1,)))), int
        self.computed[name] = (Column(read, "alias", (name,)), computed_type | None)
        return Partial(name, kind, name, shown)

    def _with_carry(self, partial: Partial) -> Partial:
        """Give a sum a carry, if it may exceed its type while a window is open."""
        if partial.kind != "sum" or self.plain[partial.name] not in WIDE:
            return partial
        carry = f"{partial.name}_carry"
        while carry in {*self.types, *self.records.names, *BOUNDS}:
            carry += "_"
        self.types[carry] = int | None
        return replace(partial, carry=carry)

    def _type(self, aggregate: Column, read: Column, kind: str) -> Any:
        python = _type_of(read, self.records)
        hint = self._hints.get(repr(aggregate))
        if python is None and hint is not None:
            python = _plain(self.result.type_of(hint))
        if python is None:
            raise UnsupportedError(
                f"{self.where}: the type of {read!r} in {aggregate!r} is not known, and the state of local-global"
                " aggregation is typed; add it as a column of its own with with_columns(...) before key_by"
            )
        numbers = (int, float, Decimal, timedelta)
        allowed = numbers if kind == "sum" else (*numbers, str, bool, bytes, date, datetime)
        try:
            arrow = record_type(python).schema.field(0).type
        except RecordTypeError:
            arrow = None
        if arrow not in [record_type(python).schema.field(0).type for python in allowed] + [pa.timestamp("us")] * (
            kind != "sum"
        ):
            raise UnsupportedError(
                f"{self.where}: local-global aggregation cannot merge {aggregate!r} of a {type_name(python)}; use"
                " reduce or process"
            )
        return python

    # Records

    def _key_types(self) -> dict[str, Any]:
        return {name: self.records.type_of(name) for name in self.keys}

    def _inputs(self) -> RecordType:
        """Return the record that the partials read: the key, plain columns, and computed ones."""
        plain = [p.column for p in self.partials if p.column is not None and p.column not in self.computed]
        as_they_are = {name: self.records.type_of(name) for name in plain if name not in self.keys}
        computed = {name: python for name, (_, python) in self.computed.items()}
        return self._record("Inputs", {**self._key_types(), **as_they_are, **computed})

    def _record(self, name: str, fields: dict[str, Any]) -> RecordType:
        # Stored by the names of its fields, so that state of other aggregates is an error and not taken for theirs.
        return record_type(msgspec.defstruct(name, list(fields.items()), frozen=True), self.where)


def _bare(expression: object) -> object:
    if isinstance(expression, Column) and expression.name in ("alias", "name") and expression.target is not None:
        return expression.target
    return expression


def _column(name: str) -> Column:
    return Column(None, "col", (f"`{name}`",), names=(name,))


def _as_column(operand: object) -> Column | None:
    """Return the column that an aggregate reads; None for all columns of a record."""
    if isinstance(operand, Column):
        return None if _column_name(operand) == "*" else operand
    if isinstance(operand, str):
        return None if operand == "*" else Column(None, "col", (operand,), names=(operand,))
    return Column(None, "lit", (operand,))


def _is_constant(expression: Column) -> bool:
    """Return whether an expression is the same for all records, and not null."""
    return expression.target is None and expression.name == "lit" and expression.arguments[0] is not None


def _column_name(expression: Column) -> str | None:
    """Return the name of the column that an expression is; None where it is something else."""
    if expression.target is None and expression.name in ("col", "column") and len(expression.arguments) == 1:
        return str(expression.arguments[0]).strip("`")
    return None


def _shown(aggregate: Column) -> str:
    """Return an aggregate as text; the same for `F.sum("a")` and `F.sum(F.col("a"))`."""
    operands = [*aggregate.arguments, *aggregate.options.values()]
    return f"{aggregate.name}({', '.join(v if isinstance(v, str) else repr(v) for v in operands)})"


# The types of expressions

_BOOLEAN = frozenset(
    ["__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__and__", "__rand__", "__or__", "__ror__",
     "__invert__", "isNull", "isNotNull", "isNaN", "isin", "like", "ilike", "rlike", "startswith", "endswith",
     "contains", "between", "eqNullSafe", "isnull", "isnotnull", "isnan", "equal_null"]
)  # fmt: skip
_ARITHMETIC = frozenset(
    ["__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__mod__", "__rmod__", "__neg__", "abs",
     "negative", "negate"]
)  # fmt: skip
_CHOOSING = frozenset(["coalesce", "greatest", "least", "ifnull", "nvl"])
_GIVES: dict[str, Any] = {
    **dict.fromkeys(
        ("year", "quarter", "month", "weekofyear", "day", "dayofmonth", "dayofweek", "dayofyear", "hour", "minute",
         "second", "length", "char_length", "size", "datediff", "date_diff", "unix_millis", "unix_seconds",
         "unix_micros", "unix_timestamp"), int
    ),
    **dict.fromkeys(("sqrt", "exp", "ln", "log10", "pow", "power", "radians", "degrees"), float),
    **dict.fromkeys(("upper", "lower", "trim", "ltrim", "rtrim", "concat_ws", "substring", "substr"), str),
}  # fmt: skip
"""The types of functions whose result does not depend on their arguments."""

_CASTS: dict[str, Any] = {
    **dict.fromkeys(("tinyint", "byte", "smallint", "short", "int", "integer", "bigint", "long"), int),
    **dict.fromkeys(("float", "double"), float),
    "string": str,
    "boolean": bool,
    "binary": bytes,
    "date": date,
    "timestamp": datetime,
}


def _type_of(expression: object, records: RecordType) -> Any | None:
    """Return the type of an expression over a record's columns; None where it is not known."""
    if not isinstance(expression, Column):
        return type(expression) if isinstance(expression, (bool, int, float, str, Decimal, date, timedelta)) else None
    column = _column_name(expression)
    if column is not None:
        return _plain(records.type_of(column)) if column in records.names else None
    operands = [*([expression.target] if expression.target is not None else []), *expression.arguments]
    name = expression.name
    if name == "lit":
        return _type_of(expression.arguments[0], records)
    if name in _BOOLEAN:
        return bool
    if name in _ARITHMETIC:
        return _number([_type_of(o, records) for o in operands])
    if name in ("__truediv__", "__rtruediv__"):
        number = _number([_type_of(o, records) for o in operands])
        return float if number is int else number
    if name in ("cast", "astype") and isinstance(expression.arguments[0], str):
        wanted = expression.arguments[0].strip().lower()
        return Decimal if wanted.startswith("decimal") else _CASTS.get(wanted)
    if name in ("alias", "name"):
        return _type_of(expression.target, records)
    if name == "when":
        values = [expression.arguments[1], *([expression.target] if expression.target is not None else [])]
        return _common_type([_type_of(v, records) for v in values])
    if name == "otherwise":
        return _common_type([_type_of(v, records) for v in operands])
    if name in _CHOOSING:
        columns = [_as_column(o) if isinstance(o, str) else o for o in operands]
        return _common_type([_type_of(c, records) for c in columns])
    return _GIVES.get(name)


def _number(types: Sequence[Any]) -> Any | None:
    if not set(types) <= {int, float, Decimal}:
        return None
    return float if float in types else Decimal if Decimal in types else int


def _common_type(types: Sequence[Any]) -> Any | None:
    return types[0] if len(set(types)) == 1 else _number(types)


def _plain(annotation: Any) -> Any:
    """Return a type without None, and for an enum that of its values."""
    arguments = [a for a in get_args(annotation) if a is not NoneType]
    if NoneType in get_args(annotation) and len(arguments) == 1:
        annotation = arguments[0]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return type(next(iter(annotation)).value)
    return annotation
