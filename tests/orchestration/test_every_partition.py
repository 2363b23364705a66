"""A source that is no series in time: all of it belongs to every partition."""

from typing import NamedTuple

import pytest
from dagster import AssetKey, BackfillPolicy, DagsterInstance, DailyPartitionsDefinition, StaticPartitionsDefinition
from deltalake import DeltaTable

from dagster_unified.api import BroadcastProcessFunction, MapStateDescriptor, Pipeline
from dagster_unified.connectors import (
    CollectionSource,
    CsvSource,
    DeltaSink,
    KafkaSource,
    ParquetSource,
    RateSource,
    StructuredSource,
)
from dagster_unified.connectors.protocol.frame import MALFORMED
from dagster_unified.errors import PipelineError
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import plan
from dagster_unified.operators.layout import PARTITION_INDEX
from dagster_unified.orchestration import BatchDeployment, unified_definitions
from dagster_unified.orchestration.partitions import slice_of
from tests.orchestration.support import resources

DAILY = DailyPartitionsDefinition("2024-01-01", end_date="2024-01-04")
DAYS = ["2024-01-01", "2024-01-02", "2024-01-03"]


class Sale(NamedTuple):
    day: str
    product: str


class Product(NamedTuple):
    product: str
    price: int


class Priced(NamedTuple):
    day: str
    price: int


PRICES = MapStateDescriptor("prices", str, int)


class Price(BroadcastProcessFunction):
    def process_element(self, value: Sale, ctx) -> list[Priced]:
        price = ctx.get_broadcast_state(PRICES).get(value.product)
        return [] if price is None else [Priced(value.day, price)]

    def process_broadcast_element(self, value: Product, ctx) -> list[Priced]:
        ctx.get_broadcast_state(PRICES).put(value.product, value.price)
        return []


def priced(folder, products=None):
    (folder / "products").mkdir(exist_ok=True)
    (folder / "products" / "all.csv").write_text("product,price\napple,3\npear,5\n")
    pipeline = Pipeline("priced")
    sales = [Sale("2024-01-01", "apple"), Sale("2024-01-02", "pear"), Sale("2024-01-03", "apple")]
    bought = pipeline.from_source(CollectionSource(sales, Sale, "sales").partitioned_by("day"))
    products = products or CsvSource(str(folder / "products"), Product, name="products").for_every_partition()
    rules = pipeline.from_source(products).broadcast(PRICES)
    bought.connect(rules).process(Price(), output_type=Priced).name("price").sink_to(
        DeltaSink(str(folder / "out"), name="out", mode="append")
    )
    return pipeline


def rows(folder):
    return sorted(tuple(row.values()) for row in DeltaTable(str(folder / "out")).to_pyarrow_table().to_pylist())


@pytest.mark.a_day(1)
@pytest.mark.parametrize("carry_state", [False, True])
def test_all_of_it_is_in_each_partition_alone_and_of_a_range(spark, tmp_path, carry_state):
    definitions = unified_definitions(
        BatchDeployment(
            priced(tmp_path),
            partitions=DAILY,
            carry_state=carry_state,
            backfill_policy=BackfillPolicy.single_run(),
            retry_policy=None,
        ),
        resources=resources(tmp_path),
    )
    job = definitions.resolve_job_def("priced_batch")
    with DagsterInstance.ephemeral() as instance:
        assert job.execute_in_process(instance=instance, partition_key=DAYS[0]).success
        assert rows(tmp_path) == [(DAYS[0], 3)]
        tags = {"dagster/asset_partition_range_start": DAYS[1], "dagster/asset_partition_range_end": DAYS[2]}
        assert job.execute_in_process(instance=instance, tags=tags).success
        counted = {
            record.asset_materialization.partition: record.asset_materialization.metadata["dagster/row_count"].value
            for record in instance.fetch_materializations(AssetKey(["priced", "products_stage"]), limit=9).records
        }
    assert rows(tmp_path) == [(DAYS[0], 3), (DAYS[1], 5), (DAYS[2], 3)]
    assert counted == dict.fromkeys(DAYS, 2)


def test_a_range_reads_it_once_and_a_malformed_row_is_each_partitions(spark, tmp_path):
    (tmp_path / "a.csv").write_text("product,price\napple,3\npear,x\n")
    source = CsvSource(str(tmp_path), Product, name="products")
    source.on_malformed = "divert"
    whole = source.for_every_partition()
    frame = whole.read_partitions(spark, [whole, whole, whole])
    read = [(row[PARTITION_INDEX], row[MALFORMED] is None) for row in frame.collect()]
    assert sorted(read) == [(index, fits) for index in range(3) for fits in (False, True)]
    assert frame._jdf.queryExecution().executedPlan().toString().count("FileScan") == 1


def test_streaming_and_a_run_without_partitions_read_all_of_it_in_any_case(tmp_path):
    found = plan(priced(tmp_path).graph(), Configuration.of({"execution.runtime-mode": "STREAMING"}))
    assert [node.source.boundedness.value for node in found.graph.sources] == ["bounded", "bounded"]
    notes = [finding.message for finding in found.findings if finding.rule == "every-partition"]
    assert len(notes) == 1
    assert "'products' is read by each partition" in notes[0]
    assert "all of it in every partition" in next(n for n in found.graph.sources if n.name == "products").describe()


def test_a_monitored_folder_and_a_topic_give_a_partition_what_is_there(tmp_path):
    for source in (
        CsvSource(str(tmp_path), Product, name="products", monitor=True),
        KafkaSource("products", Product, "localhost:1", name="products"),
    ):
        partitioned = BatchDeployment(priced(tmp_path, source.for_every_partition()), partitions=DAILY)
        assert partitioned.loaded().execution.mode == "BATCH"


def test_what_changes_in_it_changes_the_fingerprint_of_each_partition(tmp_path):
    """And not that of the code, which is what Dagster shows: nobody looks at the input while definitions load."""
    deployment = BatchDeployment(priced(tmp_path), partitions=DAILY)

    def fingerprints():
        run = deployment.plan(deployment.configuration(), slice_of(DAILY, "2024-03-01"))
        return [
            {region.name: region.fingerprint for region in planned.regions} for planned in (run, deployment.loaded())
        ]

    (before, code_before) = fingerprints()
    (tmp_path / "products" / "more.csv").write_text("product,price\nplum,7\n")
    (after, code_after) = fingerprints()
    assert {name for name in after if after[name] != before[name]} == {"products", "out"}
    assert code_after == code_before


@pytest.mark.parametrize(
    "source",
    [
        CsvSource("/in/{start:%Y-%m-%d}.csv", Sale),
        ParquetSource("/in", Sale).partitioned_by("day"),
        StructuredSource("parquet", Sale, {"path": "/in"}, partition_options=lambda part: {"day": part.key}),
    ],
)
def test_a_source_belongs_to_partitions_in_one_way_only(source):
    with pytest.raises(PipelineError, match="for_every_partition cannot be used here, since the source says already"):
        source.for_every_partition()
    with pytest.raises(PipelineError, match="partitioned_by cannot be used here"):
        ParquetSource("/in", Sale).for_every_partition().partitioned_by("day")


def test_a_source_of_which_nothing_is_there_cannot_be_in_every_partition():
    with pytest.raises(PipelineError, match="has no end, nor anything that is there"):
        RateSource().for_every_partition()


@pytest.mark.parametrize("partitions", [DAILY, StaticPartitionsDefinition(["north", "south"])])
def test_the_error_of_a_source_that_is_no_series_in_time_says_the_remedy(tmp_path, partitions):
    for source in (CsvSource(str(tmp_path), Product), CollectionSource([Product("apple", 3)], Product)):
        pipeline = Pipeline("products")
        pipeline.from_source(source).print()
        with pytest.raises(PipelineError, match=r"or give all of it to each partition, with \.for_every_partition\(\)"):
            unified_definitions(BatchDeployment(pipeline, partitions=partitions))
