"""How many rows a sink was given, as it is reported."""

from collections import Counter

import pytest

from dagster_unified.api import DeltaSink, FileSink, ForeachSink, Pipeline, PrintSink
from dagster_unified.engine.batch.intermediates.store import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.stage import run_all
from dagster_unified.engine.streaming.job import Start, StreamingJob

SINKS = {
    "print": lambda folder: PrintSink(),
    "delta": lambda folder: DeltaSink(f"{folder}/table"),
    "upsert": lambda folder: DeltaSink(f"{folder}/table", mode="upsert", key="value"),
    "files": lambda folder: FileSink(f"{folder}/files"),
    "foreach": lambda folder: ForeachSink(str, name="calls"),
}


@pytest.mark.parametrize("sink", SINKS)
def test_every_sink_reports_the_rows_that_it_was_given(spark, tmp_path, sink, capsys):
    pipeline = Pipeline("p")
    pipeline.from_collection(range(30)).rebalance().filter(lambda v: v >= 7).set_parallelism(3).sink_to(
        SINKS[sink](tmp_path)
    )
    planned = pipeline.plan({"execution.runtime-mode": "BATCH"})
    for store in ("store", "again"):  # of the same execution: a sink that has it takes nothing, and reports the same
        (*_, last) = run_all(Run(planned, spark, IntermediateStore(str(tmp_path / store)), "run", "run"))
        assert last.rows == 23
    given = Counter()
    options = {"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": str(tmp_path / "checkpoints")}
    StreamingJob(
        pipeline.plan(options), spark, Start("test"), lambda e: given.update({n: w.rows for n, w in e.written.items()})
    ).run()
    assert list(given.values()) == [23]
    if sink == "print":
        assert capsys.readouterr().out.count("print> ") == 3 * 23
