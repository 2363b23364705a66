"""A source of Kafka topics, for both modes.

`SplitSource` handles offsets and partitions; `cluster.py` asks for them, `reading.py` reads them in workers, and
`formats/` makes records of values. This module puts these together.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import pyarrow as pa

from dagster_unified.connectors.kafka.cluster import Cluster, Topics
from dagster_unified.connectors.kafka.connection import GivesConnection, KafkaConnection
from dagster_unified.connectors.kafka.formats import JsonFormat, RawFormat, ValueFormat
from dagster_unified.connectors.kafka.reading import (
    Isolation,
    KafkaOffsetsInitializer,
    OffsetRange,
    OffsetResetStrategy,
    messages,
    part_name,
    topic_and_partition,
)
from dagster_unified.connectors.protocol.frame import Malformed
from dagster_unified.connectors.protocol.positions import Offsets, OffsetsRead, cannot_follow
from dagster_unified.connectors.protocol.splits import SplitSource
from dagster_unified.connectors.secrets import Value
from dagster_unified.errors import PipelineError, RecordTypeError, SourceError, UnifiedError, nearest
from dagster_unified.graph.connectors import Boundedness, Place
from dagster_unified.graph.fingerprint import digest
from dagster_unified.operators.functions.type_variables import Out
from dagster_unified.operators.time import checked_span, to_millis
from dagster_unified.records import RecordType, record_type
from dagster_unified.values import check_count

if TYPE_CHECKING:
    from confluent_kafka import Message
    from typing_extensions import TypeForm

EARLIEST = KafkaOffsetsInitializer.earliest()

METADATA = ("key", "topic", "partition", "offset", "timestamp", "headers")
"""What a field of a record can hold from its message besides the value."""


class KafkaMessage(NamedTuple):
    """A message as it is: the record of `KafkaSource(…, KafkaMessage, value_format=RawFormat())`.

    Examples:
        >>> source = KafkaSource("raw", KafkaMessage, "broker:9092", RawFormat())
        >>> lengths = pipeline.from_source(source).map(lambda message: len(message.value or b""), int)
        >>> collect(lengths, "STREAMING", {"raw": [KafkaMessage(b"k", b"abc", "sales", 0, 17, at(9, 0), [])]})
        [3]
    """

    key: bytes | None
    value: bytes | None
    """None in a tombstone."""

    topic: str
    partition: int
    offset: int
    timestamp: datetime
    headers: list[tuple[str, bytes | None]]


class KafkaSource(SplitSource[Out]):
    """Messages of one topic, of several, or of all whose whole name matches a pattern, as typed records.

    `record` is what a value holds, written in `value_format`: JSON if nothing else is said, Avro, Protobuf, or the
    bytes as they are. `metadata` fills fields of the record from the message instead, by name: `{"sold_at":
    "timestamp"}`. A field can be its `key` (`bytes`, or `str` in UTF-8), `topic`, `partition`, `offset`, `timestamp`
    (`datetime`, or `int` milliseconds) or `headers` (`list[tuple[str, bytes | None]]`). The event time is what the
    watermark strategy takes it from: name such a field.

    Unbounded, unless `bounded` says where it ends. In BATCH a run reads from `starting_offsets` to `bounded`, or, for a
    partition in time, the offsets between the times of its window: from the first record whose timestamp is in it or
    later, until before the first whose timestamp is behind it. So each record is in exactly one partition,
    even where timestamps are out of order. The end is decided once, when the stage begins.

    In STREAMING offsets are in the checkpoint; `starting_offsets` counts only for a job that starts without state.
    Partitions and, of a pattern, topics that appear are found within `partition_discovery_interval`, and read from
    their oldest record. A micro-batch reads at most `max_records_per_trigger` offsets.

    With `isolation_level="read_committed"` records of aborted transactions are left out, and those of open ones wait.
    Each partition of Kafka is read by one task, in its order.

    A message that does not fit, such as a tombstone where the record needs fields, fails the run with
    `MalformedInputError`, which names topic, partition and offset. With `on_malformed="drop"` such messages are left
    out and counted; with `"divert"` they are kept in a table of their own.

    Raises `PipelineError` for fields that cannot be filled, and when it runs `SourceError` where topics or offsets are
    gone, `ConfigurationError` where the cluster refuses the client, and `UnavailableError` where it is away: that one
    is tried again.

    Examples:
        >>> sold = pipeline.from_source(KafkaSource("sold", Sale, "broker:9092", metadata={"at": "timestamp"}))
        >>> amounts = sold.map(lambda sale: sale.amount, int)
        >>> collect(amounts, "STREAMING", {"sold": [Sale("north", 3, at(9, 0))]})
        [3]
    """

    kind = "kafka"
    finds_times = True

    def __init__(
        self,
        topics: str | Sequence[str] | re.Pattern[str],
        record: TypeForm[Out],
        connection: KafkaConnection | GivesConnection | Value,
        value_format: ValueFormat | None = None,
        metadata: Mapping[str, str] | None = None,
        starting_offsets: KafkaOffsetsInitializer = EARLIEST,
        bounded: KafkaOffsetsInitializer | None = None,
        on_malformed: Literal["fail", "drop", "divert"] = "fail",
        isolation_level: Isolation = "read_committed",
        max_records_per_trigger: int | None = None,
        partition_discovery_interval: timedelta = timedelta(seconds=30),
        name: str | None = None,
    ) -> None:
        self.connection = KafkaConnection.of(connection)
        self.resource_keys = self.connection.resource_keys
        self.topics = _topics(topics)
        self.name = name or _path_safe(self.topics)
        where = f"source '{self.name}'"
        _check(self.topics, on_malformed, isolation_level, max_records_per_trigger, where)
        self.records = record_type(record, where)
        self.value_format = value_format or JsonFormat()
        self.metadata = _metadata_columns(record, self.records, metadata or {}, where)
        value_fields = [field for field in self.records.names if field not in self.metadata]
        self.value_fields = tuple(value_fields)
        if value_fields:
            self.value_format.check(value_fields if self.records.shape == "class" else (), where)
            self.value_format.value_type(self.records, value_fields, where)
        self.starting_offsets, self.bounded = starting_offsets, bounded
        self.boundedness = Boundedness.UNBOUNDED if bounded is None else Boundedness.BOUNDED
        self.on_malformed, self.isolation_level = on_malformed, isolation_level
        self.max_records_per_trigger = max_records_per_trigger
        checked_span(f"{where}: partition_discovery_interval", partition_discovery_interval, 0)
        self.partition_discovery_interval = partition_discovery_interval

    @property
    def origin(self) -> str:
        """Neither brokers nor topics: both may change, and the parts name their topics."""
        return "Kafka"

    def snapshot(self) -> str:
        return digest(self.kind, self._topics())

    def places(self) -> Sequence[Place]:
        return () if isinstance(self.topics, re.Pattern) else [self.connection.place(topic) for topic in self.topics]

    def check_resume_position(self) -> None:
        super().check_resume_position()
        if not isinstance(self.resume_position, OffsetsRead) or not self.resume_position.offsets:
            return
        read = {topic_and_partition(part)[0] for part in self.resume_position.offsets}
        if not any(map(self._reads, read)):
            raise cannot_follow(self.name, self.resume_position, f"it reads {self._topics()}")

    def _reads(self, topic: str) -> bool:
        return bool(self.topics.fullmatch(topic)) if isinstance(self.topics, re.Pattern) else topic in self.topics

    def _topics(self) -> str:
        if isinstance(self.topics, re.Pattern):
            return f"{self.connection.describe()}, topics that match {self.topics.pattern!r}"
        return f"{self.connection.describe()}, topic{'s' if len(self.topics) > 1 else ''} {', '.join(self.topics)}"

    def connected(self, resources: Mapping[str, object]) -> Self:
        changed = copy.copy(self)
        changed.connection = self.connection.connected(resources)
        return changed

    def describe(self) -> str:
        partition = self.of_partition()
        end = f" until {self.bounded.describe()}" if self.bounded is not None else ""
        start = f", from {self.starting_offsets.describe()}{end}" if not self.bound else ""
        malformed = f", malformed messages: {self.on_malformed}"
        return f"{self._topics()} as {self.value_format.describe()}{start}{partition}{malformed}"

    def settings(self) -> str:
        ends = "" if self.bounded is None else self.bounded.describe()
        decoding = f"{self.value_format.fingerprint()} {sorted(self.metadata.items())} {self.on_malformed}"
        return f"{super().settings()} {decoding} {self.isolation_level} {self.starting_offsets.describe()} {ends}"

    def how_to_bound(self) -> str:
        return f"give bounded=KafkaOffsetsInitializer.latest(), or run it for a partition in time{self._or_all()}"

    # Offsets

    def oldest(self) -> Offsets:
        return self._cluster.oldest()

    def newest(self) -> Offsets:
        return self._cluster.newest()

    def at(self, moment: datetime) -> Offsets:
        return self._cluster.at(max(0, to_millis(moment)))

    def first(self) -> Offsets:
        return self._initialized(self.starting_offsets, "starting_offsets")

    def last(self) -> Offsets | None:
        return None if self.bounded is None else self._initialized(self.bounded, "bounded")

    def identities(self) -> Mapping[str, str]:
        return self._cluster.identities()

    def splits(self, start: Offsets, end: Offsets) -> Sequence[OffsetRange]:
        return [
            OffsetRange(*topic_and_partition(part), start[part], last)
            for part, last in end.items()
            if last > start[part]
        ]

    def part_of(self, split: OffsetRange) -> str:
        return part_name(split.topic, split.partition)

    @cached_property
    def _cluster(self) -> Cluster:
        return Cluster(
            self.connection,
            self.topics,
            self.isolation_level,
            self.partition_discovery_interval.total_seconds(),
            f"source '{self.name}'",
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_cluster"}

    def _initialized(self, wanted: KafkaOffsetsInitializer, setting: str) -> Offsets:
        if wanted.kind == "latest":
            return self.newest()
        if wanted.moment is not None:
            return self._cluster.at(wanted.moment)
        oldest = self.oldest()
        if wanted.kind == "earliest":
            return oldest
        newest = self.newest()
        if wanted.kind == "committed":
            return self._committed(wanted, setting, oldest, newest)
        for part, offset in wanted.by_part:
            if part not in newest:
                raise SourceError(
                    f"source '{self.name}': {setting} names {part}, which {self.connection.describe()} does not have;"
                    f" there are {', '.join(sorted(newest)[:10])}"
                )
            if not oldest[part] <= offset <= newest[part]:
                raise SourceError(
                    f"source '{self.name}': {setting} names offset {offset} of {part}, which has {oldest[part]} to"
                    f" {newest[part]}; choose one of these, or KafkaOffsetsInitializer.earliest()"
                )
        rest = newest if setting == "bounded" else oldest
        return {**rest, **dict(wanted.by_part)}

    def _committed(self, wanted: KafkaOffsetsInitializer, setting: str, oldest: Offsets, newest: Offsets) -> Offsets:
        committed = self._cluster.committed(wanted.group)
        available = {part: offset for part, offset in committed.items() if oldest[part] <= offset <= newest[part]}
        if wanted.reset is not OffsetResetStrategy.NONE:
            return {**(oldest if wanted.reset is OffsetResetStrategy.EARLIEST else newest), **available}
        where = f"source '{self.name}': {setting}: consumer group '{wanted.group}'"
        advice = "say what to take in its place, with OffsetResetStrategy.EARLIEST or LATEST"
        missing = sorted(part for part in newest if part not in committed)
        if missing:
            raise SourceError(
                f"{where} has committed no offset of {', '.join(missing[:10])} in {self.connection.describe()}; correct"
                f" the group's name, or {advice}"
            )
        for part, offset in committed.items():
            if part not in available:
                raise SourceError(
                    f"{where} has committed offset {offset} of {part}, which has {oldest[part]} to {newest[part]}:"
                    " retention has deleted what comes next, the topic was made again, or a transaction is still open;"
                    f" {advice}"
                )
        return available

    # Reading, in a worker

    def read_split(self, split: OffsetRange) -> Iterator[pa.RecordBatch | Malformed]:
        columns = self._columns(split)
        for batch in messages(self.connection, self.isolation_level, split, f"source '{self.name}'"):
            yield from self._fitting(batch, columns)

    def _fitting(self, batch: list[Message], columns: _Columns) -> Iterator[pa.RecordBatch | Malformed]:
        """Records of messages, and the messages that do not fit, which are found by halving."""
        try:
            records = columns(batch)
        except Exception as error:
            if isinstance(error, UnifiedError) and not isinstance(error, RecordTypeError):
                raise type(error)(f"source '{self.name}': {error}") from error
            if len(batch) == 1:
                yield _malformed(batch[0], error)
                return
            half = len(batch) // 2
            yield from self._fitting(batch[:half], columns)
            yield from self._fitting(batch[half:], columns)
        else:
            yield records

    def _columns(self, split: OffsetRange) -> _Columns:
        """A function that turns messages into a batch."""
        schema = self.records.schema
        by_metadata = {field: _METADATA[what](schema.field(field).type, split) for field, what in self.metadata.items()}
        values = self._values() if self.value_fields else None

        def batch(messages: list[Message]) -> pa.RecordBatch:
            by_field = {} if values is None else dict(zip(self.value_fields, values(messages).columns, strict=True))
            arrays = [by_metadata[name](messages) if name in by_metadata else by_field[name] for name in schema.names]
            for name, array in zip(schema.names, arrays, strict=True):
                if array.null_count and not schema.field(name).nullable:
                    raise ValueError(f"its {self.metadata.get(name, name)} is missing, which field '{name}' needs")
            return pa.RecordBatch.from_arrays(arrays, schema=schema)

        return batch

    def _values(self) -> _Columns:
        from confluent_kafka import Message

        kind = self.value_format.value_type(self.records, self.value_fields, f"source '{self.name}'")
        decode = self.value_format.decoder(kind.python)
        raw = isinstance(self.value_format, RawFormat)

        def values(messages: list[Message]) -> pa.RecordBatch:
            contents = list(map(Message.value, messages))
            if not raw and None in contents:
                raise ValueError("it has no value: a tombstone")
            return kind.to_batch(list(map(decode, contents)))

        return values


_Columns = Callable[[list["Message"]], pa.RecordBatch]
_Column = Callable[[list["Message"]], pa.Array]


def _malformed(message: Message, error: Exception) -> Malformed:
    place = f"{part_name(message.topic() or '', message.partition() or 0)}@{message.offset()}"
    content = message.value()
    text = "" if content is None else bytes(content).decode("utf-8", "backslashreplace")
    reason = (
        f"its key or its value is no UTF-8 ({error.reason})" if isinstance(error, UnicodeDecodeError) else str(error)
    )
    return Malformed(place, text, reason.splitlines()[0] if reason else type(error).__name__)


# Columns from a message's metadata


def _key(kind: pa.DataType, split: OffsetRange) -> _Column:
    from confluent_kafka import Message

    if pa.types.is_string(kind):
        return lambda messages: pa.array([None if k is None else k.decode() for k in map(Message.key, messages)], kind)
    return lambda messages: pa.array(list(map(Message.key, messages)), kind)


def _topic(kind: pa.DataType, split: OffsetRange) -> _Column:
    return lambda messages: pa.repeat(pa.scalar(split.topic, kind), len(messages))


def _partition(kind: pa.DataType, split: OffsetRange) -> _Column:
    return lambda messages: pa.repeat(pa.scalar(split.partition, kind), len(messages))


def _offset(kind: pa.DataType, split: OffsetRange) -> _Column:
    from confluent_kafka import Message

    return lambda messages: pa.array(list(map(Message.offset, messages)), kind)


def _timestamp(kind: pa.DataType, split: OffsetRange) -> _Column:
    from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Message

    def column(messages: list[Message]) -> pa.Array:
        stamps = map(Message.timestamp, messages)
        times = pa.array([None if what == TIMESTAMP_NOT_AVAILABLE else time for what, time in stamps], pa.int64())
        return times if kind == pa.int64() else times.cast(pa.timestamp("ms")).cast(kind)

    return column


def _headers(kind: pa.DataType, split: OffsetRange) -> _Column:
    names = [field.name for field in kind.value_type]

    def column(messages: list[Message]) -> pa.Array:
        return pa.array(
            [[dict(zip(names, header, strict=True)) for header in m.headers() or ()] for m in messages], kind
        )

    return column


_METADATA: dict[str, Callable[[pa.DataType, OffsetRange], _Column]] = {
    "key": _key,
    "topic": _topic,
    "partition": _partition,
    "offset": _offset,
    "timestamp": _timestamp,
    "headers": _headers,
}

_ALLOWED: dict[str, Mapping[str, Callable[[pa.DataType], bool]]] = {
    "key": {"bytes": pa.types.is_binary, "str": pa.types.is_string},
    "topic": {"str": pa.types.is_string},
    "partition": {"int": pa.types.is_int64},
    "offset": {"int": pa.types.is_int64},
    "timestamp": {"datetime": pa.types.is_timestamp, "int": pa.types.is_int64},
    "headers": {"list[tuple[str, bytes | None]]": lambda kind: _is_headers(kind)},
}
"""The types of fields by what they hold."""


def _is_headers(kind: pa.DataType) -> bool:
    if not pa.types.is_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    return [field.type for field in kind.value_type] == [pa.string(), pa.binary()]


# The author's arguments


def _topics(topics: str | Sequence[str] | re.Pattern[str]) -> Topics:
    if isinstance(topics, re.Pattern):
        return topics
    return (topics,) if isinstance(topics, str) else tuple(topics)


def _path_safe(topics: Topics) -> str:
    text = topics.pattern if isinstance(topics, re.Pattern) else "_".join(topics)
    return re.sub(r"[^\w.-]+", "_", text).strip("_.") or "kafka"


def _check(topics: Topics, on_malformed: str, isolation: str, most: int | None, where: str) -> None:
    if isinstance(topics, tuple):
        wrong = next((name for name in topics if not re.fullmatch(r"[a-zA-Z0-9._-]{1,249}", name)), None)
        if not topics or wrong is not None:
            problem = "there is no topic" if wrong is None else f"{wrong!r} is not the name of a topic"
            raise PipelineError(f"{where}: {problem}; give names, or a pattern made by re.compile")
    for setting, value, known in (
        ("on_malformed", on_malformed, ("fail", "drop", "divert")),
        ("isolation_level", isolation, ("read_committed", "read_uncommitted")),
    ):
        if value not in known:
            raise PipelineError(f"{where}: {setting} is one of {', '.join(known)}, and not {value!r}")
    if most is not None:
        check_count(f"{where}: max_records_per_trigger", most)


def _metadata_columns(record: Any, records: RecordType, metadata: Mapping[str, str], where: str) -> dict[str, str]:
    """The message's column for each metadata field; raises `PipelineError` where the field cannot hold it."""
    if record is KafkaMessage:
        metadata = {**{name: name for name in METADATA}, **metadata}
    if metadata and records.shape != "class":
        raise PipelineError(f"{where}: metadata needs a record with fields, and {records.describe()} is a plain value")
    for field, what in metadata.items():
        if field not in records.names:
            raise PipelineError(
                f"{where}: metadata names field '{field}', which the record does not have"
                f"{nearest(field, records.names)}"
            )
        if what not in METADATA:
            raise PipelineError(
                f"{where}: field '{field}' is to hold '{what}'; a message has {', '.join(METADATA)}"
                f"{nearest(what, METADATA)}"
            )
        kind = records.schema.field(field).type
        allowed = _ALLOWED[what]
        if not any(test(kind) for test in allowed.values()):
            raise PipelineError(
                f"{where}: field '{field}' of type {kind} cannot hold the {what}; declare {' or '.join(allowed)}"
            )
    return dict(metadata)
