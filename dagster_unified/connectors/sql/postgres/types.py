"""Which column types of PostgreSQL hold which Arrow types, and how values get from one to the other.

A column of a simple type is staged in the type of PostgreSQL that holds all its values, a list of such as an array, and
everything else that is nested as JSON. Needs no client.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

_SIMPLE: dict[pa.DataType, str] = {
    pa.bool_(): "bool",
    pa.int8(): "int2",
    pa.int16(): "int2",
    pa.int32(): "int4",
    pa.int64(): "int8",
    pa.float32(): "float4",
    pa.float64(): "float8",
    pa.string(): "text",
    pa.binary(): "bytea",
    pa.date32(): "date",
    pa.duration("us"): "interval",
    pa.timestamp("us"): "timestamp",
}

_HELD_BY: dict[str, tuple[str, ...]] = {
    "bool": ("bool",),
    "int2": ("int2", "int4", "int8", "numeric"),
    "int4": ("int2", "int4", "int8", "numeric"),
    "int8": ("int2", "int4", "int8", "numeric"),
    "float4": ("float4", "float8"),
    "float8": ("float8",),
    "text": ("text", "varchar", "bpchar", "citext", "uuid", "json", "jsonb", "inet", "cidr", "enum"),
    "bytea": ("bytea",),
    "date": ("date",),
    "interval": ("interval",),
    "timestamp": ("timestamp",),
    "timestamptz": ("timestamptz",),
    "numeric": ("numeric",),
}
"""Types of a table's columns that take a staged type's values. Those that do not fit are an error at the commit."""

_UNROUNDED = {
    "numeric": "numeric",
    "timestamp": "timestamp without time zone",
    "timestamptz": "timestamp with time zone",
    "interval": "interval",
}
"""Staged types of which a column may keep fewer digits, and as what SQL has the columns that keep all."""

_JSON = ("json", "jsonb")

_UNBOUNDED = "character varying"
"""As what SQL has `varchar` without a length."""

_ASSIGNED = ("text", "varchar", "bpchar", "citext")
"""Types that texts, and arrays of texts, become without a cast, which would cut them off."""


@dataclass(frozen=True)
class TableColumn:
    """A column of a table that is there."""

    name: str
    type: str
    """The type as SQL has it, such as `numeric(10,2)`."""

    base: str
    """The type's name in the catalog, below domains: `numeric`, `_int8` for an array; for any enum `enum`, `_enum`."""

    required: bool
    """Whether it has to be given a value: it may not be null, and has no default."""

    collation: str = ""
    """The collation as SQL has it, where texts are equal under it that are not the same."""


@dataclass(frozen=True)
class StagedColumn:
    """A column of a stream, as it is staged."""

    name: str
    type: str
    """The staged type; an array's ends with `[]`."""

    json: bool = False
    """Whether the values are JSON, in text."""

    nullable: bool = True
    declared: str = ""
    """The type of a table's column that is made for it."""

    def fits(self, held: TableColumn) -> bool:
        """Whether the table's column takes its values."""
        if self.json:
            return held.base in _JSON
        if self.type.endswith("[]"):
            elements = _HELD_BY[self.type[:-2]]
            return held.base in _JSON or held.base in [f"_{element}" for element in elements]
        return held.base in _HELD_BY[self.type]

    def may_be_rounded(self, held: TableColumn) -> bool:
        """Whether the column rounds values to fewer digits, as `numeric(10,2)` does, or a domain over it.

        Of whole numbers too: `numeric(3,-2)` holds hundreds.
        """
        rounds = self.type.removesuffix("[]") in _UNROUNDED or held.base.removeprefix("_") == "numeric"
        return rounds and held.base not in _JSON and held.type.removesuffix("[]") not in _UNROUNDED.values()

    def may_be_cut(self, held: TableColumn) -> bool:
        """Whether the column cuts blanks off that are too many for it, as `varchar(3)` does, or a domain over it.

        To `char(3)` blanks at the end are nothing, so it may.
        """
        is_text = self.type.removesuffix("[]") == "text" and not self.json
        return is_text and held.base.removeprefix("_") == "varchar" and held.type.removesuffix("[]") != _UNBOUNDED

    def expression(self, held: TableColumn) -> str:
        """The staged value in SQL, as the table's column takes it."""
        name = f'"{self.name}"'
        if self.type.endswith("[]") and held.base in _JSON:
            return f"to_jsonb({name})"
        if self.type.removesuffix("[]") == "text":
            return name if held.base.removeprefix("_") in _ASSIGNED else f"{name}::{held.type}"
        return f"{name}::{held.type}" if self.type.endswith("[]") else name


def staged_column(field: pa.Field) -> StagedColumn:
    """How a column of this Arrow type is staged."""
    kind, declared, json = _type(field.type)
    return StagedColumn(field.name, kind, json, field.nullable, declared)


def _type(kind: pa.DataType) -> tuple[str, str, bool]:
    """The staged type, the type of a column that is made, and whether it is JSON."""
    simple = _simple(kind)
    if simple is not None:
        declared = f"numeric({kind.precision},{kind.scale})" if simple == "numeric" else simple
        return simple, declared, False
    if pa.types.is_list(kind):
        element = _simple(kind.value_type)
        if element is not None:
            return f"{element}[]", f"{element}[]", False
    return "text", "jsonb", True


def _simple(kind: pa.DataType) -> str | None:
    if pa.types.is_decimal128(kind):
        return "numeric"
    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz is None else "timestamptz"
    if pa.types.is_large_string(kind):
        return "text"
    return "bytea" if pa.types.is_large_binary(kind) else _SIMPLE.get(kind)
