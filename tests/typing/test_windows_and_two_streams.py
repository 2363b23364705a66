"""Windows, joins, connected and broadcast streams."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple, assert_type

from dagster_unified.api import (
    AggregateFunction,
    BroadcastProcessFunction,
    CoGroupFunction,
    CoMapFunction,
    CoProcessFunction,
    CountEvictor,
    CountSlidingWindowAssigner,
    CountTrigger,
    CountTumblingWindowAssigner,
    DataStream,
    DeltaEvictor,
    DeltaTrigger,
    EventTimeSessionWindows,
    EventTimeTrigger,
    FlatJoinFunction,
    JoinFunction,
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
    KeyedStream,
    MapStateDescriptor,
    OutputTag,
    Pipeline,
    ProcessJoinFunction,
    ProcessWindowFunction,
    PurgingTrigger,
    SlidingEventTimeWindows,
    TimeWindow,
    TumblingEventTimeWindows,
    WatermarkStrategy,
    WindowFunction,
)
from dagster_unified.api.types import ConnectedStreams, WindowedStream
from dagster_unified.api.windows import CountWindow, GlobalWindow
from dagster_unified.records import record_type


class Sale(NamedTuple):
    shop: str
    amount: int


class Stock(NamedTuple):
    shop: str
    left: int


class Total(NamedTuple):
    shop: str
    amount: int


HOUR = timedelta(hours=1)
RULES = MapStateDescriptor("rules", str, int)
LATE = OutputTag("late", Sale)
AT_ONCE = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner


def streams() -> tuple[DataStream[Sale], DataStream[Stock]]:
    pipeline = Pipeline("p")
    sales = pipeline.from_collection([Sale("a", 1)]).assign_timestamps_and_watermarks(AT_ONCE("amount"))
    stock = pipeline.from_collection([Stock("a", 1)]).assign_timestamps_and_watermarks(AT_ONCE("left"))
    return sales, stock


def keyed() -> tuple[KeyedStream[str, Sale], KeyedStream[str, Stock]]:
    sales, stock = streams()
    return sales.key_by(lambda s: s.shop), stock.key_by(lambda s: s.shop)


def windowed() -> WindowedStream[str, Sale, TimeWindow]:
    return keyed()[0].window(TumblingEventTimeWindows.of(HOUR))


def runs_with(stream: DataStream[Any], record: Any) -> bool:
    """Whether a stream's records are of a type when it runs."""
    return stream._records("test") == record_type(record)


class Mean(AggregateFunction[Sale, tuple[int, int], float]):
    def create_accumulator(self):  # type: ignore[no-untyped-def]
        return 0, 0

    def add(self, value: Sale, accumulator: tuple[int, int]) -> tuple[int, int]:
        return accumulator[0] + value.amount, accumulator[1] + 1

    def get_result(self, accumulator):  # type: ignore[no-untyped-def]  # pyright: ignore
        return accumulator[0] / accumulator[1]

    def merge(self, a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        return a[0] + b[0], a[1] + b[1]


class Spread(ProcessWindowFunction[Sale, Total, str, TimeWindow]):
    def process(
        self, key: str, context: ProcessWindowFunction.Context[TimeWindow], elements: Iterable[Sale]
    ) -> Iterable[Total]:
        yield Total(key, context.window().start)


class Named(WindowFunction[float, tuple[str, float], str, TimeWindow]):
    def apply(self, key: str, window: TimeWindow, inputs: Iterable[float]) -> Iterable[tuple[str, float]]:
        return [(key, mean) for mean in inputs]


class Both(CoMapFunction[Sale, Stock, Total]):
    def map1(self, value: Sale) -> Total:
        return Total(value.shop, value.amount)

    def map2(self, value: Stock) -> Total:
        return Total(value.shop, value.left)


class Match(KeyedCoProcessFunction[str, Sale, Stock, Total]):
    def process_element1(self, value: Sale, ctx: KeyedCoProcessFunction.Context[str]) -> Iterable[Total]:
        yield Total(ctx.get_current_key(), value.amount)

    def process_element2(self, value: Stock, ctx: KeyedCoProcessFunction.Context[str]) -> Iterable[Total]:
        return []


class Unkeyed(CoProcessFunction[Sale, Stock, int]):
    def process_element1(self, value: Sale, ctx: CoProcessFunction.Context) -> Iterable[int]:
        yield value.amount

    def process_element2(self, value: Stock, ctx: CoProcessFunction.Context) -> Iterable[int]:
        yield value.left


class Join(JoinFunction[Sale, Stock, Total]):
    def join(self, first: Sale, second: Stock) -> Total:
        return Total(first.shop, second.left)


class FlatJoin(FlatJoinFunction[Sale, Stock, Total]):
    def join(self, first: Sale, second: Stock) -> Iterable[Total]:
        yield Total(first.shop, second.left)


class Group(CoGroupFunction[Sale, Stock, Total]):
    def co_group(self, first: list[Sale], second: list[Stock]) -> Iterable[Total]:
        return []


class Near(ProcessJoinFunction[Sale, Stock, Total]):
    def process_element(self, left: Sale, right: Stock, ctx: ProcessJoinFunction.Context) -> Iterable[Total]:
        yield Total(left.shop, right.left)


class Judge(BroadcastProcessFunction[Sale, Stock, Total]):
    def process_element(self, value: Sale, ctx: BroadcastProcessFunction.ReadOnlyContext) -> Iterable[Total]:
        return []

    def process_broadcast_element(self, value: Stock, ctx: BroadcastProcessFunction.Context) -> Iterable[Total]:
        return []


class KeyedJudge(KeyedBroadcastProcessFunction[str, Sale, Stock, Total]):
    def process_element(self, value: Sale, ctx: KeyedBroadcastProcessFunction.ReadOnlyContext[str]) -> Iterable[Total]:
        yield Total(ctx.get_current_key(), value.amount)

    def process_broadcast_element(self, value: Stock, ctx: KeyedBroadcastProcessFunction.Context) -> Iterable[Total]:
        return []


def test_an_assigner_says_the_window() -> None:
    sales, _ = keyed()
    assert_type(windowed(), WindowedStream[str, Sale, TimeWindow])
    sliding = SlidingEventTimeWindows.of(HOUR, HOUR / 2)
    assert_type(sales.window(sliding), WindowedStream[str, Sale, TimeWindow])
    assert_type(sales.window(EventTimeSessionWindows.with_gap(HOUR)), WindowedStream[str, Sale, TimeWindow])
    dynamic = sales.window(EventTimeSessionWindows.with_dynamic_gap(lambda s: s.amount))
    assert_type(dynamic, WindowedStream[str, Sale, TimeWindow])
    assert_type(sales.count_window(2), WindowedStream[str, Sale, GlobalWindow])
    assert_type(sales.window(CountTumblingWindowAssigner.of(2)), WindowedStream[str, Sale, CountWindow])
    by_count = sales.window(CountSlidingWindowAssigner.of(3, 1))
    assert_type(by_count, WindowedStream[str, Sale, CountWindow])
    by_count.process(Spread())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert_type(streams()[0].window_all(sliding), WindowedStream[int, Sale, TimeWindow])


def test_triggers_evictors_and_late_data_keep_the_window() -> None:
    triggered = windowed().trigger(PurgingTrigger.of(EventTimeTrigger())).trigger(CountTrigger.of(2))
    evicting = triggered.evictor(CountEvictor.of(2)).side_output_late_data(LATE)
    assert_type(evicting, WindowedStream[str, Sale, TimeWindow])
    windowed().trigger(DeltaTrigger.of(1.0, lambda a, b: b.amount - a.amount, Sale))
    windowed().evictor(DeltaEvictor.of(1.0, lambda a, b: b.amount - a.amount))


def test_what_a_window_gives() -> None:
    assert_type(windowed().reduce(lambda a, b: Sale(a.shop, a.amount + b.amount)), DataStream[Sale])
    assert_type(windowed().max_by("amount"), DataStream[Sale])
    spread = windowed().process(Spread())
    assert_type(spread, DataStream[Total])
    assert runs_with(spread, Total)
    mean = windowed().aggregate(Mean())
    assert_type(mean, DataStream[float])
    assert runs_with(mean, float)
    named = windowed().aggregate(Mean(), Named())
    assert_type(named, DataStream[tuple[str, float]])
    assert runs_with(named, tuple[str, float])
    assert_type(windowed().reduce(lambda a, b: a, Spread()), DataStream[Total])
    assert_type(windowed().agg("sum(amount) AS amount", output_type=Total), DataStream[Total])


def test_connected_streams() -> None:
    sales, stock = streams()
    connected = sales.connect(stock)
    assert_type(connected, ConnectedStreams[Sale, Stock])
    both = connected.map(Both())
    assert_type(both, DataStream[Total])
    assert runs_with(both, Total)
    assert_type(connected.process(Unkeyed()), DataStream[int])
    assert_type(connected.key_by(lambda s: s.shop, lambda s: s.shop).process(Match()), DataStream[Total])
    assert_type(connected.key_by("shop", "shop").process(Match()), DataStream[Total])
    left, right = keyed()
    assert_type(left.connect(right).process(Match()), DataStream[Total])


def test_joins() -> None:
    sales, stock = streams()
    pairs = sales.join(stock).where("shop").equal_to(lambda s: s.shop).window(TumblingEventTimeWindows.of(HOUR))
    assert_type(pairs.apply(Join()), DataStream[Total])
    assert_type(pairs.apply(FlatJoin()), DataStream[Total])
    assert_type(pairs.apply(lambda a, b: a.amount + b.left, output_type=int), DataStream[int])
    groups = sales.co_group(stock).where("shop").equal_to("shop").window(TumblingEventTimeWindows.of(HOUR))
    assert_type(groups.apply(Group()), DataStream[Total])
    left, right = keyed()
    near = left.interval_join(right).between(-HOUR, HOUR).process(Near())
    assert_type(near, DataStream[Total])
    assert runs_with(near, Total)


def test_broadcast_streams() -> None:
    sales, stock = streams()
    judged = sales.connect(stock.broadcast(RULES)).process(Judge())
    assert_type(judged, DataStream[Total])
    assert runs_with(judged, Total)
    by_shop = sales.key_by(lambda s: s.shop)
    assert_type(by_shop.connect(stock.broadcast(RULES)).process(KeyedJudge()), DataStream[Total])


def rejected() -> None:
    """Never called: what a checker has to reject."""
    sales, stock = streams()
    left, right = keyed()
    windowed().reduce(lambda a, b: a.amount + b.amount)  # type: ignore  # pyright: ignore
    windowed().side_output_late_data(OutputTag("late", Stock))  # type: ignore[arg-type]  # pyright: ignore
    left.count_window(2).process(Spread())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    left.window(EventTimeSessionWindows.with_dynamic_gap(lambda s: s.left))  # type: ignore  # pyright: ignore
    right.window(TumblingEventTimeWindows.of(HOUR)).aggregate(Mean())  # type: ignore  # pyright: ignore
    windowed().process(Named())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    stock.connect(sales).map(Both())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    sales.connect(stock).process(Match())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    right.interval_join(left).process(Near())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    sales.connect(stock.broadcast(RULES)).process(KeyedJudge())  # type: ignore  # pyright: ignore[reportArgumentType]
    left.connect(stock.broadcast(RULES)).process(Judge())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    windows = stock.join(sales).where("shop").equal_to("shop").window(TumblingEventTimeWindows.of(HOUR))
    windows.apply(Join())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
