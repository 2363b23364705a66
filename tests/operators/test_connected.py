"""Two streams in one operator: connect, window joins, co-groups and interval joins, against what they say."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_unified.api import (
    CoFlatMapFunction,
    CoGroupFunction,
    CoMapFunction,
    CoProcessFunction,
    FlatJoinFunction,
    JoinFunction,
    KeyedCoProcessFunction,
    OutputTag,
    Pipeline,
    ProcessJoinFunction,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from dagster_unified.errors import PipelineError, RecordTypeError, UserFunctionError
from dagster_unified.testing import run_pipeline
from tests.depth import examples
from tests.operators.support import ms
from tests.support import MODES, results


class Order(NamedTuple):
    id: str
    at: int
    amount: int


class Payment(NamedTuple):
    order: str
    at: int
    paid: float


def streams(orders, payments, bound=1000):
    pipeline = Pipeline("p")
    by_at = WatermarkStrategy.for_bounded_out_of_orderness(ms(bound)).with_timestamp_assigner("at")
    return (
        pipeline.from_collection(orders, Order, "orders").assign_timestamps_and_watermarks(by_at),
        pipeline.from_collection(payments, Payment, "payments").assign_timestamps_and_watermarks(by_at),
    )


ORDERS = [Order("a", 1, 10), Order("b", 2, 20), Order("c", 14, 30)]
PAYMENTS = [Payment("a", 4, 10.0), Payment("c", 5, 1.0), Payment("a", 13, 2.0), Payment("c", 15, 29.0)]


class Texts(CoMapFunction):
    def map1(self, value) -> str:
        return f"order {value.id}"

    def map2(self, value) -> str:
        return f"payment of {value.order}"


class Halves(CoFlatMapFunction):
    def flat_map1(self, value) -> Iterable[int]:
        return [value.amount // 2] * 2

    def flat_map2(self, value) -> Iterable[int]:
        return []


class Big(CoProcessFunction):
    def process_element1(self, value, ctx) -> Iterable[str]:
        if value.amount > 15:
            yield f"{value.id} at {ctx.timestamp()}"

    def process_element2(self, value, ctx) -> Iterable[str]:
        if value.paid > 15:
            yield f"paid {value.order}"


@MODES
def test_streams_that_are_not_keyed(mode):
    orders, payments = streams(ORDERS, PAYMENTS)
    assert sorted(results(orders.connect(payments).map(Texts()), mode)) == sorted(
        [f"order {o.id}" for o in ORDERS] + [f"payment of {p.order}" for p in PAYMENTS]
    )
    orders, payments = streams(ORDERS, PAYMENTS)
    assert sorted(results(orders.connect(payments).flat_map(Halves()), mode)) == [5, 5, 10, 10, 15, 15]
    orders, payments = streams(ORDERS, PAYMENTS)
    assert sorted(results(orders.connect(payments).process(Big()), mode)) == ["b at 2", "c at 14", "paid c"]


class Open(KeyedCoProcessFunction):
    """What is still to be paid of each order, at the end."""

    def open(self, context):
        self.due = context.get_state(ValueStateDescriptor("due", float))

    def process_element1(self, value, ctx) -> Iterable[str]:
        self._add(value.amount, ctx)
        return ()

    def process_element2(self, value, ctx) -> Iterable[str]:
        self._add(-value.paid, ctx)
        return ()

    def _add(self, amount, ctx):
        self.due.update((self.due.value() or 0.0) + amount)
        ctx.timer_service().register_event_time_timer(100)

    def on_timer(self, timestamp, ctx) -> Iterable[str]:
        yield f"{ctx.get_current_key()} {self.due.value()}"


@MODES
@pytest.mark.parametrize(
    "connected",
    [
        lambda o, p: o.connect(p).key_by("id", "order"),
        lambda o, p: o.connect(p).key_by(lambda r: r.id, lambda r: r.order),
        lambda o, p: o.key_by("id").connect(p.key_by("order")),
        lambda o, p: o.connect(p).key_by(lambda r: r.id + "", lambda r: "" + r.order, key_type=str),
    ],
)
def test_keyed_streams_share_state_and_timers(mode, connected):
    assert sorted(results(connected(*streams(ORDERS, PAYMENTS)).process(Open()), mode)) == ["a -2.0", "b 20.0", "c 0.0"]


class Pair(JoinFunction):
    def join(self, first, second) -> str:
        return f"{first.id} {first.amount} {second.paid}"


class Pairs(FlatJoinFunction):
    def join(self, first, second) -> Iterable[str]:
        return [f"{first.id} {second.paid}"] if second.paid > 5 else None


class Groups(CoGroupFunction):
    def co_group(self, first, second) -> Iterable[str]:
        if [p.paid for p in second] == [1.0]:
            return None
        return [f"{[o.amount for o in first]} {sorted(p.paid for p in second)}"]


TENS = TumblingEventTimeWindows.of(ms(10))


@MODES
def test_joins_in_windows(mode):
    def joined(how):
        orders, payments = streams(ORDERS, PAYMENTS)
        return sorted(results(how(orders, payments), mode))

    assert joined(lambda o, p: o.join(p).where("id").equal_to("order").window(TENS).apply(Pair())) == [
        "a 10 10.0",
        "c 30 29.0",
    ]
    assert joined(
        lambda o, p: o.join(p).where("id").equal_to("order").window(TENS).apply(lambda a, b: b.paid - a.amount, float)
    ) == [-1.0, 0.0]
    assert joined(lambda o, p: o.join(p).where("id").equal_to("order").window(TENS).apply(Pairs())) == [
        "a 10.0",
        "c 29.0",
    ]
    assert joined(lambda o, p: o.co_group(p).where("id").equal_to("order").window(TENS).apply(Groups())) == [
        "[10] [10.0]",
        "[20] []",
        "[30] [29.0]",
        "[] [2.0]",
    ]


class Times(ProcessJoinFunction):
    def process_element(self, left, right, ctx) -> Iterable[tuple[str, int, int]]:
        assert ctx.get_timestamp() == max(left.at, right.at)
        yield (left.id, ctx.get_left_timestamp(), ctx.get_right_timestamp())


orders_of = st.lists(st.builds(Order, st.sampled_from("ab"), st.integers(0, 40), st.just(1)), max_size=12)
payments_of = st.lists(st.builds(Payment, st.sampled_from("ab"), st.integers(0, 40), st.just(1.0)), max_size=12)


@settings(max_examples=examples(20))
@given(orders_of, payments_of, st.integers(-9, 9), st.integers(0, 9), st.booleans(), st.booleans())
def test_interval_joins_give_every_pair_once(orders, payments, lower, width, without_lower, without_upper):
    upper = lower + width
    pairs = Counter(
        (o.id, o.at, p.at)
        for o in orders
        for p in payments
        if o.id == p.order
        and (lower < p.at - o.at if without_lower else lower <= p.at - o.at)
        and (p.at - o.at < upper if without_upper else p.at - o.at <= upper)
    )
    for mode, interval in (("BATCH", 1), ("STREAMING", None), ("STREAMING", 1)):
        left, right = streams(orders, payments)
        joined = left.key_by("id").interval_join(right.key_by("order")).between(ms(lower), ms(upper))
        joined = joined.lower_bound_exclusive() if without_lower else joined
        joined = joined.upper_bound_exclusive() if without_upper else joined
        assert Counter(results(joined.process(Times()), mode, watermark_interval=interval)) == pairs


@MODES
def test_interval_joins_take_records_in_the_order_of_time_in_both_modes(mode):
    left, right = streams([Order("a", 5, 1)], [Payment("a", 6, 1.0), Payment("a", 4, 1.0)])
    joined = left.key_by("id").interval_join(right.key_by("order")).between(ms(-2), ms(2)).process(Times())
    assert results(joined, mode, watermark_interval=None) == [("a", 5, 4), ("a", 5, 6)]


LATE = OutputTag("late", Order)


def test_a_record_that_is_late_for_an_interval_join_goes_to_the_side():
    pipeline = Pipeline("p")
    monotonous = WatermarkStrategy.for_bounded_out_of_orderness(ms(0)).with_timestamp_assigner("at")
    orders = pipeline.from_collection(
        [Order("a", 10, 1), Order("a", 50, 1), Order("a", 2, 1)], Order, "orders"
    ).assign_timestamps_and_watermarks(monotonous)
    joined = (
        orders.key_by("id")
        .interval_join(orders.key_by("id"))
        .between(ms(0), ms(5))
        .side_output_left_late_data(LATE)
        .process(Times())
    )
    joined.get_side_output(LATE).print("late")
    joined.print("out")
    sinks = run_pipeline(pipeline, "STREAMING").sinks
    assert sinks == {"late": [Order("a", 2, 1)], "out": [("a", 10, 10), ("a", 50, 50)]}
    assert run_pipeline(pipeline, "BATCH").sinks == {"late": [], "out": [("a", 2, 2), ("a", 10, 10), ("a", 50, 50)]}


# Errors


class Failing(Texts):
    def map2(self, value) -> str:
        raise ValueError("no")


class Mixed(Texts):
    def map2(self, value) -> int:
        return 1


@MODES
def test_a_function_that_fails_says_where_and_on_what(mode):
    orders, payments = streams(ORDERS, PAYMENTS[:1])
    with pytest.raises(
        UserFunctionError,
        match=r"operator 'Failing': ValueError: no, at .* in map2, on Payment\(order='a'",
    ):
        results(orders.connect(payments).map(Failing()), mode)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda o, p: o.connect(p).process(Open()),
            PipelineError,
            "expected a CoProcessFunction, got .*; call key_by on the connected streams first",
        ),
        (
            lambda o, p: o.connect(p).key_by("id", "paid").process(Open()),
            RecordTypeError,
            "the first stream's key is a str and the second's a float",
        ),
        (
            lambda o, p: o.connect(p).map(Mixed()),
            RecordTypeError,
            "map1 gives str and map2 gives int; make them the same",
        ),
        (
            lambda o, p: o.connect(p).key_by("identity", "order").process(Open()),
            PipelineError,
            "no field 'identity' in Order",
        ),
        (
            lambda o, p: o.join(p).window(TENS),
            PipelineError,
            r"give the keys first, with where\(key\) and equal_to\(key\)",
        ),
        (
            lambda o, p: o.key_by("id").interval_join(p.key_by("order")).process(Times()),
            PipelineError,
            "give the interval first",
        ),
        (
            lambda o, p: o.key_by("id").interval_join(p.key_by("order")).between(ms(2), ms(1)),
            PipelineError,
            "the lower bound, .*, is above the upper",
        ),
        (lambda o, p: o.key_by("id").interval_join(p), PipelineError, "both streams have to be keyed"),
        (
            lambda o, p: o.connect(Pipeline("q").from_collection([1])).map(Texts()),
            PipelineError,
            "the streams belong to different pipelines, 'p' and 'q'",
        ),
    ],
)
def test_what_cannot_be_is_an_error_when_the_graph_is_built(build, error, message):
    with pytest.raises(error, match=message):
        build(*streams(ORDERS, PAYMENTS))


class Amounts(CoMapFunction[Order, Payment, int]):
    def map1(self, value):
        return value.amount

    def map2(self, value):
        return int(value.paid)


def fifth(payment: Payment) -> str:
    return payment.order[5]


def wrong(payment: Payment) -> str:
    return payment.at + 1


def of_some(payment: Payment) -> str:
    return None if payment.order == "a" else payment.order


@MODES
@pytest.mark.parametrize(
    ("key", "says"),
    [
        (fifth, r"^p: key_by\(fifth\): IndexError: .* in fifth, on Payment\(order='a', at=2, paid=3.0\)$"),
        (wrong, r"^p: key_by\(wrong\): a key is not of the type"),
        (of_some, r"^p: key_by\(of_some\): the key is None for Payment\(order='a', at=2, paid=3.0\); filter"),
    ],
)
@pytest.mark.parametrize("joined", [False, True])
def test_an_error_names_the_key_function_of_its_stream_and_that_streams_record(mode, key, says, joined):
    orders, payments = streams([Order("a", 1, 2)], [Payment("a", 2, 3.0)])
    if joined:
        windows = orders.join(payments).where("id").equal_to(key).window(TumblingEventTimeWindows.of(ms(10)))
        both = windows.apply(lambda order, payment: order.amount, int)
    else:
        both = orders.key_by("id").connect(payments.key_by(key)).map(Amounts())
    with pytest.raises((UserFunctionError, RecordTypeError), match=says):
        results(both, mode)
