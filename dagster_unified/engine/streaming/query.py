"""One Spark query of a STREAMING job: started, watched, drained and stopped.

Knows Spark's streaming API; what its rows are and how an epoch is committed, a kind of query knows.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

from dagster_unified.connectors import listing
from dagster_unified.connectors.paths import for_spark
from dagster_unified.engine.dataframe.fragment import Fragment
from dagster_unified.engine.events import EpochCommitted, Observer, Written
from dagster_unified.engine.failures import translated
from dagster_unified.engine.streaming import tables
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory, Deployed, last_number
from dagster_unified.engine.streaming.epoch import EpochWriter
from dagster_unified.errors import UnifiedError
from dagster_unified.graph.plan import Plan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from dagster_unified.engine.commit import WriteResult

STALE = 1.0
"""Seconds after which a running query lists the files of a lookup's table again."""

GRACE = 20.0
"""Seconds for which stopping waits for an epoch that is being committed."""


@dataclass(frozen=True)
class Deployment:
    """What the queries of a job share."""

    plan: Plan
    spark: SparkSession
    directory: CheckpointDirectory
    deployed: Deployed
    observe: Observer
    check: Callable[[], None]
    """Raises where this job may not write any more."""


class _StoppedError(UnifiedError):
    """The job is being stopped; not an error to anyone."""


class Query(ABC):
    """One Spark query and its epochs."""

    output_mode = "append"
    several_stateful = True
    """Whether Spark may find several stateful operators in the query."""

    def __init__(self, deployment: Deployment, name: str, tail: Fragment) -> None:
        self.name, self.plan, self.spark = name, deployment.plan, deployment.spark
        self.directory = deployment.directory
        self.folder = deployment.directory.path
        self.writer = EpochWriter(
            deployment.plan,
            deployment.spark,
            tail,
            f"{deployment.deployed.id}/{name}",
            deployment.deployed.timeline,
            self.folder / "epochs" / name,
            deployment.check,
        )
        self.query: StreamingQuery | None = None
        self.failure: Exception | None = None
        self.epochs = 0
        self.last: int | None = None
        """The last epoch that this query has committed to its sinks."""

        committed, begun = self.directory.last_epoch(name), last_number(self.folder / "spark" / name / "offsets")
        self._settled_before = self.directory.settled() or begun == committed
        """Whether the job before left nothing in the sinks of an epoch that Spark will run again."""

        self.tables: list[DataFrame] = []
        """What lookups read in each micro-batch."""

        self._observe = deployment.observe
        self._listed = time.monotonic()
        self._stopping = False
        self._committing = Lock()
        self._draining: Thread | None = None
        self._between: Callable[[int], None] | None = None

    @abstractmethod
    def frame(self) -> DataFrame:
        """The query's rows."""

    @abstractmethod
    def commit(self, frame: DataFrame, epoch: int) -> EpochCommitted:
        """Commit one micro-batch."""

    @abstractmethod
    def end(self) -> bool:
        """The input is drained: emit the end of input to operators that wait for it; says whether there are any."""

    def tick(self) -> None:
        """Do what is due as time passes."""
        listing.look(self.folder)
        if time.monotonic() - self._listed >= STALE:
            tables.refresh(self.tables)
            self._listed = time.monotonic()

    def start(self) -> None:
        """Start the query."""
        interval = self.plan.execution.streaming.interval
        writer = self.frame().writeStream.foreachBatch(self._epoch).outputMode(self.output_mode)
        writer = writer.option("checkpointLocation", for_spark(self.folder / "spark" / self.name)).queryName(
            f"{self.plan.name}/{self.name}"
        )
        if interval:
            writer = writer.trigger(processingTime=f"{int(interval.total_seconds() * 1000)} milliseconds")
        self.spark.conf.set("spark.sql.streaming.statefulOperator.allowMultiple", str(self.several_stateful).lower())
        self.query = writer.start()

    def between_epochs(self, action: Callable[[int], None]) -> None:
        """Have `action` called once between two epochs, with the number of the one before: nothing is written then.

        An epoch that is running ends first; the one after it waits.
        """
        self._between = action

    def advance(self, bounded: bool) -> bool:
        """Do what is due, and say whether the query goes on. Raises what made it fail."""
        assert self.query is not None
        if not self.query.isActive:
            raise self._error()
        self.tick()
        self._act_while_idle()
        if not bounded:
            return True
        if self._draining is None:
            self._draining = Thread(target=self._drain, daemon=True, name=f"drain {self.name}")
            self._draining.start()
        if self._draining.is_alive():
            return True
        if not self.query.isActive:
            raise self._error()
        return False

    def halt(self) -> bool:
        """Begin no further epoch; says whether the one that was running has ended."""
        self._stopping = True
        if not self._committing.acquire(blocking=False):
            return False
        self._committing.release()
        return True

    def settled(self) -> bool:
        """Whether the sinks of a stopped query have nothing of a later epoch than the last that Spark has logged."""
        if self.failure is not None or not self.halt():
            return False
        return self._settled_before if self.last is None else self.last == self.directory.last_epoch(self.name)

    def stop(self) -> None:
        """Stop the query, after the epoch that is being committed."""
        if self.query is None:
            return
        waited = self._committing.acquire(timeout=GRACE)
        self._stopping = True
        if waited:
            self._committing.release()
            self._let_spark_commit()
        try:
            self.query.stop()
        except Exception as error:
            if self.query.isActive:
                raise translated(error, self.plan, self.name, self.spark) from error
        if waited:
            self.writer.close()

    def busy(self) -> bool:
        """Whether an epoch is being worked on."""
        return self.query is not None and self.query.isActive and bool(self.query.status["isTriggerActive"])

    def progress(self) -> Any:
        """What Spark reported of the micro-batch before, or None before the first."""
        return self.query.lastProgress if self.query is not None else None

    def measured(self) -> tuple[int, int, int]:
        """What Spark measured in the micro-batch before: rows read, and rows and bytes of state."""
        progress = self.progress()
        if progress is None:
            return 0, 0, 0
        states = progress["stateOperators"]
        rows, size = sum(s["numRowsTotal"] for s in states), sum(s["memoryUsedBytes"] for s in states)
        return int(progress["numInputRows"]), rows, size

    def _act_while_idle(self) -> None:
        """Call what waits for the time between two epochs, where there is no epoch that would call it."""
        if self._between is None or self.busy() or not self._committing.acquire(blocking=False):
            return
        try:
            before = self.directory.last_epoch(self.name)
            if not self.busy() and before is not None:
                self._act(before)
        finally:
            self._committing.release()

    def _act(self, epoch: int) -> None:
        if self.last is None and not self._settled_before:
            return  # the sinks may have what is about to run again
        action, self._between = self._between, None
        if action is not None:
            action(epoch)

    def _let_spark_commit(self) -> None:
        """Wait until Spark has logged the epoch that the sinks have.

        Otherwise it would run again, after an upgrade by other code.
        """
        deadline = time.monotonic() + GRACE
        while self.busy() and time.monotonic() < deadline:
            time.sleep(0.02)

    def _drain(self) -> None:
        assert self.query is not None
        try:
            listing.look(self.folder, now=True)
            self.query.processAllAvailable()
            with self._committing:
                # A query that is stopped has nothing available either, and its input has not ended.
                ends = not self._stopping and self.query.isActive and not self.plan.execution.goes_on
                more = ends and self.end()
            if more:
                self.query.processAllAvailable()
        except Exception as error:  # the query's own failure is read from it; anything else is this one's
            if self.query.isActive:
                self.failure = self.failure or error
                self.query.stop()

    def _epoch(self, frame: DataFrame, epoch: int) -> None:
        with self._committing:
            if self._stopping:
                raise _StoppedError("the job is being stopped")
            if epoch > 0:
                self._act(epoch - 1)
            try:
                self._observe(self.commit(frame, epoch))
                self.epochs += 1
                self.last = epoch
            except Exception as error:
                self.failure = error
                raise

    def _error(self) -> UnifiedError:
        assert self.query is not None
        stopped = UnifiedError(f"{self.plan.name}: query '{self.name}' has stopped")
        cause: Exception = self.failure or self.query.exception() or stopped
        return translated(cause, self.plan, self.name, self.spark)


def written(results: dict[str, WriteResult]) -> dict[str, Written]:
    """What sinks wrote, as events say it."""
    return {name: Written(result.rows, result.bytes) for name, result in results.items()}
