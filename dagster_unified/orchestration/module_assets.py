"""`@unified_assets`: a pipeline inside a module of assets, for a location that has its jobs and sensors elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dagster import AssetsDefinition

from dagster_unified.api.pipeline import Pipeline
from dagster_unified.errors import ConfigurationError
from dagster_unified.orchestration.definitions import DEFAULTS, unified_definitions
from dagster_unified.orchestration.deployments import BatchDeployment
from dagster_unified.orchestration.tables import SHARED, TABLES
from dagster_unified.orchestration.translator import PipelineTranslator

_OF_DEFINITIONS = ("schedule", "retention", "checks")


def unified_assets(
    *, name: str | None = None, translator: PipelineTranslator | None = None, **deployment: Any
) -> Callable[[Callable[[Pipeline], object]], list[AssetsDefinition]]:
    """Make the assets of a pipeline in BATCH of the function that builds it, as `@dbt_assets` does of a project.

    The function gets an empty `Pipeline` of its own name, or of `name`. What stands for it in the module is a list: a
    definition for each stage, with the tables that it writes, and one for each source. `load_assets_from_modules` finds
    it, and `Definitions(assets=[*revenue])` takes it. `deployment` has the arguments of a `BatchDeployment`, such as
    `partitions`, `upstream`, `automation_condition` or `options`.

    The location gives the resources: those of `unified_resources()`, or its own. Jobs, schedules, sensors, checks and
    the janitor come with `unified_definitions` only, as does STREAMING: `schedule`, `retention` and `checks` raise
    `ConfigurationError`, as does a `ResourceKey` of a source or a sink, and intermediates are kept.

    There is an example at `docs/guides/dagster-project.md`.
    """

    def decorated(build: Callable[[Pipeline], object]) -> list[AssetsDefinition]:
        pipeline = Pipeline(name or build.__name__)
        for argument in _OF_DEFINITIONS:
            if argument in deployment:
                raise ConfigurationError(
                    f"{pipeline.name}: {argument} makes more than assets, and @unified_assets gives assets only; leave"
                    " it out, or use unified_definitions"
                )
        build(pipeline)
        if pipeline.graph().resource_keys:
            raise ConfigurationError(
                f"{pipeline.name}: its sources and sinks name the resources"
                f" {', '.join(sorted(pipeline.graph().resource_keys))}, and its tables are then loaded by a resource of"
                " its own, which @unified_assets cannot give; use unified_definitions"
            )
        definitions = unified_definitions(
            BatchDeployment(pipeline, **deployment, retention=None), translator=translator, executor=None
        )
        return [made for made in definitions.assets or [] if isinstance(made, AssetsDefinition)]

    return decorated


def unified_resources() -> dict[str, object]:
    """Return the resources that the assets of `@unified_assets` need, with their defaults.

    They are `spark`, `execution`, `intermediates`, `object_store`, and `unified_tables`, which loads tables for assets
    of yours. Replace some as `Definitions(resources={**unified_resources(), "spark": ...})`. Dagster refuses a location
    without them, and names the key and the step that needs it.

    There is an example at `docs/guides/dagster-project.md`.
    """
    return {**DEFAULTS, TABLES: SHARED}
