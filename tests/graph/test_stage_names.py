"""What a stage, and so its asset, is called."""

import functools
from typing import NamedTuple

import pytest

from dagster_unified.api import Pipeline, WatermarkStrategy
from dagster_unified.connectors import CsvSource, DeltaSink, FileSink, ForeachSink, ParquetSource
from dagster_unified.graph.plan import Plan


class Sale(NamedTuple):
    shop: str
    at: int
    amount: int


IN_ORDER = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")


def twice(sale: Sale) -> Sale:
    return sale._replace(amount=sale.amount * 2)


def times(factor: int, sale: Sale) -> Sale:
    return sale._replace(amount=sale.amount * factor)


def add(a: Sale, b: Sale) -> Sale:
    return Sale(a.shop, a.at, a.amount + b.amount)


def sales(pipeline: Pipeline):
    return pipeline.from_source(CsvSource("/in/sales.csv", Sale))


def stages(plan: Plan) -> list[str]:
    return [region.name for region in plan.regions]


def test_a_name_that_the_author_gave_comes_before_a_later_operators_own():
    pipeline = Pipeline("p")
    clean = sales(pipeline).map(twice).name("clean").assign_timestamps_and_watermarks(IN_ORDER)
    clean.key_by("shop").reduce(add).sink_to(DeltaSink("/tables/totals"))
    assert stages(pipeline.plan()) == ["clean", "totals"]


def test_of_several_given_names_the_last_is_taken():
    pipeline = Pipeline("p")
    sales(pipeline).map(twice).name("clean").filter(lambda s: s.amount > 0).name("sold").map(twice).key_by(
        "shop"
    ).reduce(add).print()
    assert stages(pipeline.plan())[0] == "sold"


def test_without_a_given_name_a_function_says_more_than_the_librarys_word():
    pipeline = Pipeline("p")
    sales(pipeline).map(functools.partial(times, 3), Sale).assign_timestamps_and_watermarks(IN_ORDER).key_by(
        "shop"
    ).reduce(add).print()
    assert stages(pipeline.plan()) == ["times", "add"]


def test_without_any_name_a_stage_is_named_after_its_source_or_its_operator():
    pipeline = Pipeline("p")
    sales(pipeline).assign_timestamps_and_watermarks(IN_ORDER).key_by("shop").reduce(lambda a, b: a).rebalance().map(
        lambda s: s, Sale
    ).sink_to(ForeachSink(lambda s: None))
    assert stages(pipeline.plan()) == ["sales", "reduce", "foreach"]


def test_a_name_outside_the_way_to_what_leaves_the_stage_is_not_the_stages():
    pipeline = Pipeline("p")
    clean = sales(pipeline).map(twice)
    clean.key_by("shop").reduce(add).print()
    clean.filter(lambda s: s.amount > 9).name("large").sink_to(FileSink("/tables/large"))
    assert stages(pipeline.plan())[0] == "twice"


def test_two_stages_never_have_one_name():
    pipeline = Pipeline("p")
    totals = sales(pipeline).map(twice).name("totals").key_by("shop").reduce(add).name("totals")
    totals.rebalance().filter(lambda s: s.amount > 3).name("large").sink_to(DeltaSink("/tables/totals"))
    assert stages(pipeline.plan()) == ["totals", "totals_2", "large"]


@pytest.mark.parametrize(
    ("given", "name"),
    [("Tablé", "table"), ("große Tabelle", "gro_e_tabelle"), ("日本", "add"), ("a/b", "a_b"), ("x" * 300, "x" * 100)],
)
def test_a_stages_name_is_a_word_of_ascii_that_paths_and_dagster_take(given, name):
    pipeline = Pipeline("p")
    sales(pipeline).key_by("shop").reduce(add).name("add").map(twice).name(given).print()
    assert stages(pipeline.plan())[-1] == name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/data/sales.csv", "sales"),
        ("/data/sales/{start:%Y-%m-%d}.csv", "sales"),
        ("/data/sales/{start:%Y/%m/%d}/*.csv", "sales"),
        ("/data/sales-{key}.csv", "sales"),
        ("/data/{key}/sales/*.csv", "sales"),
        ("s3://sales/{key}.csv", "sales"),
        ("/data/sales/", "sales"),
        ("/data/2024-01-01.csv", "2024-01-01"),
        ("{key}.csv", "csv"),
    ],
)
def test_a_source_is_named_after_the_last_piece_of_its_path_that_says_something(path, name):
    assert CsvSource(path, Sale).name == name


def test_a_source_without_a_name_and_its_stage_are_readable():
    pipeline = Pipeline("p")
    pipeline.from_source(ParquetSource("/in/sales/{start:%Y}/*.parquet", Sale)).key_by("shop").reduce(add).sink_to(
        DeltaSink("/tables/totals/")
    )
    plan = pipeline.plan()
    assert (plan.graph.node(0).name, stages(plan)) == ("sales", ["sales", "totals"])


def named_as_its_source(first: str) -> Pipeline:
    pipeline = Pipeline("p")
    if first == "source":
        sales(pipeline).key_by("shop").reduce(add).name("sales").print()
        return pipeline
    other = pipeline.from_source(CsvSource("/in/other.csv", Sale)).map(twice).name("sales")
    other.union(sales(pipeline)).key_by("shop").reduce(add).name("Sales").print()
    return pipeline


@pytest.mark.parametrize(
    ("first", "uids", "names"),
    [
        ("source", {"sales": "sales-2"}, ["sales", "sales_2"]),
        ("operator", {"sales": "sales-2", "Sales": "sales-3"}, ["sales_2", "sales", "sales_3"]),
    ],
)
def test_an_operator_of_a_sources_name_has_one_number_in_uid_and_stage(first, uids, names):
    plan = named_as_its_source(first).plan()
    assert [source.uid for source in plan.graph.sources if source.name == "sales"] == ["sales"]
    called = {
        n.name: n.uid for n in plan.graph.nodes if n.name in uids and n not in (*plan.graph.sources, *plan.graph.sinks)
    }
    assert called == uids
    assert [name for name in stages(plan) if name.startswith("sales")] == names
