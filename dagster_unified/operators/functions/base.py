"""The function classes that an author may subclass, and their contexts.

Plain callables work too wherever a function has one method. Names and methods are PyFlink's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import pyarrow as pa

from dagster_unified.errors import PipelineError, UnsupportedError
from dagster_unified.operators.functions.type_variables import IN, OUT, A, In, K, Key, KeyOut, Out, R, T, V
from dagster_unified.operators.metrics import MetricGroup, Registry
from dagster_unified.operators.state.backend import KeyedStateBackend, StateBackend
from dagster_unified.operators.state.descriptors import StateDescriptor
from dagster_unified.operators.state.handles import (
    AggregatingState,
    AggregatingStateDescriptor,
    ListState,
    ListStateDescriptor,
    MapState,
    MapStateDescriptor,
    ReducingState,
    ReducingStateDescriptor,
)

if TYPE_CHECKING:
    from datetime import datetime

    from typing_extensions import TypeForm

    from dagster_unified.operators.time import TimeDomain


class KeyedStateStore(ABC):
    """Where a function gets its state. `get_state` returns every kind; the other names are PyFlink's for the same."""

    @abstractmethod
    def get_state(self, descriptor: StateDescriptor[R]) -> R:
        """The handle on the state that `descriptor` names: for a `ValueStateDescriptor`, a `ValueState`."""

    def get_list_state(self, descriptor: ListStateDescriptor[V]) -> ListState[V]:
        """The list state that `descriptor` names."""
        return self.get_state(descriptor)

    def get_map_state(self, descriptor: MapStateDescriptor[K, V]) -> MapState[K, V]:
        """The map state that `descriptor` names."""
        return self.get_state(descriptor)

    def get_reducing_state(self, descriptor: ReducingStateDescriptor[V]) -> ReducingState[V]:
        """The reducing state that `descriptor` names."""
        return self.get_state(descriptor)

    def get_aggregating_state(self, descriptor: AggregatingStateDescriptor[IN, A, OUT]) -> AggregatingState[IN, OUT]:
        """The aggregating state that `descriptor` names."""
        return self.get_state(descriptor)


class BackendStore(KeyedStateStore):
    """The state of a backend's scope."""

    def __init__(self, backend: StateBackend) -> None:
        self._backend = backend

    def get_state(self, descriptor: StateDescriptor[Any]) -> Any:
        return self._backend.bind(descriptor)


class OutputTag(Generic[T]):
    """Names a side output and its record type (Flink: *Side Outputs*).

    A function emits to it with `yield tag, value` or `ctx.output(tag, value)`, alike in both modes; `get_side_output`
    reads it.

    Examples:
        >>> large = OutputTag("large", Sale)
        >>> class Split(ProcessFunction[Sale, Sale]):
        ...     def process_element(self, value, ctx):
        ...         if value.amount > 4:
        ...             yield large, value
        ...         else:
        ...             yield value
        >>> usual = sales.process(Split())
        >>> [sale.amount for sale in collect(usual)], [sale.amount for sale in collect(usual.get_side_output(large))]
        ([3, 4], [5])
    """

    def __init__(self, name: str, output_type: TypeForm[T]) -> None:
        if not name:
            raise PipelineError("an output tag needs a name")
        self.name = name
        self.output_type: Any = output_type

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OutputTag) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"OutputTag({self.name!r})"


SideOutput = tuple[OutputTag[Any], Any]
"""A record for a side output, as a function yields it: its tag, and the record."""


class Subtask(NamedTuple):
    """A parallel instance of a task: the partition that it works on, and which attempt at it this is. Both from 0."""

    number: int = 0
    attempt: int = 0


FIRST = Subtask()


class RuntimeContext(KeyedStateStore):
    """Tells a function where it runs; where its stream is keyed, also gives access to keyed state.

    A function gets it in `open`.

    Examples:
        >>> class Located(MapFunction[int, str]):
        ...     def open(self, runtime_context: RuntimeContext) -> None:
        ...         self.subtask = runtime_context.get_index_of_this_subtask()
        ...     def map(self, value: int) -> str:
        ...         return f"{value} on partition {self.subtask}"
        >>> collect(numbers.map(Located()))[0]
        '1 on partition 0'
    """

    def __init__(
        self, task_name: str, subtask: Subtask, parallelism: int, registry: Registry, state: KeyedStateBackend | None
    ) -> None:
        self._task_name = task_name
        self._subtask = subtask
        self._parallelism = parallelism
        self._registry = registry
        self.keyed_state = state

    def get_task_name(self) -> str:
        """The operator's name."""
        return self._task_name

    def get_index_of_this_subtask(self) -> int:
        """The index of the partition that this instance works on, from 0."""
        return self._subtask.number

    def get_attempt_number(self) -> int:
        """How often this partition has been tried before, 0 for the first attempt.

        Spark counts: it tries a failed task again within its job. When Dagster retries a stage, or a STREAMING job is
        restarted, a new Spark job starts, and the count starts from 0 again. In the harness it is always 0.
        """
        return self._subtask.attempt

    def get_number_of_parallel_subtasks(self) -> int:
        """The operator's parallelism; 0 where the engine decides it while the job runs."""
        return self._parallelism

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter of the pipeline; its total appears in the run's metadata under `name` alone.

        `get_metrics_group` has counters of this operator, and other kinds of metrics.
        """
        self._registry.metrics.count(name, amount)

    def get_metrics_group(self) -> MetricGroup:
        """The operator's metrics: counters, gauges, meters and distributions. To be registered in `open`.

        They reach the metadata of the stage's materialization in BATCH, the observations of the sinks' assets in
        STREAMING, and the handle that `execute` returns.
        """
        return MetricGroup(self._registry, (self._task_name,))

    get_metric_group = get_metrics_group

    def get_state(self, descriptor: StateDescriptor[R]) -> R:
        if self.keyed_state is None:
            raise UnsupportedError(
                f"operator '{self._task_name}': state '{descriptor.name}' needs a keyed stream; call key_by before this"
                " operator"
            )
        return self.keyed_state.bind(descriptor)


class Function:
    """The base of every function class.

    `open` runs once per parallel instance before the first record, `close` after the last.
    """

    def open(self, runtime_context: RuntimeContext) -> None:
        """Called before the first record."""

    def close(self) -> None:
        """Called after the last record, and after a failure."""


class Wrapping(Function):
    """A function of the library's around one of the author's."""

    requires_time_sorted_input: bool = False

    def __init__(self, function: Any) -> None:
        self.function = function
        self.requires_time_sorted_input = self.requires_time_sorted_input or getattr(
            function, "requires_time_sorted_input", False
        )

    @property
    def wrapped_functions(self) -> tuple[Any, ...]:
        """The author's function."""
        return (self.function,)

    def open(self, runtime_context: RuntimeContext) -> None:
        if isinstance(self.function, Function):
            self.function.open(runtime_context)

    def close(self) -> None:
        if isinstance(self.function, Function):
            self.function.close()


class MapFunction(Function, ABC, Generic[In, Out]):
    """One record in, one record out (Flink: *User-Defined Functions*).

    A plain function works too. In both modes `map` is called once per record, in one pass with the operators next to
    it. On a keyed stream, a function that overrides `open` has state of the record's key.

    Examples:
        >>> class Doubled(MapFunction[int, int]):
        ...     def map(self, value: int) -> int:
        ...         return value * 2
        >>> collect(numbers.map(Doubled()))
        [2, 4, 6]
    """

    @abstractmethod
    def map(self, value: In) -> Out:
        """The record that `value` becomes."""


class FlatMapFunction(Function, ABC, Generic[In, Out]):
    """One record in, any number out (Flink: *User-Defined Functions*).

    In both modes `flat_map` is called once per record, and its results carry the record's event time.

    Examples:
        >>> class UpTo(FlatMapFunction[int, int]):
        ...     def flat_map(self, value: int) -> list[int]:
        ...         return list(range(value))
        >>> collect(numbers.flat_map(UpTo()))
        [0, 0, 1, 0, 1, 2]
    """

    @abstractmethod
    def flat_map(self, value: In) -> Iterable[Out]:
        """The records that `value` becomes."""


class FilterFunction(Function, ABC, Generic[In]):
    """Keeps a record or drops it, alike in both modes (Flink: *User-Defined Functions*).

    Examples:
        >>> class Above(FilterFunction[Sale]):
        ...     def __init__(self, amount: int) -> None:
        ...         self.amount = amount
        ...     def filter(self, value: Sale) -> bool:
        ...         return value.amount > self.amount
        >>> [sale.amount for sale in collect(sales.filter(Above(3)))]
        [4, 5]
    """

    @abstractmethod
    def filter(self, value: In) -> bool:
        """Whether `value` stays."""


class ReduceFunction(Function, ABC, Generic[T]):
    """Combines two records of one key into one of the same type (Flink: *User-Defined Functions*).

    BATCH emits one final record per key, STREAMING the combination so far with every record; see `KeyedStream.reduce`.

    Examples:
        >>> class Larger(ReduceFunction[Sale]):
        ...     def reduce(self, value1: Sale, value2: Sale) -> Sale:
        ...         return max(value1, value2, key=lambda sale: sale.amount)
        >>> sorted((sale.shop, sale.amount) for sale in collect(sales.key_by("shop").reduce(Larger())))
        [('north', 5), ('south', 4)]
    """

    @abstractmethod
    def reduce(self, value1: T, value2: T) -> T:
        """The combination; `value1` came first."""


class AggregateFunction(Function, ABC, Generic[In, A, Out]):
    """Aggregates the elements of a window, or of a state, into an accumulator (Flink: *Windows*).

    Only the accumulator is stored, in both modes. `merge` is called where windows merge, such as sessions.

    Examples:
        >>> class Mean(AggregateFunction[Sale, tuple[int, int], float]):
        ...     def create_accumulator(self) -> tuple[int, int]:
        ...         return 0, 0
        ...     def add(self, value: Sale, accumulator: tuple[int, int]) -> tuple[int, int]:
        ...         return accumulator[0] + value.amount, accumulator[1] + 1
        ...     def get_result(self, accumulator: tuple[int, int]) -> float:
        ...         return accumulator[0] / accumulator[1]
        ...     def merge(self, a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        ...         return a[0] + b[0], a[1] + b[1]
        >>> sessions = timed.key_by("shop").window(EventTimeSessionWindows.with_gap(timedelta(hours=2)))
        >>> collect(sessions.aggregate(Mean()))
        [4.0, 4.0]
    """

    @abstractmethod
    def create_accumulator(self) -> A:
        """An empty accumulator."""

    @abstractmethod
    def add(self, value: In, accumulator: A) -> A:
        """The accumulator with `value` in it."""

    @abstractmethod
    def get_result(self, accumulator: A) -> Out:
        """The result of an accumulator."""

    @abstractmethod
    def merge(self, a: A, b: A) -> A:
        """Merge two accumulators."""


class KeySelector(Function, ABC, Generic[In, KeyOut]):
    """Returns a record's key, for `key_by` (Flink: *Working with State*, "Keyed DataStream").

    It must return the same key whenever it is called for a record, in every process.

    Examples:
        >>> class Hour(KeySelector[Sale, int]):
        ...     def get_key(self, value: Sale) -> int:
        ...         return value.at.hour
        >>> sorted(sale.amount for sale in collect(sales.key_by(Hour()).sum("amount")))
        [5, 7]
    """

    @abstractmethod
    def get_key(self, value: In) -> KeyOut:
        """The key of `value`: a string, number, bool, date, timestamp, or a tuple of those."""


class Partitioner(Function, ABC, Generic[Key]):
    """Chooses the partition that a key goes to, for `partition_custom` (Flink: *Physical Partitioning*).

    Examples:
        >>> class ByLength(Partitioner[str]):
        ...     def partition(self, key: str, num_partitions: int) -> int:
        ...         return len(key) % num_partitions
        >>> amounts = sales.partition_custom(ByLength(), "shop").map(lambda sale: sale.amount, int)
        >>> sorted(collect(amounts.set_parallelism(2)))
        [3, 4, 5]
    """

    @abstractmethod
    def partition(self, key: Key, num_partitions: int) -> int:
        """A number from 0 to `num_partitions - 1`."""


class TimestampAssigner(ABC, Generic[In]):
    """Returns a record's event time, alike in both modes (Flink: *Generating Watermarks*).

    Examples:
        >>> class SoldAt(TimestampAssigner[Sale]):
        ...     def extract_timestamp(self, value: Sale, record_timestamp: int | None) -> datetime:
        ...         return value.at
        >>> strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(SoldAt())
        >>> hours = TumblingEventTimeWindows.of(timedelta(hours=1))
        >>> totals = sales.assign_timestamps_and_watermarks(strategy).window_all(hours).sum("amount")
        >>> [sale.amount for sale in collect(totals)]
        [7, 5]
    """

    @abstractmethod
    def extract_timestamp(self, value: In, record_timestamp: int | None) -> int | datetime:
        """Milliseconds since the epoch, or a datetime."""


class TimerService(ABC):
    """Time and timers, as a process function sees them (Flink: *Process Function*).

    Timers need a keyed stream; without one, registering a timer raises `UnsupportedError`. Times are milliseconds since
    the epoch. There is an example at `KeyedProcessFunction`.
    """

    @abstractmethod
    def current_processing_time(self) -> int:
        """The clock, in milliseconds since the epoch."""

    @abstractmethod
    def current_watermark(self) -> int:
        """The event-time watermark.

        In BATCH it is `MIN_TIMESTAMP` while a key's records come, and `MAX_TIMESTAMP` at the end of the key.
        """

    @abstractmethod
    def register_event_time_timer(self, timestamp: int) -> None:
        """Call `on_timer` once the watermark reaches `timestamp`; the same timer registered twice fires once.

        In BATCH a key's timers fire in the order of time after its last record.
        """

    @abstractmethod
    def register_processing_time_timer(self, timestamp: int) -> None:
        """Call `on_timer` once the clock reaches `timestamp`.

        At the end of the input, in BATCH of each key, pending ones fire or are dropped
        (`pipeline.processing-time.end-of-input`).
        """

    @abstractmethod
    def delete_event_time_timer(self, timestamp: int) -> None:
        """Delete a timer of the current key."""

    @abstractmethod
    def delete_processing_time_timer(self, timestamp: int) -> None:
        """Delete a timer of the current key."""


class NoTimers(TimerService, ABC):
    """A timer service that knows the time and takes no timers."""

    def _refuse(self, timestamp: int) -> None:
        raise UnsupportedError(
            "timers need a keyed stream; call key_by before this process function, on both streams where two are"
            " connected"
        )

    register_event_time_timer = _refuse
    register_processing_time_timer = _refuse
    delete_event_time_timer = _refuse
    delete_processing_time_timer = _refuse


class ProcessFunction(Function, ABC, Generic[In, Out]):
    """A record in, any number out, with access to its timestamp and to side outputs (Flink: *Process Function*).

    On a keyed stream it also has state and timers. It runs once per record in both modes.

    Examples:
        >>> class Stamped(ProcessFunction[Sale, str]):
        ...     def process_element(self, value: Sale, ctx: ProcessFunction.Context) -> list[str]:
        ...         return [f"{value.shop} at {ctx.timestamp()}"]
        >>> collect(timed.process(Stamped()))[0]
        'north at 1704099600000'
    """

    class Context(ABC):
        """The context that `process_element` gets with a record."""

        @abstractmethod
        def timestamp(self) -> int | None:
            """The record's event time, or None where the stream has none."""

        @abstractmethod
        def timer_service(self) -> TimerService:
            """Time and timers."""

        @abstractmethod
        def output(self, tag: OutputTag[R], value: R) -> None:
            """Emit to a side output."""

    @abstractmethod
    def process_element(self, value: In, ctx: Context) -> Iterable[Out | SideOutput] | None:
        """The results of a record; `(tag, record)` goes to a side output."""

    def on_timer(
        self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext[Any]
    ) -> Iterable[Out | SideOutput] | None:
        """The results of a timer; only keyed streams have timers."""
        return None


class KeyedProcessFunction(Function, ABC, Generic[Key, In, Out]):
    """A process function on a keyed stream: with state and timers of the record's key (Flink: *Process Function*).

    In BATCH a key's records come together, in the order of event time, and its timers fire after the last one. In
    STREAMING records come as they arrive, and timers fire as the watermark or the clock passes them.

    Examples:
        >>> class Silence(KeyedProcessFunction[str, Sale, str]):
        ...     def open(self, runtime_context: RuntimeContext) -> None:
        ...         self.due = runtime_context.get_state(ValueStateDescriptor("due", int))
        ...     def process_element(self, value: Sale, ctx: KeyedProcessFunction.Context) -> None:
        ...         timers, due = ctx.timer_service(), self.due.value()
        ...         if due is not None:
        ...             timers.delete_event_time_timer(due)
        ...         self.due.update(ctx.timestamp() + 7_200_000)
        ...         timers.register_event_time_timer(self.due.value())
        ...     def on_timer(self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext) -> list[str]:
        ...         return [f"no sale in {ctx.get_current_key()} for two hours"]
        >>> sorted(collect(timed.key_by("shop").process(Silence())))
        ['no sale in north for two hours', 'no sale in south for two hours']
    """

    class Context(ProcessFunction.Context, Generic[KeyOut]):
        """The context that `process_element` gets with a record."""

        @abstractmethod
        def get_current_key(self) -> KeyOut:
            """The key of the record or timer."""

    class OnTimerContext(Context[KeyOut]):
        """The context that `on_timer` gets with a timestamp."""

        @abstractmethod
        def time_domain(self) -> TimeDomain:
            """The clock of the timer."""

    requires_time_sorted_input: bool = False
    """Whether elements must come in event-time order, and timers between them.

    BATCH always sorts; with this, its watermark also follows a key's elements, so that a timer fires before the next
    element. STREAMING holds elements until the watermark passes them (Beam: `@RequiresTimeSortedInput`).
    """

    @abstractmethod
    def process_element(self, value: In, ctx: Context[Key]) -> Iterable[Out | SideOutput] | None:
        """The results of a record; `(tag, record)` goes to a side output."""

    def on_timer(self, timestamp: int, ctx: OnTimerContext[Key]) -> Iterable[Out | SideOutput] | None:
        """The results of a timer; they carry its timestamp."""
        return None


class KeyedBatchFunction(Function, ABC, Generic[Key]):
    """A function of Arrow batches on a keyed stream, with state and timers of their key, for `map_batches`.

    A batch has rows of one key. How a key's rows are cut into batches is not defined, in either mode: keep what spans
    batches in the key's state, and emit a result of all rows from a timer. In BATCH a key's rows come in event-time
    order, and its timers fire after the last one. In STREAMING a batch has a micro-batch's rows of the key. In the body
    of an iteration it may be an `IterationListener`, which emits batches. Spark: `applyInArrow`, with the state of
    `applyInPandasWithState`.

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
            """Emit a batch of records to a side output.

            Its rows have the event times of its column `__ts`; without it those of the rows of `process_batch`, and
            then it has as many rows; in `on_timer` the timer's timestamp.
            """

    class OnTimerContext(Context[KeyOut]):
        """The context that `on_timer` gets with a timestamp."""

        @abstractmethod
        def time_domain(self) -> TimeDomain:
            """The clock of the timer."""

    requires_time_sorted_input: bool = False
    """As `KeyedProcessFunction.requires_time_sorted_input`; a batch then has rows of one event time."""

    @abstractmethod
    def process_batch(self, batch: pa.RecordBatch, ctx: Context[Key]) -> pa.RecordBatch | None:
        """The results of a batch; None for none.

        Event times are in the column `__ts`, where the stream has them; keep it where the number of rows changes.
        """

    def on_timer(self, timestamp: int, ctx: OnTimerContext[Key]) -> pa.RecordBatch | None:
        """The results of a timer; they carry its timestamp."""
        return None
