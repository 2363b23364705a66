"""A source of records from the program: bounded, for tests, examples and small tables.

Refuses what would be misread, such as a text for its letters.
"""

from __future__ import annotations

import copy
import keyword
import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import pyarrow as pa

from dagster_unified.connectors.protocol.frame import spark_schema
from dagster_unified.connectors.protocol.positions import ALL, EverythingRead, Position, cannot_follow, cannot_stop
from dagster_unified.connectors.protocol.source import Ending, SparkSource
from dagster_unified.errors import PipelineError
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.graph.fingerprint import digest, fingerprint
from dagster_unified.operators.failures import placed
from dagster_unified.operators.functions.type_variables import Out
from dagster_unified.records import record_type, shorten, type_name
from dagster_unified.spark_internals import spark_log
from dagster_unified.storage.paths import as_pattern, children, put

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from typing_extensions import TypeForm
    from upath import UPath

_FRAMES = {
    ("pandas", "DataFrame"): "[{row}(*values) for values in frame.itertuples(index=False)]",
    ("polars", "DataFrame"): "[{row}(*values) for values in frame.iter_rows()]",
    ("polars", "LazyFrame"): "[{row}(*values) for values in frame.collect().iter_rows()]",
    ("pyarrow", "Table"): "[{row}(**values) for values in table.to_pylist()]",
    ("pyarrow", "RecordBatch"): "[{row}(**values) for values in batch.to_pylist()]",
    ("pyarrow", "Array"): "array.to_pylist()",
    ("pyarrow", "ChunkedArray"): "array.to_pylist()",
    ("pyspark", "DataFrame"): "[{row}(**values.asDict()) for values in frame.collect()]",
}
"""How the rows of a table become records, by its class and that class's package."""


def records_of(collection: object, type_info: object) -> list[Any]:
    """Return the records of a collection; raise `PipelineError` where its items are something else."""
    slip = _slip(collection, type_info)
    if slip is not None:
        raise PipelineError(slip)
    if not isinstance(collection, Iterable):
        remedy = "call it, or give what it returns" if callable(collection) else "give a list of records"
        raise PipelineError(f"{shorten(collection)} ({type_name(type(collection))}) is no collection; {remedy}")
    return list(collection)


def type_of(record: Any) -> Any:
    """Return the type that says which columns a record has; raise `PipelineError` where its own does not."""
    kind = type(record)
    if kind is tuple:
        return tuple[tuple(map(type_of, record))]  # type: ignore[misc]
    if kind.__module__ == "numpy" and hasattr(record, "item") and getattr(record, "shape", None) == ():
        return type(record.item())
    if kind.__module__.startswith("pandas.") and _frame(kind) is None:  # its Timestamp and Timedelta
        return next((base for base in (datetime, timedelta) if isinstance(record, base)), kind)
    if record is None:
        raise PipelineError("its first record is None, which stands for no record; leave it out")
    if isinstance(record, dict):
        raise PipelineError(_of_dict(record))
    if isinstance(record, (list, set, frozenset)) or _frame(kind) is not None or kind.__module__ == "numpy":
        raise PipelineError(
            f"its first record is a {type_name(kind)}, which says nothing about its columns; make it a tuple, or an"
            " instance of an annotated class such as a NamedTuple"
            + (", or give type_info=, such as list[int]" if isinstance(record, list) else "")
        )
    return kind


def _slip(collection: object, type_info: object) -> str | None:
    """The problem and the remedy where a collection yields something else than its records; None where it is fine."""
    kind = type_name(type(collection))
    if isinstance(collection, (str, bytes, bytearray)):
        items = "letters" if isinstance(collection, str) else "bytes"
        return f"{shorten(collection)} is one value, whose {items} would be the records; give [value], or list(value)"
    if isinstance(collection, tuple) and hasattr(collection, "_fields"):
        return f"{shorten(collection)} is one record, whose fields would be the records; give [record]"
    if isinstance(collection, Mapping):
        return f"a {kind} gives only its keys; give list(given.items()), list(given.values()) or list(given)"
    if isinstance(collection, (set, frozenset)):
        return (
            f"a {kind} has no order, and another one in each process, so that a job could not go on where it stopped;"
            " give sorted(given)"
        )
    remedy = _frame(type(collection))
    if remedy is None:
        return None
    if "{row}" not in remedy:
        return f"a {kind} gives Arrow's values, not Python's; give {remedy}"
    row = type_name(type_info) if isinstance(type_info, type) else "Row"
    annotated = "" if isinstance(type_info, type) else ", with Row a NamedTuple of its columns"
    return (
        f"a {kind} gives its columns, not its rows; give {remedy.format(row=row)}{annotated}, or read the file that it"
        " comes from with a source, such as ParquetSource or CsvSource"
    )


def _frame(kind: type) -> str | None:
    """How the rows of a table of this class become records; None for any other class."""
    classes = ((base.__module__.partition(".")[0], base.__name__) for base in kind.__mro__)
    return next((_FRAMES[name] for name in classes if name in _FRAMES), None)


def _of_dict(record: Mapping[Any, Any]) -> str:
    """The message for a record that is a dict."""
    message = "its first record is a dict, which has no element type at run time"
    if not record or not all(isinstance(key, str) and key.isidentifier() for key in record):
        return f"{message}; give type_info=, such as dict[str, int]"
    if any(keyword.iskeyword(key) or key.startswith("_") for key in record):
        return f"{message}; make an annotated class of its keys, or give type_info=, such as dict[str, int]"
    fields = "; ".join(f"{key}: {type_name(type(value))}" for key, value in record.items())
    return (
        f"{message}; make it Row(**record), with class Row(NamedTuple): {fields}; or give type_info=, such as"
        " dict[str, int]"
    )


class _Part(NamedTuple):
    """Records of a collection in a file, from a place on; the hash is of their values."""

    first: int
    size: int
    hash: str

    @classmethod
    def of(cls, name: str) -> _Part | None:
        match = _FILE.fullmatch(name)
        return None if match is None else cls(int(match[1]), int(match[2]), match[3])

    @property
    def name(self) -> str:
        return f"{self.first}-{self.size}-{self.hash}.parquet"


_FILE = re.compile(r"(\d+)-(\d+)-(\w+)\.parquet")


def forget_collections(sources: UPath) -> None:
    """Let the sources of a job start again from their first record; `sources` has a folder for each."""
    for file in sources.glob("*/*-*-*.parquet"):
        if _FILE.fullmatch(file.name) is not None:
            file.unlink()


class CollectionSource(SparkSource[Out]):
    """Emits its records, in both modes in their order; ends after the last one. `type_info` is their type.

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
        """Write its records to `folder` once, and read them from there; later additions go to another file.

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
        names = [
            spark_log.path_of(file.path).split("/")[-1] for file in spark_log.files_found(checkpoint_sources, logged)
        ]
        return EverythingRead(max(part.first + part.size for name in names if (part := _Part.of(name)) is not None))

    def until(self, position: Position) -> Self:
        if not isinstance(position, EverythingRead) or (position.count or 0) > len(self.data):
            raise cannot_stop(self.name, position, f"it has {len(self.data)} records")
        changed = copy.copy(self)
        changed.stop_position = position
        changed.data, changed.batch = self.data[: position.count], self.batch.slice(0, position.count)
        return changed

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
        return pa.Table.from_batches([self.batch.slice(first)])

    def _part(self, first: int, end: int) -> _Part:
        records = self.batch.slice(first, end - first)
        return _Part(first, len(records), digest(*map(repr, records.to_pylist())))
