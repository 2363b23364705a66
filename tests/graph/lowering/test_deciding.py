"""Which operators of a plan are inlined, what `explain` says of them, and that they are in every mode."""

from datetime import timedelta
from typing import NamedTuple

import pytest

from dagster_unified.api import (
    KeyedProcessFunction,
    KeySelector,
    MapFunction,
    Pipeline,
    TumblingEventTimeWindows,
    WatermarkStrategy,
)
from dagster_unified.connectors import CollectionSource, CsvSource, PrintSink
from dagster_unified.graph.explain import as_text
from dagster_unified.operators.by_field import FieldFold
from dagster_unified.operators.program import inlined
from dagster_unified.testing import run_pipeline
from tests.support import MODES

SECOND = timedelta(seconds=1)


class Sale(NamedTuple):
    shop: str
    amount: int
    at: int


def large(sale: Sale) -> bool:
    return sale.amount > 10


def doubled(sale: Sale) -> Sale:
    return sale._replace(amount=sale.amount * 2)


def shown(sale: Sale) -> Sale:
    print(sale)
    return sale


class Same(KeyedProcessFunction[str, Sale, Sale]):
    def process_element(self, value, ctx):
        yield value


def explained(build, options=None):
    pipeline = Pipeline("sales")
    build(pipeline.from_source(CsvSource("in", Sale, name="sales"))).sink_to(PrintSink(name="out"))
    lines = as_text(pipeline.plan(options or {})).splitlines()
    return [line.strip() for line in lines if line.startswith("      ")]


PRINTS = (
    f"called for each record: a call whose result is not used is not read (line {shown.__code__.co_firstlineno + 1})"
)


def test_explain_says_of_each_function_what_it_reads_or_why_it_is_called():
    assert explained(lambda s: s.filter(large).map(doubled).map(shown)) == [
        "inlined, reads amount",
        "inlined, reads amount",
        PRINTS,
    ]
    assert explained(lambda s: s.filter(large).map(doubled)) == ["in Catalyst, reads amount"] * 2
    assert explained(lambda s: s.map(shown).filter(large)) == [
        PRINTS,
        "called for each record: 'shown' before it gives records one by one",
    ]
    assert explained(lambda s: s.key_by("shop").process(Same()).filter(large)) == [
        "called for each record: 'Same' before it gives records one by one"
    ]
    by_field = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    assert explained(lambda s: s.assign_timestamps_and_watermarks(by_field).filter(large)) == [
        "in Catalyst, reads amount"
    ]


def test_an_author_may_have_functions_called():
    assert explained(lambda s: s.filter(large).in_python().map(doubled)) == [
        "called for each record: in_python() says so",
        "called for each record: 'large' before it gives records one by one",
    ]
    off = explained(lambda s: s.filter(large), {"execution.lowering": "OFF"})
    assert off == ["called for each record: execution.lowering is OFF"]


@pytest.fixture
def ran(monkeypatch):
    """What the chains on columns have given."""
    given = []

    class Chain(inlined.InlinedChain):
        def run(self, block):
            given.append(super().run(block))
            return given[-1]

    monkeypatch.setattr("dagster_unified.operators.program.run.InlinedChain", Chain)
    return given


@MODES
def test_the_harness_runs_what_spark_runs(mode, ran):
    pipeline = Pipeline("sales")
    sales = [Sale("north", 2**62, 1), Sale("south", 20, 2), Sale("south", 4, 3)]
    stream = pipeline.from_source(CollectionSource(sales, Sale, "sales")).filter(large)
    stream.map(lambda s: Sale(s.shop, s.amount // 2, s.at), Sale).sink_to(PrintSink(name="out"))
    assert sorted(run_pipeline(pipeline, mode).sinks["out"]) == [Sale("north", 2**61, 1), Sale("south", 10, 2)]
    assert any(block is not None for block in ran)


@MODES
def test_a_key_that_can_be_read_is_computed_on_columns(mode, ran):
    pipeline = Pipeline("sales")
    sales = [Sale("north", 12, 1), Sale("North", 20, 2), Sale("south", 4, 3)]
    keyed = pipeline.from_source(CollectionSource(sales, Sale, "sales")).key_by(
        lambda sale: sale.shop.lower(), key_type=str
    )
    keyed.reduce(lambda a, b: a._replace(amount=a.amount + b.amount)).sink_to(PrintSink(name="out"))
    found = run_pipeline(pipeline, mode).sinks["out"]
    assert {sale.amount for sale in found} >= {32, 4}
    keys = [key for block in ran if block is not None for key in block.columns.column(0).to_pylist()]
    assert keys == ["north", "north", "south"]


def test_explain_says_how_a_reduce_combines_each_field():
    summed = explained(lambda s: s.key_by("shop").reduce(lambda a, b: a._replace(amount=a.amount + b.amount)))
    assert summed == ["combined by field in Catalyst: shop first, amount sum, at first"]
    streaming = {"execution.runtime-mode": "STREAMING"}
    assert explained(lambda s: s.key_by("shop").reduce(lambda a, b: b), streaming) == [
        "combined by field: shop last, amount last, at last"
    ]


class ByName(MapFunction[Sale, str], KeySelector[Sale, str]):
    """Its keys are not what it maps to."""

    def get_key(self, value: Sale) -> str:
        return value.shop

    def map(self, value: Sale) -> str:
        return "all"


@MODES
def test_a_key_selector_gives_keys_by_its_own_method(mode):
    def totals(lowering):
        pipeline = Pipeline("p")
        sales = pipeline.from_collection([Sale("a", 1, 1), Sale("b", 2, 1), Sale("a", 3, 1)])
        sales.key_by(ByName()).sum("amount").print()
        return run_pipeline(pipeline, mode, options={"execution.lowering": lowering}).only()

    assert totals("AUTO") == totals("OFF")
    assert {sale.shop: sale.amount for sale in totals("AUTO")} == {"a": 4, "b": 2}


@MODES
def test_a_reader_is_inlined_behind_another_one_that_was_given_records(mode, ran):
    pipeline = Pipeline("p")
    sales = pipeline.from_source(CollectionSource([Sale("a", 6, 1), Sale("b", 1, 2)], Sale, "sales")).map(doubled)
    sales.map(shown).sink_to(PrintSink(name="shown"))
    sales.filter(large).sink_to(PrintSink(name="large"))
    assert run_pipeline(pipeline, mode).sinks["large"] == [Sale("a", 12, 1)]
    assert ran
    assert None not in ran


@pytest.mark.parametrize(
    ("mode", "method", "build"),
    [
        ("BATCH", "combined", lambda s: s.key_by("shop").sum("amount")),
        ("BATCH", "one", lambda s: s.key_by("shop").window(TumblingEventTimeWindows.of(SECOND)).sum("amount")),
        ("STREAMING", "one", lambda s: s.key_by("shop").window(TumblingEventTimeWindows.of(SECOND)).sum("amount")),
        ("STREAMING", "rolling", lambda s: s.key_by("shop").sum("amount")),
    ],
)
def test_records_are_folded_in_columns(mode, method, build, monkeypatch):
    results = []
    fold = getattr(FieldFold, method)
    monkeypatch.setattr(FieldFold, method, lambda *arguments: results.append(fold(*arguments)) or results[-1])
    pipeline = Pipeline("p")
    sales = pipeline.from_collection([Sale("a", number, number) for number in range(600)])
    by_field = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    build(sales.assign_timestamps_and_watermarks(by_field)).print()
    assert run_pipeline(pipeline, mode, micro_batch=None).only()[-1].amount == sum(range(600))
    assert results
    assert None not in results
