"""What cannot be in an iteration is refused when the graph is built, with what to do instead."""

import threading
from datetime import timedelta
from typing import NamedTuple

import pytest

from dagster_unified.api import (
    FlatMapFunction,
    Pipeline,
    ReduceFunction,
    TumblingProcessingTimeWindows,
    WatermarkStrategy,
    iterations,
)
from dagster_unified.api import functions as F
from dagster_unified.connectors import PrintSink, RateSource
from dagster_unified.errors import PipelineError, RecordTypeError, UnifiedError, UnsupportedError, UserFunctionError
from dagster_unified.graph.queries import plan_queries
from dagster_unified.graph.topology import Lanes
from dagster_unified.testing import run_pipeline
from tests.iterations.support import Body

Result = iterations.IterationBodyResult


class Sale(NamedTuple):
    shop: str
    at: int


def built(build, numbers=None, data=(), **config):
    pipeline = Pipeline("loops")
    numbers = numbers(pipeline) if numbers else [pipeline.from_collection([1, 2], int, name="numbers")]
    data = [stream(pipeline) for stream in data]
    config = iterations.IterationConfig(**config)
    return pipeline, iterations.iterate_bounded_streams_until_termination(numbers, data, Body(build), config)


def same(variables, data):
    return Result([variables[0]], [variables[0]])


def nested(variables, data):
    inner = iterations.iterate_bounded_streams_until_termination(variables, [], Body(same))
    return Result(inner, inner)


def timed(stream):
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(0))
    return stream.assign_timestamps_and_watermarks(strategy.with_timestamp_assigner(lambda n, t: n))


def windowed(variables, data):
    seconds = TumblingProcessingTimeWindows.of(timedelta(seconds=1))
    return Result([variables[0].window_all(seconds).reduce(lambda a, b: a + b)], [variables[0]])


class Listening(FlatMapFunction[int, int], iterations.IterationListener[int]):
    def flat_map(self, value: int) -> list[int]:
        return [value]


def listening(variables, data):
    return Result([variables[0].flat_map(Listening())], [variables[0]])


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (nested, "iterations cannot be nested; put one behind the other"),
        (lambda v, d: [v[0].sink_to(PrintSink())] and same(v, d), "'print': a body cannot have a sink in it; return"),
        (lambda v, d: same([timed(v[0])], d), "cannot have a timestamp assigner in it; assign timestamps before"),
        (
            lambda v, d: same([v[0].where("value > 1")], d),
            "'where': a body runs in Python workers",
        ),
        (lambda v, d: Result([v[0].map(str, str)], [v[0]]), r"feedback 0 is of str.*its variable of int.*map it to"),
        (
            lambda v, d: Result([v[0].key_by(str, key_type=str)], [v[0]]),
            "feedback 0 is keyed by str, and its variable not keyed",
        ),
        (lambda v, d: Result([], [v[0]]), "there are 1 variables and 0 feedback streams; each variable needs"),
        (lambda v, d: Result([v[0]], []), "nothing leaves the iteration; return a stream in outputs"),
        (lambda v, d: None, "has to return an IterationBodyResult"),
        (lambda v, d: Result([v[0]], ["x"]), "output 0 has to be a stream of the body.*not 'x'"),
        (
            lambda v, d: same([v[0].map(lambda n: n, int).set_parallelism(7)], d),
            "a body has one parallelism",
        ),
        (windowed, "windows of time need the end of their input.*for_each_round"),
        (
            lambda v, d: same([v[0].connect(v[0]).map_batches(lambda a, b: a, int)], d),
            "needs the second stream",
        ),
    ],
)
def test_bodies_that_cannot_run(build, says):
    with pytest.raises(UnifiedError, match=says) as refused:
        built(build)
    assert "loops: " in str(refused.value)


def test_a_stream_of_the_outside_has_to_be_passed_in():
    pipeline = Pipeline("loops")
    numbers, other = pipeline.from_collection([1]), pipeline.from_collection([2], name="other")

    def iterate(build):
        iterations.iterate_bounded_streams_until_termination([numbers], [], Body(build))

    with pytest.raises(PipelineError, match=r"cannot have a source in it, as 'read' \(.*\) is; read it before the it"):
        iterate(lambda variables, data: Result([pipeline.from_collection([3], name="read")], [variables[0]]))
    with pytest.raises(PipelineError, match=r"'map' \(.*\) works on a stream of the outside; pass"):
        iterate(lambda v, d: Result([v[0]], [other.map(lambda n: n, int)]))
    with pytest.raises(PipelineError, match="is of an iteration's body and one of the outside"):
        iterate(lambda v, d: Result([v[0].union(other)], [v[0]]))
    with pytest.raises(PipelineError, match="output 0 has to be a stream of the body"):
        iterate(lambda v, d: Result([v[0]], [other]))


def test_inputs_that_cannot_be():
    with pytest.raises(PipelineError, match="there is no variable; a loop needs a stream"):
        built(same, numbers=lambda pipeline: [])
    with pytest.raises(PipelineError, match="source 'rate' is unbounded, and a bounded iteration waits for the end"):
        built(same, numbers=lambda pipeline: [pipeline.from_source(RateSource(1))])
    with pytest.raises(PipelineError, match="belong to different pipelines"):
        built(same, data=[lambda pipeline: Pipeline("another").from_collection([1])])
    with pytest.raises(PipelineError, match="operator_life_cycle is ALL_ROUND or PER_ROUND, not 'ROUND'"):
        built(same, operator_life_cycle="ROUND")
    with pytest.raises(PipelineError, match="parallelism must be a whole number of at least 1, not 0"):
        built(same, parallelism=0)
    numbers = Pipeline("loops").from_collection([1])
    with pytest.raises(PipelineError, match="needs an IterationBody, not <function"):
        iterations.iterate_bounded_streams_until_termination([numbers], [], same)
    with pytest.raises(PipelineError, match="give it streams of an iteration's body"):
        iterations.for_each_round([Pipeline("loops").from_collection([1])], lambda inputs: inputs)
    for rounds in (0, "3", 2.5, True):
        with pytest.raises(PipelineError, match=f"max_iter must be a whole number of at least 1, not {rounds!r}"):
            iterations.TerminateOnMaxIter(rounds)
    with pytest.raises(PipelineError, match="tol is a number, not 'small'"):
        iterations.TerminateOnMaxIterOrTol(3, "small")
    with pytest.raises(PipelineError, match="variables and data are lists of streams, and one of them is 3"):
        iterations.iterate_bounded_streams_until_termination([3], [], Body(same))
    with pytest.raises(PipelineError, match="an iteration needs an IterationConfig"):
        iterations.iterate_bounded_streams_until_termination([numbers], [], Body(same), {"parallelism": 1})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"staleness": 1.5}, "staleness is how many epochs a subtask may be ahead, 0 or more, not 1.5"),
        ({"staleness": None}, "staleness is how many .* not None"),
        ({"parallelism": "2"}, "parallelism must be a whole number of at least 1, not '2'"),
        ({"operator_life_cycle": None}, "operator_life_cycle is ALL_ROUND or PER_ROUND, not None"),
        ({"name": 3}, "name is a text that is not empty, not 3"),
        ({"uid": ""}, "uid is a text that is not empty, not ''"),
    ],
)
def test_a_configuration_that_cannot_be(given, message):
    with pytest.raises(PipelineError, match=message):
        iterations.IterationConfig(**given)


def test_what_hears_of_epochs_is_refused_outside_a_body():
    numbers = Pipeline("loops").from_collection([1])
    for refused in (
        lambda: numbers.flat_map(iterations.TerminateOnMaxIter(3)),
        lambda: iterations.all_reduce(numbers, max),
        lambda: iterations.forward_inputs_of_last_round(numbers),
        lambda: iterations.combine(numbers.key_by(lambda n: n, key_type=int), max),
        lambda: numbers.flat_map(Listening()),
    ):
        with pytest.raises(PipelineError, match="hears of the epochs of an iteration, and there are none here"):
            refused()


def test_an_exchange_with_no_operator_behind_it_is_refused():
    with pytest.raises(PipelineError, match=r"data ends with broadcast\(\), .* call it on the stream that the body"):
        built(same, data=[lambda pipeline: pipeline.from_collection([1]).broadcast()])
    with pytest.raises(PipelineError, match=r"feedback 0 ends with global_\(\), .* on the variable in the body"):
        built(lambda v, d: Result([v[0].global_()], [v[0]]))
    with pytest.raises(PipelineError, match=r"output 0 ends with broadcast\(\), .* behind the iteration"):
        built(lambda v, d: Result([v[0]], [v[0].broadcast()]))


def test_an_operator_that_lives_for_one_round_hears_of_no_epochs():
    with pytest.raises(PipelineError, match="'Listening': an operator that lives for one epoch hears of no epochs"):
        built(listening, operator_life_cycle="PER_ROUND")


def test_no_native_aggregate_of_spark_stands_behind_an_iteration():
    pipeline, (out,) = built(same)
    sales = out.map(lambda n: Sale("north", n), Sale).key_by("shop")
    sales.agg(F.sum("at").alias("at"), output_type=Sale).name("totals").print()
    changed = {"execution.runtime-mode": "STREAMING", "state.native-aggregates": "SPARK"}
    with pytest.raises(UnsupportedError, match="after the native aggregate 'totals' and after 'Body', which"):
        plan_queries(pipeline.plan(changed), Lanes())


def test_a_bounded_iteration_does_not_wait_for_an_end_that_does_not_come():
    pipeline, (out,) = built(same)
    out.print()
    with pytest.raises(UnsupportedError, match="iteration 'Body' waits for the end of its input, and with"):
        pipeline.plan({"execution.runtime-mode": "STREAMING", "execution.savepoint.path": "/tmp/left"})


def test_a_bounded_iteration_is_in_no_job_whose_input_does_not_end():
    pipeline, (out,) = built(same)
    out.print()
    pipeline.from_source(RateSource(name="ticks")).print("ticks out")
    with pytest.raises(UnsupportedError, match="'Body' waits for the end of the job's input, and source 'ticks' has"):
        pipeline.plan({"execution.runtime-mode": "STREAMING"})


def test_an_unbounded_iteration_has_no_criteria_and_replays_nothing():
    pipeline = Pipeline("loops")
    numbers = pipeline.from_collection([1], int, name="numbers")
    body = Body(lambda v, d: Result([v[0]], [v[0]], v[0]))
    with pytest.raises(PipelineError, match="'Body': an unbounded iteration has no termination criteria"):
        iterations.iterate_unbounded_streams([numbers], [], body)
    with pytest.raises(PipelineError, match="data that does not end cannot be replayed"):
        iterations.iterate_unbounded_streams([numbers], iterations.ReplayableDataStreams([numbers]), body)


def test_mistakes_in_a_body_are_reported_together():
    def build(variables, data):
        return Result([variables[0]], [variables[0].map(lambda n: n), variables[0].flat_map(lambda n: [n])])

    with pytest.raises(RecordTypeError, match="2 operators have no usable output type"):
        built(build)


def test_what_a_function_raises_names_its_operator():
    class Broken(Listening):
        def on_epoch_watermark_incremented(self, epoch_watermark, context, collector):
            raise ValueError("not in this round")

    pipeline, (out,) = built(lambda v, d: Result([v[0].flat_map(Broken())], [v[0]]))
    out.print()
    with pytest.raises(UserFunctionError, match="operator 'Broken': ValueError: not in this round"):
        run_pipeline(pipeline, "BATCH")


def test_a_key_is_known_on_keyed_streams_only():
    class Asking(Listening):
        def on_epoch_watermark_incremented(self, epoch_watermark, context, collector):
            context.get_current_key()

    pipeline, (out,) = built(lambda v, d: Result([v[0].flat_map(Asking())], [v[0]]))
    out.print()
    with pytest.raises(UnifiedError, match="'Asking': there is no key; call key_by before the operator, and"):
        run_pipeline(pipeline, "BATCH")


def test_lists_of_streams_are_lists():
    numbers = Pipeline("loops").from_collection([1])
    body = Body(same)
    for variables, data, says in (
        (numbers, [], "variables is a list of streams, such as .stream., not <"),
        ([numbers], numbers, "data is a list of streams"),
        ([numbers], [], "feedback is a list of streams"),
    ):
        with pytest.raises(PipelineError, match=says):
            iterations.iterate_bounded_streams_until_termination(
                variables, data, body if data or variables is numbers else Body(lambda v, d: Result(v[0], v[0]))
            )


def test_a_reduce_function_hears_of_no_epochs():
    class Sum(ReduceFunction[int], iterations.IterationListener[int]):
        def reduce(self, value1: int, value2: int) -> int:
            return value1 + value2

    with pytest.raises(PipelineError, match="a reduce function hears of no epochs; use process"):
        built(lambda v, d: Result([v[0]], [v[0].key_by(str, key_type=str).reduce(Sum())]))


def test_a_function_that_cannot_be_copied_names_its_operator():
    class Holding(Listening):
        def __init__(self):
            self.lock = threading.Lock()

    pipeline, (out,) = built(lambda v, d: Result([v[0].flat_map(Holding())], [v[0]]))
    out.print()
    with pytest.raises(
        PipelineError, match=r"'Holding' cannot be sent to Spark's workers: cannot pickle.*in open\(\), not before"
    ):
        run_pipeline(pipeline, "BATCH")
