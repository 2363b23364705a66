"""Where event time comes from when no field of the record says it (Flink: *Generating Watermarks*)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dagster_unified.operators.functions.base import TimestampAssigner
from dagster_unified.operators.time import MIN_TIMESTAMP, wall_clock


class IngestionTimeAssigner(TimestampAssigner[object]):
    """Takes the machine's clock as a record's event time: *ingestion time*, if it stands right behind the source.

    It never goes back, also where the clock is set back while a task runs. Records get their times when a task reads
    them, in both modes, so that windows and timers depend on when and how fast the pipeline runs; the lint warns. A
    micro-batch or a stage that is run again gives its records new times.

    On a cluster whose clocks differ, use `for_bounded_out_of_orderness` with that difference: records of the slower
    clock would be late otherwise. With `pipeline.processing-time.allow=FAIL` it is an error, as reading the clock is.

    >>> from dagster_unified.api import IngestionTimeAssigner, WatermarkStrategy
    >>> strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(IngestionTimeAssigner())
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
