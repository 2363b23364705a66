"""What a worker knows of the epoch that it works on, and the files in which it leaves rows of keys."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_unified.engine import worker as batch_worker
from dagster_unified.engine.state_tables import worker
from dagster_unified.engine.worker import committed_epoch, this_epoch
from dagster_unified.operators.drivers.batch import Emitted
from dagster_unified.operators.layout import CARRIED_LAYOUT


@pytest.mark.parametrize(
    ("logged", "epoch", "committed"), [([], -1, None), (["0"], 0, None), (["0", "9", ".10.crc", "10"], 10, 9)]
)
def test_where_spark_does_not_tell_the_epoch_it_is_the_last_of_the_querys_log(tmp_path, logged, epoch, committed):
    for name in logged:
        (tmp_path / name).touch()
    assert (this_epoch(str(tmp_path)), committed_epoch(str(tmp_path))) == (epoch, committed)


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
