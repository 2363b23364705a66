"""Tasks and regions of whole pipelines, and the pure functions against their plain definitions."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import Pipeline
from dagster_unified.graph.connectors import Boundedness, Source
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.regions import regions, regions_to_recompute, regions_to_restart, releasable
from dagster_unified.records import record_type


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


def test_disable_chaining_and_the_option_that_does_so_for_all():
    pipeline = Pipeline("p")
    source(pipeline).map(same).name("a").disable_chaining().print("out")
    assert tasks(pipeline) == [("s",), ("a",), ("out",)]


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


def test_failover_of_a_chain_with_everything_lost_restarts_it_from_its_source():
    #   0 ══▶ 1 ══▶ 2
    assert regions_to_restart(1, {0: (), 1: (0,), 2: (1,)}, set()) == (0, 1, 2)
    assert regions_to_restart(1, {0: (), 1: (0,), 2: (1,)}, {0}) == (1, 2)


class Endless(Source):
    name, records, boundedness = "clicks", record_type(int), Boundedness.UNBOUNDED

    def describe(self):
        return "clicks without end"

    def snapshot(self):
        return ""


def test_one_unbounded_source_makes_the_pipeline_stream():
    pipeline = Pipeline("p")
    pipeline.from_source(Endless()).union(source(pipeline)).print()
    assert pipeline.plan().execution.mode == "STREAMING"
    with pytest.raises(Exception, match="p: source 'clicks' is unbounded, and BATCH needs bounded sources"):
        pipeline.plan({"execution.runtime-mode": "BATCH"})


@pytest.mark.parametrize(
    ("key", "given", "value"),
    [
        ("execution.runtime-mode", "batch", "BATCH"),
        ("execution.batch-shuffle-mode", "all_edges_pipelined", "ALL_EXCHANGES_PIPELINED"),
        ("execution.schedule-mode", "eager", "EAGER"),
        ("execution.incremental-updates", "TRUE", True),
        ("execution.checkpointing.interval", "10 s", timedelta(seconds=10)),
        ("execution.checkpointing.interval", timedelta(minutes=1), timedelta(minutes=1)),
        ("state.backend.type", "hashmap", "HASHMAP"),
        ("restart-strategy.type", "exponential-delay", "EXPONENTIAL-DELAY"),
        ("restart-strategy.exponential-delay.jitter-factor", "0.2", 0.2),
        ("pipeline.processing-time.allow", "ignore", "IGNORE"),
        ("pipeline.processing-time.end-of-input", "IGNORE", "IGNORE"),
        ("pipeline.event-time.end-of-input-chain", "0", 0),
        ("pipeline.operator-chaining.enabled", False, False),
        ("pipeline.object-reuse", "true", True),
        ("parallelism.default", " 4 ", 4),
    ],
)
def test_every_option_reads_text_and_its_own_type(key, given, value):
    assert Configuration.of({key: given})[key] == value


@pytest.mark.parametrize("given", [2.7, "2.5", True, "-1", "many"])
def test_a_count_is_a_whole_number(given):
    with pytest.raises(Exception, match=f"parallelism.default: {given!r} is not a whole number of at least 1"):
        Configuration.of({"parallelism.default": given})
