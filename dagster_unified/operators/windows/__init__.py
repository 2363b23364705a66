"""Windows: which elements are together, when they give a result, and what they drop (Flink: *Windows*).

Assigners say which windows an element is in, triggers when a window gives its result, evictors what it drops.
`operator.py` drives them, over the keyed state and timers that every keyed operator has. Names are PyFlink's.
"""

from dagster_unified.operators.functions.windows import ProcessWindowFunction, WindowFunction
from dagster_unified.operators.windows.assigners import (
    CountSlidingWindowAssigner,
    CountTumblingWindowAssigner,
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
from dagster_unified.operators.windows.triggers import (
    ContinuousEventTimeTrigger,
    ContinuousProcessingTimeTrigger,
    CountTrigger,
    DeltaTrigger,
    EventTimeTrigger,
    Firing,
    NeverTrigger,
    ProcessingTimeTrigger,
    PurgingTrigger,
    Trigger,
    TriggerResult,
)
from dagster_unified.operators.windows.window import CountWindow, GlobalWindow, TimeWindow

__all__ = [
    "ContinuousEventTimeTrigger", "ContinuousProcessingTimeTrigger", "CountEvictor", "CountSlidingWindowAssigner",
    "CountTrigger", "CountTumblingWindowAssigner", "CountWindow", "DeltaEvictor", "DeltaTrigger",
    "EventTimeSessionWindows", "EventTimeTrigger", "Evictor", "Firing", "GlobalWindow", "GlobalWindows",
    "MergingWindowAssigner", "NeverTrigger", "ProcessWindowFunction", "ProcessingTimeSessionWindows",
    "ProcessingTimeTrigger", "PurgingTrigger", "SlidingEventTimeWindows", "SlidingProcessingTimeWindows", "TimeEvictor",
    "TimeWindow", "Trigger", "TriggerResult", "TumblingEventTimeWindows", "TumblingProcessingTimeWindows",
    "WindowAssigner", "WindowFunction",
]  # fmt: skip
