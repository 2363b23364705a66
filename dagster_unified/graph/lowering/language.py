"""The language of functions that are read: values of a record's fields, and what Python's own types do with them.

Each expression says of which classes its value may be, exactly, so that what an operation means is known. There is no
class of an author's in it but those of records, so that no operation calls code that is not here. Knows no syntax tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from itertools import product
from types import NoneType
from typing import Any, ClassVar

from msgspec import inspect as mi

Kinds = frozenset[type]
"""The classes of which a value may be. Empty where it may be of any: it goes on as it is, or is compared with None."""

ANY: Kinds = frozenset()
BOOL: Kinds = frozenset([bool])
INT: Kinds = frozenset([int])
FLOAT: Kinds = frozenset([float])
TEXT: Kinds = frozenset([str])
NONE: Kinds = frozenset([NoneType])
MOMENT: Kinds = frozenset([datetime])
DAY: Kinds = frozenset([date])
SPAN: Kinds = frozenset([timedelta])

PLAIN: Kinds = frozenset([bool, int, float, str, NoneType, bytes, datetime, date, timedelta, Decimal])
"""Classes whose operations are Python's."""


class Texts(list[str]):
    """The class, in `Kinds`, of a list of texts that an operation makes."""

    elements: ClassVar[Kinds] = TEXT


@lru_cache(maxsize=256)
def list_of(elements: Kinds) -> type:
    """Return the class, in `Kinds`, of a field's list whose elements are of these classes."""
    return type("List", (list,), {"elements": elements})


def elements_of(kinds: Kinds) -> Kinds | None:
    """Return the classes of the elements of a list; None for other values, and where it is not known."""
    lists = [kind for kind in kinds - NONE if issubclass(kind, list)]
    return getattr(lists[0], "elements", None) if len(lists) == 1 and kinds <= NONE | set(lists) else None


@dataclass(frozen=True, eq=False)
class Expression:
    """A part of what a function computes."""

    kinds: Kinds


@dataclass(frozen=True, eq=False)
class Field(Expression):
    """A field of the record that a function is given, by its number."""

    number: int


@dataclass(frozen=True, eq=False)
class Constant(Expression):
    """A value that is the same for all records."""

    value: Any


@dataclass(frozen=True, eq=False)
class Local(Expression):
    """A value that is computed before, and has a name."""

    number: int


@dataclass(frozen=True, eq=False)
class Operation(Expression):
    """Python's own operation on values; `text` is its text, with `{}` for each of them."""

    text: str
    operands: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Conditional(Expression):
    """`yes if test else no`."""

    test: Expression
    yes: Expression
    no: Expression


@dataclass(frozen=True, eq=False)
class Bound(Expression):
    """Computes `value`, as the local of this number, and then `body`."""

    number: int
    value: Expression
    body: Expression


@dataclass(frozen=True, eq=False)
class Built(Expression):
    """A record, or a tuple, of these fields."""

    python: Any
    fields: Mapping[str, Expression]


@dataclass(frozen=True, eq=False)
class Kept(Expression):
    """What a function emits where a test is true; nothing elsewhere."""

    test: Expression
    value: Expression


@dataclass(frozen=True, eq=False)
class Each(Expression):
    """What a function emits for each element of a list, which is the local of this number."""

    number: int
    elements: Expression
    body: Expression


NOTHING = Expression(ANY)
"""What a function emits that emits nothing."""


# What is made of classes

_WHOLE = (bool, int)

_PAIRS: dict[tuple[str, type, type], type] = {
    **{(o, a, b): int for o in ["+", "-", "*", "//", "%", "&", "|", "^"] for a, b in product(_WHOLE, _WHOLE)},
    **{("/", a, b): float for a, b in product((*_WHOLE, float), (*_WHOLE, float))},
    **{(o, a, b): float for o in ["+", "-", "*", "//", "%"] for a, b in [*product(_WHOLE, [float]), (float, float)]},
    **{(o, float, b): float for o in ["+", "-", "*", "//", "%"] for b in _WHOLE},
    **{(o, bool, bool): bool for o in ["&", "|", "^"]},
    ("+", str, str): str,
    **{("*", str, b): str for b in _WHOLE},
    ("-", datetime, datetime): timedelta,
    ("+", datetime, timedelta): datetime,
    ("+", timedelta, datetime): datetime,
    ("-", datetime, timedelta): datetime,
    ("-", date, date): timedelta,
    ("+", date, timedelta): date,
    ("+", timedelta, date): date,
    ("-", date, timedelta): date,
    ("+", timedelta, timedelta): timedelta,
    ("-", timedelta, timedelta): timedelta,
    ("%", timedelta, timedelta): timedelta,
    ("//", timedelta, timedelta): int,
    ("/", timedelta, timedelta): float,
    **{("*", timedelta, b): timedelta for b in (int, float)},
    **{("*", b, timedelta): timedelta for b in (int, float)},
    **{("/", timedelta, b): timedelta for b in (int, float)},
    ("//", timedelta, int): timedelta,
}
"""By operator and the classes of both operands, the class of the result. Any other two raise, or are not read."""


def of_pair(operator: str, left: Kinds, right: Kinds) -> Kinds:
    """Return the classes of a binary operation's results; empty where it raises for all, or one is not known.

    With None each operation raises.
    """
    found = [_PAIRS.get((operator, a, b)) for a, b in product(left - NONE, right - NONE)]
    return ANY if None in found else frozenset(kind for kind in found if kind is not None)


_TEXT_TO_TEXT = """
    lower upper strip lstrip rstrip title capitalize swapcase casefold replace zfill ljust rjust center removeprefix
    removesuffix expandtabs
"""
_TEXT_TO_BOOL = """
    startswith endswith isdigit isalpha isalnum isupper islower isspace isnumeric isdecimal isascii istitle
"""

METHODS: dict[tuple[type, str], Kinds] = {
    **{(str, name): TEXT for name in _TEXT_TO_TEXT.split()},
    **{(str, name): BOOL for name in _TEXT_TO_BOOL.split()},
    **{(str, name): INT for name in ("find", "rfind", "index", "rindex", "count")},
    **{(str, name): frozenset([Texts]) for name in ("split", "rsplit", "splitlines")},
    **{(kind, name): INT for kind in (datetime, date) for name in ("weekday", "isoweekday", "toordinal")},
    **{(kind, "isoformat"): TEXT for kind in (datetime, date)},
    (datetime, "date"): DAY,
    (datetime, "astimezone"): MOMENT,
    (datetime, "timestamp"): FLOAT,
    **{(kind, "strftime"): TEXT for kind in (datetime, date)},
    (timedelta, "total_seconds"): FLOAT,
    (float, "is_integer"): BOOL,
    (int, "bit_length"): INT,
}
"""By class and method, the classes of its results; all arguments are plain values."""

ATTRIBUTES: dict[tuple[type, str], Kinds] = {
    **{(datetime, name): INT for name in ("year", "month", "day", "hour", "minute", "second", "microsecond")},
    **{(date, name): INT for name in ("year", "month", "day")},
    **{(timedelta, name): INT for name in ("days", "seconds", "microseconds")},
}


_OF_TYPES: dict[type, Kinds] = {
    mi.StrType: TEXT,
    mi.IntType: INT,
    mi.FloatType: FLOAT,
    mi.BoolType: BOOL,
    mi.BytesType: frozenset([bytes]),
    mi.DateType: DAY,
    mi.DateTimeType: MOMENT,
    mi.TimeDeltaType: SPAN,
    mi.DecimalType: frozenset([Decimal]),
    mi.NoneType: NONE,
}


def kinds_of(info: mi.Type) -> Kinds:
    """Return the classes of a field's values, once they were in a column."""
    if isinstance(info, mi.Metadata):
        return kinds_of(info.type)
    if isinstance(info, mi.UnionType):
        members = [kinds_of(member) for member in info.types]
        return ANY if ANY in members else frozenset().union(*members)
    if isinstance(info, mi.ListType):
        return frozenset([list_of(kinds_of(info.item_type))])
    if isinstance(info, (mi.NamedTupleType, mi.DataclassType)):
        return frozenset([info.cls])
    return _OF_TYPES.get(type(info), ANY)
