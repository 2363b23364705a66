"""Where a Kafka source begins and ends, as an author says it; named as in Flink's `KafkaSource`.

Knows topics and moments; not who asks a cluster for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from typing import Literal

from dagster_unified.errors import PipelineError
from dagster_unified.operators.time import to_millis


class OffsetResetStrategy(Enum):
    """What is taken of a partition of which a consumer group has no offset that can be read, as Flink names it.

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
    given: tuple[tuple[str, int], ...] = ()
    group: str = ""
    reset: OffsetResetStrategy = OffsetResetStrategy.NONE

    @staticmethod
    def earliest() -> KafkaOffsetsInitializer:
        """The oldest record that there is."""
        return KafkaOffsetsInitializer("earliest")

    @staticmethod
    def latest() -> KafkaOffsetsInitializer:
        """Behind the last record that there is when the run or the job begins."""
        return KafkaOffsetsInitializer("latest")

    @staticmethod
    def timestamp(moment: datetime | int) -> KafkaOffsetsInitializer:
        """The first record with this timestamp or a later one; behind the last record where there is none.

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
        """These offsets, by topic and partition. Others begin at their oldest record, or end at their newest."""
        for (topic, partition), offset in offsets.items():
            if offset < 0 or partition < 0:
                raise PipelineError(
                    f"KafkaOffsetsInitializer.offsets: offset {offset} of partition {partition} of '{topic}': neither"
                    " may be negative"
                )
        return KafkaOffsetsInitializer(
            "offsets", given=tuple(sorted((part_name(*part), offset) for part, offset in offsets.items()))
        )

    @staticmethod
    def committed_offsets(group: str, reset: OffsetResetStrategy = OffsetResetStrategy.NONE) -> KafkaOffsetsInitializer:
        """The offsets that a consumer group has committed, such as that of a job which this one replaces.

        `reset` says what is taken of a partition of which the group has none, or one whose record is gone; if it is
        `NONE`, that is an error. The group is only asked: nothing joins it or commits for it.
        """
        if not group:
            raise PipelineError("KafkaOffsetsInitializer.committed_offsets: name the consumer group, such as 'billing'")
        return KafkaOffsetsInitializer("committed", group=group, reset=OffsetResetStrategy(reset))

    def describe(self) -> str:
        """In words, for plans."""
        if self.moment is not None:
            return f"timestamp {datetime.fromtimestamp(self.moment / 1000, timezone.utc).isoformat()}"
        if self.kind == "offsets":
            return f"offsets {', '.join(f'{part}: {offset}' for part, offset in self.given)}"
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
