"""What `kill -9` leaves of a job that is being drained: each row once, and a savepoint that is whole or not there."""

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.errors import StateError
from dagster_unified.state import Savepoint
from tests.depth import chance
from tests.engine.savepoints.killed import FINISHED, UNFINISHED, command
from tests.engine.savepoints.test_draining import FIRST, MORE, WINDOWS, Shops, totals

ROOT = Path(__file__).parents[3]


@pytest.mark.rotates("kills")
@pytest.mark.parametrize("point", [*UNFINISHED, *FINISHED])
def test_a_job_that_is_killed_while_it_is_drained_loses_nothing_and_has_nothing_twice(spark, tmp_path, point):
    shops = Shops(spark, tmp_path)
    shops.arrive("1", FIRST)
    directory, path = shops.directory("first"), f"{tmp_path}/drained"
    calls = chance(f"drain {point}").choice((1, 2)) if point == "tables" else 1
    killing = command("drained", tmp_path, point, calls)
    with ThreadPoolExecutor(1) as thread, subprocess.Popen(killing, cwd=ROOT) as killed:
        while directory.last_epoch("main") is None:
            assert killed.poll() in (None, -9)
            time.sleep(0.05)
        asked = thread.submit(shops.take, "first", path)
        assert killed.wait() == -9
        is_whole = point in ("saved", "recorded")
        assert Path(path, "manifest.json").exists() == is_whole
        shops.arrive("2", MORE)
        if point in UNFINISHED:
            assert StreamingJob(shops.plan("first"), spark, Start("job", patience=0.5)).run(asked.done) == "finished"
        else:
            silent(directory)
        if is_whole:
            with pytest.raises(StateError, match=r"there is a savepoint in .* already"):
                asked.result()
        else:
            assert (asked.result().tables, asked.result().error) == (path, "")
    read = Savepoint.read(path).positions["sales"].count
    more = read == 2
    assert more <= (point in ("unsent", "sent"))
    assert totals(path) == ({"a": 29, "b": 34} if more else {"a": 13, "b": 2})
    assert shops.rows("first windows") == WINDOWS | ({("a", 16), ("b", 32)} if more else set())
    assert list(Savepoint.read(path).rows("windows")) == []
    assert directory.deployed().finished


def silent(directory):
    """The lease of a job that was killed has expired: its last sign of life is long ago."""
    held = msgspec.structs.replace(directory.holder(), beat=0)
    (directory.path / "lease" / f"{held.token}.json").write_bytes(msgspec.json.encode(held))
