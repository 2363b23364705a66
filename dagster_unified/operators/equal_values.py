"""Values that are equal, in one form: what is found by a hash or compared by bytes has to go by Python's `==`.

`Decimal("17")` and `Decimal("17.00")` are equal, and so are 0.0 and -0.0, 1 and 1.0, one moment in two time zones, and
the tuples and records that hold them; their encodings are not. NaN equals nothing, not even itself, so that it is no
key. Knows values; no state, no columns.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Iterable
from decimal import Decimal
from enum import Enum
from itertools import chain
from types import NoneType
from typing import Any
from uuid import UUID

from msgspec import Struct, msgpack

_encode = msgpack.Encoder().encode

OF_ONE_FORM: frozenset[type] = frozenset({int, str, bytes, NoneType, dt.date, dt.timedelta, UUID})
"""Types whose equal values have one encoding, which is no other type's of them."""

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1


def one_form(value: Any) -> Any:
    """What equal values have in common, as msgspec encodes it; values that differ may have it in common too."""
    kind = type(value)
    if kind in OF_ONE_FORM:
        return value
    if kind is float:
        return int(value) if value.is_integer() and _LEAST <= value <= _MOST else value
    if isinstance(value, tuple):
        return value if OF_ONE_FORM.issuperset(map(type, value)) else list(map(one_form, value))
    for base, convert in _FORMS:
        if isinstance(value, base):
            return convert(value)
    if dataclasses.is_dataclass(value):
        return [one_form(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return value


def has_nan(value: Any) -> bool:
    """Whether a value is NaN, or has one in it, and so does not equal itself."""
    kind = type(value)
    if kind in OF_ONE_FORM:
        return False
    if isinstance(value, (float, Decimal)):
        return value != value
    if isinstance(value, dict):
        return any(map(has_nan, chain(value, value.values())))
    if isinstance(value, (tuple, list, set, frozenset)):
        return any(map(has_nan, value))
    return any(has_nan(getattr(value, name)) for name in _fields(value))


def _fields(value: Any) -> Iterable[str]:
    if isinstance(value, Struct):
        return value.__struct_fields__
    return (field.name for field in dataclasses.fields(value)) if dataclasses.is_dataclass(value) else ()


def _decimal(value: Decimal) -> Any:
    if not value.is_finite():
        return str(value)
    if _LEAST <= value <= _MOST and value == value.to_integral_value():
        return int(value)
    as_float = float(value)
    if as_float == value:
        return as_float
    parts = value.as_tuple()
    return [parts.sign, "".join(map(str, parts.digits)).strip("0"), value.adjusted()]


def _datetime(value: dt.datetime) -> Any:
    """Of one that has a zone its moment; `fold` is nothing to `==`."""
    value = value.replace(fold=0)
    return value if value.utcoffset() is None else dt.datetime.__sub__(value, _EPOCH)


def _time(value: dt.time) -> Any:
    value = value.replace(fold=0)
    offset = value.utcoffset()
    if offset is None:
        return value
    return dt.timedelta(0, value.second, value.microsecond, 0, value.minute, value.hour) - offset


def _set(value: Iterable[Any]) -> list[bytes]:
    return sorted(_encode(one_form(item)) for item in value)


def _dict(value: dict[Any, Any]) -> list[tuple[bytes, Any]]:
    return sorted(((_encode(one_form(key)), one_form(item)) for key, item in value.items()), key=lambda pair: pair[0])


_FORMS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (Enum, lambda value: one_form(value.value)),
    (int, int),
    (float, lambda value: one_form(float(value))),
    (str, str),
    (Decimal, _decimal),
    (dt.datetime, _datetime),
    (dt.time, _time),
    (list, lambda value: list(map(one_form, value))),
    ((set, frozenset), _set),
    (dict, _dict),
    (Struct, lambda value: [one_form(getattr(value, name)) for name in value.__struct_fields__]),
)
