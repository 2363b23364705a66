"""How elements get into windows: what `window(...)` takes, up to the function that ends it.

Names follow PyFlink. In BATCH nothing is late: windows fire at the end of their key, in the order of time, and allowed
lateness changes nothing. In STREAMING they fire as the watermark (or the clock, or a trigger) says.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Generic, Self

import pyarrow as pa

from dagster_unified.api.base import BaseStream
from dagster_unified.api.building import located, main_output
from dagster_unified.errors import PipelineError, RecordTypeError, UnsupportedError
from dagster_unified.graph import nodes
from dagster_unified.graph.expressions import Column
from dagster_unified.graph.nodes import Node
from dagster_unified.operators.functions.base import OutputTag
from dagster_unified.operators.functions.type_variables import T, W
from dagster_unified.operators.keyed import rolling
from dagster_unified.operators.state.handles import ListStateDescriptor, ValueStateDescriptor
from dagster_unified.operators.time import checked_span
from dagster_unified.operators.windows import (
    EventTimeSessionWindows,
    Evictor,
    MergingWindowAssigner,
    ProcessWindowFunction,
    Trigger,
    WindowAssigner,
)
from dagster_unified.operators.windows.assigners import AlignedEventTimeWindows
from dagster_unified.operators.windows.contents import Windowing
from dagster_unified.records import RecordType


@located
class Windows(Generic[T, W]):
    """A keyed stream and how its elements get into windows: what `WindowedStream` builds operators with."""

    def __init__(self, stream: BaseStream[T], assigner: WindowAssigner[T, W], alone: bool = False) -> None:
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
        """Sets when windows emit their results, instead of the assigner's own trigger.

        In BATCH event-time timers fire at the end of a key, in STREAMING as the watermark passes them.

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
        """Drops elements of a window before or after its function sees them, in both modes.

        Windows then hold all their elements, also where they are reduced. There is an example at `CountEvictor`.
        """
        if not isinstance(evictor, Evictor):
            raise PipelineError(f"{self._where()}: expected an Evictor, got {evictor!r}")
        self._evictor = evictor
        return self

    def allowed_lateness(self, lateness: timedelta) -> Self:
        """Keeps windows for a while after their end, to fire again with each late element. Changes nothing in BATCH."""
        self._event_time_only("allowed lateness")
        self._lateness = checked_span(f"{self._where()}: the allowed lateness", lateness, 0)
        return self

    def side_output_late_data(self, tag: OutputTag[T]) -> Self:
        """Sends elements that come after all their windows are gone to a side output.

        Without it they are dropped and counted. None comes in BATCH.
        """
        self._event_time_only("late data")
        self._stream._check_late_tag(tag, self._where())
        self._late_tag = tag
        return self

    # Building

    def _rolling(self, kind: str, field: str | int) -> Node:
        combined = kind, self._stream._combined_field(kind, field)
        return self._with(None, None, self._stream._records(kind), kind, reduce=rolling(*combined), built_in=combined)

    def _aggregates(self, columns: tuple[str | Column, ...], output_type: Any) -> Node:
        assigner, where = self._assigner, self._where("agg")
        unusable = [
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
        for wrong, needed in unusable:
            if wrong:
                raise UnsupportedError(
                    f"{where}: a native window needs {needed}; or use aggregate(...), reduce(...) or process(...)"
                )
        key = self._stream._key_selector
        taken = [b for b in nodes.BOUNDS if key is not None and b in key.fields]
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
        return self._stream._node_by_key(
            nodes.WindowAggregateNode, "agg", records=records, columns=columns, assigner=assigner, timestamped=True
        )

    def _with(
        self,
        function: Any,
        output_type: Any,
        result: RecordType | None,
        name: str,
        called: str | None = None,
        **how: Any,
    ) -> Node:
        """Return the operator that runs a function on windows; `called` is the library's name for it."""
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
        if called is not None:
            name, naming = called, nodes.Naming.LIBRARY
        attributes = {"parallelism": 1} if self._alone else {}
        return stream._node_by_key(
            nodes.WindowNode, name, naming=naming, records=records, function=spec, timestamped=True, **attributes
        )

    def _event_time_only(self, what: str) -> None:
        if not self._assigner.is_event_time:
            raise PipelineError(
                f"{self._where()}: {what} is of event time, and {self._assigner.describe()} does not go by it; "
                "leave it out"
            )

    def _where(self, operator: str = "window") -> str:
        return self._stream._where(operator)


def _check_storable(spec: Windowing, where: str) -> None:
    """Check the type of a window's elements or accumulator, which are state."""
    try:
        if spec.aggregate is not None:
            ValueStateDescriptor("accumulator", spec.accumulator_type)
        else:
            ListStateDescriptor("elements", spec.element_type)
    except PipelineError as error:
        raise RecordTypeError(f"{where}: {error}") from error
