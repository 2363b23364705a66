"""Tables of a pipeline as arguments of ordinary assets: each type, whole and by partition, and what cannot be told."""

from datetime import date, datetime
from decimal import Decimal
from functools import partial
from typing import NamedTuple

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from dagster import (
    AssetIn,
    AssetKey,
    BackfillPolicy,
    DagsterInstance,
    DailyPartitionsDefinition,
    Definitions,
    WeeklyPartitionsDefinition,
    asset,
    materialize,
)
from deltalake import DeltaTable

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource, DatabaseSink, DeltaSink, FileSink, ForeachSink, PostgresSink
from dagster_unified.errors import ConfigurationError, PipelineError, SinkError, UnsupportedError
from dagster_unified.orchestration import BatchDeployment, unified_definitions
from tests.orchestration.support import resources, whole_range


class Sale(NamedTuple):
    shop: str
    at: datetime
    day: date
    amount: int | None
    price: Decimal


DAILY = DailyPartitionsDefinition("2023-12-31", end_date="2024-01-07")
CSV = "shop,at,day,amount,price\n"
DAYS = {
    "2024-01-01": "a,2024-01-01T10:00:00Z,2024-01-01,9007199254740993,1.10\nb,2024-01-01T11:00:00Z,2024-01-01,,2.20\n",
    "2024-01-02": "a,2024-01-02T10:00:00Z,2024-01-02,3,3.30\n",
    "2024-01-03": "",
}


class Shop:
    """A pipeline that copies the sales of a day, and the assets after it."""

    def __init__(self, folder, instance, partitions=DAILY):
        self.folder, self.instance, self.partitions = folder, instance, partitions
        (folder / "in").mkdir(exist_ok=True)
        for day, rows in DAYS.items():
            (folder / "in" / f"{day}.csv").write_text(CSV + rows)

    def definitions(self, sink, *assets, partitions=DAILY):
        pipeline = Pipeline("shops")
        path = str(self.folder / "in" / ("{key}.csv" if partitions is DAILY else "*.csv"))
        pipeline.from_source(CsvSource(path, Sale, name="sales")).sink_to(sink)
        deployment = BatchDeployment(
            pipeline, partitions=partitions, backfill_policy=BackfillPolicy.single_run() if partitions else None
        )
        ours = unified_definitions(deployment, resources=resources(self.folder))
        return Definitions.merge(ours, Definitions(assets=assets))

    def write(self, definitions, *partitions):
        job = definitions.resolve_job_def("shops_batch")
        for partition in partitions or (None,):
            job.execute_in_process(instance=self.instance, partition_key=partition)

    def take(self, definitions, **options):
        job = definitions.resolve_implicit_global_asset_job_def()
        job.execute_in_process(instance=self.instance, asset_selection=[AssetKey("taken")], **options)
        return SHOWN.pop()


@pytest.fixture
def shop(spark, tmp_path):
    with DagsterInstance.ephemeral() as instance:
        yield Shop(tmp_path, instance)


FORMS = {
    pa.Table: pa.Table.to_pylist,
    ds.Dataset: lambda dataset: dataset.to_table().to_pylist(),
    pd.DataFrame: lambda frame: frame.astype(object).where(frame.notna(), None).to_dict("records"),
    pl.DataFrame: pl.DataFrame.to_dicts,
    pl.LazyFrame: lambda frame: frame.collect().to_dicts(),
    duckdb.DuckDBPyRelation: lambda relation: relation.arrow().read_all().to_pylist(),
    list[Sale]: lambda sales: [sale._asdict() for sale in sales],
    None: pa.Table.to_pylist,
}
"""The rows of a table, by the type that it is asked for."""


SHOWN = []
"""What the assets of these tests have taken."""


def taken_as(kind, partitions_def=None, **options):
    """An asset that takes a table and shows its rows, in short and in order."""

    def taken(sales):
        rows = FORMS[kind](sales)
        SHOWN.append(sorted((row["shop"], row["day"].day, row["amount"]) for row in rows))

    taken.__annotations__ = {"return": None, **({} if kind is None else {"sales": kind})}
    one_run = None if partitions_def is None else BackfillPolicy.single_run()
    return asset(
        ins={"sales": AssetIn(key_prefix="shops", **options)}, partitions_def=partitions_def, backfill_policy=one_run
    )(taken)


FIRST = [("a", 1, 9007199254740993), ("b", 1, None)]
SECOND = [("a", 2, 3)]


def test_an_asset_gets_a_table_as_the_type_that_its_argument_has(shop):
    got = {}
    for kind in FORMS:
        definitions = shop.definitions(DeltaSink(str(shop.folder / "sales")), taken_as(kind), partitions=None)
        if not got:
            shop.write(definitions)
        got[kind] = shop.take(definitions)
    assert got == dict.fromkeys(FORMS, sorted(FIRST + SECOND))


@pytest.mark.parametrize(
    "sink",
    [
        lambda place: DeltaSink(f"{place}/sales"),
        lambda place: DeltaSink(f"{place}/sales", mode="append", partition_by=("day", "shop")),
        lambda place: FileSink(f"{place}/sales"),
        lambda place: FileSink(f"{place}/sales", format="csv"),
        lambda place: DatabaseSink("sales", f"duckdb:///{place}/sales.db", partition_column="written_by"),
    ],
    ids=["delta", "delta by columns", "parquet", "csv", "duckdb"],
)
def test_an_asset_of_partitions_gets_the_rows_that_these_have_written(shop, sink):
    check_partitions(shop, sink(shop.folder))


def test_so_does_one_that_takes_a_table_of_postgresql(shop, postgres):
    check_partitions(shop, PostgresSink("sales", postgres, partition_column="written_by"))


def check_partitions(shop, sink):
    daily = shop.definitions(sink, taken_as(pa.Table, DAILY))
    shop.write(daily, *DAYS)
    assert shop.take(daily, partition_key="2024-01-01") == FIRST
    assert shop.take(daily, partition_key="2024-01-02") == SECOND
    assert shop.take(daily, partition_key="2024-01-03") == []  # materialized, without rows
    with pytest.raises(SinkError, match="shops/sales: partition 2024-01-04 has not been materialized; materialize it"):
        shop.take(daily, partition_key="2024-01-04")
    several = shop.take(daily, tags=whole_range("2024-01-01", "2024-01-03"))
    whole = shop.take(shop.definitions(sink, taken_as(list[Sale])))
    assert several == whole == sorted(FIRST + SECOND)
    weeks = WeeklyPartitionsDefinition("2023-12-31")
    weekly = shop.definitions(sink, taken_as(pa.Table, weeks, metadata={"allow_missing_partitions": True}))
    assert shop.take(weekly, partition_key="2023-12-31") == sorted(FIRST + SECOND)


def test_a_partition_that_ran_again_has_only_what_it_wrote_last(shop):
    sink = DeltaSink(str(shop.folder / "sales"), mode="append")
    definitions = shop.definitions(sink, taken_as(pa.Table, DAILY))
    shop.write(definitions, "2024-01-01")
    (shop.folder / "in" / "2024-01-01.csv").write_text(CSV + "c,2024-01-01T10:00:00Z,2024-01-01,7,1.10\n")
    shop.write(definitions, "2024-01-01")
    assert shop.take(definitions, partition_key="2024-01-01") == [("c", 1, 7)]


def test_rows_that_no_file_tells_are_told_by_a_column(shop):
    sink = DeltaSink(str(shop.folder / "sales"), mode="upsert", key=("shop", "at"))
    unsaid = shop.definitions(sink, taken_as(pa.Table, DAILY))
    shop.write(unsaid, *DAYS)
    with pytest.raises(
        SinkError, match=r"does not say which partition wrote a row, so that the rows of partition 2024"
    ):
        shop.take(unsaid, partition_key="2024-01-01")
    for column in ("at", "day"):
        for kind in FORMS:
            said = shop.definitions(sink, taken_as(kind, DAILY, metadata={"partition_expr": column}))
            assert shop.take(said, partition_key="2024-01-01") == FIRST
    text = shop.definitions(sink, taken_as(pa.Table, DAILY, metadata={"partition_expr": "shop"}))
    with pytest.raises(PipelineError, match="'shop' is a text, which does not say in which zone its day is"):
        shop.take(text, partition_key="2024-01-01")


@pytest.mark.parametrize(
    "sink",
    [
        lambda place: DeltaSink(f"{place}/sales", mode="append"),
        lambda place: FileSink(f"{place}/sales"),
        lambda place: DatabaseSink("sales", f"duckdb:///{place}/sales.db", partition_column="written_by"),
    ],
    ids=["delta", "files", "duckdb"],
)
def test_rows_that_were_written_without_partitions_may_belong_to_any(shop, sink):
    sink = sink(shop.folder)
    daily = shop.definitions(sink, taken_as(pa.Table, DAILY))
    shop.write(daily, "2024-01-01")
    shop.write(shop.definitions(sink, partitions=None))
    with pytest.raises(SinkError, match=r"without.* partition.*, so that the rows of partition 2024-01-01 cannot be"):
        shop.take(daily, partition_key="2024-01-01")


def test_a_compaction_mixes_the_rows_of_partitions(shop):
    sink = DeltaSink(str(shop.folder / "sales"))
    daily = shop.definitions(sink, taken_as(pa.Table, DAILY))
    shop.write(daily, *DAYS)
    DeltaTable(str(shop.folder / "sales")).optimize.compact()
    with pytest.raises(SinkError, match="files that no run of a partition wrote, such as those of a compaction"):
        shop.take(daily, partition_key="2024-01-01")


def test_what_is_not_there_or_cannot_be_given_is_an_error_that_says_so(shop):
    sink = DeltaSink(str(shop.folder / "sales"))
    with pytest.raises(SinkError, match=r"shops: table shops/sales \(.*\): nothing is there yet; materialize it first"):
        shop.take(shop.definitions(sink, taken_as(pa.Table), partitions=None))
    shop.write(shop.definitions(sink, partitions=None))
    refused = {
        dict[str, int]: "cannot be loaded as .*; annotate the input with one of pyarrow.Table, .* or list.Sale.",
        list[int]: r"has records of Sale\(.*\), and the input asks for a list of int; annotate it with list.Sale.",
    }
    for kind, words in refused.items():
        with pytest.raises(ConfigurationError, match=words):
            shop.take(shop.definitions(sink, taken_as(kind), partitions=None))


def test_a_stage_and_the_pipelines_own_table_as_a_target_are_errors_that_say_what_to_do(shop):
    @asset(ins={"sales": AssetIn(AssetKey(["shops", "sales_stage"]))})
    def taken(sales) -> None: ...

    sink = DeltaSink(str(shop.folder / "sales"))
    definitions = shop.definitions(sink, taken, partitions=None)
    with pytest.raises(ConfigurationError) as raised:
        shop.take(definitions)
    assert str(raised.value) == (
        "shops: shops/sales_stage is stage 'sales', whose records stay in the run, so that it has no value; name it in"
        " deps=[...] to run after it, or take a table: shops/sales"
    )

    @asset(io_manager_key="unified_tables")
    def returned() -> int:
        return 1

    with pytest.raises(
        ConfigurationError, match="returned: unified_tables loads what pipelines write, and takes no value"
    ):
        materialize(
            [returned], resources={key: definitions.resources[key] for key in ("unified_tables", "object_store")}
        )


def test_a_notebook_loads_a_table_by_its_key(shop):
    definitions = shop.definitions(DeltaSink(str(shop.folder / "sales")))
    shop.write(definitions, *DAYS)
    load = partial(definitions.load_asset_value, AssetKey(["shops", "sales"]), instance=shop.instance)
    assert [sale.shop for sale in load(python_type=list[Sale], partition_key="2024-01-02")] == ["a"]
    assert len(load()) == 3


def test_an_asset_after_a_table_runs_in_the_run_that_writes_it(shop):
    definitions = shop.definitions(DeltaSink(str(shop.folder / "sales")), taken_as(pa.Table), partitions=None)
    job = definitions.resolve_implicit_global_asset_job_def()
    job.execute_in_process(instance=shop.instance)
    assert SHOWN.pop() == sorted(FIRST + SECOND)


def test_what_cannot_be_read_back_is_an_error_that_says_so(shop):
    sink = ForeachSink(print, name="sales")
    with pytest.raises(UnsupportedError, match=r"sink 'sales' .*: what it wrote cannot be read back"):
        shop.take(shop.definitions(sink, taken_as(pa.Table), partitions=None))
