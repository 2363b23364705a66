"""The rolling family: `reduce`, `sum`, `min`, `max`, `min_by`, `max_by`."""

import math
from dataclasses import dataclass
from functools import reduce
from itertools import permutations
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import Pipeline, ReduceFunction
from dagster_unified.errors import UserFunctionError
from dagster_unified.testing import run_pipeline
from tests.support import MODES, results


class Sale(NamedTuple):
    shop: str
    amount: int
    who: str


@dataclass(frozen=True)
class Point:
    shop: str
    amount: int


SALES = [Sale("a", 3, "x"), Sale("b", 5, "y"), Sale("a", 1, "z"), Sale("a", 3, "w")]


def rolled(method, *arguments, mode, data=SALES, options=None):
    pipeline = Pipeline("p")
    getattr(pipeline.from_collection(data).key_by("shop"), method)(*arguments).print()
    return run_pipeline(
        pipeline, mode, options=options, seed=None
    ).only()  # in the order in which the sales are written down


@pytest.mark.parametrize(
    ("method", "final"),
    [
        ("sum", Sale("a", 7, "x")),
        ("min", Sale("a", 1, "x")),
        ("max", Sale("a", 3, "x")),
        ("min_by", Sale("a", 1, "z")),
        ("max_by", Sale("a", 3, "x")),
    ],
)
def test_one_final_record_per_key_in_batch_and_one_per_record_in_streaming(method, final):
    assert rolled(method, "amount", mode="BATCH") == [final, Sale("b", 5, "y")]
    updates = rolled(method, "amount", mode="STREAMING")
    assert [r.shop for r in updates] == ["a", "b", "a", "a"]
    assert (updates[0], updates[-1]) == (SALES[0], final)


@MODES
def test_incremental_updates_can_be_asked_for_in_either_mode(mode):
    assert (
        rolled("sum", "amount", mode=mode, options={"execution.incremental-updates": "true"})[
            -1 if mode == "STREAMING" else 2
        ].amount
        == 7
    )


def test_dataclasses_keep_their_other_fields():
    assert rolled("sum", "amount", mode="BATCH", data=[Point("a", 1), Point("a", 2)]) == [Point("a", 3)]


class Join(ReduceFunction):
    def reduce(self, value1, value2):
        return value1._replace(amount=value1.amount * 10 + value2.amount)


@given(st.lists(st.builds(Sale, st.sampled_from("ab"), st.integers(0, 9), st.just("")), min_size=1, max_size=20))
def test_reduce_folds_each_keys_records_in_their_order(sales):
    expected = {
        shop: reduce(Join().reduce, [s for s in sales if s.shop == shop]) for shop in sorted({s.shop for s in sales})
    }
    assert rolled("reduce", Join(), mode="BATCH", data=sales) == list(expected.values())
    assert {s.shop: s for s in rolled("reduce", Join(), mode="STREAMING", data=sales)} == expected


@MODES
def test_a_failure_shows_both_records(mode):
    def refuse(a: Sale, b: Sale) -> Sale:
        raise ValueError("no")

    with pytest.raises(
        UserFunctionError,
        match=(
            r"operator 'refuse': ValueError: no, at .*test_reduce\.py:\d+ in refuse, on \(Sale\(.*'x'\),"
            r" Sale\(.*'z'\)\)"
        ),
    ):
        rolled("reduce", refuse, mode=mode)


class Reading(NamedTuple):
    shop: str
    value: float
    number: int


@pytest.mark.parametrize("order", list(permutations([1.0, math.nan, 3.0])))
@pytest.mark.parametrize(
    ("method", "expected"), [("min", 1.0), ("max", math.nan), ("min_by", 1.0), ("max_by", math.nan)]
)
def test_not_a_number_is_the_largest_number_in_any_order(order, method, expected):
    data = [Reading("a", value, number) for number, value in enumerate(order)]
    (found,) = rolled(method, "value", mode="BATCH", data=data)
    assert repr(found.value) == repr(expected)
    if method.endswith("by"):
        assert repr(order[found.number]) == repr(expected)


def first_of(a, b):
    return Sale(a.shop, a.amount, next(who for who in b.who if who != "?"))


@pytest.mark.parametrize("count", [2, 20])
@pytest.mark.parametrize("options", [{}, {"execution.incremental-updates": True}])
@MODES
def test_a_function_that_raises_stop_iteration_fails_the_run(mode, options, count):
    data = [Sale(shop, 1, "?" if shop == "b" else "x") for shop in "abc" for _ in range(count)]
    made = Pipeline("p").from_collection(data).key_by("shop").reduce(first_of)
    with pytest.raises(UserFunctionError, match=r"operator 'first_of': .*StopIteration"):
        results(made, mode, options=options, micro_batch=None, seed=None)
