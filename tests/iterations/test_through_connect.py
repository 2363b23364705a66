"""Iterations in STREAMING through Spark Connect: they go round where the server runs the query's epochs."""

import os
import re
import signal
import subprocess
import sys

import pytest

from dagster_unified.engine import connect_server
from tests.depth import chance
from tests.iterations.test_streaming_on_spark import EXPECTED, HOPS, given, hops
from tests.orchestration.test_connect_server import port_without_server

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def port():
    with port_without_server() as port:
        yield port


def run(port, folder, kind, point="none", count=0, hops=HOPS):
    """Runs the stream, on a server that is started where there is none."""
    address = connect_server.ensure(port, "local[2]", {"spark.sql.shuffle.partitions": "2"})
    command = [sys.executable, "-m", "tests.iterations.killed_stream", str(folder), kind, str(hops), point, str(count)]
    return subprocess.Popen(
        command, text=True, env={**os.environ, "SPARK_REMOTE": address}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def ends(process):
    said, failure = process.communicate(timeout=300)
    return process.returncode, said.split(), failure


def finishes(port, folder, kind, *how):
    code, said, failure = ends(run(port, folder, kind, *how))
    assert (code, said) == (0, ["finished"]), failure
    assert hops(folder) == EXPECTED


@pytest.mark.rotates("kills")
@pytest.mark.parametrize("kind", ["bounded", "unbounded", "behind"])
def test_a_job_that_is_killed_is_followed_by_one_that_goes_on_with_its_loop(port, tmp_path, kind):
    given(tmp_path)
    killed = run(port, tmp_path, kind, "epoch", chance(f"connect {kind}").randint(1, 3))
    assert ends(killed)[0] == -signal.SIGKILL
    finishes(port, tmp_path, kind)


@pytest.mark.rotates("kills")
@pytest.mark.parametrize(("kind", "victim"), [("bounded", "worker"), ("unbounded", "worker"), ("unbounded", "jvm")])
def test_a_loop_goes_on_where_a_process_of_the_server_was_killed_in_a_round(port, tmp_path, kind, victim):
    given(tmp_path)
    count = chance(f"connect {kind} {victim}").randint(1, HOPS)
    code, _, failure = ends(run(port, tmp_path, kind, victim, count))
    assert (tmp_path / "died").exists()
    assert code == 1, failure
    assert re.search(r"^dagster_unified\.errors\.\w+: hopping: ", failure, re.MULTILINE), failure
    finishes(port, tmp_path, kind, victim, count)


@pytest.mark.rotates("clusters")
def test_a_bounded_loop_is_stopped_between_rounds_that_its_job_hears_of_and_goes_on(port, tmp_path):
    given(tmp_path)
    for first in ("IterationEpochCommitted", "IterationResumed"):
        code, said, failure = ends(run(port, tmp_path, "bounded", "stopped", hops=100_000))
        assert (code, said[:2]) == (0, ["stopped", first]), failure
