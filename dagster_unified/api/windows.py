"""Windowed streams: what `window(...)` gives, up to the function that ends it; and the bases of your own windows.

Names follow PyFlink. In BATCH nothing is late: windows fire at the end of their key, in the order of time, and allowed
lateness changes nothing. In STREAMING they fire as the watermark (or the clock, or a trigger) says.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, Self, overload

import pyarrow as pa

from dagster_unified.api.located import located
from dagster_unified.api.record_types import NOT_GIVEN, itself, main_output, type_argument
from dagster_unified.errors import PipelineError, RecordTypeError, UnsupportedError
from dagster_unified.graph import nodes
from dagster_unified.graph.expressions import Column
from dagster_unified.operators.functions.base import AggregateFunction, OutputTag, ReduceFunction
from dagster_unified.operators.functions.type_variables import OUT, A, K, R, T, W
from dagster_unified.operators.keyed import rolling
from dagster_unified.operators.state.list import ListStateDescriptor
from dagster_unified.operators.state.value import ValueStateDescriptor
from dagster_unified.operators.time import checked_span
from dagster_unified.operators.windows import (
    CountWindow,
    EventTimeSessionWindows,
    Evictor,
    Firing,
    GlobalWindow,
    MergingWindowAssigner,
    ProcessWindowFunction,
    Trigger,
    TriggerResult,
    WindowAssigner,
    WindowFunction,
)
from dagster_unified.operators.windows.assigners import AlignedEventTimeWindows
from dagster_unified.operators.windows.spec import Windowing
from dagster_unified.records import RecordType, return_type

if TYPE_CHECKING:
    from typing_extensions import TypeForm

    from dagster_unified.api.stream import DataStream, KeyedStream

__all__ = [
    "CountWindow", "Evictor", "Firing", "GlobalWindow", "MergingWindowAssigner", "Trigger", "TriggerResult",
    "WindowAssigner", "WindowedStream",
]  # fmt: skip


@located
class WindowedStream(Generic[K, T, W]):
    """A keyed stream whose elements are in windows (Flink: *Windows*).

    `reduce`, `aggregate`, `process` or `apply` makes it a stream again. A window that is reduced or aggregated holds
    one value; one that is processed holds its elements. In BATCH windows close at the end of their key, in STREAMING as
    the watermark, the clock or a trigger says.
    """

    def __init__(self, stream: KeyedStream[K, T], assigner: WindowAssigner[T, W], alone: bool = False) -> None:
        self._stream, self._assigner, self._alone = stream, assigner, alone
        self._trigger: Trigger[T, W] | None = None
        self._evictor: Evictor[T, W] | None = None
        self._lateness = 0
        self._late_tag: OutputTag[T] | None = None
        where = stream._where("window")
        if not isinstance(assigner, WindowAssigner):
            raise PipelineError(
                f"{where}: expected a window assigner such as TumblingEventTimeWindows.of(timedelta(hours=1)), "
                f"got {assigner!r}"
            )
        if assigner.is_event_time and not any(stream._pipeline._node(u.node).timestamped for u in stream._upstream):
            raise PipelineError(
                f"{where}: {assigner.describe()} goes by event time, and the stream has none; "
                "call assign_timestamps_and_watermarks before key_by"
            )

    def trigger(self, trigger: Trigger[T, W]) -> Self:
        """When windows give their results, in place of the assigner's own trigger.

        Examples:
            >>> windows = sales.key_by("shop").window(GlobalWindows.create()).trigger(CountTrigger.of(2))
            >>> [sale.amount for sale in collect(windows.sum("amount"), "STREAMING")]
            [8]
        """
        if not isinstance(trigger, Trigger):
            raise PipelineError(f"{self._where()}: expected a Trigger, got {trigger!r}")
        if isinstance(self._assigner, MergingWindowAssigner) and not trigger.can_merge():
            raise UnsupportedError(
                f"{self._where()}: {type(trigger).__name__} does not work with windows that merge; "
                "use another trigger, or give it can_merge() and on_merge()"
            )
        self._trigger = trigger
        return self

    def evictor(self, evictor: Evictor[T, W]) -> Self:
        """What windows drop before or after their function sees them.

        They then hold all their elements, also where they are reduced. There is an example at `CountEvictor`.
        """
        if not isinstance(evictor, Evictor):
            raise PipelineError(f"{self._where()}: expected an Evictor, got {evictor!r}")
        self._evictor = evictor
        return self

    def allowed_lateness(self, lateness: timedelta) -> Self:
        """For how long a window stays after its end, to fire again with each late element. Changes nothing in BATCH."""
        self._event_time_only("allowed lateness")
        self._lateness = checked_span(f"{self._where()}: the allowed lateness", lateness, 0)
        return self

    def side_output_late_data(self, tag: OutputTag[T]) -> Self:
        """Where elements go that come after all their windows are gone.

        Without it they are dropped and counted. None comes in BATCH.
        """
        self._event_time_only("late data")
        self._stream._check_late_tag(tag, self._where())
        self._late_tag = tag
        return self

    # Functions

    @overload
    def reduce(self, function: Callable[[T, T], T] | ReduceFunction[T]) -> DataStream[T]: ...
    @overload
    def reduce(
        self,
        function: Callable[[T, T], T] | ReduceFunction[T],
        window_function: ProcessWindowFunction[T, R, K, W] | WindowFunction[T, R, K, W],
        output_type: TypeForm[R] = NOT_GIVEN,
    ) -> DataStream[R]: ...
    def reduce(
        self,
        function: Callable[[T, T], T] | ReduceFunction[T],
        window_function: Any = None,
        output_type: Any = None,
    ) -> DataStream[Any]:
        """Reduces each window's elements with `function(a, b)`; `window_function` is then given the one result.

        Examples:
            >>> hours = timed.key_by("shop").window(SlidingEventTimeWindows.of(timedelta(hours=2), timedelta(hours=1)))
            >>> largest = hours.reduce(lambda a, b: a if a.amount >= b.amount else b)
            >>> sorted((sale.shop, sale.amount) for sale in collect(largest))
            [('north', 3), ('north', 5), ('north', 5), ('south', 4), ('south', 4)]
        """
        self._stream._check_function("reduce", getattr(function, "reduce", function))
        self._stream._check_combines("reduce")
        return self._with(window_function, output_type, self._stream._records("reduce"), "reduce", reduce=function)

    @overload
    def aggregate(
        self,
        function: AggregateFunction[T, A, OUT],
        window_function: None = None,
        accumulator_type: TypeForm[A] = NOT_GIVEN,
        output_type: TypeForm[OUT] = NOT_GIVEN,
    ) -> DataStream[OUT]: ...
    @overload
    def aggregate(
        self,
        function: AggregateFunction[T, A, OUT],
        window_function: ProcessWindowFunction[OUT, R, K, W] | WindowFunction[OUT, R, K, W],
        accumulator_type: TypeForm[A] = NOT_GIVEN,
        output_type: TypeForm[R] = NOT_GIVEN,
    ) -> DataStream[R]: ...
    def aggregate(
        self,
        function: AggregateFunction[T, A, OUT],
        window_function: Any = None,
        accumulator_type: Any = None,
        output_type: Any = None,
    ) -> DataStream[Any]:
        """Aggregates each window's elements; `window_function` is then given the one result.

        `accumulator_type` is the accumulator's, as state keeps it, where `create_accumulator` is not annotated.

        Examples:
            >>> class Mean(AggregateFunction):
            ...     def create_accumulator(self) -> tuple[int, int]:
            ...         return 0, 0
            ...     def add(self, value: Sale, accumulator: tuple[int, int]) -> tuple[int, int]:
            ...         return accumulator[0] + value.amount, accumulator[1] + 1
            ...     def get_result(self, accumulator: tuple[int, int]) -> float:
            ...         return accumulator[0] / accumulator[1]
            ...     def merge(self, a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
            ...         return a[0] + b[0], a[1] + b[1]
            >>> collect(timed.window_all(TumblingEventTimeWindows.of(timedelta(hours=1))).aggregate(Mean()))
            [3.5, 5.0]
        """
        if not isinstance(function, AggregateFunction):
            raise PipelineError(f"{self._where('aggregate')}: expected an AggregateFunction, got {function!r}")
        accumulator = accumulator_type
        if accumulator is None:
            accumulator = return_type(function.create_accumulator) or type_argument(type(function), A)
        if accumulator in (None, Any):
            raise RecordTypeError(
                f"{self._where('aggregate')}: the accumulator's type is not known; "
                f"annotate {type(function).__name__}.create_accumulator, or give accumulator_type="
            )
        result = None
        if window_function is None:
            result = self._stream._output(type(function).__name__, function.get_result, output_type, itself)
        return self._with(
            window_function,
            output_type,
            result,
            type(function).__name__,
            aggregate=function,
            accumulator_type=accumulator,
        )

    def process(
        self, function: ProcessWindowFunction[T, R, K, W], output_type: TypeForm[R] = NOT_GIVEN
    ) -> DataStream[R]:
        """Runs a `ProcessWindowFunction` on each window's elements.

        In BATCH they come in event-time order, in STREAMING as they arrived.

        Examples:
            >>> class Count(ProcessWindowFunction):
            ...     def process(self, key: str, context, elements: list[Sale]) -> list[str]:
            ...         return [f"{key}: {len(elements)}"]
            >>> sessions = timed.key_by("shop").window(EventTimeSessionWindows.with_gap(timedelta(hours=2)))
            >>> sorted(collect(sessions.process(Count())))
            ['north: 2', 'south: 1']
        """
        if not isinstance(function, ProcessWindowFunction):
            raise PipelineError(
                f"{self._where('process')}: a window needs a ProcessWindowFunction, not {function!r}; "
                "use apply for a WindowFunction"
            )
        return self._with(function, output_type, None, "process")

    def apply(self, function: WindowFunction[T, R, K, W], output_type: TypeForm[R] = NOT_GIVEN) -> DataStream[R]:
        """Runs a `WindowFunction`, which has an example, on each window's elements.

        In BATCH they come in event-time order, in STREAMING as they arrived.
        """
        if not isinstance(function, WindowFunction):
            raise PipelineError(
                f"{self._where('apply')}: expected a WindowFunction, got {function!r}; "
                "use process for a ProcessWindowFunction"
            )
        return self._with(function, output_type, None, "apply")

    def sum(self, field: str | int = 0) -> DataStream[T]:
        """The sum of a field over each window; the other fields are the first element's."""
        return self._builtin("sum", field)

    def min(self, field: str | int = 0) -> DataStream[T]:
        """The smallest value of a field over each window; the other fields are the first element's."""
        return self._builtin("min", field)

    def max(self, field: str | int = 0) -> DataStream[T]:
        """The largest value of a field over each window; the other fields are the first element's."""
        return self._builtin("max", field)

    def min_by(self, field: str | int = 0) -> DataStream[T]:
        """Each window's element with the smallest value of a field."""
        return self._builtin("min_by", field)

    def max_by(self, field: str | int = 0) -> DataStream[T]:
        """Each window's element with the largest value of a field."""
        return self._builtin("max_by", field)

    # Columns, left to Catalyst

    def agg(self, *columns: str | Column, output_type: TypeForm[R]) -> DataStream[R]:
        """Column aggregates per key and window, such as `F.sum("delay").alias("delay")`.

        Runs in Catalyst: Spark's `window` and `session_window`. The result has the key's fields, the window's bounds
        where `output_type` has fields `window_start` and `window_end` (datetimes, or milliseconds), and the aggregates.
        In both modes each window gives one result: in BATCH when its key is over, in STREAMING once the watermark has
        passed its end; what comes later is dropped and counted. With portable state (`state.native-aggregates`), which
        savepoints and keyed operators behind it need, Arrow aggregates in Python workers instead of Catalyst.

        Examples:
            >>> class Hour(NamedTuple):
            ...     shop: str
            ...     window_start: datetime
            ...     total: int
            >>> hours = timed.key_by("shop").window(TumblingEventTimeWindows.of(timedelta(hours=1)))
            >>> found = collect(hours.agg(F.sum("amount").alias("total"), output_type=Hour))
            >>> sorted((hour.shop, hour.window_start.hour, hour.total) for hour in found)
            [('north', 9, 3), ('north', 10, 5), ('south', 9, 4)]
        """
        assigner, where = self._assigner, self._where("agg")
        said = [
            (self._alone, "a key: call key_by(field).window(...)"),
            (self._trigger is not None, "no trigger"),
            (self._evictor is not None, "no evictor"),
            (self._lateness or self._late_tag is not None, "no allowed lateness or late data"),
            (
                not isinstance(assigner, (AlignedEventTimeWindows, EventTimeSessionWindows)),
                "tumbling, sliding or session windows by event time",
            ),
            (
                isinstance(assigner, EventTimeSessionWindows) and not isinstance(assigner.gap, int),
                "one gap for all sessions",
            ),
            (
                isinstance(assigner, AlignedEventTimeWindows) and assigner.slide > assigner.size,
                "a slide that is not longer than the window",
            ),
        ]
        for wrong, needed in said:
            if wrong:
                raise UnsupportedError(
                    f"{where}: a native window needs {needed}; or use aggregate(...), reduce(...) or process(...)"
                )
        taken = [b for b in nodes.BOUNDS if b in self._stream._key_selector.fields]
        if taken:
            raise PipelineError(
                f"{where}: the stream is keyed by '{taken[0]}', which is the name of a window's bound; rename the field"
            )
        records = self._stream._aggregated(columns, output_type, nodes.BOUNDS)
        for name in nodes.BOUNDS:
            if name in records.names:
                kind = records.schema.field(name).type
                if not (pa.types.is_timestamp(kind) or pa.types.is_int64(kind)):
                    raise RecordTypeError(
                        f"{where}: field '{name}' is a {kind}; a window's bound is a datetime, "
                        "or an int in milliseconds"
                    )
        return self._stream._keyed(
            nodes.WindowAggregateNode, "agg", records=records, columns=columns, assigner=assigner, timestamped=True
        )

    # Building

    def _builtin(self, kind: str, field: str | int) -> DataStream[T]:
        return self._with(
            None,
            None,
            self._stream._records(kind),
            kind,
            reduce=rolling(kind, self._stream._combined_field(kind, field)),
        )

    def _with(
        self, function: Any, output_type: Any, result: RecordType | None, name: str, **how: Any
    ) -> DataStream[Any]:
        stream = self._stream
        if function is not None:
            method = function.process if isinstance(function, ProcessWindowFunction) else function.apply
            name = type(function).__name__
            records = stream._output(name, method, output_type, main_output)
        else:
            assert result is not None
            records = result
        spec = Windowing(
            self._assigner,
            self._trigger or self._assigner.get_default_trigger(),
            stream._records(name).python,
            self._evictor,
            self._lateness,
            self._late_tag,
            function=function,
            **how,
        )
        _check_storable(spec, self._where(name))
        naming = nodes.Naming.FUNCTION if function is not None or spec.aggregate is not None else nodes.Naming.LIBRARY
        made = stream._keyed(nodes.WindowNode, name, naming=naming, records=records, function=spec, timestamped=True)
        return made.set_parallelism(1) if self._alone else made

    def _event_time_only(self, what: str) -> None:
        if not self._assigner.is_event_time:
            raise PipelineError(
                f"{self._where()}: {what} is of event time, and {self._assigner.describe()} does not go by it; "
                "leave it out"
            )

    def _where(self, operator: str = "window") -> str:
        return self._stream._where(operator)


def _check_storable(spec: Windowing, where: str) -> None:
    """A window's elements or accumulator are state, and state is typed."""
    try:
        if spec.aggregate is not None:
            ValueStateDescriptor("accumulator", spec.accumulator_type)
        else:
            ListStateDescriptor("elements", spec.element_type)
    except PipelineError as error:
        raise RecordTypeError(f"{where}: {error}") from error
