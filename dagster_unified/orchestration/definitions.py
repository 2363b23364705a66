"""`unified_definitions`: everything that Dagster needs of some pipelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dagster import (
    AssetDep,
    AssetKey,
    AssetsDefinition,
    AssetSelection,
    AssetSpec,
    Definitions,
    ExecutorDefinition,
    ResourceDefinition,
    TimeWindowPartitionsDefinition,
    define_asset_job,
    in_process_executor,
)

from dagster_unified.api.pipeline import Pipeline
from dagster_unified.engine.malformed import diverting
from dagster_unified.errors import ConfigurationError
from dagster_unified.graph.nodes import Graph
from dagster_unified.graph.plan import Plan
from dagster_unified.orchestration._dagster_compat import without_warning
from dagster_unified.orchestration.assets import stage_assets
from dagster_unified.orchestration.catalog import Catalog
from dagster_unified.orchestration.checks import Checks, sink_checks
from dagster_unified.orchestration.control import control_job
from dagster_unified.orchestration.deployed import Deployed, by_pipeline
from dagster_unified.orchestration.deployments import BatchDeployment, StreamingDeployment
from dagster_unified.orchestration.external_assets import (
    Origin,
    StagesSelection,
    check_upstream,
    start_of,
    targets_metadata,
)
from dagster_unified.orchestration.janitor import janitor_job, janitor_schedule
from dagster_unified.orchestration.late_sensor import check_reruns, late_sensor
from dagster_unified.orchestration.outcomes import heartbeat_sensor
from dagster_unified.orchestration.resources import (
    OBJECT_STORE,
    ExecutionConfig,
    IntermediatesResource,
    ObjectStore,
    SparkResource,
)
from dagster_unified.orchestration.schedules import batch_schedule
from dagster_unified.orchestration.shadow import shadow_job
from dagster_unified.orchestration.stream_materializations import JobAssets
from dagster_unified.orchestration.streaming import streaming_job
from dagster_unified.orchestration.streaming_sensor import streaming_sensor
from dagster_unified.orchestration.tables import loaded_by, table_loader, tables_of
from dagster_unified.orchestration.translator import Malformed, PipelineTranslator, Savepoints, Stage, Stream

DEFAULTS: dict[str, object] = {
    "spark": SparkResource(),
    "execution": ExecutionConfig(),
    "intermediates": IntermediatesResource(),
    OBJECT_STORE: ResourceDefinition.none_resource("The object store is that of the machine's environment."),
}
"""The same objects each time, so that the definitions of several calls can be merged."""


def unified_definitions(
    *deployments: Pipeline | BatchDeployment | StreamingDeployment,
    resources: Mapping[str, object] | None = None,
    translator: PipelineTranslator | None = None,
    executor: ExecutorDefinition | None = in_process_executor,
) -> Definitions:
    """Build the Dagster definitions of some pipelines. Starts no JVM.

    Each sink's table is one asset, `<pipeline>/<sink>` unless the sink or the translator says another key, whichever
    mode writes it. A pipeline that reads what another one here writes depends on that asset. A `BatchDeployment` gives
    one asset per stage beside them, the asset job `<pipeline>_batch`, `<pipeline>_heartbeat_sensor`,
    which is on by default and reports runs as failed whose process has died, and `<pipeline>_janitor`, whose schedule
    is on by default and frees intermediates. A `StreamingDeployment` gives
    `<pipeline>_streaming`, a sensor that keeps it running once you turn it on, and `<pipeline>_control`, which
    suspends, resumes and drains it, takes savepoints and restores them, and `<pipeline>_shadow` where its new code runs
    beside the old. A pipeline may have both. A pipeline that is
    given as it is, and has no deployment of that kind, has the defaults: those of a `BatchDeployment` where its sources
    are bounded, else those of a `StreamingDeployment`.

    `resources` may replace `spark` (a `SparkResource` or dagster-pyspark's `PySparkResource`), `execution` (an
    `ExecutionConfig`), `intermediates` (an `IntermediatesResource`) and `object_store` (an `ObjectStore`, which says
    where buckets are). One that is None is left to the other definitions of the code location; so is each that a
    `ResourceKey` of a source or a sink names. The resource `unified_tables` is there for assets of yours
    that take a table of a pipeline as an argument; it is `<pipeline>_tables` where the pipeline names resources.
    `translator` names the assets, and sets their groups, tags and metadata.

    `executor` executes the stages of a run, also in a backfill: by default in one process, with one Spark session. It
    becomes the executor of the code location, unless it is None. A stream has the executor of its deployment.

    The assets are the stages by the options in the environment and the file; mode and options can be set at launch.
    """
    for key, resource in (resources or {}).items():
        if isinstance(resource, ObjectStore):
            if key != OBJECT_STORE:
                raise ConfigurationError(
                    f"the resource '{key}' is an ObjectStore, and runs, sensors and checks look for it as"
                    f" '{OBJECT_STORE}'; give it by that key"
                )
            resource.use()
    deployed = by_pipeline(deployments)
    return definitions_of(deployed, Catalog(deployed, translator or PipelineTranslator()), resources, executor)


def definitions_of(
    deployed: Sequence[Deployed],
    catalog: Catalog,
    resources: Mapping[str, object] | None,
    executor: ExecutorDefinition | None,
) -> Definitions:
    """Build the definitions of some pipelines of a catalog; what they share with the others of it has one owner."""
    origins = [
        Origin(catalog.key(Savepoints(pipeline.plan)), pipeline.batch, pipeline.streaming)
        for pipeline in catalog.deployed
        if pipeline.has_savepoints
    ]
    built = [_build(pipeline, origins, catalog, executor) for pipeline in deployed]
    all_resources = {**DEFAULTS, **(resources or {})}
    ours = {key: resource for key, resource in all_resources.items() if resource is not None}
    return Definitions.merge(*built, Definitions(resources=ours, executor=executor))


def _build(
    deployed: Deployed, origins: Sequence[Origin], catalog: Catalog, executor: ExecutorDefinition | None
) -> Definitions:
    shown = deployed.plan
    start = None if deployed.streaming is None else start_of(deployed.streaming, origins)
    check_upstream(shown, deployed.upstream)
    if deployed.streaming is not None and deployed.streaming.rerun_late:
        check_reruns(deployed.streaming, deployed.batch, deployed.stream_partitions)
    loader = table_loader(shown, catalog)
    # Of specs Dagster makes one definition for the whole location; a job that reads one of them then has all of it.
    external = [AssetsDefinition(specs=[spec]) for spec in _external_assets(deployed, start, catalog)]
    built = [Definitions(assets=external, resources={tables_of(shown): loader})]
    if deployed.batch is not None:
        built.append(_batch(deployed, deployed.batch, catalog, executor))
    if deployed.checks is not None:
        built.append(_checks(deployed.graph, shown, deployed.checks, catalog, executor))
    if deployed.streaming is not None:
        built.append(_streaming(deployed, deployed.streaming, start, catalog))
    return Definitions.merge(*built)


def _external_assets(deployed: Deployed, start: AssetKey | None, catalog: Catalog) -> list[AssetSpec]:
    """Return the assets of a pipeline that no step makes. `start` is the savepoint that its stream starts from."""
    plan = deployed.plan
    partitions = None if deployed.batch is None else deployed.batch.partitions
    specs = catalog.inputs(plan)
    for node in diverting(plan):
        spec = catalog.spec(Malformed(plan, node))
        specs.append(spec.replace_attributes(deps=catalog.read_by(plan, [node]), partitions_def=partitions))
    if deployed.has_savepoints:
        keyed = [region for region in plan.regions if any(node.runs_by_key for node in plan.nodes_of(region))]
        stages = [AssetDep(catalog.key(Stage(plan, region))) for region in keyed]
        deps = stages if deployed.batch is not None else catalog.read_by(plan, plan.graph.readers)
        specs.append(catalog.spec(Savepoints(plan)).replace_attributes(deps=deps))
    if deployed.batch is None:
        started_from = [] if start is None else [AssetDep(start)]
        specs += [
            loaded_by(
                spec.replace_attributes(
                    deps=[*spec.deps, *started_from], partitions_def=deployed.stream_partitions
                ).merge_attributes(kinds={"streaming"}, metadata=targets_metadata(plan, [number])),
                plan,
                catalog,
            )
            for number, spec in catalog.made_by(plan, [node.id for node in plan.graph.sinks]).items()
        ]
    elif start is not None:
        specs.append(catalog.spec(Stream(plan)).replace_attributes(deps=[start]))
    return specs


def _batch(
    deployed: Deployed, deployment: BatchDeployment, catalog: Catalog, executor: ExecutorDefinition | None
) -> Definitions:
    loaded = deployed.plan
    name, partitions = loaded.name, deployment.partitions
    with without_warning("backfill_policy"):
        stages = [stage_assets(deployment, loaded, region, catalog) for region in loaded.regions]
    keys = [catalog.key(Stage(loaded, region)) for region in loaded.regions]
    retention = deployment.retention
    kept_for = f"{name}_janitor: {retention.describe()}" if retention is not None else "All intermediates are kept"
    job = define_asset_job(
        f"{name}_batch",
        selection=StagesSelection(selected_keys=[key for stage in stages for key in stage.keys]),
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
        tables = list(catalog.tables(loaded).values())
        late = late_sensor(deployed.streaming, deployed.stream_partitions, job, tables)
        built.append(Definitions(sensors=[late]))
    if deployment.schedule is not None:
        tick = batch_schedule(name, deployment.schedule, job, partitions, deployment.carry_state, keys)
        built.append(Definitions(schedules=[tick]))
    return Definitions.merge(*built)


def _checks(
    graph: Graph, loaded: Plan, checks: Checks, catalog: Catalog, executor: ExecutorDefinition | None
) -> Definitions:
    of_sinks = sink_checks(graph, loaded, checks, catalog.tables(loaded))
    job = define_asset_job(
        f"{loaded.name}_checks",
        selection=AssetSelection.checks(*of_sinks),
        executor_def=executor,
        description=f"Checks what the sinks of {loaded.name} hold.",
    )
    return Definitions(asset_checks=of_sinks, jobs=[job])


def _streaming(
    deployed: Deployed, deployment: StreamingDeployment, start: AssetKey | None, catalog: Catalog
) -> Definitions:
    loaded = deployed.plan
    savepoint = catalog.key(Savepoints(loaded))
    stream = catalog.key(Stream(loaded)) if deployed.batch is not None and start is not None else None
    malformed = {node.uid: catalog.key(Malformed(loaded, node)) for node in diverting(loaded)}
    assets = JobAssets(catalog.tables(loaded), malformed, savepoint, stream, deployed.stream_partitions)
    streaming = streaming_job(deployment, assets)
    control = control_job(deployment, savepoint if deployed.has_savepoints else None)
    beside = shadow_job(deployment, assets) if deployment.upgrade_mode == "shadow" else None
    sensor = streaming_sensor(deployment, streaming, beside, assets)
    return Definitions(jobs=[streaming, control, *([] if beside is None else [beside])], sensors=[sensor])
