"""`CheckpointedFunction`: state of a subtask, by one program in both modes."""

from datetime import timedelta
from typing import NamedTuple

import pyarrow as pa
import pytest

from dagster_unified.api import (
    ArrowListStateDescriptor,
    BroadcastProcessFunction,
    CheckpointedFunction,
    CheckpointListener,
    CoFlatMapFunction,
    FilterFunction,
    FlatMapFunction,
    ListStateDescriptor,
    MapFunction,
    MapStateDescriptor,
    OutputTag,
    Pipeline,
    ProcessFunction,
    ReduceFunction,
    StateTtlConfig,
    ValueStateDescriptor,
)
from dagster_unified.errors import PipelineError, StateError, UnsupportedError, UserFunctionError
from dagster_unified.operators.operator_state import LIST, UNION, redistributed
from dagster_unified.testing import OneInputHarness, run_pipeline
from tests.support import MODES


class Counting(CheckpointedFunction):
    """Keeps how many records its subtask has seen."""

    def initialize_state(self, context):
        self.counts = context.get_operator_state_store().get_list_state(ListStateDescriptor("counts", int))
        self.count = sum(self.counts.get())

    def snapshot_state(self, context):
        self.counts.update([self.count])

    def see(self):
        self.count += 1
        return self.count


class Numbered(Counting, MapFunction):
    def map(self, value) -> tuple[int, int]:
        return (self.see(), value)


class EveryOther(Counting, FilterFunction):
    def filter(self, value):
        return self.see() % 2 == 0


class Repeated(Counting, FlatMapFunction):
    def flat_map(self, value) -> list[int]:
        return [value] * self.see()


class OnBatches(CheckpointedFunction):
    """Says how many rows came before, and keeps them."""

    def initialize_state(self, context):
        store = context.get_operator_state_store()
        self.state = store.get_list_state(ArrowListStateDescriptor("rows", int))
        self.rows = self.state.get()

    def snapshot_state(self, context):
        self.state.update(self.rows)

    def __call__(self, batch):
        before = self.rows.num_rows
        self.rows = pa.concat_tables([self.rows, pa.Table.from_batches([batch.select(["value"])], self.rows.schema)])
        return pa.RecordBatch.from_pydict({"value": pa.array(range(before + 1, self.rows.num_rows + 1))})


EVEN = OutputTag("even", int)


class Split(Counting, ProcessFunction):
    def process_element(self, value, ctx) -> list[int]:
        if self.see() % 2 == 0:
            ctx.output(EVEN, value)
            return []
        return [value]


class Merged(Counting, CoFlatMapFunction):
    def flat_map1(self, value) -> list[str]:
        return [f"{self.see()}: {value}"]

    def flat_map2(self, value) -> list[str]:
        return [f"{self.see()}: {value}"]


def numbers(pipeline, last=4):
    return pipeline.from_collection(list(range(1, last + 1)), int, "numbers")


OPERATORS = {
    "map": (lambda p: numbers(p).map(Numbered()), [(1, 1), (2, 2), (3, 3), (4, 4)]),
    "filter": (lambda p: numbers(p).filter(EveryOther()), [2, 4]),
    "flat_map": (lambda p: numbers(p, 3).flat_map(Repeated()), [1, 2, 2, 3, 3, 3]),
    "map_batches": (lambda p: numbers(p).map_batches(OnBatches(), int), [1, 2, 3, 4]),
    "process": (lambda p: numbers(p).process(Split()), [1, 3]),
    "side output": (lambda p: numbers(p).process(Split()).get_side_output(EVEN), [2, 4]),
    "behind a map": (
        lambda p: numbers(p).map(lambda n: 10 * n, int).map(Numbered()),
        [(i, 10 * i) for i in (1, 2, 3, 4)],
    ),
    "before a map": (lambda p: numbers(p).filter(EveryOther()).map(lambda n: 10 * n, int), [20, 40]),
    "one after another": (lambda p: numbers(p).filter(EveryOther()).map(Numbered()), [(1, 2), (2, 4)]),
}


@MODES
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_of_a_stream_without_a_key_may_have_operator_state(mode, operator):
    build, expected = OPERATORS[operator]
    pipeline = Pipeline("counted")
    build(pipeline).print()

    assert run_pipeline(pipeline, mode, seed=None).only() == expected


@MODES
def test_connected_functions_share_their_subtasks_state(mode):
    pipeline = Pipeline("counted")
    words = pipeline.from_collection(["a"], str, "words")
    numbers(pipeline, 2).connect(words).flat_map(Merged()).print()

    found = run_pipeline(pipeline, mode).only()
    assert sorted(line.partition(": ")[0] for line in found) == ["1", "2", "3"]
    assert sorted(line.partition(": ")[2] for line in found) == ["1", "2", "a"]


class Noting(MapFunction, CheckpointedFunction, CheckpointListener):
    """Notes what is called, in its state."""

    def initialize_state(self, context):
        self.state = context.get_operator_state_store().get_list_state(ListStateDescriptor("notes", str))
        self.notes = [*self.state.get(), f"initialize {context.is_restored()}"]

    def open(self, runtime_context):
        self.notes.append(f"open {runtime_context.get_index_of_this_subtask()}")

    def notify_checkpoint_complete(self, epoch):
        self.notes.append(f"complete {epoch}")

    def snapshot_state(self, context):
        self.state.update([*self.notes, f"snapshot {context.get_checkpoint_id()}"])

    def map(self, value) -> list[str]:
        self.notes.append(f"map {value}")
        return list(self.notes)


def test_in_streaming_a_function_goes_from_its_snapshot_to_the_next_in_every_epoch():
    pipeline = Pipeline("noting")
    numbers(pipeline, 2).map(Noting()).print()

    first = ["initialize False", "open 0", "map 1"]
    second = ["snapshot 0", "initialize True", "open 0", "complete 0", "map 2"]
    assert run_pipeline(pipeline, "STREAMING").only() == [first, [*first, *second]]


def test_in_batch_a_function_is_initialized_once_and_never_snapshot():
    pipeline = Pipeline("noting")
    numbers(pipeline, 2).map(Noting()).print()

    first = ["initialize False", "open 0", "map 1"]
    assert run_pipeline(pipeline, "BATCH", seed=None).only() == [first, [*first, "map 2"]]


class Forgetting(MapFunction, CheckpointedFunction):
    def __init__(self):
        self.seen = 0

    def initialize_state(self, context):
        pass

    def snapshot_state(self, context):
        pass

    def map(self, value) -> int:
        self.seen += 1
        return self.seen


def test_what_is_not_in_the_state_does_not_outlive_an_epoch():
    pipeline = Pipeline("forgetting")
    numbers(pipeline, 3).map(Forgetting()).print()

    assert run_pipeline(pipeline, "STREAMING").only() == [1, 1, 1]


class Item(NamedTuple):
    name: str
    amount: int


class Typed(MapFunction, CheckpointedFunction):
    def __init__(self, kind, value):
        self.kind, self.value = kind, value

    def initialize_state(self, context):
        self.held = context.get_operator_state_store().get_list_state(ListStateDescriptor("held", self.kind))

    def snapshot_state(self, context):
        self.held.add(self.value)

    def map(self, value) -> str:
        return repr(self.held.get())


def test_elements_come_back_as_the_type_that_was_declared():
    pipeline = Pipeline("typed")
    numbers(pipeline, 2).map(Typed(Item, Item("a", 1))).print()

    assert run_pipeline(pipeline, "STREAMING").only() == ["[]", "[Item(name='a', amount=1)]"]


@pytest.mark.parametrize(("kind", "value"), [(int, "seven"), (Item, ("a", 1, 2)), (list[int], ["x"])])
def test_an_element_of_another_type_is_an_error_that_names_the_state(kind, value):
    pipeline = Pipeline("typed")
    numbers(pipeline, 2).map(Typed(kind, value)).print()

    with pytest.raises(StateError, match=r"typed: stage 'Typed', operator 'Typed': state 'held[^ ]* is declared"):
        run_pipeline(pipeline, "STREAMING")


class Asking(MapFunction, CheckpointedFunction):
    """Asks for state in a way that is given."""

    def __init__(self, ask):
        self.ask = ask

    def initialize_state(self, context):
        self.ask(context.get_operator_state_store())

    def snapshot_state(self, context):
        pass

    def map(self, value) -> int:
        return value


def both_kinds(store):
    store.get_list_state(ListStateDescriptor("held", int))
    store.get_union_list_state(ListStateDescriptor("held", int))


def with_time_to_live(store):
    ttl = StateTtlConfig(timedelta(hours=1))
    store.get_list_state(ListStateDescriptor("held", int, ttl))


WRONG = {
    "give a ListStateDescriptor, not": lambda store: store.get_list_state(ValueStateDescriptor("held", int)),
    "is declared as a list and as a union list": both_kinds,
    "cannot have a time to live": with_time_to_live,
}


@MODES
@pytest.mark.parametrize("message", WRONG)
def test_what_is_no_operator_state_is_an_error(mode, message):
    pipeline = Pipeline("asking")
    numbers(pipeline, 1).map(Asking(WRONG[message])).print()

    with pytest.raises(PipelineError, match=f"asking: stage '.*', operator 'Asking': operator state .*{message}"):
        run_pipeline(pipeline, mode)


class Failing(Typed):
    def __init__(self, where):
        self.where = where

    def initialize_state(self, context):
        if self.where == "initialize_state":
            raise ValueError("unlucky")

    def snapshot_state(self, context):
        if self.where == "snapshot_state":
            raise ValueError("unlucky")

    def map(self, value) -> int:
        return value


@pytest.mark.parametrize("where", ["initialize_state", "snapshot_state"])
def test_a_failure_names_the_operator_and_the_method(where):
    pipeline = Pipeline("failing")
    numbers(pipeline, 1).map(Failing(where)).print()

    with pytest.raises(UserFunctionError, match=rf"operator 'Failing': ValueError: unlucky.* on '{where}\(\)'"):
        run_pipeline(pipeline, "STREAMING")


class WithTimer(Counting, ProcessFunction):
    def process_element(self, value, ctx) -> list[int]:
        ctx.timer_service().register_event_time_timer(7)
        return []


class WithKeyedState(Counting, MapFunction):
    def open(self, runtime_context):
        runtime_context.get_state(ValueStateDescriptor("held", int))

    def map(self, value) -> int:
        return value


@MODES
@pytest.mark.parametrize(
    ("function", "message"), [(WithTimer, "timers need"), (WithKeyedState, "needs a keyed stream")]
)
def test_timers_and_keyed_state_still_need_a_key(mode, function, message):
    pipeline = Pipeline("unkeyed")
    stream = numbers(pipeline, 1)
    (stream.process(function()) if function is WithTimer else stream.map(function())).print()

    with pytest.raises(UnsupportedError, match=message):
        run_pipeline(pipeline, mode)


class KeyedMap(Counting, MapFunction):
    def open(self, runtime_context):
        pass

    def map(self, value) -> int:
        return value


class Reduced(Counting, ReduceFunction):
    def reduce(self, value1, value2):
        return value1


RULES = MapStateDescriptor("rules", int, int)


class WithRules(Counting, BroadcastProcessFunction):
    def process_element(self, value, ctx) -> list[int]:
        return [value]

    def process_broadcast_element(self, value, ctx):
        return []


def with_rules(pipeline):
    return numbers(pipeline).connect(numbers(pipeline).broadcast(RULES)).process(WithRules(), int)


def half_keyed(pipeline):
    keyed = numbers(pipeline).key_by(lambda n: n, key_type=int)
    return keyed.connect(pipeline.from_collection(["a"], str, "words")).flat_map(Merged())


REFUSED = {
    "connect with a keyed stream": (half_keyed, "stream is keyed"),
    "broadcast state": (with_rules, "has no operator state"),
    "map by key": (lambda p: numbers(p).key_by(lambda n: n, key_type=int).map(Numbered()), "stream is keyed"),
    "map with open by key": (lambda p: numbers(p).key_by(lambda n: n, key_type=int).map(KeyedMap()), "stream is keyed"),
    "map_batches by key": (
        lambda p: numbers(p).key_by(lambda n: n, key_type=int).map_batches(OnBatches(), int),
        "stream is keyed",
    ),
    "reduce": (lambda p: numbers(p).key_by(lambda n: n, key_type=int).reduce(Reduced()), "stream is keyed"),
}


@pytest.mark.parametrize("operator", REFUSED)
def test_where_there_is_no_operator_state_the_graph_is_not_built(operator):
    build, message = REFUSED[operator]
    pipeline = Pipeline("refused")
    build(pipeline).print()

    with pytest.raises(PipelineError, match=f"refused: operator '.*' is given a CheckpointedFunction .*{message}"):
        pipeline.graph()


def test_more_subtasks_than_key_groups_are_an_error_of_the_plan():
    pipeline = Pipeline("wide")
    numbers(pipeline).map(Numbered()).name("wide").set_parallelism(3).print()

    with pytest.raises(PipelineError, match="operator 'wide' has 3 subtasks, and operator state for 2; launch with"):
        run_pipeline(pipeline, "STREAMING", options={"pipeline.max-parallelism": 2})


class Handle(MapFunction, CheckpointedFunction):
    """Uses its list as it goes."""

    def initialize_state(self, context):
        self.seen = context.get_operator_state_store().get_union_list_state(ListStateDescriptor("seen", int))

    def snapshot_state(self, context):
        pass

    def map(self, value) -> list[int]:
        self.seen.add(value)
        return self.seen.get()


@MODES
def test_a_list_may_be_written_at_any_time(mode):
    pipeline = Pipeline("handled")
    numbers(pipeline, 3).map(Handle()).print()

    assert run_pipeline(pipeline, mode, seed=None).only() == [[1], [1, 2], [1, 2, 3]]


def test_a_harness_snapshots_and_restores_operator_state():
    harness = OneInputHarness(lambda numbers: numbers.map(Numbered()), int)
    assert harness.process_element(7) == [(1, 7)]
    snapshot = harness.snapshot()
    assert harness.process_element(8) == [(2, 8)]
    assert harness.operator_state("counts") == [2]
    harness.restore(snapshot)
    assert harness.process_element(9) == [(2, 9)]


def test_explain_shows_the_state_and_that_subtasks_have_it():
    pipeline = Pipeline("shown")
    numbers(pipeline).map(Handle()).map(lambda n: 1, int).map(Numbered()).print()
    text = pipeline.explain()

    assert "checkpointed 'Handle' by subtask; union list state 'seen'" in text
    assert "checkpointed 'Numbered' by subtask; operator list state 'counts'" in text
    assert "'Handle' has operator state" in text


def test_lists_are_split_evenly_and_union_lists_are_given_whole():
    held = [{"a": [1, 2, 3], "b": [1]}, {"a": [4, 5]}, {"a": [], "b": [2]}]
    assert redistributed(held, {"a": LIST, "b": UNION}, 2) == [
        {"a": [1, 2, 3], "b": [1, 2]},
        {"a": [4, 5], "b": [1, 2]},
    ]
    assert redistributed(held, {"a": LIST}, 4) == [{"a": [1, 2]}, {"a": [3]}, {"a": [4]}, {"a": [5]}]
    assert redistributed([], {"a": LIST, "b": UNION}, 2) == [{"a": [], "b": []}] * 2
