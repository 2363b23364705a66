"""The partitions of a stream: whose they are, what they need, and which window of event time a record is in."""

from datetime import datetime, timedelta, timezone
from typing import NamedTuple

import pytest
from dagster import (
    DailyPartitionsDefinition,
    HourlyPartitionsDefinition,
    MonthlyPartitionsDefinition,
    StaticPartitionsDefinition,
    TimeWindowPartitionsDefinition,
)

from dagster_unified.api import Pipeline, WatermarkStrategy
from dagster_unified.connectors import CsvSource, DatabaseSink, DeltaSink, FileSink
from dagster_unified.errors import ConfigurationError
from dagster_unified.orchestration import BatchDeployment, StreamingDeployment, unified_definitions
from dagster_unified.orchestration.stream_partitions import (
    MINUTE,
    QUARTER,
    EventTimeWindows,
    partitions_of_stream,
    unit_of,
)

DAYS = DailyPartitionsDefinition("2026-01-01")
BOUNDED = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(minutes=1))


class Sale(NamedTuple):
    shop: str
    at: datetime
    amount: int


def shops(folder, strategy=BOUNDED.with_timestamp_assigner("at"), sink=None):
    pipeline = Pipeline("shops")
    source = CsvSource(str(folder / "in"), Sale, name="incoming", monitor=True).partitioned_by("at")
    pipeline.from_source(source, strategy).sink_to(sink or DeltaSink(str(folder / "sales"), mode="append"))
    return pipeline


@pytest.mark.parametrize("partitions", [StaticPartitionsDefinition(["a"]), "daily"])
def test_partitions_are_in_time(tmp_path, partitions):
    with pytest.raises(ConfigurationError, match=r"shops: .*partitions"):
        StreamingDeployment(shops(tmp_path), partitions=partitions)


def test_a_stream_has_the_partitions_of_its_pipeline_in_batch_where_it_names_none(tmp_path):
    pipeline = shops(tmp_path)
    assert partitions_of_stream(StreamingDeployment(pipeline), None) is None
    assert partitions_of_stream(StreamingDeployment(pipeline, partitions=DAYS), None) == DAYS
    assert partitions_of_stream(StreamingDeployment(pipeline), BatchDeployment(pipeline, partitions=DAYS)) == DAYS
    same = StreamingDeployment(pipeline, partitions=DailyPartitionsDefinition("2026-01-01"))
    assert partitions_of_stream(same, BatchDeployment(pipeline, partitions=DAYS)) == DAYS


def test_a_stream_without_event_time_has_no_partitions_but_those_that_it_names_are_an_error(tmp_path):
    pipeline = shops(tmp_path, strategy=None)
    batch = BatchDeployment(pipeline, partitions=DAYS)
    assert partitions_of_stream(StreamingDeployment(pipeline), batch) is None
    with pytest.raises(ConfigurationError, match=r"sink 'sales' gets records without event time; assign timestamps"):
        partitions_of_stream(StreamingDeployment(pipeline, partitions=DAYS), batch)


def test_a_stream_without_watermarks_cannot_tell_when_a_partition_is_complete(tmp_path):
    pipeline = shops(tmp_path, WatermarkStrategy.no_watermarks().with_timestamp_assigner("at"))
    with pytest.raises(ConfigurationError, match="emits no watermarks, which say when a partition is complete"):
        partitions_of_stream(StreamingDeployment(pipeline, partitions=DAYS), None)


@pytest.mark.parametrize("in_batch", [None, HourlyPartitionsDefinition("2026-01-01-00:00")])
def test_a_table_has_one_kind_of_partitions(tmp_path, in_batch):
    pipeline = shops(tmp_path)
    batch = BatchDeployment(pipeline, partitions=in_batch)
    with pytest.raises(ConfigurationError, match="give them to the BatchDeployment only"):
        partitions_of_stream(StreamingDeployment(pipeline, partitions=DAYS), batch)


def test_the_asset_of_a_streams_table_has_the_streams_partitions(tmp_path):
    definitions = unified_definitions(StreamingDeployment(shops(tmp_path), partitions=DAYS))
    specs = {spec.key.to_user_string(): spec for spec in definitions.resolve_all_asset_specs()}
    assert specs["shops/sales"].partitions_def == DAYS


def late(folder, sink=None, **in_batch):
    pipeline = shops(folder, sink=sink)
    batch = BatchDeployment(pipeline, partitions=DAYS, **in_batch)
    return unified_definitions(batch, StreamingDeployment(pipeline, rerun_late=True))


@pytest.mark.parametrize(
    "sink",
    [
        lambda folder: DeltaSink(str(folder / "t"), mode="append"),
        lambda folder: DeltaSink(str(folder / "t")),
        lambda folder: FileSink(str(folder / "t")),
        lambda folder: DatabaseSink("t", f"sqlite:///{folder}/t.db", partition_column="day"),
    ],
)
def test_late_partitions_are_not_run_again_where_that_would_double_rows_or_take_others_away(tmp_path, sink):
    with pytest.raises(ConfigurationError, match=r"shops: with rerun_late .* write with mode='upsert'"):
        late(tmp_path, sink(tmp_path))


@pytest.mark.parametrize(
    "sink",
    [
        lambda folder: DeltaSink(str(folder / "t"), mode="upsert", key="shop"),
        lambda folder: DeltaSink(str(folder / "t"), partition_by="shop"),
        lambda folder: DatabaseSink("t", f"sqlite:///{folder}/t.db", mode="upsert", key="shop"),
    ],
)
def test_late_partitions_are_run_again_where_that_replaces_what_the_stream_wrote(tmp_path, sink):
    assert late(tmp_path, sink(tmp_path)).resolve_sensor_def("shops_late_sensor")


def test_late_partitions_are_not_run_again_from_state_that_nobody_left(tmp_path):
    with pytest.raises(ConfigurationError, match=r"rerun_late .* carry_state"):
        late(tmp_path, DeltaSink(str(tmp_path / "t"), partition_by="shop"), carry_state=True)
    with pytest.raises(ConfigurationError, match="there is no BatchDeployment"):
        unified_definitions(StreamingDeployment(shops(tmp_path), rerun_late=True, partitions=DAYS))


def key_of(definition, moment):
    window = EventTimeWindows(definition).of(int(moment.timestamp() * 1000) // unit_of(definition))
    return window and window.key


def test_a_record_belongs_to_the_day_of_the_partitions_time_zone():
    vienna = DailyPartitionsDefinition("2026-03-01", timezone="Europe/Vienna")
    for moment, day in (("2026-03-28T22:59", "2026-03-28"), ("2026-03-28T23:00", "2026-03-29")):
        assert key_of(vienna, datetime.fromisoformat(f"{moment}+00:00")) == day
    window = EventTimeWindows(vienna).of(int(datetime(2026, 3, 29, 12, tzinfo=timezone.utc).timestamp()) // 900)
    assert window.end - window.start == 23 * 3_600_000
    assert key_of(vienna, datetime(2026, 2, 28, 22, tzinfo=timezone.utc)) is None


def test_units_are_not_divided_by_the_bounds_of_partitions():
    assert [unit_of(d) for d in (DAYS, MonthlyPartitionsDefinition("2026-01-01"))] == [QUARTER, QUARTER]
    assert unit_of(HourlyPartitionsDefinition("2026-01-01-00:30", minute_offset=30)) == QUARTER
    odd = HourlyPartitionsDefinition("2026-01-01-00:00", minute_offset=7)
    assert unit_of(odd) == MINUTE
    assert key_of(odd, datetime(2026, 1, 2, 10, 6, tzinfo=timezone.utc)) == "2026-01-02-09:07"


def test_records_in_excluded_windows_and_behind_the_last_belong_to_none():
    ends = DailyPartitionsDefinition("2026-01-01", end_date="2026-01-03")
    assert key_of(ends, datetime(2026, 1, 2, 23, tzinfo=timezone.utc)) == "2026-01-02"
    assert key_of(ends, datetime(2026, 1, 3, tzinfo=timezone.utc)) is None
    weekdays = TimeWindowPartitionsDefinition(
        start="2026-01-01", fmt="%Y-%m-%d", cron_schedule="0 0 * * *", exclusions=["0 0 * * 6", "0 0 * * 0"]
    )
    assert key_of(weekdays, datetime(2026, 1, 2, 12, tzinfo=timezone.utc)) == "2026-01-02"
    assert key_of(weekdays, datetime(2026, 1, 3, 12, tzinfo=timezone.utc)) is None
