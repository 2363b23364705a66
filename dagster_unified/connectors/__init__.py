"""Sources and sinks.

A source says its boundedness, a sink its guarantee. Each reads or writes through Spark's public DataFrame API.

pyspark is imported only when something is read or written, so that pipelines load without it.
"""

from dagster_unified.connectors.collection import CollectionSource
from dagster_unified.connectors.delta import DeltaSink
from dagster_unified.connectors.files import CsvSource, FileSink, JsonSource, ParquetSource
from dagster_unified.connectors.foreach import ForeachSink
from dagster_unified.connectors.printing import PrintSink
from dagster_unified.connectors.structured import Rate, RateSource, StructuredSource

__all__ = [
    "CollectionSource", "CsvSource", "DeltaSink", "FileSink", "ForeachSink", "JsonSource", "ParquetSource", "PrintSink",
    "Rate", "RateSource", "StructuredSource",
]  # fmt: skip
