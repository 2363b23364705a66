"""Arrow list state: rows of a key, kept as Arrow batches and read as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic

import pyarrow as pa

from dagster_unified.errors import PipelineError, StateError
from dagster_unified.operators.functions.type_variables import T, V
from dagster_unified.operators.layout import StreamLayout, in_declared_types
from dagster_unified.operators.state import chunks
from dagster_unified.operators.state.arrow_rows import ArrowRows
from dagster_unified.operators.state.backend import StateBackend
from dagster_unified.operators.state.chunks import SpilledRows
from dagster_unified.operators.state.columns import TypedColumn
from dagster_unified.operators.state.descriptors import OneTypeDescriptor, StateDescriptor
from dagster_unified.operators.state.handles import State
from dagster_unified.operators.state.row_columns import RowsColumn
from dagster_unified.operators.state.ttl import StateTtlConfig
from dagster_unified.records import record_type

if TYPE_CHECKING:
    from typing_extensions import TypeForm


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
        """All rows, as columns that are not copied."""
        entries: Sequence[bytes] = self._backend.current.get(self._name) or []
        return pa.concat_tables([self._records.schema.empty_table(), *map(self._rows.read, entries)])

    def add(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Appends rows. They have the columns of the declared type; other columns are left out."""
        given = self._checked(rows)
        if not given.num_rows:
            return
        entries = self._backend.current.setdefault(self._name, [])
        end = entries.inline if isinstance(entries, SpilledRows) else entries
        if end and len(end[-1]) < chunks.SMALL:
            given = pa.concat_tables([self._rows.read(end[-1]), given])
            end.pop()
        end += self._rows.streams(given)

    def update(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Replaces all rows."""
        given = self._checked(rows)
        self.clear()
        self.add(given)

    def merge(self, entries: Sequence[Any]) -> None:
        self._backend.current[self._name] = [data for own in entries for data in own]

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
