"""Whole pipelines into a table, in both modes, on Spark."""

from typing import NamedTuple

import pytest

from dagster_unified.api import Pipeline
from dagster_unified.connectors import DatabaseSink
from tests.connectors.sql.generic.test_sink import rows, url  # noqa: F401


class Total(NamedTuple):
    shop: str
    amount: int


def add(a: Total, b: Total) -> Total:
    return Total(a.shop, a.amount + b.amount)


@pytest.mark.parametrize("mode", ["batch", "streaming"])
def test_totals_are_upserted(url, run_on_spark, run_streaming, mode):  # noqa: F811
    built = Pipeline("totals")
    stream = built.from_collection([Total(f"shop {n % 7}", n) for n in range(1000)])
    stream.key_by("shop").reduce(add).sink_to(DatabaseSink("totals", url, mode="upsert", key="shop"))
    run = run_on_spark if mode == "batch" else run_streaming
    run(built)
    expected = [(f"shop {shop}", sum(range(shop, 1000, 7))) for shop in range(7)]
    assert rows(url, "SELECT * FROM totals ORDER BY shop") == expected
