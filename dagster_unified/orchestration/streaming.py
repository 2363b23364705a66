"""STREAMING under Dagster: a job with one op that owns a pipeline's queries, and a sensor that keeps it alive.

The op has no retry policy, which would catch its interruption and start a cancelled job again; the sensor alone
restarts.
"""

# No `from __future__ import annotations` here: Dagster reads the annotations of an op's function as objects.
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from dagster import (
    AssetKey,
    AssetObservation,
    Definitions,
    JobDefinition,
    MetadataValue,
    OpExecutionContext,
    TimestampMetadataValue,
    job,
    op,
)

from dagster_unified.engine import events
from dagster_unified.engine.events import (
    EpochCommitted,
    Event,
    ExecutorLost,
    InputHeldBack,
    IterationEpochCommitted,
    IterationResumed,
    MasterAway,
    MasterBack,
    PhaseBegun,
    QueriesStopped,
    QueriesTakenOver,
    SavepointTaken,
    StartDelayed,
)
from dagster_unified.engine.interrupts import Interrupts
from dagster_unified.engine.malformed import Diverted, diverting, in_streaming
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.desired import Status, read_desired, read_status, write_status
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.engine.streaming.savepoints.copy import interrupted
from dagster_unified.engine.streaming.savepoints.schedule import INTERVAL
from dagster_unified.errors import ConfigurationError
from dagster_unified.graph.plan import Plan, plan
from dagster_unified.graph.queries import plan_queries
from dagster_unified.graph.topology import Lanes
from dagster_unified.graph.upgrade import deployed_code, deployment_fingerprint
from dagster_unified.operators.metrics import Totals
from dagster_unified.operators.time import wall_clock
from dagster_unified.orchestration.deployments import StreamingDeployment, configuration_of
from dagster_unified.orchestration.external_assets import (
    malformed_observation,
    savepoint_materialization,
    start_observation,
)
from dagster_unified.orchestration.outcomes import as_failure, interruptible
from dagster_unified.orchestration.partitions import as_text
from dagster_unified.orchestration.phases import DRAINING, PHASE, STARTING, STOPPING, phase_after
from dagster_unified.orchestration.resources import OBJECT_STORE, connections, session_of
from dagster_unified.orchestration.stream_face import Committed, StreamFace
from dagster_unified.orchestration.stream_materializations import (
    UPDATED,
    JobAssets,
    StreamMaterializations,
    report_rest,
)
from dagster_unified.orchestration.stream_partitions import counting
from dagster_unified.orchestration.streaming_sensor import LOADED

LOG_EVERY = 5.0
"""Seconds between lines of the run's log."""


_DEPLOYMENTS: WeakKeyDictionary[JobDefinition, StreamingDeployment] = WeakKeyDictionary()
"""The deployment that each streaming job runs."""


def deployments_of(definitions: Definitions) -> list[StreamingDeployment]:
    """Return the streaming deployments of a code location."""
    jobs = [job for job in definitions.jobs or () if isinstance(job, JobDefinition)]
    return [_DEPLOYMENTS[job] for job in jobs if job in _DEPLOYMENTS]


def streaming_job(deployment: StreamingDeployment, assets: JobAssets) -> JobDefinition:
    """Build `<pipeline>_streaming`; raises what the job would for a pipeline that STREAMING cannot run."""
    name = deployment.pipeline.name
    graph = deployment.pipeline.graph()
    plan_queries(plan(graph, configuration_of(deployment)), Lanes())

    @op(
        name=f"{name}_queries",
        required_resource_keys={"spark", "execution", OBJECT_STORE, *graph.resource_keys},
        description=f"Runs {name} in STREAMING until it is stopped, or its input ends.",
    )
    def stream(context: OpExecutionContext) -> None:
        with interruptible(context.instance, context.run_id) as asked, as_failure(context):
            planned = plan(
                graph.connected(connections(graph, context.resources)),
                configuration_of(deployment, context.resources.execution.launched()),
            )
            _run(context, deployment, counting(planned, assets.partitions), assets, asked)

    @job(
        name=f"{name}_streaming",
        executor_def=deployment.executor,
        tags={"dagster/max_retries": "0"},
        description=f"{name} as one long-running job. Its sensor starts and restarts it.",
    )
    def streaming() -> None:
        stream()

    _DEPLOYMENTS[streaming] = deployment
    return streaming


def _run(
    context: OpExecutionContext, deployment: StreamingDeployment, planned: Plan, assets: JobAssets, asked: Interrupts
) -> None:
    directory = CheckpointDirectory(planned.execution.streaming.directory, planned.name)
    if read_desired(directory).state == "suspended":
        if LOADED not in context.run.tags:
            raise ConfigurationError(
                f"{planned.name} is suspended, and would read nothing; let it go on first (dagster-unified resume, or"
                f" {planned.name}_control with the action resume)"
            )
        context.log.info(f"{planned.name} was suspended after its sensor had launched this run")
        return
    context.log.info(STARTING)
    context.instance.add_run_tags(context.run_id, {PHASE: STARTING})
    spark = asked.started(session_of(context.resources.spark))
    deployed = directory.deployed()
    changed = (
        deployed is not None
        and deployed.fingerprint != deployment_fingerprint(deployed_code(planned))
        and not deployed.restored
        and not interrupted(directory)
    )
    fresh = deployment.upgrade_mode == "stateless" and changed
    diverted = [(assets.malformed[n.uid], in_streaming(directory, n)) for n in diverting(planned)]
    watcher = _Watcher(context, deployment, planned, assets, diverted, directory)
    start = Start(
        context.run_id,
        fresh,
        deployment.upgrade_mode in ("savepoint", "shadow"),
        loaded=context.run.tags.get(LOADED, ""),
    )
    watcher.running = StreamingJob(planned, spark, start, watcher.happened)
    try:
        outcome = watcher.running.run(lambda: asked.received or watcher.asked_to_stop(), poll=0.2)
    except BaseException:
        with suppress(Exception):  # what made the job fail is the error to show, and the sensor reports the rest
            watcher.report_rest()
        raise
    watcher.observe()
    watcher.report_rest()
    if outcome == "finished" and planned.execution.savepoint.path is not None:
        context.log_event(savepoint_materialization(assets.savepoint, planned.execution.savepoint.path, context.log))
    if asked.received:
        context.log.info(stopped(directory))
    asked.check()
    context.log.info(f"{planned.name} has {outcome}" + (f": {watcher.reason}" if watcher.reason else ""))


def stopped(directory: CheckpointDirectory) -> str:
    """Say what a job leaves that was asked to stop, perhaps in the middle of an epoch."""
    if not directory.has_epoch():
        return "stopped before the first epoch was committed, and the lease is released; the next run starts over"
    return "stopped, and the lease is released; the next run goes on behind the last epoch that is committed"


class _Watcher:
    """Reports epochs to Dagster, now and then, and checks whether the job is still wanted."""

    running: StreamingJob
    """The job; it is given this watcher before it runs."""

    def __init__(
        self,
        context: OpExecutionContext,
        deployment: StreamingDeployment,
        planned: Plan,
        assets: JobAssets,
        diverted: Sequence[tuple[AssetKey, Diverted]],
        directory: CheckpointDirectory,
    ) -> None:
        self._context, self._deployment, self._assets, self._diverted_of = context, deployment, assets, diverted
        self._plan, self._directory = planned, directory
        self._told_start = False
        self._savepoints: deque[str] = deque()
        """The savepoints that the job has taken by itself, and that are not reported yet."""

        self._diverted: set[str] = set()
        self._unobserved: set[str] = set()
        """The sinks whose query has read or written rows since they were observed."""

        self._face = StreamFace(planned, directory)
        self._trend = Trend({sink: at for sink, key in assets.sinks.items() if (at := self._last_updated(key))})
        self._logged = self._heartbeat = 0.0
        self._observed_at = self._materialized_at = time.monotonic()
        self._materializations: tuple[int, StreamMaterializations] | None = None
        """Those of the lease with this token."""

        self._opening = Lock()
        self._asking = Lock()
        """Held while the run is read or tagged: an instance in memory refuses one thread what another one reads."""

        self._phase, self._signs = STARTING, 0
        self._busy: tuple[int, int] | None = None
        self._lost = ("", 0)
        """The cluster's last loss, and when it was."""

        self.reason = ""

    def _last_updated(self, key: AssetKey) -> int | None:
        """Return when rows were last written, as the last observation of an asset says."""
        seen = self._context.instance.fetch_observations(key, limit=1).records
        observed = seen[0].asset_observation if seen else None
        at = observed.metadata.get(UPDATED) if observed is not None else None
        return round(at.value * 1000) if isinstance(at, TimestampMetadataValue) else None

    def happened(self, event: Event) -> None:
        """Take an event, such as a committed epoch or a savepoint; called from the thread of the event."""
        events.report(event)
        self._enter(phase_after(event, self._phase))
        if isinstance(event, QueriesStopped):
            self._write_heartbeat()  # else the sensor takes the time that a savepoint needs for that of a last epoch
        if isinstance(event, QueriesTakenOver | PhaseBegun):
            self._context.log.info(event.describe())
        if isinstance(event, StartDelayed):
            self._context.log.warning(event.describe())
        if isinstance(event, SavepointTaken):
            log = self._context.log.warning if event.error else self._context.log.info
            log(event.describe())
            if not event.error and event.reason == INTERVAL:  # who asks for one reports it
                self._savepoints.append(event.location)
        if isinstance(event, (IterationResumed, IterationEpochCommitted, InputHeldBack)):
            self._busy = None  # an epoch in which an iteration goes round may take long
            self._write_heartbeat()
            log = self._context.log.warning if isinstance(event, InputHeldBack) else self._context.log.info
            log(event.describe())
        if isinstance(event, (ExecutorLost, MasterAway, MasterBack)):
            self._lost = (event.describe(), wall_clock())
            self._context.log.warning(event.describe())
        if not isinstance(event, EpochCommitted):
            return
        materializations = self._opened()
        assert materializations is not None  # a job commits only what it holds the lease for
        materializations.note(event)
        self._trend.add(event)
        wrote = {sink for sink, written in event.written.items() if written.rows}
        self._unobserved |= (set(event.written) or set(self._assets.sinks)) if event.rows_in else wrote
        self._diverted |= {source for source, rows in event.diverted.items() if rows}
        if time.monotonic() - self._logged >= LOG_EVERY:
            self._logged = time.monotonic()
            self._context.log.info(self._trend.line(event))

    def asked_to_stop(self) -> bool:
        """Return whether the deployment is suspended, or new code waits; also leaves heartbeats."""
        now = time.monotonic()
        if now - self._heartbeat >= 1:
            self._heartbeat = now
            self._write_heartbeat()
            self._report_savepoints()
            self._materialize(now)
            desired = read_desired(self._directory)
            if desired.state == "drained":
                self._enter(DRAINING)
                self.running.drain()
            if desired.state == "suspended":
                self.reason = "suspended"
            elif self.running.token is not None and desired.stop >= self.running.token:
                self.reason = desired.reason
            elif self._abandoned():
                self.reason = "its run has ended in Dagster"
            if self.reason:
                self._enter(STOPPING)
        if now - self._observed_at >= self._deployment.observe_every.total_seconds():
            self.observe()
        return bool(self.reason)

    def _enter(self, phase: str) -> None:
        """Say which phase the job is in, where that is another one."""
        if phase != self._phase:
            self._phase = phase
            with self._asking:
                self._context.instance.add_run_tags(self._context.run_id, {PHASE: phase})
            self._write_heartbeat()

    def _abandoned(self) -> bool:
        """Return whether Dagster has given the run up, as after `kill -9` of the process that started this step."""
        with self._asking:
            run = self._context.instance.get_run_by_id(self._context.run_id)
        return run is not None and run.is_finished

    def observe(self) -> None:
        """Observe the assets of sinks where something has happened and, once, which savepoint the state began with."""
        self._observed_at = time.monotonic()
        self._report_savepoints()
        deployed = self.running.deployed
        start = deployed.start if deployed is not None and self._trend.begun else ""
        if start and not self._told_start and self._assets.stream is not None:
            self._told_start = True
            self._context.log_event(start_observation(self._assets.stream, start))
        face = self._face.metadata(self._trend.epochs, wall_clock()) if self._unobserved else {}
        for sink, key in self._assets.sinks.items():
            if sink in self._unobserved:
                self._unobserved.discard(sink)  # first: what happens from now on is for the next observation
                metadata = {**(self._trend.metadata(sink) or {}), **self._late(sink), "phase": self._phase, **face}
                self._context.log_event(AssetObservation(asset_key=key, metadata=metadata))
        for key, diverted in self._diverted_of:
            if diverted.source in self._diverted:
                self._diverted.discard(diverted.source)
                self._context.log_event(malformed_observation(key, diverted))

    def _late(self, sink: str) -> dict[str, MetadataValue[Any]]:
        """Return the metadata of the records that came after the materialization of their partition."""
        late = self._materializations[1].late(sink) if self._materializations is not None else {}
        return {"late records by partition": MetadataValue.json(late)} if late else {}

    def report_rest(self) -> None:
        """Materialize, once the job has ended, what it has committed since the last time."""
        context = self._context
        report_rest(self._plan, self._directory, self._assets, context.instance, context.run_id, context.log_event)

    def _opened(self) -> StreamMaterializations | None:
        """Return the materializations of this job; None while it has no lease, or has not recorded its start."""
        with self._opening:
            token, deployed = self.running.token, self.running.deployed
            if token is None or deployed is None:
                return None
            if self._materializations is None or self._materializations[0] != token:
                opened = StreamMaterializations(
                    self._plan,
                    self._directory,
                    deployed,
                    self._assets,
                    self._context.instance,
                    self._context.log_event,
                )
                self._materializations = token, opened
            return self._materializations[1]

    def _materialize(self, now: float) -> None:
        """Materialize the sinks' assets where it is time, and what an earlier run has committed at once."""
        materializations = self._opened()
        is_time = now - self._materialized_at >= self._deployment.materialize_every.total_seconds()
        if materializations is None or not materializations.is_pending:
            return
        if is_time or materializations.are_left or materializations.is_partitioned:
            self._materialized_at = now
            self.running.may_write()
            materializations.report()

    def _report_savepoints(self) -> None:
        while self._savepoints:
            self._context.log_event(
                savepoint_materialization(self._assets.savepoint, self._savepoints.popleft(), self._context.log)
            )

    def _write_heartbeat(self) -> None:
        running, directory = self.running, self._directory
        if running.token is None:
            return
        epochs, active = running.activity()
        if not active:
            self._busy = None
        elif self._busy is None or self._busy[0] != epochs:
            self._busy = (epochs, wall_clock())
        last = read_status(directory)
        self._signs = max(self._signs, last.number if last else 0) + 1
        busy = self._busy[1] if self._busy else None
        write_status(
            directory,
            Status(
                self._signs,
                self._context.run_id,
                running.token,
                wall_clock(),
                epochs,
                busy,
                self._trend.watermark,
                *self._lost,
                self._phase,
            ),
        )


# What the epochs of late say


KEPT = 60
"""Epochs that are remembered."""

_BARS = "▁▂▃▄▅▆▇█"


class Trend:
    """Remembers the last epochs."""

    def __init__(self, updated: Mapping[str, int], clock: Callable[[], int] = wall_clock) -> None:
        self._clock = clock
        self._updated = dict(updated)
        """When rows were last written to a sink, at first by earlier runs; milliseconds since the epoch."""

        self._epochs: deque[EpochCommitted] = deque(maxlen=KEPT)
        self._committed: deque[int] = deque(maxlen=KEPT)
        self._totals = Totals()
        self._rows: dict[str, int] = {}
        self._bytes: dict[str, int] = {}

    def add(self, event: EpochCommitted) -> None:
        """One more epoch."""
        self._epochs.append(event)
        self._committed.append(self._clock())
        self._totals.add(event.metrics, self._clock() / 1000, event.seconds)
        for sink, written in event.written.items():
            self._rows[sink] = self._rows.get(sink, 0) + written.rows
            self._bytes[sink] = self._bytes.get(sink, 0) + written.bytes
            if written.rows:
                self._updated[sink] = self._clock()

    @property
    def epochs(self) -> list[Committed]:
        """The last epochs, the oldest first."""
        return list(map(Committed, self._epochs.copy(), self._committed.copy()))

    @property
    def begun(self) -> bool:
        """Whether an epoch is committed."""
        return bool(self._epochs)

    @property
    def watermark(self) -> int | None:
        """The last known watermark."""
        return next((e.watermark for e in reversed(self._epochs) if e.watermark is not None), None)

    def line(self, event: EpochCommitted) -> str:
        """One epoch, as a line of a log."""
        mark = "" if event.watermark is None else f", watermark {as_text(event.watermark)}"
        rows = f"{event.rows_in:,} rows in, {event.written_rows()}"
        return (
            f"epoch {event.epoch} of {event.query}: {rows} in {event.seconds:.2f} s{mark}; durations {self._picture()}"
        )

    def metadata(self, sink: str) -> dict[str, Any] | None:
        """Return the metadata of a sink's observation, or None before the first epoch."""
        both = list(zip(self._epochs, self._committed, strict=True))
        mine = [(e, at) for e, at in both if sink in e.written] or both
        if not mine:
            return None
        last, (first, begun) = mine[-1][0], mine[0]
        rows, seconds = sum(e.rows_in for e, _ in mine), sum(e.seconds for e, _ in mine)
        elapsed = (self._clock() - begun) / 1000 + first.seconds
        metadata: dict[str, Any] = {
            "epoch": last.epoch,
            "query": last.query,
            "batch duration (s)": round(last.seconds, 3),
            "input rows per second": round(rows / elapsed, 1) if elapsed else 0.0,
            "processed rows per second": round(rows / seconds, 1) if seconds else 0.0,
            "rows written": self._rows.get(sink, 0),
            "bytes written": self._bytes.get(sink, 0),
            **({} if last.state_rows is None else {"state rows": last.state_rows}),
            **({} if last.state_bytes is None else {"state bytes": last.state_bytes}),
            "batch durations": MetadataValue.text(self._picture()),
            "late records": 0,
            **{f"backlog of {source}": waiting for source, waiting in last.backlog.items()},
            **self._epochs[-1].lacking,
            **self._totals.shown(self._clock() / 1000),
        }
        if sink in self._updated:
            metadata[UPDATED] = MetadataValue.timestamp(self._updated[sink] / 1000)
        if self.watermark is not None:
            metadata["watermark"] = MetadataValue.text(as_text(self.watermark))
            metadata["watermark lag (s)"] = round((self._clock() - self.watermark) / 1000, 1)
        return metadata

    def _picture(self) -> str:
        longest = max((e.seconds for e in self._epochs), default=0.0) or 1.0
        return "".join(_BARS[min(int(e.seconds / longest * 7.99), 7)] for e in self._epochs)
