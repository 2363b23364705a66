"""What the event log has of an asset's partitions: what the latest materialization of each shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dagster import AssetKey, AssetRecordsFilter, DagsterEventType, DagsterInstance

_CHUNK = 500
"""Events per query."""


def latest_metadata(instance: DagsterInstance, asset: AssetKey, partitions: Iterable[str] | None = None) -> dict[str, Mapping[str, Any]]:
    """By partition key, in no order, the metadata with which each was materialized last; of some partitions only, or of all."""
    by_partition = instance.get_latest_storage_id_by_partition(asset, DagsterEventType.ASSET_MATERIALIZATION, None if partitions is None else set(partitions))
    ids = sorted(by_partition.values())
    found = {}
    for first in range(0, len(ids), _CHUNK):
        chunk = ids[first : first + _CHUNK]
        for record in instance.fetch_materializations(AssetRecordsFilter(asset_key=asset, storage_ids=chunk), limit=len(chunk)).records:
            if record.partition_key is not None and record.asset_materialization is not None:
                found[record.partition_key] = record.asset_materialization.metadata
    return found
