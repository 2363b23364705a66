"""Asset checks of sinks: each passes where it should, and fails where something is wrong."""

from datetime import datetime, timedelta, timezone
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from dagster import AssetKey, AssetMaterialization, DagsterInstance, DailyPartitionsDefinition
from dagster_pyspark import PySparkResource
from deltalake import write_deltalake

from dagster_unified.api import CsvSource, DeltaSink, Pipeline
from dagster_unified.engine.batch.parity import compare
from dagster_unified.errors import ConfigurationError
from dagster_unified.orchestration import (
    Checks,
    IntermediatesResource,
    Parity,
    StreamingDeployment,
    unified_definitions,
)
from dagster_unified.orchestration.partitions import slice_of

SINK = AssetKey(["sales", "totals"])


class Sale(NamedTuple):
    shop: str
    at: datetime
    amount: int


def live(folder):
    """Sales of files that appear, by shop and day."""
    pipeline = Pipeline("sales")
    sales = pipeline.from_source(CsvSource(str(folder / "in"), Sale, name="sales", monitor=True).partitioned_by("at"))
    days = sales.map(lambda s: Sale(s.shop, s.at.replace(hour=0), s.amount), output_type=Sale)
    added = days.key_by("shop", "at").reduce(lambda a, b: Sale(a.shop, a.at, a.amount + b.amount))
    added.sink_to(DeltaSink(str(folder / "totals"), name="totals", mode="upsert", key=("shop", "at")))
    return pipeline


@pytest.fixture
def check(spark, tmp_path, run_streaming):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.csv").write_text(
        "shop,at,amount\na,2024-01-01T10:00:00Z,1\na,2024-01-01T11:00:00Z,2\nb,2024-01-02T10:00:00Z,4\n"
    )
    with DagsterInstance.local_temp(str(tmp_path)) as instance:

        def run(checks, *materialized):
            """Whether each check passed, and what it says."""
            resources = {
                "spark": PySparkResource(spark_config={}),
                "intermediates": IntermediatesResource(path=str(tmp_path / "store")),
            }
            definitions = unified_definitions(StreamingDeployment(live(tmp_path), checks=checks), resources=resources)
            for rows in materialized:
                instance.report_runless_asset_event(AssetMaterialization(SINK, metadata={"dagster/row_count": rows}))
            result = definitions.resolve_job_def("sales_checks").execute_in_process(instance=instance)
            return {e.check_name: (e.passed, e.description) for e in result.get_asset_check_evaluations()}

        yield run


def stream(folder, run_streaming):
    """What a streaming job would have written; its input ends, so that the test does."""
    pipeline = Pipeline("sales")
    sales = pipeline.from_source(CsvSource(str(folder / "in"), Sale, name="sales"))
    days = sales.map(lambda s: Sale(s.shop, s.at.replace(hour=0), s.amount), output_type=Sale)
    added = days.key_by("shop", "at").reduce(lambda a, b: Sale(a.shop, a.at, a.amount + b.amount))
    added.sink_to(DeltaSink(str(folder / "totals"), name="totals", mode="upsert", key=("shop", "at")))
    run_streaming(pipeline)


DAY = slice_of(DailyPartitionsDefinition("2024-01-01"), "2024-01-01")
FIRST = Parity(lambda: DAY, lambda part: (pc.field("at") >= part.time().start) & (pc.field("at") < part.time().end))


def test_a_sound_table_passes(check, tmp_path, run_streaming):
    stream(tmp_path, run_streaming)
    found = check(Checks(rows_within=0.5, parity=FIRST, fresh_within=timedelta(hours=1)), 2, 2)
    assert {name: passed for name, (passed, _) in found.items()} == {
        "totals_schema": True,
        "totals_unique_keys": True,
        "row_count": True,
        "totals_parity": True,
        "freshness_check": True,
    }
    assert found["totals_parity"][1] == "0 rows differ: 1 by BATCH, 1 in the table"


def test_what_is_wrong_is_told(check, tmp_path, run_streaming):
    stream(tmp_path, run_streaming)
    at = datetime(2024, 1, 1, tzinfo=timezone.utc)
    schema = pa.schema([("shop", pa.string()), ("at", pa.timestamp("us", "UTC")), ("amount", pa.int64())])
    write_deltalake(
        str(tmp_path / "totals"),
        pa.Table.from_pylist([{"shop": "a", "at": at, "amount": 7}, {"shop": "c", "at": at, "amount": 1}], schema),
        mode="append",
    )
    found = check(Checks(rows_within=0.5, parity=FIRST), 100, 100, 10)
    assert found["totals_unique_keys"] == (False, "1 keys are there more than once")
    assert found["row_count"] == (False, "10 rows, and 100 in the median of the 2 before")
    assert found["totals_parity"] == (False, "2 rows differ: 1 by BATCH, 3 in the table")


def test_another_schema_is_told(check, tmp_path):
    write_deltalake(str(tmp_path / "totals"), pa.table({"shop": ["a"], "at": ["soon"]}))
    found = check(Checks(unique_keys=False))
    assert found == {
        "totals_schema": (False, "'at' is string, and should be timestamp; 'amount' is missing, and should be bigint")
    }


def test_tables_compare_by_key_or_as_bags():
    ours, theirs = pa.table({"k": ["a", "b", "b"], "n": [1, 2, 2]}), pa.table({"k": ["a", "b", "c"], "n": [1, 2, 2]})
    bag = compare(ours, theirs)
    assert [(d.batch, d.table) for d in bag.first] == [("{'k': 'b', 'n': 2}", None), (None, "{'k': 'c', 'n': 2}")]
    keyed = compare(pa.table({"k": ["a", "b"], "n": [1, 2]}), pa.table({"k": ["a", "b"], "n": [1, 3]}), ["k"])
    assert [(d.key, d.batch, d.table) for d in keyed.first] == [
        ("{'k': 'b'}", "{'k': 'b', 'n': 2}", "{'k': 'b', 'n': 3}")
    ]
    assert compare(ours, theirs, limit=1).different == 2


def test_checks_that_cannot_be_are_errors():
    with pytest.raises(ConfigurationError, match=r"rows_within is a number such as 0.5, not negative"):
        Checks(rows_within=-1)
    with pytest.raises(ConfigurationError, match="history must be at least 1"):
        Checks(history=0)
