"""A value that is not of its declared type: the error names the record that it was computed from."""

from collections.abc import Iterable
from typing import NamedTuple

import pytest

from dagster_unified.api import MapFunction, Pipeline
from dagster_unified.errors import RecordTypeError
from dagster_unified.testing import run_pipeline


class Sale(NamedTuple):
    shop: str
    amount: int


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


@pytest.mark.parametrize("mode", ["BATCH", "STREAMING"])
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

    pipeline = Pipeline("p")
    pipeline.from_collection(SALES, Sale, name="sales").map(changing).print()
    with pytest.raises(RecordTypeError, match=r"the declared type$"):
        run_pipeline(pipeline, "BATCH")
