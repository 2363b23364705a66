"""Partial aggregates in Arrow, merged by key: what one aggregate over all records gives, in both modes."""

import math
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_unified.api import (
    EventTimeSessionWindows,
    KeyedProcessFunction,
    Pipeline,
    TumblingEventTimeWindows,
    WatermarkStrategy,
)
from dagster_unified.api import functions as F
from dagster_unified.errors import RecordTypeError
from dagster_unified.operators import partials
from dagster_unified.operators.drivers.batch import run_batch
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.operators.partials import MergePartials, Partial, PartialsStep
from dagster_unified.operators.program.step import Output, Program
from dagster_unified.records import record_type
from dagster_unified.testing import run_pipeline
from tests.depth import examples
from tests.operators.support import ASSIGNERS, EVENTS, ms
from tests.support import MODES, Event, results

LOCAL_GLOBAL = {"state.native-aggregates": "PORTABLE"}


class Reading(NamedTuple):
    sensor: str
    number: int | None
    share: float | None
    price: Decimal | None
    at: datetime | None
    label: str | None
    good: bool | None


class Summary(NamedTuple):
    sensor: str
    records: int
    numbers: int
    total: int | None
    mean: float | None
    least: int | None
    share: float | None
    price: Decimal | None
    first: datetime | None
    label: str | None
    good: bool | None


COLUMNS = [
    F.count("*").alias("records"),
    F.count("number").alias("numbers"),
    F.sum("number").alias("total"),
    F.avg("number").alias("mean"),
    F.min("number").alias("least"),
    F.max("share").alias("share"),
    F.sum("price").alias("price"),
    F.min("at").alias("first"),
    F.max("label").alias("label"),
    F.bool_and("good").alias("good"),
]


def most(values, merge):
    known = [value for value in values if value is not None]
    return merge(known) if known else None


def largest(values):
    return math.nan if any(map(math.isnan, values)) else max(values)


def expected(readings):
    by_sensor = defaultdict(list)
    for reading in readings:
        by_sensor[reading.sensor].append(reading)
    for sensor, own in by_sensor.items():
        numbers = [r.number for r in own if r.number is not None]
        yield Summary(
            sensor,
            len(own),
            len(numbers),
            most(numbers, sum),
            sum(numbers) / len(numbers) if numbers else None,
            most(numbers, min),
            most([r.share for r in own], largest),
            most([r.price for r in own], sum),
            most([r.at for r in own], min),
            most([r.label for r in own], max),
            most([r.good for r in own], all),
        )


READINGS = st.lists(
    st.builds(
        Reading,
        st.sampled_from("abc"),
        st.none() | st.integers(-(10**6), 10**6),
        st.none() | st.floats(allow_infinity=False, width=32),
        st.none() | st.decimals(-(10**6), 10**6, places=2),
        st.none() | st.datetimes(datetime(1960, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)),
        st.none() | st.text("aäZ€😀", max_size=3),
        st.none() | st.booleans(),
    ),
    max_size=12,
)


def comparable(summaries):
    """With NaN as text, which equals itself; of 0.0 and -0.0 either is the largest."""

    def text(share):
        return None if share is None else str(share + 0.0)

    return {sensor: one._replace(share=text(one.share)) for sensor, one in summaries.items()}


def last_of_each(records):
    return {record.sensor: record for record in records}


@settings(max_examples=examples(20))
@given(READINGS, st.sampled_from([("BATCH", {}), ("STREAMING", LOCAL_GLOBAL)]), st.sampled_from([1, 3, None]))
def test_partials_merge_to_the_aggregate_over_all_records(readings, mode, size):
    made = Pipeline("p").from_collection(readings, Reading).key_by("sensor").agg(*COLUMNS, output_type=Summary)
    found = last_of_each(results(made, mode[0], options=mode[1], micro_batch=size))
    assert comparable(found) == comparable(last_of_each(expected(readings)))


def test_streaming_gives_one_update_for_a_key_and_micro_batch():
    class Total(NamedTuple):
        f0: str
        total: int

    pipeline = Pipeline("p")
    records = pipeline.from_collection([("a", 1), ("a", 2), ("b", 5), ("a", 4)], tuple[str, int])
    records.key_by("f0").agg(F.sum("f1").alias("total"), output_type=Total).print()
    found = run_pipeline(pipeline, "STREAMING", options=LOCAL_GLOBAL, micro_batch=3, seed=None).only()
    assert found == [Total("a", 3), Total("b", 5), Total("a", 7)]


def test_a_task_that_has_too_many_records_to_aggregate_at_once_emits_as_few(monkeypatch):
    monkeypatch.setattr(partials, "AT_ONCE", 8)
    monkeypatch.setattr(partials, "EMITTED", 2)
    pipeline = Pipeline("p")
    records = [(f"{n % 3}", n) for n in range(100)] + [(f"x{n}", n) for n in range(30)]
    pipeline.from_collection(records, tuple[str, int]).key_by("f0").agg(
        F.sum("f1").alias("f1"), output_type=tuple[str, int]
    ).print()
    found = dict(run_pipeline(pipeline, "STREAMING", options=LOCAL_GLOBAL, micro_batch=None).only())
    assert found == {str(k): sum(range(k, 100, 3)) for k in range(3)} | {f"x{n}": n for n in range(30)}


@pytest.mark.parametrize("numbers", [[2**62, 2**62], [-(2**62), -(2**62), -1]])
def test_a_sum_that_no_column_holds_is_an_error_in_one_batch_and_over_several(numbers):
    pipeline = Pipeline("p")
    records = pipeline.from_collection([("a", n) for n in numbers], tuple[str, int])
    records.key_by("f0").agg(F.sum("f1").alias("f1"), output_type=tuple[str, int]).print()
    with pytest.raises(RecordTypeError, match=r"sum\(f1\) is larger than its type holds"):
        run_pipeline(pipeline, "STREAMING", options=LOCAL_GLOBAL, micro_batch=None)
    with pytest.raises(RecordTypeError, match=r"operator 'agg': sum\(f1\) is larger than its type holds"):
        run_pipeline(pipeline, "STREAMING", options=LOCAL_GLOBAL, micro_batch=1)


def test_a_large_sum_that_a_column_holds_is_exact():
    pipeline = Pipeline("p")
    records = pipeline.from_collection([("a", 2**62), ("a", 2**62 - 1), ("b", 5)], tuple[str, int])
    records.key_by("f0").agg(F.sum("f1").alias("f1"), output_type=tuple[str, int]).print()
    found = run_pipeline(pipeline, "STREAMING", options=LOCAL_GLOBAL, micro_batch=None).only()
    assert dict(found) == {"a": 2**63 - 1, "b": 5}


def test_a_key_that_is_none_is_an_error():
    class Loose(NamedTuple):
        shop: str | None
        amount: int

    made = (
        Pipeline("p")
        .from_collection([Loose(None, 1)], Loose)
        .key_by("shop")
        .agg(F.sum("amount").alias("amount"), output_type=Loose)
    )
    with pytest.raises(RecordTypeError, match="the key 'shop' is None"):
        results(made, "STREAMING", options=LOCAL_GLOBAL)


def test_spans_of_time_are_added_and_compared():
    class Task(NamedTuple):
        name: str
        lasts: timedelta | None

    class Whole(NamedTuple):
        name: str
        sum_lasts: timedelta | None
        max_lasts: timedelta | None

    wanted = tuple(Partial(f"{kind}_lasts", kind, "lasts", f"{kind}(lasts)") for kind in ("sum", "max"))
    given, output = record_type(Task), record_type(Whole)
    step = PartialsStep("p", None, input=given, output=output, keys=("name",), partials=wanted)
    program = Program("p", "p", StreamLayout(given), (step,), (Output(0, StreamLayout(output)),))
    tasks = [Task("a", ms(5)), Task("a", None), Task("a", ms(-7)), Task("b", None)]
    found = [one for e in run_batch(program, [given.to_batch(tasks)]) for one in output.from_batch(e.batch)]
    assert found == [Whole("a", ms(-2), ms(5)), Whole("b", None, None)]
    merge = MergePartials(Whole, Whole._fields, wanted, dict.fromkeys(Whole._fields[1:], timedelta))
    assert merge.reduce(found[0], Whole("a", ms(1), ms(9))) == Whole("a", ms(-1), ms(9))
    assert merge.reduce(found[1], found[0]) == Whole("b", ms(-2), ms(5))


# Windows


class Total(NamedTuple):
    key: str
    window_start: int
    window_end: datetime
    total: int
    most: int


def windowed(events, assigner, bound):
    pipeline = Pipeline("p")
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(ms(bound)).with_timestamp_assigner("at")
    stream = pipeline.from_collection(events, Event).assign_timestamps_and_watermarks(strategy)
    columns = [F.sum("value").alias("total"), F.max("value").alias("most")]
    stream.key_by("key").window(assigner).agg(*columns, output_type=Total).print("out")
    return pipeline


@settings(max_examples=examples(20))
@given(ASSIGNERS, EVENTS, st.sampled_from([0, 20, 1000]), st.sampled_from([1, 4, None]))
def test_windows_close_and_drop_as_those_of_spark_do(assigner, events, bound, size):
    pipeline = windowed(events, assigner, bound)
    found, wanted = (
        run_pipeline(pipeline, "STREAMING", options={"state.native-aggregates": kept}, micro_batch=size)
        for kept in ("PORTABLE", "SPARK")
    )
    assert sorted(found.only()) == sorted(wanted.only())
    left = run_pipeline(pipeline, "BATCH").only()
    if bound == 1000:
        assert sorted(found.only()) == sorted(left)


def test_late_records_are_counted():
    events = [Event("a", 0, 1), Event("a", 100, 1), Event("a", 5, 1), Event("a", 6, 1)]
    result = run_pipeline(
        windowed(events, TumblingEventTimeWindows.of(ms(10)), 0), "STREAMING", options=LOCAL_GLOBAL, seed=None
    )
    assert [(t.window_start, t.total) for t in result.only()] == [(0, 1), (100, 1)]
    assert result.metrics.counters["late records dropped"] == 2


# What comes after


class Sum(NamedTuple):
    key: str
    total: int


class Twice(KeyedProcessFunction[str, Sum, Sum]):
    def process_element(self, value, ctx) -> list[Sum]:
        return [Sum(value.key, 2 * value.total)]


@MODES
def test_a_keyed_operator_follows_in_one_pipeline(mode):
    pipeline = Pipeline("p")
    events = pipeline.from_collection([Event("a", 0, 1), Event("b", 0, 2), Event("a", 0, 3)], Event)
    totals = events.key_by("key").agg(F.sum("value").alias("total"), output_type=Sum)
    totals.key_by("key").process(Twice()).print()
    found = dict(run_pipeline(pipeline, mode).only())
    assert found == {"a": 8, "b": 4}


def test_an_aggregate_follows_another_and_unites_with_other_streams():
    pipeline = Pipeline("p")
    events = pipeline.from_collection([Event("a", 0, 1), Event("b", 0, 2), Event("a", 0, 3)], Event)
    totals = events.key_by("key").agg(F.sum("value").alias("total"), output_type=Sum)
    most = totals.key_by("key").agg(F.max("total").alias("total"), output_type=Sum)
    most.union(pipeline.from_collection([Sum("c", 9)], Sum, name="others")).print()
    assert dict(run_pipeline(pipeline, "STREAMING", micro_batch=None).only()) == {"a": 4, "b": 2, "c": 9}


# Sums that overflow

LARGEST = 2**63 - 1


class Counted(NamedTuple):
    key: str
    at: int
    number: int
    price: Decimal


class IntTotal(NamedTuple):
    key: str
    total: int


class PriceTotal(NamedTuple):
    key: str
    total: Decimal


def summed(numbers, field, output, windows):
    pipeline = Pipeline("p")
    at = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    rows = [
        Counted("a", n, number if field == "number" else 0, Decimal(number) if field == "price" else Decimal(0))
        for n, number in enumerate(numbers)
    ]
    stream = pipeline.from_collection(rows, Counted).assign_timestamps_and_watermarks(at).key_by("key")
    if windows is not None:
        stream = stream.window(windows)
    stream.agg(F.sum(field).alias("total"), output_type=output).name("op").print()
    return pipeline


WINDOWS = st.sampled_from([TumblingEventTimeWindows.of(ms(1000)), EventTimeSessionWindows.with_gap(ms(10))])


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(
        st.one_of(st.integers(-(2**63), LARGEST), st.sampled_from([LARGEST, -LARGEST, -(2**63)]), st.integers(-5, 5)),
        min_size=1,
        max_size=8,
    ),
    WINDOWS,
    st.sampled_from([{}, LOCAL_GLOBAL]),
    st.sampled_from([1, 3, None]),
)
def test_a_windows_sum_goes_by_what_it_comes_to_and_not_by_what_it_passes(numbers, windows, options, micro_batch):
    pipeline = summed(numbers, "number", IntTotal, windows)
    for mode in ("BATCH", "STREAMING"):
        if -(2**63) <= sum(numbers) <= LARGEST:
            found = run_pipeline(pipeline, mode, options=options, micro_batch=micro_batch).only()
            assert found == [IntTotal("a", sum(numbers))]
        else:
            with pytest.raises(RecordTypeError, match=r"'op': (field 'total'|sum\(number\)) is larger than its type"):
                run_pipeline(pipeline, mode, options=options, micro_batch=micro_batch)


@pytest.mark.parametrize("micro_batch", [1, None])
def test_a_windows_sum_of_decimals_goes_by_what_it_comes_to(micro_batch):
    most = 10**20 - 1
    tumbling = TumblingEventTimeWindows.of(ms(1000))
    pipeline = summed([most, most, most, -most, -most], "price", PriceTotal, tumbling)
    found = run_pipeline(pipeline, "STREAMING", options=LOCAL_GLOBAL, micro_batch=micro_batch).only()
    assert found == [PriceTotal("a", Decimal(most))]
    beyond = summed([most, most], "price", PriceTotal, tumbling)
    with pytest.raises(RecordTypeError, match=r"operator 'op': sum\(price\) is larger than its type holds"):
        run_pipeline(beyond, "STREAMING", options=LOCAL_GLOBAL, micro_batch=micro_batch)


@MODES
@pytest.mark.parametrize(
    ("field", "output", "number"), [("number", IntTotal, LARGEST), ("price", PriceTotal, 10**20 - 1)]
)
@pytest.mark.parametrize("windows", [None, TumblingEventTimeWindows.of(ms(1000))])
def test_a_sum_that_overflows_names_operator_and_field(mode, field, output, number, windows):
    pipeline = summed([number, number], field, output, windows)
    with pytest.raises(RecordTypeError, match="p: operator 'op': field 'total' is larger than its type holds"):
        run_pipeline(pipeline, mode)
