"""Rows that keys leave become files in the task that leaves them, however many they are."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_unified.engine import worker as batch_worker
from dagster_unified.engine.state_tables import worker
from dagster_unified.operators.drivers.batch import Emitted
from dagster_unified.operators.layout import CARRIED_LAYOUT

ROWS = pa.RecordBatch.from_pydict({"key": list(range(10)), "value": [None, *range(9)]})
OTHER = pa.RecordBatch.from_pydict({"n": [1]})


@pytest.mark.parametrize(("most", "files"), [(10_000, 1), (20, 3), (1, 5)])
def test_rows_are_in_files_of_a_bounded_size_and_other_outputs_pass(tmp_path, monkeypatch, most, files):
    monkeypatch.setattr(batch_worker, "FILE_ROWS", most)
    emitted = [Emitted(1, ROWS), Emitted(0, OTHER), *[Emitted(1, ROWS)] * 4]
    made = list(batch_worker.in_files(emitted, 1))
    assert [one.batch for one in made if one.output == 0] == [OTHER]
    rows = [one.batch for one in made if one.output == 1]
    assert {batch.schema for batch in rows} == {CARRIED_LAYOUT.schema}
    (*written,) = worker.files_left(str(tmp_path), rows)
    found = {row["name"]: row["rows"] for batch in written for row in batch.to_pylist()}
    assert len(found) == files
    assert sum(found.values()) == 50
    assert {name: pq.read_metadata(tmp_path / name).num_rows for name in found} == found
    read = pa.concat_tables([pq.read_table(tmp_path / name) for name in sorted(found)])
    assert sorted(read["key"].to_pylist()) == sorted(list(range(10)) * 5)
