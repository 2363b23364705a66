"""A small pipeline with a bit of everything, for the golden texts."""

from collections.abc import Iterable
from datetime import timedelta
from typing import NamedTuple

from dagster_unified.api import DeltaSink, KeyedProcessFunction, Pipeline, ValueStateDescriptor, WatermarkStrategy


class Sale(NamedTuple):
    shop: str
    at: int
    amount: int


class Follow(KeyedProcessFunction):
    def open(self, context):
        self.seen = context.get_state(ValueStateDescriptor("seen", int))

    def process_element(self, value: Sale, ctx) -> Iterable[Sale]:
        yield value


def double(sale: Sale) -> Sale:
    return sale._replace(amount=sale.amount * 2)


def add(a: Sale, b: Sale) -> Sale:
    return Sale(a.shop, b.at, a.amount + b.amount)


def pipeline() -> Pipeline:
    p = Pipeline("shops")
    by_time = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(seconds=5)).with_timestamp_assigner("at")
    sales = p.from_collection([Sale("a", 1, 2)], name="sales").assign_timestamps_and_watermarks(by_time)
    big = sales.map(double).where("amount > 1").name("big")
    totals = big.key_by("shop").process(Follow()).map(lambda s: s, output_type=Sale).name("totals")
    totals.key_by("shop").reduce(add).sink_to(DeltaSink("/tables/table", mode="upsert", key="shop"))
    return p
