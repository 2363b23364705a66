"""What a function that combines records does to each field: runs of records are then folded by field, in columns."""

from __future__ import annotations

from typing import Any

from dagster_unified.errors import UnifiedError
from dagster_unified.graph.lowering.inlining import fold_of
from dagster_unified.graph.lowering.language import (
    ANY,
    INT,
    TEXT,
    Built,
    Constant,
    Expression,
    Field,
    Operation,
    kinds_of,
)
from dagster_unified.graph.lowering.reading import read
from dagster_unified.graph.lowering.record_classes import record_of
from dagster_unified.graph.lowering.source import UnreadableError
from dagster_unified.operators.by_field import Fold, Way
from dagster_unified.operators.functions.base import AggregateFunction
from dagster_unified.records import RecordType, record_type


def reduced(function: Any, records: RecordType) -> Fold:
    """Return what a reduce function does to each field of its first record; raises `UnreadableError`."""
    one, other = record_of(records), record_of(records, len(records.names))
    return _fold(read(function, "reduce", one, other), records, records)


def aggregated(function: AggregateFunction[Any, Any, Any], accumulator: Any, records: RecordType) -> Fold:
    """Return what `add` does to each field of an accumulator of a type; raises `UnreadableError`."""
    try:
        held = record_type(accumulator)
    except UnifiedError:
        raise UnreadableError("its accumulator has no fields") from None
    return _fold(read(function, "add", record_of(records, len(held.names)), record_of(held)), held, records)


def built_in(kind: str, field: str | int | None, records: RecordType) -> Fold:
    """Return what `sum`, `min` or `max` over a field does to each field; raises `UnreadableError`."""
    number = 0 if field is None else field if isinstance(field, int) else records.names.index(field)
    kinds = kinds_of(records.types[number])
    own, other = Field(kinds, number), Field(kinds, number + len(records.names))
    if kind == "sum" and kinds == INT:
        combined = Operation(kinds, "({} + {})", (own, other))
    elif kind in ("min", "max") and kinds in (INT, TEXT):
        combined = Operation(kinds, "{}({}, {})", (Constant(ANY, min if kind == "min" else max), own, other))
    else:
        raise UnreadableError(f"{kind} of '{records.names[number]}' depends on whole records, or on their order")
    whole = record_of(records)
    if not isinstance(whole, Built):
        return _fold(combined, records, records)
    fields = {**whole.fields, records.names[number]: combined}
    return _fold(Built(ANY, whole.python, fields), records, records)


def _fold(result: Expression, held: RecordType, taken: RecordType) -> Fold:
    values, inlined = fold_of(result, held, taken)
    size = len(held.names)
    ways: list[Way] = []
    for number, (value, text) in enumerate(zip(values, inlined.fields, strict=True)):
        ends = {number + size} if held == taken else set(range(size, size + len(taken.names)))
        ways.append(_way(value, number, size) if not text.startswith("F") else _way_of_field(text, number, ends))
    return Fold(tuple(ways), inlined)


def _way_of_field(text: str, number: int, ends: set[int]) -> Way:
    """Return how a field is combined that is another one as it is; `ends` are those of the record that comes last.

    The first record of a run is a value itself, so that only its own field is the same at the end of any run.
    """
    origin = int(text[1:])
    return "first" if origin == number else "last" if origin in ends else "computed"


def _way(value: Expression, number: int, size: int) -> Way:
    """Return how a field of a value is combined, which has so many; the fields of the record are counted after them."""
    if not isinstance(value, Operation):
        return "computed"
    called: object = None
    operands = value.operands
    if operands and isinstance(operands[0], Constant) and operands[0].value in (min, max):
        called, operands = operands[0].value, operands[1:]
    fields = {operand.number for operand in operands if isinstance(operand, Field)}
    if fields != {number, number + size} or len(operands) != 2:
        return "computed"
    if value.text == "({} + {})" and value.kinds == INT and all(operand.kinds == INT for operand in operands):
        return "sum"
    if called is None or value.kinds not in (INT, TEXT):
        return "computed"
    return "min" if called is min else "max"
