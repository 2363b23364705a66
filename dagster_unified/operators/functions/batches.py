"""What an author writes for Arrow batches of a keyed stream: a function with state and timers of the batch's key.

Knows no engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic

import pyarrow as pa

from dagster_unified.operators.functions.base import Function, OutputTag, TimerService
from dagster_unified.operators.functions.type_variables import Key, KeyOut

if TYPE_CHECKING:
    from dagster_unified.operators.time import TimeDomain


class KeyedBatchFunction(Function, ABC, Generic[Key]):
    """A function of Arrow batches on a keyed stream, with state and timers of their key, for `map_batches`.

    A batch has rows of one key. How a key's rows are cut into batches is not defined, in either mode: what goes beyond
    a batch belongs into the key's state, and a result of all rows into a timer. In BATCH a key's rows come in
    event-time order, and its timers fire after the last one. In STREAMING a batch has what a micro-batch brings for the
    key. In the body of an iteration it may be an `IterationListener`, which emits batches. Spark: `applyInArrow`, with
    the state of `applyInPandasWithState`.

    Examples:
        >>> import pyarrow as pa
        >>> import pyarrow.compute as pc
        >>> class Totals(KeyedBatchFunction[str]):
        ...     def open(self, runtime_context: RuntimeContext) -> None:
        ...         self.total = runtime_context.get_state(ValueStateDescriptor("total", int))
        ...     def process_batch(self, batch: pa.RecordBatch, ctx: KeyedBatchFunction.Context) -> None:
        ...         self.total.update((self.total.value() or 0) + pc.sum(batch["amount"]).as_py())
        ...         ctx.timer_service().register_event_time_timer(MAX_TIMESTAMP)
        ...     def on_timer(self, timestamp: int, ctx: KeyedBatchFunction.OnTimerContext) -> pa.RecordBatch:
        ...         return pa.RecordBatch.from_pydict({"value": [f"{ctx.get_current_key()}: {self.total.value()}"]})
        >>> sorted(collect(sales.key_by("shop").map_batches(Totals(), str)))
        ['north: 8', 'south: 4']
    """

    class Context(ABC, Generic[KeyOut]):
        """The context that `process_batch` gets with a batch."""

        @abstractmethod
        def get_current_key(self) -> KeyOut:
            """The key of the batch or timer."""

        @abstractmethod
        def timer_service(self) -> TimerService:
            """Time and timers."""

        @abstractmethod
        def output(self, tag: OutputTag[Any], batch: pa.RecordBatch) -> None:
            """Emits a batch of records to a side output.

            Its rows have the event times of its column `__ts`, or else those of the rows of `process_batch`, of which
            it then has as many; in `on_timer`, the timer's timestamp.
            """

    class OnTimerContext(Context[KeyOut]):
        """The context that `on_timer` gets with a timestamp."""

        @abstractmethod
        def time_domain(self) -> TimeDomain:
            """Which clock the timer listened to."""

    requires_time_sorted_input: bool = False
    """As `KeyedProcessFunction.requires_time_sorted_input`; a batch then has rows of one event time."""

    @abstractmethod
    def process_batch(self, batch: pa.RecordBatch, ctx: Context[Key]) -> pa.RecordBatch | None:
        """The records that a batch leads to, None for none.

        Event times are in the column `__ts`, where the stream has them; keep it where the number of rows changes.
        """

    def on_timer(self, timestamp: int, ctx: OnTimerContext[Key]) -> pa.RecordBatch | None:
        """The records that a timer leads to. They carry the timer's timestamp."""
        return None
