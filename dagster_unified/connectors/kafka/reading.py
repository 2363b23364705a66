"""Where a Kafka source begins and ends, and how a worker reads a range of offsets of one partition."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from dagster_unified.connectors.kafka.connection import KafkaConnection
from dagster_unified.errors import PipelineError, SourceError, UnavailableError, UnifiedError
from dagster_unified.operators.time import to_millis

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message


class OffsetResetStrategy(Enum):
    """Where to start in a partition without a readable committed offset of the consumer group, named as in Flink.

    There is an example at `KafkaOffsetsInitializer`.
    """

    NONE = "none"
    """It is an error."""

    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True)
class KafkaOffsetsInitializer:
    """An offset of each partition of a source's topics: where the source begins, or where it ends.

    Make one with `earliest`, `latest`, `timestamp`, `offsets` or `committed_offsets`.

    Examples:
        >>> KafkaOffsetsInitializer.offsets({("sales", 0): 17, ("sales", 1): 4}).describe()
        'offsets sales[0]: 17, sales[1]: 4'
        >>> KafkaOffsetsInitializer.committed_offsets("billing", OffsetResetStrategy.EARLIEST).describe()
        "committed offsets of group 'billing', else earliest"
    """

    kind: Literal["earliest", "latest", "timestamp", "offsets", "committed"]
    moment: int | None = None
    by_part: tuple[tuple[str, int], ...] = ()
    group: str = ""
    reset: OffsetResetStrategy = OffsetResetStrategy.NONE

    @staticmethod
    def earliest() -> KafkaOffsetsInitializer:
        """The oldest record."""
        return KafkaOffsetsInitializer("earliest")

    @staticmethod
    def latest() -> KafkaOffsetsInitializer:
        """After the last record at the start of the run or the job."""
        return KafkaOffsetsInitializer("latest")

    @staticmethod
    def timestamp(moment: datetime | int) -> KafkaOffsetsInitializer:
        """The first record with this timestamp or a later one; after the last record where there is none.

        The moment is a datetime, or milliseconds since the epoch. A datetime without a zone is in UTC.
        """
        moment = to_millis(moment)
        if moment < 0:
            raise PipelineError(
                f"KafkaOffsetsInitializer.timestamp: {moment} is before 1970, where Kafka's time begins"
            )
        return KafkaOffsetsInitializer("timestamp", moment)

    @staticmethod
    def offsets(offsets: Mapping[tuple[str, int], int]) -> KafkaOffsetsInitializer:
        """These offsets, by topic and partition. Others start at their oldest record, or end at their newest."""
        for (topic, partition), offset in offsets.items():
            if offset < 0 or partition < 0:
                raise PipelineError(
                    f"KafkaOffsetsInitializer.offsets: offset {offset} of partition {partition} of '{topic}': neither"
                    " may be negative"
                )
        return KafkaOffsetsInitializer(
            "offsets", by_part=tuple(sorted((part_name(*part), offset) for part, offset in offsets.items()))
        )

    @staticmethod
    def committed_offsets(group: str, reset: OffsetResetStrategy = OffsetResetStrategy.NONE) -> KafkaOffsetsInitializer:
        """The offsets that a consumer group has committed, such as those of a job that this one replaces.

        `reset` is the start of a partition without a committed offset, or whose record is gone; with `NONE` that is an
        error. The group is only read: nothing joins it or commits for it.
        """
        if not group:
            raise PipelineError("KafkaOffsetsInitializer.committed_offsets: name the consumer group, such as 'billing'")
        return KafkaOffsetsInitializer("committed", group=group, reset=OffsetResetStrategy(reset))

    def describe(self) -> str:
        """In words, for plans."""
        if self.moment is not None:
            return f"timestamp {datetime.fromtimestamp(self.moment / 1000, timezone.utc).isoformat()}"
        if self.kind == "offsets":
            return f"offsets {', '.join(f'{part}: {offset}' for part, offset in self.by_part)}"
        if self.kind == "committed":
            otherwise = "" if self.reset is OffsetResetStrategy.NONE else f", else {self.reset.value}"
            return f"committed offsets of group '{self.group}'{otherwise}"
        return self.kind


def part_name(topic: str, partition: int) -> str:
    """A partition as positions and errors name it: `sales[0]`."""
    return f"{topic}[{partition}]"


def topic_and_partition(part: str) -> tuple[str, int]:
    """The inverse of `part_name`."""
    topic, _, partition = part.removesuffix("]").rpartition("[")
    return topic, int(partition)


Isolation = Literal["read_committed", "read_uncommitted"]

PATIENCE = 20.0
"""Seconds without any progress after which the cluster counts as gone."""

IDLE_PATIENCE = 5.0
"""Seconds without any progress after which a new consumer replaces an idle one that was used again.

The idle one may not know that its connection is dead, or may wait before it connects again.
"""

_MOST = 20_000
"""Messages in one batch at most."""

_WAIT = 0.1
"""Seconds to wait for a full batch."""

_CONFIG: dict[str, str | int | bool] = {
    "group.id": "dagster-unified",  # required, and not used: nothing joins or commits
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
    "fetch.wait.max.ms": 10,
    "fetch.error.backoff.ms": 100,  # a broker that was restarted refuses the first fetch: it leads in a new epoch
    "fetch.message.max.bytes": 8 << 20,
    "queued.min.messages": 200_000,
    "queued.max.messages.kbytes": 64 << 10,
}

_idle: dict[tuple[KafkaConnection, Isolation], _Reader] = {}
"""Consumers that no task of this worker uses: the next one need not connect."""


class _Reader(NamedTuple):
    """A consumer, and the topics whose leaders it knows."""

    consumer: Consumer
    topics: set[str]


class OffsetRange(NamedTuple):
    """The offsets of a partition from `start` until before `end`."""

    topic: str
    partition: int
    start: int
    end: int


def messages(
    connection: KafkaConnection, isolation: Isolation, range_: OffsetRange, where: str
) -> Iterator[list[Message]]:
    """The messages of a range in their order, many at a time. `where` begins the message of an error.

    Raises `SourceError` where offsets are gone, and `UnavailableError` where the cluster is away.
    """
    key = (connection, isolation)
    idle = _idle.pop(key, None)
    if idle is not None:
        try:
            yield from _through(idle, key, range_, IDLE_PATIENCE, where)
        except _NoProgressError as stuck:
            range_ = range_._replace(start=stuck.position)
        else:
            return
    new = _Reader(connection.consumer({**_CONFIG, "isolation.level": isolation}), set())
    try:
        yield from _through(new, key, range_, PATIENCE, where)
    except _NoProgressError as stuck:
        raise _stuck(connection, range_, stuck, where) from None


class _NoProgressError(Exception):
    """A consumer has returned nothing for too long: its position, and its last error."""

    def __init__(self, position: int, error: KafkaError | None) -> None:
        super().__init__(position, error)
        self.position, self.error = position, error


def _through(
    reader: _Reader, key: tuple[KafkaConnection, Isolation], range_: OffsetRange, patience: float, where: str
) -> Iterator[list[Message]]:
    """Read with one consumer, which is kept if it reaches the range's end, and else closed."""
    try:
        _assign(reader, key[0], range_, patience, where)
        yield from _read(reader.consumer, key[0], range_, patience, where)
    except BaseException:
        reader.consumer.close()
        raise
    reader.consumer.unassign()
    _idle[key] = reader


def _assign(reader: _Reader, connection: KafkaConnection, range_: OffsetRange, patience: float, where: str) -> None:
    from confluent_kafka import KafkaException, TopicPartition

    if range_.topic not in reader.topics:  # else the consumer takes a second until it asks for the topic's leaders
        try:
            reader.consumer.list_topics(range_.topic, timeout=patience)
        except KafkaException as error:
            _check(error.args[0], connection, range_, range_.start, where)
            raise _NoProgressError(range_.start, error.args[0]) from None
        reader.topics.add(range_.topic)
    reader.consumer.assign([TopicPartition(range_.topic, range_.partition, range_.start)])


def _read(
    consumer: Consumer, connection: KafkaConnection, range_: OffsetRange, patience: float, where: str
) -> Iterator[list[Message]]:
    from confluent_kafka import Message

    position, moved, last = range_.start, time.monotonic(), None
    while position < range_.end:
        batch = consumer.consume(min(_MOST, range_.end - position), _WAIT)
        errors = [message for message in batch if message.error() is not None]
        if errors:
            batch = [message for message in batch if message.error() is None]
        if batch:
            offsets = cast("list[int]", list(map(Message.offset, batch)))
            position, moved = offsets[-1] + 1, time.monotonic()
            if position > range_.end:
                batch = [message for message, offset in zip(batch, offsets, strict=True) if offset < range_.end]
            if batch:
                yield batch
                moved = time.monotonic()
        for message in errors:
            error = message.error()
            assert error is not None
            if _is_end(error):
                position = max(position, _offset(message))
            else:
                _check(error, connection, range_, position, where)
                last = error
        if time.monotonic() - moved > patience:
            raise _NoProgressError(position, last)


def _is_end(error: KafkaError) -> bool:
    from confluent_kafka import KafkaError

    return bool(error.code() == KafkaError._PARTITION_EOF)


def _offset(message: Message) -> int:
    offset = message.offset()
    return -1 if offset is None else offset


def _check(error: KafkaError, connection: KafkaConnection, range_: OffsetRange, position: int, where: str) -> None:
    """Raise the library's error where waiting does not help."""
    if error.name() == "GROUP_AUTHORIZATION_FAILED":  # the client asks for its group's coordinator, and needs none
        return
    if error.name() in ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE"):
        part = part_name(range_.topic, range_.partition)
        raise SourceError(
            f"{where}: the records of {part} from offset {position} on are gone, before they were read:"
            " the topic's retention has deleted them, or it was made again; start without state, or with another uid,"
            " to read what there is, and give the topic a longer retention.ms"
        )
    failure = connection.failure(error, where, SourceError)
    if not failure.retryable:
        raise failure


def _stuck(connection: KafkaConnection, range_: OffsetRange, stuck: _NoProgressError, where: str) -> UnifiedError:
    if stuck.error is not None:
        return connection.failure(stuck.error, where)
    part = part_name(range_.topic, range_.partition)
    return UnavailableError(
        f"{where}: {connection.describe()} gave nothing of {part} for {PATIENCE:.0f} s at offset {stuck.position}, and"
        f" there have to be records up to {range_.end}; see that its brokers run, and that the topic is there"
    )
