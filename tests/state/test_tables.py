"""The files of a savepoint's tables: how they are cut into row groups, and read in pieces."""

from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from upath import UPath

from dagster_unified.engine.state_tables.savepoints import write_table
from dagster_unified.errors import StateError
from dagster_unified.state import Savepoint, tables
from dagster_unified.state import manifest as manifests

ROWS = pa.table({"shop": [f"shop {number}" for number in range(10)], "amount": range(10)})
SCHEMA = pa.schema([("shop", pa.string()), ("amount", pa.int64())])


def written(tmp_path, monkeypatch, rows_of_a_group=3, rows=ROWS):
    """A savepoint whose file has row groups of a few rows."""
    monkeypatch.setattr(tables, "ROWS", rows_of_a_group)
    Savepoint.new("shops").with_state("totals", rows, key="shop").write(f"{tmp_path}/one")
    folder, manifest = manifests.read(f"{tmp_path}/one")
    return folder, manifest.operator("totals")


def test_each_row_is_in_one_of_the_pieces_that_are_read(tmp_path, monkeypatch):
    folder, state = written(tmp_path, monkeypatch)
    assert [list(one.row_groups) for one in tables.splits(folder, state)] == [[0, 1, 2, 3]]
    monkeypatch.setattr(tables, "SPLIT_BYTES", 1)
    pieces = tables.splits(folder, state)
    assert [list(one.row_groups) for one in pieces] == [[0], [1], [2], [3]]
    read = [[row["amount"] for b in tables.read_split(folder, state, one) for row in b.to_pylist()] for one in pieces]
    assert read == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_large_rows_make_small_row_groups_and_are_read_few_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ROWS_BYTES", 50)
    batches = ROWS.cast(SCHEMA).to_batches(max_chunksize=5)
    assert tables.write_file(batches, SCHEMA, UPath(tmp_path / "one.parquet")) == 10
    assert pq.ParquetFile(tmp_path / "one.parquet").num_row_groups == 2


def test_rows_are_read_few_at_a_time_where_they_are_large_in_memory(tmp_path, monkeypatch):
    alike = pa.table({"shop": [letter * 10_000 for letter in "abcdefghij"], "amount": range(10)})
    folder, state = written(tmp_path, monkeypatch, rows_of_a_group=100, rows=alike)
    assert state.bytes < 10_000
    monkeypatch.setattr(tables, "BYTES_READ_TOGETHER", 25_000)
    assert [batch.num_rows for batch in tables.read_batches(folder, state)] == [2, 2, 2, 2, 2]


def test_no_rows_make_no_file(tmp_path):
    assert tables.write_file(iter(()), SCHEMA, UPath(tmp_path / "one.parquet")) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_an_error_that_names_it_where_a_piece_is_read(tmp_path, monkeypatch):
    folder, state = written(tmp_path, monkeypatch, rows_of_a_group=100)
    pieces = tables.splits(folder, state)
    (file,) = (tmp_path / "one").rglob("*.parquet")
    data = bytearray(file.read_bytes())
    data[data.index(b"shop 0")] ^= 1
    file.write_bytes(data)
    with pytest.raises(StateError, match=rf"^{file} is damaged: "):
        list(tables.read_split(folder, state, pieces[0]))
    file.write_bytes(data[:-10])
    with pytest.raises(StateError, match=rf"^{file} is damaged: "):
        tables.splits(folder, state)


class Workers:
    """An operator's table whose tasks have written files, one of them twice, and say so of one attempt each."""

    operator = SimpleNamespace(uid="totals", node=SimpleNamespace(name="totals"), subtasks=None)
    schema = SCHEMA

    def __init__(self, reported):
        self.reported = reported

    def files(self, folder):
        for name in ("part-00000-1.parquet", "part-00000-2.parquet", "part-00001-3.parquet"):
            tables.write_file(ROWS.cast(SCHEMA).to_batches(), SCHEMA, folder / name)
        return SimpleNamespace(collect=lambda: [{"name": name, "rows": 10} for name in self.reported])


def test_of_a_task_that_ran_twice_one_file_is_taken(tmp_path):
    reported = ["part-00000-2.parquet", "part-00001-3.parquet"]
    workers = Workers(reported)
    found = write_table(workers, workers.files, UPath(tmp_path), "operators-1")
    assert (found.rows, [file.path.rpartition("/")[2] for file in found.files]) == (20, reported)
    assert sorted(file.name for file in tmp_path.rglob("*.parquet")) == reported


def test_a_file_that_only_a_worker_sees_is_an_error(tmp_path):
    workers = Workers(["part-9.parquet"])
    with pytest.raises(StateError, match=r"part-9.parquet was written by a worker, and is not there; give a path that"):
        write_table(workers, workers.files, UPath(tmp_path), "operators-1")
