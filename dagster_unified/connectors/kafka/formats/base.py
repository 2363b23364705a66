"""The base of a format of values, the frame of values whose schema is in a registry, and JSON and raw values."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import inspect as mi

from dagster_unified.connectors.kafka.formats.values import (
    Column,
    columns,
    inside,
    itself,
    needed,
    spelled,
    spelled_class,
    without_none,
)
from dagster_unified.connectors.plain_values import json_decoder
from dagster_unified.errors import PipelineError
from dagster_unified.records import RecordType, record_type, type_name

Decode = Callable[[Any], Any]
"""Decodes a value; raises where it does not fit."""

Encode = Callable[[Sequence[Sequence[Any]]], Sequence[bytes | None]]
"""Encodes records from columns that `values.plain` has converted; raises `ValueError` for what does not fit."""

_MAGIC = 0
"""The first byte of a value that names its schema in a registry; the next four are the schema's number."""


class ValueFormat(ABC):
    """How values are written."""

    name: str

    holds_nan = True
    """Whether values hold NaN and the infinities."""

    def describe(self) -> str:
        """The format, for plans."""
        return self.name

    def fingerprint(self) -> str:
        """A text that changes with the results of the format."""
        return self.describe()

    def check(self, fields: Sequence[str], where: str) -> None:  # noqa: B027 - most formats take any fields
        """Raise `PipelineError` where no value can have these fields."""

    def value_type(self, records: RecordType, fields: Sequence[str], where: str) -> RecordType:
        """The type to which a value is decoded: the record's fields that come from it, as values spell them.

        Raises `PipelineError` where values have no such fields.
        """
        return spelled_type(records, fields, where)

    @abstractmethod
    def decoder(self, python: Any) -> Decode:
        """In a worker: a function that decodes a value to this type."""

    def check_writing(self, kind: RecordType, where: str) -> None:
        """Raise `PipelineError` where values cannot hold records of this type, as far as that is known by now."""
        try:
            self.encoder(kind)
        except ValueError as error:
            raise PipelineError(f"{where}: {error}") from None

    def registered(self, topic: str) -> tuple[ValueFormat, bytes]:
        """On the driver, before anything is written: the format for workers, and the first bytes of each value.

        A format whose schema is in a registry asks the registry here, once. Raises `ValueError` where the registry has
        no schema for the topic or rejects this one, and what a `SchemaRegistry` raises where it is away.
        """
        return self, b""

    @abstractmethod
    def encoder(self, kind: RecordType) -> Encode:
        """A function that encodes records of a type from `value_type`; raises `ValueError` where values cannot."""


def spelled_type(records: RecordType, fields: Sequence[str], where: str) -> RecordType:
    """These fields of a record type as values spell them."""
    if records.shape != "class":
        return record_type(spelled(records.python), where)
    return record_type(spelled_class(records.python, tuple(fields)), where)


def framing(number: int) -> bytes:
    """The first bytes of a value whose schema has this number in a registry."""
    return bytes((_MAGIC,)) + number.to_bytes(4, "big")


def unframed(value: bytes) -> tuple[int, bytes]:
    """The number of a value's schema, and the value without it."""
    if len(value) < 5 or value[0] != _MAGIC:
        raise ValueError("it does not begin with the number of a schema in a registry")
    return int.from_bytes(value[1:5], "big"), value[5:]


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
        if without_none(python) not in (bytes, str):
            raise PipelineError(
                f"{where}: a raw value is bytes or str, and not {type_name(python)}; declare one of them, or choose"
                " another value_format"
            )
        return record_type(python, where)

    def decoder(self, python: Any) -> Decode:
        if without_none(python) is bytes:
            return itself
        return lambda value: None if value is None else value.decode()

    def encoder(self, kind: RecordType) -> Encode:
        if without_none(kind.python) is bytes:
            return lambda arrays: arrays[0]
        return lambda arrays: [None if value is None else value.encode() for value in arrays[0]]


_KEYS = (
    mi.StrType, mi.IntType, mi.FloatType, mi.BytesType, mi.DecimalType, mi.DateTimeType, mi.DateType, mi.TimeDeltaType,
    mi.EnumType,
)  # fmt: skip
"""Types that an object's keys may be of; all are texts in JSON."""


@dataclasses.dataclass(frozen=True)
class JsonFormat(ValueFormat):
    """Values are JSON: an object with the record's fields, or, for a record that is a plain value, that value.

    A tuple is an array. A datetime or date is in ISO 8601, and not finer than microseconds; bytes are in Base64; a
    Decimal is a number or a text, and is written as a text. Reading ignores fields that the record does not have, and
    a field whose type allows None may be missing. With `framed` each value begins with the number of its schema in a
    registry, as Confluent's serializers write it; such values can only be read.

    There is an example at `KafkaSource`.
    """

    framed: bool = False
    name = "json"
    holds_nan = False

    def decoder(self, python: Any) -> Decode:
        decode = json_decoder(python)
        return decode if not self.framed else lambda value: decode(unframed(value)[1])

    def check_writing(self, kind: RecordType, where: str) -> None:
        if self.framed:
            raise PipelineError(
                f"{where}: JsonFormat(framed=True) does not say which schema of a registry values have; write"
                " JsonFormat(), or AvroFormat or ProtobufFormat with a registry"
            )
        super().check_writing(kind, where)

    def encoder(self, kind: RecordType) -> Encode:
        fields = columns(kind)
        for field in fields:
            check_keys(field.type, f"field '{field.name}'")
        if kind.shape == "value":
            return lambda arrays: list(map(encode, arrays[0]))
        if kind.shape == "tuple":
            return lambda arrays: list(map(encode, zip(*arrays, strict=True)))
        make = object_of(fields)
        return lambda arrays: list(map(encode, map(make, *arrays)))


encode = msgspec.json.Encoder(decimal_format="string").encode
"""A plain value as JSON."""


def object_of(fields: Sequence[Column]) -> type[msgspec.Struct]:
    """A class that makes an object from one plain value for each field."""
    renamed = {field.name: field.encoded for field in fields}
    return msgspec.defstruct("Record", [(field.name, Any) for field in fields], rename=renamed, gc=False)


def check_keys(info: mi.Type, where: str) -> None:
    """Raise `ValueError` for a dict whose keys JSON cannot hold."""
    kind, _ = needed(info)
    if isinstance(kind, mi.DictType):
        if not isinstance(needed(kind.key_type)[0], _KEYS):
            raise ValueError(
                f"{where} is a dict whose keys are not texts, numbers or times, and JSON has no others; declare a list"
                " of tuples"
            )
        check_keys(kind.value_type, where)
    elif isinstance(kind, (mi.ListType, mi.VarTupleType)):
        check_keys(kind.item_type, where)
    elif isinstance(kind, mi.TupleType):
        for item in kind.item_types:
            check_keys(item, where)
    elif isinstance(kind, mi.StructType):
        for field in kind.fields:
            check_keys(field.type, inside(where, f".{field.name}"))
