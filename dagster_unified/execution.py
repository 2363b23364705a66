"""Runs a pipeline in this process, without Dagster: from a notebook, a script or a test.

Has the job, the handle on it, and the progress that it shows. Knows the API and the engine. Nothing schedules a job
here and nothing starts it again.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self
from uuid import uuid4

import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from dagster_unified import settings
from dagster_unified.connectors.files.sink import FileSink
from dagster_unified.engine import session
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.events import (
    EpochCommitted,
    Event,
    QueriesStopped,
    RecordsWait,
    StageFinished,
    StageStarted,
)
from dagster_unified.engine.interrupts import JobTag, meanwhile
from dagster_unified.engine.restarts import Attempts
from dagster_unified.engine.session import check_java, reach_master
from dagster_unified.errors import CancelledError, UnifiedError
from dagster_unified.graph.connectors import Sink
from dagster_unified.graph.nodes import Graph
from dagster_unified.graph.options import Configuration, Layer
from dagster_unified.graph.plan import Plan, plan
from dagster_unified.operators.functions.type_variables import T
from dagster_unified.operators.layout import declared
from dagster_unified.operators.metrics import GaugeRange, Histogram, Metrics, Totals
from dagster_unified.records import RecordType
from dagster_unified.storage.object_store import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def stages(finished: Sequence[StageFinished]) -> Table:
    """Return a table with the result of each stage."""
    table = Table("stage", "rows", "bytes", "seconds", "notes")
    for column in table.columns[1:4]:
        column.justify = "right"
    for event in finished:
        m = event.manifest
        notes = [f"{n:,} {name}" for name, n in m.counters.items()] + (["recomputed"] if event.reason else [])
        table.add_row(event.stage, f"{m.rows:,}", f"{m.bytes:,}", f"{m.seconds:.1f}", ", ".join(notes))
    return table


class ShownProgress:
    """Shows what is running: a live line on a terminal, plain lines otherwise."""

    def __init__(self, planned: Plan, console: Console) -> None:
        self._planned, self._console = planned, console
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._live = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._task: Any = None

    def __enter__(self) -> ShownProgress:
        streaming = self._planned.execution.mode == "STREAMING"
        work = "until its input ends, or Ctrl-C" if streaming else f"{len(self._planned.regions)} stages"
        start = f"{self._planned.name}: {self._planned.execution.mode}, {work}; starting Spark"
        if self._live is None:
            self._console.print(start, highlight=False)
        else:
            self._live.start()
            self._task = self._live.add_task(start)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, event: Event) -> None:
        """Show an event."""
        if isinstance(event, EpochCommitted):
            text = (
                f"epoch {event.epoch} of {event.query}: {event.rows_in:,} rows read, {event.written_rows()}, committed"
                f" in {event.seconds:.1f} s"
            )
        elif isinstance(event, QueriesStopped):
            return
        elif not isinstance(event, (StageStarted, StageFinished)):
            text = event.describe()
        elif isinstance(event, StageFinished):
            place = f"stage {event.number} of {event.total}: {event.stage}"
            text = f"{place}: {event.manifest.rows:,} rows in {event.manifest.seconds:.1f} s"
        else:
            place = f"stage {event.number} of {event.total}: {event.stage}"
            text = place + (f" (recomputing: {event.reason})" if event.reason else "")
        if self._live is None:
            self._console.print(text, highlight=False)
        elif isinstance(event, StageFinished):
            self._live.console.print(f"[green]✓[/] {text}", highlight=False)
        elif isinstance(event, RecordsWait):
            self._live.console.print(text, highlight=False, markup=False)
        else:
            self._live.update(self._task, description=text)


JobStatus = Literal["RUNNING", "FINISHED", "FAILED", "CANCELED"]

POLL = 0.1
"""Seconds between two attempts to cancel what Spark runs."""


_INTERRUPTED = 130
"""The exit code of a program that Ctrl-C has ended, as shells have it."""

_log = logging.getLogger(__name__)

_running: set[JobHandle] = set()
_interrupted = threading.Event()

_unseen: list[JobHandle] = []
"""Jobs that have failed, while nobody has asked yet how they ended."""


@dataclass(frozen=True)
class JobMetrics:
    """The totals that a job has committed so far. `watermark` is in milliseconds since the epoch."""

    rows: Mapping[str, int] = field(default_factory=dict)
    """In BATCH the rows that each stage has emitted; in STREAMING those that each sink was given."""

    rows_in: int = 0
    """In STREAMING the rows that were read."""

    epochs: int = 0
    """In STREAMING the micro-batches that were committed."""

    watermark: int | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    """Such as `late records` of the library's, and `enrich.misses` of the operator `enrich`."""

    gauges: Mapping[str, GaugeRange] = field(default_factory=dict)
    """The smallest and the largest value that parallel instances gave last."""

    meters: Mapping[str, float] = field(default_factory=dict)
    """Events per second: in BATCH over the run of the stage, in STREAMING over the meter's time span."""

    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    """Distributions of values, with `count`, `min`, `max`, `mean` and `quantile(0.95)`."""


@dataclass(frozen=True)
class JobResult:
    """How a job has ended (PyFlink: `JobExecutionResult`)."""

    job_id: str
    mode: str
    runtime: timedelta
    metrics: JobMetrics


@dataclass(frozen=True)
class Environment:
    """Where a job runs: in a session that runs already, or in one that is started on `master`."""

    spark: SparkSession | None
    master: str
    storage: str | None = None
    """Where intermediates are kept; without it they go with the job."""

    resources: Mapping[str, object] = field(default_factory=dict)
    """What sources and sinks connect by that name a resource."""

    def check(self) -> None:
        """Raise what would keep a session from starting."""
        if self.spark is None:
            reach_master(self.master)
            check_java()

    def session(self) -> SparkSession:
        """Return the session, started if need be."""
        return self.spark or session.start(self.master)

    def has_ended(self) -> bool:
        """Return whether the given session's JVM has ended, so that nothing can run in it any more."""
        return self.spark is not None and not is_connect(self.spark) and session.has_died()


class JobHandle:
    """A job that runs in a thread of its own (PyFlink: `JobClient`)."""

    def __init__(
        self,
        plan: Plan,
        options: Configuration,
        environment: Environment,
        shown: ShownProgress | None,
        daemon: bool = False,
    ) -> None:
        self.job_id = str(uuid4())
        self.plan = plan
        self._attempts = Attempts(options, plan.execution.mode, self.job_id)
        self.daemon = daemon
        """Whether it is cancelled where the program ends."""

        self._environment, self._shown = environment, shown
        self._status: JobStatus = "RUNNING"
        self._error: BaseException | None = None
        self._cancelled = threading.Event()
        self._runtime = timedelta()
        self._metrics = JobMetrics()
        self._totals = Totals()
        self._thread = Thread(target=self._run, name=f"{plan.name} {self.job_id[:8]}")
        _running.add(self)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<{self.plan.name}: {self.plan.execution.mode} job {self.job_id}, {self._status}>"

    @property
    def status(self) -> JobStatus:
        """The state of the job: whether it runs, or how it has ended."""
        if self._status == "FAILED":
            self._seen()
        return self._status

    def metrics(self) -> JobMetrics:
        """Return the totals that the job has committed so far."""
        return self._metrics

    def cancel(self) -> None:
        """Ask the job to end, and return.

        In BATCH nothing is committed after it; in STREAMING an epoch that is being committed is finished.
        """
        self._cancelled.set()

    def await_termination(self, timeout: timedelta | None = None) -> bool:
        """Wait until the job has ended, or for so long; return whether it has. Ctrl-C meanwhile cancels the job."""
        try:
            self._thread.join(None if timeout is None else timeout.total_seconds())
        except KeyboardInterrupt:
            self.cancel()
            raise
        return not self._thread.is_alive()

    def result(self, timeout: timedelta | None = None) -> JobResult:
        """Wait for the end, and return what the job did.

        Raises what made it fail, `CancelledError` where it was cancelled, and `TimeoutError`.
        """
        if not self.await_termination(timeout):
            raise TimeoutError(f"{self.plan.name} still runs after {timeout}")
        if self._error is not None:
            self._seen()
            raise self._error
        if self._status == "CANCELED":
            raise CancelledError(f"{self.plan.name} was cancelled; what it had not committed is not")
        return JobResult(self.job_id, self.plan.execution.mode, self._runtime, self.metrics())

    def _run(self) -> None:
        begun = time.monotonic()
        ended: JobStatus = "FAILED"
        try:
            with self._shown or nullcontext(), tempfile.TemporaryDirectory(prefix="dagster-unified-") as folder:
                store = IntermediateStore(self._environment.storage or folder)
                outcome = self._attempt(store, resumes=False)
                while outcome is None:
                    outcome = self._attempt(store, resumes=True)
                ended = outcome
        except UnifiedError as error:
            ended, self._error = ("CANCELED", None) if self._cancelled.is_set() else ("FAILED", error)
        except BaseException as error:  # this thread ends with it, and `result` raises it
            self._error = error
        finally:
            self._runtime = timedelta(seconds=time.monotonic() - begun)
            if self._error is not None:
                _unseen.append(self)
            self._status = ended
            _running.discard(self)

    def _attempt(self, store: IntermediateStore, resumes: bool) -> JobStatus | None:
        """Run the job; None where it failed, and its restart strategy starts it again after a wait that is over."""
        begun = datetime.now(timezone.utc)
        try:
            spark = self._environment.session()
            return (
                self._stream(spark) if self.plan.execution.mode == "STREAMING" else self._stages(spark, store, resumes)
            )
        except UnifiedError as error:
            if not error.retryable or self._cancelled.is_set() or self._environment.has_ended():
                raise
            decision = self._attempts.failed(begun, str(error))
            if isinstance(decision, str):
                if decision:
                    error.add_note(f"It is not started again: {decision}.")
                raise
        _log.warning("%s: %s", self.plan.name, decision.describe())
        self._tell(decision)
        return "CANCELED" if self._cancelled.wait(decision.seconds) else None

    def _seen(self) -> None:
        with suppress(ValueError):
            _unseen.remove(self)

    def _tell_failure(self) -> None:
        if isinstance(self._error, UnifiedError):
            notes = "".join(f". {note}" for note in getattr(self._error, "__notes__", ()))
            sys.stderr.write(f"the job has failed: {self._error}{notes}\n")
        else:
            traceback.print_exception(self._error)

    def _stream(self, spark: SparkSession) -> JobStatus:
        from dagster_unified.engine.streaming.job import Start, StreamingJob  # BATCH needs nothing of it

        ended = StreamingJob(self.plan, spark, Start(self.job_id), self._tell).run(self._cancelled.is_set)
        return "FINISHED" if ended == "finished" else "CANCELED"

    def _stages(self, spark: SparkSession, store: IntermediateStore, resumes: bool) -> JobStatus:
        tag = JobTag(spark, self.job_id)
        tag.add()

        def cancel(done: threading.Event) -> None:
            while not done.wait(POLL):
                if self._cancelled.is_set():
                    tag.cancel()

        with meanwhile(cancel, "cancelling"):
            run = Run(self.plan, spark, store, self.job_id, self.job_id, observe=self._tell, check=self._check)
            run_all(run, resumes)
        return "FINISHED"

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise CancelledError(f"{self.plan.name} was cancelled; what it had not committed is not")

    def _tell(self, event: Event) -> None:
        before = self._metrics
        if isinstance(event, StageFinished):
            manifest = event.manifest
            self._totals.add(Metrics(manifest.counters, {}, manifest.gauges, {}, manifest.histograms), 0, 0)
            self._metrics = replace(
                before,
                rows=_sum(before.rows, {event.stage: manifest.rows}),
                counters=dict(self._totals.metrics.counters),
                gauges=dict(self._totals.metrics.gauges),
                meters={**before.meters, **manifest.rates()},
                histograms=dict(self._totals.metrics.histograms),
            )
        elif isinstance(event, EpochCommitted):
            now = time.monotonic()
            self._totals.add(event.metrics, now, event.seconds)
            self._metrics = JobMetrics(
                rows=_sum(before.rows, {sink: written.rows for sink, written in event.written.items()}),
                rows_in=before.rows_in + event.rows_in,
                epochs=before.epochs + 1,
                watermark=event.watermark,
                counters=dict(self._totals.metrics.counters),
                gauges=dict(self._totals.metrics.gauges),
                meters=self._totals.rates(now),
                histograms=dict(self._totals.metrics.histograms),
            )
        if self._shown is not None:
            self._shown.show(event)


def _await_running() -> None:
    """Wait for jobs at the end of a program. Ctrl-C meanwhile cancels them, and the program ends as interrupted.

    Python waits for threads of its own accord, but by then starts none in a pool any more, and jobs do.
    """
    try:
        for handle in list(_running):
            if handle.daemon:
                handle.cancel()
            handle.await_termination()
    except KeyboardInterrupt:
        for handle in list(_running):
            handle.cancel()
        for handle in list(_running):
            handle.await_termination()
        _interrupted.set()


# Called before the pools of concurrent.futures close, since what is registered last is called first; atexit's own
# functions come after that.
threading._register_atexit(_await_running)  # type: ignore[attr-defined]


@atexit.register
def _end_as_the_jobs_did() -> None:
    """End a program that never looked at a failed job as failed, and say why.

    A script may end with `pipeline.execute()`, and whoever runs it should not take it for done.
    """
    for handle in _unseen:
        handle._tell_failure()
    if _unseen or _interrupted.is_set():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_INTERRUPTED if _interrupted.is_set() else 1)


def _sum(before: Mapping[str, int], more: Mapping[str, int]) -> Mapping[str, int]:
    return {name: before.get(name, 0) + more.get(name, 0) for name in (*before, *more)}


def execute(
    graph: Graph,
    options: Mapping[str, Any] | None,
    environment: Environment,
    progress: bool | None = None,
    daemon: bool = False,
) -> JobHandle:
    """Start a job in a thread of this process, as `Pipeline.execute` says."""
    configuration = Configuration([Layer("launch", options or {}), *settings.shared_layers()])
    planned = plan(graph, configuration).connected(environment.resources)
    console = Console(stderr=True)
    if progress is None:
        progress = console.is_terminal or console.is_jupyter
    environment.check()
    shown = ShownProgress(planned, console) if progress else None
    return JobHandle(planned, configuration, environment, shown, daemon)


_CHECKPOINTS = "execution.checkpointing.dir"


class CollectedRecords(Generic[T]):
    """An iterator over the records that a job emits (PyFlink: `CloseableIterator`). Closing it cancels the job."""

    def __init__(self, job: JobHandle, records: RecordType, folder: TemporaryDirectory[str]) -> None:
        self.job = job
        self._records, self._folder = records, folder
        self._iterator = self._all()

    def __iter__(self) -> Iterator[T]:
        return self._iterator

    def __next__(self) -> T:
        return next(self._iterator)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the job where it still runs, and forget what has not been read."""
        self.job.cancel()
        self.job.await_termination()
        self._iterator.close()
        self._folder.cleanup()

    def _all(self) -> Generator[T, None, None]:
        ended = False
        while not ended:
            ended = self.job.await_termination(timedelta(seconds=POLL))
            for file in self._arrived():
                for batch in pq.ParquetFile(file).iter_batches():
                    yield from self._records.from_batch(declared(batch.columns, self._records.schema))
                file.unlink()  # a stream that never ends would fill the disk
        try:
            self.job.result()
        except CancelledError:
            return
        self._folder.cleanup()

    def _arrived(self) -> list[Path]:
        """Return the committed files that have not been read, in the order of their epochs."""
        return sorted(Path(self._folder.name, "records").glob("*.parquet"))


def collect(
    graph_with: Callable[[Sink[Any]], Graph],
    records: RecordType,
    options: Mapping[str, Any] | None,
    environment: Environment,
) -> CollectedRecords[Any]:
    """Run a pipeline with a sink more, which holds the records of a stream until they are read."""
    folder = TemporaryDirectory(prefix="dagster-unified-")
    try:
        sink = FileSink(f"{folder.name}/records", name="collected")
        own_checkpoints = {_CHECKPOINTS: f"{folder.name}/checkpoints", **(options or {})}
        job = execute(graph_with(sink), own_checkpoints, environment, daemon=True)
    except BaseException:
        folder.cleanup()
        raise
    return CollectedRecords(job, records, folder)
