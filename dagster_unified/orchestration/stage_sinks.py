"""The sinks of a stage that writes several, as assets of their own.

A stage's asset stands for the one sink that it writes. With several, each is an external asset that depends on the
stage, and that the stage's step reports as materialized.
"""

from __future__ import annotations

from collections.abc import Iterator

from dagster import AssetDep, AssetMaterialization, AssetSpec, MetadataValue, PartitionsDefinition

from dagster_unified.engine.batch.intermediates.store import Manifest
from dagster_unified.graph.nodes import SinkNode
from dagster_unified.graph.plan import Plan, Region
from dagster_unified.orchestration.metadata import columns_metadata
from dagster_unified.orchestration.translator import StageTranslator


def stage_sink_specs(
    plan: Plan, partitions: PartitionsDefinition[str] | None, translator: StageTranslator
) -> list[AssetSpec]:
    """The external assets of the sinks of all stages that write several."""
    return [
        AssetSpec(
            translator.get_stage_sink_key(plan, node),
            deps=[AssetDep(translator.get_asset_key(plan, region))],
            group_name=translator.get_group_name(plan, region),
            description=f"{node.sink.describe()}, written by stage '{region.name}' of {plan.name}.",
            kinds={node.sink.kind} - {""},
            partitions_def=partitions,
            metadata=columns_metadata(plan.graph.written_to(node.id)),
        )
        for region in plan.regions
        for node in _several(plan, region)
    ]


def materialized_sinks(
    plan: Plan, manifest: Manifest, partition: str | None, translator: StageTranslator
) -> Iterator[AssetMaterialization]:
    """What was written to those sinks; `plan` is the one whose stages are assets."""
    for node in (node for region in plan.regions for node in _several(plan, region)):
        if node.name in manifest.sinks:
            yield AssetMaterialization(
                translator.get_stage_sink_key(plan, node),
                partition=partition,
                metadata={"written to": MetadataValue.path(manifest.sinks[node.name])},
            )


def _several(plan: Plan, region: Region) -> list[SinkNode]:
    """The sinks of a stage that has more than one."""
    found = [node for node in plan.graph.sinks if node.id in region.sinks]
    return found if len(found) > 1 else []
