"""Sources whose records come once are written to a log before anything processes them."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import GeneratorSource, Pipeline
from dagster_unified.connectors import written_ahead
from dagster_unified.connectors.written_ahead import _Log, _Receiver
from dagster_unified.errors import PipelineError, StageError, UnsupportedError


class Tick(NamedTuple):
    number: int
    text: str | None


def ticks(count, start=0):
    return [Tick(n, None if n % 3 else f"tick {n}") for n in range(start, start + count)]


def source(records, flush_every=timedelta(milliseconds=5)):
    return GeneratorSource(lambda: iter(records), Tick, name="ticks", flush_every=flush_every)


def received(one, folder):
    """Run the receiver to the end of its records; the log."""
    receiver = _Receiver(one, Path(folder) / "log")
    receiver.start()
    receiver.join(30)
    assert not receiver.is_alive()
    return _Log(one, str(Path(folder) / "log"))


def read(log, start, end):
    batches = [batch for split in log.splits(start, end) for batch in log.read_split(split)]
    return [Tick(**row) for batch in batches for row in batch.to_pylist()]


def test_the_log_has_every_record_in_order(tmp_path):
    log = received(source(ticks(1000)), tmp_path)
    assert sum(log.newest().values()) == 1000
    assert read(log, log.oldest(), log.newest()) == ticks(1000)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 9))
def test_any_range_of_the_log_can_be_read(tmp_path_factory, one, other, frame):
    folder, most = tmp_path_factory.mktemp("log"), written_ahead._MOST
    written_ahead._MOST = frame
    try:
        log = received(source(ticks(50)), folder)
    finally:
        written_ahead._MOST = most
    (name,) = log.newest()
    start, end = sorted((one, other))
    assert read(log, {name: start}, {name: end}) == ticks(50)[start:end]


def test_a_job_that_starts_begins_a_file_of_its_own_behind_the_others(tmp_path):
    received(source(ticks(10)), tmp_path)
    log = received(source(ticks(10, 10)), tmp_path)
    assert len(log.newest()) == 2
    assert read(log, log.oldest(), log.newest()) == ticks(20)


def test_an_entry_that_was_cut_off_and_what_follows_it_do_not_count(tmp_path):
    log = received(source(ticks(10)), tmp_path)
    (name,) = log.newest()
    with (tmp_path / "log" / f"{name}.index").open("ab") as index:
        index.write(b"\x01\x02\x03")
    with (tmp_path / "log" / f"{name}.log").open("ab") as data:
        data.write(b"half of a frame")
    assert read(log, log.oldest(), log.newest()) == ticks(10)


def test_a_receiver_writes_nothing_more_when_another_has_taken_over(tmp_path):
    more = threading.Event()

    def slow():
        yield Tick(1, None)
        more.wait(30)
        yield Tick(2, None)

    first = _Receiver(GeneratorSource(slow, Tick, name="ticks"), tmp_path / "log")
    first.start()
    while not any(_Log(source([]), str(tmp_path / "log")).newest().values()):
        time.sleep(0.01)
    log = received(source(ticks(1, 7)), tmp_path)
    more.set()
    first.join(30)
    assert not first.is_alive()
    assert read(log, log.oldest(), log.newest()) == [Tick(1, None), Tick(7, None)]


def test_a_receiver_that_was_succeeded_takes_no_more_records(tmp_path):
    taken = []

    def endless():
        for number in itertools.count():
            taken.append(number)
            yield Tick(number, None)
            time.sleep(0.001)

    _Receiver(GeneratorSource(endless, Tick, name="ticks", flush_every=timedelta(0)), tmp_path / "log").start()
    while not taken:
        time.sleep(0.01)
    received(source([]), tmp_path)
    until = time.monotonic() + 30
    before = None
    while before != len(taken):
        assert time.monotonic() < until
        before = len(taken)
        time.sleep(0.5)


def test_two_queries_of_a_job_share_a_receiver(spark, tmp_path):
    from upath import UPath

    calls = []

    def slowly():
        calls.append(1)
        while True:
            yield Tick(1, None)
            time.sleep(0.05)

    one = GeneratorSource(slowly, Tick, name="ticks")
    for _ in range(2):
        one.read_stream(spark, UPath(tmp_path / "sources"))
    time.sleep(0.5)
    (tmp_path / "sources" / "log" / "owner").write_text("another")
    assert calls == [1]


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        (lambda: (_ for _ in [1 / 0]), "what ticks yields has failed: ZeroDivisionError"),
        (lambda: [Tick("one", None)], "what ticks yields has failed: .*number"),
    ],
)
def test_what_goes_wrong_while_receiving_fails_the_job(tmp_path, records, problem):
    log = received(GeneratorSource(records, Tick, name="ticks"), tmp_path)
    with pytest.raises(StageError, match=problem):
        log.newest()


def test_a_bucket_cannot_hold_the_log():
    from upath import UPath

    with pytest.raises(UnsupportedError, match=r"set execution\.checkpointing\.dir to a folder on a disk"):
        source([]).read_stream(None, UPath("s3://bucket/checkpoints"))


def test_batch_is_refused_when_the_plan_is_made():
    pipeline = Pipeline("p")
    pipeline.from_source(source([])).print()
    with pytest.raises(PipelineError, match="source 'ticks' is unbounded"):
        pipeline.plan({"execution.runtime-mode": "BATCH"})


def numbers(server, given):
    """Serve numbers, each once, to whoever connects."""
    counter = itertools.count()
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection:
            try:
                for number in counter:
                    connection.sendall(f"{number}\n".encode())
                    given.append(number)
                    time.sleep(0.005)
            except OSError:
                continue


@pytest.mark.spark
def test_a_job_that_is_killed_processes_what_it_has_received_exactly_once(tmp_path):
    given: list[int] = []
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        threading.Thread(target=numbers, args=(server, given), daemon=True).start()
        command = [sys.executable, "-m", "tests.connectors.received", str(tmp_path), str(server.getsockname()[1])]
        for epochs in (2, 3):
            job = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
            try:
                wait_for_versions(job, tmp_path / "numbers", epochs)
            finally:
                if job.poll() is None:
                    os.killpg(job.pid, signal.SIGKILL)
                job.wait()
    found = sorted(DeltaTable(str(tmp_path / "numbers")).to_pyarrow_table().column(0).to_pylist())
    log = _Log(GeneratorSource(list, str, name="lines"), str(*(tmp_path / "checkpoints").rglob("log")))
    logged = [int(row["value"]) for split in log.splits(log.oldest(), log.newest()) for batch in log.read_split(split)
              for row in batch.rename_columns(["value"]).to_pylist()]  # fmt: skip
    assert logged == sorted(set(logged))
    assert set(logged) <= set(given)
    assert len(found) == len(set(found))
    assert found == logged[: len(found)]
    assert len(log.newest()) == 2
    assert found[-1] >= logged[log.newest()[min(log.newest())]]


def wait_for_versions(job, table, more):
    deadline = time.monotonic() + 300
    before = DeltaTable(str(table)).version() if DeltaTable.is_deltatable(str(table)) else 0
    while not DeltaTable.is_deltatable(str(table)) or DeltaTable(str(table)).version() < before + more:
        assert job.poll() is None, job.stderr.read().decode()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.2)
