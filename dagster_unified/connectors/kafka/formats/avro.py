"""Values that are Avro: with one schema, or each with its own, which is in a registry."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Context, Decimal, Inexact, InvalidOperation
from functools import cache, partial
from itertools import pairwise
from typing import Any

from msgspec import inspect as mi

from dagster_unified.connectors.kafka.formats.base import Decode, Encode, ValueFormat, framing, unframed
from dagster_unified.connectors.kafka.formats.values import (
    SCALARS,
    Convert,
    check_members,
    check_names,
    columns,
    converted,
    each,
    entries,
    field_converters,
    from_plain,
    in_32_bits,
    in_order,
    inside,
    members,
    needed,
    one_of,
)
from dagster_unified.connectors.kafka.registry import SINCE_MIDNIGHT, TIMES_OF_DAY, SchemaRegistry, for_records
from dagster_unified.errors import MissingRequirementError, PipelineError
from dagster_unified.graph.fingerprint import digest
from dagster_unified.records import RecordType, shorten
from dagster_unified.values import described


@dataclasses.dataclass(frozen=True)
class AvroFormat(ValueFormat):
    """Values are Avro without a header: all with one `schema`, or, with a `registry`, each with its own.

    With a registry each value begins with the number of its schema. A worker that reads asks the registry for each
    number once; `schema` is then the reader's schema, and may be left out. The driver of a job that writes registers
    `schema` for `subject`, by default the topic's name with `-value`; without a `schema` it takes the subject's latest.
    Workers that write ask for nothing. `schema` is Avro's JSON, as a text or as a mapping.

    Raises `PipelineError` where the schema is not Avro's, where it lacks a field of the record, and, in writing, where
    it cannot hold all values of the record's type. A value that its type in the schema cannot hold exactly, such as 0.1
    in a `float` of 32 bits, is a `SinkError` that names the field.

    Examples:
        >>> AvroFormat({"type": "record", "name": "Sale", "fields": [{"name": "amount", "type": "long"}]}).describe()
        'avro'
    """

    schema: str | Mapping[str, Any] | None = None
    registry: SchemaRegistry | None = None
    subject: str | None = None
    name = "avro"

    def __post_init__(self) -> None:
        if self.schema is None and self.registry is None:
            raise PipelineError(
                "AvroFormat: there is no schema; give schema=, or registry= where values name their own"
            )
        if self.schema is None:
            return
        try:
            definition = self._definition()
        except ValueError as error:
            raise PipelineError(
                f"AvroFormat: the schema {shorten(self.schema)} is not JSON ({error}); give the text of an .avsc file,"
                " such as '\"long\"' for a type by its name, or the schema as a mapping"
            ) from None
        try:
            _parsed(definition, {})
        except ValueError as error:
            raise PipelineError(f"AvroFormat: {error}") from None

    def describe(self) -> str:
        return self.name if self.registry is None else f"{self.name}, schemas in {self.registry.origin}"

    def fingerprint(self) -> str:
        return digest(self.describe(), json.dumps(self._definition(), sort_keys=True))

    def value_type(self, records: RecordType, fields: Sequence[str], where: str) -> RecordType:
        kind, definition = super().value_type(records, fields, where), self._definition()
        if isinstance(definition, dict) and definition.get("type") == "record":
            check_names(kind, [field["name"] for field in definition["fields"]], "the Avro schema", where)
        return kind

    def decoder(self, python: Any) -> Decode:
        definition, registry = self._definition(), self.registry
        schema, convert = None if definition is None else _parsed(definition, {}), from_plain(python)
        if registry is None:
            return lambda value: convert(_read(value, schema, None))
        from fastavro import parse_schema

        known: dict[int, Any] = {}

        def registered(value: bytes) -> Any:
            number, content = unframed(value)
            if number not in known:
                known[number] = parse_schema(registry.avro(number))
            return convert(_read(content, known[number], schema))

        return registered

    def check_writing(self, kind: RecordType, where: str) -> None:
        if self.schema is not None:  # else only the registry knows it, which the driver asks
            super().check_writing(kind, where)

    def registered(self, topic: str) -> tuple[ValueFormat, bytes]:
        if self.registry is None:
            return self, b""
        subject, definition = self.subject or f"{topic}-value", self._definition()
        if definition is not None:
            return self, framing(self.registry.register(subject, json.dumps(definition), "AVRO"))
        number = self.registry.latest(subject)
        return dataclasses.replace(self, schema=json.dumps(self.registry.avro(number))), framing(number)

    def encoder(self, kind: RecordType) -> Encode:
        named: dict[str, Any] = {}
        schema = _parsed(self._definition(), named)
        fields = columns(kind)
        if kind.shape == "class":
            names = [field.encoded for field in fields]
            by_name = _field_converters([(field.encoded, field.type) for field in fields], schema, named, "")
            converts = [by_name[name] for name in names]
            return lambda arrays: _written(
                [dict(zip(names, row, strict=True)) for row in zip(*converted(arrays, names, converts), strict=True)],
                schema,
            )
        whole = _writer(mi.type_info(kind.python), schema, named, "the value")
        if kind.shape == "tuple":
            return lambda arrays: _written(
                converted([list(map(list, zip(*arrays, strict=True)))], ["value"], [whole])[0], schema
            )
        return lambda arrays: _written(converted(arrays, ["value"], [whole])[0], schema)

    def _definition(self) -> Any:
        return json.loads(self.schema) if isinstance(self.schema, str) else self.schema


def _parsed(definition: Any, named: dict[str, Any]) -> Any:
    """A schema as fastavro takes it; `named` gets its named types."""
    try:
        from fastavro import parse_schema
    except ImportError as error:
        raise MissingRequirementError("Avro needs the package fastavro: install dagster-unified[kafka]") from error
    try:
        schema = parse_schema(for_records(definition), named_schemas=named)
        _convert_defaults(named)
    except Exception as error:
        raise ValueError(f"the Avro schema cannot be used ({_reason(error)}); correct it") from error
    if isinstance(definition, Mapping) and definition["type"] == "record" and "fields" not in definition:
        raise ValueError(f"the Avro schema cannot be used (the record {definition['name']} has no fields); correct it")
    return schema


def _reason(error: Exception) -> str:
    """Why fastavro rejects a schema: some of its errors are only a name."""
    from fastavro.schema import UnknownType

    if isinstance(error, UnknownType):
        return f"there is no type '{error}'"
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _convert_defaults(named: Mapping[str, Any]) -> None:
    """Convert the fields' defaults to values, in place.

    In a schema bytes are a text and a time is a number, and fastavro leaves them so.
    """
    for record in named.values():
        for field in record.get("fields", ()):
            if "default" in field:
                try:
                    field["default"] = _default(field["default"], field["type"], named)
                except (ValueError, OverflowError) as error:
                    raise ValueError(
                        f"the default of field '{field['name']}' is {shorten(field['default'])}, and {error}"
                    ) from None


def _default(value: Any, schema: Any, named: Mapping[str, Any]) -> Any:
    schema = _resolved(schema, named)
    if isinstance(schema, list):  # of which type it is, only JSON says
        kinds = [kind for kind in schema if type(value) in _IN_JSON.get(_avro(_resolved(kind, named)), ())]
        return _default(value, kinds[0], named) if kinds else value
    avro = _avro(schema)
    if avro == "array":
        return [_default(item, schema["items"], named) for item in value]
    if avro == "map":
        return {key: _default(item, schema["values"], named) for key, item in value.items()}
    if avro in ("record", "error"):
        types = {field["name"]: field["type"] for field in schema["fields"]}
        return {name: _default(item, types[name], named) if name in types else item for name, item in value.items()}
    logical = schema.get("logicalType") if isinstance(schema, dict) else None
    if type(value) is int and avro in TIMES_OF_DAY and logical is not None:
        read = _logical_readers().get(f"{avro}-{logical}")
        return value if read is None else read(value)
    if avro not in ("bytes", "fixed") or not isinstance(value, str):
        return value
    try:
        content = value.encode("latin-1")
    except UnicodeEncodeError:
        raise ValueError("bytes are the first 256 characters of Unicode there") from None
    if avro == "fixed" and len(content) != schema["size"]:
        raise ValueError(f"{_spelled(schema)} has {schema['size']} bytes")
    if logical != "decimal":
        return content
    return Decimal(int.from_bytes(content, "big", signed=True)).scaleb(-schema.get("scale", 0))


_IN_JSON: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("record", "error", "map"), (dict,)), "array": (list,),
    **dict.fromkeys(("string", "enum", "bytes", "fixed"), (str,)),
    **dict.fromkeys(("int", "long"), (int,)), **dict.fromkeys(("float", "double"), (int, float)),
}  # fmt: skip
"""The JSON types of a default in a schema, by its Avro type; booleans and null stay as they are."""


def _avro(schema: Any) -> str:
    """The type of a schema that is no union, without its logical type."""
    name: str = schema if isinstance(schema, str) else schema["type"]
    return name


@cache
def _logical_readers() -> dict[str, Callable[..., Any]]:
    """fastavro's functions that make values of logical types, by type; with the times of day of records added."""
    from fastavro.read import LOGICAL_READERS

    known: dict[str, Callable[..., Any]] = LOGICAL_READERS
    for avro, logical in TIMES_OF_DAY.items():
        known[f"{avro}-{SINCE_MIDNIGHT}{logical}"] = partial(_since_midnight, _UNITS[logical])
    return known


def _since_midnight(unit: timedelta, value: int, *schemas: Any) -> timedelta:
    return unit * value


_UNITS = {"time-millis": timedelta(milliseconds=1), "time-micros": timedelta(microseconds=1)}


def _read(value: bytes, writer: Any, reader: Any) -> Any:
    """Decode an Avro value; raises `ValueError` where it has too many or too few bytes, and so another schema."""
    from fastavro import schemaless_reader

    _logical_readers()
    stream = io.BytesIO(value)
    try:
        result = schemaless_reader(stream, writer, reader)
    except (EOFError, IndexError):
        raise ValueError("it ends before its schema does") from None
    if stream.read(1):
        raise ValueError("it does not end where its schema does")
    return result


def _written(values: Sequence[Any], schema: Any) -> list[bytes]:
    """Encode the values of many records; raises `ValueError` for the first that does not fit."""
    from fastavro import schemaless_writer

    stream, ends = io.BytesIO(), [0]
    for value in values:
        try:
            schemaless_writer(stream, schema, value)
        except Exception as error:
            raise ValueError(f"{shorten(value)} does not fit the Avro schema: {error}") from error
        ends.append(stream.tell())
    content = stream.getvalue()
    return [content[start:end] for start, end in pairwise(ends)]


# Which types of a record fit which types of a schema


def _writer(info: mi.Type, schema: Any, named: Mapping[str, Any], where: str) -> Convert | None:
    """A function that turns a plain value into one for this schema; None where they are the same.

    Raises `ValueError` that begins with `where`, if the schema cannot hold all values of the type.
    """
    schema = _resolved(schema, named)
    if isinstance(schema, list):
        return _of_union(info, schema, named, where)
    kind, nullable = needed(info)
    if nullable:
        raise ValueError(
            f"{where} may be None, and in the Avro schema it may not; make its type there a union with null, or declare"
            " it without None"
        )
    avro = _avro(schema)
    if isinstance(kind, mi.StructType) and avro in ("record", "error"):
        return members(
            _field_converters([(field.encode_name, field.type) for field in kind.fields], schema, named, where)
        )
    if isinstance(kind, (mi.ListType, mi.VarTupleType)) and avro == "array":
        item = _writer(kind.item_type, schema["items"], named, inside(where, "[]"))
        return item and each(item)
    if isinstance(kind, mi.TupleType) and avro == "array":
        return in_order(
            [_writer(item_type, schema["items"], named, inside(where, "[]")) for item_type in kind.item_types]
        )
    if isinstance(kind, mi.DictType) and avro == "map" and _is_text(kind.key_type):
        return entries(None, _writer(kind.value_type, schema["values"], named, inside(where, "[]")))
    return _scalar(kind, avro, schema if isinstance(schema, dict) else {}, where)


def _resolved(schema: Any, named: Mapping[str, Any]) -> Any:
    return named.get(schema, schema) if isinstance(schema, str) else schema


def _field_converters(
    fields: Sequence[tuple[str, mi.Type]], schema: Any, named: Mapping[str, Any], where: str
) -> dict[str, Convert | None]:
    if not isinstance(schema, dict) or schema["type"] not in ("record", "error"):
        raise ValueError(f"the record has fields, and the Avro schema is no record ({_spelled(schema)})")

    known = {field["name"]: field["type"] for field in schema["fields"]}
    needed = {field["name"]: "has no default" for field in schema["fields"] if "default" not in field}
    return field_converters(
        fields, known, needed, "the Avro schema", lambda info, kind, place: _writer(info, kind, named, place), where
    )


def _of_union(info: mi.Type, schemas: Sequence[Any], named: Mapping[str, Any], where: str) -> Convert:
    """A function that names the union's type for a value; fastavro would search for it with each value."""
    kind, nullable = needed(info)
    if nullable and "null" not in map(_branch, schemas):
        raise ValueError(f"{where} may be None, and the Avro schema's union has no null; add it, or declare another")
    wrong = ""
    # a type that holds all values goes before one that holds some
    for schema in sorted(schemas, key=lambda candidate: _is_narrow(_resolved(candidate, named), kind)):
        try:
            convert = _writer(kind, schema, named, where)
        except ValueError as error:
            wrong = wrong if _branch(schema) == "null" else str(error)
            continue
        return _of_branch(_branch(schema), convert)
    raise ValueError(wrong or f"{where} is {described(kind)}, and the Avro schema's union has no type for it")


def _is_narrow(schema: Any, kind: mi.Type) -> bool:
    """Whether one of a union's types may hold only some values of a record's type."""
    avro, logical = (schema, None) if isinstance(schema, str) else (schema["type"], schema.get("logicalType"))
    if logical == "decimal":
        scale = schema.get("scale", 0)
        return bool(scale < 18 or schema["precision"] - scale < 20)  # what a record's Decimal has
    if avro == "enum":
        return isinstance(kind, mi.StrType)
    in_millis = logical in _TIMES and _TIMES[logical][1]
    return in_millis or logical in _OF_DAY or (avro in ("int", "float", "fixed") and logical != "date")


def _of_branch(branch: str, convert: Convert | None) -> Convert:
    if convert is None:
        return lambda value: _NULL if value is None else (branch, value)
    return lambda value: _NULL if value is None else (branch, convert(value))


_NULL = ("null", None)


def _branch(schema: Any) -> str:
    if isinstance(schema, str):
        return schema
    name: str = schema["name"] if schema["type"] in ("record", "error", "enum", "fixed") else schema["type"]
    return name


_TIMES = {
    "timestamp-millis": (False, True), "timestamp-micros": (False, False),
    "local-timestamp-millis": (True, True), "local-timestamp-micros": (True, False),
}  # fmt: skip
"""Avro's types of moments: whether they have no zone, and whether only milliseconds."""

_OF_DAY = tuple(f"{SINCE_MIDNIGHT}{logical}" for logical in TIMES_OF_DAY.values())
_OTHER_LOGICAL = ("date", "decimal", "duration", "timestamp-nanos", *_TIMES, *_OF_DAY)


def _scalar(kind: mi.Type, avro: str, schema: Mapping[str, Any], where: str) -> Convert | None:
    logical = schema.get("logicalType", "")
    logical = logical if logical in _OTHER_LOGICAL else ""
    scalar = _SCALARS.get((type(kind), avro)) if not logical else None
    if scalar is not None:
        return scalar[0]
    if isinstance(kind, mi.DateType) and (avro, logical) == ("int", "date"):
        return None
    if isinstance(kind, mi.DateTimeType) and avro == "long" and logical in _TIMES:
        local, in_millis = _TIMES[logical]
        if local == (kind.tz is False):
            return _whole_millis if in_millis else None
    if isinstance(kind, mi.DecimalType) and logical == "decimal":
        return _decimal(schema)
    if isinstance(kind, mi.TimeDeltaType) and logical in _OF_DAY:
        return partial(_time_of_day, _UNITS[TIMES_OF_DAY[avro]])
    if avro == "fixed" and not logical and isinstance(kind, mi.BytesType):
        return None  # fastavro holds it to the size
    if avro == "enum" and isinstance(kind, mi.StrType):
        return one_of(schema["symbols"], f"the Avro enum {schema['name']}")
    if isinstance(kind, mi.EnumType):
        return _member(kind, avro, schema, where)
    raise ValueError(
        f"{where} is {described(kind)}, which the Avro type {_spelled(schema or avro)} does not hold; change the schema"
        " or the record"
    )


def _member(kind: mi.EnumType, avro: str, schema: Mapping[str, Any], where: str) -> Convert | None:
    """The converter of an enum's member, which is written as its value."""
    if isinstance(next(iter(kind.cls)).value, int):
        return _scalar(mi.IntType(), avro, schema, where)
    if avro != "enum":
        return _scalar(mi.StrType(), avro, schema, where)
    check_members(kind, schema["symbols"], f"the Avro enum {schema['name']}", where)
    return None


def _decimal(schema: Mapping[str, Any]) -> Convert:
    unit = Decimal(1).scaleb(-schema.get("scale", 0))
    exact = Context(prec=schema["precision"], traps=[Inexact, InvalidOperation])

    def convert(value: Decimal) -> Decimal:
        try:
            return value.quantize(unit, context=exact)
        except (Inexact, InvalidOperation):
            raise ValueError(
                f"the schema's decimal has {schema['precision']} digits, {schema.get('scale', 0)} of them after the"
                " point; round it, or change the schema"
            ) from None

    return convert


def _time_of_day(unit: timedelta, value: timedelta) -> int:
    count, rest = divmod(value, unit)
    if rest or not timedelta() <= value < timedelta(days=1):
        whole = "whole milliseconds" if unit == _UNITS["time-millis"] else "microseconds"
        raise ValueError(f"the schema's type is a time of day, in {whole}; change the schema, or write a string")
    return count


def _whole_millis(value: datetime) -> datetime:
    if value.microsecond % 1000:
        raise ValueError("the schema's type has only milliseconds; cut it to these, or declare timestamp-micros")
    return value


_SCALARS: dict[tuple[type[mi.Type], str], tuple[Convert | None]] = {
    (mi.BoolType, "boolean"): (None,),
    (mi.IntType, "long"): (None,),
    (mi.IntType, "int"): (in_32_bits,),
    **SCALARS,
}
"""The converters from a record's type to an Avro type without a logical type."""


def _is_text(info: mi.Type) -> bool:
    kind, nullable = needed(info)
    if isinstance(kind, mi.EnumType):
        return isinstance(next(iter(kind.cls)).value, str)
    return isinstance(kind, mi.StrType) and not nullable


def _spelled(schema: Any) -> str:
    """A type as people know it: `long`, `timestamp-millis`, `record Sale`."""
    if not isinstance(schema, dict):
        return str(schema)
    logical = schema.get("logicalType", "").removeprefix(SINCE_MIDNIGHT)
    return str(logical or " ".join(filter(None, (schema["type"], schema.get("name")))))
