"""Assets that no step of their own makes: sources, malformed rows, savepoints, and the sinks of stages and streams.

A stage's asset stands for the one sink that it writes. With several sinks, each is an external asset that depends on
the stage, and the stage's step reports it as materialized. A stream reports what it has written to its sinks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median_low
from typing import TYPE_CHECKING, Any

import msgspec
from dagster import (
    AssetDep,
    AssetKey,
    AssetMaterialization,
    AssetObservation,
    AssetSelection,
    AssetSpec,
    MetadataValue,
    PartitionsDefinition,
    TableRecord,
)

from dagster_unified.engine.batch.intermediates import Manifest
from dagster_unified.engine.batch.savepoint import PATH
from dagster_unified.engine.malformed import SCHEMA, Diverted, diverting
from dagster_unified.errors import PipelineError, nearest
from dagster_unified.graph.nodes import IterationNode, ReadingNode, SinkNode
from dagster_unified.graph.plan import Plan, Region
from dagster_unified.graph.targets import Written, check_targets, written
from dagster_unified.orchestration import metadata
from dagster_unified.orchestration._dagster_compat import CoercibleToAssetDep, KeysAssetSelection
from dagster_unified.orchestration.deployments import (
    BatchDeployment,
    StreamingDeployment,
    configuration_of,
    directory_of,
)
from dagster_unified.orchestration.metadata import columns_metadata, preview, table_schema
from dagster_unified.orchestration.partitions import as_text
from dagster_unified.orchestration.translator import StageTranslator
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


def check_location(assets: BaseAssetGraph[Any]) -> None:
    """Raise where two sinks of a code location would overwrite each other."""
    shown = [assets.get(key).metadata.get(WRITES) for key in assets.get_all_asset_keys()]
    check_targets(
        msgspec.convert(written, Written) for of_asset in shown if of_asset is not None for written in of_asset.data
    )


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


# Sources


def source_specs(plan: Plan, upstream: Upstream, translator: StageTranslator) -> list[AssetSpec]:
    """Return the external assets that stand for the sources, where there is no asset of the user's."""
    standing_in = {
        translator.get_source_key(plan, node): node for node in plan.graph.readers if node.source.name not in upstream
    }
    return [
        AssetSpec(
            key,
            group_name=plan.name,
            description=node.source.describe(),
            kinds={node.source.kind} - {""},
            metadata={"boundedness": node.source.boundedness.value, **columns_metadata(node.source.records)},
        )
        for key, node in standing_in.items()
    ]


def upstream_deps(
    plan: Plan, readers: Iterable[ReadingNode], upstream: Upstream, translator: StageTranslator
) -> list[AssetDep]:
    """Return the assets that some nodes read, each once."""
    deps: dict[AssetKey, AssetDep] = {}
    for node in readers:
        dep = upstream_dep(plan, node, upstream, translator)
        deps.setdefault(dep.asset_key, dep)
    return list(deps.values())


def upstream_dep(plan: Plan, node: ReadingNode, upstream: Upstream, translator: StageTranslator) -> AssetDep:
    """Return the asset that a source reads: the user's own, or the one that stands for it."""
    if node.source.name in upstream:
        return AssetDep.from_coercible(upstream[node.source.name])
    return AssetDep(translator.get_source_key(plan, node))


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


def malformed_assets(plan: Plan, translator: StageTranslator) -> dict[str, AssetKey]:
    """Return the asset of each source that sets malformed rows aside, by the source's uid."""
    return {node.uid: translator.get_malformed_key(plan, node) for node in diverting(plan)}


def malformed_specs(
    plan: Plan, upstream: Upstream, partitions: PartitionsDefinition[str] | None, translator: StageTranslator
) -> list[AssetSpec]:
    """Return the external assets of the malformed rows."""
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


# Sinks


def sink_assets(plan: Plan, translator: StageTranslator) -> dict[str, AssetKey]:
    """The asset of each sink, by the sink's name: that of the stage that writes it in BATCH, or one of its own."""
    if plan.execution.mode == "BATCH":
        return {node.name: translator.get_asset_key(plan, plan.region_of(node.id)) for node in plan.graph.sinks}
    return {node.name: translator.get_sink_key(plan, node) for node in plan.graph.sinks}


def sink_specs(
    plan: Plan,
    upstream: Upstream,
    start: AssetKey | None,
    partitions: PartitionsDefinition[str] | None,
    translator: StageTranslator,
) -> list[AssetSpec]:
    """Return the external assets that stand for the sinks of a pipeline that has no BATCH stages.

    `start` is the asset of the savepoint that the stream starts from, and `partitions` are those of the stream.
    """
    started_from = [] if start is None else [AssetDep(start)]

    def read_by(node: SinkNode) -> list[ReadingNode]:
        before = plan.graph.upstream(node.id)
        return [reader for reader in plan.graph.readers if reader.id in before]

    return [
        AssetSpec(
            translator.get_sink_key(plan, node),
            deps=[*upstream_deps(plan, read_by(node), upstream, translator), *started_from],
            group_name=plan.name,
            description=(
                f"{node.sink.describe()}, written by {plan.name} in STREAMING ({node.sink.capabilities.describe()})."
            ),
            kinds={"spark", "streaming", node.sink.kind} - {""},
            partitions_def=partitions,
            metadata={**targets_metadata(plan, [node.id]), **columns_metadata(plan.graph.written_to(node.id))},
        )
        for node in plan.graph.sinks
    ]


def stage_sink_specs(
    plan: Plan, partitions: PartitionsDefinition[str] | None, translator: StageTranslator
) -> list[AssetSpec]:
    """Return the external assets of the sinks of all stages that write several."""
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
        for region, node in stage_sinks(plan)
    ]


def stage_sink_materializations(
    plan: Plan, manifest: Manifest, partition: str | None, translator: StageTranslator
) -> Iterator[AssetMaterialization]:
    """Report what was written to a stage's sinks where it has several; the stages of `plan` are assets."""
    for _, node in stage_sinks(plan):
        if node.name in manifest.sinks:
            yield AssetMaterialization(
                translator.get_stage_sink_key(plan, node),
                partition=partition,
                metadata={"written to": MetadataValue.path(manifest.sinks[node.name])},
            )


def stage_sinks(plan: Plan) -> Iterator[tuple[Region, SinkNode]]:
    """Yield the sinks of the stages that write several."""
    for region in plan.regions:
        if len(region.sinks) > 1:
            yield from ((region, node) for node in plan.graph.sinks if node.id in region.sinks)


# Savepoints: a folder that runs replace or add to, so the asset has no partitions, and runs report each savepoint


START = "execution.state-recovery.path"


def has_savepoints(plan: Plan, batch: BatchDeployment | None, streaming: StreamingDeployment | None) -> bool:
    """Return whether a pipeline's deployment leaves savepoints, or one can be taken of it."""
    if streaming is None and (batch is None or _left_at(batch) is None):
        return False
    return any(node.runs_by_key or isinstance(node, IterationNode) for node in plan.graph.nodes)


def savepoint_spec(plan: Plan, upstream: Upstream, translator: StageTranslator) -> AssetSpec:
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
