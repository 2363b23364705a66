"""Assets that no step of their own makes: sources, malformed rows, and sinks that a stage or a stream writes.

A stage's asset stands for the one sink that it writes. With several sinks, each is an external asset that depends on
the stage, and the stage's step reports it as materialized. A stream reports what it has written to its sinks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dagster import (
    AssetDep,
    AssetKey,
    AssetMaterialization,
    AssetObservation,
    AssetSpec,
    MetadataValue,
    PartitionsDefinition,
)

from dagster_unified.engine.batch.intermediates.store import Manifest
from dagster_unified.engine.malformed import SCHEMA, Diverted, diverting
from dagster_unified.errors import PipelineError, nearest
from dagster_unified.graph.nodes import ReadingNode, SinkNode
from dagster_unified.graph.plan import Plan, Region
from dagster_unified.orchestration._dagster_compat import CoercibleToAssetDep
from dagster_unified.orchestration.metadata import columns_metadata, preview, table_schema
from dagster_unified.orchestration.targets import targets_metadata
from dagster_unified.orchestration.translator import StageTranslator


def upstream_deps(
    loaded: Plan,
    sources: Sequence[ReadingNode],
    given: Mapping[str, CoercibleToAssetDep],
    translator: StageTranslator,
) -> list[AssetDep]:
    """The assets that a stage depends on through its sources."""
    found: dict[AssetKey, AssetDep] = {}
    for node in sources:
        dep = upstream_dep(loaded, node, given, translator)
        found.setdefault(dep.asset_key, dep)
    return list(found.values())


def upstream_dep(
    loaded: Plan, node: ReadingNode, given: Mapping[str, CoercibleToAssetDep], translator: StageTranslator
) -> AssetDep:
    """The asset that a source reads: the user's own, or the one that stands for it."""
    if name_of(node) in given:
        return AssetDep.from_coercible(given[name_of(node)])
    return AssetDep(translator.get_source_key(loaded, node))


def name_of(node: ReadingNode) -> str:
    """The name of what a node reads."""
    return node.source.name


def checked_upstream(loaded: Plan, given: Mapping[str, CoercibleToAssetDep]) -> None:
    """Raises where `upstream` names a source that the pipeline does not have."""
    names = {name_of(n) for n in loaded.graph.readers}
    for name in given:
        if name not in names:
            raise PipelineError(
                f"{loaded.name}: upstream names the source '{name}', and there are"
                f" {', '.join(sorted(names))}{nearest(name, names)}"
            )


def source_specs(
    loaded: Plan, upstream: Mapping[str, CoercibleToAssetDep], translator: StageTranslator
) -> list[AssetSpec]:
    """The external assets that stand for the sources, where there is no asset of the user's."""
    nodes = {translator.get_source_key(loaded, n): n for n in loaded.graph.readers if name_of(n) not in upstream}
    return [
        AssetSpec(
            key,
            group_name=loaded.name,
            description=n.source.describe(),
            kinds={n.source.kind} - {""},
            metadata={"boundedness": n.source.boundedness.value, **columns_metadata(n.source.records)},
        )
        for key, n in nodes.items()
    ]


def sink_assets(planned: Plan, translator: StageTranslator) -> dict[str, AssetKey]:
    """The asset of each sink, by the sink's name: that of the stage that writes it in BATCH, or one of its own."""
    found = {}
    for node in planned.graph.sinks:
        staged = planned.execution.mode == "BATCH"
        found[node.name] = (
            translator.get_asset_key(planned, planned.region_of(node.id))
            if staged
            else translator.get_sink_key(planned, node)
        )
    return found


def sink_specs(
    planned: Plan, upstream: Mapping[str, CoercibleToAssetDep], start: AssetKey | None, translator: StageTranslator
) -> list[AssetSpec]:
    """The external assets that stand for the sinks of a pipeline that has no BATCH stages.

    `start` is the asset of the savepoint that the stream starts from.
    """
    before = [] if start is None else [AssetDep(start)]

    def read_by(node: SinkNode) -> list[ReadingNode]:
        earlier = planned.upstream(node.id)
        return [n for n in planned.graph.readers if n.id in earlier]

    return [
        AssetSpec(
            translator.get_sink_key(planned, node),
            deps=[*upstream_deps(planned, read_by(node), upstream, translator), *before],
            group_name=planned.name,
            description=(
                f"{node.sink.describe()}, written by {planned.name} in STREAMING ({node.sink.capabilities.describe()})."
            ),
            kinds={"spark", "streaming", node.sink.kind} - {""},
            metadata={
                **targets_metadata(planned, [node.id]),
                **columns_metadata(planned.graph.written_to(node.id)),
            },
        )
        for node in planned.graph.sinks
    ]


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


SHOWN = 10
"""Rows in a preview."""


def malformed_assets(plan: Plan, translator: StageTranslator) -> dict[str, AssetKey]:
    """The asset of each source that sets malformed rows aside, by the source's uid."""
    return {node.uid: translator.get_malformed_key(plan, node) for node in diverting(plan)}


def malformed_specs(
    plan: Plan,
    upstream: Mapping[str, CoercibleToAssetDep],
    partitions: PartitionsDefinition[str] | None,
    translator: StageTranslator,
) -> list[AssetSpec]:
    """Those assets. The steps that read a source materialize them, in addition to their own."""
    return [
        AssetSpec(
            translator.get_malformed_key(plan, node),
            deps=upstream_deps(plan, [node], upstream, translator),
            group_name=plan.name,
            description=(
                f"Rows of source '{node.source.name}' ({node.source.describe()}) that do not fit"
                f" {node.source.records.describe()}."
            ),
            kinds={"parquet"},
            partitions_def=partitions,
            metadata={"dagster/column_schema": table_schema(SCHEMA)},
        )
        for node in diverting(plan)
    ]


def materialized(key: AssetKey, diverted: Diverted, rows: int, partition: str | None) -> AssetMaterialization:
    """What a BATCH run has set aside of a partition, or of all input."""
    return AssetMaterialization(asset_key=key, partition=partition, metadata=_metadata(diverted, rows))


def observation(key: AssetKey, diverted: Diverted) -> AssetObservation:
    """What a STREAMING job has set aside so far."""
    return AssetObservation(asset_key=key, metadata=_metadata(diverted, diverted.rows()))


def _metadata(diverted: Diverted, rows: int) -> dict[str, Any]:
    found: dict[str, Any] = {"dagster/row_count": rows, "rows are at": MetadataValue.path(str(diverted.folder))}
    if rows:
        found["latest rows"] = preview(diverted.table(SHOWN))
    return found
