"""Brings a query to the end of its data, or of its input, while the job watches, and says which epoch is the last."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec
import pyarrow as pa

from dagster_unified.by_value import sent
from dagster_unified.connectors import written_ahead
from dagster_unified.connectors.files import listing
from dagster_unified.engine.shipping import Payload
from dagster_unified.engine.streaming.checkpoint import last_number
from dagster_unified.graph.execution_graph import Link, program
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.functions.checkpoints import listeners
from dagster_unified.operators.program.run import RunningProgram
from dagster_unified.operators.program.step import Program
from dagster_unified.operators.time import wall_clock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from upath import UPath

Offsets: TypeAlias = dict[str, int | dict[str, int]]
"""By part, or by topic and part."""


class CatchUp:
    """The records that a query has to read now."""

    def __init__(self, query: StreamingQuery, begun: int | None) -> None:
        """`begun` is the last epoch that Spark has logged to have begun."""
        self._query = query
        # the one after that may have been planned already
        self._planned_later = 2 + (-1 if begun is None else begun)
        self._targets: list[Offsets] | None = None

    def is_read(self) -> bool:
        """Return whether an epoch has read up to the newest offset known when the first epoch from now on was planned.

        Where a source does not tell its newest offset, such an epoch has read what there was.
        """
        progress = self._query.lastProgress
        if progress is None or progress.batchId < self._planned_later:
            return False
        if self._targets is None:
            self._targets = [_offsets(source.latestOffset) for source in progress.sources]
        read = [_offsets(source.endOffset) for source in progress.sources]
        return all(covers(have, wanted) for have, wanted in zip(read, self._targets, strict=True))


def covers(read: Mapping[str, int | dict[str, int]], wanted: Mapping[str, int | dict[str, int]]) -> bool:
    """Return whether every wanted offset is read."""
    for part, last in wanted.items():
        have = read.get(part)
        if isinstance(last, dict):
            if not covers(have if isinstance(have, dict) else {}, last):
                return False
        elif not isinstance(have, int) or have < last:
            return False
    return True


def _offsets(text: str | None) -> Offsets:
    """Parse a source's offsets; empty where Spark does not tell them, or not in numbers."""
    try:
        return msgspec.json.decode(text or "", type=Offsets)
    except msgspec.DecodeError:
        return {}


_POLL = 0.05
"""Seconds after which a query that is drained is looked at again."""


class End(Enum):
    """The end of a query."""

    DATA = "data"
    """Where its data ends: open windows and pending timers stay in the state."""

    INPUT = "input"
    """Where its input ends: all timers fire."""


class Drained(Protocol):
    """A query (`query.Query`), as far as draining needs it."""

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
    """Drains one query, until that has come to its end or has stopped."""

    def __init__(self, query: Drained, running: StreamingQuery, end: End, bounded: bool) -> None:
        """`bounded` says that the query's sources end, so that it will have nothing to do."""
        super().__init__(daemon=True, name=f"drain {query.name}")
        self.end = end
        self.error: Exception | None = None
        """The error, if there was one."""

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
        """Let the query read what has arrived, also what was handed on in a bucket, of which Spark hears late."""
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
        """Wait until the query is over, is idle, or has `reached` what is needed: records may never cease."""
        idle = _Idle(self._running)
        idle.start()
        while idle.is_alive():
            if self._query.over or reached():
                return
            idle.join(_POLL)
        if idle.error is not None and not (self._query.over or reached()):
            raise idle.error


class _Idle(Thread):
    """Waits until a query is idle."""

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


def tell_of_last_epoch(plan: Plan, nodes: Iterable[int], epoch: int, spark: SparkSession) -> None:
    """Tell a new instance of each of these operators that listens that an epoch is committed."""
    for node in map(plan.graph.node, sorted(nodes)):
        if node.step is None or next(iter(listeners(node.user_function)), None) is None:
            continue
        alone = program(plan, node.name, (Link(node.id),))
        payload = sent([alone], partial(Payload.of, alone, [node.user_function]), plan.name)
        spark.range(0, 1, 1, 1).mapInArrow(partial(_tell, payload, epoch), "id long").collect()


def _tell(payload: Payload, epoch: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    alone: Program = payload.load()
    for batch in batches:
        with RunningProgram(alone, lambda number, emitted: None, wall_clock) as running:
            running.notify(epoch)
        yield batch.slice(0, 0)
