"""One asset per table, whoever writes it, and edges by what is read and written."""

from typing import Annotated, NamedTuple

import pytest
from dagster import AssetDep, AssetKey, Definitions, asset
from msgspec import Meta

from dagster_unified.api import Pipeline
from dagster_unified.connectors import (
    CsvSource,
    DeltaSink,
    DeltaSource,
    FileSink,
    KafkaSink,
    KafkaSource,
    ParquetSource,
    PostgresSink,
    PostgresSource,
)
from dagster_unified.errors import ConfigurationError, PipelineError
from dagster_unified.orchestration import StreamingDeployment, unified_definitions
from tests.support import Sale


def copying(name, source, sink):
    """A pipeline from a source to a sink."""
    pipeline = Pipeline(name)
    pipeline.from_source(source).map(lambda sale: sale, Sale).sink_to(sink)
    return pipeline


def parents(definitions, key):
    return {k.to_user_string() for k in definitions.resolve_asset_graph().get(AssetKey(key)).parent_keys}


def test_a_table_has_one_key_and_its_identity_in_both_modes():
    pipeline = copying("shop", CsvSource("/in/orders", Sale), DeltaSink("/lake/orders"))
    for deployed in ([pipeline], [StreamingDeployment(pipeline)], [pipeline, StreamingDeployment(pipeline)]):
        shown = unified_definitions(*deployed).resolve_asset_graph().get(AssetKey(["shop", "orders"])).metadata
        assert shown["dagster/table_name"] == "/lake/orders"
        assert shown["dagster/uri"] == "file:///lake/orders"
        assert shown["dagster/storage_kind"] == "deltalake"


@pytest.mark.parametrize(
    ("sink", "source"),
    [
        (DeltaSink("/lake/orders"), DeltaSource("/lake/../lake/orders/", Sale)),
        (FileSink("/lake/orders"), ParquetSource("/lake/orders/*.parquet", Sale)),
        (FileSink("/lake/orders"), ParquetSource("/lake/orders/{key}/*.parquet", Sale)),
        (FileSink("/la*ke[1]?/orders"), ParquetSource("/la[*]ke[1]?/orders/*.parquet", Sale)),
        (KafkaSink("orders", "broker:9092"), KafkaSource("orders", Sale, "broker:9092")),
        (
            PostgresSink("orders", "postgresql://etl@db.example/shop"),
            PostgresSource("public.orders", Sale, "postgresql://report@db.example/shop"),
        ),
    ],
)
def test_a_pipeline_depends_on_the_table_folder_or_topic_of_another_that_it_reads(sink, source):
    writing = copying("writing", CsvSource("/in", Sale), sink)
    reading = copying("reading", source, DeltaSink("/lake/copy"))
    definitions = unified_definitions(reading, writing, StreamingDeployment(reading), StreamingDeployment(writing))
    graph = definitions.resolve_asset_graph()
    read = [key for key in graph.get_all_asset_keys() if AssetKey(["writing", "orders"]) in graph.get(key).parent_keys]
    assert [key.path[0] for key in read] == ["reading"]
    assert not graph.has(AssetKey(["reading", "orders_source"]))


def test_another_broker_or_another_database_is_another_place():
    writing = copying("writing", CsvSource("/in", Sale), KafkaSink("orders", "broker:9092"))
    reading = StreamingDeployment(
        copying("reading", KafkaSource("orders", Sale, "other:9092"), DeltaSink("/lake/copy"))
    )
    assert parents(unified_definitions(writing, reading), ["reading", "copy"]) == {"reading/orders_source"}


def test_pipelines_that_read_each_others_topics_do_not_depend_on_each_other():
    there = copying("there", KafkaSource("a", Sale, "broker:9092"), KafkaSink("b", "broker:9092"))
    back = copying("back", KafkaSource("b", Sale, "broker:9092"), KafkaSink("a", "broker:9092"))
    definitions = unified_definitions(there, back)
    assert parents(definitions, ["there", "b"]) == {"there/a_source"}
    assert parents(definitions, ["back", "a"]) == {"back/b_source"}


def test_a_table_that_batch_and_a_stream_of_another_pipeline_write_is_one_asset():
    history = copying("history", CsvSource("/in", Sale), DeltaSink("/lake/orders", mode="append"))
    live = copying("live", KafkaSource("orders", Sale, "broker:9092"), DeltaSink("/lake/orders", mode="append"))
    definitions = unified_definitions(StreamingDeployment(live), history)
    assert parents(definitions, ["history", "orders"]) == {"history/orders_stage", "live/orders_source"}
    assert not definitions.resolve_asset_graph().has(AssetKey(["live", "orders"]))


def test_an_author_chooses_the_key_and_two_choices_for_one_table_are_an_error():
    def of(name, key):
        return copying(name, CsvSource("/in", Sale), DeltaSink("/lake/orders", mode="append", asset=key))

    for key in ("lake/orders", ["lake", "orders"], AssetKey(["lake", "orders"])):
        assert (
            AssetKey(["lake", "orders"])
            in unified_definitions(of("shop", key)).resolve_asset_graph().get_all_asset_keys()
        )
    with pytest.raises(ConfigurationError, match=r"'orders' of two .* one table, .* a/b and c; name one"):
        unified_definitions(of("one", "a/b"), of("two", "c"))
    with pytest.raises(PipelineError, match=r"asset=\[\] is no key of an asset"):
        of("shop", [])
    with pytest.raises(ConfigurationError, match="would both be the asset lake/x"):
        unified_definitions(
            copying("one", CsvSource("/in", Sale), DeltaSink("/lake/a", asset="lake/x")),
            copying("two", CsvSource("/in", Sale), DeltaSink("/lake/b", asset="lake/x")),
        )


def test_an_asset_of_another_tool_is_found_by_the_name_of_its_table():
    @asset(metadata={"dagster/table_name": "/lake/raw"})
    def raw() -> None: ...

    @asset(deps=[AssetDep("orders_by_name", metadata={"dagster/table_name": "/lake/orders"})])
    def report() -> None: ...

    reading = copying("reading", DeltaSource("/lake/raw", Sale), DeltaSink("/lake/orders"))
    definitions = Definitions.merge(unified_definitions(reading), Definitions(assets=[raw, report]))
    assert parents(definitions, ["reading", "orders_stage"]) == {"raw"}
    assert parents(definitions, ["report"]) == {"reading/orders"}


class Described(NamedTuple):
    shop: Annotated[str, Meta(description="where it was sold")]
    amount: int
    """In cents."""


def test_columns_have_the_descriptions_of_the_fields():
    pipeline = Pipeline("shop")
    pipeline.from_source(CsvSource("/in", Described)).sink_to(DeltaSink("/lake/orders"))
    shown = unified_definitions(pipeline).resolve_asset_graph().get(AssetKey(["shop", "orders"])).metadata
    assert [column.description for column in shown["dagster/column_schema"].columns] == [
        "where it was sold",
        "In cents.",
    ]
