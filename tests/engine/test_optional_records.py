"""An optional record in a record, and None in its place: through every kind of operator directly behind a source."""

from collections import Counter
from datetime import timedelta
from typing import NamedTuple

import pytest
from deltalake import DeltaTable

from dagster_unified.api import (
    BroadcastProcessFunction,
    CoMapFunction,
    JoinFunction,
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    MapStateDescriptor,
    Pipeline,
    TumblingEventTimeWindows,
    WatermarkStrategy,
    iterations,
)
from dagster_unified.connectors import DeltaSink
from dagster_unified.testing import run_pipeline
from tests.iterations.support import Body
from tests.support import MODES


class Inner(NamedTuple):
    a: int
    b: str


class Rec(NamedTuple):
    k: str
    n: int
    inner: Inner | None


ROWS = [Rec("a", 1, None), Rec("b", 2, Inner(5, "x")), Rec("c", 3, None)]
KNOWN = MapStateDescriptor("known", int, Rec)
SECONDS = TumblingEventTimeWindows.of(timedelta(seconds=1))


class Keep(KeyedProcessFunction[str, Rec, Rec]):
    def process_element(self, value, ctx):
        return [value]


class Both(CoMapFunction[Rec, Rec, Rec]):
    def map1(self, value):
        return value

    def map2(self, value):
        return value


class KeyedBoth(KeyedCoProcessFunction[str, Rec, Rec, Rec]):
    def process_element1(self, value, ctx):
        return [value]

    def process_element2(self, value, ctx):
        return [value]


class Rules(BroadcastProcessFunction[Rec, Rec, Rec]):
    def process_element(self, value, ctx):
        return [value]

    def process_broadcast_element(self, value, ctx):
        ctx.get_broadcast_state(KNOWN).put(value.n, value)


class KeyedRules(KeyedBroadcastProcessFunction[str, Rec, Rec, Rec]):
    process_element = Rules.process_element
    process_broadcast_element = Rules.process_broadcast_element


class First(JoinFunction[Rec, Rec, Rec]):
    def join(self, first, second):
        return first


def timed(stream):
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(lambda r: r.n)
    return stream.assign_timestamps_and_watermarks(strategy)


def looped(one, other):
    def build(variables, data):
        further = variables[0].map(lambda r: r._replace(n=r.n - 1, inner=None if r.inner else Inner(r.n, "y")), Rec)
        return iterations.IterationBodyResult([further.filter(lambda r: r.n > 0)], [further])

    return iterations.iterate_bounded_streams_until_termination([one], [other], Body(build))[0]


OPERATORS = {
    "written": lambda one, other: one,
    "keyed": lambda one, other: one.key_by("k").process(Keep(), Rec),
    "keyed by a function": lambda one, other: one.key_by(lambda r: r.k, key_type=str).process(Keep(), Rec),
    "reduced": lambda one, other: one.key_by("k").reduce(lambda a, b: a),
    "in batches": lambda one, other: one.map_batches(lambda batch: batch, Rec),
    "exchanged": lambda one, other: one.rebalance().map(lambda r: r, Rec),
    "united": lambda one, other: one.union(other).key_by("k").process(Keep(), Rec),
    "connected": lambda one, other: one.connect(other).map(Both(), Rec),
    "connected by key": lambda one, other: one.key_by("k").connect(other.key_by("k")).process(KeyedBoth(), Rec),
    "with rules": lambda one, other: one.connect(other.broadcast(KNOWN)).process(Rules(), Rec),
    "with rules by key": lambda one, other: one.key_by("k").connect(other.broadcast(KNOWN)).process(KeyedRules(), Rec),
    "filtered by Catalyst": lambda one, other: one.where("n > 0").key_by("k").process(Keep(), Rec),
    "in windows": lambda one, other: timed(one).key_by("k").window(SECONDS).reduce(lambda a, b: a),
    "joined": lambda one, other: (
        timed(one).join(timed(other)).where("k").equal_to("k").window(SECONDS).apply(First(), Rec)
    ),
    "in a loop": looped,
}


def named(name):
    return lambda record: (name, str(record))


@pytest.mark.a_day(1)
@MODES
def test_none_in_the_place_of_a_record_passes_every_operator(run_in, mode, tmp_path):
    pipeline = Pipeline("optional")
    one, other = (pipeline.from_collection(ROWS, Rec, name=name) for name in ("one", "other"))
    first, *more = [build(one, other).map(named(name), tuple[str, str]) for name, build in OPERATORS.items()]
    first.union(*more).sink_to(DeltaSink(str(tmp_path / "out"), name="out"))
    run_in[mode](pipeline)
    rows = DeltaTable(str(tmp_path / "out")).to_pyarrow_table().to_pylist()
    assert Counter(tuple(row.values()) for row in rows) == Counter(run_pipeline(pipeline, mode).sinks["out"])
