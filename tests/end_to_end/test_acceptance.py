"""What a user does from the outside: FLIP-134's acceptance, and the code location as Dagster loads it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.spark

ROOT = Path(__file__).parents[2]

ACCEPTANCE = """
from dagster_unified.api import Pipeline
from dagster_unified.connectors import FileSink


def digit(v: int) -> int:
    return v % 10


def parity(v: int) -> str:
    return "even" if v % 2 == 0 else "odd"


pipeline = Pipeline("acceptance")
numbers = pipeline.from_collection(list(range(1000)), name="numbers")
sums = numbers.key_by(digit).reduce(lambda a, b: a + b).name("sums")
largest = sums.key_by(parity).max().name("largest")
largest.key_by(lambda v: 0, key_type=int).reduce(lambda a, b: a + b).sink_to(FileSink("out", name="out", format="csv"))
"""


def test_several_keyed_stages_run_on_one_core_one_dagster_step_at_a_time(tmp_path):
    (tmp_path / "acceptance.py").write_text(ACCEPTANCE)
    command = [
        str(Path(sys.executable).with_name("dagster-unified")),
        "run",
        "acceptance.py",
        "--master",
        "local[1]",
        "-D",
        "execution.runtime-mode=BATCH",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=600,
        check=False,
        env={**os.environ, "DAGSTER_HOME": ""},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    stages = [line for line in done.stderr.splitlines() if line.startswith("stage ")]
    assert [line.split(":")[0] for line in stages] == [f"stage {n} of 4" for n in (1, 1, 2, 2, 3, 3, 4, 4)]
    (file,) = (tmp_path / "out").glob("*.csv")
    sums = [sum(v for v in range(1000) if v % 10 == d) for d in range(10)]
    assert file.read_text().split() == [
        "value",
        str(max(s for s in sums if s % 2 == 0) + max((s for s in sums if s % 2), default=0)),
    ]


def test_the_code_location_loads_without_a_jvm(tmp_path):
    environment = {
        **os.environ,
        "DAGSTER_HOME": str(tmp_path),
        "JAVA_HOME": "/nowhere",
        "DAGSTER_DISABLE_TELEMETRY": "yes",
    }
    command = [str(Path(sys.executable).with_name("dagster")), "definitions", "validate", "-w", "workspace.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
