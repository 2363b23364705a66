"""The network that the flights of the year make: how many there were from each airport to each other."""

from __future__ import annotations

from typing import NamedTuple

from dagster_unified.api import DataStream, Pipeline
from dagster_unified.api import functions as F
from dagster_unified.connectors import CsvSource
from jobs.flights import RawFlight


class Leg(NamedTuple):
    """A flight that took place."""

    origin: str
    dest: str


class Route(NamedTuple):
    """Two airports, and how many flights there were from one to the other."""

    origin: str
    dest: str
    flights: int


def routes(pipeline: Pipeline, flights_csv: str) -> DataStream[Route]:
    """The routes of all flights in a file that have arrived."""
    flights = pipeline.from_source(CsvSource(flights_csv, RawFlight, name="flights", null_value="NA"))
    legs = flights.where("arr_delay is not null").name("completed").uid("completed")
    return (
        legs.select("origin", "dest", output_type=Leg)
        .key_by("origin", "dest")
        .agg(F.count("*").alias("flights"), output_type=Route)
        .name("routes")
        .uid("routes")
    )
