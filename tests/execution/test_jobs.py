"""Jobs that run in this process, without Dagster."""

import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
from deltalake import DeltaTable

from dagster_unified.api import MapFunction, Pipeline
from dagster_unified.connectors import CollectionSource, CsvSource, DeltaSink
from dagster_unified.errors import CancelledError, PipelineError, SourceError, UnavailableError, UserFunctionError
from dagster_unified.operators.metrics import GaugeRange
from dagster_unified.state import Savepoint
from tests.support import Sale, streaming

SALES = [Sale("north", 1), Sale("south", 2), Sale("north", 4)]
TOTALS = [Sale("north", 5), Sale("south", 2)]


def totals(pipeline):
    return pipeline.from_collection(SALES, name="sales").key_by("shop").sum("amount").name("totals")


def test_a_batch_job_ends_with_its_result_and_what_each_stage_made(spark, tmp_path):
    pipeline = Pipeline("shops")
    totals(pipeline).sink_to(DeltaSink(str(tmp_path / "out"), mode="upsert", key="shop"))
    job = pipeline.execute(spark=spark)
    result = job.result()
    assert (job.status, result.mode, result.metrics.rows) == ("FINISHED", "BATCH", {"sales": 3, "out": 2})
    rows = DeltaTable(str(tmp_path / "out")).to_pyarrow_table().to_pylist()
    assert sorted(Sale(**row) for row in rows) == TOTALS


def test_a_bounded_stream_ends_with_its_result_and_what_each_sink_was_given(spark, tmp_path):
    pipeline = Pipeline("shops")
    totals(pipeline).sink_to(DeltaSink(str(tmp_path / "out"), mode="upsert", key="shop"))
    result = pipeline.execute(streaming(tmp_path, 2), spark=spark).result()
    assert (result.mode, result.metrics.rows_in, set(result.metrics.rows)) == ("STREAMING", 3, {"out"})
    assert result.metrics.epochs >= 1
    assert DeltaTable(str(tmp_path / "out")).to_pyarrow_table().num_rows == 2


class Priced(MapFunction):
    def open(self, context):
        group = context.get_metrics_group()
        self.sold, self.rate, self.amounts = group.counter("sold"), group.meter("rate"), group.histogram("amounts")
        group.gauge("attempt", context.get_attempt_number)

    def map(self, sale: Sale) -> Sale:
        self.sold.inc(sale.amount)
        self.rate.mark_event()
        self.amounts.update(sale.amount)
        return sale


class Counted(MapFunction):
    def open(self, context):
        self.totals = context.get_metrics_group().counter("totals")

    def map(self, sale: Sale) -> Sale:
        self.totals.inc()
        return sale


@pytest.mark.a_day(1)
@pytest.mark.parametrize(("mode", "totals"), [("BATCH", 2), ("STREAMING", 3)])
def test_metrics_of_all_parallel_instances_are_added_up(spark, tmp_path, mode, totals):
    pipeline = Pipeline("shops")
    sales = pipeline.from_collection(SALES).rebalance().map(Priced()).set_parallelism(2).name("priced")
    counted = sales.key_by("shop").sum("amount").map(Counted()).name("counted")
    counted.sink_to(DeltaSink(str(tmp_path / "out"), mode="upsert", key="shop"))
    options = {**streaming(tmp_path, 2), "execution.runtime-mode": mode}
    metrics = pipeline.execute(options, spark=spark).result().metrics
    assert metrics.counters == {"priced.sold": 7, "counted.totals": totals}
    assert metrics.gauges == {"priced.attempt": GaugeRange(0, 0)}
    assert set(metrics.meters) == {"priced.rate"}
    amounts = metrics.histograms["priced.amounts"]
    assert (amounts.count, amounts.min, amounts.max, amounts.sum) == (3, 1, 4, 7)


def test_what_a_function_raises_is_raised_by_the_result(spark, tmp_path):
    def broken(sale: Sale) -> Sale:
        raise ValueError("no such shop")

    pipeline = Pipeline("shops")
    pipeline.from_collection(SALES).map(broken).sink_to(DeltaSink(str(tmp_path / "out")))
    job = pipeline.execute(spark=spark)
    with pytest.raises(UserFunctionError, match="no such shop"):
        job.result()
    assert job.status == "FAILED"


class AwaySource(CollectionSource):
    """A source whose system is away at the first attempts."""

    def __init__(self, attempts, error=UnavailableError):
        super().__init__(SALES, Sale, name="sales")
        self.attempts, self.error, self.failures = attempts, error, []

    def _try(self):
        if len(self.failures) < self.attempts:
            self.failures.append(self.error)
            raise self.error(f"the system is away: {len(self.failures)}")

    def read(self, spark):
        self._try()
        return super().read(spark)

    def read_stream(self, spark, folder):
        self._try()
        return super().read_stream(spark, folder)


@pytest.mark.a_day(1)
@pytest.mark.parametrize("mode", ["BATCH", "STREAMING"])
@pytest.mark.parametrize("failures", [2, 3])
def test_a_job_is_started_again_as_its_restart_strategy_says(spark, tmp_path, mode, failures):
    source = AwaySource(failures)
    pipeline = Pipeline("away")
    pipeline.from_source(source).sink_to(DeltaSink(str(tmp_path / "out"), name="out", mode="append"))
    options = {
        "restart-strategy.type": "fixed-delay",
        "restart-strategy.fixed-delay.attempts": 2,
        "restart-strategy.fixed-delay.delay": "10 ms",
    }
    given = streaming(tmp_path, 2) if mode == "STREAMING" else {}
    job = pipeline.execute({**given, **options}, spark=spark)
    if failures == 2:
        job.result()
        assert DeltaTable(str(tmp_path / "out")).to_pyarrow_table().num_rows == 3
    else:
        with pytest.raises(UnavailableError, match="the system is away: 3"):
            job.result()
    assert len(source.failures) == failures


def test_a_batch_job_for_which_no_strategy_is_set_and_an_error_that_would_come_again_are_not_tried_again(
    spark, tmp_path
):
    options = {
        "restart-strategy.type": "exponential-delay",
        "restart-strategy.exponential-delay.initial-backoff": "10 ms",
    }
    for given, error in (({}, UnavailableError), (options, SourceError)):
        source = AwaySource(9, error)
        pipeline = Pipeline("away")
        pipeline.from_source(source).print()
        with pytest.raises(error, match="the system is away: 1"):
            pipeline.execute(given, spark=spark).result()


def test_a_job_that_waits_to_be_started_again_can_be_cancelled(spark, tmp_path):
    pipeline = Pipeline("away")
    source = AwaySource(9)
    pipeline.from_source(source).print()
    options = {"restart-strategy.type": "fixed-delay", "restart-strategy.fixed-delay.delay": "1 h"}
    job = pipeline.execute({**streaming(tmp_path, 2), **options}, spark=spark)
    while job.status == "RUNNING" and not source.failures:
        time.sleep(0.02)
    job.cancel()
    with pytest.raises(CancelledError):
        job.result(timedelta(seconds=20))


def test_a_mistake_is_raised_before_anything_runs():
    with pytest.raises(PipelineError, match="nothing is written anywhere"):
        Pipeline("shops").execute()


def test_a_batch_job_that_is_cancelled_commits_nothing(spark, tmp_path):
    begun = tmp_path / "begun"

    def slow(sale: Sale) -> Sale:
        begun.touch()
        time.sleep(600)
        return sale

    pipeline = Pipeline("shops")
    pipeline.from_collection(SALES).map(slow).sink_to(DeltaSink(str(tmp_path / "out")))
    job = pipeline.execute(spark=spark)
    while not begun.exists():
        assert not job.await_termination(timedelta(seconds=0.1))
    job.cancel()
    with pytest.raises(CancelledError, match="shops was cancelled"):
        job.result()
    assert job.status == "CANCELED"
    assert (
        not DeltaTable.is_deltatable(str(tmp_path / "out"))
        or DeltaTable(str(tmp_path / "out")).to_pyarrow_table().num_rows == 0
    )


@pytest.mark.a_day(1)
@pytest.mark.parametrize("mode", ["BATCH", "STREAMING"])
def test_a_streams_records_come_to_the_program(spark, mode):
    with totals(Pipeline("shops")).execute_and_collect(
        {"execution.runtime-mode": mode, "pipeline.max-parallelism": 2}, spark=spark
    ) as found:
        records = list(found)
    assert {sale.shop: sale for sale in records} == {
        sale.shop: sale for sale in TOTALS
    }  # STREAMING emits each total as it grows
    assert all(type(sale) is Sale for sale in records)


def test_an_unbounded_stream_is_read_until_the_program_has_enough(spark, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "one.csv").write_text("shop,amount\nnorth,1\n")
    pipeline = Pipeline("shops")
    sales = pipeline.from_source(CsvSource(str(tmp_path / "in"), Sale, name="sales", monitor=True))
    with sales.execute_and_collect({"pipeline.max-parallelism": 2}, spark=spark) as found:
        assert next(found) == Sale("north", 1)
        (tmp_path / "in" / ".two.csv").write_text("shop,amount\nsouth,2\n")
        (tmp_path / "in" / ".two.csv").rename(tmp_path / "in" / "two.csv")
        assert next(found) == Sale("south", 2)
    assert found.job.status == "CANCELED"
    with pytest.raises(PipelineError, match="nothing is written anywhere"):
        pipeline.plan()


SCRIPT = """
from dagster_unified.api import Pipeline
from dagster_unified.errors import UnifiedError

def halves(name):
    built = Pipeline(name)
    built.from_collection([1, 0]).map(lambda number: 1 / number, float).print()
    return built.execute(master="local[1]")

try:
    halves("handled").result()
except UnifiedError:
    pass
halves("unseen")
"""


AT_ONCE_AND_LEFT = """
import os
import sys
from contextlib import suppress
from pathlib import Path

from dagster_unified.api import KeyedProcessFunction, Pipeline, ValueStateDescriptor

jobs = []
for number in range(4):
    pipeline = Pipeline(f"job{number}")
    pipeline.from_collection([number], int).map(lambda n: n + 1, int).print()
    jobs.append(pipeline.execute(master="local[2]", progress=False))
for job in jobs:
    job.result()
children = []
for thread in Path("/proc/self/task").iterdir():
    with suppress(FileNotFoundError):  # a thread may end meanwhile
        children += (thread / "children").read_text().split()
print(sum("java" in os.readlink(f"/proc/{child}/exe") for child in set(children)))

class Last(KeyedProcessFunction):
    def open(self, context):
        self.last = context.get_state(ValueStateDescriptor("last", int))

    def process_element(self, value, ctx) -> list[int]:
        self.last.update(value)
        return [value]

pipeline = Pipeline("left")
pipeline.from_collection([1, 2]).key_by(lambda n: n, key_type=int).process(Last()).uid("last").print()
pipeline.execute({"execution.savepoint.path": sys.argv[1]}, master="local[2]")
"""


@pytest.mark.spark
@pytest.mark.rotates("processes")
def test_jobs_that_begin_at_once_share_a_session_and_one_that_the_program_leaves_behind_finishes(tmp_path):
    command = [sys.executable, "-c", AT_ONCE_AND_LEFT, str(tmp_path / "left")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [line for line in ended.stdout.splitlines() if not line.startswith("print> ")] == ["1"]
    assert [operator.uid for operator in Savepoint.read(str(tmp_path / "left")).operators] == ["last"]


ENDLESS = """
import sys
from dagster_unified.api import Pipeline
from dagster_unified.connectors import DeltaSink, RateSource

pipeline = Pipeline("endless")
numbers = pipeline.from_source(RateSource(5)).map(lambda rate: rate.value, int)
numbers.sink_to(DeltaSink(f"{sys.argv[1]}/out", mode="append"))
pipeline.execute({"execution.checkpointing.dir": f"{sys.argv[1]}/checkpoints"}, master="local[1]")
"""


@pytest.mark.spark
@pytest.mark.rotates("processes")
def test_ctrl_c_ends_a_program_that_only_waits_for_its_job(tmp_path):
    command = [sys.executable, "-c", ENDLESS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        while not (tmp_path / "out" / "_delta_log").exists():
            assert program.poll() is None, program.communicate()
            time.sleep(0.1)
        program.send_signal(signal.SIGINT)
        assert program.communicate(timeout=60) == ("", "")
    assert program.returncode == 130


COLLECTED = """
from dagster_unified.api import Pipeline
from dagster_unified.connectors import RateSource

numbers = Pipeline("collected").from_source(RateSource(5)).map(lambda rate: rate.value, int)
found = numbers.execute_and_collect(master="local[1]")
print(next(found))
raise ValueError("of the program itself")
"""


@pytest.mark.spark
@pytest.mark.rotates("processes")
def test_a_program_that_ends_cancels_a_job_whose_records_it_read():
    ended = subprocess.run([sys.executable, "-c", COLLECTED], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (1, "0\n")
    assert ended.stderr.strip().endswith("ValueError: of the program itself")


@pytest.mark.spark
@pytest.mark.rotates("processes")
def test_a_program_that_ends_without_a_look_at_its_job_fails_as_the_job_does():
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("the job has failed: unseen: stage 'collection', operator 'map': ZeroDivisionError")
    assert "handled" not in ended.stderr
