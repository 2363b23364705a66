"""Stale-synchronous iterations: how late records are, and that results which do not depend on it are what they were."""

from collections import Counter
from operator import methodcaller
from typing import NamedTuple
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_unified.api import BroadcastProcessFunction, FlatMapFunction, MapStateDescriptor, Pipeline, iterations
from dagster_unified.engine.events import IterationEpochCommitted, IterationResumed
from dagster_unified.errors import PipelineError, UnsupportedError, UserFunctionError
from dagster_unified.testing import run_pipeline
from dagster_unified.testing.iterations import HarnessLoop, InMemory
from tests.depth import examples
from tests.iterations.deltas import Nearest, NearestOfMany, by_dijkstra, distances
from tests.iterations.killed_job import run
from tests.iterations.support import Body, Hop, iterate, results, rows
from tests.iterations.test_on_spark import counting_down
from tests.support import MODES

Result = iterations.IterationBodyResult
EPOCHS = 8


class Seen(NamedTuple):
    """A record that `sender` fed back, which belongs to the epoch `due`; with where and when it was taken."""

    sender: int
    due: int
    number: int = 0
    at: int = -1
    epoch: int = -1


class Noting(FlatMapFunction[Seen, Seen], iterations.IterationListener[Seen]):
    """Emits what it took in an epoch, and three records for the next one."""

    def open(self, runtime_context):
        self.at, self.held = runtime_context.get_index_of_this_subtask(), []

    def flat_map(self, value: Seen) -> list[Seen]:
        self.held.append(value)
        return []

    def on_epoch_watermark_incremented(self, epoch_watermark, context, collector):
        for seen in self.held:
            collector.collect(seen._replace(at=self.at, epoch=epoch_watermark))
        for number in range(3):
            collector.collect(Seen(self.at, epoch_watermark + 1, number))


def noted(exchange, staleness, subtasks):
    """What all subtasks took, of what they fed back to each other in eight epochs."""

    def build(variables, data):
        both = exchange(variables[0]).flat_map(Noting())
        sent = both.filter(lambda seen: seen.epoch < 0)
        taken = both.filter(lambda seen: seen.epoch >= 0)
        return Result([sent], [taken], both.flat_map(iterations.TerminateOnMaxIter(EPOCHS)))

    pipeline = Pipeline("noted")
    start = pipeline.from_collection([Seen(0, 0)], Seen, name="start")
    config = iterations.IterationConfig(staleness=staleness, parallelism=subtasks)
    (out,) = iterations.iterate_bounded_streams_until_termination([start], [], Body(build), config)
    return [seen for seen in results(pipeline, out) if seen.due]


SPREAD = methodcaller("partition_custom", lambda number, count: number % count, "number")
BROADCAST = methodcaller("broadcast")


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
@pytest.mark.parametrize(("exchange", "copies"), [(SPREAD, 1), (BROADCAST, 3)], ids=["spread", "broadcast"])
def test_records_of_other_subtasks_are_late_by_the_staleness_and_own_ones_never(exchange, copies, staleness):
    found = noted(exchange, staleness, 3)
    late = Counter((seen.sender == seen.at, seen.epoch - seen.due) for seen in found)
    assert {lateness for own, lateness in late if own} == {0}
    assert {lateness for own, lateness in late if not own} == {staleness}
    times = Counter((seen.sender, seen.due) for seen in found)
    whole = range(1, EPOCHS - staleness)  # what was fed back in the last epochs may be on its way when it ends
    assert {times[sender, due] for sender in range(3) for due in whole} == {times[0, 1]}
    assert times[0, 1] == 3 * copies


@pytest.mark.parametrize("staleness", [1, 2])
def test_alone_a_subtask_waits_for_nobody(staleness):
    assert noted(BROADCAST, staleness, 1) == noted(BROADCAST, 0, 1)


WAYS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 5)), max_size=30, unique_by=lambda w: w[:2]
)


@settings(max_examples=examples(12))
@given(WAYS, st.integers(0, 4), st.integers(1, 4), st.sampled_from([Nearest, NearestOfMany]))
def test_shortest_ways_do_not_depend_on_staleness(ways, staleness, subtasks, body):
    config = {"staleness": staleness, "parallelism": subtasks}
    pipeline, places = distances(ways, [0, 1], body=body(), combine={"distance": "min"}, **config)
    found = places.map(lambda place: (place.name, place.distance), tuple[int, int | None])
    expected = by_dijkstra(ways, [0, 1])
    assert results(pipeline, found) == expected


@settings(max_examples=examples(12))
@given(st.lists(st.integers(0, 5)), st.integers(0, 5), st.integers(0, 4), st.integers(1, 4))
def test_each_record_goes_round_as_often_as_in_step(numbers, hops, staleness, subtasks):
    def build(variables, data):
        further = variables[0].rebalance().map(lambda hop: hop._replace(hops=hop.hops + 1), Hop)
        return Result([further.filter(lambda hop: hop.hops < hops)], [further])

    pipeline = Pipeline("hopping")
    given = pipeline.from_collection([Hop(n, 0) for n in numbers], Hop, name="numbers")
    config = iterations.IterationConfig(staleness=staleness, parallelism=subtasks)
    (out,) = iterations.iterate_bounded_streams_until_termination([given], [], Body(build), config)
    assert results(pipeline, out) == sorted(Hop(n, hop) for n in numbers for hop in range(1, max(hops, 1) + 1))


class InAnyOrder(InMemory):
    """Subtasks that end in any order, and how far one was ahead of the slowest."""

    run_apart = True

    def __init__(self, loop, clock, order):
        super().__init__(loop, clock)
        self.loop, self.order, self.begun, self.settled, self.ahead, self.given = loop, order, {}, -1, 0, 0

    def give(self, subtask, epoch, inbox, replayed):
        assert subtask not in self.begun
        self.ahead, self.given = max(self.ahead, epoch - self.settled - 1), max(self.given, epoch)
        self.begun[subtask] = (epoch, [*replayed, *inbox])

    def ended(self):
        subtask = sorted(self.begun)[self.order(len(self.begun))]
        epoch, inbox = self.begun.pop(subtask)
        return subtask, self.run_subtask(0, subtask, epoch, False, inbox)

    def settle(self, epoch):
        assert epoch == self.settled + 1
        self.settled = epoch


def epochs_of(build, order=None):
    """The epochs of a program in the harness, with all their records; subtasks end in an order, or in step."""
    found, apart = [], []
    commit = HarnessLoop.commit

    def noted(self, ended):
        messages = [ended.fed_back, *ended.later, ended.outputs]
        records = [[(*one[:2], one.batch.to_pylist()) for one in some] for some in messages]
        found.append((ended.number, ended.feedback, ended.criteria, ended.reason, records))
        commit(self, ended)

    def in_any_order(loop, clock):
        apart.append(InAnyOrder(loop, clock, order))
        return apart[-1]

    with (
        patch.object(HarnessLoop, "commit", noted),
        patch("dagster_unified.testing.iterations.InMemory", in_any_order if order else InMemory),
    ):
        result = build()
    for levels in apart:
        assert levels.ahead <= levels.loop.staleness
        assert levels.given == levels.settled == found[-1][0]  # no subtask has begun an epoch that is not
        found.append(levels.ahead)
    return result, found


MODEL = MapStateDescriptor("model", int, float)


class Near(BroadcastProcessFunction[float, float, float]):
    """Emits how often a point has met what it was told, one by one."""

    def process_element(self, value: float, ctx) -> list[float]:
        return [] if ctx.get_broadcast_state(MODEL).get(0) is None else [ctx.get_broadcast_state(MODEL).get(0) + 1]

    def process_broadcast_element(self, value: float, ctx) -> list[float]:
        ctx.get_broadcast_state(MODEL).put(0, value)
        return []


def drawn(staleness, subtasks):
    """Points that come again in each epoch draw numbers to themselves, until none is fed back."""

    def build(variables, data):
        near = data[0].connect(variables[0].broadcast(MODEL)).process(Near())
        return Result([near.filter(lambda n: n < 4)], [near])

    pipeline = Pipeline("drawn")
    start = pipeline.from_collection([0.0], float, name="start")
    data = iterations.ReplayableDataStreams(replayed=[pipeline.from_collection([1.0, 2.0], float, name="points")])
    config = iterations.IterationConfig(staleness=staleness, parallelism=subtasks)
    return results(pipeline, *iterations.iterate_bounded_streams_until_termination([start], data, Body(build), config))


@settings(max_examples=examples(12))
@given(
    WAYS, st.integers(1, 4), st.integers(2, 4), st.sampled_from(["nearest", "drawn", "spread", "broadcast"]), st.data()
)
def test_subtasks_that_are_ahead_of_others_do_what_they_do_in_step(ways, staleness, subtasks, kind, data):
    def build():
        if kind == "drawn":
            return drawn(staleness, subtasks)
        if kind != "nearest":
            return noted(SPREAD if kind == "spread" else BROADCAST, staleness, subtasks)
        pipeline, places = distances(ways, [0, 1], staleness=staleness, parallelism=subtasks)
        return results(pipeline, places.map(lambda place: (place.name, place.distance), tuple[int, int | None]))

    result, (*epochs, _) = epochs_of(build, lambda count: data.draw(st.integers(0, count - 1)))
    assert (result, epochs) == epochs_of(build)


def test_a_subtask_is_ahead_by_the_staleness():
    for staleness in (1, 2, 3):
        _, (*_, ahead) = epochs_of(lambda k=staleness: noted(SPREAD, k, 3), lambda count: 0)
        assert ahead == staleness


class Descending(BroadcastProcessFunction[float, float, float]):
    """Each point draws the subtask's model to itself, and the others' when they hear of it."""

    def process_element(self, value: float, ctx) -> list[float]:
        return [0.02 * (value - (ctx.get_broadcast_state(MODEL).get(0) or 0.0))]

    def process_broadcast_element(self, value: float, ctx) -> list[float]:
        state = ctx.get_broadcast_state(MODEL)
        state.put(0, (state.get(0) or 0.0) + value)
        return []


@pytest.mark.parametrize("staleness", [0, 1, 3])
@MODES
def test_gradients_that_come_late_lead_to_the_same_model(staleness, mode):
    def build(variables, data):
        steps = data[0].connect(variables[0].broadcast(MODEL)).process(Descending())
        last = iterations.forward_inputs_of_last_round(steps)
        return Result([steps], [last], steps.flat_map(iterations.TerminateOnMaxIter(120)))

    points = [1.0, 2.0, 3.0, 4.0, 10.0]
    pipeline = Pipeline("descent")
    start = pipeline.from_collection([0.0], float, name="start")
    data = iterations.ReplayableDataStreams(replayed=[pipeline.from_collection(points, float, name="points")])
    config = iterations.IterationConfig(staleness=staleness, parallelism=3)
    iterations.iterate_bounded_streams_until_termination([start], data, Body(build), config)[0].print("out")
    steps = run_pipeline(pipeline, mode, seed=1).sinks["out"]
    models = [point - step / 0.02 for point, step in zip(sorted(points), sorted(steps), strict=True)]
    assert models == pytest.approx([4.0] * 5, abs=0.2 * staleness + 0.01)  # their mean


def test_a_run_that_is_tried_again_goes_on_after_the_last_epoch_that_all_have_ended(spark, tmp_path):
    events = []

    def once_more(run_id):
        return run(tmp_path, spark, *counting_down(tmp_path / "mended", 2, staleness=2), events.append, run_id=run_id)

    with pytest.raises(UserFunctionError, match="ValueError: not yet"):
        once_more("first")
    (tmp_path / "mended").touch()
    assert once_more("second") == rows(sorted([*range(1, 9), *range(1, 8)]))
    numbers = [event.epoch.number for event in events if isinstance(event, IterationEpochCommitted)]
    (resumed,) = [event.epoch for event in events if isinstance(event, IterationResumed)]
    assert numbers == list(range(9))
    assert 3 <= resumed <= 5  # it fails in the epoch after: 2 is taken in epoch 6 of one of two subtasks


class Alone(FlatMapFunction[int, int], iterations.IterationListener[int]):
    in_one_subtask = True

    def flat_map(self, value: int) -> list[int]:
        return [value]


def doubled(inputs):
    return [inputs[0].map(lambda n: 2 * n, int)]


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda v, d: iterations.all_reduce(v[0], min), "'all reduce': it has one subtask, for which each epoch waits"),
        (lambda v, d: v[0].flat_map(Alone()), "'Alone': it has one subtask"),
        (lambda v, d: v[0].map(lambda n: n, int).set_parallelism(1), "'map': it has one subtask"),
        (lambda v, d: v[0].map(lambda n: n, int).rebalance().filter(bool), "'bool': it is sent records by other"),
        (lambda v, d: iterations.for_each_round([v[0]], doubled)[0], "'map': it lives for one epoch"),
    ],
)
def test_bodies_in_which_a_subtask_cannot_go_on_without_the_others(build, says):
    with pytest.raises(UnsupportedError, match=f"loops: iteration 'Body', operator {says}.*leave staleness out"):
        iterate([1, 2], lambda v, d: Result([v[0]], [build(v, d)]), staleness=1)


def test_criteria_are_a_number_of_epochs():
    with pytest.raises(UnsupportedError, match="its termination criteria 'bool' need what all subtasks did"):
        iterate([1, 2], lambda v, d: Result([v[0]], [v[0]], v[0].filter(bool)), staleness=1)
    with pytest.raises(UnsupportedError, match=r"termination criteria .* need what all subtasks did"):
        iterate([1, 2], lambda v, d: Result([v[0]], [v[0]], v[0]), staleness=1)


def test_a_staleness_is_a_number_of_epochs_of_a_bounded_iteration():
    with pytest.raises(PipelineError, match="staleness is how many epochs a subtask may be ahead, 0 or more, not -1"):
        iterate([1, 2], lambda v, d: Result([v[0]], [v[0]]), staleness=-1)
    numbers = Pipeline("loops").from_collection([1], int)
    body = Body(lambda v, d: Result([v[0]], [v[0]]))
    with pytest.raises(PipelineError, match="an epoch of an unbounded iteration waits for what comes in"):
        iterations.iterate_unbounded_streams([numbers], [], body, iterations.IterationConfig(staleness=1))


def test_explain_shows_it():
    pipeline, (out,) = iterate([1, 2], lambda v, d: Result([v[0].map(lambda n: n, int)], [v[0]]), staleness=2)
    out.print("out")
    text = pipeline.explain({"execution.runtime-mode": "BATCH"})
    assert "1 variable, 0 data streams, ALL_ROUND, staleness 2, until nothing is fed back" in text
