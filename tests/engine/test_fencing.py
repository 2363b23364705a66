"""Of two writers one wins, in a bucket as on a disk, and one who was paused and wakes up late writes nothing."""

import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import msgspec
import pytest
from upath import UPath

from dagster_unified.engine.batch.intermediates import Address, IntermediateStore
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.desired import read_desired
from dagster_unified.engine.streaming.savepoints.copy import remove_halves, savepoints
from dagster_unified.errors import ConfigurationError, LeaseLostError
from tests.depth import examples
from tests.engine.fenced_writer import Writer, outcome
from tests.object_store import IGNORES_CONDITIONS, LOSES_ANSWERS, client, served

ROOT = Path(__file__).parents[2]
RACES = ("lease", "file", "manifest")


@pytest.fixture(scope="module")
def bucket():
    """The environment of a process that reaches the bucket `lake`."""
    with served("lake") as environment:
        yield environment


@pytest.fixture
def reached(bucket, monkeypatch):
    """This process reaches the bucket."""
    for name, value in bucket.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def start(bucket):
    """Starts a writer in a process of its own."""
    started = []

    def start(root, name):
        command = [sys.executable, "-m", "tests.engine.fenced_writer", root, name]
        environment = {**os.environ, **bucket}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def tell(line, *processes):
    """Has all processes do something at once, and returns what came of it."""
    for process in processes:
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
    return [said(process) for process in processes]


def said(process):
    return process.stdout.readline().strip()


def contents(root):
    """Every file but the leases, which show only who was there."""
    files = [path for path in UPath(root, use_listings_cache=False).rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in files if path.parent.name != "lease"}


def test_of_two_processes_that_write_at_once_one_wins(start, reached):
    pair = [start("s3://lake/races", name) for name in ("one", "two")]
    assert [said(process) for process in pair] == ["ready", "ready"]
    for number in range(examples(8)):
        for process in pair:
            assert tell(f"begin {number}", process) == ["begun"]
        assert sorted(tell(RACES[number % len(RACES)], *pair)) == ["refused", "written"]


def test_an_attempt_whose_data_is_being_removed_for_that_of_another_says_so(tmp_path):
    store = IntermediateStore(str(tmp_path))
    attempt = store.new_attempt(Address("job", "stage", "run"))
    os.symlink(tmp_path / "removed after it was listed", attempt / "gone.parquet")
    with pytest.raises(LeaseLostError, match="was removed: another attempt of the stage was committed meanwhile"):
        store.files(attempt)


def test_two_who_ask_at_once_are_both_heard(start, reached):
    pair = [start("s3://lake/asked", name) for name in ("one", "two")]
    for process in pair:
        assert (said(process), *tell("begin 0", process)) == ("ready", "begun")
    for _ in range(examples(3)):
        assert tell("asked", *pair) == ["written", "written"]
    assert read_desired(CheckpointDirectory("s3://lake/asked/0", "job")).number == 2 * examples(3)


@pytest.mark.parametrize("place", ["a bucket", "a disk"])
def test_a_paused_writer_that_wakes_up_late_writes_nothing(place, start, reached, tmp_path):
    root = "s3://lake/paused" if place == "a bucket" else str(tmp_path)
    process = start(root, "paused")
    assert (said(process), *tell("begin 0", process)) == ("ready", "begun")
    directory = CheckpointDirectory(f"{root}/0", "job")
    process.stdin.write("late\n")
    process.stdin.flush()
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)

    other = Writer(root, "other")
    lease = directory.take("other", patience=0)
    other.begin("0")
    other.own(lease.token)
    remove_halves(directory, ())
    other.manifest()
    lease.release()
    before = contents(root)

    process.send_signal(signal.SIGCONT)
    assert said(process).split() == ["refused"] * 6
    assert contents(root) == before
    assert savepoints(directory) == []


def test_a_job_sees_that_another_process_took_its_lease(bucket, reached):
    directory = CheckpointDirectory("s3://lake/leases", "job")
    held = directory.take("one", patience=60)
    with pytest.raises(LeaseLostError, match="another job, one, is writing"):
        directory.take("two", patience=60)
    held.check()
    client(bucket["AWS_ENDPOINT_URL"]).put_object(Bucket="lake", Key="leases/job/lease/2.json", Body=b"{}")
    with pytest.raises(LeaseLostError, match="another job has taken over"):
        held.check()
    held.release()


def test_a_lease_is_read_while_its_holder_signs_it(bucket, reached):
    directory, ended = CheckpointDirectory("s3://lake/signed", "job"), Event()
    directory.take("one", patience=60).release()
    s3, data = client(bucket["AWS_ENDPOINT_URL"]), msgspec.json.encode(directory.holder())

    def sign():
        while not ended.is_set():
            s3.put_object(Bucket="lake", Key="signed/job/lease/1.json", Body=data + b" " * random.randrange(9))

    with ThreadPoolExecutor(1) as thread:
        signing = thread.submit(sign)
        try:
            assert {directory.holder().owner for _ in range(60)} == {"one"}
        finally:
            ended.set()
        signing.result()


def test_a_store_that_ignores_conditions_is_refused(monkeypatch):
    with served("lake", IGNORES_CONDITIONS) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        directory = CheckpointDirectory("s3://lake/checkpoints", "job")
        with pytest.raises(
            ConfigurationError, match=r"execution.checkpointing.dir: .*use a store with conditional wri"
        ):
            directory.take("one", patience=60)
        assert directory.holder() is None


def test_a_store_that_is_busy_or_loses_its_answer_is_asked_again_and_who_has_written_knows_it(monkeypatch):
    with served("lake", LOSES_ANSWERS) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        one, two = Writer("s3://lake", "one"), Writer("s3://lake", "two")
        for writer in (one, two):
            writer.begin("0")
        for race in RACES:
            assert (outcome(getattr(one, race)), outcome(getattr(two, race))) == ("written", "refused")
        one.held.release()
        assert len(one.store.files(one.attempt)) == 1
