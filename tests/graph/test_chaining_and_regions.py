"""Tasks, exchanges and regions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import Pipeline
from dagster_unified.errors import PipelineError
from dagster_unified.graph.regions import regions, regions_to_recompute, regions_to_restart, releasable


def same(value: int) -> int:
    return value


def flink_example():
    pipeline = Pipeline("flink")
    stream = pipeline.from_collection([1, 2], name="source").map(same).name("map1").map(same).name("map2")
    stream = stream.rebalance().map(same).name("map3").map(same).name("map4")
    stream.key_by(same).map(same).name("map5").map(same).name("map6").print("sink")
    return pipeline


def task_names(plan):
    return [tuple(plan.graph.node(o).name for o in t.operators) for t in plan.tasks]


def test_flinks_documentation_example_has_three_tasks():
    # source → map1 → map2 → rebalance → map3 → map4 → key_by → map5 → map6 → sink
    assert task_names(flink_example().plan()) == [
        ("source", "map1", "map2"),
        ("map3", "map4"),
        ("map5", "map6", "sink"),
    ]


@pytest.mark.parametrize(
    ("mode", "count"),
    [
        ("ALL_EXCHANGES_BLOCKING", 3),
        ("ALL_EDGES_BLOCKING", 3),
        ("POINTWISE_EDGES_PIPELINED", 3),
        ("ALL_EXCHANGES_PIPELINED", 1),
        ("ALL_EDGES_PIPELINED", 1),
    ],
)
def test_the_shuffle_mode_decides_which_exchanges_are_barriers(mode, count):
    assert len(flink_example().plan({"execution.batch-shuffle-mode": mode}).regions) == count


@pytest.mark.parametrize(("mode", "count"), [("ALL_EXCHANGES_BLOCKING", 2), ("POINTWISE_EXCHANGES_PIPELINED", 1)])
def test_rescale_is_pointwise(mode, count):
    pipeline = Pipeline("p")
    pipeline.from_collection([1]).rescale().map(same).print()
    assert len(pipeline.plan({"execution.batch-shuffle-mode": mode}).regions) == count


def test_all_edges_are_barriers_where_the_author_asks_for_it_and_forward_edges_otherwise_stay_inside_their_region():
    #   s ─ a ┬─▶ u ─ out       u has two inputs, so that neither edge to it is chained
    #       b ┘
    pipeline = Pipeline("p")
    stream = pipeline.from_collection([1], name="s").map(same).name("a")
    stream.union(pipeline.from_collection([2], name="b")).map(same).name("u").print("out")
    assert len(pipeline.plan().regions) == 1
    plan = pipeline.plan({"execution.shuffle-mode": "ALL_EDGES_BLOCKING"})
    assert [tuple(plan.graph.node(n).name for n in r.nodes) for r in plan.regions] == [("s", "a"), ("b",), ("u", "out")]
    assert {e.reason for e in plan.exchanges} == {"all edges between tasks are blocking"}


def test_chaining_is_broken_where_the_author_says_so():
    pipeline = Pipeline("p")
    pipeline.from_collection([1], name="s").map(same).name("a").map(same).name("b").start_new_chain().map(same).name(
        "c"
    ).disable_chaining().map(same).name("d").print("out")
    plan = pipeline.plan()
    assert task_names(plan) == [("s", "a"), ("b",), ("c",), ("d", "out")]
    assert len(plan.regions) == 1  # forward exchanges stay inside their region
    assert len(pipeline.plan({"pipeline.operator-chaining.enabled": "false"}).tasks) == 6


def test_a_change_of_parallelism_rebalances_and_forward_then_is_an_error():
    pipeline = Pipeline("p")
    stream = pipeline.from_collection([1]).map(same).set_parallelism(2)
    stream.map(same).set_parallelism(3).print()
    assert [e.kind.value for e in pipeline.plan().exchanges] == ["REBALANCE"]
    pipeline = Pipeline("p")
    pipeline.from_collection([1]).map(same).set_parallelism(2).forward().map(same).set_parallelism(3).print()
    with pytest.raises(PipelineError, match=r"goes from 2 to 3; use rebalance\(\) or rescale\(\)"):
        pipeline.plan()


def test_regions_with_a_cycle_between_them_are_merged():
    #   0 ══▶ 1
    #   │     │        0─2 pipelined, 1─3 pipelined; 0 blocks 1 and 3 blocks 2: neither region could run first
    #   2 ◀══ 3
    assert regions(4, [(0, 2), (1, 3)], [(0, 1), (3, 2)]) == ((0, 1, 2, 3),)


def test_regions_come_in_topological_order():
    #   0 ══▶ 1 ── 2 ══▶ 3
    #   └════════════════▲
    assert regions(4, [(1, 2)], [(0, 1), (2, 3), (0, 3)]) == ((0,), (1, 2), (3,))


#   0 ══▶ 1 ══▶ 3
#   └═══▶ 2 ════▲
DIAMOND = {0: (), 1: (0,), 2: (0,), 3: (1, 2)}


@pytest.mark.parametrize(
    ("failed", "available", "restart"),
    [
        (3, {0, 1, 2}, (3,)),
        (3, {0, 2}, (1, 3)),
        (3, {2}, (0, 1, 2, 3)),
        (1, {0, 2}, (1, 3)),
        (0, set(), (0, 1, 2, 3)),
        (3, set(), (0, 1, 2, 3)),
    ],
)
def test_failover_restarts_the_failed_region_lost_producers_and_their_consumers(failed, available, restart):
    assert regions_to_restart(failed, DIAMOND, available) == restart


@pytest.mark.parametrize(
    ("available", "recompute"), [({0, 1, 2}, ()), ({0, 1}, (2,)), ({1, 2}, ()), ({2}, (0, 1)), (set(), (0, 1, 2))]
)
def test_recovery_recomputes_from_the_nearest_ancestors_that_stand(available, recompute):
    assert regions_to_recompute(3, DIAMOND, available) == recompute


@pytest.mark.parametrize(
    ("finished", "free"), [({0}, set()), ({0, 1}, set()), ({0, 1, 2}, {0}), ({0, 1, 2, 3}, {0, 1, 2})]
)
def test_an_intermediate_may_go_when_all_its_consumers_have_finished(finished, free):
    assert releasable(DIAMOND, finished) == free


@st.composite
def acyclic(draw):
    count = draw(st.integers(1, 7))
    return {n: tuple(draw(st.sets(st.integers(0, n - 1)))) if n else () for n in range(count)}


@given(acyclic(), st.data())
def test_failover_is_the_smallest_set_closed_under_its_rules(inputs, data):
    failed = data.draw(st.sampled_from(list(inputs)))
    available = data.draw(st.sets(st.sampled_from(list(inputs))))
    restart = set(regions_to_restart(failed, inputs, available))

    def closed(chosen):
        lost = all(p in chosen for r in chosen for p in inputs[r] if p not in available)
        consumers = all(c in chosen for c, producers in inputs.items() if set(producers) & chosen)
        return failed in chosen and lost and consumers

    assert closed(restart)
    assert all(not closed(restart - {r}) for r in restart)
