"""The README's demonstrations, as a reader runs them. `make demo` is in tests/jobs; a backfill takes too long."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.spark
@pytest.mark.rotates("stories")
@pytest.mark.parametrize("demo", ["demo-streaming", "demo-handover", "demo-kafka"])
def test_a_demonstration_ends_with_equal_tables(demo, tmp_path):
    environment = {
        **os.environ,
        "DAGSTER_HOME": f"{tmp_path}/home",
        "DAGSTER_UNIFIED_DATA": f"{tmp_path}/data",
        "DAGSTER_UNIFIED_OUTPUT": f"{tmp_path}/tables",
        "UNIFIED_STORAGE": f"{tmp_path}/intermediates",
    }
    ended = subprocess.run(["make", demo], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2400)
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
