"""Record types: how a Python class or value becomes Arrow columns and comes back.

A record is an instance of an annotated class (`NamedTuple` first; dataclasses and `msgspec.Struct` too) or a plain
Python value with a stated type, such as `int` or `tuple[str, int]` (whose columns are `f0`, `f1`, as in Flink's
tuples). msgspec's type inspection does the introspection; this module maps what it finds to Arrow types and converts in
whole columns.

A leaf module: knows no graph, no engine and no Spark.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import operator
import struct
import textwrap
import types
import typing
from collections.abc import Callable, Collection
from datetime import date, datetime, timedelta
from enum import Enum
from functools import cached_property, lru_cache
from itertools import pairwise, repeat, starmap
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from msgspec import Struct
from msgspec import inspect as mi

from dagster_unified.arrow_types import forbidden_null, python_values
from dagster_unified.errors import LoweringError, RecordTypeError
from dagster_unified.values import Fit, Misfit, RecordFit, UnfitError, class_of, described, fit_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Decoder = Callable[[Any], Any]
Copy = Callable[[Any], Any]

VALUE = "value"
"""The column of a record that is a plain value."""

RESERVED = "__"
"""Column names that begin so belong to the library."""

UNITED = "__united__"
"""The attribute of a class for records of two streams, with its name for people, such as `Order | Payment`."""

_SCALARS: dict[type, pa.DataType] = {
    mi.StrType: pa.string(),
    mi.IntType: pa.int64(),
    mi.FloatType: pa.float64(),
    mi.BoolType: pa.bool_(),
    mi.BytesType: pa.binary(),
    mi.DateType: pa.date32(),
    mi.DecimalType: pa.decimal128(38, 18),
    mi.TimeDeltaType: pa.duration("us"),
}


class _NotRead:
    def __repr__(self) -> str:
        return "(not read)"


NOT_READ = _NotRead()
"""The value of a field that nobody looks at."""


@dataclasses.dataclass(frozen=True)
class RecordType:
    """A record's Python type and its Arrow schema.

    `shape` says how columns become records: `class` (an annotated class), `tuple` (a plain tuple), `value` (one
    column). Timestamps come back as aware datetimes in UTC; a naive datetime that a function returns is taken as UTC.
    """

    python: Any
    shape: str
    schema: pa.Schema

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.schema.names)

    @property
    def descriptions(self) -> dict[str, str]:
        """What the author says of fields: `Annotated[int, Meta(description="…")]`, or a docstring below the field."""
        if self.shape != "class":
            return {}
        hints = typing.get_type_hints(self.python, include_extras=True)
        said = {name: _said(getattr(hints.get(name), "__metadata__", ())) for name in self.names}
        return {**_docstrings(self.python), **{name: text for name, text in said.items() if text}}

    def describe(self) -> str:
        """`Flight(carrier: string, dep_delay: double?)`, for plans and messages."""
        united = getattr(self.python, UNITED, None)
        if united is not None:
            return str(united)
        fields = ", ".join(f"{f.name}: {f.type}{'?' if f.nullable else ''}" for f in self.schema)
        return f"{type_name(self.python)}({fields})"

    def records(self, columns: Sequence[Sequence[Any]]) -> list[Any]:
        """Records from columns of Python values, each column a list of equal length."""
        if self.shape == "value":
            return list(columns[0])
        rows = zip(*columns, strict=True)
        return list(rows) if self.shape == "tuple" else list(self._construct(rows))

    def record(self, values: tuple[Any, ...]) -> Any:
        """One record from the values of its fields."""
        if self.shape == "value":
            return values[0]
        return values if self.shape == "tuple" else next(iter(self._construct((values,))))

    def _construct(self, rows: Iterable[tuple[Any, ...]]) -> Iterable[Any]:
        if issubclass(self.python, tuple):
            # The generated `_make` is a Python call per record; this stays in C.
            return starmap(tuple.__new__, zip(repeat(self.python), rows, strict=False))
        if self._takes_fields_in_order:
            return starmap(self.python, rows)
        names = self.names
        return (self.python(**dict(zip(names, row, strict=True))) for row in rows)

    @cached_property
    def _takes_fields_in_order(self) -> bool:
        """Whether the class takes its fields by their places, in the order of the columns."""
        parameters = inspect.signature(self.python).parameters.values()
        by_place = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        return tuple(by_place) == self.names

    def columns(self, records: Sequence[Any]) -> list[Sequence[Any]]:
        """The inverse of `records`."""
        if self.shape == "value":
            return [records]
        if not records:
            return [[] for _ in self.schema]
        if self.shape == "tuple" or issubclass(self.python, tuple):
            return list(zip(*records, strict=True))
        return [list(map(get, records)) for get in map(operator.attrgetter, self.names)]

    def to_batch(self, records: Sequence[Any]) -> pa.RecordBatch:
        """Records as one Arrow batch; raises `RecordTypeError` naming the field and the value that does not fit."""
        self._check_shape(records)
        columns = self.columns(records)
        arrays = [self._array(i, column, records) for i, column in enumerate(columns)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def plain_batch(self, records: Sequence[Any]) -> pa.RecordBatch | None:
        """As `to_batch`, of records that are plainly in normal form; None where that takes a look at each value."""
        if not all(column.fit.has_one_form for column in _columns(self.python)):
            return None
        if self.shape != "value" and not _shape_check(self.python).are_bare(records):
            return None
        arrays = []
        for index, values in enumerate(self.columns(records)):
            array = self.plain_column(index, values)
            if array is None:
                return None
            arrays.append(array)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def check(self, records: Sequence[Any]) -> None:
        """Raise what `to_batch` raises for values of another type."""
        self._check_shape(records)
        for i, column in enumerate(self.columns(records)):
            self._raise_misfit(i, _columns(self.python)[i].fit.misfit(column), records)

    def _check_shape(self, records: Sequence[Any]) -> None:
        if self.shape == "value":
            return
        shape = _shape_check(self.python)
        if shape.does_more:
            self._check_remade(shape, records)
        if operator.countOf(map(type, records), self.python) == len(records):
            return
        misfit = shape.shape_misfit(records, set(map(type, records)))
        if misfit is not None:
            actual, expected = type(misfit.value), type_name(self.python)
            remedy = f"make it {expected}(**record), or" if issubclass(actual, dict) else "convert it, or"
            raise RecordTypeError(
                f"expected a {self.describe()}, got {shorten(misfit.value)}"
                f" ({type_name(actual)}); {remedy} change the declared type"
            )

    def _check_remade(self, shape: RecordFit, records: Sequence[Any]) -> None:
        misfit = shape.remade_misfit(record for record in records if type(record) is self.python)
        if misfit is not None:
            raise RecordTypeError(f"{shorten(misfit.value)}: {misfit.advice}")

    def _array(self, index: int, values: Sequence[Any], records: Sequence[Any]) -> pa.Array:
        column, arrow = _columns(self.python)[index], self.schema.field(index).type
        try:
            array = column.plain(values, arrow)
            if array is not None:
                return array
            self._raise_misfit(index, column.fit.misfit(values), records)
            return column.encoded(values, arrow)
        except _REFUSED as error:
            raise self._misfit(index, values, records, error) from error

    def _raise_misfit(self, index: int, misfit: Misfit | None, records: Sequence[Any]) -> None:
        if misfit is None:
            return
        values = self.columns(records)[index]
        fit = _columns(self.python)[index].fit
        record = next(record for record, value in zip(records, values, strict=True) if fit.misfit((value,)) is not None)
        subject, whole = self._subject(index, misfit, record)
        if misfit.value is None:
            raise RecordTypeError(
                f"{subject} is None{whole}, and its type, {misfit.declared}, does not allow None; {misfit.remedy()}"
            )
        raise RecordTypeError(
            f"{subject} is declared {misfit.declared}, and is {shorten(misfit.value)}"
            f" ({type_name(type(misfit.value))}){whole}; {misfit.remedy()}"
        )

    def _misfit(self, index: int, values: Sequence[Any], records: Sequence[Any], cause: Exception) -> RecordTypeError:
        """The error for a value that Arrow refuses although its type is right, such as an int beyond 64 bits."""
        for value, record in zip(values, records, strict=True):
            error = self._beyond(index, value, record)
            if error is not None:
                return error
        return RecordTypeError(f"records do not fit {self.describe()}: {cause}")

    def from_batch(self, batch: pa.RecordBatch) -> list[Any]:
        """The records of an Arrow batch whose first columns are this type's.

        Raises `RecordTypeError` for a null where the type does not allow None, such as one of a file.
        """
        self.check_nulls(batch)
        columns = [self.values(number, batch.column(number)) for number in range(len(self.names))]
        return self.records(columns)

    def partly_read(self, batch: pa.RecordBatch, fields: Collection[int]) -> list[Any]:
        """As `from_batch`, for one who looks at no other fields than these. Others may have a column of type null."""
        self.check_others(batch, fields)
        unread = [NOT_READ] * batch.num_rows
        columns = enumerate(batch.columns)
        return self.records([self.values(number, column) if number in fields else unread for number, column in columns])

    def values(self, index: int, column: pa.Array) -> list[Any]:
        """The values of a field from its column, whose nulls are checked.

        Raises `LoweringError` for a column of type null, which stands for one that nobody was to read.
        """
        if self.lacks(index, column):
            raise LoweringError(f"field '{self.names[index]}' of {type_name(self.python)} is read, and was left out")
        try:
            values = python_values(column)
        except OverflowError as error:
            raise RecordTypeError(
                f"field '{self.names[index]}' of {type_name(self.python)}: a value is a time outside of the years 1 to"
                " 9999, which times are in; give another value for it where it comes from"
            ) from error
        decode = _decoders(self.python)[index]
        return values if decode is None else self._decoded(index, decode, values)

    def lacks(self, index: int, column: pa.Array) -> bool:
        """Whether a column, of type null, stands for a field that was left out."""
        return pa.types.is_null(column.type) and not pa.types.is_null(self.schema.types[index])

    def is_checked_by_columns(self, index: int) -> bool:
        """Whether an expression on columns can say if a field's values can be read."""
        kinds = (*_ALWAYS_READABLE, pa.types.is_string, pa.types.is_timestamp, pa.types.is_date)
        is_plain = any(is_such(self.schema.types[index]) for is_such in kinds)
        return is_plain and _decoders(self.python)[index] is None

    def partial_batch(self, columns: Sequence[pa.Array]) -> pa.RecordBatch:
        """Columns as a batch, some of which may be of type null, since their fields were left out."""
        if not any(pa.types.is_null(column.type) for column in columns):
            return pa.RecordBatch.from_arrays(columns, schema=self.schema)
        return pa.RecordBatch.from_arrays(columns, names=self.names)

    def check_readable(self, index: int, column: pa.Array) -> None:
        """Raise an error where reading a field from its column raises one, without reading all of it."""
        if self.lacks(index, column):
            return
        if pa.types.is_string(column.type) and _decoders(self.python)[index] is None:
            column.validate(full=True)
        elif not any(is_such(column.type) for is_such in _ALWAYS_READABLE):
            self.values(index, column)

    def check_others(self, batch: pa.RecordBatch, read: Collection[int]) -> None:
        """Raise an error where reading a batch raises one, but for values of the fields that are read besides."""
        self.check_nulls(batch)
        for index, column in enumerate(batch.columns):
            if index not in read:
                self.check_readable(index, column)

    def plain_column(self, index: int, values: Sequence[Any]) -> pa.Array | None:
        """A field's values in Arrow's form, where all are of the very type, and so of it in normal form; else None.

        Times have to be in UTC.
        """
        column = _columns(self.python)[index]
        if not column.fit.has_one_form and column.kind is not datetime:
            return None
        try:
            return column.plain(values, self.schema.types[index])
        except _REFUSED:
            return None

    def column(self, index: int, values: Sequence[Any]) -> pa.Array:
        """A field's values in Arrow's form, which are in normal form."""
        column, kind = _columns(self.python)[index], self.schema.types[index]
        plain = column.plain(values, kind)
        return column.encoded(values, kind) if plain is None else plain

    def check_nulls(self, batch: pa.RecordBatch) -> None:
        """Raise `RecordTypeError` for a null where the type does not allow None."""
        for i, info in _required(self.python):
            column = batch.column(i)
            path = None if self.lacks(i, column) else forbidden_null(column, info)
            if path is not None:
                raise RecordTypeError(
                    f"field '{self.names[i]}{path}' of {type_name(self.python)} is null, and its type does not allow"
                    " None; declare it optional (`| None`), or leave such rows out before"
                )

    @cached_property
    def fit(self) -> Fit:
        """The check that a record is of this type; it also makes the normal form."""
        return _columns(self.python)[0].fit if self.shape == "value" else _shape_check(self.python)

    def normal(self, record: Any) -> Any:
        """The normal form of a record, which it has once it was in columns. Raises `RecordTypeError` as `check`."""
        try:
            return self.fit.normal(record)
        except UnfitError as error:
            raise self._refusal(record, error.misfit) from None

    def all_normal(self, records: list[Any]) -> list[Any]:
        """The normal forms of some records; the list itself where all are in normal form."""
        return records if self.fit.are_normal(records) else list(map(self.normal, records))

    @cached_property
    def normal_in_chain(self) -> Callable[[list[Any]], list[Any]]:
        """The normal forms of some records, as a chain of functions makes them: it asks for classes, not for ranges."""
        names: dict[str, Any] = {"normal": self.normal}
        test = self.fit.clause_test("value", names)
        made: Callable[[list[Any]], list[Any]] = eval(
            f"lambda values: [value if {test} else normal(value) for value in values]", names
        )
        return made

    def _refusal(self, record: Any, misfit: Misfit) -> RecordTypeError:
        try:
            self.check([record])
        except RecordTypeError as error:
            return error
        errors = (self._beyond(i, value, record) for i, (value,) in enumerate(self.columns([record])))
        return next(filter(None, errors), RecordTypeError(f"{shorten(record)}: {misfit.advice}"))

    def _beyond(self, index: int, value: Any, record: Any) -> RecordTypeError | None:
        """The error for a value of the declared type that the type cannot hold."""
        try:
            _columns(self.python)[index].fit.normal(value)
        except UnfitError as error:
            misfit = error.misfit
            subject, whole = self._subject(index, misfit, record)
            return RecordTypeError(
                f"{subject} is declared {misfit.declared}, and cannot hold {shorten(misfit.value)}{whole};"
                f" {misfit.remedy()}"
            )
        return None

    def _subject(self, index: int, misfit: Misfit, record: Any) -> tuple[str, str]:
        """How an error names the field of a value, and the record that it is in."""
        if self.shape == "value" and not misfit.path:
            return "the value", ""
        path, owner = f"{self.names[index]}{misfit.path}", type_name(self.python)
        if hasattr(self.python, UNITED):
            _, _, path = path.partition(".")
            record, owner = record[record.side], type_name(type(record[record.side]))
        return f"field '{path}' of {owner}", f" in {shorten(record)}"

    @cached_property
    def copier(self) -> Copy | None:
        """A function that copies a record so that changes of one do not change the other; None for immutable records.

        The copy is in normal form. A record that does not fit is copied as it is, and refused where it is emitted.
        """
        return _Copier(self.fit) if self.fit.mutable else None

    def check_members(self, batch: pa.RecordBatch) -> None:
        """Raise `RecordTypeError` for a value in an enum's column that no member has."""
        for i, (info, decode) in enumerate(zip(_inspected_columns(self.python), _decoders(self.python), strict=True)):
            if decode is not None and holds(info, mi.EnumType):
                column = batch.column(i)
                self._decoded(i, decode, (column if pa.types.is_nested(column.type) else column.unique()).to_pylist())

    @property
    def types(self) -> tuple[mi.Type, ...]:
        """The inspected type of each column."""
        return _inspected_columns(self.python)

    def members(self) -> dict[str, type[Enum]]:
        """The enum of each column that holds one."""
        columns = zip(self.names, _inspected_columns(self.python), strict=True)
        return {name: enum for name, info in columns if (enum := _enum_of(info)) is not None}

    def _decoded(self, index: int, decode: Decoder, values: list[Any]) -> list[Any]:
        try:
            return [None if v is None else decode(v) for v in values]
        except RecordTypeError as error:
            raise RecordTypeError(f"field '{self.names[index]}' of {type_name(self.python)}: {error}") from error

    def type_of(self, name: str) -> Any:
        """A field's annotation."""
        index = self.names.index(name)
        if self.shape == "value":
            return self.python
        return (
            typing.get_args(self.python)[index]
            if self.shape == "tuple"
            else typing.get_type_hints(self.python, include_extras=True)[name]
        )

    def getter(self, name: str) -> Callable[[Any], Any]:
        """A function that reads one field of a record. Can be pickled."""
        if self.shape == "value":
            return _itself
        return operator.itemgetter(self.names.index(name)) if self.shape == "tuple" else operator.attrgetter(name)

    def decoder_of(self, name: str) -> Decoder | None:
        """A function that turns one field's Arrow value into the record's; None where they are the same."""
        return _decoders(self.python)[self.names.index(name)]

    def __reduce__(self) -> tuple[object, ...]:
        return (RecordType, (self.python, self.shape, self.schema))


class _Copier:
    """Copies records of a type, in their normal form."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit

    def __call__(self, record: Any) -> Any:
        try:
            return self._fit.copied(self._fit.normal(record))
        except UnfitError:
            return self._fit.copied(record)


def _itself(value: Any) -> Any:
    return value


_REFUSED = (pa.ArrowInvalid, pa.ArrowTypeError, struct.error, OverflowError, TypeError, ValueError)
"""Errors of Arrow for a value that it rejects."""

_ALWAYS_READABLE = (pa.types.is_int64, pa.types.is_float64, pa.types.is_boolean, pa.types.is_binary)

RANGE_OF_TIMES = tuple(
    (moment - datetime(1970, 1, 1)) // timedelta(microseconds=1) for moment in (datetime.min, datetime.max)
)
"""The first and the last time, in microseconds since the epoch."""

RANGE_OF_DATES = tuple((day - date(1970, 1, 1)).days for day in (date.min, date.max))
"""The first and the last date, in days since the epoch."""


@dataclasses.dataclass(frozen=True)
class _Column:
    """How one column's values are checked and converted for Arrow."""

    fit: Fit
    encode: Decoder | None
    kind: type | None
    """The one type of values that need no look at them."""
    code: str
    """The code of `struct` for values that can be laid out as they are.

    This is faster than Arrow's own conversion, by more than the check costs.
    """

    def plain(self, values: Sequence[Any], arrow: pa.DataType) -> pa.Array | None:
        """The column, where all its values are plainly of the declared type."""
        if self.kind is None:
            return None
        size = len(values)
        plain = operator.countOf(map(type, values), self.kind)
        if plain == size and self.code:
            return pa.Array.from_buffers(arrow, size, [None, pa.py_buffer(struct.pack(f"{size}{self.code}", *values))])
        if plain < size and self.fit.nullable:
            plain += operator.countOf(map(type, values), types.NoneType)
        if plain < size:
            return None
        array = pa.array(values, arrow)
        return array if not pa.types.is_timestamp(arrow) or _has_moments(array) else None

    def encoded(self, values: Sequence[Any], arrow: pa.DataType) -> pa.Array:
        """The column, by Arrow's own conversion."""
        return pa.array(values if self.encode is None else list(map(self.encode, values)), arrow)


def _has_moments(column: pa.Array) -> bool:
    """Whether Python's datetimes can represent all of these."""
    import pyarrow.compute as pc  # slow to load, and a pipeline is built without it

    first, last = pc.min_max(column).values()
    earliest, latest = RANGE_OF_TIMES
    return not first.is_valid or (first.value >= earliest and last.value <= latest)


@lru_cache(maxsize=1024)
def _columns(python: Any) -> tuple[_Column, ...]:
    return tuple(map(_column, _inspected_columns(python)))


def _column(info: mi.Type) -> _Column:
    fit = fit_of(info, _through_arrow, widens=True)
    return _Column(
        fit, encoder_of(info), fit.kind, {int: "q", float: "d"}.get(fit.kind, "") if fit.kind is not None else ""
    )


@lru_cache(maxsize=1024)
def _shape_check(python: Any) -> RecordFit:
    fit = fit_of(mi.type_info(python), _through_arrow, widens=True)
    assert isinstance(fit, RecordFit)
    return fit


def _through_arrow(info: mi.Type, values: list[Any]) -> list[Any]:
    return python_values(pa.array(values, arrow_type(info, "")))


@lru_cache(maxsize=1024)
def _inspected_columns(python: Any) -> tuple[mi.Type, ...]:
    info = mi.type_info(python)
    if isinstance(info, (mi.NamedTupleType, mi.DataclassType, mi.StructType)):
        return tuple(f.type for f in info.fields)
    return info.item_types if isinstance(info, mi.TupleType) else (info,)


@lru_cache(maxsize=1024)
def _required(python: Any) -> tuple[tuple[int, mi.Type], ...]:
    """The columns that hold no null, or values of which a part holds none."""
    fields = zip(record_type(python).schema, _inspected_columns(python), strict=True)
    return tuple((i, info) for i, (f, info) in enumerate(fields) if not f.nullable or pa.types.is_nested(f.type))


@lru_cache(maxsize=1024)
def _decoders(python: Any) -> tuple[Decoder | None, ...]:
    """One function per column from Arrow's value to the annotation's; None where they are the same."""
    return tuple(map(decoder_of, _inspected_columns(python)))


def encoder_of(info: mi.Type) -> Decoder | None:
    """A function that turns a value of an inspected type, or None, into Arrow's; None where they are the same.

    Arrow takes nested named tuples, but not dataclasses and msgspec structs; those become dicts.
    """
    if isinstance(info, mi.Metadata):
        return encoder_of(info.type)
    if isinstance(info, mi.UnionType):
        return encoder_of(next(t for t in info.types if not isinstance(t, mi.NoneType)))
    if isinstance(info, (mi.DataclassType, mi.StructType, mi.NamedTupleType)):
        fields = [(f.name, encoder_of(f.type)) for f in info.fields]
        if isinstance(info, mi.NamedTupleType) and all(encode is None for _, encode in fields):
            return None
        return lambda v: None if v is None else {n: getattr(v, n) if e is None else e(getattr(v, n)) for n, e in fields}
    if isinstance(info, mi.TupleType):
        items = [(f"f{i}", encoder_of(t)) for i, t in enumerate(info.item_types)]
        if all(encode is None for _, encode in items):
            return None
        return lambda v: (
            None if v is None else {n: x if e is None else e(x) for (n, e), x in zip(items, v, strict=True)}
        )
    if isinstance(info, (mi.ListType, mi.VarTupleType)):
        item = encoder_of(info.item_type)
        return None if item is None else lambda v: None if v is None else [item(x) for x in v]
    if isinstance(info, mi.DictType):
        key, value = encoder_of(info.key_type), encoder_of(info.value_type)
        if key is None and value is None:
            return None
        return lambda v: (
            None
            if v is None
            else {(k if key is None else key(k)): x if value is None else value(x) for k, x in v.items()}
        )
    return (lambda v: None if v is None else v._value_) if isinstance(info, mi.EnumType) else None


def arrow_of(info: mi.Type) -> pa.DataType:
    """The Arrow type of an inspected type that may be None as well; raises `RecordTypeError` where there is none."""
    return _field(VALUE, info, "a value").type


def decoder_of(info: mi.Type) -> Decoder | None:
    """A function that turns Arrow's value into one of an inspected type; None where they are the same.

    Nested records come from Arrow as dicts, maps as lists of pairs.
    """
    if isinstance(info, mi.Metadata):
        return decoder_of(info.type)
    if isinstance(info, mi.UnionType):
        inner = decoder_of(next(t for t in info.types if not isinstance(t, mi.NoneType)))
        return None if inner is None else lambda v: None if v is None else inner(v)
    if isinstance(info, (mi.NamedTupleType, mi.DataclassType, mi.StructType)):
        return _struct_decoder(class_of(info), [(f.name, decoder_of(f.type)) for f in info.fields])
    if isinstance(info, mi.TupleType):
        items = [(f"f{i}", decoder_of(t)) for i, t in enumerate(info.item_types)]
        return _struct_decoder(lambda *values: values, items)
    if isinstance(info, (mi.ListType, mi.VarTupleType)):
        item = decoder_of(info.item_type)
        collect: Callable[[Iterable[Any]], Any] = tuple if isinstance(info, mi.VarTupleType) else list
        return None if item is None and collect is list else lambda v: collect(v if item is None else map(item, v))
    if isinstance(info, mi.DictType):
        key, value = decoder_of(info.key_type), decoder_of(info.value_type)
        return lambda v: {(k if key is None else key(k)): x if value is None or x is None else value(x) for k, x in v}
    return _Members(info.cls).__getitem__ if isinstance(info, mi.EnumType) else None


def _struct_decoder(make: Callable[..., Any], fields: list[tuple[str, Decoder | None]]) -> Decoder:
    return lambda v: make(
        *[v[name] if decode is None or v[name] is None else decode(v[name]) for name, decode in fields]
    )


def type_name(python: Any) -> str:
    """`Flight`, `tuple[str, int]`, `str | None`: a type as its author would write it."""
    if isinstance(python, type) and not typing.get_args(python):
        return python.__name__
    return str(python).replace("typing.", "")


def shorten(value: object, limit: int = 200) -> str:
    """`repr(value)`, cut to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def is_column(value: object) -> bool:
    """Whether it is an expression on columns: a recorded one, or one of Spark's."""
    return any(
        base.__name__ == "Column" and base.__module__.startswith(("pyspark.sql.", "dagster_unified.graph."))
        for base in type(value).__mro__
    )


def not_in_a_key(info: mi.Type) -> str | None:
    """The part of a type that no key can have, as it is mutable or has no fixed length; None where there is none."""
    if isinstance(info, (mi.ListType, mi.DictType, mi.VarTupleType)):
        return described(info)
    if isinstance(info, (mi.NamedTupleType, mi.DataclassType, mi.StructType)) and class_of(info).__hash__ is None:
        return type_name(info.cls)
    return next(filter(None, map(not_in_a_key, _inner(info))), None)


def equal_by_more(info: mi.Type) -> str | None:
    """The class in a key's type whose records are not equal by exactly their fields; None without one.

    Columns and encodings know only fields: keys that are equal to Python would be two to them.
    """
    if isinstance(info, (mi.NamedTupleType, mi.DataclassType, mi.StructType)) and not _equal_by_fields(class_of(info)):
        return type_name(info.cls)
    return next(filter(None, map(equal_by_more, _inner(info))), None)


def _equal_by_fields(cls: type[Any]) -> bool:
    """Whether a class of records has the generated `==` over all its fields."""
    if issubclass(cls, tuple):
        return cls.__eq__ is tuple.__eq__
    if issubclass(cls, Struct):
        return cls.__struct_config__.eq and cls.__eq__ is Struct.__eq__
    code = getattr(cls.__eq__, "__code__", None)
    generated = code is not None and code.co_filename == "<string>"  # as `dataclass` makes methods
    return generated and all(field.compare for field in dataclasses.fields(cls))


def is_model(info: mi.Type) -> bool:
    """Whether a type is a pydantic model; does not import pydantic."""
    return isinstance(info, mi.CustomType) and hasattr(info.cls, "__pydantic_fields__")


def instead_of_model(info: mi.Type) -> str:
    """The advice for a pydantic model."""
    return (
        f"{described(info)} is a pydantic model, and making one for every record takes ten times as long as a"
        " NamedTuple; declare a NamedTuple, or, where each record has to be validated, a pydantic.dataclasses.dataclass"
    )


def inspected(python: Any, where: str, use: str) -> mi.Type:
    """msgspec's inspection of a type that an author gave; raises `RecordTypeError` for one that is no type.

    `use` says what it is for.
    """
    if isinstance(python, str):
        raise RecordTypeError(f"{where}: the type is the text {python!r}; give the type itself, without quotes")
    try:
        return mi.type_info(python)
    except (TypeError, NameError) as error:
        raise RecordTypeError(f"{where}: {type_name(python)} cannot be used as {use}: {error}") from error


def record_type(python: Any, where: str = "record") -> RecordType:
    """The `RecordType` of an annotated class or a plain type.

    Raises `RecordTypeError` that begins with `where` and names the field when a type cannot be expressed.
    """
    if isinstance(python, RecordType):
        return python
    if python is None or python is type(None):
        raise RecordTypeError(
            f"{where}: None is not a record type; a function that gives no records should be a filter or a sink"
        )
    info = inspected(python, where, "a record type")
    try:
        return _record_type(python, info, where)
    except RecursionError:
        raise RecordTypeError(
            f"{where}: {type_name(python)} has records of its own type, however deep, which no columns hold; give them"
            " an id of what they belong to, or make a text of them"
        ) from None


def _record_type(python: Any, info: mi.Type, where: str) -> RecordType:
    if isinstance(info, (mi.NamedTupleType, mi.DataclassType, mi.StructType)):
        if typing.get_origin(python) is not None:
            name = class_of(info).__name__
            raise RecordTypeError(
                f"{where}: {type_name(python)} is no class of its own, which a record's type has to be; declare one,"
                f" such as `class Of{name}({type_name(python)})`, or use a class that is not generic"
            )
        fields = [_field(f.name, f.type, f"{where}: field '{f.name}' of {type_name(python)}") for f in info.fields]
        _check_cases(fields, f"{where}: {type_name(python)}")
        computed = next((f.name for f in _dataclass_fields(python) if not f.init), None)
        if computed is not None:
            raise RecordTypeError(
                f"{where}: field '{computed}' of {type_name(python)} has init=False, so that no record is made of its"
                " columns; make it a property, or an argument with a default"
            )
        if not fields:
            raise RecordTypeError(f"{where}: {type_name(python)} has no fields")
        return RecordType(python, "class", pa.schema(fields))
    if isinstance(info, mi.TupleType):
        fields = [
            _field(f"f{i}", t, f"{where}: item {i} of {type_name(python)}") for i, t in enumerate(info.item_types)
        ]
        return RecordType(python, "tuple", pa.schema(fields))
    if is_model(info):
        raise RecordTypeError(f"{where}: {instead_of_model(info)}")
    if isinstance(info, (mi.AnyType, mi.CustomType)) or python is dict or python is tuple:
        raise RecordTypeError(
            f"{where}: {type_name(python)} says nothing about the columns; use a NamedTuple or another annotated class,"
            " or a plain type such as int or tuple[str, int]"
        )
    return RecordType(python, "value", pa.schema([_field(VALUE, info, where)]))


def _dataclass_fields(python: Any) -> Iterable[dataclasses.Field[Any]]:
    return dataclasses.fields(python) if dataclasses.is_dataclass(python) else ()


def _field(name: str, info: mi.Type, where: str) -> pa.Field:
    if name.startswith(RESERVED):
        raise RecordTypeError(f"{where}: names that begin with '{RESERVED}' are reserved; rename the field")
    nullable = False
    if isinstance(info, mi.Metadata):
        return _field(name, info.type, where)
    if isinstance(info, mi.UnionType):
        members = [t for t in info.types if not isinstance(t, mi.NoneType)]
        nullable = len(members) < len(info.types)
        if len(members) != 1:
            raise RecordTypeError(
                f"{where}: a union of several types has no column type; use one type, or one field for each"
            )
        info = members[0]
    return pa.field(name, arrow_type(info, where), nullable=nullable)


def _check_cases(fields: Sequence[pa.Field], where: str) -> None:
    """Raise `RecordTypeError` where names differ only in case, which Spark and most tables ignore."""
    seen: dict[str, str] = {}
    for field in fields:
        other = seen.setdefault(field.name.lower(), field.name)
        if other != field.name:
            raise RecordTypeError(
                f"{where} has the fields '{other}' and '{field.name}', which are one column to Spark; rename one"
            )


def arrow_type(info: mi.Type, where: str) -> pa.DataType:
    """The Arrow type of one inspected msgspec type; raises `RecordTypeError` beginning with `where`."""
    if isinstance(info, mi.Metadata):
        info = info.type
    scalar = _SCALARS.get(type(info))
    if scalar is not None:
        return scalar
    if isinstance(info, mi.DateTimeType):
        return pa.timestamp("us") if info.tz is False else pa.timestamp("us", "UTC")
    if isinstance(info, (mi.ListType, mi.VarTupleType)):
        return pa.list_(_field("element", info.item_type, where).with_name("element"))
    if isinstance(info, mi.DictType):
        value = _field("value", info.value_type, where)
        return pa.map_(arrow_type(info.key_type, where), value.type)
    if isinstance(info, mi.TupleType):
        return pa.struct([_field(f"f{i}", t, where) for i, t in enumerate(info.item_types)])
    if isinstance(info, (mi.NamedTupleType, mi.DataclassType, mi.StructType)):
        fields = [_field(f.name, f.type, f"{where}.{f.name}") for f in info.fields]
        _check_cases(fields, where)
        return pa.struct(fields)
    if isinstance(info, mi.EnumType):
        return pa.string() if isinstance(next(iter(info.cls)).value, str) else pa.int64()  # msgspec takes no others
    if isinstance(info, mi.LiteralType):
        raise RecordTypeError(f"{where}: a Literal has no column type; declare an Enum, or str or int")
    if is_model(info):
        raise RecordTypeError(f"{where}: {instead_of_model(info)}")
    if isinstance(info, mi.AnyType):
        raise RecordTypeError(
            f"{where}: Any has no column type, nor has a dict, a list or a tuple without the types of its items: write"
            " dict[str, int], list[int] or tuple[str, int]; give values of several types a class of their own, or keep"
            " them as text (json.dumps)"
        )
    raise RecordTypeError(f"{where}: no column type for {described(info)}; use one of {', '.join(SUPPORTED)}")


def _enum_of(info: mi.Type) -> type[Enum] | None:
    """The enum that a type is, which may be None as well."""
    if isinstance(info, mi.Metadata):
        return _enum_of(info.type)
    if isinstance(info, mi.UnionType):
        return _enum_of(next(t for t in info.types if not isinstance(t, mi.NoneType)))
    return info.cls if isinstance(info, mi.EnumType) else None


def holds(info: mi.Type, kind: type[mi.Type]) -> bool:
    """Whether values of a type may contain one of a kind, such as an enum."""
    return isinstance(info, kind) or any(holds(inner, kind) for inner in _inner(info))


def _inner(info: mi.Type) -> tuple[mi.Type, ...]:
    if isinstance(info, mi.Metadata):
        return (info.type,)
    if isinstance(info, mi.UnionType):
        return info.types
    if isinstance(info, (mi.NamedTupleType, mi.DataclassType, mi.StructType)):
        return tuple(field.type for field in info.fields)
    if isinstance(info, mi.TupleType):
        return info.item_types
    if isinstance(info, (mi.ListType, mi.VarTupleType)):
        return (info.item_type,)
    return (info.key_type, info.value_type) if isinstance(info, mi.DictType) else ()


class _Members(dict[Any, Enum]):
    def __init__(self, cls: type[Enum]) -> None:
        super().__init__((member.value, member) for member in cls)
        self._cls = cls

    def __missing__(self, value: Any) -> Enum:
        try:
            return self._cls(value)  # what `_missing_` gives, and combined flags
        except ValueError:
            listed = ", ".join(map(repr, self))
            raise RecordTypeError(f"{value!r} is not a value of {self._cls.__name__}, which has {listed}") from None


SUPPORTED = (
    "str",
    "int",
    "float",
    "bool",
    "bytes",
    "datetime",
    "date",
    "timedelta",
    "Decimal",
    "list[...]",
    "dict[..., ...]",
    "tuple[...]",
    "an Enum of str or int values",
    "a nested annotated class",
)


def return_type(function: Callable[..., Any]) -> Any | None:
    """A callable's return annotation, or None where there is none or it cannot be resolved."""
    target = function
    if not isinstance(function, (types.FunctionType, types.MethodType)):
        target = getattr(function, "__call__", function)  # noqa: B004
    try:
        return typing.get_type_hints(target, include_extras=True).get("return")
    except (NameError, TypeError):
        return None


def element_type(annotation: Any) -> Any | None:
    """`T` of `Iterable[T]`, `Iterator[T]`, `Generator[T, ...]` or `list[T]`, also where it may be None.

    None for any other annotation.
    """
    arguments = typing.get_args(annotation)
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        members = [a for a in arguments if a is not type(None)]
        return element_type(members[0]) if len(members) == 1 else None
    return arguments[0] if arguments else None


def _said(annotations: Iterable[object]) -> str:
    """Return the description among the annotations of a field; empty where there is none."""
    texts = (getattr(a, "description", None) or getattr(a, "documentation", None) for a in annotations)
    return next((text for text in texts if isinstance(text, str)), "")


def _docstrings(record: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class, as far as its source is there."""
    try:
        (declared,) = ast.parse(textwrap.dedent(inspect.getsource(record))).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return {}
    found = {}
    for field, below in pairwise(getattr(declared, "body", [])):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            text = getattr(below.value, "value", None)
            if isinstance(text, str):
                found[field.target.id] = inspect.cleandoc(text)
    return found
