"""Structured Streaming's own sources: `rate`, for tests and demonstrations, and any other by its format and options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from dagster_unified.connectors.base import SparkSource, spark_schema
from dagster_unified.errors import PipelineError
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.graph.fingerprint import digest
from dagster_unified.operators.functions.type_variables import Out
from dagster_unified.records import record_type

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from typing_extensions import TypeForm
    from upath import UPath

    from dagster_unified.graph.slices import Slice


class StructuredSource(SparkSource[Out]):
    """A source of Spark's `format`, such as `kafka`. Unbounded.

    Its columns are those of `record`, cast where nothing is lost.

    With `bounded=True` BATCH reads it with `spark.read`; `options` then have to say where it ends, such as Kafka's
    `endingOffsets`. `partition_options` gets a partition as a `Slice`, and returns the further options with which BATCH
    reads it, such as Kafka's `startingTimestamp` and `endingTimestamp` from its `time()`.

    Examples:
        >>> class Message(NamedTuple):
        ...     value: bytes
        >>> options = {"kafka.bootstrap.servers": "broker:9092", "subscribe": "sales"}
        >>> messages = pipeline.from_source(StructuredSource("kafka", Message, options, name="sales"))
        >>> collect(messages.map(lambda message: message.value.decode(), str), "STREAMING", {"sales": [Message(b"a")]})
        ['a']
    """

    def __init__(
        self,
        format: str,  # noqa: A002 - Spark's name
        record: TypeForm[Out],
        options: Mapping[str, str] | None = None,
        name: str | None = None,
        bounded: bool = False,
        partition_options: Callable[[Slice], Mapping[str, str]] | None = None,
    ) -> None:
        self.partition_options = partition_options
        self.format = self.kind = format
        self.options = dict(options or {})
        self.name = name or format
        self.records = record_type(record, f"source '{self.name}'")
        self.boundedness = Boundedness.BOUNDED if bounded else Boundedness.UNBOUNDED

    def describe(self) -> str:
        return f"Spark source {self.format}" + (f", partition {self.slice.key}" if self.slice is not None else "")

    def identifies_input(self) -> bool:
        return False

    def can_be_bounded(self) -> bool:
        return super().can_be_bounded() or self.partition_options is not None

    def reads_all(self) -> bool:
        return self.partition_options is None

    def how_to_bound(self) -> str:
        return f"{super().how_to_bound()}, or give partition_options="

    def snapshot(self) -> str:
        return digest(self.format, sorted(self.options.items()))

    def read(self, spark: SparkSession) -> DataFrame:
        partition = (
            self.partition_options(self.slice) if self.partition_options is not None and self.slice is not None else {}
        )
        return self.unread(self._typed(spark.read.format(self.format).options(**{**self.options, **partition}).load()))

    def read_stream(self, spark: SparkSession, folder: UPath) -> DataFrame:
        return self.unread(self._typed(spark.readStream.format(self.format).options(**self.options).load()))

    def _typed(self, frame: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        wanted = spark_schema(self.records.schema)
        missing = [n for n in wanted.names if n not in frame.columns]
        if missing:
            raise PipelineError(
                f"source '{self.name}': {self.format} gives no column '{missing[0]}'; it gives"
                f" {', '.join(frame.columns)}"
            )
        return frame.select(*[F.col(f.name).cast(f.dataType).alias(f.name) for f in wanted])


class Rate(NamedTuple):
    """A record of `RateSource`; there is an example at `RateSource`."""

    timestamp: datetime
    value: int


class RateSource(StructuredSource[Rate]):
    """Counts up, `rows_per_second` records a second, on Spark's rate source. Unbounded.

    Examples:
        >>> ticks = pipeline.from_source(RateSource(10)).map(lambda tick: tick.value, int)
        >>> collect(ticks, "STREAMING", {"rate": [Rate(at(9, 0), 0), Rate(at(9, 0), 1)]})
        [0, 1]
    """

    def __init__(self, rows_per_second: int = 1, name: str = "rate") -> None:
        if rows_per_second < 1:
            raise PipelineError(f"source '{name}': rows_per_second must be at least 1, not {rows_per_second}")
        super().__init__("rate", Rate, {"rowsPerSecond": str(rows_per_second)}, name)
