"""How many rows a sink was given, as it is reported."""

from collections import Counter

import pytest

from dagster_unified.api import CoMapFunction, Pipeline
from dagster_unified.connectors import DeltaSink, FileSink, ForeachSink, PrintSink
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.events import EpochCommitted
from dagster_unified.engine.streaming.job import Start, StreamingJob

SINKS = {
    "print": lambda folder: PrintSink(),
    "delta": lambda folder: DeltaSink(f"{folder}/delta"),
    "upsert": lambda folder: DeltaSink(f"{folder}/upsert", mode="upsert", key="value"),
    "files": lambda folder: FileSink(f"{folder}/files"),
    "foreach": lambda folder: ForeachSink(str, name="calls"),
}


def values(pipeline):
    return pipeline.from_collection(range(30)).rebalance().filter(lambda v: v >= 7).set_parallelism(3)


@pytest.mark.parametrize("sink", SINKS)
def test_in_batch_every_sink_reports_the_rows_that_it_was_given(spark, tmp_path, sink, capsys):
    pipeline = Pipeline("p")
    values(pipeline).sink_to(SINKS[sink](tmp_path))
    planned = pipeline.plan({"execution.runtime-mode": "BATCH"})
    for store in ("store", "again"):  # of the same execution: a sink that has it takes nothing, and reports the same
        (*_, last) = run_all(Run(planned, spark, IntermediateStore(str(tmp_path / store)), "run", "run"))
        assert last.rows == 23
    if sink == "print":
        assert capsys.readouterr().out.count("print> ") == 2 * 23


def test_in_streaming_every_sink_reports_the_rows_that_it_was_given(spark, tmp_path, capsys):
    pipeline = Pipeline("p")
    stream = values(pipeline)
    for name, sink in SINKS.items():
        stream.sink_to(sink(tmp_path)).name(name)
    given = Counter()
    options = {"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": str(tmp_path / "checkpoints")}

    def observe(event):
        if isinstance(event, EpochCommitted):
            given.update({name: written.rows for name, written in event.written.items()})

    StreamingJob(pipeline.plan(options), spark, Start("test"), observe).run()
    assert given == dict.fromkeys(SINKS, 23)
    assert capsys.readouterr().out.count("print> ") == 23


class Both(CoMapFunction):
    def map1(self, value):
        return value

    def map2(self, value):
        return value


def test_what_goes_to_several_operators_of_two_inputs_counts_once(run_on_spark):
    pipeline = Pipeline("p")
    orders, payments = (pipeline.from_collection(range(count), name=name) for name, count in (("a", 3), ("b", 1)))
    for name in ("one", "other"):
        keyed = orders.key_by(lambda n: n, key_type=int).connect(payments.key_by(lambda n: n, key_type=int))
        keyed.map(Both(), int).print(name)
    rows = {manifest.stage: manifest.rows for manifest in run_on_spark(pipeline)}
    assert (rows["a"], rows["b"]) == (3, 1)
    assert (rows["one"], rows["other"]) == (4, 4)
