"""Sources and sinks, and the two protocols that they follow.

A source says its boundedness, a sink what its target is able to do. Who writes a connector of their own extends
`SplitSource` or `SparkSink`.

pyspark is imported only when something is read or written, so that pipelines load without it.
"""

from dagster_unified.connectors.base import SparkSink, SparkSource
from dagster_unified.connectors.collection import CollectionSource
from dagster_unified.connectors.commits import (
    Commit,
    CommitConflictError,
    Committable,
    Committer,
    CommitUncertainError,
    NoCommitter,
    WriteAttempt,
    WriteIdentity,
    Writer,
    WriterTask,
)
from dagster_unified.connectors.database import DatabaseSink, DatabaseSource
from dagster_unified.connectors.delivery import DeliveryGuarantee
from dagster_unified.connectors.delta import DeltaSink
from dagster_unified.connectors.file_sink import FileSink
from dagster_unified.connectors.files import CsvSource, JsonSource, ParquetSource
from dagster_unified.connectors.finding import find_sink, find_source
from dagster_unified.connectors.foreach import ForeachSink
from dagster_unified.connectors.http import HttpSource
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
from dagster_unified.connectors.postgres import PostgresConnection, PostgresSink, PostgresSource
from dagster_unified.connectors.printing import PrintSink
from dagster_unified.connectors.splits import Malformed, Offsets, SplitSource
from dagster_unified.connectors.structured import Rate, RateSource, StructuredSource
from dagster_unified.connectors.written_ahead import GeneratorSource, SocketSource, WrittenAheadSource
from dagster_unified.graph.connectors import Capabilities

__all__ = [
    "AvroFormat", "Capabilities", "CollectionSource", "Commit", "CommitConflictError", "CommitUncertainError",
    "Committable", "Committer", "CsvSource", "DatabaseSink", "DatabaseSource", "DeliveryGuarantee", "DeltaSink",
    "FileSink", "ForeachSink", "GeneratorSource", "HttpSource", "JsonFormat", "JsonSource", "KafkaConnection",
    "KafkaMessage", "KafkaOffsetsInitializer", "KafkaSink", "KafkaSource", "Malformed", "NoCommitter",
    "OffsetResetStrategy", "Offsets", "ParquetSource", "PostgresConnection", "PostgresSink", "PostgresSource",
    "PrintSink", "ProtobufFormat", "Rate", "RateSource", "RawFormat", "SchemaRegistry", "SocketSource", "SparkSink",
    "SparkSource", "SplitSource", "StructuredSource", "WriteAttempt", "WriteIdentity", "Writer", "WriterTask",
    "WrittenAheadSource", "find_sink", "find_source",
]  # fmt: skip
