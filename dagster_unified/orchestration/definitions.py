"""`unified_definitions`: everything that Dagster needs of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dagster import AssetSelection, Definitions, ExecutorDefinition, RetryPolicy, define_asset_job, in_process_executor

from dagster_unified.api.pipeline import Pipeline
from dagster_unified.errors import PipelineError
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import plan
from dagster_unified.orchestration.assets import DEFAULT_RETRY, source_specs, stage_asset
from dagster_unified.orchestration.deployment import StreamingDeployment
from dagster_unified.orchestration.io_manager import IntermediateIOManager
from dagster_unified.orchestration.resources import ExecutionConfig, SparkResource
from dagster_unified.orchestration.streaming import sink_assets, sink_specs, streaming_jobs, streaming_sensor
from dagster_unified.orchestration.translator import StageTranslator


def unified_definitions(
    pipeline: Pipeline | Sequence[Pipeline],
    resources: Mapping[str, Any] | None = None,
    translator: StageTranslator | None = None,
    retry_policy: RetryPolicy | None = DEFAULT_RETRY,
    deployments: Sequence[StreamingDeployment] = (),
    streaming_executor: ExecutorDefinition = in_process_executor,
) -> Definitions:
    """For each pipeline that can run in BATCH, one asset per stage and one asset job `<pipeline>_batch`; for each pipeline `<pipeline>_streaming`,
    a sensor that keeps it alive once it is turned on, `<pipeline>_suspend`, `_resume`, `_drain`, `_savepoint` and `_restore`; and the resources that they need.

    `deployments` say how pipelines are kept running in STREAMING; one that is not among them has the defaults.

    `resources` may replace `spark` (a `SparkResource` or dagster-pyspark's `PySparkResource`), `execution` (an `ExecutionConfig`)
    and `intermediates` (an `IntermediateIOManager`). The stages are those of the default configuration; the mode and all options
    are set at launch. Starts no JVM.
    """
    translator = translator or StageTranslator()
    assets: list[Any] = []
    jobs: list[Any] = []
    sensors = []
    pipelines = [pipeline] if isinstance(pipeline, Pipeline) else list(pipeline)
    names = [p.name for p in pipelines]
    if len(set(names)) < len(names):
        raise PipelineError(f"two pipelines are named '{next(n for n in names if names.count(n) > 1)}'; a name is part of asset keys and storage paths")
    declared = {d.pipeline.name: d for d in deployments}
    stranger = next((name for name in declared if name not in names), None)
    if stranger is not None:
        raise PipelineError(f"there is a deployment of '{stranger}', which is not among the pipelines: {', '.join(names)}")
    for each in pipelines:
        graph = each.graph()
        loaded = plan(graph, Configuration())
        assets += source_specs(loaded, translator)
        if loaded.execution.mode == "BATCH":
            stages = [stage_asset(graph, loaded, region, translator, retry_policy) for region in loaded.regions]
            assets += stages
            jobs.append(
                define_asset_job(
                    f"{each.name}_batch",
                    selection=AssetSelection.assets(*stages),
                    executor_def=in_process_executor,
                    description=f"{each.name} in BATCH: {len(stages)} stages, each materialized before the next begins.",
                )
            )
        else:
            assets += sink_specs(loaded, translator)
        deployment = declared.get(each.name, StreamingDeployment(each))
        streaming = streaming_jobs(deployment, sink_assets(loaded, translator), streaming_executor)
        jobs += streaming
        sensors.append(streaming_sensor(deployment, streaming[0]))
    given = {"spark": SparkResource(), "execution": ExecutionConfig(), "intermediates": IntermediateIOManager(), **(resources or {})}
    return Definitions(assets=assets, jobs=jobs, sensors=sensors, resources=given)
