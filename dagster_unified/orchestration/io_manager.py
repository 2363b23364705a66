"""Finds what the producing run wrote: never whatever lies there now.

A manifest in the store is the commit of a stage, so the store itself says which run of a chain of re-executions produced it.
Where none of them did (a run of some stages only), it is the latest materialization from before the run was created.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster import AssetKey, AssetRecordsFilter, ConfigurableIOManager, DagsterInstance, InputContext, OutputContext
from pydantic import Field

from dagster_unified.engine.batch.store import Address, IntermediateStore, Manifest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dagster import DagsterRun


@dataclass(frozen=True)
class StageOutput:
    """A handle on what a stage produced; None as its manifest where the stage ran as part of a later one."""

    stage: str
    manifest: Manifest | None


class IntermediateIOManager(ConfigurableIOManager):
    """Stores intermediates below `path`, a folder or a URL; loads the handle of what an upstream stage's producing run wrote."""

    path: str = Field(default=".dagster_unified/intermediates", description="Where intermediates are kept: a folder, or a URL such as s3://bucket/folder.")

    def store(self) -> IntermediateStore:
        """The store."""
        return IntermediateStore(self.path)

    def handle_output(self, context: OutputContext, obj: Any) -> None:
        """The stage has committed its manifest already; says where."""
        if isinstance(obj, StageOutput) and obj.manifest is not None:
            manifest = obj.manifest
            context.add_output_metadata({"intermediate": str(self.store().folder(Address(manifest.pipeline, manifest.stage, manifest.run, manifest.partition)))})

    def load_input(self, context: InputContext) -> AssetKey:
        """The upstream asset's key: the stage looks its manifest up itself, since it may have to go further up."""
        return context.asset_key


def lineage(run: DagsterRun, instance: DagsterInstance) -> Iterator[str]:
    """The run, the run that it re-executes, and so on."""
    current: DagsterRun | None = run
    seen: set[str] = set()
    while current is not None and current.run_id not in seen:
        seen.add(current.run_id)
        yield current.run_id
        current = instance.get_run_by_id(current.parent_run_id) if current.parent_run_id else None


def find_manifest(store: IntermediateStore, pipeline: str, stage: str, partition: str, key: AssetKey, run: DagsterRun, instance: DagsterInstance) -> Manifest | None:
    """What the producing run wrote for a stage, if it still stands."""
    runs = list(lineage(run, instance))
    for run_id in runs:
        found = store.find(Address(pipeline, stage, run_id, partition))
        if found is not None:
            return found
    if run.parent_run_id is None and run.step_keys_to_execute is None and run.asset_selection is None:
        return None  # a whole run reads what it wrote itself, and nothing else
    record = instance.get_run_record_by_id(runs[-1])
    before = record.create_timestamp.timestamp() if record is not None else None
    hits = instance.fetch_materializations(AssetRecordsFilter(asset_key=key, before_timestamp=before), limit=1).records
    return store.find(Address(pipeline, stage, hits[0].run_id, partition)) if hits else None


def execution_id(store: IntermediateStore, pipeline: str, stage: str, partition: str, run: DagsterRun, instance: DagsterInstance) -> str:
    """The identity under which a stage writes to its sinks: the oldest run of this chain of re-executions in which it did not finish.

    So a retry or a re-execution from failure does not write twice, and re-executing a finished stage does write again.
    """
    runs = list(lineage(run, instance))
    chosen = runs[0]
    for run_id in runs[1:]:
        if store.find(Address(pipeline, stage, run_id, partition)) is not None:
            break
        chosen = run_id
    return chosen
