"""How the value of a Kafka message becomes a typed record: JSON, Avro, Protobuf, or the bytes as they are.

A format knows the type that values are decoded to, and decodes one value at a time, in a worker. It knows neither
topics nor offsets, and imports what it decodes with only where it decodes.
"""

from __future__ import annotations

import dataclasses
import io
import json
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import inspect as mi

from dagster_unified.connectors.kafka.registry import SchemaRegistry, without_uuids
from dagster_unified.errors import MissingRequirementError, PipelineError, nearest
from dagster_unified.graph.fingerprint import digest
from dagster_unified.records import RecordType, record_type, type_name

if TYPE_CHECKING:
    from google.protobuf.message import Message

Decode = Callable[[Any], Any]
"""Makes of a value what it holds; raises where it does not fit."""

_MAGIC = 0
"""The first byte of a value that names its schema in a registry; the next four are the schema's number."""


class ValueFormat(ABC):
    """How values are written."""

    name: str

    def describe(self) -> str:
        """The format, for plans."""
        return self.name

    def fingerprint(self) -> str:
        """Changes with what the format makes of a value."""
        return self.describe()

    def check(self, fields: Sequence[str], where: str) -> None:  # noqa: B027 - most formats take any fields
        """Raises `PipelineError` where no value can have these fields."""

    def value_type(self, records: RecordType, fields: Sequence[str], where: str) -> RecordType:
        """The type that a value is decoded to: the record's fields that come from it, as values spell them."""
        if records.shape != "class":
            return record_type(_spelled(records.python), where)
        return record_type(_struct(records.python, tuple(fields)), where)

    @abstractmethod
    def decoder(self, python: Any) -> Decode:
        """In a worker: what decodes a value to this type."""


@dataclasses.dataclass(frozen=True)
class JsonFormat(ValueFormat):
    """Values are JSON: an object with the record's fields, or, for a record that is a plain value, that value.

    Fields that the record does not have are ignored. A field whose type allows None may be missing. A datetime or date
    is in ISO 8601, bytes are in Base64, a Decimal is a number or a text. With `framed` each value begins with the
    number of its schema in a registry, as Confluent's serializers write it.

    There is an example at `KafkaSource`.
    """

    framed: bool = False
    name = "json"

    def decoder(self, python: Any) -> Decode:
        decode = msgspec.json.Decoder(python).decode
        return decode if not self.framed else lambda value: decode(_unframed(value)[1])


@dataclasses.dataclass(frozen=True)
class RawFormat(ValueFormat):
    """Values are kept as they are: `bytes`, or `str` in UTF-8.

    The record is such a value, or a class with one field for it beside those that come from the message's metadata.
    Where its type allows None, a tombstone is None.

    There is an example at `KafkaMessage`.
    """

    name = "raw"

    def check(self, fields: Sequence[str], where: str) -> None:
        if len(fields) > 1:
            raise PipelineError(
                f"{where}: a raw value is one field, and there are {', '.join(fields)}; say which of them come from the"
                " message, with metadata=, or choose another value_format"
            )

    def value_type(self, records: RecordType, fields: Sequence[str], where: str) -> RecordType:
        python = records.python if records.shape != "class" else records.type_of(fields[0])
        if _without_none(python) not in (bytes, str):
            raise PipelineError(
                f"{where}: a raw value is bytes or str, and not {type_name(python)}; declare one of them, or choose"
                " another value_format"
            )
        return record_type(python, where)

    def decoder(self, python: Any) -> Decode:
        if _without_none(python) is bytes:
            return _itself
        return lambda value: None if value is None else value.decode()


@dataclasses.dataclass(frozen=True)
class AvroFormat(ValueFormat):
    """Values are Avro records without a header, all with one `schema`; or, with a `registry`, each with its own.

    In a registry's format each value begins with the number of its schema, which a worker asks the registry for once.
    `schema` is then the reader's schema, and may be left out. It is Avro's JSON, as a text or as a mapping.

    Raises `PipelineError` where the schema has no such field as the record.

    Examples:
        >>> AvroFormat({"type": "record", "name": "Sale", "fields": [{"name": "amount", "type": "long"}]}).describe()
        'avro'
    """

    schema: str | Mapping[str, Any] | None = None
    registry: SchemaRegistry | None = None
    name = "avro"

    def __post_init__(self) -> None:
        if self.schema is None and self.registry is None:
            raise PipelineError(
                "AvroFormat: there is no schema; give schema=, or registry= where values name their own"
            )

    def describe(self) -> str:
        return self.name if self.registry is None else f"{self.name}, schemas in {self.registry.origin}"

    def fingerprint(self) -> str:
        return digest(self.describe(), json.dumps(self._given(), sort_keys=True))

    def check(self, fields: Sequence[str], where: str) -> None:
        given = self._given()
        if not isinstance(given, dict) or given.get("type") != "record":
            return
        known = [field["name"] for field in given["fields"]]
        for name in fields:
            if name not in known:
                raise PipelineError(
                    f"{where}: the Avro schema has no field '{name}'; it has {', '.join(known)}{nearest(name, known)}"
                )

    def decoder(self, python: Any) -> Decode:
        try:
            from fastavro import parse_schema
        except ImportError as error:
            raise MissingRequirementError("Avro needs the package fastavro: install dagster-unified[kafka]") from error
        given, registry = self._given(), self.registry
        schema = None if given is None else parse_schema(without_uuids(given))
        if registry is None:
            return lambda value: msgspec.convert(_avro(value, schema, None), python)
        known: dict[int, Any] = {}

        def registered(value: bytes) -> Any:
            number, content = _unframed(value)
            if number not in known:
                known[number] = registry.avro(number)
            return msgspec.convert(_avro(content, known[number], schema), python)

        return registered

    def _given(self) -> Any:
        return json.loads(self.schema) if isinstance(self.schema, str) else self.schema


class ProtobufFormat(ValueFormat):
    """Values are Protobuf messages of one generated class; the record has fields with the names of the message's.

    A field that the message does not hold is None where the record allows it, and else its default. Of well-known types
    a `Timestamp` is a datetime, a `Duration` a timedelta, and a wrapper the value in it; an enum's value is its name,
    for a `str` or an `Enum`. With `framed` each value begins with the number of its schema in a registry, and with the
    message's place in it, as Confluent's serializers write it.

    Raises `PipelineError` where the message has no such field as the record.

    Examples:
        >>> from google.protobuf.type_pb2 import Field
        >>> ProtobufFormat(Field).describe()
        'protobuf google.protobuf.Field'
    """

    name = "protobuf"

    def __init__(self, message: type[Message], framed: bool = False) -> None:
        from dagster_unified.connectors.kafka import protobuf

        descriptor = message.DESCRIPTOR
        self.message, self.framed = descriptor.full_name, framed
        self._fields = tuple(field.name for field in descriptor.fields)
        self._files = protobuf.files(descriptor.file)
        self._place = protobuf.place(descriptor)

    def describe(self) -> str:
        return f"{self.name} {self.message}"

    def fingerprint(self) -> str:
        return digest(self.describe(), self._files, self.framed)

    def check(self, fields: Sequence[str], where: str) -> None:
        for name in fields:
            if name not in self._fields:
                raise PipelineError(
                    f"{where}: the message {self.message} has no field '{name}'; it has"
                    f" {', '.join(self._fields)}{nearest(name, self._fields)}"
                )

    def decoder(self, python: Any) -> Decode:
        from dagster_unified.connectors.kafka import protobuf

        read, framed, place = protobuf.reader(self._files, self.message), self.framed, self._place

        def decode(value: bytes) -> Any:
            if framed:
                found, value = _message_place(_unframed(value)[1])
                if found != place:
                    raise ValueError(f"it is another message of its schema, the one at {list(found)}")
            return msgspec.convert(read(value), python)

        return decode


# The types of values


@cache
def _struct(python: Any, names: tuple[str, ...]) -> type[msgspec.Struct]:
    """A msgspec struct with these fields of an annotated class: what an object in JSON is decoded to."""
    info = typing.cast("Any", mi.type_info(python))
    hints = typing.get_type_hints(python, include_extras=True)
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    renamed = {}
    for field in info.fields:
        if field.name not in names:
            continue
        kind = _spelled(hints[field.name])
        renamed[field.name] = field.encode_name
        if field.default is not msgspec.NODEFAULT:
            fields.append((field.name, kind, field.default))
        elif field.default_factory is not msgspec.NODEFAULT:
            fields.append((field.name, kind, msgspec.field(default_factory=field.default_factory)))
        elif type(None) in typing.get_args(kind):
            fields.append((field.name, kind, None))
        else:
            fields.append((field.name, kind))
    return msgspec.defstruct(python.__name__, fields, rename=renamed, kw_only=True, gc=False)


def _spelled(python: Any) -> Any:
    """A type as values spell it: annotated classes are objects by field name, also NamedTuples."""
    origin, arguments = typing.get_origin(python), typing.get_args(python)
    if origin is typing.Annotated:
        return typing.Annotated[(_spelled(arguments[0]), *arguments[1:])]
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(_spelled, arguments))]  # noqa: UP007 - made of values
    if origin is not None:
        return origin[tuple(map(_spelled, arguments))]
    if not isinstance(python, type):
        return python
    info = mi.type_info(python)
    if isinstance(info, (mi.NamedTupleType, mi.DataclassType, mi.StructType)):
        return _struct(python, tuple(field.name for field in info.fields))
    return python


def _without_none(python: Any) -> Any:
    kinds = [kind for kind in typing.get_args(python) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 else python


def _itself(value: Any) -> Any:
    return value


# What values begin with


def _unframed(value: bytes) -> tuple[int, bytes]:
    """The number of a value's schema, and the value without it."""
    if len(value) < 5 or value[0] != _MAGIC:
        raise ValueError("it does not begin with the number of a schema in a registry")
    return int.from_bytes(value[1:5], "big"), value[5:]


def _message_place(value: bytes) -> tuple[tuple[int, ...], bytes]:
    """Which message of its schema a value is, and the value without that: a list of zigzag integers; 0 is [0]."""
    stream = io.BytesIO(value)
    count = _zigzag(stream)
    if not 0 <= count <= len(value):
        raise ValueError("it does not say which message of its schema it is")
    found = tuple(_zigzag(stream) for _ in range(count)) if count else (0,)
    return found, stream.read()


def _zigzag(stream: io.BytesIO) -> int:
    number, shift = 0, 0
    while True:
        byte = stream.read(1)
        if not byte or shift > 63:
            raise ValueError("it does not say which message of its schema it is")
        number |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return (number >> 1) ^ -(number & 1)
        shift += 7


def _avro(value: bytes, writer: Any, reader: Any) -> Any:
    """What an Avro value holds; raises `ValueError` where it has bytes too many or too few, and so another schema."""
    from fastavro import schemaless_reader

    stream = io.BytesIO(value)
    try:
        found = schemaless_reader(stream, writer, reader)
    except (EOFError, IndexError):
        raise ValueError("it ends before its schema does") from None
    if stream.read(1):
        raise ValueError("it does not end where its schema does")
    return found
