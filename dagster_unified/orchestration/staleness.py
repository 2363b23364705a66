"""Which partitions went on from a carried state that has been made again since.

Dagster does not say it of assets that depend on themselves, once they have more than a hundred partitions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

from dagster import AssetCheckResult, AssetCheckSeverity, AssetCheckSpec, AssetKey, DagsterInstance

from dagster_unified.engine.batch.store import Address, IntermediateStore, Manifest
from dagster_unified.graph.slices import Slice
from dagster_unified.orchestration.history import latest_materializations

CHECK = "carried_state"

_READERS = 16
"""Manifests read at once: they may lie in a bucket."""


def carried_state_spec(asset: AssetKey) -> AssetCheckSpec:
    """The check that the runs of a stage report."""
    return AssetCheckSpec(CHECK, asset=asset, description="Each partition goes on from the state that the one before it ended with when it last ran.")


def carried_state_result(store: IntermediateStore, address: Address, asset: AssetKey, keys: Sequence[str], instance: DagsterInstance, made: Collection[str]) -> AssetCheckResult:
    """Says which partitions a backfill has to make again, once the run at `address` has `made` some of the partitions, which `keys` are in their order; they are not wrong in themselves, so it is a warning."""
    producers = {**{k: r.run_id for k, r in latest_materializations(instance, asset)}, **dict.fromkeys(made, address.run)}
    stale = stale_partitions(store, address, keys, producers)
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


def stale_partitions(store: IntermediateStore, stage: Address, keys: Sequence[str], producers: Mapping[str, str]) -> list[str]:
    """In their order: the first whose predecessor has run again, and all that come after it. `producers` are the runs that made each; what the janitor has freed tells nothing."""

    def read(key: str) -> Manifest | None:
        return store.manifest(replace(stage, run=producers[key], partition=Slice(key, {}).name)) if key in producers else None

    with ThreadPoolExecutor(_READERS) as readers:
        held = list(readers.map(read, keys))
    for i, (before, mine) in enumerate(pairwise(held), 1):
        if before is not None and mine is not None and mine.carried_from != before.run:
            return [key for key in keys[i:] if key in producers]
    return []
