"""For users' own tests: run an operator or a whole pipeline in either mode's semantics, in memory, with no JVM.

The operators are the very ones that Spark's workers run; only the driver differs.
"""

from dagster_unified.testing.operators import (
    BroadcastHarness,
    KeyedHarness,
    ManualClock,
    OneInputHarness,
    TwoInputHarness,
)
from dagster_unified.testing.parity import Shared, assert_same_in_both_modes, collect, final_result
from dagster_unified.testing.run import Result, run_pipeline

__all__ = [
    "BroadcastHarness",
    "KeyedHarness",
    "ManualClock",
    "OneInputHarness",
    "Result",
    "Shared",
    "TwoInputHarness",
    "assert_same_in_both_modes",
    "collect",
    "final_result",
    "run_pipeline",
]
