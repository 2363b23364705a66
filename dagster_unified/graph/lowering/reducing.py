"""What a reduce function does to each field: of a run of records it can then be computed by field, in columns."""

from __future__ import annotations

from typing import Any

from dagster_unified.graph.lowering.language import (
    INT,
    TEXT,
    Bound,
    Built,
    Constant,
    Expression,
    Field,
    Local,
    Operation,
    kinds_of,
)
from dagster_unified.graph.lowering.reading import Reader, check_class, record_of
from dagster_unified.graph.lowering.source import UnreadableError
from dagster_unified.operators.by_field import Way
from dagster_unified.records import RecordType


def ways_of(function: Any, records: RecordType) -> tuple[Way, ...]:
    """Return how a reduce function combines each field of two records; raises `UnreadableError`.

    Only what is the same however a run is cut: sums of floats are not, and so are left to the function.
    """
    kinds, size = [kinds_of(info) for info in records.types], len(records.names)
    one = record_of(records.python, records.shape, records.names, kinds)
    other = record_of(records.python, records.shape, records.names, kinds, size)
    result, known = Reader().read(function, one, other), dict[int, Expression]()
    while isinstance(result, Bound):
        known[result.number] = result.value
        result = result.body
    if records.shape == "value":
        values = [result]
    elif isinstance(result, Built) and result.python is (records.python if records.shape == "class" else tuple):
        fields = result.fields
        values = list(fields.values()) if result.python is tuple else [fields[name] for name in records.names]
    else:
        raise UnreadableError("it is not known which fields the record has that it returns")
    if len(values) != size:
        raise UnreadableError("it returns a record with other fields")
    ways: list[Way] = []
    for number, value in enumerate(values):
        way = _way(known.get(value.number, value) if isinstance(value, Local) else value, number, size)
        if way is None:
            raise UnreadableError(f"field '{records.names[number]}' is not combined with itself alone")
        ways.append(way)
    used = {n for value in values if isinstance(value, Local) for n in [value.number]}
    if known.keys() - used:
        raise UnreadableError("it computes more than the fields")
    return tuple(ways)


def ways_of_builtin(kind: str, field: str | int | None, records: RecordType) -> tuple[Way, ...]:
    """Return how `sum`, `min` or `max` over a field combines each field; raises `UnreadableError`."""
    if records.shape == "class":
        check_class(records.python)
    number = 0 if field is None else field if isinstance(field, int) else records.names.index(field)
    kinds = kinds_of(records.types[number])
    if kind == "sum" and kinds == INT:
        way: Way = "sum"
    elif kind == "min" and kinds in (INT, TEXT):
        way = "min"
    elif kind == "max" and kinds in (INT, TEXT):
        way = "max"
    else:
        raise UnreadableError(f"{kind} of '{records.names[number]}' depends on whole records, or on their order")
    return tuple(way if position == number else "first" for position in range(len(records.names)))


def _way(value: Expression, number: int, size: int) -> Way | None:
    if isinstance(value, Field) and value.number in (number, number + size):
        return "first" if value.number == number else "last"
    if not isinstance(value, Operation):
        return None
    called, operands = None, value.operands
    if operands and isinstance(operands[0], Constant) and operands[0].value in (min, max):
        called, operands = operands[0].value, operands[1:]
    fields = {operand.number for operand in operands if isinstance(operand, Field)}
    if fields != {number, number + size} or len(operands) != 2:
        return None
    if value.text == "({} + {})" and value.kinds == INT and all(operand.kinds == INT for operand in operands):
        return "sum"
    if called is None or value.kinds not in (INT, TEXT):
        return None
    return "min" if called is min else "max"
