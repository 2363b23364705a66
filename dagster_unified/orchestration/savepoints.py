"""A pipeline's savepoints as an asset: the stages that leave them, what they hold, and what starts from one.

A savepoint is a folder that runs replace or add to, so the asset has no partitions, and each savepoint is a
materialization of it. Runs report it themselves: nothing else can make one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from dagster import AssetDep, AssetKey, AssetMaterialization, AssetObservation, AssetSpec, MetadataValue, TableRecord

from dagster_unified.engine.batch.savepoint import PATH
from dagster_unified.graph.nodes import IterationNode
from dagster_unified.graph.plan import Plan
from dagster_unified.orchestration import metadata
from dagster_unified.orchestration._dagster_compat import CoercibleToAssetDep
from dagster_unified.orchestration.deployments import (
    BatchDeployment,
    StreamingDeployment,
    configuration_of,
    directory_of,
)
from dagster_unified.orchestration.external_assets import upstream_deps
from dagster_unified.orchestration.partitions import as_text
from dagster_unified.orchestration.translator import StageTranslator
from dagster_unified.state import manifest as manifests
from dagster_unified.state.manifest import Manifest, OperatorState
from dagster_unified.state.tables import keys_per_group
from dagster_unified.storage.paths import storage_path

START = "execution.state-recovery.path"


def has_savepoints(plan: Plan, batch: BatchDeployment | None, streaming: StreamingDeployment | None) -> bool:
    """Return whether a pipeline's deployment leaves savepoints, or one can be taken of it."""
    if streaming is None and (batch is None or _left_at(batch) is None):
        return False
    return any(node.runs_by_key or isinstance(node, IterationNode) for node in plan.graph.nodes)


def savepoint_spec(plan: Plan, upstream: Mapping[str, CoercibleToAssetDep], translator: StageTranslator) -> AssetSpec:
    """Return the asset of a pipeline's savepoints: it depends on the keyed stages or, of a stream, on its sources."""
    staged = plan.execution.mode == "BATCH"
    keyed = [r for r in plan.regions if any(node.runs_by_key for node in plan.nodes_of(r))]
    stages = [AssetDep(translator.get_asset_key(plan, region)) for region in keyed]
    return AssetSpec(
        translator.get_savepoint_key(plan),
        deps=stages if staged else upstream_deps(plan, plan.graph.readers, upstream, translator),
        group_name=plan.name,
        description=f"The state of the keyed operators of {plan.name}, as runs leave it or as it is taken of a stream.",
        kinds={"parquet"},
    )


def _left_at(batch: BatchDeployment) -> str | None:
    path: str | None = batch.configuration()[PATH]
    return path


# What starts from one


@dataclass(frozen=True)
class Origin:
    """Where the savepoints of a pipeline are, and their asset."""

    key: AssetKey
    batch: BatchDeployment | None
    streaming: StreamingDeployment | None

    def has(self, path: str) -> bool:
        """Return whether a savepoint in a folder is one of them."""
        place, left_at = storage_path(path, START), None if self.batch is None else _left_at(self.batch)
        if left_at is not None and storage_path(left_at, PATH) == place:
            return True
        return self.streaming is not None and place.parent == directory_of(self.streaming).path / "savepoints"


def start_of(deployment: StreamingDeployment, origins: Sequence[Origin]) -> AssetKey | None:
    """Return the asset of the savepoint that a stream starts from, where this code location has it."""
    path: str | None = configuration_of(deployment)[START]
    return None if path is None else next((origin.key for origin in origins if origin.has(path)), None)


def stream_spec(plan: Plan, start: AssetKey, translator: StageTranslator) -> AssetSpec:
    """The asset of a streaming deployment which starts from a savepoint, and whose sinks are those of BATCH stages."""
    return AssetSpec(
        translator.get_stream_key(plan),
        deps=[start],
        group_name=plan.name,
        description=f"{plan.name} in STREAMING, which starts from a savepoint and writes to the sinks of the stages.",
        kinds={"spark", "streaming"},
    )


def start_observation(key: AssetKey, path: str) -> AssetObservation:
    """Return the observation that a stream runs on the state of a savepoint."""
    return AssetObservation(asset_key=key, metadata={"started from": MetadataValue.path(path)})


# What it holds


def savepoint_materialization(
    key: AssetKey, path: str, log: logging.Logger, without_tables: str = ""
) -> AssetMaterialization:
    """Return the materialization of a savepoint that was just taken; `without_tables` says why it has no tables."""
    shown: dict[str, Any] = {"path": MetadataValue.path(path)}
    if without_tables:
        return AssetMaterialization(asset_key=key, metadata={**shown, "without tables": without_tables})
    try:
        shown |= _metadata(path)
    except Exception as error:  # the savepoint is whole, whatever can be said of it
        log.warning(f"the savepoint in {path} could not be described: {type(error).__name__}: {error}")
    return AssetMaterialization(asset_key=key, metadata=shown)


def _metadata(path: str) -> dict[str, Any]:
    folder, manifest = manifests.read(path)
    shown: dict[str, Any] = {
        "mode": manifest.mode,
        "taken": MetadataValue.timestamp(manifest.taken / 1000),
        "dagster/row_count": sum(operator.rows for operator in manifest.operators),
        "bytes": sum(operator.bytes for operator in manifest.operators),
        "key groups": manifest.max_parallelism,
        "fingerprint": manifest.fingerprint,
    }
    if manifest.partition:
        shown["after partition"] = manifest.partition
    if manifest.reason:
        shown["reason"] = manifest.reason
    if manifest.operators:
        spread = {
            operator.uid: keys_per_group(folder, operator, manifest.max_parallelism) for operator in manifest.operators
        }
        shown["operators"] = MetadataValue.table(
            [_operator(manifest, operator, spread[operator.uid]) for operator in manifest.operators]
        )
        known = {uid: keys for uid, keys in spread.items() if keys is not None}
        if known:
            shown["keys per group"] = metadata.keys_per_group(known)
    if manifest.positions:
        read = [TableRecord({"source": uid, "read": at.describe()}) for uid, at in manifest.positions.items()]
        shown["sources"] = MetadataValue.table(read)
    if manifest.epochs:
        shown["epochs"] = ", ".join(f"{epoch} of {query}" for query, epoch in sorted(manifest.epochs.items()))
    return shown


def _operator(manifest: Manifest, state: OperatorState, spread: Sequence[int] | None) -> TableRecord:
    watermark = manifest.event.watermarks.get(state.uid)
    return TableRecord(
        {
            "operator": state.uid,
            "name": state.name,
            "keys": state.rows,
            "bytes": state.bytes,
            "watermark": "" if watermark is None else as_text(watermark),
            "keys per group (least / median / most)": "" if spread is None else _spread(spread),
        }
    )


def _spread(keys: Sequence[int]) -> str:
    return f"{min(keys):,} / {median_low(keys):,} / {max(keys):,}"
