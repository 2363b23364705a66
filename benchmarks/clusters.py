"""A standalone cluster of two workers of one core against two cores of one process, and a bucket against a disk.

All on this machine. Each session is a process of its own, which says what its rounds took once it is warm:
`python -m benchmarks.clusters WHAT MASTER RECORDS PLACE...`. BATCH reads records, shuffles them by key through an
intermediate, reduces them in Python and writes a table, all at a PLACE; of several, each has a round in turn, and so
have the sessions that are compared: a machine that others use changes its speed within minutes. STREAMING
reduces micro-batches of a quarter of the records, with its checkpoint at PLACE. The last case kills a worker under a
stream with a file a second.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from benchmarks import bucket_epochs
from benchmarks.bars import Bar, Measurement, Options
from benchmarks.stream import Nowhere, S, batches, combine, streaming_session
from dagster_unified.api import Pipeline
from dagster_unified.connectors import DeltaSink, ParquetSource
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.events import EpochCommitted, Event
from dagster_unified.engine.streaming.job import Start, StreamingJob
from tests.object_store import s3a, served
from tests.servers.standalone import Cluster

KEYS = 10_000
ROUNDS, WARM = 14, 8
"""Rounds of a session, and how many of them do not count: each executor compiles what it runs for itself."""

BUCKET = "s3://lake/bench"

WITHIN = 15.0
"""Seconds within which an epoch is committed after a worker was killed."""

ROOT = Path(__file__).parents[1]


class Setting(NamedTuple):
    """Where a session runs, and the environment of its process."""

    master: str
    environment: dict[str, str]


def measure(options: Options) -> tuple[list[Bar], list[Measurement]]:
    """All cases of the family `cluster`."""
    bars, measurements = bucket_epochs.measure(options)
    with _settings() as (local, cluster, spark_cluster):
        rates: dict[tuple[str, str], float] = {}
        for what, records in (("batch", options.records), ("stream", options.stream_records // 3)):
            here, there = _by_turns(what, (local, cluster), records)
            rates |= {(what, "local"): here, (what, "cluster"): there}
        disk, bucket = _rates(local, options.records, ("disk", BUCKET))
        rates |= {("batch", "disk"): disk, ("batch", "bucket"): bucket}
        recovered = _recovery(cluster, spark_cluster)
    measurements += [
        Measurement(f"{what} {where}", round(rate / 1e6, 3), (round(rate / 1e6, 3),))
        for (what, where), rate in rates.items()
    ]
    bars += [
        Bar("cluster.batch_vs_local", rates["batch", "cluster"] / rates["batch", "local"], 0.9),
        Bar("cluster.stream_vs_local", rates["stream", "cluster"] / rates["stream", "local"], 0.85),
        Bar("cluster.batch_in_a_bucket_vs_disk", bucket / disk, 0.85),
        Bar("cluster.first_epoch_after_a_kill_s", recovered, WITHIN, at_most=True),
    ]
    return bars, measurements


@contextmanager
def _settings() -> Iterator[tuple[Setting, Setting, Cluster]]:
    """Two cores of one process, a cluster of two workers, both with a bucket at hand."""
    with tempfile.TemporaryDirectory(prefix="bench") as folder, served("lake") as store:
        config = {
            "spark.executor.memory": "900m",
            "spark.executor.defaultJavaOptions": "-XX:+UseParallelGC",  # as a driver on one machine has it
            **s3a(Path(folder), store["AWS_ENDPOINT_URL"]),
        }
        (Path(folder) / "spark-defaults.conf").write_text("".join(f"{k} {v}\n" for k, v in config.items()))
        environment = {**os.environ, **store, "SPARK_CONF_DIR": folder, "BENCH_FOLDER": folder}
        cluster = Cluster(Path(folder), environment)
        try:
            yield Setting("local[2]", environment), Setting(cluster.url, cluster.environment), cluster
        finally:
            cluster.end()


def _rates(setting: Setting, records: int, places: Sequence[str]) -> list[float]:
    """The records a second in BATCH of a session that is warm, at each place."""
    disk = f"{setting.environment['BENCH_FOLDER']}/disk"
    with _session("batch", setting, records, [disk if place == "disk" else place for place in places]) as running:
        said, _ = running.communicate()
    rounds = msgspec.json.decode(said.splitlines()[-1], type=list[list[float]])
    return [records / statistics.median(seconds[WARM:]) for seconds in rounds]


def _by_turns(what: str, settings: Sequence[Setting], records: int) -> list[float]:
    """The records a second of several sessions that are warm, of which one has a round at a time."""
    seconds: list[list[float]] = [[] for _ in settings]
    with ExitStack() as opened:
        places = [f"{one.environment['BENCH_FOLDER']}/{what}-{number}" for number, one in enumerate(settings)]
        sessions = [
            opened.enter_context(_session(what, one, records, ["turns", place]))
            for one, place in zip(settings, places, strict=True)
        ]
        for _ in range(ROUNDS):
            for own, running in zip(seconds, sessions, strict=True):
                assert running.stdin is not None
                assert running.stdout is not None
                print(file=running.stdin, flush=True)
                said = next(line for line in running.stdout if line.startswith("took "))  # Spark says more at first
                own.append(float(said.removeprefix("took ")))
    return [records / statistics.median(own[WARM:]) for own in seconds]


@contextmanager
def _session(what: str, setting: Setting, records: int, places: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.clusters", what, setting.master, str(records), *places]
    pipe, environment = subprocess.PIPE, setting.environment
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


def _recovery(setting: Setting, cluster: Cluster) -> float:
    """Seconds from the end of a worker to the commit of an epoch that began after it."""
    base = f"{setting.environment['BENCH_FOLDER']}/recovery"
    with _session("recovery", setting, 0, [base]) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith("warm"):
                break
        cluster.kill(cluster.workers[0])
        killed = time.time()
        began, committed = (float(part) for part in next(running.stdout).split())
        while began < killed:
            began, committed = (float(part) for part in next(running.stdout).split())
    return committed - killed


def in_turn(spark: SparkSession, what: str, records: int, place: str) -> None:
    """Has a round whenever a line comes, and says in one how many seconds it took."""
    _numbers(spark, f"{place}/in", records)
    for _ in sys.stdin:
        print(f"took {_run(spark, place) if what == 'batch' else _streamed(spark, records, place)}", flush=True)


def batch(spark: SparkSession, records: int, *places: str) -> list[list[float]]:
    """The seconds of runs of the BATCH pipeline, at each place."""
    seconds: dict[str, list[float]] = {place: [] for place in places}
    for place in places:
        _numbers(spark, f"{place}/in", records)
    for _ in range(ROUNDS):
        for place in places:
            seconds[place].append(_run(spark, place))
    return list(seconds.values())


def _run(spark: SparkSession, place: str) -> float:
    """The seconds of one run of the BATCH pipeline."""
    pipeline = Pipeline("bench")
    stream = pipeline.from_source(ParquetSource(f"{place}/in", S, name="numbers"))
    stream.key_by("k").reduce(combine).sink_to(DeltaSink(f"{place}/out", name="out"))
    plan = pipeline.plan({"execution.runtime-mode": "BATCH"})
    name = f"run-{time.time_ns()}"  # a run that the table has would write nothing
    run = Run(plan, spark, IntermediateStore(f"{place}/store"), name, name)
    begun = time.perf_counter()
    run_all(run)
    return time.perf_counter() - begun


def _streamed(spark: SparkSession, records: int, place: str) -> float:
    """The seconds of a micro-batch, as if it had all records: of a job of four, without the first."""
    pipeline = Pipeline("bench")
    source = ParquetSource(f"{place}/in", S, name="numbers", max_files_per_trigger=2)
    pipeline.from_source(source).key_by("k").reduce(combine).sink_to(Nowhere())
    options = {"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": f"{place}/{time.time_ns()}"}
    StreamingJob(pipeline.plan(options), spark, Start("bench")).run()
    return statistics.median(seconds * records / rows for rows, seconds in batches(records)[1:])


def recovery(spark: SparkSession, base: str) -> None:
    """A stream that says when each of its epochs began and was committed, once it is warm."""
    arriving = Path(base, "arriving")
    arriving.mkdir(parents=True)
    pipeline = Pipeline("bench")
    source = ParquetSource(str(arriving), S, name="numbers", monitor=True)
    pipeline.from_source(source).key_by("k").reduce(combine).sink_to(Nowhere())
    options = {"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": f"{base}/checkpoints"}
    epochs, files, dropped = 0, 0, 0.0

    def observe(event: Event) -> None:
        nonlocal epochs
        if isinstance(event, EpochCommitted) and event.rows_in:
            epochs += 1
            print("warm" if epochs < 10 else f"{dropped} {time.time()}", flush=True) if epochs > 8 else None

    def ended() -> bool:
        nonlocal files, dropped
        if not job.activity()[1] and time.time() - dropped > 1:
            pq.write_table(pa.table({"k": [str(k) for k in range(1000)], "v": [files] * 1000}), arriving / f".{files}")
            dropped = time.time()
            (arriving / f".{files}").rename(arriving / f"{files:04d}.parquet")
            files += 1
        return False

    job = StreamingJob(pipeline.plan(options), spark, Start("bench"), observe)
    job.run(ended)


def _numbers(spark: SparkSession, path: str, records: int) -> None:
    ids = spark.range(records)
    rows = ids.select((F.col("id") % KEYS).cast("string").alias("k"), F.col("id").alias("v"))
    rows.repartition(8).write.mode("overwrite").parquet(path.replace("s3://", "s3a://"))


if __name__ == "__main__":
    what, master, number, *given = sys.argv[1:]
    with streaming_session(master, **{"spark.driver.memory": "2g"}) as session:
        if what == "recovery":
            recovery(session, *given)
        if given[0] == "turns":
            in_turn(session, what, int(number), given[1])
            sys.exit()
        rounds = batch(session, int(number), *given)
    print(msgspec.json.encode(rounds).decode(), flush=True)
