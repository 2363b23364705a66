"""What the commit of an epoch to a Delta table takes as epochs add up: a job that appends, without its Spark jobs.

A commit is what the engine asks of the committer for an epoch: what the table remembers, and the transaction. The rows
of an epoch are a Parquet file that is there already.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.bars import Bar, Measurement, Options
from dagster_unified.connectors import DeltaSink
from dagster_unified.connectors.delta.committer import DeltaFile
from dagster_unified.connectors.protocol.commits import Commit, WriteAttempt, WriteIdentity
from dagster_unified.records import record_type

EPOCHS, ROUNDS = 2000, 5
"""Epochs of the long table, and how often ten more are compared with the first of a new one.

A commit takes a fifth of a millisecond: what the machine does meanwhile counts as much, so both are measured by turns.
"""


class Row(NamedTuple):
    id: int
    name: str


def measure(_: Options) -> tuple[list[Bar], list[Measurement]]:
    folder = Path(tempfile.mkdtemp(prefix="bench"))
    try:
        long = _Epochs(folder / "long")
        long.commit(EPOCHS)
        tenth, last, bare, bare_later = [], [], [], []
        for number in range(ROUNDS):
            last += long.commit(10)
            bare_later += long.create(10)
            new = _Epochs(folder / f"new {number}")
            tenth += new.commit(15)[5:]
            bare += new.create(10)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    first, later = statistics.median(tenth), statistics.median(last)
    print(f"a commit to a Delta table: the tenth {1000 * first:.2f} ms, after {EPOCHS} epochs {1000 * later:.2f} ms")
    files = [1000 * statistics.median(seconds) for seconds in (bare, bare_later)]
    print(f"of that, to create a file beside the table: {files[0]:.2f} ms, and {files[1]:.2f} ms")
    return [Bar("connectors.delta_commit_after_2000_epochs", later / first, 1.5, at_most=True)], []


class _Epochs:
    """The epochs of a job that appends to a table of its own."""

    def __init__(self, path: Path) -> None:
        self._path, self._next = path, 0
        sink = DeltaSink(str(path), mode="append").bound_to(record_type(Row))
        self._rows = pa.Table.from_batches([sink.records.to_batch([Row(n, "name") for n in range(100)])])
        self._committer = sink.committer(sink.records.schema)

    def commit(self, count: int) -> list[float]:
        """Commit so many more; the seconds of each."""
        taken = []
        for epoch in range(self._next, self._next + count):
            identity = WriteIdentity("bench", "rows", "job", epoch=epoch)
            attempt = WriteAttempt(identity, uuid4().hex, "stage")
            written = self._path / f"epoch-{epoch}.parquet"
            pq.write_table(self._rows, written)
            file = DeltaFile(path=written.name, rows=self._rows.num_rows, bytes=written.stat().st_size)
            commit = Commit(attempt, [file])
            begun = time.perf_counter()
            for name in commit.marks:
                self._committer.last_version(name)
            self._committer.begin([attempt])
            self._committer.commit([commit])
            taken.append(time.perf_counter() - begun)
        self._next += count
        return taken

    def create(self, count: int) -> list[float]:
        """Create so many files in the folder of the log, as a commit does; the seconds of each."""
        taken = []
        for number in range(count):
            new = self._path / "_delta_log" / f"_bare_{number}.tmp"
            begun = time.perf_counter()
            new.write_text("{}" * 300)
            taken.append(time.perf_counter() - begun)
        for file in (self._path / "_delta_log").glob("_bare_*.tmp"):
            file.unlink()
        return taken
