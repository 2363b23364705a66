"""STREAMING under Dagster: a job with one op that owns a pipeline's queries, and a sensor that keeps it alive.

The op has no retry policy, which would catch its interruption and start a cancelled job again; the sensor alone
restarts.
"""

# No `from __future__ import annotations` here: Dagster reads the annotations of an op's function as objects.
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4
from weakref import WeakKeyDictionary

from dagster import (
    AssetDep,
    AssetKey,
    AssetObservation,
    AssetSpec,
    DagsterRun,
    DagsterRunStatus,
    DefaultSensorStatus,
    Definitions,
    Failure,
    JobDefinition,
    OpExecutionContext,
    RunRecord,
    RunRequest,
    RunsFilter,
    SensorDefinition,
    SensorEvaluationContext,
    SkipReason,
    TimestampMetadataValue,
    job,
    op,
    sensor,
)

from dagster_unified.engine.events import (
    EpochCommitted,
    Event,
    ExecutorLost,
    InputHeldBack,
    IterationResumed,
    MasterAway,
    MasterBack,
    PhaseBegun,
    QueriesStopped,
    QueriesTakenOver,
    RoundCommitted,
    SavepointTaken,
    StartDelayed,
)
from dagster_unified.engine.failures import naming_store
from dagster_unified.engine.interrupts import Interrupts
from dagster_unified.engine.malformed import Diverted, diverting, in_streaming
from dagster_unified.engine.restarts import most_failures
from dagster_unified.engine.streaming.checkpoint import PATIENCE, CheckpointDirectory
from dagster_unified.engine.streaming.desired import Status, ask, read_desired, read_status, write_status
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.engine.streaming.savepoint import interrupted
from dagster_unified.engine.streaming.saving import INTERVAL
from dagster_unified.engine.streaming.topology import Lanes, laid_out
from dagster_unified.errors import ConfigurationError, UnifiedError
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.graph.nodes import ReadingNode, SinkNode
from dagster_unified.graph.plan import Plan, plan
from dagster_unified.graph.upgrade import deployed_code, deployment_fingerprint
from dagster_unified.operators.time import wall_clock
from dagster_unified.orchestration import progress
from dagster_unified.orchestration._dagster_compat import REPOSITORY_LABEL_TAG, CoercibleToAssetDep
from dagster_unified.orchestration.deployment import (
    Decision,
    Seen,
    SeenRun,
    StreamingDeployment,
    configuration_of,
    directory_of,
    next_step,
)
from dagster_unified.orchestration.history import error_of, log_of, why_it_failed
from dagster_unified.orchestration.malformed import observation
from dagster_unified.orchestration.metadata import columns_metadata
from dagster_unified.orchestration.moments import now, utc
from dagster_unified.orchestration.outcomes import as_failure, interruptible
from dagster_unified.orchestration.partitions import upstream_deps
from dagster_unified.orchestration.resources import session_of
from dagster_unified.orchestration.savepoints import left, started
from dagster_unified.orchestration.targets import check_location, targets_metadata
from dagster_unified.orchestration.translator import StageTranslator
from dagster_unified.orchestration.trend import UPDATED, Trend

if TYPE_CHECKING:
    from upath import UPath

LOG_EVERY = 5.0
"""Seconds between lines of the run's log."""

LOADED = "dagster-unified/loaded"
"""The tag that says which loading of the code location asked for a run."""

CODE = "dagster-unified/code"
"""The tag with the fingerprint of the code with which the sensor launched a run."""

_LOOK_BACK = 50
"""How many runs a tick looks at, and how many more at a time where all of them have failed."""


_DEPLOYMENTS: WeakKeyDictionary[JobDefinition, StreamingDeployment] = WeakKeyDictionary()
"""The deployment that each streaming job runs."""


def deployments_of(definitions: Definitions) -> list[StreamingDeployment]:
    """The streaming deployments of a code location."""
    jobs = [one for one in definitions.jobs or () if isinstance(one, JobDefinition)]
    return [_DEPLOYMENTS[one] for one in jobs if one in _DEPLOYMENTS]


@dataclass(frozen=True)
class JobAssets:
    """The assets of a job: those of its sinks by name, of malformed rows by their source's uid, of its savepoints.

    `stream` stands for the job itself, where it starts from a savepoint and its sinks are those of BATCH stages.
    """

    sinks: dict[str, AssetKey]
    malformed: dict[str, AssetKey]
    savepoint: AssetKey
    stream: AssetKey | None = None


def streaming_job(deployment: StreamingDeployment, assets: JobAssets) -> JobDefinition:
    """Build `<pipeline>_streaming`; raises what the job would for a pipeline that STREAMING cannot run."""
    name = deployment.pipeline.name
    laid_out(plan(deployment.pipeline.graph(), configuration_of(deployment)), Lanes())

    @op(
        name=f"{name}_queries",
        required_resource_keys={"spark", "execution"},
        description=f"Runs {name} in STREAMING until it is stopped, or its input ends.",
    )
    def stream(context: OpExecutionContext) -> None:
        with interruptible(context.instance, context.run_id) as asked, as_failure(context):
            planned = plan(
                deployment.pipeline.graph(), configuration_of(deployment, context.resources.execution.launched())
            )
            _run(context, deployment, planned, assets, asked)

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
    context.log.info("starting Spark")
    spark = asked.started(session_of(context.resources.spark))
    held = directory.deployed()
    changed = (
        held is not None
        and held.fingerprint != deployment_fingerprint(deployed_code(planned))
        and not held.restored
        and not interrupted(directory)
    )
    fresh = deployment.upgrade_mode == "stateless" and changed
    kept = [(assets.malformed[n.uid], in_streaming(directory, n)) for n in diverting(planned)]
    watcher = _Watcher(context, deployment, assets, kept, directory)
    start = Start(
        context.run_id, fresh, deployment.upgrade_mode == "savepoint", loaded=context.run.tags.get(LOADED, "")
    )
    watcher.running = StreamingJob(planned, spark, start, watcher.happened)
    outcome = watcher.running.run(lambda: asked.received or watcher.asked_to_stop(), poll=0.2)
    watcher.observe()
    if outcome == "finished" and planned.execution.savepoint.path is not None:
        context.log_event(left(assets.savepoint, planned.execution.savepoint.path, context.log))
    if asked.received:
        context.log.info("stopped: the last epoch is committed, and the lease is released")
    asked.check()
    context.log.info(f"{planned.name} has {outcome}" + (f": {watcher.reason}" if watcher.reason else ""))


class _Watcher:
    """Reports epochs to Dagster, now and then, and checks whether the job is still wanted."""

    running: StreamingJob
    """The job; it is given this watcher before it runs."""

    def __init__(
        self,
        context: OpExecutionContext,
        deployment: StreamingDeployment,
        assets: JobAssets,
        kept: Sequence[tuple[AssetKey, Diverted]],
        directory: CheckpointDirectory,
    ) -> None:
        self._context, self._deployment, self._assets, self._kept = context, deployment, assets, kept
        self._directory = directory
        self._told_start = False
        self._left: deque[str] = deque()
        """The savepoints that the job has taken by itself, and that are not reported yet."""

        self._diverted: set[str] = set()
        self._trend = Trend({sink: at for sink, key in assets.sinks.items() if (at := self._last_updated(key))})
        self._logged = self._told = self._looked = 0.0
        self._observed_at = time.monotonic()
        self._signs = 0
        self._busy: tuple[int, int] | None = None
        self._lost = ("", 0)
        """What was lost last of the cluster, and when."""

        self.reason = ""

    def _last_updated(self, key: AssetKey) -> int | None:
        """When rows were last written, as the last observation of an asset says."""
        seen = self._context.instance.fetch_observations(key, limit=1).records
        observed = seen[0].asset_observation if seen else None
        at = observed.metadata.get(UPDATED) if observed is not None else None
        return round(at.value * 1000) if isinstance(at, TimestampMetadataValue) else None

    def happened(self, event: Event) -> None:
        """An epoch is committed, a savepoint taken, or the queries have stopped; called from the thread that did it."""
        progress.report(event)
        if isinstance(event, QueriesStopped):
            self._sign()  # else the sensor takes the time that a savepoint needs for that of a last epoch
        if isinstance(event, QueriesTakenOver | PhaseBegun):
            self._context.log.info(event.describe())
        if isinstance(event, StartDelayed):
            self._context.log.warning(event.describe())
        if isinstance(event, SavepointTaken):
            log = self._context.log.warning if event.error else self._context.log.info
            log(event.describe())
            if not event.error and event.reason == INTERVAL:  # who asks for one reports it
                self._left.append(event.location)
        if isinstance(event, (IterationResumed, RoundCommitted, InputHeldBack)):
            self._busy = None  # an epoch in which an iteration goes round may take long
            self._sign()
            log = self._context.log.warning if isinstance(event, InputHeldBack) else self._context.log.info
            log(event.describe())
        if isinstance(event, (ExecutorLost, MasterAway, MasterBack)):
            self._lost = (event.describe(), wall_clock())
            self._context.log.warning(event.describe())
        if not isinstance(event, EpochCommitted):
            return
        self._trend.add(event)
        self._diverted |= {source for source, rows in event.diverted.items() if rows}
        if time.monotonic() - self._logged >= LOG_EVERY:
            self._logged = time.monotonic()
            self._context.log.info(self._trend.line(event))

    def asked_to_stop(self) -> bool:
        """Whether the deployment is suspended, or new code waits; also leaves signs of life."""
        now = time.monotonic()
        if now - self._told >= 1:
            self._told = now
            self._sign()
            self._report_savepoints()
            desired = read_desired(self._directory)
            if desired.state == "drained":
                self.running.drain()
            if desired.state == "suspended":
                self.reason = "suspended"
            elif self.running.token is not None and desired.stop >= self.running.token:
                self.reason = desired.reason
            elif self._abandoned():
                self.reason = "its run has ended in Dagster"
        if now - self._observed_at >= self._deployment.observe_every.total_seconds():
            self.observe()
        return bool(self.reason)

    def _abandoned(self) -> bool:
        """Whether Dagster has given the run up, as after `kill -9` of the process that this step was started from."""
        run = self._context.instance.get_run_by_id(self._context.run_id)
        return run is not None and run.is_finished

    def observe(self) -> None:
        """An observation of each sink's asset and, once, of the job's own: which savepoint its state began with."""
        self._observed_at = time.monotonic()
        self._report_savepoints()
        deployed = self.running.deployed
        start = deployed.start if deployed is not None and self._trend.begun else ""
        if start and not self._told_start and self._assets.stream is not None:
            self._told_start = True
            self._context.log_event(started(self._assets.stream, start))
        for sink, key in self._assets.sinks.items():
            metadata = self._trend.metadata(sink)
            if metadata is not None:
                self._context.log_event(AssetObservation(asset_key=key, metadata=metadata))
        for key, diverted in self._kept:
            if diverted.source in self._diverted:
                self._diverted.discard(diverted.source)
                self._context.log_event(observation(key, diverted))

    def _report_savepoints(self) -> None:
        while self._left:
            self._context.log_event(left(self._assets.savepoint, self._left.popleft(), self._context.log))

    def _sign(self) -> None:
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
            ),
        )


# The sensor


def streaming_sensor(deployment: StreamingDeployment, streaming: JobDefinition) -> SensorDefinition:
    """`<pipeline>_streaming_sensor`: a short look at what is there, and at most one thing done."""
    name = deployment.pipeline.name
    loaded = uuid4().hex[:12]

    @sensor(
        name=f"{name}_streaming_sensor",
        job_name=streaming.name,
        minimum_interval_seconds=int(deployment.tick_every.total_seconds()),
        default_status=DefaultSensorStatus.STOPPED,
        description=(
            f"Keeps {name} running in STREAMING: starts it, restarts it after failures, replaces it when its code"
            " changes."
        ),
    )
    def keep_alive(context: SensorEvaluationContext) -> RunRequest | SkipReason:
        options = configuration_of(deployment)
        try:
            if context.repository_def is not None:
                check_location(context.repository_def.asset_graph)
            with naming_store(name, directory_of(deployment).path, "the sensor looks again"):
                seen = _see(context, deployment, streaming.name, loaded)
                decision = next_step(deployment, options, seen)
                if not decision.failed:
                    context.log.info(decision.message)
                    _carry_out(context, deployment, decision)
        except UnifiedError as error:
            return SkipReason(str(error))
        if decision.failed:
            raise Failure(decision.message)
        if decision.launch is None:
            return SkipReason(decision.message)
        orphan = _orphan(context) if seen.deployed is None else None
        if orphan is not None:
            return SkipReason(
                f"{name} is new here, and run {orphan.run_id[:8]} of {orphan.job_name} still runs, which this code"
                f" location has no more: if {name} is that pipeline under another name, it would read all input once"
                " more beside it. Terminate that run, or give the pipeline its name back"
            )
        tags = {"dagster-unified/reason": decision.message[:200], LOADED: loaded, CODE: seen.fingerprint}
        return RunRequest(run_key=decision.launch, tags=tags)

    return keep_alive


def _carry_out(context: SensorEvaluationContext, deployment: StreamingDeployment, decision: Decision) -> None:
    instance = context.instance
    if decision.stop is not None:
        ask(directory_of(deployment), stop=decision.stop, reason=decision.message)
    for run_id in (decision.mark_failed, decision.replace):
        run = instance.get_run_by_id(run_id) if run_id is not None else None
        if run is None:
            continue
        if decision.replace is not None:
            directory = directory_of(deployment)
            lease = directory.holder()
            ask(directory, stop=lease.token if lease else 0, reason="no progress")
            instance.run_launcher.terminate(run.run_id)
        instance.report_run_failed(run, decision.message)


def _see(context: SensorEvaluationContext, deployment: StreamingDeployment, job_name: str, loaded: str) -> Seen:
    directory = directory_of(deployment)
    records = _records(context, job_name, most_failures(configuration_of(deployment)))
    runs = [
        SeenRun(
            r.dagster_run.run_id,
            r.dagster_run.status.value,
            utc(r.start_time or r.create_timestamp.timestamp()),
            utc(r.end_time) if r.end_time else None,
            (
                why_it_failed(context.instance, r.dagster_run.run_id)
                if number == 0 and r.dagster_run.status is DagsterRunStatus.FAILURE
                else ""
            ),
            (
                error_of(context.instance, r.dagster_run.run_id)
                if number == 0 and r.dagster_run.status is DagsterRunStatus.FAILURE
                else ""
            ),
            r.dagster_run.tags.get(CODE, ""),
            (
                log_of(context.instance, r.dagster_run.run_id)
                if number == 0 and r.dagster_run.status is DagsterRunStatus.FAILURE
                else ""
            ),
        )
        for number, r in enumerate(records)
    ]
    planned = plan(deployment.pipeline.graph(), configuration_of(deployment))
    code = deployed_code(planned)
    return Seen(
        runs=runs,
        deployed=directory.deployed(),
        lease=directory.holder(),
        desired=read_desired(directory),
        status=read_status(directory),
        fingerprint=deployment_fingerprint(code),
        now=now(),
        bounded=planned.execution.boundedness is Boundedness.BOUNDED,
        may_start=_may_start(deployment, planned, context, runs),
        patience=PATIENCE,
        code=code,
        loaded=loaded,
    )


def _may_start(
    deployment: StreamingDeployment, planned: Plan, context: SensorEvaluationContext, runs: Sequence[SeenRun]
) -> bool:
    if callable(deployment.start_when):
        return bool(deployment.start_when(context))
    if deployment.start_when == "always":
        return True
    since = max((r.ended or r.created for r in runs), default=None)
    watched = [
        n.source
        for n in planned.graph.sources
        if n.source.boundedness is Boundedness.UNBOUNDED and hasattr(n.source, "files")
    ]
    return any(since is None or _arrived(f) > since.timestamp() for source in watched for f in source.files())


def _arrived(file: "UPath") -> float:
    """When a file came to be where it is: one that was moved there keeps the time when it was written."""
    found = file.stat()
    return max(float(found.st_mtime), float(getattr(found, "st_ctime", 0)))


_RUNNING = [DagsterRunStatus.STARTING, DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING]


def _orphan(context: SensorEvaluationContext) -> DagsterRun | None:
    """A stream that still runs, and whose job this code location does not have any more."""
    if context.repository_def is None:
        return None
    jobs = set(context.repository_def.job_names)
    running = RunsFilter(statuses=_RUNNING, tags=_of_location(context))
    found = (record.dagster_run for record in context.instance.get_run_records(running, limit=_LOOK_BACK))
    return next((run for run in found if LOADED in run.tags and run.job_name not in jobs), None)


def _records(context: SensorEvaluationContext, job_name: str, failures: int) -> Sequence[RunRecord]:
    """The latest runs of a job of this code location; as many as to see so many failures in a row, where they are."""
    own = RunsFilter(job_name=job_name, tags=_of_location(context))
    found = page = list(context.instance.get_run_records(own, limit=_LOOK_BACK))
    while len(page) == _LOOK_BACK and len(found) < failures and all(map(_has_failed, page)):
        page = list(context.instance.get_run_records(own, limit=_LOOK_BACK, cursor=page[-1].dagster_run.run_id))
        found = [*found, *page]
    return found


def _has_failed(record: RunRecord) -> bool:
    return record.dagster_run.status is DagsterRunStatus.FAILURE


def _of_location(context: SensorEvaluationContext) -> dict[str, str]:
    """The tags of this code location's runs: others may have jobs of the same name."""
    origin, repository = context.code_location_origin, context.repository_name
    if origin is None or repository is None:
        return {}
    return {REPOSITORY_LABEL_TAG: f"{repository}@{origin.location_name}"}


def sink_assets(planned: Plan, translator: StageTranslator) -> dict[str, AssetKey]:
    """The asset of each sink, by the sink's name: that of the stage that writes it in BATCH, or one of its own."""
    found = {}
    for node in planned.graph.sinks:
        staged = planned.execution.mode == "BATCH"
        found[node.name] = (
            translator.get_asset_key(planned, planned.region_of(node.id))
            if staged
            else translator.get_sink_key(planned, node)
        )
    return found


def sink_specs(
    planned: Plan, upstream: Mapping[str, CoercibleToAssetDep], start: AssetKey | None, translator: StageTranslator
) -> list[AssetSpec]:
    """The external assets that stand for the sinks of a pipeline that has no BATCH stages.

    `start` is the asset of the savepoint that the stream starts from.
    """
    before = [] if start is None else [AssetDep(start)]

    def read_by(node: SinkNode) -> list[ReadingNode]:
        earlier = planned.upstream(node.id)
        return [n for n in planned.graph.readers if n.id in earlier]

    return [
        AssetSpec(
            translator.get_sink_key(planned, node),
            deps=[*upstream_deps(planned, read_by(node), upstream, translator), *before],
            group_name=planned.name,
            description=(
                f"{node.sink.describe()}, written by {planned.name} in STREAMING ({node.sink.capabilities.describe()})."
            ),
            kinds={"spark", "streaming", node.sink.kind} - {""},
            metadata={
                **targets_metadata(planned, [node.id]),
                **columns_metadata(planned.graph.written_to(node.id)),
            },
        )
        for node in planned.graph.sinks
    ]
