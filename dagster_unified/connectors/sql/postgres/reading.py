"""Reads rows as Arrow batches of a record type: what is asked of the server for each field, and what becomes of it.

The server casts a column to the type that its field has, so that a batch needs little work in a worker. Knows neither
splits nor positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa
from msgspec import inspect as mi

from dagster_unified.arrow_types import forbidden_null, has
from dagster_unified.connectors.exact_times import python_times
from dagster_unified.connectors.nested import from_json
from dagster_unified.connectors.protocol.frame import Malformed
from dagster_unified.connectors.sql.postgres.names import quoted
from dagster_unified.connectors.sql.reading import MONTHS, REFUSED, exact_floats, first
from dagster_unified.records import RecordType, shorten

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
class ReadField:
    """A field of a record, as it is read."""

    name: str
    arrow: pa.DataType
    info: mi.Type

    @classmethod
    def of(cls, records: RecordType) -> list[ReadField]:
        """The fields of a record type."""
        return [cls(f.name, f.type, info) for f, info in zip(records.schema, records.types, strict=True)]

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

    def misfit(self, base: str, place: int) -> str | None:
        """Of a row whose value the server cannot give, the place of the field and what is wrong; None if it gives all.

        Of an array of several dimensions it would give one list.
        """
        name = quoted(self.name)
        cases = []
        if self.type.endswith("[]"):
            cases.append(f"WHEN array_ndims({name}) > 1 THEN '{place} {_FLAT}'")
        if self._narrows(base):
            exists = f"EXISTS (SELECT FROM unnest({name}) AS each WHERE NOT {_is_float('each')})"
            problem = f"'{place} it has ' || left({name}::text, 100) || '{_TOO_LARGE}'"
            cases.append(f"WHEN {exists if base.startswith('_') else f'NOT {_is_float(name)}'} THEN {problem}")
        return " ".join(cases) or None

    def converted(self, column: pa.Array) -> pa.Array:
        """The values in the field's Arrow type; raises a `ValueError` for what it does not hold."""
        found = self._cast(column)
        path = forbidden_null(found, self.info)
        if path is not None:
            raise ValueError(
                f"it has a null at '{path}', and its type does not allow None there"
                if path
                else "it is null, and its type does not allow None"
            )
        return found

    def _cast(self, column: pa.Array) -> pa.Array:
        if self.type == "json":
            decode = from_json(self.arrow)
            return pa.array([None if text is None else decode(text) for text in column.to_pylist()], self.arrow)
        if self.type == "interval":
            return _durations(column)
        if self.type == "interval[]":
            try:
                lists = [None if row is None else [t and int(t) for t in row] for row in column.to_pylist()]
            except ValueError:
                raise ValueError(MONTHS) from None
            return pa.array(lists, pa.list_(pa.int64())).cast(self.arrow)
        if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
            column = python_times(column)
        if self.type == "float8":
            return exact_floats(column)
        if self.type == "float8[]":
            exact_floats(column.flatten())
        return column if column.type == self.arrow else column.cast(self.arrow)

    @staticmethod
    def _simple(kind: pa.DataType) -> str | None:
        return "numeric" if pa.types.is_decimal(kind) else _TYPES.get(kind)


def _length(interval: str) -> str:
    """The microseconds of an interval, as a text; the interval itself where it has months, which have no length."""
    months = f"EXTRACT(YEAR FROM {interval}) <> 0 OR EXTRACT(MONTH FROM {interval}) <> 0"
    micros = f"trunc(EXTRACT(EPOCH FROM {interval})::numeric * 1000000)::text"
    return f"CASE WHEN {months} THEN {interval}::text ELSE {micros} END"


def _durations(column: pa.Array) -> pa.Array:
    try:
        return column.cast(pa.int64()).cast(pa.duration("us"))
    except pa.ArrowInvalid:
        raise ValueError(MONTHS) from None


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


def misfits(fields: Iterable[ReadField], bases: Mapping[str, str]) -> list[str]:
    """A column that says of a row which value the server cannot give, where there may be such rows."""
    cases = [misfit for place, field in enumerate(fields) if (misfit := field.misfit(bases[field.name], place))]
    return [f"CASE {' '.join(cases)} END AS misfit"] if cases else []


def _check_misfits(batch: pa.RecordBatch, fields: Sequence[ReadField]) -> None:
    if batch.num_columns == len(fields):
        return
    told = batch.columns[-1].drop_null()
    if len(told):
        place, _, problem = told[0].as_py().partition(" ")
        raise ValueError(f"field '{fields[int(place)].name}': {problem}")


def _by_field(batch: pa.RecordBatch, fields: Sequence[ReadField]) -> Iterator[tuple[ReadField, pa.Array]]:
    return zip(fields, batch.columns[: len(fields)], strict=True)


def converted(batch: pa.RecordBatch, fields: list[ReadField], place: str) -> Iterator[pa.RecordBatch | Malformed]:
    """A batch in the columns of the records, and the rows of it that do not fit."""
    try:
        _check_misfits(batch, fields)
        columns = [field.converted(column) for field, column in _by_field(batch, fields)]
    except REFUSED as error:
        if batch.num_rows > 1:
            half = batch.num_rows // 2
            yield from converted(batch.slice(0, half), fields, place)
            yield from converted(batch.slice(half), fields, place)
        else:
            yield _malformed(batch, fields, place, error)
    else:
        yield pa.RecordBatch.from_arrays(columns, [field.name for field in fields])


def _malformed(batch: pa.RecordBatch, fields: list[ReadField], place: str, error: Exception) -> Malformed:
    """A row that does not fit, and the first of its fields that does not."""
    row = {field.name: first(column) for field, column in _by_field(batch, fields)}
    content = msgspec.json.encode(row, enc_hook=str).decode()
    try:
        _check_misfits(batch, fields)  # what the server could not give is null here
    except ValueError as misfit:
        return Malformed(place, content, str(misfit))
    for field, column in _by_field(batch, fields):
        try:
            field.converted(column)
        except REFUSED as found:
            return Malformed(place, content, f"field '{field.name}': {shorten(str(found))[1:-1]}")
    return Malformed(place, content, str(error))
