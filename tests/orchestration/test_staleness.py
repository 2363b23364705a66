"""What is said of partitions whose carried state begins where another run has ended since.

Also what a re-executed range leaves for the days after it.
"""

import shutil
from typing import NamedTuple

import pytest
from dagster import AssetKey, DagsterInstance, DailyPartitionsDefinition, MetadataValue

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource, DeltaSink
from dagster_unified.orchestration import BatchDeployment, IntermediatesResource, SparkResource, unified_definitions
from dagster_unified.orchestration.checks import stale_partitions
from dagster_unified.orchestration.metadata import CARRIED_FROM, MADE_BY

DAYS = [f"2013-03-0{d}" for d in range(1, 6)]


class Sale(NamedTuple):
    shop: str
    at: str
    amount: int


@pytest.fixture
def run(spark, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "sales.csv").write_text(
        "shop,at,amount\n" + "".join(f"north,{day}T12:00:00Z,{i}\n" for i, day in enumerate(DAYS))
    )
    pipeline = Pipeline("sales")
    sales = pipeline.from_source(CsvSource(str(tmp_path / "in"), Sale, name="incoming").partitioned_by("at"))
    sales.key_by("shop").reduce(lambda a, b: Sale(a.shop, b.at, a.amount + b.amount)).name("totals").sink_to(
        DeltaSink(str(tmp_path / "table"), mode="append")
    )
    resources = {
        "spark": SparkResource(master="local[2]"),
        "intermediates": IntermediatesResource(path=str(tmp_path / "store")),
    }
    daily = DailyPartitionsDefinition(DAYS[0], end_date="2013-03-06")
    job = unified_definitions(
        BatchDeployment(pipeline, retry_policy=None, partitions=daily, carry_state=True), resources=resources
    ).resolve_job_def("sales_batch")
    with DagsterInstance.local_temp(str(tmp_path)) as instance:

        def go(first, last=None):
            """Runs a range of days; gives what the check of the stage with state says."""
            days = {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last or first}
            result = job.execute_in_process(instance=instance, tags=days)
            (found,) = result.get_asset_check_evaluations()
            assert found.asset_key == AssetKey(["sales", "table"])
            return found.passed, found.description

        go.folder = tmp_path
        yield go


def test_days_after_one_that_has_run_again_are_stale_until_a_backfill_has_made_them_again(run):
    follows = (True, "every partition goes on from the one before it")
    assert run(DAYS[0], DAYS[3]) == follows
    assert run(DAYS[1]) == (
        False,
        "2013-03-03 to 2013-03-04 went on from a state that has been replaced since: run a backfill over them",
    )
    assert run(DAYS[4]) == (
        False,
        "2013-03-03 to 2013-03-05 went on from a state that has been replaced since: run a backfill over them",
    )
    assert run(DAYS[2], DAYS[3]) == (
        False,
        "2013-03-05 went on from a state that has been replaced since: run a backfill over it",
    )
    assert run(DAYS[4]) == follows


def test_days_are_stale_also_where_the_janitor_has_freed_what_they_were_made_of(run):
    run(DAYS[0], DAYS[3])
    for partition in (run.folder / "store" / "sales" / "table").iterdir():
        if DAYS[3] not in partition.name:
            shutil.rmtree(partition)
    assert run(DAYS[0]) == (
        False,
        "2013-03-02 to 2013-03-04 went on from a state that has been replaced since: run a backfill over them",
    )


def test_a_day_that_was_the_first_is_stale_once_there_is_one_before_it():
    made = {MADE_BY: MetadataValue.dagster_run("a")}
    shown = {DAYS[1]: made, DAYS[2]: {**made, CARRIED_FROM: MetadataValue.dagster_run("a")}}
    assert stale_partitions(DAYS, shown) == []
    assert stale_partitions(DAYS, {DAYS[0]: {MADE_BY: MetadataValue.dagster_run("b")}, **shown}) == DAYS[1:3]
    assert stale_partitions(DAYS, {DAYS[0]: {}, DAYS[1]: {}}) == []  # of a stage without state
