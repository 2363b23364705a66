"""`unified_definitions`: everything that Dagster needs of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dagster import (
    AssetKey,
    AssetSelection,
    AutomationCondition,
    BackfillPolicy,
    Definitions,
    ExecutorDefinition,
    FreshnessPolicy,
    PartitionsDefinition,
    RetryPolicy,
    TimeWindowPartitionsDefinition,
    define_asset_job,
    in_process_executor,
)

from dagster_unified.api.pipeline import Pipeline
from dagster_unified.errors import PipelineError
from dagster_unified.graph.targets import check_targets, written
from dagster_unified.orchestration._dagster_compat import CoercibleToAssetDep, without_beta_warning
from dagster_unified.orchestration.assets import DEFAULT_RETRY, Batch, source_specs, stage_asset
from dagster_unified.orchestration.checks import Checks, sink_checks
from dagster_unified.orchestration.control import control_job
from dagster_unified.orchestration.deployment import StreamingDeployment
from dagster_unified.orchestration.heartbeat import heartbeat_sensor
from dagster_unified.orchestration.io_manager import IntermediateIOManager
from dagster_unified.orchestration.janitor import Retention, janitor_job, janitor_schedule
from dagster_unified.orchestration.malformed import malformed_assets, malformed_specs
from dagster_unified.orchestration.partitions import checked_carrying, checked_upstream, in_zone
from dagster_unified.orchestration.resources import ExecutionConfig, SparkResource, batch_configuration
from dagster_unified.orchestration.schedules import BatchSchedule, batch_schedule
from dagster_unified.orchestration.streaming import sink_assets, sink_specs, streaming_job, streaming_sensor
from dagster_unified.orchestration.targets import StagesSelection
from dagster_unified.orchestration.translator import StageTranslator


def unified_definitions(
    pipeline: Pipeline | Sequence[Pipeline],
    resources: Mapping[str, Any] | None = None,
    translator: StageTranslator | None = None,
    retry_policy: RetryPolicy | None = DEFAULT_RETRY,
    partitions: PartitionsDefinition[str] | None = None,
    timezone: str | None = None,
    backfill_policy: BackfillPolicy | None = None,
    carry_state: bool = False,
    reuse: Literal["never", "fingerprint"] = "never",
    upstream: Mapping[str, CoercibleToAssetDep] | None = None,
    schedule: BatchSchedule | None = None,
    freshness_policy: FreshnessPolicy | None = None,
    automation_condition: AutomationCondition[AssetKey] | None = None,
    pool: str | None = None,
    retention: Retention | None = None,
    checks: Checks | None = None,
    deployments: Sequence[StreamingDeployment] = (),
    executor: ExecutorDefinition | None = in_process_executor,
    streaming_executor: ExecutorDefinition = in_process_executor,
) -> Definitions:
    """For each pipeline that can run in BATCH, one asset per stage, one asset job `<pipeline>_batch`, and a sensor that
    reports its runs as failed whose process has died (`<pipeline>_heartbeat_sensor`, on by default); for each pipeline with a deployment or an
    unbounded source `<pipeline>_streaming`, a sensor that keeps it alive once it is turned on, and `<pipeline>_control`, which suspends, resumes
    and drains it, takes savepoints and restores them; and the resources that they need.

    With `partitions` a BATCH run is for a partition, to which every source is bounded: by its path template, or by the field that
    `partitioned_by` names. Time zones, and days of 23 or 25 hours, are those of the partitions definition; `timezone` gives one to a
    definition that names none. `backfill_policy` says how many partitions a backfill gives to one run, by default one; of several, a
    stage makes 32 in one Spark job (`execution.batch.partitions-per-job`), each as if by itself. A sink holds each partition's rows
    apart: running a partition again replaces them.

    With `carry_state` a partition goes on from the keyed state, with its timers, that the one before it ended with, so that partition
    after partition gives what one run over all input gives, and what STREAMING gives. A partition ends with the watermark of what has come
    so far, by the pipeline's strategies, as a micro-batch does; the last partition of a definition that has an end, with the end of
    input. Dagster runs partitions in their order, and in a backfill each stage in runs of its own, since the stages depend on themselves;
    `backfill_policy` is then `BackfillPolicy.single_run()` unless it is given. A partition whose predecessor has not been run is an error.

    With `reuse="fingerprint"` a stage does not run where its latest materialization was made of the same code, configuration, library
    version, input and upstream stages, and still stands: after a change to the last operator, only its stage runs. Sources whose input
    cannot be told by a snapshot, and re-executions, run in any case.

    `upstream` gives the user's own assets that sources read, by the names of the sources, with partition mappings if need be
    (`AssetDep(key, partition_mapping=…)`); the others are shown as external assets.

    `schedule` gives each pipeline a schedule, `<pipeline>_schedule`; an `automation_condition` of the stages, Dagster's declarative
    automation, may stand in its place. `freshness_policy` is that of the stages.

    `pool` is the stages' concurrency pool: a backfill of many partitions runs as many stages at once as the instance gives it slots.

    `retention` gives each pipeline a job `<pipeline>_janitor` and a schedule that free intermediates; without it they are kept.

    `checks` gives the assets of the sinks their checks, and a job that runs them, `<pipeline>_checks`.

    `executor` executes the stages of a run, also in a backfill: by default in one process, with one Spark session. It becomes the code
    location's, unless it is None.

    `deployments` say which pipelines are kept running in STREAMING, and how; one with an unbounded source has the defaults without being among them.

    `resources` may replace `spark` (a `SparkResource` or dagster-pyspark's `PySparkResource`), `execution` (an `ExecutionConfig`)
    and `intermediates` (an `IntermediateIOManager`). The stages are those of the
    options in the environment and the file; the mode and all options can be set at launch. Starts no JVM.
    """
    translator = translator or StageTranslator()
    assets: list[Any] = []
    jobs: list[Any] = []
    sensors: list[Any] = []
    schedules: list[Any] = []
    asset_checks: list[Any] = []
    pipelines = [pipeline] if isinstance(pipeline, Pipeline) else list(pipeline)
    names = [p.name for p in pipelines]
    if len(set(names)) < len(names):
        raise PipelineError(f"two pipelines are named '{next(n for n in names if names.count(n) > 1)}'; a name is part of asset keys and storage paths")
    declared = {d.pipeline.name: d for d in deployments}
    stranger = next((name for name in declared if name not in names), None)
    if stranger is not None:
        raise PipelineError(f"there is a deployment of '{stranger}', which is not among the pipelines: {', '.join(names)}")
    partitions = in_zone(partitions, timezone)
    if carry_state:
        checked_carrying(partitions)
        backfill_policy = backfill_policy or BackfillPolicy.single_run()
    batch = Batch(retry_policy, partitions, backfill_policy, carry_state, reuse, dict(upstream or {}), freshness_policy, automation_condition, pool)
    check_targets(target for each in pipelines for target in written(each.graph()))
    for each in pipelines:
        graph = each.graph()
        loaded = batch.plan(graph, batch_configuration())
        checked_upstream(loaded, batch.upstream)
        assets += source_specs(loaded, batch, translator)
        assets += malformed_specs(loaded, batch.upstream, batch.partitions, translator)
        if loaded.execution.mode == "BATCH":
            with without_beta_warning("backfill_policy"):
                stages = [stage_asset(graph, loaded, region, translator, batch) for region in loaded.regions]
            assets += stages
            sensors.append(heartbeat_sensor(each.name, {stage.op.name for stage in stages}))
            job = define_asset_job(
                f"{each.name}_batch",
                selection=StagesSelection(selected_keys=[stage.key for stage in stages]),
                executor_def=executor,
                description=f"{each.name} in BATCH: {len(stages)} stages, each materialized before the next begins.",
            )
            jobs.append(job)
            if retention is not None:
                janitor = janitor_job(each.name, loaded, retention, partitions if carry_state and isinstance(partitions, TimeWindowPartitionsDefinition) else None)
                jobs.append(janitor)
                schedules.append(janitor_schedule(each.name, retention, janitor))
            if schedule is not None:
                schedules.append(batch_schedule(each.name, schedule, job, partitions, carry_state, [stage.key for stage in stages]))
        else:
            assets += sink_specs(loaded, translator)
        if checks is not None:
            own_checks = sink_checks(graph, loaded, checks, sink_assets(loaded, translator))
            asset_checks += own_checks
            jobs.append(
                define_asset_job(
                    f"{each.name}_checks", selection=AssetSelection.checks(*own_checks), executor_def=executor, description=f"Checks what the sinks of {each.name} hold."
                )
            )
        deployment = declared.get(each.name) or (StreamingDeployment(each) if loaded.execution.mode == "STREAMING" else None)
        if deployment is not None:
            streaming = streaming_job(deployment, sink_assets(loaded, translator), malformed_assets(loaded, translator), streaming_executor)
            jobs += [streaming, control_job(deployment)]
            sensors.append(streaming_sensor(deployment, streaming))
    return Definitions(assets=assets, jobs=jobs, sensors=sensors, schedules=schedules, asset_checks=asset_checks, resources={**_DEFAULTS, **(resources or {})}, executor=executor)


_DEFAULTS: dict[str, Any] = {"spark": SparkResource(), "execution": ExecutionConfig(), "intermediates": IntermediateIOManager()}
"""The same objects each time, so that the definitions of several calls can be merged."""
