"""The BATCH driver: sorted batches cut anywhere, several partitions, and what one of them leaves to the next."""

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import (
    CheckpointedFunction,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapFunction,
    Pipeline,
    ValueStateDescriptor,
)
from dagster_unified.errors import RecordTypeError, UserFunctionError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.execution_graph import keyed_program
from dagster_unified.operators.drivers import batch
from dagster_unified.operators.drivers.batch import GROUP, PAGE, STATE, run_batch, run_range
from dagster_unified.operators.drivers.key_groups import ControlEvent
from dagster_unified.operators.keyed import KeyedProcessOperator, ReduceOperator
from dagster_unified.operators.keys import KeyedInput
from dagster_unified.operators.layout import CARRIED, CARRIED_LAYOUT, PARTITION_INDEX, StreamLayout
from dagster_unified.operators.metrics import merge
from dagster_unified.operators.program.step import CarryOver, KeyedStep, Output, Program
from dagster_unified.operators.time import MIN_TIMESTAMP
from dagster_unified.records import record_type


class Row(NamedTuple):
    key: str | None
    value: int


class Count(KeyedProcessFunction):
    """Emits every record's number within its key, and the total when the key ends."""

    def open(self, context):
        self.count = context.get_state(ValueStateDescriptor("count", int))

    def process_element(self, value, ctx):
        self.count.update((self.count.value() or 0) + 1)
        ctx.timer_service().register_event_time_timer(0)
        yield f"{value.key}{self.count.value()}"

    def on_timer(self, timestamp, ctx):
        yield f"{ctx.get_current_key()}: {self.count.value()}"


ROWS = StreamLayout(record_type(Row))
TEXTS = StreamLayout(record_type(str))


def program(function, layout=ROWS, key="key"):
    return Program(
        "p",
        "s",
        layout,
        (KeyedStep("op", function, output=TEXTS.records, operator=KeyedProcessOperator),),
        (Output(0, TEXTS),),
        KeyedInput((key,), str),
    )


def emitted(program, batches):
    return [r for item in run_batch(program, batches) for r in TEXTS.records.from_batch(item.batch)]


def rows_of(*rows):
    return ROWS.records.to_batch(rows)


def test_a_key_goes_on_over_batches_and_ends_where_the_next_begins():
    batches = [
        rows_of(Row("a", 1)),
        rows_of(),
        rows_of(Row("a", 2)),
        rows_of(Row("a", 3), Row("b", 4)),
        rows_of(Row("c", 5)),
    ]
    assert emitted(program(Count()), batches) == ["a1", "a2", "a3", "a: 3", "b1", "b: 1", "c1", "c: 1"]


@given(st.lists(st.sampled_from("abc"), max_size=30).map(sorted), st.lists(st.integers(0, 30), max_size=5))
def test_where_batches_are_cut_makes_no_difference(keys, cuts):
    whole = rows_of(*[Row(k, 0) for k in keys])
    places = sorted({0, len(keys), *[c for c in cuts if c < len(keys)]})
    cut = [whole.slice(a, b - a) for a, b in pairwise(places)]
    assert emitted(program(Count()), cut) == emitted(program(Count()), [whole])


def test_no_input_gives_no_output():
    assert emitted(program(Count()), []) == []


def test_a_key_that_is_none_is_an_error_with_its_record():
    with pytest.raises(
        RecordTypeError,
        match=(
            r"p: stage 's', operator 'op': the key 'key' is None for \{'key': None, 'value': 2\}; filter such"
            r" records out"
        ),
    ):
        emitted(program(Count()), [rows_of(Row("a", 1), Row(None, 2))])


def test_a_long_key_leaves_in_pieces_while_it_is_read():
    read = []

    def batches():
        for n in range(50):
            read.append(n)
            yield rows_of(*[Row("a", n)] * 1000)

    running = iter(run_batch(program(Count()), batches()))
    next(running)
    assert len(read) <= 10
    running.close()


def test_a_failing_timer_names_its_time_and_key():
    class Bad(Count):
        def on_timer(self, timestamp, ctx):
            raise ValueError("late")

    with pytest.raises(
        UserFunctionError,
        match=r"operator 'op': ValueError: late, at .*test_batch_driver.py:\d+ in on_timer, on .timer at 0 of key 'a'.",
    ):
        emitted(program(Bad()), [rows_of(Row("a", 1))])


def test_keys_of_two_columns_are_tuples():
    class Keys(KeyedProcessFunction):
        def process_element(self, value, ctx):
            yield str(ctx.get_current_key())

    layout = StreamLayout(record_type(tuple[str, int]))
    two = Program(
        "p",
        "s",
        layout,
        (KeyedStep("op", Keys(), output=TEXTS.records, operator=KeyedProcessOperator),),
        (Output(0, TEXTS),),
        KeyedInput(("f0", "f1"), tuple[str, str]),
    )
    assert emitted(two, [layout.records.to_batch([("a", 1), ("a", 2), ("b", 2)])]) == [
        "('a', 1)",
        "('a', 2)",
        "('b', 2)",
    ]


class Remember(KeyedProcessFunction):
    """Counts, and tells the count when time passes ten times the value it saw last."""

    def open(self, context):
        self.count = context.get_state(ValueStateDescriptor("count", int))

    def process_element(self, value, ctx):
        self.count.update((self.count.value() or 0) + 1)
        ctx.timer_service().register_event_time_timer(10 * value.value)

    def on_timer(self, timestamp, ctx):
        yield f"{ctx.get_current_key()} {timestamp}: {self.count.value()}"


def carrying(step, event, begins):
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
    for output, chunk, _ in run_batch(carrying(step, event or ControlEvent(), begins), batches(rows, state, size)):
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
        run = run_batch(carrying(step, ControlEvent(), MIN_TIMESTAMP), batches(rows, [], 10))
        list(run)
        assert merge(run.metrics.values()).counters == {"opened": 1, "closed": 1}


def test_a_group_that_holds_nothing_begins_where_the_partition_before_it_ended():
    class Clock(KeyedProcessFunction):
        def process_element(self, value, ctx):
            yield str(ctx.timer_service().current_watermark())

    step = KeyedStep("op", Clock(), uid="op", output=TEXTS.records, operator=KeyedProcessOperator)
    assert partition(step, [Row("a", 1)], begins=15)[0] == ["15"]


PARTITIONS = 3


class Numbered(KeyedProcessFunction):
    """Counts, in state and outside of it, and tells both when time passes ten times a value."""

    def open(self, context):
        self.count = context.get_state(ValueStateDescriptor("count", int))
        self.context = context
        self.calls = 0

    def process_element(self, value, ctx):
        self.calls += 1
        self.context.count("elements")
        self.count.update((self.count.value() or 0) + 1)
        ctx.timer_service().register_event_time_timer(10 * value.value)
        yield Row(value.key, -self.calls)

    def on_timer(self, timestamp, ctx):
        yield Row(ctx.get_current_key(), timestamp * 100 + self.count.value())


def ranged(**attributes):
    step = KeyedStep("op", Numbered(), uid="op", output=ROWS.records, operator=KeyedProcessOperator)
    outputs = (Output(0, ROWS), *([Output(0, CARRIED_LAYOUT, CARRIED)] if attributes.get("carry") else []))
    return Program("p", "s", ROWS, (step,), outputs, KeyedInput(("key",), str), **attributes)


def in_batches(rows, schema, size):
    return pa.Table.from_pylist(rows, schema).to_batches(max_chunksize=size) if rows else []


def told(runs):
    """Records, state and metrics by partition, of runs and the index of the first partition of each."""
    found = {}
    for first, run in runs:
        for output, made, partition in run:
            records, state, _ = found.setdefault(first + partition, ([], [], []))
            if output == 1:
                state += CARRIED_LAYOUT.records.from_batch(made)
            else:
                records += ROWS.records.from_batch(made)
        for partition, metrics in run.metrics.items():
            found.setdefault(first + partition, ([], [], []))[2].append(metrics)
    return {
        partition: (sorted(records), sorted(state), metrics)
        for partition, (records, state, metrics) in found.items()
        if records or state
    }


given_rows = st.lists(
    st.tuples(st.integers(0, PARTITIONS - 1), st.builds(Row, st.sampled_from("abxy"), st.integers(1, 9))), max_size=30
)


@given(rows=given_rows, size=st.integers(1, 7))
def test_each_partition_is_as_if_it_were_alone(rows, size):
    plain = pa.schema([("key", pa.string()), ("value", pa.int64())])
    ordered = sorted(rows, key=lambda r: (r[0], r[1].key))
    together = in_batches(
        [{**r._asdict(), PARTITION_INDEX: part} for part, r in ordered],
        plain.append(pa.field(PARTITION_INDEX, pa.int32())),
        size,
    )
    alone = [
        (part, run_batch(ranged(), in_batches([r._asdict() for p, r in ordered if p == part], plain, size)))
        for part in range(PARTITIONS)
    ]
    assert told([(0, run_range(lambda: ranged(last_event_times=(None,) * PARTITIONS), together))]) == told(alone)


@given(
    rows=given_rows,
    size=st.integers(1, 7),
    marks=st.lists(st.integers(0, 60), min_size=PARTITIONS, max_size=PARTITIONS),
    ends=st.booleans(),
)
def test_carried_state_goes_on_from_partition_to_partition(rows, size, marks, ends):
    columns = [
        ("key", pa.string()),
        ("value", pa.int64()),
        (GROUP, pa.int32()),
        (PAGE, pa.int64()),
        (STATE, pa.binary()),
    ]
    events = [
        ControlEvent(watermarks={"op": mark}, end=ends and part == PARTITIONS - 1)
        for part, mark in enumerate(sorted(marks))
    ]
    begins = [MIN_TIMESTAMP, *sorted(marks)[:-1]]
    carry = tuple(CarryOver(begin, msgspec.json.encode(event)) for begin, event in zip(begins, events, strict=True))
    lines = [(int(r.key > "m"), part, None, r) for part, r in rows]

    def batches(some, beside):
        ordered = sorted(
            some, key=lambda line: (line[0], line[1], -1 if line[2] is not None else 0, line[3].key if line[3] else "")
        )
        shaped = [
            {
                "key": r and r.key,
                "value": r and r.value,
                GROUP: g,
                PAGE: s and s.page,
                STATE: s and s.state,
                **({PARTITION_INDEX: p} if beside else {}),
            }
            for g, p, s, r in ordered
        ]
        return in_batches(shaped, pa.schema([*columns, *([(PARTITION_INDEX, pa.int32())] if beside else [])]), size)

    expected, state = {}, []
    for part in range(PARTITIONS):
        before = [(s.group, part, s, None) for s in state]
        run = run_batch(
            ranged(carry=carry[part : part + 1]),
            batches([*before, *[line for line in lines if line[1] == part]], beside=False),
        )
        own = told([(part, run)])
        expected |= own
        state = own[part][1] if part in own else []
    whole = ranged(carry=carry, last_event_times=(None,) * PARTITIONS)
    found = told([(0, run_range(lambda: whole, batches(lines, beside=True)))])

    def calls(tables):
        return {
            part: ([r for r in records if r.value > 0], state, metrics)
            for part, (records, state, metrics) in tables.items()
        }

    assert calls(found) == calls(expected)


class Number(NamedTuple):
    value: int


class Seen(NamedTuple):
    subtask: int
    value: int
    before: int
    """How many records its subtask had seen."""


class Counted(MapFunction[Number, Seen], CheckpointedFunction):
    def initialize_state(self, context):
        self.state = context.get_operator_state_store().get_list_state(ListStateDescriptor("values", int))
        self.values = self.state.get()

    def open(self, runtime_context):
        self.subtask = runtime_context.get_index_of_this_subtask()

    def snapshot_state(self, context):
        self.state.update(self.values)

    def map(self, value: Number) -> Seen:
        self.values.append(value.value)
        return Seen(self.subtask, value.value, len(self.values) - 1)


def counting():
    pipeline = Pipeline("counted")
    pipeline.from_collection([], Number, "rows").map(Counted()).print()
    plan = pipeline.plan()
    (node,) = [node for node in plan.graph.nodes if isinstance(node, g.CheckpointedNode)]
    outputs = (Output(0, StreamLayout(node.records)), Output(0, CARRIED_LAYOUT, CARRIED))
    carry = (CarryOver(MIN_TIMESTAMP, msgspec.json.encode(ControlEvent())),)
    return replace(keyed_program(plan, node), outputs=outputs, carry=carry)


def day(rows, state=(), size=1000):
    """What a day's records of each subtask give, and the state that it leaves; `rows` are (subtask, value)."""
    shipped = counting()
    records = [{"value": value, GROUP: subtask, PAGE: None, STATE: None} for subtask, value in rows]
    pages = [{"value": None, GROUP: s.group, PAGE: s.page, STATE: s.state} for s in state]
    ordered = sorted(pages + records, key=lambda r: (r[GROUP], r[PAGE] is None))
    schema = pa.schema([("value", pa.int64()), (GROUP, pa.int32()), (PAGE, pa.int64()), (STATE, pa.binary())])
    emitted, left = [], []
    for output, chunk, _ in run_batch(shipped, pa.Table.from_pylist(ordered, schema).to_batches(max_chunksize=size)):
        layout = shipped.outputs[output].layout
        (left if output == 1 else emitted).extend(layout.records.from_batch(chunk))
    return emitted, left


def test_each_subtask_goes_on_with_its_own_state():
    emitted, state = day([(0, 1), (2, 5), (2, 6)])
    assert emitted == [Seen(0, 1, 0), Seen(2, 5, 0), Seen(2, 6, 1)]
    emitted, state = day([(1, 8), (2, 7)], state)
    assert emitted == [Seen(1, 8, 0), Seen(2, 7, 2)]
    emitted, _ = day([(0, 2)], state)
    assert emitted == [Seen(0, 2, 1)]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_subtask_with_many_records_takes_them_in_slices_and_keeps_its_count(monkeypatch, size):
    monkeypatch.setattr(batch, "MOST_WAITING", 4)
    emitted, state = day([(0, n) for n in range(11)] + [(1, n) for n in range(5)], size=size)
    assert emitted == [Seen(0, n, n) for n in range(11)] + [Seen(1, n, n) for n in range(5)]
    assert day([(1, 9)], state)[0] == [Seen(1, 9, 5)]
