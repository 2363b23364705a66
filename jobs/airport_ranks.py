"""Which airports is everything near to? PageRank over the network that the flights of the year make.

    flights ─ completed ─ routes ─ both ways ─┐
                                              ├─ iteration: an airport shares its rank over its routes ─┐
    nothing (the shares of the epoch before) ─┘        ↑ the next epoch's shares ──────────────────────┘
                                                       └─ ranks → airport_ranks

A route weighs as much as it has flights, and is flown both ways. The loop ends when the ranks hardly change. It runs in
BATCH, and each epoch is committed.

`python -m jobs.data` puts the flights in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dagster_unified.api import (
    DataStream,
    KeyedProcessFunction,
    ListStateDescriptor,
    OutputTag,
    Pipeline,
    RuntimeContext,
    ValueStateDescriptor,
    iterations,
)
from dagster_unified.connectors import DeltaSink
from jobs.data import FLIGHTS, OUTPUT
from jobs.routes import Route, routes

DAMPING = 0.85
ROUNDS, CHANGE = 100, 1e-3
"""It ends when the ranks together change by no more than this, or after so many epochs."""


class Message(NamedTuple):
    """What an airport is told: a route to a neighbour and its weight or, without one, a share of a neighbour's rank."""

    airport: str
    neighbour: str | None
    weight: float


class Link(NamedTuple):
    """A route of an airport."""

    neighbour: str
    weight: float


class Ranked(NamedTuple):
    """An airport and its rank; the mean of all ranks is 1."""

    airport: str
    rank: float


RANKS = OutputTag("ranks", Ranked)
CHANGES = OutputTag("changes", float)


class Share(KeyedProcessFunction[str, Message, Message], iterations.IterationListener[Message]):
    """An airport: takes the shares of an epoch, and at its end shares its new rank over its routes."""

    def open(self, runtime_context: RuntimeContext) -> None:
        self.links = runtime_context.get_list_state(ListStateDescriptor("links", Link))
        self.rank = runtime_context.get_state(ValueStateDescriptor("rank", float))
        self.heard = runtime_context.get_state(ValueStateDescriptor("heard", float))

    def process_element(self, value: Message, ctx: KeyedProcessFunction.Context[str]) -> list[Message]:
        if value.neighbour is None:
            self.heard.update((self.heard.value() or 0.0) + value.weight)
        else:
            self.links.add(Link(value.neighbour, value.weight))
        return []

    def on_epoch_watermark_incremented(
        self, epoch_watermark: int, context: iterations.EpochContext, collector: iterations.EpochCollector[Message]
    ) -> None:
        before = self.rank.value()
        rank = 1.0 if before is None else 1 - DAMPING + DAMPING * (self.heard.value() or 0.0)
        self.rank.update(rank)
        self.heard.clear()
        context.output(CHANGES, abs(rank - (before or 0.0)))
        links = list(self.links.get())
        total = sum(link.weight for link in links)
        for link in links:
            collector.collect(Message(link.neighbour, None, rank * link.weight / total))

    def on_iteration_terminated(
        self, context: iterations.EpochContext, collector: iterations.EpochCollector[Message]
    ) -> None:
        rank = self.rank.value()
        if rank is not None:
            context.output(RANKS, Ranked(context.get_current_key(), rank))


class PageRank(iterations.IterationBody):
    """The shares of one epoch are the variable of the next."""

    def process(
        self, variables: Sequence[DataStream[Message]], data: Sequence[DataStream[Message]]
    ) -> iterations.IterationBodyResult:
        shares = variables[0].union(data[0]).key_by("airport").process(Share()).name("share").uid("share")
        change = iterations.all_reduce(shares.get_side_output(CHANGES), lambda a, b: a + b)
        ends = change.flat_map(iterations.TerminateOnMaxIterOrTol(ROUNDS, CHANGE))
        return iterations.IterationBodyResult([shares], [shares.get_side_output(RANKS)], ends)


def both_ways(route: Route) -> list[Message]:
    """A route as each of its airports knows it."""
    flights = float(route.flights)
    return [Message(route.origin, route.dest, flights), Message(route.dest, route.origin, flights)]


def build(flights_csv: str = str(FLIGHTS), output: str = str(OUTPUT)) -> Pipeline:
    """The pipeline, from a CSV file to a Delta table."""
    pipeline = Pipeline("airport_ranks")
    links = routes(pipeline, flights_csv).flat_map(both_ways).name("links").uid("links")
    nothing = pipeline.from_collection([], Message, name="no shares yet")
    config = iterations.IterationConfig(name="pagerank", uid="pagerank")
    (ranks,) = iterations.iterate_bounded_streams_until_termination([nothing], [links], PageRank(), config)
    ranks.sink_to(DeltaSink(f"{output}/airport_ranks", mode="overwrite")).name("airport ranks").uid("airport-ranks")
    return pipeline


pipeline = build()
