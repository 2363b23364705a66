"""An error in a program says which line of it is meant."""

import inspect

import pytest

from dagster_unified.api import KeyedProcessFunction, MapFunction, Pipeline, TumblingEventTimeWindows
from dagster_unified.errors import PipelineError, RecordTypeError
from tests.support import Sale


class Untyped(MapFunction):
    def map(self, value):
        return value


class Inherits(Untyped):
    pass


class Process(KeyedProcessFunction):
    def process_element(self, value, ctx):
        yield value


class Inheriting(Process):
    pass


MISTAKES = {
    "where": lambda sales: sales.where("amout > 1"),
    "key_by": lambda sales: sales.key_by("shp"),
    "sum": lambda sales: sales.key_by("shop").sum("amout"),
    "window": lambda sales: sales.key_by("shop").window(TumblingEventTimeWindows).sum("amount"),
    "map": lambda sales: sales.map(Inherits()).print(),
    "process": lambda sales: sales.key_by("shop").process(Inheriting()).print(),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_has_its_line(mistake):
    pipeline = Pipeline("p")
    sales = pipeline.from_collection([Sale("a", 1)], Sale, name="sales")
    line = inspect.getsourcelines(MISTAKES[mistake])[1]
    with pytest.raises((PipelineError, RecordTypeError), match=rf"\(tests/api/test_located\.py:{line}\)$"):
        MISTAKES[mistake](sales) and pipeline.plan()


def test_the_line_is_told_once():
    sales = Pipeline("p").from_collection([Sale("a", 1)], Sale, name="sales")
    with pytest.raises(PipelineError) as raised:
        sales.key_by("shop").max_by("amout")
    assert str(raised.value).count("test_located.py") == 1
