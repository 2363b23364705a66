"""The deployments of a pipeline, as its author declares them: in BATCH, and in STREAMING."""

# No `from __future__ import annotations` here: `component.py` reads the types of the fields as objects.
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Literal

from dagster import (
    AssetKey,
    AutomationCondition,
    BackfillPolicy,
    Backoff,
    ExecutorDefinition,
    FreshnessPolicy,
    Jitter,
    PartitionsDefinition,
    RetryPolicy,
    TimeWindowPartitionsDefinition,
    in_process_executor,
)

from dagster_unified import settings
from dagster_unified.api.pipeline import Pipeline
from dagster_unified.connectors.protocol.positions import Position
from dagster_unified.engine.positions import stopping
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.shadow import Round, accept
from dagster_unified.errors import ConfigurationError, PipelineError
from dagster_unified.graph.connectors import Boundedness, Slice
from dagster_unified.graph.nodes import Graph
from dagster_unified.graph.options import Configuration, Layer
from dagster_unified.graph.plan import Plan, plan
from dagster_unified.graph.upgrade import deployed_code, deployment_fingerprint
from dagster_unified.orchestration._dagster_compat import CoercibleToAssetDep
from dagster_unified.orchestration.checks import Checks
from dagster_unified.orchestration.janitor import Retention
from dagster_unified.orchestration.partitions import (
    check_apart,
    check_lengths,
    checked_carrying,
    dimensions_of,
    in_zone,
)
from dagster_unified.orchestration.resources import batch_configuration
from dagster_unified.orchestration.schedules import BatchSchedule

UPGRADES = ("stateless", "last-state", "savepoint", "shadow")


@dataclass(frozen=True)
class StreamingDeployment:
    """How a pipeline is kept running in STREAMING.

    `upgrade_mode` says what happens when the pipeline's code changes: `last-state` stops the job after an epoch and
    starts the new code from its state, `savepoint` keeps a copy of that state as well, to which one can go back, and
    `stateless` starts it without. With `shadow` the job of the old code goes on, and the new code runs beside it, from
    a savepoint and into tables of its own (`<pipeline>_shadow`), which are compared; `dagster-unified swap` then
    upgrades as `savepoint` does. `from_savepoint` is the savepoint, of either mode, that a job without state starts
    from: short for the option `execution.state-recovery.path`. `restart_strategy` is short for the option
    `restart-strategy.type`; `options` are option keys, among them the strategy's own, such as
    `restart-strategy.fixed-delay.attempts`. `start_when` says when the job is started: `always`, when `files` have
    arrived since it last ran, or a function of the sensor's context. A job that has been busy with one epoch for
    `stall_after` is replaced. Its sinks' assets are observed every `observe_every`, and materialized every
    `materialize_every` where rows were committed since, and when the job ends, so that assets downstream follow it. The
    sensor looks every `tick_every`, as far as the daemon can.

    With `partitions` in time, by default those of the pipeline's `BatchDeployment`, a partition that records belong to
    by their event time is materialized once the watermark has passed its end, and only then. Records that come later
    are counted by partition. `rerun_late` adds `<pipeline>_late_sensor`, which runs those partitions again in BATCH.
    `executor` executes the job's one step.

    `upstream` maps the names of sources to your own assets; `checks` gives the assets of the sinks their checks, and
    the job `<pipeline>_checks`. A pipeline that has a `BatchDeployment` as well gives each of them in one of the two.
    """

    pipeline: Pipeline
    state: Literal["running", "suspended"] = "running"
    upgrade_mode: Literal["stateless", "last-state", "savepoint", "shadow"] = "last-state"
    from_savepoint: str | None = None
    restart_strategy: Literal["none", "fixed-delay", "exponential-delay", "failure-rate"] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    start_when: Literal["always", "files"] | Callable[[Any], bool] = "always"
    stall_after: timedelta = timedelta(minutes=10)
    observe_every: timedelta = timedelta(seconds=30)
    materialize_every: timedelta = timedelta(minutes=5)
    partitions: PartitionsDefinition[str] | None = None
    rerun_late: bool = False
    tick_every: timedelta = timedelta(seconds=30)
    upstream: Mapping[str, CoercibleToAssetDep] = field(default_factory=dict)
    checks: Checks | None = None
    executor: ExecutorDefinition = in_process_executor

    def __post_init__(self) -> None:
        check_pipeline(self.pipeline, "StreamingDeployment")
        check_types(
            self.pipeline.name, self, options=Mapping, upstream=Mapping, checks=Checks, executor=ExecutorDefinition
        )
        if self.partitions is not None and not isinstance(self.partitions, TimeWindowPartitionsDefinition):
            raise ConfigurationError(
                f"{self.pipeline.name}: a stream is materialized by partitions in time, as its watermark passes their"
                f" ends, and partitions is {self.partitions!r}; give DailyPartitionsDefinition(...), or another in time"
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
            materialize_every=self.materialize_every,
            tick_every=self.tick_every,
        )
        if self.tick_every.microseconds:
            raise ConfigurationError(
                f"{self.pipeline.name}: tick_every has to be in whole seconds, as Dagster's sensors tick, and is"
                f" {self.tick_every}"
            )


def check_pipeline(pipeline: object, kind: str) -> None:
    """Raise `ConfigurationError` for what is no pipeline."""
    if not isinstance(pipeline, Pipeline):
        raise ConfigurationError(f"a {kind} is of a pipeline, and not of {pipeline!r}; give it the Pipeline itself")


def check_types(pipeline: str, arguments: object, **kinds: type[object]) -> None:
    """Raise `ConfigurationError` where an argument of a deployment is of another type; None says nothing."""
    for name, kind in kinds.items():
        value = getattr(arguments, name)
        if value is not None and not isinstance(value, kind):
            raise ConfigurationError(f"{pipeline}: {name} is a {kind.__name__}, not {value!r}")


def swap(deployment: StreamingDeployment, launched: Layer, differences: bool) -> Round | None:
    """Let the new code of a deployment take the place of the old; return how their tables compared.

    Raises `ConfigurationError` where new code does not wait for that, and as `accept` does.
    """
    if deployment.upgrade_mode != "shadow":
        raise ConfigurationError(
            f"{deployment.pipeline.name}: its upgrade_mode is '{deployment.upgrade_mode}', so that new code takes the"
            " place of the old as soon as it is loaded; there is nothing to swap. Give upgrade_mode='shadow'"
        )
    planned = plan(deployment.pipeline.graph(), configuration_of(deployment, launched))
    code = deployment_fingerprint(deployed_code(planned))
    return accept(directory_of(deployment, launched), code, differences)


def configuration_of(deployment: StreamingDeployment, *launched: Layer) -> Configuration:
    """Return the options of a deployment, in STREAMING.

    From the strongest: those set at launch, its own, those of the environment, the file, and the defaults.
    """
    declared = Layer("deployment", {"execution.runtime-mode": "STREAMING", **deployment.options})
    return Configuration([*launched, declared, *settings.shared_layers()])


def directory_of(deployment: StreamingDeployment, *launched: Layer) -> CheckpointDirectory:
    """Where a deployment keeps its state."""
    return CheckpointDirectory(
        configuration_of(deployment, *launched)["execution.checkpointing.dir"], deployment.pipeline.name
    )


DEFAULT_RETRY = RetryPolicy(max_retries=3, delay=1, backoff=Backoff.EXPONENTIAL, jitter=Jitter.PLUS_MINUS)
"""Three further attempts with exponential delay; an error that is terminal by its type is not retried."""

MODE = "execution.runtime-mode"


@dataclass(frozen=True)
class BatchDeployment:
    """How a pipeline runs in BATCH: its stages are assets, in the job `<pipeline>_batch`.

    `partitions` bound every source of a run to one partition: by its path template, or by the field that
    `partitioned_by` names. `timezone` gives a zone to partitions in time that name none. Running a partition again
    replaces its rows in every sink. `backfill_policy` says how many partitions a backfill gives to one run, by default
    one. A stage runs up to 32 of them in one Spark job (`execution.batch.partitions-per-job`).

    With `carry_state` a partition starts from the keyed state and the timers that the partition before it left.
    Partition after partition then gives what one run over all input gives, and what STREAMING gives. A partition ends
    with the watermark of the records so far; the last partition of a definition that has an end also ends the input.
    The stages depend on themselves, so Dagster runs partitions in order, and a backfill runs each stage in runs of its
    own; `backfill_policy` is then `BackfillPolicy.single_run()` unless you give one. A partition whose predecessor has
    not run is an error.

    With `reuse="fingerprint"` a stage is not run again while the code, configuration, library version, input and
    upstream stages of its latest materialization are the same and its output is there. A source without a snapshot of
    its input, and a re-execution, run in any case.

    `upstream` maps the names of sources to your own assets, with partition mappings where needed (`AssetDep(key,
    partition_mapping=...)`); another source depends on the pipeline here that writes what it reads, on the asset that
    has its table's name, or is shown as an external asset.

    `schedule` gives the pipeline `<pipeline>_schedule`; `automation_condition`, Dagster's declarative automation, may
    take its place. It does not look at the assets that stand for sources, which nobody materializes: give `upstream`
    for what it is to wait for. `freshness_policy` is that of the tables, `retry_policy` that of the steps. `pool` is
    their concurrency pool: a backfill runs as many stages at once as the instance gives it slots.

    `retention` gives the pipeline a job `<pipeline>_janitor` and its schedule, which free intermediates: by default
    those that nobody needs any more and that are older than seven days, or more than 100 GB in all. Its schedule is on.
    With None they are kept. `checks` gives the assets of the sinks their checks, and the job `<pipeline>_checks`.

    `options` are option keys, such as `execution.savepoint.path`; what is set at launch goes before them.
    """

    pipeline: Pipeline
    partitions: PartitionsDefinition[str] | None = None
    timezone: str | None = None
    backfill_policy: BackfillPolicy | None = None
    carry_state: bool = False
    reuse: Literal["never", "fingerprint"] = "never"
    upstream: Mapping[str, CoercibleToAssetDep] = field(default_factory=dict)
    schedule: BatchSchedule | None = None
    automation_condition: AutomationCondition[AssetKey] | None = None
    freshness_policy: FreshnessPolicy | None = None
    retry_policy: RetryPolicy | None = DEFAULT_RETRY
    pool: str | None = None
    retention: Retention | None = field(default_factory=Retention)
    checks: Checks | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_pipeline(self.pipeline, "BatchDeployment")
        name = self.pipeline.name
        check_types(
            name,
            self,
            partitions=PartitionsDefinition,
            timezone=str,
            backfill_policy=BackfillPolicy,
            upstream=Mapping,
            schedule=BatchSchedule,
            automation_condition=AutomationCondition,
            freshness_policy=FreshnessPolicy,
            retry_policy=RetryPolicy,
            pool=str,
            retention=Retention,
            checks=Checks,
            options=Mapping,
        )
        if MODE in self.options:
            raise ConfigurationError(
                f"{name}: a BatchDeployment runs in BATCH; leave the option {MODE} out, or use a StreamingDeployment"
            )
        Configuration.of(self.options)
        if self.reuse not in ("never", "fingerprint"):
            raise ConfigurationError(f"{name}: reuse is 'never' or 'fingerprint', not {self.reuse!r}")
        object.__setattr__(self, "partitions", in_zone(name, self.partitions, self.timezone))
        if self.carry_state:
            checked_carrying(name, self.partitions)
            object.__setattr__(self, "backfill_policy", self.backfill_policy or BackfillPolicy.single_run())

    def configuration(self, *launched: Layer) -> Configuration:
        """Return the options of a run: those set at launch, its own, of the environment, the file, and the defaults."""
        return batch_configuration(*launched, Layer("deployment", self.options))

    def plan(
        self, options: Configuration, slice_: Slice | None = None, stops: Mapping[str, Position] = MappingProxyType({})
    ) -> Plan:
        """Plan one partition or, while none is known, all of the pipeline.

        `stops` says where sources stop because another run has, by uid. Raises `StateError` where one cannot.
        """
        return plan(stopping(self._graph(slice_), stops), options, self.carry_state)

    def _graph(self, slice_: Slice | None) -> Graph:
        graph = self.pipeline.graph()
        if self.partitions is not None:
            graph = graph.bounded_to(dimensions_of(self.partitions) if slice_ is None else slice_)
            check_apart(graph, self.partitions, slice_)
        return graph

    def loaded(self) -> Plan:
        """Plan the stages that become assets, whatever the sources hold.

        Raises `PipelineError` for a source that stays unbounded.
        """
        planned = plan(self._graph(None), self.configuration(), self.carry_state, with_input=False)
        if planned.execution.mode != "BATCH":
            unbounded = next(n for n in planned.graph.sources if n.source.boundedness is Boundedness.UNBOUNDED)
            raise PipelineError(
                f"{planned.name}: source '{unbounded.name}' is unbounded, and a BatchDeployment needs bounded sources; "
                f"use a StreamingDeployment, or read the source from a bounded one"
            )
        return planned
