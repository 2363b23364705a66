"""Savepoints in a bucket of an S3-compatible server, which Spark's workers reach through pyarrow alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dagster_unified.cli import main, terminal
from dagster_unified.errors import StateError
from dagster_unified.state import Savepoint
from tests.object_store import client, served
from tests.state.bucket_run import BUCKET
from tests.state.test_handover import table

ROOT = Path(__file__).parents[2]
ABSENT = ("s3fs", "aiobotocore", "boto3")


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """The folder of runs that have handed state to each other, and the environment in which the bucket is there."""
    folder = tmp_path_factory.mktemp("bucket")
    (folder / "absent").mkdir()
    for package in ABSENT:
        (folder / "absent" / f"{package}.py").write_text(f"raise ImportError('a worker needs {package}')")
    with served("lake") as environment:
        command = [sys.executable, "-m", "tests.state.bucket_run", str(folder)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-5000:]
        yield folder, environment


@pytest.fixture
def bucket(left, monkeypatch):
    for name, value in left[1].items():
        monkeypatch.setenv(name, value)
    return left[0]


@pytest.mark.spark
def test_runs_of_both_modes_hand_state_to_each_other_through_a_bucket(left):
    folder, _ = left
    assert table(f"{folder}/table") == table(f"{folder}/once")


@pytest.mark.spark
def test_a_savepoint_in_a_bucket_is_read_copied_and_changed(bucket):
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


@pytest.mark.spark
def test_the_command_line_shows_savepoints_in_a_bucket(bucket, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    terminal.out.cache_clear()

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(("state", *arguments))
        return ended.value.code, capsys.readouterr().out

    code, listed = run("ls", f"{BUCKET}/one")
    assert (code, "sessions" in listed, "tumbling" in listed) == (0, True, True)
    code, shown = run("show", f"{BUCKET}/one", "sessions", "--key", "a")
    assert (code, "values" in shown) == (0, True)
    code, differences = run("diff", f"{BUCKET}/one", f"{BUCKET}/two")
    assert (code, "sessions" in differences) == (1, True)
    terminal.out.cache_clear()
