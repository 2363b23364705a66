"""State and timers of a keyed process function, in the harness."""

import pytest

from dagster_unified.api import (
    AggregateFunction,
    AggregatingStateDescriptor,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    OutputTag,
    Pipeline,
    ReducingStateDescriptor,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from dagster_unified.errors import PipelineError, UserFunctionError
from dagster_unified.operators.operator import KeyedOptions
from dagster_unified.testing import KeyedHarness, ManualClock, run_pipeline


class Mean(AggregateFunction):
    def create_accumulator(self):
        return (0, 0)

    def add(self, value, accumulator):
        return (accumulator[0] + value, accumulator[1] + 1)

    def get_result(self, accumulator):
        return accumulator[0] / accumulator[1]

    def merge(self, a, b):
        return (a[0] + b[0], a[1] + b[1])


class AllStates(KeyedProcessFunction):
    def open(self, context):
        self.value = context.get_state(ValueStateDescriptor("value", int))
        self.list = context.get_list_state(ListStateDescriptor("list", int))
        self.map = context.get_map_state(MapStateDescriptor("map", int, str))
        self.sum = context.get_reducing_state(ReducingStateDescriptor("sum", lambda a, b: a + b, int))
        self.mean = context.get_aggregating_state(AggregatingStateDescriptor("mean", Mean(), tuple[int, int]))

    def process_element(self, value, ctx):
        self.value.update(value)
        self.list.add(value)
        self.map.put(value, str(value))
        self.sum.add(value)
        self.mean.add(value)
        yield self.value.value(), list(self.list), self.map.items(), self.sum.get(), self.mean.get()


def test_each_key_has_its_own_state_of_every_kind():
    harness = KeyedHarness(AllStates())
    harness.element("a", 1)
    harness.element("b", 10)
    assert harness.element("a", 3) == [(3, [1, 3], [(1, "1"), (3, "3")], 4, 2.0)]
    assert harness.element("b", 20) == [(20, [10, 20], [(10, "10"), (20, "20")], 30, 15.0)]


class Echo(KeyedProcessFunction):
    """Registers the timers that it is given and says when they fire."""

    def __init__(self, again=0):
        self.again = again

    def process_element(self, value, ctx):
        for at in value:
            if at < 0:
                ctx.timer_service().delete_event_time_timer(-at)
            else:
                ctx.timer_service().register_event_time_timer(at)

    def on_timer(self, timestamp, ctx):
        yield timestamp
        if self.again:
            ctx.timer_service().register_event_time_timer(timestamp + self.again)


def test_timers_fire_in_order_once_each_and_not_when_deleted():
    harness = KeyedHarness(Echo())
    harness.element("a", [30, 10, 20, 10, -20])
    assert harness.watermark(9) == []
    assert harness.watermark(30) == [10, 30]
    assert harness.end_of_input() == []


def self_registering(times):
    pipeline = Pipeline("chain")
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(lambda v: v)
    stream = pipeline.from_collection(times).assign_timestamps_and_watermarks(strategy)

    class Start(KeyedProcessFunction):
        def process_element(self, value, ctx) -> list[int]:
            ctx.timer_service().register_event_time_timer(value)
            return []

        def on_timer(self, timestamp, ctx):
            yield timestamp
            ctx.timer_service().register_event_time_timer(timestamp + 100)

    stream.key_by(lambda v: v % 2, key_type=int).process(Start()).print("out")
    return pipeline


@pytest.mark.parametrize("limit", [16, 3, 0])
def test_a_timer_that_registers_itself_for_ever_ends_at_the_same_place_in_both_modes(limit):
    options = {"pipeline.event-time.end-of-input-chain": limit}
    batch, streaming = (
        run_pipeline(self_registering([0, 1, 301, 1000]), mode, options=options) for mode in ("BATCH", "STREAMING")
    )
    assert sorted(batch.only()) == sorted(streaming.only())
    beyond = [t for t in batch.only() if t > 1000 and t % 2 == 1]
    assert len(beyond) == 1 + limit
    assert batch.metrics.counters == streaming.metrics.counters


class Later(KeyedProcessFunction):
    def process_element(self, value, ctx):
        ctx.timer_service().register_processing_time_timer(ctx.timer_service().current_processing_time() + 1000)

    def on_timer(self, timestamp, ctx):
        yield timestamp
        ctx.timer_service().register_processing_time_timer(timestamp + 1000)


def test_processing_time_timers_fire_as_the_clock_moves_and_once_more_at_the_end():
    harness = KeyedHarness(Later(), ManualClock(0))
    harness.element("a", 0)
    assert harness.processing_time(999) == []
    assert harness.processing_time(2500) == [1000, 2000]
    assert harness.end_of_input() == [3000]


def test_processing_time_timers_can_be_forbidden():
    from dagster_unified.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match=r"pipeline\.processing-time\.allow is FAIL"):
        KeyedHarness(Later(), options=KeyedOptions(processing_time="FAIL")).element("a", 0)


def test_side_outputs_are_emitted_by_yield_and_by_the_context():
    tag = OutputTag("side", str)

    class Both(KeyedProcessFunction):
        def process_element(self, value, ctx):
            yield tag, f"yielded {value}"
            ctx.output(tag, f"put {value}")
            yield value

    harness = KeyedHarness(Both())
    assert harness.element("a", 1) == [1]
    assert harness.side_outputs == {"side": ["yielded 1", "put 1"]}


def test_an_error_names_operator_record_and_the_users_line():
    class Bad(KeyedProcessFunction):
        def process_element(self, value, ctx):
            raise KeyError("gone")

    with pytest.raises(
        UserFunctionError, match=r"Bad: KeyError: 'gone', at .*test_keyed_process\.py:\d+ in process_element, on 1"
    ):
        KeyedHarness(Bad()).element("a", 1)


def test_one_name_for_two_kinds_of_state_is_an_error():
    class Twice(KeyedProcessFunction):
        def open(self, context):
            context.get_state(ValueStateDescriptor("s", int))
            context.get_list_state(ListStateDescriptor("s", int))

        def process_element(self, value, ctx):
            pass

    with pytest.raises(PipelineError, match="declared as value state of int and as list state of int"):
        KeyedHarness(Twice())


class OnlyInTimers(KeyedProcessFunction[str, tuple[str, int], str]):
    def process_element(self, value: tuple[str, int], ctx: KeyedProcessFunction.Context[str]) -> None:
        ctx.timer_service().register_event_time_timer(value[1])

    def on_timer(self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext[str]) -> list[str]:
        return [f"{ctx.get_current_key()} at {timestamp}"]


@pytest.mark.parametrize("mode", ["BATCH", "STREAMING"])
def test_a_function_that_emits_in_its_timers_only_may_say_that_process_element_returns_nothing(mode):
    pipeline = Pipeline("p")
    pipeline.from_collection([("a", 5)]).key_by(lambda row: row[0], key_type=str).process(OnlyInTimers()).print()
    assert run_pipeline(pipeline, mode).only() == ["a at 5"]
