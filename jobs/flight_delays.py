"""Where do delays come from? Every flight out of New York in 2013, followed aircraft by aircraft.

    flights ─ clean ─┬─ by carrier ─ totals ────────────────────────────────────→ carrier_delays
                     └─ by aircraft ─ AircraftDay ─┬─ by carrier, month ─ sums → delay_propagation
                                                   └─ (idle aircraft) ───────── → idle_aircraft

`AircraftDay` follows each tail number through its days: how long it stood on the ground between two departures from New
York, how much of a delay it brought along from the leg before, and when it has not been seen in New York for thirty
days.

What the data does not have, and what is done about it:
  - Flights to New York. The way back is taken to last as long as the way out; what remains is time on the ground, at
    both ends.
  - Taxiing. An aircraft lands `air_time` after it left the gate, so ground time includes taxiing.
  - The time after 2013. A silence that would become an alert only then is no alert.

`python -m jobs.data` puts the flights in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from dagster_unified.api import (
    DataStream,
    KeyedProcessFunction,
    MapStateDescriptor,
    OutputTag,
    Pipeline,
    RuntimeContext,
    ValueStateDescriptor,
)
from dagster_unified.api import functions as F
from dagster_unified.connectors import DeltaSink
from jobs.data import FLIGHTS, OUTPUT
from jobs.flights import IN_ORDER, NEW_YORK, Flight, cleaned

IDLE_AFTER = timedelta(days=30)
DATA_ENDS = datetime(2014, 1, 1, tzinfo=NEW_YORK)
MINUTE = timedelta(minutes=1)
MILLISECOND = timedelta(milliseconds=1)
EPOCH = datetime.fromtimestamp(0, timezone.utc)


class CarrierDelay(NamedTuple):
    """A carrier's year: flights, total minutes of departure delay, and the extremes."""

    carrier: str
    flights: int
    minutes: int
    worst: int
    earliest: int
    miles: int


class Leg(NamedTuple):
    """A flight after another one of the same aircraft, on the same day. Minutes."""

    carrier: str
    tail: str
    month: int
    ground: int
    inherited: int
    own: int


class Propagation(NamedTuple):
    """How a carrier's delays of a month come about.

    They are minutes that aircraft brought along from the leg before, and minutes added.
    """

    carrier: str
    month: int
    legs: int
    inherited: int
    own: int
    ground: int


class Idle(NamedTuple):
    """An aircraft that has not left New York for `IDLE_AFTER`.

    It says where the aircraft went last, when it landed there, and when that was noticed.
    """

    tail: str
    carrier: str
    last_seen: str
    since: datetime
    noticed: datetime


IDLE = OutputTag("idle", Idle)


def as_propagation(leg: Leg) -> Propagation:
    """One leg as a total of one."""
    return Propagation(leg.carrier, leg.month, 1, leg.inherited, leg.own, leg.ground)


def add(a: Propagation, b: Propagation) -> Propagation:
    """Two totals of a carrier and month as one."""
    return Propagation(
        a.carrier, a.month, a.legs + b.legs, a.inherited + b.inherited, a.own + b.own, a.ground + b.ground
    )


def within_the_data(idle: Idle) -> bool:
    """Whether the data covers the whole silence: after its end, every aircraft is silent."""
    return idle.noticed < DATA_ENDS


class AircraftDay(KeyedProcessFunction):
    """Follows one aircraft from departure to departure.

    A flight calls off the alert that the one before it has set, unless that was due already. An alert that is due keeps
    its record until its timer fires: at once in STREAMING, at the end of the aircraft's flights in BATCH. Both emit the
    same.
    """

    requires_time_sorted_input = True

    def open(self, context: RuntimeContext) -> None:
        self.last = context.get_state(ValueStateDescriptor("last flight", Flight))
        self.alerts = context.get_map_state(MapStateDescriptor("alerts", int, Idle))

    def process_element(self, flight: Flight, ctx: KeyedProcessFunction.Context) -> Iterable[Leg]:
        last = self.last.value()
        self.last.update(flight)
        if last is not None:
            self._call_off_alert(last, flight, ctx)
            yield from _leg(last, flight)
        noticed = flight.departed + IDLE_AFTER
        self.alerts.put(_millis(noticed), Idle(flight.tail, flight.carrier, flight.dest, flight.landed, noticed))
        ctx.timer_service().register_event_time_timer(_millis(noticed))

    def on_timer(self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext) -> Iterable[Leg]:
        yield IDLE, self.alerts.get(timestamp)
        self.alerts.remove(timestamp)

    def _call_off_alert(self, last: Flight, flight: Flight, ctx: KeyedProcessFunction.Context) -> None:
        noticed = last.departed + IDLE_AFTER
        if flight.departed < noticed:
            ctx.timer_service().delete_event_time_timer(_millis(noticed))
            self.alerts.remove(_millis(noticed))


def _leg(last: Flight, flight: Flight) -> Iterable[Leg]:
    """What the aircraft did between two flights of a day; nothing where the data has it in two places at once."""
    way_back = last.landed - last.departed
    ground = (flight.departed - last.landed - way_back) // MINUTE
    if flight.day == last.day and ground > 0:
        inherited = max(0, min(last.arr_delay, flight.dep_delay))
        yield Leg(flight.carrier, flight.tail, flight.day.month, ground, inherited, flight.dep_delay - inherited)


def _millis(time: datetime) -> int:
    """A timer's timestamp: milliseconds since the epoch."""
    return (time - EPOCH) // MILLISECOND


class Delays(NamedTuple):
    """The streams of the pipeline that go to its sinks."""

    totals: DataStream[CarrierDelay]
    sums: DataStream[Propagation]
    alerts: DataStream[Idle]


def delays(clean_flights: DataStream[Flight]) -> Delays:
    """The pipeline between its source and its sinks."""
    flights = clean_flights.assign_timestamps_and_watermarks(IN_ORDER).name("flights").uid("event-times")

    totals = flights.key_by("carrier").agg(
        F.count("*").alias("flights"),
        F.sum("dep_delay").alias("minutes"),
        F.max("dep_delay").alias("worst"),
        F.min("dep_delay").alias("earliest"),
        F.sum("miles").alias("miles"),
        output_type=CarrierDelay,
    )
    legs = flights.key_by("tail").process(AircraftDay()).name("legs").uid("aircraft")
    propagation = legs.map(as_propagation).name("propagation").uid("propagation")
    sums = propagation.key_by("carrier", "month").reduce(add).name("sums").uid("sums")
    alerts = legs.get_side_output(IDLE).filter(within_the_data).name("alerts").uid("alerts")
    return Delays(totals.name("totals").uid("totals"), sums, alerts)


def build(
    flights_csv: str = str(FLIGHTS), output: str = str(OUTPUT), name: str = "flight_delays", live: bool = False
) -> Pipeline:
    """The pipeline, from a CSV file to three Delta tables; `live` from a folder in which files appear."""
    pipeline = Pipeline(name)
    totals, sums, alerts = delays(cleaned(pipeline, flights_csv, live))
    totals.sink_to(DeltaSink(f"{output}/carrier_delays", mode="upsert", key="carrier"))
    sums.sink_to(DeltaSink(f"{output}/delay_propagation", mode="upsert", key=("carrier", "month")))
    alerts.sink_to(DeltaSink(f"{output}/idle_aircraft", mode="upsert", key=("tail", "since")))
    return pipeline


pipeline = build()
