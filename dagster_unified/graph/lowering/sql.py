"""What a function computes of a record, in Spark's SQL, where that is Python's own result for every value.

In what is written here null says that only Python knows: where the function would raise, or where a number does not
fit into 64 bits. What reads it decides what becomes of such a row. There is an expression for what can be said exactly,
and for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
)

_LONGEST = 4000
"""Characters of an expression. `and` and `or` write their operands twice."""

_EXACT = 1 << 53
"""The integers below it are floats, too."""

_ARITHMETIC = {"({} + {})": "try_add({}, {})", "({} - {})": "try_subtract({}, {})", "({} * {})": "try_multiply({}, {})"}

_COMPARED = {"<": "<", "<=": "<=", ">": ">", ">=": ">=", "==": "=", "!=": "<>"}

_OF_TEXTS = {"{}.startswith({})": "startswith({}, {})", "{}.endswith({})": "endswith({}, {})"}


class UnsaidError(Exception):
    """There is no exact expression for it."""


def both(first: str, second: str) -> str:
    """Return that two conditions hold, of which the second is only asked where the first one holds."""
    return f"CASE WHEN {first} THEN {second} WHEN NOT {first} THEN false END"


def _either(first: str, second: str) -> str:
    return f"CASE WHEN {first} THEN true WHEN NOT {first} THEN {second} END"


class Sql:
    """Writes what is computed of a record, whose fields are columns of these names. Raises `UnsaidError`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._locals: dict[int, Expression] = {}

    def bind(self, value: Expression) -> tuple[Expression, list[str]]:
        """Return what comes of a function behind the values that it computes first, and that each of these is known.

        What is known for all rows is not among the conditions.
        """
        conditions: list[str] = []
        while isinstance(value, Bound):
            self._locals[value.number] = value.value
            conditions.append(self.known(value.value))
            value = value.body
        return value, [condition for condition in conditions if condition != "true"]

    def resolved(self, value: Expression) -> Expression:
        """Return what a local is, and another value as it is."""
        while isinstance(value, Local):
            value = self._locals[value.number]
        return value

    def known(self, value: Expression) -> str:
        """Return whether the function does not raise as it computes a value, which may have more than 64 bits."""
        return self.is_known(value) if self._may_raise(value) else "true"

    def is_known(self, value: Expression) -> str:
        """Return whether a value is known here, so that it is what `result` says."""
        value = self.resolved(value)
        if isinstance(value, (Field, Constant)):
            return "true"
        if isinstance(value, Conditional):
            test, branches = self.true(value.test), (self.is_known(value.yes), self.is_known(value.no))
            if branches == ("true", "true"):
                return f"(({test}) IS NOT NULL)"
            return self._bounded(f"CASE WHEN {test} THEN {branches[0]} WHEN NOT {test} THEN {branches[1]} END")
        if value.kinds & NONE:
            raise UnsaidError
        return f"(({self._double(value) if value.kinds == FLOAT else self.value(value)}) IS NOT NULL)"

    def _may_raise(self, value: Expression) -> bool:
        """Return whether to compute a value may raise in Python, as far as that is not known to be impossible."""
        if isinstance(value, (Field, Constant, Local)):
            return False
        if isinstance(value, Conditional):
            return any(map(self._may_raise, (value.test, value.yes, value.no)))
        if not isinstance(value, Operation) or any(map(self._may_raise, value.operands)):
            return True
        text, operands = value.text, [self.resolved(operand) for operand in value.operands]
        if text in ("(not {})", "({} is None)", "({} is not None)"):
            return False
        if text in (f"({word.join(['{}'] * len(operands))})" for word in (" and ", " or ")):
            return False
        kinds = frozenset[type]().union(*(operand.kinds for operand in operands))
        if text in _ARITHMETIC:
            return kinds not in (INT, FLOAT)
        return not (_is_comparison(text, len(operands)) and kinds in (INT, FLOAT, TEXT, BOOL))

    def result(self, value: Expression) -> str:
        """Return what a function returns in a field; null where it is None, or not known."""
        value = self.resolved(value)
        if isinstance(value, Field):
            return self._column(value)
        if isinstance(value, Constant) and value.value is None:
            return "NULL"
        if isinstance(value, Conditional):
            return self._chosen(value, self.result)
        if value.kinds & NONE:
            raise UnsaidError
        text = self._double(value) if value.kinds == FLOAT else self.value(value)
        return self._bounded(f"CAST({text} AS STRING)" if value.kinds == TEXT else text)

    def true(self, value: Expression) -> str:
        """Return whether a value is true."""
        if isinstance(value, Bound):
            self._locals[value.number] = value.value
            known, found = self.known(value.value), self.true(value.body)
            return found if known == "true" else self._bounded(f"CASE WHEN {known} THEN {found} END")
        if isinstance(value, Local):
            return self.true(self._locals[value.number])
        if isinstance(value, Conditional):
            return self._chosen(value, self.true)
        if isinstance(value, Constant) and value.value is None:
            return "false"
        if isinstance(value, Operation):
            condition = self._logical(value)
            if condition is not None:
                return self._bounded(condition)
        if value.kinds - NONE == INT:
            return f"({self.value(value)} <> 0L)"
        if value.kinds - NONE == TEXT:
            return f"({self.value(value)} <> X'')"
        if value.kinds - NONE == BOOL:
            return f"({self.value(value)})"
        raise UnsaidError

    def _chosen(self, value: Conditional, of: Callable[[Expression], str]) -> str:
        test = self.true(value.test)
        return self._bounded(f"CASE WHEN {test} THEN {of(value.yes)} WHEN NOT {test} THEN {of(value.no)} END")

    @staticmethod
    def _bounded(text: str, condition: str | None = None) -> str:
        """Return the text, which is null where the condition does not hold, if it is not too long."""
        text = text if condition is None else f"CASE WHEN {condition} THEN {text} END"
        if len(text) > _LONGEST:
            raise UnsaidError
        return text

    def _logical(self, value: Operation) -> str | None:
        text, operands = value.text, value.operands
        if text == "(not {})":
            return f"(NOT {self.true(operands[0])})"
        for word, joined in ((" and ", both), (" or ", _either)):
            if text == f"({word.join(['{}'] * len(operands))})" and len(operands) > 1:
                return self._joined(operands, joined)
        if text in ("({} is None)", "({} is not None)"):
            return self._is_null(operands[0], text)
        if text == "({} in {})":
            return self._is_in(*operands)
        if text in _OF_TEXTS and all(operand.kinds - NONE == TEXT for operand in operands):
            return _OF_TEXTS[text].format(*map(self.value, operands))
        if _is_comparison(text, len(operands)):
            return self._compared(_operators(text), operands)
        return None

    def _joined(self, operands: Sequence[Expression], joined: Callable[[str, str], str]) -> str:
        found = self.true(operands[-1])
        for operand in reversed(operands[:-1]):
            found = self._bounded(joined(self.true(operand), found))
        return found

    def _is_null(self, operand: Expression, text: str) -> str:
        operand = self.resolved(operand)
        if not isinstance(operand, Field):
            raise UnsaidError
        return f"({self._column(operand)} IS {'NOT ' if 'not' in text else ''}NULL)"

    def _is_in(self, member: Expression, container: Expression) -> str:
        if container.kinds - NONE == TEXT and member.kinds - NONE == TEXT:
            return f"contains({self.value(container)}, {self.value(member)})"
        values = container.value if isinstance(container, Constant) else ()
        if type(values) not in (tuple, frozenset) or not values:
            raise UnsaidError
        kinds = {type(value) for value in values}
        if member.kinds - NONE not in (INT, TEXT) or kinds != member.kinds - NONE:
            raise UnsaidError
        return f"({self.value(member)} IN ({', '.join(sorted(map(_literal, values)))}))"

    def _compared(self, operators: Sequence[str], operands: Sequence[Expression]) -> str:
        pairs = zip(operands, operators, operands[1:], strict=False)
        found = [self._pair(left, _COMPARED[operator], right) for left, operator, right in pairs]
        text = found[-1]
        for before in reversed(found[:-1]):
            text = both(before, text)
        return text

    def _pair(self, left: Expression, operator: str, right: Expression) -> str:
        kinds = left.kinds - NONE, right.kinds - NONE
        if kinds[0] == kinds[1] and kinds[0] in (INT, TEXT, BOOL):
            return f"({self.value(left)} {operator} {self.value(right)})"
        if FLOAT not in kinds or not set(kinds) <= {INT, FLOAT}:
            raise UnsaidError
        one, other = self._comparable(left), self._comparable(right)
        no_numbers = [f"isnan({text})" for text, value in ((one, left), (other, right)) if value.kinds - NONE == FLOAT]
        answer = str(operator == "<>").lower()  # NaN equals nothing, and for Spark it is the largest number
        return self._bounded(
            f"CASE WHEN {one} IS NULL OR {other} IS NULL THEN NULL WHEN {' OR '.join(no_numbers)} THEN {answer}"
            f" ELSE {one} {operator} {other} END"
        )

    def _comparable(self, value: Expression) -> str:
        """Return a number as a float, which an integer is exactly only where it is a small constant."""
        if value.kinds - NONE == FLOAT:
            return self._double(value)
        if isinstance(value, Constant) and abs(value.value) < _EXACT:
            return f"CAST({_literal(value.value)} AS DOUBLE)"
        raise UnsaidError

    def value(self, value: Expression) -> str:
        """Return an integer, a text as bytes, or a boolean; null where it is None, or not known."""
        if isinstance(value, Local):
            return self.value(self._locals[value.number])
        kinds = value.kinds - NONE
        if isinstance(value, Constant):
            return _literal(value.value)
        if isinstance(value, Conditional) and kinds in (INT, TEXT, BOOL):
            return self._chosen(value, self.value)
        if isinstance(value, Field) and kinds in (INT, BOOL):
            return self._column(value)
        if isinstance(value, Field) and kinds == TEXT:
            return f"CAST({self._column(value)} AS BINARY)"  # as Python compares texts, whatever the collation
        if isinstance(value, Operation) and kinds == INT:
            return self._bounded(self._whole(value))
        if isinstance(value, Operation) and kinds == BOOL:
            found = self._logical(value)
            if found is not None:
                return self._bounded(found)
        raise UnsaidError

    def _whole(self, value: Operation) -> str:
        called, operands = _call(value)
        if called is len:
            if operands[0].kinds - NONE != TEXT or not isinstance(operands[0], Field):
                raise UnsaidError
            return f"CAST(char_length({self._column(operands[0])}) AS BIGINT)"
        if any(operand.kinds - NONE != INT for operand in operands):
            raise UnsaidError
        if value.text in _ARITHMETIC:
            return _ARITHMETIC[value.text].format(*map(self.value, operands))
        if value.text == "(-{})":
            return f"try_subtract(0L, {self.value(operands[0])})"
        if called is abs:
            number = self.value(operands[0])
            return f"CASE WHEN {number} < 0L THEN try_subtract(0L, {number}) WHEN {number} >= 0L THEN {number} END"
        if called in (min, max) and len(operands) == 2:
            one, other = map(self.value, operands)
            first = f"{other} {'<' if called is min else '>'} {one}"
            return f"CASE WHEN {first} THEN {other} WHEN NOT {first} THEN {one} END"
        divisor = operands[-1]
        if value.text not in ("({} % {})", "({} // {})") or not isinstance(divisor, Constant) or divisor.value <= 0:
            raise UnsaidError
        number, by = map(self.value, operands)
        rest = f"pmod({number}, {by})"
        return rest if "%" in value.text else f"(try_subtract({number}, {rest}) DIV {by})"

    def _double(self, value: Expression) -> str:
        """Return a float, which may be NaN, or an integer as the float that Python makes of it in arithmetic."""
        kinds = value.kinds - NONE
        if isinstance(value, Local):
            return self._double(self._locals[value.number])
        if kinds == INT:
            return f"CAST({self.value(value)} AS DOUBLE)"
        if kinds != FLOAT:
            raise UnsaidError
        if isinstance(value, Constant):
            return _literal(value.value)
        if isinstance(value, Field):
            return self._column(value)
        if isinstance(value, Conditional):
            return self._chosen(value, self._double)
        if not isinstance(value, Operation):
            raise UnsaidError
        called, operands = _call(value)
        if value.text in _ARITHMETIC:
            left, right = map(self._double, operands)
            return self._bounded(value.text.format(left, right))
        if value.text == "({} / {})":
            return self._bounded(f"try_divide({', '.join(map(self._double, operands))})", self._are_exact(operands))
        if value.text == "(-{})" or called is abs:
            return self._bounded(f"{'abs' if called is abs else '-'}({self._double(operands[0])})")
        raise UnsaidError

    def _are_exact(self, operands: Sequence[Expression]) -> str | None:
        """Return whether two integers are floats as well, as Python divides them as they are; None for others."""
        if any(operand.kinds - NONE != INT for operand in operands):
            return None
        return " AND ".join(f"{self.value(operand)} BETWEEN {-_EXACT}L AND {_EXACT}L" for operand in operands)

    def _column(self, field: Field) -> str:
        return f"`{self._names[field.number]}`"


def _operators(text: str) -> list[str]:
    return text.strip("()").split(" ")[1::2]


def _is_comparison(text: str, operands: int) -> bool:
    operators = _operators(text)
    return 0 < len(operators) == operands - 1 and set(operators) <= set(_COMPARED)


def _call(value: Operation) -> tuple[object, tuple[Expression, ...]]:
    """Return which function an operation calls, None for none, and the operands."""
    first = value.operands[0]
    if value.text.startswith("{}(") and isinstance(first, Constant):
        return first.value, value.operands[1:]
    return None, value.operands


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "NULL"
    if type(value) is int and abs(value) < 1 << 63:
        return f"({value}L)"
    if type(value) is float and value == value and abs(value) != float("inf"):
        return f"CAST('{value!r}' AS DOUBLE)"
    if type(value) is str:
        try:
            return f"X'{value.encode().hex()}'"
        except UnicodeEncodeError:
            raise UnsaidError from None
    raise UnsaidError
