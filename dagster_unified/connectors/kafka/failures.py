"""What Kafka's errors mean to a pipeline: whether another attempt may help, and what to do.

Knows the error codes of librdkafka and of brokers, by their names; imports no client before there is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from dagster_unified.errors import ConfigurationError, UnavailableError, UnifiedError

if TYPE_CHECKING:
    from confluent_kafka import KafkaError

_AUTHENTICATION, _SSL, SASL_AUTHENTICATION_FAILED = -169, -181, 58
REFUSALS = {_AUTHENTICATION, _SSL, SASL_AUTHENTICATION_FAILED}
"""Codes with which a cluster, or this client, ends a conversation before it has begun."""

UNCOORDINATED = {
    "_TIMED_OUT", "_WAIT_COORD", "COORDINATOR_NOT_AVAILABLE", "NOT_COORDINATOR", "COORDINATOR_LOAD_IN_PROGRESS",
}  # fmt: skip
"""What a client says where it has found no coordinator, whether or not its brokers answer."""

FORGOTTEN = (
    "the cluster has forgotten this producer, which wrote nothing for longer than the brokers'"
    " transactional.id.expiration.ms"
)

_LASTING = {
    "TOPIC_AUTHORIZATION_FAILED": (
        "this user has no permission for the topic",
        "give it READ and DESCRIBE to read, or WRITE and DESCRIBE to write",
    ),
    "GROUP_AUTHORIZATION_FAILED": (
        "this user has no permission for consumer groups that begin with 'dagster-unified/'",
        "give it READ on that prefix",
    ),
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": (
        "this user has no permission for transactional ids that begin with 'dagster-unified/'",
        "give it WRITE and DESCRIBE on that prefix, or choose at-least-once",
    ),
    "CLUSTER_AUTHORIZATION_FAILED": (
        "this user has no permission to write",
        "give it WRITE on the topic, and IDEMPOTENT_WRITE on the cluster where brokers are older than 2.8",
    ),
    "UNKNOWN_TOPIC_OR_PART": ("there is no such topic or partition", "create the topic, or name another"),
    "_UNKNOWN_TOPIC": ("there is no such topic", "create it, or name another"),
    "_UNKNOWN_PARTITION": ("there is no such partition", "let the partitioner give one that the topic has"),
    "MSG_SIZE_TOO_LARGE": (
        "a record is larger than the topic takes",
        "write smaller records, or raise the topic's max.message.bytes and the option message.max.bytes",
    ),
    "INVALID_MSG_SIZE": (
        "a record is larger than this client sends",
        "write smaller records, or raise the option message.max.bytes",
    ),
    "RECORD_LIST_TOO_LARGE": (
        "a batch of records is larger than the topic's segments",
        "lower the option batch.size, or raise the topic's segment.bytes",
    ),
    "INVALID_RECORD": (
        "the broker refused a record",
        "a compacted topic takes only records with a key: name the field, with key=",
    ),
    "POLICY_VIOLATION": ("the broker's policy refused a record", "ask who runs the cluster"),
    "INVALID_TRANSACTION_TIMEOUT": (
        "the time-out of transactions is longer than the broker allows",
        "lower transaction_timeout, or raise the broker's transaction.max.timeout.ms",
    ),
    "INVALID_TIMESTAMP": (
        "a record's time is not one that the topic takes",
        "correct the field timestamp=, or raise the topic's message.timestamp.before.max.ms or .after.max.ms",
    ),
    "UNSUPPORTED_COMPRESSION_TYPE": ("the broker does not know this compression", "set compression.type"),
    "_INVALID_ARG": ("the client refuses an argument", "check the sink's options and the record's fields"),
    "UNSUPPORTED_VERSION": ("the broker is too old", "Kafka 2.5 and newer have what is needed"),
    "_UNSUPPORTED_FEATURE": ("the broker is too old", "Kafka 2.5 and newer have what is needed"),
    "UNSUPPORTED_SASL_MECHANISM": ("the broker does not know this sasl.mechanism", "choose one that it has"),
}
"""What comes again with every attempt: the reason, and what to do."""

_PASSING = {
    "COORDINATOR_NOT_AVAILABLE": ("the coordinator is away", "see that the cluster's brokers run"),
    "NOT_COORDINATOR": ("the coordinator has moved", "see that the cluster's brokers run"),
    "COORDINATOR_LOAD_IN_PROGRESS": ("the coordinator is still starting", "wait until it has started"),
    "NOT_ENOUGH_REPLICAS": (
        "too few replicas are in sync",
        "see that the brokers run, or lower the topic's min.insync.replicas",
    ),
    "NOT_ENOUGH_REPLICAS_AFTER_APPEND": (
        "too few replicas are in sync",
        "see that the brokers run, or lower the topic's min.insync.replicas",
    ),
    "KAFKA_STORAGE_ERROR": ("a broker cannot write to its disk", "see whether it is full"),
    "INVALID_PRODUCER_ID_MAPPING": (FORGOTTEN, "another attempt begins anew"),
    "UNKNOWN_PRODUCER_ID": (FORGOTTEN, "another attempt begins anew"),
}
"""What another attempt may not meet."""


def failure(
    error: KafkaError,
    where: str,
    hide: Callable[[str], str] = str,
    refused: type[UnifiedError] = ConfigurationError,
) -> UnifiedError:
    """The library's error for one of Kafka's: terminal where another attempt meets the same, else transient.

    `where` names what it is about; `hide` takes secrets out of a text; `refused` is the class of terminal errors.
    """
    name, said = error.name(), hide(_plain(error.str()))
    if error.code() in (_AUTHENTICATION, SASL_AUTHENTICATION_FAILED):
        return ConfigurationError(
            f"{where}: the broker refused the login ({said}); check sasl.mechanism, sasl.username and sasl.password"
        )
    if error.code() == _SSL:
        return ConfigurationError(
            f"{where}: no connection with TLS ({said}); check security.protocol, the port, and ssl.ca.location"
        )
    if name in _LASTING:
        reason, advice = _LASTING[name]
        return refused(f"{where}: {reason} ({said}); {advice}")
    if name in _PASSING:
        reason, advice = _PASSING[name]
        return UnavailableError(f"{where}: {reason} ({said}); {advice}")
    return UnavailableError(f"{where} does not answer ({said}); see that it runs and that this machine reaches it")


def _plain(text: str) -> str:
    """librdkafka's words without its own bookkeeping, such as times and the names of its threads."""
    text = re.sub(r"\s*\(after \d+ms in state .*\)", "", text)
    return re.sub(r"^(?:[\w/]+://)?[\w.:-]+/(?:bootstrap|\d+): ", "", text).strip()
