"""Which rows a filter surely drops, so that they need not reach it: as a condition in Spark's SQL.

In the condition, null says that only the function knows: also where it would raise, or where the answer could differ
from Python's, by overflow, by NaN or by a missing value. Rows that it is null for reach the function, and so do those
that it keeps. There is an expression for what can be said exactly, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dagster_unified.graph.lowering.language import (
    BOOL,
    FLOAT,
    INT,
    NONE,
    TEXT,
    Bound,
    Conditional,
    Constant,
    Expression,
    Field,
    Local,
    Operation,
    kinds_of,
)
from dagster_unified.graph.lowering.reading import read
from dagster_unified.graph.lowering.record_classes import record_of
from dagster_unified.graph.lowering.source import UnreadableError
from dagster_unified.records import RecordType

_LONGEST = 4000
"""Characters of a condition. `and` and `or` write their operands twice."""

_EXACT = 1 << 53
"""The integers below it are floats, too."""

_ARITHMETIC = {"({} + {})": "try_add({}, {})", "({} - {})": "try_subtract({}, {})", "({} * {})": "try_multiply({}, {})"}

_COMPARED = {"<": "<", "<=": "<=", ">": ">", ">=": ">=", "==": "=", "!=": "<>"}


class _UnsaidError(Exception):
    """There is no exact expression for it."""


def kept_rows(function: Any, taken: RecordType) -> str | None:
    """Return the condition of a filter's function on the columns of records; None where it cannot be said."""
    try:
        fields = record_of(taken.python, taken.shape, taken.names, [kinds_of(info) for info in taken.types])
        text = _Condition(taken.names).of(read(function, "filter", fields))
    except (UnreadableError, _UnsaidError, RecursionError):
        return None
    return text if len(text) <= _LONGEST else None


def all_kept(conditions: Sequence[str]) -> str:
    """Return the condition that all hold, each of which is only asked where those before it hold."""
    found = conditions[-1]
    for before in reversed(conditions[:-1]):
        found = _both(before, found)
    return found


def _both(first: str, second: str) -> str:
    return f"CASE WHEN {first} THEN {second} WHEN NOT {first} THEN false END"


def _either(first: str, second: str) -> str:
    return f"CASE WHEN {first} THEN true WHEN NOT {first} THEN {second} END"


class _Condition:
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._locals: dict[int, Expression] = {}

    def of(self, value: Expression) -> str:
        """Return whether a value is true."""
        if isinstance(value, Bound):
            self._locals[value.number] = value.value
            computed = self.value(value.value)  # it is computed also where nobody reads it, and may raise
            return self._bounded(f"CASE WHEN ({computed}) IS NOT NULL THEN {self.of(value.body)} END")
        if isinstance(value, Local):
            return self.of(self._locals[value.number])
        if isinstance(value, Conditional):
            test = self.of(value.test)
            yes, no = self.of(value.yes), self.of(value.no)
            return self._bounded(f"CASE WHEN {test} THEN {yes} WHEN NOT {test} THEN {no} END")
        if isinstance(value, Operation):
            found = self._logical(value)
            if found is not None:
                return self._bounded(found)
        if value.kinds - NONE == INT:
            return f"({self.value(value)} <> 0L)"
        if value.kinds - NONE == TEXT:
            return f"({self.value(value)} <> X'')"
        if value.kinds - NONE == BOOL:
            return f"({self.value(value)})"
        raise _UnsaidError

    @staticmethod
    def _bounded(text: str) -> str:
        if len(text) > _LONGEST:
            raise _UnsaidError
        return text

    def _logical(self, value: Operation) -> str | None:
        text, operands = value.text, value.operands
        if text == "(not {})":
            return f"(NOT {self.of(operands[0])})"
        for word, joined in ((" and ", _both), (" or ", _either)):
            if text == f"({word.join(['{}'] * len(operands))})" and len(operands) > 1:
                return self._joined(operands, joined)
        if text in ("({} is None)", "({} is not None)"):
            return self._is_null(operands[0], text)
        if text == "({} in {})":
            return self._is_in(*operands)
        operators = text.strip("()").split(" ")[1::2]
        if operators and len(operators) == len(operands) - 1 and set(operators) <= set(_COMPARED):
            return self._compared(operators, operands)
        return None

    def _joined(self, operands: Sequence[Expression], joined: Callable[[str, str], str]) -> str:
        found = self.of(operands[-1])
        for operand in reversed(operands[:-1]):
            found = self._bounded(joined(self.of(operand), found))
        return found

    def _is_null(self, operand: Expression, text: str) -> str:
        if not isinstance(operand, Field):
            raise _UnsaidError
        return f"({self._column(operand)} IS {'NOT ' if 'not' in text else ''}NULL)"

    def _is_in(self, member: Expression, container: Expression) -> str:
        values = container.value if isinstance(container, Constant) else ()
        if type(values) not in (tuple, frozenset) or not values:
            raise _UnsaidError
        kinds = {type(value) for value in values}
        if member.kinds - NONE not in (INT, TEXT) or kinds != member.kinds - NONE:
            raise _UnsaidError
        return f"({self.value(member)} IN ({', '.join(sorted(map(_literal, values)))}))"

    def _compared(self, operators: Sequence[str], operands: Sequence[Expression]) -> str:
        pairs = zip(operands, operators, operands[1:], strict=False)
        found = [self._pair(left, _COMPARED[operator], right) for left, operator, right in pairs]
        text = found[-1]
        for before in reversed(found[:-1]):
            text = _both(before, text)
        return text

    def _pair(self, left: Expression, operator: str, right: Expression) -> str:
        kinds = left.kinds - NONE, right.kinds - NONE
        if kinds[0] == kinds[1] and kinds[0] in (INT, TEXT, FLOAT, BOOL):
            return f"({self.value(left)} {operator} {self.value(right)})"
        if set(kinds) == {INT, FLOAT}:
            return f"({self._float(left)} {operator} {self._float(right)})"
        raise _UnsaidError

    def _float(self, value: Expression) -> str:
        """Return a number as a float, which an integer is exactly only where it is a small constant."""
        if value.kinds - NONE == FLOAT:
            return self.value(value)
        if isinstance(value, Constant) and abs(value.value) < _EXACT:
            return f"CAST({_literal(value.value)} AS DOUBLE)"
        raise _UnsaidError

    def value(self, value: Expression) -> str:
        """Return an integer, a text, a float or a boolean; null where it is None, or not known."""
        if isinstance(value, Local):
            return self.value(self._locals[value.number])
        kinds = value.kinds - NONE
        if isinstance(value, Constant):
            return _literal(value.value)
        if isinstance(value, Field) and kinds in (INT, BOOL):
            return self._column(value)
        if isinstance(value, Field) and kinds == TEXT:
            return f"CAST({self._column(value)} AS BINARY)"  # as Python compares texts, whatever the collation
        if isinstance(value, Field) and kinds == FLOAT:
            column = self._column(value)
            return f"CASE WHEN NOT isnan({column}) THEN {column} END"
        if isinstance(value, Operation) and kinds == INT:
            return self._bounded(self._whole(value))
        if isinstance(value, Operation) and kinds == BOOL:
            found = self._logical(value)
            if found is not None:
                return self._bounded(found)
        raise _UnsaidError

    def _whole(self, value: Operation) -> str:
        operands = value.operands
        if value.text == "{}({})" and isinstance(operands[0], Constant) and operands[0].value is len:
            if operands[1].kinds - NONE != TEXT or not isinstance(operands[1], Field):
                raise _UnsaidError
            return f"CAST(char_length({self._column(operands[1])}) AS BIGINT)"
        if any(operand.kinds - NONE != INT for operand in operands):
            raise _UnsaidError
        if value.text in _ARITHMETIC:
            return _ARITHMETIC[value.text].format(*map(self.value, operands))
        divisor = operands[-1]
        if value.text not in ("({} % {})", "({} // {})") or not isinstance(divisor, Constant) or divisor.value <= 0:
            raise _UnsaidError
        number, by = map(self.value, operands)
        rest = f"pmod({number}, {by})"
        return rest if "%" in value.text else f"(try_subtract({number}, {rest}) DIV {by})"

    def _column(self, field: Field) -> str:
        return f"`{self._names[field.number]}`"


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if type(value) is int and abs(value) < 1 << 63:
        return f"({value}L)"
    if type(value) is float and value == value and abs(value) != float("inf"):
        return f"CAST('{value!r}' AS DOUBLE)"
    if type(value) is str:
        try:
            return f"X'{value.encode().hex()}'"
        except UnicodeEncodeError:
            raise _UnsaidError from None
    raise _UnsaidError
