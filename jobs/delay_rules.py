"""Which flights should somebody look at? Flights that break rules, and the rules may change while the pipeline runs.

    flights ─ clean ─ by aircraft ─┐
                                   ├─ flag → flagged_flights
    rules ─── broadcast ───────────┘

A rule says how late a flight has to leave, how often in a row, and from where. Every key group holds all rules, and
each aircraft counts for itself. As a stream, `build(live=True)` watches the rules' folder: a file with another rule, or
with one that is no longer `active`, is in force from the next micro-batch on. In BATCH all rules are there before the
first flight.

`python -m jobs.data` puts flights and two rules in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

from dagster_unified.api import (
    KeyedBroadcastProcessFunction,
    MapStateDescriptor,
    Pipeline,
    RuntimeContext,
    WatermarkStrategy,
)
from dagster_unified.connectors import DeltaSink, JsonSource
from jobs.data import FLIGHTS, OUTPUT, RULES
from jobs.flights import IN_ORDER, Flight, cleaned


class Rule(NamedTuple):
    """Flags the flight with which an aircraft leaves `minutes` late or more, `in_a_row` times or more.

    A rule is for one airport, or for any. Of several rules of one name the last that was `made` is in force.
    """

    name: str
    made: datetime
    airport: str | None
    minutes: int
    in_a_row: int
    active: bool


class Flagged(NamedTuple):
    """A flight that broke a rule, and how often in a row its aircraft had done so."""

    rule: str
    tail: str
    departed: datetime
    carrier: str
    origin: str
    minutes: int
    in_a_row: int


IN_FORCE = MapStateDescriptor("rules in force", str, Rule)


class Flag(KeyedBroadcastProcessFunction):
    """Counts for each aircraft and rule how often in a row it was broken."""

    requires_time_sorted_input = True

    def open(self, context: RuntimeContext) -> None:
        self.broken = context.get_map_state(MapStateDescriptor("broken in a row", str, int))

    def process_element(self, flight: Flight, ctx: KeyedBroadcastProcessFunction.ReadOnlyContext) -> Iterable[Flagged]:
        for name, rule in ctx.get_broadcast_state(IN_FORCE).items():
            if rule.airport not in (None, flight.origin):
                continue
            broken = (self.broken.get(name) or 0) + 1 if flight.dep_delay >= rule.minutes else 0
            self.broken.put(name, broken)
            if broken >= rule.in_a_row:
                yield Flagged(
                    name, flight.tail, flight.departed, flight.carrier, flight.origin, flight.dep_delay, broken
                )

    def process_broadcast_element(self, rule: Rule, ctx: KeyedBroadcastProcessFunction.Context) -> None:
        rules = ctx.get_broadcast_state(IN_FORCE)
        if rule.active:
            rules.put(rule.name, rule)
        else:
            rules.remove(rule.name)


def build(
    flights_csv: str = str(FLIGHTS),
    rules_json: str = str(RULES),
    output: str = str(OUTPUT),
    name: str = "delay_rules",
    live: bool = False,
) -> Pipeline:
    """The pipeline, from flights and a folder of rules to a Delta table; `live` from folders in which files appear."""
    pipeline = Pipeline(name)
    flights = (
        cleaned(pipeline, flights_csv, live)
        .assign_timestamps_and_watermarks(IN_ORDER)
        .name("flights")
        .uid("flight-times")
    )
    made = (
        WatermarkStrategy.for_monotonous_timestamps()
        .with_timestamp_assigner("made")
        .with_idleness(timedelta(seconds=5))
    )  # rules are few and far between
    rules = (
        pipeline.from_source(JsonSource(rules_json, Rule, name="rules", monitor=live))
        .assign_timestamps_and_watermarks(made)
        .name("made")
        .uid("rule-times")
    )
    flagged = flights.key_by("tail").connect(rules.broadcast(IN_FORCE)).process(Flag()).name("flag").uid("flag")
    flagged.sink_to(DeltaSink(f"{output}/flagged_flights", mode="upsert", key=("rule", "tail", "departed")))
    return pipeline


pipeline = build()
