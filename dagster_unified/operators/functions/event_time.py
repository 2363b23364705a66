"""Event time where no field of the record has it (Flink: *Generating Watermarks*)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import datetime
from typing import Any, Generic

from dagster_unified.operators.functions.base import TimestampAssigner
from dagster_unified.operators.functions.type_variables import In
from dagster_unified.operators.time import MIN_TIMESTAMP, wall_clock


class WatermarkOutput(ABC):
    """The output to which a `WatermarkGenerator` emits watermarks, in STREAMING.

    There is an example at `WatermarkGenerator`.
    """

    @abstractmethod
    def emit_watermark(self, watermark: int | datetime) -> None:
        """Declare that no record up to this time is still to come; an earlier time changes nothing."""

    @abstractmethod
    def mark_idle(self) -> None:
        """Let other inputs' watermarks advance without this one, until it emits a watermark or is active."""

    @abstractmethod
    def mark_active(self) -> None:
        """End `mark_idle`."""


class WatermarkGenerator(ABC, Generic[In]):
    """Emits watermarks after records (`on_event`) or from time to time (`on_periodic_emit`).

    In STREAMING the watermark moves between two micro-batches. Each task of a micro-batch has a generator of its own,
    and asks it for a periodic watermark after its last record. The smallest of the last emitted watermarks counts, and
    the watermark never goes back. Attributes that a generator sets as records come last to the next micro-batch, for
    each parallel instance: numbers, text, moments and collections of them; anything else is refused. While no records
    come, the job asks another generator for periodic watermarks, every `pipeline.auto-watermark-interval`.

    In BATCH no generator is asked: nothing is late (FLIP-134).

    Examples:
        >>> class Complete(WatermarkGenerator[int]):
        ...     def on_event(self, event: int, event_timestamp: int, output: WatermarkOutput) -> None:
        ...         if event % 3 == 0:
        ...             output.emit_watermark(event_timestamp)
        >>> class Watermark(KeyedProcessFunction[int, int, str]):
        ...     def process_element(self, value: int, ctx: KeyedProcessFunction.Context) -> list[str]:
        ...         return [f"{value} after {ctx.timer_service().current_watermark()}"]
        >>> strategy = WatermarkStrategy.for_generator(Complete).with_timestamp_assigner(lambda event: event)
        >>> events = Pipeline("events").from_collection([1, 3, 4]).assign_timestamps_and_watermarks(strategy)
        >>> collect(events.key_by(lambda event: 0, key_type=int).process(Watermark()), "STREAMING")[2]
        '4 after 3'
    """

    @abstractmethod
    def on_event(self, event: In, event_timestamp: int, output: WatermarkOutput) -> None:
        """Called for each record, with its event time in milliseconds."""

    def on_periodic_emit(self, output: WatermarkOutput) -> None:
        """Called at the end of each micro-batch, and periodically while no records come."""
        return


class IngestionTimeAssigner(TimestampAssigner[object]):
    """Takes the machine's clock as a record's event time: *ingestion time*, if it stands right after the source.

    It never goes back, also where the clock is set back while a task runs. Records get their times when a task reads
    them, in both modes, so that windows and timers depend on when and how fast the pipeline runs; the lint warns. A
    repeated micro-batch or stage gives its records new times.

    On a cluster whose clocks differ, use `for_bounded_out_of_orderness` with that difference: else records of the
    slower clock would be late. With `pipeline.processing-time.allow=FAIL` it is an error, as reading the clock is.

    Examples:
        >>> strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(IngestionTimeAssigner())
        >>> arrived = numbers.assign_timestamps_and_watermarks(strategy)
        >>> collect(arrived.window_all(TumblingEventTimeWindows.of(timedelta(days=36500))).sum())
        [6]
    """

    def __init__(self) -> None:
        self._clock = wall_clock
        self._latest = MIN_TIMESTAMP

    def reading(self, clock: Callable[[], int]) -> IngestionTimeAssigner:
        """A new assigner that reads another clock."""
        assigner = IngestionTimeAssigner()
        assigner._clock = clock
        return assigner

    def extract_timestamp(self, value: object, record_timestamp: int | None) -> int:
        self._latest = max(self._clock(), self._latest)
        return self._latest


class CallableTimestamp(TimestampAssigner[Any]):
    """A timestamp assigner from a function of the record."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def extract_timestamp(self, value: Any, record_timestamp: int | None) -> Any:
        return self.function(value)


class FieldTimestamp(TimestampAssigner[Any]):
    """A timestamp assigner that reads a field."""

    def __init__(self, get: Callable[[Any], Any]) -> None:
        self._get = get

    def extract_timestamp(self, value: Any, record_timestamp: int | None) -> Any:
        return self._get(value)
