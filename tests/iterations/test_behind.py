"""State behind an iteration: in STREAMING it is in a query of its own, and the result is that of BATCH."""

from threading import Event, Thread

import pyarrow.parquet as pq
import pytest

from dagster_unified.api import FileSink
from dagster_unified.engine.streaming.relays import Handed, RelayLog
from dagster_unified.testing import run_pipeline
from tests.iterations.behind import PIPELINES, built, together


def in_harness(name, bounded, mode, **options):
    pipeline, found, passed = built(name, bounded)
    found.print("found")
    passed.print("passed")
    result = run_pipeline(pipeline, mode, **options)
    assert not result.metrics.counters.get("late records")
    return {sink: sorted(records) for sink, records in result.sinks.items()}


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("micro_batch", [1, 4, None])
def test_state_behind_an_iteration_has_in_streaming_what_it_has_in_batch(name, bounded, micro_batch):
    expected = in_harness(name, bounded, "BATCH")
    assert expected["found"]
    assert in_harness(name, bounded, "STREAMING", micro_batch=micro_batch) == expected


def test_a_log_is_listed_while_files_of_it_are_deleted(tmp_path):
    log = RelayLog(str(tmp_path))
    for epoch in (3, 4):
        log.commit(epoch, Handed([]))
    stop = Event()

    def come_and_go():
        while not stop.is_set():
            for number in range(20):
                (tmp_path / f"handed-3-{number}").touch()
            for number in range(20):
                (tmp_path / f"handed-3-{number}").unlink()

    other = Thread(target=come_and_go)
    other.start()
    try:
        assert all(log.epochs() == [3, 4] for _ in range(3000))
    finally:
        stop.set()
        other.join()
    log.forget(before=9)
    assert log.epochs() == [4]


def written(folder):
    return sorted(tuple(row.values()) for row in pq.read_table(folder).to_pylist())


@pytest.mark.parametrize(("bounded", "names"), [(True, ["beside", "between"]), (False, ["joined", "between"])])
def test_state_behind_an_iteration_on_spark(run_streaming, tmp_path, bounded, names):
    pipeline, found = together(names, bounded)
    for name, stream in found.items():
        stream.sink_to(FileSink(str(tmp_path / name), name=name))
    assert run_streaming(pipeline, {"parallelism.default": 2}) == "finished"
    assert {name: written(tmp_path / name) for name in found} == {
        name: in_harness(name, bounded, "BATCH")["found"] for name in found
    }
