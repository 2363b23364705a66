"""Writes the sinks of a region: directly, or from what it materialized.

Knows the intermediate store and the sink protocol; not what computed the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from dagster_unified.connectors.protocol.commits import WriteIdentity
from dagster_unified.engine.batch.intermediates import dataframes
from dagster_unified.engine.batch.intermediates.store import Manifest
from dagster_unified.engine.batch.materialize import LeavingStream
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.commit import SinkCommits, WriteContext, WriteResult
from dagster_unified.engine.dataframe.partitions import PartitionAxis
from dagster_unified.engine.shipping import by_value_afresh
from dagster_unified.engine.writing import spark_sink, write, write_partitions
from dagster_unified.graph.nodes import SinkNode
from dagster_unified.graph.plan import Region
from dagster_unified.graph.slices import WHOLE
from dagster_unified.operators.layout import EMITTED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class RegionSinks:
    """The sinks of a region, for one partition or several."""

    def __init__(self, runs: Sequence[Run], region: Region, nodes: Sequence[SinkNode]) -> None:
        self.runs, self.region, self.nodes = runs, region, nodes

    @property
    def need_order(self) -> bool:
        """Whether a sink needs the order in which rows were emitted."""
        return any(node.sink.upserts for node in self.nodes)

    def write(self, run: Run, node: SinkNode, frame: DataFrame) -> WriteResult:
        """Write the rows of one partition to a sink."""
        with closing(SinkCommits(spark_sink(run.plan.name, node))) as commits:
            return write(node, commits, frame, self._context(run, node))

    def write_materialized(self, run: Run, node: SinkNode, manifest: Manifest) -> WriteResult:
        """Write what one partition materialized to a sink."""
        return self.write(run, node, self._materialized(node, [manifest]))

    def write_together(self, manifests: Sequence[Manifest]) -> tuple[list[dict[str, WriteResult]], list[SinkNode]]:
        """Write what several partitions materialized to the sinks that can take several at once.

        Returns the results by partition, and the sinks that are left.
        """
        results: list[dict[str, WriteResult]] = [{} for _ in manifests]
        left = list(self.nodes)
        if len(manifests) == 1:
            return results, left
        for node in self.nodes:
            contexts = [self._context(run, node) for run in self.runs]
            frame = self._materialized(node, manifests, [EMITTED] if node.sink.upserts else [])
            written = write_partitions(node, frame, contexts)
            if written is not None:
                left.remove(node)
                for of_partition, result in zip(results, written, strict=True):
                    of_partition[node.name] = result
        return results, left

    def _materialized(self, node: SinkNode, manifests: Sequence[Manifest], further: Sequence[str] = ()) -> DataFrame:
        run = self.runs[0]
        stream = LeavingStream.to_sink(run.plan, self.region, node)
        frame = dataframes.read(run.spark, run.store, manifests, stream.uid, stream.tag, stream.layout, further)
        return frame.select(*stream.layout.records.names, *further, *PartitionAxis(len(manifests)).columns)

    def _context(self, run: Run, node: SinkNode) -> WriteContext:
        replaces = node.sink.capabilities.takes_again(partitioned=run.partition != WHOLE)
        number = run.number if replaces else 0
        identity = WriteIdentity(run.plan.name, node.uid, run.execution, run.partition, run=number)
        staging = str(run.store.root / ".staging")
        return WriteContext(identity, self.region.name, ship=by_value_afresh, staging=staging)
