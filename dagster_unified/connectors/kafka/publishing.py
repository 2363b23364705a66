"""Publishes messages to a topic, and says what the cluster refused.

Used on the driver within transactions, and by workers where a sink is at-least-once. Raises the client's own errors,
which `Publisher.failure` explains.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dagster_unified.connectors.kafka.connection import KafkaConnection, telling
from dagster_unified.connectors.kafka.groups import PROBE
from dagster_unified.connectors.kafka.messages import Messages
from dagster_unified.connectors.kafka.offsets import part_name
from dagster_unified.errors import SinkError, UnavailableError, UnifiedError

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, KafkaException

_PRODUCER = {
    "enable.idempotence": True,
    "linger.ms": 5,
    "batch.size": 1 << 20,
    "batch.num.messages": 100_000,
    "queue.buffering.max.messages": 500_000,
    "queue.buffering.max.kbytes": 128 << 10,
    "compression.type": "lz4",
    "delivery.report.only.error": True,
}
"""Defaults for throughput: with a queue of 128 MB, and an answer only for a message that is refused."""

_FLUSH = 120.0
"""Seconds in which everything has to be acknowledged."""


class Publisher:
    """A producer for one topic. `where` begins the message of an error."""

    def __init__(self, connection: KafkaConnection, topic: str, where: str, config: Mapping[str, Any]) -> None:
        self._connection, self._topic, self._where = connection, topic, where
        self._reported: list[KafkaError] = []
        self._refused: list[KafkaError] = []
        self._partitions: int | None = None
        own = {"error_cb": self._reported.append, "on_delivery": self._delivered}
        self.producer = connection.producer({**_PRODUCER, **config, **own})

    def publish(self, messages: Messages) -> None:
        """Send messages, which are not acknowledged yet; raises what the cluster has refused so far."""
        produce, topic = self.producer.produce, self._topic
        keys = messages.keys if messages.keys is not None else [None] * len(messages)
        further = self._further(messages)
        for number, (key, value) in enumerate(zip(keys, messages.values, strict=True)):
            arguments = further[number] if further else {}
            while True:
                try:
                    produce(topic, value, key, **arguments)
                    break
                except BufferError:
                    self.producer.poll(0.1)
                    self.raise_refused()
        self.producer.poll(0)
        self.raise_refused()

    def flush(self) -> None:
        """Wait until everything is acknowledged."""
        deadline = time.monotonic() + _FLUSH
        left = 1
        while left and time.monotonic() < deadline:
            left = self.producer.flush(1.0)
            self.raise_refused()
        if left:
            reason = telling(self._reported)
            said = f" ({reason.str()})" if reason is not None else ""
            raise UnavailableError(
                f"{self._where}: {self._connection.describe()} has not acknowledged {left} messages within"
                f" {_FLUSH:.0f} s{said}; see that it runs and that this machine reaches it"
            )

    def raise_refused(self) -> None:
        """Raise the first error with which the cluster has refused a message, if there is one."""
        from confluent_kafka import KafkaException

        if self._refused:
            raise KafkaException(self._refused[0])

    def failure(self, error: KafkaException) -> UnifiedError:
        """The library's error for one of the client's, with what the client knows of its reason."""
        from confluent_kafka import KafkaError, KafkaException

        with suppress(KafkaException):  # after a fatal error it says so again
            self.producer.poll(0)
        reason: KafkaError = error.args[0]
        if reason.code() in (KafkaError._TIMED_OUT, KafkaError._MSG_TIMED_OUT):
            leaderless = self.leaderless()
            if leaderless is not None:
                return leaderless
        if reason.code() in (KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN):
            reason = telling(self._reported) or reason
        return self._connection.failure(reason, self._where, SinkError)

    def leaderless(self) -> UnavailableError | None:
        """What is wrong where nobody can write to a partition now, as on a broker's full disk."""
        from confluent_kafka import KafkaException

        try:
            found = self.producer.list_topics(self._topic, timeout=PROBE).topics[self._topic].partitions
        except KafkaException:
            return None
        partitions = [part_name(self._topic, number) for number, one in sorted(found.items()) if one.leader < 0]
        if not partitions:
            return None
        return UnavailableError(
            f"{self._where}: {self._connection.describe()}: {', '.join(partitions)} has no leader; see that the brokers"
            " with its replicas run, and that there is room on their disks"
        )

    def _delivered(self, error: KafkaError | None, _: object) -> None:
        from confluent_kafka import KafkaError

        if error is not None and error.code() not in (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT):
            self._refused.append(error)

    def _further(self, messages: Messages) -> list[dict[str, Any]]:
        """The further arguments of `produce` for each message, if there are any."""
        columns: dict[str, Sequence[Any]] = {}
        if messages.headers is not None:
            columns["headers"] = messages.headers
        if messages.timestamps is not None:
            columns["timestamp"] = messages.timestamps
        if messages.places is not None:
            if self._partitions is None:
                self._partitions = topic_partitions(self._connection, self._topic, self._where)
            columns["partition"] = [place % self._partitions for place in messages.places]
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def topic_partitions(connection: KafkaConnection, topic: str, where: str) -> int:
    """How many partitions a topic has; raises `SinkError` where there is no such topic, or no permission."""
    found = connection.metadata(where, topic).topics[topic]
    if found.error is not None:
        raise connection.failure(found.error, where, SinkError)
    return len(found.partitions)
