"""How a pipeline runs in BATCH, as the author declares it. `StreamingDeployment` is its counterpart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dagster import (
    AssetKey,
    AutomationCondition,
    BackfillPolicy,
    Backoff,
    FreshnessPolicy,
    Jitter,
    PartitionsDefinition,
    RetryPolicy,
)

from dagster_unified.api.pipeline import Pipeline
from dagster_unified.errors import ConfigurationError, PipelineError
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.graph.options import Configuration, Layer
from dagster_unified.graph.plan import Plan, plan
from dagster_unified.graph.slices import Slice, bound
from dagster_unified.orchestration._dagster_compat import CoercibleToAssetDep
from dagster_unified.orchestration.checks import Checks
from dagster_unified.orchestration.deployment import check_pipeline, check_types
from dagster_unified.orchestration.janitor import Retention
from dagster_unified.orchestration.partitions import check_apart, checked_carrying, dimensions_of, in_zone
from dagster_unified.orchestration.resources import batch_configuration
from dagster_unified.orchestration.schedules import BatchSchedule

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
    partition_mapping=...)`); every other source is shown as an external asset.

    `schedule` gives the pipeline `<pipeline>_schedule`; `automation_condition`, Dagster's declarative automation, may
    take its place. It does not look at the assets that stand for sources, which nobody materializes: give `upstream`
    for what it is to wait for. With `carry_state` the stages then have no check of the state that they went on from,
    and say it in the run's log. `freshness_policy` and `retry_policy` are those of the stages. `pool` is their
    concurrency pool: a backfill runs as many stages at once as the instance gives it slots.

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
        """The options of a run: those set at launch, its own, of the environment, the file, and the defaults."""
        return batch_configuration(*launched, Layer("deployment", self.options))

    def plan(self, options: Configuration, slice_: Slice | None = None) -> Plan:
        """Plan one partition or, while none is known, the stages that become assets."""
        graph = self.pipeline.graph()
        if self.partitions is not None:
            graph = bound(graph, dimensions_of(self.partitions) if slice_ is None else slice_)
            check_apart(graph, self.partitions, slice_)
        return plan(graph, options, self.carry_state)

    def loaded(self) -> Plan:
        """Plan the stages that become assets; raises `PipelineError` for a source that stays unbounded."""
        found = self.plan(self.configuration())
        if found.execution.mode != "BATCH":
            unbounded = next(n for n in found.graph.sources if n.source.boundedness is Boundedness.UNBOUNDED)
            raise PipelineError(
                f"{found.name}: source '{unbounded.name}' is unbounded, and a BatchDeployment needs bounded sources; "
                f"use a StreamingDeployment, or read the source from a bounded one"
            )
        return found
