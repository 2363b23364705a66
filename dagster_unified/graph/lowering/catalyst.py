"""What an operator whose function is known makes of rows, in Spark's SQL: no row of it reaches a Python worker.

Where only Python knows the result, to evaluate it raises `LoweringError`, and the stage runs again and calls functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dagster_unified.errors import LoweringError
from dagster_unified.graph.lowering.deciding import Lowering, key_on_columns
from dagster_unified.graph.lowering.inlining import made_fields
from dagster_unified.graph.lowering.language import INT, NONE, TEXT, Expression, Field, kinds_of
from dagster_unified.graph.lowering.reading import read
from dagster_unified.graph.lowering.record_classes import record_of
from dagster_unified.graph.lowering.sifting import kept_rows
from dagster_unified.graph.lowering.source import UnreadableError
from dagster_unified.graph.lowering.sql import Sql, UnsaidError
from dagster_unified.graph.nodes import Key, Port
from dagster_unified.graph.nodes.base import Node
from dagster_unified.graph.nodes.functions import FilterNode, MapNode
from dagster_unified.graph.nodes.keyed import ReduceNode
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.by_field import Way
from dagster_unified.operators.layout import ComputedKey, StreamLayout, key_column
from dagster_unified.records import RecordType, record_type

ORDER = "__order"
"""The column with the place of a row among those of a reduce, where that needs to know it."""


@dataclass(frozen=True)
class MappedInSql:
    """What a map or a filter makes of a row."""

    columns: tuple[str, ...] | None = None
    """The fields of the result; None where a row stays as it is."""

    condition: str | None = None
    """Whether a row goes on."""


@dataclass(frozen=True)
class ReducedInSql:
    """What a reduce makes of the rows of a key."""

    fields: tuple[str, ...]
    """Each an aggregate, or a column of the key."""

    key: tuple[str, ...]
    """The names of its columns."""

    @property
    def needs_order(self) -> bool:
        """Whether a field is that of the first or the last row."""
        return any(f"`{ORDER}`" in field for field in self.fields)


InSql = MappedInSql | ReducedInSql


class OperatorsInSql:
    """Operators of a plan, of those that run together, that Catalyst runs in place of Python workers.

    These are whole chains of maps and filters, and reduces that head a chain. An assigner that reads a field runs in
    Catalyst where all of its chain does.
    """

    def __init__(self, plan: Plan, nodes: Iterable[int], chain_of: Callable[[int], Sequence[int]]) -> None:
        """`chain_of` gives the operators that would run in one pass, behind the one that heads them."""
        self._plan = plan
        self._keys: dict[Port, tuple[str, ...] | None] = {}
        self.operators: dict[int, InSql] = {}
        behind = set[int]()
        for number in sorted(nodes):
            if number in behind or not plan.graph.nodes[number].needs_worker:
                continue
            chain = chain_of(number)
            said = self._said(chain)
            if len(said) < len(chain):
                said = {number: found} if isinstance(found := said.get(number), ReducedInSql) else {}
                behind |= {number} if said else set(chain)
            else:
                behind |= set(chain)
            self.operators |= {number: found for number, found in said.items() if found is not None}

    def keys(self, port: Port) -> tuple[str, ...] | None:
        """Return what computes the keys of a stream, of rows in its columns; None where only a worker can."""
        if port not in self._keys:
            layout, node = self._plan.layout(port), self._plan.graph.nodes[port.node]
            where = f"{self._plan.name}: key_by behind '{node.name}'"
            found = [key_in_sql(key, layout.records, where) for key in layout.keys]
            texts = tuple(text for text in found if text is not None)
            self._keys[port] = texts if len(texts) == len(found) else None
        return self._keys[port]

    def _said(self, chain: Sequence[int]) -> dict[int, InSql | None]:
        """Return what each operator of a chain is that Catalyst can run, None for an assigner, which is as it is."""
        plan, found = self._plan, dict[int, InSql | None]()
        if chain[0] in plan.subtasks or any(self._may_not_fit(edge.port) for edge in plan.graph.inputs(chain[0])):
            return found
        for number in chain:
            node, layout = plan.graph.nodes[number], plan.input_layout(number)
            where = f"{plan.name}: operator '{node.name}'"
            if node.key is not None:
                said: InSql | None = reduced_in_sql(node, plan.lowering(node), node.key, layout, where)
            else:
                said = mapped_in_sql(node, plan.lowering(node), layout.records, where)
            if (said is not None or not node.needs_worker) and self.keys(Port(number)) is not None:
                found[number] = said
        return found

    def _may_not_fit(self, port: Port) -> bool:
        """Return whether a stream has fields of which only a worker can say if their values are of their types."""
        records = self._plan.layout(port).records
        is_seen = self._plan.graph.nodes[port.node].needs_worker or self.keys(port) is None
        return not is_seen and not all(records.is_checked_by_columns(number) for number in range(len(records.names)))


def mapped_in_sql(node: Node, lowering: Lowering | None, taken: RecordType, where: str) -> MappedInSql | None:
    """Return what a map or a filter makes of a row; None where that cannot be said. An error says `where`."""
    if lowering is None or lowering.inlined is None:
        return None
    unknown = _unknown(where)
    if isinstance(node, FilterNode):
        kept = kept_rows(node.function, taken)
        return None if kept is None else MappedInSql(condition=f"coalesce({kept}, {unknown})")
    if not isinstance(node, MapNode) or node.records is None:
        return None
    return computed_in_sql(node.function, taken, node.records, "map", unknown)


def key_in_sql(key: ComputedKey, taken: RecordType, where: str) -> str | None:
    """Return what computes a key, of texts or integers; None where that cannot be said. An error says `where`."""
    if key_on_columns(key, taken) is None:
        return None
    found = computed_in_sql(key.function, taken, record_type(key.python), "get_key", _unknown(where))
    return None if found is None or found.columns is None or found.condition is not None else found.columns[0]


def reduced_in_sql(
    node: Node, lowering: Lowering | None, key: Key, taken: StreamLayout, where: str
) -> ReducedInSql | None:
    """Return what a reduce makes of the rows of a key; None where that cannot be said.

    In a row of the first or the last of a key, by event time, only Python knows which of equal times is which.
    """
    if type(node) is not ReduceNode or lowering is None or lowering.fold is None or not lowering.fold.combines:
        return None
    records, computed = taken.records, key.computed
    numbers = [records.names.index(name) for name in key.fields]
    same = {number: f"`{records.names[number]}`" for number in numbers}
    columns = tuple(key.fields)
    if computed is not None:
        if computed.python not in (str, int):
            return None
        columns = (key_column(0),)
        number = _field_of(computed, records)
        same = {} if number is None else {number: f"`{columns[0]}`"}
    if not columns or any(kinds_of(records.types[number]) not in (INT, TEXT) for number in numbers):
        return None
    ways: dict[int, Way] = {n: way for n, way in enumerate(lowering.fold.ways) if n not in same}
    places = set(ways.values()) & _BY_PLACE.keys()
    if places and taken.timestamped:
        return None
    texts = same | {n: _combined(way, records, n, _unknown(where)) for n, way in ways.items() if way not in places}
    for way in places:
        texts |= _at(way, [number for number, its in ways.items() if its == way], records)
    return ReducedInSql(tuple(texts[number] for number in range(len(records.names))), columns)


_BY_PLACE: dict[Way, str] = {"first": "min_by", "last": "max_by"}


def _combined(way: Way, records: RecordType, number: int, unknown: str) -> str:
    column, is_text = f"`{records.names[number]}`", pa.types.is_string(records.schema.field(number).type)
    if way == "sum":
        return f"coalesce(try_sum({column}), {unknown})"
    return f"CAST({way}(CAST({column} AS BINARY)) AS STRING)" if is_text else f"{way}({column})"


def _at(way: Way, numbers: Sequence[int], records: RecordType) -> dict[int, str]:
    """Return fields of the first or the last row; in one aggregate if Spark has to sort for it."""
    columns = {number: f"`{records.names[number]}`" for number in numbers}
    if all(_has_fixed_size(records.schema.field(number).type) for number in numbers):
        return {number: f"{_BY_PLACE[way]}({column}, `{ORDER}`)" for number, column in columns.items()}
    row = f"{_BY_PLACE[way]}(struct({', '.join(columns.values())}), `{ORDER}`)"
    return {number: f"{row}.{column}" for number, column in columns.items()}


def _has_fixed_size(kind: pa.DataType) -> bool:
    """Return whether Spark keeps aggregates of a type in a hash table: it sorts all rows for others."""
    is_number = pa.types.is_int64(kind) or pa.types.is_float64(kind) or pa.types.is_boolean(kind)
    return bool(is_number or pa.types.is_timestamp(kind) or pa.types.is_date32(kind))


def computed_in_sql(
    function: Any, taken: RecordType, made: RecordType, method: str, unknown: str
) -> MappedInSql | None:
    """Return what a function makes of a record, and `unknown` where only Python knows; None where that is not said."""
    sql = Sql(taken.names)
    try:
        result, known = sql.bind(read(function, method, _record(taken)))
        fields = [
            _result(sql, value, taken, made, number, unknown) for number, value in enumerate(made_fields(result, made))
        ]
    except (UnreadableError, UnsaidError, RecursionError):
        return None
    condition = f"CASE WHEN {' AND '.join(known)} THEN true ELSE {unknown} END" if known else None
    return MappedInSql(tuple(fields), condition)


def _result(sql: Sql, value: Expression, taken: RecordType, made: RecordType, number: int, unknown: str) -> str:
    if isinstance(value, Field) and taken.types[value.number] == made.types[number]:
        return sql.result(value, unknown)  # of any type
    text = sql.result(value, unknown)
    missing = bool(value.kinds & NONE) and not made.schema.field(number).nullable
    return f"coalesce({text}, {unknown})" if missing else text


def _field_of(key: ComputedKey, records: RecordType) -> int | None:
    """Return the field that a key is, if it is one."""
    try:
        value = read(key.function, "get_key", _record(records))
    except (UnreadableError, RecursionError):
        return None
    is_same = isinstance(value, Field) and value.kinds in (INT, TEXT) and value.kinds == frozenset([key.python])
    return value.number if isinstance(value, Field) and is_same else None


def _record(taken: RecordType) -> Expression:
    return record_of(taken.python, taken.shape, taken.names, [kinds_of(info) for info in taken.types])


def _unknown(where: str) -> str:
    message = f"{LoweringError.__module__}.LoweringError: {where}: a value can only be computed by its function"
    return f"raise_error(CAST(X'{message.encode().hex()}' AS STRING))"
