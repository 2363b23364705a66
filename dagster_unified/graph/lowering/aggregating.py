"""What a reduce, or a window that folds its elements, is in Spark's SQL.

Where only Python knows the result, to evaluate it raises `LoweringError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from dagster_unified.graph.lowering.deciding import Lowering
from dagster_unified.graph.lowering.inlining import made_fields
from dagster_unified.graph.lowering.language import (
    INT,
    TEXT,
    Conditional,
    Constant,
    Expression,
    Field,
    Operation,
    kinds_of,
)
from dagster_unified.graph.lowering.mapping import MappedInSql, computed_in_sql, only_python, record_in_sql
from dagster_unified.graph.lowering.reading import read
from dagster_unified.graph.lowering.source import UnreadableError
from dagster_unified.graph.lowering.sql import Sql, UnsaidError
from dagster_unified.graph.nodes import Key
from dagster_unified.graph.nodes.keyed import ReduceNode, WindowNode
from dagster_unified.operators.by_field import Fold, Way
from dagster_unified.operators.functions.base import AggregateFunction
from dagster_unified.operators.layout import TIMESTAMP, ComputedKey, StreamLayout, key_column
from dagster_unified.operators.windows.assigners import TumblingEventTimeWindows
from dagster_unified.operators.windows.contents import Windowing
from dagster_unified.records import RecordType, record_type

ORDER = "__order"
"""The column with the place of a row among those of a reduce, where that needs to know it."""


@dataclass(frozen=True)
class Tumbling:
    """The windows of rows."""

    start: str
    """When that of a row begins."""

    size: int
    """How many milliseconds it has."""


@dataclass(frozen=True)
class ReducedInSql:
    """What an operator makes of the rows of a key, or of a window of it."""

    fields: tuple[str, ...]
    """Each an aggregate, or a column of the key."""

    key: tuple[str, ...]
    """The names of its columns."""

    windows: Tumbling | None = None
    condition: str | None = None
    """Is true for each row, or raises."""

    held: RecordType | None = None
    """The type of the record that the fields are of, where the operator makes another one of it."""

    result: MappedInSql | None = None
    """That other one."""

    @property
    def needs_order(self) -> bool:
        """Whether a field is that of the first or the last row."""
        return any(f"`{ORDER}`" in field for field in self.fields)


def reduced_in_sql(node: ReduceNode, lowering: Lowering | None, taken: StreamLayout, where: str) -> ReducedInSql | None:
    """Return what a reduce makes of the rows of a key; None where that cannot be said. An error says `where`."""
    keyed = _key_in_sql(node.key, taken.records)
    if keyed is None or lowering is None or lowering.fold is None:
        return None
    fields = _folded(lowering.fold, keyed[1], taken, only_python(where))
    return None if fields is None else ReducedInSql(fields, keyed[0])


def windowed_in_sql(
    node: WindowNode, lowering: Lowering | None, taken: StreamLayout, where: str
) -> ReducedInSql | None:
    """Return what windows make of their rows; None where that cannot be said. An error says `where`.

    In BATCH no row is late.
    """
    spec: Windowing = node.function
    keyed = _key_in_sql(node.key, taken.records)
    unknown = only_python(where)
    windows = _tumbling(spec, unknown)
    if keyed is None or windows is None or lowering is None or lowering.fold is None or node.records is None:
        return None
    if spec.aggregate is None:
        fields = _folded(lowering.fold, keyed[1], taken, unknown)
        return None if fields is None else ReducedInSql(fields, keyed[0], windows)
    held = record_type(spec.accumulator_type)
    result = computed_in_sql(spec.aggregate, held, node.records, "get_result", unknown)
    try:
        fields, condition = _Accumulating(held, taken.records, unknown).fields(spec.aggregate)
    except (UnreadableError, UnsaidError, RecursionError):
        return None
    return None if result is None else ReducedInSql(fields, keyed[0], windows, condition, held, result)


def _tumbling(spec: Windowing, unknown: str) -> Tumbling | None:
    assigner = spec.assigner
    if type(assigner) is not TumblingEventTimeWindows or not spec.takes_runs:
        return None
    if spec.function is not None or spec.late_tag is not None:
        return None
    known = f"`{TIMESTAMP}` BETWEEN {-(1 << 62)}L AND {1 << 62}L"
    start = f"`{TIMESTAMP}` - pmod(`{TIMESTAMP}` - {assigner.offset}L, {assigner.size}L)"
    return Tumbling(f"CASE WHEN {known} THEN {start} ELSE {unknown} END", assigner.size)


def _key_in_sql(key: Key | None, records: RecordType) -> tuple[tuple[str, ...], Mapping[int, str]] | None:
    """Return the columns of a key, and the fields of its records that are one of them.

    None for a key that is no text or integer, or has several forms.
    """
    if key is None or key == Key():
        return None
    computed = key.computed
    if computed is None:
        numbers = [records.names.index(name) for name in key.fields]
        plain = all(kinds_of(records.types[number]) in (INT, TEXT) for number in numbers)
        return (tuple(key.fields), {number: f"`{records.names[number]}`" for number in numbers}) if plain else None
    if computed.python not in (str, int):
        return None
    number = _field_of(computed, records)
    return (key_column(0),), {} if number is None else {number: f"`{key_column(0)}`"}


def _field_of(key: ComputedKey, records: RecordType) -> int | None:
    """Return the field that a key is, if it is one."""
    try:
        value = read(key.function, "get_key", record_in_sql(records))
    except (UnreadableError, RecursionError):
        return None
    is_same = isinstance(value, Field) and value.kinds in (INT, TEXT) and value.kinds == frozenset([key.python])
    return value.number if isinstance(value, Field) and is_same else None


_BY_PLACE: dict[Way, str] = {"first": "min_by", "last": "max_by"}


def _folded(fold: Fold, keys: Mapping[int, str], taken: StreamLayout, unknown: str) -> tuple[str, ...] | None:
    """Return the fields of combined records, in which those of `keys` are all the same; None if it cannot be said."""
    if not fold.combines:
        return None
    records = taken.records
    same = {number: text for number, text in keys.items() if fold.ways[number] != "sum"}
    ways: dict[int, Way] = {number: way for number, way in enumerate(fold.ways) if number not in same}
    places = set(ways.values()) & _BY_PLACE.keys()
    texts = same | {number: _combined(way, records, number, unknown) for number, way in ways.items()}
    for way in places:
        texts |= _at(way, [number for number, its in ways.items() if its == way], taken)
    return tuple(texts[number] for number in range(len(records.names)))


def _combined(way: Way, records: RecordType, number: int, unknown: str) -> str:
    column, is_text = f"`{records.names[number]}`", pa.types.is_string(records.schema.field(number).type)
    if way == "sum":
        return f"coalesce(try_sum({column}), {unknown})"
    return f"CAST({way}(CAST({column} AS BINARY)) AS STRING)" if is_text else f"{way}({column})"


def _at(way: Way, numbers: Sequence[int], taken: StreamLayout) -> dict[int, str]:
    """Return fields of the first or the last row, by event time if there is one; in one aggregate if Spark has to sort.

    Rows of one time are in the order in which they come, as they are in a worker.
    """
    columns = {number: f"`{taken.records.names[number]}`" for number in numbers}
    is_fixed = all(_has_fixed_size(taken.records.schema.field(number).type) for number in numbers)
    if is_fixed and not taken.timestamped:
        return {number: f"{_BY_PLACE[way]}({column}, `{ORDER}`)" for number, column in columns.items()}
    order = f"struct(`{TIMESTAMP}`, `{ORDER}`)" if taken.timestamped else f"`{ORDER}`"
    row = f"{_BY_PLACE[way]}(struct({', '.join(columns.values())}), {order})"
    return {number: f"{row}.{column}" for number, column in columns.items()}


def _has_fixed_size(kind: pa.DataType) -> bool:
    """Return whether Spark keeps aggregates of a type in a hash table: it sorts all rows for others."""
    is_number = pa.types.is_int64(kind) or pa.types.is_float64(kind) or pa.types.is_boolean(kind)
    return bool(is_number or pa.types.is_timestamp(kind) or pa.types.is_date32(kind))


class _Accumulating:
    """Says what all records together make of an accumulator of integers, each field apart from the others."""

    def __init__(self, held: RecordType, records: RecordType, unknown: str) -> None:
        self._held, self._records, self._unknown = held, records, unknown
        self._size = len(held.names)
        self._sql = Sql([*(f"{_HELD}{number}" for number in range(self._size)), *records.names])

    def fields(self, function: AggregateFunction[object, object, object]) -> tuple[tuple[str, ...], str | None]:
        """Return the accumulator's fields as aggregates, and what is true for each row, or raises."""
        begun = made_fields(read(function, "create_accumulator"), self._held)
        added, known = self._sql.bind(
            read(function, "add", record_in_sql(self._records, self._size), record_in_sql(self._held))
        )
        fields = enumerate(zip(made_fields(added, self._held), begun, strict=True))
        texts = tuple(self._field(value, number, first) for number, (value, first) in fields)
        if any(f"`{_HELD}" in text for text in [*texts, *known]):
            raise UnsaidError
        return texts, f"CASE WHEN {' AND '.join(known)} THEN true ELSE {self._unknown} END" if known else None

    def _field(self, value: Expression, number: int, first: Expression) -> str:
        if not isinstance(first, Constant) or type(first.value) is not int or kinds_of(self._held.types[number]) != INT:
            raise UnsaidError
        begun = self._sql.value(first)
        value = self._sql.resolved(value)
        if isinstance(value, Operation) and value.text == "{}({}, {})" and isinstance(value.operands[0], Constant):
            called, one, other = value.operands[0].value, *map(self._sql.resolved, value.operands[1:])
            compared = {min: ("least", "min"), max: ("greatest", "max")}.get(called) if called in (min, max) else None
            if compared is None or {self._is_own(one, number), self._is_own(other, number)} != {True, False}:
                raise UnsaidError
            text = self._sql.result(other if self._is_own(one, number) else one, self._unknown)
            return f"{compared[0]}({begun}, {compared[1]}({text}))"
        more = self._sql.result(self._more(value, number), self._unknown)
        return f"coalesce(try_add({begun}, try_sum({more})), {self._unknown})"

    def _more(self, value: Expression, number: int) -> Expression:
        """Return what is added to a field of the accumulator."""
        value = self._sql.resolved(value)
        if self._is_own(value, number):
            return Constant(INT, 0)
        if value.kinds != INT:
            raise UnsaidError
        if isinstance(value, Conditional):
            return Conditional(INT, value.test, self._more(value.yes, number), self._more(value.no, number))
        if isinstance(value, Operation) and value.text in ("({} + {})", "({} - {})"):
            left, right = map(self._sql.resolved, value.operands)
            if value.text == "({} + {})" and self._is_own(right, number):
                return left
            more = self._more(left, number)
            if isinstance(more, Constant) and value.text == "({} + {})":
                return right
            return Operation(INT, value.text, (more, right))
        raise UnsaidError

    def _is_own(self, value: Expression, number: int) -> bool:
        return isinstance(value, Field) and value.number == number


_HELD = "__held"
"""Begins the names of an accumulator's fields, which are no columns: what reads one cannot be said."""
