"""Publishes messages to a Kafka topic: each write is one transaction of staged messages."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dagster_unified.connectors.kafka.cluster import ANSWER, PROBE, answers, committed_offsets, group_member
from dagster_unified.connectors.kafka.connection import FORGOTTEN, UNCOORDINATED, KafkaConnection, telling_error
from dagster_unified.connectors.kafka.messages import Messages, StagedMessages, staged_messages
from dagster_unified.connectors.kafka.reading import part_name
from dagster_unified.connectors.protocol.commits import (
    Commit,
    CommitConflictError,
    Committer,
    CommitUncertainError,
    WriteAttempt,
    remove_staging,
)
from dagster_unified.errors import SinkError, UnavailableError, UnifiedError

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

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
"""Seconds within which everything has to be acknowledged."""


@dataclass(frozen=True)
class Topic:
    """A topic that is written to."""

    connection: KafkaConnection
    name: str
    where: str
    """The start of an error's message."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """Options of its producers."""

    def partitions(self) -> int:
        """How many partitions it has; raises `SinkError` where there is no such topic, or no permission."""
        metadata = self.connection.metadata(self.where, self.name).topics[self.name]
        if metadata.error is not None:
            raise self.connection.failure(metadata.error, self.where, SinkError)
        return len(metadata.partitions)


class Publisher:
    """A producer for one topic, with the topic's options and further ones."""

    def __init__(self, topic: Topic, config: Mapping[str, Any] | None = None) -> None:
        self._topic, self._where = topic, topic.where
        self._reported: list[KafkaError] = []
        self._refused: list[KafkaError] = []
        self._partitions: int | None = None
        callbacks = {"error_cb": self._reported.append, "on_delivery": self._delivered}
        self.producer = topic.connection.producer({**_PRODUCER, **topic.config, **(config or {}), **callbacks})

    def publish(self, messages: Messages) -> None:
        """Send messages, which are not acknowledged yet; raises what the cluster has refused so far."""
        produce, topic = self.producer.produce, self._topic.name
        keys = messages.keys if messages.keys is not None else [None] * len(messages)
        all_arguments = self._produce_arguments(messages)
        for number, (key, value) in enumerate(zip(keys, messages.values, strict=True)):
            arguments = all_arguments[number] if all_arguments else {}
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
        unacknowledged = 1
        while unacknowledged and time.monotonic() < deadline:
            unacknowledged = self.producer.flush(1.0)
            self.raise_refused()
        if unacknowledged:
            reason = telling_error(self._reported)
            said = f" ({reason.str()})" if reason is not None else ""
            raise UnavailableError(
                f"{self._where}: {self._topic.connection.describe()} has not acknowledged {unacknowledged} messages"
                f" within {_FLUSH:.0f} s{said}; see that it runs and that this machine reaches it"
            )

    def raise_refused(self) -> None:
        """Raise the first error with which the cluster has refused a message, if there is one."""
        from confluent_kafka import KafkaException

        if self._refused:
            raise KafkaException(self._refused[0])

    def failure(self, error: KafkaException) -> UnifiedError:
        """The library's error for one of the client's, with the reason that the client knows."""
        from confluent_kafka import KafkaError, KafkaException

        with suppress(KafkaException):  # after a fatal error it says so again
            self.producer.poll(0)
        reason: KafkaError = error.args[0]
        if reason.code() in (KafkaError._TIMED_OUT, KafkaError._MSG_TIMED_OUT):
            leaderless = self.leaderless()
            if leaderless is not None:
                return leaderless
        if reason.code() in (KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN):
            reason = telling_error(self._reported) or reason
        return self._topic.connection.failure(reason, self._where, SinkError)

    def leaderless(self) -> UnavailableError | None:
        """The error where nobody can write to a partition now, as on a broker's full disk; else None."""
        from confluent_kafka import KafkaException

        name = self._topic.name
        try:
            metadata = self.producer.list_topics(name, timeout=PROBE).topics[name].partitions
        except KafkaException:
            return None
        leaderless = [part_name(name, number) for number, partition in sorted(metadata.items()) if partition.leader < 0]
        if not leaderless:
            return None
        return UnavailableError(
            f"{self._where}: {self._topic.connection.describe()}: {', '.join(leaderless)} has no leader; see that the"
            " brokers with its replicas run, and that there is room on their disks"
        )

    def _delivered(self, error: KafkaError | None, _: object) -> None:
        from confluent_kafka import KafkaError

        if error is not None and error.code() not in (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT):
            self._refused.append(error)

    def _produce_arguments(self, messages: Messages) -> list[dict[str, Any]]:
        columns: dict[str, Sequence[Any]] = {}
        if messages.headers is not None:
            columns["headers"] = messages.headers
        if messages.timestamps is not None:
            columns["timestamp"] = messages.timestamps
        if messages.places is not None:
            if self._partitions is None:
                self._partitions = self._topic.partitions()
            columns["partition"] = [place % self._partitions for place in messages.places]
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


_COMMIT = 60.0
"""Seconds after which nobody can tell whether a transaction was committed, if it may last for as long."""

_FENCED = {"_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH"}
_FORGOTTEN = {"INVALID_PRODUCER_ID_MAPPING", "UNKNOWN_PRODUCER_ID"}
_OF_A_TIMELINE = re.compile(r"/(?:timeline \d+|timelines)$")


class KafkaCommitter(Committer[StagedMessages]):
    """The transactions of one sink, with a producer for each transactional id until it is closed.

    Raises `SinkError` where there is no such topic. A transaction lasts for `timeout` at most.
    """

    def __init__(self, topic: Topic, timeout: timedelta) -> None:
        self._topic, self._timeout = topic, timeout
        self._producers: dict[str, _TransactionalProducer] = {}
        topic.partitions()

    def last_version(self, name: str) -> int | None:
        return self._producer(name).mark(name)

    def commit(self, commits: Sequence[Commit[StagedMessages]]) -> None:
        for commit in commits:
            self._producer(commit.identity.writer).commit(commit)

    def clean_up(self, attempts: Sequence[WriteAttempt], committed: bool) -> None:
        remove_staging(attempts, committed)

    def close(self) -> None:
        for producer in self._producers.values():
            producer.close()
        self._producers.clear()

    def _producer(self, name: str) -> _TransactionalProducer:
        """The producer for a mark: the marks of one writer, on all timelines, have one transactional id."""
        identity = _OF_A_TIMELINE.sub("", name)
        if identity not in self._producers:
            self._producers[identity] = _TransactionalProducer(self._topic, self._timeout, identity)
        return self._producers[identity]


class _TransactionalProducer:
    """One transactional id. Remembers marks for as long as no other producer has begun with it."""

    def __init__(self, topic: Topic, timeout: timedelta, identity: str) -> None:
        self._topic, self._timeout, self._identity = topic, timeout.total_seconds(), identity
        self._where = topic.where
        self._publisher: Publisher | None = None
        self._groups: dict[str, Consumer] = {}
        self._marks: dict[str, int | None] = {}

    def mark(self, name: str) -> int | None:
        """The version that the cluster holds for a mark."""
        publisher = self._begun()
        if name not in self._marks:
            self._marks[name] = self._asked(publisher, name)
        return self._marks[name]

    def commit(self, commit: Commit[StagedMessages]) -> None:
        """Publish the staged messages, with the marks, in one transaction."""
        from confluent_kafka import KafkaException

        publisher = self._begun()
        writer, version = commit.identity.writer, commit.identity.version
        current = self.mark(writer)
        if current is not None and current >= version:
            raise CommitConflictError(f"{self._where}: '{writer}' is at {current} already, and this write is {version}")
        began = time.monotonic()
        try:
            publisher.producer.begin_transaction()
            for name, marked in commit.marks.items():
                member = self._marked_member(name).consumer_group_metadata()
                publisher.producer.send_offsets_to_transaction([self._place(marked + 1)], member, ANSWER)
            for messages in staged_messages(commit.committables):
                publisher.publish(messages)
            self._end(publisher)
        except KafkaException as error:
            self._abort(publisher, error)
            raise self._failure(publisher, error, time.monotonic() - began) from None
        except CommitUncertainError:
            self._forget()
            raise
        except BaseException:
            self._abort(publisher)
            raise
        self._marks.update(commit.marks)

    def close(self) -> None:
        """Close the producer and the groups."""
        self._forget()
        for group in self._groups.values():
            group.close()
        self._groups.clear()

    def _begun(self) -> Publisher:
        """The producer, which is the last to have begun with this id as far as it knows."""
        from confluent_kafka import KafkaException

        if self._publisher is None:
            timeout = {"transaction.timeout.ms": round(self._timeout * 1000)}
            publisher = Publisher(self._topic, {"transactional.id": self._identity, **timeout})
            try:
                publisher.producer.init_transactions(ANSWER)
            except KafkaException as error:
                if error.args[0].name() in UNCOORDINATED and answers(publisher.producer):
                    raise self._uncoordinated(error) from None
                raise self._failure(publisher, error) from None
            self._publisher = publisher
        return self._publisher

    def _asked(self, publisher: Publisher, name: str) -> int | None:
        (committed,) = committed_offsets(
            self._topic.connection,
            self._marked_member(name),
            name,
            [self._place()],
            lambda error: self._failure(publisher, error),
            self._where,
        )
        return committed.offset - 1 if committed.offset > 0 else None

    def _end(self, publisher: Publisher) -> None:
        """Commit, and wait as long as the cluster only takes its time."""
        from confluent_kafka import KafkaException

        deadline = time.monotonic() + min(_COMMIT, self._timeout)
        while True:
            try:
                publisher.producer.commit_transaction(5.0)
                return
            except KafkaException as error:
                with suppress(KafkaException):
                    publisher.producer.poll(0)
                publisher.raise_refused()
                if not error.args[0].retriable():
                    raise
                if time.monotonic() > deadline:
                    reason = self._failure(publisher, error)
                    raise CommitUncertainError(
                        f"{reason}; nobody can tell whether the transaction was committed"
                    ) from None

    def _abort(self, publisher: Publisher, error: KafkaException | None = None) -> None:
        """End a failed transaction: nothing of it is visible."""
        self._forget()
        if error is None or not error.args[0].fatal():
            with suppress(Exception):  # the next producer with this id aborts what is left
                publisher.producer.abort_transaction(5.0)

    def _forget(self) -> None:
        """Start and ask anew next time."""
        self._publisher = None
        self._marks.clear()

    def _failure(self, publisher: Publisher, error: KafkaException, seconds: float = 0.0) -> UnifiedError:
        """The error for a client's error that came this many seconds after the transaction had begun."""
        name = error.args[0].name()
        if name in _FENCED and seconds >= self._timeout:
            return publisher.leaderless() or UnavailableError(
                f"{self._where}: a transaction took {seconds:.0f} s, and the cluster has aborted it after"
                f" {self._timeout:.0f} s, with nothing of it visible; raise transaction_timeout, or write less at once"
                " (the brokers allow what their transaction.max.timeout.ms says)"
            )
        if name in _FENCED:
            return CommitConflictError(f"{self._where}: another process has begun to write as '{self._identity}'")
        if name in _FORGOTTEN:
            return CommitConflictError(
                f"{self._where}: '{self._identity}': {FORGOTTEN}; it begins anew, and asks first what is committed"
            )
        if name == "INVALID_TXN_STATE":
            return CommitConflictError(
                f"{self._where}: '{self._identity}': the cluster has ended the transaction; it begins anew, and asks"
                " first what is committed"
            )
        return publisher.failure(error)

    def _uncoordinated(self, error: KafkaException) -> UnavailableError:
        return UnavailableError(
            f"{self._where}: {self._topic.connection.describe()} answers, and its coordinator of transactions does not"
            f" ({error.args[0].str()}); see that the topic __transaction_state is there and has"
            " transaction.state.log.min.isr replicas in sync"
        )

    def _marked_member(self, name: str) -> Consumer:
        """A member of the group that holds a mark."""
        if name not in self._groups:
            self._groups[name] = group_member(self._topic.connection, name)
        return self._groups[name]

    def _place(self, offset: int | None = None) -> TopicPartition:
        """The partition at which a group holds its mark: every topic has partition 0."""
        from confluent_kafka import TopicPartition

        return TopicPartition(self._topic.name, 0) if offset is None else TopicPartition(self._topic.name, 0, offset)
