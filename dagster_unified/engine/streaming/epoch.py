"""Commits one micro-batch: what the query computed goes to all sinks, as one epoch.

The query's rows have to be computed exactly once, since that is what moves its state on. Where one sink takes
everything they go straight to it (`engine/writing.py` computes them also where the sink has this epoch already); else
they are staged in the checkpoint directory and each sink is written from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from dagster_unified.connectors.base import WriteContext, WriteResult, spark_schema
from dagster_unified.connectors.paths import for_spark, remove_tree
from dagster_unified.engine.dataframe.regions import RegionFrames, observed
from dagster_unified.engine.shipping import Shipments, by_value_afresh
from dagster_unified.engine.writing import write
from dagster_unified.graph.nodes import SinkNode
from dagster_unified.graph.plan import Plan, Port, Region
from dagster_unified.operators.drivers.report import Report, merge_reports
from dagster_unified.operators.lanes import PACKED, REPORT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from upath import UPath

Unpacked = Callable[["DataFrame", Port], "DataFrame"]
"""One stream of a query's output."""


@dataclass
class EpochWriter:
    """Writes the epochs of one query."""

    plan: Plan
    spark: SparkSession
    tail: Region
    deployment: str
    timeline: int
    staging: UPath
    check: Callable[[], None]
    """Raises where this job may not write any more."""

    _begun: bool = False
    _shipments: Shipments = field(default_factory=Shipments)

    def packed(
        self, frame: DataFrame, epoch: int, unpacked: Unpacked, kept: Mapping[int, Callable[[DataFrame, int], None]]
    ) -> tuple[Report, dict[str, WriteResult]]:
        """Commits packed rows. `kept` says what is done with the lanes that go to no sink, such as malformed rows."""
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        self.check()
        observation = Observation()
        counts = [
            F.collect_list(F.when(F.col("lane") == REPORT, F.col("data"))).alias("reports"),
            F.count(F.when(F.col("lane") != REPORT, 1)).alias("rows"),
        ]
        data = frame.observe(observation, *counts).where(F.col("lane") != REPORT)
        direct = len(self.tail.sinks) == 1 and not kept
        if direct:
            results = self._write(epoch, lambda port: unpacked(data, port))
        else:
            target = self.staging / f"epoch-{epoch}"
            data.write.mode("overwrite").option("compression", "lz4_raw").parquet(for_spark(target))
            results = {}
        seen = observed(observation)
        rows, report = int(seen.get("rows") or 0), merge_reports(bytes(r) for r in seen.get("reports") or [])
        if not direct:
            if (
                rows or epoch == 0 or (self.timeline and not self._begun)
            ):  # the first epoch makes the tables, or takes back what was undone, also where it has nothing for them
                staged = self.spark.read.schema(spark_schema(PACKED)).parquet(for_spark(target))
                for lane, keep in kept.items():
                    keep(staged.where(F.col("lane") == lane), epoch)
                results = self._write(epoch, lambda port: unpacked(staged, port))
                self._begun = True
            remove_tree(target)
        return report, results

    def plain(self, frame: DataFrame, epoch: int) -> dict[str, WriteResult]:
        """Commits the rows of one stream in its own columns."""
        self.check()
        if len(self.tail.sinks) == 1:
            return self._write(epoch, lambda port: frame)
        target = self.staging / f"epoch-{epoch}"
        frame.write.mode("overwrite").option("compression", "lz4_raw").parquet(for_spark(target))
        staged = self.spark.read.schema(frame.schema).parquet(for_spark(target))
        results = self._write(epoch, lambda port: staged)
        remove_tree(target)
        return results

    def _write(self, epoch: int, stream: Callable[[Port], DataFrame]) -> dict[str, WriteResult]:
        frames = RegionFrames(self.plan, self.tail, self.spark, stream, shipments=self._shipments)
        results = {}
        try:
            for number in self.tail.sinks:
                node = cast("SinkNode", self.plan.graph.node(number))
                context = WriteContext(
                    self.spark,
                    self.plan.name,
                    self.tail.name,
                    self.deployment,
                    "streaming",
                    epoch,
                    self.timeline,
                    self.check,
                    self._shipping(node.uid),
                    node.uid,
                )
                results[node.name] = write(node, frames.sink_input(number), context)
        finally:
            frames.release()
        return results

    def _shipping(self, uid: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Ships a sink's functions: those of the first epoch, each epoch again."""
        numbers = count()

        def ship(function: Callable[..., Any]) -> Callable[..., Any]:
            return self._shipments.once(
                (uid, next(numbers), type(function).__qualname__), partial(by_value_afresh, function)
            )

        return ship
