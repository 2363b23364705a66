"""Windows: assigners say which windows an element is in, triggers when a window gives its result, evictors what it
drops (Flink: *Windows*).

`operator.py` drives them, over the keyed state and timers that every keyed operator has. Names are PyFlink's.
"""

from dagster_unified.operators.windows.assigners import (
    EventTimeSessionWindows,
    GlobalWindows,
    MergingWindowAssigner,
    ProcessingTimeSessionWindows,
    SlidingEventTimeWindows,
    SlidingProcessingTimeWindows,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    WindowAssigner,
)
from dagster_unified.operators.windows.evictors import CountEvictor, DeltaEvictor, Evictor, TimeEvictor
from dagster_unified.operators.windows.functions import ProcessWindowFunction, WindowFunction
from dagster_unified.operators.windows.triggers import (
    ContinuousEventTimeTrigger,
    ContinuousProcessingTimeTrigger,
    CountTrigger,
    DeltaTrigger,
    EventTimeTrigger,
    ProcessingTimeTrigger,
    PurgingTrigger,
    Trigger,
    TriggerResult,
)
from dagster_unified.operators.windows.window import GlobalWindow, TimeWindow

__all__ = [
    "ContinuousEventTimeTrigger", "ContinuousProcessingTimeTrigger", "CountEvictor", "CountTrigger", "DeltaEvictor",
    "DeltaTrigger", "EventTimeSessionWindows",
    "EventTimeTrigger", "Evictor", "GlobalWindow", "GlobalWindows", "MergingWindowAssigner", "ProcessWindowFunction",
    "ProcessingTimeSessionWindows",
    "ProcessingTimeTrigger", "PurgingTrigger", "SlidingEventTimeWindows", "SlidingProcessingTimeWindows", "TimeEvictor",
    "TimeWindow", "Trigger", "TriggerResult",
    "TumblingEventTimeWindows", "TumblingProcessingTimeWindows", "WindowAssigner", "WindowFunction",
]  # fmt: skip
