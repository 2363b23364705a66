"""How are aircraft used?

The stretches in which each one keeps coming back to New York, and what kind of aircraft it is.

    flights ─ clean ─ by aircraft ─ sessions ─ look up the aircraft → aircraft_sessions

A session ends when an aircraft has not left New York for 36 hours; sessions that touch merge, and each holds an
accumulator, no flights. The register is a small table that Spark sends to every worker; not every aircraft is in it.

`python -m jobs.data` puts flights and the register in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

from dagster_unified.api import AggregateFunction, EventTimeSessionWindows, Pipeline, ProcessWindowFunction
from dagster_unified.connectors import CsvSource, DeltaSink
from jobs.data import FLIGHTS, OUTPUT, PLANES
from jobs.flights import IN_ORDER, Flight, cleaned

ABSENCE = timedelta(hours=36)


class Plane(NamedTuple):
    """A line of planes.csv: an aircraft as it is registered."""

    tailnum: str
    year: int | None
    type: str
    manufacturer: str
    model: str
    engines: int
    seats: int
    speed: float | None
    engine: str


class Activity(NamedTuple):
    """What an aircraft did in a session, so far."""

    first: datetime
    last: datetime
    flights: int
    miles: int
    minutes: int


class Session(NamedTuple):
    """A session of an aircraft: from its first departure to its last landing; minutes of arrival delay."""

    tail: str
    first: datetime
    last: datetime
    flights: int
    miles: int
    minutes: int


class AircraftSession(NamedTuple):
    """A session, and the aircraft."""

    tail: str
    first: datetime
    last: datetime
    flights: int
    miles: int
    minutes: int
    manufacturer: str | None
    model: str | None
    seats: int | None
    built: int | None


class Used(AggregateFunction):
    """Adds up an aircraft's flights."""

    def create_accumulator(self) -> Activity | None:
        return None

    def add(self, value: Flight, accumulator: Activity | None) -> Activity | None:
        return self.merge(accumulator, Activity(value.departed, value.landed, 1, value.miles, value.arr_delay))

    def get_result(self, accumulator: Activity | None) -> Activity | None:
        return accumulator

    def merge(self, a: Activity | None, b: Activity | None) -> Activity | None:
        if a is None or b is None:
            return a or b
        return Activity(
            min(a.first, b.first), max(a.last, b.last), a.flights + b.flights, a.miles + b.miles, a.minutes + b.minutes
        )


class AsSession(ProcessWindowFunction):
    """Gives a session its aircraft."""

    def process(
        self, key: str, context: ProcessWindowFunction.Context, elements: Iterable[Activity]
    ) -> Iterable[Session]:
        for activity in elements:
            yield Session(key, *activity)


def build(flights_csv: str = str(FLIGHTS), planes_csv: str = str(PLANES), output: str = str(OUTPUT)) -> Pipeline:
    """The pipeline, from two CSV files to a Delta table."""
    pipeline = Pipeline("aircraft_sessions")
    flights = (
        cleaned(pipeline, flights_csv).assign_timestamps_and_watermarks(IN_ORDER).name("flights").uid("flight-times")
    )
    sessions = (
        flights.key_by("tail")
        .window(EventTimeSessionWindows.with_gap(ABSENCE))
        .aggregate(Used(), AsSession())
        .name("sessions")
        .uid("sessions")
    )
    planes = CsvSource(planes_csv, Plane, name="planes", null_value="NA")
    known = {"manufacturer": "manufacturer", "model": "model", "seats": "seats", "built": "year"}
    looked_up = (
        sessions.lookup_join(planes, on={"tail": "tailnum"}, columns=known, output_type=AircraftSession)
        .name("aircraft")
        .uid("aircraft")
    )
    looked_up.sink_to(DeltaSink(f"{output}/aircraft_sessions", mode="upsert", key=("tail", "first")))
    return pipeline


pipeline = build()
