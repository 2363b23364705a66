"""What a pipeline author writes. Names are PyFlink's wherever PyFlink has the thing."""

from dagster_unified.api.columns import functions
from dagster_unified.api.pipeline import Pipeline
from dagster_unified.api.stream import DataStream, DataStreamSink, KeyedStream
from dagster_unified.api.watermarks import WatermarkStrategy
from dagster_unified.connectors import (
    CollectionSource,
    CsvSource,
    DeltaSink,
    FileSink,
    ForeachSink,
    JsonSource,
    ParquetSource,
    PrintSink,
    Rate,
    RateSource,
    StructuredSource,
)
from dagster_unified.operators.functions import (
    AggregateFunction,
    FilterFunction,
    FlatMapFunction,
    KeyedProcessFunction,
    KeySelector,
    MapFunction,
    OutputTag,
    Partitioner,
    ProcessFunction,
    ReduceFunction,
    RuntimeContext,
    TimerService,
    TimestampAssigner,
)
from dagster_unified.operators.state import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateTtlConfig,
    UpdateType,
    ValueStateDescriptor,
)
from dagster_unified.operators.time import MAX_TIMESTAMP, MIN_TIMESTAMP, TimeDomain

__all__ = [
    "MAX_TIMESTAMP", "MIN_TIMESTAMP", "AggregateFunction", "AggregatingStateDescriptor", "CollectionSource", "CsvSource", "DataStream", "DataStreamSink",
    "DeltaSink", "FileSink", "FilterFunction", "FlatMapFunction", "ForeachSink", "JsonSource", "KeySelector", "KeyedProcessFunction", "KeyedStream", "ListStateDescriptor",
    "MapFunction", "MapStateDescriptor", "OutputTag", "ParquetSource", "Partitioner", "Pipeline", "PrintSink", "ProcessFunction", "Rate", "RateSource", "ReduceFunction",
    "ReducingStateDescriptor", "RuntimeContext", "StateTtlConfig", "StructuredSource", "TimeDomain", "TimerService", "TimestampAssigner", "UpdateType", "ValueStateDescriptor",
    "WatermarkStrategy", "functions",
]  # fmt: skip
