"""A kit for the tests of a sink, against its real target: kills, zombies, retried tasks; then it compares.

Each write runs in a process of its own, which drives the sink as the engine does (`engine/commit.py`), with Spark's
tasks on a Spark Connect server. Processes are killed at every step of the protocol, or stopped there and woken up after
their successor has committed. What readers see in the end has to be what writes without any fault would have left.

A sink's author writes a `SinkTarget` and calls `check_epochs` and `check_partitions`. `tests/connectors/test_kit.py`
shows it for the sinks of the library.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import pyarrow as pa

from dagster_unified.connectors.protocol.commits import (
    C,
    Commit,
    Committer,
    Ship,
    SparkSink,
    WriteAttempt,
    WriteIdentity,
    Writer,
    WriterTask,
    stage_by_writers,
)
from dagster_unified.engine.commit import SinkCommits, WriteContext
from dagster_unified.engine.shipping import by_value_afresh
from dagster_unified.records import record_type

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from pyspark.sql import DataFrame

_PATIENCE = 300.0
"""Seconds that a process may take for a write, and that it may take to wake up."""

_TOKEN = "SPARK_CONNECT_AUTHENTICATE_TOKEN"

_BULKY_EVERY, _BULK = 3, 32_000
"""Of so many writes one has texts of so many characters: a sink stages much data otherwise than a little of it."""

_RESTART_EVERY = 8
"""Of so many writes, one meets a restart of the server."""

_TRIES = 8
"""How often a write that fails without a fault of the kit's is tried, for a target that is restarted meanwhile."""


class Entry(NamedTuple):
    """The record that the kit writes. `key` identifies it for a sink that upserts."""

    key: int
    version: int
    text: str


class SinkTarget(ABC):
    """A place that a sink writes to. The kit pickles it, since writes run in other processes."""

    locks_others_out: bool = False
    """Whether a process that is stopped while it commits holds up all others, as one that has a file locked does.

    Such a process is killed, and not stopped.
    """

    @abstractmethod
    def sink(self) -> SparkSink[Any, Any]:
        """Return a sink that writes records with the fields of `Entry` to this place."""

    @abstractmethod
    def rows(self) -> Iterable[tuple[int, int, str]]:
        """Return the fields of all entries that a reader sees there now."""

    def restart(self) -> None:  # noqa: B027 - a file has no server
        """Restart the server as a crash would, if there is one. Called while a write runs."""


@dataclass
class Faults:
    """The faults that happened during a check."""

    writes: int = 0
    kills: int = 0
    zombies: int = 0
    restarts: int = 0
    retried_tasks: int = 0


class _Step(Enum):
    """Where a process is killed or stopped. The last three are moments within a step, which a timer picks."""

    BEFORE_STAGING = "before staging"
    STAGED = "between staging and commit"
    COMMITTED = "between commit and acknowledgement"
    CLEANING_UP = "before cleaning up"
    STAGING = "while staging"
    COMMITTING = "while committing"
    ANY = "at any time"


class _Loss(Enum):
    """When the first attempt at each of Spark's tasks fails."""

    MIDWAY = "after some rows"
    PREPARED = "after it has prepared its commit"
    """As one whose answer is lost, or which a speculative copy of the task has overtaken."""


@dataclass(frozen=True)
class _Fault:
    step: _Step
    signal: int
    delay: float
    """Seconds into the step, for a moment within one."""


@dataclass(frozen=True)
class _Write:
    """The writes of a process: entries for each of these identities."""

    target: SinkTarget
    server: str
    identity: WriteIdentity
    entries: tuple[Entry, ...]
    loss: _Loss | None
    """When Spark's tasks fail at their first attempt; None where they do not."""

    staging: str
    """A folder for what writers stage."""

    token: str | None
    """What the server asks for; the fork server may be older than the server, and then has another environment."""


@contextmanager
def spark_connect_server(port: int) -> Iterator[str]:
    """A Spark Connect server for a check, whose tasks are tried twice; gives its address, and stops it at the end."""
    from dagster_unified.engine import connect_server

    address = connect_server.ensure(port, "local[2,2]", {"spark.sql.shuffle.partitions": "2"})
    try:
        yield address
    finally:
        connect_server.stop(port)


def check_epochs(target: SinkTarget, server: str, seed: int, kills: int) -> Faults:
    """Write epochs as a STREAMING job does until so many writers were killed, and compare.

    Now and then the deployment goes back to an earlier epoch, on a new timeline. Raises `AssertionError` where rows are
    lost, there twice, or visible though their epoch was undone.
    """
    return _Check(target, server, random.Random(f"epochs {seed}"), kills).epochs()


def check_partitions(target: SinkTarget, server: str, seed: int, kills: int) -> Faults:
    """Write partitions as BATCH runs do until so many writers were killed, and compare.

    Partitions run again, now and then two runs of one partition write at once, and of a sink that can replace what it
    has a run is executed again with other rows. Raises `AssertionError` where rows are lost, there twice, or those of
    two runs of a partition are mixed.
    """
    return _Check(target, server, random.Random(f"partitions {seed}"), kills).partitions()


@dataclass
class _Check:
    target: SinkTarget
    server: str
    chance: random.Random
    kills: int
    faults: Faults = field(default_factory=Faults)
    _folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp()))
    _number: int = 0

    def epochs(self) -> Faults:
        sink, entries_by_epoch = self.target.sink(), list[tuple[int, tuple[Entry, ...]]]()
        epoch = timeline = writes = 0
        while self.faults.kills < self.kills or epoch < 3:
            goes_back = epoch > 2 and self.chance.random() < 0.1
            if goes_back:  # a write has to follow: it undoes what was later
                epoch = self.chance.randrange(1, epoch)
                timeline += 1
                if sink.capabilities.undoes:
                    entries_by_epoch = [(number, written) for number, written in entries_by_epoch if number < epoch]
            writes += 1  # what is written later counts, also where it is an earlier epoch on a new timeline
            entries = self._entries(writes, f"timeline {timeline}")
            identity = WriteIdentity("kit", "sink", "deployment", "streaming", epoch, timeline)
            if goes_back and self.faults.kills < self.kills:
                self._attempt_with_fault(identity, entries, _Step.COMMITTING)  # while it undoes what was later
            self._write(identity, entries, self._is_restarted(writes))
            entries_by_epoch.append((epoch, entries))
            epoch += 1
        self._compare(sink, [entry for _, written in entries_by_epoch for entry in written])
        return self.faults

    def partitions(self) -> Faults:
        sink, runs = self.target.sink(), 0
        entries_by_partition: dict[str, list[tuple[Entry, ...]]] = {}
        executions: dict[str, str] = {}
        takes_again = sink.capabilities.takes_again(partitioned=True)
        while self.faults.kills < self.kills or runs < 6:
            partition = f"2024-01-0{self.chance.randrange(1, 5)}"
            at_once = 2 if sink.capabilities.replaces_partition and self.chance.random() < 0.15 else 1
            rivals = []
            for _ in range(at_once):
                runs += 1
                is_new = not takes_again or partition not in executions or self.chance.random() < 0.7
                if at_once == 2 or is_new:  # else it executes the last run again, whose code was another
                    executions[partition] = f"run {runs}"
                number = runs if takes_again else 0
                identity = WriteIdentity("kit", "sink", executions[partition], partition, run=number)
                rivals.append((identity, self._entries(runs, partition)))
            if at_once == 2:
                winner = self._write_at_once(rivals)
            else:
                self._write(*rivals[0], self._is_restarted(runs))
                winner = rivals[0][1]
            if sink.capabilities.replaces_partition:
                entries_by_partition[partition] = [winner]
            else:
                entries_by_partition.setdefault(partition, []).append(winner)
        self._compare(
            sink, [entry for written in entries_by_partition.values() for entries in written for entry in entries]
        )
        return self.faults

    def _is_restarted(self, write: int) -> bool:
        """Return whether the server, if there is one, is restarted during a write."""
        return type(self.target).restart is not SinkTarget.restart and write % _RESTART_EVERY == _RESTART_EVERY // 2

    def _entries(self, version: int, text: str) -> tuple[Entry, ...]:
        """Return the rows of a write: a key occurs once, and now and then there are none, or they are bulky."""
        keys = self.chance.sample(range(60), self.chance.choice((0, 1, 20, 50)))
        text = f"{text}, write {version}"
        if version % _BULKY_EVERY == 0:
            text = f"{text} {random.Random(version).randbytes(_BULK // 2).hex()}"
        return tuple(Entry(key, version, text) for key in keys)

    def _compare(self, sink: SparkSink[Any, Any], written: Sequence[Entry]) -> None:
        expected = Counter(map(tuple, written))
        if sink.upserts:
            last = {entry.key: entry for entry in sorted(written, key=lambda entry: entry.version)}
            expected = Counter(map(tuple, last.values()))
        rows = Counter(map(tuple, self.target.rows()))
        lost, further = expected - rows, rows - expected
        assert rows == expected, (
            f"{sink.describe()}: {lost.total()} rows are lost, such as {_some(lost)}, and {further.total()} should not"
            f" be there, such as {_some(further)}, after {self.faults}"
        )

    def _write(self, identity: WriteIdentity, entries: tuple[Entry, ...], restart: bool) -> None:
        """Write until it is through, with faults on the way."""
        while self.faults.kills < self.kills and self.chance.random() < 0.6:
            self._attempt_with_fault(identity, entries)
        for attempt in range(1, _TRIES + 1):
            process, log = self._start(identity, entries, None)
            if restart and attempt == 1:
                time.sleep(self.chance.uniform(0, 1))
                self.target.restart()
                self.faults.restarts += 1
            self._join(process, log)
            if process.exitcode == 0:
                return
            assert restart or attempt == _TRIES, f"a write without a fault failed: {log.read_text()}"
        raise AssertionError(f"a write did not come through after a restart: {log.read_text()}")

    def _attempt_with_fault(
        self, identity: WriteIdentity, entries: tuple[Entry, ...], step: _Step | None = None
    ) -> None:
        """Run one attempt that is killed, or stopped and woken up after its successor has written."""
        step = step or self.chance.choice(list(_Step))
        span = {_Step.STAGING: 0.5, _Step.COMMITTING: 0.05, _Step.ANY: 1.5}.get(step, 0.0)
        sent = signal.SIGSTOP if self.chance.random() < 0.25 else signal.SIGKILL
        if self.target.locks_others_out and step in (_Step.STAGING, _Step.COMMITTING, _Step.ANY):
            sent = signal.SIGKILL
        process, log = self._start(identity, entries, _Fault(step, sent, self.chance.uniform(0, span)))
        if sent == signal.SIGKILL:
            self._join(process, log)
            self.faults.kills += process.exitcode == -signal.SIGKILL
            return
        if not self._has_stopped(process, log):
            return
        self.faults.zombies += 1
        assert process.pid is not None
        try:
            self._write(identity, entries, False)
        finally:
            with suppress(ProcessLookupError):  # it was about to end when it was to be stopped
                os.kill(process.pid, signal.SIGCONT)  # one that is stopped could not be ended either
        self._join(process, log)

    def _write_at_once(self, rivals: Sequence[tuple[WriteIdentity, tuple[Entry, ...]]]) -> tuple[Entry, ...]:
        """Write for two runs of a partition at once; returns the entries of the one that is left there."""
        started = [self._start(identity, entries, None) for identity, entries in rivals]
        for process, log in started:
            self._join(process, log)
            assert process.exitcode == 0, f"one of two runs at once failed: {log.read_text()}"
        texts = {text for _, _, text in self.target.rows()}
        for _, entries in rivals:
            if entries and entries[0].text in texts:
                return entries
        empty = [entries for _, entries in rivals if not entries]
        assert empty, f"the rows of two runs at once are lost: {[identity for identity, _ in rivals]}"
        return empty[0]

    def _start(
        self, identity: WriteIdentity, entries: tuple[Entry, ...], fault: _Fault | None
    ) -> tuple[BaseProcess, Path]:
        self._number += 1
        self.faults.writes += 1
        drawn = self.chance.random()
        loss = _Loss.PREPARED if drawn < 0.1 else _Loss.MIDWAY if drawn < 0.2 else None
        self.faults.retried_tasks += loss is not None
        log = self._folder / f"write-{self._number}"
        staging = str(self._folder / "staging")
        write = _Write(self.target, self.server, identity, entries, loss, staging, os.environ.get(_TOKEN))
        process = _processes().Process(target=_run, args=(write, fault, str(log)), daemon=True)
        process.start()
        return process, log

    def _join(self, process: BaseProcess, log: Path) -> None:
        process.join(_PATIENCE)
        if process.exitcode is None:
            process.kill()
            raise AssertionError(f"a write has not ended within {_PATIENCE:.0f} s: {_text(log)}")

    def _has_stopped(self, process: BaseProcess, log: Path) -> bool:
        """Wait until a process has stopped itself; False where it ended before."""
        deadline = time.monotonic() + _PATIENCE
        while process.is_alive() and time.monotonic() < deadline:
            if _text(log).endswith("stopped"):
                time.sleep(0.05)  # the signal follows what it wrote
                return process.is_alive()
            time.sleep(0.02)
        return False


def _some(rows: Counter[tuple[Any, ...]]) -> list[tuple[int, int, str]]:
    return [(key, version, text[:60]) for key, version, text in sorted(rows)[:3]]


def _text(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def _processes() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["dagster_unified.testing.connectors", "pyspark.sql.connect.session", "dagster_unified.connectors"]
    )
    return context


def _run(write: _Write, fault: _Fault | None, log: str) -> None:
    """Run one write, with its fault, in a process."""
    from pyspark.sql import SparkSession

    if write.token is not None:
        os.environ[_TOKEN] = write.token
    faults = _Faults(fault, Path(log))
    try:
        faults.at(_Step.ANY)
        spark = SparkSession.builder.remote(write.server).create()
        sink = write.target.sink().bound_to(record_type(Entry, "the kit"))
        frame: DataFrame = spark.createDataFrame(list(write.entries), "key long, version long, text string")
        frame = frame.repartition(2, "key")
        if write.loss is _Loss.PREPARED and type(sink).stage is SparkSink.stage:
            vars(sink)["stage"] = partial(_stage_with_lost_tasks, sink)
        elif write.loss is not None:
            frame = frame.mapInArrow(_fail_first, frame.schema)
        context = WriteContext(write.identity, "stage", lambda: faults.at(_Step.STAGED), by_value_afresh, write.staging)
        with closing(_FaultyCommits(sink, faults)) as commits:
            commits.write(frame, [context])
    except BaseException:
        Path(log).write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def _fail_first(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Fail at a task's first attempt, after half of a batch."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    for batch in batches:
        yield batch.slice(0, batch.num_rows // 2)
        if context.attemptNumber() == 0:
            raise RuntimeError("a task of the kit fails at its first attempt")
        yield batch.slice(batch.num_rows // 2)


def _stage_with_lost_tasks(
    sink: SparkSink[Any, C], frame: DataFrame, attempts: Sequence[WriteAttempt], ship: Ship
) -> list[list[C]]:
    return stage_by_writers(_LosingWriters(sink), sink.committable, frame, attempts, ship)


class _LosingWriters(Generic[C]):
    """A sink's writers that fail at a task's first attempt when they have prepared their commit."""

    def __init__(self, sink: SparkSink[Any, C]) -> None:
        self._sink = sink

    def writer(self, task: WriterTask) -> Writer[C]:
        writer = self._sink.writer(task)
        return _LosingWriter(writer) if task.retry == 0 else writer


class _LosingWriter(Writer[C]):
    def __init__(self, writer: Writer[C]) -> None:
        self._writer = writer

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write(batch)

    def prepare_commit(self) -> Iterable[C]:
        prepared = list(self._writer.prepare_commit())
        raise RuntimeError(f"a task of the kit fails with {len(prepared)} committables")

    def close(self) -> None:
        self._writer.close()


@dataclass
class _Faults:
    """Kills or stops this process where it is asked to, once.

    After a conflict the engine asks again whether it may write, and so comes by a second time.
    """

    fault: _Fault | None
    log: Path
    _is_due: bool = True

    def at(self, step: _Step) -> None:
        if self.fault is None or self.fault.step is not step or not self._is_due:
            return
        self._is_due = False
        if self.fault.delay:
            timer = Timer(self.fault.delay, self._send)
            timer.daemon = True
            timer.start()
        else:
            self._send()

    def _send(self) -> None:
        assert self.fault is not None
        if self.fault.signal == signal.SIGSTOP:
            self.log.write_text("stopped")
        os.kill(os.getpid(), self.fault.signal)


class _FaultyCommits(SinkCommits[C]):
    """The engine's commits, with faults between the steps."""

    def __init__(self, sink: SparkSink[Any, C], faults: _Faults) -> None:
        super().__init__(sink)
        self._faults = faults

    def _open(self, frame: DataFrame) -> Committer[C]:
        return _FaultyCommitter(super()._open(frame), self._faults)


class _FaultyCommitter(Committer[C]):
    def __init__(self, committer: Committer[C], faults: _Faults) -> None:
        self._committer, self._faults = committer, faults

    def last_version(self, name: str) -> int | None:
        return self._committer.last_version(name)

    def begin(self, attempts: Sequence[WriteAttempt]) -> None:
        self._faults.at(_Step.BEFORE_STAGING)
        self._committer.begin(attempts)
        self._faults.at(_Step.STAGING)

    def commit(self, commits: Sequence[Commit[C]]) -> None:
        self._faults.at(_Step.COMMITTING)
        self._committer.commit(commits)
        self._faults.at(_Step.COMMITTED)

    def clean_up(self, attempts: Sequence[WriteAttempt], committed: bool) -> None:
        self._faults.at(_Step.CLEANING_UP)
        self._committer.clean_up(attempts, committed)
