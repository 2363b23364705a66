"""Records in records, and lists in them: which functions are read, and that they make the same on columns."""

from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CollectionSource, PrintSink
from dagster_unified.errors import UnifiedError
from dagster_unified.graph.lowering.inlining import inlined_filter, inlined_flat_map, inlined_map
from dagster_unified.graph.lowering.source import UnreadableError
from dagster_unified.records import record_type
from dagster_unified.testing import run_pipeline
from tests.support import MODES


class Address(NamedTuple):
    city: str
    number: int | None


@dataclass
class Item:
    name: str
    price: int
    address: Address | None


class Tag(NamedTuple):
    name: str
    n: int | None


class Score(NamedTuple):
    """Its fields have names that stand for others in a function's text."""

    F0: int
    v0: int


class Checked(NamedTuple):
    n: int

    @property
    def twice(self):
        return self.n * 2


class Order(NamedTuple):
    number: int
    address: Address
    billing: Address | None
    items: list[Item]
    tags: list[Tag]
    texts: list[str]
    counts: list[int] | None
    times: list[datetime]
    checked: Checked
    score: Score


class Sold(NamedTuple):
    order: int
    name: str
    price: int


def city(o: Order) -> str:
    return o.address.city.upper()


def house(o: Order) -> int:
    return -1 if o.address.number is None else o.address.number + 1


def billed(o: Order) -> str:
    return o.billing.city


def address(o: Order) -> Address:
    return o.address


def first_tag(o: Order) -> Tag:
    return o.tags[0]


def score(o: Order) -> int:
    return o.score.F0


def size(o: Order) -> int:
    return len(o.items) + len(o.counts)


def sold(o: Order):
    for item in o.items:
        if item.price > 10:
            yield Sold(o.number, item.name, item.price * 2)


def sold_listed(o: Order) -> list[Sold]:
    return [Sold(o.number, item.name.lower(), item.price) for item in o.items if item.address is not None]


def tags(o: Order):
    yield from o.tags


def some_tags(o: Order):
    for tag in o.tags:
        if tag.name:
            yield tag


def cities(o: Order):
    for item in o.items:
        yield item.address.city


def texts(o: Order) -> list[str]:
    return o.texts


def counts(o: Order):
    for count in o.counts:
        yield 10 // count


def years(o: Order):
    for time in o.times:
        yield time.year


MAPS = [(city, str), (house, int), (billed, str), (address, Address), (first_tag, Tag), (size, int), (score, int)]
FLAT_MAPS = [
    *[(sold, Sold), (sold_listed, Sold), (tags, Tag), (some_tags, Tag), (cities, str), (texts, str)],
    *[(counts, int), (years, int)],
]

ADDRESSES = st.builds(Address, st.sampled_from(["a", "ß", ""]), st.none() | st.integers(-3, 3))
ITEMS = st.builds(Item, st.sampled_from(["X", "y"]), st.integers(-5, 30), st.none() | ADDRESSES)
ORDERS = st.builds(
    Order,
    st.integers(0, 9),
    ADDRESSES,
    st.none() | ADDRESSES,
    st.lists(ITEMS, max_size=3),
    st.lists(st.builds(Tag, st.sampled_from(["t", ""]), st.none() | st.integers(0, 1)), max_size=2),
    st.lists(st.sampled_from(["t", ""]), max_size=2),
    st.none() | st.lists(st.integers(-2, 2), max_size=2),
    st.lists(st.datetimes(datetime(1990, 1, 1), datetime(2030, 1, 1)), max_size=2),
    st.builds(Checked, st.integers(0, 3)),
    st.builds(Score, st.integers(0, 3), st.integers(4, 7)),
)


def outcome(build, orders, mode, lowering):
    pipeline = Pipeline("orders")
    build(pipeline.from_source(CollectionSource(orders, Order, "orders"))).sink_to(PrintSink(name="out"))
    try:
        return run_pipeline(pipeline, mode, options={"execution.lowering": lowering}).sinks["out"]
    except UnifiedError as error:
        return type(error), str(error)


CASES = [
    *(("map", inlined_map, function, made) for function, made in MAPS),
    *(("flat_map", inlined_flat_map, function, made) for function, made in FLAT_MAPS),
]


@pytest.mark.parametrize(("method", "inlined", "function", "made"), CASES, ids=[case[2].__name__ for case in CASES])
@given(orders=st.lists(ORDERS, max_size=4))
def test_a_function_makes_the_same(method, inlined, function, made, orders):
    def build(stream):
        return getattr(stream, method)(function, made)

    assert inlined(function, record_type(Order), record_type(made))
    on, off = (outcome(build, orders, "BATCH", lowering) for lowering in ("AUTO", "OFF"))
    assert on == off


@MODES
def test_both_modes_run_them(mode):
    rest = Checked(1), Score(1, 2)
    items = [Item("X", 11, None), Item("y", 3, None)]
    orders = [
        Order(1, Address("a", 1), None, items, [], [], None, [], *rest),
        Order(2, Address("b", None), None, [], [], [], None, [], *rest),
    ]
    assert outcome(lambda s: s.flat_map(sold, Sold), orders, mode, "AUTO") == [Sold(1, "X", 22)]


def test_what_is_no_field_and_whole_records_are_not_read():
    for function in (lambda o: o.checked.twice > 1, lambda o: o.address == o.billing, lambda o: o.address):
        with pytest.raises(UnreadableError):
            inlined_filter(function, record_type(Order))
