"""What tests of iterations share."""

from typing import NamedTuple

from dagster_unified.api import KeyedProcessFunction, MapStateDescriptor, Pipeline, iterations
from dagster_unified.testing import run_pipeline


class Body(iterations.IterationBody):
    """A body from a function."""

    def __init__(self, build):
        self.build = build

    def process(self, variables, data):
        return self.build(variables, data)


def iterate(numbers, build, data=(), **config):
    """A bounded iteration over some numbers: its pipeline and its outputs."""
    pipeline = Pipeline("loops")
    variables = [pipeline.from_collection(numbers, int, name="numbers")]
    streams = data(pipeline) if callable(data) else data
    config = iterations.IterationConfig(**config)
    return pipeline, iterations.iterate_bounded_streams_until_termination(variables, streams, Body(build), config)


def results(pipeline, stream, **options):
    """What a stream has in BATCH in the harness."""
    stream.print("out")
    return sorted(run_pipeline(pipeline, "BATCH", options=options, seed=3).sinks["out"])


def rows(expected):
    """Records as a sink of rows has them."""
    return sorted(tuple(record) if isinstance(record, tuple) else (record,) for record in expected)


class Hop(NamedTuple):
    number: int
    hops: int


class Visits(KeyedProcessFunction[int, Hop, Hop]):
    """Lets a hop pass, and counts those of its number; it fails where one is missing or comes twice."""

    def open(self, runtime_context):
        self.visits = runtime_context.get_map_state(MapStateDescriptor("visits", int, int))

    def process_element(self, value, ctx):
        visits = (self.visits.get(value.hops) or 0) + 1
        if value.hops and visits > (self.visits.get(value.hops - 1) or 0):
            raise ValueError(f"{value} came before it was sent, or twice")
        self.visits.put(value.hops, visits)
        return [value]
