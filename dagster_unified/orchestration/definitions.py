"""`unified_definitions`: everything that Dagster needs of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dagster import AssetSelection, Definitions, RetryPolicy, define_asset_job, in_process_executor

from dagster_unified.api.pipeline import Pipeline
from dagster_unified.errors import PipelineError
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import plan
from dagster_unified.orchestration.assets import DEFAULT_RETRY, source_specs, stage_asset
from dagster_unified.orchestration.io_manager import IntermediateIOManager
from dagster_unified.orchestration.resources import ExecutionConfig, SparkResource
from dagster_unified.orchestration.translator import StageTranslator


def unified_definitions(
    pipeline: Pipeline | Sequence[Pipeline],
    resources: Mapping[str, Any] | None = None,
    translator: StageTranslator | None = None,
    retry_policy: RetryPolicy | None = DEFAULT_RETRY,
) -> Definitions:
    """One asset per stage and one asset job `<pipeline>_batch` for each pipeline, with the resources that they need.

    `resources` may replace `spark` (a `SparkResource` or dagster-pyspark's `PySparkResource`), `execution` (an `ExecutionConfig`)
    and `intermediates` (an `IntermediateIOManager`). The stages are those of the default configuration; the mode and all options
    are set at launch. Starts no JVM.
    """
    translator = translator or StageTranslator()
    assets: list[Any] = []
    jobs = []
    pipelines = [pipeline] if isinstance(pipeline, Pipeline) else list(pipeline)
    names = [p.name for p in pipelines]
    if len(set(names)) < len(names):
        raise PipelineError(f"two pipelines are named '{next(n for n in names if names.count(n) > 1)}'; a name is part of asset keys and storage paths")
    for each in pipelines:
        graph = each.graph()
        loaded = plan(graph, Configuration())
        stages = [stage_asset(graph, loaded, region, translator, retry_policy) for region in loaded.regions]
        assets += [*source_specs(loaded, translator), *stages]
        jobs.append(
            define_asset_job(
                f"{each.name}_batch",
                selection=AssetSelection.assets(*stages),
                executor_def=in_process_executor,
                description=f"{each.name} in BATCH: {len(stages)} stages, each materialized before the next begins.",
            )
        )
    given = {"spark": SparkResource(), "execution": ExecutionConfig(), "intermediates": IntermediateIOManager(), **(resources or {})}
    return Definitions(assets=assets, jobs=jobs, resources=given)
