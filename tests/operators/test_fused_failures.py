"""Where a fused chain says that it failed, as a user sees it."""

import pytest

from dagster_unified.api import FilterFunction, FlatMapFunction, MapFunction, Pipeline
from dagster_unified.errors import UserFunctionError
from dagster_unified.testing import run_pipeline


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


@pytest.mark.parametrize("mode", ["BATCH", "STREAMING"])
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
    from dagster_unified.operators.program.fusion import fuse
    from dagster_unified.operators.stateless import FlatMap

    return fuse([FlatMap(f) for f in functions], False, lambda clause, seen: None)


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
    pipeline = Pipeline("p")
    pipeline.from_collection(["x" * 1000]).map(lambda v: int(v), int).name("parse").print()
    with pytest.raises(UserFunctionError, match=r"on 'x+… \(1002 characters\)$"):
        run_pipeline(pipeline, "BATCH")
