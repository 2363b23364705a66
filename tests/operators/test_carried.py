"""The carrying driver: what a partition leaves is what the next begins with, however its rows are cut."""

from typing import NamedTuple

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import KeyedProcessFunction, ValueStateDescriptor
from dagster_unified.operators.drivers import batch
from dagster_unified.operators.drivers.batch import GROUP, PAGE, STATE, run_batch
from dagster_unified.operators.drivers.key_groups import ControlEvent
from dagster_unified.operators.keyed import KeyedProcessOperator, ReduceOperator
from dagster_unified.operators.keys import KeyedInput
from dagster_unified.operators.layout import CARRIED, CARRIED_LAYOUT, StreamLayout
from dagster_unified.operators.metrics import merge
from dagster_unified.operators.program.step import CarryOver, KeyedStep, Output, Program
from dagster_unified.operators.time import MIN_TIMESTAMP
from dagster_unified.records import record_type


class Row(NamedTuple):
    key: str
    value: int


ROWS = StreamLayout(record_type(Row))
TEXTS = StreamLayout(record_type(str))


class Remember(KeyedProcessFunction):
    """Counts, and tells the count when time passes ten times the value it saw last."""

    def open(self, context):
        self.count = context.get_state(ValueStateDescriptor("count", int))

    def process_element(self, value, ctx):
        self.count.update((self.count.value() or 0) + 1)
        ctx.timer_service().register_event_time_timer(10 * value.value)

    def on_timer(self, timestamp, ctx):
        yield f"{ctx.get_current_key()} {timestamp}: {self.count.value()}"


def program(step, event, begins):
    outputs = (Output(0, TEXTS if step.operator is KeyedProcessOperator else ROWS), Output(0, CARRIED_LAYOUT, CARRIED))
    return Program(
        "p",
        "s",
        ROWS,
        (step,),
        outputs,
        KeyedInput(("key",), str),
        carry=(CarryOver(begins, msgspec.json.encode(event)),),
    )


REMEMBER = KeyedStep("op", Remember(), uid="op", output=TEXTS.records, operator=KeyedProcessOperator)
ADD = KeyedStep(
    "op", lambda a, b: Row(a.key, a.value + b.value), uid="op", output=ROWS.records, operator=ReduceOperator
)


def batches(rows, state, size):
    """Two groups, keys up to `m` and the others; first a group's state, then its records by key."""
    group = lambda key: int(key > "m")  # noqa: E731
    records = [{"key": r.key, "value": r.value, GROUP: group(r.key), PAGE: None, STATE: None} for r in rows]
    pages = [{"key": None, "value": None, GROUP: s.group, PAGE: s.page, STATE: s.state} for s in state]
    ordered = sorted(pages + records, key=lambda r: (r[GROUP], r[PAGE] is None, r["key"] or ""))
    schema = pa.schema(
        [("key", pa.string()), ("value", pa.int64()), (GROUP, pa.int32()), (PAGE, pa.int64()), (STATE, pa.binary())]
    )
    return pa.Table.from_pylist(ordered, schema).to_batches(max_chunksize=size) if ordered else []


def partition(step, rows, state=(), event=None, size=1000, begins=MIN_TIMESTAMP):
    """What a partition emits, and the state that it leaves."""
    emitted, left = [], []
    own = TEXTS if step.operator is KeyedProcessOperator else ROWS
    for output, chunk, _ in run_batch(program(step, event or ControlEvent(), begins), batches(rows, state, size)):
        if output == 1:
            left += CARRIED_LAYOUT.records.from_batch(chunk)
        else:
            emitted += own.records.from_batch(chunk)
    return emitted, left


def test_state_and_timers_go_on_to_the_next_partition_also_of_keys_that_it_does_not_have():
    emitted, state = partition(
        REMEMBER, [Row("a", 1), Row("a", 2), Row("z", 3)], event=ControlEvent(watermarks={"op": 15})
    )
    assert emitted == ["a 10: 2"]
    emitted, state = partition(REMEMBER, [Row("a", 9)], state, ControlEvent(watermarks={"op": 35}))
    assert emitted == ["a 20: 3", "z 30: 1"]
    assert partition(REMEMBER, [], state, ControlEvent(watermarks={"op": 35}, end=True))[0] == ["a 90: 3"]


def test_groups_that_hold_nothing_leave_nothing():
    class Nothing(KeyedProcessFunction):
        def process_element(self, value, ctx):
            yield value.key

    step = KeyedStep("op", Nothing(), uid="op", output=TEXTS.records, operator=KeyedProcessOperator)
    assert partition(step, [Row("a", 1), Row("z", 3)]) == (["a", "z"], [])


@pytest.mark.parametrize("step", [REMEMBER, ADD])
@given(
    st.lists(st.lists(st.builds(Row, st.sampled_from("abyz"), st.integers(0, 9)), max_size=30), min_size=2, max_size=3),
    st.integers(1, 40),
    st.integers(2, 12),
)
def test_partitions_give_the_same_however_their_rows_are_cut(step, partitions, size, waiting):
    def run(size):
        found, state = [], []
        for number, rows in enumerate(partitions):
            emitted, state = partition(
                step, rows, state, ControlEvent(watermarks={"op": 40 * number}, end=number == len(partitions) - 1), size
            )
            found.append(sorted(emitted))
        return found

    whole = run(1000)
    held, batch.MOST_WAITING = batch.MOST_WAITING, waiting
    try:
        assert run(size) == whole
    finally:
        batch.MOST_WAITING = held


def test_what_is_counted_as_functions_open_and_close_is_reported():
    class Opened(KeyedProcessFunction):
        def open(self, context):
            self.context = context
            context.count("opened")

        def process_element(self, value, ctx):
            yield value.key

        def close(self):
            self.context.count("closed")

    step = KeyedStep("op", Opened(), uid="op", output=TEXTS.records, operator=KeyedProcessOperator)
    for rows in ([Row("a", 1)], []):
        run = run_batch(program(step, ControlEvent(), MIN_TIMESTAMP), batches(rows, [], 10))
        list(run)
        assert merge(run.metrics.values()).counters == {"opened": 1, "closed": 1}


def test_a_group_that_holds_nothing_begins_where_the_partition_before_it_ended():
    class Clock(KeyedProcessFunction):
        def process_element(self, value, ctx):
            yield str(ctx.timer_service().current_watermark())

    step = KeyedStep("op", Clock(), uid="op", output=TEXTS.records, operator=KeyedProcessOperator)
    assert partition(step, [Row("a", 1)], begins=15)[0] == ["15"]
