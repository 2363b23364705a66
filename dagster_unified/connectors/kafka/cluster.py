"""A source's questions to a cluster: the partitions of topics, their offsets, and offsets committed by groups."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_unified.connectors.kafka.connection import (
    PATIENCE,
    SETTLING,
    SETTLING_PATIENCE,
    SLOW_PATIENCE,
    UNCOORDINATED,
    KafkaConnection,
)
from dagster_unified.connectors.kafka.reading import Isolation, part_name, topic_and_partition
from dagster_unified.errors import SourceError, UnavailableError, UnifiedError, nearest

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.admin._metadata import ClusterMetadata

ANSWER = 30.0
"""Seconds within which a coordinator has to answer."""

PROBE = 3.0
"""Seconds within which a broker that is not away answers."""


def group_member(connection: KafkaConnection, group: str) -> Consumer:
    """A client of a group; it joins nothing and commits nothing by itself."""
    return connection.consumer({"group.id": group, "isolation.level": "read_committed", "enable.auto.commit": False})


def committed_offsets(
    connection: KafkaConnection,
    member: Consumer,
    group: str,
    places: Sequence[TopicPartition],
    explain: Callable[[KafkaException], UnifiedError],
    where: str,
) -> list[TopicPartition]:
    """The offsets that a group has committed, negative where it has none; raises the error that `explain` returns.

    A coordinator that moves or starts may take its time. An admin client could ask as well, but it crashes where the
    coordinator is still starting (librdkafka 2.16).
    """
    from confluent_kafka import KafkaException

    deadline = time.monotonic() + ANSWER
    while True:
        try:
            offsets: list[TopicPartition] = member.committed(list(places), timeout=5.0)
            wrong = next((place.error for place in offsets if place.error is not None), None)
            if wrong is not None:
                raise KafkaException(wrong)
            return offsets
        except KafkaException as error:
            failure = explain(_refusal(connection, group) or error)
            if not failure.retryable:
                raise failure from None
            if time.monotonic() > deadline:
                if error.args[0].name() not in UNCOORDINATED or not answers(member):
                    raise failure from None
                if _in_transaction(connection, group, places):
                    raise _locked_in_transaction(connection, group, where) from None
                raise _away(connection, group, error, where) from None
            time.sleep(0.2)


def answers(client: Consumer | Producer) -> bool:
    """Whether a broker answers at all."""
    from confluent_kafka import KafkaException

    try:
        return bool(client.list_topics(timeout=PROBE).brokers)
    except KafkaException:
        return False


def _away(connection: KafkaConnection, group: str, error: KafkaException, where: str) -> UnavailableError:
    return UnavailableError(
        f"{where}: {connection.describe()} answers, and the coordinator of consumer group '{group}' does not"
        f" ({error.args[0].str()}); see that the topic __consumer_offsets is there and has replicas in sync"
    )


def _in_transaction(connection: KafkaConnection, group: str, places: Sequence[TopicPartition]) -> bool:
    """Whether a group answers only a question that ignores open transactions."""
    from confluent_kafka import KafkaException

    asking = connection.consumer({"group.id": group, "isolation.level": "read_uncommitted"})
    try:
        return all(place.error is None for place in asking.committed(list(places), timeout=PROBE))
    except KafkaException:
        return False
    finally:
        asking.close()


def _locked_in_transaction(connection: KafkaConnection, group: str, where: str) -> UnavailableError:
    return UnavailableError(
        f"{where}: the offsets of consumer group '{group}' in {connection.describe()} are in a transaction that has not"
        " ended; wait for its end, or, where brokers have lost it, end it with kafka-transactions.sh find-hanging and"
        " abort"
    )


def _refusal(connection: KafkaConnection, group: str) -> KafkaException | None:
    """The error if the group may not be asked, which a consumer does not report."""
    from confluent_kafka import KafkaException

    admin = connection.admin()  # which has to be there until it has answered
    try:
        admin.describe_consumer_groups([group], request_timeout=5.0)[group].result()
    except KafkaException as error:
        return error if error.args[0].name() == "GROUP_AUTHORIZATION_FAILED" else None
    return None


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
        """The partitions; asked for again when the discovery interval has passed.

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
        """The end of each partition; of committed records where only those are read."""
        return self._offsets(_specs().latest())

    def at(self, moment: int) -> dict[str, int]:
        """The first offset with this timestamp or a later one; the partition's end where there is none."""
        offsets, newest = self._offsets(_specs().for_timestamp(moment)), self.newest()
        known = {part: offset for part, offset in offsets.items() if part in newest}
        return {part: newest[part] if offset < 0 else min(offset, newest[part]) for part, offset in known.items()}

    def identities(self) -> dict[str, str]:
        """The id of each topic, which changes when it is made again under its name; old brokers have none."""
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
        """The offset that a consumer group has committed for each partition, where it has one."""
        from confluent_kafka import TopicPartition

        places = [TopicPartition(*topic_and_partition(part)) for part in self.parts()]
        member = group_member(self._connection, group)
        try:
            explain = partial(self._group_failure, group)
            committed = committed_offsets(self._connection, member, group, places, explain, self._where)
        finally:
            member.close()
        return {part_name(place.topic, place.partition): place.offset for place in committed if place.offset >= 0}

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
            topics = self._metadata().topics
            names = [name for name, topic in topics.items() if topic.error is None and topic.partitions]
            wanted = self._wanted(names)
            missing = next((name for name in wanted if name not in names), None)
            if wanted and missing is None:
                self._warn_of_gone(topics)
                return [part_name(name, number) for name in wanted for number in sorted(topics[name].partitions)]
            error = topics[missing].error if missing is not None and missing in topics else None
            settles = error is None or error.name() in SETTLING
            if not settles or time.monotonic() > end:
                raise self._no_topic(missing, names, None if settles else error)
            time.sleep(0.1)

    def _warn_of_gone(self, there: Mapping[str, object]) -> None:
        """Warn of topics that are gone. Only a pattern may lose a topic; a missing named topic is an error."""
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
        """The cluster's metadata of topics. The client that asks for offsets then knows new partitions as well."""
        from confluent_kafka import KafkaException

        if self._admin is None:
            metadata = self._connection.metadata(self._where)
            self._admin = self._connection.admin()
            return metadata
        try:
            return self._admin.list_topics(timeout=SLOW_PATIENCE)
        except KafkaException as error:
            raise self._connection.failure(error.args[0], self._where, SourceError) from None

    def _offsets(self, spec: Any) -> dict[str, int]:
        end = time.monotonic() + PATIENCE
        while True:
            error, offsets = self._asked(spec)
            if error is None:
                return offsets
            if error.name() not in SETTLING or time.monotonic() > end:
                raise self._connection.failure(error, self._where, SourceError)
            self._parts = ()  # listing the topics reports what is gone
            time.sleep(0.1)

    def _asked(self, spec: Any) -> tuple[KafkaError | None, dict[str, int]]:
        from confluent_kafka import OFFSET_INVALID, IsolationLevel, KafkaError, KafkaException, TopicPartition

        parts = self.parts()
        assert self._admin is not None
        committed = self._isolation == "read_committed"
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        request = {TopicPartition(*topic_and_partition(part)): spec for part in parts}
        futures: Mapping[Any, Any] = self._admin.list_offsets(request, isolation_level=level, request_timeout=PATIENCE)
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
    """The client's factory of offset specifications, which it does not type."""
    from confluent_kafka import admin

    untyped: Any = admin
    return untyped.OffsetSpec
