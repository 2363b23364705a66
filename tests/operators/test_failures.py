"""Functions that fail: one that calls `sys.exit()`, and one whose value is not of its declared type."""

import sys
from collections.abc import Iterable
from datetime import timedelta

import pytest

from dagster_unified.api import (
    AsyncDataStream,
    AsyncFunction,
    KeyedProcessFunction,
    MapFunction,
    Pipeline,
    ProcessFunction,
)
from dagster_unified.errors import RecordTypeError, UserFunctionError
from dagster_unified.testing import run_pipeline
from tests.support import MODES, Sale, results


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
@MODES
def test_a_function_that_exits_fails_the_run_where_it_stands(mode, operator):
    pipeline = Pipeline("p")
    stream = pipeline.from_collection([Sale("a", 1), Sale("a", 2)])
    OPERATORS[operator](stream).print()
    with pytest.raises(UserFunctionError, match=r"^p: .*: SystemExit: no shop, at .*test_failures.py:\d+ in leave"):
        run_pipeline(pipeline, mode, micro_batch=None, seed=None)


SALES = [Sale("a", 1), Sale("b", 2), Sale("c", 3)]


class Odd(MapFunction[Sale, int]):
    def map(self, value: Sale) -> int:
        return value.amount if value.amount != 2 else "two"


def several(sale: Sale) -> Iterable[int]:
    yield from range(sale.amount - 1)
    yield 1.5 if sale.amount == 2 else 0


CHAINS = {
    "map": lambda sales: sales.map(Odd()),
    "flat_map": lambda sales: sales.flat_map(several),
    "filter": lambda sales: sales.filter(lambda sale: sale.amount > 1).map(Odd()),
    "two": lambda sales: sales.map(lambda sale: sale, Sale).flat_map(several).filter(lambda n: n != 0),
}


@MODES
@pytest.mark.parametrize("chain", CHAINS)
def test_a_wrong_return_type_names_the_record(mode, chain):
    pipeline = Pipeline("p")
    CHAINS[chain](pipeline.from_collection(SALES, Sale, name="sales")).print()
    with pytest.raises(RecordTypeError, match=r"declared int, and is .*computed from Sale\(shop='b', amount=2\)\)$"):
        run_pipeline(pipeline, mode)


def test_a_function_that_gives_another_value_when_it_runs_again_names_no_record():
    calls = []

    def changing(sale: Sale) -> int:
        calls.append(sale)
        return "x" if len(calls) == 2 else 1

    made = Pipeline("p").from_collection(SALES, Sale, name="sales").map(changing)
    with pytest.raises(RecordTypeError, match=r"the declared type$"):
        results(made, "BATCH")
