"""The flights as the examples read them.

A line of the file, a flight that took place, and how one becomes the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date, datetime, timedelta, timezone
from typing import NamedTuple
from zoneinfo import ZoneInfo

from dagster_unified.api import DataStream, Pipeline, WatermarkStrategy
from dagster_unified.connectors import CsvSource

NEW_YORK = ZoneInfo("America/New_York")
MINUTE = timedelta(minutes=1)
IN_ORDER = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(days=1)).with_timestamp_assigner("departed")
"""By departure. The file is in the order of schedules, and a flight leaves up to a day late."""


class RawFlight(NamedTuple):
    """A line of flights.csv. What is missing was not measured: a cancelled flight has no departure."""

    year: int
    month: int
    day: int
    dep_time: float | None
    sched_dep_time: int
    dep_delay: float | None
    arr_time: float | None
    sched_arr_time: int
    arr_delay: float | None
    carrier: str
    flight: int
    tailnum: str | None
    origin: str
    dest: str
    air_time: float | None
    distance: int
    hour: int
    minute: int
    time_hour: str


class Flight(NamedTuple):
    """A flight that took place. Delays in minutes; times in UTC; `day` is New York's, on which it was to leave."""

    carrier: str
    tail: str
    origin: str
    dest: str
    day: date
    departed: datetime
    landed: datetime
    dep_delay: int
    arr_delay: int
    miles: int


def clean(raw: RawFlight) -> Iterable[Flight]:
    """Flights that left and landed where they were to, with a known aircraft and times in UTC."""
    if raw.dep_delay is None or raw.arr_delay is None or raw.air_time is None or raw.tailnum is None:
        return
    local = datetime(raw.year, raw.month, raw.day, raw.sched_dep_time // 100, raw.sched_dep_time % 100, tzinfo=NEW_YORK)
    departed = local.astimezone(timezone.utc) + raw.dep_delay * MINUTE
    landed = departed + raw.air_time * MINUTE
    yield Flight(
        raw.carrier,
        raw.tailnum,
        raw.origin,
        raw.dest,
        local.date(),
        departed,
        landed,
        int(raw.dep_delay),
        int(raw.arr_delay),
        raw.distance,
    )


def flights_source(path: str, live: bool = False) -> CsvSource:
    """The file's lines; `live` those of files that appear in a folder. A line that is not a flight is put aside."""
    return CsvSource(path, RawFlight, name="flights", null_value="NA", on_malformed="divert", monitor=live)


def cleaned(pipeline: Pipeline, path: str, live: bool = False) -> DataStream:
    """The flights that took place."""
    return pipeline.from_source(flights_source(path, live)).flat_map(clean).name("clean").uid("clean")
