"""How records become the values of Kafka messages, and values records: a module for each format, which does both.

A format knows the type that a value has as `values.py` spells it, and neither topics nor offsets. What a format is
encoded with is imported only where that is done: on workers, and on the driver to check a schema.
"""

from dagster_unified.connectors.kafka.formats.avro import AvroFormat
from dagster_unified.connectors.kafka.formats.base import JsonFormat, RawFormat, ValueFormat
from dagster_unified.connectors.kafka.formats.protobuf import ProtobufFormat

__all__ = ["AvroFormat", "JsonFormat", "ProtobufFormat", "RawFormat", "ValueFormat"]
