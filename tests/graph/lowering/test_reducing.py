"""Reduce functions that are combined by field: of which this is known, and that it is what the functions give."""

from itertools import pairwise
from typing import NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.errors import RecordTypeError, UserFunctionError
from dagster_unified.graph.lowering.reducing import ways_of, ways_of_builtin
from dagster_unified.graph.lowering.source import UnreadableError
from dagster_unified.operators.drivers.batch import run_batch
from dagster_unified.operators.keyed import ReduceOperator
from dagster_unified.operators.keys import KeyedInput
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.operators.operator import KeyedOptions
from dagster_unified.operators.program.step import KeyedStep, Output, Program
from dagster_unified.records import record_type


class Sale(NamedTuple):
    shop: str
    amount: int
    least: int
    name: str
    at: int | None
    rate: float


def combined(a: Sale, b: Sale) -> Sale:
    return Sale(a.shop, a.amount + b.amount, min(a.least, b.least), max(a.name, b.name), b.at, a.rate)


SALES = record_type(Sale)
LAYOUT = StreamLayout(SALES, timestamped=True)


@pytest.mark.parametrize(
    ("function", "ways"),
    [
        (combined, ("first", "sum", "min", "max", "last", "first")),
        (lambda a, b: b, ("last",) * 6),
        (lambda a, b: a._replace(amount=b.amount + a.amount), ("first", "sum", "first", "first", "first", "first")),
    ],
)
def test_functions_that_combine_each_field_with_itself(function, ways):
    assert ways_of(function, SALES) == ways


def test_tuples_and_plain_values_are_combined_too():
    assert ways_of(lambda a, b: (a[0], a[1] + b[1]), record_type(tuple[str, int])) == ("first", "sum")
    assert ways_of(lambda a, b: a + b, record_type(int)) == ("sum",)
    assert ways_of(lambda a, b: max(a, b), record_type(str)) == ("max",)


def test_the_librarys_own_combinations():
    assert ways_of_builtin("sum", "amount", SALES) == ("first", "sum", "first", "first", "first", "first")
    assert ways_of_builtin("max", 1, record_type(tuple[str, str])) == ("first", "max")
    assert ways_of_builtin("min", None, record_type(int)) == ("min",)
    for kind, field in (("sum", "rate"), ("min", "at"), ("min_by", "amount")):
        with pytest.raises(UnreadableError, match="depends on"):
            ways_of_builtin(kind, field, SALES)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: a._replace(rate=a.rate + b.rate),
        lambda a, b: a._replace(rate=max(a.rate, b.rate)),
        lambda a, b: a._replace(amount=a.amount + b.least),
        lambda a, b: a._replace(amount=a.amount - b.amount),
        lambda a, b: a._replace(amount=a.amount + b.amount + 1),
        lambda a, b: a._replace(name=a.name + b.name),
        lambda a, b: a._replace(at=min(a.at, b.at)),
        lambda a, b: a if a.amount > b.amount else b,
        lambda a, b: Sale(b.name, a.amount, a.least, a.shop, a.at, a.rate),
    ],
)
def test_what_depends_on_order_on_cuts_or_on_another_field_is_left_to_the_function(function):
    with pytest.raises(UnreadableError):
        ways_of(function, SALES)


def test_a_function_that_computes_more_than_the_fields_is_called():
    def fails(a: Sale, b: Sale) -> Sale:
        _ = a.amount // b.amount
        return a

    with pytest.raises(UnreadableError, match="computes more"):
        ways_of(fails, SALES)


def reduced(batches, ways):
    step = KeyedStep("op", combined, input=SALES, output=SALES, operator=ReduceOperator, arguments={"by_field": ways})
    options = KeyedOptions(incremental_updates=False)
    program = Program("p", "s", LAYOUT, (step,), (Output(0, LAYOUT),), KeyedInput(("shop",), str), options)
    try:
        return [row for item in run_batch(program, batches) for row in item.batch.to_pylist()]
    except (RecordTypeError, UserFunctionError) as error:
        return str(error)


NUMBERS = st.one_of(st.integers(-5, 5), st.sampled_from([2**61, 2**62, 2**63 - 1, -(2**63), -(2**62)]))
ROWS = st.lists(
    st.tuples(
        st.builds(
            Sale, st.sampled_from("abc"), NUMBERS, NUMBERS, st.text(max_size=2), st.none() | NUMBERS, st.floats()
        ),
        st.none() | st.integers(0, 9),
    ),
    max_size=30,
)


@given(ROWS, st.lists(st.integers(0, 30), max_size=4))
def test_runs_are_combined_as_the_function_combines_them_wherever_batches_are_cut(rows, cuts):
    """Also where a sum needs more than 64 bits, at the end or on the way."""
    rows = sorted(rows, key=lambda row: row[0].shop)
    bounds = sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))})
    batches = []
    for start, end in pairwise(bounds):
        records, times = [row for row, _ in rows[start:end]], [time for _, time in rows[start:end]]
        columns = [*SALES.to_batch(records).columns, pa.array(times, pa.int64())]
        batches.append(pa.RecordBatch.from_arrays(columns, schema=LAYOUT.schema))
    by_field, called = reduced(batches, ways_of(combined, SALES)), reduced(batches, None)
    assert repr(by_field) == repr(called)
