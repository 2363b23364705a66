"""What STREAMING cannot run is an error that says what to do instead, before Spark has started, and in the harness."""

from typing import NamedTuple

import pytest

from dagster_unified.api import Pipeline
from dagster_unified.api import functions as F
from dagster_unified.errors import UnsupportedError
from dagster_unified.testing import run_pipeline


class Sale(NamedTuple):
    shop: str
    amount: int


def sales(pipeline, name="sales"):
    return pipeline.from_collection([Sale("north", 1)], name=name)


SPARK = {"state.native-aggregates": "SPARK"}


def test_a_keyed_operator_cannot_follow_an_aggregate_whose_state_spark_keeps():
    pipeline = Pipeline("p")
    totals = sales(pipeline).key_by("shop").agg(F.sum("amount").alias("amount"), output_type=Sale).name("totals")
    totals.key_by("shop").sum("amount").name("again").print()
    with pytest.raises(
        UnsupportedError,
        match=(
            "p: sink 'print' comes after the native aggregate 'totals' and after 'again', which STREAMING cannot run in"
            r" one query with state\.native-aggregates=SPARK; remove the option"
        ),
    ):
        run_pipeline(pipeline, "STREAMING", options=SPARK)


def test_an_aggregate_whose_state_spark_keeps_is_not_united_with_another_stream():
    pipeline = Pipeline("p")
    totals = sales(pipeline).key_by("shop").agg(F.sum("amount").alias("amount"), output_type=Sale).name("totals")
    totals.union(sales(pipeline, "others")).print()
    with pytest.raises(
        UnsupportedError,
        match=(
            "sink 'print' unites the native aggregate 'totals' with another stream, which STREAMING cannot run with"
            r" state\.native-aggregates=SPARK; remove the option, or write them to two sinks"
        ),
    ):
        run_pipeline(pipeline, "STREAMING", options=SPARK)
