"""Arrow list state: rows of a key, kept as Arrow batches, read as a table, and as columns of a savepoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic

import msgspec
import pyarrow as pa
from msgspec import inspect as mi

from dagster_unified.arrow_types import has
from dagster_unified.errors import PipelineError, StateError
from dagster_unified.operators.functions.type_variables import T, V
from dagster_unified.operators.layout import TIMESTAMP, StreamLayout, declared, in_declared_types
from dagster_unified.operators.state import chunks
from dagster_unified.operators.state.backend import StateBackend
from dagster_unified.operators.state.chunks import SpilledRows
from dagster_unified.operators.state.columns import Encoded, TypedColumn, check_members, is_empty, same_type
from dagster_unified.operators.state.descriptors import OneTypeDescriptor, StateDescriptor, StateTtlConfig
from dagster_unified.operators.state.evolution import FILL_IN, migration
from dagster_unified.operators.state.handles import State
from dagster_unified.records import RecordType, record_type, type_name

if TYPE_CHECKING:
    from typing_extensions import TypeForm


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
        data: bytes = sink.getvalue().to_pybytes()
        return data

    def streams(self, rows: pa.Table, step: int | None = None) -> list[bytes]:
        """Rows as streams of this many rows each.

        The last stream is small and takes more rows: so added rows are checked against its columns, and no large stream
        is read.
        """
        starts = range(0, rows.num_rows, step or max(1, rows.num_rows))
        streams = [self.encode(rows.slice(start, step)) for start in starts]
        if streams and len(streams[-1]) >= chunks.SMALL:
            streams.append(self.encode(self.schema.empty_table()))
        return streams

    def read(self, data: bytes) -> pa.Table:
        """The rows of a stream; columns of this type are not copied."""
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
        """Raise `StateError` where rows with these columns cannot become rows of this type."""
        columns = [field for field in stored if field.name != TIMESTAMP]
        info = mi.type_info(self._records.python)
        if self._records.shape == "value":
            (value_column, *_) = self.schema.names
            fits = [field.name for field in columns] == [value_column] and migration(columns[0].type, info) is not None
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
    """The value of a field that stored rows do not have."""
    info = mi.type_info(records.python)
    assert isinstance(info, (mi.NamedTupleType, mi.DataclassType, mi.StructType))
    field = next(field for field in info.fields if field.name == name)
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


PIECE = 4
"""Rows of a table become streams of this many times `chunks.SMALL` bytes; subtasks get whole streams."""

LARGEST = (1 << 31) - (1 << 20)
"""Bytes of streams that become one array: Arrow counts those of a column with 31 bits."""


class RowsColumn(TypedColumn):
    """Lists of streams, as lists of rows."""

    def __init__(self, what: str, layout: StreamLayout) -> None:
        super().__init__(what, list[bytes])
        self._rows = ArrowRows(what, layout)
        self._row_type = type_name(layout.records.python)
        kind = pa.list_(pa.field("element", pa.struct(list(layout.schema))))
        self.arrow = None if has(kind, is_empty) else kind

    def encode(self, values: Sequence[Any]) -> tuple[pa.Array | None, Encoded]:
        return super().encode(values) if self.arrow is None else (self.lists(values), {})

    def decode(self, array: pa.Array | None, encoded: Encoded) -> list[Any]:
        rows = [] if array is None else self.tables(array)
        total = sum(table.num_rows for table in rows if table is not None)
        step = PIECE * chunks.SMALL * total // max(1, 0 if array is None else array.nbytes)
        values: list[Any] = [None if table is None else self._rows.streams(table, max(1, step)) for table in rows]
        for place, data in encoded.items():
            values[place] = self.decoded(data)
        return values

    def check(self, stored: pa.DataType) -> None:
        if not (pa.types.is_list(stored) and pa.types.is_struct(stored.value_type)):
            raise StateError(
                f"{self.what} is declared with rows of {self._row_type}, and the savepoint has {stored}; keep the type"
                " as it was"
            )
        self._rows.check(pa.schema(list(stored.value_type)))

    def lists(self, values: Sequence[Sequence[bytes] | None]) -> pa.ListArray:
        """Lists of streams as lists of rows."""
        if sum(map(len, chain.from_iterable(streams or () for streams in values))) > LARGEST:
            raise pa.ArrowCapacityError(f"{self.what} has more than {LARGEST} bytes")
        pieces = [[self._rows.read(data) for data in streams or ()] for streams in values]
        rows = pa.concat_tables([self._rows.schema.empty_table(), *chain.from_iterable(pieces)])
        columns = [column.combine_chunks() for column in rows.columns]
        structs = pa.StructArray.from_arrays(columns, fields=list(rows.schema))
        sizes = (sum(piece.num_rows for piece in tables) for tables in pieces)
        return pa.ListArray.from_arrays(offsets(values, sizes), structs, type=self.arrow)

    def tables(self, lists: pa.ListArray) -> list[pa.Table | None]:
        """Lists of rows, also of another type, each as a table of this type."""
        self.check(lists.type)
        flat = lists.flatten()
        if flat.null_count:
            raise StateError(f"{self.what}: a row may not be None, and is None {flat.null_count} times; leave it out")
        rows = self._rows.migrated(pa.Table.from_batches([pa.RecordBatch.from_struct_array(flat)]))
        tables: list[pa.Table | None] = []
        start = 0
        for size in lists.value_lengths().to_pylist():
            tables.append(None if size is None else rows.slice(start, size))
            start += size or 0
        return tables


class RowsByKeyColumn(TypedColumn):
    """Maps to streams, or to lists of streams, as maps to lists of rows."""

    def __init__(self, what: str, key: Any, rows: RowsColumn, several: bool) -> None:
        value: Any = list[bytes] if several else bytes
        super().__init__(what, dict[key, value])
        self._key, self._rows, self._several = TypedColumn(what, key), rows, several
        none = self._key.arrow is None or rows.arrow is None
        self.arrow = None if none else pa.map_(self._key.arrow, rows.arrow)

    def encode(self, values: Sequence[Any]) -> tuple[pa.Array | None, Encoded]:
        if self.arrow is None:
            return super().encode(values)
        keys, encoded = self._key.encode([key for by_key in values for key in by_key or ()])
        if encoded:
            return None, {i: msgspec.msgpack.encode(by_key) for i, by_key in enumerate(values) if by_key is not None}
        items = [item for by_key in values for item in (by_key or {}).values()]
        lists = self._rows.lists(items if self._several else [[data] for data in items])
        places = offsets(values, (len(by_key or ()) for by_key in values))
        return pa.MapArray.from_arrays(places, keys, lists, type=self.arrow), {}

    def decode(self, array: pa.Array | None, encoded: Encoded) -> list[Any]:
        maps: list[Any] = []
        if array is not None:
            self.check(array.type)
            places = array.offsets.to_pylist()
            first, last = places[0], places[-1]
            keys = self._key.decode(array.keys.slice(first, last - first), {})
            items = self._items(array.items.slice(first, last - first))
            entries = list(zip(keys, items, strict=True))
            spans = zip(array.is_valid().to_pylist(), places[:-1], places[1:], strict=True)
            maps = [dict(entries[start - first : end - first]) if valid else None for valid, start, end in spans]
        for place, data in encoded.items():
            maps[place] = self.decoded(data)
        return maps

    def check(self, stored: pa.DataType) -> None:
        if not pa.types.is_map(stored):
            super().check(stored)
        self._key.check(stored.key_type)
        self._rows.check(stored.item_type)

    def _items(self, lists: pa.ListArray) -> list[Any]:
        if self._several:
            return self._rows.decode(lists, {})
        return [None if rows is None else ArrowRows.encode(rows) for rows in self._rows.tables(lists)]


def offsets(values: Sequence[object], sizes: Iterable[int]) -> pa.Array:
    """The offsets of lists with these sizes; null for a value that is None."""
    starts: list[int | None] = []
    end = 0
    for value, size in zip(values, sizes, strict=True):
        starts.append(None if value is None else end)
        end += size
    return pa.array([*starts, end], pa.int32())


class ArrowListState(State, Generic[T]):
    """Rows of the current key, in the order of adding; there is an example at `ArrowListStateDescriptor`."""

    def __init__(self, backend: StateBackend, descriptor: ArrowListStateDescriptor[T]) -> None:
        super().__init__(backend, descriptor)
        self._what = f"state '{descriptor.name}'"
        self._records = record_type(descriptor.type, self._what)
        self._rows = ArrowRows(self._what, StreamLayout(self._records))

    def _value_type(self, descriptor: Any) -> Any:
        return bytes

    def get(self) -> pa.Table:
        """All rows; their columns are not copied."""
        entries: Sequence[bytes] = self._backend.current.get(self._name) or []
        return pa.concat_tables([self._records.schema.empty_table(), *map(self._rows.read, entries)])

    def add(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Append rows. They need the columns of the declared type; other columns are left out."""
        added = self._checked(rows)
        if not added.num_rows:
            return
        entries = self._backend.current.setdefault(self._name, [])
        end = entries.inline if isinstance(entries, SpilledRows) else entries
        if end and len(end[-1]) < chunks.SMALL:
            added = pa.concat_tables([self._rows.read(end[-1]), added])
            end.pop()
        end += self._rows.streams(added)

    def update(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Replace all rows."""
        replacement = self._checked(rows)
        self.clear()
        self.add(replacement)

    def merge(self, entries: Sequence[Any]) -> None:
        self._backend.current[self._name] = [data for batches in entries for data in batches]

    def _checked(self, rows: object) -> pa.Table:
        records = self._records
        if not isinstance(rows, (pa.RecordBatch, pa.Table)):
            raise StateError(
                f"{self._what} holds rows of {records.describe()}, and was given a {type(rows).__name__}; give it a"
                " pyarrow.RecordBatch or a pyarrow.Table"
            )
        missing = next((name for name in records.names if name not in rows.schema.names), None)
        if missing is not None:
            raise StateError(
                f"{self._what} holds rows of {records.describe()}, and the given rows have no column '{missing}'; they"
                f" have {', '.join(rows.schema.names)}"
            )
        batches = [rows] if isinstance(rows, pa.RecordBatch) else rows.to_batches()
        typed = [in_declared_types(batch, records.schema, records, self._what, "given rows") for batch in batches]
        return pa.Table.from_batches(typed, records.schema)


class ArrowListStateDescriptor(OneTypeDescriptor[ArrowListState[V]], Generic[V]):
    """A list of rows per key, kept as Arrow batches and read as a table; `type` is the type of a row.

    For functions of batches: rows stay columns. Few rows are kept together, and what has grown large costs a
    micro-batch what it adds, not its whole length. It lasts as `ValueStateDescriptor` says, and has no time to live. As
    operator state it is its batches that are split over subtasks. A savepoint has it as a list of records, like that of
    a `ListState`.

    Examples:
        >>> import pyarrow as pa
        >>> import pyarrow.compute as pc
        >>> class Medians(KeyedBatchFunction[str]):
        ...     def open(self, runtime_context: RuntimeContext) -> None:
        ...         self.sales = runtime_context.get_state(ArrowListStateDescriptor("sales", Sale))
        ...     def process_batch(self, batch: pa.RecordBatch, ctx: KeyedBatchFunction.Context) -> None:
        ...         self.sales.add(batch)
        ...         ctx.timer_service().register_event_time_timer(MAX_TIMESTAMP)
        ...     def on_timer(self, timestamp: int, ctx: KeyedBatchFunction.OnTimerContext) -> pa.RecordBatch:
        ...         (median,) = pc.quantile(self.sales.get()["amount"], 0.5).to_pylist()
        ...         return pa.RecordBatch.from_pydict({"f0": [ctx.get_current_key()], "f1": [median]})
        >>> sorted(collect(sales.key_by("shop").map_batches(Medians(), tuple[str, float])))
        [('north', 4.0), ('south', 4.0)]
    """

    kind = "arrow list"
    handle_type = ArrowListState
    spilled = SpilledRows

    def __init__(self, name: str, type: TypeForm[V]) -> None:  # noqa: A002
        super().__init__(name, type, None)

    @property
    def stored_type(self) -> Any:
        return list[bytes]

    def column(self, what: str) -> TypedColumn:
        return RowsColumn(what, StreamLayout(record_type(self.type, what)))

    def stores_as(self, other: StateDescriptor[Any]) -> bool:
        return isinstance(other, ArrowListStateDescriptor) and self.type == other.type

    def enable_time_to_live(self, ttl: StateTtlConfig) -> None:
        raise PipelineError(f"arrow list state '{self.name}' has no time to live; clear it in a timer")
