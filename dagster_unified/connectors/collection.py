"""A source of records that are given in the program: bounded, for tests, examples and small tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from dagster_unified.connectors.base import SparkSource, spark_schema
from dagster_unified.connectors.paths import as_pattern
from dagster_unified.connectors.positions import EverythingRead, Position, cannot_follow
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.graph.fingerprint import fingerprint
from dagster_unified.operators.functions.type_variables import Out
from dagster_unified.records import RecordType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from upath import UPath


class CollectionSource(SparkSource[Out]):
    """Gives its records, in both modes in their order; ends after the last one.

    There is an example at `Pipeline.from_collection`, which makes one.
    """

    boundedness = Boundedness.BOUNDED

    def __init__(self, name: str, records: RecordType, data: tuple[Out, ...]) -> None:
        self.name = name
        self.records = records
        self.data = data
        self.batch = records.to_batch(data)

    def describe(self) -> str:
        return f"{len(self.data)} records given in the program" + (
            f", partition {self.slice.key}" if self.slice is not None else ""
        )

    def snapshot(self) -> str:
        return fingerprint(self.data[self._start :])

    def disorder(self, field: str) -> int | None:
        import pyarrow.compute as pc  # slow to load, and a pipeline is built without it

        column = self.batch.column(field)
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("ms", column.type.tz), safe=False)
        times = column.cast(pa.int64()).drop_null()
        return pc.max(pc.subtract(pc.cumulative_max(times), times)).as_py() or 0

    def read_stream(self, spark: SparkSession, folder: UPath) -> DataFrame:
        """Its records are written to `folder` once, and read from there."""
        import pyarrow.parquet as pq

        data = folder / f"{self.snapshot()}.parquet"
        if not data.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f".{data.name}").open("wb") as file:
                pq.write_table(self._table(), file)
            (folder / f".{data.name}").rename(data)
        return self.unread(spark.readStream.schema(spark_schema(self.records.schema)).parquet(as_pattern(folder)))

    def read(self, spark: SparkSession) -> DataFrame:
        return self.unread(spark.createDataFrame(self._table(), schema=spark_schema(self.records.schema)))

    def batch_position(self, spark: SparkSession) -> Position:
        return EverythingRead(len(self.data)) if self.slice is None else super().batch_position(spark)

    def stream_position(self, checkpoint_sources: UPath | None, offset: str | None) -> Position:
        return self.behind if offset is None else EverythingRead(len(self.data))

    def check_behind(self) -> None:
        if not isinstance(self.behind, EverythingRead):
            super().check_behind()
        elif self._start > len(self.data):
            raise cannot_follow(self.name, self.behind, f"it has only {len(self.data)}")

    @property
    def _start(self) -> int:
        """The place of the first record that was not read before."""
        if isinstance(self.behind, EverythingRead):
            return len(self.data) if self.behind.count is None else self.behind.count
        return 0

    def _table(self) -> pa.Table:
        """The records that were not read before."""
        return pa.Table.from_batches([self.batch.slice(self._start)])
