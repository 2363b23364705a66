"""What `explain` shows of an iteration, and what its fingerprint depends on."""

import json

from dagster_unified.api import Pipeline, iterations
from dagster_unified.graph.nodes import QueryInputNode, QueryOutputNode
from dagster_unified.graph.queries import segments
from tests.iterations.behind import built
from tests.iterations.programs import PROGRAMS
from tests.iterations.support import Body


def explained(name, format="text"):
    pipeline, out = PROGRAMS[name][0]()
    out.print("out")
    return pipeline.explain({"execution.runtime-mode": "BATCH"}, format)


def test_the_text_shows_the_body():
    text = explained("growing")
    for line in (
        "iteration 'Growing': 1 variable, 2 data streams (1 replayed), ALL_ROUND, until nothing is fed back",
        "'variable 0' reads feedback 0 of the epoch before",
        "'data 0', replayed in every epoch",
        "reduce 'reduce', new in each epoch reads 'Grown' through HASH by shop and 'data 0' through HASH by shop",
        "broadcast 'Below' reads 'reduce' and 'data 1' through BROADCAST",
    ):
        assert line in text


def test_the_picture_has_feedback_as_a_dotted_arrow():
    picture = explained("growing", "mermaid")
    for part in (
        '-. "next epoch" .->',
        "body of Growing, ALL_ROUND",
        "data 0, replayed in every epoch",
        "reduce, new in",
    ):
        assert part in picture


def test_tools_find_the_body_with_its_feedback_and_life_cycles():
    (loop,) = (o for o in json.loads(explained("growing", "json"))["operators"] if o["kind"] == "iteration")
    body = {o["name"]: o for o in loop["body"]["operators"]}
    assert (body["Grown"]["life_cycle"], body["reduce"]["life_cycle"]) == ("ALL_ROUND", "PER_ROUND")
    (feedback,) = loop["body"]["feedback"]
    assert (feedback["from"], feedback["to"]) == (body["feedback 0"]["id"], body["variable 0"]["id"])


def behind(format):
    pipeline, found, passed = built("beside", bounded=False)
    found.print("found")
    passed.print("passed")
    options = {"execution.runtime-mode": "STREAMING"}
    return pipeline.plan(options), pipeline.explain(options, format)


def test_the_text_shows_into_which_queries_a_stream_is_cut():
    plan, text = behind("text")
    first, second = segments(plan)
    query_outputs = [node.uid for node in first.graph.nodes if isinstance(node, QueryOutputNode)]
    assert query_outputs == [node.uid for node in second.graph.nodes if isinstance(node, QueryInputNode)]
    assert (
        f"""
queries, since state comes after an iteration
  query 'main': given, timestamps, down
    hands on 'timestamps' to query 'main-1' ({query_outputs[0]})
    hands on 'down' / output-0 to query 'main-1' ({query_outputs[1]})
  query 'main-1': reduce, down as 1, reduce as 2, Both, map, found, passed
"""
        in text
    )
    assert "queries" not in explained("growing")


def test_the_picture_has_a_box_for_each_query():
    _, picture = behind("mermaid")
    assert 'subgraph r0_0["query main"]' in picture
    assert 'subgraph r0_1["query main-1"]' in picture
    assert picture.count('== "handed on" ==>') == 3


def test_tools_find_the_queries_and_what_they_hand_on():
    plan, found = behind("json")
    first, second = json.loads(found)["queries"]
    names = [[plan.graph.node(n).name for n in query["operators"]] for query in (first, second)]
    assert names[0] == ["given", "timestamps", "down"]
    handed = [(plan.graph.node(one["from"]).name, one["side_output"], one["to"]) for one in first["hands_on"]]
    assert handed == [("timestamps", None, "main-1"), ("down", "output-0", "main-1")]
    assert not second["hands_on"]
    assert json.loads(explained("growing", "json"))["queries"] == []


def mark(step):
    pipeline = Pipeline("loops")

    def build(variables, data):
        on = variables[0].map(lambda n: n + step, int)
        return iterations.IterationBodyResult([on.filter(lambda n: n < 3)], [on])

    numbers = pipeline.from_collection([0], int, name="numbers")
    iterations.iterate_bounded_streams_until_termination([numbers], [], Body(build))[0].print("out")
    return pipeline.plan({"execution.runtime-mode": "BATCH"}).regions[0].fingerprint


def test_code_in_a_body_counts():
    assert mark(1) == mark(1) != mark(2)
