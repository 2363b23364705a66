"""Records that can change belong to one operator: what it does to them, no other one sees, in any mode."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

import pytest

from dagster_unified.api import (
    AsyncDataStream,
    AsyncFunction,
    BroadcastProcessFunction,
    KeyedProcessFunction,
    MapFunction,
    MapStateDescriptor,
    OutputTag,
    Pipeline,
    ProcessFunction,
    ProcessWindowFunction,
    SlidingEventTimeWindows,
    TimeWindow,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from dagster_unified.connectors import DeltaSink
from dagster_unified.testing import run_pipeline
from tests.support import MODES


@dataclass
class Bag:
    k: str
    n: int
    items: list[int] = field(default_factory=list)

    def change(self) -> "Bag":
        self.n += 100
        self.items.append(7)
        return self


ROWS = [Bag("a", 1), Bag("a", 2), Bag("b", 3, [5])]
SLIDING = SlidingEventTimeWindows.of(timedelta(milliseconds=4), timedelta(milliseconds=2))
ASIDE = OutputTag("aside", Bag)
KNOWN = MapStateDescriptor("known", str, Bag)
CATALOGUE = {row.k: Bag(row.k, 0) for row in ROWS}


class OneBuffer(MapFunction[Bag, Bag]):
    """Gives the same record again and again."""

    def open(self, runtime_context):
        self.bag = Bag("", 0)

    def map(self, value):
        self.bag.k, self.bag.n = value.k, value.n
        self.bag.items[:] = [value.n]
        return self.bag


class Twice(ProcessFunction[Bag, Bag]):
    """Changes a record between one emission and the next."""

    def process_element(self, value, ctx):
        ctx.output(ASIDE, value)
        yield value
        yield value.change()
        value.change()


class Held(KeyedProcessFunction[str, Bag, Bag]):
    """Emits its state, and goes on changing it."""

    def open(self, runtime_context):
        self.state = runtime_context.get_state(ValueStateDescriptor("held", Bag))

    def process_element(self, value, ctx):
        held = self.state.value() or Bag(value.k, 0)
        held.items.append(1)
        self.state.update(held)
        yield held


class Changing(ProcessWindowFunction[Bag, Bag, str, TimeWindow]):
    def process(self, key, context, elements):
        for element in elements:
            yield element.change()


class Rules(BroadcastProcessFunction[Bag, Bag, Bag]):
    def process_element(self, value, ctx):
        yield value

    def process_broadcast_element(self, value, ctx):
        yield value
        ctx.get_broadcast_state(KNOWN).put(value.k, value.change())


class Waiting(AsyncFunction[Bag, Bag]):
    async def async_invoke(self, value):
        return [value, value.change()]


def timed(stream):
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(lambda r: r.n)
    return stream.assign_timestamps_and_watermarks(strategy)


def change(bag):
    return bag.change()


def add(one, other):
    one.n += other.n
    one.items.extend(other.items)
    return one


def from_catalogue(bag):
    return CATALOGUE[bag.k]


def with_aside(stream):
    main = stream.process(Twice(), Bag)
    return main.union(main.get_side_output(ASIDE))


CHANGED = ["a 101 [7]", "a 102 [7]", "b 103 [5, 7]"]
PLAIN = ["a 1 []", "a 2 []", "b 3 [5]"]
OPERATORS = {
    "a buffer": (lambda s: s.map(OneBuffer(), Bag), ["a 1 [1]", "a 2 [2]", "b 3 [3]"]),
    "a buffer in a flat_map": (
        lambda s: s.flat_map(lambda bag: (bag.change() for _ in range(2)), Bag),
        [*CHANGED, "a 201 [7, 7]", "a 202 [7, 7]", "b 203 [5, 7, 7]"],
    ),
    "from a catalogue": (
        lambda s: s.map(from_catalogue, Bag).map(change, Bag), ["a 100 [7]", "a 100 [7]", "b 100 [7]"]
    ),
    "two branches": (lambda s: s.map(change, Bag).union(s.map(change, Bag), s), [*CHANGED, *CHANGED, *PLAIN]),
    "branches of a map": (
        lambda s: (lambda m: m.map(change, Bag).union(m.map(change, Bag), m))(s.map(lambda bag: bag, Bag)),
        [*CHANGED, *CHANGED, *PLAIN],
    ),
    "between emissions": (with_aside, [*PLAIN, *PLAIN, *CHANGED]),
    "its state": (
        lambda s: s.key_by("k").process(Held(), Bag).map(change, Bag),
        ["a 100 [1, 7]", "a 100 [1, 1, 7]", "b 100 [1, 7]"],
    ),
    "with rules": (lambda s: s.connect(s.broadcast(KNOWN)).process(Rules(), Bag), [*PLAIN, *PLAIN]),
    "waiting": (
        lambda s: AsyncDataStream.unordered_wait(s, Waiting(), timedelta(seconds=9), output_type=Bag),
        [*CHANGED, *CHANGED],
    ),
    "reduced in windows": (
        lambda s: timed(s).key_by("k").window(SLIDING).reduce(add), ["a 1 []", "a 3 []", "a 2 []", "b 3 [5]", "b 3 [5]"]
    ),
    "changed in windows": (
        lambda s: timed(s).key_by("k").window(SLIDING).process(Changing(), Bag),
        ["a 101 [7]", "a 101 [7]", "a 102 [7]", "a 102 [7]", "b 103 [5, 7]", "b 103 [5, 7]"],
    ),
    "reduced": (
        lambda s: s.map(lambda bag: Bag(bag.k, 1, bag.items), Bag).key_by("k").reduce(add).map(change, Bag),
        {"BATCH": ["a 102 [7]", "b 101 [5, 7]"], "STREAMING": ["a 101 [7]", "a 102 [7]", "b 101 [5, 7]"]},
    ),
    "the largest": (
        lambda s: s.map(lambda bag: Bag(bag.k, 1, bag.items), Bag).key_by("k").max_by("n").map(change, Bag),
        {"BATCH": ["a 101 [7]", "b 101 [5, 7]"], "STREAMING": ["a 101 [7]", "a 101 [7]", "b 101 [5, 7]"]},
    ),
}  # fmt: skip


def named(name):
    return lambda bag: (name, f"{bag.k} {bag.n} {bag.items}")


def everything():
    pipeline = Pipeline("mutable")
    stream = pipeline.from_collection(ROWS, Bag)
    first, *more = [build(stream).map(named(name), tuple[str, str]) for name, (build, _) in OPERATORS.items()]
    return pipeline, first.union(*more)


def expected(mode):
    of_mode = {name: found if isinstance(found, list) else found[mode] for name, (_, found) in OPERATORS.items()}
    return Counter((name, bag) for name, found in of_mode.items() for bag in found)


@MODES
def test_what_an_operator_does_to_its_records_no_other_one_sees(mode):
    pipeline, result = everything()
    result.sink_to(DeltaSink("unused", name="out"))
    assert Counter(run_pipeline(pipeline, mode).sinks["out"]) == expected(mode)
    assert [row.n for row in ROWS] == [1, 2, 3]


@pytest.mark.parametrize(("reused", "expected"), [(True, [201, 201]), (False, [1, 101])])
def test_with_object_reuse_what_is_emitted_is_the_very_record(reused, expected):
    pipeline = Pipeline("reused")
    twice = pipeline.from_collection(ROWS[:1], Bag).process(Twice(), Bag)
    twice.sink_to(DeltaSink("unused", name="out"))
    found = run_pipeline(pipeline, "BATCH", options={"pipeline.object-reuse": reused})
    assert [bag.n for bag in found.sinks["out"]] == expected
