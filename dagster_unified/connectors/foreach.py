"""A sink that is a function: for what has no connector, such as a call of a service per record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dagster_unified.connectors.base import SparkSink, WriteContext, WriteResult
from dagster_unified.errors import PipelineError
from dagster_unified.graph.connectors import Guarantee
from dagster_unified.operators.failures import user_failure
from dagster_unified.operators.functions.type_variables import In
from dagster_unified.records import RecordType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class ForeachSink(SparkSink[In]):
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

    guarantee = Guarantee.AT_LEAST_ONCE

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

    def write(self, frame: DataFrame, context: WriteContext) -> WriteResult:
        from pyspark.sql import functions as F

        context.before_commit()
        where = f"{context.pipeline}: stage '{context.stage}', sink '{self.name}'"
        called = frame.mapInArrow(context.ship(_Calls(self.function, self.records, where)), "calls long")
        calls: int = called.agg(F.sum("calls")).collect()[0][0] or 0
        return WriteResult(f"{calls} calls")

    def preview(self, spark: SparkSession, rows: int) -> pa.Table | None:
        return None


class _Calls:
    """What runs on a worker: gives the number of calls."""

    def __init__(self, function: Any, records: RecordType, where: str) -> None:
        self._function, self._records, self._where = function, records, where

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        function = self._function
        if hasattr(function, "open"):
            function.open()
        try:
            for batch in batches:
                record = None
                try:
                    for record in self._records.from_batch(batch):
                        function(record)
                except Exception as error:
                    raise user_failure(error, self._where, function, record) from error
                yield pa.RecordBatch.from_pydict({"calls": pa.array([batch.num_rows], pa.int64())})
        finally:
            if hasattr(function, "close"):
                function.close()
