"""Which column types of PostgreSQL hold which Arrow types, and how each field is requested from the server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from dagster_unified.arrow_types import has
from dagster_unified.connectors.sql.postgres.connection import quoted
from dagster_unified.records import RecordType

_TYPES: dict[pa.DataType, str] = {
    pa.bool_(): "bool",
    pa.int64(): "int8",
    pa.float64(): "float8",
    pa.string(): "text",
    pa.binary(): "bytea",
    pa.date32(): "date",
    pa.duration("us"): "interval",
    pa.timestamp("us"): "timestamp",
    pa.timestamp("us", "UTC"): "timestamptz",
}


def _simple(kind: pa.DataType) -> str | None:
    """The type that holds all values of a field that is not nested; None for a nested one."""
    return "numeric" if pa.types.is_decimal(kind) else _TYPES.get(kind)


_STORED_IN: dict[str, tuple[str, ...]] = {
    "bool": ("bool",),
    "int8": ("int2", "int4", "int8", "numeric"),
    "float8": ("float8",),
    "text": ("text", "varchar", "bpchar", "citext", "uuid", "json", "jsonb", "inet", "cidr", "enum"),
    "bytea": ("bytea",),
    "date": ("date",),
    "interval": ("interval",),
    "timestamp": ("timestamp",),
    "timestamptz": ("timestamptz",),
    "numeric": ("numeric",),
}
"""Column types that take a staged type's values. A value that does not fit is an error at the commit."""

_UNROUNDED = {
    "numeric": "numeric",
    "timestamp": "timestamp without time zone",
    "timestamptz": "timestamp with time zone",
    "interval": "interval",
}
"""Staged types whose columns may keep fewer digits, and SQL's name of the type that keeps all."""

_JSON = ("json", "jsonb")

_UNBOUNDED = "character varying"
"""SQL's name of `varchar` without a length."""

_ASSIGNED = ("text", "varchar", "bpchar", "citext")
"""Types that texts, and arrays of texts, become without a cast, which would cut them off."""


@dataclass(frozen=True)
class TableColumn:
    """A column of an existing table."""

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
    """A column of a stream in the staging table."""

    name: str
    type: str
    """The staged type; an array's ends with `[]`."""

    json: bool = False
    """Whether the values are JSON, in text."""

    nullable: bool = True
    declared: str = ""
    """The type of a table's column that is made for it."""

    def fits(self, column: TableColumn) -> bool:
        """Whether the table's column takes its values."""
        if self.json:
            return column.base in _JSON
        if self.type.endswith("[]"):
            elements = _STORED_IN[self.type[:-2]]
            return column.base in _JSON or column.base in [f"_{element}" for element in elements]
        return column.base in _STORED_IN[self.type]

    def may_be_rounded(self, column: TableColumn) -> bool:
        """Whether the column rounds values to fewer digits, as `numeric(10,2)` does, or a domain over it.

        That includes whole numbers: `numeric(3,-2)` holds hundreds.
        """
        rounds = self.type.removesuffix("[]") in _UNROUNDED or column.base.removeprefix("_") == "numeric"
        return rounds and column.base not in _JSON and column.type.removesuffix("[]") not in _UNROUNDED.values()

    def may_be_cut(self, column: TableColumn) -> bool:
        """Whether the column cuts surplus blanks off, as `varchar(3)` does, or a domain over it.

        `char(3)` may do so: it ignores blanks at the end.
        """
        is_text = self.type.removesuffix("[]") == "text" and not self.json
        return is_text and column.base.removeprefix("_") == "varchar" and column.type.removesuffix("[]") != _UNBOUNDED

    def expression(self, column: TableColumn) -> str:
        """The staged value in SQL, as the table's column takes it."""
        name = f'"{self.name}"'
        if self.type.endswith("[]") and column.base in _JSON:
            return f"to_jsonb({name})"
        if self.type.removesuffix("[]") == "text":
            return name if column.base.removeprefix("_") in _ASSIGNED else f"{name}::{column.type}"
        return f"{name}::{column.type}" if self.type.endswith("[]") else name


def staged_column(field: pa.Field) -> StagedColumn:
    """The staged column for an Arrow field."""
    kind, declared, json = _type(field.type)
    return StagedColumn(field.name, kind, json, field.nullable, declared)


def _type(kind: pa.DataType) -> tuple[str, str, bool]:
    """The staged type, the type of a new column, and whether it is JSON."""
    simple = _simple(kind)
    if simple is not None:
        declared = f"numeric({kind.precision},{kind.scale})" if simple == "numeric" else simple
        return simple, declared, False
    if pa.types.is_list(kind):
        element = _simple(kind.value_type)
        if element is not None:
            return f"{element}[]", f"{element}[]", False
    return "text", "jsonb", True


_READ_FROM: dict[str, tuple[str, ...]] = {
    "bool": ("bool",),
    "int8": ("int2", "int4", "int8"),
    "float8": ("float4", "float8", "numeric", "int2", "int4", "int8"),
    "text": ("text", "varchar", "bpchar", "citext", "name", "uuid", "json", "jsonb", "xml", "inet", "cidr", "enum"),
    "bytea": ("bytea",),
    "date": ("date",),
    "interval": ("interval",),
    "timestamp": ("timestamp",),
    "timestamptz": ("timestamptz", "timestamp"),
    "numeric": ("numeric", "int2", "int4", "int8"),
}
"""Column types from which fields are read, by the type that holds all of a field's values."""

_ELEMENTS = ("bool", "int8", "float8", "text", "bytea", "interval")
"""Elements of lists that are read as arrays; PostgreSQL's JSON has bytes and intervals in forms of its own."""


@dataclass(frozen=True)
class AskedField:
    """A field of a record, as it is requested from the server."""

    name: str
    arrow: pa.DataType

    @classmethod
    def of(cls, records: RecordType) -> list[AskedField]:
        """The fields of a record type."""
        return [cls(field.name, field.type) for field in records.schema]

    @property
    def type(self) -> str:
        """The PostgreSQL type that holds all its values; an array's ends with `[]`, and `json` stands for the rest."""
        simple = _simple(self.arrow)
        if simple is not None:
            return simple
        element = _simple(self.arrow.value_type) if pa.types.is_list(self.arrow) else None
        return f"{element}[]" if element in _ELEMENTS else "json"

    def reads(self, base: str) -> bool:
        """Whether it is read from a column whose type has this name in the catalog."""
        if self.type == "json":
            return base in _JSON or ((base == "record" or base.startswith("_")) and not has(self.arrow, _is_binary))
        if self.type.endswith("[]"):
            return base in [f"_{name}" for name in _READ_FROM[self.type[:-2]]]
        return base in _READ_FROM[self.type]

    def expression(self, base: str) -> str:
        """The expression in the query, for a column of this type."""
        name = quoted(self.name)
        if self.type == "json":
            # a value of json that jsonb does not hold is for the reader to refuse
            return f"{name}::text AS {name}" if base in _JSON else f"to_json({name})::text AS {name}"
        if self.type == "numeric":
            return f"{name}::text AS {name}"
        if self.type == "interval":
            return f"{_length(name)} AS {name}"
        if self.type == "interval[]":
            each = _length("each")
            return f"CASE WHEN {name} IS NOT NULL THEN ARRAY(SELECT {each} FROM unnest({name}) AS each) END AS {name}"
        if self._narrows(base) and self.type == "float8":
            return f"{_nearest(name)} AS {name}"
        if self._narrows(base):
            each = _nearest("each")
            return f"CASE WHEN {name} IS NOT NULL THEN ARRAY(SELECT {each} FROM unnest({name}) AS each) END AS {name}"
        if base in ("inet", "_inet"):  # a cast to text adds the mask that its own text leaves out
            return f"{name}::text::{self.type} AS {name}" if base == "_inet" else f"abbrev({name}) AS {name}"
        if self.type == "timestamptz" and base == "timestamp":
            return f"{name} AT TIME ZONE 'UTC' AS {name}"
        if self.type.startswith("float8") and base.removeprefix("_") == "int8":
            return name  # whether a float holds it is seen here
        return name if base == self.type else f"{name}::{self.type} AS {name}"

    def _narrows(self, base: str) -> bool:
        """Whether the column may have numbers that no float holds; a cast would end the statement there."""
        return self.type.startswith("float8") and base.removeprefix("_") == "numeric"

    def misfit(self, base: str) -> str | None:
        """A condition for a row whose value the server cannot return, with the reason; None if it can return all.

        An array of several dimensions would come back as one list.
        """
        name, cases = quoted(self.name), []
        field = f"field '{self.name}':".replace("'", "''")
        if self.type.endswith("[]"):
            cases.append(f"WHEN array_ndims({name}) > 1 THEN '{field} {_FLAT}'")
        if self._narrows(base):
            exists = f"EXISTS (SELECT FROM unnest({name}) AS each WHERE NOT {_is_float('each')})"
            problem = f"'{field} it has ' || left({name}::text, 100) || '{_TOO_LARGE}'"
            cases.append(f"WHEN {exists if base.startswith('_') else f'NOT {_is_float(name)}'} THEN {problem}")
        return " ".join(cases) or None


def _length(interval: str) -> str:
    """The microseconds of an interval, as a text; the interval itself where it has months, which have no length."""
    months = f"EXTRACT(YEAR FROM {interval}) <> 0 OR EXTRACT(MONTH FROM {interval}) <> 0"
    micros = f"trunc(EXTRACT(EPOCH FROM {interval})::numeric * 1000000)::text"
    return f"CASE WHEN {months} THEN {interval}::text ELSE {micros} END"


def _is_binary(kind: pa.DataType) -> bool:
    """Whether it is bytes or a duration, which PostgreSQL's `to_jsonb` writes in its own way."""
    return kind in (pa.binary(), pa.duration("us"))


_FLAT = "it is an array of several dimensions; declare a list of lists"
_TOO_LARGE = ", which a float cannot hold; declare a Decimal, or cast it in a query"


def _nearest(numeric: str) -> str:
    """The float nearest to a number of any size; null where there is none."""
    return f"CASE WHEN abs({numeric}) < 5e-324 THEN 0 WHEN {_is_float(numeric)} THEN {numeric}::float8 END"


def _is_float(numeric: str) -> str:
    return f"(abs({numeric}) <= 1.7976931348623157e308 OR {numeric}::text IN ('NaN', 'Infinity', '-Infinity'))"


def misfits(fields: Iterable[AskedField], bases: Mapping[str, str]) -> list[str]:
    """A column that names the value of a row that the server cannot return, where there may be such rows."""
    cases = [misfit for field in fields if (misfit := field.misfit(bases[field.name]))]
    return [f"CASE {' '.join(cases)} END AS misfit"] if cases else []
