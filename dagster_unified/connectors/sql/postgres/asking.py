"""What is asked of the server for each field of a record.

The server casts a column to the type that its field has, so that a batch needs little work in a worker. Knows neither
splits nor positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from dagster_unified.arrow_types import has
from dagster_unified.connectors.sql.postgres.names import quoted
from dagster_unified.records import RecordType

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
"""Types of columns from which fields are read, by the type that holds all of a field's values."""

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
_ELEMENTS = ("bool", "int8", "float8", "text", "bytea", "interval")
"""Elements of lists that are read as arrays; PostgreSQL's JSON has bytes and intervals in forms of its own."""

_JSON = ("json", "jsonb")


@dataclass(frozen=True)
class AskedField:
    """A field of a record, as it is asked for."""

    name: str
    arrow: pa.DataType

    @classmethod
    def of(cls, records: RecordType) -> list[AskedField]:
        """The fields of a record type."""
        return [cls(field.name, field.type) for field in records.schema]

    @property
    def type(self) -> str:
        """The type of PostgreSQL that holds all its values; an array's ends with `[]`, and `json` is all the rest."""
        simple = self._simple(self.arrow)
        if simple is not None:
            return simple
        element = self._simple(self.arrow.value_type) if pa.types.is_list(self.arrow) else None
        return f"{element}[]" if element in _ELEMENTS else "json"

    def reads(self, base: str) -> bool:
        """Whether it is read from a column whose type has this name in the catalog."""
        if self.type == "json":
            return base in _JSON or ((base == "record" or base.startswith("_")) and not has(self.arrow, _is_binary))
        if self.type.endswith("[]"):
            return base in [f"_{name}" for name in _READ_FROM[self.type[:-2]]]
        return base in _READ_FROM[self.type]

    def expression(self, base: str) -> str:
        """What is asked of the server, for a column of such a type."""
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
        """Whether the column has numbers that no float holds, at which a cast would end the statement."""
        return self.type.startswith("float8") and base.removeprefix("_") == "numeric"

    def misfit(self, base: str) -> str | None:
        """Of a row whose value the server cannot give, what is wrong; None if it gives all.

        Of an array of several dimensions it would give one list.
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

    @staticmethod
    def _simple(kind: pa.DataType) -> str | None:
        return "numeric" if pa.types.is_decimal(kind) else _TYPES.get(kind)


def _length(interval: str) -> str:
    """The microseconds of an interval, as a text; the interval itself where it has months, which have no length."""
    months = f"EXTRACT(YEAR FROM {interval}) <> 0 OR EXTRACT(MONTH FROM {interval}) <> 0"
    micros = f"trunc(EXTRACT(EPOCH FROM {interval})::numeric * 1000000)::text"
    return f"CASE WHEN {months} THEN {interval}::text ELSE {micros} END"


def _is_binary(kind: pa.DataType) -> bool:
    """Whether it is bytes or a duration, which PostgreSQL's `to_jsonb` writes as nobody else reads them."""
    return kind in (pa.binary(), pa.duration("us"))


_FLAT = "it is an array of several dimensions; declare a list of lists"
_TOO_LARGE = ", which a float cannot hold; declare a Decimal, or cast it in a query"


def _nearest(numeric: str) -> str:
    """The float that is the nearest to a number of any size; null where there is none."""
    return f"CASE WHEN abs({numeric}) < 5e-324 THEN 0 WHEN {_is_float(numeric)} THEN {numeric}::float8 END"


def _is_float(numeric: str) -> str:
    return f"(abs({numeric}) <= 1.7976931348623157e308 OR {numeric}::text IN ('NaN', 'Infinity', '-Infinity'))"


def misfits(fields: Iterable[AskedField], bases: Mapping[str, str]) -> list[str]:
    """A column that says of a row which value the server cannot give, where there may be such rows."""
    cases = [misfit for field in fields if (misfit := field.misfit(bases[field.name]))]
    return [f"CASE {' '.join(cases)} END AS misfit"] if cases else []
