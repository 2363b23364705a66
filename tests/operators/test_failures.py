"""A function that calls `sys.exit()` fails the job where it stands, and ends neither a worker nor a test."""

import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import NamedTuple

import pytest

from dagster_unified.api import (
    AsyncDataStream,
    AsyncFunction,
    KeyedProcessFunction,
    Pipeline,
    ProcessFunction,
)
from dagster_unified.errors import UserFunctionError
from dagster_unified.testing import run_pipeline


class Sale(NamedTuple):
    shop: str
    amount: int


def leave(*_: object) -> Sale:
    sys.exit("no shop")


class Leaves(ProcessFunction):
    def process_element(self, value: Sale, context) -> Iterable[Sale]:
        yield leave()


class LeavesKeyed(KeyedProcessFunction):
    def process_element(self, value: Sale, context) -> Iterable[Sale]:
        yield leave()


class LeavesLater(AsyncFunction):
    async def async_invoke(self, value: Sale) -> Iterable[Sale]:
        return [leave()]


class LeavesInOpen(LeavesKeyed):
    def open(self, context) -> None:
        leave()


OPERATORS = {
    "map": lambda s: s.map(leave),
    "filter": lambda s: s.filter(leave),
    "key_by": lambda s: s.key_by(leave, key_type=Sale).reduce(max),
    "process": lambda s: s.process(Leaves()),
    "keyed": lambda s: s.key_by("shop").process(LeavesKeyed()),
    "open": lambda s: s.key_by("shop").process(LeavesInOpen()),
    "reduce": lambda s: s.key_by("shop").reduce(leave),
    "window": lambda s: s.key_by("shop").count_window(2).reduce(leave),
    "async": lambda s: AsyncDataStream.ordered_wait(s, LeavesLater(), timedelta(seconds=9)),
}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("mode", ["BATCH", "STREAMING"])
def test_a_function_that_exits_fails_the_run_where_it_stands(mode, operator):
    pipeline = Pipeline("p")
    stream = pipeline.from_collection([Sale("a", 1), Sale("a", 2)])
    OPERATORS[operator](stream).print()
    with pytest.raises(UserFunctionError, match=r"^p: .*: SystemExit: no shop, at .*test_failures.py:\d+ in leave"):
        run_pipeline(pipeline, mode, micro_batch=None, seed=None)
