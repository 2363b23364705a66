"""Event time: where timestamps come from, and how far out of order records may be (Flink: *Generating Watermarks*)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Generic, Self, overload

from dagster_unified.errors import PipelineError, UnsupportedError
from dagster_unified.operators.functions.base import TimestampAssigner
from dagster_unified.operators.functions.event_time import WatermarkGenerator
from dagster_unified.operators.functions.type_variables import In, T
from dagster_unified.operators.time import checked_span


@dataclass(frozen=True)
class WatermarkStrategy(Generic[In]):
    """How event time is assigned and how it progresses.

    In STREAMING the watermark follows the largest timestamp seen, `max_out_of_orderness` behind. In BATCH only the
    timestamps count: the watermark is `MIN` while a key's records come and `MAX` at its end (FLIP-134).
    """

    max_out_of_orderness: timedelta | None
    assigner: Any = None
    idleness: timedelta | None = None
    generator: Callable[[], WatermarkGenerator[In]] | None = None
    watermark_group: str | None = None
    max_drift: timedelta | None = None

    @staticmethod
    def for_bounded_out_of_orderness(max_out_of_orderness: timedelta) -> WatermarkStrategy[object]:
        """Records may be late by up to `max_out_of_orderness` (a `timedelta`, or a pendulum duration)."""
        if not isinstance(max_out_of_orderness, timedelta) or max_out_of_orderness < timedelta(0):
            raise PipelineError(
                f"the out-of-orderness bound must be a timedelta that is not negative, not {max_out_of_orderness!r}"
            )
        checked_span("the out-of-orderness bound", max_out_of_orderness)
        return WatermarkStrategy(max_out_of_orderness)

    @staticmethod
    def for_monotonous_timestamps() -> WatermarkStrategy[object]:
        """Records come in the order of their timestamps."""
        return WatermarkStrategy(timedelta(0))

    @staticmethod
    def no_watermarks() -> WatermarkStrategy[object]:
        """Timestamps only; event-time timers fire at the end of input."""
        return WatermarkStrategy(None)

    @staticmethod
    def for_generator(supplier: Callable[[], WatermarkGenerator[T]]) -> WatermarkStrategy[T]:
        """Watermarks come from a `WatermarkGenerator`, which `supplier` (its class, or a function) creates.

        In STREAMING each task creates one for each micro-batch. In BATCH none is created: nothing is late (FLIP-134).

        >>> class Complete(WatermarkGenerator[int]):
        ...     def on_event(self, event, event_timestamp, output):
        ...         if event % 100 == 0:
        ...             output.emit_watermark(event_timestamp)
        >>> strategy = WatermarkStrategy.for_generator(Complete).with_timestamp_assigner(lambda event: event)
        """
        if isinstance(supplier, WatermarkGenerator) or not callable(supplier):
            raise PipelineError(
                "for_generator needs what creates a watermark generator, since each task has its own: the class, or a"
                f" function such as `lambda: {type(supplier).__name__}(...)`, not {supplier!r}"
            )
        return WatermarkStrategy(None, generator=supplier)

    @overload
    def with_timestamp_assigner(self, assigner: str) -> Self: ...
    @overload
    def with_timestamp_assigner(
        self: WatermarkStrategy[object], assigner: Callable[[T], int | datetime] | TimestampAssigner[T]
    ) -> WatermarkStrategy[T]: ...
    @overload
    def with_timestamp_assigner(self, assigner: Callable[[In], int | datetime] | TimestampAssigner[In]) -> Self: ...
    def with_timestamp_assigner(
        self, assigner: str | Callable[[Any], int | datetime] | TimestampAssigner[Any]
    ) -> WatermarkStrategy[Any]:
        """Sets where the timestamp comes from, in both modes.

        That is a field's name (of a datetime, or an int in milliseconds), a function of the record, or a
        `TimestampAssigner`. A field's name is the fastest: Catalyst reads it.
        """
        return replace(self, assigner=assigner)

    def with_idleness(self, timeout: timedelta) -> Self:
        """In STREAMING, a source without records for `timeout` does not hold the watermark back. No effect in BATCH.

        Raises `PipelineError` for a timeout of less than a millisecond; Flink wants more than 0.
        """
        checked_span("the idle timeout", timeout, 1)
        return replace(self, idleness=timeout)

    def with_watermark_alignment(
        self, watermark_group: str, max_allowed_watermark_drift: timedelta, update_interval: timedelta | None = None
    ) -> Self:
        """In STREAMING, parts of a source that get too far ahead of others wait (FLIP-182, FLIP-217).

        A part, such as a partition of a topic, is not read further while its watermark is more than
        `max_allowed_watermark_drift` ahead of the slowest part of all sources in `watermark_group`. A part that is
        idle, has come to its end, or has had no record does not hold others back. Each micro-batch goes by the
        watermarks that the one before it left, so `update_interval` changes nothing; what one micro-batch reads of a
        part is not cut by its times, so limit it with the source's `max_records_per_trigger`. No effect in BATCH.

        The timestamps have to be assigned straight behind a source that is read in splits, such as `KafkaSource`; a
        STREAMING job with another source in a group raises `UnsupportedError`, and so does `for_generator`.
        """
        if not isinstance(max_allowed_watermark_drift, timedelta) or max_allowed_watermark_drift < timedelta(0):
            raise PipelineError(
                f"watermark group '{watermark_group}': the drift must be a timedelta that is not negative, not"
                f" {max_allowed_watermark_drift!r}"
            )
        checked_span(f"watermark group '{watermark_group}': the drift", max_allowed_watermark_drift)
        if update_interval is not None:
            checked_span(f"watermark group '{watermark_group}': the update interval", update_interval, 1)
        if self.max_out_of_orderness is None:
            raise UnsupportedError(
                f"watermark group '{watermark_group}': the watermark of each part has to be known, which only"
                " for_bounded_out_of_orderness and for_monotonous_timestamps tell"
            )
        return replace(self, watermark_group=watermark_group, max_drift=max_allowed_watermark_drift)
