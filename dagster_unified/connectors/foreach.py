"""Sinks without a system behind them: a function of yours, and one that prints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic

import pyarrow as pa

from dagster_unified.connectors.protocol.commits import (
    Committable,
    NoCommitter,
    Ship,
    SparkSink,
    WriteAttempt,
    Writer,
    WriterTask,
)
from dagster_unified.errors import PipelineError
from dagster_unified.graph.connectors import AssetName, Capabilities, asset_path
from dagster_unified.operators.failures import RAISED, user_failure
from dagster_unified.operators.functions.type_variables import In
from dagster_unified.records import RecordType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class ForeachSink(SparkSink[In, Committable]):
    """Calls a function with every record, on Spark's workers, in each partition's order.

    A callable object may have `open()` and `close()`: they are called once per partition, in BATCH of the stage, in
    STREAMING of each epoch. `upserts` says that a later record replaces an earlier one, so that rolling updates may end
    here. At-least-once in both modes: a retried stage, or a replayed epoch, calls it again with the same records.
    Raises `UserFunctionError`, naming the record, where the function does.

    Examples:
        >>> sink = sales.sink_to(ForeachSink(lambda sale: None, name="charge"))
        >>> [sale.amount for sale in run_pipeline(pipeline, "BATCH").sinks["charge"]]
        [3, 4, 5]
    """

    capabilities = Capabilities()
    committable = Committable
    commits_in_writers = True

    def __init__(
        self,
        function: Callable[[In], object],
        name: str | None = None,
        upserts: bool = False,
        asset: AssetName | None = None,
    ) -> None:
        called = getattr(function, "__name__", type(function).__name__)
        self.named = name is not None or called != "<lambda>"
        self.name = name or (called if self.named else "foreach")
        self.asset = asset_path(asset, f"sink '{self.name}'")
        self.function = function
        self.upserts = upserts
        if not callable(function):
            raise PipelineError(f"sink '{self.name}': expected a function of a record, got {function!r}")

    def describe(self) -> str:
        return f"calls of {self.name}"

    def check(self, records: RecordType) -> None:
        """A function takes every record."""

    def takes_together(self) -> bool:
        return False

    def committer(self, schema: pa.Schema) -> NoCommitter[Committable]:
        return NoCommitter()

    def writer(self, task: WriterTask) -> _Calls[In]:
        where = f"{task.attempt.identity.pipeline}: stage '{task.attempt.stage}', sink '{self.name}'"
        return _Calls(self.function, self.records, where)


class _Calls(Writer[Committable], Generic[In]):
    """The calls for the rows of one task."""

    def __init__(self, function: Callable[[In], object], records: RecordType, where: str) -> None:
        self._function, self._records, self._where = function, records, where
        if hasattr(function, "open"):
            function.open()

    def write(self, batch: pa.RecordBatch) -> None:
        record = None
        try:
            for record in self._records.from_batch(batch):
                self._function(record)
        except RAISED as error:
            raise user_failure(error, self._where, self._function, record) from error

    def prepare_commit(self) -> Sequence[Committable]:
        return ()

    def close(self) -> None:
        if hasattr(self._function, "close"):
            self._function.close()


class PrintSink(SparkSink[object, Committable]):
    """Prints every record as a line to standard output, in both modes, at least once.

    All rows pass through the driver, one partition at a time.

    Examples:
        >>> sink = numbers.sink_to(PrintSink("numbers"))
        >>> run_pipeline(pipeline, "BATCH").sinks["numbers"]
        [1, 2, 3]
    """

    capabilities = Capabilities()
    commits_in_writers = True
    upserts = True  # a line per update is what one wants to see of a rolling operation

    def __init__(self, name: str | None = None) -> None:
        self.name, self.named = name or "print", name is not None

    def describe(self) -> str:
        return "standard output"

    def check(self, records: RecordType) -> None:
        """Every record can be printed."""

    def committer(self, schema: pa.Schema) -> NoCommitter[Committable]:
        return NoCommitter()

    def takes_together(self) -> bool:
        return False

    def stage(self, frame: DataFrame, attempts: Sequence[WriteAttempt], ship: Ship) -> list[list[Committable]]:
        persisted = frame.persist()
        try:
            # the whole of it in one job: of the jobs that fetch one partition each, Spark observes nothing
            persisted.count()
            for row in persisted.toLocalIterator():
                values = tuple(row)
                if len(values) == 1:
                    shown = values[0]
                else:
                    fields = ", ".join(f"{name}={value!r}" for name, value in row.asDict().items())
                    shown = f"{getattr(self.records.python, '__name__', '')}({fields})"
                sys.stdout.write(f"{self.name}> {shown}\n")
            sys.stdout.flush()
        finally:
            persisted.unpersist()
        return [[]]
