"""The part of a split source that Spark runs: a Python data source that carries the source along.

In BATCH the splits are planned where the DataFrame is made, so that a problem of the source is an error there. In
STREAMING Spark asks a Python process beside the driver, and its offsets are the source's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StringType, StructField, StructType

from dagster_unified.by_value import by_value_bytes, from_bytes
from dagster_unified.connectors.protocol.frame import MALFORMED, PART, Malformed, OnMalformed, spark_schema
from dagster_unified.connectors.protocol.positions import Offsets, Range
from dagster_unified.connectors.protocol.source import planned_in
from dagster_unified.errors import MalformedInputError, StageError, UnifiedError
from dagster_unified.graph.fingerprint import digest
from dagster_unified.records import shorten

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_MALFORMED_ROWS = 10_000
"""Malformed rows at most in one batch."""

_PAUSE = 0.02
"""Seconds at least between two questions for new offsets: Spark asks a hundred times a second while nothing comes."""

_SALT = token_hex()
"""Keeps a source's content, such as a password, from being guessed by the names in Spark's plans."""

_registering = threading.Lock()
_registered: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


class SplitReads(Protocol):
    """The methods of a split source that Spark's processes call (`splits.py` describes each)."""

    name: str
    kind: str
    on_malformed: OnMalformed
    max_records_per_trigger: int | None

    @property
    def columns(self) -> pa.Schema: ...
    def describe(self) -> str: ...
    def available(self, since: Offsets) -> dict[str, int]: ...
    def aligned(self, start: Offsets, end: Offsets, until: Offsets | None) -> Offsets: ...
    def limited(self, start: Offsets, end: Offsets) -> Offsets: ...
    def splits(self, start: Offsets, end: Offsets) -> Sequence[Any]: ...
    def read_split(self, split: Any) -> Iterator[pa.RecordBatch | Malformed]: ...
    def part_of(self, split: Any) -> str | None: ...


def batch(spark: SparkSession, source: SplitReads, start: Offsets, end: Offsets) -> DataFrame:
    """The rows between two positions, in the source's columns."""
    splits = tuple(source.splits(start, end))
    return spark.read.format(_register(spark, source, splits=splits)).load()


def stream(spark: SparkSession, source: SplitReads, range_: Range) -> DataFrame:
    """The source as a stream, in the same columns."""
    return spark.readStream.format(_register(spark, source, range_=range_)).load()


def _register(spark: SparkSession, source: SplitReads, splits: Sequence[Any] = (), range_: Range | None = None) -> str:
    """Register one read of a source with Spark; returns its name.

    Each read has a name of its own: a plan of Connect looks names up when it runs. The source travels in the class, and
    not in options, which Spark shows.
    """
    payload = by_value_bytes((source, splits, range_))
    name = f"{source.kind}_{digest(_SALT, payload)[:16]}"
    with _registering:
        known = _registered.setdefault(spark, set())
        if name not in known:
            members = {"payload": payload, "title": name, "__module__": __name__}
            spark.dataSource.register(type(name, (_SplitData,), members))
            known.add(name)
    return name


class _SplitData(DataSource):
    """The data source of one read."""

    payload: bytes
    title: str

    @classmethod
    def name(cls) -> str:
        return cls.title

    def _read(self) -> tuple[SplitReads, Sequence[Any], Range | None]:
        read: tuple[SplitReads, Sequence[Any], Range | None] = from_bytes(self.payload)
        return read

    def schema(self) -> StructType:
        source, _, range_ = self._read()
        return _schema(source, streaming=range_ is not None)

    def reader(self, schema: StructType) -> DataSourceReader:
        source, splits, _ = self._read()
        return _BatchReader(source, splits)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        source, _, range_ = self._read()
        assert range_ is not None
        return _StreamReader(source, range_)


class _Split(InputPartition):
    def __init__(self, split: Any) -> None:
        self.split = split


class _BatchReader(DataSourceReader):
    def __init__(self, source: SplitReads, splits: Sequence[Any]) -> None:
        self._source, self._splits = source, splits

    def partitions(self) -> list[InputPartition]:
        return [_Split(split) for split in self._splits]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _rows(self._source, partition, streaming=False)


class _StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, source: SplitReads, range_: Range) -> None:
        self._source, self._range = source, range_
        self._until = range_.end
        self._seen: dict[str, int] | None = None
        self._asked = 0.0
        self._reads = ExitStack()
        """Ends with the micro-batch that is read."""

    def __getstate__(self) -> dict[str, Any]:
        """The state for workers, which plan nothing."""
        return {name: value for name, value in vars(self).items() if name != "_reads"}

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        return _sorted(self._range.start)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        most = self._source.max_records_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        # Twice: a part that the query has not seen enters with its oldest offset.
        self._until = self._capped(self._source.available(self._source.available(self._range.start)))

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802 - Spark's name
        time.sleep(max(0.0, self._asked + _PAUSE - time.monotonic()))
        self._seen = self._capped(self._source.available(start))
        self._asked = time.monotonic()
        bounded = isinstance(limit, ReadMaxRows) or self._source.max_records_per_trigger is not None
        end = self._source.aligned(start, self._seen, self._range.end)
        return _sorted(self._source.limited(start, end) if bounded else end)

    def reportLatestOffset(self) -> dict[str, int] | None:  # noqa: N802 - Spark's name
        return None if self._seen is None else _sorted(self._seen)

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        begin = {part: start.get(part, last) for part, last in end.items()}
        with planned_in(self._reads):
            return [_Split(split) for split in self._source.splits(begin, end)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _rows(self._source, partition, streaming=True)

    def commit(self, end: dict[str, int]) -> None:
        """Release what was kept open for the micro-batch; its offsets are in Spark's checkpoint, and nowhere else."""
        self._reads.close()

    def _capped(self, offsets: dict[str, int]) -> dict[str, int]:
        """These offsets, but no later than the stream's end."""
        if self._until is None:
            return offsets
        return {part: min(offset, self._until[part]) for part, offset in offsets.items() if part in self._until}


def _sorted(offsets: Offsets) -> dict[str, int]:
    """Offsets in one order: Spark compares them as texts."""
    return {part: offsets[part] for part in sorted(offsets)}


def _schema(source: SplitReads, streaming: bool) -> StructType:
    """The columns of a source's rows: the records', the malformed rows', and in STREAMING the part."""
    columns = spark_schema(source.columns)
    if source.on_malformed != "fail":
        texts = [StructField(name, StringType()) for name in ("file", "row", "reason")]
        columns = columns.add(MALFORMED, StructType(texts))
    return columns.add(PART, StringType()) if streaming else columns


def _rows(source: SplitReads, partition: InputPartition, streaming: bool) -> Iterator[pa.RecordBatch]:
    """In a worker: the rows of one split."""
    if not isinstance(partition, _Split):  # what Spark asks for where there are no splits
        return
    schema = to_arrow_schema(_schema(source, streaming), timezone="UTC")
    part = source.part_of(partition.split)
    malformed: list[Malformed] = []
    try:
        for entry in source.read_split(partition.split):
            if isinstance(entry, pa.RecordBatch):
                columns = dict(zip(entry.schema.names, entry.columns, strict=True))
                yield _with_schema(columns, len(entry), part, schema)
                continue
            if source.on_malformed == "fail":
                raise _refused(source, entry)
            malformed.append(entry)
            if len(malformed) == _MALFORMED_ROWS:
                yield _set_aside(malformed, part, schema)
                malformed = []
    except (UnifiedError, GeneratorExit):
        raise
    except Exception as error:
        raise StageError(
            f"source '{source.name}': {shorten(partition.split)} of {source.describe()} cannot be read:"
            f" {type(error).__name__}: {error}"
        ) from error
    if malformed:
        yield _set_aside(malformed, part, schema)


def _with_schema(columns: dict[str, pa.Array], size: int, part: str | None, schema: pa.Schema) -> pa.RecordBatch:
    """Some columns in the schema that Spark expects; missing ones are null."""
    arrays = []
    for field in schema:
        column = columns.get(field.name)
        if field.name == PART:
            column = pa.repeat(pa.scalar(part, pa.string()), size)
        elif column is None:
            column = pa.nulls(size, field.type)
        arrays.append(column if column.type == field.type else column.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _set_aside(malformed: Sequence[Malformed], part: str | None, schema: pa.Schema) -> pa.RecordBatch:
    """Rows that do not fit, without any fields."""
    rows = [{"file": entry.place, "row": entry.content, "reason": entry.reason} for entry in malformed]
    return _with_schema({MALFORMED: pa.array(rows, schema.field(MALFORMED).type)}, len(rows), part, schema)


def _refused(source: SplitReads, entry: Malformed) -> MalformedInputError:
    return MalformedInputError(
        f"source '{source.name}': {entry.place}: {entry.reason}: {shorten(entry.content)}; correct what writes it, or"
        " read with on_malformed='drop' or 'divert'"
    )
