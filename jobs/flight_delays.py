"""Where do delays come from? Every flight out of New York in 2013, followed aircraft by aircraft.

    flights ─ clean ─┬─ by carrier ─ totals ──────────────────────────────→ carrier_delays
                     └─ by aircraft ─ AircraftDay ─┬─ by carrier ─ sums ──→ delay_propagation
                                                   └─ (idle aircraft) ────→ idle_aircraft

`AircraftDay` follows each tail number through its days: how long it stood between two departures from New York, how much of a
delay it brought along from the leg before, and whether it has not flown for three days.

The data has New York's departures only, so a leg's return flight is not in it: the *turnaround* is the time from landing
at the destination to the next departure from New York, and includes the way back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple
from zoneinfo import ZoneInfo

from dagster_unified.api import CsvSource, DeltaSink, KeyedProcessFunction, OutputTag, Pipeline, ValueStateDescriptor, WatermarkStrategy
from dagster_unified.api import functions as F
from jobs.data import FLIGHTS

NEW_YORK = ZoneInfo("America/New_York")
OUTPUT = Path(os.environ.get("DAGSTER_UNIFIED_OUTPUT", ".dagster_unified/tables"))
IDLE_AFTER = timedelta(days=3)
MILLISECOND = timedelta(milliseconds=1)


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
    """A flight that took place. Delays in minutes; times in UTC; `scheduled` is the departure's."""

    carrier: str
    tail: str
    origin: str
    dest: str
    scheduled: datetime
    departed: datetime
    landed: datetime
    dep_delay: int
    arr_delay: int
    miles: int


class CarrierDelay(NamedTuple):
    """A carrier's year: flights, total minutes of departure delay, and the extremes."""

    carrier: str
    flights: int
    minutes: int
    worst: int
    earliest: int
    miles: int


class Leg(NamedTuple):
    """A flight after another one of the same aircraft. Minutes."""

    carrier: str
    tail: str
    turnaround: int
    inherited: int
    own: int
    legs: int


class Propagation(NamedTuple):
    """How a carrier's delays come about: minutes that aircraft brought along from the leg before, and minutes added."""

    carrier: str
    legs: int
    inherited: int
    own: int
    turnaround: int


class Idle(NamedTuple):
    """An aircraft that has not flown for `IDLE_AFTER`, as far as the data goes: after its end, every aircraft is idle."""

    tail: str
    carrier: str
    last_seen: str
    since: datetime


IDLE = OutputTag("idle", Idle)


def clean(raw: RawFlight) -> Iterable[Flight]:
    """Flights that left and landed, with a known aircraft and times in UTC."""
    if raw.dep_delay is None or raw.arr_delay is None or raw.air_time is None or raw.tailnum is None:
        return
    local = datetime(raw.year, raw.month, raw.day, raw.sched_dep_time // 100, raw.sched_dep_time % 100, tzinfo=NEW_YORK)
    scheduled = local.astimezone(ZoneInfo("UTC"))
    departed = scheduled + timedelta(minutes=raw.dep_delay)
    landed = departed + timedelta(minutes=raw.air_time)  # taxiing is not in the data
    yield Flight(raw.carrier, raw.tailnum, raw.origin, raw.dest, scheduled, departed, landed, int(raw.dep_delay), int(raw.arr_delay), raw.distance)


def as_propagation(leg: Leg) -> Propagation:
    """One leg as a total of one."""
    return Propagation(leg.carrier, 1, leg.inherited, leg.own, leg.turnaround)


def add(a: Propagation, b: Propagation) -> Propagation:
    """Two totals of a carrier as one."""
    return Propagation(a.carrier, a.legs + b.legs, a.inherited + b.inherited, a.own + b.own, a.turnaround + b.turnaround)


class AircraftDay(KeyedProcessFunction):
    """Follows one aircraft from departure to departure."""

    requires_time_sorted_input = True

    def open(self, context):
        self.last = context.get_state(ValueStateDescriptor("last flight", Flight))
        self.legs = context.get_state(ValueStateDescriptor("legs today", int))

    def process_element(self, flight: Flight, ctx: KeyedProcessFunction.Context) -> Iterable[Leg]:
        last = self.last.value()
        timers = ctx.timer_service()
        if last is not None:
            timers.delete_event_time_timer(_idle_at(last))
            same_day = last.scheduled.astimezone(NEW_YORK).date() == flight.scheduled.astimezone(NEW_YORK).date()
            self.legs.update((self.legs.value() or 1) + 1 if same_day else 1)
            turnaround = (flight.departed - last.landed) // timedelta(minutes=1)
            if same_day and turnaround > 0:
                inherited = max(0, min(last.arr_delay, flight.dep_delay))
                yield Leg(flight.carrier, flight.tail, turnaround, inherited, flight.dep_delay - inherited, self.legs.value())
        self.last.update(flight)
        timers.register_event_time_timer(_idle_at(flight))

    def on_timer(self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext) -> Iterable[Leg]:
        last = self.last.value()
        yield IDLE, Idle(last.tail, last.carrier, last.dest, last.landed)


def _idle_at(flight: Flight) -> int:
    """When an aircraft counts as idle, if it does not fly again. Milliseconds since the epoch."""
    return (flight.scheduled + IDLE_AFTER - datetime.fromtimestamp(0, ZoneInfo("UTC"))) // MILLISECOND


def build(flights_csv: str = str(FLIGHTS), output: str = str(OUTPUT)) -> Pipeline:
    """The pipeline, from a CSV file to three Delta tables."""
    pipeline = Pipeline("flight_delays")
    by_schedule = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(days=1)).with_timestamp_assigner("scheduled")
    flights = (
        pipeline.from_source(CsvSource(flights_csv, RawFlight, name="flights", null_value="NA", on_malformed="divert"))
        .flat_map(clean)
        .name("clean")
        .uid("clean")
        .assign_timestamps_and_watermarks(by_schedule)
        .name("flights")
    )

    totals = flights.key_by("carrier").agg(
        F.count("*").alias("flights"),
        F.sum("dep_delay").alias("minutes"),
        F.max("dep_delay").alias("worst"),
        F.min("dep_delay").alias("earliest"),
        F.sum("miles").alias("miles"),
        output_type=CarrierDelay,
    )
    totals.name("totals").uid("totals").sink_to(DeltaSink(f"{output}/carrier_delays", mode="upsert", key="carrier"))

    legs = flights.key_by("tail").process(AircraftDay()).name("legs").uid("aircraft")
    propagation = legs.map(as_propagation).name("propagation").key_by("carrier").reduce(add).name("sums").uid("sums")
    propagation.sink_to(DeltaSink(f"{output}/delay_propagation", mode="upsert", key="carrier"))
    legs.get_side_output(IDLE).sink_to(DeltaSink(f"{output}/idle_aircraft", mode="overwrite"))
    return pipeline


pipeline = build()
