"""The sensor that keeps a stream running, and the decision that it takes at each tick.

The decision is a pure function of what the runs, the checkpoint directory and the clock say: a cursor can be reset by
anyone, and a run's status can be wrong after `kill -9`.
"""

# No `from __future__ import annotations` here: Dagster reads the annotations of a sensor's function as objects.

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING
from uuid import uuid4

from dagster import (
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    DefaultSensorStatus,
    Failure,
    JobDefinition,
    RunRecord,
    RunRequest,
    RunsFilter,
    SensorDefinition,
    SensorEvaluationContext,
    SkipReason,
    sensor,
)

from dagster_unified.engine.failures import naming_store
from dagster_unified.engine.restarts import Failure as FailedRun
from dagster_unified.engine.restarts import decide, most_failures
from dagster_unified.engine.streaming.checkpoint import PATIENCE, Deployed, Lease
from dagster_unified.engine.streaming.desired import Desired, Status, ask, read_desired, read_status
from dagster_unified.engine.streaming.shadow import Round, last_round
from dagster_unified.errors import UnifiedError, lasting
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import Plan, plan
from dagster_unified.graph.upgrade import Code, changes, deployed_code, deployment_fingerprint
from dagster_unified.orchestration._dagster_compat import REPOSITORY_LABEL_TAG
from dagster_unified.orchestration.deployments import StreamingDeployment, configuration_of, directory_of
from dagster_unified.orchestration.external_assets import check_location
from dagster_unified.orchestration.outcomes import error_of, log_of, why_it_failed
from dagster_unified.orchestration.partitions import now, utc, words
from dagster_unified.orchestration.resources import OBJECT_STORE
from dagster_unified.orchestration.stream_materializations import JobAssets, report_rest

if TYPE_CHECKING:
    from upath import UPath


LOADED = "dagster-unified/loaded"
"""The tag that says which loading of the code location asked for a run."""

CODE = "dagster-unified/code"
"""The tag with the fingerprint of the code with which the sensor launched a run."""

_LOOK_BACK = 50
"""How many runs a tick looks at, and how many more at a time where all of them have failed."""

_RUNNING = [DagsterRunStatus.STARTING, DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING]

STARTUP = timedelta(minutes=10)
"""How long a run may take to start Spark and take the lease, also on a machine that is busy."""

UPGRADES_PER_LOADING = 3
"""How often a job is upgraded for one load of the code location.

After that its fingerprint is taken to be unstable.
"""


@dataclass(frozen=True)
class SeenRun:
    """A run of the streaming job, as Dagster shows it."""

    run_id: str
    status: str
    created: datetime
    ended: datetime | None
    reason: str = ""
    error: str = ""
    """The class of the library's error that it failed with, where it is known."""

    code: str = ""
    """The fingerprint of the code with which the sensor launched it; empty of one that was launched by hand."""

    log: str = ""
    """Where what its process wrote is, where it failed and Dagster captured it."""

    @property
    def alive(self) -> bool:
        """Whether it may still run or come to run; QUEUED counts."""
        return self.status in ("NOT_STARTED", "QUEUED", "STARTING", "STARTED", "MANAGED", "CANCELING")


@dataclass(frozen=True)
class Seen:
    """Everything a decision is taken from. `runs` has the newest first."""

    runs: Sequence[SeenRun]
    deployed: Deployed | None
    lease: Lease | None
    desired: Desired
    status: Status | None
    fingerprint: str
    now: datetime
    bounded: bool = False
    """Whether its input ends by itself."""

    may_start: bool = True
    patience: float = 20.0
    code: Code = field(default_factory=dict)
    """The parts of the fingerprint."""

    loaded: str = ""
    """Which loading of the code location the sensor is of."""

    compared: Round | None = None
    """How the tables of new code that runs beside the old compared the last time."""

    @property
    def changed(self) -> bool:
        """Whether the code is not that of the deployment."""
        return self.deployed is not None and self.deployed.fingerprint != self.fingerprint

    @property
    def exhausted(self) -> bool:
        """Whether this code was started again and again, and was found to be other code each time."""
        deployed = self.deployed
        return (
            self.changed
            and deployed is not None
            and bool(self.loaded)
            and deployed.loaded == self.loaded
            and deployed.upgrades >= UPGRADES_PER_LOADING
        )

    def what_changed(self) -> str:
        """For people."""
        return ", ".join(changes(self.deployed.code, self.code)) if self.deployed is not None else ""


@dataclass(frozen=True)
class Decision:
    """The decision of a tick.

    `mark_failed` is a run that Dagster takes for alive and that is dead; `replace` one that has to be ended by force.
    """

    message: str
    launch: str | None = None
    """The run key to launch under."""
    mark_failed: str | None = None
    replace: str | None = None
    stop: int | None = None
    """The token of the lease whose holder has to stop, for new code."""

    beside: bool = False
    """Whether new code has to run beside the old code's job."""

    failed: bool = False
    """Whether something is wrong that a person has to see: the tick fails with the message."""


# The decision


def next_step(deployment: StreamingDeployment, options: Configuration, seen: Seen) -> Decision:
    """Decide what the sensor does at a tick."""
    name = deployment.pipeline.name
    resume = f"launch {name}_control with the action resume"
    wanted = seen.desired.state or deployment.state
    alive = next((r for r in seen.runs if r.alive), None)
    if alive is not None:
        return _watch(deployment, seen, alive, wanted)
    if wanted == "suspended":
        return Decision(f"{name} is suspended; {resume} to let it go on")
    changed = seen.changed and not seen.exhausted
    if changed and _waits(deployment, seen):
        return Decision(
            f"the job of {name} has ended, and the code that is loaded is another, which has not been accepted:"
            f" {seen.what_changed()}. Load the code before, or swap (dagster-unified swap, or {name}_control with the"
            " action swap)",
            failed=True,
        )
    last = seen.runs[0] if seen.runs else None
    resumed = utc(seen.desired.at / 1000) if seen.desired.state == "running" else None
    resumed_since = resumed is not None and last is not None and resumed > (last.ended or last.created)
    finished = seen.deployed is not None and seen.deployed.finished
    if finished and not seen.bounded and not resumed_since:
        return Decision(f"{name} was drained, and has come to the end of its input")
    if finished and not resumed_since:
        begun_anew = f"; its code is another now: {resume} to run it on all its input once more" if changed else ""
        return Decision(f"{name} has come to the end of its input{begun_anew}")
    key = f"{name}/{last.run_id if last else 'first'}/{seen.fingerprint}"
    if last is not None and last.status == "CANCELED" and not resumed_since:
        return Decision(f"run {last.run_id[:8]} was terminated by hand; {resume} to start {name} again")
    failures = [f for f in _failures(seen) if resumed is None or f.ended > resumed]
    if failures:
        why = f"run {seen.runs[0].run_id[:8]} failed: {seen.runs[0].reason or 'see its log'}"
        logs = f"; its log is {seen.runs[0].log or f'that of run {seen.runs[0].run_id}'}"
        if lasting(seen.runs[0].error):
            return Decision(f"{why}; giving up: it would fail again. Fix the cause, then {resume}{logs}")
        verdict = decide(failures, options)
        if verdict.at is None:
            return Decision(f"{why}; giving up: {verdict.reason}. Fix the cause, then {resume}{logs}")
        if seen.now < verdict.at:
            return Decision(f"{why}; attempt {verdict.attempt} begins at {verdict.at:%H:%M:%S} UTC")
        return Decision(f"{why}; attempt {verdict.attempt}", launch=key)
    if not seen.may_start and not resumed_since and not changed:
        return Decision(f"{name} waits for what start_when asks for")
    return Decision(f"starting {name}" + (f" with new code: {seen.what_changed()}" if changed else ""), launch=key)


def _watch(deployment: StreamingDeployment, seen: Seen, run: SeenRun, wanted: str) -> Decision:
    name = deployment.pipeline.name
    short = run.run_id[:8]
    lease, status, now = seen.lease, seen.status, seen.now.timestamp() * 1000
    mine = lease is not None and lease.owner == run.run_id
    silent = lease is None or now - lease.beat > seen.patience * 1000
    if lease is not None and mine and silent and run.status in ("STARTED", "CANCELING"):
        return Decision(
            f"run {short} has given no sign of life for {(now - lease.beat) / 1000:.0f} s; it is taken to be dead",
            mark_failed=run.run_id,
        )
    if not mine and silent and run.status == "STARTED" and seen.now - run.created > STARTUP:
        return Decision(
            f"run {short} began {words(seen.now - run.created)} ago and has not taken the lease; it is taken to be"
            " dead",
            mark_failed=run.run_id,
        )
    if (
        mine
        and status is not None
        and status.run_id == run.run_id
        and status.busy_since is not None
        and now - status.busy_since > deployment.stall_after.total_seconds() * 1000
    ):
        return Decision(
            f"run {short} has been busy with one epoch for {(now - status.busy_since) / 1000:.0f} s; replacing it"
            + _lost(deployment, seen, run),
            replace=run.run_id,
        )
    if wanted == "suspended":
        return Decision(f"run {short} of {name} is stopping, since it is suspended")
    if mine and lease is not None and seen.changed and run.status == "STARTED":
        if seen.desired.stop >= lease.token:
            return Decision(f"run {short} is stopping, to be started with new code")
        if seen.exhausted:
            return Decision(_unstable(name, short, seen), failed=True)
        if _waits(deployment, seen):
            return Decision(
                f"run {short} of {name} goes on with the code before, and the new code runs beside it"
                f" ({seen.what_changed()}); {_compared(seen)}",
                beside=True,
            )
        return Decision(
            f"the code of {name} has changed: {seen.what_changed()}; stopping run {short} after its epoch",
            stop=lease.token,
        )
    return Decision(f"run {short} of {name} is {run.status.lower()}{_lost(deployment, seen, run)}")


def _waits(deployment: StreamingDeployment, seen: Seen) -> bool:
    """Return whether new code has to be accepted before it takes the place of the old."""
    has_state = seen.deployed is not None and bool(seen.deployed.id) and not seen.deployed.finished
    return deployment.upgrade_mode == "shadow" and has_state and seen.desired.accepted != seen.fingerprint


def _compared(seen: Seen) -> str:
    if seen.compared is None:
        return "their tables have not been compared yet"
    if seen.compared.is_empty:
        return f"the new code has not written anything yet ({seen.compared.describe()})"
    if seen.compared.is_equal:
        return f"their tables are equal ({seen.compared.describe()}): dagster-unified swap puts it in place"
    return f"their tables differ ({seen.compared.describe()})"


def _lost(deployment: StreamingDeployment, seen: Seen, run: SeenRun) -> str:
    """Return the executor or master that a run has lost lately, as a part of a sentence."""
    status = seen.status
    if status is None or status.run_id != run.run_id or not status.lost:
        return ""
    when = utc(status.lost_at / 1000)
    return "" if seen.now - when > deployment.stall_after else f"; at {when:%H:%M:%S} UTC {status.lost}"


def _unstable(name: str, run: str, seen: Seen) -> str:
    assert seen.deployed is not None
    return (
        f"{name} was started with new code {seen.deployed.upgrades} times since the code location was loaded, and its"
        f" code still differs from run to run: {seen.what_changed()}. Run {run} goes on and is not upgraded. Either the"
        " files have changed since the location was loaded: reload it. Or what is named depends on the process, such"
        " as a time, a random number or an address: make it the same in every process, then reload the location"
    )


def _failures(seen: Seen) -> list[FailedRun]:
    """Return the failures of this code since the last run that ended well, oldest first."""
    failures = []
    for run in seen.runs:
        is_of_it = seen.exhausted or (run.code == seen.fingerprint if run.code else not seen.changed)
        if run.status != "FAILURE" or not is_of_it:
            break
        failures.append(FailedRun(run.created, run.ended or run.created, run.run_id))
    return failures[::-1]


# The sensor


def streaming_sensor(
    deployment: StreamingDeployment, streaming: JobDefinition, beside: JobDefinition | None, assets: JobAssets
) -> SensorDefinition:
    """`<pipeline>_streaming_sensor`: a short look at what is there, and at most one thing done.

    `beside` is the job that runs new code beside the old, for a deployment that asks for it.
    """
    name = deployment.pipeline.name
    loaded = uuid4().hex[:12]

    @sensor(
        name=f"{name}_streaming_sensor",
        jobs=[streaming] if beside is None else [streaming, beside],
        minimum_interval_seconds=int(deployment.tick_every.total_seconds()),
        default_status=DefaultSensorStatus.STOPPED,
        required_resource_keys={OBJECT_STORE},
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
                    if beside is not None:
                        _end_abandoned(context, beside, seen.fingerprint)
                _report_rest(context, deployment, assets, seen)
        except UnifiedError as error:
            return SkipReason(str(error))
        if decision.failed:
            raise Failure(decision.message)
        if decision.beside and beside is not None:
            return _run_beside(context, beside, decision, seen)
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
        return RunRequest(run_key=decision.launch, job_name=streaming.name, tags=tags)

    return keep_alive


def _end_abandoned(context: SensorEvaluationContext, beside: JobDefinition, loaded: str) -> None:
    """Terminate the runs beside the job of code that is no longer loaded."""
    running = RunsFilter(job_name=beside.name, statuses=_RUNNING, tags=of_location(context))
    for run in context.instance.get_runs(running):
        if run.tags.get(CODE, loaded) != loaded and run.status is not DagsterRunStatus.CANCELING:
            context.log.info(f"terminating run {run.run_id[:8]} of {beside.name}, whose code is no longer loaded")
            context.instance.run_launcher.terminate(run.run_id)


def _run_beside(
    context: SensorEvaluationContext, beside: JobDefinition, decision: Decision, seen: Seen
) -> RunRequest | SkipReason:
    """Launch the job that runs new code beside the old, once for this code."""
    of_code = RunsFilter(job_name=beside.name, tags={**of_location(context), CODE: seen.fingerprint})
    records = context.instance.get_run_records(of_code, limit=1)
    if not records:
        return RunRequest(run_key=None, job_name=beside.name, tags={CODE: seen.fingerprint})
    run = records[0].dagster_run
    ended = f"; run {run.run_id[:8]} of {beside.name} is {run.status.value.lower()}: launch it again by hand"
    return SkipReason(decision.message + (ended if run.is_finished else ""))


def _report_rest(
    context: SensorEvaluationContext, deployment: StreamingDeployment, assets: JobAssets, seen: Seen
) -> None:
    """Report what a job has committed that has ended, or was killed, before it could report it."""
    if seen.lease is None or seen.lease.is_alive(PATIENCE):
        return
    planned = plan(deployment.pipeline.graph(), configuration_of(deployment))
    report, owner = context.instance.report_runless_asset_event, f"a tick of {deployment.pipeline.name}'s sensor"
    made = report_rest(planned, directory_of(deployment), assets, context.instance, owner, report)
    if made:
        context.log.info(
            f"reported {made} {'materialization' if made == 1 else 'materializations'} of a job that ended"
        )


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
    runs = [_seen_run(context.instance, record, is_latest=not number) for number, record in enumerate(records)]
    planned = plan(deployment.pipeline.graph(), configuration_of(deployment))
    code = deployed_code(planned)
    fingerprint = deployment_fingerprint(code)
    return Seen(
        runs=runs,
        deployed=directory.deployed(),
        lease=directory.holder(),
        desired=read_desired(directory),
        status=read_status(directory),
        fingerprint=fingerprint,
        now=now(),
        bounded=planned.execution.boundedness is Boundedness.BOUNDED,
        may_start=_may_start(deployment, planned, context, runs),
        patience=PATIENCE,
        code=code,
        loaded=loaded,
        compared=last_round(directory, fingerprint) if deployment.upgrade_mode == "shadow" else None,
    )


def _seen_run(instance: DagsterInstance, record: RunRecord, is_latest: bool) -> SeenRun:
    run = record.dagster_run
    started, ended = record.start_time or record.create_timestamp.timestamp(), record.end_time
    code = run.tags.get(CODE, "")
    seen = SeenRun(run.run_id, run.status.value, utc(started), utc(ended) if ended else None, code=code)
    if not (is_latest and run.status is DagsterRunStatus.FAILURE):
        return seen
    reason, error, log = (ask_log(instance, run.run_id) for ask_log in (why_it_failed, error_of, log_of))
    return replace(seen, reason=reason, error=error, log=log)


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
    """Return when a file arrived in its folder; a moved file keeps the time at which it was written."""
    status = file.stat()
    return max(float(status.st_mtime), float(getattr(status, "st_ctime", 0)))


def _orphan(context: SensorEvaluationContext) -> DagsterRun | None:
    """Return a stream that still runs, though this code location no longer has its job."""
    if context.repository_def is None:
        return None
    jobs = set(context.repository_def.job_names)
    running = RunsFilter(statuses=_RUNNING, tags=of_location(context))
    runs = (record.dagster_run for record in context.instance.get_run_records(running, limit=_LOOK_BACK))
    return next((run for run in runs if LOADED in run.tags and run.job_name not in jobs), None)


def _records(context: SensorEvaluationContext, job_name: str, failures: int) -> Sequence[RunRecord]:
    """Return the latest runs of a job here: enough to see `failures` in a row, if there are so many."""
    of_job = RunsFilter(job_name=job_name, tags=of_location(context))
    records = page = list(context.instance.get_run_records(of_job, limit=_LOOK_BACK))
    while len(page) == _LOOK_BACK and len(records) < failures and all(map(_has_failed, page)):
        page = list(context.instance.get_run_records(of_job, limit=_LOOK_BACK, cursor=page[-1].dagster_run.run_id))
        records = [*records, *page]
    return records


def _has_failed(record: RunRecord) -> bool:
    return record.dagster_run.status is DagsterRunStatus.FAILURE


def of_location(context: SensorEvaluationContext) -> dict[str, str]:
    """Return the tags of this code location's runs: others may have jobs of the same name."""
    origin, repository = context.code_location_origin, context.repository_name
    if origin is None or repository is None:
        return {}
    return {REPOSITORY_LABEL_TAG: f"{repository}@{origin.location_name}"}
