"""A streaming deployment as the author declares it, and the decision that its sensor takes at each tick.

The decision is a pure function of what the runs, the checkpoint directory and the clock say: a cursor can be reset by
anyone, and a run's status can be wrong after `kill -9`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from dagster import ExecutorDefinition, in_process_executor

from dagster_unified import settings
from dagster_unified.api.pipeline import Pipeline
from dagster_unified.engine.restarts import Failure, decide
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory, Deployed, Lease
from dagster_unified.engine.streaming.desired import Desired, Status
from dagster_unified.errors import ConfigurationError, lasting
from dagster_unified.graph.options import Configuration, Layer
from dagster_unified.graph.upgrade import Code, changes
from dagster_unified.orchestration.checks import Checks
from dagster_unified.orchestration.moments import check_lengths, utc, words

if TYPE_CHECKING:
    from dagster_unified.orchestration._dagster_compat import CoercibleToAssetDep

STARTUP = timedelta(minutes=10)
"""How long a run may take to start Spark and take the lease, also on a machine that is busy."""

UPGRADES = ("stateless", "last-state", "savepoint")

UPGRADES_PER_LOADING = 3
"""How often a job is upgraded for one load of the code location.

After that its fingerprint is taken to be unstable.
"""


@dataclass(frozen=True)
class StreamingDeployment:
    """How a pipeline is kept running in STREAMING.

    `upgrade_mode` says what happens when the pipeline's code changes: `last-state` stops the job after an epoch and
    starts the new code from its state, `savepoint` keeps a copy of that state as well, to which one can go back, and
    `stateless` starts it without. `from_savepoint` is the savepoint, of either mode, that a job without state starts
    from: short for the option `execution.state-recovery.path`. `restart_strategy` is short for the option
    `restart-strategy.type`; `options` are option keys, among them the strategy's own, such as
    `restart-strategy.fixed-delay.attempts`. `start_when` says when the job is started: `always`, when `files` have
    arrived since it last ran, or a function of the sensor's context. A job that has been busy with one epoch for
    `stall_after` is replaced. Its sinks' assets are observed every `observe_every`; the sensor looks every
    `tick_every`, as far as the daemon can. `executor` executes the job's one step.

    `upstream` maps the names of sources to your own assets; `checks` gives the assets of the sinks their checks, and
    the job `<pipeline>_checks`. A pipeline that has a `BatchDeployment` as well gives each of them in one of the two.
    """

    pipeline: Pipeline
    state: Literal["running", "suspended"] = "running"
    upgrade_mode: Literal["stateless", "last-state", "savepoint"] = "last-state"
    from_savepoint: str | None = None
    restart_strategy: Literal["none", "fixed-delay", "exponential-delay", "failure-rate"] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    start_when: Literal["always", "files"] | Callable[[Any], bool] = "always"
    stall_after: timedelta = timedelta(minutes=10)
    observe_every: timedelta = timedelta(seconds=30)
    tick_every: timedelta = timedelta(seconds=30)
    upstream: Mapping[str, CoercibleToAssetDep] = field(default_factory=dict)
    checks: Checks | None = None
    executor: ExecutorDefinition = in_process_executor

    def __post_init__(self) -> None:
        check_pipeline(self.pipeline, "StreamingDeployment")
        check_types(
            self.pipeline.name, self, options=Mapping, upstream=Mapping, checks=Checks, executor=ExecutorDefinition
        )
        if self.state not in ("running", "suspended"):
            raise ConfigurationError(
                f"{self.pipeline.name}: a deployment's state is 'running' or 'suspended', not {self.state!r}"
            )
        if self.upgrade_mode not in UPGRADES:
            raise ConfigurationError(
                f"{self.pipeline.name}: upgrade_mode is one of {', '.join(UPGRADES)}, not {self.upgrade_mode!r}"
            )
        if not callable(self.start_when) and self.start_when not in ("always", "files"):
            raise ConfigurationError(
                f"{self.pipeline.name}: start_when is 'always', 'files' or a function, not {self.start_when!r}"
            )
        if self.from_savepoint is not None:
            if "execution.state-recovery.path" in self.options:
                raise ConfigurationError(
                    f"{self.pipeline.name}: the savepoint to start from is given twice; leave from_savepoint or the"
                    " option execution.state-recovery.path out"
                )
            started = {**self.options, "execution.state-recovery.path": self.from_savepoint}
            object.__setattr__(self, "options", started)
        if self.restart_strategy is not None:
            if "restart-strategy.type" in self.options:
                raise ConfigurationError(
                    f"{self.pipeline.name}: the restart strategy is given twice; leave restart_strategy or the option"
                    " restart-strategy.type out"
                )
            object.__setattr__(self, "options", {**self.options, "restart-strategy.type": self.restart_strategy})
        if Configuration.of(self.options)["execution.runtime-mode"] == "BATCH":
            raise ConfigurationError(
                f"{self.pipeline.name}: a StreamingDeployment runs in STREAMING, and its options say"
                " execution.runtime-mode=BATCH; leave the option out, or use a BatchDeployment"
            )
        check_lengths(
            self.pipeline.name,
            timedelta(seconds=1),
            stall_after=self.stall_after,
            observe_every=self.observe_every,
            tick_every=self.tick_every,
        )
        if self.tick_every.microseconds:
            raise ConfigurationError(
                f"{self.pipeline.name}: tick_every has to be in whole seconds, as Dagster's sensors tick, and is"
                f" {self.tick_every}"
            )


def check_pipeline(given: object, of: str) -> None:
    """Raises `ConfigurationError` for what is no pipeline."""
    if not isinstance(given, Pipeline):
        raise ConfigurationError(f"a {of} is of a pipeline, and not of {given!r}; give it the Pipeline itself")


def check_types(pipeline: str, arguments: object, **kinds: type[object]) -> None:
    """Raises `ConfigurationError` where an argument of a deployment is of another type; None says nothing."""
    for name, kind in kinds.items():
        value = getattr(arguments, name)
        if value is not None and not isinstance(value, kind):
            raise ConfigurationError(f"{pipeline}: {name} is a {kind.__name__}, not {value!r}")


def configuration_of(deployment: StreamingDeployment, *launched: Layer) -> Configuration:
    """The options of a deployment, in STREAMING.

    From the strongest: those set at launch, its own, those of the environment, the file, and the defaults.
    """
    own = Layer("deployment", {"execution.runtime-mode": "STREAMING", **deployment.options})
    return Configuration([*launched, own, *settings.shared_layers()])


def directory_of(deployment: StreamingDeployment, *launched: Layer) -> CheckpointDirectory:
    """Where a deployment keeps its state."""
    return CheckpointDirectory(
        configuration_of(deployment, *launched)["execution.checkpointing.dir"], deployment.pipeline.name
    )


@dataclass(frozen=True)
class SeenRun:
    """What Dagster says of a run of the streaming job."""

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
    """What the fingerprint consists of."""

    loaded: str = ""
    """Which loading of the code location the sensor is of."""

    @property
    def changed(self) -> bool:
        """Whether the code is not that of the deployment."""
        return self.deployed is not None and self.deployed.fingerprint != self.fingerprint

    @property
    def exhausted(self) -> bool:
        """Whether this code was started again and again, and was found to be other code each time."""
        held = self.deployed
        return (
            self.changed
            and held is not None
            and bool(self.loaded)
            and held.loaded == self.loaded
            and held.upgrades >= UPGRADES_PER_LOADING
        )

    def what_changed(self) -> str:
        """For people."""
        return ", ".join(changes(self.deployed.code, self.code)) if self.deployed is not None else ""


@dataclass(frozen=True)
class Decision:
    """What to do now.

    `mark_failed` is a run that Dagster takes for alive and that is dead; `replace` one that has to be ended by force.
    """

    message: str
    launch: str | None = None
    """The run key to launch under."""
    mark_failed: str | None = None
    replace: str | None = None
    stop: int | None = None
    """The token of the lease whose holder has to stop, for new code."""
    failed: bool = False
    """Whether something is wrong that a person has to see: the tick fails with the message."""


def next_step(deployment: StreamingDeployment, options: Configuration, seen: Seen) -> Decision:
    """What the sensor does at a tick."""
    name = deployment.pipeline.name
    resume = f"launch {name}_control with the action resume"
    wanted = seen.desired.state or deployment.state
    alive = next((r for r in seen.runs if r.alive), None)
    if alive is not None:
        return _watch(deployment, seen, alive, wanted)
    if wanted == "suspended":
        return Decision(f"{name} is suspended; {resume} to let it go on")
    changed = seen.changed and not seen.exhausted
    last = seen.runs[0] if seen.runs else None
    resumed = utc(seen.desired.at / 1000) if seen.desired.state == "running" else None
    again = resumed is not None and last is not None and resumed > (last.ended or last.created)
    finished = seen.deployed is not None and seen.deployed.finished
    if finished and not seen.bounded and not again:
        return Decision(f"{name} was drained, and has come to the end of its input")
    if finished and not again:
        begun_anew = f"; its code is another now: {resume} to run it on all its input once more" if changed else ""
        return Decision(f"{name} has come to the end of its input{begun_anew}")
    key = f"{name}/{last.run_id if last else 'first'}/{seen.fingerprint}"
    if last is not None and last.status == "CANCELED" and not again:
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
    if not seen.may_start and not again and not changed:
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
        return Decision(
            f"the code of {name} has changed: {seen.what_changed()}; stopping run {short} after its epoch",
            stop=lease.token,
        )
    return Decision(f"run {short} of {name} is {run.status.lower()}{_lost(deployment, seen, run)}")


def _lost(deployment: StreamingDeployment, seen: Seen, run: SeenRun) -> str:
    """What a run has lost of its cluster of late."""
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


def _failures(seen: Seen) -> list[Failure]:
    """The failures of this code since the last run that ended well, oldest first."""
    found = []
    for run in seen.runs:
        is_of_it = seen.exhausted or (run.code == seen.fingerprint if run.code else not seen.changed)
        if run.status != "FAILURE" or not is_of_it:
            break
        found.append(Failure(run.created, run.ended or run.created, run.run_id))
    return found[::-1]
