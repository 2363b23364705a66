"""The interface of a source that Spark reads."""

from __future__ import annotations

import copy
import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self

from dagster_unified.connectors.protocol.bounds import (
    PartitionBounds,
    bounding_range,
    check_partition_columns,
    checked_columns,
    rows_after,
    rows_in,
)
from dagster_unified.connectors.protocol.frame import OnMalformed
from dagster_unified.connectors.protocol.positions import (
    FilesRead,
    OffsetsRead,
    PartitionsRead,
    Position,
    SparkOffset,
    Unread,
    cannot_follow,
    partitions_read,
)
from dagster_unified.errors import PipelineError, UnsupportedError
from dagster_unified.graph.connectors import Boundedness, Dimensions, Slice, Source
from dagster_unified.operators.functions.type_variables import Out
from dagster_unified.operators.layout import PARTITION_INDEX

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from upath import UPath


Ending = Callable[["UPath", "str | None"], frozenset[str]]
"""Returns the parts of a source that have been read to their end, and `ALL` if all of them have.

It takes the source's folder in Spark's checkpoint, and its offset in Spark's log, as `stream_position` does.
"""


class SparkSource(Source[Out]):
    """A source that Spark reads."""

    on_malformed: OnMalformed = "fail"
    """How rows that do not fit the records are treated."""

    partition_columns: Mapping[str, str] = {}
    """The fields that say a record's partition, by dimension."""

    slice: Slice | None = None
    bound: bool = False
    resume_position: Position = Unread()
    """The position that was read before: it reads what comes after."""

    stop_position: Position | None = None
    """The position at which it stops, if another run's says so."""

    ends_where_it_stands: bool = False
    """Whether its stream has ended once an epoch finds no more of it, so that an epoch more has to look."""

    _covered: PartitionBounds | None = None
    """The bounds of several partitions that are read together."""

    @abstractmethod
    def read(self, spark: SparkSession) -> DataFrame:
        """The records' columns, and `MALFORMED` (see below) where the source does not fail on a malformed row.

        Leaves out what `after` leaves out (`unread`).
        """

    def partitioned_by(self, field: str | None = None, /, **dimensions: str) -> Self:
        """The same source; a run for a partition reads only the records that `field` puts into it.

        For partitions in time the field is a datetime, a date, milliseconds since the epoch or an ISO text (UTC where
        it names no zone); for static ones it equals the key. With several dimensions each has its own: `date="day",
        airport="origin"`. A run without partitions, and STREAMING, read everything.
        """

        if self.in_every_partition:
            raise self._already_partitioned("partitioned_by")
        columns = {**({"": field} if field is not None else {}), **dimensions}
        if not columns:
            raise PipelineError(
                f"source '{self.name}': partitioned_by needs a field, such as"
                f' partitioned_by("{self.records.names[0]}")'
            )
        changed = copy.copy(self)
        changed.partition_columns = checked_columns(columns, self.records.names, f"source '{self.name}'")
        return changed

    def for_every_partition(self) -> Self:
        """The same source; a run for a partition reads all of it: rules, a dimension, a table of products.

        A run for several partitions reads it once. A run without partitions, and STREAMING, read all of it in any case.
        From a source without an end a partition has what is there when the run begins.
        """
        if self.can_be_bounded() and self.says_partition():
            raise self._already_partitioned("for_every_partition")
        if self.boundedness is Boundedness.UNBOUNDED and not self.has_present():
            raise PipelineError(
                f"source '{self.name}' ({self.describe()}): for_every_partition reads all of a source, and this one has"
                " no end, nor anything that is there at the beginning of a run; read from files or a table"
            )
        changed = copy.copy(self)
        changed.in_every_partition = True
        return changed

    def says_partition(self) -> bool:
        """Whether the author has said which records belong to a partition."""
        return bool(self.partition_columns)

    def has_present(self) -> bool:
        """Whether a BATCH run can read the current content of a source without an end."""
        return False

    def _already_partitioned(self, method: str) -> PipelineError:
        return PipelineError(
            f"source '{self.name}' ({self.describe()}): {method} cannot be used here, since the source says already"
            " what of it belongs to a partition: partitioned_by(field) and a path template give each partition records"
            " of its own, for_every_partition() gives each all of them; use one of these"
        )

    def bounded_to(self, slice_: Slice | Dimensions) -> Self:
        if self.in_every_partition:
            changed = copy.copy(self)
            changed.boundedness = Boundedness.BOUNDED
            return changed
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
        behind = "" if isinstance(self.resume_position, Unread) else f" after {self.resume_position.describe()}"
        behind += " all in every partition" if self.in_every_partition else ""
        return f"{sorted(self.partition_columns.items())} {dimensions}{behind}"

    def check_dimensions(self, known: Dimensions) -> None:
        """Raise `PipelineError` where these dimensions do not say which of the source's rows are in a partition."""

        check_partition_columns(self.partition_columns, self.records.schema, known, f"source '{self.name}'")

    def can_be_bounded(self) -> bool:
        """Whether it knows which records belong to a partition."""
        return bool(self.partition_columns)

    def distinguishes(self, one: Slice, other: Slice) -> bool:
        """Whether these two partitions have different records."""
        return True

    def how_to_bound(self) -> str:
        """The advice for a source that cannot be bounded to a partition."""
        return f"name the field that says it, with .partitioned_by(field){self._or_all()}"

    def _or_all(self) -> str:
        has_all = self.boundedness is Boundedness.BOUNDED or self.has_present()
        return ", or give all of it to each partition, with .for_every_partition()" if has_all else ""

    def of_partition(self) -> str:
        """The end of its description: the partition that it reads, if it is bounded to one."""
        return f", partition {self.slice.key}" if self.slice is not None else ""

    def read_partition(self, spark: SparkSession) -> DataFrame:
        """The rows of a BATCH run: all, or those of the partition that the source is bounded to."""

        frame = self.read(spark)
        return (
            frame
            if self.slice is None or not self.partition_columns
            else rows_in(frame, self.partition_columns, [self.slice], self.name)
        )

    def read_partitions(self, spark: SparkSession, bounded: Sequence[SparkSource[Any]]) -> DataFrame:
        """The rows of a BATCH run of several partitions.

        The column `PARTITION_INDEX` has the index in `bounded` of the source that is bounded to the row's partition.
        """
        from pyspark.sql import functions as F

        if self.in_every_partition:
            indexes = F.array(*map(F.lit, range(len(bounded))))
            return bounded[-1].read(spark).withColumn(PARTITION_INDEX, F.explode(indexes))
        slices = [source.slice for source in bounded if source.slice is not None]
        alike = all(source.stop_position == self.stop_position for source in bounded)
        if self.partition_columns and self.reads_all() and alike:
            together = copy.copy(self)
            together._covered = bounding_range(self.partition_columns, slices)
            return rows_in(together.read(spark), self.partition_columns, slices, self.name)
        frames = [
            source.read_partition(spark).withColumn(PARTITION_INDEX, F.lit(number))
            for number, source in enumerate(bounded)
        ]
        return functools.reduce(lambda some, more: some.unionByName(more), frames)

    def covered(self) -> PartitionBounds:
        """Bounds of the partitions that are read, so that a reader may leave out the rest; Spark filters exactly."""

        if self._covered is not None:
            return self._covered
        return {} if self.slice is None else bounding_range(self.partition_columns, [self.slice])

    def reads_all(self) -> bool:
        """Whether `read` returns the same rows for every partition: only columns say which partition a row is in."""
        return True

    @abstractmethod
    def read_stream(self, spark: SparkSession, folder: UPath) -> DataFrame:
        """The same as a stream; `folder` is the job's own, for what a source has to keep.

        Leaves out what `after` leaves out (`unread`).
        """

    def ending(self, folder: UPath) -> Ending | None:
        """A function that tells how much of its stream has been read to the end.

        None where the stream does not end, or the source cannot tell. `folder` is the one of `read_stream` before.
        """
        return None

    def with_fixed_range(self) -> Self:
        """The same source, with a BATCH run's range decided now: its position is then exactly what is read."""
        return self

    def stops_at(self) -> Position | None:
        """Where a BATCH run stops whose range is decided; None where another run could not stop there (`until`)."""
        return None

    def lost(self, position: Position) -> Sequence[str]:
        """What a run had read that had reached a position, and what is gone; empty where that is not known."""
        return ()

    def until(self, position: Position) -> Self:
        """The same source, bounded: it reads no more than a run that had reached a position, in both modes.

        Raises `StateError` for a position of another source, and `UnsupportedError` where it cannot stop at one.
        """
        raise UnsupportedError(
            f"source '{self.name}' ({self.describe()}) cannot stop where another run has stopped; read from files, a"
            " table with versions, or a topic"
        )

    def batch_position(self, spark: SparkSession) -> Position:
        """The position of a BATCH run when it has finished.

        Ask before the run reads, so that what arrives meanwhile does not count. Raises `UnsupportedError` where the
        source cannot tell.
        """
        if self.slice is not None:
            return partitions_read(self.slice, self.name)
        raise self._positionless()

    def stream_position(self, checkpoint_sources: UPath | None, offset: str | None) -> Position:
        """The position of a STREAMING query at one epoch, including what was read before it.

        `offset` is the text of this source's offset in Spark's log of that epoch, None where there is none yet;
        `checkpoint_sources` is the source's folder in Spark's checkpoint. Raises `UnsupportedError` where the source
        cannot tell.
        """
        raise self._positionless()

    def backlog(self, offset: str, latest: str) -> int | None:
        """How many records wait between two of its offsets, in Spark's form; None if unknown."""
        return None

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
        changed.resume_position = position
        changed.check_resume_position()
        return changed

    def check_resume_position(self) -> None:
        """Raise `StateError` where the source cannot go on after `resume_position`."""
        if isinstance(self.resume_position, Unread):
            return
        if not isinstance(self.resume_position, PartitionsRead):
            known = f"a {type(self).__name__} does not know such a position"
            raise cannot_follow(self.name, self.resume_position, known)
        if set(self.partition_columns) != {""}:
            raise cannot_follow(
                self.name,
                self.resume_position,
                f"it does not say which records belong to a partition; {self.how_to_bound()}",
            )

    def partitions_read_before(self) -> PartitionsRead | None:
        """The partitions that were read before."""
        if isinstance(self.resume_position, FilesRead | OffsetsRead | SparkOffset):
            return self.resume_position.partitions
        return self.resume_position if isinstance(self.resume_position, PartitionsRead) else None

    def unread(self, frame: DataFrame) -> DataFrame:
        """The rows that belong to no partition that was read before."""

        read = self.partitions_read_before()
        if read is None or not self.partition_columns:
            return frame
        return rows_after(frame, self.partition_columns[""], read.until, self.name)

    def lacking(self) -> Mapping[str, str]:
        """By column, the files that lack it, so that it is None in their rows."""
        return {}

    def keeps_malformed(self) -> bool:
        """Whether malformed rows are kept in a side table, rather than dropped."""
        return self.on_malformed == "divert"


_reads: ContextVar[ExitStack | None] = ContextVar("reads", default=None)


def at_end_of_read(release: Callable[[], object]) -> None:
    """Call `release` when what is planned now has been read, for a source that keeps something open until then.

    Spark does not say when a DataFrame was read for the last time; its reader does: a stage of BATCH, and in STREAMING
    the reader of a micro-batch. Outside of both nobody does.
    """
    reads = _reads.get()
    if reads is not None:
        reads.callback(release)


@contextmanager
def planned_in(reads: ExitStack) -> Iterator[None]:
    """Reads planned inside end when `reads` is closed."""
    token = _reads.set(reads)
    try:
        yield
    finally:
        _reads.reset(token)


@contextmanager
def read_here() -> Iterator[None]:
    """Reads planned inside end with the block."""
    with ExitStack() as reads, planned_in(reads):
        yield
