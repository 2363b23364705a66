"""A Kafka cluster as a Dagster resource, shared by pipelines and the other assets of a code location."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dagster import ConfigurableResource
from pydantic import Field

from dagster_unified.connectors.kafka.connection import KafkaConnection

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Producer


class KafkaResource(ConfigurableResource):  # type: ignore[type-arg]
    """How to reach a Kafka cluster. Give it to `KafkaSource` and `KafkaSink`, and to assets of your own.

    A field or an option may be an `EnvVar`, which is looked up where a client connects.

    Examples:
        >>> from dagster import EnvVar
        >>> kafka = KafkaResource(bootstrap_servers="broker:9092", options={"sasl.password": EnvVar("KAFKA_PASSWORD")})
        >>> kafka.connection()
        KafkaConnection(broker:9092, options sasl.password)
    """

    bootstrap_servers: str = Field(description="The brokers to ask first, such as one:9092,two:9092.")
    options: dict[str, str] = Field(
        default={}, description="Further options of librdkafka, such as security.protocol; an EnvVar keeps secrets out."
    )

    def connection(self) -> KafkaConnection:
        """The same for sinks and sources."""
        return KafkaConnection(self.bootstrap_servers, self.options)

    def get_producer(self, config: Mapping[str, Any] | None = None) -> Producer:
        """A producer of confluent-kafka, for an asset, with further options of librdkafka."""
        return self.connection().producer(config or {})

    def get_consumer(self, group: str, config: Mapping[str, Any] | None = None) -> Consumer:
        """A consumer of confluent-kafka in a consumer group, for an asset, with further options of librdkafka."""
        return self.connection().consumer({"group.id": group, **(config or {})})
