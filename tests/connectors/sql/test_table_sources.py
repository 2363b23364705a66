"""What all sources of tables do, in each real database: they leave out what is surely of other partitions."""

from datetime import datetime, timedelta, timezone
from typing import NamedTuple

import pytest
from dagster import DailyPartitionsDefinition, StaticPartitionsDefinition

from dagster_unified.orchestration.partitions import slice_of
from tests.connectors.sql.support import everything
from tests.connectors.support import write
from tests.connectors.trips import Parcel

DAYS = DailyPartitionsDefinition("2024-01-01")
REGIONS = StaticPartitionsDefinition(["it's", "\\x", "süd"])
SHELVES = StaticPartitionsDefinition(["1", "02", "x"])


class Visit(NamedTuple):
    id: int
    at: datetime


def test_a_partition_reads_its_window(database):
    first = datetime(2024, 1, 1, tzinfo=timezone.utc)
    write(database.sink("visits"), [Visit(n, first + n * timedelta(hours=1)) for n in range(240)])
    source = database.source("visits", Visit).partitioned_by("at").bounded_to(slice_of(DAYS, "2024-01-05"))
    # the database leaves out what is surely of another day; Spark looks closer
    read = {visit.at.day for visit in everything(source)}
    assert read == ({4, 5, 6} if database.is_postgres else {4, 5, 6, 7})


@pytest.mark.parametrize(
    ("field", "definition", "key", "read"),
    [
        ("region", REGIONS, "it's", {"it's", None}),
        ("region", REGIONS, "\\x", {"\\x", None}),
        ("region", REGIONS, "süd", {"süd", None}),
        ("shelf", SHELVES, "1", {1}),
        ("shelf", SHELVES, "02", set()),
        ("shelf", SHELVES, "x", set()),
        ("at", DAYS, "2024-01-05", {1704412800000, 1704499199999}),
    ],
)
def test_the_database_leaves_out_what_is_of_other_partitions(database, field, definition, key, read):
    times = (1704412799999, 1704412800000, 1704499199999, 1704499200000)
    regions = ("it's", "\\x", "süd", None)
    write(database.sink("parcels"), [Parcel(regions[n], n % 2, at) for n, at in enumerate(times)])
    source = database.source("parcels", Parcel).partitioned_by(field)
    found = everything(source.bounded_to(slice_of(definition, key)))
    assert {getattr(parcel, field) for parcel in found} == read
