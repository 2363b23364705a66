"""Structured Streaming's own sources: `rate`, for tests and demonstrations, and any other by its format and options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from dagster_unified.connectors.protocol.frame import as_fields
from dagster_unified.connectors.protocol.positions import ALL, OffsetsRead, Position, SparkOffset, cannot_follow
from dagster_unified.connectors.protocol.source import Ending, SparkSource
from dagster_unified.errors import PipelineError, StateError, UnsupportedError
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.graph.fingerprint import digest
from dagster_unified.operators.functions.type_variables import Out
from dagster_unified.records import record_type, shorten
from dagster_unified.values import check_count

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from typing_extensions import TypeForm
    from upath import UPath

    from dagster_unified.graph.connectors import Slice

StartingOptions: TypeAlias = Callable[[str], Mapping[str, str | None]]


def _kafka_starting_options(offset: str) -> Mapping[str, str | None]:
    """The starting options of Spark's Kafka source; the two that would override `startingOffsets` are removed."""
    return {"startingOffsets": offset, "startingOffsetsByTimestamp": None, "startingTimestamp": None}


KNOWN: Mapping[str, StartingOptions] = {"kafka": _kafka_starting_options}
"""The options with which a Spark source starts after an offset, by its format."""


_KAFKA_ENDING_TIMES = ("endingTimestamp", "endingOffsetsByTimestamp")
"""Options of Spark's Kafka source that override `endingOffsets`."""


_KAFKA_ENDS = {"endingoffsets", *map(str.lower, _KAFKA_ENDING_TIMES)}


class StructuredSource(SparkSource[Out]):
    """A source of Spark's `format`, such as `kafka`. Unbounded.

    Its columns are those of `record`, cast where nothing is lost.

    With `bounded=True` BATCH reads it with `spark.read`; `options` then have to say where it ends, such as Kafka's
    `endingOffsets`. STREAMING reads it with `spark.readStream`, and it ends there with the first epoch in which Spark
    finds no more of it. `partition_options` gets a partition as a `Slice`, and returns the further options with which
    BATCH reads it, such as Kafka's `startingTimestamp` and `endingTimestamp` from its `time()`.

    A savepoint has to hold what was read: in STREAMING Spark's offset, as in its log. `starting_options` gets that
    offset, and returns the options with which a run starts right after it, in either mode, such as the
    `startingVersion` of a table's changes; they override `options`, and None removes one. For Spark's `kafka` they are
    known. A BATCH run over that leaves a position where `endingOffsets` has a number for each partition. For any other
    source without `starting_options` a savepoint is an error.

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
        starting_options: StartingOptions | None = None,
    ) -> None:
        self.partition_options = partition_options
        self.starting_options = starting_options or KNOWN.get(format)
        self.format = self.kind = format
        self.options = dict(options or {})
        self.name = name or format
        self.records = record_type(record, f"source '{self.name}'")
        self.boundedness = Boundedness.BOUNDED if bounded else Boundedness.UNBOUNDED
        self.ends_where_it_stands = bounded

    def describe(self) -> str:
        return f"Spark source {self.format}{self.of_partition()}"

    def identifies_input(self) -> bool:
        return False

    def can_be_bounded(self) -> bool:
        return super().can_be_bounded() or self.partition_options is not None

    def reads_all(self) -> bool:
        return self.partition_options is None

    def says_partition(self) -> bool:
        return super().says_partition() or self.partition_options is not None

    def how_to_bound(self) -> str:
        return f"{super().how_to_bound()}, or give partition_options="

    def snapshot(self) -> str:
        return digest(self.format, sorted(self.options.items()))

    def read(self, spark: SparkSession) -> DataFrame:
        partition = (
            self.partition_options(self.slice) if self.partition_options is not None and self.slice is not None else {}
        )
        options = {**self._started(), **partition}
        return self.unread(self._typed(spark.read.format(self.format).options(**options).load()))

    def read_stream(self, spark: SparkSession, folder: UPath) -> DataFrame:
        ends = next((key for key in self.options if self.format == "kafka" and key.lower() in _KAFKA_ENDS), None)
        if ends is not None:
            raise UnsupportedError(
                f"source '{self.name}': Spark's kafka takes {ends} in BATCH only; leave it out in STREAMING, or read"
                " with KafkaSource, which ends at the same records in both modes"
            )
        return self.unread(self._typed(spark.readStream.format(self.format).options(**self._started()).load()))

    def ending(self, folder: UPath) -> Ending | None:
        if self.boundedness is Boundedness.UNBOUNDED:
            return None
        before: str | None = None

        def read(log: UPath, offset: str | None) -> frozenset[str]:
            nonlocal before
            stands, before = offset is not None and offset == before, offset
            return frozenset([ALL] if stands else ())

        return read

    def batch_position(self, spark: SparkSession) -> Position:
        if self.slice is not None or self.format != "kafka":
            return super().batch_position(spark)
        by_name = {key.lower(): (key, value) for key, value in self.options.items()}
        for name in _KAFKA_ENDING_TIMES:
            if name.lower() in by_name:
                raise UnsupportedError(
                    f"source '{self.name}': a savepoint has to hold what was read of it, and"
                    f" {by_name[name.lower()][0]}, which counts for more than endingOffsets, does not say; give"
                    " endingOffsets alone, with a number for each partition, or read with KafkaSource, which decides"
                    " them once"
                )
        _, ending = by_name.get("endingoffsets", ("", ""))
        try:
            parts = msgspec.json.decode(ending, type=dict[str, dict[str, int]])
        except msgspec.DecodeError:
            parts = {}
        if not parts or any(offset < 0 for part in parts.values() for offset in part.values()):
            shown = shorten(ending) if ending else "not set"
            raise UnsupportedError(
                f"source '{self.name}': a savepoint has to hold what was read of it, and endingOffsets ({shown}) does"
                " not say; give it a number for each partition, or read with KafkaSource, which decides them once"
            )
        return SparkOffset(self.format, ending, self.partitions_read_before())

    def stream_position(self, checkpoint_sources: UPath | None, offset: str | None) -> Position:
        if self.starting_options is None:
            raise self._positionless()
        return (
            self.resume_position if offset is None else SparkOffset(self.format, offset, self.partitions_read_before())
        )

    def check_resume_position(self) -> None:
        if not isinstance(self.resume_position, SparkOffset):
            super().check_resume_position()
        elif self.resume_position.format != self.format:
            raise cannot_follow(self.name, self.resume_position, f"it reads Spark's {self.format}")
        elif self.starting_options is None:
            raise cannot_follow(
                self.name, self.resume_position, "nothing says with which options; give starting_options="
            )

    def _positionless(self) -> UnsupportedError:
        return UnsupportedError(
            f"source '{self.name}' ({self.describe()}) cannot go on after what has been read of it, which a savepoint"
            " has to hold: nothing says with which options; give starting_options=, or partition the source in time"
            " with .partitioned_by(field) and run it in BATCH"
        )

    def _started(self) -> Mapping[str, str]:
        """The options with which it starts after what was read before."""
        if not isinstance(self.resume_position, SparkOffset) or self.starting_options is None:
            return self.options
        starting = self.starting_options(self.resume_position.offset)
        replaced = {key.lower() for key in starting}  # Spark takes names in any case
        options = {key: value for key, value in self.options.items() if key.lower() not in replaced}
        return options | {key: value for key, value in starting.items() if value is not None}

    def _typed(self, frame: DataFrame) -> DataFrame:
        missing = [n for n in self.records.names if n not in frame.columns]
        if missing:
            raise PipelineError(
                f"source '{self.name}': {self.format} gives no column '{missing[0]}'; it gives"
                f" {', '.join(frame.columns)}"
            )
        return as_fields(frame, self.records.schema, f"source '{self.name}'")


class Rate(NamedTuple):
    """A record of `RateSource`; there is an example at `RateSource`."""

    timestamp: datetime
    value: int


class RateSource(StructuredSource[Rate]):
    """Counts up, `rows_per_second` records a second, on Spark's rate source. Unbounded.

    A job that starts from a savepoint continues with the next number; the timestamps are of its own clock.

    Examples:
        >>> ticks = pipeline.from_source(RateSource(10)).map(lambda tick: tick.value, int)
        >>> collect(ticks, "STREAMING", {"rate": [Rate(at(9, 0), 0), Rate(at(9, 0), 1)]})
        [0, 1]
    """

    def __init__(self, rows_per_second: int = 1, name: str = "rate") -> None:
        check_count(f"source '{name}': rows_per_second", rows_per_second)
        super().__init__("rate", Rate, {"rowsPerSecond": str(rows_per_second)}, name)
        self.rows_per_second = rows_per_second

    def stream_position(self, checkpoint_sources: UPath | None, offset: str | None) -> Position:
        if offset is None:
            return self.resume_position
        try:
            seconds = msgspec.json.decode(offset, type=int)
        except msgspec.DecodeError:
            raise StateError(
                f"source '{self.name}': {shorten(offset)} in Spark's checkpoint is not an offset of its rate source;"
                " restore the checkpoint, or start without state"
            ) from None
        return OffsetsRead(
            "rate", {"value": self._begin + seconds * self.rows_per_second}, self.partitions_read_before()
        )

    def check_resume_position(self) -> None:
        if not isinstance(self.resume_position, OffsetsRead):
            super().check_resume_position()
        elif self.resume_position.origin != "rate":
            raise cannot_follow(self.name, self.resume_position, "it reads Spark's rate")

    @property
    def _begin(self) -> int:
        """The first value that was not read before."""
        return self.resume_position.offsets["value"] if isinstance(self.resume_position, OffsetsRead) else 0

    def _typed(self, frame: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        return super()._typed(frame.withColumn("value", F.col("value") + self._begin))
