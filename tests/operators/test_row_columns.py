"""Rows that state keeps as Arrow streams, as columns of a savepoint: lists of records, whose fields may change."""

from io import BytesIO
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_unified.api import ArrowListStateDescriptor, ListStateDescriptor
from dagster_unified.errors import StateError
from dagster_unified.operators.arrow_functions import TableDescriptor
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.operators.state import arrow_list, chunks, table
from dagster_unified.operators.state.arrow_list import ArrowRows
from dagster_unified.operators.state.pages import Content
from dagster_unified.operators.state.table import KeyShape, StateTable
from dagster_unified.records import record_type


class Sale(NamedTuple):
    item: str
    amount: int | None
    tags: list[str]


class Noted(NamedTuple):
    """The next version of a sale."""

    item: str
    amount: float | None
    tags: list[str]
    note: str = "none"


class Required(NamedTuple):
    item: str
    amount: int


class Text(NamedTuple):
    item: str
    amount: str


SALES = [Sale("tea", 3, ["hot"]), Sale("ice", None, [])]


def layout(kind, timestamped=False):
    return StreamLayout(record_type(kind), timestamped)


def stream(*sales):
    return ArrowRows.encode(pa.Table.from_batches([record_type(Sale).to_batch(sales)]))


def read(kind, streams):
    rows = ArrowRows("state 'rows'", layout(kind))
    return [row for data in streams for row in rows.read(data).to_pylist()]


def state_table(descriptor):
    return StateTable("p: operator 'o'", KeyShape(("key",), str), int, {"rows": descriptor}, {})


def through_parquet(batch):
    """A batch as Parquet has it: any value may be null, and lists have other names for their elements."""
    file = BytesIO()
    pq.write_table(pa.Table.from_batches([batch]), file, store_schema=False)
    file.seek(0)
    return pq.read_table(file).combine_chunks().to_batches()[0]


def stored(**keys):
    """What a savepoint has of some keys' streams of sales."""
    held = Content({key: {} if streams is None else {"rows": streams} for key, streams in keys.items()})
    held.event_timers = [(1, key, 0) for key in keys]
    return through_parquet(state_table(ArrowListStateDescriptor("rows", Sale)).rows(held))


def test_rows_are_a_list_of_records_in_a_savepoint():
    rows = stored(a=[stream(*SALES), stream(SALES[0])], b=None, c=[])
    sale = {"item": "tea", "amount": 3, "tags": ["hot"]}
    assert dict(zip(rows["key"].to_pylist(), rows["rows"].to_pylist(), strict=True)) == {
        "a": [sale, {"item": "ice", "amount": None, "tags": []}, sale],
        "b": None,
        "c": [],
    }


@pytest.mark.parametrize("kind", [Sale, Noted])
def test_rows_are_what_they_were_or_those_of_the_next_version(kind):
    found = state_table(ArrowListStateDescriptor("rows", kind))
    batch = stored(a=[stream(*SALES)], b=None, c=[stream(SALES[1])])
    found.check(batch.schema)
    for rows in (batch, batch.slice(1)):
        keys = {key: read(kind, state["rows"]) for key, state in found.content(rows).keys.items()}
        expected = [kind(*sale)._asdict() for sale in SALES]
        assert keys == {
            key: own for key, own in (("a", expected), ("c", expected[1:])) if key in rows["key"].to_pylist()
        }


def test_a_list_of_records_and_one_of_arrow_batches_become_each_other():
    one, other = state_table(ListStateDescriptor("rows", Sale)), state_table(ArrowListStateDescriptor("rows", Sale))
    one.check(other.schema)
    other.check(one.schema)
    assert one.content(stored(a=[stream(*SALES)])).keys == {"a": {"rows": SALES}}
    batch = through_parquet(one.rows(Content({"a": {"rows": SALES}})))
    assert read(Sale, other.content(batch).keys["a"]["rows"]) == [sale._asdict() for sale in SALES]


def test_a_type_that_the_rows_do_not_become_is_an_error_before_any_is_read():
    says = (
        r"p: operator 'o': state 'rows' is declared Text, and has rows of item: string, amount: int64, tags: .*; fields"
        " may be added with a default"
    )
    with pytest.raises(StateError, match=says):
        state_table(ArrowListStateDescriptor("rows", Text)).check(stored(a=[]).schema)
    says = (
        "state 'rows' is declared with rows of Sale, and the savepoint has list<element: int64 not null>; keep the type"
    )
    numbers = state_table(ListStateDescriptor("rows", int)).rows(Content({"a": {"rows": [1]}}))
    with pytest.raises(StateError, match=says):
        state_table(ArrowListStateDescriptor("rows", Sale)).check(through_parquet(numbers).schema)
    required = state_table(ArrowListStateDescriptor("rows", Required))
    with pytest.raises(StateError, match="field 'amount' may not be None any more, and is None 1 times; fill it in"):
        required.content(stored(a=[stream(*SALES)]))


def test_many_rows_become_several_streams_that_subtasks_share(monkeypatch):
    monkeypatch.setattr(chunks, "SMALL", 500)
    rows = stored(a=[stream(*SALES * 500)])
    streams = state_table(ArrowListStateDescriptor("rows", Sale)).content(rows).keys["a"]["rows"]
    assert len(streams) > 10
    assert read(Sale, streams) == [sale._asdict() for sale in SALES * 500]


def test_rows_that_are_too_large_for_a_savepoint_are_an_error_that_names_the_state(monkeypatch):
    found = state_table(ArrowListStateDescriptor("rows", Sale))
    for module in (arrow_list, table):
        monkeypatch.setattr(module, "LARGEST", 10_000)
        with pytest.raises(StateError, match="state 'rows' of key 'a' is too large for a savepoint"):
            list(found.batches(Content({"a": {"rows": [stream(*SALES * 1_000)]}})))
        monkeypatch.undo()


def broadcast_table(kind, timestamped=False):
    broadcast = {"table": TableDescriptor(layout(kind, timestamped))}
    return StateTable("p: operator 'o'", KeyShape(("key",), str), int, {}, broadcast)


def test_a_broadcast_table_is_a_map_of_lists_of_records():
    maps = {"table": {0: stream(*SALES), 1: stream(SALES[0])}}
    row = through_parquet(broadcast_table(Sale).broadcast_row(maps))
    for kind, timestamped in ((Sale, False), (Noted, False), (Sale, True)):
        found = broadcast_table(kind, timestamped)
        found.check(row.schema)
        table = found.broadcast_of(row)["table"]
        rows = [ArrowRows("table", layout(kind, timestamped)).read(table[number]).to_pylist() for number in (0, 1)]
        times = {"__ts": None} if timestamped else {}
        first, second = [kind(*sale)._asdict() | times for sale in SALES]
        assert rows == [[first, second], [first]]
    with pytest.raises(StateError, match="broadcast state 'table' is declared Text, and has rows of item"):
        broadcast_table(Text).check(row.schema)
