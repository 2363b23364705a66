"""Function classes, keyed state, side outputs."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from enum import Enum
from typing import Any, NamedTuple, assert_type

from pyspark import cloudpickle

from dagster_unified.api import (
    AggregateFunction,
    AggregatingStateDescriptor,
    BroadcastProcessFunction,
    Counter,
    Distribution,
    EventTimeTrigger,
    KeyedProcessFunction,
    KeyedStream,
    ListState,
    ListStateDescriptor,
    MapFunction,
    MapState,
    MapStateDescriptor,
    Meter,
    OutputTag,
    Pipeline,
    ProcessingTimeTrigger,
    ProcessWindowFunction,
    ReducingStateDescriptor,
    RuntimeContext,
    StateTtlConfig,
    StateVisibility,
    TimerService,
    TimeWindow,
    UpdateType,
    ValueState,
    ValueStateDescriptor,
)
from dagster_unified.api.types import MetricGroup
from dagster_unified.by_value import by_value_bytes
from dagster_unified.testing import run_pipeline


class Sale(NamedTuple):
    shop: str
    amount: int


class Total(NamedTuple):
    shop: str
    amount: int


LARGE = OutputTag("large", Sale)
assert_type(LARGE, OutputTag[Sale])
assert_type(OutputTag("note", str | None), OutputTag[str | None])

ANSWERS = ValueStateDescriptor("answers", dict[str, int])
assert_type(ANSWERS, ValueStateDescriptor[dict[str, int]])


class Mean(AggregateFunction[Sale, tuple[int, int], float]):
    def create_accumulator(self) -> tuple[int, int]:
        return 0, 0

    def add(self, value: Sale, accumulator: tuple[int, int]) -> tuple[int, int]:
        return accumulator[0] + value.amount, accumulator[1] + 1

    def get_result(self, accumulator: tuple[int, int]) -> float:
        return accumulator[0] / accumulator[1]

    def merge(self, a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        return a[0] + b[0], a[1] + b[1]


class Totals(KeyedProcessFunction[str, Sale, Total]):
    def open(self, runtime_context: RuntimeContext) -> None:
        self.total = runtime_context.get_state(ValueStateDescriptor("total", int))
        self.seen = runtime_context.get_list_state(ListStateDescriptor("seen", Sale))
        self.by_day = runtime_context.get_map_state(MapStateDescriptor("by day", str, int))
        self.largest = runtime_context.get_reducing_state(ReducingStateDescriptor("largest", max, int))
        self.mean = runtime_context.get_aggregating_state(AggregatingStateDescriptor("mean", Mean(), tuple[int, int]))
        assert_type(runtime_context.get_state(ListStateDescriptor("seen", Sale)), ListState[Sale])
        runtime_context.get_list_state(ValueStateDescriptor("total", int))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    def process_element(
        self, value: Sale, ctx: KeyedProcessFunction.Context[str]
    ) -> Iterable[Total | tuple[OutputTag[Sale], Sale]]:
        assert_type(ctx.get_current_key(), str)
        assert_type(ctx.timestamp(), int | None)
        assert_type(ctx.timer_service(), TimerService)
        assert_type(self.total.value(), int | None)
        assert_type(self.seen.get(), list[Sale])
        assert_type(self.by_day.items(), list[tuple[str, int]])
        assert_type(self.largest.get(), int | None)
        assert_type(self.mean.get(), float | None)
        self.mean.add(value)
        self.total.update(value.shop)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        self.by_day.put(1, 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        self.mean.add(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        ctx.output(LARGE, value)
        ctx.output(LARGE, value.amount)  # type: ignore[misc]  # pyright: ignore[reportArgumentType]
        yield LARGE, value
        yield Total(value.shop, value.amount)

    def on_timer(self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext[str]) -> Iterable[Total]:
        yield Total(ctx.get_current_key(), timestamp)


class WrongRecord(MapFunction[Sale, int]):
    def map(self, value: Sale) -> str:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        return value.shop


class Spread(ProcessWindowFunction[Sale, int, str, TimeWindow]):
    def process(
        self, key: str, context: ProcessWindowFunction.Context[TimeWindow], elements: Iterable[Sale]
    ) -> Iterable[int]:
        assert_type(context.window(), TimeWindow)
        assert_type(context.window_state().get_state(ANSWERS).value(), dict[str, int] | None)
        yield max(e.amount for e in elements)


RULES = MapStateDescriptor("rules", str, int)


class Judge(BroadcastProcessFunction[Sale, Total, Sale]):
    def process_element(self, value: Sale, ctx: BroadcastProcessFunction.ReadOnlyContext) -> Iterable[Sale]:
        assert_type(ctx.get_broadcast_state(RULES).get(value.shop), int | None)
        return [value]

    def process_broadcast_element(self, value: Total, ctx: BroadcastProcessFunction.Context) -> Iterable[Sale]:
        ctx.get_broadcast_state(RULES).put(value.shop, value.amount)
        ctx.get_broadcast_state(RULES).put(value.amount, 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        return []


class Unstated(KeyedProcessFunction):  # type: ignore[type-arg]  # pyright: ignore[reportMissingTypeArgument]
    def process_element(self, value: Any, ctx: Any) -> Iterable[Total]:
        return []


def test_type_arguments_change_nothing_at_run_time() -> None:
    assert Totals.__bases__ == Unstated.__bases__ == (KeyedProcessFunction,)
    assert OutputTag("large", Sale) == LARGE
    assert isinstance(Totals(), KeyedProcessFunction)


def test_a_class_with_type_arguments_is_shipped_with_them() -> None:
    data = by_value_bytes((Totals(), LARGE, ANSWERS))
    assert b"on_timer" in data
    shipped = cloudpickle.loads(data)
    assert [base.__name__ for base in type(shipped[0]).__bases__] == ["KeyedProcessFunction"]
    assert shipped[1] == LARGE
    assert shipped[2].describe() == ANSWERS.describe()


class Annotated(KeyedProcessFunction[str, Sale, Total]):
    count: ValueState[int]
    seen: ListState[Sale]
    by_day: MapState[str, int]

    def open(self, runtime_context: RuntimeContext) -> None:
        self.count = runtime_context.get_state(ValueStateDescriptor("count", int))

    def process_element(self, value: Sale, ctx: KeyedProcessFunction.Context[str]) -> Iterable[Total]:
        self.count.update((self.count.value() or 0) + value.amount)
        yield Total(value.shop, self.count.value() or 0)


def test_state_handles_can_be_annotated() -> None:
    sales = Pipeline("p").from_collection([Sale("a", 1), Sale("a", 2)])
    totals = sales.key_by(lambda s: s.shop).process(Annotated())
    totals.print()
    assert run_pipeline(totals._pipeline, "BATCH").only() == [Total("a", 1), Total("a", 3)]


def test_a_time_to_live_is_built_as_in_pyflink() -> None:
    day = timedelta(days=1)
    builder = StateTtlConfig.new_builder(day)
    assert builder.build() == StateTtlConfig(day)
    built = builder.update_ttl_on_read_and_write().return_expired_if_not_cleaned_up().build()
    assert_type(built, StateTtlConfig)
    assert built == StateTtlConfig(day, UpdateType.ON_READ_AND_WRITE, StateVisibility.RETURN_EXPIRED_IF_NOT_CLEANED_UP)
    assert builder.update_ttl_on_create_and_write().never_return_expired().build() == StateTtlConfig(day)


def test_triggers_are_created_as_in_pyflink() -> None:
    assert_type(EventTimeTrigger.create(), EventTimeTrigger)
    assert type(EventTimeTrigger.create()) is EventTimeTrigger
    assert type(ProcessingTimeTrigger.create()) is ProcessingTimeTrigger


class Kind(Enum):
    SALE = "sale"
    RETURN = "return"


class Entry(NamedTuple):
    kind: Kind
    amount: int


def test_an_enum_is_typed_as_itself_in_fields_keys_and_state() -> None:
    entries = Pipeline("p").from_collection([Entry(Kind.SALE, 1)])
    keyed = entries.key_by(lambda entry: entry.kind, key_type=Kind)
    assert_type(keyed, KeyedStream[Kind, Entry])
    assert_type(ValueStateDescriptor("kind", Kind), ValueStateDescriptor[Kind])
    entries.map(lambda entry: Entry("sale", 1), Entry)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


class Measuring(MapFunction[Sale, Sale]):
    def open(self, runtime_context: RuntimeContext) -> None:
        group = runtime_context.get_metrics_group().add_group("shop", "north")
        assert_type(group, MetricGroup)
        self.sold = group.counter("sold")
        self.amounts = group.distribution("amounts")
        assert_type((self.sold, group.meter("rate", 10), self.amounts), tuple[Counter, Meter, Distribution])
        group.gauge("attempt", runtime_context.get_attempt_number)
        group.gauge("name", lambda: "north")  # type: ignore[arg-type, return-value]  # pyright: ignore

    def map(self, value: Sale) -> Sale:
        self.sold.inc(value.amount)
        self.amounts.update("1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        return value
