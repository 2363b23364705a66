"""What a stream has committed to its tables, as materializations: each is reported once, and never before its commit.

The job reports while it runs and when it ends. Of a job that was killed, the next job or the sensor's next tick reports
what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dagster import (
    AssetKey,
    AssetMaterialization,
    AssetRecordsFilter,
    DagsterInstance,
    MetadataValue,
    TimeWindowPartitionsDefinition,
)

from dagster_unified.connectors.protocol.positions import Position
from dagster_unified.engine.events import EpochCommitted
from dagster_unified.engine.positions import shown, streamed_positions
from dagster_unified.engine.streaming.checkpoint import PATIENCE, CheckpointDirectory, Deployed
from dagster_unified.engine.streaming.reports import Report, Reports, read_notes, read_settled
from dagster_unified.errors import LeaseLostError
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.time import wall_clock
from dagster_unified.orchestration.partitions import as_text
from dagster_unified.orchestration.stream_partitions import by_partition

UPDATED = "dagster/last_updated_timestamp"
"""The metadata that Dagster's freshness checks look at."""

REPORT = "report"
"""The metadata with a report's id."""

_LOOK_BACK = 50
"""How many of an asset's latest materializations are looked through for a report that may have been made."""


@dataclass(frozen=True)
class JobAssets:
    """The assets of a job: those of its sinks by name, of malformed rows by their source's uid, of its savepoints.

    `stream` stands for the job itself, where it starts from a savepoint and its sinks are those of BATCH stages.
    """

    sinks: dict[str, AssetKey]
    malformed: dict[str, AssetKey]
    savepoint: AssetKey
    stream: AssetKey | None = None
    partitions: TimeWindowPartitionsDefinition | None = None
    """Those by which the stream is materialized."""


class StreamMaterializations:
    """Reports what the job that holds the lease has committed. Safe for several threads, of which one reports."""

    def __init__(
        self,
        planned: Plan,
        directory: CheckpointDirectory,
        deployed: Deployed,
        assets: JobAssets,
        instance: DagsterInstance,
        log: Callable[[AssetMaterialization], None],
    ) -> None:
        self._plan, self._directory, self._deployed = planned, directory, deployed
        self._assets, self._instance, self._log = assets.sinks, instance, log
        self._reports = Reports(directory, deployed, by_partition(planned, assets.partitions))
        self._positions: dict[tuple[str, int], Mapping[str, Position]] = {}
        self.is_partitioned = assets.partitions is not None
        if _has_ended(planned, deployed):
            self._reports.end()
        self.are_left = self._reports.is_pending
        """Whether an earlier process has left something to report."""

    def note(self, event: EpochCommitted) -> None:
        """Note an epoch that is committed to the sinks and that Spark has not logged yet."""
        self._reports.note(event, wall_clock())

    def late(self, sink: str) -> dict[str, int]:
        """Return how many records came after the materialization of their partition, by partition.

        Those are left out that a run in BATCH has read meanwhile.
        """
        self._reports.forget(read_settled(self._directory))
        return self._reports.late(sink)

    @property
    def is_pending(self) -> bool:
        """Whether there is something to report now."""
        return self._reports.is_pending

    def report(self) -> int:
        """Report what is due, and return how much that was."""
        self.are_left = False
        self._positions.clear()
        due = self._reports.due()
        for report in due:
            key = self._assets.get(report.sink)  # none where new code has no such sink any more
            if key is not None and not (report.id in self._reports.found and self._is_made(key, report)):
                metadata = self._metadata(report)
                self._log(AssetMaterialization(asset_key=key, partition=report.partition, metadata=metadata))
            self._reports.reported(report)
        return len(due)

    def _is_made(self, key: AssetKey, report: Report) -> bool:
        """Return whether a report was made by a process that was killed before it could take it off."""
        partitions = None if report.partition is None else [report.partition]
        of_asset = AssetRecordsFilter(asset_key=key, asset_partitions=partitions)
        latest = self._instance.fetch_materializations(of_asset, limit=_LOOK_BACK).records
        made = (record.asset_materialization for record in latest)
        ids = [m.metadata[REPORT].value for m in made if m is not None and REPORT in m.metadata]
        return report.id in ids

    def _metadata(self, report: Report) -> dict[str, Any]:
        written = {"rows written": report.rows, "bytes written": report.bytes}
        return {
            REPORT: report.id,
            **(written if report.partition is None else {"records": report.rows}),
            "query": report.query,
            "epoch": report.epoch,
            **({} if report.version is None else {"version": report.version}),
            **({} if report.watermark is None else {"watermark": MetadataValue.text(as_text(report.watermark))}),
            UPDATED: MetadataValue.timestamp(report.at / 1000),
            "read": MetadataValue.json(self._read(report)),
        }

    def _read(self, report: Report) -> dict[str, Any]:
        """Return what was read of each source of a sink's, by the source's name."""
        graph = self._plan.graph
        before = graph.upstream(*(node.id for node in graph.sinks if node.name == report.sink))
        names = {node.uid: node.source.name for node in graph.sources if node.id in before}
        positions = [self._positions_at(query, epoch) for query, epoch in report.epochs.items()]
        return {names[uid]: shown(at) for of_query in positions for uid, at in of_query.items() if uid in names}

    def _positions_at(self, query: str, epoch: int) -> Mapping[str, Position]:
        """Return the position of each source of a query, by uid, at an epoch; those that are reported together once."""
        if (query, epoch) not in self._positions:
            folder, sources = self._directory.path / "spark" / query, self._deployed.sources.get(query, ())
            self._positions[query, epoch] = streamed_positions(self._plan, folder, sources, epoch)
        return self._positions[query, epoch]


def _has_ended(planned: Plan, deployed: Deployed) -> bool:
    """Return whether the input has ended, and not only the data of a run whose state another one goes on with."""
    return deployed.finished and not planned.execution.goes_on


def report_rest(
    planned: Plan,
    directory: CheckpointDirectory,
    assets: JobAssets,
    instance: DagsterInstance,
    owner: str,
    log: Callable[[AssetMaterialization], None],
) -> int:
    """Report what a job has left that has ended, and return how much that was; nothing where another one runs.

    It holds the lease meanwhile, as `owner`, so that a job that starts waits for it.
    """
    deployed = directory.deployed()
    notes = read_notes(directory)
    if deployed is not None and _has_ended(planned, deployed):
        notes.end()
    if deployed is None or not notes.is_pending(by_partition(planned, assets.partitions)):
        return 0
    try:
        lease = directory.take(owner, PATIENCE)
    except LeaseLostError:
        return 0
    with lease:
        return StreamMaterializations(planned, directory, deployed, assets, instance, log).report()
