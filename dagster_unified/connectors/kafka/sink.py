"""The Kafka sink: messages of a topic, exactly-once by transactions, or at-least-once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, Self

import pyarrow as pa

from dagster_unified.connectors.kafka.committer import KafkaCommitter, Publisher, Topic
from dagster_unified.connectors.kafka.connection import (
    PRODUCER_RESERVED,
    GivesConnection,
    KafkaConnection,
    check_option,
)
from dagster_unified.connectors.kafka.formats import JsonFormat, ValueFormat
from dagster_unified.connectors.kafka.messages import (
    Bytes,
    MessageEncoder,
    MessageFormat,
    MessagesWriter,
    StagedMessages,
)
from dagster_unified.connectors.protocol.commits import (
    Committer,
    DeliveryGuarantee,
    NoCommitter,
    SparkSink,
    WriteIdentity,
    Writer,
    WriterTask,
)
from dagster_unified.connectors.secrets import Value
from dagster_unified.errors import PipelineError, SinkError, UnifiedError
from dagster_unified.graph.connectors import AssetName, Capabilities, Target, asset_path
from dagster_unified.operators.functions.type_variables import In
from dagster_unified.operators.time import checked_span
from dagster_unified.records import RecordType


class KafkaSink(SparkSink[In, StagedMessages]):
    """Writes a message to `topic` for every record.

    By default exactly-once, for readers with `isolation.level=read_committed`: in BATCH a run writes one transaction,
    and of several partitions one each; in STREAMING each epoch is one. Workers stage messages, and the driver publishes
    them, so that readers see all of a run or an epoch or nothing. A topic cannot be taken back: a BATCH run of a
    partition adds to what an earlier run wrote, and so does a deployment that goes back to a savepoint. With
    `AT_LEAST_ONCE` workers publish at once, without transactions; a retried task or a replayed epoch writes again.

    * `key`: the fields of the key, or a function of a record that gives bytes or a str. One field of type str or bytes
      is the key as it is; another is JSON, and several are a JSON object. Messages with one key are in one partition,
      in the order of emission.
    * `value_format`: how the record is written, as `KafkaSource` reads it: `JsonFormat` if nothing else is said,
      `AvroFormat`, `ProtobufFormat`, `RawFormat`. Where its schema is in a registry, the driver asks that, once for a
      job. Or `value`: one field of type str or bytes, or a function, whose None is a message without a value.
    * `mode="upsert"`: a later message of a key replaces an earlier one, as in a compacted topic, so that rolling
      updates may end here; of an epoch only the last message of each key is written, where it has several.
    * `tombstone`: a bool field, or a function, that says which records delete their key: their message has no value.
    * `headers`: the fields of headers by name, or a function that gives a mapping.
    * `partitioner`: one of librdkafka's, by default that of Java's clients, so that keys are in the same partitions; or
      an int field or a function, whose number modulo the topic's partitions is the partition.
    * `timestamp`: the field of the message's time; else it is when the message is published.
    * `transaction_timeout`: how long the cluster lets a transaction last. What a job that died has left holds back
      readers of committed messages for so long, unless the job is started again before.
    * `options`: further options of librdkafka's producer, except those that the library sets itself.

    Raises `PipelineError` for a field that is not there or of another type, for `upsert` without a key or with one that
    may be None, where the schema of `value_format` cannot hold the record's fields, and `ConfigurationError` for an
    option of the library's own. When it runs, `SinkError` where the topic is not there, a record is too large or does
    not fit its format (NaN in JSON, an int of 64 bits in one of 32), a registry does not take the schema or permission
    is lacking, and `UnavailableError`, which is tried again, where the cluster or the registry is away.

    Examples:
        >>> from dagster_unified.connectors import DeliveryGuarantee, KafkaSink
        >>> sink = sales.sink_to(KafkaSink("sales", "broker:9092", key="shop"))
        >>> [sale.amount for sale in run_pipeline(pipeline, "BATCH").sinks["sales"]]
        [3, 4, 5]
        >>> KafkaSink("sales", "broker:9092", delivery_guarantee=DeliveryGuarantee.AT_LEAST_ONCE).guarantee.value
        'at-least-once'
    """

    kind = "kafka"
    committable = StagedMessages

    def __init__(
        self,
        topic: str,
        connection: KafkaConnection | GivesConnection | Value,
        *,
        name: str | None = None,
        key: str | Sequence[str] | Callable[[In], Bytes] | None = None,
        value: str | Callable[[In], Bytes] | None = None,
        mode: Literal["append", "upsert"] = "append",
        tombstone: str | Callable[[In], bool] | None = None,
        headers: Mapping[str, str] | Callable[[In], Mapping[str, Bytes]] | None = None,
        partitioner: str | Callable[[In], int] = "murmur2_random",
        timestamp: str | None = None,
        delivery_guarantee: DeliveryGuarantee = DeliveryGuarantee.EXACTLY_ONCE,
        transaction_timeout: timedelta = timedelta(minutes=5),
        options: Mapping[str, str | int | float | bool] | None = None,
        value_format: ValueFormat | None = None,
        asset: AssetName | None = None,
    ) -> None:
        self.topic, self.connection = topic, KafkaConnection.of(connection)
        self.resource_keys = self.connection.resource_keys
        self.name = name or topic
        self.asset = asset_path(asset, f"sink '{self.name}'")
        self.mode, self.upserts = mode, mode == "upsert"
        keys = (key,) if isinstance(key, str) else key if key is None or callable(key) else tuple(key)
        self.key = keys if self.upserts and isinstance(keys, tuple) else ()
        self.delivery_guarantee, self.transaction_timeout = delivery_guarantee, transaction_timeout
        exactly_once = delivery_guarantee is DeliveryGuarantee.EXACTLY_ONCE
        self.capabilities = Capabilities(transactional=exactly_once, upsert=self.upserts)
        self.commits_in_writers = not exactly_once
        named = isinstance(partitioner, str) and partitioner in _PARTITIONERS
        self._options = {"partitioner": partitioner if named else _PARTITIONERS[0], **(options or {})}
        self.value_format = value_format or JsonFormat()
        self._format = MessageFormat(
            keys,
            value,
            headers,
            None if named else partitioner,
            timestamp,
            tombstone,
            self.value_format,
            replaces=self.upserts,
        )
        self._registered = False
        checked_span(f"sink '{self.name}': transaction_timeout", transaction_timeout, 1)
        for option in options or {}:
            check_option(option, f"sink '{self.name}'", PRODUCER_RESERVED)
        if mode not in ("append", "upsert"):
            raise PipelineError(f"sink '{self.name}': mode is 'append' or 'upsert', not {mode!r}")
        if value is not None and value_format is not None:
            raise PipelineError(
                f"sink '{self.name}': value= gives the value itself, and value_format= encodes the record; give one of"
                " them"
            )
        if self.upserts and not keys:
            raise PipelineError(f"sink '{self.name}': upsert needs key=, the fields that identify a record")
        if tombstone is not None and not keys:
            raise PipelineError(f"sink '{self.name}': a tombstone deletes a key; name the fields of it, with key=")

    def connected(self, resources: Mapping[str, object]) -> Self:
        changed = copy.copy(self)
        changed.connection = self.connection.connected(resources)
        return changed

    def describe(self) -> str:
        key = f" by {', '.join(self.key)}" if self.key else ""
        encoded = "" if isinstance(self.value_format, JsonFormat) else f" as {self.value_format.describe()}"
        return f"{self.connection.describe()}, topic '{self.topic}', {self.mode}{key}{encoded}"

    def target(self) -> Target:
        return Target(self.connection.place(self.topic), shared=not self.upserts)

    def check(self, records: RecordType) -> None:
        self._format.check(records, f"sink '{self.name}'")
        for field in self.key:
            if records.schema.field(field).nullable:
                raise PipelineError(
                    f"sink '{self.name}': field '{field}' is in its key and may be None, and a message without a key"
                    " replaces none; declare it without None"
                )

    def committer(self, schema: pa.Schema) -> Committer[StagedMessages]:
        where = f"sink '{self.name}' (topic '{self.topic}')"
        self._register(where)
        if self.delivery_guarantee is DeliveryGuarantee.AT_LEAST_ONCE:
            self._topic(where).partitions()
            return NoCommitter()
        return KafkaCommitter(self._topic(where), self.transaction_timeout)

    def writer(self, task: WriterTask) -> Writer[StagedMessages]:
        stage = f"{task.attempt.identity.pipeline}: stage '{task.attempt.stage}'"
        where = f"{stage}, sink '{self.name}' (topic '{self.topic}')"
        self._register(where)
        encoder = MessageEncoder(self._format, self.records, where)
        if self.delivery_guarantee is DeliveryGuarantee.EXACTLY_ONCE:
            return MessagesWriter(encoder, task.attempt, self.upserts)
        return _PublishingWriter(encoder, self, where)

    def _register(self, where: str) -> None:
        """Ask the registry. Workers get the answer, and ask nothing.

        Raises `SinkError` where the registry has no schema that holds the records, or rejects this one.
        """
        if self._registered or self._format.value is not None:
            return
        try:
            registered, prefix = self.value_format.registered(self.topic)
            registered.encoder(registered.value_type(self.records, self.records.names, where))
        except ValueError as error:
            raise SinkError(f"{where}: {error}") from None
        except UnifiedError as error:
            raise type(error)(f"{where}: {error}") from error
        self._format, self._registered = replace(self._format, value_format=registered, prefix=prefix), True

    def takes_together(self) -> bool:
        return False  # a transaction of several partitions could not keep out a writer of one of them

    def location(self, identity: WriteIdentity) -> str:
        return f"{self.connection.origin}/{self.topic}"

    def publisher(self, where: str) -> Publisher:
        """A producer of messages that are visible at once."""
        return Publisher(self._topic(where))

    def _topic(self, where: str) -> Topic:
        return Topic(self.connection, self.topic, where, self._options)


_PARTITIONERS = (
    "murmur2_random", "murmur2", "consistent_random", "consistent", "random", "fnv1a_random", "fnv1a",
)  # fmt: skip
"""librdkafka's partitioners. The first chooses the partitions that Java's clients choose."""


class _PublishingWriter(Writer[StagedMessages]):
    """Publishes at once, at-least-once."""

    def __init__(self, encoder: MessageEncoder, sink: KafkaSink[Any], where: str) -> None:
        self._encoder, self._upserts = encoder, sink.upserts
        self._publisher = sink.publisher(where)

    def write(self, batch: pa.RecordBatch) -> None:
        messages = self._encoder.encode(batch)
        with self._explained():
            self._publisher.publish(messages.last_of_each_key() if self._upserts else messages)

    def prepare_commit(self) -> Sequence[StagedMessages]:
        with self._explained():
            self._publisher.flush()
        return ()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        from confluent_kafka import KafkaException

        try:
            yield
        except KafkaException as error:
            raise self._publisher.failure(error) from None
