"""The metric group of a function: what each kind of metric adds up to, over parallel instances and micro-batches."""

import random
from functools import partial

import pytest

from dagster_unified.api import KeyedProcessFunction, MapFunction, Pipeline, ProcessFunction
from dagster_unified.errors import UnifiedError, UserFunctionError
from dagster_unified.operators.metrics import (
    GaugeRange,
    Histogram,
    MeterCount,
    MetricGroup,
    Metrics,
    Registry,
    Totals,
    merge,
)
from dagster_unified.testing import run_pipeline
from tests.support import MODES, results


class Measured(KeyedProcessFunction):
    def open(self, context):
        group = context.get_metrics_group().add_group("cache")
        self.hits = group.counter("hits")
        self.held = set()
        group.gauge("size", lambda: len(self.held))
        self.seen = group.meter("seen", 10)
        self.values = context.get_metrics_group().distribution("values")

    def process_element(self, value: int, ctx) -> list[int]:
        if value in self.held:
            self.hits.inc()
        self.held.add(value)
        self.seen.mark_event()
        self.values.update(value)
        return []


@MODES
def test_an_operators_metrics_are_named_by_operator_and_group(mode):
    pipeline = Pipeline("p")
    pipeline.from_collection([1, 1, 4, -2, 0]).key_by(lambda v: 0, key_type=int).process(Measured()).name(
        "find"
    ).print()
    metrics = run_pipeline(pipeline, mode, micro_batch=None).metrics
    assert metrics.counters == {"find.cache.hits": 1}
    last = 4 if mode == "BATCH" else 0  # the micro-batch that ends the input has a function of its own
    assert metrics.gauges == {"find.cache.size": GaugeRange(last, last)}
    assert metrics.meters == {"find.cache.seen": MeterCount(5, 10)}
    values = metrics.histograms["find.values"]
    assert (values.count, values.min, values.max, values.mean) == (5, -2, 4, 0.8)
    assert values.quantile(0.5) == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("build", [lambda s: s.map(Twice()), lambda s: s.process(Every())], ids=["map", "process"])
@MODES
def test_a_counter_goes_up_and_down_and_knows_its_own_count(mode, build):
    pipeline = Pipeline("p")
    build(pipeline.from_collection([1, 2, 3])).name("count").print()
    result = run_pipeline(pipeline, mode, micro_batch=None)
    assert result.only() == [3, 6, 9]
    assert result.metrics.counters == {"count.n": 9}


class Twice(MapFunction):
    def open(self, context):
        self.counter = context.get_metrics_group().counter("n")

    def map(self, value) -> int:
        self.counter.inc(4)
        self.counter.dec()
        return self.counter.get_count()


class Every(Twice, ProcessFunction):
    def process_element(self, value, ctx) -> list[int]:
        return [self.map(value)]


@MODES
@pytest.mark.parametrize(
    ("gauge", "words"),
    [(lambda: "much", "a gauge has to give an int or a float, and gave 'much'"), (lambda: 1 / 0, "ZeroDivisionError")],
)
def test_a_gauge_that_gives_no_number_is_an_error_that_names_it(mode, gauge, words):
    class Gauged(MapFunction):
        def open(self, context):
            context.get_metrics_group().gauge("size", gauge)

        def map(self, value) -> int:
            return value

    made = Pipeline("p").from_collection([1]).map(Gauged()).name("gauged")
    with pytest.raises(UnifiedError, match=rf"gauge 'gauged.size': .*{words}"):
        results(made, mode)


def test_a_value_that_is_not_a_number_is_an_error():
    class Bad(MapFunction):
        def open(self, context):
            self.values = context.get_metrics_group().histogram("values")

        def map(self, value) -> int:
            self.values.update(float("nan"))
            return value

    made = Pipeline("p").from_collection([1]).map(Bad())
    with pytest.raises(UserFunctionError, match="operator 'Bad'"):
        results(made, "BATCH")


def test_groups_have_scopes_and_variables():
    group = MetricGroup(Registry(), ("find",)).add_group("cache").add_group("table", "shops")
    assert group.get_scope_components() == ["find", "cache", "table", "shops"]
    assert group.get_all_variables() == {"table": "shops"}
    assert group.get_metric_identifier("hits") == "find.cache.table.shops.hits"


def reported(values):
    registry = Registry()
    group = MetricGroup(registry, ("o",))
    counter, meter, distribution = group.counter("c"), group.meter("m"), group.distribution("d")
    group.gauge("g", lambda: len(values))
    for value in values:
        counter.inc(value)
        meter.mark_event()
        distribution.update(value)
    registry.read("o.g")
    return registry.metrics


def test_reports_add_up_in_any_order_and_through_json():
    parts = [reported(values) for values in ([1, 2, 3], [10], [-5, 0, 7, 7])]
    total = merge(parts)
    assert total.counters == {"o.c": 25}
    assert total.gauges == {"o.g": GaugeRange(1, 4)}
    assert total.meters == {"o.m": MeterCount(8, 60)}
    assert merge(part.encode() for part in reversed(parts)) == total
    assert total.histograms == reported([1, 2, 3, 10, -5, 0, 7, 7]).histograms


def test_quantiles_are_within_one_percent():
    values = [random.Random(n).lognormvariate(3, 2) * (-1) ** n for n in range(2000)]
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    for fraction in (0.0, 0.01, 0.25, 0.5, 0.95, 0.99, 1.0):
        exact = sorted(values)[int(fraction * (len(values) - 1))]
        assert histogram.quantile(fraction) == pytest.approx(exact, rel=0.0101)


@MODES
def test_a_gauge_that_is_not_finite_has_no_value(mode):
    class Gauged(MapFunction):
        def open(self, context):
            for name in ("nan", "inf", "1"):
                context.get_metrics_group().gauge(name, partial(float, name))

        def map(self, value: int) -> int:
            return value

    pipeline = Pipeline("gauges")
    pipeline.from_collection([1]).map(Gauged()).name("gauged").print()
    assert run_pipeline(pipeline, mode).metrics.gauges == {"gauged.1": GaugeRange(1.0, 1.0)}


def test_over_time_counters_add_up_gauges_are_replaced_and_meters_have_a_span():
    totals = Totals()
    totals.add(Metrics({"c": 1}, gauges={"g": GaugeRange(5, 9)}, meters={"m": MeterCount(20, 10)}), 102.0, 2.0)
    assert totals.shown(102.0) == {"c": 1, "g": 9, "g (min)": 5, "m (per second)": 10.0}
    totals.add(Metrics({"c": 2}, gauges={"g": GaugeRange(1, 2)}, meters={"m": MeterCount(4, 10)}), 111.0, 1.0)
    assert totals.shown(111.0) == {"c": 3, "g": 2, "g (min)": 1, "m (per second)": 2.4}
    assert totals.rates(114.0) == {"m": 0.4}


def test_a_histogram_shows_its_quantiles():
    totals = Totals()
    totals.add(reported([2, 2, 2]), 1.0, 1.0)
    assert {n: v for n, v in totals.shown(1.0).items() if n.startswith("o.d")} == {
        "o.d (count)": 3,
        "o.d (min)": 2.0,
        "o.d (max)": 2.0,
        "o.d (mean)": 2.0,
        "o.d (p50)": 2.0,
        "o.d (p95)": 2.0,
        "o.d (p99)": 2.0,
    }
