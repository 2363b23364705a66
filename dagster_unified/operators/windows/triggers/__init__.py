"""When a window gives its result, and whether it keeps its elements then.

A trigger sees each element and each timer that it registered; what it has to remember is state of its key and window. A
new one is a class here, or anywhere: it says of itself when it fires (`firing`) and whether elements may be taken many
at a time (`only_registers_end`), and nothing else knows it.
"""

from dagster_unified.operators.windows.triggers.base import Firing, Trigger, TriggerResult
from dagster_unified.operators.windows.triggers.context import OnMergeContext, TriggerContext
from dagster_unified.operators.windows.triggers.continuous import (
    ContinuousEventTimeTrigger,
    ContinuousProcessingTimeTrigger,
)
from dagster_unified.operators.windows.triggers.count import CountTrigger, SlidingCountTrigger
from dagster_unified.operators.windows.triggers.delta import DeltaTrigger
from dagster_unified.operators.windows.triggers.event_time import EventTimeTrigger, NeverTrigger
from dagster_unified.operators.windows.triggers.processing_time import ProcessingTimeTrigger
from dagster_unified.operators.windows.triggers.purging import PurgingTrigger

__all__ = [
    "ContinuousEventTimeTrigger", "ContinuousProcessingTimeTrigger", "CountTrigger", "DeltaTrigger", "EventTimeTrigger",
    "Firing", "NeverTrigger", "OnMergeContext", "ProcessingTimeTrigger", "PurgingTrigger", "SlidingCountTrigger",
    "Trigger", "TriggerContext", "TriggerResult",
]  # fmt: skip
