"""Iterations in the harness: what BATCH and STREAMING have in common, and what comes in while they go round."""

from collections import Counter
from datetime import timedelta
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import (
    CheckpointedFunction,
    FlatMapFunction,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapFunction,
    OutputTag,
    Pipeline,
    ProcessFunction,
    StateTtlConfig,
    ValueStateDescriptor,
    iterations,
)
from dagster_unified.errors import PipelineError
from dagster_unified.testing import assert_same_in_both_modes, run_pipeline
from tests.iterations.programs import PROGRAMS
from tests.iterations.support import Body, Hop


def streamed(pipeline, stream, **options):
    stream.print("out")
    return run_pipeline(pipeline, "STREAMING", **options).sinks["out"]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("micro_batch", [1, 3, None])
def test_a_bounded_program_gives_in_streaming_what_it_gives_in_batch(name, micro_batch):
    build, expected = PROGRAMS[name]
    assert sorted(streamed(*build(), micro_batch=micro_batch)) == expected


def test_the_parity_check_tells_what_an_unbounded_iteration_gives_in_one_mode_only():
    pipeline, out = hopping([1, 2], 2)
    out.print("out")
    assert_same_in_both_modes(pipeline)
    pipeline, rounds, _ = listening()
    rounds.print("rounds")
    with pytest.raises(AssertionError, match=r"(?s)'rounds' ends differently.*only in STREAMING: .*3"):
        assert_same_in_both_modes(pipeline)


def hopping(numbers, hops):
    """Records that go round so many times, counted by key in each of their hops."""
    pipeline = Pipeline("hopping")
    given = pipeline.from_collection([Hop(n, 0) for n in numbers], Hop, name="numbers")

    def build(variables, data):
        further = variables[0].map(lambda hop: hop._replace(hops=hop.hops + 1), Hop)
        return iterations.IterationBodyResult([further.filter(lambda hop: hop.hops <= hops)], [variables[0]])

    return pipeline, iterations.iterate_unbounded_streams([given], [], Body(build))[0]


@given(st.lists(st.integers(0, 9)), st.integers(0, 4), st.integers(1, 4), st.integers(0, 3))
def test_every_record_takes_every_hop_once_whenever_it_comes(numbers, hops, micro_batch, seed):
    expected = Counter(Hop(n, hop) for n in numbers for hop in range(hops + 1))
    assert Counter(streamed(*hopping(numbers, hops), micro_batch=micro_batch, seed=seed)) == expected
    pipeline, out = hopping(numbers, hops)
    out.print("out")
    assert Counter(run_pipeline(pipeline, "BATCH").sinks["out"]) == expected


ENDED = OutputTag("ended", str)


class Rounds(ProcessFunction[int, int], iterations.IterationListener[int]):
    """Emits each round's number, and at the end how it ended."""

    def process_element(self, value, ctx):
        return []

    def on_epoch_watermark_incremented(self, epoch_watermark, context, collector):
        collector.collect(epoch_watermark)

    def on_iteration_terminated(self, context, collector):
        context.output(ENDED, "ended")


def listening():
    pipeline = Pipeline("listening")
    numbers = pipeline.from_collection([0, 0, 0], int, name="numbers")

    def build(variables, data):
        further = variables[0].map(lambda n: n + 1, int).filter(lambda n: n < 2)
        rounds = variables[0].process(Rounds()).set_parallelism(1)
        return iterations.IterationBodyResult([further], [rounds, rounds.get_side_output(ENDED)])

    return pipeline, *iterations.iterate_unbounded_streams([numbers], [], Body(build))


def test_listeners_hear_of_each_round_and_of_the_end_of_the_input():
    pipeline, rounds, ended = listening()
    rounds.print("rounds")
    ended.print("ended")
    found = run_pipeline(pipeline, "STREAMING", micro_batch=1).sinks
    assert found["rounds"] == [0, 1, 2, 3]  # of three records one after another, which go round twice each
    assert found["ended"] == ["ended"]
    assert run_pipeline(pipeline, "STREAMING", micro_batch=None).sinks["rounds"] == [0, 1]  # as in BATCH
    assert run_pipeline(pipeline, "BATCH").sinks["rounds"] == [0, 1]


class Model(FlatMapFunction[int, int]):
    """Keeps the sum of all that it was given."""

    def open(self, runtime_context):
        self.total = runtime_context.get_state(ValueStateDescriptor("total", int))

    def flat_map(self, value):
        self.total.update((self.total.value() or 0) + value)
        return [self.total.value()]


def test_state_lives_over_all_rounds_of_an_unbounded_iteration():
    pipeline = Pipeline("model")
    start = pipeline.from_collection([0], int, name="start")
    samples = pipeline.from_collection([1, 2, 3, 4], int, name="samples")

    def build(variables, data):
        model = variables[0].union(data[0]).key_by(lambda n: 0, key_type=int).flat_map(Model())
        return iterations.IterationBodyResult([model.filter(lambda n: False)], [model])

    (model,) = iterations.iterate_unbounded_streams([start], [samples], Body(build))
    assert max(streamed(pipeline, model)) == 10


class Remembering(KeyedProcessFunction[int, int, int]):
    """Counts what came, and forgets it after a second of the clock."""

    def open(self, runtime_context):
        self.seen = runtime_context.get_state(ValueStateDescriptor("seen", int, StateTtlConfig(timedelta(seconds=1))))

    def process_element(self, value, ctx):
        seen = (self.seen.value() or 0) + 1
        self.seen.update(seen)
        return [seen]


@pytest.mark.parametrize(("mode", "expected"), [("STREAMING", [1, 1, 1]), ("BATCH", [1, 2, 3])])
def test_state_of_an_unbounded_body_expires_in_streaming(mode, expected):
    pipeline = Pipeline("forgetting")
    numbers = pipeline.from_collection([0, 0, 0], int, name="numbers")

    def build(variables, data):
        counted = variables[0].key_by(lambda n: 0, key_type=int).process(Remembering())
        return iterations.IterationBodyResult([variables[0].filter(lambda n: False)], [counted])

    (out,) = iterations.iterate_unbounded_streams([numbers], [], Body(build))
    out.print("out")
    times = count(step=60_000)
    found = run_pipeline(pipeline, mode, micro_batch=1, clock=lambda: next(times)).sinks["out"]
    assert found == expected


def test_the_output_of_an_iteration_is_united_with_what_an_exchange_chose_a_subtask_for():
    pipeline = Pipeline("united")
    numbers = pipeline.from_collection([3], int, name="numbers")

    def build(variables, data):
        smaller = variables[0].map(lambda n: n - 1, int).filter(lambda n: n > 0)
        return iterations.IterationBodyResult([smaller], [smaller])

    (out,) = iterations.iterate_unbounded_streams([numbers], [], Body(build))
    numbers.global_().map(Kept()).union(out).map(lambda n: n * 10, int).print("out")
    assert sorted(streamed_again(pipeline)) == [10, 20, 30]


class Kept(MapFunction[int, int], CheckpointedFunction):
    """Has operator state, so that it is of the subtasks that an exchange chose."""

    def initialize_state(self, context):
        self.kept = context.get_operator_state_store().get_list_state(ListStateDescriptor("kept", int))

    def snapshot_state(self, context):
        self.kept.update([1])

    def map(self, value):
        return value


def streamed_again(pipeline):
    return run_pipeline(pipeline, "STREAMING").sinks["out"]


def test_a_loop_that_multiplies_its_records_ends_with_an_error_before_they_fill_the_memory():
    pipeline = Pipeline("doubling")
    numbers = pipeline.from_collection([1, 2], int, name="numbers")
    body = Body(lambda v, d: iterations.IterationBodyResult([v[0].flat_map(lambda n: [n, n], int)], [v[0]]))
    (out,) = iterations.iterate_unbounded_streams([numbers], [], body)
    out.print("out")
    with pytest.raises(PipelineError, match=r"iteration 'Body': its records multiply.*fewer by themselves$"):
        run_pipeline(pipeline, "STREAMING", options={"iteration.max-feedback-records": 10})
