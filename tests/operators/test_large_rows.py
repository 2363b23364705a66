"""State of one key that is larger than Arrow and Spark can hold; here with a limit of a few kilobytes."""

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_unified.api import (
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    Pipeline,
    ValueStateDescriptor,
)
from dagster_unified.engine.state_tables import worker
from dagster_unified.errors import StateError
from dagster_unified.graph.execution_graph import keyed_program
from dagster_unified.operators.drivers import batch, group
from dagster_unified.operators.drivers.batch import rows_of
from dagster_unified.operators.state import table
from dagster_unified.operators.state.table import KeyShape, StateTable
from dagster_unified.testing import OneInputHarness
from dagster_unified.testing.operators import MemoryStore


class Note(NamedTuple):
    key: str
    text: str


class Noted(KeyedProcessFunction):
    """Keeps the notes of a key, and a timer for each."""

    def open(self, context):
        self.last = context.get_state(ValueStateDescriptor("last", str))
        self.notes = context.get_list_state(ListStateDescriptor("notes", str))

    def process_element(self, value: Note, ctx) -> Iterable[str]:
        self.last.update(value.text)
        self.notes.add(value.text)
        ctx.timer_service().register_event_time_timer(len(value.text))
        return []


def payload():
    pipeline = Pipeline("notes")
    pipeline.from_collection([], Note, "items").key_by("key").process(Noted()).name("noted").print()
    plan = pipeline.plan({"execution.runtime-mode": "STREAMING"})
    (node,) = [node for node in plan.graph.nodes if node.runs_by_key]
    return worker.payload_of(keyed_program(plan, node))


def pages(notes):
    """The pages of a key group whose operator has processed some notes."""
    harness = OneInputHarness(lambda items: items.key_by("key").process(Noted()), Note)
    for note in notes:
        harness.process_element(note)
    (rows,) = rows_of(0, MemoryStore(harness.snapshot()))
    return rows


def saved(notes, folder):
    """The rows of the table that a worker writes of these notes."""
    shipped = payload()
    (described,) = worker.describe([shipped], [None], [pa.RecordBatch.from_pydict({"id": [0]})])
    schema = pa.ipc.read_schema(pa.py_buffer(described.column("schema")[0].as_py()))
    folder.mkdir()
    (written,) = worker.rows_to_file(partial(worker.to_rows, shipped), schema, str(folder), [pages(notes)])
    found = pq.read_table(folder / written.column("name")[0].as_py())
    assert written.column("rows").to_pylist() == [found.num_rows]
    return found


NOTES = [Note(key, letter * 900) for key in "abcdefg" for letter in "xy"]


def test_keys_that_do_not_fit_together_are_written_one_after_another(tmp_path, monkeypatch):
    whole = saved(NOTES, tmp_path / "whole")
    monkeypatch.setattr(table, "LARGEST", 4_000)
    found = saved(NOTES, tmp_path / "in pieces")
    assert found.sort_by("key").to_pylist() == whole.sort_by("key").to_pylist()
    assert found.num_rows == 7


def test_a_key_that_is_too_large_by_itself_is_an_error_that_names_operator_state_and_key(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "LARGEST", 4_000)
    with pytest.raises(StateError) as raised:
        saved([*NOTES, *[Note("e", str(number) * 500) for number in range(9)]], tmp_path / "one")
    assert str(raised.value) == (
        "notes: operator 'noted': state 'notes' of key 'e' is too large for a savepoint, which holds up to 4,000 bytes"
        " of a key; keep less of it, for example with a time to live, or spread what it holds over several keys"
    )


def test_broadcast_state_that_is_too_large_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setattr(table, "LARGEST", 4_000)
    rules = {"rules": MapStateDescriptor("rules", str, str)}
    broadcast = StateTable("p: operator 'o'", KeyShape(("key",), str), int, {}, rules)
    assert broadcast.broadcast_row({"rules": {"a": "x" * 3_000}}).num_rows == 1
    with pytest.raises(StateError, match="p: operator 'o': broadcast state 'rules' is too large for a savepoint"):
        broadcast.broadcast_row({"rules": {"a": "x" * 5_000}})


def test_rows_are_sliced_in_pieces_that_fit_together(tmp_path, monkeypatch):
    rows = saved(NOTES, tmp_path / "saved")

    def sliced(limit):
        monkeypatch.setattr(worker, "SLICED_BYTES", limit)
        slices = pa.Table.from_batches(worker.to_slices(payload(), 2, False, rows.to_batches()))
        pages = pa.Table.from_batches(worker.to_pages(payload(), rows.schema, 0, slices.sort_by("group").to_batches()))
        return pages.select(["group", "page"]).to_pylist(), [len(data) for data in slices.column("rows").to_pylist()]

    whole, sizes = sliced(64 << 20)
    pages, pieces = sliced(4_000)
    assert pages == whole
    assert len(pieces) > len(sizes)
    assert max(pieces) < max(sizes)


def test_a_group_whose_rows_do_not_fit_together_is_restored_in_pieces(tmp_path, monkeypatch):
    notes = [Note(f"{number:03}", letter * 900) for number in range(200) for letter in "xy"]
    rows = saved(notes, tmp_path / "saved")
    monkeypatch.setattr(worker, "SLICED_BYTES", 20_000)

    def restored():
        """The state of each key in the pages of the one group, how many pages and batches of them there are."""
        slices = pa.Table.from_batches(worker.to_slices(payload(), 1, False, rows.to_batches()))
        batches = list(worker.to_pages(payload(), rows.schema, 0, slices.to_batches()))
        (written,) = worker.rows_to_file(partial(worker.to_rows, payload()), rows.schema, str(tmp_path), batches)
        found = pq.read_table(tmp_path / written.column("name")[0].as_py())
        return found.sort_by("key").to_pylist(), sum(batch.num_rows for batch in batches), batches

    whole, few, (_,) = restored()
    assert whole == rows.sort_by("key").to_pylist()
    monkeypatch.setattr(worker, "COMBINED_BYTES", 50_000)
    monkeypatch.setattr(batch, "ROWS_BYTES", 50_000)
    monkeypatch.setattr(group, "LARGE_PAGE", 50_000)
    found, several, batches = restored()
    assert found == whole
    assert several > few
    assert len(batches) > 1
    sizes = [sum(map(len, batch.column("state").to_pylist())) for batch in batches]
    assert max(sizes) <= 50_000 + max(len(data) for batch in batches for data in batch.column("state").to_pylist())

    monkeypatch.setattr(worker, "LARGEST", 30_000)
    said = (
        r"notes: operator 'noted': keys of key group 0 that share a page have [\d,]+ bytes of state, and a page holds"
    )
    with pytest.raises(StateError, match=said):
        restored()
