"""When a schedule ticks, and which partitions it then asks for."""

from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from dagster import (
    AssetKey,
    AssetMaterialization,
    AssetSelection,
    AutomationCondition,
    DagsterInstance,
    DailyPartitionsDefinition,
    FreshnessPolicy,
    HourlyPartitionsDefinition,
    MonthlyPartitionsDefinition,
    MultiPartitionsDefinition,
    StaticPartitionsDefinition,
    TimeWindowPartitionsDefinition,
    WeeklyPartitionsDefinition,
    build_schedule_context,
)

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CollectionSource
from dagster_unified.errors import ConfigurationError
from dagster_unified.orchestration import BatchDeployment, BatchSchedule, unified_definitions
from dagster_unified.orchestration.schedules import cron_of

NEW_YORK = ZoneInfo("America/New_York")
DAILY = DailyPartitionsDefinition("2024-03-01", timezone="America/New_York")
SIX_HOURS = TimeWindowPartitionsDefinition(cron_schedule="0 */6 * * *", start="2024-03-01-00:00", fmt="%Y-%m-%d-%H:%M")
STAGE, TABLE = AssetKey(["days", "ticks_stage"]), AssetKey(["days", "print"])


def defined(partitions=DAILY, **options):
    pipeline = Pipeline("days")
    source = CollectionSource([1, 2], int, "ticks")
    source = source.partitioned_by(**options.pop("by")) if "by" in options else source.partitioned_by("value")
    pipeline.from_source(source).print()
    return unified_definitions(BatchDeployment(pipeline, partitions=partitions, **options))


def tick(definitions, at, instance):
    found = definitions.resolve_schedule_def("days_schedule")
    context = build_schedule_context(
        instance=instance, scheduled_execution_time=at, repository_def=definitions.get_repository_def()
    )
    result = found.evaluate_tick(context)
    return result.skip_message or [
        r.partition_key or (r.tags["dagster/asset_partition_range_start"], r.tags["dagster/asset_partition_range_end"])
        for r in result.run_requests
    ]


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    """An instance as a schedule's context needs it."""
    with DagsterInstance.local_temp(str(tmp_path_factory.mktemp("dagster"))) as instance:
        yield instance


@pytest.fixture
def instance(on_disk):
    on_disk.wipe_assets([STAGE])
    return on_disk


def done(instance, *keys):
    for key in keys:
        instance.report_runless_asset_event(AssetMaterialization(STAGE, partition=key))


def morning(day, hour=6):
    return datetime(2024, 3, day, hour, tzinfo=NEW_YORK)


def test_the_newest_partition_that_is_complete_is_run(instance):
    assert tick(defined(schedule=BatchSchedule()), morning(5, 0), instance) == ["2024-03-04"]
    assert tick(defined(schedule=BatchSchedule(offset=timedelta(days=1, hours=6))), morning(5), instance) == [
        "2024-03-03"
    ]
    assert (
        tick(defined(schedule=BatchSchedule()), morning(1, 0), instance)
        == "no partition of days is complete, or those that are are on their way"
    )


@pytest.mark.parametrize(("month", "day", "newest"), [(3, 10, "2024-03-09"), (11, 3, "2024-11-02")])
def test_six_hours_after_midnight_is_six_in_the_morning_on_days_of_23_and_25_hours(instance, month, day, newest):
    six = datetime(2024, month, day, 6, tzinfo=NEW_YORK)
    assert tick(defined(schedule=BatchSchedule(offset=timedelta(hours=6))), six, instance) == [newest]


def test_what_was_missed_is_run_as_well_and_what_is_there_is_not(instance):
    done(instance, "2024-03-02")
    assert tick(defined(schedule=BatchSchedule(catch_up=3)), morning(5, 0), instance) == [
        "2024-03-01",
        "2024-03-03",
        "2024-03-04",
    ]
    assert tick(defined(schedule=BatchSchedule(catch_up=1)), morning(5, 0), instance) == ["2024-03-03", "2024-03-04"]


def test_with_carried_state_what_was_missed_is_one_range_in_order(instance):
    done(instance, "2024-03-01", "2024-03-02")
    assert tick(defined(schedule=BatchSchedule(catch_up=3), carry_state=True), morning(5, 0), instance) == [
        ("2024-03-03", "2024-03-04")
    ]


def test_every_key_of_the_newest_window_is_run(instance):
    both = MultiPartitionsDefinition({"date": DAILY, "shop": StaticPartitionsDefinition(["a", "b"])})
    found = tick(
        defined(both, schedule=BatchSchedule(), by={"date": "value", "shop": "value"}), morning(5, 0), instance
    )
    assert sorted(found) == ["2024-03-04|a", "2024-03-04|b"]


def test_retries_are_those_of_the_run(instance):
    definitions = defined(schedule=BatchSchedule(retries=2))
    context = build_schedule_context(
        instance=instance, scheduled_execution_time=morning(5, 0), repository_def=definitions.get_repository_def()
    )
    (request,) = definitions.resolve_schedule_def("days_schedule").evaluate_tick(context).run_requests
    assert request.tags["dagster/max_retries"] == "2"


@pytest.mark.parametrize(
    ("partitions", "offset", "cron"),
    [
        (HourlyPartitionsDefinition("2024-03-01-00:00"), timedelta(hours=2, minutes=15), "15 * * * *"),
        (DAILY, timedelta(hours=6, minutes=30), "30 6 * * *"),
        (DAILY, timedelta(days=2, hours=1), "0 1 * * *"),
        (DailyPartitionsDefinition("2024-03-01", hour_offset=5), timedelta(hours=20), "0 1 * * *"),
        (WeeklyPartitionsDefinition("2024-03-01"), timedelta(days=1, hours=3), "0 3 * * 1"),
        (MonthlyPartitionsDefinition("2024-03-01"), timedelta(days=2, hours=3), "0 3 3 * *"),
    ],
)
def test_an_offset_moves_the_cadence_of_the_partitions(partitions, offset, cron):
    assert cron_of("days", partitions, offset) == cron


def test_partitions_of_a_cron_of_their_own_have_an_offset_from_the_schedules(instance):
    definitions = defined(SIX_HOURS, schedule=BatchSchedule(offset=timedelta(hours=1), cron="0 1-19/6 * * *"))
    at = datetime(2024, 3, 5, 7, tzinfo=ZoneInfo("UTC"))
    assert tick(definitions, at, instance) == ["2024-03-05-00:00"]


def test_once_partitions_have_ended_only_what_was_missed_is_run(instance):
    ended = DailyPartitionsDefinition("2024-03-01", end_date="2024-03-04", timezone="America/New_York")
    definitions = defined(ended, schedule=BatchSchedule(catch_up=1))
    assert tick(definitions, morning(4, 0), instance) == ["2024-03-02", "2024-03-03"]
    done(instance, "2024-03-02")
    assert tick(definitions, morning(5, 0), instance) == ["2024-03-03"]
    done(instance, "2024-03-03")
    assert "no partition of days is complete" in tick(definitions, morning(6, 0), instance)


@pytest.mark.parametrize("carry", [False, True])
def test_on_excluded_days_only_what_was_missed_is_run(instance, carry):
    weekdays = DailyPartitionsDefinition(
        "2024-03-01", timezone="America/New_York", exclusions=["0 0 * * 6", "0 0 * * 0"]
    )
    definitions = defined(weekdays, schedule=BatchSchedule(), carry_state=carry)
    assert tick(definitions, morning(9, 0), instance) == ["2024-03-08"]  # Friday's, on Saturday
    done(instance, "2024-03-08")
    for day in (10, 11):
        assert "no partition of days is complete" in tick(definitions, morning(day, 0), instance)
    assert tick(definitions, morning(12, 0), instance) == ["2024-03-11"]
    assert tick(definitions, morning(18, 0), instance) == ["2024-03-15"]  # which has failed, or the daemon was down


def test_a_schedule_that_cannot_be_is_an_error():
    with pytest.raises(ConfigurationError, match="days: the partitions say when the schedule ticks; leave cron= out"):
        defined(schedule=BatchSchedule(cron="0 3 * * *"))
    with pytest.raises(ConfigurationError, match="a schedule without partitions in time needs cron="):
        defined(None, schedule=BatchSchedule())
    with pytest.raises(ConfigurationError, match="ends on day 31 of the month"):
        cron_of("days", MonthlyPartitionsDefinition("2024-03-01"), timedelta(days=30))
    with pytest.raises(ConfigurationError, match=r"partitions of '0 \*/6 \* \* \*' have no cadence .* by cron= when"):
        defined(SIX_HOURS, schedule=BatchSchedule(offset=timedelta(hours=1)))
    with pytest.raises(ConfigurationError, match="offset is in whole minutes, and is 0:00:30"):
        BatchSchedule(offset=timedelta(seconds=30))
    with pytest.raises(ConfigurationError, match="cannot be negative"):
        BatchSchedule(catch_up=-1)


def test_stages_have_the_pool_the_policy_and_the_condition_that_were_given():
    condition = AutomationCondition.eager()
    policy = FreshnessPolicy.time_window(fail_window=timedelta(hours=30))
    definitions = defined(pool="spark", freshness_policy=policy, automation_condition=condition)
    graph = definitions.resolve_asset_graph()
    stage, table = graph.get(STAGE), graph.get(TABLE)
    without_sources = condition.ignore(AssetSelection.assets(AssetKey(["days", "ticks_source"])))
    assert (stage.pools, stage.automation_condition, table.freshness_policy) == ({"spark"}, without_sources, policy)
