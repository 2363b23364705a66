"""Whether Python values are of their declared type, and the one form that each value has.

The rule: what is read back equals what was given. A value for which that does not hold is a misfit and an error; no
value is ever changed silently. Values of the declared type itself only have their types checked, at the speed of C;
values are looked at only where other types occur (a subclass, NumPy's scalars, an `int` for a `float`).

Equal values may differ in form: a time in two zones, 3 and 3.0, a dict and a `defaultdict`. The normal form is the form
that is read back. A value gets it where it is produced, so that every function sees the form that it has after an
exchange, a micro-batch or a savepoint. `Fit.normal` is code written for its type; it recognises a value in normal form
with as few steps as that takes.

A leaf module: knows no records, no state and no engine. A `Codec` says what values are once they are read back (from
Arrow or msgpack).
"""

from __future__ import annotations

import datetime as dt
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from decimal import Context, Decimal, DecimalException, Inexact, InvalidOperation
from enum import Enum
from functools import cached_property, lru_cache
from itertools import chain
from numbers import Integral, Rational, Real
from operator import attrgetter
from types import NoneType
from typing import Any, get_args, get_origin

from msgspec import Struct
from msgspec import inspect as mi
from msgspec.structs import force_setattr

from dagster_unified.errors import PipelineError

TOO_LARGE = (
    "is larger than its type holds, an int of 64 bits or a Decimal of 20 digits before the point; sum floats, or"
    " smaller numbers"
)
"""The end of errors about a computed number."""

Codec = Callable[[mi.Type, "list[Any]"], "list[Any]"]
"""Returns values of one scalar type as they are once stored and read again. Raises for what cannot be stored."""


@dataclass(frozen=True)
class Misfit:
    """A value that is not of its declared type, and where in a column's value it is: `[].floor`."""

    value: Any
    declared: str
    path: str = ""
    advice: str = ""

    def at(self, path: str) -> Misfit:
        """The same misfit, seen from outside."""
        return replace(self, path=path + self.path)

    def remedy(self) -> str:
        """Advice to the author."""
        kind = type(self.value)
        if self.value is None:
            return "annotate it as '| None' if it may be missing"
        if kind.__name__ == "Column":
            return "functions of columns go into select, where or agg, and a Python function into map"
        if self.advice:
            return self.advice
        wanted = self.declared.removesuffix(" | None").split("[")[0]
        for declared, types, remedy in _REMEDIES:
            if wanted == declared and issubclass(kind, types):
                return remedy
        return "convert it, or change the declared type"


class UnfitError(Exception):
    """A value is not of its declared type. `Fit.normal` raises it; whoever knows the operator tells the author."""

    def __init__(self, misfit: Misfit) -> None:
        super().__init__(misfit)
        self.misfit = misfit

    def at(self, path: str) -> UnfitError:
        """The same error, seen from outside."""
        return UnfitError(self.misfit.at(path))


_REMEDIES: list[tuple[str, type | tuple[type, ...], str]] = [
    ("int", bool, "use int(...), or declare bool"),
    ("int", int, "an int has 64 bits; declare str or Decimal"),
    ("int", (Real, Decimal), "round it, or declare float"),
    ("float", bool, "use float(...), or declare bool"),
    ("float", int, "a float cannot hold it exactly; declare int"),
    ("bool", Real, "use bool(...), or declare int"),
    (
        "datetime",
        Real,
        "make a datetime of it, such as datetime.fromtimestamp(milliseconds / 1000, timezone.utc), or declare int",
    ),
    ("datetime", dt.datetime, "a datetime is kept in microseconds, in UTC, in the years 1 to 9999"),
    ("datetime", dt.date, "make a datetime of it, or declare date"),
    ("date", dt.datetime, "use .date(), or declare datetime"),
    ("timedelta", dt.timedelta, "a timedelta is kept in microseconds of 64 bits, some 292,000 years"),
    ("timedelta", Real, "make a timedelta of it, such as timedelta(milliseconds=...), or declare int"),
    ("str", (bytes, bytearray), "decode it, or declare bytes"),
    ("str", str, "it has one half of a surrogate pair, which is no character; leave it out, or declare bytes"),
    ("bytes", str, "encode it, or declare str"),
    ("Decimal", float, "use Decimal(str(...)), or declare float"),
    ("Decimal", Decimal, "a Decimal has 18 digits after the point, and 20 before it; use quantize(...)"),
    ("list", (tuple, set, frozenset), "use list(...), or declare what it is"),
    ("tuple", list, "use tuple(...), or declare list[...]"),
]


FOLD = "<fold>"
"""The file name of the code of loops that combine values."""


class Fit(ABC):
    """Checks that values are of one declared type. Values of the types in `exact` need no look at them."""

    mutable = False
    """Whether a value can be changed in its place."""

    scalar = False
    """Whether a value is checked at once; other values are gathered and checked many at a time."""

    grows = False
    """Whether a value may be large, and changed in its place."""

    kind: type | None = None
    """The type of a scalar type's values."""

    has_one_form = False
    """Whether each value of `kind` that the type can hold is in normal form."""

    def __init__(self, name: str, nullable: bool, exact: Iterable[type] = ()) -> None:
        self.name = f"{name} | None" if nullable else name
        self.nullable = nullable
        self.exact = frozenset(exact) | ({NoneType} if nullable else set())
        self._loops: dict[str, Callable[..., Any]] = {}

    def misfit(self, values: Collection[Any]) -> Misfit | None:
        """The first of these values that is not of the type, or None."""
        kinds = set(map(type, values))
        if kinds <= self.exact:
            return None
        if NoneType in kinds:
            if not self.nullable:
                return Misfit(None, self.name)
            kinds.discard(NoneType)
            values = [v for v in values if v is not None]
        return self._misfit(values, kinds)

    @abstractmethod
    def _misfit(self, values: Collection[Any], kinds: set[type]) -> Misfit | None:
        """As `misfit`, of values of these kinds, none of which is None."""

    def copied(self, value: Any) -> Any:
        """A copy that shares nothing mutable with the original. A value that does not fit is returned as it is."""
        return value

    @cached_property
    def normal(self) -> Callable[[Any], Any]:
        """Returns the normal form of a value, which is the value itself where it has that form.

        Raises `UnfitError` for a value of another type, or one that the type cannot hold.
        """
        names: dict[str, Any] = {"formed": self._formed, "UnfitError": UnfitError}
        test = self.test("value", names)
        if test == "False":
            return self._formed
        lines = [
            "def normal(value):",
            "    try:",
            f"        if {test}: return value",
            "    except UnfitError: pass",  # of a part of it; what is formed says which
            "    return formed(value)",
        ]
        exec("\n".join(lines), names)
        function: Callable[[Any], Any] = names["normal"]
        return function

    def test(self, value: str, names: dict[str, Any], ranges: bool = True) -> str:
        """Code of an expression that is true only of values in normal form, without a call where possible.

        `value` is the name of the variable; the names that the expression uses are added to `names`. Without `ranges`
        it does not check that the type can hold the value.
        """
        return self._or_none(value, self._test(value, names, ranges))

    def _test(self, value: str, names: dict[str, Any], ranges: bool) -> str:
        """As `test`, of a value that is not None."""
        return "False"

    def clause_test(self, value: str, names: dict[str, Any]) -> str:
        """As `test` without ranges, for a clause of a comprehension: it assigns no variable and calls nothing."""
        return self.test(value, names, ranges=False) if self.scalar else "False"

    def fold(self, call: str) -> Callable[..., Any]:
        """A loop that combines values, and makes the normal form of each result before it uses it.

        `call` is the code that combines: `function(combined, value)`. The loop takes the value to start from, the
        values, the function, and a function that makes a normal form.
        """
        if call not in self._loops:
            names: dict[str, Any] = {}
            body = [
                "for value in values:",
                f"    result = {call}",
                f"    combined = {self._normal_code(names, ranges=True)}",
            ]
            self._loops[call] = _loop("combined, values, function, normal", body, names)
        return self._loops[call]

    @cached_property
    def scan(self) -> Callable[..., Any]:
        """A loop over the values of some keys, key after key, that emits each result of combining them.

        It takes the values, and before each of them its key's value so far: None for nothing, or `same` for the last
        result; then `same`, the function, a function that makes a normal form, and one that is called with each result.
        It does not check that the type can hold a result: whoever takes the results does.
        """
        names: dict[str, Any] = {}
        body = [
            "for value, previous in zip(values, before):",
            "    if previous is None:",
            "        combined = value",
            "    else:",
            "        if previous is not same:",
            "            combined = previous",
            "        result = function(combined, value)",
            f"        combined = {self._normal_code(names, ranges=False)}",
            "    emit(combined)",
        ]
        return _loop("values, before, same, function, normal, emit", body, names)

    def _normal_code(self, names: dict[str, Any], ranges: bool) -> str:
        """The code for the normal form of a loop's result."""
        # What grows and is the same object was looked at, and is looked at again when it is not changed any more.
        test = "result is combined" if self.grows else self.test("result", names, ranges)
        return f"result if {test} else normal(result)"

    def _or_none(self, value: str, test: str) -> str:
        return f"({value} is None or {test})" if self.nullable and test != "False" else test

    def are_normal(self, values: Collection[Any]) -> bool:
        """Whether all values are certainly in normal form."""
        normal = self.normal
        try:
            return all(normal(value) is value for value in values)
        except UnfitError:
            return False

    def _formed(self, value: Any) -> Any:
        """As `normal`, where the test does not show that the value is in normal form."""
        if value is None:
            if self.nullable:
                return None
            raise UnfitError(Misfit(None, self.name))
        return self._form(value)

    def _form(self, value: Any) -> Any:
        """As `normal`, of a value that is not None."""
        misfit = self._misfit((value,), {type(value)})
        if misfit is not None:
            raise UnfitError(misfit)
        return value

    def _refused(self, values: Collection[Any], refused: set[type]) -> Misfit | None:
        return next((Misfit(v, self.name) for v in values if type(v) in refused), None)


_LEAST, _MOST = -(2**63), 2**63 - 1
_SHORTEST, _LONGEST = dt.timedelta(microseconds=_LEAST), dt.timedelta(microseconds=_MOST)
_UTC = dt.timezone.utc


def in_utc(value: dt.datetime) -> dt.datetime:
    """The normal form of a time; one without a zone is of UTC."""
    if value.tzinfo is _UTC and not value.fold:
        return value
    return (value.replace(tzinfo=_UTC) if value.tzinfo is None else value.astimezone(_UTC)).replace(fold=0)


_DIGITS = Context(prec=38, traps=[Inexact, InvalidOperation])
_UNIT = Decimal(1).scaleb(-18)
_ZERO = Decimal(0).scaleb(-18)


def _is_text(value: str) -> bool:
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def _whole(value: int) -> int:
    if _LEAST <= value <= _MOST:
        return value
    raise OverflowError


def _text(value: str) -> str:
    value.encode()  # which a half of a surrogate pair cannot be
    return value


def _span(value: dt.timedelta) -> dt.timedelta:
    if _SHORTEST <= value <= _LONGEST:
        return value
    raise OverflowError


def _decimal(value: Decimal) -> Decimal:
    """The number with 18 digits after the point, as Arrow has it; a zero has no sign."""
    if not value.is_finite():
        raise OverflowError
    return _DIGITS.quantize(value, _UNIT) if value else _ZERO


@dataclass(frozen=True)
class _Scalar:
    """A scalar type of Python's, and how the normal form of its values is recognised and made."""

    python: type
    other: Callable[[type], bool]
    """Whether values of another type may be equal to its own."""

    test: str | None = None
    """Code of a condition that, of values of the very type, is true only of normal forms; empty if it is of all.

    None where no condition tells.
    """

    is_range: bool = False
    """Whether the condition says only that the type can hold the value, and nothing about its form."""

    names: dict[str, Any] = field(default_factory=dict)
    """The names that the condition uses."""

    form: Callable[[Any], Any] | None = None
    """Makes the normal form of a value of the very type, if it may be another; raises if the type cannot hold it."""

    @property
    def has_one_form(self) -> bool:
        """Whether each value of the very type that the type can hold is in normal form."""
        return self.python in (int, float, str, bool, bytes, dt.date)


def _of(*types: type) -> Callable[[type], bool]:
    return lambda kind: issubclass(kind, types) and not issubclass(kind, bool)


_SCALARS: dict[type[mi.Type], _Scalar] = {
    mi.IntType: _Scalar(
        int,
        _of(Integral),
        "{0}.bit_length() < 64",  # which is not so of the least one
        is_range=True,
        form=_whole,
    ),
    mi.FloatType: _Scalar(
        float, lambda kind: _of(Real)(kind) and (issubclass(kind, Integral) or not issubclass(kind, Rational)), ""
    ),
    mi.StrType: _Scalar(
        str, _of(str), "({0}.isascii() or is_text({0}))", is_range=True, names={"is_text": _is_text}, form=_text
    ),
    mi.BoolType: _Scalar(bool, lambda kind: kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"), ""),
    mi.BytesType: _Scalar(bytes, _of(bytes, bytearray, memoryview), ""),
    mi.DateTimeType: _Scalar(dt.datetime, _of(dt.datetime), "{0}.tzinfo is UTC and not {0}.fold", names={"UTC": _UTC}),
    mi.DateType: _Scalar(dt.date, lambda kind: issubclass(kind, dt.date) and not issubclass(kind, dt.datetime), ""),
    mi.TimeType: _Scalar(dt.time, _of(dt.time)),
    mi.TimeDeltaType: _Scalar(
        dt.timedelta,
        _of(dt.timedelta),
        "SHORTEST <= {0} <= LONGEST",
        is_range=True,
        names={"SHORTEST": _SHORTEST, "LONGEST": _LONGEST},
        form=_span,
    ),
    mi.DecimalType: _Scalar(
        Decimal,
        _of(Decimal, Integral),
        "{0}.same_quantum(UNIT) and -LIMIT < {0} < LIMIT and ({0} or not {0}.is_signed())",
        names={"UNIT": _UNIT, "LIMIT": Decimal(10**20)},
        form=_decimal,
    ),
    mi.UUIDType: _Scalar(uuid.UUID, _of(uuid.UUID)),
    mi.ByteArrayType: _Scalar(bytearray, _of(bytes, bytearray)),
}

_ANYTHING = _Scalar(object, lambda kind: True)
"""A type that says nothing of its values: then a value is as good as what is read back of it."""


class _ScalarFit(Fit):
    scalar = True

    def __init__(self, info: mi.Type, scalar: _Scalar, nullable: bool, exact: Iterable[type], codec: Codec) -> None:
        super().__init__(described(info), nullable, exact)
        self._info, self._scalar, self._codec = info, scalar, codec
        self._unchecked = self.exact
        self._python = scalar.python
        self.kind = None if scalar is _ANYTHING else scalar.python
        self.has_one_form = scalar.has_one_form

    def _test(self, value: str, names: dict[str, Any], ranges: bool) -> str:
        kind, scalar = self._python, self._scalar
        if scalar.test is None:
            return "False"
        names[kind.__name__] = kind
        names |= scalar.names
        of_kind = f"{value}.__class__ is {kind.__name__}"
        if not scalar.test or (scalar.is_range and not ranges):
            return of_kind
        return f"{of_kind} and {scalar.test.format(value)}"

    def are_normal(self, values: Collection[Any]) -> bool:
        if not self.has_one_form:
            return super().are_normal(values)
        kinds = set(map(type, values))
        if kinds == {self._python, NoneType} and self.nullable:
            values, kinds = [v for v in values if v is not None], {self._python}
        if kinds != {self._python}:
            return not kinds or (self.nullable and kinds == {NoneType})
        if self._python is int:
            return bool(min(values) >= _LEAST and max(values) <= _MOST)
        return self._python is not str or _is_text("".join(values))

    def _form(self, value: Any) -> Any:
        if type(value) is not self._python or self._python is dt.time:
            misfit = self._misfit((value,), {type(value)})
            if misfit is not None:
                raise UnfitError(misfit)
            try:
                (value,) = self._codec(self._info, [value])
            except Exception:  # whatever a codec says of a value that it cannot hold
                raise UnfitError(Misfit(value, self.name)) from None
        form = self._scalar.form
        try:
            return value if form is None else form(value)
        except (ValueError, OverflowError, DecimalException):
            raise UnfitError(Misfit(value, self.name)) from None

    def _misfit(self, values: Collection[Any], kinds: set[type]) -> Misfit | None:
        odd = kinds - self._unchecked
        refused = self._refused(values, {kind for kind in odd if not self._scalar.other(kind)})
        if refused is not None:
            return refused
        looked_at = [v for v in values if type(v) in odd]
        try:
            read_back = self._codec(self._info, looked_at)
        except Exception:  # whatever a codec says of one of many values, each is tried by itself
            return self._first_that_differs(looked_at)
        return next(
            (Misfit(v, self.name) for v, back in zip(looked_at, read_back, strict=True) if not _same(v, back)), None
        )

    def _first_that_differs(self, values: list[Any]) -> Misfit | None:
        for value in values:
            try:
                (back,) = self._codec(self._info, [value])
            except Exception:
                return Misfit(value, self.name)
            if not _same(value, back):
                return Misfit(value, self.name)
        return None


def _same(value: Any, back: Any) -> bool:
    """Whether the value read back is the value that was stored; nan is, and a naive datetime counts as UTC."""
    if isinstance(value, dt.datetime) and isinstance(back, dt.datetime) and value.tzinfo is None:
        back = back.replace(tzinfo=None)
    return bool(value == back) or bool(value != value and back != back)


_BEYOND = {dt.MINYEAR, dt.MAXYEAR}


class _MomentFit(_ScalarFit):
    """Datetimes.

    Those in the first and the last year may have no moment in UTC. A declared zone, or none, is enforced.
    """

    def __init__(
        self, info: mi.DateTimeType, scalar: _Scalar, nullable: bool, exact: Iterable[type], codec: Codec
    ) -> None:
        super().__init__(info, scalar, nullable, exact, codec)
        self._aware = info.tz
        self.exact = frozenset()
        if self._aware is not None:
            self.kind = None

    def _test(self, value: str, names: dict[str, Any], ranges: bool) -> str:
        return "False" if self._aware is False else super()._test(value, names, ranges)

    def _form(self, value: Any) -> Any:
        misfit = self._misfit((value,), {type(value)})
        if misfit is not None:
            raise UnfitError(misfit)
        if type(value) is not dt.datetime:
            (value,) = self._codec(self._info, [value])
        if self._aware is False:
            return value.replace(fold=0)
        return in_utc(value)

    def _misfit(self, values: Collection[Any], kinds: set[type]) -> Misfit | None:
        return super()._misfit(values, kinds) or self._unfit_moment(values)

    def _unfit_moment(self, moments: Collection[Any]) -> Misfit | None:
        aware = self._aware
        if aware is not None:
            for moment in moments:
                if (moment.tzinfo is not None) is not aware:
                    return Misfit(moment, f"{self.name} {'with' if aware else 'without'} a time zone")
        if _BEYOND.isdisjoint(map(attrgetter("year"), moments)):
            return None
        for moment in moments:
            try:
                moment.astimezone(dt.timezone.utc) if moment.tzinfo is not None else None
            except OverflowError:
                return Misfit(moment, self.name)
        return None


_ONE_FORM = "two of its values are one, such as the same time with and without a zone; give it one of them"


class _ItemsFit(Fit):
    """Lists, tuples of any length, and sets."""

    def __init__(self, name: str, nullable: bool, container: type, item: Fit) -> None:
        super().__init__(name, nullable)
        self._container, self.item = container, item
        self.mutable = container in (list, set) or item.mutable
        self.grows = self.mutable

    def _misfit(self, values: Collection[Any], kinds: set[type]) -> Misfit | None:
        refused = self._refused(values, {kind for kind in kinds if not issubclass(kind, self._container)})
        if refused is not None:
            return refused
        if set(map(type, chain.from_iterable(values))) <= self.item.exact:
            return None
        misfit = self.item.misfit(list(chain.from_iterable(values)))
        return None if misfit is None else misfit.at("[]")

    def _test(self, value: str, names: dict[str, Any], ranges: bool) -> str:
        names[self._container.__name__] = self._container
        items_are_normal = _named(self.item.are_normal, names)
        return f"{value}.__class__ is {self._container.__name__} and {items_are_normal}({value})"

    def _form(self, value: Any) -> Any:
        if not isinstance(value, self._container):
            raise UnfitError(Misfit(value, self.name))
        items: Any = value
        try:
            converted = self._container(map(self.item.normal, items))
        except UnfitError as error:
            raise error.at("[]") from None
        if len(converted) < len(items):
            raise UnfitError(Misfit(value, self.name, advice=_ONE_FORM))
        return converted

    def copied(self, value: Any) -> Any:
        items: Iterable[Any] = value
        if not self.mutable or not isinstance(value, self._container):
            return value
        return self._container(map(self.item.copied, items) if self.item.mutable else items)


class _DictFit(Fit):
    mutable = grows = True

    def __init__(self, name: str, nullable: bool, key: Fit, value: Fit) -> None:
        super().__init__(name, nullable)
        self._key, self._value = key, value

    def _misfit(self, values: Collection[Any], kinds: set[type]) -> Misfit | None:
        refused = self._refused(values, {kind for kind in kinds if not issubclass(kind, dict)})
        if refused is not None:
            return refused
        misfit = self._key.misfit(list(chain.from_iterable(values)))
        if misfit is not None:
            return misfit.at(".keys()")
        misfit = self._value.misfit([entry for value in values for entry in value.values()])
        return None if misfit is None else misfit.at(".values()")

    def _test(self, value: str, names: dict[str, Any], ranges: bool) -> str:
        keys, values = _named(self._key.are_normal, names), _named(self._value.are_normal, names)
        return f"{value}.__class__ is dict and {keys}({value}) and {values}({value}.values())"

    def _form(self, value: Any) -> Any:
        if not isinstance(value, dict):
            raise UnfitError(Misfit(value, self.name))
        try:
            keys = list(map(self._key.normal, value))
        except UnfitError as error:
            raise error.at(".keys()") from None
        try:
            converted = dict(zip(keys, map(self._value.normal, value.values()), strict=True))
        except UnfitError as error:
            raise error.at(".values()") from None
        if len(converted) < len(value):
            raise UnfitError(Misfit(value, self.name, advice=_ONE_FORM))
        return converted

    def copied(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        keys: Iterable[Any] = map(self._key.copied, value) if self._key.mutable else value
        values: Iterable[Any] = map(self._value.copied, value.values()) if self._value.mutable else value.values()
        return dict(zip(keys, values, strict=True))


class RecordFit(Fit):
    """Records of a class, or tuples of one length. With `alike` another class with the same fields fits too."""

    def __init__(self, name: str, nullable: bool, python: Any, names: tuple[str, ...], alike: bool) -> None:
        super().__init__(name, nullable)
        self._python, self._names, self._alike = python, names, alike
        self.by_position = isinstance(python, type) and issubclass(python, tuple)
        self.fields: list[tuple[str, Fit]] = []
        self._mutable_fields: list[tuple[int, str, Fit]] = []
        self.does_more = False
        """Whether making a record does more than set its fields."""

        if not self.by_position:
            made_with = getattr(python, "__dataclass_params__", None) or getattr(python, "__struct_config__", None)
            self._frozen = bool(getattr(made_with, "frozen", False))
            self.mutable = not self._frozen
            self.does_more = hasattr(python, "__post_init__") or not getattr(made_with, "init", True)

    def complete(self, fields: list[tuple[str, Fit]]) -> None:
        """Set the fields, whose types may include this very type."""
        self.fields = fields
        self.mutable = self.mutable or any(fit.mutable for _, fit in fields)
        self.grows = any(fit.grows for _, fit in fields)
        self._mutable_fields = [
            (i, name, fit) for i, (name, (_, fit)) in enumerate(zip(self._names, fields, strict=True)) if fit.mutable
        ]

    def shape_misfit(self, values: Collection[Any], kinds: set[type]) -> Misfit | None:
        """The first value that does not have these fields."""
        if kinds == {self._python} and self._python is not tuple:
            return None
        refused = self._refused(
            values, {kind for kind in kinds if kind is not self._python and not self._has_fields(kind)}
        )
        if refused is None and self.by_position and values and set(map(len, values)) != {len(self._names)}:
            return next(Misfit(v, self.name) for v in values if len(v) != len(self._names))
        return refused

    def _has_fields(self, kind: type) -> bool:
        if not self._alike:
            return kind is self._python
        if self.by_position:
            named = getattr(kind, "_fields", None)
            return issubclass(kind, tuple) and (named is None or self._python is tuple or named == self._names)
        fields = getattr(kind, "__struct_fields__", None) or getattr(kind, "__dataclass_fields__", None)
        return fields is not None and set(fields) == set(self._names)

    def _misfit(self, values: Collection[Any], kinds: set[type]) -> Misfit | None:
        misfit = self.shape_misfit(values, kinds)
        if misfit is not None or not values:
            return misfit
        columns: Iterable[Collection[Any]] = (
            zip(*values, strict=True)
            if self.by_position
            else (list(map(get, values)) for get in map(attrgetter, self._names))
        )
        for (path, fit), column in zip(self.fields, columns, strict=True):
            misfit = fit.misfit(column)
            if misfit is not None:
                return misfit.at(path)
        return self.remade_misfit(values)

    def _test(self, value: str, names: dict[str, Any], ranges: bool) -> str:
        tests = [f"{value}.__class__ is {_named(self._python, names)}", *self._shape_tests(value)]
        for number, (read, fit) in enumerate(self._reads(value)):
            variable = f"x{number}"
            test = fit.test(variable, names, ranges)
            if not fit.scalar or test == "False":
                test = f"{_named(fit, names)}.normal({variable}) is {variable}"
            first, rest = test.split(variable, 1)
            tests.append(f"{first}({variable} := {read}){rest}" if variable in rest else f"{first}{read}{rest}")
        if self.does_more:
            tests.append(f"{_named(self.remade_misfit, names)}(({value},)) is None")
        return " and ".join(tests)

    def clause_test(self, value: str, names: dict[str, Any]) -> str:
        fields = [fit.clause_test(read, names) if fit.scalar else "False" for read, fit in self._reads(value)]
        if self.does_more or "False" in fields:
            return "False"
        of_class = f"{value}.__class__ is {_named(self._python, names)}"
        return self._or_none(value, " and ".join([of_class, *self._shape_tests(value), *fields]))

    def _reads(self, value: str) -> list[tuple[str, Fit]]:
        reads = [f"{value}[{i}]" if self.by_position else f"{value}.{name}" for i, name in enumerate(self._names)]
        return list(zip(reads, (fit for _, fit in self.fields), strict=True))

    def _shape_tests(self, value: str) -> list[str]:
        count = len(self._names)
        if self.by_position:
            return [f"len({value}) == {count}"] if self._python is tuple else []
        more = not self.does_more and not self._frozen and self._python.__dictoffset__
        return [f"len({value}.__dict__) == {count}"] if more else []

    def are_normal(self, values: Collection[Any]) -> bool:
        if not self.are_bare(values):
            return super().are_normal(values)
        columns: Iterable[Collection[Any]] = (
            zip(*values, strict=True)
            if self.by_position
            else (list(map(get, values)) for get in map(attrgetter, self._names))
        )
        return all(fit.are_normal(column) for (_, fit), column in zip(self.fields, columns, strict=True))

    def are_bare(self, values: Collection[Any]) -> bool:
        """Whether these are records of the very class, with nothing but fields."""
        if self.does_more or set(map(type, values)) != {self._python}:
            return False
        if self.by_position:
            return self._python is not tuple or set(map(len, values)) == {len(self._names)}
        return self._frozen or not hasattr(next(iter(values)), "__dict__") or not self._has_more(values)

    def _has_more(self, values: Iterable[Any]) -> bool:
        """Whether a record has attributes that are no fields; they are not stored."""
        return set(map(len, map(vars, values))) != {len(self._names)}

    def _form(self, value: Any) -> Any:
        misfit = self.shape_misfit((value,), {type(value)})
        if misfit is not None:
            raise UnfitError(misfit)
        values = value if self.by_position else [getattr(value, name) for name in self._names]
        parts = []
        for field_value, (path, fit) in zip(values, self.fields, strict=True):
            try:
                parts.append(fit.normal(field_value))
            except UnfitError as error:
                raise error.at(path) from None
        if self.by_position:
            return tuple(parts) if self._python is tuple else tuple.__new__(self._python, parts)
        misfit = self.remade_misfit((value,))
        if misfit is not None:
            raise UnfitError(misfit)
        return self._python(**dict(zip(self._names, parts, strict=True)))

    def remade_misfit(self, values: Iterable[Any]) -> Misfit | None:
        """The first record that changes when it is made again from its fields, as it is where it is read."""
        if not self.does_more:
            return None
        for value in values:
            fields = {name: getattr(value, name) for name in self._names}
            arguments = fields | {name: fit.copied(fields[name]) for _, name, fit in self._mutable_fields}
            try:
                again = self._python(**arguments)
            except Exception as error:
                advice = f"it cannot be made again of its fields, as it is wherever it is read: {error!r}"
                return Misfit(value, self.name, advice=advice)
            if not all(_same(original, getattr(again, name)) for name, original in fields.items()):
                advice = (
                    f"made again of its fields, as it is wherever it is read, it is {again!r}; let {self.name} leave"
                    " fields as they are that it is given"
                )
                return Misfit(value, self.name, advice=advice)
        return None

    def copied(self, value: Any) -> Any:
        kind: Any = type(value)
        if kind is not self._python and not self._has_fields(kind):
            return value
        if self.by_position:
            return self._copied_tuple(value)
        record = _shallow(kind)(value)
        for _, name, fit in self._mutable_fields:
            _set(record, name, fit.copied(getattr(value, name)))
        return record

    def _copied_tuple(self, value: tuple[Any, ...]) -> Any:
        items = list(value)
        for i, _, fit in self._mutable_fields:
            if i < len(items):
                items[i] = fit.copied(items[i])
        return tuple.__new__(type(value), items)


def _loop(parameters: str, body: list[str], names: dict[str, Any]) -> Callable[..., Any]:
    """A loop that combines values; `names` are the names that its body uses."""
    lines = [
        f"def loop({parameters}):",
        "    try:",
        *(f"        {line}" for line in body),
        "    except UnfitError:",  # of a part of what was made; what makes a normal form says whose
        "        normal(result)",
        "        raise",
        "    return combined",
    ]
    names["UnfitError"] = UnfitError
    exec(compile("\n".join(lines), FOLD, "exec"), names)
    loop: Callable[..., Any] = names["loop"]
    return loop


def _named(thing: Any, names: dict[str, Any]) -> str:
    """Add an object to `names`, and return its name."""
    name = f"_{len(names)}"
    names[name] = thing
    return name


@lru_cache(maxsize=1024)
def _shallow(kind: type) -> Callable[[Any], Any]:
    """A function that copies a record of this class without calling its `__init__`."""
    if hasattr(kind, "__copy__") or any(getattr(base, "__slots__", ()) for base in kind.__mro__):
        return copy

    def copied(record: Any) -> Any:  # as copy does, in a third of its time
        clone: Any = object.__new__(kind)
        clone.__dict__.update(record.__dict__)
        return clone

    return copied


def _set(record: Any, name: str, value: Any) -> None:
    if isinstance(record, Struct):
        force_setattr(record, name, value)
    else:
        object.__setattr__(record, name, value)


class _ChoiceFit(Fit):
    def __init__(self, name: str, nullable: bool, members: list[Fit]) -> None:
        super().__init__(name, nullable, chain.from_iterable(m.exact for m in members))
        self._members = members
        self.mutable = any(m.mutable for m in members)
        self.grows = any(m.grows for m in members)
        self.scalar = all(m.scalar for m in members)

    def _misfit(self, values: Collection[Any], kinds: set[type]) -> Misfit | None:
        odd = kinds - self.exact
        return next(
            (Misfit(v, self.name) for v in values if type(v) in odd and all(m.misfit((v,)) for m in self._members)),
            None,
        )

    def _form(self, value: Any) -> Any:
        kind = type(value)
        for member in sorted(self._members, key=lambda m: kind not in m.exact):
            try:
                return member.normal(value)
            except UnfitError:
                pass
        raise UnfitError(Misfit(value, self.name))

    def copied(self, value: Any) -> Any:
        if not self.mutable or type(value) in self.exact:
            return value
        member = next((m for m in self._members if m.mutable and m.misfit((value,)) is None), None)
        return value if member is None else member.copied(value)


class _EnumFit(Fit):
    """Members of an enum. A plain value does not fit, not even the value of a member."""

    scalar = True

    def __init__(self, cls: type[Enum], nullable: bool) -> None:
        super().__init__(cls.__name__, nullable, {cls})
        self._cls = cls

    def _test(self, value: str, names: dict[str, Any], ranges: bool) -> str:
        return f"{value}.__class__ is {_named(self._cls, names)}"

    def _misfit(self, values: Collection[Any], kinds: set[type]) -> Misfit | None:
        misfit = self._refused(values, kinds - self.exact)
        return None if misfit is None else replace(misfit, advice=f"use a member, such as {next(iter(self._cls))}")


class _LiteralFit(Fit):
    scalar = True

    def __init__(self, name: str, nullable: bool, allowed: Collection[Any]) -> None:
        super().__init__(name, nullable)
        self._allowed = {(type(value), value) for value in allowed}

    def _misfit(self, values: Collection[Any], kinds: set[type]) -> Misfit | None:
        return next((Misfit(v, self.name) for v in values if (type(v), v) not in self._allowed), None)


def class_of(info: mi.NamedTupleType | mi.DataclassType | mi.StructType) -> Any:
    """The function that makes records of an inspected class; for a generic class with its types, the class."""
    return get_origin(info.cls) or info.cls


def fit_of(info: mi.Type, codec: Codec, widens: bool) -> Fit:
    """The check that values are of a type, as msgspec inspected it.

    With `widens` another type fits where nothing is lost: an `int` for a `float` or `Decimal`, where the codec itself
    refuses an int that they cannot hold, and a record of another class with the same fields.
    """
    return _Builder(codec, widens).of(info)


class _Builder:
    def __init__(self, codec: Codec, widens: bool) -> None:
        self._codec, self._widens = codec, widens
        self._records: dict[tuple[int, bool], RecordFit] = {}

    def of(self, info: mi.Type, nullable: bool = False) -> Fit:
        while isinstance(info, mi.Metadata):
            info = info.type
        if isinstance(info, mi.UnionType):
            members = [t for t in info.types if not isinstance(t, mi.NoneType)]
            nullable = nullable or len(members) < len(info.types)
            if len(members) == 1:
                return self.of(members[0], nullable)
            return _ChoiceFit(" | ".join(map(described, members)), nullable, [self.of(t) for t in members])
        scalar = _SCALARS.get(type(info))
        if scalar is not None:
            exact = {scalar.python, int} if self._widens and scalar.python in (float, Decimal) else {scalar.python}
            if isinstance(info, mi.DateTimeType):
                return _MomentFit(info, scalar, nullable, exact, self._codec)
            return _ScalarFit(info, scalar, nullable, exact, self._codec)
        if isinstance(info, (mi.ListType, mi.VarTupleType, mi.SetType, mi.FrozenSetType)):
            container = {mi.ListType: list, mi.VarTupleType: tuple, mi.SetType: set, mi.FrozenSetType: frozenset}[
                type(info)
            ]
            return _ItemsFit(described(info), nullable, container, self.of(info.item_type))
        if isinstance(info, mi.DictType):
            return _DictFit(described(info), nullable, self.of(info.key_type), self.of(info.value_type))
        if isinstance(info, mi.TupleType):
            names = tuple(f"f{i}" for i in range(len(info.item_types)))
            fit = RecordFit(described(info), nullable, tuple, names, self._widens)
            fit.complete([(f"[{i}]", self.of(t)) for i, t in enumerate(info.item_types)])
            return fit
        if isinstance(info, (mi.NamedTupleType, mi.DataclassType, mi.StructType)):
            return self._record(info, nullable)
        return self._other(info, nullable)

    def _record(self, info: mi.NamedTupleType | mi.DataclassType | mi.StructType, nullable: bool) -> RecordFit:
        fit = self._records.get((id(info), nullable))
        if fit is None:
            names = tuple(f.name for f in info.fields)
            fit = self._records[(id(info), nullable)] = RecordFit(
                described(info), nullable, class_of(info), names, self._widens
            )
            fit.complete([(f".{f.name}", self.of(f.type)) for f in info.fields])
        return fit

    def _other(self, info: mi.Type, nullable: bool) -> Fit:
        if isinstance(info, mi.NoneType):
            return _LiteralFit("None", True, ())
        if isinstance(info, mi.EnumType):
            return _EnumFit(info.cls, nullable)
        if isinstance(info, mi.LiteralType):
            return _LiteralFit(described(info), nullable, info.values)
        return _ScalarFit(info, _ANYTHING, True, {int, float, str, bool, bytes}, self._codec)


def python_of(info: mi.Type) -> Any:
    """The type to decode a scalar to."""
    scalar = _SCALARS.get(type(info))
    return scalar.python if scalar is not None else getattr(info, "cls", Any)


def described(info: mi.Type) -> str:
    """A type as its author would write it."""
    while isinstance(info, mi.Metadata):
        info = info.type
    scalar = _SCALARS.get(type(info))
    if scalar is not None:
        return scalar.python.__name__
    if isinstance(info, mi.UnionType):
        return " | ".join(map(described, info.types))
    if isinstance(info, mi.TupleType):
        return f"tuple[{', '.join(map(described, info.item_types))}]"
    if isinstance(info, mi.VarTupleType):
        return f"tuple[{described(info.item_type)}, ...]"
    if isinstance(info, (mi.ListType, mi.SetType, mi.FrozenSetType)):
        return f"{type(info).__name__.removesuffix('Type').lower()}[{described(info.item_type)}]"
    if isinstance(info, mi.DictType):
        return f"dict[{described(info.key_type)}, {described(info.value_type)}]"
    if isinstance(info, mi.LiteralType):
        return f"Literal[{', '.join(map(repr, info.values))}]"
    cls = getattr(info, "cls", None)
    if cls is not None:
        return str(cls).replace("typing.", "") if get_args(cls) else cls.__name__
    return type(info).__name__.removesuffix("Type")


def is_count(value: object, least: int) -> bool:
    """Whether a value is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_count(what: str, value: object) -> None:
    """Raise `PipelineError` unless `value` is a whole number of at least 1."""
    if not is_count(value, 1):
        raise PipelineError(f"{what} must be a whole number of at least 1, not {value!r}")
