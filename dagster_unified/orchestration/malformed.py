"""The malformed rows that sources diverted, as assets of their own.

Each depends on its source, and shows where its rows are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dagster import AssetKey, AssetMaterialization, AssetObservation, AssetSpec, MetadataValue, PartitionsDefinition

from dagster_unified.engine.malformed import SCHEMA, Diverted, diverting
from dagster_unified.graph.plan import Plan
from dagster_unified.orchestration._dagster_compat import CoercibleToAssetDep
from dagster_unified.orchestration.metadata import preview, table_schema
from dagster_unified.orchestration.partitions import upstream_deps
from dagster_unified.orchestration.translator import StageTranslator

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
