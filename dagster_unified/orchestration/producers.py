"""Finds what the producing run wrote: never whatever lies there now.

A manifest in the store is the commit of a stage, so the store itself says which run of a chain of re-executions
produced it. Where none of them did (a run of some stages only), it is the latest materialization from before the run
was created.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dagster import (
    AssetKey,
    AssetRecordsFilter,
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
)

from dagster_unified.connectors.protocol.positions import Position
from dagster_unified.engine.batch.intermediates import Address, IntermediateStore, Manifest
from dagster_unified.graph.connectors import WHOLE, Slice
from dagster_unified.operators.time import to_millis


@dataclass
class Chain:
    """A run and those that it re-executes, of which Dagster is asked once."""

    run: DagsterRun
    instance: DagsterInstance

    @cached_property
    def lineage(self) -> list[str]:
        """The run, the run that it re-executes, and so on."""
        return list(lineage_of(self.run, self.instance))

    @cached_property
    def begun(self) -> float | None:
        """When the oldest run was created, in seconds since the epoch."""
        record = self.instance.get_run_record_by_id(self.lineage[-1])
        return record.create_timestamp.timestamp() if record is not None else None

    @cached_property
    def number(self) -> int:
        """The run's number: when it was created, in milliseconds since the epoch."""
        record = self.instance.get_run_record_by_id(self.run.run_id)
        return 0 if record is None else to_millis(record.create_timestamp)


@dataclass
class Producers:
    """The runs whose intermediates one run may read, for one partition of one pipeline."""

    store: IntermediateStore
    pipeline: str
    slice: Slice | None
    chain: Chain

    @property
    def partition(self) -> str:
        """The partition's name in the store."""
        return WHOLE if self.slice is None else self.slice.name

    def of(self, slice_: Slice) -> Producers:
        """Return the same for another partition."""
        return replace(self, slice=slice_)

    def latest(self, stage: str, key: AssetKey) -> Manifest | None:
        """Return what this run or one that it re-executes wrote for a stage, or else its latest materialization."""
        return self.of_chain(stage) or self.materialized(stage, key)

    def holding(self, key: AssetKey, state: Set[tuple[str, str | None]]) -> Manifest | None:
        """Return what a stage left that was renamed since, as stages are named by their operators.

        None where the stage was ever materialized under its present name: what it left then is freed or damaged.
        """
        return None if self._latest(key) else self.store.newest_holding(self.pipeline, self.partition, state)

    def of_chain(self, stage: str) -> Manifest | None:
        """Return what this run, or one that it re-executes, wrote for a stage, if it still stands."""
        return next((m for run_id in self.chain.lineage if (m := self._manifest(stage, run_id)) is not None), None)

    def find(self, stage: str, key: AssetKey) -> Manifest | None:
        """Return what the producing run wrote for a stage, if it still stands."""
        manifest = self.of_chain(stage)
        if manifest is not None:
            return manifest
        run = self.chain.run
        if (
            run.parent_run_id is None
            and run.step_keys_to_execute is None
            and (run.asset_selection is None or key in run.asset_selection)
        ):
            return None  # a run that runs this stage too reads what it wrote itself, and nothing else
        return self.materialized(stage, key, self.chain.begun)

    def materialized(self, stage: str, key: AssetKey, before: float | None = None) -> Manifest | None:
        """Return the manifest of a stage's latest materialization, if it still stands.

        `before` is a moment in seconds since the epoch.
        """
        run_id = self._latest(key, before)
        return None if run_id is None else self._manifest(stage, run_id)

    def _latest(self, key: AssetKey, before: float | None = None) -> str | None:
        partitions = None if self.slice is None else [self.slice.key]
        hits = self.chain.instance.fetch_materializations(
            AssetRecordsFilter(asset_key=key, asset_partitions=partitions, before_timestamp=before), limit=1
        ).records
        return hits[0].run_id if hits else None

    def stops(self, stages: Iterable[str]) -> dict[str, Position]:
        """Return where the sources of stages stopped, by uid, in this run or in the last one that it re-executes."""
        stops: dict[str, Position] = {}
        for stage in stages:
            of_runs = (self.store.stops(self._address(stage, run_id)) for run_id in self.chain.lineage)
            stops |= next(filter(None, of_runs), {})
        return stops

    def execution(self, stage: str) -> str:
        """Return the identity under which a stage writes to its sinks.

        It is the oldest run of this chain of re-executions in which the stage did not finish.

        So a retry or a re-execution from failure does not write twice, and re-executing a finished stage does write
        again.
        """
        chosen, *older = self.chain.lineage
        for run_id in older:
            if self._finished(stage, run_id):
                break
            chosen = run_id
        return chosen

    def _finished(self, stage: str, run_id: str) -> bool:
        """Return whether a run finished a stage.

        It left a manifest, whether or not the data stands, or it succeeded and the janitor has freed both.
        """
        if self.store.manifest(self._address(stage, run_id)) is not None:
            return True
        run = self.chain.instance.get_run_by_id(run_id)
        return run is not None and run.status is DagsterRunStatus.SUCCESS

    def _manifest(self, stage: str, run_id: str) -> Manifest | None:
        return self.store.find(self._address(stage, run_id))

    def _address(self, stage: str, run_id: str) -> Address:
        return Address(self.pipeline, stage, run_id, self.partition)


def lineage_of(run: DagsterRun, instance: DagsterInstance) -> Iterator[str]:
    """Yield a run, the run that it re-executes, and so on."""
    current: DagsterRun | None = run
    seen: set[str] = set()
    while current is not None and current.run_id not in seen:
        seen.add(current.run_id)
        yield current.run_id
        current = instance.get_run_by_id(current.parent_run_id) if current.parent_run_id else None


_PER_QUERY = 500
"""Events per query."""


def latest_metadata(
    instance: DagsterInstance, asset: AssetKey, partitions: Iterable[str] | None = None
) -> dict[str, Mapping[str, Any]]:
    """Return the metadata of each partition's latest materialization, by partition key.

    For all partitions or some, in no order.
    """
    by_partition = instance.get_latest_storage_id_by_partition(
        asset, DagsterEventType.ASSET_MATERIALIZATION, None if partitions is None else set(partitions)
    )
    ids = sorted(by_partition.values())
    by_key = {}
    for first in range(0, len(ids), _PER_QUERY):
        batch = ids[first : first + _PER_QUERY]
        for record in instance.fetch_materializations(
            AssetRecordsFilter(asset_key=asset, storage_ids=batch), limit=len(batch)
        ).records:
            if record.partition_key is not None and record.asset_materialization is not None:
                by_key[record.partition_key] = record.asset_materialization.metadata
    return by_key
