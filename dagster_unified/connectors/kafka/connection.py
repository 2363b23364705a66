"""How clients reach a Kafka cluster, which options are secret, and what its errors mean."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dagster_unified.connectors.secrets import HasValue, Option, ResourceKey, Value, deferred, resolved, shown
from dagster_unified.errors import (
    ConfigurationError,
    MissingRequirementError,
    PipelineError,
    UnavailableError,
    UnifiedError,
)
from dagster_unified.graph.connectors import Place

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Producer
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.admin._metadata import ClusterMetadata

_AUTHENTICATION, _SSL, SASL_AUTHENTICATION_FAILED = -169, -181, 58
REFUSALS = {_AUTHENTICATION, _SSL, SASL_AUTHENTICATION_FAILED}
"""Codes with which a cluster, or this client, ends a conversation before it has begun."""

UNCOORDINATED = {
    "_TIMED_OUT", "_WAIT_COORD", "COORDINATOR_NOT_AVAILABLE", "NOT_COORDINATOR", "COORDINATOR_LOAD_IN_PROGRESS",
}  # fmt: skip
"""Errors of a client that has found no coordinator, whether or not its brokers answer."""

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
"""Errors that come again with every attempt: the reason, and the advice."""

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
"""Errors that another attempt may not meet: the reason, and the advice."""


def failure(
    error: KafkaError,
    where: str,
    hide: Callable[[str], str] = str,
    refused: type[UnifiedError] = ConfigurationError,
) -> UnifiedError:
    """The library's error for one of Kafka's: terminal where another attempt meets the same, else transient.

    `where` names the subject; `hide` takes secrets out of a text; `refused` is the class of terminal errors.
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
    """librdkafka's message without its own bookkeeping, such as times and the names of its threads."""
    text = re.sub(r"\s*\(after \d+ms in state .*\)", "", text)
    return re.sub(r"^(?:[\w/]+://)?[\w.:-]+/(?:bootstrap|\d+): ", "", text).strip()


PATIENCE = 6.0
"""Seconds after which a cluster that cannot be reached counts as away."""

SLOW_PATIENCE = 15.0
"""Seconds within which a cluster that can be reached has to answer: it may be starting, or busy."""

SETTLING_PATIENCE = 5.0
"""Seconds after which a broker knows a new topic."""

SETTLING = frozenset(
    (
        "LEADER_NOT_AVAILABLE",
        "NOT_LEADER_FOR_PARTITION",
        "UNKNOWN_TOPIC_OR_PART",
        "_UNKNOWN_PARTITION",
        "_UNKNOWN_TOPIC",
    )
)
"""Errors of brokers for a topic or a partition that is new, or that is moving, for a moment."""

_RESERVED = {
    "bootstrap.servers": "give it as bootstrap_servers",
    "group.id": "the library names consumer groups",
    "transactional.id": "the library names transactions",
    "enable.auto.commit": "positions belong to checkpoints",
    "enable.auto.offset.store": "positions belong to checkpoints",
}
"""Options of librdkafka that an author cannot set, and why."""

PRODUCER_RESERVED = {
    **_RESERVED,
    "transaction.timeout.ms": "give it as transaction_timeout",
    "enable.idempotence": "without it, messages come twice or out of order",
    "partitioner": "give it as partitioner",
    "error_cb": "the library explains what the client reports",
    "on_delivery": "the library explains what the client reports",
}
"""Options of a producer that an author cannot set, and why."""


_CLIENT: dict[str, int | str] = {
    # what the client would print of an error comes back as an error
    "log_level": 0,
    # else a transactional producer hangs for ever when its broker comes back (librdkafka 2.10 to 2.16)
    "metadata.recovery.strategy": "none",
    # Java's clients wait no longer either; with librdkafka's ten seconds, and up to half as much again that it adds at
    # random, a client comes back long after its broker
    "reconnect.backoff.max.ms": 1000,
}


@runtime_checkable
class GivesConnection(Protocol):
    """Something that knows how to reach a cluster, such as `KafkaResource`."""

    def connection(self) -> KafkaConnection:
        """How to reach it."""


class KafkaConnection:
    """A Kafka cluster: the brokers to ask first, and further options of librdkafka, such as those of TLS and SASL.

    It serves sources and sinks in both modes. A value is a text, a number, or an object with `get_value()`, such as
    Dagster's `EnvVar`: that is called only where a client is made, on the driver and in Spark's workers. No value of an
    option appears in plans, logs, metadata or checkpoints.

    Raises `ConfigurationError` for options that the library sets itself.

    Examples:
        >>> from dagster import EnvVar
        >>> login = {"sasl.username": "etl", "sasl.password": EnvVar("KAFKA_PASSWORD")}
        >>> KafkaConnection("broker:9093", {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", **login})
        KafkaConnection(broker:9093, options sasl.mechanism, sasl.password, sasl.username, security.protocol)
    """

    def __init__(self, bootstrap_servers: Value, options: Mapping[str, Option] | None = None) -> None:
        self._servers = deferred(bootstrap_servers)
        self._options: dict[str, Option] = {name: deferred(value) for name, value in (options or {}).items()}
        for name in self._options:
            check_option(name, self.describe())

    @classmethod
    def of(cls, connection: KafkaConnection | GivesConnection | Value) -> KafkaConnection:
        """A connection from whatever an author may write for one; raises `PipelineError` for anything else."""
        if isinstance(connection, KafkaConnection):
            return connection
        if isinstance(connection, ResourceKey):
            return _KafkaByKey(connection)
        if isinstance(connection, GivesConnection):
            return connection.connection()
        if isinstance(connection, (str, HasValue)):
            return cls(connection)
        raise PipelineError(
            "expected a KafkaConnection, a KafkaResource or the address of a broker, got a"
            f" {type(connection).__name__};"
            ' write KafkaConnection("broker:9092")'
        )

    def describe(self) -> str:
        """Where the cluster is, for people: no user, no password, no options."""
        return f"Kafka at {self.origin}"

    @property
    def resource_keys(self) -> frozenset[str]:
        """The key of the resource that it stands for, if it stands for one."""
        return frozenset()

    def connected(self, resources: Mapping[str, object]) -> KafkaConnection:
        """The same, with the resource that it stands for."""
        return self

    @property
    def origin(self) -> str:
        """The brokers to ask first; where they are looked up, the name of the variable."""
        return shown(self._servers)

    def place(self, topic: str) -> Place:
        """The identity of a topic."""
        return Place(f"kafka://{self.origin}/{topic}", topic)

    def __repr__(self) -> str:
        options = f", options {', '.join(sorted(self._options))}" if self._options else ""
        return f"KafkaConnection({self.origin}{options})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, KafkaConnection) and self._servers == other._servers and self._options == other._options
        )

    def __hash__(self) -> int:
        return hash(self.origin)

    def consumer(self, config: Mapping[str, Any]) -> Consumer:
        """A consumer; `config` overrides the author's options."""
        consumer: Consumer = self._client(_imported("confluent_kafka").Consumer, config)
        return consumer

    def producer(self, config: Mapping[str, Any]) -> Producer:
        """A producer; `config` overrides the author's options."""
        producer: Producer = self._client(_imported("confluent_kafka").Producer, config)
        return producer

    def admin(self, config: Mapping[str, Any] | None = None) -> AdminClient:
        """A client that asks about topics and groups."""
        admin: AdminClient = self._client(_imported("confluent_kafka.admin").AdminClient, config or {})
        return admin

    def metadata(self, where: str, topic: str | None = None) -> ClusterMetadata:
        """The cluster's metadata of its topics, or of one. `where` begins the message of an error.

        It waits a moment for a topic that brokers do not know, or whose partitions have no leader: the topic may be
        new. Raises `ConfigurationError` at once where the cluster refuses this client, and `UnavailableError` where it
        cannot be reached for `PATIENCE` seconds, or does not answer for `SLOW_PATIENCE`.
        """
        from confluent_kafka import KafkaException

        reported: list[KafkaError] = []
        admin = self.admin({"error_cb": reported.append, "socket.connection.setup.timeout.ms": int(1000 * PATIENCE)})
        began, wait, settled = time.monotonic(), 0.5, 0.0
        while True:
            try:
                metadata = (
                    admin.list_topics(topic, timeout=wait) if topic is not None else admin.list_topics(timeout=wait)
                )
            except KafkaException as error:
                admin.poll(0.1)
                refused = next((reason for reason in reported if reason.code() in REFUSALS), None)
                away = telling_error(reported)
                if refused is not None or time.monotonic() > began + (SLOW_PATIENCE if away is None else PATIENCE):
                    raise self.failure(refused or away or error.args[0], where) from None
                # an answer that comes later than this is not looked at: a slow cluster needs ever longer waits
                wait = min(2 * wait, PATIENCE)
                continue
            settled = settled or time.monotonic() + SETTLING_PATIENCE
            if not _settles(metadata, topic) or time.monotonic() > settled:
                return metadata
            time.sleep(0.1)

    def failure(self, error: KafkaError, where: str, refused: type[UnifiedError] = ConfigurationError) -> UnifiedError:
        """The library's error for one of Kafka's; `where` begins its message.

        `refused` is its class where no further attempt would help.
        """
        return failure(error, f"{where}: {self.describe()}", self._hidden, refused)

    def _client(self, make: Callable[[dict[str, Any]], Any], config: Mapping[str, Any]) -> Any:
        from confluent_kafka import KafkaException

        where = self.describe()
        options = {
            name: value if isinstance(value, (int, float)) else resolved(value, f"{where}: {name}")
            for name, value in self._options.items()
        }
        servers = resolved(self._servers, f"{where}: bootstrap_servers")
        if not servers.strip(" ,"):  # librdkafka would wait for brokers to be added
            raise ConfigurationError(
                f"{where}: bootstrap_servers is empty; give the address of a broker, such as broker:9092"
            )
        settings = {**options, **config}
        try:
            # librdkafka takes none that is below the least, which the author may have raised
            longest = max(int(_CLIENT["reconnect.backoff.max.ms"]), int(settings.get("reconnect.backoff.ms", 0)))
            return make({**_CLIENT, "reconnect.backoff.max.ms": longest, **settings, "bootstrap.servers": servers})
        except KafkaException as error:
            raise ConfigurationError(
                f"{where}: {self._hidden(error.args[0].str())}; options are those of librdkafka"
            ) from None
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{where}: {self._hidden(str(error))}") from None

    def _hidden(self, text: str) -> str:
        """A text without the values of secret options."""
        for name, value in self._options.items():
            known = value.get_value() if isinstance(value, HasValue) else value if _is_secret(name) else None
            if known:
                text = text.replace(str(known), "***")
        return text


class _KafkaByKey(KafkaConnection):
    """The cluster of a resource, by its key."""

    def __init__(self, key: ResourceKey) -> None:
        super().__init__("")
        self._servers = self._key = key

    @property
    def resource_keys(self) -> frozenset[str]:
        return frozenset([self._key.key])

    def connected(self, resources: Mapping[str, object]) -> KafkaConnection:
        return _KafkaByKey(self._key.connected(resources))

    def _client(self, make: Callable[[dict[str, Any]], Any], config: Mapping[str, Any]) -> Any:
        return self._given._client(make, config)

    def _hidden(self, text: str) -> str:
        return self._given._hidden(text)

    @property
    def _given(self) -> KafkaConnection:
        resource = self._key.resource
        if not isinstance(resource, (KafkaConnection, str, HasValue)):
            raise self._key.unfit("KafkaResource")
        return KafkaConnection.of(resource)


def check_option(name: str, where: str, reserved: Mapping[str, str] = _RESERVED) -> None:
    """Raise `ConfigurationError` for an option of librdkafka that the library sets itself; `reserved` says why."""
    if name in reserved:
        raise ConfigurationError(f"{where}: the option {name} cannot be set: {reserved[name]}")


def telling_error(reported: Sequence[KafkaError]) -> KafkaError | None:
    """The reported error that best explains why nobody answers, if there is one.

    That all brokers are down explains nothing.
    """
    from confluent_kafka import KafkaError

    return next((reason for reason in reversed(reported) if reason.code() != KafkaError._ALL_BROKERS_DOWN), None)


def _settles(metadata: ClusterMetadata, topic: str | None) -> bool:
    """Whether a topic may be unknown only because it is new."""
    error = None if topic is None else metadata.topics[topic].error
    return error is not None and error.name() in SETTLING


_SECRET = ("password", "passphrase", "secret", "token", "key.pem", "sasl.jaas", "credentials", "oauthbearer.config")


def _is_secret(name: str) -> bool:
    return any(word in name for word in _SECRET)


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingRequirementError(
            "Kafka needs the package confluent-kafka: install dagster-unified[kafka]"
        ) from error
