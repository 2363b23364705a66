"""Where do flights go, and how late do they arrive? With the airports' names, from a small table.

    flights ─ completed ─ look up the airport ─ by destination ─ totals → destinations

All of it is expressions on columns, which Catalyst runs: no Python worker is started, in either mode.

`python -m jobs.data` puts flights and airports in place.
"""

from __future__ import annotations

from typing import NamedTuple

from dagster_unified.api import Pipeline
from dagster_unified.api import functions as F
from dagster_unified.connectors import CsvSource, DeltaSink
from jobs.data import AIRPORTS, FLIGHTS, OUTPUT
from jobs.flights import RawFlight


class Airport(NamedTuple):
    """A line of airports.csv."""

    faa: str
    name: str
    lat: float
    lon: float
    alt: int
    tz: float
    dst: str
    tzone: str | None


class Arrival(NamedTuple):
    """A flight that arrived: minutes of delay, miles."""

    dest: str
    arr_delay: float | None
    distance: int


class Located(NamedTuple):
    """An arrival, and the airport's name and time zone where they are known."""

    dest: str
    arr_delay: float | None
    distance: int
    airport: str | None
    zone: str | None


class Named(NamedTuple):
    """An arrival at an airport that has a name."""

    dest: str
    arr_delay: float | None
    distance: int
    airport: str
    zone: str | None


class Destination(NamedTuple):
    """A destination's year: flights, minutes of arrival delay in all and at the worst, and how far it is."""

    dest: str
    airport: str
    flights: int
    minutes: float | None
    worst: float | None
    miles: int | None


def build(flights_csv: str = str(FLIGHTS), airports_csv: str = str(AIRPORTS), output: str = str(OUTPUT)) -> Pipeline:
    """The pipeline, from two CSV files to a Delta table."""
    pipeline = Pipeline("destinations")
    flights = pipeline.from_source(CsvSource(flights_csv, RawFlight, name="flights", null_value="NA"))
    arrived = (
        flights.where("arr_delay is not null")
        .name("completed")
        .uid("completed")
        .select("dest", "arr_delay", "distance", output_type=Arrival)
        .name("arrivals")
        .uid("arrivals")
    )
    airports = CsvSource(airports_csv, Airport, name="airports", null_value="NA")
    located = (
        arrived.lookup_join(
            airports, on={"dest": "faa"}, columns={"airport": "name", "zone": "tzone"}, output_type=Located
        )
        .name("airport")
        .uid("airport")
    )
    named = (
        located.with_columns({"airport": F.coalesce("airport", F.lit("not in the list"))}, Named)
        .name("named")
        .uid("named")
    )
    totals = named.key_by("dest", "airport").agg(
        F.count("*").alias("flights"),
        F.sum("arr_delay").alias("minutes"),
        F.max("arr_delay").alias("worst"),
        F.max("distance").alias("miles"),
        output_type=Destination,
    )
    totals.name("totals").uid("totals").sink_to(
        DeltaSink(f"{output}/destinations", mode="upsert", key=("dest", "airport"))
    )
    return pipeline


pipeline = build()
