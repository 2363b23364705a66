"""Whose flights are late, and where?

Each carrier's totals so far, and each airport's weeks.

    flights ─ clean ─┬─ by carrier ─ add up → totals
                     └─ by airport ─ weeks ─ add up → weeks

`python -m jobs.data` puts the flights in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from dagster_unified.api import Pipeline, ProcessWindowFunction, TumblingEventTimeWindows
from dagster_unified.connectors import CsvSource, DeltaSink
from jobs.data import FLIGHTS, OUTPUT
from jobs.flights import IN_ORDER, Flight, RawFlight, clean

WEEK = timedelta(days=7)


class Delays(NamedTuple):
    """The flights of a carrier, and their minutes of departure delay."""

    carrier: str
    flights: int
    minutes: int
    worst: int


class Week(NamedTuple):
    """A week of an airport, which begins on a Thursday: its flights, and their minutes of departure delay."""

    origin: str
    begins: datetime
    flights: int
    minutes: int


def as_delays(flight: Flight) -> Delays:
    """One flight as a total of one."""
    return Delays(flight.carrier, 1, flight.dep_delay, flight.dep_delay)


def add(a: Delays, b: Delays) -> Delays:
    """Two totals of a carrier as one."""
    return Delays(a.carrier, a.flights + b.flights, a.minutes + b.minutes, max(a.worst, b.worst))


def as_week(flight: Flight) -> Week:
    """One flight as a week of one."""
    return Week(flight.origin, flight.departed, 1, flight.dep_delay)


def add_week(a: Week, b: Week) -> Week:
    """Two parts of a week as one."""
    return Week(a.origin, a.begins, a.flights + b.flights, a.minutes + b.minutes)


class WithBeginning(ProcessWindowFunction):
    """Says when a week begins."""

    def process(self, key: str, context: ProcessWindowFunction.Context, elements: Iterable[Week]) -> Iterable[Week]:
        begins = datetime.fromtimestamp(context.window().start / 1000, timezone.utc)
        for week in elements:
            yield week._replace(begins=begins)


def build(
    flights_csv: str = str(FLIGHTS), output: str = str(OUTPUT), name: str = "delay_totals", live: bool = False
) -> Pipeline:
    """The pipeline, from CSV files to two Delta tables; `live` from a folder in which files appear."""
    pipeline = Pipeline(name)
    source = CsvSource(
        flights_csv, RawFlight, name="flights", null_value="NA", monitor=live, max_files_per_trigger=7 if live else None
    )
    flights = (
        pipeline.from_source(source)
        .flat_map(clean)
        .name("clean")
        .uid("clean")
        .assign_timestamps_and_watermarks(IN_ORDER)
        .name("flights")
        .uid("event-times")
    )
    totals = flights.map(as_delays).key_by("carrier").reduce(add).name("totals").uid("totals")
    totals.sink_to(DeltaSink(f"{output}/delay_totals", mode="upsert", key="carrier"))
    weeks = (
        flights.map(as_week)
        .key_by("origin")
        .window(TumblingEventTimeWindows.of(WEEK))
        .reduce(add_week, WithBeginning())
        .name("weeks")
        .uid("weeks")
    )
    weeks.sink_to(DeltaSink(f"{output}/delay_weeks", mode="upsert", key=("origin", "begins")))
    return pipeline


pipeline = build()
