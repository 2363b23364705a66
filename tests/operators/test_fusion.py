"""The fused chain: the plain composition of its functions, which knows where it failed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import FilterFunction, FlatMapFunction, MapFunction, Pipeline
from dagster_unified.errors import UserFunctionError
from dagster_unified.operators.program.fusion import compile_chain
from dagster_unified.operators.stateless import Assign, Filter, FlatMap, Map
from dagster_unified.testing import run_pipeline
from tests.support import MODES, results

CLAUSES = {
    "map": Map(lambda v: v * 3 - 1),
    "filter": Filter(lambda v: v % 2 == 0),
    "flat_map": FlatMap(lambda v: [v, v + 1][: v % 3]),
    "assign": Assign(lambda v, t: v * 10),
}


def composed(clauses, records, timestamps):
    """What the chain means, one record at a time."""
    rows = list(zip(records, timestamps or [None] * len(records), strict=True))
    for clause in clauses:
        f = clause.function
        if isinstance(clause, Map):
            rows = [(f(v), t) for v, t in rows]
        elif isinstance(clause, Filter):
            rows = [(v, t) for v, t in rows if f(v)]
        elif isinstance(clause, FlatMap):
            rows = [(o, t) for v, t in rows for o in f(v)]
        else:
            rows = [(v, f(v, t)) for v, t in rows]
    return rows


@given(st.lists(st.sampled_from(sorted(CLAUSES)), min_size=1, max_size=6), st.lists(st.integers(0, 50)), st.booleans())
def test_a_fused_chain_is_the_composition_of_its_functions(kinds, records, timestamped):
    clauses = [CLAUSES[k] for k in kinds]
    timestamps = list(range(len(records))) if timestamped else None
    out, times = compile_chain(clauses, timestamped).bind(clauses, lambda clause, seen: None).run(records, timestamps)
    assert list(zip(out, times if times is not None else [None] * len(out), strict=True)) == composed(
        clauses, records, timestamps
    )


def fails_on_three(v):
    if v == 3:
        raise ValueError("three")
    return v


def yields_then_fails(v):
    yield v
    if v == 3:
        raise ValueError("three")


@pytest.mark.parametrize(
    ("clause", "place"),
    [
        (Map(fails_on_three), 1),
        (Filter(lambda v: fails_on_three(v) >= 0), 1),
        (FlatMap(yields_then_fails), 1),
    ],
)
@pytest.mark.parametrize("timestamps", [None, [10, 20, 30]])
def test_a_failure_is_traced_to_its_operator_and_its_record(clause, place, timestamps):
    clauses = [Map(lambda v: v + 1), clause, Map(lambda v: v)]
    chain = compile_chain(clauses, timestamps is not None).bind(clauses, lambda clause, seen: None)
    with pytest.raises(ValueError) as caught:
        chain.run([0, 1, 2], timestamps)
    assert chain.locate(caught.value.__traceback__) == (place, 3)


def chain(*steps):
    """A pipeline `shop` over 4, 5, 6 of (method, function, name)."""
    pipeline = Pipeline("shop")
    stream = pipeline.from_collection([4, 5, 6])
    for method, function, name in steps:
        stream = getattr(stream, method)(function, *([] if method == "filter" else [int])).name(name)
    stream.print()
    return pipeline


def inverse(v):
    return 10 // (v - 5)


def inverse_later(v):
    yield 10 // (v - 5)


def same(v):
    return v


class Inverse(MapFunction):
    def map(self, value):
        return inverse(value)


class InverseFilter(FilterFunction):
    def filter(self, value):
        return inverse(value)


class InverseFlatMap(FlatMapFunction):
    def flat_map(self, value):
        yield inverse(value)


@MODES
@pytest.mark.parametrize(
    ("method", "function"),
    [
        ("map", inverse),
        ("filter", inverse),
        ("flat_map", inverse_later),
        ("map", Inverse()),
        ("filter", InverseFilter()),
        ("flat_map", InverseFlatMap()),
        ("flat_map", lambda v: [inverse(v)]),
    ],
)
def test_a_failure_names_pipeline_operator_line_and_record(mode, method, function):
    with pytest.raises(UserFunctionError) as caught:
        run_pipeline(chain(("map", same, "before"), (method, function, "bad"), ("map", same, "after")), mode)
    message = str(caught.value)
    assert message.startswith("shop: stage '")
    assert "operator 'bad': ZeroDivisionError: integer division or modulo by zero, at " in message
    assert __file__ in message
    assert message.endswith(", on 5")
    assert caught.value.record == "5"


def fused(*functions):
    from dagster_unified.operators.program.fusion import compile_chain
    from dagster_unified.operators.stateless import FlatMap

    clauses = [FlatMap(f) for f in functions]
    return compile_chain(clauses, False).bind(clauses, lambda clause, seen: None)


def located(chain, records):
    with pytest.raises(ZeroDivisionError) as caught:
        chain.run(records, None)
    return chain.locate(caught.value.__traceback__)


def test_the_second_use_of_one_generator_function_is_told_from_the_first():
    # 6 → 10 → 2; 4 → -10 → -1; 7 → 5 → fails in the second use, on 5
    assert located(fused(inverse_later, inverse_later), [6, 7]) == (1, 5)


def test_a_generator_expression_is_traced_to_the_operator_that_returned_it():
    assert located(fused(lambda v: (10 // x for x in [v]), lambda v: [v]), [1, 0]) == (0, 0)


def test_a_long_record_is_shortened():
    made = Pipeline("p").from_collection(["x" * 1000]).map(lambda v: int(v), int).name("parse")
    with pytest.raises(UserFunctionError, match=r"on 'x+… \(1002 characters\)$"):
        results(made, "BATCH")
