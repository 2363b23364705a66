"""The records of a stream, read by the program that runs it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self

import pyarrow.parquet as pq

from dagster_unified.connectors.file_sink import FileSink
from dagster_unified.errors import CancelledError
from dagster_unified.execution.job import POLL, Environment, JobHandle, execute
from dagster_unified.graph.connectors import Sink
from dagster_unified.graph.nodes import Graph
from dagster_unified.operators.functions.type_variables import T
from dagster_unified.operators.layout import declared
from dagster_unified.records import RecordType

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CHECKPOINTS = "execution.checkpointing.dir"


class CollectedRecords(Generic[T]):
    """An iterator over the records that a job emits (PyFlink: `CloseableIterator`). Closing it cancels the job."""

    def __init__(self, job: JobHandle, records: RecordType, folder: TemporaryDirectory[str]) -> None:
        self.job = job
        self._records, self._folder = records, folder
        self._iterator = self._all()

    def __iter__(self) -> Iterator[T]:
        return self._iterator

    def __next__(self) -> T:
        return next(self._iterator)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels the job where it still runs, and forgets what has not been read."""
        self.job.cancel()
        self.job.await_termination()
        self._iterator.close()
        self._folder.cleanup()

    def _all(self) -> Generator[T, None, None]:
        ended = False
        while not ended:
            ended = self.job.await_termination(timedelta(seconds=POLL))
            for file in self._arrived():
                for batch in pq.ParquetFile(file).iter_batches():
                    yield from self._records.from_batch(declared(batch.columns, self._records.schema))
                file.unlink()  # a stream that never ends would fill the disk
        try:
            self.job.result()
        except CancelledError:
            return
        self._folder.cleanup()

    def _arrived(self) -> list[Path]:
        """Files that were committed and have not been read, in the order of their epochs."""
        return sorted(Path(self._folder.name, "records").glob("*.parquet"))


def collect(
    graph_with: Callable[[Sink[Any]], Graph],
    records: RecordType,
    options: Mapping[str, Any] | None,
    spark: SparkSession | None,
    master: str,
) -> CollectedRecords[Any]:
    """Runs a pipeline with a sink more, which holds the records of a stream until they are read."""
    folder = TemporaryDirectory(prefix="dagster-unified-")
    try:
        sink = FileSink(f"{folder.name}/records", name="collected")
        given = {_CHECKPOINTS: f"{folder.name}/checkpoints", **(options or {})}
        job = execute(graph_with(sink), given, Environment(spark, master), daemon=True)
    except BaseException:
        folder.cleanup()
        raise
    return CollectedRecords(job, records, folder)
