"""What a source reads of real databases: types, splits, partitions, and what it refuses."""

from datetime import date, datetime, timedelta, timezone
from typing import NamedTuple

import pytest
from dagster import DailyPartitionsDefinition

from dagster_unified.api import DatabaseSink, DatabaseSource, Pipeline
from dagster_unified.connectors.splits import Malformed
from dagster_unified.errors import ConfigurationError, PipelineError, SourceError, UnsupportedError
from dagster_unified.orchestration.partitions import slice_of
from tests.connectors.database.test_sink import MANY, VALUE, Everything, Sale, execute, rows, url  # noqa: F401
from tests.connectors.postgres.support import write

DAYS = DailyPartitionsDefinition("2024-01-01")


class Visit(NamedTuple):
    id: int
    at: datetime


def planned(source):
    reading = source.settled()
    return reading.splits(reading._range.start, reading._range.end)


def everything(source):
    found = []
    for split in planned(source):
        for batch in source.read_split(split):
            found += [batch] if isinstance(batch, Malformed) else source.records.from_batch(batch)
    return found


def test_what_a_sink_has_written_comes_back(url):  # noqa: F811
    values = [VALUE, Everything(*[None] * 11)]
    write(DatabaseSink("everything", url), values)
    assert sorted(everything(DatabaseSource("everything", Everything, url)), key=repr) == sorted(values, key=repr)


def test_ranges_of_a_column_are_the_whole_table(url):  # noqa: F811
    write(DatabaseSink("sales", url), MANY)
    source = DatabaseSource("sales", Sale, url, split_by="id", parallelism=3)
    assert len(planned(source)) == 4
    assert sorted(everything(source)) == MANY


def test_a_query_is_read(url):  # noqa: F811
    write(DatabaseSink("sales", url), MANY[:20])
    query = """SELECT id, "order", amount FROM sales WHERE "order" <> ':x' AND id > 10; """
    assert sorted(everything(DatabaseSource(None, Sale, url, query=query, split_by="id"))) == MANY[11:20]


def test_a_partition_reads_its_window(url):  # noqa: F811
    first = datetime(2024, 1, 1, tzinfo=timezone.utc)
    write(DatabaseSink("visits", url), [Visit(n, first + n * timedelta(hours=1)) for n in range(240)])
    source = DatabaseSource("visits", Visit, url).partitioned_by("at").bounded_to(slice_of(DAYS, "2024-01-05"))
    # the database leaves out what is surely of another day; Spark looks closer
    assert {visit.at.day for visit in everything(source)} == {4, 5, 6, 7}


def test_what_is_no_time_is_not_left_out_with_a_window(tmp_path):
    shop = f"sqlite:///{tmp_path}/shop.db"
    execute(shop, "CREATE TABLE visits (id bigint, at DATETIME)")
    execute(shop, "INSERT INTO visits VALUES (1, 1704447000), (2, '2024-01-05 10:00:00'), (3, '2024-01-20 10:00:00')")
    source = DatabaseSource("visits", Visit, shop, on_malformed="divert").partitioned_by("at")
    found = everything(source.bounded_to(slice_of(DAYS, "2024-01-05")))
    assert [one.id if isinstance(one, Visit) else one.reason for one in found] == ["1704447000 is not a time", 2]


def test_rows_that_do_not_fit_are_told_apart(url):  # noqa: F811
    execute(url, 'CREATE TABLE sales (id bigint, "order" text, amount double)')
    execute(url, "INSERT INTO sales VALUES (1, 'a', 1), (NULL, 'b', 1), (3, 'c', NULL)")
    found = everything(DatabaseSource("sales", Sale, url, on_malformed="divert"))
    assert [one for one in found if isinstance(one, Sale)] == [Sale(1, "a", 1.0), Sale(3, "c", None)]
    assert [(one.place, "field 'id': it is null" in one.reason) for one in found if isinstance(one, Malformed)] == [
        ("table sales", True)
    ]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ('ids bigint, "order" text, amount double', "has no column 'id'; did you mean 'ids'"),
        ('id text, "order" text, amount double', "column 'id' of table sales is .*cannot be read as the field's int64"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_before_anything_is_read(url, made, says):  # noqa: F811
    execute(url, f"CREATE TABLE sales ({made})")
    with pytest.raises(SourceError, match=says):
        planned(DatabaseSource("sales", Sale, url))
    with pytest.raises(SourceError, match="has no table gone; check the name"):
        planned(DatabaseSource("gone", Sale, url))
    with pytest.raises(UnsupportedError, match="cannot tell what has been read"):
        DatabaseSource("sales", Sale, url).batch_position(None)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"table": None}, "either a table or query"),
        ({"query": "SELECT 1"}, "either a table or query"),
        ({"split_by": "ids"}, "no field 'ids'; did you mean 'id'"),
        ({"split_by": "order"}, "has to be an int"),
        ({"parallelism": 0}, "at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused_when_the_graph_is_built(given, says):
    with pytest.raises(PipelineError, match=says):
        DatabaseSource(**{"table": "sales", "record": Sale, "connection": "sqlite://", **given})


@pytest.mark.parametrize("mode", ["batch", "streaming"])
def test_a_table_is_copied_on_spark(url, run_on_spark, run_streaming, mode):  # noqa: F811
    write(DatabaseSink("sales", url), MANY)
    built = Pipeline("copied")
    source = DatabaseSource("sales", Sale, url, split_by="id", parallelism=3)
    built.from_source(source).sink_to(DatabaseSink("copied", url, mode="upsert", key="id"))
    (run_on_spark if mode == "batch" else run_streaming)(built)
    assert rows(url, "SELECT * FROM copied ORDER BY id") == [tuple(sale) for sale in MANY]


def test_reading_what_is_not_there_makes_no_file(tmp_path):
    for kind in ("sqlite", "duckdb"):
        with pytest.raises(ConfigurationError, match=r"there is no file .*gone.db; check the path"):
            planned(DatabaseSource("sales", Sale, f"{kind}:///{tmp_path}/gone.db"))
    assert list(tmp_path.iterdir()) == []


class Day(NamedTuple):
    day: date


def test_a_time_is_not_cut_to_a_date(tmp_path):
    shop = f"duckdb:///{tmp_path}/shop.duckdb"
    execute(shop, "CREATE TABLE visits (moment TIMESTAMP)")
    execute(shop, "INSERT INTO visits VALUES ('2024-01-01 12:00:00')")
    source = DatabaseSource(None, Day, shop, query="SELECT moment AS day FROM visits", on_malformed="divert")
    assert ["is not a date" in one.reason for one in everything(source)] == [True]
