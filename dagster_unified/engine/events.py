"""What happens while a pipeline runs, as one stream of events that a terminal, Dagster and tests all listen to.

Core code never prints; it reports to an observer. `describe` says an event as a line of a log.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_unified.operators.time import MIN_TIMESTAMP, to_datetime

if TYPE_CHECKING:
    from dagster_unified.engine.batch.intermediates import Manifest
    from dagster_unified.engine.iterations.epoch_log import Epoch
    from dagster_unified.operators.metrics import Metrics


@dataclass(frozen=True)
class StageStarted:
    """A stage begins. `reason` is set where it is recomputed for a later stage."""

    stage: str
    number: int
    total: int
    reason: str = ""


@dataclass(frozen=True)
class StageFinished:
    """A stage's output is committed."""

    stage: str
    number: int
    total: int
    manifest: Manifest
    reason: str = ""


@dataclass(frozen=True)
class SinkHeld:
    """An earlier attempt or run of the execution gave a sink a stage's rows, so the sink was given none."""

    stage: str
    sink: str
    execution: str
    """The run that began it."""

    def describe(self) -> str:
        return (
            f"stage '{self.stage}': sink '{self.sink}' has the rows that an earlier attempt of the execution"
            f" {self.execution} has committed, and was given none, since it could not replace them; if the code or the"
            " input has changed since, mend the target by hand, or take the rows out and launch a new run"
        )


@dataclass(frozen=True)
class RecordsWait:
    """At the end of a run that leaves state to another one, records wait for a watermark that a source holds back."""

    stage: str
    operator: str
    records: int
    timers: int
    """Pending event-time timers; an open window has one."""

    sources: tuple[str, ...]
    watermark: int
    """Milliseconds since the epoch."""

    def describe(self) -> str:
        counts = [f"{number} {what}" for number, what in ((self.records, "records"), (self.timers, "timers")) if number]
        sources = " and ".join(f"'{name}'" for name in self.sources)
        position = f"at {self.watermark}"
        with contextlib.suppress(OverflowError):
            position = f"at {to_datetime(self.watermark).isoformat()}"
        if self.watermark == MIN_TIMESTAMP:
            position = "before its first record"
        return (
            f"stage '{self.stage}': {' and '.join(counts)} of operator '{self.operator}' wait in its state, because"
            f" source {sources} holds the watermark {position}, and others are further; a later run goes on with them"
            " once that source has later records. If it may be silent for long, give its WatermarkStrategy"
            " with_idleness(...): at the end of a run it then holds nobody back"
        )


@dataclass(frozen=True)
class Written:
    """The rows that a sink was given in an epoch, and the bytes that it has written of them."""

    rows: int
    bytes: int
    version: int | None = None
    """The version of the table that it has committed, where that has versions."""


@dataclass(frozen=True)
class IterationResumed:
    """A stage was tried again, and its iteration goes on after the last committed epoch."""

    stage: str
    iteration: str
    epoch: int

    def describe(self) -> str:
        return f"iteration '{self.iteration}' of stage '{self.stage}' goes on after epoch {self.epoch}"


@dataclass(frozen=True)
class InputHeldBack:
    """An unbounded iteration takes no new records, since too many circulate in it."""

    iteration: str
    feedback: int
    most: int

    def describe(self) -> str:
        return (
            f"iteration '{self.iteration}': {self.feedback:,} records circulate, and new input waits until there are at"
            f" most {self.most:,} (iteration.max-feedback-records)"
        )


@dataclass(frozen=True)
class IterationEpochCommitted:
    """An epoch of an iteration is committed."""

    stage: str
    iteration: str
    epoch: Epoch

    def describe(self) -> str:
        epoch = self.epoch
        text = f"iteration '{self.iteration}', epoch {epoch.number}: {epoch.feedback:,} records fed back"
        criteria = f", {epoch.criteria:,} of the termination criteria" if epoch.criteria else ""
        gauges = "".join(f", {name} {gauge.max:.6g}" for name, gauge in sorted(epoch.gauges.items()))
        ends = f"; it ends: {epoch.reason}" if epoch.reason else ""
        return f"{text}{criteria}{gauges}, in {epoch.seconds:.2f} s{ends}"


@dataclass(frozen=True)
class EpochCommitted:
    """A STREAMING job has committed a micro-batch to its sinks. Times are milliseconds since the epoch."""

    query: str
    epoch: int
    rows_in: int
    seconds: float
    watermark: int | None
    metrics: Metrics
    written: Mapping[str, Written]
    """By sink."""
    state_rows: int | None = None
    state_bytes: int | None = None
    """Of state, after the micro-batch before; None in a job's first one."""

    diverted: Mapping[str, int] = field(default_factory=dict)
    """Malformed rows that were set aside, by source."""

    backlog: Mapping[str, int] = field(default_factory=dict)
    """The records that wait to be read after the micro-batch before, by source, of those that tell it."""

    event_times: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """How many records were read of each unit of event time, by the uid of their assigner, if the job counts them."""

    complete_until: Mapping[str, int] = field(default_factory=dict)
    """The event time up to which each sink has what belongs to it, where records are counted by event time."""

    read: Mapping[str, int] = field(default_factory=dict)
    """The records that were read from each source, by its uid, where they are told apart."""

    lacking: Mapping[str, str] = field(default_factory=dict)
    """The files that the job has read and that lack a column, as metadata names them."""

    @property
    def counters(self) -> Mapping[str, int]:
        """The counters of its functions."""
        return self.metrics.counters

    def written_rows(self) -> str:
        """Return the rows that each sink was given, as a line of a log has them."""
        return ", ".join(f"{written.rows:,} to {sink}" for sink, written in self.written.items()) or "none written"


@dataclass(frozen=True)
class StartDelayed:
    """A STREAMING job lacked a Python process to start its queries, and starts them again after a pause."""

    reason: str
    attempt: int
    total: int
    pause: float
    """In seconds."""

    def describe(self) -> str:
        return f"{self.reason}; starting again in {self.pause:.0f} s (attempt {self.attempt} of {self.total})"


@dataclass(frozen=True)
class JobRestarting:
    """A job has failed, and is started again in its process as its restart strategy says."""

    attempt: int
    seconds: float
    """How long it waits before."""

    error: str

    def describe(self) -> str:
        return (
            f"the job has failed: {self.error}; attempt {self.attempt} to start it again begins in {self.seconds:.1f} s"
        )


@dataclass(frozen=True)
class PhaseBegun:
    """A phase of a STREAMING job before its first committed epoch."""

    phase: str

    def describe(self) -> str:
        return self.phase


@dataclass(frozen=True)
class QueriesStopped:
    """A STREAMING job works on no more epochs, and is about to write a savepoint."""


@dataclass(frozen=True)
class SavepointTaken:
    """A STREAMING job has taken a savepoint, or has tried to: `error` says what went wrong."""

    reason: str
    location: str
    seconds: float
    error: str = ""

    def describe(self) -> str:
        if self.error:
            return f"savepoint ({self.reason}) failed: {self.error}"
        return f"savepoint {self.location} taken in {self.seconds:.1f} s ({self.reason})"


@dataclass(frozen=True)
class QueriesTakenOver:
    """A job goes on with the queries that the previous job left running on a Spark Connect server."""

    queries: tuple[str, ...]
    server: str
    session: str

    def describe(self) -> str:
        return (
            f"goes on with {len(self.queries)} {'query' if len(self.queries) == 1 else 'queries'}"
            f" ({', '.join(self.queries)}) that the job before has left running on {self.server}, in session"
            f" {self.session}"
        )


@dataclass(frozen=True)
class ExecutorLost:
    """An executor of the cluster is gone that nobody asked to go. `reason` is Spark's; `remaining` counts the others.

    `executor` is its number in the application; empty where Spark does not tell it.
    """

    executor: str
    host: str
    reason: str
    remaining: int

    def describe(self) -> str:
        name = f"executor {self.executor}" if self.executor else "an executor"
        why = f" ({self.reason})" if self.reason else ""
        if not self.remaining:
            consequence = "none is left, and tasks wait until the cluster gives another"
        elif self.remaining == 1:
            consequence = "Spark runs its tasks again on the one that is left"
        else:
            consequence = f"Spark runs its tasks again on the {self.remaining} that are left"
        return f"{name} on host {self.host} was lost{why}; {consequence}"


@dataclass(frozen=True)
class MasterAway:
    """The master of a standalone cluster cannot be reached any more."""

    master: str
    reason: str

    def describe(self) -> str:
        return (
            f"the Spark master {self.master} cannot be reached ({self.reason}); the executors go on, and there are no"
            " others until it is back"
        )


@dataclass(frozen=True)
class MasterBack:
    """The master of a standalone cluster can be reached again."""

    master: str

    def describe(self) -> str:
        return f"the Spark master {self.master} can be reached again"


Event = (
    StageStarted
    | StageFinished
    | SinkHeld
    | RecordsWait
    | IterationResumed
    | IterationEpochCommitted
    | InputHeldBack
    | EpochCommitted
    | StartDelayed
    | JobRestarting
    | PhaseBegun
    | QueriesStopped
    | QueriesTakenOver
    | SavepointTaken
    | ExecutorLost
    | MasterAway
    | MasterBack
)
Observer = Callable[[Event], None]


def ignore_events(event: Event) -> None:
    """Observe nothing."""


_listeners: list[Observer] = []


def report(event: Event) -> None:
    """Pass an event to every listener in this process, such as the terminal of `dagster-unified run`."""
    for listener in _listeners:
        listener(event)


@contextlib.contextmanager
def listening(observer: Observer) -> Iterator[None]:
    """Let `observer` hear this process's events meanwhile."""
    _listeners.append(observer)
    try:
        yield
    finally:
        _listeners.remove(observer)
