"""What `kill -9` leaves of a STREAMING job with operator state: no element is lost, none is there twice."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from dagster_unified.state import Savepoint
from tests.depth import NIGHTLY, chance

ROOT = Path(__file__).parents[3]
POINTS = ("before", "staged", "committed")
KILLS, FILES = (10, 20) if NIGHTLY else (2, 4)
"""A kill takes two files at most."""


@pytest.mark.spark
@pytest.mark.rotates("kills")
@pytest.mark.parametrize("sinks", [1, 2])
def test_operator_state_of_a_job_that_is_killed_again_and_again_is_neither_lost_nor_doubled(tmp_path, sinks):
    seeded = chance("operator state")
    numbers = inputs(tmp_path / "in", seeded)
    points = ["committed", *(seeded.choice(POINTS) for _ in range(KILLS - 1))]
    seeded.shuffle(points)
    cores = seeded.sample((1, 2, 3), 3)  # another number each time
    kills = [(seeded.choice((1, 2)), point, cores[number % 3]) for number, point in enumerate(points)]
    for epoch, point, count in kills:
        assert run(tmp_path, epoch * sinks, point, count, sinks) == -9
    assert run(tmp_path, 0, "never", cores[KILLS % 3], sinks) == 0
    saved = Savepoint.read(f"{tmp_path}/savepoint")
    waiting = [one for row in saved.rows("buffered") for one in row.get("waiting", ())]
    emitted = DeltaTable(str(tmp_path / "all")).to_pyarrow_table().column("value").to_pylist()
    assert sorted(emitted + waiting) == numbers, kills
    assert sorted(one for row in saved.rows("seen") for one in row["seen"]) == sorted(emitted), kills
    if sinks == 2:
        totals = DeltaTable(str(tmp_path / "totals")).to_pyarrow_table().to_pylist()
        expected = {rest: sum(n for n in emitted if n % 3 == rest) for rest in range(3)}
        assert {row["f0"]: row["f1"] for row in totals} == expected, kills


def inputs(folder: Path, seeded: random.Random) -> list[int]:
    """Files of several row groups each, which Spark splits otherwise with another number of cores."""
    folder.mkdir()
    first = 0
    for number in range(FILES):
        rows, path = seeded.randrange(40, 80), folder / f"{number:02d}.parquet"
        ballast = [seeded.randbytes(500) for _ in range(rows)]  # the data is larger than the footer
        pq.write_table(pa.table({"value": range(first, first + rows), "ballast": ballast}), path, row_group_size=10)
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
        first += rows
    return list(range(first))


def run(folder: Path, epoch: int, point: str, cores: int, sinks: int) -> int:
    arguments = [str(folder), str(epoch), point, str(cores), str(sinks)]
    command = [sys.executable, "-m", "tests.engine.savepoints.killed_operator_state", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    assert done.returncode in (0, -9), done.stderr[-2000:]
    return done.returncode
