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
from dagster_unified.engine.batch.region import RegionFrames
from dagster_unified.engine.batch.run import PartitionStart, Run
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


def table_of(rows, schema=None, **columns):
    """A table of records; `columns` replace some."""
    table = pa.Table.from_pylist([row._asdict() for row in rows], schema)
    for name, column in columns.items():
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return table


def written(folder, table):
    """The folder, with the table in a file."""
    folder.mkdir()
    pq.write_table(table, folder / "records.parquet")
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


def outcome(case, source, spark, folder, lowering, options=None, records=Trip):
    """The sorted texts that a case writes, or its error."""
    pipeline = Pipeline("trips")
    case(pipeline.from_source(ParquetSource(source, records, name="trips"))).sink_to(
        FileSink(str(folder / "out"), "out")
    )
    plan = pipeline.plan({**PIPELINED, **(options or {}), "execution.lowering": lowering})
    try:
        run_stages(plan, spark, folder)
    except UnifiedError as error:
        return type(error), str(error)
    return sorted(pq.read_table(folder / "out").column("value").to_pylist())


@pytest.fixture
def both(spark, tmp_path):
    """Runs a case over a table with functions that are read, and with functions that are called."""

    def run(case, table, records=Trip, options=None):
        source = written(tmp_path / "in", table)
        return [outcome(case, source, spark, tmp_path / mode, mode, options, records) for mode in ("AUTO", "OFF")]

    return run


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", [{}, {"execution.batch-shuffle-mode": "ALL_EXCHANGES_BLOCKING"}], ids=["1", "n"])
def test_results_are_the_same(name, options, both, tmp_path):
    on, off = both(CASES[name], table_of(trips(), SCHEMA), options=options)
    assert on == off
    assert on
    assert not list((tmp_path / "AUTO" / "store").rglob(".calls")), "it ran again"


def columns_of(case, records=Trip):
    pipeline = Pipeline("trips")
    case(pipeline.from_source(ParquetSource("in", records, name="trips"))).sink_to(FileSink("out", "out"))
    text = physical(pipeline.plan(PIPELINED))
    return [line.split("(")[-1].rstrip(")") for line in text.splitlines() if line.strip().startswith("reads ")]


def test_only_columns_that_are_read_travel():
    assert columns_of(CASES["keyed process"])[0] == "city, miles, seats"  # no expression can check a list
    assert columns_of(CASES["map"])[0] == "city, note, miles, seats"
    assert columns_of(SIFTED["windows"], Ride)[1] == "city, miles, __ts"


WRONG = {
    "number": pa.array([*range(399), None], pa.int64()),
    "note": pa.Array.from_buffers(pa.string(), 400, pa.array([b"\xff\xfe"] * 400, pa.binary()).buffers()),
    "day": pa.array([1 << 30] * 400, pa.int32()).cast(pa.date32()),
    "seats": pa.array([[1, None]] * 400, pa.list_(pa.int64())),
}


@pytest.mark.parametrize("field", WRONG)
@pytest.mark.parametrize("name", ["keyed process", "behind a filter", "keyed by a function", "map", "windows"])
def test_a_value_that_nobody_reads_and_that_is_not_of_its_type_is_found(name, field, both):
    on, off = both(CASES[name], table_of(trips(), SCHEMA, **{field: WRONG[field]}))
    assert on == off
    assert issubclass(on[0], UnifiedError)


def test_an_error_shows_the_whole_record(both):
    on, off = both(lambda s: s.filter(far).key_by("city").process(Numbers()), table_of(trips(), SCHEMA))
    assert on == off
    assert repr(trips()[300])[:150] in on[1]


def test_a_stage_runs_again_where_only_functions_can_say(spark, tmp_path):
    source = written(tmp_path / "in", table_of(trips(), SCHEMA))
    pipeline = Pipeline("trips")
    trips_by_city = pipeline.from_source(ParquetSource(source, Trip, name="trips")).key_by("city")
    trips_by_city.process(Noted()).sink_to(FileSink(str(tmp_path / "out"), "out"))
    plan, seen = pipeline.plan(PIPELINED), []
    (region,) = plan.regions
    store = IntermediateStore(f"{tmp_path}/store")
    assert store.calls("trips", region.name) is None
    for number, starts in ((1, 2), (2, 1)):  # the first run begins on columns
        run_all(Run(plan, spark, store, f"run-{number}", "run", observe=seen.append))
        assert sum(isinstance(event, StageStarted) for event in seen) == starts
        seen.clear()
    assert store.calls("trips", region.name) == plan.code_of(region)
    assert sum(pq.read_table(tmp_path / "out").column("value").to_pylist()) == sum(range(400))


def test_what_leaves_a_stage_is_whole(spark, tmp_path):
    source = written(tmp_path / "in", table_of(trips(), SCHEMA))
    pipeline = Pipeline("trips")
    kept = pipeline.from_source(ParquetSource(source, Trip, name="trips")).filter(far)
    kept.key_by("city").process(Longest()).map(repr, str).sink_to(FileSink(str(tmp_path / "out"), "out"))
    plan = pipeline.plan({"execution.batch-shuffle-mode": "ALL_EXCHANGES_BLOCKING"})
    (port,) = plan.regions[0].outputs
    assert plan.layout(Port(port.node)).schema.names == list(Trip._fields)
    run_stages(plan, spark, tmp_path)
    stored = [pq.read_table(file) for file in tmp_path.rglob("data-*/**/*.parquet")]
    assert sum(table.column("note").null_count for table in stored) == 0
    assert sum(table.num_rows for table in stored) == sum(far(trip) for trip in trips())


class Ride(NamedTuple):
    number: int
    city: str
    miles: float
    tip: int | None


def rare(ride: Ride) -> bool:
    return ride.number % 20 == 7


def tipped(ride: Ride) -> bool:
    return ride.tip > 3


def far_enough(ride: Ride) -> bool:
    return ride.miles > 10.0 and ride.city != "city 3"


def city_in_capitals(ride: Ride) -> str:
    """Spark has capitals of its own."""
    return ride.city.upper()


class RideMiles(AggregateFunction[Ride, float, float]):
    def create_accumulator(self) -> float:
        return 0.0

    def add(self, value: Ride, accumulator: float) -> float:
        return accumulator + value.miles

    def get_result(self, accumulator: float) -> float:
        return accumulator

    def merge(self, a: float, b: float) -> float:
        return a + b


def by_number(rides):
    """With a native assigner."""
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(seconds=1)).with_timestamp_assigner("number")
    return rides.assign_timestamps_and_watermarks(strategy)


def in_tens(keyed):
    return keyed.window(TumblingEventTimeWindows.of(timedelta(milliseconds=10))).aggregate(RideMiles())


def city_of_ride(ride: Ride) -> str:
    return ride.city[:6]


def same(ride: Ride) -> Ride:
    return ride


class Rides(KeyedProcessFunction[str, Ride, float]):
    def process_element(self, value, ctx):
        yield value.miles


SIFTED = {
    "one": lambda s: texts(s.filter(rare).key_by("city").process(Rides())),
    "two": lambda s: texts(s.filter(rare).filter(far_enough).map(same)),
    "behind an exchange": lambda s: texts(s.rebalance().filter(far_enough).map(same)),
    "behind a map": lambda s: texts(s.map(lambda ride: ride._replace(tip=1), Ride).filter(rare)),
    "two readers": lambda s: texts(s.filter(rare).union(s.filter(far_enough))),
    "with a reader of all": lambda s: texts(s.filter(rare)).union(texts(s)),
    "twice read": lambda s: texts((few := s.filter(far_enough)).filter(rare)).union(texts(few)),
    "windows": lambda s: texts(in_tens(by_number(s).key_by("city"))),
    "windows behind a filter": lambda s: texts(in_tens(by_number(s.filter(far_enough)).key_by(city_of_ride))),
    "windows behind an exchange": lambda s: texts(in_tens(by_number(s.filter(far_enough).rebalance()).key_by("city"))),
    "windows of a union": lambda s: texts(in_tens(by_number(s.filter(rare).union(s)).key_by("city"))),
    "windows and keys": lambda s: texts(
        s.key_by(city_of_ride).process(Rides()).union(in_tens(by_number(s).key_by("city")))
    ),
    "chosen": lambda s: texts(
        s.filter(far_enough).partition_custom(lambda key, count: len(key) % count, "city").map(lambda r: r.miles, float)
    ),
    "in two stages": lambda s: texts(s.key_by("city").process(Rides()).filter(lambda miles: miles > 20.0)),
}


def rides(**columns):
    return table_of([Ride(n, f"city {n % 7}", n / 8, n % 10) for n in range(400)], **columns)


@pytest.mark.parametrize("name", SIFTED)
@pytest.mark.parametrize("options", [{}, {"execution.batch-shuffle-mode": "ALL_EXCHANGES_BLOCKING"}], ids=["1", "n"])
def test_rows_that_a_filter_drops_are_dropped_before(name, options, both, tmp_path):
    on, off = both(SIFTED[name], rides(), Ride, options)
    assert on == off
    assert on
    assert not list((tmp_path / "AUTO" / "store").rglob(".calls")), "it ran again"


WRONG_RIDES = {
    "number": pa.array([None, *range(399)], pa.int64()),
    "city": pa.Array.from_buffers(pa.string(), 400, pa.array([b"\xff\xfe"] * 400, pa.binary()).buffers()),
    "miles": pa.array([None, *map(float, range(399))], pa.float64()),
}


@pytest.mark.parametrize("field", WRONG_RIDES)
@pytest.mark.parametrize("name", ["one", "two", "behind an exchange"])
def test_a_wrong_value_of_a_row_that_is_dropped_is_found(name, field, both):
    on, off = both(SIFTED[name], rides(**{field: WRONG_RIDES[field]}), Ride)
    assert on == off
    assert issubclass(on[0], UnifiedError)


def test_a_filter_that_raises_raises(both):
    on, off = both(lambda s: texts(s.filter(tipped)), rides(tip=pa.array([None, *range(399)], pa.int64())), Ride)
    assert on == off
    assert "TypeError" in on[1]
    assert repr(Ride(0, "city 0", 0.0, None)) in on[1]


def test_what_reaches_a_worker(spark, tmp_path):
    pipeline = Pipeline("rides")
    source = ParquetSource(written(tmp_path / "in", rides()), Ride, name="rides")
    pipeline.from_source(source).filter(rare).map(city_in_capitals).sink_to(FileSink("out", "out"))
    plan = pipeline.plan(PIPELINED)
    (region,) = plan.regions
    (filtering,) = (node for node in plan.nodes_of(region) if node.kind == "filter")
    frames = RegionFrames(plan, region, spark, None, [PartitionStart(plan)])
    reaching = frames.input_of(filtering.id)
    assert reaching.columns == ["number", "city"]
    assert reaching.count() == 20


def test_many_filters_have_a_short_condition():
    pipeline = Pipeline("rides")
    rides = pipeline.from_source(ParquetSource("in", Ride, name="rides"))
    for _ in range(40):
        rides = rides.filter(rare)
    rides.map(city_in_capitals).sink_to(FileSink("out", "out"))
    assert len(physical(pipeline.plan(PIPELINED))) < 10_000


def test_the_plan_says_which_rows_do_not_travel():
    pipeline = Pipeline("rides")
    rides = pipeline.from_source(ParquetSource("in", Ride, name="rides"))
    rides.filter(rare).filter(far_enough).map(city_in_capitals).sink_to(FileSink("out", "out"))
    text = physical(pipeline.plan(PIPELINED))
    assert "Spark leaves out rows for which this is false: CASE WHEN (pmod(`number`, (20L)) = (7L)) THEN " in text
