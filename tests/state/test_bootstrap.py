"""State that a program makes of a table: a run of either mode starts from it."""

from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import NamedTuple

import pyarrow as pa
import pytest

from dagster_unified.api import (
    KeyedProcessFunction,
    MapStateDescriptor,
    Pipeline,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from dagster_unified.connectors import CollectionSource, DeltaSink
from dagster_unified.errors import StateError
from dagster_unified.state import EverythingRead, Savepoint
from tests.support import table_rows

DAY = date(2026, 1, 1)
SINCE = datetime(2020, 1, 1, tzinfo=timezone.utc)


class Sale(NamedTuple):
    shop: str
    at: int
    amount: int


class Out(NamedTuple):
    shop: str
    what: str
    value: int


class Last(NamedTuple):
    at: datetime
    amount: int | None
    took: timedelta = timedelta(0)
    prices: dict[date, Decimal] = {}


class Totals(KeyedProcessFunction):
    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", int))
        self.last = context.get_state(ValueStateDescriptor("last", Last))
        self.by_amount = context.get_map_state(MapStateDescriptor("by_amount", int, int))

    def process_element(self, value, ctx):
        last = self.last.value()
        self.by_amount.put(value.amount, (self.by_amount.get(value.amount) or 0) + 1)
        self.total.update((self.total.value() or 0) + value.amount)
        self.last.update(Last(last.at if last else SINCE, None, timedelta(seconds=value.at), {DAY: Decimal("1.5")}))
        yield Out(value.shop, "total", self.total.value())
        yield Out(value.shop, f"of {value.amount}", self.by_amount.get(value.amount))
        if last is not None:
            yield Out(value.shop, "since", int((last.at - SINCE).total_seconds()))

    def on_timer(self, timestamp, ctx):
        yield Out(ctx.get_current_key(), "timer", timestamp)


def totals(path):
    pipeline = Pipeline("totals")
    sales = [Sale("left out", 1, 1), Sale("north", 10, 5), Sale("new", 11, 6)]
    source = CollectionSource(sales, Sale, "sales")
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    stream = pipeline.from_source(source).assign_timestamps_and_watermarks(strategy)
    results = stream.key_by("shop").process(Totals(), output_type=Out).uid("totals")
    results.sink_to(DeltaSink(path, name="table", mode="upsert", key=("shop", "what")))
    return pipeline


STATE = pa.table(
    {
        "shop": ["north", "south"],
        "total": pa.array([100, 7], pa.int32()),
        "last": pa.array(
            [{"at": SINCE.replace(minute=1), "amount": None}, None],
            pa.struct([("at", pa.timestamp("ms", "UTC")), ("amount", pa.int64())]),
        ),
        "by_amount": pa.array([[(5, 2)], None], pa.map_(pa.int64(), pa.int64())),
    }
)
TIMERS = pa.table({"shop": ["north", "south", "only timers"], "timestamp": [1, 20, 30]})
EXPECTED = [
    ("new", "of 6", 1),
    ("new", "total", 6),
    ("north", "of 5", 3),
    ("north", "since", 60),
    ("north", "timer", 1),
    ("north", "total", 105),
    ("only timers", "timer", 30),
    ("south", "timer", 20),
]


@pytest.fixture(params=["BATCH", "STREAMING"])
def run(request, run_on_spark, run_streaming):
    return run_on_spark if request.param == "BATCH" else run_streaming


@pytest.mark.a_day(1)
def test_a_run_starts_from_state_that_was_made_of_a_table(run, tmp_path):
    pipeline = totals(f"{tmp_path}/table")
    made = Savepoint.new(pipeline).with_state("totals", STATE, timers=TIMERS)
    made.with_position("sales", EverythingRead(1)).write(f"{tmp_path}/made")
    run(pipeline, {"execution.state-recovery.path": f"{tmp_path}/made"})
    assert table_rows(f"{tmp_path}/table") == EXPECTED


def test_a_run_starts_from_state_that_was_made_of_dataframes(spark, run_on_spark, tmp_path):
    pipeline = totals(f"{tmp_path}/table")
    state, timers = spark.createDataFrame(STATE), spark.createDataFrame(TIMERS)
    made = Savepoint.new(pipeline).with_state("totals", state, timers=timers)
    written = made.with_position("sales", EverythingRead(1)).write(f"{tmp_path}/made")
    assert written.operator("totals").rows == 3
    assert sorted(map(str, written.timers("totals").to_pylist())) == sorted(
        map(str, Savepoint.new(pipeline).with_state("totals", STATE, timers=TIMERS).timers("totals").to_pylist())
    )
    frame = written.keyed_state("totals", spark=spark)
    assert {row["shop"]: row["total"] for row in frame.collect()} == {"north": 100, "south": 7, "only timers": None}
    run_on_spark(pipeline, {"execution.state-recovery.path": f"{tmp_path}/made"})
    assert table_rows(f"{tmp_path}/table") == EXPECTED


def test_dataframes_that_are_no_state_are_refused(spark):
    def given(state, timers=None):
        frames = [None if rows is None else spark.createDataFrame(pa.table(rows)) for rows in (state, timers)]
        return Savepoint.new("p").with_state("o", frames[0], "k", timers=frames[1])

    fine, times = {"k": ["a"], "v": [1]}, {"k": ["a"], "timestamp": [1]}
    long = pa.array([Decimal("0.123456789012345678901")], pa.decimal128(30, 24))
    for state, timers, message in (
        (fine, {**times, "generation": pa.array([None], pa.int64())}, "generation of a timer is a whole number"),
        (fine, {**times, "generation": ["x"]}, "generation of a timer is a whole number"),
        ({"k": ["a", "a"], "v": [1, 2]}, None, "several rows have the key 'a'; give each key one row"),
        ({"k": ["a", None], "v": [1, 2]}, None, "a row has no key; fill in k"),
        ({"k": [float("nan")], "v": [1]}, None, "the key 'k' of a row is nan"),
        ({"k": ["a"], "v": long}, None, "column 'v' is a decimal128.30, 24., and state has decimal128.38, 18."),
        (fine, times | {"domain": ["Event"]}, "a timer has the domain 'Event', and it is 'event' or 'processing'"),
        (fine, times | {"timestamp": [1.7]}, "the timestamp of a timer is of type double"),
        (fine, times | {"k": pa.array([None], pa.string())}, "a timer has no k; fill it in"),
    ):
        with pytest.raises(StateError, match=message):
            given(state, timers)


@pytest.mark.a_day(1)
def test_what_a_run_has_left_is_read_changed_and_started_from(run, run_on_spark, tmp_path):
    pipeline = totals(f"{tmp_path}/table")
    run(pipeline, {"execution.savepoint.path": f"{tmp_path}/left"})
    left = Savepoint.read(f"{tmp_path}/left")
    assert (left.pipeline, left.operator("totals").name) == ("totals", "Totals")
    found = sorted(left.rows("totals"), key=lambda row: row["shop"])
    last = {"at": SINCE, "amount": None, "took": timedelta(seconds=1), "prices": {DAY: Decimal("1.5")}}
    assert found[0] == {"shop": "left out", "total": 1, "last": last, "by_amount": {1: 1}}
    assert left.positions["sales"].describe() == "the first 3 records"
    table = left.keyed_state("totals")
    doubled = table.set_column(table.schema.get_field_index("total"), "total", pa.array([2] * 3, pa.int64()))
    left.with_state("totals", doubled).with_position("sales", EverythingRead(1)).write(f"{tmp_path}/changed")
    again = totals(f"{tmp_path}/again")
    run_on_spark(again, {"execution.state-recovery.path": f"{tmp_path}/changed"})
    assert ("north", "total", 7) in table_rows(f"{tmp_path}/again")


def windows(path):
    pipeline = Pipeline("windows")
    sales = pipeline.from_source(CollectionSource([Sale("north", 50, 5), Sale("north", 160, 6)], Sale, "sales"))
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    keyed = sales.assign_timestamps_and_watermarks(strategy).key_by("shop")
    hundreds = keyed.window(TumblingEventTimeWindows.of(timedelta(milliseconds=100)))
    sums = hundreds.reduce(lambda a, b: Sale(a.shop, max(a.at, b.at), a.amount + b.amount)).uid("windows")
    sums.sink_to(DeltaSink(path, name="table"))
    return pipeline


WINDOW = {"start": 0, "end": 100}
OPEN = pa.table(
    {
        "shop": ["north", "south"],
        "window contents": pa.array(
            [[(WINDOW, Sale("north", 20, 100)._asdict())], [(WINDOW, Sale("south", 30, 7)._asdict())]],
            pa.map_(
                pa.struct([("start", pa.int64()), ("end", pa.int64())]),
                pa.struct([("shop", pa.string()), ("at", pa.int64()), ("amount", pa.int64())]),
            ),
        ),
        "window timers": pa.array(
            [[(99, [WINDOW])]] * 2,
            pa.map_(pa.int64(), pa.list_(pa.struct([("start", pa.int64()), ("end", pa.int64())]))),
        ),
    }
)
CLOSING = pa.table({"shop": ["north", "south"], "timestamp": [99, 99]})


@pytest.mark.a_day(1)
def test_a_run_starts_from_open_windows_that_were_made_of_a_table(run, tmp_path):
    pipeline = windows(f"{tmp_path}/table")
    Savepoint.new(pipeline).with_state("windows", OPEN, timers=CLOSING).write(f"{tmp_path}/made")
    run(pipeline, {"execution.state-recovery.path": f"{tmp_path}/made"})
    assert table_rows(f"{tmp_path}/table") == [("north", 50, 105), ("north", 160, 6), ("south", 30, 7)]


def test_open_windows_that_nothing_would_close_are_refused(tmp_path):
    made = Savepoint.new(windows(f"{tmp_path}/table"))
    with pytest.raises(StateError, match="windows: operator 'windows': the table has 'window contents', and no timers"):
        made.with_state("windows", OPEN)
    with pytest.raises(StateError, match="and not which timers close them; give it the column 'window timers' as well"):
        made.with_state("windows", OPEN.drop_columns(["window timers"]), timers=CLOSING)


NO_TIMERS = OPEN.set_column(2, OPEN.schema.field(2), pa.array([[(99, [WINDOW])], []], OPEN.schema.field(2).type))


@pytest.mark.parametrize("frames", [False, True], ids=["table", "frame"])
@pytest.mark.parametrize(
    ("state", "timers"),
    [
        pytest.param(OPEN, CLOSING.slice(0, 1), id="no timer"),
        pytest.param(OPEN, pa.table({"shop": ["north", "south"], "timestamp": [99, 100]}), id="another moment"),
        pytest.param(OPEN, CLOSING.append_column("domain", pa.array(["event", "processing"])), id="another domain"),
        pytest.param(NO_TIMERS, CLOSING, id="a timer of no window"),
    ],
)
def test_open_windows_of_a_single_key_that_nothing_would_close_are_refused(spark, frames, state, timers):
    made = Savepoint.new(windows("table"))
    given = [spark.createDataFrame(one) if frames else one for one in (state, timers)]
    message = "windows: operator 'windows': nothing would close the windows of key 'south'; each moment in its 'window"
    with pytest.raises(StateError, match=message):
        made.with_state("windows", given[0], timers=given[1])


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("totl", "declares no state 'totl', which the savepoint has; did you mean 'total'\\?"),
        ("last", "state 'last' is declared Last, and the savepoint has int64; fields may be"),
    ],
)
def test_state_that_does_not_fit_is_an_error_before_anything_runs(spark, run_on_spark, tmp_path, column, message):
    pipeline = totals(f"{tmp_path}/table")
    state = pa.table({"shop": ["north"], column: [1]})
    Savepoint.new(pipeline).with_state("totals", state).write(f"{tmp_path}/made")
    with pytest.raises(StateError, match=message):
        run_on_spark(pipeline, {"execution.state-recovery.path": f"{tmp_path}/made"})
    assert not (tmp_path / "table").exists()
