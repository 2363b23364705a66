"""An epoch of a stream whose checkpoint is in a bucket, against one whose checkpoint is on a disk.

`python -m benchmarks.bucket_epochs` prints the median epoch of both, and what the store was asked: in an epoch, and in
a second without any. A file of 1,000 records arrives once the epoch before has ended; a rolling reduce keeps state. The
two run in turn, after a turn that does not count: the first stream of a session is slower, wherever its checkpoint is.
The server is on this machine and takes milliseconds a request, so that the number of requests decides.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from benchmarks.bars import Bar, Measurement, Options
from benchmarks.stream import Nowhere, S, batches, combine, streaming_session
from dagster_unified.api import Pipeline
from dagster_unified.connectors import ParquetSource
from dagster_unified.engine.events import EpochCommitted, Event
from dagster_unified.engine.streaming.job import Start, StreamingJob
from tests.object_store import Request, requests, s3a, served

EPOCHS, FIRST = 30, 8
"""How many a stream runs, and how many of them do not count: the query has just started."""

TURNS = 3
"""How often each of the two runs; its first time does not count, as the JVM is not warm yet."""

IDLE = 5.0
"""Seconds in which nothing arrives, at the end."""

LONGER = 0.150
"""Seconds that an epoch in a bucket may take longer."""


class Measured(NamedTuple):
    """The seconds of each epoch, and what the store was asked in these and in the `waited` seconds without any."""

    seconds: list[float]
    epochs: list[Request]
    idle: list[Request]
    waited: float

    @property
    def median(self) -> float:
        """The median epoch, in seconds."""
        return statistics.median(self.seconds)


def measure(options: Options) -> tuple[list[Bar], list[Measurement]]:
    """The bar: an epoch takes little longer in a bucket than on a disk."""
    disk, bucket = epochs()
    asked, idle = len(bucket.epochs) / len(bucket.seconds), len(bucket.idle) / bucket.waited
    print(
        f"an epoch on a disk: {1000 * disk.median:.0f} ms, in a bucket: {1000 * bucket.median:.0f} ms;"
        f" {asked:.0f} requests an epoch, {idle:.1f} a second without one"
    )
    longer = bucket.median - disk.median
    return [Bar("cluster.epoch in a bucket", longer, LONGER, at_most=True)], []


def epochs() -> tuple[Measured, Measured]:
    """The epochs with the checkpoint on a disk, and in a bucket."""
    folder = Path(tempfile.mkdtemp(prefix="bench"))
    try:
        with _bucket() as url, streaming_session(**s3a(folder, url)) as spark:
            turns = [
                [
                    _run(spark, folder, f"{root}/{turn}", url)
                    for root in (f"{folder}/checkpoints", "s3://lake/checkpoints")
                ]
                for turn in range(TURNS)
            ]
            disk, bucket = zip(*turns[1:], strict=True)
            return _together(disk), _together(bucket)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _bucket() -> Iterator[str]:
    """The URL of a server with the bucket `lake`, which this process reaches."""
    before = dict(os.environ)
    try:
        with served("lake") as environment:
            os.environ.update(environment)
            yield environment["AWS_ENDPOINT_URL"]
    finally:
        os.environ.clear()
        os.environ.update(before)


def _together(turns: Sequence[Measured]) -> Measured:
    return Measured(
        [seconds for turn in turns for seconds in turn.seconds],
        [request for turn in turns for request in turn.epochs],
        [request for turn in turns for request in turn.idle],
        sum(turn.waited for turn in turns),
    )


def _run(spark: SparkSession, folder: Path, checkpoints: str, url: str) -> Measured:
    arriving = Path(tempfile.mkdtemp(dir=folder))
    pipeline = Pipeline("bench")
    stream = pipeline.from_source(ParquetSource(str(arriving), S, name="numbers", monitor=True))
    stream.key_by("k").reduce(combine).sink_to(Nowhere())
    options = {"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": checkpoints}
    told: list[EpochCommitted] = []
    asked: list[Request] = []
    idle: list[Request] = []
    files, since = 0, 0.0

    def observe(event: Event) -> None:
        if isinstance(event, EpochCommitted) and event.rows_in:
            told.append(event)

    def arrive(number: int) -> None:
        rows = range(number * 1000, (number + 1) * 1000)
        pq.write_table(pa.table({"k": [str(k % 777) for k in rows], "v": list(rows)}), arriving / f".{number}")
        (arriving / f".{number}").rename(arriving / f"{number:04d}.parquet")

    def ended() -> bool:
        nonlocal files, since
        if len(told) < files or job.activity()[1]:
            return False
        if files < EPOCHS:
            arrive(files)
            files += 1
            if files == FIRST + 1:
                requests(url)
            return False
        if not since:
            asked.extend(requests(url))
            since = time.monotonic()
        if time.monotonic() - since < IDLE:
            return False
        idle.extend(requests(url))
        return True

    job = StreamingJob(pipeline.plan({**options, "parallelism.default": 2}), spark, Start("bench"), observe)
    job.run(ended)
    return Measured([seconds for _, seconds in batches(EPOCHS * 1000)][FIRST:], asked, idle, IDLE)


def _kind(key: str) -> str:
    """The kind of thing that a key is of: numbers and tokens do not tell one from another."""
    below = re.sub(r"^checkpoints/\d+/bench", "", key)
    return re.sub(r"\d+", "#", re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}|[0-9a-f]{12,32}|(?<=\d-)[0-9a-f]{6}", "*", below))


if __name__ == "__main__":
    on_disk, in_bucket = epochs()
    print(f"disk {on_disk.median:.3f} s, bucket {in_bucket.median:.3f} s")
    counts = [("epoch", in_bucket.epochs, len(in_bucket.seconds)), ("idle second", in_bucket.idle, in_bucket.waited)]
    for name, found, of in counts:
        print(f"{len(found) / of:.1f} requests an {name}")
        for (client, method, key), count in Counter((r.client, r.method, _kind(r.key)) for r in found).most_common(60):
            print(f"  {count / of:7.2f}  {client:5} {method:6} {key}")
