"""A streaming job run, interrupted and saved from the command line, as on a terminal."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deltalake import DeltaTable

pytestmark = pytest.mark.spark

PROGRAM = """
from typing import NamedTuple

from dagster_unified.api import CsvSource, DeltaSink, Pipeline


class Sale(NamedTuple):
    shop: str
    amount: int


pipeline = Pipeline("shops")
sales = pipeline.from_source(CsvSource("in", Sale, name="sales", monitor=True))
totals = sales.key_by("shop").reduce(lambda a, b: Sale(a.shop, a.amount + b.amount))
totals.sink_to(DeltaSink("out", mode="upsert", key="shop"))
"""
COMMAND = str(Path(sys.executable).with_name("dagster-unified"))


def test_interrupting_saving_and_listing(tmp_path):
    (tmp_path / "shops.py").write_text(PROGRAM)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/1.csv").write_text("shop,amount\nnorth,3\nsouth,5\n")

    def told(*arguments):
        done = subprocess.run(
            [COMMAND, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
        )
        return done.returncode, done.stdout + done.stderr

    with (tmp_path / "log").open("w") as log:
        running = subprocess.Popen(
            [COMMAND, "run", "shops.py"], cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            deadline = time.monotonic() + 600
            while "epoch 0 of main" not in (tmp_path / "log").read_text():
                assert running.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.2)
            code, running_job = told("savepoint", "shops.py")
            assert code == 0, running_job
            assert "epoch 0 of main" in running_job
            os.killpg(running.pid, signal.SIGINT)  # as a terminal does
            assert running.wait(120) == 130, (tmp_path / "log").read_text()
        finally:
            running.kill()
    assert "Error" not in (tmp_path / "log").read_text()
    assert sorted(tuple(r.values()) for r in DeltaTable(str(tmp_path / "out")).to_pyarrow_table().to_pylist()) == [
        ("north", 3),
        ("south", 5),
    ]
    code, made = told("savepoint", "shops.py")
    assert code == 0
    assert told("savepoints", "shops.py") == (0, running_job + made)
    assert "epoch 0 of main" in made
    assert told("restore", "shops.py", "--savepoint", "other")[0] == 2
    assert told("restore", "shops.py") == (0, f"went back to {made}")
