"""Streaming DataFrames of operators that begin with their sources.

These are native operators, Python passes and native aggregates, which run before any state of key groups.

Knows Spark's DataFrame API. Lazy: nothing runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from dagster_unified.engine.dataframe.frames import Frames
from dagster_unified.engine.dataframe.inputs import spark_source, split_malformed
from dagster_unified.engine.dataframe.native import MOMENT, Natives
from dagster_unified.engine.dataframe.passes import mapped, without_reports
from dagster_unified.engine.streaming.control import ControlFile
from dagster_unified.errors import PipelineError, UnsupportedError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.execution_graph import ExecutionGraph
from dagster_unified.graph.plan import Port
from dagster_unified.operators.layout import TIMESTAMP
from dagster_unified.operators.program.spec import Program

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from upath import UPath

END = 253_402_300_799_000
"""The last moment that Spark's timestamps reach (the year 9999), in milliseconds."""


class NativeStreams(Frames):
    """The streams of operators that begin with their sources.

    `tables` are those of lookups, and `log` is Spark's log of the query's offsets. `control` is where the end of input
    is written, on which windows close.
    """

    def __init__(
        self,
        graph: ExecutionGraph,
        spark: SparkSession,
        sources: UPath,
        tables: Callable[[DataFrame], DataFrame],
        log: str,
        control: ControlFile | None = None,
    ) -> None:
        super().__init__(graph, _no_stream, log=log)
        self.spark = spark
        self.drops_malformed: list[g.SourceNode] = []
        """The sources whose malformed rows are dropped here."""

        self._sources, self._control = sources, control
        self._natives = Natives(self.plan.name, graph.name, spark, tables, self._with_watermark)

    def run_program(self, frame: DataFrame, program: Program, place: Hashable) -> DataFrame:
        return without_reports(mapped(frame, program, self.shipments, place, self.axis, self.log))

    def persist(self, frame: DataFrame) -> DataFrame:
        return frame  # it is a stream

    def run_natively(self, node: g.Node, port: Port) -> DataFrame:
        if isinstance(node, g.SourceNode):
            return self._source(node)
        return self._natives.run(node, self.input_of(node.id))

    def _source(self, node: g.SourceNode) -> DataFrame:
        source = spark_source(self.plan.name, node)
        rows, unfit = split_malformed(source.read_stream(self.spark, self._sources / node.uid))
        if unfit is not None:
            self.drops_malformed.append(node)
        return rows.select(*source.records.names)

    def _with_watermark(self, node: g.Node, frame: DataFrame) -> DataFrame:
        """Rows with Spark's watermark, by the strategy of the one assigner.

        At the end of input a row of the control stream moves it to its end.

        Spark has one watermark for a query, which is the latest of all its sources': so there can be only one assigner.
        """
        from pyspark.sql import functions as F

        bound = self._bound(node)
        nothing = [F.lit(None).cast(f.dataType).alias(f.name) for f in frame.schema if f.name != MOMENT]
        end = self._end_of_input().select(*nothing, F.timestamp_millis(F.lit(END)).alias(MOMENT))
        early = self._natives.raised(
            node,
            "a record is from before 1970, where Spark's watermark begins, so that its native window is lost in"
            " STREAMING; use aggregate(...) instead of agg(...)",
        )
        frame = frame.withColumn(MOMENT, F.when(F.col(TIMESTAMP) < 0, early.cast("timestamp")).otherwise(F.col(MOMENT)))
        both = frame.unionByName(end).withWatermark(MOMENT, f"{bound} milliseconds")
        return both.where(F.col(MOMENT) < F.timestamp_millis(F.lit(END)))

    def _bound(self, node: g.Node) -> int:
        """How far a window's records may be out of order, in milliseconds."""
        where = f"{self.plan.name}: operator '{node.name}'"
        before = self.plan.assigners_before(node.id)
        assigners = [n for n in self.plan.graph.assigners if n.uid in before]
        if len(assigners) != 1:
            raise UnsupportedError(
                f"{where}: its event times come from {' and '.join(n.name for n in assigners)}, and a native window has"
                " one watermark in STREAMING; assign timestamps once, after the union, or use aggregate(...) instead"
                " of agg(...)"
            )
        if assigners[0].generator is not None:
            raise UnsupportedError(
                f"{where}: '{assigners[0].name}' has a watermark generator, and a native window goes by Spark's"
                " watermark in STREAMING, which has a bound; use aggregate(...) instead of agg(...)"
            )
        bound = assigners[0].max_out_of_orderness_ms
        if bound is None:
            raise UnsupportedError(
                f"{where}: '{assigners[0].name}' emits no watermarks, which a native window needs in STREAMING; give"
                " the strategy a bound"
            )
        return bound

    def _end_of_input(self) -> DataFrame:
        from pyspark.sql import functions as F

        assert self._control is not None
        return self._control.stream(self.spark).where(F.get_json_object("event", "$.end") == "true")


def _no_stream(port: Port) -> DataFrame:
    raise PipelineError(f"stream {port} is not among these operators")
