"""Sinks of one code location that would overwrite each other, also where the definitions of several calls are merged.

Each asset says in its metadata what it writes to. Dagster has all of them together when it resolves the jobs of the
code location; so that is where they are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec
from dagster import AssetKey, AssetSelection, MetadataValue

from dagster_unified.graph.plan import Plan
from dagster_unified.graph.targets import Written, check_targets, written
from dagster_unified.orchestration._dagster_compat import KeysAssetSelection

if TYPE_CHECKING:
    from dagster_unified.orchestration._dagster_compat import BaseAssetGraph

WRITES = "writes to"


def targets_metadata(plan: Plan, sinks: Iterable[int]) -> Mapping[str, Any]:
    """The places that some of a pipeline's sinks write to."""
    places = [asdict(place) for place in written(plan.graph, set(sinks))]
    return {WRITES: MetadataValue.json(places)} if places else {}


def check_location(assets: BaseAssetGraph[Any]) -> None:
    """Raises where two sinks of a code location would overwrite each other."""
    shown = [assets.get(key).metadata.get(WRITES) for key in assets.get_all_asset_keys()]
    check_targets(msgspec.convert(one, Written) for of_asset in shown if of_asset is not None for one in of_asset.data)


class StagesSelection(KeysAssetSelection):
    """The stages of a pipeline.

    Is resolved when the code location loads, over all its assets, and then compares their targets.
    """

    def resolve_inner(self, asset_graph: BaseAssetGraph[Any], allow_missing: bool) -> set[AssetKey]:
        check_location(asset_graph)
        return set(super().resolve_inner(asset_graph, allow_missing))

    def to_serializable_asset_selection(self, asset_graph: BaseAssetGraph[Any]) -> AssetSelection:
        return AssetSelection.assets(*self.selected_keys)
