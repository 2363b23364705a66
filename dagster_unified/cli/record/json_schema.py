"""A JSON Schema of objects as an Arrow schema, whose record the format `JsonFormat` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from dagster_unified.cli.record.classes import unread
from dagster_unified.errors import RecordTypeError

_PLAIN = {
    "boolean": pa.bool_(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "string": pa.string(),
}
_FORMATS = {"date-time": pa.timestamp("us", "UTC"), "date": pa.date32()}


def of_json_schema(schema: Mapping[str, Any], where: str) -> pa.Schema:
    """The members of an object's schema; one that an object need not have may be None.

    Raises `RecordTypeError` where it has none.
    """
    field = _Schema(schema).field("", schema, ())
    if not pa.types.is_struct(field.type):
        raise RecordTypeError(f"{where}: its values are no objects with known members; a plain type takes them")
    return pa.schema(list(field.type))


class _Schema:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root

    def field(self, name: str, schema: Mapping[str, Any], above: tuple[str, ...]) -> pa.Field:
        """A field for values of a schema; `above` are the definitions that it is within."""
        if "$ref" in schema:
            return self._referred(name, schema["$ref"], above)
        kinds, nullable = _kinds(schema)
        if len(kinds) != 1:
            return unread(
                name, " or ".join(kind if isinstance(kind, str) else "another" for kind in kinds) or "untyped"
            )
        (kind,) = kinds
        if isinstance(kind, Mapping):
            inner = self.field(name, kind, above)
            return _described(inner.with_nullable(inner.nullable or nullable), schema)
        if kind == "array":
            made = self._list(name, schema, above)
        elif kind == "object":
            made = self._object(name, schema, above)
        else:
            plain = _FORMATS.get(schema.get("format", "")) if kind == "string" else None
            made = pa.field(name, plain or _PLAIN[kind]) if kind in _PLAIN else unread(name, str(kind))
        return _described(made.with_nullable(nullable), schema)

    def _referred(self, name: str, reference: str, above: tuple[str, ...]) -> pa.Field:
        definition = reference.rpartition("/")[2]
        if reference in above:
            return unread(name, f"a {definition} within another")
        target: Any = self._root
        for part in reference.removeprefix("#").strip("/").split("/") if reference.startswith("#") else ("",):
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            return unread(name, reference)
        field = self.field(name, target, (*above, reference))
        return field.with_metadata({b"class": definition.encode(), **(field.metadata or {})})

    def _list(self, name: str, schema: Mapping[str, Any], above: tuple[str, ...]) -> pa.Field:
        items = schema.get("items")
        if not isinstance(items, Mapping):
            return unread(name, "an array of anything")
        return pa.field(name, pa.list_(self.field("element", items, above)))

    def _object(self, name: str, schema: Mapping[str, Any], above: tuple[str, ...]) -> pa.Field:
        members: Mapping[str, Mapping[str, Any]] = schema.get("properties") or {}
        rest = schema.get("additionalProperties")
        if members:
            required: Sequence[str] = schema.get("required") or ()
            fields = [self.field(member, of_member, above) for member, of_member in members.items()]
            kind = pa.struct([field.with_nullable(field.nullable or field.name not in required) for field in fields])
            return pa.field(name, kind, metadata={"class": schema["title"]} if schema.get("title") else None)
        if isinstance(rest, Mapping):
            return pa.field(name, pa.map_(pa.string(), self.field("value", rest, above)))
        return unread(name, "an object of anything")


def _kinds(schema: Mapping[str, Any]) -> tuple[list[Any], bool]:
    """The types that values may be of, or the schemas for them, without null; and whether they may be null."""
    given = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf") or schema.get("type")
    if given is None and "properties" in schema:
        given = "object"
    if given is None and "enum" in schema:
        names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
        given = sorted({names.get(type(value), "object") for value in schema["enum"]})
    kinds = list(given) if isinstance(given, list) else [given] if given is not None else []
    present = [kind for kind in kinds if kind not in ("null", {"type": "null"})]
    return present, len(present) < len(kinds)


def _described(field: pa.Field, schema: Mapping[str, Any]) -> pa.Field:
    description = schema.get("description")
    if not isinstance(description, str):
        return field
    return field.with_metadata({**(field.metadata or {}), b"comment": description.encode()})
