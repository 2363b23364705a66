"""Ctrl-C and SIGTERM, sent to a real `dagster-unified run` as a terminal and a supervisor send them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import time
from pathlib import Path
from typing import NamedTuple

from dagster_unified.api import DeltaSink, Pipeline


class Sale(NamedTuple):
    shop: str
    amount: int


FOLDER = Path(__file__).parent


def slow(sale: Sale) -> Sale:
    with (FOLDER / "calls").open("a") as calls:
        calls.write(".")
    while not (FOLDER / "let go").exists():
        time.sleep(0.05)
    return sale


pipeline = Pipeline("shops")
sales = pipeline.from_collection([Sale("north", 3)], name="sales")
sales.sink_to(DeltaSink("early", mode="append")).name("early")
sales.map(slow).name("slow").key_by("shop").sum("amount").sink_to(DeltaSink("out", mode="upsert", key="shop")).name("out")
"""
COMMAND = str(Path(sys.executable).with_name("dagster-unified"))
INTERRUPT_TWICE = (signal.SIGINT, signal.SIGINT)


def until(look, what, running):
    deadline = time.monotonic() + 180
    while not look():
        assert running.poll() is None, what
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def has_a_jvm(process):
    pids = [pid for file in Path(f"/proc/{process}/task").glob("*/children") for pid in file.read_text().split()]
    return any(b"SparkSubmit" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)


@pytest.mark.parametrize(
    ("moment", "signals", "code"),
    [("in a stage", [signal.SIGINT], 130), ("in a stage", [signal.SIGTERM], 143), ("starting Spark", [signal.SIGINT], 130), ("starting Spark", INTERRUPT_TWICE, 130)],
    ids=["Ctrl-C in a stage", "SIGTERM in a stage", "Ctrl-C while Spark starts", "Ctrl-C twice"],
)
def test_a_run_that_is_interrupted_is_cancelled_and_commits_nothing_more(tmp_path, moment, signals, code):
    (tmp_path / "shops.py").write_text(PROGRAM)
    log = tmp_path / "log"
    with log.open("w") as output:
        running = subprocess.Popen([COMMAND, "run", "shops.py", "--master", "local[1]"], cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            reached = (tmp_path / "calls").exists if moment == "in a stage" else lambda: has_a_jvm(running.pid)
            until(reached, moment, running)
            os.killpg(running.pid, signals[0])
            for number in signals[1:]:
                until(lambda: "a second signal ends the process" in log.read_text(), "answering the first signal", running)
                os.killpg(running.pid, number)
            assert running.wait(180) == code, log.read_text()
        finally:
            running.kill()
    said = log.read_text()
    assert "Traceback" not in said
    assert "py4j" not in said
    assert ("shops is cancelled" in said) == (len(signals) == 1)
    assert not (tmp_path / "out").exists()
    if moment == "in a stage":
        assert (tmp_path / "calls").read_text() == "."  # not tried again
