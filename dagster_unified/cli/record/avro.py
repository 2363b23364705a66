"""An Avro schema as an Arrow schema, whose record the format `AvroFormat` reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from dagster_unified.cli.record.classes import unread
from dagster_unified.connectors.kafka.registry import SINCE_MIDNIGHT, TIMES_OF_DAY
from dagster_unified.errors import RecordTypeError

_PLAIN = {
    "boolean": pa.bool_(),
    "int": pa.int64(),
    "long": pa.int64(),
    "float": pa.float64(),
    "double": pa.float64(),
    "string": pa.string(),
    "enum": pa.string(),
    "bytes": pa.binary(),
    "fixed": pa.binary(),
}
_LOGICAL = {
    ("int", "date"): pa.date32(),
    **{
        ("long", f"{local}timestamp-{unit}"): pa.timestamp("us", "UTC")
        for local in ("", "local-")
        for unit in ("millis", "micros")
    },
    **{(avro, f"{SINCE_MIDNIGHT}{logical}"): pa.duration("us") for avro, logical in TIMES_OF_DAY.items()},
}
_UNREAD = ("timestamp-nanos", "local-timestamp-nanos", "duration")
"""Logical types that no field holds."""


def of_avro(schema: Any, where: str) -> pa.Schema:
    """The fields of a schema that a registry has parsed and inlined.

    Raises `RecordTypeError` where it is of no record.
    """
    if not isinstance(schema, dict) or schema["type"] != "record":
        raise RecordTypeError(
            f"{where}: its values are {_spelled(schema)}, and no records; a plain type takes them, without a class"
        )
    return pa.schema(_Schema().record(schema))


class _Schema:
    def __init__(self) -> None:
        self._named: dict[str, Any] = {}
        self._open: list[str] = []
        """The records that are being read, from the outermost on."""

    def record(self, schema: Mapping[str, Any]) -> list[pa.Field]:
        self._named[schema["name"]] = schema
        self._open.append(schema["name"])
        fields = [self._described(self._field(field["name"], field["type"]), field) for field in schema["fields"]]
        self._open.pop()
        return fields

    def _described(self, made: pa.Field, field: Mapping[str, Any]) -> pa.Field:
        doc = field.get("doc")
        return made.with_metadata({**(made.metadata or {}), b"comment": doc.encode()}) if doc else made

    def _field(self, name: str, schema: Any) -> pa.Field:
        """A field for values of a schema."""
        if isinstance(schema, list):
            return self._of_union(name, schema)
        schema = self._named.get(schema, schema) if isinstance(schema, str) else schema
        avro = schema if isinstance(schema, str) else schema["type"]
        if not isinstance(avro, str):
            return self._field(name, avro)
        if avro in ("record", "error"):
            if schema["name"] in self._open:
                return unread(name, f"a {_spelled(schema)} within another")
            return pa.field(name, pa.struct(self.record(schema)), False, {"class": _spelled(schema)})
        if avro in ("enum", "fixed"):
            self._named[schema["name"]] = schema
        if avro == "array":
            return pa.field(name, pa.list_(self._field("element", schema["items"])), False)
        if avro == "map":
            return pa.field(name, pa.map_(pa.string(), self._field("value", schema["values"])), False)
        return self._plain(name, avro, schema if isinstance(schema, dict) else {})

    def _of_union(self, name: str, schemas: list[Any]) -> pa.Field:
        fields = [self._field(name, schema) for schema in schemas if schema != "null"]
        if not fields or any(field.type != fields[0].type for field in fields):
            return unread(name, " or ".join(map(_spelled, schemas)))
        return fields[0].with_nullable("null" in schemas or any(field.nullable for field in fields))

    def _plain(self, name: str, avro: str, schema: Mapping[str, Any]) -> pa.Field:
        logical = schema.get("logicalType", "")
        if logical == "decimal" and avro in ("bytes", "fixed"):
            return pa.field(name, pa.decimal128(min(schema["precision"], 38), schema.get("scale", 0)), False)
        kind = _LOGICAL.get((avro, logical), _PLAIN.get(avro))
        return unread(name, logical or avro) if kind is None or logical in _UNREAD else pa.field(name, kind, False)


def _spelled(schema: Any) -> str:
    """A type as people know it, without its namespace."""
    if isinstance(schema, dict):
        schema = schema.get("name") or schema["type"]
    return str(schema).rpartition(".")[2]
