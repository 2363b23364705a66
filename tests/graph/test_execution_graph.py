"""The execution graph: which operators run in one pass, and how records travel between them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import Pipeline, iterations
from dagster_unified.graph.execution_graph import ExecutionGraph, Runs, channel_selector
from dagster_unified.graph.nodes import ExchangeKind
from dagster_unified.graph.queries import key_group_queries
from dagster_unified.graph.topology import Lanes
from dagster_unified.operators.routing import ByKey, ByPartitioner, CopyToAll, Rebalance

STEPS = {
    "map": lambda s: s.map(lambda n: n, int),
    "filter": lambda s: s.filter(lambda n: True),
    "key": lambda s: s.key_by(lambda n: n, key_type=int).reduce(lambda a, b: a),
    "rebalance": lambda s: s.rebalance().map(lambda n: n, int),
    "broadcast": lambda s: s.broadcast().map(lambda n: n, int).set_parallelism(2),
    "global": lambda s: s.global_().map(lambda n: n, int),
    "alone": lambda s: s.map(lambda n: n, int).disable_chaining(),
}


def build(steps, mode):
    """A pipeline of steps, each of which reads the stream of an earlier one, or two of them united."""
    pipeline = Pipeline("generated")
    streams = [pipeline.from_collection([1], int)]
    for step, one, other in steps:
        stream, second = streams[one % len(streams)], streams[other % len(streams)]
        streams.append(STEPS[step](stream if stream is second else stream.union(second)))
    for stream in streams:
        stream.print()
    return pipeline.plan({"execution.runtime-mode": mode, "execution.batch-shuffle-mode": "ALL_EXCHANGES_PIPELINED"})


GENERATED = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8
)


@given(GENERATED)
def test_each_operator_is_in_one_vertex_which_is_behind_all_that_it_reads(steps):
    plan = build(steps, "BATCH")
    for region in plan.regions:
        graph = ExecutionGraph.of(plan, region)
        assert sorted(n for vertex in graph.vertices for n in vertex.members) == sorted(region.nodes)
        seen = set()
        for vertex in graph.vertices:
            for edge in graph.edges[vertex.head]:
                assert edge.edge.source in seen or edge.source is None
                if edge.source is not None:
                    assert vertex.depth >= edge.source.depth + (edge.kind is not ExchangeKind.FORWARD)
            seen.update(vertex.members)
            if len(vertex.members) > 1:
                assert vertex.runs is Runs.PYTHON
                task = next(task for task in plan.tasks if vertex.head in task.operators)
                assert set(vertex.members) <= set(task.operators)


@given(GENERATED)
def test_each_step_of_a_query_is_reached_and_each_lane_that_a_route_leads_to_is_read(steps):
    plan = build(steps, "STREAMING")
    lanes = Lanes()
    (query,) = key_group_queries(plan, lanes)
    topology = query.stages
    read, running = set(topology.tail_lanes.values()), [head.routed for head in topology.heads]
    for programs in (*topology.levels, *topology.passes, *[s.programs for b in topology.between for s in b]):
        read |= programs.keys()
        running += programs.values()
    steps_run = {step.uid for one in running for step in one.program.steps}
    run = steps_run | {plan.graph.node(n).uid for n in topology.tail.nodes}
    assert run >= {node.uid for node in plan.graph.nodes if node.step is not None or node in plan.graph.sinks}
    for one in running:
        assert len(one.routes) == len(one.program.outputs)
        assert {route.target for routes in one.routes for route in routes} <= read


@pytest.mark.parametrize(
    ("exchange", "selector"),
    [
        (lambda s: s, None),
        (lambda s: s.rebalance(), Rebalance(3)),
        (lambda s: s.global_(), Rebalance(1)),
        (lambda s: s.broadcast(), CopyToAll(3)),
    ],
)
def test_an_exchange_has_one_selector_in_all_runtimes(exchange, selector):
    pipeline = Pipeline("p")
    exchange(pipeline.from_collection([1], int)).map(lambda n: n, int).print()
    plan = pipeline.plan()
    assert channel_selector(plan, plan.graph.edges[0], 3) == selector


def test_the_selector_of_a_key_says_its_columns_and_that_of_a_partitioner_its_function():
    def choose(key, count):
        return key % count

    pipeline = Pipeline("p")
    numbers = pipeline.from_collection([1], int)
    numbers.key_by(lambda n: n, key_type=int).reduce(lambda a, b: a).print()
    numbers.partition_custom(choose, lambda n: n, key_type=int).map(lambda n: n, int).set_parallelism(2).print()
    plan = pipeline.plan()
    by_key, by_partitioner = (channel_selector(plan, edge, 2) for edge in plan.graph.outputs(0))
    assert isinstance(by_key, ByKey)
    assert by_key.keyed.columns == ("__k0",)
    assert isinstance(by_partitioner, ByPartitioner)
    assert by_partitioner.partitioner is choose


class Halved(iterations.IterationBody):
    def process(self, variables, data):
        halved = variables[0].map(lambda n: n // 2, int).name("halve")
        known = halved.key_by(lambda n: n, key_type=int).reduce(lambda a, b: a).name("known")
        return iterations.IterationBodyResult([known.filter(lambda n: n > 0).name("more")], [halved])


def test_the_body_of_an_iteration_is_printed_level_by_level():
    pipeline = Pipeline("p")
    config = iterations.IterationConfig(name="loop")
    (out,) = iterations.iterate_bounded_streams_until_termination(
        [pipeline.from_collection([8], int, name="numbers")], [], Halved(), config
    )
    out.print("out")
    assert pipeline.explain({"parallelism.default": 2}, "physical").splitlines() == [
        "p: BATCH",
        "",
        "stage 'out'",
        "  vertex 1, depth 0, source: 'numbers'",
        "  vertex 2, depth 0, iteration: 'loop'",
        "    reads 'numbers' of vertex 1: forward (value)",
        "    body on 2 subtasks",
        "      input 0 → 'halve': in turn over 2 (value)",
        "      level 0",
        "        plain pass on 2",
        "          Python: 'halve'",
        "          'halve' → 'known': by key over 32 (value, __k0)",
        "          'halve' → 'output-0': forward (value)",
        "      level 1",
        "        grouped pass on 2, 32 key groups",
        "          Python: 'known', 'more'",
        "          'more' → next epoch",
        "  vertex 3, depth 0, end: 'out'",
        "    reads 'loop' / output-0 of vertex 2: forward (value)",
    ]
