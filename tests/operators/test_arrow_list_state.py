"""Arrow list state: rows go in as batches, come out as a table, and are kept compact."""

from collections import defaultdict
from datetime import timedelta
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dagster_unified.api import (
    MAX_TIMESTAMP,
    ArrowListStateDescriptor,
    KeyedBatchFunction,
    KeyedProcessFunction,
    Pipeline,
    StateTtlConfig,
)
from dagster_unified.errors import PipelineError, RecordTypeError, StateError
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.operators.state import chunks
from dagster_unified.operators.state.arrow_list import ArrowRows
from dagster_unified.records import record_type
from dagster_unified.testing import OneInputHarness
from tests.operators.support import Memory, Row, process, ran
from tests.support import MODES, results


class Kept(NamedTuple):
    at: int
    amount: int


class Rows(KeyedBatchFunction[str]):
    """All rows of a key, at its end."""

    def open(self, runtime_context):
        self.rows = runtime_context.get_state(ArrowListStateDescriptor("rows", Kept))

    def process_batch(self, batch, ctx):
        self.rows.add(batch)
        if batch.num_rows and pc.min(batch["amount"]).as_py() < 0:
            self.rows.update(self.rows.get().filter(pc.field("amount") >= 0))
        ctx.timer_service().register_event_time_timer(MAX_TIMESTAMP)

    def on_timer(self, timestamp, ctx):
        table = self.rows.get().sort_by("amount")
        self.rows.clear()
        assert self.rows.get().num_rows == 0
        return pa.RecordBatch.from_pydict({"f0": [ctx.get_current_key()], "f1": [table["amount"].to_pylist()]})


@MODES
@pytest.mark.parametrize("micro_batch", [1, 3, None])
def test_rows_of_a_key_are_read_as_one_table(mode, micro_batch):
    rows = [Row("a", at, amount) for at, amount in enumerate([5, 3, -1, 4])] + [Row("b", 9, 7)]
    made = Pipeline("p").from_collection(rows, Row).key_by("key").map_batches(Rows(), tuple[str, list[int]])
    found = results(made, mode, micro_batch=micro_batch)
    assert sorted(found) == [("a", [3, 4, 5]), ("b", [7])]


class OneByOne(KeyedProcessFunction):
    """Adds a row for each record."""

    kept: type = Kept

    def open(self, runtime_context):
        self.rows = runtime_context.get_state(ArrowListStateDescriptor("rows", self.kept))

    def process_element(self, value: Row, ctx) -> list[str]:
        self.rows.add(pa.RecordBatch.from_pylist([{"at": value.at, "amount": value.amount}]))
        return [f"{value.key} {self.rows.get()['amount'].to_pylist()}"]


def rows_of(amounts):
    return [Row("a", at, amount) for at, amount in enumerate(amounts)]


def test_rows_outlive_a_micro_batch():
    stores = defaultdict(Memory)
    assert ran(process(OneByOne()), [(rows_of([5]), None), (rows_of([7]), None)], stores=stores) == [
        "a [5]",
        "a [5, 7]",
    ]
    assert ran(process(OneByOne()), [(rows_of([1]), None)], stores=stores) == ["a [5, 7, 1]"]


def test_few_rows_are_kept_together_and_many_in_pages_of_their_own(monkeypatch):
    monkeypatch.setattr(chunks, "SMALL", 2000)
    monkeypatch.setattr(chunks, "BYTES", 4000)
    stores = defaultdict(Memory)
    ran(process(OneByOne()), [(rows_of([1] * 20), None)], groups=1, stores=stores)
    assert (len(stores[0].pages), len(stores[0].index) < 2000) == (0, True)
    ran(process(OneByOne()), [(rows_of([1] * 800), None)], groups=1, stores=stores)
    before = dict(stores[0].pages)
    assert len(before) > 4
    found = ran(process(OneByOne()), [(rows_of([2]), None)], groups=1, stores=stores)
    assert found == [f"a {[1] * 820 + [2]}"]
    written = [number for number, data in stores[0].pages.items() if before.get(number) != data]
    assert len(written) <= 1


def test_what_is_no_such_rows_is_an_error_that_names_the_state():
    harness = OneInputHarness(lambda stream: stream.key_by("key").map_batches(Adding(), Row), Row)
    for amount, kind, words in (
        (
            0,
            StateError,
            r"state 'rows' holds rows of Kept\(at: int64, amount: int64\), and was given a list; give it a",
        ),
        (1, StateError, r"and the given rows have no column 'amount'; they have key, at"),
        (2, RecordTypeError, r"state 'rows': column 'amount' of the given rows is a string"),
        (3, RecordTypeError, r"state 'rows': field 'amount' is None in the given rows"),
    ):
        with pytest.raises(kind, match=words):
            harness.process_element(Row("a", 0, amount))


class Adding(KeyedBatchFunction[str]):
    def open(self, runtime_context):
        self.rows = runtime_context.get_state(ArrowListStateDescriptor("rows", Kept))

    def process_batch(self, batch, ctx):
        wrong = [
            batch.to_pylist(),
            batch.drop_columns(["amount"]),
            batch.set_column(2, "amount", pa.array(["x"])),
            batch.set_column(2, "amount", pa.nulls(1, pa.int64())),
        ]
        self.rows.add(wrong[batch["amount"][0].as_py()])


class Noted(NamedTuple):
    note: str = "none"
    amount: float = 0.0
    tags: list[str] | None = None


class Text(NamedTuple):
    at: int
    amount: str


class Changed(OneByOne):
    """The next version of the function: it drops a field, adds two, and widens one."""

    kept = Noted

    def process_element(self, value, ctx):
        self.rows.add(pa.RecordBatch.from_pylist([{"note": "new", "amount": 0.5, "tags": [value.key]}], NOTED))
        return [str(self.rows.get().to_pylist())]


NOTED = pa.schema([("note", pa.string()), ("amount", pa.float64()), ("tags", pa.list_(pa.string()))])
BEFORE, AFTER = {"note": "none", "amount": 5.0, "tags": None}, {"note": "new", "amount": 0.5, "tags": ["a"]}


@pytest.mark.parametrize("small", [0, 1 << 16], ids=["each in its own batch", "together"])
def test_rows_become_those_of_a_type_whose_fields_have_changed(monkeypatch, small):
    monkeypatch.setattr(chunks, "SMALL", small)
    stores = defaultdict(Memory)
    ran(process(OneByOne()), [(rows_of([5]), None)], stores=stores)
    assert ran(process(Changed()), [(rows_of([7]), None)], stores=stores) == [str([BEFORE, AFTER])]
    assert ran(process(Changed()), [(rows_of([7]), None)], stores=stores) == [str([BEFORE, AFTER, AFTER])]


@pytest.mark.parametrize("amounts", [[5], [1] * 2000], ids=["few", "many"])
def test_rows_of_a_type_that_they_cannot_become_are_an_error_before_any_is_added(monkeypatch, amounts):
    class OfText(OneByOne):
        kept = Text

        def process_element(self, value, ctx):
            self.rows.add(pa.RecordBatch.from_pylist([{"at": value.at, "amount": "x"}]))
            return []

    monkeypatch.setattr(chunks, "SMALL", 500)
    monkeypatch.setattr(chunks, "BYTES", 1000)
    stores = defaultdict(Memory)
    ran(process(AtOnce()), [(rows_of(amounts), None)], stores=stores)
    says = (
        r"state 'rows' is declared Text, and has rows of at: int64, amount: int64; fields may be added with a default,"
        " dropped, widened or made optional; otherwise keep the type as it was"
    )
    with pytest.raises(StateError, match=says):
        ran(process(OfText()), [(rows_of([5]), None)], stores=stores)


def test_a_field_that_must_not_be_none_any_more_is_an_error_where_it_is():
    kept = ArrowRows("state 'rows'", StreamLayout(record_type(Kept)))
    loose = pa.schema([pa.field("at", pa.int64()), pa.field("amount", pa.int64())])
    fits, misfits = (ArrowRows.encode(pa.table({"at": [1], "amount": [n]}, loose)) for n in (2, None))
    assert kept.read(fits).to_pylist() == [{"at": 1, "amount": 2}]
    with pytest.raises(StateError, match="state 'rows': field 'amount' may not be None any more, and is None 1 times"):
        kept.read(misfits)


def test_two_states_of_one_name_have_rows_of_one_type():
    class Both(OneByOne):
        def open(self, runtime_context):
            super().open(runtime_context)
            runtime_context.get_state(ArrowListStateDescriptor("rows", Text))

    says = "state 'rows' is declared as arrow list state of Kept and as arrow list state of Text; give one"
    with pytest.raises(PipelineError, match=says):
        OneInputHarness(lambda stream: stream.key_by("key").process(Both()), Row)


class AtOnce(OneByOne):
    """Keeps the amounts of a micro-batch as one batch of rows."""

    def open(self, runtime_context):
        super().open(runtime_context)
        self.waiting: list[Row] = []

    def process_element(self, value, ctx):
        self.waiting.append(value)
        if len(self.waiting) in (1, 2000):
            self.rows.update(pa.RecordBatch.from_pylist([{"at": r.at, "amount": r.amount} for r in self.waiting]))
        return []


def test_one_batch_that_is_large_leaves_the_page_of_its_key(monkeypatch):
    monkeypatch.setattr(chunks, "SMALL", 500)
    monkeypatch.setattr(chunks, "BYTES", 1000)
    stores = defaultdict(Memory)
    ran(process(AtOnce()), [(rows_of([1] * 2000), None)], groups=1, stores=stores)
    assert (len(stores[0].pages), len(stores[0].index) < 2000) == (1, True)
    assert ran(process(OneByOne()), [(rows_of([2]), None)], groups=1, stores=stores) == [f"a {[1] * 2000 + [2]}"]
    ran(process(AtOnce()), [(rows_of([3]), None)], groups=1, stores=stores)
    assert len(stores[0].pages) == 0


def test_it_has_no_time_to_live():
    with pytest.raises(PipelineError, match="arrow list state 'rows' has no time to live; clear it in a timer"):
        ArrowListStateDescriptor("rows", Kept).enable_time_to_live(StateTtlConfig(timedelta(1)))


def test_explain_shows_it():
    pipeline = Pipeline("p")
    pipeline.from_collection(rows_of([1]), Row).key_by("key").process(OneByOne()).print()
    assert "; arrow list state 'rows'" in pipeline.explain()
