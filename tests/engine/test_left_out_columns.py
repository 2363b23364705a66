"""BATCH on Spark leaves out columns that nobody reads, and nothing else changes: no result, and no error."""

from datetime import UTC, date, datetime, timedelta
from operator import methodcaller
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_unified.api import (
    AggregateFunction,
    KeyedProcessFunction,
    Pipeline,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from dagster_unified.connectors import FileSink, ParquetSource
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.events import StageStarted
from dagster_unified.errors import UnifiedError
from dagster_unified.graph.explain import physical
from dagster_unified.graph.nodes import Port
from tests.support import run_stages

PIPELINED = {"execution.batch-shuffle-mode": "ALL_EXCHANGES_PIPELINED"}


class Trip(NamedTuple):
    number: int
    city: str
    note: str
    day: date
    at: datetime
    miles: float
    tip: int | None
    seats: list[int]


class Short(NamedTuple):
    city: str
    miles: float
    note: str


FIELDS = [pa.int64(), pa.string(), pa.string(), pa.date32(), pa.timestamp("us", "UTC"), pa.float64(), pa.int64()]
SCHEMA = pa.schema(list(zip(Trip._fields, [*FIELDS, pa.list_(pa.int64())], strict=True)))


def trips(count=400):
    return [
        Trip(
            number,
            f"city {number % 7}",
            f"note {number}",
            date(2026, 1, 1) + timedelta(days=number % 3),
            datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number),
            number / 8,
            None if number % 5 else number,
            [number],
        )
        for number in range(count)
    ]


def written(folder, rows, **columns):
    """A file of trips; `columns` replace some."""
    table = pa.Table.from_pylist([trip._asdict() for trip in rows], SCHEMA)
    for name, column in columns.items():
        table = table.set_column(table.schema.get_field_index(name), name, column)
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / "trips.parquet")
    return str(folder)


class Longest(KeyedProcessFunction[str, Trip, float]):
    """Reads one field."""

    def open(self, context):
        self.longest = context.get_state(ValueStateDescriptor("longest", float))

    def process_element(self, value, ctx):
        longest = self.longest.value()
        if longest is None or value.miles > longest:
            self.longest.update(value.miles)
            yield value.miles


class InTime(Longest):
    """Its records wait in state."""

    requires_time_sorted_input = True


class Numbers(KeyedProcessFunction[str, Trip, str]):
    """Fails for one trip."""

    def process_element(self, value, ctx):
        if value.number == 300:
            raise ValueError("no such number")
        yield str(value.number)


class Miles(AggregateFunction[Trip, tuple[float, int], float]):
    def create_accumulator(self) -> tuple[float, int]:
        return 0.0, 0

    def add(self, value: Trip, accumulator: tuple[float, int]) -> tuple[float, int]:
        return accumulator[0] + value.miles, accumulator[1] + 1

    def get_result(self, accumulator: tuple[float, int]) -> float:
        return accumulator[0] / accumulator[1]

    def merge(self, a: tuple[float, int], b: tuple[float, int]) -> tuple[float, int]:
        return a[0] + b[0], a[1] + b[1]


def shortened(trip: Trip) -> Short:
    return Short(trip.city.upper(), trip.miles * 2, trip.note)


def far(trip: Trip) -> bool:
    return trip.miles > 10.0


def city_of(trip: Trip) -> str:
    return trip.city[:6]


def miles_of(trip: Trip) -> float:
    return trip.miles


def miles_of_short(short: Short) -> float:
    return short.miles


def noted(trip, ctx):
    yield float(trip.note.removeprefix("note "))


class Noted(KeyedProcessFunction[str, Trip, float]):
    """Its method is not the one in its text, in a way that no text shows."""

    def open(self, context):
        methodcaller("__setattr__", "process_element", noted)(self)

    def process_element(self, value, ctx):
        yield value.miles


def one_of_each(trip: Trip) -> int:
    return 1


def itself(number: int) -> int:
    return number % 7


def added(a: int, b: int) -> int:
    return a + b


def pair_of(trip: Trip) -> tuple[str, float, str]:
    return trip.city, trip.miles, trip.note


class Second(KeyedProcessFunction[str, tuple[str, float, str], float]):
    def process_element(self, value, ctx):
        yield value[1]


def timed(trips):
    return trips.assign_timestamps_and_watermarks(
        WatermarkStrategy.for_bounded_out_of_orderness(timedelta(seconds=1)).with_timestamp_assigner("at")
    )


def in_minutes(keyed):
    return keyed.window(TumblingEventTimeWindows.of(timedelta(minutes=1))).aggregate(Miles())


def texts(stream):
    return stream.map(repr, str)


CASES = {
    "keyed process": lambda s: texts(s.key_by("city").process(Longest())),
    "keyed by a function": lambda s: texts(s.key_by(city_of).process(Longest())),
    "behind a filter": lambda s: texts(s.filter(far).key_by("city").process(Longest())),
    "two readers": lambda s: texts(
        s.filter(far).key_by("city").process(Longest()).union(s.map(lambda t: t.miles, float))
    ),
    "two streams": lambda s: texts(s.filter(far).union(s).key_by(city_of).process(Longest())),
    "map": lambda s: texts(s.filter(far).map(shortened)),
    "map and another exchange": lambda s: texts(s.rebalance().map(shortened).map(miles_of_short)),
    "windows": lambda s: texts(in_minutes(timed(s).key_by("city"))),
    "windows behind a filter": lambda s: texts(in_minutes(timed(s.filter(far)).key_by(city_of))),
    "sorted by time": lambda s: texts(timed(s).key_by("city").process(InTime())),
    "no field": lambda s: texts(s.map(one_of_each)),
    "no field behind an exchange": lambda s: texts(s.rebalance().map(one_of_each).key_by(itself).reduce(added)),
    "tuples": lambda s: texts(s.map(pair_of).key_by(lambda pair: pair[0]).process(Second())),
    "reduce": lambda s: texts(s.filter(far).key_by("city").reduce(lambda a, b: a if a.miles > b.miles else b)),
}


def outcome(case, source, spark, folder, lowering, options=None):
    """The sorted texts that a case writes, or its error."""
    pipeline = Pipeline("trips")
    case(pipeline.from_source(ParquetSource(source, Trip, name="trips"))).sink_to(FileSink(str(folder / "out"), "out"))
    plan = pipeline.plan({**PIPELINED, **(options or {}), "execution.lowering": lowering})
    try:
        run_stages(plan, spark, folder)
    except UnifiedError as error:
        return type(error), str(error)
    return sorted(pq.read_table(folder / "out").column("value").to_pylist())


@pytest.fixture
def both(spark, tmp_path):
    """Runs a case with functions that are read, and with functions that are called."""

    def run(case, source, options=None):
        return [outcome(case, source, spark, tmp_path / mode, mode, options) for mode in ("AUTO", "OFF")]

    return run


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", [{}, {"execution.batch-shuffle-mode": "ALL_EXCHANGES_BLOCKING"}], ids=["1", "n"])
def test_results_are_the_same(name, options, both, tmp_path):
    on, off = both(CASES[name], written(tmp_path / "in", trips()), options)
    assert on == off
    assert on
    assert not list((tmp_path / "AUTO" / "store").rglob(".calls")), "it ran again"


def columns_of(case):
    pipeline = Pipeline("trips")
    case(pipeline.from_source(ParquetSource("in", Trip, name="trips"))).sink_to(FileSink("out", "out"))
    text = physical(pipeline.plan(PIPELINED))
    return [line.split("(")[-1].rstrip(")") for line in text.splitlines() if line.strip().startswith("reads ")]


def test_only_columns_that_are_read_travel():
    assert columns_of(CASES["keyed process"])[0] == "city, miles, seats"  # no expression can check a list
    assert columns_of(CASES["map"])[0] == "city, note, miles, seats"
    assert columns_of(CASES["windows behind a filter"])[-3:][0] == "city, at, miles, seats"


WRONG = {
    "number": pa.array([*range(399), None], pa.int64()),
    "note": pa.Array.from_buffers(pa.string(), 400, pa.array([b"\xff\xfe"] * 400, pa.binary()).buffers()),
    "day": pa.array([1 << 30] * 400, pa.int32()).cast(pa.date32()),
    "seats": pa.array([[1, None]] * 400, pa.list_(pa.int64())),
}


@pytest.mark.parametrize("field", WRONG)
@pytest.mark.parametrize("name", ["keyed process", "behind a filter", "keyed by a function", "map", "windows"])
def test_a_value_that_nobody_reads_and_that_is_not_of_its_type_is_found(name, field, both, tmp_path):
    on, off = both(CASES[name], written(tmp_path / "in", trips(), **{field: WRONG[field]}))
    assert on == off
    assert issubclass(on[0], UnifiedError)


def test_an_error_shows_the_whole_record(both, tmp_path):
    on, off = both(lambda s: s.filter(far).key_by("city").process(Numbers()), written(tmp_path / "in", trips()))
    assert on == off
    assert repr(trips()[300])[:150] in on[1]


def test_a_stage_runs_again_where_only_functions_can_say(spark, tmp_path):
    source = written(tmp_path / "in", trips())
    pipeline = Pipeline("trips")
    trips_by_city = pipeline.from_source(ParquetSource(source, Trip, name="trips")).key_by("city")
    trips_by_city.process(Noted()).sink_to(FileSink(str(tmp_path / "out"), "out"))
    plan, seen = pipeline.plan(PIPELINED), []
    (region,) = plan.regions
    store = IntermediateStore(f"{tmp_path}/store")
    assert store.calls("trips", region.name) is None
    for number, starts in ((1, 2), (2, 1)):  # the first run begins on columns
        run_all(Run(plan, spark, store, f"run {number}".replace(" ", "-"), "run", observe=seen.append))
        assert sum(isinstance(event, StageStarted) for event in seen) == starts
        seen.clear()
    assert store.calls("trips", region.name) == plan.code_of(region)
    assert sum(pq.read_table(tmp_path / "out").column("value").to_pylist()) == sum(range(400))


def test_what_leaves_a_stage_is_whole(spark, tmp_path):
    source = written(tmp_path / "in", trips())
    pipeline = Pipeline("trips")
    kept = pipeline.from_source(ParquetSource(source, Trip, name="trips")).filter(far)
    kept.key_by("city").process(Longest()).map(repr, str).sink_to(FileSink(str(tmp_path / "out"), "out"))
    plan = pipeline.plan({"execution.batch-shuffle-mode": "ALL_EXCHANGES_BLOCKING"})
    (port,) = plan.regions[0].outputs
    assert plan.layout(Port(port.node)).schema.names == list(Trip._fields)
    run_stages(plan, spark, tmp_path)
    stored = [pq.read_table(f) for f in (tmp_path / "trips").rglob("*.parquet")] or [
        pq.read_table(f) for f in tmp_path.rglob("data-*/**/*.parquet")
    ]
    assert sum(table.column("note").null_count for table in stored) == 0
    assert sum(table.num_rows for table in stored) == sum(far(trip) for trip in trips())
