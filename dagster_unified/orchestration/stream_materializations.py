"""What a stream has committed to its tables, as materializations: each is reported once, and never before its commit.

The job reports while it runs and when it ends. Of a job that was killed, the next job or the sensor's next tick reports
what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dagster import AssetKey, AssetMaterialization, AssetRecordsFilter, DagsterInstance, MetadataValue

from dagster_unified.connectors.protocol.positions import FilesRead, OffsetsRead, Position, SparkOffset
from dagster_unified.engine.events import EpochCommitted
from dagster_unified.engine.positions import streamed_positions
from dagster_unified.engine.streaming.checkpoint import PATIENCE, CheckpointDirectory, Deployed
from dagster_unified.engine.streaming.reports import Report, Reports, is_pending, read_notes
from dagster_unified.errors import LeaseLostError
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.time import wall_clock
from dagster_unified.orchestration.partitions import as_text

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


class StreamMaterializations:
    """Reports what the job that holds the lease has committed. Safe for several threads, of which one reports."""

    def __init__(
        self,
        planned: Plan,
        directory: CheckpointDirectory,
        deployed: Deployed,
        assets: Mapping[str, AssetKey],
        instance: DagsterInstance,
        log: Callable[[AssetMaterialization], None],
    ) -> None:
        self._plan, self._directory, self._deployed = planned, directory, deployed
        self._assets, self._instance, self._log = assets, instance, log
        self._reports = Reports(directory, deployed)
        self.are_left = self._reports.is_pending
        """Whether an earlier process has left something to report."""

    def note(self, event: EpochCommitted) -> None:
        """Note an epoch that is committed to the sinks and that Spark has not logged yet."""
        self._reports.note(event, wall_clock())

    def report(self) -> int:
        """Report what is due, and return how much that was."""
        self.are_left = False
        due = self._reports.due()
        for report in due:
            key = self._assets.get(report.sink)  # none where new code has no such sink any more
            if key is not None and not (report.id in self._reports.found and self._is_made(key, report)):
                self._log(AssetMaterialization(asset_key=key, metadata=self._metadata(report)))
            self._reports.reported(report)
        return len(due)

    def _is_made(self, key: AssetKey, report: Report) -> bool:
        """Return whether a report was made by a process that was killed before it could take it off."""
        latest = self._instance.fetch_materializations(AssetRecordsFilter(asset_key=key), limit=_LOOK_BACK).records
        made = (record.asset_materialization for record in latest)
        ids = [m.metadata[REPORT].value for m in made if m is not None and REPORT in m.metadata]
        return report.id in ids

    def _metadata(self, report: Report) -> dict[str, Any]:
        return {
            REPORT: report.id,
            "rows written": report.rows,
            "bytes written": report.bytes,
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
        read: dict[str, Any] = {}
        for query, epoch in report.epochs.items():
            folder, sources = self._directory.path / "spark" / query, self._deployed.sources.get(query, ())
            positions = streamed_positions(self._plan, folder, sources, epoch)
            read |= {names[uid]: _shown(position) for uid, position in positions.items() if uid in names}
        return read


def _shown(position: Position) -> Any:
    """Return a position as JSON that people can read; files are counted, since there may be many."""
    if isinstance(position, OffsetsRead):
        return {"of": position.origin, "offsets": position.offsets}
    if isinstance(position, FilesRead):
        return {"of": position.root, "files": position.count}
    if isinstance(position, SparkOffset):
        return {"of": position.format, "offset": position.offset}
    return position.describe()


def report_rest(
    planned: Plan,
    directory: CheckpointDirectory,
    assets: Mapping[str, AssetKey],
    instance: DagsterInstance,
    owner: str,
    log: Callable[[AssetMaterialization], None],
) -> int:
    """Report what a job has left that has ended, and return how much that was; nothing where another one runs.

    It holds the lease meanwhile, as `owner`, so that a job that starts waits for it.
    """
    deployed = directory.deployed()
    if deployed is None or not is_pending(read_notes(directory)):
        return 0
    try:
        lease = directory.take(owner, PATIENCE)
    except LeaseLostError:
        return 0
    with lease:
        return StreamMaterializations(planned, directory, deployed, assets, instance, log).report()
