"""Sources that are read in splits: what a connector to a log, a queue or a database implements, once for both modes.

A source of this kind has *parts*, such as the partitions of a topic; an offset says how far each part has been read.
The library plans which offsets a run or a micro-batch reads; the source cuts them into splits, and reads each split as
Arrow batches in one of Spark's workers.

Knows positions, slices and record types; `split_reader.py` is the part that Spark runs.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import msgspec

from dagster_unified.connectors.protocol.frame import Malformed
from dagster_unified.connectors.protocol.positions import (
    Offsets,
    OffsetsRead,
    PartitionsRead,
    Position,
    Range,
    cannot_follow,
    cannot_stop,
    held_back,
    partitions_read,
    shared,
)
from dagster_unified.connectors.protocol.source import Ending, SparkSource
from dagster_unified.errors import PipelineError, SourceError, StateError
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.graph.fingerprint import digest
from dagster_unified.operators.functions.type_variables import Out
from dagster_unified.records import shorten
from dagster_unified.storage.paths import put

if TYPE_CHECKING:
    from datetime import datetime

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from upath import UPath

    from dagster_unified.graph.connectors import Dimensions, TimeRange

_IDENTITIES = "identities.json"
"""The file beside a stream's range, with the identities of what its offsets refer to."""


class SplitSource(SparkSource[Out]):
    """A source that plans splits between two positions, and reads a split as Arrow batches in a worker.

    A connector sets `name`, `kind`, `records` and `boundedness`, and implements the abstract methods below. The
    library makes of it a source for both modes:

    In BATCH a run reads from `first` to `last`, which are asked for once, when the run begins. A run for a partition in
    time reads from `at(start)` to `at(end)`, if the source `finds_times`; or, with `partitioned_by`, the records that a
    field puts into the partition.

    In STREAMING each micro-batch reads up to `newest`, at most about `max_records_per_trigger` records. The offsets are
    in Spark's checkpoint. A part that appears while the job runs is read from its oldest record.

    Savepoints hold the offsets, and `after` goes on from them in either mode.

    All methods but `read_split` run on the driver, or in a Python process beside it. The object travels there and to
    the workers by value, with its author's classes, so it holds no open connections.

    There is an example in the guide on connectors.
    """

    max_records_per_trigger: int | None = None
    can_wait = True
    finds_times: bool = False
    """Whether `at` finds where the records of a moment begin, so that a partition's window bounds the source."""

    _range: Range | None = None
    _stops_at: OffsetsRead | None = None
    """The position at the end of that range."""

    _watermarks: UPath | None = None

    @property
    @abstractmethod
    def origin(self) -> str:
        """The thing that is read, without what may change: a position with another origin is of another source."""

    @abstractmethod
    def newest(self) -> Offsets:
        """Where each existing part ends now."""

    @abstractmethod
    def oldest(self) -> Offsets:
        """The oldest offset of each part that can still be read."""

    def first(self) -> Offsets:
        """Where reading begins, if nothing was read before: the oldest records, unless the author says otherwise."""
        return self.oldest()

    def last(self) -> Offsets | None:
        """Where reading ends; None where the author sets no end.

        BATCH then ends where each part ends now, and STREAMING does not end.
        """
        return None

    def at(self, moment: datetime) -> Offsets:
        """Where the records of a moment or later begin; the end of a part that has none."""
        raise NotImplementedError(f"{type(self).__name__} says that it finds times, and has no `at`")

    @abstractmethod
    def splits(self, start: Offsets, end: Offsets) -> Sequence[Any]:
        """Cut the range between two positions into pieces that workers read, each in one task.

        Both positions have the same parts. A split is anything that can be pickled.
        """

    @abstractmethod
    def read_split(self, split: Any) -> Iterator[pa.RecordBatch | Malformed]:
        """Read one split, in a worker: batches in the columns of `records`, and entries that do not fit them."""

    def part_of(self, split: Any) -> str | None:
        """The part that a split belongs to, if any: STREAMING then keeps a watermark for each part."""
        return None

    def as_records(self, rows: DataFrame) -> DataFrame:
        """The columns of splits as the record's fields; the same, unless `columns` are others."""
        return rows

    # How the library reads it

    @property
    def columns(self) -> pa.Schema:
        """The columns in which a split is read."""
        return self.records.schema

    def snapshot(self) -> str:
        return digest(self.kind, self.origin)

    def identifies_input(self) -> bool:
        return False

    def can_be_bounded(self) -> bool:
        return super().can_be_bounded() or self.finds_times

    def has_present(self) -> bool:
        return True

    def reads_all(self) -> bool:
        return not self.finds_times or bool(self.partition_columns)

    def check_dimensions(self, known: Dimensions) -> None:
        super().check_dimensions(known)
        missing = [name for name in known.names if name not in self.partition_columns]
        in_time = [name for name in missing if name in known.in_time]
        if self.finds_times and len(in_time) == 1:
            missing.remove(in_time[0])
        if missing:
            dimension = f"dimension '{missing[0]}'" if missing[0] else "the partitions, which are not in time"
            raise PipelineError(
                f"source '{self.name}': it does not say which records belong to {dimension}; name the field that says"
                f" it, with .partitioned_by({missing[0] or 'field'}=...){self._or_all()}"
            )

    def with_fixed_range(self) -> Self:
        changed = copy.copy(self)
        changed._range = self._batch_range()
        assert changed._range.end is not None
        changed._stops_at = OffsetsRead(self.origin, changed._range.end, None, dict(self.identities()))
        return changed

    def stops_at(self) -> Position | None:
        return None if self._range is None else self._stops_at

    def until(self, position: Position) -> Self:
        if not isinstance(position, OffsetsRead) or position.origin != self.origin:
            raise cannot_stop(self.name, position, f"it reads {self.origin}")
        changed = copy.copy(self)
        changed.stop_position, changed._range, changed.boundedness = position, None, Boundedness.BOUNDED
        return changed

    def after(self, position: Position) -> Self:
        changed = super().after(position)
        changed._range = None
        return changed

    def bounded_to(self, slice_: Any) -> Self:
        changed = super().bounded_to(slice_)
        changed.stop_position = changed._range = None
        return changed

    def read(self, spark: SparkSession) -> DataFrame:
        from dagster_unified.connectors.protocol.split_reader import batch

        range_ = self._range or self._batch_range()
        assert range_.end is not None
        return self.unread(self.as_records(batch(spark, self, range_.start, range_.end)))

    def read_stream(self, spark: SparkSession, folder: UPath) -> DataFrame:
        """The same as a stream. Its start and end are decided once and kept in `folder`."""
        from dagster_unified.connectors.protocol.split_reader import stream

        return self.unread(self.as_records(stream(spark, self, self.stream_range(folder))))

    def going_by(self, watermarks: UPath) -> Self:
        """The same source, with a stream that follows the watermarks in this file (see `positions.py`)."""
        changed = copy.copy(self)
        changed._watermarks = watermarks
        return changed

    def batch_position(self, spark: SparkSession) -> Position:
        if self.slice is not None:
            known = partitions_read(self.slice, self.name)
            if self._window() is None:
                return known
        fixed = self if self._range is not None else self.with_fixed_range()
        assert fixed._stops_at is not None
        return msgspec.structs.replace(fixed._stops_at, partitions=self._filtered_before())

    def stream_position(self, checkpoint_sources: UPath | None, offset: str | None) -> Position:
        if offset is None:
            return self.resume_position
        try:
            offsets = msgspec.json.decode(offset, type=dict[str, int])
        except msgspec.DecodeError:
            raise StateError(
                f"source '{self.name}': {shorten(offset)} in Spark's checkpoint is not a position of {self.describe()};"
                " restore the checkpoint, or start without state"
            ) from None
        return OffsetsRead(self.origin, offsets, self._filtered_before())

    def backlog(self, offset: str, latest: str) -> int | None:
        try:
            read, there = (msgspec.json.decode(text, type=dict[str, int]) for text in (offset, latest))
        except msgspec.DecodeError:
            return None
        return sum(max(0, last - read.get(part, last)) for part, last in there.items())

    def check_resume_position(self) -> None:
        if isinstance(self.resume_position, OffsetsRead):
            if self.resume_position.origin != self.origin:
                raise cannot_follow(self.name, self.resume_position, f"it reads {self.origin}")
        elif not isinstance(self.resume_position, PartitionsRead) or self.partition_columns or not self.finds_times:
            super().check_resume_position()

    def aligned(self, start: Offsets, end: Offsets, until: Offsets | None) -> Offsets:
        """Where a micro-batch may end: parts that are too far ahead of others of their group stay where they are."""
        if self._watermarks is None:
            return end
        waiting = held_back(self._watermarks, start, end, until)
        return {part: start[part] if part in waiting else last for part, last in end.items()}

    def limited(self, start: Offsets, end: Offsets) -> Offsets:
        """Where a micro-batch ends that may not read everything up to `end`."""
        return end if self.max_records_per_trigger is None else shared(start, end, self.max_records_per_trigger)

    def available(self, since: Offsets) -> dict[str, int]:
        """The current end after a position, for a stream.

        A part that the position does not have enters with its oldest offset, and is read from the next time on: so a
        micro-batch that is run again reads the same.
        """
        newest = self._unlost(since, self.newest())
        oldest = self.oldest() if any(part not in since for part in newest) else {}
        return {**since, **{part: end if part in since else oldest.get(part, end) for part, end in newest.items()}}

    def _window(self) -> TimeRange | None:
        """The range of time that bounds it to a partition; None where a field says the partition."""
        if self.slice is None or not self.finds_times:
            return None
        in_time = [name for name in self.slice.shape.in_time if name not in self.partition_columns]
        return self.slice.time() if in_time else None

    def _filtered_before(self) -> PartitionsRead | None:
        """The partitions whose records a field leaves out, and not the start of reading."""
        return self.partitions_read_before() if self.partition_columns else None

    def _begin(self) -> Offsets:
        """Where reading begins after what was read before."""
        if isinstance(self.resume_position, OffsetsRead):
            if self.resume_position.identities:
                self._check_identities(self.resume_position.identities, self.identities())
            return self.resume_position.offsets
        if isinstance(self.resume_position, PartitionsRead) and not self.partition_columns:
            return self.at(self.resume_position.until)
        return self.first()

    def _stop(self) -> Offsets | None:
        """Where reading ends: where another run has stopped, or where the author says; None for neither."""
        stop = self.stop_position
        if not isinstance(stop, OffsetsRead):
            return self.last()
        if stop.identities:
            self._check_identities(stop.identities, self.identities())
        self._unlost(stop.offsets, self.newest())
        return stop.offsets

    def _batch_range(self) -> Range:
        window = self._window()
        start = self._begin() if window is None else self.at(window.start)
        end = self._stop() if window is None or self.stop_position is not None else self.at(window.end)
        if end is None or window is None:
            newest = self._unlost(start, self.newest())
            end = newest if end is None else end
        oldest = self.oldest() if any(part not in start for part in end) else {}
        begin = {part: start.get(part, oldest.get(part, last)) for part, last in end.items()}
        begin = {**start, **begin}
        return Range(begin, {part: max(end.get(part, first), first) for part, first in begin.items()})

    def stream_range(self, folder: UPath) -> Range:
        """Where its stream begins and ends; decided once and kept in `folder`."""
        self._keep_identities(folder)
        stop = () if self.stop_position is None else (self.stop_position,)
        file = folder / f"range-{digest(self.resume_position, *stop)[:16]}.json"
        if file.exists():
            return msgspec.json.decode(file.read_bytes(), type=Range)
        start, last = dict(self._begin()), self._stop()
        # it does not end before it begins, and keeps the offsets of parts that are not read any more
        ends = {**start, **{part: max(end, start.get(part, end)) for part, end in (last or {}).items()}}
        range_ = Range(start, None if last is None else ends)
        folder.mkdir(parents=True, exist_ok=True)
        put(file, msgspec.json.encode(range_))
        return range_

    def ending(self, folder: UPath) -> Ending | None:
        range_ = self.stream_range(folder)
        return None if range_.end is None else range_.parts_read

    def identities(self) -> Mapping[str, str]:
        """Ids of the things that offsets refer to, which change when a thing is made again under its name; or empty."""
        return {}

    def _keep_identities(self, folder: UPath) -> None:
        """Keep the identities of a stream's offsets; raises `SourceError` where they have changed."""
        now = self.identities()
        if not now:
            return
        known = self.kept_identities(folder)
        self._check_identities(known, now)
        if not now.items() <= known.items():
            folder.mkdir(parents=True, exist_ok=True)
            put(folder / _IDENTITIES, msgspec.json.encode({**known, **now}))

    @staticmethod
    def kept_identities(folder: UPath) -> Mapping[str, str]:
        """The identities of a stream's offsets that were kept in `folder`; empty where none were."""
        file = folder / _IDENTITIES
        return msgspec.json.decode(file.read_bytes(), type=dict[str, str]) if file.exists() else {}

    def _check_identities(self, read: Mapping[str, str], now: Mapping[str, str]) -> None:
        again = next((name for name, identity in read.items() if now.get(name, identity) != identity), None)
        if again is not None:
            raise SourceError(
                f"source '{self.name}': {again} was deleted and made again since it was read, so that what was read of"
                " it says nothing of what there is now; start without state, or with another uid, to read it from its"
                " beginning"
            )

    def _unlost(self, read: Offsets, end: Offsets) -> Offsets:
        """Where the parts end now; raises `SourceError` where one ends before what was read of it."""
        for part, offset in read.items():
            if offset > end.get(part, offset):
                raise SourceError(
                    f"source '{self.name}': {part} ends at offset {end[part]}, and has been read up to {offset}: it was"
                    " deleted and made again, or lost records; start without state to read it from its beginning"
                )
        return end


def forget_ranges(sources: UPath) -> None:
    """Let the sources of a job decide again where they begin and end; `sources` has a folder for each."""
    for pattern in ("*/range-*.json", f"*/{_IDENTITIES}"):
        for file in sources.glob(pattern):
            file.unlink()
