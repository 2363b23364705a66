"""What a read function becomes inside of a chain: its own operations on the fields of the record, as Python's text.

They are Python's operations in Python's order, so that nothing has to be guarded: where one raises, the chain runs the
functions themselves, and these raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from itertools import count
from typing import Any

from msgspec import inspect as mi

from dagster_unified.graph.lowering.language import (
    ANY,
    INT,
    MOMENT,
    NONE,
    PLAIN,
    Bound,
    Built,
    Conditional,
    Constant,
    Each,
    Expression,
    Field,
    Kept,
    Kinds,
    Local,
    Operation,
    elements_of,
    kinds_of,
)
from dagster_unified.graph.lowering.reading import read
from dagster_unified.graph.lowering.record_classes import check_class, record_of
from dagster_unified.graph.lowering.source import UnreadableError
from dagster_unified.operators.program.inlined import Inlined, given, in_utc_or_none
from dagster_unified.records import RecordType
from dagster_unified.values import in_utc

_LONGEST = 5000
"""Characters of what a function becomes: of many branches that make records, each asks all conditions again."""

_MADE: dict[type, mi.Type] = {
    int: mi.IntType(),
    float: mi.FloatType(),
    str: mi.StrType(),
    bool: mi.BoolType(),
    date: mi.DateType(),
    datetime: mi.DateTimeType(),
}
"""The classes of computed values that go into a column as they are, and the type of such a column."""


def inlined_map(function: Any, taken: RecordType, made: RecordType, method: str = "map") -> Inlined:
    """Return what a function, or this method of an object, that makes a record of a record becomes.

    Raises `UnreadableError`.
    """
    writer = _Writer()
    result = writer.statements(read(function, method, record_of(taken)))
    fields = made_fields(result, made)
    return writer.inlined(tuple(writer.field(value, taken.types, made, n) for n, value in enumerate(fields)))


def inlined_flat_map(function: Any, taken: RecordType, made: RecordType) -> Inlined:
    """Return what a function that emits some records for a record becomes; raises `UnreadableError`."""
    writer = _Writer()
    result = writer.emitted(read(function, "flat_map", record_of(taken), emits=True))
    fields = made_fields(result, made)
    return writer.inlined(tuple(writer.field(value, taken.types, made, n) for n, value in enumerate(fields)))


def fold_of(result: Expression, held: RecordType, taken: RecordType) -> tuple[list[Expression], Inlined]:
    """Return what is made of the fields of a value and of a record, whose fields come after: by field, and as text.

    Raises `UnreadableError`.
    """
    writer, known = _Writer(), dict[int, Expression]()
    rest = result
    while isinstance(rest, Bound):
        known[rest.number] = rest.value
        rest = rest.body
    fields = made_fields(writer.statements(result), held)
    types = (*held.types, *taken.types)
    inlined = writer.inlined(tuple(writer.field(value, types, held, n) for n, value in enumerate(fields)))
    named = [known.get(value.number, value) if isinstance(value, Local) else value for value in fields]
    return named, inlined


def inlined_filter(function: Any, taken: RecordType) -> Inlined:
    """Return what a function that says whether a record goes on becomes; raises `UnreadableError`."""
    writer = _Writer()
    result = writer.statements(read(function, "filter", record_of(taken)))
    is_known = result.kinds <= PLAIN or elements_of(result.kinds) is not None
    if isinstance(result, Built) or not result.kinds or not is_known:
        raise UnreadableError("it is not known whether what it returns is true")
    if result.kinds & NONE:
        raise UnreadableError("it may return None")
    writer.keep(result)
    return writer.inlined(tuple(f"F{number}" for number in range(len(taken.names))))


def made_fields(result: Expression, made: RecordType) -> list[Expression]:
    """Return the fields of a record of this type that a function returns; raises `UnreadableError`."""
    if made.shape == "value":
        return [result]
    python = made.python if made.shape == "class" else tuple
    if result.kinds == frozenset([python]):  # a record that was in another one
        check_class(python)
        return [
            Operation(kinds_of(info), f"{{}}.{name}", (result,))
            for name, info in zip(made.names, made.types, strict=True)
        ]
    if not isinstance(result, Built) or result.python is not python or len(result.fields) != len(made.names):
        raise UnreadableError("it is not known which fields the record has that it returns")
    return list(result.fields.values()) if python is tuple else [result.fields[name] for name in made.names]


class _Writer:
    """Writes the text of one operator. In it stand `F0`, … for fields, `L0`, … for locals, `C0`, … for constants."""

    def __init__(self) -> None:
        self._constants: dict[str, Any] = {}
        self._numbers = count()
        self._lines: list[tuple[str, str]] = []
        self._reads: set[int] = set()
        self._whole: list[str] = []

    def statements(self, value: Expression) -> Expression:
        """Write what is computed first, whatever comes of it; return the result."""
        while isinstance(value, Bound):
            self._lines.append((f"L{value.number}", self.text(value.value)))
            value = value.body
        return value

    def emitted(self, value: Expression) -> Expression:
        """Write for which records, and for which elements of a list, something is emitted; return what it is."""
        while True:
            value = self.statements(value)
            if isinstance(value, Kept):
                self.keep(value.test)
                value = value.value
            elif isinstance(value, Each):
                self._lines.append((f"*L{value.number}", self.text(value.elements)))
                value = value.body
            else:
                return value

    def keep(self, test: Expression) -> None:
        """Write that a record only goes on where this is true."""
        self._lines.append(("", self.text(test)))

    def field(self, value: Expression, types: Sequence[mi.Type], made: RecordType, number: int) -> str:
        """Write a field of the result; return what stands for it. `types` are those of the fields that are given."""
        info = made.types[number]
        if isinstance(value, Field) and types[value.number] == info:
            return f"F{value.number}"
        optional, bare = _optional(info)
        allowed = {kind for kind, known in _MADE.items() if known == bare}
        is_never = not value.kinds if optional else not value.kinds - NONE
        if is_never or not allowed or not value.kinds <= allowed | NONE:
            raise UnreadableError(f"field '{made.names[number]}' may become of another type than its own")
        form = _form(value.kinds, optional)
        name = f"L{value.number}" if isinstance(value, Local) and form is None else f"R{number}"
        if form is not None:
            self._lines.append((name, f"{self._constant(Constant(ANY, form))}({self.text(value)})"))
        elif not isinstance(value, Local):
            self._lines.append((name, self.text(value)))
        if value.kinds & INT:
            self._whole.append(name)
        return name

    def inlined(self, fields: tuple[str, ...]) -> Inlined:
        """Return what was written; raises `UnreadableError` where that is too long."""
        inlined = Inlined(tuple(self._lines), fields, tuple(sorted(self._reads)), self._constants, tuple(self._whole))
        if sum(len(text) for _, text in self._lines) > _LONGEST or not inlined.compiles():
            raise UnreadableError("it is too long")
        return inlined

    def text(self, value: Expression) -> str:
        write: Mapping[type[Expression], Callable[[Any], str]] = {
            Field: self._field,
            Local: lambda local: f"L{local.number}",
            Constant: self._constant,
            Operation: lambda made: made.text.format(*map(self.text, made.operands)),
            Conditional: lambda made: f"({self.text(made.yes)} if {self.text(made.test)} else {self.text(made.no)})",
            Bound: lambda bound: f"((L{bound.number} := {self.text(bound.value)}), {self.text(bound.body)})[1]",
        }
        if type(value) not in write:
            raise UnreadableError("it uses a whole record")
        return write[type(value)](value)

    def _field(self, field: Field) -> str:
        self._reads.add(field.number)
        return f"F{field.number}"

    def _constant(self, constant: Constant) -> str:
        if constant.value is None or isinstance(constant.value, bool):
            return repr(constant.value)
        name = f"C{next(self._numbers)}"
        self._constants[name] = constant.value
        return name


def _form(kinds: Kinds, optional: bool) -> Callable[[Any], Any] | None:
    """Return what makes a field's value of a computed one, where these may differ; it raises where there is none."""
    if kinds - NONE == MOMENT:
        return in_utc_or_none if kinds & NONE and optional else in_utc
    return given if kinds & NONE and not optional else None


def _optional(info: mi.Type) -> tuple[bool, mi.Type]:
    """Return whether a type allows None, and the type without that."""
    if not isinstance(info, mi.UnionType):
        return False, info
    others = [member for member in info.types if not isinstance(member, mi.NoneType)]
    return len(others) < len(info.types), others[0] if len(others) == 1 else info
