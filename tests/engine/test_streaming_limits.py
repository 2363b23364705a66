"""What STREAMING cannot run is an error that says what to do instead, before Spark has started, and in the harness."""

import pytest

from dagster_unified.api import Pipeline
from dagster_unified.api import functions as F
from dagster_unified.errors import UnsupportedError
from dagster_unified.testing import run_pipeline
from tests.support import Sale


def sales(pipeline, name="sales"):
    return pipeline.from_collection([Sale("north", 1)], name=name)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        pytest.param(
            lambda totals: totals.key_by("shop").sum("amount").name("again"),
            "p: sink 'print' comes after the native aggregate 'totals' and after 'again', which STREAMING cannot run in"
            r" one query with state\.native-aggregates=SPARK; remove the option",
            id="a keyed operator that follows it",
        ),
        pytest.param(
            lambda totals: totals.union(sales(totals._pipeline, "others")),
            "sink 'print' unites the native aggregate 'totals' with another stream, which STREAMING cannot run with"
            r" state\.native-aggregates=SPARK; remove the option, or write them to two sinks",
            id="another stream that it is united with",
        ),
    ],
)
def test_what_an_aggregate_whose_state_spark_keeps_cannot_have_beside_it(build, words):
    pipeline = Pipeline("p")
    totals = sales(pipeline).key_by("shop").agg(F.sum("amount").alias("amount"), output_type=Sale).name("totals")
    build(totals).print()
    with pytest.raises(UnsupportedError, match=words):
        run_pipeline(pipeline, "STREAMING", options={"state.native-aggregates": "SPARK"})
