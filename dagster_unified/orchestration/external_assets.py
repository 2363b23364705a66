"""What runs report of assets that no step of their own makes: malformed rows, savepoints, what a stream starts from."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median_low
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import msgspec
from dagster import (
    AssetKey,
    AssetMaterialization,
    AssetObservation,
    AssetSelection,
    MetadataValue,
    TableRecord,
)

from dagster_unified.engine.batch.savepoint import PATH
from dagster_unified.engine.malformed import Diverted
from dagster_unified.errors import PipelineError, nearest
from dagster_unified.graph.nodes import IterationNode
from dagster_unified.graph.plan import Plan
from dagster_unified.graph.targets import Written, check_targets, written
from dagster_unified.orchestration import metadata
from dagster_unified.orchestration._dagster_compat import CoercibleToAssetDep, KeysAssetSelection
from dagster_unified.orchestration.deployments import (
    BatchDeployment,
    StreamingDeployment,
    configuration_of,
    directory_of,
)
from dagster_unified.orchestration.metadata import preview
from dagster_unified.orchestration.partitions import as_text
from dagster_unified.state import manifest as manifests
from dagster_unified.state.manifest import Manifest as SavepointManifest
from dagster_unified.state.manifest import OperatorState
from dagster_unified.state.tables import keys_per_group
from dagster_unified.storage.paths import storage_path

if TYPE_CHECKING:
    from dagster_unified.orchestration._dagster_compat import BaseAssetGraph

WRITES = "writes to"


def targets_metadata(plan: Plan, sinks: Iterable[int]) -> Mapping[str, Any]:
    """Return the places that some of a pipeline's sinks write to."""
    places = [asdict(place) for place in written(plan.graph, set(sinks))]
    return {WRITES: MetadataValue.json(places)} if places else {}


_CHECKED: WeakSet[BaseAssetGraph[Any]] = WeakSet()
"""The graphs of code locations that have passed: each job of a location asks, and each tick of a stream's sensor."""


def check_location(assets: BaseAssetGraph[Any]) -> None:
    """Raise where two sinks of a code location would overwrite each other."""
    if assets in _CHECKED:
        return
    shown = [assets.get(key).metadata.get(WRITES) for key in assets.get_all_asset_keys()]
    check_targets(
        msgspec.convert(written, Written) for of_asset in shown if of_asset is not None for written in of_asset.data
    )
    _CHECKED.add(assets)


class StagesSelection(KeysAssetSelection):
    """The stages of a pipeline.

    Is resolved when the code location loads, over all its assets, and then compares their targets.
    """

    def resolve_inner(self, asset_graph: BaseAssetGraph[Any], allow_missing: bool) -> set[AssetKey]:
        check_location(asset_graph)
        return set(super().resolve_inner(asset_graph, allow_missing))

    def to_serializable_asset_selection(self, asset_graph: BaseAssetGraph[Any]) -> AssetSelection:
        return AssetSelection.assets(*self.selected_keys)


PREVIEW_ROWS = 10
"""Malformed rows in a preview."""

Upstream = Mapping[str, CoercibleToAssetDep]
"""The user's own assets that sources read, by the names of the sources."""


def check_upstream(plan: Plan, upstream: Upstream) -> None:
    """Raise `PipelineError` where `upstream` names a source that the pipeline does not have."""
    names = {node.source.name for node in plan.graph.readers}
    for name in upstream:
        if name not in names:
            raise PipelineError(
                f"{plan.name}: upstream names the source '{name}', and there are"
                f" {', '.join(sorted(names))}{nearest(name, names)}"
            )


# Malformed rows, which the steps that read a source materialize in addition to their own asset


def malformed_materialization(
    key: AssetKey, diverted: Diverted, rows: int, partition: str | None
) -> AssetMaterialization:
    """Report what a BATCH run has set aside of a partition, or of all input."""
    return AssetMaterialization(asset_key=key, partition=partition, metadata=_malformed_metadata(diverted, rows))


def malformed_observation(key: AssetKey, diverted: Diverted) -> AssetObservation:
    """Report what a STREAMING job has set aside so far."""
    return AssetObservation(asset_key=key, metadata=_malformed_metadata(diverted, diverted.rows()))


def _malformed_metadata(diverted: Diverted, rows: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {"dagster/row_count": rows, "rows are at": MetadataValue.path(str(diverted.folder))}
    if rows:
        metadata["latest rows"] = preview(diverted.table(PREVIEW_ROWS))
    return metadata


# Savepoints: a folder that runs replace or add to, so the asset has no partitions, and runs report each savepoint


START = "execution.state-recovery.path"


def has_savepoints(plan: Plan, batch: BatchDeployment | None, streaming: StreamingDeployment | None) -> bool:
    """Return whether a pipeline's deployment leaves savepoints, or one can be taken of it."""
    if streaming is None and (batch is None or _left_at(batch) is None):
        return False
    return any(node.runs_by_key or isinstance(node, IterationNode) for node in plan.graph.nodes)


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


def _operator(manifest: SavepointManifest, state: OperatorState, spread: Sequence[int] | None) -> TableRecord:
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
