"""`CheckpointListener` in Spark's workers: before a source's first exchange, with keyed state, and behind it."""

from collections.abc import Iterable
from typing import NamedTuple

import pytest

from dagster_unified.api import CheckpointListener, KeyedProcessFunction, MapFunction, Pipeline, ValueStateDescriptor
from dagster_unified.connectors import DeltaSink, ParquetSource
from dagster_unified.engine.streaming.job import Start, StreamingJob
from tests.support import arrive, committed, table_rows


class Seen(NamedTuple):
    value: int
    ahead: int
    keyed: int
    behind: int


class Value(NamedTuple):
    value: int


class Heard(CheckpointListener):
    def open(self, runtime_context):
        self.epoch = -1

    def notify_checkpoint_complete(self, epoch):
        self.epoch = epoch


class Ahead(Heard, MapFunction):
    def map(self, value: Value) -> Seen:
        return Seen(value.value, self.epoch, 0, 0)


class Keyed(KeyedProcessFunction, CheckpointListener):
    def open(self, runtime_context):
        self.epoch = -1
        self.count = runtime_context.get_state(ValueStateDescriptor("count", int))

    def notify_checkpoint_complete(self, epoch):
        self.epoch = epoch

    def process_element(self, value, ctx) -> Iterable[Seen]:
        self.count.update((self.count.value() or 0) + 1)
        yield value._replace(keyed=self.epoch)


class Behind(Heard, MapFunction):
    def map(self, value: Seen) -> Seen:
        return value._replace(behind=self.epoch)


@pytest.fixture
def files(tmp_path):
    def write(first, last):
        return arrive(tmp_path / "in", *[[Value(number)] for number in range(first, last + 1)], first=first)

    return write


def listening(source, sink):
    pipeline = Pipeline("listening")
    values = pipeline.from_source(ParquetSource(source, Value, max_files_per_trigger=1))
    values.map(Ahead()).key_by("value").process(Keyed()).map(Behind()).sink_to(sink)
    return pipeline


def test_every_function_hears_of_the_epoch_before_that_of_its_records(run_streaming, files, tmp_path):
    pipeline = listening(files(0, 2), DeltaSink(str(tmp_path / "out"), mode="append"))
    assert run_streaming(pipeline) == "finished"
    assert table_rows(tmp_path / "out") == [(0, -1, -1, -1), (1, 0, 0, 0), (2, 1, 1, 1)]


class Noting(MapFunction, CheckpointListener):
    """Leaves a file for each epoch that it hears of."""

    def __init__(self, folder):
        self.folder = folder

    def notify_checkpoint_complete(self, epoch):
        (self.folder / str(epoch)).touch()

    def map(self, value: Value) -> Value:
        return value


@pytest.fixture
def noting(spark, files, tmp_path):
    """Runs a job over the files until it has read some, and gives the epochs of which its functions have heard."""
    (tmp_path / "heard").mkdir()

    def run(first, last, monitor):
        pipeline, epochs = Pipeline("noting"), []
        source = ParquetSource(files(first, last), Value, max_files_per_trigger=1, monitor=monitor)
        pipeline.from_source(source).map(Noting(tmp_path / "heard")).print()
        options = {"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": str(tmp_path / "checkpoints")}
        job = StreamingJob(pipeline.plan(options), spark, Start("job", patience=0.5), committed(epochs))
        enough = lambda: monitor and sum(epoch.rows_in for epoch in epochs) > last - first  # noqa: E731
        assert job.run(enough, 0.02) == ("stopped" if monitor else "finished")
        return sorted(int(path.name) for path in (tmp_path / "heard").iterdir())

    return run


def test_of_the_last_epoch_of_a_job_that_is_stopped_only_the_next_job_hears(noting):
    assert noting(0, 1, monitor=True) == [0]
    assert noting(2, 2, monitor=True) == [0, 1]


def test_of_the_last_epoch_of_a_job_whose_input_has_ended_an_instance_hears(noting):
    assert noting(0, 1, monitor=False) == [0, 1]


def test_in_batch_no_function_hears_of_anything(run_on_spark, files, tmp_path):
    run_on_spark(listening(files(0, 2), DeltaSink(str(tmp_path / "out"), mode="append")))
    assert table_rows(tmp_path / "out") == [(n, -1, -1, -1) for n in range(3)]
