"""What the commit of an epoch to a Delta table takes as epochs add up: a job that appends, without its Spark jobs.

A commit is what the engine asks of the committer for an epoch: what the table remembers, and the transaction. The rows
of an epoch are a Parquet file that is there already.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.bars import Bar, Measurement, Options
from dagster_unified.api import DeltaSink
from dagster_unified.connectors.commits import Commit, WriteAttempt, WriteIdentity
from dagster_unified.connectors.delta.committer import DeltaFile
from dagster_unified.records import record_type

EPOCHS = 2000


class Row(NamedTuple):
    id: int
    name: str


def measure(_: Options) -> tuple[list[Bar], list[Measurement]]:
    folder = Path(tempfile.mkdtemp(prefix="bench"))
    try:
        taken = _commit_seconds(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    tenth, last = statistics.median(taken[5:15]), statistics.median(taken[-10:])
    print(f"a commit to a Delta table: the tenth {1000 * tenth:.1f} ms, after {EPOCHS} epochs {1000 * last:.1f} ms")
    return [Bar("connectors.delta_commit_after_2000_epochs", last / tenth, 1.5, at_most=True)], []


def _commit_seconds(folder: Path) -> list[float]:
    sink = DeltaSink(str(folder / "table"), mode="append").taking(record_type(Row))
    rows = pa.Table.from_batches([sink.records.to_batch([Row(n, "name") for n in range(100)])])
    taken = []
    with closing(sink.committer(sink.records.schema)) as committer:
        for epoch in range(EPOCHS + 10):
            identity = WriteIdentity("bench", "rows", "job", epoch=epoch)
            attempt = WriteAttempt(identity, uuid4().hex, "stage")
            path = f"epoch-{epoch}.parquet"
            pq.write_table(rows, folder / "table" / path)
            file = DeltaFile(path=path, rows=rows.num_rows, bytes=(folder / "table" / path).stat().st_size)
            commit = Commit(attempt, [file])
            begun = time.perf_counter()
            for name in commit.marks:
                committer.last_version(name)
            committer.begin([attempt])
            committer.commit([commit])
            taken.append(time.perf_counter() - begun)
    return taken
