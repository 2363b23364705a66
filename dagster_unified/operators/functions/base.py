"""The function classes that an author may subclass, and the contexts that they are given.

Plain callables do as well wherever a function has one method. Names and methods are PyFlink's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

from dagster_unified.errors import PipelineError, UnsupportedError
from dagster_unified.operators.functions.type_variables import A, In, Key, KeyOut, Out, R, T
from dagster_unified.operators.metrics import MetricGroup, Registry
from dagster_unified.operators.state.backend import KeyedStateBackend
from dagster_unified.operators.state.descriptors import StateDescriptor
from dagster_unified.operators.state.store import KeyedStateStore

if TYPE_CHECKING:
    from datetime import datetime

    from typing_extensions import TypeForm

    from dagster_unified.operators.time import TimeDomain


class OutputTag(Generic[T]):
    """Names a side output and gives its record type.

    A function emits to it with `yield tag, value` or `ctx.output(tag, value)`.
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
    """What a function learns about where it runs; with keyed state where its stream is keyed."""

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
        """Adds to a counter of the pipeline, whose total appears in the run's metadata under `name` alone.

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
    """The base of every function class: `open` runs once per parallel instance before the first record, `close` after
    the last.
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
        """The author's."""
        return (self.function,)

    def open(self, runtime_context: RuntimeContext) -> None:
        if isinstance(self.function, Function):
            self.function.open(runtime_context)

    def close(self) -> None:
        if isinstance(self.function, Function):
            self.function.close()


class MapFunction(Function, ABC, Generic[In, Out]):
    """One record in, one record out."""

    @abstractmethod
    def map(self, value: In) -> Out:
        """The record that `value` becomes."""


class FlatMapFunction(Function, ABC, Generic[In, Out]):
    """One record in, any number out."""

    @abstractmethod
    def flat_map(self, value: In) -> Iterable[Out]:
        """The records that `value` becomes."""


class FilterFunction(Function, ABC, Generic[In]):
    """Keeps a record or drops it."""

    @abstractmethod
    def filter(self, value: In) -> bool:
        """Whether `value` stays."""


class ReduceFunction(Function, ABC, Generic[T]):
    """Combines two records of one key into one of the same type."""

    @abstractmethod
    def reduce(self, value1: T, value2: T) -> T:
        """The combination; `value1` came first."""


class AggregateFunction(Function, ABC, Generic[In, A, Out]):
    """Aggregates values into an accumulator (Flink: `AggregateFunction`)."""

    @abstractmethod
    def create_accumulator(self) -> A:
        """An empty accumulator."""

    @abstractmethod
    def add(self, value: In, accumulator: A) -> A:
        """The accumulator with `value` in it."""

    @abstractmethod
    def get_result(self, accumulator: A) -> Out:
        """The result that the accumulator stands for."""

    @abstractmethod
    def merge(self, a: A, b: A) -> A:
        """One accumulator of two."""


class KeySelector(Function, ABC, Generic[In, KeyOut]):
    """Gives a record's key."""

    @abstractmethod
    def get_key(self, value: In) -> KeyOut:
        """The key of `value`: a string, number, bool, date, timestamp, or a tuple of those."""


class Partitioner(Function, ABC, Generic[Key]):
    """Says which partition a key goes to (`partition_custom`)."""

    @abstractmethod
    def partition(self, key: Key, num_partitions: int) -> int:
        """A number from 0 to `num_partitions - 1`."""


class TimestampAssigner(ABC, Generic[In]):
    """Gives a record's event time."""

    @abstractmethod
    def extract_timestamp(self, value: In, record_timestamp: int | None) -> int | datetime:
        """Milliseconds since the epoch, or a datetime."""


class TimerService(ABC):
    """Time and timers, as a process function sees them. Timers need a keyed stream."""

    @abstractmethod
    def current_processing_time(self) -> int:
        """The clock, in milliseconds since the epoch."""

    @abstractmethod
    def current_watermark(self) -> int:
        """The event-time watermark: in BATCH `MIN_TIMESTAMP` while records come and `MAX_TIMESTAMP` at the end of a
        key.
        """

    @abstractmethod
    def register_event_time_timer(self, timestamp: int) -> None:
        """Calls `on_timer` once the watermark reaches `timestamp`; twice the same timer is one."""

    @abstractmethod
    def register_processing_time_timer(self, timestamp: int) -> None:
        """Calls `on_timer` once the clock reaches `timestamp`."""

    @abstractmethod
    def delete_event_time_timer(self, timestamp: int) -> None:
        """Removes a timer of the current key."""

    @abstractmethod
    def delete_processing_time_timer(self, timestamp: int) -> None:
        """Removes a timer of the current key."""


class NoTimers(TimerService, ABC):
    """A timer service that tells the time and takes no timers."""

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
    """A record in, any number out, with its timestamp and side outputs at hand; on a keyed stream with state and timers
    as well.
    """

    class Context(ABC):
        """What `process_element` is given besides the record."""

        @abstractmethod
        def timestamp(self) -> int | None:
            """The record's event time, or None where the stream has none."""

        @abstractmethod
        def timer_service(self) -> TimerService:
            """Time and timers."""

        @abstractmethod
        def output(self, tag: OutputTag[R], value: R) -> None:
            """Emits to a side output."""

    @abstractmethod
    def process_element(self, value: In, ctx: Context) -> Iterable[Out | SideOutput] | None:
        """The records that `value` leads to; `(tag, record)` goes to a side output."""

    def on_timer(
        self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext[Any]
    ) -> Iterable[Out | SideOutput] | None:
        """The records that a timer leads to, on a keyed stream: no other has timers."""
        return None


class KeyedProcessFunction(Function, ABC, Generic[Key, In, Out]):
    """A process function on a keyed stream: with state and timers of the record's key."""

    class Context(ProcessFunction.Context, Generic[KeyOut]):
        """What `process_element` is given besides the record."""

        @abstractmethod
        def get_current_key(self) -> KeyOut:
            """The key of the record or timer."""

    class OnTimerContext(Context[KeyOut]):
        """What `on_timer` is given besides the timestamp."""

        @abstractmethod
        def time_domain(self) -> TimeDomain:
            """Which clock the timer listened to."""

    requires_time_sorted_input: bool = False
    """Whether elements must come in event-time order, and timers between them.

    BATCH always sorts; with this, its watermark also follows a key's elements, so that a timer fires before the next
    element. STREAMING holds elements until the watermark passes them (Beam: `@RequiresTimeSortedInput`).
    """

    @abstractmethod
    def process_element(self, value: In, ctx: Context[Key]) -> Iterable[Out | SideOutput] | None:
        """The records that `value` leads to; `(tag, record)` goes to a side output."""

    def on_timer(self, timestamp: int, ctx: OnTimerContext[Key]) -> Iterable[Out | SideOutput] | None:
        """The records that a timer leads to. What it emits carries the timer's timestamp."""
        return None
