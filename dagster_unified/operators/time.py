"""Event-time constants and conversions. All times are milliseconds since the epoch (UTC), as in Flink."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from enum import Enum

MIN_TIMESTAMP = -(2**63)
"""Flink's `Long.MIN_VALUE`: the watermark before the first one."""

MAX_TIMESTAMP = 2**63 - 1
"""Flink's `Long.MAX_VALUE`: the watermark at the end of input."""

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MILLISECOND = timedelta(milliseconds=1)


class TimeDomain(Enum):
    """Which clock a timer listens to."""

    EVENT_TIME = "event time"
    PROCESSING_TIME = "processing time"


def to_millis(moment: int | datetime) -> int:
    """Milliseconds since the epoch; a naive datetime is taken as UTC."""
    if isinstance(moment, datetime):
        return to_span((moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)) - _EPOCH)
    return moment


def to_span(length: timedelta) -> int:
    """A length of time in whole milliseconds.

    A pendulum duration, which cannot be divided by a `timedelta`, does as well.
    """
    return timedelta.__floordiv__(length, _MILLISECOND)


def wall_clock() -> int:
    """The machine's clock."""
    return time.time_ns() // 1_000_000
