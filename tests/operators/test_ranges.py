"""Several partitions through one program, however their rows are cut into batches."""

from typing import NamedTuple

import msgspec
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import KeyedProcessFunction, ValueStateDescriptor
from dagster_unified.operators.drivers.batch import GROUP, PAGE, STATE, run_batch, run_range
from dagster_unified.operators.drivers.key_groups import ControlEvent
from dagster_unified.operators.keyed import KeyedProcessOperator
from dagster_unified.operators.keys import KeyedInput
from dagster_unified.operators.layout import CARRIED, CARRIED_LAYOUT, PARTITION_INDEX, StreamLayout
from dagster_unified.operators.program.step import CarryOver, KeyedStep, Output, Program
from dagster_unified.operators.time import MIN_TIMESTAMP
from dagster_unified.records import record_type


class Row(NamedTuple):
    key: str
    value: int


ROWS = StreamLayout(record_type(Row))
PARTITIONS = 3


class Remember(KeyedProcessFunction):
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


def program(**attributes):
    step = KeyedStep("op", Remember(), uid="op", output=ROWS.records, operator=KeyedProcessOperator)
    outputs = (Output(0, ROWS), *([Output(0, CARRIED_LAYOUT, CARRIED)] if attributes.get("carry") else []))
    return Program("p", "s", ROWS, (step,), outputs, KeyedInput(("key",), str), **attributes)


def cut(rows, schema, size):
    return pa.Table.from_pylist(rows, schema).to_batches(max_chunksize=size) if rows else []


def told(runs):
    """Records, state and metrics by partition, of runs and the index of the first partition of each."""
    found = {}
    for first, run in runs:
        for output, batch, partition in run:
            records, state, _ = found.setdefault(first + partition, ([], [], []))
            if output == 1:
                state += CARRIED_LAYOUT.records.from_batch(batch)
            else:
                records += ROWS.records.from_batch(batch)
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
    together = cut(
        [{**r._asdict(), PARTITION_INDEX: part} for part, r in ordered],
        plain.append(pa.field(PARTITION_INDEX, pa.int32())),
        size,
    )
    alone = [
        (part, run_batch(program(), cut([r._asdict() for p, r in ordered if p == part], plain, size)))
        for part in range(PARTITIONS)
    ]
    assert told([(0, run_range(lambda: program(last_event_times=(None,) * PARTITIONS), together))]) == told(alone)


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
        return cut(shaped, pa.schema([*columns, *([(PARTITION_INDEX, pa.int32())] if beside else [])]), size)

    expected, state = {}, []
    for part in range(PARTITIONS):
        before = [(s.group, part, s, None) for s in state]
        run = run_batch(
            program(carry=carry[part : part + 1]),
            batches([*before, *[line for line in lines if line[1] == part]], beside=False),
        )
        own = told([(part, run)])
        expected |= own
        state = own[part][1] if part in own else []
    ranged = program(carry=carry, last_event_times=(None,) * PARTITIONS)
    found = told([(0, run_range(lambda: ranged, batches(lines, beside=True)))])

    def calls(tables):
        return {
            part: ([r for r in records if r.value > 0], state, metrics)
            for part, (records, state, metrics) in tables.items()
        }

    assert calls(found) == calls(expected)
