"""Event-time constants and conversions. All times are milliseconds since the epoch (UTC), as in Flink."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from enum import Enum

from dagster_unified.errors import PipelineError

MIN_TIMESTAMP = -(2**63)
"""Flink's `Long.MIN_VALUE`: the watermark before the first one."""

MAX_TIMESTAMP = 2**63 - 1
"""Flink's `Long.MAX_VALUE`: the watermark at the end of input."""

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MILLISECOND = timedelta(milliseconds=1)


class TimeDomain(Enum):
    """The clock of a timer, as `OnTimerContext.time_domain` returns it.

    Examples:
        >>> class Reminder(KeyedProcessFunction[str, str, str]):
        ...     def process_element(self, value: str, ctx: KeyedProcessFunction.Context) -> None:
        ...         ctx.timer_service().register_event_time_timer(1_000)
        ...         ctx.timer_service().register_processing_time_timer(1_000)
        ...     def on_timer(self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext) -> list[str]:
        ...         return [ctx.time_domain().value]
        >>> harness = KeyedHarness(Reminder())
        >>> harness.element("north", "a", timestamp=0), harness.watermark(1_000), harness.processing_time(1_000)
        ([], ['event time'], ['processing time'])
    """

    EVENT_TIME = "event time"
    PROCESSING_TIME = "processing time"


def to_millis(moment: int | datetime) -> int:
    """The milliseconds since the epoch of a datetime, as timers use them (Java: `Instant.toEpochMilli`).

    A fraction of a millisecond is cut off downwards, and a datetime without a time zone is in UTC; an int is returned
    as it is. `int(moment.timestamp() * 1000)` uses a float, which is one millisecond less for some moments.

    Examples:
        >>> from datetime import datetime, timezone
        >>> to_millis(datetime(2024, 1, 1, tzinfo=timezone.utc))
        1704067200000
    """
    if isinstance(moment, datetime):
        return to_span((moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)) - _EPOCH)
    return moment


def to_datetime(millis: int) -> datetime:
    """A moment in UTC, from milliseconds since the epoch; raises `OverflowError` where no calendar has it."""
    return _EPOCH + millis * _MILLISECOND


def to_span(length: timedelta) -> int:
    """A length of time in milliseconds; a fraction is cut off downwards.

    It also takes a pendulum duration, which cannot be divided by a `timedelta`.
    """
    return timedelta.__floordiv__(length, _MILLISECOND)


def checked_span(what: str, length: timedelta, at_least: int | None = None) -> int:
    """An author's length of time, in milliseconds.

    Raises `PipelineError` for anything but a `timedelta`, for a fraction of a millisecond, which would be cut off, and
    for less than `at_least` milliseconds.
    """
    if not isinstance(length, timedelta):
        raise PipelineError(f"{what} is a timedelta, not {length!r}; import it from datetime")
    millis = to_span(length)
    if at_least is not None and length < at_least * _MILLISECOND:
        raise PipelineError(f"{what} has to be at least {at_least} ms, and is {length}")
    if length != millis * _MILLISECOND:
        raise PipelineError(f"{what} has to be in whole milliseconds, and is {length}; round it up or down")
    return millis


def wall_clock() -> int:
    """The machine's clock."""
    return time.time_ns() // 1_000_000
