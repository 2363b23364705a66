"""What a reduce, or a window that folds its elements, is in Spark's SQL.

Where only Python knows the result, to evaluate it raises `LoweringError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dagster_unified.graph.lowering.deciding import Lowering
from dagster_unified.graph.lowering.inlining import inlined_map, made_fields
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
from dagster_unified.graph.lowering.mapping import (
    MappedInSql,
    all_known,
    computed_in_sql,
    is_closed,
    only_python,
)
from dagster_unified.graph.lowering.reading import read
from dagster_unified.graph.lowering.record_classes import record_of
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
    """When that of a row begins, in milliseconds since the epoch."""

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

    checks: tuple[str, ...] = ()
    """Aggregates, each of which is true where the fields are what Python would make of the rows in its own order."""

    unknown: str = ""
    """Is evaluated where one of them is not; it raises."""

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
    if keyed is None or lowering is None or lowering.fold is None or is_closed(node.function):
        return None
    folded, unknown = _folded(lowering.fold, keyed[1], taken), only_python(where)
    if folded is None:
        return None
    return ReducedInSql(folded[0], keyed[0], None, all_known(_set_keys(node.key), unknown), folded[1], unknown)


def windowed_in_sql(
    node: WindowNode, lowering: Lowering | None, taken: StreamLayout, where: str
) -> ReducedInSql | None:
    """Return what windows make of their rows; None where that cannot be said. An error says `where`.

    In BATCH no row is late.
    """
    spec: Windowing = node.function
    keyed, unknown = _key_in_sql(node.key, taken.records), only_python(where)
    windows = _tumbling(spec, unknown)
    if keyed is None or windows is None or lowering is None or lowering.fold is None or node.records is None:
        return None
    if any(map(is_closed, spec.functions)):
        return None
    if spec.aggregate is None:
        folded = _folded(lowering.fold, keyed[1], taken)
        if folded is None:
            return None
        return ReducedInSql(folded[0], keyed[0], windows, all_known(_set_keys(node.key), unknown), folded[1], unknown)
    held = record_type(spec.accumulator_type)
    accumulating = _Accumulating(held, taken.records)
    try:
        inlined_map(spec.aggregate, held, node.records, "get_result")  # its fields are of their types
        fields = accumulating.fields(spec.aggregate)
    except (UnreadableError, UnsaidError, RecursionError):
        return None
    result = computed_in_sql(spec.aggregate, held, node.records, "get_result", unknown)
    if result is None:
        return None
    condition = all_known([*_set_keys(node.key), *accumulating.known], unknown)
    return ReducedInSql(
        fields, keyed[0], windows, condition, tuple(accumulating.checks), unknown, held=held, result=result
    )


def _tumbling(spec: Windowing, unknown: str) -> Tumbling | None:
    assigner = spec.assigner
    if type(assigner) is not TumblingEventTimeWindows or not spec.takes_runs:
        return None
    if spec.function is not None or spec.late_tag is not None or assigner.size != assigner.slide:
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


def _set_keys(key: Key | None) -> list[str]:
    """Return that a key is set which a function in a worker has computed."""
    return [] if key is None or key.computed is None else [f"(`{key_column(0)}` IS NOT NULL)"]


def _field_of(key: ComputedKey, records: RecordType) -> int | None:
    """Return the field that a key is, if it is one."""
    try:
        value = read(key.function, "get_key", record_of(records))
    except (UnreadableError, RecursionError):
        return None
    is_same = isinstance(value, Field) and value.kinds in (INT, TEXT) and value.kinds == frozenset([key.python])
    return value.number if isinstance(value, Field) and is_same else None


_BY_PLACE: dict[Way, str] = {"first": "min_by", "last": "max_by"}


def _folded(fold: Fold, keys: Mapping[int, str], taken: StreamLayout) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return the fields of combined records, in which those of `keys` are all the same, and what is checked.

    None if it cannot be said.
    """
    if not fold.combines:
        return None
    records = taken.records
    same = {number: text for number, text in keys.items() if fold.ways[number] != "sum"}
    ways: dict[int, Way] = {number: way for number, way in enumerate(fold.ways) if number not in same}
    places = set(ways.values()) & _BY_PLACE.keys()
    texts = same | {number: _combined(way, records, number) for number, way in ways.items() if way not in places}
    for way in places:
        texts |= _at(way, [number for number, its in ways.items() if its == way], taken)
    checks = tuple(_adds_up(f"`{records.names[number]}`") for number, way in ways.items() if way == "sum")
    return tuple(texts[number] for number in range(len(records.names))), checks


def _combined(way: Way, records: RecordType, number: int) -> str:
    column, is_text = f"`{records.names[number]}`", pa.types.is_string(records.schema.field(number).type)
    if way == "sum":
        return f"try_sum({column})"
    return f"CAST({way}(CAST({column} AS BINARY)) AS STRING)" if is_text else f"{way}({column})"


def _adds_up(number: str) -> str:
    """Return whether integers can be added in any order without a sum, on the way, of more than 64 bits."""
    return f"try_sum(({number}) ^ shiftright({number}, 63)) <= {_LARGEST}L"


_LARGEST = 1 << 61


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

    def __init__(self, held: RecordType, records: RecordType) -> None:
        self._held, self._records = held, records
        self._size = len(held.names)
        self._sql = Sql([*(f"{_HELD}{number}" for number in range(self._size)), *records.names])
        self.known: list[str] = []
        """What is true for each row, as Python computes something of it and does not raise."""

        self.checks: list[str] = []
        """What is true of all rows together, as sums have no more than 64 bits on the way."""

    def fields(self, function: AggregateFunction[Any, Any, Any]) -> tuple[str, ...]:
        """Return the accumulator's fields as aggregates."""
        begun = made_fields(read(function, "create_accumulator"), self._held)
        added, self.known = self._sql.bind(
            read(function, "add", record_of(self._records, self._size), record_of(self._held))
        )
        fields = enumerate(zip(made_fields(added, self._held), begun, strict=True))
        texts = tuple(self._field(value, number, first) for number, (value, first) in fields)
        if any(f"`{_HELD}" in text for text in [*texts, *self.known]):
            raise UnsaidError
        return texts

    def _field(self, value: Expression, number: int, first: Expression) -> str:
        is_whole = isinstance(first, Constant) and type(first.value) is int and abs(first.value) <= _LARGEST
        if not isinstance(first, Constant) or not is_whole or kinds_of(self._held.types[number]) != INT:
            raise UnsaidError
        value = self._sql.resolved(value)
        if isinstance(value, Operation) and value.text == "{}({}, {})" and isinstance(value.operands[0], Constant):
            called, one, other = value.operands[0].value, *map(self._sql.resolved, value.operands[1:])
            compared = ("least", "min") if called is min else ("greatest", "max") if called is max else None
            if compared is None or self._is_own(one, number) == self._is_own(other, number):
                raise UnsaidError
            text = self._whole(other if self._is_own(one, number) else one)
            return f"{compared[0]}({first.value}L, {compared[1]}({text}))"
        more = self._whole(self._more(value, number))
        self.checks.append(_adds_up(more))
        return f"try_add({first.value}L, try_sum({more}))"

    def _whole(self, value: Expression) -> str:
        """Return an integer of each row, which is known."""
        if value.kinds != INT:
            raise UnsaidError
        self.known.append(self._sql.is_known(value))
        return self._sql.result(value)

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
                left, right = right, left
            if left.kinds != INT or right.kinds != INT:
                raise UnsaidError
            if value.text == "({} + {})" and self._is_own(left, number):
                return right
            return Operation(INT, value.text, (self._more(left, number), right))
        raise UnsaidError

    def _is_own(self, value: Expression, number: int) -> bool:
        return isinstance(value, Field) and value.number == number


_HELD = "__held"
"""Begins the names of an accumulator's fields, which are no columns: what reads one cannot be said."""
