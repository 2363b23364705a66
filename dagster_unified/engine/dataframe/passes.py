"""Runs Python passes over rows, and observes what they report."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from dagster_unified.arrow_types import has
from dagster_unified.connectors.protocol.frame import spark_schema
from dagster_unified.engine.dataframe.partitions import PartitionAxis
from dagster_unified.engine.shipping import Shipments
from dagster_unified.engine.worker import shipped
from dagster_unified.graph.execution_graph import Vertex
from dagster_unified.graph.nodes import Port
from dagster_unified.operators.layout import METRICS, OUTPUT, SUBTASK, StreamLayout, combined_schema, output_column
from dagster_unified.operators.metrics import Metrics, merge
from dagster_unified.operators.program.step import Program

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Observation, SparkSession


def observed(observation: Observation) -> dict[str, Any]:
    """Return the metrics that a finished job observed.

    Empty where the optimizer removed the observed node, as it does over input that it knows to be empty.
    """
    try:
        return observation.get
    except Exception as error:
        if "toPyRow" in str(error):  # how a classic session says that the row is not there
            return {}
        raise


def mapped(
    frame: DataFrame,
    program: Program,
    shipments: Shipments,
    place: Hashable,
    axis: PartitionAxis,
    log: str | None = None,
) -> DataFrame:
    """Run rows through a program: its streams combined, and its reports in rows of their own.

    In STREAMING `log` is Spark's log of the query's offsets.
    """
    from pyspark.sql import functions as F

    if program.in_subtasks:
        frame = frame.withColumn(SUBTASK, F.spark_partition_id())
    schema = axis.schema(combined_schema(tuple(o.layout for o in program.outputs)))
    return frame.mapInArrow(shipments.once(place, lambda: shipped(program, log)), spark_schema(schema))


T = TypeVar("T")


def stream_of(
    vertex: Vertex, combined: DataFrame, port: Port, layout: StreamLayout, pass_through: Sequence[str]
) -> DataFrame:
    """One of the streams of a vertex, out of its combined DataFrame."""
    if len(vertex.outputs) == 1:
        return combined
    number = vertex.outputs.index(port)
    column = output_column(number)
    names = [f"{column}.{name}" for name in layout.schema.names]
    return combined.where(f"{OUTPUT} = {number}").select(*names, *pass_through)


def without_reports(frame: DataFrame) -> DataFrame:
    """Return a pass's streams without its reports."""
    from pyspark.sql import functions as F

    return frame.where(F.col(METRICS).isNull()).drop(METRICS)


@dataclass
class Reports:
    """The reports of a job's passes, which Spark observes while the job runs."""

    axis: PartitionAxis = field(default_factory=PartitionAxis)
    _observations: list[Observation] = field(default_factory=list)

    def taken_from(self, frame: DataFrame) -> DataFrame:
        """Return a pass's streams; its reports are observed and dropped."""
        from pyspark.sql import functions as F

        report = F.struct(self.axis.index.alias("partition"), F.col(METRICS).alias("report"))
        return without_reports(self.observe(frame, F.collect_list(F.when(F.col(METRICS).isNotNull(), report))))

    def observe(self, frame: DataFrame, reports: Column) -> DataFrame:
        """Rows that yield these reports, an array of structs (partition, report), when they are computed."""
        from pyspark.sql import Observation

        observation = Observation()
        self._observations.append(observation)
        return frame.observe(observation, reports.alias("reports"))

    def take(self, built: Callable[[], T]) -> tuple[T, Callable[[], list[Metrics]]]:
        """Return what `built` gives, and a function that returns the metrics of its rows, apart from all others'.

        Call that after their job has run, if it runs.
        """
        before = len(self._observations)
        found = built()
        taken = Reports(self.axis, self._observations[before:])
        del self._observations[before:]
        return found, taken.metrics

    def metrics(self) -> list[Metrics]:
        """Return the totals of each partition; call it after the job has run."""
        reports = [r for o in self._observations for r in observed(o).get("reports") or []]
        return [merge(r["report"] for r in reports if r["partition"] == index) for index in range(self.axis.count)]


MAX_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
MAX_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
UNLIMITED = str((1 << 31) - 1)
"""Spark's value for no limit of bytes."""


@contextmanager
def small_rows(spark: SparkSession) -> Iterator[None]:
    """Keep Spark from measuring batches. Nothing changes where the session's configuration sets the limit of bytes."""
    if spark.conf.get(MAX_BYTES, None) is not None:
        yield
        return
    spark.conf.set(MAX_BYTES, UNLIMITED)
    try:
        yield
    finally:
        spark.conf.unset(MAX_BYTES)


def may_be_large(schemas: Iterable[pa.Schema]) -> bool:
    """Return whether rows of one of these schemas may be large: they have bytes in them."""
    return any(has(field.type, _is_bytes) for schema in schemas for field in schema)


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
