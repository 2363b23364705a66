"""Tasks, exchanges and regions: those of whole pipelines, and the pure functions against their plain definitions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import Pipeline
from dagster_unified.errors import PipelineError
from dagster_unified.graph.regions import regions, regions_to_recompute, regions_to_restart, releasable


def same(value: int) -> int:
    return value


def source(pipeline, name="s"):
    return pipeline.from_collection([1], name=name)


def tasks(pipeline, **options):
    plan = pipeline.plan(options)
    return [tuple(plan.graph.node(o).name for o in t.operators) for t in plan.tasks]


def stages(pipeline, options=None):
    plan = pipeline.plan(options)
    return [{plan.graph.node(n).name for n in r.nodes} for r in plan.regions]


def test_both_branches_of_a_fan_out_chain_to_the_operator_before_it():
    #   s ─ a ─┬─ b ─ one
    #          └─ c ─ two
    pipeline = Pipeline("p")
    a = source(pipeline).map(same).name("a")
    a.map(same).name("b").print("one")
    a.map(same).name("c").print("two")
    assert tasks(pipeline) == [("s", "a", "b", "one", "c", "two")]


def test_a_union_begins_a_task_in_the_region_of_its_inputs():
    #   s ─ a ─┐
    #          ├─ c ─ out
    #   t ─ b ─┘
    pipeline = Pipeline("p")
    a, b = source(pipeline, "s").map(same).name("a"), source(pipeline, "t").map(same).name("b")
    a.union(b).map(same).name("c").print("out")
    assert tasks(pipeline) == [("s", "a"), ("t", "b"), ("c", "out")]
    assert stages(pipeline) == [{"s", "a", "t", "b", "c", "out"}]


def test_a_stream_united_with_its_own_total_is_one_region():
    #   s ─ a ─────────────┬─ c ─ out      the barrier a ══▶ total lies within one pipelined component
    #       └═▶ total ─────┘
    pipeline = Pipeline("p")
    a = source(pipeline).map(same).name("a")
    a.union(a.key_by(lambda v: v % 2, key_type=int).reduce(lambda x, y: x + y).name("total")).map(same).name("c").print(
        "out"
    )
    assert stages(pipeline) == [{"s", "a", "total", "c", "out"}]


def test_a_task_has_one_parallelism():
    #   a(4) ─ b ─ c(2)
    pipeline = Pipeline("p")
    source(pipeline).map(same).name("a").set_parallelism(4).map(same).name("b").map(same).name("c").set_parallelism(
        2
    ).print("out")
    plan = pipeline.plan()
    for task in plan.tasks:
        assert len({plan.graph.node(o).parallelism for o in task.operators} - {None}) <= 1


@pytest.mark.parametrize("kind", ["rebalance", "rescale", "shuffle", "broadcast", "global_"])
def test_an_exchange_ends_a_task(kind):
    pipeline = Pipeline("p")
    getattr(source(pipeline), kind)().map(same).name("a").print("out")
    assert tasks(pipeline) == [("s",), ("a", "out")]


def test_what_leads_to_no_sink_is_not_planned():
    pipeline = Pipeline("p")
    a = source(pipeline).map(same).name("a")
    a.map(same).name("unused")
    a.print("out")
    assert tasks(pipeline) == [("s", "a", "out")]


def test_a_finding_names_an_operator_of_the_plan_although_unused_ones_are_gone():
    pipeline = Pipeline("p")
    s = source(pipeline)
    s.map(same).name("unused")
    s.key_by(same).sum().name("total").filter(lambda v: v > 1).name("big").print("out")
    plan = pipeline.plan()
    (finding,) = [f for f in plan.findings if f.rule == "counts-updates"]
    assert plan.graph.node(finding.node).name == "big"


def pairs(count):
    arcs = [(low, high) for high in range(count) for low in range(high)]
    return st.lists(st.sampled_from(arcs), max_size=8)


@given(st.integers(2, 6).flatmap(lambda n: st.tuples(st.just(n), pairs(n), pairs(n))))
def test_regions_are_the_finest_that_can_run_one_after_another(graph):
    count, pipelined, blocking = graph

    def merged(groups, arcs):
        """Joins groups along arcs, as long as something changes."""
        for s, t in arcs:
            a, b = next(g for g in groups if s in g), next(g for g in groups if t in g)
            if a is not b:
                return merged([g for g in groups if g is not a and g is not b] + [a | b], arcs)
        return groups

    def reaches(groups, a, b):
        seen, todo = set(), [a]
        while todo:
            here = todo.pop()
            for s, t in blocking:
                if s in here and t not in here:
                    there = next(g for g in groups if t in g)
                    if there is b:
                        return True
                    if there not in seen:
                        seen.add(there)
                        todo.append(there)
        return False

    expected = merged([frozenset({n}) for n in range(count)], pipelined)
    while True:
        cycle = next(
            (
                (a, b)
                for a in expected
                for b in expected
                if a is not b and reaches(expected, a, b) and reaches(expected, b, a)
            ),
            None,
        )
        if cycle is None:
            break
        expected = [g for g in expected if g not in cycle] + [cycle[0] | cycle[1]]
    found = regions(count, pipelined, blocking)
    assert {frozenset(r) for r in found} == set(expected)
    place = {task: i for i, region in enumerate(found) for task in region}
    assert all(place[s] <= place[t] for s, t in blocking)


@pytest.mark.parametrize(
    ("count", "pipelined", "blocking", "expected"),
    [
        #  0   1                      nothing joins them
        (2, [], [], ((0,), (1,))),
        #  0 ── 1 ── 2
        (3, [(0, 1), (1, 2)], [], ((0, 1, 2),)),
        #  0 ══▶ 1 ══▶ 2
        (3, [], [(0, 1), (1, 2)], ((0,), (1,), (2,))),
        #  0 ── 2, 0 ══▶ 1 ══▶ 2      1 needs all of 0 and 2 needs all of 1, but 0 and 2 run together
        (3, [(0, 2)], [(0, 1), (1, 2)], ((0, 1, 2),)),
        #  0 ══▶ 1 within one region
        (2, [(0, 1)], [(0, 1)], ((0, 1),)),
        #  2 ══▶ 0 ══▶ 1              numbered against the flow
        (3, [], [(2, 0), (0, 1)], ((2,), (0,), (1,))),
        #  0 ══▶ 1 ── 2 ══▶ 3
        #  └════════════════▲
        (4, [(1, 2)], [(0, 1), (2, 3), (0, 3)], ((0,), (1, 2), (3,))),
        #  0 ══▶ 1
        #  │     │                   0 blocks 1 and 3 blocks 2: neither region could run first
        #  2 ◀══ 3
        (4, [(0, 2), (1, 3)], [(0, 1), (3, 2)], ((0, 1, 2, 3),)),
    ],
)
def test_regions_of_small_graphs(count, pipelined, blocking, expected):
    assert regions(count, pipelined, blocking) == expected


@st.composite
def acyclic(draw):
    return {
        n: tuple(sorted(draw(st.sets(st.integers(0, n - 1), max_size=3)))) if n else ()
        for n in range(draw(st.integers(1, 7)))
    }


@given(acyclic(), st.data())
def test_recovery_recomputes_just_what_is_missing_below_what_stands(inputs, data):
    wanted, available = data.draw(st.sampled_from(list(inputs))), data.draw(st.sets(st.sampled_from(list(inputs))))

    def missing(region):
        return {m for p in inputs[region] if p not in available for m in {p} | missing(p)}

    found = regions_to_recompute(wanted, inputs, available)
    assert set(found) == missing(wanted)
    assert all(p not in found[i:] for i, region in enumerate(found) for p in inputs[region])


@given(acyclic(), st.data())
def test_an_intermediate_is_released_when_no_unfinished_region_reads_it(inputs, data):
    finished = data.draw(st.sets(st.sampled_from(list(inputs))))
    readers = {r: {c for c in inputs if r in inputs[c]} for r in inputs}
    assert releasable(inputs, finished) == {
        r for r in inputs if r in finished and readers[r] and readers[r] <= finished
    }


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
    stream = source(pipeline).map(same).name("a").set_parallelism(2)
    stream.forward().map(same).name("b").set_parallelism(3).print()
    says = r"p: forward\(\) from 'a' to 'b' needs the same .* goes from 2 to 3; use rebalance\(\) or rescale\(\)"
    with pytest.raises(PipelineError, match=says):
        pipeline.plan()


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
