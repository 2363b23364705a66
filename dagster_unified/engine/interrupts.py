"""Whether this process was asked to stop, by SIGINT (Ctrl-C) or SIGTERM.

A signal's handler only remembers it: raising there, in the middle of a call of the JVM, would break the connection to
it. What runs asks at its safe points, and what Spark runs meanwhile is cancelled by a thread of its own. PySpark puts a
handler of its own in place when a session starts in the main thread, and Dagster one whenever it runs a step there.

A terminal sends Ctrl-C to every process in front, so also to the ones that Dagster starts to mirror a step's output,
which would print their tracebacks. What is started while `listening(at_once=True)` therefore has SIGINT blocked, and a
thread of this process waits for it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import TYPE_CHECKING

from dagster_unified.errors import CancelledError
from dagster_unified.storage.object_store import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLL = 0.1
"""Seconds between two looks at whether a signal has come."""


class Interrupts:
    """The signals that ask this process to stop. With `at_once` a second one ends it there and then."""

    def __init__(self, at_once: bool = False) -> None:
        self.signal: int | None = None
        self.on_stop: Callable[[], None] | None = None
        """Called once, before what was running ends for a signal's sake."""

        self._at_once = at_once
        self._session: SparkSession | None = None

    @property
    def received(self) -> bool:
        """Whether the process was asked to stop."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """The exit code of the process, by the shell's convention: 130 after SIGINT, 143 after SIGTERM."""
        return 128 + (self.signal or 0)

    def listen(self) -> None:
        """Install the handlers in the main thread, again where something else has installed its own."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._handle)
            signal.signal(signal.SIGTERM, self._handle)

    def check(self) -> None:
        """Raise `CancelledError` where the process was asked to stop. To be called before anything is committed."""
        if self.received:
            raise CancelledError(
                f"the process was asked to stop ({signal.Signals(self.signal or 0).name}); what had not been committed"
                " is not"
            )

    def started(self, session: SparkSession) -> SparkSession:
        """Return the session in which jobs are cancelled after a signal."""
        self.listen()
        self._session = session
        self.check()
        return session

    def stopping(self) -> None:
        """Notify the listener, once, that what was running ends because of a signal."""
        notify, self.on_stop = self.on_stop, None
        if notify is not None:
            notify()

    @contextmanager
    def cancelling(self) -> Iterator[None]:
        """Cancel, meanwhile, whatever Spark runs as soon as a signal has come."""

        def watch(done: threading.Event) -> None:
            while not done.wait(POLL):
                if self.received and self._session is not None:
                    with suppress(Exception):  # what fails now is going to be tried again, until the job has ended
                        _cancel(self._session)

        with meanwhile(watch, "cancelling"):
            yield

    def take(self, number: int) -> None:
        """Remember a signal; with `at_once` the second one ends the process."""
        if self._at_once and self.received:
            os._exit(self.exit_code)
        if self._at_once:
            os.write(2, b"\nstopping; a second signal ends the process at once\n")
        self.signal = self.signal or number

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.take(number)


_current: Interrupts | None = None


@contextmanager
def listening(at_once: bool = False) -> Iterator[Interrupts]:
    """Listen for signals until the context ends; an outer context that listens already is used."""
    global _current
    outer = _current
    mine = outer or Interrupts(at_once)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    _current = mine
    try:
        mine.listen()
        with _alone(mine) if at_once and outer is None else nullcontext():
            yield mine
    finally:
        _current = outer
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _alone(interrupts: Interrupts) -> Iterator[None]:
    """Give SIGINT to a thread of its own, and to no thread or process that starts meanwhile."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    def wait(done: threading.Event) -> None:
        while not done.is_set():
            if signal.sigtimedwait({signal.SIGINT}, POLL) is not None:
                interrupts.take(signal.SIGINT)

    try:
        with meanwhile(wait, "waiting for SIGINT"):
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@contextmanager
def meanwhile(work: Callable[[threading.Event], None], name: str) -> Iterator[None]:
    """Run `work` in a thread until the end of the context; it ends soon after the event is set that it is given."""
    done = threading.Event()
    thread = threading.Thread(target=work, args=(done,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class JobTag:
    """A tag by which jobs of a session are cancelled."""

    def __init__(self, session: SparkSession, tag: str) -> None:
        self._session, self._tag = session, tag

    def add(self) -> None:
        """Give the tag to the jobs that this thread runs from now on."""
        if is_connect(self._session):
            self._session.addTag(self._tag)
        else:  # a classic session's own tags are a thread's; those of its context are everyone's
            self._session.sparkContext.addJobTag(self._tag)

    def cancel(self) -> None:
        """Cancel the jobs that have the tag. Spark's errors do not count: who waits for a job tries again."""
        with suppress(Exception):
            if is_connect(self._session):
                self._session.interruptTag(self._tag)
            else:
                self._session.sparkContext.cancelJobsWithTag(self._tag)

    def cancel_until_over(self, thread: threading.Thread) -> None:
        """Cancel what a thread runs until it has ended: it may not have submitted its job yet."""
        while thread.is_alive():
            self.cancel()
            thread.join(POLL)


def _cancel(session: SparkSession) -> None:
    if is_connect(session):
        session.interruptAll()
    else:
        session.sparkContext.cancelAllJobs()
