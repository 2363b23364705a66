"""What consumer groups hold: the offsets that they have committed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dagster_unified.connectors.kafka.connection import KafkaConnection
from dagster_unified.connectors.kafka.failures import UNCOORDINATED
from dagster_unified.errors import UnavailableError, UnifiedError

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

ANSWER = 30.0
"""Seconds in which a coordinator has to answer."""

PROBE = 3.0
"""Seconds in which a broker answers that is not away."""


def group_member(connection: KafkaConnection, group: str) -> Consumer:
    """A client of a group, which joins nothing and commits nothing by itself."""
    return connection.consumer({"group.id": group, "isolation.level": "read_committed", "enable.auto.commit": False})


def committed_offsets(
    connection: KafkaConnection,
    member: Consumer,
    group: str,
    places: Sequence[TopicPartition],
    explain: Callable[[KafkaException], UnifiedError],
    where: str,
) -> list[TopicPartition]:
    """The offsets that a group has committed, negative where it has none; raises what `explain` makes of an error.

    A coordinator that moves or starts may take its time. An admin client could be asked as well, and crashes where the
    coordinator is still starting (librdkafka 2.16).
    """
    from confluent_kafka import KafkaException

    deadline = time.monotonic() + ANSWER
    while True:
        try:
            found: list[TopicPartition] = member.committed(list(places), timeout=5.0)
            wrong = next((place.error for place in found if place.error is not None), None)
            if wrong is not None:
                raise KafkaException(wrong)
            return found
        except KafkaException as error:
            failure = explain(_refusal(connection, group) or error)
            if not failure.retryable:
                raise failure from None
            if time.monotonic() > deadline:
                if error.args[0].name() not in UNCOORDINATED or not answers(member):
                    raise failure from None
                if _in_transaction(connection, group, places):
                    raise _held(connection, group, where) from None
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
    """Whether a group answers who does not ask for what transactions have committed."""
    from confluent_kafka import KafkaException

    asking = connection.consumer({"group.id": group, "isolation.level": "read_uncommitted"})
    try:
        return all(place.error is None for place in asking.committed(list(places), timeout=PROBE))
    except KafkaException:
        return False
    finally:
        asking.close()


def _held(connection: KafkaConnection, group: str, where: str) -> UnavailableError:
    return UnavailableError(
        f"{where}: the offsets of consumer group '{group}' in {connection.describe()} are in a transaction that has not"
        " ended; wait for its end, or, where brokers have lost it, end it with kafka-transactions.sh find-hanging and"
        " abort"
    )


def _refusal(connection: KafkaConnection, group: str) -> KafkaException | None:
    """Whether a group may not be asked, which a consumer does not say."""
    from confluent_kafka import KafkaException

    admin = connection.admin()  # which has to be there until it has answered
    try:
        admin.describe_consumer_groups([group], request_timeout=5.0)[group].result()
    except KafkaException as error:
        return error if error.args[0].name() == "GROUP_AUTHORIZATION_FAILED" else None
    return None
