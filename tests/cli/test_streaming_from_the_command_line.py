"""A streaming job run, interrupted and saved from the command line, as on a terminal."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from deltalake import DeltaTable

from dagster_unified.api import Pipeline
from dagster_unified.connectors import DeltaSink
from dagster_unified.orchestration import SparkResource
from dagster_unified.orchestration.launch import Outcome
from dagster_unified.state import Savepoint

pytestmark = [pytest.mark.spark, pytest.mark.rotates("stories", together=True)]

PROGRAM = """
from typing import NamedTuple

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource, DeltaSink


class Sale(NamedTuple):
    shop: str
    amount: int


pipeline = Pipeline("shops")
sales = pipeline.from_source(CsvSource("in", Sale, name="sales", monitor=True))
totals = sales.key_by("shop").reduce(lambda a, b: Sale(a.shop, a.amount + b.amount))
totals.sink_to(DeltaSink("out", mode="upsert", key="shop"))
"""
COMMAND = str(Path(sys.executable).with_name("dagster-unified"))


@pytest.fixture
def told(tmp_path):
    """Gives a command's exit code and what it printed."""
    (tmp_path / "shops.py").write_text(PROGRAM)
    (tmp_path / "dagster-unified.toml").write_text("[pipeline]\nmax-parallelism = 4\n")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/1.csv").write_text("shop,amount\nnorth,3\nsouth,5\n")

    def run(*arguments):
        done = subprocess.run(
            [COMMAND, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
        )
        return done.returncode, done.stdout + done.stderr

    return run


@contextmanager
def running(folder):
    """The job in a process of its own, which has committed an epoch."""
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [COMMAND, "run", "shops.py"], cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            deadline = time.monotonic() + 600
            while "epoch 0 of main" not in (folder / "log").read_text():
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.2)
            yield process
        finally:
            process.kill()
    assert "Error" not in (folder / "log").read_text()
    assert sorted(tuple(r.values()) for r in DeltaTable(str(folder / "out")).to_pyarrow_table().to_pylist()) == [
        ("north", 3),
        ("south", 5),
    ]


def test_interrupting_saving_and_listing(tmp_path, told):
    with running(tmp_path) as job:
        code, running_job = told("savepoint", "shops.py")
        assert code == 0, running_job
        assert "epoch 0 of main" in running_job
        os.killpg(job.pid, signal.SIGINT)  # as a terminal does
        assert job.wait(120) == 130, (tmp_path / "log").read_text()
    code, made = told("savepoint", "shops.py")
    assert code == 0
    assert told("savepoints", "shops.py") == (0, running_job + made)
    assert "epoch 0 of main" in made
    assert told("restore", "shops.py", "--savepoint", "other")[0] == 2
    assert told("restore", "shops.py") == (0, f"went back to {made}")


def test_draining_with_a_savepoint(tmp_path, told):
    with running(tmp_path) as job:
        code, printed = told("stop", "shops.py", "--savepoint", "left", "--drain")
        assert code == 0, printed
        assert job.wait(120) == 0, (tmp_path / "log").read_text()
    left, ended = printed.splitlines()
    assert left.endswith(f", drained, tables in {tmp_path}/left")
    assert ended == "shops is drained"
    saved = Savepoint.read(str(tmp_path / "left"))
    (totals,) = saved.operators
    assert {r["shop"]: r["value"]["amount"] for r in saved.rows(totals.uid)} == {"north": 3, "south": 5}
    code, again = told("stop", "shops.py", "--savepoint", "left")
    assert (code, "shops was drained" in again) == (2, True), again


def test_a_table_that_no_epoch_has_made_yet_is_not_shown(spark, tmp_path):
    pipeline = Pipeline("early")
    pipeline.from_collection([1], int).sink_to(DeltaSink(str(tmp_path / "table"), name="table"))
    assert Outcome("run", None, SparkResource()).tables(pipeline.plan({}), 5) == {}
