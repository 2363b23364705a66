"""What a source reads of itself for a partition: by path, by a field in time, by a key."""

from datetime import date, datetime, timezone
from itertools import pairwise
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dagster import (
    DailyPartitionsDefinition,
    HourlyPartitionsDefinition,
    MonthlyPartitionsDefinition,
    MultiPartitionsDefinition,
    StaticPartitionsDefinition,
)

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CollectionSource, CsvSource, ParquetSource, RateSource, StructuredSource
from dagster_unified.connectors.files.path_template import PathTemplate
from dagster_unified.connectors.protocol.bounds import bounding_range, expression_of, rows_in, whole_numbers
from dagster_unified.connectors.protocol.frame import MALFORMED
from dagster_unified.engine.failures import translated
from dagster_unified.errors import MalformedInputError, PipelineError
from dagster_unified.graph.connectors import Slice, TimeRange
from dagster_unified.operators.layout import PARTITION_INDEX
from dagster_unified.orchestration.partitions import slice_of
from dagster_unified.records import record_type

NEW_YORK = "America/New_York"
DAILY = DailyPartitionsDefinition("2013-01-01", timezone=NEW_YORK)
MAY = slice_of(DAILY, "2013-05-01")


class Sale(NamedTuple):
    shop: str
    at: str
    amount: int


def csv(folder, name, *lines):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(["shop,at,amount", *lines]) + "\n")
    return str(folder)


def amounts(spark, source, part):
    return sorted(r.amount for r in source.bounded_to(part).read_partition(spark).collect())


def test_a_path_template_names_the_files_of_a_partition(spark, tmp_path):
    csv(tmp_path / "2013" / "05", "01.csv", "north,x,1")
    csv(tmp_path / "2013" / "05", "02.csv", "north,x,2")
    source = CsvSource(f"{tmp_path}/{{start:%Y/%m/%d}}.csv", Sale)
    assert amounts(spark, source, MAY) == [1]
    assert sorted(r.amount for r in source.read(spark).collect()) == [1, 2]
    with pytest.raises(PipelineError, match=r"there are no files at .*03.csv for partition 2013-05-03"):
        amounts(spark, source, slice_of(DAILY, "2013-05-03"))


def test_a_template_may_name_dimensions_and_a_wrong_name_is_told(tmp_path):
    both = MultiPartitionsDefinition({"date": DAILY, "airport": StaticPartitionsDefinition(["EWR", "JFK"])})
    part = slice_of(both, "JFK|2013-05-01")
    assert str(CsvSource("/in/{airport}/{date:%Y%m%d}.csv", Sale).bounded_to(part).path) == "/in/JFK/20130501.csv"
    with pytest.raises(
        PipelineError,
        match=(
            r"asks for 'airprt', and a partition has {airport}, {date}, {end}, {key}, {start}; did you mean 'airport'"
        ),
    ):
        CsvSource("/in/{airprt}.csv", Sale).bounded_to(part)


@pytest.mark.parametrize("key", ["../secret", "a/b", "..", "~root", ""])
def test_a_key_cannot_lead_out_of_its_folder(key):
    with pytest.raises(PipelineError, match="cannot be part of a path"):
        CsvSource("/in/{key}/x.csv", Sale).bounded_to(Slice(key, {"": key}))


def test_a_text_field_tells_the_partition_in_its_time_zone(spark, tmp_path):
    lines = [
        "a,2013-05-01T03:59:59Z,1",
        "a,2013-05-01T04:00:00Z,2",
        "a,2013-05-02T03:59:59Z,3",
        "a,2013-05-02T04:00:00Z,4",
        "a,2013-05-01T23:30:00-05:00,5",
    ]
    source = CsvSource(csv(tmp_path, "sales.csv", *lines), Sale).partitioned_by("at")
    assert amounts(spark, source, MAY) == [2, 3]
    assert amounts(spark, source, slice_of(DAILY, "2013-05-02")) == [4, 5]
    assert sorted(r.amount for r in source.read_partition(spark).collect()) == [1, 2, 3, 4, 5]


def test_every_row_is_in_one_partition_when_clocks_change(spark, tmp_path):
    hours = [
        datetime(2013, month, day, hour, 30, tzinfo=timezone.utc)
        for month, day in ((3, 10), (11, 3))
        for hour in range(24)
    ]
    source = CsvSource(
        csv(tmp_path, "sales.csv", *[f"a,{h.isoformat()},{i}" for i, h in enumerate(hours)]), Sale
    ).partitioned_by("at")
    days = [slice_of(DAILY, f"2013-{d}") for d in ("03-09", "03-10", "11-02", "11-03")]
    found = [amounts(spark, source, d) for d in days]
    assert sorted(i for part in found for i in part) == list(range(48))
    assert [len(f) for f in found] == [5, 19, 4, 20]
    lengths = [(d.time().end.timestamp() - d.time().start.timestamp()) / 3600 for d in days]
    assert lengths == [24, 23, 24, 25]
    hourly = HourlyPartitionsDefinition("2013-11-03-00:00", timezone=NEW_YORK)
    keys = hourly.get_partition_keys(current_time=datetime(2013, 11, 4, 5, tzinfo=timezone.utc))[:25]
    windows = [slice_of(hourly, k).time() for k in keys]
    assert len({slice_of(hourly, k).name for k in keys}) == 25
    assert all(a.end.timestamp() == b.start.timestamp() for a, b in pairwise(windows))


class Typed(NamedTuple):
    moment: datetime
    day: date
    millis: int


@pytest.mark.a_day(1)
@pytest.mark.parametrize("field", ["moment", "day", "millis"])
def test_datetimes_dates_and_milliseconds_tell_the_partition_and_parquet_skips_the_rest(spark, tmp_path, field):
    moments = [datetime(2013, 5, d, 12, tzinfo=timezone.utc) for d in range(1, 5)]
    rows = [Typed(m, m.date(), int(m.timestamp() * 1000)) for m in moments]
    kind = record_type(Typed, "here")
    pq.write_table(pa.Table.from_batches([kind.to_batch(rows)]), tmp_path / "t.parquet", row_group_size=1)
    frame = ParquetSource(str(tmp_path), Typed).partitioned_by(field).bounded_to(MAY).read_partition(spark)
    assert [r.day for r in frame.collect()] == [date(2013, 5, 1)]
    assert "PushedFilters: [Or(" in frame._jdf.queryExecution().toString()


def test_dates_do_not_tell_hours_and_numbers_of_the_wrong_kind_do_not_tell_time(spark, tmp_path):
    pq.write_table(
        pa.table(
            {
                "moment": pa.array([], pa.timestamp("us", "UTC")),
                "day": pa.array([], pa.date32()),
                "millis": pa.array([], pa.int64()),
            }
        ),
        tmp_path / "t.parquet",
    )
    hour = slice_of(HourlyPartitionsDefinition("2013-01-01-00:00"), "2013-05-01-03:00")
    with pytest.raises(
        PipelineError, match="field 'day' is a date, which cannot separate partitions that are shorter than a day"
    ):
        ParquetSource(str(tmp_path), Typed).partitioned_by("day").bounded_to(hour).read_partition(spark)


def test_static_keys_and_several_dimensions(spark, tmp_path):
    source = CsvSource(
        csv(
            tmp_path,
            "s.csv",
            "north,2013-05-01T12:00:00Z,1",
            "south,2013-05-01T12:00:00Z,2",
            "north,2013-05-02T12:00:00Z,3",
        ),
        Sale,
    )
    shops = StaticPartitionsDefinition(["north", "south"])
    assert amounts(spark, source.partitioned_by("shop"), slice_of(shops, "south")) == [2]
    both = MultiPartitionsDefinition({"date": DAILY, "shop": shops})
    assert amounts(spark, source.partitioned_by(date="at", shop="shop"), slice_of(both, "2013-05-01|north")) == [1]


def test_a_row_whose_partition_is_not_known_is_malformed_and_not_lost(spark, tmp_path):
    folder = csv(tmp_path, "s.csv", "north,2013-05-01T12:00:00Z,1", "south,soon,2")
    diverting = CsvSource(folder, Sale, on_malformed="divert").partitioned_by("at").bounded_to(MAY)
    rows = diverting.read_partition(spark).collect()
    assert [(r.amount, r[MALFORMED].reason if r[MALFORMED] else None) for r in sorted(rows)] == [
        (1, None),
        (2, "field 'at' does not say the partition"),
    ]
    failing = CsvSource(folder, Sale, name="sales").partitioned_by("at").bounded_to(MAY)
    with pytest.raises(Exception, match="field 'at' does not say the partition") as raised:
        failing.read_partition(spark).collect()
    pipeline = Pipeline("daily")
    pipeline.from_source(failing).print()
    error = translated(raised.value, pipeline.plan(), "sales", spark)
    assert isinstance(error, MalformedInputError)
    assert (
        str(error)
        == """daily: source 'sales': field 'at' does not say the partition: {"shop":"south","at":"soon","amount":2}"""
    )


def test_partition_options_bound_a_source_of_spark(spark, tmp_path):
    for day in ("2013-05-01", "2013-05-02"):
        pq.write_table(pa.table({"amount": [int(day[-1])]}), tmp_path / f"{day}.parquet")

    class Amount(NamedTuple):
        amount: int

    source = StructuredSource(
        "parquet", Amount, {"path": str(tmp_path)}, partition_options=lambda part: {"pathGlobFilter": f"{part.key}*"}
    )
    assert amounts(spark, source, MAY) == [1]


HAVANA = DailyPartitionsDefinition("2008-03-01", timezone="America/Havana")
"""On the 16th the clock skips the hour from 00:00."""


def test_a_day_that_begins_at_one_is_known_by_its_date():
    template = PathTemplate("sales/{start:%Y-%m-%d}.csv", "source 'sales'")
    assert template.of(slice_of(HAVANA, "2008-03-16")) == "sales/2008-03-16.csv"
    until = slice_of(HAVANA, "2008-03-15").time().end
    assert [template.ends_by(f"2008-03-{day}.csv", until) for day in (15, 16, 17)] == [True, False, False]


def test_a_path_that_says_less_than_a_partitions_beginning_is_read_as_such():
    fiscal = MonthlyPartitionsDefinition("2024-01-15", day_offset=15)
    template = PathTemplate("sales/{start:%Y-%m}.csv", "source 'sales'")
    until = slice_of(fiscal, "2024-01-15").time().end
    assert [template.ends_by(f"2024-0{month}.csv", until) for month in (1, 2, 3)] == [True, False, False]


def test_dates_tell_days_of_which_one_begins_at_one(spark):
    frame = spark.createDataFrame([(date(2008, 3, day),) for day in (15, 16, 17)], "day date")
    days = [slice_of(HAVANA, f"2008-03-{day}") for day in (15, 16)]
    rows = rows_in(frame, {"": "day"}, days, "sales").collect()
    assert [(row.day.day, row[PARTITION_INDEX]) for row in rows] == [(15, 0), (16, 1)]


def test_a_source_that_cannot_be_bounded_is_named():
    pipeline = Pipeline("p")
    pipeline.from_source(RateSource(name="ticks")).print()
    with pytest.raises(
        PipelineError,
        match=r"p: source 'ticks' \(Spark source rate\) does not say what of it belongs to a partition; name the field",
    ):
        pipeline.graph().bounded_to(MAY)
    with pytest.raises(PipelineError, match=r"or write a path template such as /in/\{start:%Y-%m-%d\}\.csv"):
        CsvSource("/in/all.csv", Sale).bounded_to(MAY)
    with pytest.raises(
        PipelineError, match="cannot be partitioned by 'att': there is no such field; did you mean 'at'"
    ):
        CsvSource("/in/all.csv", Sale).partitioned_by("att")


def test_partitions_differ_in_what_they_are_known_by():
    source = CollectionSource([Sale("a", "2013-05-01T12:00:00Z", 1)], Sale, "sales").partitioned_by("at")
    assert source.bounded_to(MAY).describe() != source.bounded_to(slice_of(DAILY, "2013-05-02")).describe()
    assert isinstance(MAY.time(), TimeRange)


def test_a_server_is_told_what_partitions_cover():
    days = [slice_of(DAILY, f"2013-05-0{day}") for day in (1, 2, 5)]
    first, last = days[0].time(), days[2].time()
    assert bounding_range({"": "at"}, days) == {"at": TimeRange(first.start, last.end)}
    shops = MultiPartitionsDefinition({"day": DAILY, "shop": StaticPartitionsDefinition(["a", "b"])})
    both = [slice_of(shops, key) for key in ("2013-05-01|a", "2013-05-01|b")]
    assert bounding_range({"day": "at", "shop": "shop"}, both) == {"at": first, "shop": {"a", "b"}}
    assert bounding_range({"shop": "shop"}, both) == {"shop": {"a", "b"}}
    assert bounding_range({"": "at"}, []) == {}


def test_a_server_is_told_of_the_hour_that_comes_twice():
    hours = HourlyPartitionsDefinition("2013-11-03-00:00", end_date="2013-11-03-04:00", timezone=NEW_YORK)
    slices = [slice_of(hours, key) for key in hours.get_partition_keys()[:3]]
    covered = bounding_range({"": "at"}, slices)["at"]
    assert covered.start.isoformat() == "2013-11-03T00:00:00-04:00"
    assert covered.end.isoformat() == "2013-11-03T02:00:00-05:00"
    covered = bounding_range({"": "at"}, slices[:2])["at"]
    assert covered.end.isoformat() == "2013-11-03T01:00:00-05:00"


def test_a_key_names_a_number_as_spark_writes_it():
    keys = ["1", "-2", "02", "+3", " 4", "x", "", "5.0", "-0", "9223372036854775807", "9223372036854775808"]
    assert whole_numbers(keys) == [-2, 1, 9223372036854775807]


MOMENTS = [datetime(2013, 5, 1, 3, 59), datetime(2013, 5, 1, 4), datetime(2013, 5, 2, 3, 59), datetime(2013, 5, 2, 4)]
"""Around May 1 of New York, in UTC."""


@pytest.mark.parametrize(
    ("column", "wanted"),
    [
        (pa.array(MOMENTS, pa.timestamp("us", "UTC")), [1, 2]),
        (pa.array([1000 * int(m.replace(tzinfo=timezone.utc).timestamp()) for m in MOMENTS]), [1, 2]),
        (pa.array([date(2013, 4, 30), date(2013, 5, 1), date(2013, 5, 2)]), [1]),
        (pa.array([datetime(2013, 4, 30, 23, 59), datetime(2013, 5, 1), datetime(2013, 5, 1, 23, 59)]), [1, 2]),
    ],
    ids=["moments", "milliseconds", "dates", "times by the clock"],
)
def test_arrow_finds_the_rows_of_a_day_of_a_zone(column, wanted):
    table = pa.table({"at": column, "row": range(len(column))})
    chosen = expression_of({"": "at"}, table.schema, MAY.shape, [MAY], "table sales")
    assert table.filter(chosen)["row"].to_pylist() == wanted


def test_arrow_finds_the_rows_of_several_partitions_by_the_columns_of_their_dimensions():
    both = MultiPartitionsDefinition({"day": DAILY, "shop": StaticPartitionsDefinition(["1", "2"])})
    slices = [slice_of(both, key) for key in ("2013-05-01|1", "2013-05-02|2")]
    rows = [(date(2013, 5, day), shop) for day in (1, 2, 3) for shop in (1, 2)]
    table = pa.table({"day": [row[0] for row in rows], "shop": [row[1] for row in rows]})
    chosen = expression_of({"day": "day", "shop": "shop"}, table.schema, slices[0].shape, slices, "table sales")
    assert [(row["day"].day, row["shop"]) for row in table.filter(chosen).to_pylist()] == [(1, 1), (2, 2)]


def test_arrow_is_not_asked_for_the_hours_of_a_date():
    hour = slice_of(HourlyPartitionsDefinition("2013-01-01-00:00"), "2013-05-01-07:00")
    schema = pa.schema([("day", pa.date32())])
    with pytest.raises(PipelineError, match="table sales: field 'day' is a date, which cannot separate partitions"):
        expression_of({"": "day"}, schema, hour.shape, [hour], "table sales")
