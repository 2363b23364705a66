"""Apache Kafka, through librdkafka (`confluent-kafka`): `pip install dagster-unified[kafka]`."""

from dagster_unified.connectors.kafka.connection import KafkaConnection
from dagster_unified.connectors.kafka.formats import AvroFormat, JsonFormat, ProtobufFormat, RawFormat, ValueFormat
from dagster_unified.connectors.kafka.reading import KafkaOffsetsInitializer, OffsetResetStrategy
from dagster_unified.connectors.kafka.registry import SchemaRegistry
from dagster_unified.connectors.kafka.sink import KafkaSink
from dagster_unified.connectors.kafka.source import KafkaMessage, KafkaSource

__all__ = [
    "AvroFormat",
    "JsonFormat",
    "KafkaConnection",
    "KafkaMessage",
    "KafkaOffsetsInitializer",
    "KafkaSink",
    "KafkaSource",
    "OffsetResetStrategy",
    "ProtobufFormat",
    "RawFormat",
    "SchemaRegistry",
    "ValueFormat",
]
