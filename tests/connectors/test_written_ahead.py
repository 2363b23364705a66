"""Sources whose records come once are written to a log before anything processes them."""

import itertools
import json
import os
import shutil
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
from upath import UPath

from dagster_unified.api import Pipeline
from dagster_unified.connectors import DeltaSink, GeneratorSource, SocketSource, written_ahead
from dagster_unified.connectors.written_ahead import WrittenAheadSource, _Log, _Receiver
from dagster_unified.engine.events import EpochCommitted
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.engine.streaming.savepoints.copy import RESTORING
from dagster_unified.errors import PipelineError, StageError, StateError, UnsupportedError
from dagster_unified.records import record_type


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


def until(holds):
    """Waits until something holds, for a minute at the most."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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


class InGroups(WrittenAheadSource[Tick]):
    """Ten ticks at a time, without an end; it remembers what it was told and what the log had then.

    A hundred groups at most are not logged yet, so that the log stays short.
    """

    kind = "groups"
    flush_every = timedelta(milliseconds=1)

    def __init__(self, log):
        self.name, self.records, self.log, self.told = "groups", record_type(Tick), log, []
        self.room = threading.Semaphore(100)

    def describe(self):
        return "groups of ticks"

    def receive(self):
        raise NotImplementedError

    def receive_groups(self):
        for start in itertools.count(0, 10):
            self.room.acquire()
            yield ticks(10, start)

    def on_logged(self, records):
        self.room.release((records - (self.told[-1][0] if self.told else 0)) // 10)
        self.told.append((records, sum(_Log(self, str(self.log)).newest().values())))


def test_what_came_is_said_to_be_logged_when_it_is_and_a_group_is_logged_whole(tmp_path):
    one = InGroups(tmp_path / "log")
    receiver = _Receiver(one, tmp_path / "log")
    receiver.start()
    until(lambda: len(one.told) >= 20)
    receiver.end()
    assert [told for told, _ in one.told] == [logged for _, logged in one.told]
    log = _Log(one, str(tmp_path / "log"))
    assert read(log, log.oldest(), log.newest()) == ticks(one.told[-1][0])
    assert one.told[-1][0] % 10 == 0


def test_what_cannot_be_written_is_not_said_to_be_logged(tmp_path, monkeypatch):
    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(written_ahead, "_flush", full)
    one = InGroups(tmp_path / "log")
    log = received(one, tmp_path)
    with pytest.raises(StageError, match=r"source 'groups': groups of ticks has failed: OSError.* No space left"):
        log.newest()
    assert one.told == []


def test_a_receiver_writes_nothing_more_when_another_has_taken_over(tmp_path):
    more = threading.Event()

    def slow():
        yield Tick(1, None)
        more.wait(30)
        yield Tick(2, None)

    first = _Receiver(GeneratorSource(slow, Tick, name="ticks"), tmp_path / "log")
    first.start()
    until(lambda: any(_Log(source([]), str(tmp_path / "log")).newest().values()))
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
    until(lambda: taken)
    received(source([]), tmp_path)
    before = None

    def takes_none():
        nonlocal before
        before, known = len(taken), before
        time.sleep(0.1)
        return before == known == len(taken)

    until(takes_none)


def test_two_queries_of_a_job_share_a_receiver(spark, tmp_path):
    calls = []

    def slowly():
        calls.append(1)
        while True:
            yield Tick(1, None)
            time.sleep(0.05)

    one = GeneratorSource(slowly, Tick, name="shared")
    for _ in range(2):
        one.read_stream(spark, UPath(tmp_path / "sources"))
    assert [thread.name for thread in threading.enumerate()].count("receive shared") == 1
    until(lambda: calls)
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


@pytest.fixture
def in_files_of_ten(monkeypatch):
    """Makes files of ten records, one frame each."""
    monkeypatch.setattr(written_ahead, "_MOST", 10)
    monkeypatch.setattr(written_ahead, "_FILE_BYTES", 1)


def checkpointed(folder, *offsets, begun=0):
    """Spark's logs of offsets and of commits, with the positions of some epochs; the last may only have begun."""
    (folder / "offsets").mkdir(parents=True, exist_ok=True)
    (folder / "commits").mkdir(exist_ok=True)
    for epoch, position in enumerate(offsets, 5):
        lines = ["v1", "{}", '{"number":1,"event":"{}"}', json.dumps(position), "-"]
        (folder / "offsets" / str(epoch)).write_text("\n".join(lines))
        if epoch < 5 + len(offsets) - begun:
            (folder / "commits" / str(epoch)).write_text("v1\n{}")


def logs(folder):
    return sorted(file.stem for file in (folder / "log").glob("*.log"))


def test_files_that_no_checkpoint_and_no_savepoint_needs_are_deleted(tmp_path, in_files_of_ten):
    log = received(source(ticks(50)), tmp_path)
    first, second, third, fourth, last = sorted(log.newest())
    assert all(count == 10 for count in log.newest().values())

    def left():
        written_ahead.delete_unneeded(tmp_path / "log", tmp_path, last)
        return logs(tmp_path)

    assert left() == [first, second, third, fourth, last]
    checkpointed(tmp_path / "spark" / "main", {first: 10, second: 9}, {first: 10, second: 10, third: 10, fourth: 10})
    checkpointed(tmp_path / "savepoints" / "one" / "spark" / "main", {first: 10})
    assert left() == [second, third, fourth, last]
    shutil.rmtree(tmp_path / "savepoints")
    assert left() == [second, third, fourth, last]
    (tmp_path / "spark" / "main" / "offsets" / "5").unlink()
    checkpointed(tmp_path / "spark" / "other")
    assert left() == [second, third, fourth, last]
    checkpointed(tmp_path / "spark" / "other", dict.fromkeys((first, second, third, fourth, last), 10))
    assert left() == [last]

    assert read(log, log.oldest(), log.newest()) == ticks(10, 40)
    gone = r"source 'ticks': .* has no longer what came after record 3 of file .*; go on from a later savepoint"
    with pytest.raises(StateError, match=gone):
        log.splits({**log.newest(), second: 3}, log.newest())
    with pytest.raises(StateError, match=f"has no longer what came after record 0 of file {second}"):
        log.available({first: 10})
    assert log.available(dict.fromkeys((first, second, third, fourth), 10))[last] == 0


@pytest.mark.parametrize("state", ["spark/main", "savepoints/one/spark/main"])
def test_an_epoch_that_is_not_committed_needs_what_it_reads(tmp_path, in_files_of_ten, state):
    log = received(source(ticks(30)), tmp_path)
    first, second, last = sorted(log.newest())
    all_read, job = log.newest(), tmp_path / state

    checkpointed(job, all_read, begun=1)
    written_ahead.delete_unneeded(tmp_path / "log", tmp_path, last)
    assert logs(tmp_path) == [first, second, last]

    checkpointed(job, {first: 10, second: 0, last: 0}, all_read, begun=1)
    written_ahead.delete_unneeded(tmp_path / "log", tmp_path, last)
    assert logs(tmp_path) == [second, last]
    (job / "offsets" / "5").unlink()
    written_ahead.delete_unneeded(tmp_path / "log", tmp_path, last)
    assert logs(tmp_path) == [second, last]


@pytest.mark.parametrize(("position", "needs"), [({"sales[0]": 7}, "none"), ({}, "all")])
def test_a_query_of_another_source_needs_no_file_and_one_that_has_seen_none_yet_needs_all(
    tmp_path, in_files_of_ten, position, needs
):
    log = received(source(ticks(20)), tmp_path)
    first, last = sorted(log.newest())
    checkpointed(tmp_path / "spark" / "main", log.newest())
    checkpointed(tmp_path / "spark" / "other", position)
    written_ahead.delete_unneeded(tmp_path / "log", tmp_path, last)
    assert logs(tmp_path) == ([first, last] if needs == "all" else [last])


def test_a_file_without_an_index_has_nothing(tmp_path, in_files_of_ten):
    log = received(source(ticks(20)), tmp_path)
    first, last = sorted(log.newest())
    (tmp_path / "log" / "0.log").touch()
    checkpointed(tmp_path / "spark" / "main", log.newest())
    written_ahead.delete_unneeded(tmp_path / "log", tmp_path, last)
    assert logs(tmp_path) == ["0", last]
    assert log.available({first: 10}) == {first: 10, last: 0}


def test_files_are_in_order_also_where_the_clock_goes_back(tmp_path, monkeypatch, in_files_of_ten):
    received(source(ticks(20)), tmp_path)
    monkeypatch.setattr(written_ahead.time, "time_ns", lambda: 1)
    log = received(source(ticks(20, 20)), tmp_path)
    assert len(log.newest()) == 4
    assert read(log, log.oldest(), log.newest()) == ticks(40)


def test_a_job_that_stops_ends_its_receiver_and_keeps_what_it_has_received(tmp_path):
    taken, more, ended = threading.Event(), threading.Event(), threading.Event()

    def slow():
        try:
            yield Tick(1, None)
            yield Tick(2, None)
            taken.set()
            more.wait(30)
            yield Tick(3, None)
        finally:
            ended.set()

    one = GeneratorSource(slow, Tick, name="ticks", flush_every=timedelta(seconds=30))
    receiver = _Receiver(one, tmp_path / "log")
    receiver.start()
    assert taken.wait(30)
    receiver.end()
    assert not receiver.is_alive()
    log = _Log(one, str(tmp_path / "log"))
    assert read(log, log.oldest(), log.newest()) == [Tick(1, None), Tick(2, None)]
    more.set()
    assert ended.wait(30)


def test_a_socket_is_closed_when_the_job_stops(tmp_path):
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        one = SocketSource("127.0.0.1", server.getsockname()[1])
        receiver = _Receiver(one, tmp_path / "log")
        receiver.start()
        connection, _ = server.accept()
        with connection:
            connection.settimeout(30)
            connection.sendall(b"a line\n")
            log = _Log(one, str(tmp_path / "log"))
            until(lambda: any(log.newest().values()))
            receiver.end()
            assert connection.recv(1) == b""
    assert sum(log.newest().values()) == 1  # and it has not failed


class Unstoppable(WrittenAheadSource[int]):
    """A source whose client fails when it is closed."""

    kind = "client"

    def __init__(self, name):
        self.name, self.records = name, record_type(int)
        self.more = threading.Event()

    def describe(self):
        return "a client"

    def receive(self):
        yield 1
        self.more.wait(30)

    def stop_receiving(self):
        raise RuntimeError("the client is closed already")


def test_a_source_that_fails_to_stop_holds_up_no_other(tmp_path, caplog):
    job = UPath(tmp_path)
    sources = {tmp_path / name / "log": Unstoppable(name) for name in ("one", "two")}
    receivers = {log: _Receiver(source, log) for log, source in sources.items()}
    written_ahead._receivers.update(receivers)
    for receiver in receivers.values():
        receiver.start()
    for log, source in sources.items():
        until(lambda: any(_Log(source, str(log)).newest().values()))
    written_ahead.end(job)
    assert [receiver.is_alive() for receiver in receivers.values()] == [False, False]
    assert [record.getMessage() for record in caplog.records] == [
        f"source '{name}': stop_receiving failed while the job stopped" for name in ("one", "two")
    ]
    for source in sources.values():
        source.more.set()


def test_a_job_that_fails_to_stop_releases_its_lease(spark, tmp_path, monkeypatch):
    pipeline = Pipeline("p")
    pipeline.from_source(source([])).print()
    options = {"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": str(tmp_path)}
    job = StreamingJob(pipeline.plan(options), spark, Start("one"))
    (job.directory.path / RESTORING).parent.mkdir(parents=True)
    (job.directory.path / RESTORING).write_text('{"savepoint": "one"}')

    def fails(folder):
        raise OSError("the disk is full")

    monkeypatch.setattr(written_ahead, "end", fails)
    with pytest.raises(StateError, match="going back to savepoint 'one' was interrupted"):
        job.start()
    job.directory.take("another", 30).release()


@pytest.mark.a_day(1)
@pytest.mark.parametrize("drained", [False, True])
def test_the_receiver_ends_with_the_job(spark, tmp_path, drained):
    yielded, stops = [], threading.Event()

    def endless():
        for number in itertools.count():
            yielded.append(number)
            yield Tick(number, None)
            time.sleep(0.001)

    pipeline = Pipeline("endless")
    ticked = pipeline.from_source(GeneratorSource(endless, Tick, name="ticks"))
    ticked.sink_to(DeltaSink(str(tmp_path / "table"), name="table"))
    options = {"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": str(tmp_path / "checkpoints")}

    def observe(event):
        if isinstance(event, EpochCommitted):
            job.drain() if drained else stops.set()

    job = StreamingJob(pipeline.plan(options), spark, Start("test"), observe)
    assert job.run(stops.is_set) == ("finished" if drained else "stopped")
    until(lambda: not any("receive ticks" in thread.name for thread in threading.enumerate()))
    log = _Log(source([]), str(*(tmp_path / "checkpoints").rglob("log")))
    logged = sum(log.newest().values())
    assert len(yielded) - logged in (0, 1)  # the one with which it saw that nobody takes more
    if drained:
        table = DeltaTable(str(tmp_path / "table")).to_pyarrow_table()
        assert sorted(table["number"].to_pylist()) == yielded[:logged]


def test_a_bucket_cannot_hold_the_log():
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
@pytest.mark.rotates("kills")
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
