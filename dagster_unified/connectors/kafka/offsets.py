"""Where a Kafka source begins and ends, as an author says it; named as in Flink's `KafkaSource`.

Knows topics and moments; not who asks a cluster for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Literal

from dagster_unified.errors import PipelineError


@dataclass(frozen=True)
class KafkaOffsetsInitializer:
    """An offset of each partition of a source's topics: where the source begins, or where it ends.

    Make one with `earliest`, `latest`, `timestamp` or `offsets`.

    Examples:
        >>> KafkaOffsetsInitializer.offsets({("sales", 0): 17, ("sales", 1): 4}).describe()
        'offsets sales[0]: 17, sales[1]: 4'
    """

    kind: Literal["earliest", "latest", "timestamp", "offsets"]
    moment: int | None = None
    given: tuple[tuple[str, int], ...] = ()

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
        if isinstance(moment, datetime):
            aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)
            moment = int(aware.timestamp() * 1000)
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

    def describe(self) -> str:
        """In words, for plans."""
        if self.moment is not None:
            return f"timestamp {datetime.fromtimestamp(self.moment / 1000, timezone.utc).isoformat()}"
        if self.kind == "offsets":
            return f"offsets {', '.join(f'{part}: {offset}' for part, offset in self.given)}"
        return self.kind


def part_name(topic: str, partition: int) -> str:
    """A partition as positions and errors name it: `sales[0]`."""
    return f"{topic}[{partition}]"


def topic_and_partition(part: str) -> tuple[str, int]:
    """The inverse of `part_name`."""
    topic, _, partition = part.removesuffix("]").rpartition("[")
    return topic, int(partition)
