"""Moments and lengths of time, by pendulum: of the calendar, and as people read them."""

from __future__ import annotations

from datetime import datetime, timedelta

import pendulum

from dagster_unified.errors import ConfigurationError, PipelineError
from dagster_unified.operators.time import checked_span


def now() -> pendulum.DateTime:
    """The moment that it is, in UTC."""
    return pendulum.now("UTC")


def utc(timestamp: float) -> pendulum.DateTime:
    """A moment, from seconds since the epoch."""
    return pendulum.from_timestamp(timestamp)


def as_text(millis: int) -> str:
    """A moment as people read it, from milliseconds since the epoch; as its number where no calendar has it."""
    try:
        return utc(millis / 1000).replace(microsecond=0).isoformat(sep=" ")
    except (OverflowError, ValueError, OSError):
        return str(millis)


def check_lengths(where: str, at_least: timedelta | None = None, /, **lengths: timedelta | None) -> None:
    """Raises `ConfigurationError` where one of these is no length of time, or is too short; None says nothing."""
    for name, value in lengths.items():
        if value is None:
            continue
        try:
            checked_span(f"{where}: {name}", value)
        except PipelineError as error:
            raise ConfigurationError(str(error)) from None
        if at_least is not None and value < at_least:
            raise ConfigurationError(f"{where}: {name} is at least {words(at_least)}, and {value} was given")


def earlier_on_the_clock(moment: datetime, by: timedelta) -> pendulum.DateTime:
    """The moment at which the clocks of its zone showed so much less.

    Six hours before six in the morning is midnight, on every day.
    """
    zoned = pendulum.instance(moment)
    return (zoned.timezone or pendulum.UTC).convert(zoned.naive() - by)


def words(length: timedelta) -> str:
    """A length as people say it: 2 hours 30 minutes."""
    seconds = round(length.total_seconds())
    return pendulum.duration(seconds=seconds).in_words() if seconds else "less than a second"
