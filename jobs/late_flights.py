"""Will a flight be late? Logistic regression that learns online, and averages what its subtasks have learned.

    flights ─ samples ─┐
                       ├─ iteration: subtasks learn from an epoch's flights, and average their models ─ late_flights
    an empty model ────┘         ↑ the model of the next epoch ────────────────────────────┘

Each subtask goes on from the latest model, one flight after another (stochastic gradient descent). In STREAMING an
epoch has the flights that have come in; in BATCH the first has the whole year. `loss` is the mean log loss of the
predictions that were made before the model had seen their flights.

`python -m jobs.data` puts the flights in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import Any, NamedTuple
from zlib import crc32

from dagster_unified.api import (
    BroadcastProcessFunction,
    DataStream,
    MapStateDescriptor,
    Pipeline,
    RuntimeContext,
    iterations,
)
from dagster_unified.connectors import CsvSource, DeltaSink
from jobs.data import FLIGHTS, OUTPUT
from jobs.flights import RawFlight
from jobs.live_flights import INCOMING, TABLES

LATE = 15
"""Minutes from which on a flight is late."""

WEIGHTS = 512
"""Features share weights by their hash."""

RATE = 0.02


class Sample(NamedTuple):
    """A flight that took place: which weights its features have, and whether it was late."""

    features: list[int]
    late: bool


class Model(NamedTuple):
    """Weights, the flights that they were learned from in an epoch, and the mean log loss of these."""

    weights: list[float]
    flights: int
    loss: float


LATEST = MapStateDescriptor("latest", int, Model)


def sample(raw: RawFlight) -> list[Sample]:
    """What is known of a flight before it leaves; nothing of one that was cancelled."""
    if raw.arr_delay is None:
        return []
    known = ("", raw.carrier, raw.origin, raw.dest, f"{raw.hour} o'clock", f"month {raw.month}")
    return [Sample([crc32(one.encode()) % WEIGHTS for one in known], raw.arr_delay >= LATE)]


class Learn(BroadcastProcessFunction[Sample, Model, Model], iterations.IterationListener[Model]):
    """Goes on from the latest model, flight by flight, and gives its own at the end of the epoch."""

    def open(self, runtime_context: RuntimeContext) -> None:
        self.weights: list[float] | None = None
        self.flights, self.loss = 0, 0.0

    def process_element(self, value: Sample, ctx: Any) -> list[Model]:
        if self.weights is None:
            latest = ctx.get_broadcast_state(LATEST).get(0)
            self.weights = [0.0] * WEIGHTS if latest is None else list(latest.weights)
        weights = self.weights
        expected = 1 / (1 + exp(-sum(weights[feature] for feature in value.features)))
        self.flights += 1
        self.loss -= log(expected if value.late else 1 - expected)
        for feature in value.features:
            weights[feature] += RATE * (value.late - expected)
        return []

    def process_broadcast_element(self, value: Model, ctx: Any) -> list[Model]:
        ctx.get_broadcast_state(LATEST).put(0, value)
        return []

    def on_epoch_watermark_incremented(
        self, epoch_watermark: int, context: iterations.EpochContext, collector: iterations.EpochCollector[Model]
    ) -> None:
        if self.weights is not None:
            collector.collect(Model(self.weights, self.flights, self.loss / self.flights))


def average(a: Model, b: Model) -> Model:
    """Two models as one, each by the flights that it was learned from."""
    flights = a.flights + b.flights
    part, rest = a.flights / flights, b.flights / flights
    weights = [part * one + rest * other for one, other in zip(a.weights, b.weights, strict=True)]
    return Model(weights, flights, part * a.loss + rest * b.loss)


class Online(iterations.IterationBody):
    """The model of one epoch is the variable of the next."""

    def process(
        self, variables: Sequence[DataStream[Model]], data: Sequence[DataStream[Sample]]
    ) -> iterations.IterationBodyResult:
        learned = data[0].connect(variables[0].broadcast(LATEST)).process(Learn()).name("learn").uid("learn")
        model = iterations.all_reduce(learned, average)
        return iterations.IterationBodyResult([model], [model])


def build(flights_csv: str = str(FLIGHTS), output: str = str(OUTPUT), live: bool = False) -> Pipeline:
    """The pipeline, from a CSV file, or a folder that is watched, to a Delta table of models."""
    pipeline = Pipeline("live_lateness" if live else "late_flights")
    source = CsvSource(flights_csv, RawFlight, name="flights", null_value="NA", monitor=live)
    samples = pipeline.from_source(source).flat_map(sample).name("samples").uid("samples")
    start = pipeline.from_collection([Model([0.0] * WEIGHTS, 0, 0.0)], Model, name="empty model")
    config = iterations.IterationConfig(name="online", uid="online")
    (models,) = iterations.iterate_unbounded_streams([start], [samples], Online(), config)
    models.sink_to(DeltaSink(f"{output}/late_flights", mode="append")).name("late flights").uid("late-flights")
    return pipeline


pipeline = build()
live = build(str(INCOMING), str(TABLES), live=True)
"""The same on flights as they arrive."""
