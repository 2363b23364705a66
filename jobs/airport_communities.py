"""Which airports belong together? Label propagation over the network that the flights of the year make.

    flights ─ completed ─ routes ─────────────┐
                                              ├─ iteration: airports take labels of their neighbours ─┐
    nothing (the labels of the epoch before) ─┘        ↑ the next epoch's labels ────────────────────┘
                                                       └─ members → airport_communities

An airport takes the label that has the most weight among its neighbours, unless its own has as much. A route weighs
what it has more than an even share of the flights to its destination. New York's airports begin with their names; so in
one epoch airports elsewhere move, and in the next New York's. The loop ends when nobody does. It runs in BATCH, and
each epoch is committed. Raghavan et al., "Near linear time algorithm to detect community structures in large-scale
networks", 2007.

`python -m jobs.data` puts the flights in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from dagster_unified.api import (
    DataStream,
    KeyedProcessFunction,
    MapStateDescriptor,
    OutputTag,
    Pipeline,
    RuntimeContext,
    ValueStateDescriptor,
    iterations,
)
from dagster_unified.connectors import DeltaSink
from jobs.data import FLIGHTS, OUTPUT
from jobs.routes import Route, routes

AIRPORTS_OF_NEW_YORK = 3


class Message(NamedTuple):
    """What an airport is told: the label of a neighbour, and how much the route to it weighs."""

    airport: str
    neighbour: str
    weight: int
    label: str


class Neighbour(NamedTuple):
    """What an airport knows of a neighbour."""

    weight: int
    label: str


class Member(NamedTuple):
    """An airport, and the label of its community: the name of one of New York's airports."""

    airport: str
    community: str


MEMBERS = OutputTag("members", Member)


class Propagate(KeyedProcessFunction[str, Message, Message], iterations.IterationListener[Message]):
    """An airport: hears of its neighbours' labels and, at the end of the epoch, tells them where it moves."""

    def open(self, runtime_context: RuntimeContext) -> None:
        self.label = runtime_context.get_state(ValueStateDescriptor("label", str))
        self.near = runtime_context.get_map_state(MapStateDescriptor("near", str, Neighbour))

    def process_element(self, value: Message, ctx: KeyedProcessFunction.Context[str]) -> list[Message]:
        self.near.put(value.neighbour, Neighbour(value.weight, value.label))
        return []

    def on_epoch_watermark_incremented(
        self, epoch_watermark: int, context: iterations.EpochContext, collector: iterations.EpochCollector[Message]
    ) -> None:
        if epoch_watermark == 0:
            self._weigh()
        airport, weights = context.get_current_key(), Counter[str]()
        for neighbour in self.near.values():
            weights[neighbour.label] += neighbour.weight
        own, most = self.label.value() or airport, max(weights.values(), default=0)
        label = max((one for one, weight in weights.items() if weight == most), default=own)
        if weights[own] == most:
            label = own
        self.label.update(label)
        if label != own:
            for name, neighbour in sorted(self.near.items()):
                collector.collect(Message(name, airport, neighbour.weight, label))

    def _weigh(self) -> None:
        """Keeps the routes that have more than an even share of the airport's flights; they weigh what is more."""
        flights = {name: neighbour.weight for name, neighbour in self.near.items()}
        for name, own in flights.items():
            more = AIRPORTS_OF_NEW_YORK * own - sum(flights.values())
            if more > 0:
                self.near.put(name, Neighbour(more, name))
            else:
                self.near.remove(name)

    def on_iteration_terminated(
        self, context: iterations.EpochContext, collector: iterations.EpochCollector[Message]
    ) -> None:
        label = self.label.value()
        if label is not None:
            context.output(MEMBERS, Member(context.get_current_key(), label))


class Propagation(iterations.IterationBody):
    """The labels that airports take in one epoch are the variable of the next."""

    def process(
        self, variables: Sequence[DataStream[Message]], data: Sequence[DataStream[Message]]
    ) -> iterations.IterationBodyResult:
        labels = variables[0].union(data[0]).key_by("airport").process(Propagate()).name("propagate").uid("propagate")
        return iterations.IterationBodyResult([labels], [labels.get_side_output(MEMBERS)])


def arriving(route: Route) -> Message:
    """A route as its destination knows it, with its flights for a weight."""
    return Message(route.dest, route.origin, route.flights, route.origin)


def build(flights_csv: str = str(FLIGHTS), output: str = str(OUTPUT)) -> Pipeline:
    """The pipeline, from a CSV file to a Delta table."""
    pipeline = Pipeline("airport_communities")
    links = routes(pipeline, flights_csv).map(arriving).name("links").uid("links")
    nothing = pipeline.from_collection([], Message, name="no labels yet")
    config = iterations.IterationConfig(name="communities", uid="communities")
    (members,) = iterations.iterate_bounded_streams_until_termination([nothing], [links], Propagation(), config)
    sink = DeltaSink(f"{output}/airport_communities", mode="overwrite")
    members.sink_to(sink).name("airport communities").uid("airport-communities")
    return pipeline


pipeline = build()
