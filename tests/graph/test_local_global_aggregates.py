"""What a plan makes of local-global column aggregates, and which it refuses."""

from datetime import timedelta
from decimal import Decimal
from enum import Enum
from typing import NamedTuple

import pytest

from dagster_unified.api import KeyedProcessFunction, Pipeline, TumblingEventTimeWindows, WatermarkStrategy
from dagster_unified.api import functions as F
from dagster_unified.errors import PipelineError, UnsupportedError
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import plan
from tests.support import MODES

LOCAL_GLOBAL = {"execution.runtime-mode": "STREAMING", "state.native-aggregates": "PORTABLE"}


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


class Sale(NamedTuple):
    shop: str
    amount: int
    price: float | None
    paid: Decimal
    size: Size
    at: int
    tags: list[str]


class Total(NamedTuple):
    shop: str
    total: int


class Last(KeyedProcessFunction[str, Total, Total]):
    def process_element(self, value, ctx) -> list[Total]:
        return [value]


def pipeline(*columns, output_type=Total, windowed=False):
    made = Pipeline("p")
    sales = made.from_collection([], Sale)
    if windowed:
        strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
        sales = sales.assign_timestamps_and_watermarks(strategy)
        keyed = sales.key_by("shop").window(TumblingEventTimeWindows.of(timedelta(hours=1)))
    else:
        keyed = sales.key_by("shop")
    keyed.agg(*columns, output_type=output_type).name("totals").uid("u").print()
    return made


def kinds(plan):
    return [node.kind for node in plan.graph.nodes]


TOTAL = F.sum("amount").alias("total")


@pytest.mark.parametrize(
    ("options", "local_global"),
    [
        ({}, False),
        ({"state.native-aggregates": "PORTABLE"}, False),
        ({"execution.savepoint.path": "/s"}, True),
        ({"execution.state-recovery.path": "/s"}, True),
        ({"execution.runtime-mode": "STREAMING"}, False),
        ({"execution.runtime-mode": "STREAMING", "execution.savepoint.interval": "1 h"}, True),
        ({"execution.runtime-mode": "STREAMING", "execution.state-recovery.path": "/s"}, True),
        (
            {
                "execution.runtime-mode": "STREAMING",
                "execution.savepoint.interval": "1 h",
                "state.native-aggregates": "SPARK",
            },
            False,
        ),
        (LOCAL_GLOBAL, True),
    ],
)
def test_aggregates_are_local_global_where_it_is_asked_for_or_needed(options, local_global):
    assert ("merge" in kinds(pipeline(TOTAL).plan(options))) is local_global


@pytest.mark.parametrize(
    ("options", "local_global"),
    [
        ({}, False),
        ({"state.native-aggregates": "PORTABLE"}, True),
        ({"execution.savepoint.path": "/s"}, True),
    ],
)
def test_partitions_hand_on_local_global_aggregates_where_it_is_asked_for_or_a_savepoint_is(options, local_global):
    planned = plan(pipeline(TOTAL).graph(), Configuration.of(options), carry_state=True)
    assert ("merge" in kinds(planned)) is local_global


@MODES
@pytest.mark.parametrize("option", ["execution.savepoint.path", "execution.state-recovery.path"])
def test_an_aggregate_whose_state_spark_keeps_and_a_savepoint_are_refused_together(mode, option):
    with pytest.raises(UnsupportedError, match="p: a savepoint cannot hold the state of 'totals', which Catalyst"):
        pipeline(TOTAL).plan({"execution.runtime-mode": mode, option: "/s", "state.native-aggregates": "SPARK"})


def test_partitions_whose_aggregates_spark_keeps_leave_no_savepoint():
    options = {"execution.savepoint.path": "/s", "state.native-aggregates": "SPARK"}
    with pytest.raises(UnsupportedError, match="savepoint cannot hold the state of 'totals', which Catalyst"):
        plan(pipeline(TOTAL).graph(), Configuration.of(options), carry_state=True)


def test_an_aggregate_becomes_partials_a_merge_and_its_results():
    plan = pipeline(TOTAL).plan(LOCAL_GLOBAL)
    assert kinds(plan) == ["source", "partials", "merge", "select", "sink"]
    merge = plan.graph.nodes[2]
    assert (merge.uid, merge.name) == ("u", "totals")
    assert merge.records.describe() == "Partials(shop: string, sum_amount: int64?)"
    assert [edge.partitioning.kind.value for edge in plan.graph.edges] == ["FORWARD", "HASH", "FORWARD", "FORWARD"]


def test_stages_keep_their_names():
    def names(options):
        made = Pipeline("p")
        sales = made.from_collection([], Sale).rebalance().map(lambda sale: sale, output_type=Sale)
        sales.key_by("shop").agg(TOTAL, output_type=Total).key_by("shop").sum("total").print()
        return [region.name for region in made.plan(options).regions]

    assert names({"execution.savepoint.path": "/s"}) == names({}) == ["collection", "map", "agg", "print"]


def test_what_an_aggregate_computes_is_computed_as_columns_before():
    plan = pipeline(F.sum(F.col("amount") * 2).alias("total")).plan(LOCAL_GLOBAL)
    assert kinds(plan) == ["source", "select", "partials", "merge", "select", "sink"]
    assert plan.graph.nodes[1].records.describe() == "Inputs(shop: string, sum_amount_2_edde6a: int64?)"


def test_a_mean_is_a_sum_and_a_count_which_other_aggregates_share():
    class Means(NamedTuple):
        shop: str
        mean: float
        total: float
        count: int

    columns = [F.avg("price").alias("mean"), F.sum("price").alias("total"), F.count("price").alias("count")]
    plan = pipeline(*columns, output_type=Means).plan(LOCAL_GLOBAL)
    assert plan.graph.nodes[2].records.describe() == ("Partials(shop: string, sum_price: double?, count_price: int64)")


def test_partials_have_the_types_of_what_they_read():
    class Most(NamedTuple):
        shop: str
        paid: Decimal
        size: str
        year: int
        some: bool
        of: int

    columns = [
        F.sum("paid").alias("paid"),
        F.max("size").alias("size"),
        F.max(F.year(F.lit("2026-01-01"))).alias("year"),
        F.bool_or(F.col("amount") > 3).alias("some"),
        F.count_if(F.col("amount") > 3).alias("of"),
    ]
    plan = pipeline(*columns, output_type=Most).plan(LOCAL_GLOBAL)
    assert plan.graph.nodes[3].records.describe() == (
        "Partials(shop: string, sum_paid: decimal128(38, 18)?, max_size: string?,"
        " max_year_lit_2026_01_01_88c3e7: int64?, bool_or_amount_3_4e5a92: bool?,"
        " count_if_amount_3_a83f18: int64)"
    )


def test_the_declared_result_says_the_type_where_the_expression_does_not():
    plan = pipeline(F.sum(F.expr("amount div 2")).alias("total")).plan(LOCAL_GLOBAL)
    assert plan.graph.nodes[1].records.names == ("shop", "sum_expr_amount_div_2_c96cb7")


def test_what_keeps_an_aggregate_is_named_after_it_wherever_it_stands():
    class Two(NamedTuple):
        shop: str
        more: int
        less: int

    columns = [F.sum(F.col("amount") + F.col("at")).alias("more"), F.sum(F.col("amount") - F.col("at")).alias("less")]
    names = [
        set(pipeline(*order, output_type=Two).plan(LOCAL_GLOBAL).graph.nodes[3].records.names)
        for order in (columns, columns[::-1])
    ]
    assert names[0] == names[1]
    assert len(names[0]) == 3


def test_windows_merge_as_windows():
    class Hour(NamedTuple):
        shop: str
        window_start: int
        total: int

    plan = pipeline(TOTAL, output_type=Hour, windowed=True).plan(LOCAL_GLOBAL)
    assert kinds(plan) == ["source", "assign timestamps", "partials", "merge windows", "select", "sink"]
    assert plan.graph.nodes[3].records.describe() == ("Windowed(shop: string, window_start: int64, sum_amount: int64?)")


def test_columns_keep_their_lineage():
    plan = pipeline(TOTAL).plan(LOCAL_GLOBAL)
    before = {name: frozenset({(0, name)}) for name in Sale._fields}
    for node in plan.graph.nodes[1:4]:
        before = node.lineage(before)
    assert before == {"shop": frozenset({(0, "shop")}), "total": frozenset({(0, "amount")})}


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (
            F.count_distinct("amount"),
            r"p: operator 'totals': local-global aggregation cannot merge count_distinct\('amount'\);",
        ),
        (F.min("tags"), r"local-global aggregation cannot merge min\('tags'\) of a list\[str\]; use reduce or process"),
        (F.sum("shop"), r"local-global aggregation cannot merge sum\('shop'\) of a str; use reduce or process"),
        (F.max_by("amount", "price"), r"local-global aggregation cannot merge max_by\('amount', 'price'\)"),
        (F.sum(F.expr("amount div 2")) + 1, r"the type of .* in .* is not known, .* with_columns\(...\) before key_by"),
        ("sum(amount)", r"local-global aggregation cannot take apart 'sum\(amount\)'; write it with"),
    ],
)
def test_what_cannot_be_merged_is_an_error_that_names_it(column, message):
    named = f"{column} AS total" if isinstance(column, str) else column.alias("total")
    with pytest.raises(UnsupportedError, match=message if not isinstance(column, str) else "cannot take apart"):
        pipeline(named).plan(LOCAL_GLOBAL)


def test_a_result_that_the_record_does_not_have_is_an_error():
    with pytest.raises(PipelineError, match=r"operator 'totals': no column 'total'; it gives shop, "):
        pipeline(F.sum("amount").alias("total").cast("long")).plan(LOCAL_GLOBAL)


def test_findings_name_their_operators():
    made = Pipeline("p")
    totals = made.from_collection([], Sale).key_by("shop").agg(TOTAL, output_type=Total).name("totals")
    totals.key_by("shop").process(Last()).name("last").print()
    plan = made.plan({"execution.runtime-mode": "STREAMING"})
    assert {plan.graph.node(f.node).name for f in plan.findings if f.rule == "counts-updates"} == {"last"}
