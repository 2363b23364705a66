"""Which vertices of a large graph hang together? A delta iteration over a generated graph of a million vertices.

    blocks ─ edges ─ vertices ─┬─ the solution set ─┐
                               │                    ├─ iteration: least labels ─ components
                               └─ a label of its own┘

A vertex takes the least label that it is offered, and offers it to its neighbours: only vertices that are offered
something are looked at, by batches. The loop ends when there is no offer. It runs in BATCH, and each epoch is
committed.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from dagster_unified.api import FlatMapFunction, Pipeline, iterations
from dagster_unified.api import functions as F
from dagster_unified.connectors import DeltaSink
from jobs.data import OUTPUT

VERTICES, BLOCK = 1_000_000, 10_000
EDGES_PER_VERTEX = 0.6
"""Enough for one component of a third of the vertices, and many small ones."""


class Edge(NamedTuple):
    """A vertex, and one that it is joined to."""

    vertex: int
    near: int


class Vertex(NamedTuple):
    """A vertex, the least label that it has been offered, and its neighbours."""

    vertex: int
    label: int | None
    near: list[int]


class Offer(NamedTuple):
    """A label for a vertex."""

    vertex: int
    label: int


class Member(NamedTuple):
    """A vertex, and the least vertex of its component."""

    vertex: int
    label: int


class Edges(FlatMapFunction[int, Edge]):
    """The edges of a block of vertices, both ways; the same in every run. Each vertex is joined to itself."""

    def __init__(self, vertices: int) -> None:
        self.vertices = vertices

    def flat_map(self, value: int) -> Iterable[Edge]:
        random = Random(value)
        for vertex in range(value * BLOCK, min((value + 1) * BLOCK, self.vertices)):
            yield Edge(vertex, vertex)
            if random.random() < EDGES_PER_VERTEX:
                other = random.randrange(self.vertices)
                yield Edge(vertex, other)
                yield Edge(other, vertex)


class LeastLabels(iterations.BatchDeltaFunction):
    """Vertices that are offered a smaller label take it, and offer it to their neighbours."""

    def update_batch(
        self, solution: pa.RecordBatch, workset: pa.RecordBatch
    ) -> tuple[pa.RecordBatch | None, pa.RecordBatch | None]:
        better = pc.fill_null(pc.less(workset["label"], solution["label"]), True)
        taken, near = workset.filter(better), solution["near"].filter(better)
        labels = taken["label"].take(pc.list_parent_indices(near))
        return taken, pa.RecordBatch.from_arrays([pc.list_flatten(near), labels], names=["vertex", "label"])


def build(vertices: int = VERTICES, output: str = str(OUTPUT)) -> Pipeline:
    """The pipeline, to a Delta table."""
    pipeline = Pipeline("graph_components")
    blocks = pipeline.from_collection(list(range(-(-vertices // BLOCK))), int, name="blocks")
    edges = blocks.flat_map(Edges(vertices)).name("edges").uid("edges")
    graph = (
        edges.key_by("vertex")
        .agg(F.min(F.lit(None).cast("long")).alias("label"), F.collect_list("near").alias("near"), output_type=Vertex)
        .name("vertices")
        .uid("vertices")
    )
    own = graph.map(lambda vertex: Offer(vertex.vertex, vertex.vertex), Offer).name("own labels").uid("own-labels")
    config = iterations.IterationConfig(name="components", uid="components")
    found = iterations.iterate_delta(
        graph.key_by("vertex"), own.key_by("vertex"), LeastLabels(), config=config, combine={"label": "min"}
    )
    members = found.map(lambda one: Member(one.vertex, one.label or 0), Member).name("members").uid("members")
    members.sink_to(DeltaSink(f"{output}/graph_components", mode="overwrite")).name("components").uid("component-table")
    return pipeline


pipeline = build()
