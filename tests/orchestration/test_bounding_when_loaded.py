"""What of a source belongs to a partition is checked when the code location loads."""

import re
from datetime import datetime
from decimal import Decimal
from typing import NamedTuple

import pytest
from dagster import (
    DailyPartitionsDefinition,
    HourlyPartitionsDefinition,
    MultiPartitionsDefinition,
    StaticPartitionsDefinition,
)

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource
from dagster_unified.errors import PipelineError
from dagster_unified.orchestration import BatchDeployment, unified_definitions
from dagster_unified.orchestration.partitions import slice_of

DAILY = DailyPartitionsDefinition("2013-01-01", timezone="America/New_York")
SHOPS = StaticPartitionsDefinition(["north", "south"])


class Sale(NamedTuple):
    shop: str
    at: str
    amount: float


def daily(source):
    pipeline = Pipeline("daily")
    pipeline.from_source(source).print()
    return pipeline


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/in/sales/{date}.csv", "asks for 'date', and a partition has {end}, {key}, {start}"),
        (
            "/in/sales/{strat:%Y}.csv",
            "asks for 'strat', and a partition has {end}, {key}, {start}; did you mean 'start'?",
        ),
        ("/in/sales/{}.csv", "has {}, which no partition has; write {{ and }} for braces that are part of a name"),
        ("/in/sales/{start.year}.csv", "has {start.year}, which no partition has; write {{ and }}"),
        ("/in/sales/{key:%Y}.csv", "formats {key} as a time, '%Y', and it is a text; write {key}"),
        (
            "/in/sales/{start:yyyy-MM-dd}.csv",
            "has the format 'yyyy-MM-dd' for {start}, which is the same at every time; write {start:%Y-%m-%d}",
        ),
        (
            "/in/sales/{start:%Y-%Q}.csv",
            "has the format '%Y-%Q' for {start}, in which '%Q' is no directive of strftime; write {start:%Y-%m-%d}",
        ),
        ("/in/sales/{start:%Y-%}.csv", "has the format '%Y-%' for {start}, in which '%' is no directive of strftime"),
        ("/in/sales/{start!r}.csv", "has the conversion '!r' for {start}; write {start:%Y-%m-%d}"),
    ],
)
def test_a_template_that_fits_no_partition_is_an_error_when_the_code_location_loads(path, problem):
    with pytest.raises(
        PipelineError, match=r"^(daily: )?source 'sales': the path template " + re.escape(f"'{path}' {problem}")
    ):
        unified_definitions(BatchDeployment(daily(CsvSource(path, Sale)), partitions=DAILY))


HOURLY = HourlyPartitionsDefinition("2024-11-03-00:00", timezone="America/New_York")


@pytest.mark.parametrize(
    ("partitions", "path", "says"),
    [
        (HOURLY, "/in/{start:%Y-%m-%d}.csv", "2024-11-03-00:00 and 2024-11-03-01:00: csv files at /in/"),
        (DAILY, "/in/{start:%Y/%m}.csv", "2013-01-01 and 2013-01-02: csv files at"),
        (
            MultiPartitionsDefinition({"date": HOURLY, "shop": SHOPS}),
            "/in/{shop}/{date:%Y-%m-%d}.csv",
            r"2024-11-03-00:00|north and 2024-11-03-01:00|north: csv files at",
        ),
    ],
)
def test_partitions_of_one_path_are_an_error_when_the_code_location_loads(partitions, path, says):
    with pytest.raises(PipelineError, match=re.escape(f"source 'sales' reads the same for the partitions {says}")):
        unified_definitions(BatchDeployment(daily(CsvSource(path, Sale, name="sales")), partitions=partitions))
    by_field = CsvSource(path, Sale, name="sales").partitioned_by(
        **({"date": "at", "shop": "shop"} if isinstance(partitions, MultiPartitionsDefinition) else {"": "at"})
    )
    unified_definitions(BatchDeployment(daily(by_field), partitions=partitions))


def test_a_source_may_be_the_same_for_all_keys_of_a_dimension():
    both = MultiPartitionsDefinition({"date": HOURLY, "shop": SHOPS})
    unified_definitions(BatchDeployment(daily(CsvSource("/in/{shop}.csv", Sale)), partitions=both))


def test_the_hour_that_comes_twice_needs_a_path_of_its_own_for_each():
    key = "2024-11-03-01:00-0500"
    assert HOURLY.time_window_for_partition_key(key).start.utcoffset().total_seconds() == -5 * 3600
    for path, fits in [("{start:%Y-%m-%d-%H}", False), ("{start:%Y-%m-%d-%H%z}", True), ("{key}", True)]:
        deployment = BatchDeployment(daily(CsvSource(f"/in/{path}.csv", Sale, name="sales")), partitions=HOURLY)
        unified_definitions(deployment)
        if fits:
            deployment.plan(deployment.configuration(), slice_of(HOURLY, key))
            continue
        with pytest.raises(PipelineError, match="reads the same for the partitions 2024-11-03-01:00 and 2024-11-03-01"):
            deployment.plan(deployment.configuration(), slice_of(HOURLY, key))


class Priced(NamedTuple):
    price: Decimal
    sold: bool
    weight: float
    at: datetime


@pytest.mark.parametrize("field", Priced._fields)
def test_keys_are_compared_with_what_is_written_in_one_way_only(field):
    pipeline = daily(CsvSource("/in", Priced, name="sales").partitioned_by(field))
    with pytest.raises(PipelineError, match=f"source 'sales': field '{field}' of type .* cannot be compared with the"):
        unified_definitions(BatchDeployment(pipeline, partitions=SHOPS))


BOTH = MultiPartitionsDefinition({"date": DAILY, "shop": SHOPS})


@pytest.mark.parametrize(
    ("path", "partitions", "problem"),
    [
        ("{start}", SHOPS, "asks for 'start', and a partition has {key}"),
        ("{key}", BOTH, "'2013-01-01|north' for {key}, which cannot be part of a path"),
        (
            "{shp}",
            BOTH,
            "asks for 'shp', and a partition has {date}, {end}, {key}, {shop}, {start}; did you mean 'shop'?",
        ),
        ("{shop:%Y}", BOTH, "formats {shop} as a time"),
    ],
)
def test_static_partitions_have_no_times_and_several_dimensions_have_their_names(path, partitions, problem):
    with pytest.raises(PipelineError, match=re.escape(problem)):
        unified_definitions(BatchDeployment(daily(CsvSource(f"/in/sales/{path}.csv", Sale)), partitions=partitions))
    fitting = daily(CsvSource("/in/sales/{shop}/{date:%Y}/{end:%j}.csv", Sale))
    unified_definitions(BatchDeployment(fitting, partitions=BOTH))


@pytest.mark.parametrize(
    ("fields", "partitions", "says"),
    [
        (
            {"store": "shop"},
            BOTH,
            "daily: source 'sales': is partitioned by 'shop' as dimension 'store', and the partitions have 'date', 'sh",
        ),
        ({"": "at"}, BOTH, "is partitioned by 'at' as its only dimension, and the partitions have 'date', 'shop'"),
        (
            {"date": "at"},
            DAILY,
            "is partitioned by 'at' as dimension 'date', and the partitions have one dimension without a name",
        ),
        (
            {"": "amount"},
            DAILY,
            "cannot be partitioned in time by field 'amount' of type double; a datetime, a date",
        ),
    ],
)
def test_a_field_that_tells_no_dimension_or_no_time_is_an_error_when_the_code_location_loads(fields, partitions, says):
    source = CsvSource("/in/sales.csv", Sale).partitioned_by(**fields)
    with pytest.raises(PipelineError, match=says):
        unified_definitions(BatchDeployment(daily(source), partitions=partitions))
