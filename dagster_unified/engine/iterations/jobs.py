"""How an iteration's tasks run: they stay on the driver's machine and take orders, or each order is a Spark job."""

from __future__ import annotations

import functools
import os
import selectors
import shutil
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING
from uuid import uuid4

from dagster_unified.engine.interrupts import JobTag
from dagster_unified.engine.iterations.worker import Answer, stay
from dagster_unified.storage.object_store import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class SeparateJobs:
    """Jobs that run at once; `carry_out(number, order)` runs one and returns its answer."""

    def __init__(self, spark: SparkSession, carry_out: Callable[[int, bytes], bytes]) -> None:
        self._spark, self._carry_out = spark, carry_out
        self._tag = JobTag(spark, f"rounds-{uuid4().hex}")
        self._ended: SimpleQueue[tuple[int, bytes | BaseException]] = SimpleQueue()
        self._threads: dict[int, Thread] = {}

    def give(self, number: int, order: bytes) -> None:
        """Start an order."""
        from pyspark import InheritableThread

        self._threads[number] = InheritableThread(
            target=self._run, session=self._spark, args=(number, order), name=f"rounds-{number}", daemon=True
        )
        self._threads[number].start()

    def _run(self, number: int, order: bytes) -> None:
        try:
            self._tag.add()
            self._ended.put((number, self._carry_out(number, order)))
        except BaseException as error:
            self._ended.put((number, error))

    def answered(self) -> tuple[int, bytes]:
        """Wait for the next finished order; return its number and the answer. Raises what its job fails with."""
        number, answer = self._ended.get()
        if isinstance(answer, BaseException):
            raise answer
        return number, answer

    def close(self, failed: bool = False) -> None:
        """Wait for the jobs that still run; they are cancelled where something has `failed`."""
        for thread in self._threads.values():
            if failed:
                self._tag.cancel_until_over(thread)
            thread.join()


LONGEST = 10.0
"""Seconds after which a job makes room for others of its session, which wait for the cores that it has."""

_LOOK_EVERY, _PATIENCE = 1.0, 2.0
"""Seconds between two looks at the age of a job, and until one that should end is cancelled."""

IS_PINNED = os.environ.get("PYSPARK_PIN_THREAD", "true").lower() == "true"
"""Whether the jobs of a thread can be told from those of another."""

_LONGEST_FOLDER = 80
"""Bytes: the path of a socket has up to a hundred."""


def can_stay(spark: SparkSession) -> bool:
    """Return whether a session's tasks run on this machine and reach this process through a socket in a folder."""
    if is_connect(spark) or not IS_PINNED or not hasattr(socket, "AF_UNIX"):
        return False
    master = spark.sparkContext.master or ""
    is_here = master == "local" or master.startswith("local[")
    return is_here and len(os.fsencode(tempfile.gettempdir())) < _LONGEST_FOLDER


class ResidentTasks:
    """Up to so many tasks that carry out orders; they end where this is closed, and come again for another order."""

    def __init__(self, spark: SparkSession, tasks: int, answer: Answer) -> None:
        self._spark, self._answer = spark, answer
        self._tasks = min(tasks, spark.sparkContext.defaultParallelism)
        self._waiting: dict[int, bytes] = {}
        """The orders that no task has yet, by number."""

        self._answered: deque[tuple[int, bytes]] = deque()
        self._job: _Job | None = None

    def give(self, number: int, order: bytes) -> None:
        """Start an order: in the task that had the last one of this number, if that is idle."""
        self._waiting[number] = order
        self._hand_out()

    def answered(self) -> tuple[int, bytes]:
        """Wait for the next finished order; return its number and the answer.

        Raises what the tasks' job fails with.
        """
        while not self._answered:
            assert self._job is not None
            self._answered += self._job.answers()
            self._hand_out()
        return self._answered.popleft()

    def _hand_out(self) -> None:
        if self._job is not None and self._job.is_old:
            if self._job.is_busy:
                self._job.let_idle_tasks_end()
                return
            self.close()
        if self._waiting:
            if self._job is None:
                self._job = _Job(self._spark, self._tasks, self._answer)
            self._job.hand_out(self._waiting)

    def close(self, failed: bool = False) -> None:
        """Let the tasks end; those that still work are killed where something has `failed`."""
        job, self._job = self._job, None
        if job is not None:
            job.close(failed)


class _Job:
    def __init__(self, spark: SparkSession, tasks: int, answer: Answer) -> None:
        from pyspark import InheritableThread

        self._begun = time.monotonic()
        self._folder = tempfile.mkdtemp(prefix="rounds-")  # which nobody else can enter
        self._server = socket.socket(socket.AF_UNIX)
        self._server.settimeout(None)
        self._server.bind(os.path.join(self._folder, "tasks"))
        self._server.listen(tasks)
        self._over, self._runs = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(self._over, selectors.EVENT_READ)
        self._idle: list[Connection] = []
        self._busy: dict[Connection, tuple[int, bytes]] = {}
        self._lost: dict[int, bytes] = {}
        """The orders of tasks that are gone."""

        self._had: dict[int, Connection] = {}
        """Which task had the last order of a number."""

        self._answered = 0
        self._failure: BaseException | None = None
        self._tag = JobTag(spark, f"rounds-{uuid4().hex}")
        staying = functools.partial(stay, self._server.getsockname(), answer)
        frame = spark.range(0, tasks, 1, tasks).mapInArrow(staying, "nothing boolean")
        self._thread = InheritableThread(target=self._run, args=(frame,), name="rounds", daemon=True)
        self._thread.start()

    def _run(self, frame: DataFrame) -> None:
        try:
            self._tag.add()
            frame.collect()
        except BaseException as error:
            self._failure = error
        finally:
            self._runs.close()

    @property
    def is_old(self) -> bool:
        """Whether another job should follow; not before this one has done something."""
        return self._answered > 0 and time.monotonic() - self._begun > LONGEST

    @property
    def is_busy(self) -> bool:
        """Whether work that was handed out is not done yet."""
        return bool(self._busy or self._lost)

    def hand_out(self, waiting: dict[int, bytes]) -> None:
        """Give waiting orders to idle tasks."""
        for number in list(waiting):
            if self._had.get(number) in self._idle:
                self._send(self._had[number], number, waiting.pop(number))
        for number in list(waiting)[: len(self._idle)]:
            self._send(self._idle[0], number, waiting.pop(number))

    def answers(self) -> list[tuple[int, bytes]]:
        """Wait until something happens; return what has been carried out. Raises what the job fails with."""
        answers: list[tuple[int, bytes]] = []
        for key, _ in self._selector.select(_LOOK_EVERY):
            if key.fileobj is self._over:
                raise self._failure or RuntimeError("the tasks of an iteration have ended by themselves")
            if key.fileobj is self._server:
                accepted, _ = self._server.accept()
                accepted.settimeout(None)
                self._take_in(Connection(accepted.detach()))
            else:
                assert isinstance(key.fileobj, Connection)
                answers += self._answer_of(key.fileobj)
        return answers

    def _answer_of(self, task: Connection) -> list[tuple[int, bytes]]:
        try:
            answer = task.recv_bytes()
        except (EOFError, OSError):
            self._lose(task)
            return []
        number, _ = self._busy.pop(task)
        self._idle.append(task)
        self._answered += 1
        return [(number, answer)]

    def _take_in(self, task: Connection) -> None:
        self._selector.register(task, selectors.EVENT_READ)
        self._idle.append(task)
        if self._lost:
            self._send(task, *self._lost.popitem())

    def _send(self, task: Connection, number: int, order: bytes) -> None:
        self._idle.remove(task)
        self._busy[task], self._had[number] = (number, order), task
        try:
            task.send_bytes(order)
        except OSError:
            self._lose(task)

    def _lose(self, task: Connection) -> None:
        """Keep a lost task's work for the one that replaces it; where Spark starts none, the job fails."""
        if task in self._busy:
            number, order = self._busy.pop(task)
            self._lost[number] = order
        elif task in self._idle:
            self._idle.remove(task)
        self._had = {number: had for number, had in self._had.items() if had is not task}
        self._selector.unregister(task)
        task.close()

    def let_idle_tasks_end(self) -> None:
        """Give back the cores of idle tasks."""
        for task in list(self._idle):
            self._lose(task)

    def close(self, failed: bool) -> None:
        """Let the tasks end, and wait until the job has."""
        self._server.close()
        for task in (*self._idle, *self._busy):
            task.close()
        self._selector.close()
        self._thread.join(0 if failed else _PATIENCE)
        self._tag.cancel_until_over(self._thread)  # it works on, or waits for a core to find that nothing is left
        self._over.close()
        shutil.rmtree(self._folder, ignore_errors=True)
