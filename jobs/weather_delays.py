"""Is it the weather? Departure delays by airport and hour, joined with that hour's weather.

    flights ─ clean ─ by airport ─ hours ─┐
                                          ├─ by airport and hour ─ with weather ─┬────────────────────────→
                                          weather_delays
    weather ──────────────────────────────┘                                      └─ by conditions ─ sums →
    delay_by_conditions

The hours are tumbling windows that hold an accumulator each; an hour's result has the hour's last moment as its event
time, so that it falls into the same hour's window with the weather that was measured then.

`python -m jobs.data` puts flights and weather in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from dagster_unified.api import (
    AggregateFunction,
    Pipeline,
    ProcessWindowFunction,
    TumblingEventTimeWindows,
    WatermarkStrategy,
)
from dagster_unified.connectors import CsvSource, DeltaSink
from jobs.data import FLIGHTS, OUTPUT, WEATHER
from jobs.flights import IN_ORDER, Flight, cleaned

HOUR = TumblingEventTimeWindows.of(timedelta(hours=1))


class Weather(NamedTuple):
    """A line of weather.csv: what an airport measured in an hour. Degrees Fahrenheit, miles an hour, inches, miles."""

    origin: str
    year: int
    month: int
    day: int
    hour: int
    temp: float | None
    dewp: float | None
    humid: float | None
    wind_dir: float | None
    wind_speed: float | None
    wind_gust: float | None
    precip: float
    pressure: float | None
    visib: float
    time_hour: datetime


class Hour(NamedTuple):
    """What left an airport in an hour: flights, and minutes of delay in all."""

    origin: str
    hour: datetime
    flights: int
    minutes: int


class WeatherDelay(NamedTuple):
    """An hour's departures and its weather."""

    origin: str
    hour: datetime
    flights: int
    minutes: int
    wind_speed: float | None
    precip: float
    visib: float


class ByConditions(NamedTuple):
    """What left under some conditions; `mean` is in minutes."""

    conditions: str
    hours: int
    flights: int
    minutes: int
    mean: float


class Departures(AggregateFunction):
    """Flights, and their minutes of delay."""

    def create_accumulator(self) -> tuple[int, int]:
        return 0, 0

    def add(self, value: Flight, accumulator: tuple[int, int]) -> tuple[int, int]:
        return accumulator[0] + 1, accumulator[1] + value.dep_delay

    def get_result(self, accumulator: tuple[int, int]) -> tuple[int, int]:
        return accumulator

    def merge(self, a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        return a[0] + b[0], a[1] + b[1]


class AsHour(ProcessWindowFunction):
    """Gives an hour's accumulator its airport and hour."""

    def process(
        self, key: str, context: ProcessWindowFunction.Context, elements: Iterable[tuple[int, int]]
    ) -> Iterable[Hour]:
        for flights, minutes in elements:
            yield Hour(key, datetime.fromtimestamp(context.window().start / 1000, timezone.utc), flights, minutes)


def with_weather(hour: Hour, weather: Weather) -> WeatherDelay:
    """An hour and its weather."""
    return WeatherDelay(
        hour.origin, hour.hour, hour.flights, hour.minutes, weather.wind_speed, weather.precip, weather.visib
    )


def conditions(delay: WeatherDelay) -> ByConditions:
    """One hour as a total of one."""
    wet = "rain or snow" if delay.precip > 0 else "dry"
    sight = "can see" if delay.visib >= 5 else "can hardly see"
    return ByConditions(f"{wet}, {sight}", 1, delay.flights, delay.minutes, round(delay.minutes / delay.flights, 1))


def add(a: ByConditions, b: ByConditions) -> ByConditions:
    """Two totals as one."""
    flights, minutes = a.flights + b.flights, a.minutes + b.minutes
    return ByConditions(a.conditions, a.hours + b.hours, flights, minutes, round(minutes / flights, 1))


def build(flights_csv: str = str(FLIGHTS), weather_csv: str = str(WEATHER), output: str = str(OUTPUT)) -> Pipeline:
    """The pipeline, from two CSV files to two Delta tables."""
    pipeline = Pipeline("weather_delays")
    flights = (
        cleaned(pipeline, flights_csv).assign_timestamps_and_watermarks(IN_ORDER).name("flights").uid("flight-times")
    )
    hours = flights.key_by("origin").window(HOUR).aggregate(Departures(), AsHour()).name("hours").uid("hours")

    measured = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(hours=1)).with_timestamp_assigner("time_hour")
    source = CsvSource(weather_csv, Weather, name="weather", null_value="NA")
    weather = (
        pipeline.from_source(source).assign_timestamps_and_watermarks(measured).name("measured").uid("weather-times")
    )

    joined = (
        hours.join(weather)
        .where("origin")
        .equal_to("origin")
        .window(HOUR)
        .apply(with_weather)
        .name("with_weather")
        .uid("with-weather")
    )
    joined.sink_to(DeltaSink(f"{output}/weather_delays", mode="upsert", key=("origin", "hour")))

    sums = (
        joined.map(conditions)
        .name("conditions")
        .uid("conditions")
        .key_by("conditions")
        .reduce(add)
        .name("sums")
        .uid("sums")
    )
    sums.sink_to(DeltaSink(f"{output}/delay_by_conditions", mode="upsert", key="conditions"))
    return pipeline


pipeline = build()
