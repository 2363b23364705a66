"""Record types: how a Python class or value becomes Arrow columns and comes back.

A record is an instance of an annotated class (`NamedTuple` first; dataclasses and `msgspec.Struct` too) or a plain Python
value with a stated type, such as `int` or `tuple[str, int]` (whose columns are `f0`, `f1`, as in Flink's tuples). msgspec's
type inspection does the introspection; this module maps what it finds to Arrow types and converts in whole columns.

A leaf module: knows no graph, no engine and no Spark.
"""

from __future__ import annotations

import dataclasses
import operator
import types
import typing
from collections.abc import Callable
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from msgspec import inspect as mi

from dagster_unified.errors import RecordTypeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Decoder = Callable[[Any], Any]

VALUE = "value"
"""The column of a record that is a plain value."""

RESERVED = "__"
"""Column names that begin so belong to the library."""

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


@dataclasses.dataclass(frozen=True)
class RecordType:
    """A record's Python type and its Arrow schema.

    `shape` says how columns become records: `class` (an annotated class), `tuple` (a plain tuple), `value` (one column).
    Timestamps come back as aware datetimes in UTC; a naive datetime that a function returns is taken as UTC.
    """

    python: Any
    shape: str
    schema: pa.Schema

    @property
    def names(self) -> tuple[str, ...]:
        """The column names, in order."""
        return tuple(self.schema.names)

    def describe(self) -> str:
        """`Flight(carrier: string, dep_delay: double?)`, for plans and messages."""
        fields = ", ".join(f"{f.name}: {f.type}{'?' if f.nullable else ''}" for f in self.schema)
        return f"{type_name(self.python)}({fields})"

    def records(self, columns: Sequence[Sequence[Any]]) -> list[Any]:
        """Records from columns of Python values, each column a list of equal length."""
        if self.shape == "value":
            return list(columns[0])
        rows = zip(*columns, strict=True)
        return list(rows) if self.shape == "tuple" else list(self._construct(rows))

    def _construct(self, rows: Iterable[tuple[Any, ...]]) -> Iterable[Any]:
        if issubclass(self.python, tuple):
            # The generated `_make` is a Python call per record; this stays in C.
            return map(tuple.__new__, repeat(self.python), rows)
        names = self.names
        return (self.python(**dict(zip(names, row, strict=True))) for row in rows)

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
        try:
            columns = self.columns(records)
            if len(columns) != len(self.schema):
                raise RecordTypeError(f"{type_name(self.python)} has {len(self.schema)} fields, but a record has {len(columns)}")
            encoders = _encoders(self.python)
            encoded = [column if encode is None else list(map(encode, column)) for column, encode in zip(columns, encoders, strict=True)]
            arrays = [pa.array(column, field.type) for column, field in zip(encoded, self.schema, strict=True)]
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, TypeError, AttributeError, ValueError) as error:
            raise self._misfit(records, error) from error
        for array, field in zip(arrays, self.schema, strict=True):
            if array.null_count and not field.nullable:
                record = records[array.is_null().to_pylist().index(True)]
                raise RecordTypeError(
                    f"field '{field.name}' of {type_name(self.python)} is None in {shorten(record)}, and its type does not allow None; annotate it as '| None' if it may be missing"
                )
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def from_batch(self, batch: pa.RecordBatch) -> list[Any]:
        """The records of an Arrow batch whose first columns are this type's."""
        columns = []
        for i, decode in enumerate(_decoders(self.python)):
            values = batch.column(i).to_pylist()
            columns.append(values if decode is None else [None if v is None else decode(v) for v in values])
        return self.records(columns)

    def type_of(self, name: str) -> Any:
        """One field's annotation."""
        index = self.names.index(name)
        if self.shape == "value":
            return self.python
        return typing.get_args(self.python)[index] if self.shape == "tuple" else typing.get_type_hints(self.python, include_extras=True)[name]

    def getter(self, name: str) -> Callable[[Any], Any]:
        """What reads one field of a record. Can be pickled."""
        if self.shape == "value":
            return _itself
        return operator.itemgetter(self.names.index(name)) if self.shape == "tuple" else operator.attrgetter(name)

    def decoder_of(self, name: str) -> Decoder | None:
        """What turns one field's value as Arrow gives it into a record's; None where they are the same."""
        return _decoders(self.python)[self.names.index(name)]

    def _misfit(self, records: Sequence[Any], cause: Exception) -> RecordTypeError:
        for record in records:
            if self.shape != "value" and not _has_shape(record, self):
                return RecordTypeError(
                    f"expected a {self.describe()}, got {shorten(record)} ({type_name(type(record))}); does the function return what its annotation or output_type says?"
                )
            values = [record] if self.shape == "value" else self.columns([record])
            for value, field in zip(values, self.schema, strict=True):
                one = [value] if self.shape == "value" else value
                try:
                    pa.array(one, field.type)
                except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, TypeError, AttributeError, ValueError):
                    return RecordTypeError(f"field '{field.name}' is a {field.type}, but a record has {shorten(one[0])} ({type_name(type(one[0]))}): {shorten(record)}")
        return RecordTypeError(f"records do not fit {self.describe()}: {cause}")

    def __reduce__(self) -> tuple[object, ...]:
        return (RecordType, (self.python, self.shape, self.schema))


def _itself(value: Any) -> Any:
    return value


def _has_shape(record: Any, record_type: RecordType) -> bool:
    if record_type.shape == "tuple" or issubclass(record_type.python, tuple):
        return isinstance(record, tuple) and len(record) == len(record_type.schema)
    return all(hasattr(record, name) for name in record_type.names)


def _column_types(python: Any) -> tuple[mi.Type, ...]:
    """The inspected type of each column of a record type."""
    info = mi.type_info(python)
    if isinstance(info, (mi.NamedTupleType, mi.DataclassType, mi.StructType)):
        return tuple(f.type for f in info.fields)
    return info.item_types if isinstance(info, mi.TupleType) else (info,)


@lru_cache(maxsize=1024)
def _decoders(python: Any) -> tuple[Decoder | None, ...]:
    """One function per column from what Arrow gives to what the annotation says; None where they are the same."""
    return tuple(map(_decoder, _column_types(python)))


@lru_cache(maxsize=1024)
def _encoders(python: Any) -> tuple[Decoder | None, ...]:
    """One function per column from what the annotation says to what Arrow takes; None where Arrow takes it as it is."""
    return tuple(map(_encoder, _column_types(python)))


def _encoder(info: mi.Type) -> Decoder | None:
    """Arrow takes nested named tuples, but not dataclasses and msgspec structs; those become dicts."""
    if isinstance(info, mi.UnionType):
        return _encoder(next(t for t in info.types if not isinstance(t, mi.NoneType)))
    if isinstance(info, (mi.DataclassType, mi.StructType, mi.NamedTupleType)):
        fields = [(f.name, _encoder(f.type)) for f in info.fields]
        if isinstance(info, mi.NamedTupleType) and all(encode is None for _, encode in fields):
            return None
        return lambda v: None if v is None else {n: getattr(v, n) if e is None else e(getattr(v, n)) for n, e in fields}
    if isinstance(info, mi.TupleType):
        items = [(f"f{i}", _encoder(t)) for i, t in enumerate(info.item_types)]
        if all(encode is None for _, encode in items):
            return None
        return lambda v: None if v is None else {n: x if e is None else e(x) for (n, e), x in zip(items, v, strict=True)}
    if isinstance(info, (mi.ListType, mi.VarTupleType)):
        item = _encoder(info.item_type)
        return None if item is None else lambda v: None if v is None else [item(x) for x in v]
    if isinstance(info, mi.DictType):
        value = _encoder(info.value_type)
        return None if value is None else lambda v: None if v is None else {k: value(x) for k, x in v.items()}
    return None


def decoder(python: Any) -> Decoder | None:
    """What turns one value as Arrow gives it into `python`; None where nothing has to be done."""
    return _decoder(mi.type_info(python))


def _decoder(info: mi.Type) -> Decoder | None:
    """Nested records come from Arrow as dicts, maps as lists of pairs; everything else is already right."""
    if isinstance(info, mi.UnionType):
        inner = _decoder(next(t for t in info.types if not isinstance(t, mi.NoneType)))
        return None if inner is None else lambda v: None if v is None else inner(v)
    if isinstance(info, (mi.NamedTupleType, mi.DataclassType, mi.StructType)):
        return _struct_decoder(info.cls, [(f.name, _decoder(f.type)) for f in info.fields])
    if isinstance(info, mi.TupleType):
        return _struct_decoder(lambda *values: values, [(f"f{i}", _decoder(t)) for i, t in enumerate(info.item_types)])
    if isinstance(info, (mi.ListType, mi.VarTupleType)):
        item = _decoder(info.item_type)
        collect: Callable[[Iterable[Any]], Any] = tuple if isinstance(info, mi.VarTupleType) else list
        return None if item is None and collect is list else lambda v: collect(v if item is None else map(item, v))
    if isinstance(info, mi.DictType):
        key, value = _decoder(info.key_type), _decoder(info.value_type)
        return lambda v: {(k if key is None else key(k)): x if value is None or x is None else value(x) for k, x in v}
    return None


def _struct_decoder(make: Callable[..., Any], fields: list[tuple[str, Decoder | None]]) -> Decoder:
    return lambda v: make(*[v[name] if decode is None or v[name] is None else decode(v[name]) for name, decode in fields])


def type_name(python: Any) -> str:
    """`Flight`, `tuple[str, int]`, `str | None`: a type as its author would write it."""
    if isinstance(python, type) and not typing.get_args(python):
        return python.__name__
    return str(python).replace("typing.", "")


def shorten(value: object, limit: int = 200) -> str:
    """`repr(value)`, cut to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def record_type(python: Any, where: str = "record") -> RecordType:
    """The `RecordType` of an annotated class or a plain type.

    Raises `RecordTypeError` that begins with `where` and names the field when a type cannot be expressed.
    """
    if isinstance(python, RecordType):
        return python
    if python is None or python is type(None):
        raise RecordTypeError(f"{where}: None is not a record type; a function that gives no records should be a filter or a sink")
    try:
        info = mi.type_info(python)
    except (TypeError, NameError) as error:
        raise RecordTypeError(f"{where}: {type_name(python)} cannot be used as a record type: {error}") from error
    if isinstance(info, (mi.NamedTupleType, mi.DataclassType, mi.StructType)):
        fields = [_field(f.name, f.type, f"{where}: field '{f.name}' of {type_name(python)}") for f in info.fields]
        if not fields:
            raise RecordTypeError(f"{where}: {type_name(python)} has no fields")
        return RecordType(python, "class", pa.schema(fields))
    if isinstance(info, mi.TupleType):
        fields = [_field(f"f{i}", t, f"{where}: item {i} of {type_name(python)}") for i, t in enumerate(info.item_types)]
        return RecordType(python, "tuple", pa.schema(fields))
    if isinstance(info, (mi.AnyType, mi.CustomType)) or python is dict or python is tuple:
        raise RecordTypeError(
            f"{where}: {type_name(python)} says nothing about the columns; use a NamedTuple or another annotated class, or a plain type such as int or tuple[str, int]"
        )
    return RecordType(python, "value", pa.schema([_field(VALUE, info, where)]))


def _field(name: str, info: mi.Type, where: str) -> pa.Field:
    if name.startswith(RESERVED):
        raise RecordTypeError(f"{where}: names that begin with '{RESERVED}' are reserved; rename the field")
    nullable = False
    if isinstance(info, mi.UnionType):
        members = [t for t in info.types if not isinstance(t, mi.NoneType)]
        nullable = len(members) < len(info.types)
        if len(members) != 1:
            raise RecordTypeError(f"{where}: a union of several types has no column type; use one type, or one field for each")
        info = members[0]
    return pa.field(name, arrow_type(info, where), nullable=nullable)


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
        return pa.struct([_field(f.name, f.type, f"{where}.{f.name}") for f in info.fields])
    if isinstance(info, (mi.EnumType, mi.LiteralType)):
        raise RecordTypeError(f"{where}: an enum or literal has no column type of its own; store its value as str or int")
    raise RecordTypeError(f"{where}: no column type for {type(info).__name__.removesuffix('Type').lower()}; use one of {', '.join(SUPPORTED)}")


SUPPORTED = ("str", "int", "float", "bool", "bytes", "datetime", "date", "timedelta", "Decimal", "list[...]", "dict[..., ...]", "tuple[...]", "a nested annotated class")


def return_type(function: Callable[..., Any]) -> Any | None:
    """A callable's return annotation, or None where there is none or it cannot be resolved."""
    target = function if isinstance(function, (types.FunctionType, types.MethodType)) else getattr(function, "__call__", function)  # noqa: B004
    try:
        return typing.get_type_hints(target, include_extras=True).get("return")
    except (NameError, TypeError):
        return None


def element_type(annotation: Any) -> Any | None:
    """`T` of `Iterable[T]`, `Iterator[T]`, `Generator[T, ...]` or `list[T]`, also where it may be None; None where there is none."""
    arguments = typing.get_args(annotation)
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        given = [a for a in arguments if a is not type(None)]
        return element_type(given[0]) if len(given) == 1 else None
    return arguments[0] if arguments else None
