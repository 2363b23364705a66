"""A project as a team has it: an IO manager's table, a pipeline in both modes, dbt and polars behind it, one graph.

What `make demo-project` shows, in its own environment: a backfill, a stream that is killed once, a late order.
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.ports import free_port

ROOT = Path(__file__).parents[2]


@pytest.mark.spark
@pytest.mark.rotates("stories")
def test_dbt_and_polars_follow_batch_the_stream_and_a_late_order_by_automation_alone(tmp_path):
    environment = {**os.environ, "TEAM_HOME": str(tmp_path / "team"), "TEAM_PORT": str(free_port())}
    done = subprocess.run(
        ["make", "demo-project"], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=2100
    )
    log = tmp_path / "team" / "dagster.log"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text()[-5000:] if log.exists() else "")
    assert "are as Python has them" in " ".join(done.stdout.split())  # of lines as wide as a terminal
