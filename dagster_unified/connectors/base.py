"""What an engine asks of a connector: to read a DataFrame, or to write one under an execution's identity."""

from __future__ import annotations

import copy
import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from dagster_unified.connectors.positions import (
    FilesRead,
    PartitionsRead,
    Position,
    Unread,
    cannot_follow,
    partitions_read,
)
from dagster_unified.errors import PipelineError, UnsupportedError
from dagster_unified.graph.connectors import Boundedness, Sink, Source
from dagster_unified.graph.slices import WHOLE, Dimensions, Slice
from dagster_unified.operators.functions.type_variables import In, Out
from dagster_unified.operators.layout import PARTITION_INDEX

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType
    from upath import UPath


def _may_write() -> None:
    """Nobody else writes."""


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@dataclass(frozen=True)
class WriteContext:
    """Who writes.

    `execution` is the same for a run, its retries and its re-executions: a sink that has committed it does not write
    again.

    In STREAMING `execution` is the deployment and `epoch` the epoch: a sink that has this or a later epoch of it does
    not write again. Where the deployment went back to a savepoint, it begins a new `timeline`, on which epochs come
    again. `before_commit` raises where this job may not write any more; a sink calls it just before it commits.
    """

    spark: SparkSession
    pipeline: str
    stage: str
    execution: str
    partition: str = WHOLE
    """The partition that is written. A sink that does not upsert replaces what an earlier run wrote of it."""

    epoch: int | None = None
    timeline: int = 0
    before_commit: Callable[[], None] = _may_write
    ship: Callable[[Callable[..., Any]], Callable[..., Any]] = _as_it_is
    """Makes a function one that reaches Spark's workers with its author's code, where each task has a copy of its own.

    A sink gives it the same functions for every epoch.
    """

    sink: str = "sink"
    """The uid of the sink that writes: two sinks may write to one place, each under an identity of its own."""


@dataclass
class WriteResult:
    """What a sink wrote: where, and how many bytes.

    `repeated` says that this execution had committed before, and that nothing was written now.

    The engine counts the `rows`, so a sink need not.
    """

    location: str
    bytes: int = 0
    repeated: bool = False
    rows: int = 0


class SparkSource(Source[Out]):
    """A source that Spark reads."""

    partition_columns: Mapping[str, str] = {}
    """The fields that say a record's partition, by dimension."""

    slice: Slice | None = None
    bound: bool = False
    behind: Position = Unread()
    """What was read of it before: it reads what comes after."""

    @abstractmethod
    def read(self, spark: SparkSession) -> DataFrame:
        """The records' columns, and `MALFORMED` (see below) where the source does not fail on a malformed row.

        What `after` leaves out is left out here too (`unread`).
        """

    def partitioned_by(self, field: str | None = None, /, **dimensions: str) -> Self:
        """The same source, of which a run for a partition reads only the records that `field` puts into it.

        Of partitions in time the field is a datetime, a date, milliseconds since the epoch or an ISO text (UTC where it
        names no zone); of static ones it equals the key. Of partitions with several dimensions each has its own:
        `date="day", airport="origin"`. A run without partitions, and STREAMING, read everything.
        """
        from dagster_unified.connectors.bounds import checked_columns

        given = {**({"": field} if field is not None else {}), **dimensions}
        if not given:
            raise PipelineError(
                f"source '{self.name}': partitioned_by needs a field, such as"
                f' partitioned_by("{self.records.names[0]}")'
            )
        changed = copy.copy(self)
        changed.partition_columns = checked_columns(given, self.records.names, f"source '{self.name}'")
        return changed

    def bounded_to(self, slice_: Slice | Dimensions) -> Self:
        if not self.can_be_bounded():
            raise PipelineError(
                f"source '{self.name}' ({self.describe()}) does not say what of it belongs to a partition;"
                f" {self.how_to_bound()}"
            )
        known = slice_.shape if isinstance(slice_, Slice) else slice_
        self.check_dimensions(known)
        changed = copy.copy(self)
        changed.slice = slice_ if isinstance(slice_, Slice) else None
        changed.bound, changed.boundedness = True, Boundedness.BOUNDED
        return changed

    def settings(self) -> str:
        dimensions = sorted(self.slice.dimensions.items()) if self.slice is not None else None
        behind = "" if isinstance(self.behind, Unread) else f" after {self.behind.describe()}"
        return f"{sorted(self.partition_columns.items())} {dimensions}{behind}"

    def check_dimensions(self, known: Dimensions) -> None:
        """Raises `PipelineError` where these dimensions do not say which of the source's rows are in a partition."""
        from dagster_unified.connectors.bounds import check_partition_columns

        check_partition_columns(self.partition_columns, self.records.schema, known, f"source '{self.name}'")

    def can_be_bounded(self) -> bool:
        """Whether it knows what belongs to a partition."""
        return bool(self.partition_columns)

    def how_to_bound(self) -> str:
        """What an author can do about that."""
        return "name the field that says it, with .partitioned_by(field)"

    def read_partition(self, spark: SparkSession) -> DataFrame:
        """What a BATCH run reads: all, or the partition that the source is bounded to."""
        from dagster_unified.connectors.bounds import within

        frame = self.read(spark)
        return (
            frame
            if self.slice is None or not self.partition_columns
            else within(frame, self.partition_columns, [self.slice], self.name)
        )

    def read_partitions(self, spark: SparkSession, bounded: Sequence[SparkSource[Any]]) -> DataFrame:
        """What a BATCH run of several partitions reads.

        The column `PARTITION_INDEX` has the index in `bounded` of the source that is bounded to the row's partition.
        """
        from pyspark.sql import functions as F

        from dagster_unified.connectors.bounds import within

        slices = [source.slice for source in bounded if source.slice is not None]
        if self.partition_columns and self.reads_all():
            return within(self.read(spark), self.partition_columns, slices, self.name)
        frames = [
            source.read_partition(spark).withColumn(PARTITION_INDEX, F.lit(number))
            for number, source in enumerate(bounded)
        ]
        return functools.reduce(lambda some, more: some.unionByName(more), frames)

    def reads_all(self) -> bool:
        """Whether `read` gives the same rows for every partition: only columns say which partition a row is in."""
        return True

    @abstractmethod
    def read_stream(self, spark: SparkSession, folder: UPath) -> DataFrame:
        """The same as a stream; `folder` is the job's own, for what a source has to keep.

        What `after` leaves out is left out here too (`unread`).
        """

    def batch_position(self, spark: SparkSession) -> Position:
        """What a BATCH run will have read when it has finished.

        Ask before the run reads, so that what arrives meanwhile does not count. Raises `UnsupportedError` where the
        source cannot tell.
        """
        if self.slice is not None:
            return partitions_read(self.slice, self.name)
        raise self._positionless()

    def stream_position(self, checkpoint_sources: UPath | None, offset: str | None) -> Position:
        """What a STREAMING query has read at one epoch, together with what was read before it.

        `offset` is the text of this source's offset in Spark's log of that epoch, None where there is none yet;
        `checkpoint_sources` is the source's folder in Spark's checkpoint. Raises `UnsupportedError` where the source
        cannot tell.
        """
        raise self._positionless()

    def _positionless(self) -> UnsupportedError:
        return UnsupportedError(
            f"source '{self.name}' ({self.describe()}) cannot tell what has been read of it, which a savepoint has to"
            " hold; read from files, or partition the source in time with .partitioned_by(field) and run it in BATCH"
        )

    def after(self, position: Position) -> Self:
        """The same source, which reads only what comes after a position, in both modes.

        Raises `StateError` where it cannot tell what that is.
        """
        changed = copy.copy(self)
        changed.behind = position
        changed.check_behind()
        return changed

    def check_behind(self) -> None:
        """Raises `StateError` where the source cannot go on after the position `behind`."""
        if isinstance(self.behind, Unread):
            return
        if not isinstance(self.behind, PartitionsRead):
            known = f"a {type(self).__name__} does not know such a position"
            raise cannot_follow(self.name, self.behind, known)
        if set(self.partition_columns) != {""}:
            raise cannot_follow(
                self.name, self.behind, f"it does not say which records belong to a partition; {self.how_to_bound()}"
            )

    def partitions_behind(self) -> PartitionsRead | None:
        """The partitions that were read before."""
        if isinstance(self.behind, FilesRead):
            return self.behind.partitions
        return self.behind if isinstance(self.behind, PartitionsRead) else None

    def unread(self, frame: DataFrame) -> DataFrame:
        """The rows that belong to no partition that was read before."""
        from dagster_unified.connectors.bounds import beyond

        read = self.partitions_behind()
        if read is None or not self.partition_columns:
            return frame
        return beyond(frame, self.partition_columns[""], read.until, self.name)

    def keeps_malformed(self) -> bool:
        """Whether malformed rows are kept in a side table, rather than dropped."""
        return False


class SparkSink(Sink[In]):
    """A sink that Spark writes."""

    @abstractmethod
    def write(self, frame: DataFrame, context: WriteContext) -> WriteResult:
        """Writes all rows, once per execution.

        `frame` has the columns of `self.records`; each of Spark's tasks has its rows in the order of emission, and the
        rows of a key that an operator before the sink emitted are in one task. The engine counts the rows while they
        are written, so run one job over them. A sink that promises exactly-once first asks whether this execution
        (with `epoch`, `timeline`, `sink` and `partition`) has committed, and then gives a result that is `repeated`;
        it calls `context.before_commit()` last before it commits; and it commits who it is together with the rows,
        also where there are none.
        """

    def write_partitions(self, frame: DataFrame, contexts: Sequence[WriteContext]) -> list[WriteResult] | None:
        """Writes several partitions at once, or returns None where they have to be written one by one.

        The column `PARTITION_INDEX` has the index in `contexts` of a row's partition.

        For a sink that `upserts` the column `EMITTED` has the order of a key's rows within a partition.
        """
        return None

    def elsewhere(self, path: str) -> Self | None:
        """The same sink, writing to another place; None where it writes to none that can be read back."""
        return None

    def exists(self) -> bool:
        """Whether what it wrote is still there, as far as it knows."""
        return True

    def dataset(self) -> ds.Dataset:
        """All that is there."""
        raise NotImplementedError

    @abstractmethod
    def preview(self, spark: SparkSession, rows: int) -> pa.Table | None:
        """The first rows of what is there, or None where it cannot be read back."""


MALFORMED = "__malformed"
"""A struct column (file, row, reason), null in every row that fits."""


def fitting(source: str) -> Column:
    """A condition on a frame with `MALFORMED` that is true for a row that fits.

    A row that does not fit raises an error that says where it is.
    """
    from pyspark.sql import functions as F

    message = F.concat(
        F.lit("dagster_unified.errors.MalformedInputError: "),
        F.to_json(F.struct(F.lit(source).alias("source"), F.col(f"{MALFORMED}.*"))),
    )
    return F.when(F.col(MALFORMED).isNull(), F.lit(True)).otherwise(F.raise_error(message).cast("boolean"))


def spark_schema(schema: pa.Schema) -> StructType:
    """An Arrow schema as Spark's, everything nullable at every depth: Spark's readers do not promise more."""
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.sql.types import StructType

    converted = from_arrow_schema(pa.schema([pa.field(f.name, _nullable(f.type)) for f in schema]))
    return StructType(list(converted.fields))


def _nullable(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _nullable(f.type)) for f in kind])
    if pa.types.is_list(kind):
        return pa.list_(pa.field("element", _nullable(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(_nullable(kind.key_type), _nullable(kind.item_type))
    return kind
