"""Values that are JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import inspect as mi

from dagster_unified.connectors.exact_times import json_decoder
from dagster_unified.connectors.kafka.formats.base import Decode, Encode, ValueFormat, unframed
from dagster_unified.connectors.kafka.formats.values import Column, columns, inside, needed
from dagster_unified.errors import PipelineError
from dagster_unified.records import RecordType

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
            return lambda found: list(map(encode, found[0]))
        if kind.shape == "tuple":
            return lambda found: list(map(encode, zip(*found, strict=True)))
        make = object_of(fields)
        return lambda found: list(map(encode, map(make, *found)))


encode = msgspec.json.Encoder(decimal_format="string").encode
"""A plain value as JSON."""


def object_of(fields: Sequence[Column]) -> type[msgspec.Struct]:
    """What makes of one plain value for each field an object."""
    renamed = {field.name: field.encoded for field in fields}
    return msgspec.defstruct("Record", [(field.name, Any) for field in fields], rename=renamed, gc=False)


def check_keys(info: mi.Type, where: str) -> None:
    """Raises `ValueError` for a dict whose keys JSON cannot hold."""
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
