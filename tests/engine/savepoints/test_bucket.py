"""Savepoints in a bucket of an S3-compatible server, which Spark's workers reach through pyarrow alone."""

import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import fsspec.config
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from upath import UPath

from dagster_unified.cli import main, terminal
from dagster_unified.engine.streaming.savepoints.copy import restore_stopped
from dagster_unified.errors import StateError
from dagster_unified.state import Savepoint
from tests.engine.savepoints.bucket_job import BUCKET as LIVE
from tests.engine.savepoints.bucket_job import OPTIONS
from tests.engine.savepoints.bucket_run import BUCKET
from tests.engine.savepoints.copied_job import BUCKET as COPIED
from tests.engine.savepoints.copied_job import KEPT
from tests.engine.savepoints.shops import FIRST, MORE, Sale
from tests.engine.savepoints.test_taking import Shops, sums
from tests.object_store import (
    COMPLETE,
    CUT,
    DENIED,
    HALF_DONE,
    HELD,
    LOST,
    PART,
    SLOW_DOWN,
    Fault,
    client,
    disturb,
    requests,
    served,
)
from tests.support import table_rows

LAST = [Sale("a", 30_000, 64), Sale("b", 30_001, 128)]
EARLY, LATE, END = {("a", 5), ("b", 2)}, {("a", 8), ("a", 16), ("b", 32)}, {("a", 64), ("b", 128)}
ROOT = Path(__file__).parents[3]
ABSENT = ("s3fs", "aiobotocore", "boto3")

pytestmark = [pytest.mark.spark, pytest.mark.rotates("stories", together=True)]


@pytest.fixture(scope="module")
def server():
    """The environment in which the bucket is there."""
    with served("lake") as environment:
        yield environment


@pytest.fixture(scope="module")
def left(server, tmp_path_factory):
    """The folder of runs that have handed state to each other."""
    folder = tmp_path_factory.mktemp("bucket")
    (folder / "absent").mkdir()
    for package in ABSENT:
        (folder / "absent" / f"{package}.py").write_text(f"raise ImportError('a worker needs {package}')")
    command = [sys.executable, "-m", "tests.engine.savepoints.bucket_run", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **server}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


@pytest.fixture
def reached(server, monkeypatch):
    """This process reaches the bucket."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def told(reached, capsys, monkeypatch):
    """Gives a command's exit code and what it printed."""
    monkeypatch.setenv("COLUMNS", "300")
    terminal.out.cache_clear()

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        printed = capsys.readouterr()
        return ended.value.code, printed.out + printed.err

    yield run
    terminal.out.cache_clear()


def test_runs_of_both_modes_hand_state_to_each_other_through_a_bucket(left):
    assert table_rows(f"{left}/table") == table_rows(f"{left}/once")


def test_a_savepoint_in_a_bucket_is_read_copied_and_changed(left, reached):
    saved = Savepoint.read(f"{BUCKET}/two")
    assert set(saved.keyed_state("sessions").column("key").to_pylist()) <= {"a", "b", "cc", "dd"}
    saved.without("tumbling").write(f"{BUCKET}/changed")
    changed = Savepoint.read(f"{BUCKET}/changed")
    assert {one.uid for one in changed.operators} == {one.uid for one in saved.operators} - {"tumbling"}
    assert changed.keyed_state("sessions").to_pylist() == saved.keyed_state("sessions").to_pylist()
    s3 = client(os.environ["AWS_ENDPOINT_URL"])
    keys = [one["Key"] for one in s3.list_objects_v2(Bucket="lake", Prefix="handed over/changed/")["Contents"]]
    file = next(key for key in keys if key.endswith(".parquet"))
    data = s3.get_object(Bucket="lake", Key=file)["Body"].read()
    s3.put_object(Bucket="lake", Key=file, Body=bytes(len(data)))
    with pytest.raises(StateError, match=rf"{Path(file).name} is damaged"):
        changed.keyed_state(Path(file).parent.name)
    s3.delete_object(Bucket="lake", Key=file)
    with pytest.raises(StateError, match=rf"{Path(file).name} is missing"):
        Savepoint.read(f"{BUCKET}/changed")


def test_the_command_line_shows_savepoints_in_a_bucket(left, told):
    code, listed = told("state", "ls", f"{BUCKET}/one")
    assert (code, "sessions" in listed, "tumbling" in listed) == (0, True, True)
    code, shown = told("state", "show", f"{BUCKET}/one", "sessions", "--key", "a")
    assert (code, "values" in shown) == (0, True)
    code, differences = told("state", "diff", f"{BUCKET}/one", f"{BUCKET}/two")
    assert (code, "sessions" in differences) == (1, True)


@pytest.fixture
def written_by(reached, monkeypatch, server):
    """Lets the client of a name write savepoints, in parts of 5 to 10 MB, and takes the store's faults away again."""

    def choose(name):
        if name == "s3fs":  # as where fsspec is configured
            monkeypatch.setenv("FSSPEC_S3", json.dumps({"endpoint_url": server["AWS_ENDPOINT_URL"]}))
            monkeypatch.setitem(fsspec.config.conf, "s3", {"default_block_size": 5 << 20})

    yield choose
    disturb(server["AWS_ENDPOINT_URL"])


LARGE = Savepoint.new("large").with_state(
    "o", pa.table({"k": list(range(24)), "v": [random.Random(k).randbytes(1 << 19) for k in range(24)]}), "k"
)


@pytest.mark.parametrize("writer", ["pyarrow", "s3fs"])
@pytest.mark.parametrize("faults", [(CUT, SLOW_DOWN, HALF_DONE), (LOST, CUT, LOST), (SLOW_DOWN, LOST, SLOW_DOWN)])
def test_a_file_in_parts_is_whole_where_the_store_breaks_off_each_of_them(writer, faults, written_by, server):
    written_by(writer)
    url, methods = server["AWS_ENDPOINT_URL"], (f"{PART} 1", f"{PART} 2", COMPLETE)
    requests(url)
    disturb(url, *[Fault(kind, method=method) for kind, method in zip(faults, methods, strict=True)])
    written = LARGE.write(f"s3://lake/{writer}/{' '.join(faults)}")
    asked = [request.method for request in requests(url)]
    assert min(asked.count(method) for method in methods) > 1, "the store broke nothing off"
    assert written.keyed_state("o").equals(LARGE.keyed_state("o"))


@pytest.mark.parametrize(
    ("writer", "fault"),
    [
        ("pyarrow", Fault(CUT, method=f"{PART} 2", lasting=True)),
        ("pyarrow", Fault(HALF_DONE, method=COMPLETE, lasting=True)),
        ("s3fs", Fault(DENIED, method=f"{PART} 2")),
        ("s3fs", Fault(DENIED, method=COMPLETE)),
    ],
)
def test_nothing_is_seen_of_a_file_whose_parts_the_store_does_not_take(writer, fault, written_by, server):
    written_by(writer)
    place = f"{writer}/{fault.kind}/{fault.method}"
    disturb(server["AWS_ENDPOINT_URL"], fault)
    with pytest.raises(OSError, match=r"NETWORK_CONNECTION during UploadPart|an internal error|Access Denied"):
        LARGE.write(f"s3://lake/{place}")
    assert "Contents" not in client(server["AWS_ENDPOINT_URL"]).list_objects_v2(Bucket="lake", Prefix=place)
    disturb(server["AWS_ENDPOINT_URL"])
    assert LARGE.write(f"s3://lake/{place}").operator("o").rows == 24


@pytest.fixture
def stream(server, tmp_path):
    """A streaming job with its checkpoints in the bucket, which has read the first files."""
    arrive(tmp_path, "1", FIRST)
    (tmp_path / "shops.py").write_text(
        f"from tests.engine.savepoints.shops import shops\npipeline = shops({str(tmp_path)!r})"
    )
    command = [sys.executable, "-m", "tests.engine.savepoints.bucket_job", str(tmp_path), server["AWS_ENDPOINT_URL"]]
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **server}, stdout=log, stderr=subprocess.STDOUT)
    try:
        while (rows(tmp_path / "live totals"), rows(tmp_path / "live windows")) != ({("a", 13), ("b", 2)}, EARLY):
            assert job.poll() is None, (tmp_path / "log").read_text()[-5000:]
            time.sleep(0.1)
        yield job
    finally:
        job.kill()


def arrive(folder, name, sales):
    (folder / "in").mkdir(exist_ok=True)
    staged = folder / f"in/.{name}"
    pq.write_table(pa.Table.from_pylist([sale._asdict() for sale in sales]), staged)
    staged.rename(folder / f"in/{name}.parquet")


def rows(path):
    found = DeltaTable(str(path)).to_pyarrow_table().to_pylist() if DeltaTable.is_deltatable(str(path)) else []
    return {(row["shop"], row["amount"]) for row in found}


def test_a_stream_with_checkpoints_in_a_bucket_leaves_savepoints_there_while_it_runs_and_as_it_is_drained(
    stream, told, tmp_path
):
    where = [str(tmp_path / "shops.py"), *chain.from_iterable(("-D", f"{k}={v}") for k, v in OPTIONS.items())]
    made = UPath(f"{LIVE}/checkpoints/shops/savepoints", use_listings_cache=False)
    while not (by_itself := sorted(made.glob("*/manifest.json"))):  # where the interval has it, its tables are whole
        assert stream.poll() is None, (tmp_path / "log").read_text()[-5000:]
        time.sleep(0.1)
    code, shown = told("state", "show", str(by_itself[0].parent), "totals", "--key", "a")
    assert (code, "13" in shown) == (0, True)
    code, printed = told("savepoint", *where, "--path", f"{LIVE}/asked")
    assert (code, printed.strip().endswith(f"tables in {LIVE}/asked")) == (0, True), printed
    arrive(tmp_path, "2", MORE)
    code, printed = told("stop", *where, "--savepoint", f"{LIVE}/drained", "--drain")
    assert (code, printed.strip().endswith("shops is drained")) == (0, True), printed
    assert rows(tmp_path / "live windows") == EARLY | LATE
    arrive(tmp_path, "3", LAST)

    code, listed = told("state", "ls", f"{LIVE}/drained")
    assert (code, "totals" in listed, "windows" in listed) == (0, True, True)
    code, shown = told("state", "show", f"{LIVE}/asked", "totals", "--key", "a")
    assert (code, "13" in shown) == (0, True)
    code, differences = told("state", "diff", f"{LIVE}/asked", f"{LIVE}/drained")
    assert (code, "totals" in differences, "windows" in differences) == (1, True, True)

    assert stream.wait() == 0, (tmp_path / "log").read_text()[-5000:]
    for mode in ("BATCH", "STREAMING"):
        for savepoint, windows in (("asked", LATE | END), ("drained", END)):
            assert rows(tmp_path / f"{savepoint} {mode} windows") == windows
            assert rows(tmp_path / f"{savepoint} {mode} totals") == {("a", 93), ("b", 162)}


def test_a_job_goes_on_while_its_checkpoint_is_copied_and_keeps_what_the_copy_needs(server, reached, tmp_path):
    url, shops = server["AWS_ENDPOINT_URL"], Shops(None, tmp_path, COPIED)
    shops.arrive(range(60))
    command = [sys.executable, "-m", "tests.engine.savepoints.copied_job", str(tmp_path), url]
    with ThreadPoolExecutor(1) as thread, (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **server}, stdout=log, stderr=subprocess.STDOUT)

        def more_than(count, seconds):
            """Wait until the table has more rows, or for so long."""
            deadline = time.monotonic() + seconds
            while (found := len(shops.rows())) <= count and time.monotonic() < deadline:
                assert job.poll() is None, (tmp_path / "log").read_text()[-5000:]
                time.sleep(0.1)
            return found

        try:
            while not DeltaTable.is_deltatable(f"{tmp_path}/table"):
                assert job.poll() is None, (tmp_path / "log").read_text()[-5000:]
                time.sleep(0.1)
            more_than(6, 60)  # so that it keeps as many as it may
            disturb(url, Fault(DENIED, method="PUT", key="/spark/", client="s3fs", lasting=True))
            with pytest.raises(StateError, match="Access Denied"):
                shops.take()
            assert list((shops.directory.path / "savepoints").glob("*/**/*")) == []
            disturb(url, Fault(HELD, method="PUT", key="/spark/", client="s3fs"))
            asked = thread.submit(shops.take)
            held = 0
            while (found := more_than(held, 8)) > held:
                held = found
            assert not asked.done()
            disturb(url)
            taken = asked.result()
            epoch = taken.savepoint.epochs["main"]
            assert held == epoch + 1 + KEPT - 2
            assert more_than(held, 60) > held
        finally:
            disturb(url)
            job.kill()
            job.wait()
    assert shops.totals(taken.location) == dict(sums(epoch + 1))
    assert restore_stopped(shops.directory, "test", None, patience=0.5) == taken.savepoint
    assert shops.directory.last_epoch("main") == epoch
