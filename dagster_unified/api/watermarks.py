"""Event time: where timestamps come from, and how far out of order records may be (Flink: *Generating Watermarks*)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Generic, NoReturn, Self, overload

from dagster_unified.errors import PipelineError, UnsupportedError
from dagster_unified.operators.functions.base import TimestampAssigner
from dagster_unified.operators.functions.event_time import WatermarkGenerator
from dagster_unified.operators.functions.type_variables import In, T


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

    @staticmethod
    def for_bounded_out_of_orderness(max_out_of_orderness: timedelta) -> WatermarkStrategy[object]:
        """Records may be late by up to `max_out_of_orderness` (a `timedelta`, or a pendulum duration)."""
        if not isinstance(max_out_of_orderness, timedelta) or max_out_of_orderness < timedelta(0):
            raise PipelineError(
                f"the out-of-orderness bound must be a timedelta that is not negative, not {max_out_of_orderness!r}"
            )
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
        """Where the timestamp comes from.

        A field's name (datetime, or int in milliseconds), a function of the record, or a `TimestampAssigner`.

        A field's name is the fastest: it is read in Catalyst.
        """
        return replace(self, assigner=assigner)

    def with_idleness(self, timeout: timedelta) -> Self:
        """In STREAMING, a source without records for `timeout` does not hold the watermark back. No effect in BATCH."""
        return replace(self, idleness=timeout)

    def with_watermark_alignment(
        self, watermark_group: str, max_allowed_watermark_drift: timedelta, update_interval: timedelta | None = None
    ) -> NoReturn:
        """Raises `UnsupportedError`: Spark gives no source of a query a way to wait for another (FLIP-182)."""
        raise UnsupportedError(
            f"watermark group '{watermark_group}': watermark alignment is not supported, because Spark fixes how much"
            " each source reads in a micro-batch when the query starts, so that no source can wait for another; limit"
            " the source that gets ahead, with max_files_per_trigger or an option of its format such as"
            " maxOffsetsPerTrigger"
        )
