"""Where a plan is cut behind its iterations, and what each piece is handed."""

from datetime import timedelta

import pytest

from dagster_unified.api import Pipeline, TumblingEventTimeWindows, WatermarkStrategy, iterations
from dagster_unified.graph.nodes import QueryInputNode, QueryOutputNode
from dagster_unified.graph.queries import segments


class Same(iterations.IterationBody):
    def process(self, variables, data):
        return iterations.IterationBodyResult([variables[0]], [variables[0]])


def looped(stream, name):
    config = iterations.IterationConfig(name=name)
    return iterations.iterate_unbounded_streams([stream], [], Same(), config)[0]


def summed(stream, name):
    return stream.key_by(lambda n: n, key_type=int).reduce(lambda a, b: a + b).name(name)


def cut(pipeline):
    """The names in each piece: what comes in, what runs there, and what it hands on."""
    found = []
    for plan in segments(pipeline.plan({"execution.runtime-mode": "STREAMING"})):
        names = [[], [], []]
        for node in plan.graph.nodes:
            names[0 if isinstance(node, QueryInputNode) else 2 if isinstance(node, QueryOutputNode) else 1].append(
                node.name
            )
        found.append(names)
    return found


def test_a_plan_without_state_behind_an_iteration_stays_whole():
    """Of numbers → totals → loop → out."""
    pipeline = Pipeline("whole")
    numbers = pipeline.from_collection([1], int, name="numbers")
    looped(summed(numbers, "totals"), "loop").print("out")
    plan = pipeline.plan({"execution.runtime-mode": "STREAMING"})
    assert segments(plan) == (plan,)


def test_what_comes_behind_a_loop_with_state_is_in_the_next_piece():
    """Of numbers → loop → (totals → out, plain)."""
    pipeline = Pipeline("behind")
    out = looped(pipeline.from_collection([1], int, name="numbers"), "loop")
    summed(out, "totals").print("out")
    out.print("plain")
    assert cut(pipeline) == [
        [[], ["numbers", "loop"], ["loop handed on"]],
        [["loop"], ["totals", "out", "plain"], []],
    ]


def test_a_source_is_read_where_it_is_needed_and_a_stream_of_several_pieces_is_handed_on():
    """Of numbers → loop → union → totals → out, where numbers and others are united as well, and numbers → early."""
    pipeline = Pipeline("beside")
    numbers = pipeline.from_collection([1], int, name="numbers")
    others = pipeline.from_collection([2], int, name="others")
    out = looped(numbers, "loop")
    numbers.print("early")
    summed(out.union(numbers, others), "totals").print("out")
    assert cut(pipeline) == [
        [[], ["numbers", "loop", "early"], ["loop handed on", "numbers handed on"]],
        [["loop", "numbers"], ["others", "totals", "out"], []],
    ]


def test_loops_with_state_between_them_are_in_pieces_of_their_own():
    """Of numbers → one → totals → two → three → more → out."""
    pipeline = Pipeline("several")
    first = summed(looped(pipeline.from_collection([1], int, name="numbers"), "one"), "totals")
    summed(looped(looped(first, "two"), "three"), "more").print("out")
    assert cut(pipeline) == [
        [[], ["numbers", "one"], ["one handed on"]],
        [["one"], ["totals", "two", "three"], ["three handed on"]],
        [["three"], ["more", "out"], []],
    ]


@pytest.mark.parametrize("assigned", [True, False])
def test_event_time_is_handed_on_where_there_is_any(assigned):
    pipeline = Pipeline("timed")
    numbers = pipeline.from_collection([1], int, name="numbers")
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(0)).with_timestamp_assigner(lambda n, t: n)
    if assigned:
        numbers = numbers.assign_timestamps_and_watermarks(strategy)
    out = looped(numbers, "loop")
    if not assigned:
        out = out.assign_timestamps_and_watermarks(strategy)
    windows = out.key_by(lambda n: n, key_type=int).window(TumblingEventTimeWindows.of(timedelta(seconds=1)))
    windows.reduce(lambda a, b: a + b).name("windows").print("out")
    first, second = segments(pipeline.plan({"execution.runtime-mode": "STREAMING"}))
    relay, relayed = first.graph.nodes[-1], second.graph.nodes[0]
    assert relay.uid == relayed.uid
    assert relayed.is_timed is assigned
    windows = next(node for node in second.graph.nodes if node.has_timers)
    assert second.assigners_before(windows.id) == ((relayed.uid,) if assigned else (second.graph.assigners[0].uid,))
    assert bool(first.assigners_before(relay.id)) is assigned


BY_VALUE = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(0)).with_timestamp_assigner(lambda n, t: n)


def assigned(stream, name, strategy=BY_VALUE):
    return stream.assign_timestamps_and_watermarks(strategy).name(name)


def windowed(stream, name):
    windows = stream.key_by(lambda n: n, key_type=int).window(TumblingEventTimeWindows.of(timedelta(seconds=1)))
    return windows.reduce(lambda a, b: a + b).name(name)


def test_event_time_that_is_assigned_between_loops_starts_a_piece():
    """Of numbers → one → early → two → times → three → four → windows → out: `early` says nothing to the windows."""
    pipeline = Pipeline("between")
    first = looped(pipeline.from_collection([1], int, name="numbers"), "one")
    second = assigned(looped(assigned(first, "early"), "two"), "times")
    windowed(looped(looped(second, "three"), "four"), "windows").print("out")
    assert cut(pipeline) == [
        [[], ["numbers", "one", "early", "two"], ["two handed on"]],
        [["two"], ["times", "three", "four"], ["four handed on"]],
        [["four"], ["windows", "out"], []],
    ]


def test_event_time_is_assigned_where_its_source_is_read():
    """Of numbers → (loop, doubled → times), which are united → windows → out: only a source knows its parts."""
    pipeline = Pipeline("parts")
    numbers = pipeline.from_collection([1], int, name="numbers")
    own = assigned(numbers.map(lambda n: 2 * n, int).name("doubled"), "times")
    out = assigned(looped(numbers, "loop"), "again")
    windowed(out.union(own.map(lambda n: n, int).name("later")), "windows").print("out")
    assert cut(pipeline) == [
        [[], ["numbers", "doubled", "times", "loop"], ["loop handed on", "times handed on"]],
        [["loop", "times"], ["again", "later", "windows", "out"], []],
    ]
