"""Which kinds of delay do aircraft have? k-means of their profiles over the year.

    flights ─ completed ─ profiles ─┐
                                    ├─ iteration: sums by the nearest center ─ one subtask moves the centers ─┐
    a center of each kind ──────────┘        ↑ the next epoch's centers ─────────────────────────────────────┘
                                             └─ centers of the last epoch → aircraft_profiles

The profile of an aircraft is its mean delay at departure, what of it is made up for in the air, and how much delays
differ. Profiles are read in every epoch from where they lie, as Arrow batches; the loop ends when no center moves. It
runs in BATCH, and each epoch is committed.

`python -m jobs.data` puts the flights in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dagster_unified.api import DataStream, OutputTag, Pipeline, ProcessFunction, iterations
from dagster_unified.api import functions as F
from dagster_unified.connectors import CsvSource, DeltaSink
from jobs.data import FLIGHTS, OUTPUT
from jobs.flights import RawFlight

MEASURES = ("departure", "made_up", "spread")
START = ((0.0, 0.0, 10.0), (10.0, 5.0, 30.0), (20.0, 5.0, 60.0), (40.0, 5.0, 120.0))
"""Where the centers begin, in minutes: from punctual aircraft to those that are often very late."""

ROUNDS, MOVED = 100, 1e-6
"""It ends when all centers together move by less than this many minutes, or after so many epochs."""


class Leg(NamedTuple):
    """A flight that took place, and its delays in minutes."""

    tailnum: str
    dep_delay: float
    arr_delay: float


class Profile(NamedTuple):
    """An aircraft: the means of its departure delays and of what it made up for, and how much the former differ."""

    tailnum: str
    departure: float
    made_up: float
    spread: float


class Center(NamedTuple):
    """A center of profiles, and how many aircraft it has."""

    kind: int
    aircraft: int
    departure: float
    made_up: float
    spread: float


class Sums(NamedTuple):
    """The profiles of a batch that are nearest to a center: how many, their sums, and where the center is."""

    kind: int
    aircraft: int
    sums: list[float]
    center: list[float]


TRAVELLED = OutputTag("moved", float)


def matrix(columns: pa.RecordBatch | pa.Table) -> np.ndarray:
    """The measures, a row for each profile or center."""
    return np.stack([columns.column(name).to_numpy() for name in MEASURES], 1)


def nearest(profiles: pa.RecordBatch, centers: pa.Table) -> pa.RecordBatch:
    """The sums of a batch of profiles by their nearest center."""
    points, at = matrix(profiles), matrix(centers)
    near = ((points[:, None] - at) ** 2).sum(2).argmin(1)
    sums = [points[near == center].sum(0).tolist() for center in range(len(at))]
    counts = np.bincount(near, minlength=len(at))
    return pa.RecordBatch.from_pydict(
        {"kind": centers["kind"].combine_chunks(), "aircraft": counts, "sums": sums, "center": at.tolist()}
    )


class Move(ProcessFunction[Sums, Center], iterations.IterationListener[Center]):
    """Moves each center to the mean of its profiles, at the end of an epoch; one that has none stays."""

    def __init__(self) -> None:
        self.held: dict[int, list[Sums]] = {}

    def process_element(self, value: Sums, ctx: ProcessFunction.Context) -> list[Center]:
        self.held.setdefault(value.kind, []).append(value)
        return []

    def on_epoch_watermark_incremented(
        self, epoch_watermark: int, context: iterations.EpochContext, collector: iterations.EpochCollector[Center]
    ) -> None:
        travelled = 0.0
        for kind, parts in sorted(self.held.items()):
            aircraft = sum(part.aircraft for part in parts)
            before = np.array(parts[0].center)
            at = np.sum([part.sums for part in parts], axis=0) / aircraft if aircraft else before
            travelled += float(np.abs(at - before).sum())
            collector.collect(Center(kind, aircraft, *at.tolist()))
        context.output(TRAVELLED, travelled)


class KMeans(iterations.IterationBody):
    """The centers of one epoch are the variable of the next, broadcast to the profiles."""

    def process(
        self, variables: Sequence[DataStream[Center]], data: Sequence[DataStream[Profile]]
    ) -> iterations.IterationBodyResult:
        sums = data[0].connect(variables[0].broadcast()).map_batches(nearest, Sums).name("nearest").uid("nearest")
        moved = sums.global_().process(Move()).name("move").uid("move")
        ends = moved.get_side_output(TRAVELLED).flat_map(iterations.TerminateOnMaxIterOrTol(ROUNDS, MOVED))
        return iterations.IterationBodyResult([moved], [iterations.forward_inputs_of_last_round(moved)], ends)


def build(flights_csv: str = str(FLIGHTS), output: str = str(OUTPUT)) -> Pipeline:
    """The pipeline, from a CSV file to a Delta table."""
    pipeline = Pipeline("aircraft_profiles")
    flights = pipeline.from_source(CsvSource(flights_csv, RawFlight, name="flights", null_value="NA"))
    completed = flights.where("arr_delay is not null and tailnum is not null").name("completed").uid("completed")
    profiles = (
        completed.select("tailnum", "dep_delay", "arr_delay", output_type=Leg)
        .key_by("tailnum")
        .agg(
            F.avg("dep_delay").alias("departure"),
            F.avg(F.col("dep_delay") - F.col("arr_delay")).alias("made_up"),
            F.stddev_pop("dep_delay").alias("spread"),
            output_type=Profile,
        )
        .name("profiles")
        .uid("profiles")
    )
    start = [Center(kind, 0, *at) for kind, at in enumerate(START)]
    centers = pipeline.from_collection(start, Center, name="first centers")
    data = iterations.ReplayableDataStreams(replayed=[profiles])
    config = iterations.IterationConfig(name="kmeans", uid="kmeans")
    (found,) = iterations.iterate_bounded_streams_until_termination([centers], data, KMeans(), config)
    sink = DeltaSink(f"{output}/aircraft_profiles", mode="overwrite")
    found.sink_to(sink).name("aircraft profiles").uid("aircraft-profiles")
    return pipeline


pipeline = build()
