"""Ctrl-C and SIGTERM, sent to a real `dagster-unified run` as a terminal and a supervisor send them."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.depth import rotated

PROGRAM = """
import time
from pathlib import Path
from typing import NamedTuple

from dagster_unified.api import Pipeline
from dagster_unified.connectors import DeltaSink


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
totals = sales.map(slow).name("slow").key_by("shop").sum("amount")
totals.sink_to(DeltaSink("out", mode="upsert", key="shop")).name("out")
"""
COMMAND = str(Path(sys.executable).with_name("dagster-unified"))

pytestmark = pytest.mark.spark


def until(look, what, running):
    deadline = time.monotonic() + 180
    while not (found := look()):
        assert running.poll() is None, what
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return found


def process_file(path):
    """A file of /proc; nothing once its process or thread has ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def children(process):
    found = Path(f"/proc/{process}/task").glob("*/children")
    return [int(pid) for file in found for pid in process_file(file).split()]


def command_of(process):
    return process_file(Path(f"/proc/{process}/cmdline"))


def jvm_of(process):
    """The JVM that a process has started; None before it has."""
    return next((pid for pid in children(process) if b"SparkSubmit" in command_of(pid)), None)


def mirrors_output(process):
    """Whether Dagster shows a step's output on the terminal and writes it to a file.

    It takes processes of its own.
    """
    return any(b"watch_orphans" in command_of(pid) for pid in children(process))


@pytest.fixture
def start(tmp_path, request):
    """Starts `dagster-unified run` in a session of its own, with a Dagster instance that keeps the output of steps."""
    (tmp_path / "shops.py").write_text(PROGRAM)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "dagster.yaml").touch()
    with (tmp_path / "log").open("w") as output:
        running = subprocess.Popen(
            [COMMAND, "run", "shops.py", "--master", "local[1]", *getattr(request, "param", ())],
            env={**os.environ, "DAGSTER_HOME": str(tmp_path / "home")},
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield running
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("start", "moment", "number", "code"),
    rotated(
        [
            pytest.param((), "in a stage", signal.SIGINT, 130, id="Ctrl-C in a stage"),
            pytest.param((), "in a stage", signal.SIGTERM, 143, id="SIGTERM in a stage"),
            pytest.param((), "starting Spark", signal.SIGINT, 130, id="Ctrl-C while Spark starts"),
            pytest.param(
                ("-D", "execution.runtime-mode=STREAMING"), "in an epoch", signal.SIGINT, 130, id="Ctrl-C in an epoch"
            ),
        ],
        1,
    ),
    indirect=["start"],
)
def test_a_run_that_is_interrupted_is_cancelled_and_commits_nothing_more(tmp_path, start, moment, number, code):
    until(lambda: jvm_of(start.pid) if moment == "starting Spark" else (tmp_path / "calls").exists(), moment, start)
    assert mirrors_output(start.pid) or moment != "in a stage"
    os.killpg(start.pid, number)
    assert start.wait(180) == code, (tmp_path / "log").read_text()
    said = (tmp_path / "log").read_text()
    assert "Traceback" not in said
    assert "py4j" not in said
    assert "Exception in thread" not in said
    assert "shops is cancelled" in said
    assert not (tmp_path / "out").exists()
    if moment == "in a stage":
        assert (tmp_path / "calls").read_text() == "."  # not tried again


def test_a_second_ctrl_c_ends_the_process_at_once(tmp_path, start):
    jvm = until(lambda: jvm_of(start.pid), "starting Spark", start)
    os.kill(jvm, signal.SIGSTOP)  # the first signal waits for it
    os.killpg(start.pid, signal.SIGINT)
    until(
        lambda: "a second signal ends the process" in (tmp_path / "log").read_text(),
        "answering the first signal",
        start,
    )
    os.killpg(start.pid, signal.SIGINT)
    assert start.wait(20) == 130
    said = (tmp_path / "log").read_text()
    assert "Traceback" not in said
    assert "cancelled" not in said
    assert not (tmp_path / "out").exists()
