"""Dagster's partitions as slices of a pipeline's input. Time zones and days of 23 or 25 hours are those of the partitions definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dagster import AssetDep, AssetKey, MultiPartitionKey, MultiPartitionsDefinition, PartitionsDefinition, TimeWindowPartitionsDefinition
from dagster._core.definitions.assets.definition.asset_dep import CoercibleToAssetDep

from dagster_unified.errors import PipelineError, nearest
from dagster_unified.graph.nodes import LookupNode, SourceNode
from dagster_unified.graph.plan import Plan
from dagster_unified.graph.slices import Slice, TimeRange
from dagster_unified.orchestration.translator import StageTranslator


def slice_of(partitions: PartitionsDefinition[str], key: str) -> Slice:
    """What a partition is to the sources."""
    if isinstance(partitions, MultiPartitionsDefinition):
        several = partitions.get_partition_key_from_str(key)
        assert isinstance(several, MultiPartitionKey)
        by_name = several.keys_by_dimension
        return Slice(key, {d.name: _part(d.partitions_def, by_name[d.name]) for d in partitions.partitions_defs})
    return Slice(key, {"": _part(partitions, key)})


def _part(partitions: PartitionsDefinition[str], key: str) -> TimeRange | str:
    if isinstance(partitions, TimeWindowPartitionsDefinition):
        window = partitions.time_window_for_partition_key(key)
        return TimeRange(window.start, window.end)
    return key


def upstream_deps(loaded: Plan, sources: Sequence[SourceNode | LookupNode], given: Mapping[str, CoercibleToAssetDep], translator: StageTranslator) -> list[AssetDep]:
    """What a stage depends on by the sources that it reads: the user's own assets, or those that stand for the sources."""
    found: dict[AssetKey, AssetDep] = {}
    for node in sources:
        dep = AssetDep.from_coercible(given[name_of(node)]) if name_of(node) in given else AssetDep(translator.get_source_key(loaded, node))
        found.setdefault(dep.asset_key, dep)
    return list(found.values())


def name_of(node: SourceNode | LookupNode) -> str:
    """The name of what a node reads."""
    return node.source.name


def checked_upstream(loaded: Plan, given: Mapping[str, CoercibleToAssetDep]) -> None:
    """Raises where `upstream` names a source that the pipeline does not have."""
    names = {name_of(n) for n in loaded.graph.nodes if isinstance(n, (SourceNode, LookupNode))}
    for name in given:
        if name not in names:
            raise PipelineError(f"{loaded.name}: upstream names the source '{name}', and there are {', '.join(sorted(names))}{nearest(name, names)}")
