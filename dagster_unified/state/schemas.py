"""Schemas of state tables: as Spark writes them in JSON, which a manifest holds, and as Arrow's. Loads no pyspark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from dagster_unified.errors import StateError
from dagster_unified.operators.state.table import ROLE, STATE
from dagster_unified.state.manifest import Column, OperatorState

_NAMES: dict[str, pa.DataType] = {
    "string": pa.string(),
    "long": pa.int64(),
    "integer": pa.int32(),
    "short": pa.int16(),
    "byte": pa.int8(),
    "double": pa.float64(),
    "float": pa.float32(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "interval day to second": pa.duration("us"),
    "void": pa.null(),
}
_TYPES = {arrow: name for name, arrow in _NAMES.items()}
_DECIMAL = re.compile(r"decimal\((\d+),\s*(-?\d+)\)")


def from_spark(text: str) -> pa.Schema:
    """A schema that Spark wrote; raises `StateError` for a type that no state has."""
    return pa.schema([pa.field(f["name"], _arrow(f["type"], f["name"])) for f in json.loads(text)["fields"]])


def to_spark(schema: pa.Schema) -> str:
    """The same schema as Spark writes it."""
    return json.dumps(_struct(schema))


SUBTASK_ROLES = ("list", "union")
"""Those of operator state, whose key is a subtask."""

ROLES = ("key", "state", "broadcast", *SUBTASK_ROLES)


def table_schema(state: OperatorState, roles: Sequence[str] = ROLES) -> pa.Schema:
    """The columns of an operator's table; those with one of these roles have it in the metadata of their field."""
    columns = {column.name: column for column in state.columns if column.role in roles}
    return pa.schema([_with_role(field, columns) for field in from_spark(state.schema)])


def columns_of(schema: pa.Schema) -> list[Column]:
    """What a manifest says of a table's columns."""
    found = []
    for field in schema:
        metadata = field.metadata or {}
        role, state = metadata.get(ROLE, b"").decode(), metadata.get(STATE, b"").decode()
        found.append(Column(field.name, str(field.type), role, state))
    return found


def _with_role(field: pa.Field, columns: Mapping[str, Column]) -> pa.Field:
    column = columns.get(field.name)
    return field if column is None else field.with_metadata({ROLE: column.role, STATE: column.state})


def _arrow(kind: Any, where: str) -> pa.DataType:
    if isinstance(kind, str):
        decimal = _DECIMAL.fullmatch(kind)
        if decimal is not None:
            return pa.decimal128(int(decimal[1]), int(decimal[2]))
        if kind in _NAMES:
            return _NAMES[kind]
    elif kind["type"] == "array":
        return pa.list_(pa.field("element", _arrow(kind["elementType"], where)))
    elif kind["type"] == "map":
        return pa.map_(_arrow(kind["keyType"], where), _arrow(kind["valueType"], where))
    elif kind["type"] == "struct":
        return pa.struct([pa.field(f["name"], _arrow(f["type"], f"{where}.{f['name']}")) for f in kind["fields"]])
    raise StateError(f"column '{where}' has the type {kind}, which no state has; convert it first")


def _spark(kind: pa.DataType, where: str) -> Any:
    if pa.types.is_decimal128(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pa.types.is_list(kind):
        return {"type": "array", "elementType": _spark(kind.value_type, where), "containsNull": True}
    if pa.types.is_map(kind):
        key, value = _spark(kind.key_type, where), _spark(kind.item_type, where)
        return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}
    if pa.types.is_struct(kind):
        return _struct(list(kind))
    if kind in _TYPES:
        return _TYPES[kind]
    raise StateError(f"column '{where}' has the type {kind}, which no state has; convert it first")


def _struct(fields: Sequence[pa.Field] | pa.Schema) -> dict[str, Any]:
    found = [{"name": f.name, "type": _spark(f.type, f.name), "nullable": True, "metadata": {}} for f in fields]
    return {"type": "struct", "fields": found}
