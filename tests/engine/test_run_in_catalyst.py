"""BATCH runs chains and reduces in Catalyst whose functions are known; no result changes, and no error."""

import random
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_unified.api import (
    AggregateFunction,
    KeyedProcessFunction,
    MapFunction,
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
from dagster_unified.graph.execution_graph import ExecutionGraph, Runs
from tests.support import run_stages

PIPELINED = {"execution.batch-shuffle-mode": "ALL_EXCHANGES_PIPELINED"}
BLOCKING = {"execution.batch-shuffle-mode": "ALL_EXCHANGES_BLOCKING"}


class Sale(NamedTuple):
    shop: str
    number: int
    cents: int
    tip: int | None
    at: datetime
    rate: float


SCHEMA = pa.schema(
    [
        ("shop", pa.string()),
        ("number", pa.int64()),
        ("cents", pa.int64()),
        ("tip", pa.int64()),
        ("at", pa.timestamp("us", "UTC")),
        ("rate", pa.float64()),
    ]
)


def sales(count=600):
    return [
        Sale(
            f"shop {number % 7}",
            number,
            (number * 37) % 1000 - 200,
            None if number % 5 else number,
            datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number),
            number / 8,
        )
        for number in range(count)
    ]


def table_of(rows, **columns):
    """A table of records; `columns` replace some."""
    table = pa.Table.from_pylist([row._asdict() for row in rows], SCHEMA)
    for name, column in columns.items():
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return table


class Total(NamedTuple):
    shop: str
    cents: int
    least: int
    most: int
    tip: int | None


class Tip(NamedTuple):
    shop: str
    tip: int


@dataclass
class Sum:
    shop: str
    cents: int


def doubled(s: Sale) -> Sale:
    return Sale(s.shop, s.number, s.cents * 2, s.tip, s.at, s.rate / 4)


def positive(s: Sale) -> bool:
    return s.cents > 0


def total_of(s: Sale) -> Total:
    return Total(s.shop, s.cents, s.cents, s.cents, s.tip)


def totals(a: Total, b: Total) -> Total:
    return Total(a.shop, a.cents + b.cents, min(a.least, b.least), max(a.most, b.most), a.tip)


def totals_last(a: Total, b: Total) -> Total:
    return Total(b.shop, a.cents + b.cents, min(a.least, b.least), max(a.most, b.most), b.tip)


def sum_of(s: Sale) -> Sum:
    return Sum(s.shop, s.cents)


def sums(a: Sum, b: Sum) -> Sum:
    return Sum(a.shop, a.cents + b.cents)


def tipped(s: Sale) -> bool:
    return s.tip > 3


def cents_of(s: Sale) -> int:
    return s.cents


def added(a: int, b: int) -> int:
    return a + b


def shop_of(s: Sale) -> str:
    return s.shop


def ten(s: Sale) -> int:
    return s.number // 10


def ninth(n: int) -> int:
    return n % 9


def half(t: Total) -> int:
    return t.most % 2


def hour_of(s: Sale) -> str:
    return s.at.strftime("%H")


def twice(s: Sale):
    yield s
    if s.cents > 100:
        yield s


def shops(s: Sale) -> Sale:
    return Sale(s.shop.upper(), s.number, s.cents, s.tip, s.at, s.rate)


class Last(KeyedProcessFunction[str, Total, int]):
    def open(self, context):
        self.last = context.get_state(ValueStateDescriptor("last", int))

    def process_element(self, value, ctx):
        self.last.update((self.last.value() or 0) + value.cents)
        yield self.last.value()


def timed(stream):
    by_field = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(seconds=1)).with_timestamp_assigner("at")
    return stream.assign_timestamps_and_watermarks(by_field)


class At(KeyedProcessFunction[str, Sale, str]):
    """Emits event times."""

    def process_element(self, value, ctx):
        yield f"{value.shop} {value.cents} {ctx.timestamp()}"


class Mean(AggregateFunction[Sale, tuple[int, int], float]):
    def create_accumulator(self) -> tuple[int, int]:
        return 0, 0

    def add(self, value: Sale, accumulator: tuple[int, int]) -> tuple[int, int]:
        total, count = accumulator
        return total + value.cents, count + 1

    def get_result(self, accumulator: tuple[int, int]) -> float:
        return accumulator[0] / accumulator[1]

    def merge(self, a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        return a[0] + b[0], a[1] + b[1]


class Odd(AggregateFunction[Sale, tuple[int, int, int, int], int]):
    """Begins with something, subtracts, counts some, and has a smallest one."""

    def create_accumulator(self) -> tuple[int, int, int, int]:
        return 7, 1, 50, -3

    def add(self, value: Sale, accumulator: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        less = accumulator[0] - value.cents * 2
        some = accumulator[1] + 1 if value.cents > 300 else accumulator[1]
        return less, some, min(value.cents, accumulator[2]), max(accumulator[3], value.number % 11)

    def get_result(self, accumulator: tuple[int, int, int, int]) -> int:
        less, some, least, most = accumulator
        return less * 1000 + some * 100 + least * 10 + most

    def merge(self, a, b):
        raise NotImplementedError


class More(Odd):
    """Adds constants, in several orders."""

    def add(self, value: Sale, accumulator: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        a, b, c, d = accumulator
        return a + 1 + value.cents, 2 + b - value.cents, value.cents + 3 + c, d


class Bools(Odd):
    """Adds truth values, which are integers."""

    def add(self, value: Sale, accumulator: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        a, b, c, d = accumulator
        return a + (value.cents > 10), b, c, d


class Truncated(Odd):
    """Its results are no integers."""

    def get_result(self, accumulator: tuple[int, int, int, int]) -> int:
        return 0.5


class Closed(MapFunction[Sale, int]):
    """Is told of the end."""

    def map(self, value: Sale) -> int:
        return value.cents

    def close(self) -> None:
        raise ValueError("closed")


def rests_in_vain(s: Sale) -> int:
    rest = s.number % (s.number - 5)  # noqa: F841
    return s.cents


def above_in_vain(s: Sale) -> bool:
    rest = s.number // (s.number - 5)  # noqa: F841
    return s.cents > 0


def key_in_vain(s: Sale) -> int:
    rest = 3 // (s.number - 5)  # noqa: F841
    return s.number


class Count(AggregateFunction[int, int, int]):
    def create_accumulator(self) -> int:
        return 0

    def add(self, value: int, accumulator: int) -> int:
        return accumulator + 1

    def get_result(self, accumulator: int) -> int:
        return accumulator

    def merge(self, a: int, b: int) -> int:
        return a + b


def in_minutes(keyed):
    return keyed.window(TumblingEventTimeWindows.of(timedelta(minutes=1)))


def by_shop(a: Sale, b: Sale) -> Sale:
    return Sale(a.shop, b.number, a.cents + b.cents, b.tip, b.at, a.rate)


CASES = {
    "map": lambda s: s.map(doubled),
    "filter": lambda s: s.filter(positive),
    "several": lambda s: s.filter(positive).map(doubled).filter(lambda r: r.cents % 4 == 0).map(total_of),
    "map behind a key": lambda s: s.key_by("shop").map(cents_of),
    "reduce by a field": lambda s: s.map(total_of).key_by("shop").reduce(totals),
    "reduce by a function": lambda s: s.map(total_of).key_by(lambda t: t.shop).reduce(totals_last),
    "reduce by what is computed": lambda s: s.map(cents_of).key_by(ninth).reduce(added),
    "reduce a source": lambda s: s.key_by(ten).reduce(
        lambda a, b: Sale(a.shop, a.number, a.cents, a.tip, a.at, a.rate) if a.number < b.number else b
    ),
    "by a key that only Python knows": lambda s: (
        s.map(doubled)
        .key_by(hour_of)
        .reduce(lambda a, b: Sale(a.shop, a.number, a.cents + b.cents, a.tip, a.at, a.rate))
    ),
    "first and last": lambda s: s.key_by(ten).reduce(
        lambda a, b: Sale(b.shop, a.number, a.cents + b.cents, b.tip, b.at, a.rate)
    ),
    "texts": lambda s: s.key_by(ten).reduce(
        lambda a, b: Sale(min(a.shop, b.shop), max(a.number, b.number), a.cents, b.tip, b.at, a.rate)
    ),
    "dataclasses": lambda s: s.map(sum_of).key_by(lambda r: r.shop).reduce(sums),
    "built in": lambda s: s.map(cents_of).key_by(ninth).max(),
    "behind a reduce": lambda s: s.map(total_of).key_by("shop").reduce(totals).filter(lambda t: t.most > 0),
    "Python behind a reduce": lambda s: s.map(total_of).key_by("shop").reduce(totals).map(repr, str),
    "Python before a reduce": lambda s: s.flat_map(twice, Sale).map(total_of).key_by("shop").reduce(totals),
    "Python between": lambda s: (
        s.map(doubled)
        .map(shops)
        .key_by("shop")
        .reduce(lambda a, b: Sale(a.shop, max(a.number, b.number), a.cents + b.cents, a.tip, a.at, a.rate))
    ),
    "two reduces": lambda s: s.map(total_of).key_by("shop").reduce(totals).key_by(half).reduce(totals),
    "two readers": lambda s: s.map(total_of).union(s.filter(positive).map(total_of)).key_by("shop").reduce(totals),
    "branches": lambda s: (lambda m: m.filter(lambda t: t.cents > 5).union(m.key_by("shop").reduce(totals)))(
        s.map(total_of)
    ),
    "subtasks": lambda s: s.map(total_of).key_by("shop").reduce(totals).set_parallelism(2),
    "rebalanced": lambda s: s.rebalance().map(doubled).rebalance().filter(positive),
    "keyed process": lambda s: s.map(total_of).key_by(lambda t: t.shop).reduce(totals).key_by("shop").process(Last()),
    "event time": lambda s: timed(s.map(doubled)).filter(positive).key_by("shop").process(At()),
    "event time of a reduce": lambda s: (
        timed(s)
        .key_by("shop")
        .reduce(lambda a, b: Sale(a.shop, max(a.number, b.number), a.cents + b.cents, None, a.at, 0.5))
        .key_by("shop")
        .process(At())
    ),
    "first and last by event time": lambda s: (
        timed(s).key_by(ten).reduce(lambda a, b: Sale(b.shop, a.number, a.cents + b.cents, a.tip, b.at, a.rate))
    ),
    "a key that is summed": lambda s: (
        s.map(lambda r: (r.cents % 5, r.cents), tuple[int, int])
        .key_by("f0")
        .reduce(lambda a, b: (a[0] + b[0], a[1] + b[1]))
    ),
    "windows": lambda s: in_minutes(timed(s).key_by("shop")).aggregate(Mean()),
    "windows with an offset": lambda s: (
        timed(s.filter(positive))
        .key_by(shop_of)
        .window(TumblingEventTimeWindows.of(timedelta(seconds=70), timedelta(seconds=13)))
        .aggregate(Odd())
    ),
    "windows and constants": lambda s: in_minutes(timed(s).key_by("shop")).aggregate(More()),
    "windows with a reduce": lambda s: in_minutes(timed(s).key_by("shop")).reduce(by_shop),
    "windows with a sum": lambda s: in_minutes(timed(s).key_by("shop")).sum("cents"),
    "windows and their times": lambda s: in_minutes(timed(s).key_by("shop")).sum("cents").key_by("shop").process(At()),
    "windows behind windows": lambda s: in_minutes(
        in_minutes(timed(s).key_by("shop")).aggregate(Odd()).key_by(ninth)
    ).aggregate(Count()),
    "values": lambda s: s.map(cents_of).filter(lambda n: n > 3).map(lambda n: n * 2, int),
    "pairs": lambda s: (
        s.map(lambda r: (r.shop, r.cents), tuple[str, int])
        .key_by(lambda p: p[0])
        .reduce(lambda a, b: (a[0], a[1] + b[1]))
    ),
}
WITHOUT = {"reduce a source", "event time of a reduce"}
"""One of two records, and fields that are no combination of the same field of both: Python makes them."""


class Up(AggregateFunction[Sale, int, int]):
    """Adds up what is more than an integer on the way."""

    def create_accumulator(self) -> int:
        return 0

    def add(self, value: Sale, accumulator: int) -> int:
        return accumulator + value.cents * 2**53

    def get_result(self, accumulator: int) -> int:
        return accumulator

    def merge(self, a: int, b: int) -> int:
        return a + b


class Tips(Up):
    def add(self, value: Sale, accumulator: int) -> int:
        return accumulator + value.tip


class LeastTip(Up):
    def add(self, value: Sale, accumulator: int) -> int:
        return min(accumulator, value.tip)


NOT_SAID = {
    "a value that nobody uses": lambda s: s.map(rests_in_vain),
    "a value that nobody uses, in a filter": lambda s: s.filter(above_in_vain),
    "a value that nobody uses, in a filter before Python": lambda s: s.filter(above_in_vain).map(repr, str),
    "a value that nobody uses, in a key": lambda s: s.key_by(key_in_vain).process(At()),
    "truth values that are added": lambda s: in_minutes(timed(s).key_by("shop")).aggregate(Bools()),
    "None in a sum of a window": lambda s: in_minutes(timed(s).key_by("shop")).aggregate(Tips()).set_parallelism(1),
    "the smallest of None": lambda s: in_minutes(timed(s).key_by("shop")).aggregate(LeastTip()).set_parallelism(1),
    "a result of another type": lambda s: in_minutes(timed(s).key_by("shop")).aggregate(Truncated()),
    "a function that is closed": lambda s: s.map(Closed()),
    "windows that overlap": lambda s: (
        timed(s).key_by("shop").window(TumblingEventTimeWindows(60_000, 20_000, 0)).sum("cents")
    ),
}
"""What only looks as if Spark's SQL could say it."""


def outcome(case, source, spark, folder, lowering, options=None, apart=True):
    """What a case writes, as texts in their order, or its error; and how often a stage began."""
    pipeline = Pipeline("shop")
    found = case(pipeline.from_source(ParquetSource(source, Sale, name="sales")))
    (found.rebalance() if apart else found).map(repr, str).sink_to(FileSink(str(folder / "out"), "out"))
    plan, seen = pipeline.plan({**PIPELINED, **(options or {}), "execution.lowering": lowering}), []
    store = IntermediateStore(str(folder / "store"))
    try:
        run_all(Run(plan, spark, store, "all", "run", observe=seen.append))
    except UnifiedError as error:
        return (type(error), str(error)), 0
    begun = Counter(event.stage for event in seen if isinstance(event, StageStarted))
    return sorted(pq.read_table(folder / "out").column("value").to_pylist()), max(begun.values())


def both(case, table, spark, folder, options=None, apart=True):
    """What a case writes with functions that are read, and with functions that are called."""
    source = folder / "in"
    source.mkdir()
    pq.write_table(table, source / "records.parquet")
    (on, begun), (off, _) = (
        outcome(case, str(source), spark, folder / lowering, lowering, options, apart) for lowering in ("AUTO", "OFF")
    )
    return on, off, begun


def in_catalyst(case, options=PIPELINED):
    """The operators of a case that Catalyst runs in place of Python."""
    pipeline = Pipeline("shop")
    case(pipeline.from_source(ParquetSource("in", Sale, name="sales"))).sink_to(FileSink("out", "out"))
    plan = pipeline.plan(options)
    graphs = [ExecutionGraph.of(plan, region) for region in plan.regions]
    for graph in graphs:
        assert all(graph.vertex_of[number].runs is Runs.CATALYST for number in graph.in_sql)
    return [plan.graph.node(number).kind for graph in graphs for number in graph.in_sql]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", [PIPELINED, BLOCKING], ids=["1", "n"])
def test_results_are_the_same(name, options, spark, tmp_path):
    assert bool(in_catalyst(CASES[name])) == (name not in WITHOUT)
    on, off, begun = both(CASES[name], table_of(sales()), spark, tmp_path, options)
    assert on == off
    assert on
    assert begun == 1


def large(s: Sale) -> Sale:
    return Sale(s.shop, s.number, s.cents * 2**60, s.tip, s.at, s.rate)


def small(s: Sale) -> Sale:
    return Sale(s.shop, s.number, s.cents // 2**60, s.tip, s.at, s.rate)


def more(s: Sale) -> Sale:
    return Sale(s.shop, s.number, s.cents, s.tip + 1, s.at, s.rate)


def ratio(s: Sale) -> Sale:
    return Sale(s.shop, s.number, s.cents, s.tip, s.at, 1.0 / s.rate)


def has_tip(s: Sale) -> bool:
    return s.tip is not None


def never(s: Sale) -> bool:
    return False


def tip_of(s: Sale) -> Tip:
    return Tip(s.shop, s.tip)


def one(t: Tip) -> int:
    return 1


def no_shop(t: Tip) -> bool:
    return t.shop == "none"


def in_capitals(t: Tip) -> str:
    return t.shop.upper()


def huge(s: Sale) -> Tip:
    return Tip(s.shop, s.number * 2**60)


def huge_tips(a: Tip, b: Tip) -> Tip:
    return Tip(a.shop, a.tip + b.tip)


def tip_hour(s: Sale) -> str:
    return None if s.tip is None else s.at.strftime("%H")


ONLY_PYTHON = {
    "a key that is None": lambda s: s.key_by(tip_hour).reduce(by_shop),
    "is not None behind a comparison": lambda s: s.filter(tipped).filter(has_tip),
    "is not None behind a map": lambda s: s.map(more).filter(has_tip),
    "a filter that keeps nothing": lambda s: s.map(more).filter(never),
    "None where it may not be, and nobody reads it": lambda s: s.map(tip_of).map(one),
    "None where it may not be, and a filter drops it": lambda s: s.map(tip_of).filter(no_shop),
    "None where it may not be, and Python reads another field": lambda s: s.map(tip_of).rebalance().map(in_capitals),
    "a large number behind an exchange that nobody reads": lambda s: s.map(huge).rebalance().map(one),
    "a large number behind an exchange that a filter drops": lambda s: s.map(huge).rebalance().filter(no_shop),
    "a large sum that nobody reads": lambda s: s.map(huge).key_by("shop").reduce(huge_tips).rebalance().map(one),
    "a sum of a window": lambda s: in_minutes(timed(s).key_by("shop")).aggregate(Up()).set_parallelism(1),
    "a number that is too large on its way": lambda s: s.map(large).map(small),
    "a number that is too large": lambda s: s.map(large),
    "a sum that is too large": lambda s: s.map(lambda r: r.cents * 2**52, int).key_by(ninth).reduce(added),
    "a sum that is too large, of which the half is read": lambda s: (
        s.map(lambda r: r.cents * 2**52, int).key_by(ninth).reduce(added).map(lambda n: n // 2**20, int)
    ),
    "None in a filter": lambda s: s.filter(tipped),
    "None in a map": lambda s: s.map(more),
    "None in a map of which nobody reads it": lambda s: s.map(more).map(cents_of),
    "None in a filter behind a map": lambda s: s.map(doubled).filter(tipped).map(cents_of),
    "zero": lambda s: s.map(ratio),
    "zero that nobody reads": lambda s: s.map(ratio).map(cents_of),
}


@pytest.fixture
def compiled(spark):
    """Spark compiles what it runs: it asks some conditions in another order then."""
    settings = {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}
    before = {name: spark.conf.get(name) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    yield
    for name, value in before.items():
        spark.conf.set(name, value)


@pytest.mark.parametrize("name", ONLY_PYTHON)
@pytest.mark.usefixtures("compiled")
def test_where_only_functions_know_the_stage_runs_again(name, spark, tmp_path):
    assert in_catalyst(ONLY_PYTHON[name])
    on, off, begun = both(ONLY_PYTHON[name], table_of(sales()), spark, tmp_path)
    assert on == off
    assert isinstance(on, tuple) or begun == 2


INVALID = pa.array([b"\xff\xfe"] * 600, pa.binary()).buffers()
WRONG = {
    "shop": pa.Array.from_buffers(pa.string(), 600, INVALID),
    "number": pa.array([*range(599), None], pa.int64()),
    "at": pa.array([2**62] * 600, pa.int64()).cast(pa.timestamp("us", "UTC")),
}
READERS = {
    "map": lambda s: s.map(doubled),
    "map of one field": lambda s: s.map(cents_of),
    "filter that drops all": lambda s: s.filter(lambda r: r.cents > 10_000),
    "reduce": lambda s: s.key_by("shop").reduce(by_shop),
    "reduce by a function": lambda s: s.key_by(shop_of).reduce(by_shop),
    "key of a function": lambda s: s.key_by(shop_of).process(At()),
}


@pytest.mark.parametrize("field", WRONG)
@pytest.mark.parametrize("name", READERS)
def test_a_value_that_is_not_of_its_type_is_found(name, field, spark, tmp_path):
    on, off, _ = both(READERS[name], table_of(sales(), **{field: WRONG[field]}), spark, tmp_path)
    assert on == off
    assert issubclass(on[0], UnifiedError)


class Daily(NamedTuple):
    number: int
    day: int


@pytest.mark.parametrize("name", ["filter", "map and filter"])
def test_a_filter_by_a_folder_does_not_hide_what_is_in_others(name, spark, tmp_path):
    for day, number in ((1, None), (2, 5)):
        (tmp_path / f"in/day={day}").mkdir(parents=True)
        pq.write_table(pa.table({"number": pa.array([number], pa.int64())}), tmp_path / f"in/day={day}/a.parquet")
    found = []
    for lowering in ("AUTO", "OFF"):
        pipeline = Pipeline("days")
        stream = pipeline.from_source(ParquetSource(str(tmp_path / "in"), Daily, name="days"))
        stream = stream if name == "filter" else stream.map(lambda d: Daily(d.number + 1, d.day), Daily)
        kept = stream.filter(lambda d: d.day == 2)
        kept.sink_to(FileSink(str(tmp_path / lowering), "out"))
        with pytest.raises(UnifiedError) as raised:
            run_stages(pipeline.plan({**PIPELINED, "execution.lowering": lowering}), spark, tmp_path / lowering)
        found.append((type(raised.value), str(raised.value)))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["a number that is too large", "None in a map"])
def test_what_goes_on_to_a_function_in_the_chain_is_what_the_one_before_returned(name, spark, tmp_path):
    """Also where a column cannot hold it."""
    on, off, _ = both(ONLY_PYTHON[name], table_of(sales()), spark, tmp_path, apart=False)
    assert on == off


def test_a_chain_of_many_functions_stays_in_python():
    """The JVM does not compile what Spark makes of them, and so they would be slower there."""

    def chain(length):
        def build(stream):
            for _ in range(length):
                stream = stream.map(doubled)
            return stream

        return build

    assert in_catalyst(chain(6)) == ["map"] * 6
    assert in_catalyst(chain(7)) == []


def test_an_exchange_before_a_map_stays(spark):
    pipeline = Pipeline("shop")
    stream = pipeline.from_source(ParquetSource("in", Sale, name="sales")).key_by("shop").map(cents_of)
    stream.set_parallelism(3).sink_to(FileSink("out", "out"))
    plan = pipeline.plan(PIPELINED)
    (region,) = plan.regions
    (mapping,) = (node for node in plan.nodes_of(region) if node.kind == "map")
    frames = RegionFrames(plan, region, spark, None, [PartitionStart(plan)])
    rows = spark.createDataFrame(table_of(sales()))
    frames.port = lambda port: rows
    assert mapping.id in frames.graph.in_sql
    assert frames.input_of(mapping.id).rdd.getNumPartitions() == 3


@pytest.mark.parametrize("name", NOT_SAID)
@pytest.mark.usefixtures("compiled")
def test_what_sql_cannot_say_stays_in_python(name, spark, tmp_path):
    on, off, _ = both(NOT_SAID[name], table_of(sales()), spark, tmp_path)
    assert on == off


class Numbered(MapFunction[Sale, Total]):
    """Gives another number each time."""

    def map(self, value: Sale) -> Total:
        number = random.getrandbits(40)
        return Total(value.shop, number, number, number, None)


def least(t: Total) -> str:
    return f"{t.shop} {t.least}"


def most(t: Total) -> str:
    return f"{t.shop} {t.most}"


def test_several_readers_see_the_same_records_where_they_are_not_computed_twice(spark, tmp_path):
    pq.write_table(table_of(sales(7)), tmp_path / "in.parquet")
    pipeline = Pipeline("shop")
    numbered = pipeline.from_source(ParquetSource(str(tmp_path / "in.parquet"), Sale, name="sales")).map(Numbered())
    reduced = numbered.key_by("shop").reduce(totals)
    for reader in (least, most):
        reduced.rebalance().map(reader, str).sink_to(FileSink(str(tmp_path / reader.__name__), reader.__name__))
    run_stages(pipeline.plan(PIPELINED), spark, tmp_path)
    one, other = (pq.read_table(tmp_path / reader.__name__).column("value").to_pylist() for reader in (least, most))
    assert sorted(one) == sorted(other)


def test_a_stream_that_is_written_and_read_is_computed_once(spark, tmp_path):
    pq.write_table(table_of(sales(7)), tmp_path / "in.parquet")
    pipeline = Pipeline("shop")
    numbered = pipeline.from_source(ParquetSource(str(tmp_path / "in.parquet"), Sale, name="sales")).map(Numbered())
    numbered.sink_to(FileSink(str(tmp_path / "all"), "all"))
    numbered.rebalance().map(most, str).sink_to(FileSink(str(tmp_path / "most"), "most"))
    run_stages(pipeline.plan(PIPELINED), spark, tmp_path)
    whole = pq.read_table(tmp_path / "all").to_pylist()
    found = pq.read_table(tmp_path / "most").column("value").to_pylist()
    assert sorted(f"{row['shop']} {row['most']}" for row in whole) == sorted(found)


@pytest.mark.parametrize("name", ["reduce by a field", "windows", "windows with a sum"])
def test_rows_are_in_the_order_in_which_a_worker_emits_them(name, spark, tmp_path):
    pq.write_table(table_of(sales()[::-1]), tmp_path / "in.parquet")
    found = []
    for lowering in ("AUTO", "OFF"):
        pipeline = Pipeline("shop")
        stream = CASES[name](pipeline.from_source(ParquetSource(str(tmp_path / "in.parquet"), Sale, name="sales")))
        stream.set_parallelism(1).sink_to(FileSink(str(tmp_path / lowering), "out"))
        run_stages(pipeline.plan({**PIPELINED, "execution.lowering": lowering}), spark, tmp_path / f"{lowering}-store")
        found.append(pq.read_table(tmp_path / lowering).to_pylist())
    assert found[0] == found[1]
