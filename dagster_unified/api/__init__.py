"""The API of pipeline authors. Names are PyFlink's wherever PyFlink has the thing."""

from dagster_unified.api.async_io import AsyncDataStream
from dagster_unified.api.columns import functions
from dagster_unified.api.pipeline import Pipeline
from dagster_unified.api.stream import DataStream, KeyedStream
from dagster_unified.api.watermarks import WatermarkStrategy
from dagster_unified.operators.functions.async_io import AsyncFunction, AsyncRetryStrategy
from dagster_unified.operators.functions.base import (
    AggregateFunction,
    FilterFunction,
    FlatMapFunction,
    KeyedBatchFunction,
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
from dagster_unified.operators.functions.checkpoints import (
    CheckpointedFunction,
    CheckpointListener,
    FunctionInitializationContext,
    FunctionSnapshotContext,
    OperatorStateStore,
)
from dagster_unified.operators.functions.event_time import IngestionTimeAssigner, WatermarkGenerator, WatermarkOutput
from dagster_unified.operators.functions.two_streams import (
    BroadcastProcessFunction,
    BroadcastState,
    CoFlatMapFunction,
    CoGroupFunction,
    CoMapFunction,
    CoProcessFunction,
    FlatJoinFunction,
    JoinFunction,
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
    ProcessJoinFunction,
    ReadOnlyBroadcastState,
)
from dagster_unified.operators.metrics import Counter as Counter  # not in __all__: `collections` has one as well
from dagster_unified.operators.metrics import Distribution, Meter
from dagster_unified.operators.state.arrow_list import ArrowListState, ArrowListStateDescriptor
from dagster_unified.operators.state.descriptors import StateTtlConfig, StateVisibility, UpdateType
from dagster_unified.operators.state.handles import (
    AggregatingState,
    AggregatingStateDescriptor,
    ListState,
    ListStateDescriptor,
    MapState,
    MapStateDescriptor,
    ReducingState,
    ReducingStateDescriptor,
    ValueState,
    ValueStateDescriptor,
)
from dagster_unified.operators.time import MAX_TIMESTAMP, MIN_TIMESTAMP, TimeDomain, to_millis
from dagster_unified.operators.windows import (
    ContinuousEventTimeTrigger,
    ContinuousProcessingTimeTrigger,
    CountEvictor,
    CountSlidingWindowAssigner,
    CountTrigger,
    CountTumblingWindowAssigner,
    DeltaEvictor,
    DeltaTrigger,
    EventTimeSessionWindows,
    EventTimeTrigger,
    GlobalWindows,
    NeverTrigger,
    ProcessingTimeSessionWindows,
    ProcessingTimeTrigger,
    ProcessWindowFunction,
    PurgingTrigger,
    SlidingEventTimeWindows,
    SlidingProcessingTimeWindows,
    TimeEvictor,
    TimeWindow,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    WindowFunction,
)

__all__ = [
    "MAX_TIMESTAMP", "MIN_TIMESTAMP", "AggregateFunction", "AggregatingState", "AggregatingStateDescriptor",
    "ArrowListState", "ArrowListStateDescriptor", "AsyncDataStream", "AsyncFunction", "AsyncRetryStrategy",
    "BroadcastProcessFunction", "BroadcastState", "CheckpointListener", "CheckpointedFunction", "CoFlatMapFunction",
    "CoGroupFunction", "CoMapFunction", "CoProcessFunction", "ContinuousEventTimeTrigger",
    "ContinuousProcessingTimeTrigger", "CountEvictor", "CountSlidingWindowAssigner", "CountTrigger",
    "CountTumblingWindowAssigner", "DataStream", "DeltaEvictor", "DeltaTrigger", "Distribution",
    "EventTimeSessionWindows", "EventTimeTrigger", "FilterFunction", "FlatJoinFunction", "FlatMapFunction",
    "FunctionInitializationContext", "FunctionSnapshotContext", "GlobalWindows", "IngestionTimeAssigner",
    "JoinFunction", "KeySelector", "KeyedBatchFunction", "KeyedBroadcastProcessFunction", "KeyedCoProcessFunction",
    "KeyedProcessFunction", "KeyedStream", "ListState", "ListStateDescriptor", "MapFunction", "MapState",
    "MapStateDescriptor", "Meter", "NeverTrigger", "OperatorStateStore", "OutputTag", "Partitioner", "Pipeline",
    "ProcessFunction", "ProcessJoinFunction", "ProcessWindowFunction", "ProcessingTimeSessionWindows",
    "ProcessingTimeTrigger", "PurgingTrigger", "ReadOnlyBroadcastState", "ReduceFunction", "ReducingState",
    "ReducingStateDescriptor", "RuntimeContext", "SlidingEventTimeWindows", "SlidingProcessingTimeWindows",
    "StateTtlConfig", "StateVisibility", "TimeDomain", "TimeEvictor", "TimeWindow", "TimerService",
    "TimestampAssigner", "TumblingEventTimeWindows", "TumblingProcessingTimeWindows", "UpdateType", "ValueState",
    "ValueStateDescriptor", "WatermarkGenerator", "WatermarkOutput", "WatermarkStrategy", "WindowFunction",
    "functions", "to_millis",
]  # fmt: skip
