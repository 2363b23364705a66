"""Pipelines through Spark Connect give what they give in a classic session."""

import json
import os
import subprocess
import sys

import pytest

from dagster_unified.engine import connect_server
from tests.engine.test_unkeyed_watermarks import MET
from tests.orchestration.test_connect_server import port_without_server

pytestmark = [pytest.mark.spark, pytest.mark.rotates("clusters")]


def test_a_path_stands_for_itself_and_functions_are_told_the_watermark_and_committed_epochs(tmp_path):
    with port_without_server() as port:
        address = connect_server.ensure(port, "local[2]", {"spark.sql.shuffle.partitions": "2"})
        command = [sys.executable, "-m", "tests.engine.connect_pipelines", str(tmp_path)]
        environment = {**os.environ, "SPARK_REMOTE": address}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["BATCH"] == found["STREAMING"] == [[[1]], [[2]], [[3]], [[4]]]
    assert {name: list(map(tuple, rows)) for name, rows in found["unkeyed"].items()} == dict.fromkeys(
        ("plain", "exchanged", "broadcast"), MET
    )
    assert found["epochs"] == {
        "heard": [[0, -1, -1, -1], [1, 0, 0, 0], [2, 1, 1, 1]],
        "saved": [[0, -1, 0, 0], [1, 0, 0, 0], [2, 1, 0, 0]],
    }
