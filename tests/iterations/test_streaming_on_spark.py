"""Iterations in STREAMING on Spark: the feedback edge is a log, and a killed job goes on after its last round."""

import signal
import subprocess
import sys
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_unified.api import FileSink
from dagster_unified.engine.streaming.job import Start, StreamingJob
from tests.depth import chance
from tests.iterations.killed_stream import POINTS, hopping, options
from tests.iterations.programs import PROGRAMS
from tests.iterations.test_on_spark import rows


def written(folder):
    return sorted(tuple(row.values()) for row in pq.read_table(folder).to_pylist())


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_bounded_program_gives_in_streaming_what_it_gives_in_batch(run_streaming, tmp_path, name):
    build, expected = PROGRAMS[name]
    pipeline, out = build()
    out.sink_to(FileSink(str(tmp_path / "out"), name="out"))
    assert run_streaming(pipeline, {"parallelism.default": 2}) == "finished"
    assert written(tmp_path / "out") == rows(expected)


HOPS = 5
FILES = [range(60), range(40, 100), range(90, 130)]
EXPECTED = Counter((number, hop) for file in FILES for number in file for hop in range(HOPS + 1))


def given(folder):
    for number, file in enumerate(FILES):
        table = pa.Table.from_pylist([{"number": n, "hops": 0} for n in file])
        (folder / "in").mkdir(exist_ok=True)
        pq.write_table(table, folder / "in" / f"{number}.parquet")


def hops(folder):
    return Counter(written(folder / "out"))


def test_every_record_takes_every_hop_once(spark, tmp_path):
    given(tmp_path)
    job = StreamingJob(hopping(tmp_path, HOPS).plan(options(tmp_path)), spark, Start("test"))
    assert job.run() == "finished"
    assert hops(tmp_path) == EXPECTED


@pytest.mark.parametrize("point", POINTS)
def test_a_stream_that_is_killed_goes_on_after_its_last_round(tmp_path, point):
    given(tmp_path)
    random = chance(f"killed stream {point}")
    command = [sys.executable, "-m", "tests.iterations.killed_stream", str(tmp_path), str(HOPS)]
    for count in (random.randint(1, 4), random.randint(1, 4)):
        killed = subprocess.run([*command, point, str(count)], capture_output=True, text=True, timeout=300)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    ended = subprocess.run([*command, "none", "0"], capture_output=True, text=True, timeout=300)
    assert ended.stdout.split() == ["finished"], ended.stderr
    assert hops(tmp_path) == EXPECTED
