"""The STREAMING driver over a store in memory: what tests of operators with state run."""

from collections import defaultdict
from datetime import timedelta
from typing import NamedTuple

import pyarrow as pa
from hypothesis import strategies as st

from dagster_unified.api import (
    AggregateFunction,
    EventTimeSessionWindows,
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
)
from dagster_unified.operators.drivers.key_groups import ControlEvent, GroupInput, KeyGroups, MicroBatch
from dagster_unified.operators.keyed import KeyedProcessOperator
from dagster_unified.operators.keys import KeyedInput, key_hash
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.operators.operator import INDEX, KeyedOptions
from dagster_unified.operators.program.step import KeyedStep, Output, Program
from dagster_unified.operators.state.pages import KEYS_PER_PAGE
from dagster_unified.records import record_type
from tests.support import Event


def ms(n):
    return timedelta(milliseconds=n)


ASSIGNERS = st.one_of(
    st.builds(
        lambda size, offset: TumblingEventTimeWindows.of(ms(size), ms(offset % size)),
        st.integers(1, 50),
        st.integers(-49, 49),
    ),
    st.builds(
        lambda slide, more, offset: SlidingEventTimeWindows.of(ms(slide + more), ms(slide), ms(offset % slide)),
        st.integers(1, 20), st.integers(0, 50), st.integers(0, 19),
    ),
    st.builds(lambda gap: EventTimeSessionWindows.with_gap(ms(gap)), st.integers(1, 30)),
)  # fmt: skip
EVENTS = st.lists(
    st.builds(Event, st.sampled_from("ab"), st.integers(-100, 200), st.integers(-5, 5)), min_size=1, max_size=15
)


class Row(NamedTuple):
    key: str
    at: int
    amount: int


ROWS = StreamLayout(record_type(Row, "rows"), timestamped=True)


TEXTS = StreamLayout(record_type(str, "texts"))


class Memory:
    """A group store in memory that notes which pages are read and written."""

    def __init__(self):
        self.index = None
        self.pages = {}
        self.read = []
        self.written = []

    def read_page(self, number):
        if number == INDEX:
            return self.index
        self.read.append(number)
        return self.pages.get(number)

    def write_page(self, number, data):
        if number == INDEX:
            self.index = data
            return
        self.written.append(number)
        self.pages[number] = data

    def remove_page(self, number):
        del self.pages[number]


def program(step, updates=True):
    return Program(
        "p",
        "s",
        ROWS,
        (step,),
        (Output(0, TEXTS if step.output is TEXTS.records else ROWS),),
        KeyedInput(("key",), str),
        KeyedOptions(incremental_updates=updates),
    )


def process(function):
    return KeyedStep("op", function, uid="op", output=TEXTS.records, operator=KeyedProcessOperator)


def batch(rows):
    return pa.RecordBatch.from_arrays(
        [*ROWS.records.to_batch(rows).columns, pa.array([r.at for r in rows], pa.int64())], schema=ROWS.schema
    )


def ran(step, batches, groups=3, updates=True, stores=None, keys_per_page=KEYS_PER_PAGE):
    """Runs micro-batches of (rows, watermark or None), each in a new driver, as after a restart.

    The input ends where `stores` is not given.
    """
    out = []
    given = stores if stores is not None else defaultdict(Memory)
    events = [(rows, ControlEvent(watermarks={"op": mark} if mark is not None else {})) for rows, mark in batches]
    if stores is None:
        events.append(([], ControlEvent(end=True)))
    for rows, event in events:
        records = (TEXTS if step.output is TEXTS.records else ROWS).records
        driver = KeyGroups(
            program(step, updates),
            lambda number, b: out.extend(records.from_batch(b)),
            lambda: 0,
            keys_per_page=keys_per_page,
        )
        by_group = defaultdict(list)
        for row in rows:
            by_group[key_hash(row.key) % groups].append(row)
        for group in range(groups):
            arrived = GroupInput([batch(by_group[group])] if group in by_group else [])
            driver.run(given[group], MicroBatch(arrived, event))
        driver.close()
    return out


class Sum(AggregateFunction):
    """Adds up amounts."""

    def create_accumulator(self) -> int:
        return 0

    def add(self, value, accumulator):
        return accumulator + value.amount

    def get_result(self, accumulator) -> int:
        return accumulator

    def merge(self, a, b):
        return a + b
