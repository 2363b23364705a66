"""Exchanges that choose a record's subtask, in the harness."""

from collections import Counter

from dagster_unified.api import Pipeline
from dagster_unified.connectors import PrintSink
from dagster_unified.graph.queries import key_group_queries
from dagster_unified.graph.topology import Lanes
from dagster_unified.testing import run_pipeline
from tests import exchanges
from tests.support import MODES


@MODES
def test_each_subtask_sees_the_records_that_an_exchange_sends_to_it(mode):
    found = run_pipeline(exchanges.pipeline(PrintSink), mode, micro_batch=None)
    assert {name: Counter(rows) for name, rows in found.sinks.items()} == exchanges.expected()


def test_only_exchanges_that_choose_a_subtask_need_a_stage_of_their_own():
    def stages(build):
        pipeline = Pipeline("p")
        items = pipeline.from_collection(exchanges.ITEMS, exchanges.Item, "items")
        exchanges.kept(build(exchanges.kept(items))).print()
        queries = key_group_queries(pipeline.plan({"execution.runtime-mode": "STREAMING"}), Lanes())
        return [len(between) for query in queries for between in query.stages.between]

    assert stages(lambda items: items.rebalance().map(exchanges.same).union(items.shuffle())) == [0, 0, 0]
    assert stages(lambda items: items.global_().broadcast()) == [0, 0, 0]
    assert stages(lambda items: items.global_().where("value > 1")) == [0, 1, 0]  # the native operator
    assert stages(lambda items: items.global_().map(exchanges.same)) == [0, 1, 0]
