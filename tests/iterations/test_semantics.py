"""Iterations in the harness: epochs, life cycles, termination (FLIP-176)."""

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dagster_unified.api import (
    ArrowListStateDescriptor,
    BroadcastProcessFunction,
    CheckpointedFunction,
    CoMapFunction,
    FilterFunction,
    FlatMapFunction,
    KeyedProcessFunction,
    MapFunction,
    MapStateDescriptor,
    OutputTag,
    Pipeline,
    ProcessFunction,
    iterations,
)
from dagster_unified.errors import UserFunctionError
from dagster_unified.testing import run_pipeline
from tests.iterations.programs import PROGRAMS
from tests.iterations.support import Body, iterate, results
from tests.support import MODES


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_a_program_gives_its_result_with_any_number_of_subtasks(name, parallelism):
    build, expected = PROGRAMS[name]
    assert results(*build(), **{"parallelism.default": parallelism}) == expected


def up_to(limit, criteria=None):
    def build(variables, data):
        more = variables[0].map(lambda n: n + 1, int)
        ends = None if criteria is None else criteria(more)
        return iterations.IterationBodyResult([more.filter(lambda n: n < limit)], [more], ends)

    return build


def test_it_ends_when_nothing_is_fed_back():
    pipeline, (out,) = iterate([0, 2], up_to(4))
    assert results(pipeline, out) == [1, 2, 3, 3, 4, 4]


def test_it_ends_when_the_criteria_have_no_record_though_something_is_fed_back():
    pipeline, (out,) = iterate([0], up_to(100, lambda more: more.filter(lambda n: n < 3)))
    assert results(pipeline, out) == [1, 2, 3]


def test_it_ends_when_nothing_is_fed_back_though_the_criteria_have_records():
    pipeline, (out,) = iterate([0], up_to(2, lambda more: more))
    assert results(pipeline, out) == [1, 2]


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_it_ends_after_so_many_rounds(rounds):
    pipeline, (out,) = iterate([0], up_to(100, lambda m: m.flat_map(iterations.TerminateOnMaxIter(rounds))))
    assert results(pipeline, out) == list(range(1, rounds + 1))


@pytest.mark.parametrize("keyed", [False, True])
def test_it_ends_when_a_value_is_small_enough_or_after_so_many_rounds(keyed):
    def halves(most):
        def build(variables, data):
            half = variables[0].map(lambda n: n // 2, int)
            loss = half.filter(lambda n: n < 50).map(float, float)  # the first round has none
            loss = loss.key_by(int, key_type=int) if keyed else loss
            ends = loss.flat_map(iterations.TerminateOnMaxIterOrTol(most, 5))
            return iterations.IterationBodyResult([half], [half], ends)

        return build

    pipeline, (out,) = iterate([100], halves(50))
    assert results(pipeline, out) == [3, 6, 12, 25, 50]
    pipeline, (out,) = iterate([100], halves(2))
    assert results(pipeline, out) == [25, 50]


def test_replayed_data_comes_in_every_round_and_other_data_in_the_first():
    def build(variables, data):
        replayed, once = (stream.map(lambda n: n, int) for stream in data)
        fewer = variables[0].map(lambda n: n - 1, int).filter(lambda n: n > 0)
        return iterations.IterationBodyResult([fewer], [replayed, once])

    def data(pipeline):
        return iterations.ReplayableDataStreams(
            replayed=[pipeline.from_collection([7, 8], int, name="a")],
            not_replayed=[pipeline.from_collection([9], int, name="b")],
        )

    pipeline, (replayed, once) = iterate([3], build, data)
    replayed.print("out")
    once.print("once")
    found = run_pipeline(pipeline, "BATCH").sinks
    assert (sorted(found["out"]), found["once"]) == ([7, 7, 7, 8, 8, 8], [9])


def test_what_a_body_hands_straight_on_goes_round_and_out():
    def build(variables, data):
        ends = variables[0].flat_map(iterations.TerminateOnMaxIter(3))
        return iterations.IterationBodyResult([variables[0]], [variables[0].union(data[0])], ends)

    pipeline, (out,) = iterate([1, 2], build, lambda p: [p.from_collection([5], int, name="five")])
    assert results(pipeline, out) == [1, 1, 1, 2, 2, 2, 5]


def test_two_variables_are_fed_back_each_to_itself():
    def build(variables, data):
        one = variables[0].map(lambda n: n + 1, int).filter(lambda n: n < 4)
        other = variables[1].map(lambda t: t + "!", str).filter(lambda t: len(t) < 5)
        return iterations.IterationBodyResult([one, other], [one, other])

    pipeline = Pipeline("loops")
    variables = [pipeline.from_collection([1]), pipeline.from_collection(["a"], name="texts")]
    one, other = iterations.iterate_bounded_streams_until_termination(variables, [], Body(build))
    one.print("one")
    other.print("other")
    found = run_pipeline(pipeline, "BATCH").sinks
    assert (sorted(found["one"]), sorted(found["other"])) == ([2, 3], ["a!", "a!!", "a!!!"])


def test_what_is_emitted_at_the_end_of_an_epoch_belongs_to_it():
    class Once(FlatMapFunction[int, int], iterations.IterationListener[int]):
        def flat_map(self, value: int) -> list[int]:
            return []

        def on_epoch_watermark_incremented(self, epoch_watermark, context, collector):
            if epoch_watermark < 2:
                collector.collect(10 + epoch_watermark)

    def build(variables, data):
        emitted = variables[0].global_().flat_map(Once())
        return iterations.IterationBodyResult([emitted], [variables[0].map(lambda n: n, int)])

    pipeline, (out,) = iterate([1], build)
    assert results(pipeline, out) == [1, 10, 11]


def test_each_round_has_new_operators_where_they_live_for_one():
    def build(variables, data):
        total = variables[0].key_by(lambda n: 0, key_type=int).reduce(lambda a, b: a + b)
        more = total.filter(lambda n: n < 40).flat_map(lambda n: [n, n], int)
        return iterations.IterationBodyResult([more], [total])

    pipeline, (out,) = iterate([1, 2, 3], build, operator_life_cycle="PER_ROUND")
    assert results(pipeline, out) == [6, 12, 24, 48]
    pipeline, (rolling,) = iterate([1, 2, 3], lambda v, d: build(v, d))
    assert results(pipeline, rolling)[-1] > 48  # its state lives on


def test_all_reduce_gives_one_record_a_round():
    def build(variables, data):
        total = iterations.all_reduce(variables[0], lambda a, b: a + b)
        return iterations.IterationBodyResult([total.filter(lambda n: n < 0)], [total])

    pipeline, (out,) = iterate([1, 2, 3, 4, 5], build)
    assert results(pipeline, out) == [15]


def test_metrics_of_all_rounds_are_counted():
    class Counted(FlatMapFunction[int, int]):
        def open(self, runtime_context):
            self.context = runtime_context

        def flat_map(self, value: int) -> list[int]:
            self.context.count("seen")
            return [value - 1] if value > 1 else []

    def build(variables, data):
        fewer = variables[0].flat_map(Counted())
        return iterations.IterationBodyResult([fewer], [fewer])

    pipeline, (out,) = iterate([3, 2], build)
    out.print("out")
    assert run_pipeline(pipeline, "BATCH").metrics.counters["seen"] == 5


def test_side_outputs_of_a_body_leave_it():
    tag = OutputTag("even", int)

    def build(variables, data):
        from dagster_unified.api import ProcessFunction

        class Split(ProcessFunction[int, int]):
            def process_element(self, value: int, ctx) -> list[int]:
                if value % 2 == 0:
                    ctx.output(tag, value)
                return [value - 1] if value > 0 else []

        split = variables[0].process(Split())
        return iterations.IterationBodyResult([split], [split.get_side_output(tag)])

    pipeline, (out,) = iterate([5], build)
    assert results(pipeline, out) == [0, 2, 4]


def kept(stream, rounds):
    """The stream's last round, after so many."""
    return [iterations.forward_inputs_of_last_round(stream)], stream.flat_map(iterations.TerminateOnMaxIter(rounds))


def test_what_follows_an_operator_of_one_round_lives_on():
    def build(variables, data):
        (total,) = iterations.for_each_round(
            variables, lambda inputs: [inputs[0].key_by(lambda n: 0, key_type=int).reduce(lambda a, b: a + b)]
        )
        more = total.map(lambda n: n + 1, int)
        return iterations.IterationBodyResult([more], *kept(more, 3))

    pipeline, (out,) = iterate([1, 2], build)
    assert results(pipeline, out) == [6]


def test_operators_of_one_round_take_what_is_emitted_at_the_end():
    def build(variables, data):
        outputs, ends = kept(variables[0], 2)
        totals = iterations.for_each_round(
            outputs, lambda inputs: [inputs[0].rebalance().key_by(str, key_type=str).reduce(lambda a, b: a + b)]
        )
        return iterations.IterationBodyResult([variables[0]], totals, ends)

    pipeline, (out,) = iterate([4, 4, 5], build)
    assert results(pipeline, out) == [5, 8]


class Told(BroadcastProcessFunction[int, int, int]):
    def process_element(self, value: int, ctx) -> list[int]:
        return [value]

    def process_broadcast_element(self, value: int, ctx) -> list[int]:
        return [100 * value]


@pytest.mark.parametrize("life_cycle", ["ALL_ROUND", "PER_ROUND"])
@pytest.mark.parametrize("numbers", [[7], []])
def test_what_broadcast_records_lead_to_is_emitted_once(life_cycle, numbers):
    def build(variables, data):
        told = variables[0].connect(data[0].broadcast(MapStateDescriptor("none", str, int))).process(Told())
        return iterations.IterationBodyResult([told.filter(lambda n: n < 0)], [told])

    pipeline, (out,) = iterate(
        numbers, build, lambda p: [p.from_collection([1, 2], int, name="told")], operator_life_cycle=life_cycle
    )
    assert results(pipeline, out) == [*numbers, 100, 200]


def test_a_key_that_a_function_computes_chooses_the_subtask_of_any_operator():
    def build(variables, data):
        keyed = variables[0].key_by(lambda n: n % 3, key_type=int).map(lambda n: n + 1, int)
        spread = keyed.partition_custom(lambda key, count: key % count, lambda n: n, int).map(lambda n: n, int)
        return iterations.IterationBodyResult([spread.filter(lambda n: n < 4)], [spread])

    pipeline, (out,) = iterate([1, 2], build)
    assert results(pipeline, out) == [2, 3, 3, 4, 4]


def test_a_variable_that_is_keyed_by_a_function_is_read_by_any_operator():
    def parity(n: int) -> int:
        return n % 2

    pipeline = Pipeline("loops")
    numbers = pipeline.from_collection([1, 2], int, name="numbers").key_by(parity)

    def build(variables, data):
        more = variables[0].filter(lambda n: n < 4).map(lambda n: n + 1, int)
        return iterations.IterationBodyResult([more.key_by(parity)], [more])

    (out,) = iterations.iterate_bounded_streams_until_termination([numbers], [], Body(build))
    assert results(pipeline, out) == [2, 3, 3, 4, 4]


def test_criteria_of_the_library_work_where_operators_live_for_one_round():
    def build(variables, data):
        more = variables[0].map(lambda n: n + 1, int)
        return iterations.IterationBodyResult([more], *kept(more, 4))

    pipeline, (out,) = iterate([0], build, operator_life_cycle="PER_ROUND")
    assert results(pipeline, out) == [4]


class Kept(CheckpointedFunction, iterations.IterationListener[pa.RecordBatch]):
    """Keeps the rows of the first round, and gives the largest of them that is left in each."""

    def initialize_state(self, context):
        self.state = context.get_operator_state_store().get_list_state(ArrowListStateDescriptor("rows", int))
        self.rows = self.state.get()

    def snapshot_state(self, context):
        self.state.update(self.rows)

    def __call__(self, batch):
        self.rows = pa.concat_tables([self.rows, pa.Table.from_batches([batch], self.rows.schema)])
        return batch.slice(0, 0)

    def on_epoch_watermark_incremented(self, epoch_watermark, context, collector):
        if self.rows.num_rows:
            largest = pc.max(self.rows["value"])
            collector.collect(pa.RecordBatch.from_pydict({"value": [largest.as_py()]}))
            self.rows = self.rows.filter(pc.less(self.rows["value"], largest))

    def on_iteration_terminated(self, context, collector):
        collector.collect(pa.RecordBatch.from_pydict({"value": [100 + self.rows.num_rows]}))


def test_a_subtask_keeps_batches_from_round_to_round():
    def build(variables, data):
        largest = data[0].map_batches(Kept(), int).set_parallelism(1)
        ends = largest.flat_map(iterations.TerminateOnMaxIter(3))
        return iterations.IterationBodyResult([variables[0]], [largest], ends)

    def data(pipeline):
        return [pipeline.from_collection([3, 9, 4, 7, 1], int, name="others")]

    pipeline, (out,) = iterate([1], build, data)
    assert results(pipeline, out) == [4, 7, 9, 102]


@pytest.mark.parametrize("life_cycle", ["ALL_ROUND", "PER_ROUND"])
def test_batches_are_joined_by_a_table_whichever_way_operators_live(life_cycle):
    def add(numbers: pa.RecordBatch, others: pa.Table) -> pa.RecordBatch:
        return numbers.set_column(0, "value", pc.add(numbers["value"], sum(others["value"].to_pylist())))

    def build(variables, data):
        more = variables[0].connect(data[0].broadcast()).map_batches(add, int)
        return iterations.IterationBodyResult([more.filter(lambda n: n < 8)], [more])

    def data(pipeline):
        return iterations.ReplayableDataStreams(replayed=[pipeline.from_collection([3, 2], int, name="others")])

    pipeline, (out,) = iterate([1], build, data, operator_life_cycle=life_cycle)
    assert results(pipeline, out) == [6, 11]


SEEN = OutputTag("seen", int)


class Counted(iterations.IterationListener[int]):
    """Emits to a side output how many records came in the round."""

    count = 0

    def take(self, value: int) -> int:
        self.count += 1
        return value

    def on_epoch_watermark_incremented(self, epoch_watermark, context, collector):
        context.output(SEEN, self.count)
        self.count = 0


class CountedMap(MapFunction[int, int], Counted):
    map = Counted.take


class CountedFilter(FilterFunction[int], Counted):
    def filter(self, value: int) -> bool:
        return self.take(value) > 1


class CountedFlatMap(FlatMapFunction[int, int], Counted):
    def flat_map(self, value: int) -> list[int]:
        return [self.take(value)]


class CountedBoth(CoMapFunction[int, int, int], Counted):
    map1 = map2 = Counted.take


@MODES
@pytest.mark.parametrize(
    "counting",
    [
        lambda s: s.map(CountedMap(), int),
        lambda s: s.filter(CountedFilter()),
        lambda s: s.flat_map(CountedFlatMap(), int),
        lambda s: s.connect(s.filter(lambda n: False)).map(CountedBoth(), int),
    ],
)
def test_any_function_that_listens_has_side_outputs(counting, mode):
    def build(variables, data):
        counted = counting(variables[0]).set_parallelism(1)
        further = counted.map(lambda n: n - 1, int).filter(lambda n: n > 0)
        return iterations.IterationBodyResult([further], [counted.get_side_output(SEEN)])

    pipeline, (out,) = iterate([1, 2, 3], build)
    out.print("out")
    assert run_pipeline(pipeline, mode).sinks["out"] == [3, 2, 1]


@pytest.mark.parametrize(
    ("method", "keyed"),
    [
        ("on_epoch_watermark_incremented", False),
        ("on_epoch_watermark_incremented", True),
        ("on_iteration_terminated", False),
    ],
)
def test_a_listener_that_returns_what_it_should_emit_is_an_error(method, keyed):
    base = KeyedProcessFunction if keyed else ProcessFunction

    def process_element(self, value, ctx):
        return [value]

    listener = type("Returning", (base, iterations.IterationListener), {"process_element": process_element})
    setattr(listener, method, lambda self, *_: [7])

    def build(variables, data):
        stream = variables[0].key_by(lambda n: n, key_type=int) if keyed else variables[0]
        returned = stream.process(listener(), int)
        return iterations.IterationBodyResult([returned.filter(lambda n: False)], [returned])

    pipeline, (out,) = iterate([1], build)
    out.print("out")
    with pytest.raises(UserFunctionError, match=r"returned \[7\], which goes nowhere; emit with collector.collect"):
        run_pipeline(pipeline, "BATCH")


@MODES
def test_what_comes_when_an_iteration_has_ended_is_reduced_and_combined_too(mode):
    def build(variables, data):
        more = variables[0].map(lambda n: n * 2, int)
        last = iterations.forward_inputs_of_last_round(more)
        again = iterations.forward_inputs_of_last_round(last)
        summed = iterations.all_reduce(last, lambda a, b: a + b)
        combined = iterations.combine(last.key_by(lambda n: n % 16, key_type=int), max)
        criteria = more.flat_map(iterations.TerminateOnMaxIter(3))
        return iterations.IterationBodyResult([more], [last, again, summed, combined], criteria)

    pipeline = Pipeline("p")
    numbers = pipeline.from_collection([1, 2, 3], int)
    for number, stream in enumerate(iterations.iterate_bounded_streams_until_termination([numbers], [], Body(build))):
        stream.print(f"out{number}")
    found = run_pipeline(pipeline, mode).sinks
    assert [sorted(found[f"out{number}"]) for number in range(3)] == [[8, 16, 24], [8, 16, 24], [48]]
    assert sorted(found["out3"]) in ([16, 24], [8, 16, 24])  # it combines what is in one subtask


class SaysGoodbye(KeyedProcessFunction, iterations.IterationListener[int]):
    """Has no state of its keys."""

    def process_element(self, value, ctx):
        return [value]

    def on_iteration_terminated(self, context, collector):
        collector.collect(100 + context.get_current_key())


class SaysGoodbyeOpened(MapFunction, iterations.IterationListener[int]):
    """The same of a function that is keyed since it overrides `open`."""

    def open(self, runtime_context):
        pass

    def map(self, value):
        return value

    def on_iteration_terminated(self, context, collector):
        collector.collect(100 + context.get_current_key())


@MODES
@pytest.mark.parametrize("life", ["process", "map"])
def test_a_function_without_keyed_state_hears_of_the_end_for_each_key_that_came(mode, life):
    def build(variables, data):
        keyed = variables[0].key_by(lambda n: n % 10, key_type=int)
        gone = keyed.process(SaysGoodbye(), int) if life == "process" else keyed.map(SaysGoodbyeOpened(), int)
        return iterations.IterationBodyResult([gone.map(lambda n: n + 10, int).filter(lambda n: n < 20)], [gone])

    pipeline, (out,) = iterate([1, 2, 7], build)
    out.print("out")
    assert sorted(run_pipeline(pipeline, mode).sinks["out"]) == [1, 2, 7, 11, 12, 17, 101, 102, 107]
