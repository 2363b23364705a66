"""A pipeline with two kinds of state, of which savepoints are taken: totals of windows, and running totals."""

from datetime import timedelta
from typing import NamedTuple

from dagster_unified.api import Pipeline, TumblingEventTimeWindows, WatermarkStrategy
from dagster_unified.connectors import DeltaSink, ParquetSource


class Sale(NamedTuple):
    shop: str
    at: int
    amount: int


FIRST = [Sale("a", 0, 1), Sale("b", 10, 2), Sale("a", 20, 4), Sale("a", 5_000, 8)]
MORE = [Sale("a", 6_000, 16), Sale("b", 20_000, 32)]


def add(a: Sale, b: Sale) -> Sale:
    return Sale(a.shop, max(a.at, b.at), a.amount + b.amount)


def shops(folder: str, table: str = "live", monitor: bool = True) -> Pipeline:
    """Totals of windows, and running totals beside them, of a folder of files."""
    pipeline = Pipeline("shops")
    source = ParquetSource(f"{folder}/in", Sale, name="sales", monitor=monitor)
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    sales = pipeline.from_source(source).assign_timestamps_and_watermarks(strategy).key_by("shop")
    windows = sales.window(TumblingEventTimeWindows.of(timedelta(seconds=1))).reduce(add).uid("windows")
    windows.sink_to(DeltaSink(f"{folder}/{table} windows", mode="append", name="windows"))
    totals = sales.reduce(add).uid("totals")
    totals.sink_to(DeltaSink(f"{folder}/{table} totals", mode="upsert", key="shop", name="totals"))
    return pipeline
