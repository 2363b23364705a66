"""A sink that is a function: for what has no connector, such as a call of a service per record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic

import pyarrow as pa

from dagster_unified.connectors.protocol.commits import Committable, NoCommitter, Writer, WriterTask
from dagster_unified.connectors.protocol.sink import SparkSink
from dagster_unified.errors import PipelineError
from dagster_unified.graph.connectors import Capabilities
from dagster_unified.operators.failures import RAISED, user_failure
from dagster_unified.operators.functions.type_variables import In
from dagster_unified.records import RecordType


class ForeachSink(SparkSink[In, Committable]):
    """Calls a function with every record, on Spark's workers, in the order in which each partition has them.

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

    def __init__(self, function: Callable[[In], object], name: str | None = None, upserts: bool = False) -> None:
        called = getattr(function, "__name__", type(function).__name__)
        self.named = name is not None or called != "<lambda>"
        self.name = name or (called if self.named else "foreach")
        self.function = function
        self.upserts = upserts
        if not callable(function):
            raise PipelineError(f"sink '{self.name}': expected a function of a record, got {function!r}")

    def describe(self) -> str:
        return f"calls of {self.name}"

    def check(self, records: RecordType) -> None:
        """Every record can be given to a function."""

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
