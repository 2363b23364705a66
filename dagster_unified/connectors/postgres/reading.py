"""Reads rows as Arrow batches of a record type: what is asked of the server for each field, and what becomes of it.

The server casts a column to the type that its field has, so that a batch needs little work in a worker. Knows neither
splits nor positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa
from msgspec import inspect as mi

from dagster_unified.arrow_types import has
from dagster_unified.connectors.database.reading import MONTHS, REFUSED, exact_floats, first
from dagster_unified.connectors.exact_times import python_times
from dagster_unified.connectors.nested import from_json
from dagster_unified.connectors.postgres.names import quoted
from dagster_unified.connectors.splits import Malformed
from dagster_unified.nulls import forbidden_null
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
            return f"to_jsonb({name})::text AS {name}"
        if self.type == "numeric":
            return f"{name}::text AS {name}"
        if self.type == "interval":
            return f"{_length(name)} AS {name}"
        if self.type == "interval[]":
            each = _length("each")
            return f"CASE WHEN {name} IS NOT NULL THEN ARRAY(SELECT {each} FROM unnest({name}) AS each) END AS {name}"
        if base in ("inet", "_inet"):  # a cast to text adds the mask that its own text leaves out
            return f"{name}::text::{self.type} AS {name}" if base == "_inet" else f"abbrev({name}) AS {name}"
        if self.type == "timestamptz" and base == "timestamp":
            return f"{name} AT TIME ZONE 'UTC' AS {name}"
        if self.type.startswith("float8") and base.removeprefix("_") == "int8":
            return name  # whether a float holds it is seen here
        return name if base == self.type else f"{name}::{self.type} AS {name}"

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


def flattened(fields: Iterable[ReadField]) -> list[str]:
    """Where there are arrays, a column with the place of the field whose array has several dimensions.

    Such an array comes as one list.
    """
    arrays = [(place, field.name) for place, field in enumerate(fields) if field.type.endswith("[]")]
    cases = [f"WHEN array_ndims({quoted(name)}) > 1 THEN {place}" for place, name in arrays]
    return [f"CASE {' '.join(cases)} END AS flattened"] if cases else []


def _check_flattened(batch: pa.RecordBatch, fields: Sequence[ReadField]) -> None:
    if batch.num_columns == len(fields):
        return
    places = batch.columns[-1].drop_null()
    if len(places):
        name = fields[places[0].as_py()].name
        raise ValueError(f"field '{name}': it is an array of several dimensions; declare a list of lists")


def _by_field(batch: pa.RecordBatch, fields: Sequence[ReadField]) -> Iterator[tuple[ReadField, pa.Array]]:
    return zip(fields, batch.columns[: len(fields)], strict=True)


def converted(batch: pa.RecordBatch, fields: list[ReadField], place: str) -> Iterator[pa.RecordBatch | Malformed]:
    """A batch in the columns of the records, and the rows of it that do not fit."""
    try:
        _check_flattened(batch, fields)
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
    for field, column in _by_field(batch, fields):
        try:
            field.converted(column)
        except REFUSED as found:
            return Malformed(place, content, f"field '{field.name}': {shorten(str(found))[1:-1]}")
    return Malformed(place, content, str(error))
