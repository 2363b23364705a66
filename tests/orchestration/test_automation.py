"""Dagster's declarative automation over stages: it requests what is due, and waits for nothing that never comes."""

from datetime import datetime, timezone

import pytest
from dagster import (
    AssetKey,
    AssetMaterialization,
    AutomationCondition,
    DagsterInstance,
    DailyPartitionsDefinition,
    Definitions,
    asset,
    evaluate_automation_conditions,
)

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource, DeltaSink
from dagster_unified.orchestration import BatchDeployment, unified_definitions
from tests.support import Sale

DAILY = DailyPartitionsDefinition("2024-01-01", timezone="UTC")
STAGES = [AssetKey(["shops", "sales_stage"]), AssetKey(["shops", "totals_stage"])]
EACH_DAY = AutomationCondition.on_cron("0 0 * * *")


@asset(partitions_def=DAILY)
def exports() -> None:
    """Files that somebody leaves."""


def requested(condition, partitions=None, carry_state=False, upstream=False):
    """What a condition requests of the stages: the days on which it did, and the partitions.

    It is asked on three days. What it requested is materialized; where there is an asset upstream, that is too.
    """
    pipeline = Pipeline("shops")
    sales = pipeline.from_source(CsvSource("in/{start:%Y-%m-%d}.csv" if partitions else "in", Sale, name="sales"))
    sales.key_by("shop").sum("amount").name("totals").sink_to(DeltaSink("totals"))
    deployment = BatchDeployment(
        pipeline,
        automation_condition=condition,
        partitions=partitions,
        carry_state=carry_state,
        upstream={"sales": exports.key} if upstream else {},
    )
    definitions = Definitions.merge(unified_definitions(deployment), Definitions(assets=[exports] if upstream else []))
    found, cursor = {key: [] for key in STAGES}, None
    with DagsterInstance.ephemeral() as instance:

        def materialize(key, partition):
            instance.report_runless_asset_event(AssetMaterialization(key, partition=partition))

        if carry_state:
            for key in STAGES:
                materialize(key, "2024-01-03")
        for day in (4, 5, 6):
            for minute in (0, 1, 2):
                if minute == 1 and upstream:
                    materialize(exports.key, f"2024-01-0{day - 1}")
                moment = datetime(2024, 1, day, 0, minute, 30, tzinfo=timezone.utc)
                evaluated = evaluate_automation_conditions(definitions, instance, cursor=cursor, evaluation_time=moment)
                cursor = evaluated.cursor
                for key in STAGES:
                    for partition in evaluated.get_requested_partitions(key):
                        found[key].append((day, partition))
                        materialize(key, partition)
    return found


def test_on_cron_requests_all_stages_of_a_source_that_is_no_asset_of_the_users():
    assert requested(EACH_DAY) == {key: [(5, None), (6, None)] for key in STAGES}
    days = [(5, "2024-01-04"), (6, "2024-01-05")]
    assert requested(EACH_DAY, DAILY) == dict.fromkeys(STAGES, days)


@pytest.mark.parametrize("carry_state", [False, True])
def test_on_cron_waits_for_the_users_asset_and_not_for_the_days_before(carry_state):
    days = [(5, "2024-01-04"), (6, "2024-01-05")]
    assert requested(EACH_DAY, DAILY, carry_state, upstream=True) == dict.fromkeys(STAGES, days)


def test_eager_requests_what_is_new_upstream():
    days = [(4, "2024-01-03"), (5, "2024-01-04"), (6, "2024-01-05")]
    assert requested(AutomationCondition.eager(), DAILY, upstream=True) == dict.fromkeys(STAGES, days)


def test_on_missing_requests_a_partition_that_is_not_there():
    found = requested(AutomationCondition.on_missing(), DAILY)
    assert (5, "2024-01-04") in found[STAGES[0]]


def test_a_condition_that_looks_at_no_dependencies_stays_as_it_is():
    condition = AutomationCondition.cron_tick_passed("0 0 * * *").since_last_handled()
    assert requested(condition, DAILY)[STAGES[0]] != []
