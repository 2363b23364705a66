"""What a source asks of a cluster: which partitions its topics have, and which offsets these have now, or at a moment.

One client serves all questions of a process. Knows Kafka's administration client; not what is read.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_unified.connectors.kafka.connection import (
    PATIENCE,
    SETTLING,
    SETTLING_PATIENCE,
    SLOW_PATIENCE,
    KafkaConnection,
)
from dagster_unified.connectors.kafka.groups import committed_offsets, group_member
from dagster_unified.connectors.kafka.offsets import part_name, topic_and_partition
from dagster_unified.connectors.kafka.reading import Isolation
from dagster_unified.errors import SourceError, UnifiedError, nearest

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.admin._metadata import ClusterMetadata

_log = logging.getLogger(__name__)

Topics = tuple[str, ...] | re.Pattern[str]


class Cluster:
    """The topics of one source. `where` begins the messages of errors."""

    def __init__(
        self, connection: KafkaConnection, topics: Topics, isolation: Isolation, discovery: float, where: str
    ) -> None:
        self._connection, self._topics, self._isolation = connection, topics, isolation
        self._discovery, self._where = discovery, where
        self._parts: tuple[str, ...] = ()
        self._listed = 0.0
        self._admin: AdminClient | None = None

    def parts(self) -> Sequence[str]:
        """The partitions, which are asked for again when the time of discovery has passed.

        Raises `SourceError` where there is no such topic.
        """
        if not self._parts or time.monotonic() - self._listed >= self._discovery:
            self._parts = tuple(self._list())
            self._listed = time.monotonic()
        return self._parts

    def oldest(self) -> dict[str, int]:
        """The oldest offset of each partition."""
        return self._offsets(_specs().earliest())

    def newest(self) -> dict[str, int]:
        """Where each partition ends; of committed records where only those are read."""
        return self._offsets(_specs().latest())

    def at(self, moment: int) -> dict[str, int]:
        """The first offset whose record has this timestamp or a later one; where there is none, the partition's end."""
        found, newest = self._offsets(_specs().for_timestamp(moment)), self.newest()
        known = {part: offset for part, offset in found.items() if part in newest}
        return {part: newest[part] if offset < 0 else min(offset, newest[part]) for part, offset in known.items()}

    def identities(self) -> dict[str, str]:
        """The id of each topic, which one that is made again under its name does not have; old brokers have none."""
        from confluent_kafka import KafkaException, TopicCollection

        topics = sorted({topic_and_partition(part)[0] for part in self.parts()})
        assert self._admin is not None
        futures: Mapping[str, Any] = self._admin.describe_topics(TopicCollection(topics), request_timeout=PATIENCE)
        try:
            ids = {topic: future.result(2 * PATIENCE).topic_id for topic, future in futures.items()}
        except KafkaException as error:
            raise self._connection.failure(error.args[0], self._where, SourceError) from None
        known = {topic: id_ for topic, id_ in ids.items() if id_ is not None and any(_bits(id_))}
        return {topic: str(id_) for topic, id_ in known.items()}

    def committed(self, group: str) -> dict[str, int]:
        """The offset that a consumer group has committed of each partition, where it has one."""
        from confluent_kafka import TopicPartition

        places = [TopicPartition(*topic_and_partition(part)) for part in self.parts()]
        member = group_member(self._connection, group)
        try:
            explain = partial(self._group_failure, group)
            found = committed_offsets(self._connection, member, group, places, explain, self._where)
        finally:
            member.close()
        return {part_name(place.topic, place.partition): place.offset for place in found if place.offset >= 0}

    def _group_failure(self, group: str, error: KafkaException) -> UnifiedError:
        if error.args[0].name() == "GROUP_AUTHORIZATION_FAILED":
            return SourceError(
                f"{self._where}: {self._connection.describe()}: this user may not ask what consumer group '{group}' has"
                " committed; give it READ on the group"
            )
        return self._connection.failure(error.args[0], self._where, SourceError)

    def _list(self) -> list[str]:
        end = time.monotonic() + SETTLING_PATIENCE
        while True:
            found = self._metadata().topics
            names = [name for name, topic in found.items() if topic.error is None and topic.partitions]
            wanted = self._wanted(names)
            missing = next((name for name in wanted if name not in names), None)
            if wanted and missing is None:
                self._warn_of_gone(found)
                return [part_name(name, number) for name in wanted for number in sorted(found[name].partitions)]
            error = found[missing].error if missing is not None and missing in found else None
            settles = error is None or error.name() in SETTLING
            if not settles or time.monotonic() > end:
                raise self._no_topic(missing, names, None if settles else error)
            time.sleep(0.1)

    def _warn_of_gone(self, there: Mapping[str, object]) -> None:
        """Only a pattern lets a topic go; one that was named is an error."""
        for topic in sorted({topic_and_partition(part)[0] for part in self._parts} - there.keys()):
            _log.warning(
                "%s: %s has no topic '%s' any more: what was not read of it is lost, and its partitions hold back"
                " watermarks by partition unless with_idleness is set",
                self._where,
                self._connection.describe(),
                topic,
            )

    def _wanted(self, names: Sequence[str]) -> Sequence[str]:
        if not isinstance(self._topics, re.Pattern):
            return self._topics
        return [name for name in names if self._topics.fullmatch(name) and not name.startswith("__")]

    def _no_topic(self, missing: str | None, names: Sequence[str], error: KafkaError | None) -> UnifiedError:
        if error is not None:
            return self._connection.failure(error, self._where, SourceError)
        if isinstance(self._topics, re.Pattern):
            return SourceError(
                f"{self._where}: {self._connection.describe()} has no topic that matches {self._topics.pattern!r};"
                " correct the pattern, or give this user DESCRIBE on the topics"
            )
        return SourceError(
            f"{self._where}: {self._connection.describe()} has no topic '{missing}', or this user may not see it;"
            f" create the topic, correct its name, or give the user DESCRIBE and READ{nearest(missing or '', names)}"
        )

    def _metadata(self) -> ClusterMetadata:
        """What the cluster says of its topics. The client that asks for offsets then knows new partitions as well."""
        from confluent_kafka import KafkaException

        if self._admin is None:
            found = self._connection.metadata(self._where)
            self._admin = self._connection.admin()
            return found
        try:
            return self._admin.list_topics(timeout=SLOW_PATIENCE)
        except KafkaException as error:
            raise self._connection.failure(error.args[0], self._where, SourceError) from None

    def _offsets(self, spec: Any) -> dict[str, int]:
        end = time.monotonic() + PATIENCE
        while True:
            error, found = self._asked(spec)
            if error is None:
                return found
            if error.name() not in SETTLING or time.monotonic() > end:
                raise self._connection.failure(error, self._where, SourceError)
            self._parts = ()  # what is not there any more is told by the topics
            time.sleep(0.1)

    def _asked(self, spec: Any) -> tuple[KafkaError | None, dict[str, int]]:
        from confluent_kafka import OFFSET_INVALID, IsolationLevel, KafkaError, KafkaException, TopicPartition

        parts = self.parts()
        assert self._admin is not None
        committed = self._isolation == "read_committed"
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        asked = {TopicPartition(*topic_and_partition(part)): spec for part in parts}
        futures: Mapping[Any, Any] = self._admin.list_offsets(asked, isolation_level=level, request_timeout=PATIENCE)
        try:
            offsets = {
                part_name(part.topic, part.partition): int(future.result(2 * PATIENCE).offset)
                for part, future in futures.items()
            }
        except KafkaException as error:
            return error.args[0], {}
        if OFFSET_INVALID in offsets.values():  # of a broker that stops, and says nothing more of the partition
            return KafkaError(KafkaError.LEADER_NOT_AVAILABLE), {}
        return None, offsets


def _bits(topic_id: Any) -> tuple[int, int]:
    return topic_id.get_most_significant_bits(), topic_id.get_least_significant_bits()


def _specs() -> Any:
    """What makes specifications of offsets; Kafka's client does not type them."""
    from confluent_kafka import admin

    untyped: Any = admin
    return untyped.OffsetSpec
