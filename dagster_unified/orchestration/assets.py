"""One asset per stage: its step runs the stage's region, and says what it wrote.

The assets are those of the plan as it is at load time. A run launched with another shuffle mode may join several of them in one
Spark job; then the last of them runs it, and the others say so.
"""

# No `from __future__ import annotations` here: Dagster reads the annotations of an asset's function as objects.
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dagster import AssetExecutionContext, AssetIn, AssetKey, AssetsDefinition, AssetSpec, Backoff, Failure, Jitter, MaterializeResult, MetadataValue, RetryPolicy, asset

from dagster_unified.connectors.base import SparkSink
from dagster_unified.engine.batch.stage import Run, run_stage
from dagster_unified.engine.events import Event, StageFinished, StageStarted
from dagster_unified.errors import UnifiedError
from dagster_unified.graph.nodes import Graph, LookupNode, SinkNode, SourceNode
from dagster_unified.graph.plan import Plan, Region, plan
from dagster_unified.orchestration import progress
from dagster_unified.orchestration.io_manager import StageOutput, execution_id, find_manifest
from dagster_unified.orchestration.metadata import stage_metadata
from dagster_unified.orchestration.resources import session_of

if TYPE_CHECKING:
    import pyarrow as pa

    from dagster_unified.engine.batch.store import Manifest
    from dagster_unified.orchestration.translator import StageTranslator

DEFAULT_RETRY = RetryPolicy(max_retries=3, delay=1, backoff=Backoff.EXPONENTIAL, jitter=Jitter.PLUS_MINUS)
"""Three further attempts with exponential delay; an error that is terminal by its type is not retried."""

PREVIEW_ROWS = 10


def source_specs(loaded: Plan, translator: "StageTranslator") -> list[AssetSpec]:
    """The external assets that stand for the sources."""
    nodes = {translator.get_source_key(loaded, n): n for n in loaded.graph.nodes if isinstance(n, (SourceNode, LookupNode))}
    return [AssetSpec(key, group_name=loaded.name, description=n.source.describe(), metadata={"boundedness": n.source.boundedness.value}) for key, n in nodes.items()]


def stage_asset(graph: Graph, loaded: Plan, region: Region, translator: "StageTranslator", retry_policy: RetryPolicy | None) -> AssetsDefinition:
    """The asset of one stage."""
    upstream = {f"input_{i}": AssetIn(key=translator.get_asset_key(loaded, loaded.regions[r])) for i, r in enumerate(region.inputs)}
    read = [n for n in (loaded.graph.node(i) for i in region.nodes) if isinstance(n, (SourceNode, LookupNode))]

    @asset(
        key=translator.get_asset_key(loaded, region),
        ins=upstream,
        deps=list(dict.fromkeys(translator.get_source_key(loaded, n) for n in read)),
        group_name=translator.get_group_name(loaded, region),
        tags=translator.get_tags(loaded, region),
        kinds=translator.get_kinds(loaded, region),
        description=translator.get_description(loaded, region),
        metadata=translator.get_metadata(loaded, region),
        code_version=region.fingerprint,
        retry_policy=retry_policy,
        io_manager_key="intermediates",
        required_resource_keys={"spark", "execution", "intermediates"},
    )
    def stage(context: AssetExecutionContext, **inputs: AssetKey) -> MaterializeResult[Any]:
        try:
            launched = plan(graph, context.resources.execution.configuration())
            joined = _launched_region(loaded, launched, region)
            if joined is None:
                return MaterializeResult(value=StageOutput(region.name, None), metadata={"pipelined": "runs in one Spark job with a later stage"})
            return _materialize(context, launched, joined, translator)
        except UnifiedError as error:
            raise Failure(str(error), metadata={"error": MetadataValue.text(type(error).__name__)}, allow_retries=error.retryable) from error

    return stage


def _launched_region(loaded: Plan, launched: Plan, region: Region) -> Region | None:
    """The region that this step has to run; None where a later stage's step runs it."""
    uids = {loaded.graph.node(n).uid for n in region.nodes}
    mine = [r for r in launched.regions if any(launched.graph.node(n).uid in uids for n in r.nodes)]
    wanted = mine[-1]
    members = {launched.graph.node(n).uid for n in wanted.nodes}
    last = max(r.id for r in loaded.regions if any(loaded.graph.node(n).uid in members for n in r.nodes))
    return wanted if last == region.id else None


def _materialize(context: AssetExecutionContext, launched: Plan, region: Region, translator: "StageTranslator") -> MaterializeResult[Any]:
    store = context.resources.intermediates.store()
    partition = "all"

    def find(wanted: Region) -> "Manifest | None":
        found = find_manifest(store, launched.name, wanted.name, partition, translator.get_asset_key(launched, wanted), context.run, context.instance)
        if found is not None and found.fingerprint != wanted.fingerprint:
            context.log.warning(f"the intermediate of stage '{wanted.name}' was made by other code or from other input, and is not used")
            return None
        return found

    run = Run(
        plan=launched,
        spark=session_of(context.resources.spark),
        store=store,
        run_id=context.run.run_id,
        execution=execution_id(store, launched.name, region.name, partition, context.run, context.instance),
        partition=partition,
        observe=_observer(context),
    )
    manifest = run_stage(run, region, find)
    metadata = stage_metadata(launched, region, manifest, translator, _previews(run, region))
    return MaterializeResult(value=StageOutput(region.name, manifest), metadata=metadata)


def _observer(context: AssetExecutionContext) -> Callable[[Event], None]:
    def observe(event: Event) -> None:
        progress.tell(event)
        if isinstance(event, StageStarted) and event.reason:
            context.log.warning(f"recomputing stage '{event.stage}': {event.reason}")
        elif isinstance(event, StageFinished):
            m = event.manifest
            context.log.info(f"stage '{event.stage}': {m.rows} rows, {m.bytes} bytes in {m.seconds:.2f} s" + (f", recomputed: {event.reason}" if event.reason else ""))

    return observe


def _previews(run: Run, region: Region) -> "dict[str, pa.Table]":
    found = {}
    for node_id in region.sinks:
        node = run.plan.graph.node(node_id)
        if isinstance(node, SinkNode) and isinstance(node.sink, SparkSink):
            table = node.sink.preview(run.spark, PREVIEW_ROWS)
            if table is not None:
                found[node.name] = table
    return found
