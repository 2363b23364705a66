"""Arrow list state: rows of a key, kept as Arrow batches and read as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic

import pyarrow as pa

from dagster_unified.errors import PipelineError, StateError
from dagster_unified.operators.functions.type_variables import T, V
from dagster_unified.operators.map_batches import in_declared_types
from dagster_unified.operators.state.backend import StateBackend
from dagster_unified.operators.state.chunks import LargeRows
from dagster_unified.operators.state.descriptors import OneTypeDescriptor
from dagster_unified.operators.state.handles import State
from dagster_unified.operators.state.ttl import StateTtlConfig
from dagster_unified.records import record_type

if TYPE_CHECKING:
    from typing_extensions import TypeForm

SMALL = 64 << 10
"""Bytes of a batch from which on rows are not added to it any more."""


class ArrowListState(State, Generic[T]):
    """Rows of the current key, in the order of adding; there is an example at `ArrowListStateDescriptor`."""

    def __init__(self, backend: StateBackend, descriptor: ArrowListStateDescriptor[T]) -> None:
        super().__init__(backend, descriptor)
        self._what = f"state '{descriptor.name}'"
        self._records = record_type(descriptor.type, self._what)

    def _value_type(self, descriptor: Any) -> Any:
        return bytes

    def get(self) -> pa.Table:
        """All rows, as columns that are not copied."""
        entries: Sequence[bytes] = self._backend.current.get(self._name) or []
        return pa.concat_tables([self._records.schema.empty_table(), *map(self._read, entries)])

    def add(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Appends rows. They have the columns of the declared type; other columns are left out."""
        given = self._checked(rows)
        if not given.num_rows:
            return
        entries = self._backend.current.setdefault(self._name, [])
        end = entries.inline if isinstance(entries, LargeRows) else entries
        if end and len(end[-1]) < SMALL:
            given = pa.concat_tables([self._read(end.pop()), given])
        end.append(to_bytes(given))

    def update(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Replaces all rows."""
        given = self._checked(rows)
        self.clear()
        self.add(given)

    def merge(self, entries: Sequence[Any]) -> None:
        self._backend.current[self._name] = [data for own in entries for data in own]

    def _read(self, data: bytes) -> pa.Table:
        return from_bytes(data, self._records.schema, self._what)

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
        own = [in_declared_types(batch, records.schema, records, self._what, "given rows") for batch in batches]
        return pa.Table.from_batches(own, records.schema)


class ArrowListStateDescriptor(OneTypeDescriptor[ArrowListState[V]], Generic[V]):
    """A list of rows per key, kept as Arrow batches and read as a table; `type` is the type of a row.

    For functions of batches: rows stay columns. Few rows are kept together, and what has grown large costs a
    micro-batch what it adds, not its whole length. It lasts as `ValueStateDescriptor` says, and has no time to live. As
    operator state it is its batches that are split over subtasks. In a savepoint's table it is a list of Arrow streams.

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
    chunks = LargeRows

    def __init__(self, name: str, type: TypeForm[V]) -> None:  # noqa: A002
        super().__init__(name, type, None)

    @property
    def stored_type(self) -> Any:
        return list[bytes]

    def enable_time_to_live(self, ttl: StateTtlConfig) -> None:
        raise PipelineError(f"arrow list state '{self.name}' has no time to live; clear it in a timer")


def to_bytes(rows: pa.Table) -> bytes:
    """Rows as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows.combine_chunks())
    found: bytes = sink.getvalue().to_pybytes()
    return found


def from_bytes(data: bytes, schema: pa.Schema, what: str) -> pa.Table:
    """The inverse of `to_bytes`; raises `StateError` where the rows have other columns than `schema`."""
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        rows = reader.read_all()
    if rows.schema != schema:
        raise StateError(
            f"{what} was stored with the columns {', '.join(f'{f.name}: {f.type}' for f in rows.schema)}, and is"
            f" declared with {', '.join(f'{f.name}: {f.type}' for f in schema)}; keep the type as it was, or start"
            " without state"
        )
    return rows
