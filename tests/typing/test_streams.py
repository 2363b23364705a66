"""Streams: what each operator makes of a record's type, and what a checker rejects."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, NamedTuple, assert_type

import pytest

from dagster_unified.api import (
    AsyncDataStream,
    AsyncFunction,
    AsyncRetryStrategy,
    DataStream,
    FilterFunction,
    FlatMapFunction,
    IngestionTimeAssigner,
    KeyedProcessFunction,
    KeyedStream,
    KeySelector,
    MapFunction,
    OutputTag,
    Pipeline,
    ProcessFunction,
    ReduceFunction,
    WatermarkGenerator,
    WatermarkOutput,
    WatermarkStrategy,
)
from dagster_unified.api.types import ConnectedStreams
from dagster_unified.connectors import (
    Change,
    CollectionSource,
    CsvSource,
    DeltaSource,
    ForeachSink,
    JsonSource,
    ParquetSource,
    PrintSink,
    Rate,
    RateSource,
)
from dagster_unified.errors import RecordTypeError
from dagster_unified.graph.connectors import Source
from dagster_unified.records import record_type


class Sale(NamedTuple):
    shop: str
    amount: int
    at: datetime


class Total(NamedTuple):
    shop: str
    amount: int


SALES = [Sale("a", 1, datetime(2026, 1, 1)), Sale("b", 2, datetime(2026, 1, 2))]


def sales() -> DataStream[Sale]:
    return Pipeline("p").from_collection(SALES)


def runs_with(stream: DataStream[Any], record: Any) -> bool:
    """Whether a stream's records are of a type when it runs."""
    return stream._records("test") == record_type(record)


class Amount(MapFunction[Sale, int]):
    def map(self, value):  # type: ignore[no-untyped-def]  # pyright: ignore
        return value.amount


class Words(FlatMapFunction[Sale, str]):
    def flat_map(self, value: Sale) -> Iterable[str]:
        return value.shop.split()


class Large(FilterFunction[Sale]):
    def filter(self, value: Sale) -> bool:
        return value.amount > 10


class Sum(ReduceFunction[Total]):
    def reduce(self, value1: Total, value2: Total) -> Total:
        return Total(value1.shop, value1.amount + value2.amount)


class ByShop(KeySelector[Sale, str]):
    def get_key(self, value):  # type: ignore[no-untyped-def]  # pyright: ignore
        return value.shop.upper()


LARGE = OutputTag("large", Sale)


class Split(ProcessFunction[Sale, Total]):
    def process_element(
        self, value: Sale, ctx: ProcessFunction.Context
    ) -> Iterable[Total | tuple[OutputTag[Sale], Sale]]:
        yield LARGE, value
        yield Total(value.shop, value.amount)


class Count(KeyedProcessFunction[str, Sale, Total]):
    def process_element(self, value: Sale, ctx: KeyedProcessFunction.Context[str]) -> Iterable[Total]:
        yield Total(ctx.get_current_key(), 1)


class Ask(AsyncFunction[Sale, Total]):
    async def async_invoke(self, value: Sale) -> list[Total]:
        return [Total(value.shop, value.amount)]


class Unparametrized(MapFunction):  # type: ignore[type-arg]  # pyright: ignore
    def map(self, value: Sale) -> int:
        return value.amount


class Contradictory(MapFunction[Sale, int]):
    def map(self, value: Sale) -> str:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        return value.shop


def total(sale: Sale) -> Total:
    return Total(sale.shop, sale.amount)


def test_map_gives_what_its_function_gives() -> None:
    stream = sales().map(total)
    assert_type(stream, DataStream[Total])
    assert runs_with(stream, Total)
    named = sales().map(lambda s: (s.shop, s.amount), output_type=tuple[str, int])
    assert_type(named, DataStream[tuple[str, int]])
    assert runs_with(named, tuple[str, int])
    nullable = sales().map(lambda s: s.shop or None, output_type=str | None)
    assert_type(nullable, DataStream[str | None])
    assert runs_with(nullable, str | None)
    assert_type(sales().map(lambda s: s.amount / 2, float), DataStream[float])


def test_the_class_of_a_function_says_its_output_type() -> None:
    stream = sales().map(Amount())
    assert_type(stream, DataStream[int])
    assert runs_with(stream, int)
    assert runs_with(sales().map(Unparametrized()), int)


def test_flat_map_and_filter() -> None:
    stream = sales().filter(Large()).filter(lambda s: s.amount > 1).flat_map(Words())
    assert_type(stream, DataStream[str])
    assert runs_with(stream, str)
    assert_type(sales().flat_map(lambda s: [s.amount], output_type=int), DataStream[int])


def test_a_process_function_gives_its_output_and_a_side_output_its_tag() -> None:
    stream = sales().process(Split())
    assert_type(stream, DataStream[Total])
    assert runs_with(stream, Total)
    side = stream.get_side_output(LARGE)
    assert_type(side, DataStream[Sale])
    assert runs_with(side, Sale)


def test_keys() -> None:
    by_field = sales().key_by(lambda s: s.shop)
    assert_type(by_field, KeyedStream[str, Sale])
    assert_type(by_field.process(Count()), DataStream[Total])
    assert_type(sales().key_by("shop"), KeyedStream[Any, Sale])
    assert_type(sales().key_by("shop", key_type=str), KeyedStream[str, Sale])
    assert_type(sales().key_by("shop", "amount", key_type=tuple[str, int]), KeyedStream[tuple[str, int], Sale])
    assert_type(sales().key_by(ByShop()), KeyedStream[str, Sale])
    assert_type(sales().key_by(lambda s: s.shop.upper(), key_type=str), KeyedStream[str, Sale])


def test_reduce_gives_the_record_that_it_takes() -> None:
    totals = sales().map(total).key_by("shop")
    assert_type(totals.reduce(Sum()), DataStream[Total])
    assert_type(totals.reduce(lambda a, b: Total(a.shop, a.amount + b.amount)), DataStream[Total])
    assert_type(totals.sum("amount"), DataStream[Total])


def test_time_does_not_change_the_record() -> None:
    def moment(sale: Sale) -> datetime:
        return sale.at

    by_name = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(1)).with_timestamp_assigner("at")
    by_function = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(moment)
    assert_type(by_function, WatermarkStrategy[Sale])
    timed = sales().assign_timestamps_and_watermarks(by_name.with_idleness(timedelta(minutes=1)))
    assert_type(timed, DataStream[Sale])
    assert_type(sales().assign_timestamps_and_watermarks(by_function), DataStream[Sale])
    lambdas = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner
    sales().assign_timestamps_and_watermarks(lambdas(lambda s: s.at))
    by_clock = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(IngestionTimeAssigner())
    assert_type(sales().assign_timestamps_and_watermarks(by_clock), DataStream[Sale])


class OfSales(WatermarkGenerator[Sale]):
    def on_event(self, event: Sale, event_timestamp: int, output: WatermarkOutput) -> None:
        output.emit_watermark(event.at)
        output.emit_watermark(event_timestamp - event.amount)


class OfAnything(WatermarkGenerator[object]):
    def on_event(self, event: object, event_timestamp: int, output: WatermarkOutput) -> None:
        output.emit_watermark(event_timestamp)


def test_a_watermark_generator_is_of_the_record() -> None:
    def of_total(total: Total) -> int:
        return total.amount

    strategy = WatermarkStrategy.for_generator(OfSales)
    assert_type(strategy, WatermarkStrategy[Sale])
    assert_type(strategy.with_timestamp_assigner("at"), WatermarkStrategy[Sale])
    assert_type(strategy.with_timestamp_assigner(lambda s: s.at), WatermarkStrategy[Sale])
    by_clock = strategy.with_timestamp_assigner(IngestionTimeAssigner()).with_idleness(timedelta(minutes=1))
    assert_type(sales().assign_timestamps_and_watermarks(by_clock), DataStream[Sale])
    anything = WatermarkStrategy.for_generator(lambda: OfAnything())
    assert_type(anything, WatermarkStrategy[object])
    assert_type(anything.with_timestamp_assigner(of_total), WatermarkStrategy[Total])
    strategy.with_timestamp_assigner(of_total)  # type: ignore[arg-type]  # pyright: ignore
    strategy.with_timestamp_assigner(lambda s: s.moment)  # type: ignore[attr-defined]  # pyright: ignore
    totals = Pipeline("p").from_collection([Total("a", 1)])
    totals.assign_timestamps_and_watermarks(strategy.with_timestamp_assigner("amount"))  # type: ignore[arg-type]  # pyright: ignore


def test_exchanges_and_unions_keep_the_record() -> None:
    assert_type(sales().rebalance().rescale().shuffle().broadcast().global_(), DataStream[Sale])
    assert_type(sales().partition_custom(lambda key, n: key % n, lambda s: s.amount), DataStream[Sale])
    first = sales()
    assert_type(first.union(first.filter(lambda s: True)), DataStream[Sale])


def test_columns_give_their_output_type() -> None:
    assert_type(sales().where("amount > 1").select("shop", "amount", output_type=Total), DataStream[Total])
    assert_type(sales().select("shop"), DataStream[Any])
    assert_type(sales().with_columns({"amount": "amount + 1"}, output_type=Sale), DataStream[Sale])
    assert_type(sales().key_by("shop").agg("sum(amount) AS amount", output_type=Total), DataStream[Total])
    shops = CollectionSource([Total("a", 1)], Total, "shops")
    looked_up = sales().lookup_join(shops, "shop", {"rank": "amount"}, tuple_of_four())
    assert_type(looked_up, DataStream[Ranked])


class Ranked(NamedTuple):
    shop: str
    amount: int
    at: datetime
    rank: int | None


def tuple_of_four() -> type[Ranked]:
    return Ranked


def test_asynchronous_calls() -> None:
    stream = AsyncDataStream.unordered_wait(sales(), Ask(), timedelta(seconds=1))
    assert_type(stream, DataStream[Total])
    assert runs_with(stream, Total)
    twice = AsyncRetryStrategy.fixed_delay(2, timedelta(seconds=1))
    retried = AsyncDataStream.ordered_wait_with_retry(sales(), Ask(), timedelta(seconds=9), twice)
    assert_type(retried, DataStream[Total])


def test_sources_and_sinks() -> None:
    pipeline = Pipeline("p")
    assert_type(pipeline.from_source(CsvSource("sales.csv", Sale)), DataStream[Sale])
    assert_type(pipeline.from_source(RateSource()), DataStream[Rate])
    assert_type(pipeline.from_source(DeltaSource("sales", Sale)), DataStream[Sale])
    assert_type(pipeline.from_source(DeltaSource("sales", Sale, changes=True)), DataStream[Change[Sale]])
    assert_type(pipeline.from_collection([1, 2]), DataStream[int])
    assert_type(pipeline.from_collection([], type_info=Sale), DataStream[Sale])
    sources: list[Source[Sale]] = [JsonSource("sales.json", Sale), ParquetSource("sales", Sale)]
    assert len(sources) == 2
    sales().sink_to(PrintSink())
    sales().sink_to(ForeachSink(lambda s: print(s.shop)))


def test_connected_streams_keep_both_records() -> None:
    first = sales()
    assert_type(first.connect(first.map(total)), ConnectedStreams[Sale, Total])


def rejected() -> None:
    """Never called: what a checker has to reject."""
    sales().map(lambda s: s.amuont)  # type: ignore[attr-defined]  # pyright: ignore
    sales().filter(lambda s: s.amuont > 1)  # type: ignore[attr-defined]  # pyright: ignore
    sales().key_by(lambda s: s.shpo)  # type: ignore[attr-defined]  # pyright: ignore
    sales().map(lambda s: s.amount, output_type=Total).map(lambda t: t.at)  # type: ignore  # pyright: ignore
    totals = sales().map(total)
    totals.map(Amount())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    totals.flat_map(Words())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    totals.filter(Large())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    totals.process(Split())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    totals.key_by("shop").process(Count())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    sales().key_by(lambda s: s.amount).process(Count())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    sales().process(Count())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    sales().reduce(lambda a, b: a)  # type: ignore  # pyright: ignore
    keyed = totals.key_by("shop")
    keyed.reduce(lambda a, b: a.amount + b.amount)  # type: ignore  # pyright: ignore[reportArgumentType]
    sales().key_by("shop").reduce(Sum())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    totals.union(sales())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    totals.sink_to(ForeachSink(lambda t: print(t.at)))  # type: ignore[attr-defined]  # pyright: ignore
    AsyncDataStream.ordered_wait(totals, Ask(), timedelta(1))  # type: ignore  # pyright: ignore[reportArgumentType]
    wrong: DataStream[Total] = Pipeline("p").from_source(CsvSource("sales.csv", Sale))  # type: ignore  # pyright: ignore
    print(wrong)


def test_a_class_and_its_method_that_disagree_are_an_error() -> None:
    stream = sales().map(Contradictory())
    stream.print()
    says = "the function's class says that it gives int, but its method is annotated to give str"
    with pytest.raises(RecordTypeError, match=says):
        stream._pipeline.graph()
