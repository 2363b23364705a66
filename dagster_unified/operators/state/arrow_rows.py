"""Rows of one type as Arrow streams, and what becomes of rows that were stored when the type was another.

A stream says itself which columns it has. So rows of several versions of a type may lie side by side, and each version
of the code reads all of them: fields that it has more have their defaults, those that it has not are left out.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa
from msgspec import inspect as mi

from dagster_unified.errors import StateError
from dagster_unified.operators.layout import TIMESTAMP, StreamLayout, declared
from dagster_unified.operators.state import chunks
from dagster_unified.operators.state.columns import TypedColumn, check_members, same_type
from dagster_unified.operators.state.evolution import FILL_IN, migration
from dagster_unified.records import RecordType, type_name


class ArrowRows:
    """Rows with the columns of a stream. `what` names them in errors: `state 'rows'`."""

    def __init__(self, what: str, layout: StreamLayout) -> None:
        self.what, self.schema = what, layout.schema
        self._records = layout.records

    @staticmethod
    def encode(rows: pa.Table) -> bytes:
        """Rows as an Arrow stream."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows.combine_chunks())
        found: bytes = sink.getvalue().to_pybytes()
        return found

    def streams(self, rows: pa.Table, step: int | None = None) -> list[bytes]:
        """Rows as streams of so many rows each.

        The last is small and takes more, so that what is added is held to its columns, and no large one is read.
        """
        starts = range(0, rows.num_rows, step or max(1, rows.num_rows))
        found = [self.encode(rows.slice(start, step)) for start in starts]
        if found and len(found[-1]) >= chunks.SMALL:
            found.append(self.encode(self.schema.empty_table()))
        return found

    def read(self, data: bytes) -> pa.Table:
        """The rows of a stream, as columns that are not copied where they are of this type."""
        with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
            return self.migrated(reader.read_all())

    def migrated(self, rows: pa.Table) -> pa.Table:
        """Rows of another type as rows of this one; raises `StateError` where `check` does, and for a missing value."""
        if rows.schema == self.schema:
            return rows
        self.check(rows.schema)
        try:
            arrays = [self._array(rows, field) for field in self.schema]
        except ValueError as error:
            raise StateError(f"{self.what}: {error}") from error
        return pa.Table.from_arrays(arrays, schema=self.schema)

    def check(self, stored: pa.Schema) -> None:
        """Raises `StateError` where rows with these columns cannot become rows of this type."""
        columns = [field for field in stored if field.name != TIMESTAMP]
        info = mi.type_info(self._records.python)
        if self._records.shape == "value":
            (own, *_) = self.schema.names
            fits = [field.name for field in columns] == [own] and migration(columns[0].type, info) is not None
        else:
            fits = migration(pa.struct(columns), info) is not None
        if not fits:
            has = ", ".join(f"{field.name}: {field.type}" for field in columns)
            raise StateError(
                f"{self.what} is declared {type_name(self._records.python)}, and has rows of {has}; fields may be added"
                " with a default, dropped, widened or made optional; otherwise keep the type as it was"
            )

    def _array(self, rows: pa.Table, field: pa.Field) -> pa.Array:
        """One column; raises `ValueError` for a missing value."""
        if field.name == TIMESTAMP:
            return (
                rows[TIMESTAMP].combine_chunks() if TIMESTAMP in rows.schema.names else pa.nulls(len(rows), field.type)
            )
        python = self._records.type_of(field.name)
        column = TypedColumn(f"{self.what}: field '{field.name}'", python)
        if field.name not in rows.schema.names:
            array, _ = column.encode([_default(self._records, field.name)])
            assert array is not None
            return array.take(pa.repeat(pa.scalar(0), len(rows)))
        stored = rows[field.name].combine_chunks()
        if stored.null_count and not field.nullable:
            raise ValueError(
                f"field '{field.name}' may not be None any more, and is None {stored.null_count} times; {FILL_IN}"
            )
        if stored.type == field.type:
            return stored
        if same_type(stored.type, field.type):
            check_members(stored, mi.type_info(python))
            return declared([stored], pa.schema([field])).column(0)
        if pa.types.is_int64(stored.type) and pa.types.is_float64(field.type):
            return stored.cast(field.type)
        array, _ = column.encode(column.decode(stored, {}))
        assert array is not None
        return array


def _default(records: RecordType, name: str) -> Any:
    """What a field is that stored rows do not have."""
    info = mi.type_info(records.python)
    assert isinstance(info, (mi.NamedTupleType, mi.DataclassType, mi.StructType))
    field = next(field for field in info.fields if field.name == name)
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
