"""A source of records that are given in the program: bounded, for tests, examples and small tables."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from dagster_unified.connectors.literals import records_of
from dagster_unified.connectors.paths import as_pattern, children, put
from dagster_unified.connectors.protocol.alignment import ALL
from dagster_unified.connectors.protocol.frame import spark_schema
from dagster_unified.connectors.protocol.positions import EverythingRead, Position, cannot_follow
from dagster_unified.connectors.protocol.source import Ending, SparkSource
from dagster_unified.engine.spark_internals import spark_log
from dagster_unified.errors import PipelineError
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.graph.fingerprint import digest, fingerprint
from dagster_unified.operators.failures import placed
from dagster_unified.operators.functions.type_variables import Out
from dagster_unified.records import record_type

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from typing_extensions import TypeForm
    from upath import UPath


class _Part(NamedTuple):
    """Records of a collection in a file, from a place on; the hash is that of their values."""

    first: int
    size: int
    hash: str

    @classmethod
    def of(cls, name: str) -> _Part | None:
        found = _FILE.fullmatch(name)
        return None if found is None else cls(int(found[1]), int(found[2]), found[3])

    @property
    def name(self) -> str:
        return f"{self.first}-{self.size}-{self.hash}.parquet"


_FILE = re.compile(r"(\d+)-(\d+)-(\w+)\.parquet")


def forget_collections(sources: UPath) -> None:
    """Let the sources of a job give their records from the first again; `sources` has a folder for each."""
    for kept in sources.glob("*/*-*-*.parquet"):
        if _FILE.fullmatch(kept.name) is not None:
            kept.unlink()


class CollectionSource(SparkSource[Out]):
    """Gives its records, in both modes in their order; ends after the last one. `type_info` is their type.

    There is an example at `Pipeline.from_collection`, which makes one.
    """

    boundedness = Boundedness.BOUNDED

    def __init__(self, collection: Iterable[Out], type_info: TypeForm[Out], name: str = "collection") -> None:
        self.name = name
        try:
            self.data = tuple(records_of(collection, type_info))
        except PipelineError as error:
            raise PipelineError(f"source '{name}': {error}") from None
        with placed(f"source '{name}'"):
            self.records = record_type(type_info, f"source '{name}'")
            self.batch = self.records.to_batch(self.data)

    def describe(self) -> str:
        return f"{len(self.data)} records given in the program{self.of_partition()}"

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
        """Its records are written to `folder` once, and read from there; what was added since goes to another file.

        Raises `StateError` where the collection does not begin with the records that are there.
        """
        import pyarrow.parquet as pq

        end = self._start
        parts = [part for name in children(folder) if (part := _Part.of(name)) is not None]
        for part in sorted(parts):
            end = part.first + part.size
            if part != self._part(part.first, end):
                raise cannot_follow(self.name, EverythingRead(end), "it does not begin with them any more")
        if end < len(self.data) or not parts:
            content = pa.BufferOutputStream()
            pq.write_table(self._from(end), content)
            put(folder / self._part(end, len(self.data)).name, content.getvalue().to_pybytes())
        # of several files in a folder that looks like a pattern, Spark 4.3 reads all of them once for each
        reader = spark.readStream.schema(spark_schema(self.records.schema)).option("maxFilesPerTrigger", 1)
        return self.unread(reader.parquet(as_pattern(folder)))

    def read(self, spark: SparkSession) -> DataFrame:
        return self.unread(spark.createDataFrame(self._from(self._start), schema=spark_schema(self.records.schema)))

    def batch_position(self, spark: SparkSession) -> Position:
        return EverythingRead(len(self.data)) if self.slice is None else super().batch_position(spark)

    def stream_position(self, checkpoint_sources: UPath | None, offset: str | None) -> Position:
        logged = spark_log.offset_of(offset)
        if checkpoint_sources is None or logged < 0:
            return self.resume_position
        names = [spark_log.path_of(file.path).split("/")[-1] for file in spark_log.found(checkpoint_sources, logged)]
        return EverythingRead(max(part.first + part.size for name in names if (part := _Part.of(name)) is not None))

    def ending(self, folder: UPath) -> Ending | None:
        def read(log: UPath, offset: str | None) -> frozenset[str]:
            return frozenset([ALL] if self.stream_position(log, offset) == EverythingRead(len(self.data)) else ())

        return read

    def check_resume_position(self) -> None:
        if not isinstance(self.resume_position, EverythingRead):
            super().check_resume_position()
        elif self._start > len(self.data):
            raise cannot_follow(self.name, self.resume_position, f"it has only {len(self.data)}")

    @property
    def _start(self) -> int:
        """The place of the first record that was not read before."""
        if isinstance(self.resume_position, EverythingRead):
            return len(self.data) if self.resume_position.count is None else self.resume_position.count
        return 0

    def _from(self, first: int) -> pa.Table:
        """The records from a place on."""
        return pa.Table.from_batches([self.batch.slice(first)])

    def _part(self, first: int, end: int) -> _Part:
        records = self.batch.slice(first, end - first)
        return _Part(first, len(records), digest(*map(repr, records.to_pylist())))
