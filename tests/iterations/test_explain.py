"""What `explain` shows of an iteration, and what its fingerprint depends on."""

import json

from dagster_unified.api import Pipeline, iterations
from tests.iterations.programs import PROGRAMS
from tests.iterations.test_semantics import Body


def explained(name, format="text"):
    pipeline, out = PROGRAMS[name][0]()
    out.print("out")
    return pipeline.explain({"execution.runtime-mode": "BATCH"}, format)


def test_the_text_shows_the_body():
    text = explained("growing")
    for line in (
        "iteration 'Growing': 1 variable, 2 data streams (1 replayed), ALL_ROUND, until nothing is fed back",
        "'variable 0' reads feedback 0 of the round before",
        "'data 0', replayed in every round",
        "reduce 'reduce', new in each round reads 'Grown' through HASH by shop and 'data 0' through HASH by shop",
        "broadcast 'Below' reads 'reduce' and 'data 1' through BROADCAST",
    ):
        assert line in text


def test_the_picture_has_feedback_as_a_dotted_arrow():
    assert '-. "next round" .->' in explained("growing", "mermaid")


def test_tools_find_the_body_with_its_feedback_and_life_cycles():
    (loop,) = (o for o in json.loads(explained("growing", "json"))["operators"] if o["kind"] == "iteration")
    body = {o["name"]: o for o in loop["body"]["operators"]}
    assert (body["Grown"]["life_cycle"], body["reduce"]["life_cycle"]) == ("ALL_ROUND", "PER_ROUND")
    (feedback,) = loop["body"]["feedback"]
    assert (feedback["from"], feedback["to"]) == (body["feedback 0"]["id"], body["variable 0"]["id"])


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
