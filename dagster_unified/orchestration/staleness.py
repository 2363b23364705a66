"""Which partitions went on from a carried state that has been made again since.

Dagster does not say it of assets that depend on themselves, once they have more than a hundred partitions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from dagster import AssetCheckResult, AssetCheckSeverity, AssetCheckSpec, AssetKey, AssetRecordsFilter, DagsterEventType, DagsterInstance, TimeWindowPartitionsDefinition

from dagster_unified.engine.batch.store import Address, IntermediateStore, Manifest
from dagster_unified.orchestration.partitions import key_before, slice_of

CHECK = "carried_state"

_RECORDS = 500
"""Events per query."""

_READERS = 16
"""Manifests read at once: they may lie in a bucket."""


def carried_state_spec(asset: AssetKey) -> AssetCheckSpec:
    """The check that the runs of a stage report."""
    return AssetCheckSpec(CHECK, asset=asset, description="Each partition goes on from the state that the one before it ended with when it last ran.")


def carried_state_result(
    store: IntermediateStore, address: Address, asset: AssetKey, partitions: TimeWindowPartitionsDefinition, instance: DagsterInstance, made: Sequence[str]
) -> AssetCheckResult:
    """Says which partitions a backfill has to make again, once the run at `address` has `made` some; they are not wrong in themselves, so it is a warning."""
    producers = {**_producers(instance, asset), **dict.fromkeys(made, address.run)}
    stale = stale_partitions(store, address, partitions, producers)
    if not stale:
        return AssetCheckResult(asset_key=asset, check_name=CHECK, passed=True, description="every partition goes on from the one before it", metadata={"stale partitions": 0})
    which = stale[0] if len(stale) == 1 else f"{stale[0]} to {stale[-1]}"
    return AssetCheckResult(
        asset_key=asset,
        check_name=CHECK,
        passed=False,
        severity=AssetCheckSeverity.WARN,
        description=f"{which} went on from a state that has been made again since: run a backfill over {'it' if len(stale) == 1 else 'them'}",
        metadata={"stale partitions": len(stale), "first": stale[0], "last": stale[-1]},
    )


def stale_partitions(store: IntermediateStore, stage: Address, partitions: TimeWindowPartitionsDefinition, producers: Mapping[str, str]) -> list[str]:
    """In their order: the first whose predecessor has run again, and all that come after it. `producers` are the runs that made each; what the janitor has freed tells nothing."""
    keys = [key for key in partitions.get_partition_keys() if key in producers]

    def read(key: str) -> Manifest | None:
        return store.manifest(replace(stage, run=producers[key], partition=slice_of(partitions, key).name))

    with ThreadPoolExecutor(_READERS) as readers:
        held = dict(zip(keys, readers.map(read, keys), strict=True))
    for i, key in enumerate(keys):
        mine, before = held[key], held.get(key_before(partitions, key) or "")
        if mine is not None and before is not None and mine.carried_from != before.run:
            return keys[i:]
    return []


def _producers(instance: DagsterInstance, asset: AssetKey) -> dict[str, str]:
    """The run that materialized each partition last."""
    ids = sorted(instance.get_latest_storage_id_by_partition(asset, DagsterEventType.ASSET_MATERIALIZATION).values())
    found: dict[str, str] = {}
    for first in range(0, len(ids), _RECORDS):
        chunk = ids[first : first + _RECORDS]
        for record in instance.fetch_materializations(AssetRecordsFilter(asset_key=asset, storage_ids=chunk), limit=len(chunk)).records:
            if record.partition_key is not None:
                found[record.partition_key] = record.run_id
    return found
