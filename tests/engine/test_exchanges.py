"""Exchanges that choose a record's subtask, on Spark in both modes."""

from collections import Counter

from dagster_unified.connectors import FileSink
from tests import exchanges
from tests.depth import rotated

ONE_JOB = {"execution.batch-shuffle-mode": "ALL_EXCHANGES_PIPELINED"}


def test_each_subtask_sees_the_records_that_an_exchange_sends_to_it(spark, run_on_spark, run_streaming, tmp_path):
    cases = rotated(list(exchanges.CASES), 6)
    expected = exchanges.expected(cases)
    for run, mode in ((run_streaming, "streaming"), (run_on_spark, "batch")):
        run(exchanges.pipeline(lambda name, mode=mode: FileSink(str(tmp_path / mode / name)), cases), ONE_JOB)
        found = {
            name: Counter(exchanges.Row(*row) for row in spark.read.parquet(str(tmp_path / mode / name)).collect())
            for name in expected
        }
        assert found == expected, mode
