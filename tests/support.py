"""What tests of many folders use."""

import pytest

from dagster_unified.testing import run_pipeline

MODES = pytest.mark.parametrize("mode", ["BATCH", "STREAMING"])


def results(stream, mode="STREAMING", **how):
    """What a stream gives in the harness."""
    stream.print("out")
    return run_pipeline(stream._pipeline, mode, **how).sinks["out"]
