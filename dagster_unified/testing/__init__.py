"""For users' own tests: run an operator or a whole pipeline in either mode's semantics, in memory, with no JVM.

The operators are the very ones that Spark's workers run; only the driver differs.
"""

from dagster_unified.testing.collecting import collect
from dagster_unified.testing.harness import KeyedHarness, ManualClock
from dagster_unified.testing.operators import BroadcastHarness, OneInputHarness, TwoInputHarness
from dagster_unified.testing.parity import assert_same_in_both_modes, final_result
from dagster_unified.testing.run import Result, run_pipeline
from dagster_unified.testing.shared import Shared

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
