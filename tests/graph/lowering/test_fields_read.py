"""Functions that are called, of whose records only some fields are read."""

import sys
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import KeyedProcessFunction, Pipeline, RuntimeContext, ValueStateDescriptor
from dagster_unified.errors import UnifiedError
from dagster_unified.graph.lowering.fields_read import fields_read
from dagster_unified.graph.lowering.source import UnreadableError
from dagster_unified.operators.keyed import KeyedProcessOperator
from dagster_unified.records import record_type
from dagster_unified.testing import run_pipeline
from tests.graph.lowering.replacing import replaced
from tests.support import MODES


class Sale(NamedTuple):
    shop: str
    amount: int
    note: str | None
    items: list[int]
    rate: float


@dataclass
class Order:
    shop: str
    amount: int
    note: str = ""


class Total(KeyedProcessFunction[str, Sale, tuple[str, int]]):
    def open(self, context: RuntimeContext) -> None:
        self.total = context.get_state(ValueStateDescriptor("total", int))

    def process_element(self, value, ctx):
        total = (self.total.value() or 0) + value.amount
        self.total.update(total)
        ctx.timer_service().register_event_time_timer(total % 7)
        yield ctx.get_current_key(), total

    def on_timer(self, timestamp, ctx):
        yield ctx.get_current_key(), -timestamp


class Listed(KeyedProcessFunction[str, Sale, tuple[str, int]]):
    def process_element(self, value, ctx):
        return [(each.upper(), value.amount) for each in value.shop.split(",") if value.amount]


class Inherits(Listed):
    pass


class ByPlace(KeyedProcessFunction[str, Sale, tuple[str, int]]):
    def process_element(self, value, ctx):
        yield value[0], 10 // value[1]


class Nothing(KeyedProcessFunction[str, Sale, tuple[str, int]]):
    def process_element(self, value, ctx):
        yield ctx.get_current_key(), 1


@pytest.mark.parametrize(
    ("function", "fields"),
    [(Total(), (1,)), (Listed(), (0, 1)), (Inherits(), (0, 1)), (ByPlace(), (0, 1)), (Nothing(), ())],
)
def test_fields_that_are_read(function, fields):
    assert fields_read(function, "process_element", record_type(Sale)) == fields


class Keeps(Total):
    def process_element(self, value, ctx):
        self.total.update(value)


class Yields(Total):
    def process_element(self, value, ctx):
        yield value


class Sets(Total):
    def process_element(self, value, ctx):
        value.amount = 1
        yield value.shop, 1


class Rebinds(Total):
    def process_element(self, value, ctx):
        value = value._replace(amount=1)
        yield value.shop, 1


class Asks(Total):
    def process_element(self, value, ctx):
        yield str(locals()), value.amount


class Matches(Total):
    def process_element(self, value, ctx):
        match value:
            case (shop, *_):
                yield shop, 1


class Counts(Total):
    def process_element(self, value, ctx):
        yield value.shop, value.count(1)


class Slices(Total):
    def process_element(self, value, ctx):
        yield value[-1], value.amount


class InAFunction(Total):
    def process_element(self, value, ctx):
        return (lambda: [(str(value), value.amount)])()


class Many(Total):
    def process_element(self, *arguments):
        yield str(arguments), 1


@pytest.mark.parametrize(
    "python", [Keeps, Yields, Sets, Rebinds, Asks, Matches, Counts, Slices, InAFunction, Many], ids=lambda p: p.__name__
)
def test_a_record_that_is_used_otherwise_is_read_as_a_whole(python):
    with pytest.raises(UnreadableError):
        fields_read(python(), "process_element", record_type(Sale))


class InAFrame(Total):
    def process_element(self, value, ctx):
        yield str(sys._getframe().f_locals), value.amount


def test_a_record_may_be_seen_without_its_name():
    with pytest.raises(UnreadableError, match="f_locals"):
        fields_read(InAFrame(), "process_element", record_type(Sale))


def test_a_value_is_no_record():
    with pytest.raises(UnreadableError, match="is a value"):
        fields_read(Nothing(), "process_element", record_type(int))


def test_a_method_that_is_replaced_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "replacing.py").write_text(
        "from dagster_unified.api import KeyedProcessFunction\n"
        "class Replaced(KeyedProcessFunction):\n"
        "    def open(self, context):\n        self.process_element = self.other\n"
        "    def process_element(self, value, ctx):\n        yield value.shop, 1\n"
        "    def other(self, value, ctx):\n        yield value.note, 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import replacing

    with pytest.raises(UnreadableError, match="may be set again"):
        fields_read(replacing.Replaced(), "process_element", record_type(Sale))


class Pops(Total):
    def process_element(self, value, ctx):
        while True:
            value.items.pop()


def outcome(rows, function, mode, lowering, made=tuple[str, int]):
    pipeline = Pipeline("p")
    pipeline.from_collection(rows, type(rows[0])).key_by("shop").process(function, made).print()
    try:
        return run_pipeline(pipeline, mode, options={"execution.lowering": lowering}, micro_batch=3, seed=5).only()
    except UnifiedError as error:
        return str(error)


SHOPS = st.sampled_from(["a", "b", "a,b"])
SALES = st.builds(Sale, SHOPS, st.integers(-3, 3), st.none() | st.text(), st.lists(st.integers(0, 9)), st.floats())


@MODES
@pytest.mark.parametrize("function", [Total(), Listed(), ByPlace(), Nothing()], ids=lambda f: type(f).__name__)
@given(st.lists(SALES, min_size=1, max_size=9))
def test_results_and_errors_are_those_of_whole_records(mode, function, rows):
    """Where one raises, the error shows the whole record."""
    assert outcome(rows, function, mode, "AUTO") == outcome(rows, function, mode, "OFF")


@MODES
def test_an_error_shows_what_the_function_has_made_of_its_record(mode):
    rows = [Sale("a", 1, "n", [3, 1], 0.5)]
    assert "items=[]" in outcome(rows, Pops(), mode, "AUTO")
    assert outcome(rows, Pops(), mode, "AUTO") == outcome(rows, Pops(), mode, "OFF")


@MODES
def test_a_method_that_open_replaces_is_given_whole_records(mode, monkeypatch):
    opened = Listed.open
    monkeypatch.setattr(Listed, "open", lambda self, context: (opened(self, context), replaced(self))[0])
    rows = [Sale("a", 1, "n", [3, 1], 0.5)]
    assert outcome(rows, Listed(), mode, "AUTO") == outcome(rows, Listed(), mode, "OFF")


@MODES
def test_only_these_fields_become_values(mode, monkeypatch):
    seen = []
    read = KeyedProcessOperator.read

    def noted(self, batch, layout):
        seen.extend(records := read(self, batch, layout))
        return records

    monkeypatch.setattr(KeyedProcessOperator, "read", noted)
    rows = [Order("a", 1, "first"), Order("a", 2, "second")]
    assert outcome(rows, Listed(), mode, "AUTO") == [("A", 1), ("A", 2)]
    found = [(order.shop, order.amount, str(order.note)) for order in seen]
    assert found == [("a", 1, "(not read)"), ("a", 2, "(not read)")]


def test_explain_says_which():
    pipeline = Pipeline("p")
    sales = pipeline.from_collection([Sale("a", 1, None, [], 0.0)]).key_by("shop")
    sales.process(Total(), tuple[str, int]).print()
    sales.process(Keeps(), tuple[str, int]).print("whole")
    assert pipeline.explain().count("called for each record, of which it reads amount\n") == 1
    assert pipeline.explain().count("called for each record") == 1
