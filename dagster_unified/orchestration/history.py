"""What the event log has of an asset's partitions: the latest materialization of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dagster import AssetKey, AssetRecordsFilter, DagsterEventType, DagsterInstance, EventLogRecord

_CHUNK = 500
"""Events per query."""


def latest_materializations(instance: DagsterInstance, asset: AssetKey, partitions: Iterable[str] | None = None) -> Iterator[tuple[str, EventLogRecord]]:
    """Partition keys, in no order, with the record of what materialized each last; of some partitions only, or of all."""
    by_partition = instance.get_latest_storage_id_by_partition(asset, DagsterEventType.ASSET_MATERIALIZATION, None if partitions is None else set(partitions))
    ids = sorted(by_partition.values())
    for first in range(0, len(ids), _CHUNK):
        chunk = ids[first : first + _CHUNK]
        for record in instance.fetch_materializations(AssetRecordsFilter(asset_key=asset, storage_ids=chunk), limit=len(chunk)).records:
            if record.partition_key is not None:
                yield record.partition_key, record
