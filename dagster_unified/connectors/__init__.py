"""Sources and sinks: the systems that a pipeline reads from and writes to.

`connectors.protocol` has the classes that an author of a connector extends.

pyspark is imported only when something is read or written, so that pipelines load without it.
"""

from dagster_unified.connectors.asset import AssetSource
from dagster_unified.connectors.collection import CollectionSource
from dagster_unified.connectors.delta import Change, ChangeKind, DeltaSink, DeltaSource
from dagster_unified.connectors.files.sink import FileSink
from dagster_unified.connectors.files.sources import ParquetSource
from dagster_unified.connectors.files.text_sources import CsvSource, JsonSource
from dagster_unified.connectors.finding import find_sink, find_source
from dagster_unified.connectors.foreach import ForeachSink, PrintSink
from dagster_unified.connectors.kafka import (
    AvroFormat,
    JsonFormat,
    KafkaConnection,
    KafkaMessage,
    KafkaOffsetsInitializer,
    KafkaSink,
    KafkaSource,
    OffsetResetStrategy,
    ProtobufFormat,
    RawFormat,
    SchemaRegistry,
)
from dagster_unified.connectors.protocol.commits import DeliveryGuarantee
from dagster_unified.connectors.secrets import ResourceKey
from dagster_unified.connectors.sql.generic import DatabaseSink, DatabaseSource
from dagster_unified.connectors.sql.postgres import PostgresConnection, PostgresSink, PostgresSource
from dagster_unified.connectors.structured import Rate, RateSource, StructuredSource
from dagster_unified.connectors.written_ahead import GeneratorSource, SocketSource

__all__ = [
    "AssetSource", "AvroFormat", "Change", "ChangeKind", "CollectionSource", "CsvSource", "DatabaseSink",
    "DatabaseSource", "DeliveryGuarantee", "DeltaSink", "DeltaSource", "FileSink", "ForeachSink", "GeneratorSource",
    "JsonFormat", "JsonSource", "KafkaConnection", "KafkaMessage", "KafkaOffsetsInitializer", "KafkaSink",
    "KafkaSource", "OffsetResetStrategy", "ParquetSource", "PostgresConnection", "PostgresSink", "PostgresSource",
    "PrintSink", "ProtobufFormat", "Rate", "RateSource", "RawFormat", "ResourceKey", "SchemaRegistry", "SocketSource",
    "StructuredSource", "find_sink", "find_source",
]  # fmt: skip
