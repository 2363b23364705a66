"""The BATCH driver: sorted batches of a keyed stream, cut anywhere."""

from itertools import pairwise
from typing import NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import KeyedProcessFunction, ValueStateDescriptor
from dagster_unified.errors import RecordTypeError, UserFunctionError
from dagster_unified.operators.drivers.batch import run_batch
from dagster_unified.operators.keyed import KeyedProcessOperator
from dagster_unified.operators.keys import KeyedInput
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.operators.program.step import KeyedStep, Output, Program
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


def batch(*rows):
    return ROWS.records.to_batch(rows)


def test_a_key_goes_on_over_batches_and_ends_where_the_next_begins():
    batches = [batch(Row("a", 1)), batch(), batch(Row("a", 2)), batch(Row("a", 3), Row("b", 4)), batch(Row("c", 5))]
    assert emitted(program(Count()), batches) == ["a1", "a2", "a3", "a: 3", "b1", "b: 1", "c1", "c: 1"]


@given(st.lists(st.sampled_from("abc"), max_size=30).map(sorted), st.lists(st.integers(0, 30), max_size=5))
def test_where_batches_are_cut_makes_no_difference(keys, cuts):
    whole = batch(*[Row(k, 0) for k in keys])
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
        emitted(program(Count()), [batch(Row("a", 1), Row(None, 2))])


def test_a_long_key_leaves_in_pieces_while_it_is_read():
    read = []

    def batches():
        for n in range(50):
            read.append(n)
            yield batch(*[Row("a", n)] * 1000)

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
        emitted(program(Bad()), [batch(Row("a", 1))])


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
    rows = layout.records.to_batch([("a", 1), ("a", 2), ("b", 2)])
    assert emitted(two, [pa.RecordBatch.from_arrays(rows.columns, schema=layout.schema)]) == [
        "('a', 1)",
        "('a', 2)",
        "('b', 2)",
    ]
