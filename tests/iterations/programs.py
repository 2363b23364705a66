"""Iterations that several tests run: in the harness, in BATCH on Spark, and killed."""

from datetime import timedelta
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from dagster_unified.api import (
    BroadcastProcessFunction,
    FlatMapFunction,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    OutputTag,
    Pipeline,
    ProcessFunction,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
    iterations,
)
from tests.iterations.deltas import NearestOfMany, by_dijkstra, distances


class Message(NamedTuple):
    """What a vertex sends: an edge (kind 0), or a label that it may take (kind 1)."""

    vertex: int
    value: int
    kind: int


EDGES = [(1, 2), (2, 3), (3, 4), (10, 11), (12, 11), (20, 21), (21, 22), (22, 23), (23, 24), (24, 20)]
COMPONENTS = {1: 1, 2: 1, 3: 1, 4: 1, 10: 10, 11: 10, 12: 10, 20: 20, 21: 20, 22: 20, 23: 20, 24: 20}


class Least(KeyedProcessFunction[int, Message, Message], iterations.IterationListener[Message]):
    """Connected components: a vertex tells its neighbours when it has found a smaller label, once a round."""

    def open(self, runtime_context):
        self.label = runtime_context.get_state(ValueStateDescriptor("label", int))
        self.told = runtime_context.get_state(ValueStateDescriptor("told", int))
        self.near = runtime_context.get_list_state(ListStateDescriptor("near", int))

    def process_element(self, value: Message, ctx) -> list[Message]:
        if value.kind == 0:
            self.near.add(value.value)
            value = value._replace(value=value.vertex)
        held = self.label.value()
        self.label.update(value.value if held is None else min(held, value.value))
        return []

    def on_epoch_watermark_incremented(self, epoch_watermark, context, collector):
        label = self.label.value()
        if label != self.told.value():
            self.told.update(label)
            for vertex in self.near.get():
                collector.collect(Message(vertex, label, 1))

    def on_iteration_terminated(self, context, collector):
        context.output(LABELS, (context.get_current_key(), self.label.value()))


LABELS = OutputTag("labels", tuple[int, int])


class Components(iterations.IterationBody):
    def process(self, variables, data):
        labels = variables[0].union(data[0]).key_by("vertex").process(Least()).name("least")
        return iterations.IterationBodyResult([labels], [labels.get_side_output(LABELS)])


def components(edges=EDGES, parallelism=None):
    """Of undirected edges: pairs of vertex and least vertex of its component."""
    pipeline = Pipeline("components")
    both = [Message(a, b, 0) for one in edges for a, b in (one, one[::-1])]
    graph = pipeline.from_collection(both, Message, name="edges")
    nothing = pipeline.from_collection([], Message, name="labels")
    config = iterations.IterationConfig(parallelism=parallelism)
    (found,) = iterations.iterate_bounded_streams_until_termination([nothing], [graph], Components(), config)
    return pipeline, found


class Collatz(iterations.IterationBody):
    def process(self, variables, data):
        following = variables[0].filter(lambda n: n > 1).map(lambda n: n // 2 if n % 2 == 0 else 3 * n + 1, int)
        return iterations.IterationBodyResult(feedback=[following], outputs=[following])


def collatz():
    pipeline = Pipeline("collatz")
    numbers = pipeline.from_collection([1, 2, 3, 7])
    return pipeline, iterations.iterate_bounded_streams_until_termination([numbers], [], Collatz())[0]


def trajectories(*numbers):
    """What Collatz visits after its first numbers."""
    found = []
    for number in numbers:
        while number > 1:
            number = number // 2 if number % 2 == 0 else 3 * number + 1
            found.append(number)
    return sorted(found)


class Total(NamedTuple):
    shop: str
    rounds: int
    amount: int


class Grown(KeyedProcessFunction[str, Total, Total]):
    """Counts the rounds in state, which lives on over them; broadcast limits say when a shop stops."""

    def open(self, runtime_context):
        self.rounds = runtime_context.get_state(ValueStateDescriptor("rounds", int))

    def process_element(self, value: Total, ctx) -> list[Total]:
        self.rounds.update((self.rounds.value() or 0) + 1)
        return [value._replace(rounds=self.rounds.value())]


LIMITS = MapStateDescriptor("limits", str, int)


class Below(BroadcastProcessFunction[Total, tuple[str, int], Total]):
    def process_element(self, value: Total, ctx) -> list[Total]:
        limit = ctx.get_broadcast_state(LIMITS).get(value.shop)
        return [value] if limit is not None and value.amount < limit else []

    def process_broadcast_element(self, value, ctx) -> list[Total]:
        ctx.get_broadcast_state(LIMITS).put(*value)
        return []


class Growing(iterations.IterationBody):
    """Two data streams, one replayed: sales are added in every round, limits are held as broadcast state."""

    def process(self, variables, data):
        sales, limits = data
        counted = variables[0].process(Grown())

        def totals(inputs):
            return [
                inputs[0]
                .union(inputs[1])
                .key_by("shop")
                .reduce(lambda a, b: Total(a.shop, max(a.rounds, b.rounds), a.amount + b.amount))
            ]

        (grown,) = iterations.for_each_round([counted, sales], totals)
        below = grown.connect(limits.broadcast(LIMITS)).process(Below()).key_by("shop")
        return iterations.IterationBodyResult([below], [grown])


def growing():
    pipeline = Pipeline("growing")
    start = pipeline.from_collection([Total("a", 0, 1), Total("b", 0, 2)], name="start").key_by("shop")
    sales = pipeline.from_collection([Total("a", 0, 10), Total("b", 0, 1), Total("b", 0, 2)], name="sales")
    limits = pipeline.from_collection([("a", 35), ("b", 6)], tuple[str, int], name="limits")
    data = iterations.ReplayableDataStreams(replayed=[sales], not_replayed=[limits])
    return pipeline, iterations.iterate_bounded_streams_until_termination([start], data, Growing())[0]


GROWN = sorted(
    [
        *[Total("a", 1, 11), Total("a", 2, 21), Total("a", 3, 31), Total("a", 4, 41)],
        *[Total("b", 1, 5), Total("b", 2, 8)],  # which is not below its limit
        *[Total("b", 0, 3), Total("b", 3, 6)],  # sales come in every round, and state is there from before
    ]
)


class Mean(NamedTuple):
    value: float


class Part(NamedTuple):
    total: float
    count: int


def towards(points: pa.RecordBatch, mean: pa.Table) -> pa.RecordBatch:
    """Moves the mean half of the way to the points."""
    held = mean.column("value")[0].as_py()
    moved = pc.add(pc.multiply(points.column("value"), 0.5), 0.5 * held)
    return pa.RecordBatch.from_pydict({"total": [pc.sum(moved).as_py()], "count": [len(moved)]})


class Averaged(FlatMapFunction[Part, Mean], iterations.IterationListener[Mean]):
    def __init__(self):
        self.total, self.count = 0.0, 0

    def flat_map(self, value: Part) -> list[Mean]:
        self.total, self.count = self.total + value.total, self.count + value.count
        return []

    def on_epoch_watermark_incremented(self, epoch_watermark, context, collector):
        collector.collect(Mean(self.total / self.count))


class Descent(iterations.IterationBody):
    """A model that is broadcast to batches of points, and updated by one subtask."""

    def process(self, variables, data):
        parts = data[0].connect(variables[0].broadcast()).map_batches(towards, Part)
        mean = parts.global_().flat_map(Averaged(), Mean)
        ends = mean.flat_map(iterations.TerminateOnMaxIter(5))
        return iterations.IterationBodyResult([mean], [iterations.forward_inputs_of_last_round(mean)], ends)


def descent():
    pipeline = Pipeline("descent")
    model = pipeline.from_collection([Mean(32.0)], name="model")
    points = pipeline.from_collection([Mean(float(n)) for n in range(1, 8)], name="points")
    data = iterations.ReplayableDataStreams(replayed=[points])
    return pipeline, iterations.iterate_bounded_streams_until_termination([model], data, Descent())[0]


class Epochs(ProcessFunction[int, tuple[int, str]], iterations.IterationListener[tuple[int, str]]):
    def process_element(self, value: int, ctx) -> list[tuple[int, str]]:
        return []

    def on_epoch_watermark_incremented(self, epoch_watermark, context, collector):
        collector.collect((epoch_watermark, "epoch"))

    def on_iteration_terminated(self, context, collector):
        collector.collect((-1, "terminated"))


class Watched(iterations.IterationBody):
    def process(self, variables, data):
        smaller = variables[0].filter(lambda n: n > 0).map(lambda n: n - 1, int)
        seen = smaller.global_().process(Epochs())
        return iterations.IterationBodyResult([smaller], [seen])


def watched():
    pipeline = Pipeline("watched")
    numbers = pipeline.from_collection([3, 1])
    return pipeline, iterations.iterate_bounded_streams_until_termination([numbers], [], Watched())[0]


WAYS = [(1, 2, 4), (2, 3, 1), (1, 3, 9), (3, 4, 1), (5, 1, 1)]


def nearest(body=None, **config):
    pipeline, places = distances(WAYS, [1], combine={"distance": "min"}, body=body, **config)
    return pipeline, places.map(lambda place: (place.name, place.distance), tuple[int, int | None])


def nearest_of_many():
    return nearest(NearestOfMany())


def stale():
    return nearest(NearestOfMany(), staleness=1)


class Timed(NamedTuple):
    key: str
    at: int
    n: int


class Windowed(iterations.IterationBody):
    """Windows, a join and a co-group, which give their results at the end of each round."""

    def process(self, variables, data):
        windows, (numbers,), (factors,) = TumblingEventTimeWindows.of(timedelta(milliseconds=10)), variables, data
        joined = numbers.join(factors).where("key").equal_to("key").window(windows)
        products = joined.apply(lambda a, b: a._replace(n=a.n * b.n), output_type=Timed)
        sums = products.key_by("key").window(windows).reduce(lambda a, b: a._replace(n=a.n + b.n))
        both = numbers.co_group(factors).where("key").equal_to("key").window(windows)
        counts = both.apply(counted, output_type=tuple[str, str, int])
        outputs = sums.map(lambda one: ("sum", one.key, one.n), output_type=tuple[str, str, int]).union(counts)
        return iterations.IterationBodyResult([sums.filter(lambda one: one.n < 100)], [outputs])


def counted(numbers, factors):
    numbers, factors = list(numbers), list(factors)
    return [("count", (numbers or factors)[0].key, len(numbers) + len(factors))]


def windowed():
    pipeline = Pipeline("windowed")
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    numbers, factors = (
        pipeline.from_collection(rows, Timed, name=name).assign_timestamps_and_watermarks(strategy)
        for name, rows in (
            ("numbers", [Timed("a", 1, 2), Timed("b", 1, 5), Timed("a", 2, 3)]),
            ("factors", [Timed("a", 5, 3), Timed("b", 5, 10)]),
        )
    )
    streams = iterations.ReplayableDataStreams(replayed=[factors])
    config = iterations.IterationConfig(operator_life_cycle="PER_ROUND")
    return pipeline, iterations.iterate_bounded_streams_until_termination([numbers], streams, Windowed(), config)[0]


IN_WINDOWS = sorted(
    [
        *[("sum", "a", 15), ("sum", "b", 50), ("count", "a", 3), ("count", "b", 2)],
        *[("sum", "a", 45), ("sum", "b", 500), ("count", "a", 2), ("count", "b", 2)],
        *[("sum", "a", 135), ("count", "a", 2), ("count", "b", 1)],
    ]
)
"""In round 0, 1 and 2."""


PROGRAMS = {
    "collatz": (collatz, trajectories(1, 2, 3, 7)),
    "components": (components, sorted(COMPONENTS.items())),
    "growing": (growing, GROWN),
    "nearest": (nearest, by_dijkstra(WAYS, [1])),
    "nearest of many": (nearest_of_many, by_dijkstra(WAYS, [1])),
    "stale": (stale, by_dijkstra(WAYS, [1])),
    "descent": (descent, [Mean(4.0 + 28.0 / 32)]),
    "windowed": (windowed, IN_WINDOWS),
    "watched": (watched, [(-1, "terminated"), (0, "epoch"), (1, "epoch"), (2, "epoch"), (3, "epoch")]),
}
"""What each gives, sorted."""
