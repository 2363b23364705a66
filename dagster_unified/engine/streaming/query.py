"""One Spark query of a STREAMING job: started, watched, drained and stopped.

Knows Spark's streaming API; what its rows are and what follows from an epoch, a kind of query knows. What an epoch does
with the rows is its runner's, which may be in another process.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

from dagster_unified.connectors import written_ahead
from dagster_unified.connectors.files import listing
from dagster_unified.engine.dataframe.frames import files_lacking_columns
from dagster_unified.engine.events import EpochCommitted, Observer
from dagster_unified.engine.failures import translated
from dagster_unified.engine.iterations.files import text_of
from dagster_unified.engine.session import give_up
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory, Deployed, last_number
from dagster_unified.engine.streaming.control import brings_end
from dagster_unified.engine.streaming.draining import Draining, End
from dagster_unified.engine.streaming.epoch import EpochRunner, EpochWriter, Outcome, StoppedError
from dagster_unified.engine.streaming.iterations import Host
from dagster_unified.engine.streaming.savepoints.request import Brake, Pause
from dagster_unified.engine.streaming.sources import LookupTables
from dagster_unified.engine.streaming.through_connect import EpochsElsewhere
from dagster_unified.errors import LeaseLostError, StateError, UnifiedError
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.graph.execution_graph import ExecutionGraph
from dagster_unified.graph.plan import Plan
from dagster_unified.storage.object_store import is_connect
from dagster_unified.storage.paths import for_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter
    from upath import UPath

STALE = 1.0
"""Seconds after which a running query lists the files of a lookup's table again."""

LEAD = 0.5
"""Seconds before Spark starts an epoch, where epochs have an interval, in which the epoch's files are listed."""

GRACE = 20.0
"""Seconds for which stopping waits for an epoch that is being committed."""


@dataclass(frozen=True)
class Deployment:
    """The context that the queries of a job share."""

    plan: Plan
    spark: SparkSession
    directory: CheckpointDirectory
    deployed: Deployed
    observe: Observer
    token: int
    """The fencing token of the job."""

    @property
    def check(self) -> Callable[[], None]:
        """Raises where this job may not write any more."""
        return partial(self.directory.check_lease, self.token)


class Query(ABC):
    """One Spark query and its epochs."""

    output_mode = "append"
    epochs_after_end = 0
    """Epochs that it takes, after the one that brings the end of the input, until all that waits for it is out."""

    several_stateful = True
    """Whether Spark may find several stateful operators in the query."""

    runner: EpochRunner

    def __init__(self, deployment: Deployment, name: str, tail: ExecutionGraph) -> None:
        self.name, self.plan, self.spark = name, deployment.plan, deployment.spark
        self.directory = deployment.directory
        self.folder = deployment.directory.path
        self._token = deployment.token
        self.through_connect = is_connect(deployment.spark)
        self._elsewhere: EpochsElsewhere | None = None
        self.log = text_of(self.folder / "spark" / name / "offsets")
        """Spark's log of the query's offsets, as workers read it."""

        self.writer = EpochWriter(
            deployment.plan,
            None if self.through_connect else deployment.spark,
            tail,
            f"{deployment.deployed.id}/{name}",
            deployment.deployed.timeline,
            self.folder / "epochs" / name,
            deployment.check,
            deployment.token,
            self.log,
        )
        self.query: StreamingQuery | None = None
        self.failure: Exception | None = None
        self.epochs = 0
        self.last: int | None = None
        """The last epoch that this query has committed to its sinks."""

        self._in_sinks = False
        """Whether the sinks may have an epoch of which nobody has heard how it ended."""

        committed, begun = self.directory.last_epoch(name), last_number(self.folder / "spark" / name / "offsets")
        self._settled_before = self.directory.settled() or begun == committed
        """Whether the job before left nothing in the sinks of an epoch that Spark will run again."""

        self.tables = LookupTables(deployment.spark, self.folder, name, deployment.token)

        interval = deployment.plan.execution.streaming.interval
        self._interval = interval.total_seconds() if interval else 0.0
        """Seconds between the starts of two epochs. Spark counts them from 1970 on, and starts one that is late."""

        self._observe = deployment.observe
        self._listed = time.monotonic()
        self._stopping = self._cancelled = False
        self._committing = Lock()
        self._draining: Draining | None = None
        self._pause: Pause | None = None
        self._brake: Brake | None = None
        self._end_sent = False
        self._last_needed: int | None = None
        """The epoch after which there is none, once the end of the input has come."""

    @abstractmethod
    def frame(self) -> DataFrame:
        """Return the query's rows."""

    @abstractmethod
    def committed(self, outcome: Outcome, epoch: int, started: float) -> EpochCommitted:
        """Do what follows from a committed epoch, which was started then, before Spark logs it."""

    @abstractmethod
    def end(self) -> bool:
        """Send the end of the drained input to operators that wait for it; return whether there are any."""

    def host(self) -> Host:
        """Return this process's functions for epochs."""
        return Host(self.spark, self.writer.check, self._observe, lambda: self._stopping or self._cancelled)

    def has_read_inputs(self) -> Callable[[], bool]:
        """Return a function that says whether the query has read all that other queries have handed on until now."""
        return lambda: True

    def ends_alignment(self) -> bool:
        """Let no source wait for another from now on: the input is drained. Return whether any may have waited."""
        return False

    def tick(self) -> None:
        """Do what is due as time passes."""
        listing.look(self.folder, early=self._is_early())
        written_ahead.look(self.folder)
        if time.monotonic() - self._listed >= STALE:
            self._list_tables()
            self._listed = time.monotonic()

    @property
    def ends(self) -> bool:
        """Whether the end of its input is in its checkpoint, or on its way there."""
        return self._end_sent

    @property
    def has_end(self) -> bool:
        """Whether the sinks have the epoch that brings the end of its input."""
        return self._last_needed is not None

    @property
    def over(self) -> bool:
        """Whether its last epoch, with the end of the input, has been committed to its sinks and logged by Spark."""
        logged = None if self._last_needed is None else self.directory.last_epoch(self.name)
        return logged is not None and self._last_needed is not None and logged >= self._last_needed

    def goes_on_at_end(self) -> None:
        """Read nothing after the epoch that brings the end of the input, which the previous job has sent."""
        self._end_sent = True
        committed = self.directory.last_epoch(self.name)
        if committed is not None:
            last = range(max(0, committed - self.epochs_after_end), committed + 1)
            first = next((epoch for epoch in last if brings_end(self._logged(epoch))), None)
            self._last_needed = None if first is None else first + self.epochs_after_end

    def start(self) -> None:
        """Start the query."""
        writer = self.frame().writeStream.outputMode(self.output_mode)
        writer = writer.option("checkpointLocation", for_spark(self.folder / "spark" / self.name)).queryName(
            f"{self.plan.name}/{self.name}"
        )
        if self._interval:
            writer = writer.trigger(processingTime=f"{round(self._interval * 1000)} milliseconds")
        self.spark.conf.set("spark.sql.streaming.statefulOperator.allowMultiple", str(self.several_stateful).lower())
        self.query = self._started_elsewhere(writer) if self.through_connect else self._started_here(writer)

    def _started_here(self, writer: DataStreamWriter) -> StreamingQuery:
        def run(frame: DataFrame, epoch: int) -> None:
            try:
                self._epoch(partial(self.runner.run, frame, epoch), epoch)
            except StoppedError:
                raise
            except Exception as error:
                self.failure = self.failure or error
                # In a trace of Java's, Spark looks for an interruption by a pattern that overflows its thread's stack.
                raise StoppedError(f"epoch {epoch} has ended by a {type(error).__name__}") from None

        return writer.foreachBatch(run).start()

    def _started_elsewhere(self, writer: DataStreamWriter) -> StreamingQuery:
        calls = self.folder / "calls" / self.name
        token = self._token
        self._elsewhere = EpochsElsewhere(self.plan, self.name, calls, self.directory, token, token, self.host())
        function = self._elsewhere.function(self.runner)
        self._elsewhere.serve(self._epoch)
        try:
            self._elsewhere.running = writer.foreachBatch(function).start()
        except BaseException:
            self._elsewhere.close()
            raise
        return self._elsewhere.running

    def attach(self, running: StreamingQuery, started: int) -> None:
        """Go on with a query that a previous job started, with the token `started`, and that a server runs."""
        self.tables.go_on_with(started)
        self.frame()  # its sources and tables are listed, received and aligned by this process from now on
        calls = self.folder / "calls" / self.name
        self._elsewhere = EpochsElsewhere(
            self.plan, self.name, calls, self.directory, self._token, started, self.host()
        )
        self.query = self._elsewhere.running = running
        begun = last_number(self.folder / "spark" / self.name / "offsets")
        if begun == self.directory.last_epoch(self.name):
            begun, self._settled_before = None, True
        else:
            self._committing.acquire()  # until it has ended
            self._settled_before = False
        self._elsewhere.go_on(self._epoch, self._end_epoch, begun)

    def pause(self, pause: Pause) -> None:
        """Hold the query between two epochs; one that is running ends first."""
        self._pause = pause

    def brake(self, brake: Brake) -> None:
        """Let the query end no epoch that is too far ahead."""
        self._brake = brake

    def advance(self, end: End | None) -> bool:
        """Do what is due, and return whether the query goes on; without an `end` it does. Raises what made it fail."""
        if self.query is None:  # its input had ended before the job was started
            self._hold_ended()
            return False
        if not self._is_active(self.query):
            if self.over:
                self._hold_ended()
                return False
            raise self._error()
        if self._elsewhere is not None and self._elsewhere.failure is not None:
            raise self._error()  # Spark runs it, and nobody answers to its epochs
        self.tick()
        self._hold_idle()
        if end is None:
            return True
        return self._advance_to(end, self.query)

    def send_end(self) -> bool:
        """Send the end of the input to operators that wait for it; return whether that was to be done."""
        with self._committing:
            # A query that is stopped has nothing available either, and its input has not ended.
            sends = not self._stopping and self.query is not None and self.query.isActive and not self.has_end
            if sends:
                self._end_sent = sends = self.end()
            return sends

    def halt(self) -> bool:
        """Begin no further epoch; return whether the one that was running has ended."""
        self._stopping = True
        if not self._committing.acquire(blocking=False):
            return False
        self._committing.release()
        return True

    def settled(self) -> bool:
        """Return whether the sinks of a stopped query have no later epoch than the last that Spark has logged."""
        if self.failure is not None or self._in_sinks or not self.halt():
            return False
        if self.last is None:
            return self._settled_before or self.over
        return self.last == self.directory.last_epoch(self.name)

    def leave(self) -> None:
        """Leave a query alone with which another job goes on."""
        self._cancelled = self._stopping = True
        if self._elsewhere is not None:
            self._elsewhere.leave()

    def stop(self) -> None:
        """Stop the query, after the epoch that is being committed."""
        if self.query is None:
            self.tables.drop()
            return
        self._cancelled = True
        waited = self._committing.acquire(timeout=GRACE)
        self._stopping = True
        if waited:
            self._committing.release()
        try:
            with ExitStack() as ending:
                ending.callback(self.tables.drop)
                ending.callback(self.query.stop)  # which comes first
                if waited:
                    self._let_spark_commit()
        except Exception as error:
            if self._is_active(self.query):
                raise translated(error, self.plan, self.name, self.spark) from error
        finally:
            if self._elsewhere is not None:
                self._elsewhere.close()
        if waited:
            self.runner.close()

    def busy(self) -> bool:
        """Whether an epoch is being worked on, or Spark asks whether there is anything to read."""
        return self.query is not None and self.query.isActive and bool(self.query.status["isTriggerActive"])

    def phase(self) -> str | None:
        """Return its phase before its first committed epoch; None where Spark does not say, or it is over."""
        message = ""
        with contextlib.suppress(Exception):  # what is wrong with a query, `advance` says
            if self.query is not None and self.query.isActive:
                message = self.query.status["message"]
        if "Processing" in message:
            committed = self.directory.last_epoch(self.name)
            return f"query {self.name} is working on epoch {0 if committed is None else committed + 1}"
        if "offsets" in message or "Initializing" in message:
            return f"query {self.name} is reading its sources"
        return f"query {self.name} waits for records" if "Waiting" in message else None

    def progress(self) -> Any:
        """Return Spark's report of the previous micro-batch, or None before the first."""
        return self.query.lastProgress if self.query is not None else None

    def measured(self) -> tuple[int, int | None, int | None]:
        """Return Spark's measures of the previous micro-batch, if any: rows read, and rows and bytes of state."""
        progress = self.progress()
        if progress is None:
            return 0, None, None
        states = progress["stateOperators"]
        rows, size = sum(s["numRowsTotal"] for s in states), sum(s["memoryUsedBytes"] for s in states)
        return int(progress.numInputRows), rows, size

    def _list_tables(self) -> None:
        try:
            self.tables.refresh()
        except Exception as error:  # of a server that cannot be reached, or of a folder that is gone
            raise self._unanswered(error) from error

    def _is_active(self, query: StreamingQuery) -> bool:
        """Return whether Spark still runs the query; raises where it cannot be asked."""
        try:
            return bool(query.isActive)
        except Exception as error:  # of a server that cannot be reached
            raise self._unanswered(error) from error

    def _unanswered(self, error: Exception) -> UnifiedError:
        """Return the error to raise where Spark has not answered; a Connect server is asked no more."""
        if self.through_connect:
            give_up(self.spark)
        return translated(error, self.plan, self.name, self.spark)

    def _is_early(self) -> bool:
        """Return whether an epoch that is not late starts only in a while."""
        return bool(self._interval) and self._interval - time.time() % self._interval > LEAD

    def _hold_idle(self) -> None:
        """Hold the query where no epoch comes that would hold it: the next one waits."""
        # of a bucket Spark asks all the time whether there is anything to read: that is no epoch
        if self._pause is None or self.query is None or listing.is_busy(self.query):
            return
        if not self._committing.acquire(blocking=False):
            return
        before = self.directory.last_epoch(self.name)
        if not self._is_logged(before) or not self._hold(before, self._committing.release):
            self._committing.release()

    def _hold_ended(self) -> None:
        """As `_hold`, for a query that has nothing left to do."""
        if self._pause is not None:
            self._hold(self.directory.last_epoch(self.name), lambda: None)

    def _hold(self, before: int | None, go_on: Callable[[], None]) -> bool:
        """Hold the query behind an epoch, if a pause is due, until `go_on` is called."""
        if self.last is None and not (self._settled_before or self.over):
            return False  # the sinks may have what is about to run again
        pause, self._pause = self._pause, None
        if pause is not None:
            pause.hold(self.name, before, go_on)
        return pause is not None

    def _check_going_on(self) -> None:
        if self._stopping:
            raise StoppedError("the job is being stopped")

    def _let_spark_commit(self) -> None:
        """Wait until Spark has logged the epoch that the sinks have.

        Otherwise it would run again, after an upgrade by other code.
        """
        deadline = time.monotonic() + GRACE
        while self.query is not None and self.query.isActive and time.monotonic() < deadline:
            if self._is_logged(self.directory.last_epoch(self.name)):
                return
            time.sleep(0.02)

    def _is_logged(self, logged: int | None) -> bool:
        return self.last is None or self.last == logged

    def _advance_to(self, end: End, running: StreamingQuery) -> bool:
        """Drain the query, and return whether that goes on. Raises what made it fail."""
        if self._draining is None or not (self._draining.end is end or self._draining.is_alive()):
            bounded = self.plan.execution.boundedness is Boundedness.BOUNDED
            self._draining = Draining(self, running, end, bounded)
            self._draining.start()
        if self._draining.is_alive():
            return True
        failed = self._draining.error if running.isActive else None  # else the query says itself what made it fail
        if (failed is not None or not running.isActive) and not self.over:
            self.failure = self.failure or failed
            raise self._error()
        return False

    def _epoch(self, run: Callable[[bool], Outcome], epoch: int) -> None:
        """Run an epoch, between what comes before it and what follows from it."""
        begun = time.time()
        with self._committing:
            self._check_going_on()
            if self._last_needed is not None and epoch > self._last_needed:
                raise StoppedError("the input has ended")  # what came later would be late, and count as read
            going_on = Event()
            if self._hold(epoch - 1 if epoch > 0 else None, going_on.set):
                going_on.wait()
                self._check_going_on()
            if self._brake is not None:
                self._brake.wait(self.name, epoch)
                self._check_going_on()
            self._commit(run, epoch)
        if not self._interval or time.time() // self._interval > begun // self._interval:
            listing.look_between_epochs(self.folder)

    def _end_epoch(self, run: Callable[[bool], Outcome] | None, epoch: int) -> None:
        """End an epoch that the previous job began; without `run` Spark has logged it. Nothing else commits yet."""
        try:
            if run is not None:
                self._commit(run, epoch)
                return
            self.last = epoch
            if self._end_sent and self._last_needed is None:
                self.goes_on_at_end()
        finally:
            self._committing.release()

    def _commit(self, run: Callable[[bool], Outcome], epoch: int) -> None:
        """Run an epoch, and do what follows from it."""
        try:
            started = time.monotonic()
            ends = self._end_sent and self._last_needed is None and brings_end(self._logged(epoch))
            self._in_sinks = True
            outcome = run(ends)
            committed = self.committed(outcome, epoch, started)
            self._observe(replace(committed, lacking=files_lacking_columns(self.plan.graph.sources)))
            self.epochs += 1
            self.last, self._in_sinks = epoch, False
            if ends:
                self._last_needed = epoch + self.epochs_after_end
        except StoppedError:
            raise
        except Exception as error:
            self.failure = error
            raise

    def _logged(self, epoch: int) -> UPath:
        return self.folder / "spark" / self.name / "offsets" / str(epoch)

    def _error(self) -> UnifiedError:
        assert self.query is not None
        try:
            self.directory.check_lease(self._token)
        except StateError as deleted:
            return deleted
        except (LeaseLostError, OSError):  # the query says so; of a store that does not answer, that went wrong
            pass
        stopped = UnifiedError(f"{self.plan.name}: query '{self.name}' has stopped")
        unreachable = self._elsewhere.failure if self._elsewhere is not None else None
        cause: Exception = self.failure or unreachable or self.query.exception() or stopped
        return translated(cause, self.plan, self.name, self.spark)
