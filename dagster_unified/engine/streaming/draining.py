"""Brings a query to the end of its data, or of its input, while the job watches.

What has arrived is read first, and then the end of the input is sent. Knows what a query has to read, not what its
rows are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from threading import Thread
from typing import TYPE_CHECKING, Protocol

from dagster_unified.connectors import written_ahead
from dagster_unified.connectors.files import listing
from dagster_unified.engine.streaming.catch_up import CatchUp
from dagster_unified.engine.streaming.checkpoint import last_number

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery
    from upath import UPath

_POLL = 0.05
"""Seconds after which a query that is drained is looked at again."""


class End(Enum):
    """Where a query ends."""

    DATA = "data"
    """Where its data ends: open windows and pending timers stay in the state."""

    INPUT = "input"
    """Where its input ends: all timers fire."""


class Drained(Protocol):
    """A query (`query.Query`), as far as draining asks it."""

    name: str
    folder: UPath

    @property
    def has_end(self) -> bool: ...
    @property
    def over(self) -> bool: ...
    def send_end(self) -> bool: ...
    def has_read_inputs(self) -> Callable[[], bool]: ...
    def ends_alignment(self) -> bool: ...


class Draining(Thread):
    """Drains one query. It goes on until the query has come to its end, or has stopped."""

    def __init__(self, query: Drained, running: StreamingQuery, end: End, bounded: bool) -> None:
        """`bounded` says that the query's sources end, so that it will have nothing to do."""
        super().__init__(daemon=True, name=f"drain {query.name}")
        self.end = end
        self.error: Exception | None = None
        """What went wrong."""

        self._query, self._running, self._bounded = query, running, bounded

    def run(self) -> None:
        try:
            written_ahead.end(self._query.folder)  # else there may always be more
            listing.end(self._query.folder)
            self._read()
            if self.end is End.INPUT and (self._query.send_end() or self._query.has_end):
                self._await_end()  # also of an end that the job before has sent: native windows close an epoch later
        except Exception as error:
            self.error = error

    def _read(self) -> None:
        """Have the query read what has arrived, also what was handed on in a bucket, of which Spark hears late."""
        self._wait_until(self._query.has_read_inputs())
        if self._bounded:
            self._read_arrived()  # its sources stay aligned up to there
        if self._query.ends_alignment() or not self._bounded:
            self._read_arrived()

    def _read_arrived(self) -> None:
        """Wait until what has arrived is read, and not for what comes meanwhile, if anything can."""
        if self._bounded:
            self._wait(_never)
        else:
            folder = self._query.folder
            self._wait(lambda: listing.all_taken(folder))
            begun = last_number(folder / "spark" / self._query.name / "offsets")
            self._wait(CatchUp(self._running, begun).is_read)

    def _await_end(self) -> None:
        """Wait until the end of the input, which is on its way, has come, and what follows from it."""
        self._wait_until(lambda: self._query.has_end)
        self._wait(_never)

    def _wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait for something that comes by itself, while the query is active."""
        while not reached() and self._running.isActive:
            time.sleep(_POLL)

    def _wait(self, reached: Callable[[], bool]) -> None:
        """Wait until the query is over, has nothing to do, or has `reached` what is needed: records may never cease."""
        idle = _Idle(self._running)
        idle.start()
        while idle.is_alive():
            if self._query.over or reached():
                return
            idle.join(_POLL)
        if idle.error is not None and not (self._query.over or reached()):
            raise idle.error


class _Idle(Thread):
    """Waits until a query has nothing to do."""

    def __init__(self, running: StreamingQuery) -> None:
        super().__init__(daemon=True, name=f"wait for {running.name}")
        self._running = running
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._running.processAllAvailable()
        except Exception as error:
            self.error = error


def _never() -> bool:
    return False
