"""Functions that combine records, folded by field: what is known of each, and that it is what the functions give."""

from datetime import timedelta
from itertools import pairwise
from typing import NamedTuple
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_unified.api import (
    AggregateFunction,
    EventTimeSessionWindows,
    Pipeline,
    ReduceFunction,
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
    WatermarkStrategy,
)
from dagster_unified.errors import UnifiedError
from dagster_unified.graph.lowering.reducing import aggregated, built_in, reduced
from dagster_unified.graph.lowering.source import UnreadableError
from dagster_unified.operators import keyed
from dagster_unified.operators.drivers.batch import run_batch
from dagster_unified.operators.keyed import ReduceOperator
from dagster_unified.operators.keys import KeyedInput
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.operators.operator import KeyedOptions
from dagster_unified.operators.program.step import KeyedStep, Output, Program
from dagster_unified.records import record_type
from dagster_unified.testing import run_pipeline
from tests.depth import examples
from tests.support import MODES


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
        (lambda a, b: a._replace(rate=a.rate + b.rate), (*["first"] * 5, "computed")),
        (lambda a, b: b._replace(shop=a.shop, least=a.amount), ("first", "last", "computed", "last", "last", "last")),
    ],
)
def test_functions_that_are_known_by_field(function, ways):
    assert reduced(function, SALES).ways == ways


def test_tuples_and_plain_values_are_combined_too():
    assert reduced(lambda a, b: (a[0], a[1] + b[1]), record_type(tuple[str, int])).ways == ("first", "sum")
    assert reduced(lambda a, b: a + b, record_type(int)).ways == ("sum",)
    assert reduced(lambda a, b: max(a, b), record_type(str)).ways == ("max",)


def test_the_librarys_own_combinations():
    assert built_in("sum", "amount", SALES).ways == ("first", "sum", "first", "first", "first", "first")
    assert built_in("max", 1, record_type(tuple[str, str])).ways == ("first", "max")
    assert built_in("min", None, record_type(int)).ways == ("min",)
    for kind, field in (("sum", "rate"), ("min", "at"), ("min_by", "amount")):
        with pytest.raises(UnreadableError, match="depends on"):
            built_in(kind, field, SALES)


class Latest(ReduceFunction[Sale]):
    """Uses nothing of its own."""

    def reduce(self, a: Sale, b: Sale) -> Sale:
        return a if a.amount > b.amount else b


class Weighed(ReduceFunction[Sale]):
    def __init__(self) -> None:
        self.weight = 2

    def reduce(self, a: Sale, b: Sale) -> Sale:
        return a._replace(amount=a.amount + self.weight * b.amount)


class Mean(AggregateFunction[Sale, tuple[float, int, int], float]):
    def create_accumulator(self) -> tuple[float, int, int]:
        return 0.0, 0, 0

    def add(self, value: Sale, accumulator: tuple[float, int, int]) -> tuple[float, int, int]:
        return accumulator[0] + value.rate, accumulator[1] + 1, value.amount

    def get_result(self, accumulator: tuple[float, int, int]) -> float:
        return accumulator[0] / accumulator[1] + accumulator[2]

    def merge(self, a: tuple[float, int, int], b: tuple[float, int, int]) -> tuple[float, int, int]:
        return a[0] + b[0], a[1] + b[1], b[2]


class Listed(Mean):
    def add(self, value: Sale, accumulator: tuple[float, int, int]) -> tuple[float, int, int]:
        print(value)
        return accumulator


def test_methods_are_read_that_use_nothing_of_their_object():
    assert reduced(Latest(), SALES).ways == ("computed",) * 6
    assert aggregated(Mean(), tuple[float, int, int], SALES).ways == ("computed", "computed", "last")
    for read in (
        lambda: reduced(Weighed(), SALES),
        lambda: aggregated(Listed(), tuple[float, int, int], SALES),
        lambda: aggregated(Mean(), list[int], SALES),
    ):
        with pytest.raises(UnreadableError):
            read()
    patched = Mean()
    patched.add = lambda value, accumulator: accumulator
    with pytest.raises(UnreadableError, match="not known what its add is"):
        aggregated(patched, tuple[float, int, int], SALES)


def divides(a: Sale, b: Sale) -> Sale:
    """Raises where a name is empty, though no field depends on that."""
    _ = 1 // len(b.name)
    return a._replace(amount=a.amount + b.amount)


def weighs(a: Sale, b: Sale) -> Sale:
    total = a.rate * 2 + b.rate
    if b.at is None:
        return a._replace(rate=total, least=b.amount)
    return Sale(b.shop, a.amount * 3 - b.least, a.least, a.name + b.name, b.at, total)


FUNCTIONS = (
    combined,
    divides,
    weighs,
    Latest(),
    lambda a, b: a,
    lambda a, b: b,
    lambda a, b: a._replace(amount=b.least),
    lambda a, b: b._replace(amount=a.least, least=a.amount),
)


def in_batch(batches, function, fold):
    step = KeyedStep("op", function, input=SALES, output=SALES, operator=ReduceOperator, arguments={"fold": fold})
    options = KeyedOptions(incremental_updates=False)
    program = Program("p", "s", LAYOUT, (step,), (Output(0, LAYOUT),), KeyedInput(("shop",), str), options)
    try:
        return [row for item in run_batch(program, batches) for row in item.batch.to_pylist()]
    except UnifiedError as error:
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


@pytest.mark.parametrize("function", FUNCTIONS)
@given(ROWS, st.lists(st.integers(0, 30), max_size=4))
def test_runs_are_folded_as_the_function_does_wherever_batches_are_cut(function, rows, cuts):
    """Also where a number needs more than 64 bits, at the end or on the way."""
    rows = sorted(rows, key=lambda row: row[0].shop)
    bounds = sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))})
    batches = []
    for start, end in pairwise(bounds):
        records, times = [row for row, _ in rows[start:end]], [time for _, time in rows[start:end]]
        columns = [*SALES.to_batch(records).columns, pa.array(times, pa.int64())]
        batches.append(pa.RecordBatch.from_arrays(columns, schema=LAYOUT.schema))
    fold = reduced(function, SALES)
    assert repr(in_batch(batches, function, fold)) == repr(in_batch(batches, function, None))


OFF = {"execution.lowering": "OFF"}


def outcome(build, rows, mode, options=None, **how):
    pipeline = Pipeline("p")
    build(pipeline.from_collection(rows, Sale)).print()
    try:
        return run_pipeline(pipeline, mode, options=options, **how).only()
    except UnifiedError as error:
        return str(error)


@MODES
@pytest.mark.parametrize("function", FUNCTIONS)
@settings(max_examples=examples(15))
@given(ROWS, st.sampled_from([1, 4, None]))
def test_each_update_is_that_of_the_function(mode, function, rows, micro_batch):
    """Over several micro-batches, whose state goes on; in columns also where there are few records."""
    options = {"execution.incremental-updates": True}
    rows = [row for row, _ in rows]

    def build(stream):
        return stream.key_by("shop").reduce(function)

    how = {"seed": 7, "micro_batch": micro_batch}
    with mock.patch.object(keyed, "WORTH_COLUMNS", 2):
        found = outcome(build, rows, mode, options, **how)
    assert repr(found) == repr(outcome(build, rows, mode, {**options, **OFF}, **how))


TIMED = st.lists(
    st.builds(Sale, st.sampled_from("ab"), NUMBERS, NUMBERS, st.text(max_size=2), st.integers(0, 60), st.floats()),
    min_size=1,
    max_size=25,
)
WINDOWS = (
    TumblingEventTimeWindows.of(timedelta(milliseconds=10)),
    SlidingEventTimeWindows.of(timedelta(milliseconds=20), timedelta(milliseconds=10)),
    EventTimeSessionWindows.with_gap(timedelta(milliseconds=5)),
)


@MODES
@pytest.mark.parametrize("function", [*FUNCTIONS, Mean(), "sum"])
@settings(max_examples=examples(15))
@given(TIMED, st.sampled_from(WINDOWS), st.integers(0, 5), st.sampled_from([1, 4, None]))
def test_windows_are_those_of_the_function(mode, function, rows, assigner, lateness, micro_batch):
    """Also of records that are late, and of windows that fire once more."""

    def build(stream):
        strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
        windows = stream.assign_timestamps_and_watermarks(strategy).key_by("shop").window(assigner)
        windows = windows.allowed_lateness(timedelta(milliseconds=lateness))
        if function == "sum":
            return windows.sum("amount")
        return windows.aggregate(function) if isinstance(function, Mean) else windows.reduce(function)

    how = {"seed": 7, "micro_batch": micro_batch, "watermark_interval": micro_batch}
    assert repr(outcome(build, rows, mode, **how)) == repr(outcome(build, rows, mode, OFF, **how))
