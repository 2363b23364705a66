"""`unified_definitions`: everything that Dagster needs of some pipelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from dagster import (
    AssetKey,
    AssetSelection,
    Definitions,
    ExecutorDefinition,
    TimeWindowPartitionsDefinition,
    define_asset_job,
    in_process_executor,
)

from dagster_unified.api.pipeline import Pipeline
from dagster_unified.engine.malformed import diverting
from dagster_unified.errors import ConfigurationError, PipelineError
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.graph.mode import boundedness
from dagster_unified.graph.nodes import Graph
from dagster_unified.graph.plan import Plan, plan
from dagster_unified.graph.targets import check_targets, written
from dagster_unified.orchestration._dagster_compat import without_warning
from dagster_unified.orchestration.assets import stage_asset
from dagster_unified.orchestration.checks import Checks, sink_checks
from dagster_unified.orchestration.control import control_job
from dagster_unified.orchestration.deployments import BatchDeployment, StreamingDeployment, configuration_of
from dagster_unified.orchestration.external_assets import (
    Origin,
    StagesSelection,
    Upstream,
    check_upstream,
    has_savepoints,
    malformed_assets,
    malformed_specs,
    savepoint_spec,
    sink_assets,
    sink_specs,
    source_specs,
    stage_sink_specs,
    stage_sinks,
    start_of,
    stream_spec,
)
from dagster_unified.orchestration.janitor import janitor_job, janitor_schedule
from dagster_unified.orchestration.late_sensor import check_reruns, late_sensor
from dagster_unified.orchestration.outcomes import heartbeat_sensor
from dagster_unified.orchestration.resources import ExecutionConfig, IntermediatesResource, ObjectStore, SparkResource
from dagster_unified.orchestration.schedules import batch_schedule
from dagster_unified.orchestration.stream_materializations import JobAssets
from dagster_unified.orchestration.stream_partitions import partitions_of_stream
from dagster_unified.orchestration.streaming import streaming_job
from dagster_unified.orchestration.streaming_sensor import streaming_sensor
from dagster_unified.orchestration.translator import StageTranslator

_DEFAULTS: dict[str, object] = {
    "spark": SparkResource(),
    "execution": ExecutionConfig(),
    "intermediates": IntermediatesResource(),
}
"""The same objects each time, so that the definitions of several calls can be merged."""

Value = TypeVar("Value")


def unified_definitions(
    *deployments: Pipeline | BatchDeployment | StreamingDeployment,
    resources: Mapping[str, object] | None = None,
    translator: StageTranslator | None = None,
    executor: ExecutorDefinition | None = in_process_executor,
) -> Definitions:
    """Build the Dagster definitions of some pipelines. Starts no JVM.

    A `BatchDeployment` gives one asset per stage, the asset job `<pipeline>_batch`, `<pipeline>_heartbeat_sensor`,
    which is on by default and reports runs as failed whose process has died, and `<pipeline>_janitor`, whose schedule
    is on by default and frees intermediates. A `StreamingDeployment` gives
    `<pipeline>_streaming`, a sensor that keeps it running once you turn it on, and `<pipeline>_control`, which
    suspends, resumes and drains it, takes savepoints and restores them. A pipeline may have both. A pipeline that is
    given as it is, and has no deployment of that kind, has the defaults: those of a `BatchDeployment` where its sources
    are bounded, else those of a `StreamingDeployment`.

    `resources` may replace `spark` (a `SparkResource` or dagster-pyspark's `PySparkResource`), `execution` (an
    `ExecutionConfig`) and `intermediates` (an `IntermediatesResource`). One that is None is left to the other
    definitions of the code location. An `ObjectStore` among them says where the buckets of this process are.
    `translator` names the assets, and sets their groups, tags and metadata.

    `executor` executes the stages of a run, also in a backfill: by default in one process, with one Spark session. It
    becomes the executor of the code location, unless it is None. A stream has the executor of its deployment.

    The assets are the stages by the options in the environment and the file; mode and options can be set at launch.
    """
    for resource in (resources or {}).values():
        if isinstance(resource, ObjectStore):
            resource.use()
    translator = translator or StageTranslator()
    deployed = _by_pipeline(deployments)
    origins = [
        Origin(translator.get_savepoint_key(pipeline.plan), pipeline.batch, pipeline.streaming)
        for pipeline in deployed
        if pipeline.has_savepoints
    ]
    for pipeline in deployed:
        _check_keys(pipeline, translator)
    built = [_build(pipeline, origins, translator, executor) for pipeline in deployed]
    all_resources = {**_DEFAULTS, **(resources or {})}
    ours = {key: resource for key, resource in all_resources.items() if resource is not None}
    return Definitions.merge(*built, Definitions(resources=ours, executor=executor))


def _check_keys(deployed: _Deployed, translator: StageTranslator) -> None:
    """Raise where two parts of a pipeline would be one asset, since their names differ in blanks and signs only."""
    plan = deployed.plan
    named = [(translator.get_source_key(plan, n), f"source '{n.reads}'") for n in plan.graph.readers]
    named += [(translator.get_malformed_key(plan, n), f"malformed rows of '{n.name}'") for n in diverting(plan)]
    if deployed.has_savepoints:
        named.append((translator.get_savepoint_key(plan), "savepoints of the pipeline"))
    if plan.execution.mode == "BATCH":
        named += [(translator.get_asset_key(plan, region), f"stage '{region.name}'") for region in plan.regions]
        named += [(translator.get_stage_sink_key(plan, n), f"sink '{n.name}'") for _, n in stage_sinks(plan)]
    else:
        named += [(translator.get_sink_key(plan, n), f"sink '{n.name}'") for n in plan.graph.sinks]
    owners: dict[AssetKey, str] = {}
    for key, part in named:
        other = owners.setdefault(key, part)
        if other != part:
            raise ConfigurationError(
                f"{plan.name}: {other} and {part} would both be the asset {key.to_user_string()}; give one of them"
                " another name"
            )


@dataclass
class _Deployed:
    pipeline: Pipeline
    batch: BatchDeployment | None = None
    streaming: StreamingDeployment | None = None

    @cached_property
    def graph(self) -> Graph:
        return self.pipeline.graph()

    @cached_property
    def plan(self) -> Plan:
        """The plan that the assets show."""
        if self.batch is not None:
            return self.batch.loaded()
        assert self.streaming is not None
        return plan(self.graph, configuration_of(self.streaming))

    @cached_property
    def stream_partitions(self) -> TimeWindowPartitionsDefinition | None:
        """The partitions by which the stream is materialized, if it is."""
        return None if self.streaming is None else partitions_of_stream(self.streaming, self.batch)

    @cached_property
    def has_savepoints(self) -> bool:
        """Whether it leaves savepoints, or one can be taken of it."""
        return has_savepoints(self.plan, self.batch, self.streaming)

    @property
    def checks(self) -> Checks | None:
        checks = self._only("checks", [d.checks for d in self._declared if d.checks is not None])
        if checks is not None and checks.rows_within is not None and self.batch is None:
            raise ConfigurationError(
                f"{self.pipeline.name}: rows_within compares the row counts of runs in BATCH, and this pipeline is"
                " deployed in STREAMING only; leave it out, or see with fresh_within whether rows still come"
            )
        return checks

    @property
    def upstream(self) -> Upstream:
        """The user's assets, by the names of the sources that read them."""
        return self._only("upstream", [d.upstream for d in self._declared if d.upstream]) or {}

    @property
    def _declared(self) -> list[BatchDeployment | StreamingDeployment]:
        return [deployment for deployment in (self.batch, self.streaming) if deployment is not None]

    def _only(self, argument: str, values: Sequence[Value]) -> Value | None:
        if len(values) > 1:
            raise ConfigurationError(
                f"{self.pipeline.name}: both its BatchDeployment and its StreamingDeployment give {argument}; they go"
                " for the assets of both, so give them in one place"
            )
        return values[0] if values else None


def _by_pipeline(declared: Sequence[Pipeline | BatchDeployment | StreamingDeployment]) -> list[_Deployed]:
    by_name: dict[str, _Deployed] = {}
    for declaration in declared:
        if not isinstance(declaration, (Pipeline, BatchDeployment, StreamingDeployment)):
            raise ConfigurationError(
                f"unified_definitions takes pipelines and deployments of pipelines, each by itself, not {declaration!r}"
            )
        pipeline = declaration if isinstance(declaration, Pipeline) else declaration.pipeline
        deployed = by_name.setdefault(pipeline.name, _Deployed(pipeline))
        if deployed.pipeline is not pipeline:
            raise PipelineError(
                f"two pipelines are named '{pipeline.name}'; a name is part of asset keys and storage paths"
            )
        if isinstance(declaration, Pipeline):
            continue
        kind = "batch" if isinstance(declaration, BatchDeployment) else "streaming"
        if getattr(deployed, kind) is not None:
            raise PipelineError(
                f"{pipeline.name} has two deployments of one kind: {type(declaration).__name__}; give one, or build a"
                " second pipeline with another name"
            )
        setattr(deployed, kind, declaration)
    for pipeline in (declaration for declaration in declared if isinstance(declaration, Pipeline)):
        deployed = by_name[pipeline.name]
        if boundedness(deployed.graph) is Boundedness.BOUNDED:
            deployed.batch = deployed.batch or BatchDeployment(pipeline)
        else:
            deployed.streaming = deployed.streaming or StreamingDeployment(pipeline)
    check_targets(target for deployed in by_name.values() for target in written(deployed.graph))
    return list(by_name.values())


def _build(
    deployed: _Deployed, origins: Sequence[Origin], translator: StageTranslator, executor: ExecutorDefinition | None
) -> Definitions:
    shown, upstream = deployed.plan, deployed.upstream
    start = None if deployed.streaming is None else start_of(deployed.streaming, origins)
    partitions = None if deployed.batch is None else deployed.batch.partitions
    check_upstream(shown, upstream)
    if deployed.streaming is not None and deployed.streaming.rerun_late:
        check_reruns(deployed.streaming, deployed.batch, deployed.stream_partitions)
    specs = [*source_specs(shown, upstream, translator), *malformed_specs(shown, upstream, partitions, translator)]
    if deployed.has_savepoints:
        specs.append(savepoint_spec(shown, upstream, translator))
    if deployed.batch is None:
        specs += sink_specs(shown, upstream, start, deployed.stream_partitions, translator)
    else:
        specs += stage_sink_specs(shown, partitions, translator)
        if start is not None:
            specs.append(stream_spec(shown, start, translator))
    built = [Definitions(assets=specs)]
    if deployed.batch is not None:
        built.append(_batch(deployed, deployed.batch, upstream, translator, executor))
    if deployed.checks is not None:
        built.append(_checks(deployed.graph, shown, deployed.checks, translator, executor))
    if deployed.streaming is not None:
        built.append(_streaming(deployed, deployed.streaming, start, translator))
    return Definitions.merge(*built)


def _batch(
    deployed: _Deployed,
    deployment: BatchDeployment,
    upstream: Upstream,
    translator: StageTranslator,
    executor: ExecutorDefinition | None,
) -> Definitions:
    loaded = deployed.plan
    name, partitions = loaded.name, deployment.partitions
    with without_warning("backfill_policy"):
        stages = [stage_asset(deployment, loaded, region, upstream, translator) for region in loaded.regions]
    keys = [stage.key for stage in stages]
    retention = deployment.retention
    kept_for = f"{name}_janitor: {retention.describe()}" if retention is not None else "All intermediates are kept"
    job = define_asset_job(
        f"{name}_batch",
        selection=StagesSelection(selected_keys=keys),
        executor_def=executor,
        description=f"{name} in BATCH: {len(stages)} stages, each materialized before the next begins. {kept_for}.",
    )
    heartbeat = heartbeat_sensor(name, {stage.op.name for stage in stages})
    built = [Definitions(assets=stages, jobs=[job], sensors=[heartbeat])]
    if retention is not None:
        carried_over = (
            partitions if deployment.carry_state and isinstance(partitions, TimeWindowPartitionsDefinition) else None
        )
        janitor = janitor_job(name, loaded, retention, carried_over)
        built.append(Definitions(jobs=[janitor], schedules=[janitor_schedule(name, retention, janitor)]))
    if deployed.streaming is not None and deployed.stream_partitions is not None and deployed.streaming.rerun_late:
        tables = list(sink_assets(loaded, translator).values())
        late = late_sensor(deployed.streaming, deployed.stream_partitions, job, tables)
        built.append(Definitions(sensors=[late]))
    if deployment.schedule is not None:
        tick = batch_schedule(name, deployment.schedule, job, partitions, deployment.carry_state, keys)
        built.append(Definitions(schedules=[tick]))
    return Definitions.merge(*built)


def _checks(
    graph: Graph, loaded: Plan, checks: Checks, translator: StageTranslator, executor: ExecutorDefinition | None
) -> Definitions:
    of_sinks = sink_checks(graph, loaded, checks, sink_assets(loaded, translator))
    job = define_asset_job(
        f"{loaded.name}_checks",
        selection=AssetSelection.checks(*of_sinks),
        executor_def=executor,
        description=f"Checks what the sinks of {loaded.name} hold.",
    )
    return Definitions(asset_checks=of_sinks, jobs=[job])


def _streaming(
    deployed: _Deployed, deployment: StreamingDeployment, start: AssetKey | None, translator: StageTranslator
) -> Definitions:
    loaded = deployed.plan
    savepoint = translator.get_savepoint_key(loaded)
    stream = translator.get_stream_key(loaded) if deployed.batch is not None and start is not None else None
    sinks, malformed = sink_assets(loaded, translator), malformed_assets(loaded, translator)
    assets = JobAssets(sinks, malformed, savepoint, stream, deployed.stream_partitions)
    streaming = streaming_job(deployment, assets)
    control = control_job(deployment, savepoint if deployed.has_savepoints else None)
    return Definitions(jobs=[streaming, control], sensors=[streaming_sensor(deployment, streaming, assets)])
