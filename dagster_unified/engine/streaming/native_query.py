"""The query of a native aggregate: an epoch has the keys that changed, or the windows that closed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable
from datetime import datetime
from typing import TYPE_CHECKING

from dagster_unified.engine.dataframe.frames import Frames, spark_source, split_malformed
from dagster_unified.engine.dataframe.native import MOMENT, Natives
from dagster_unified.engine.dataframe.passes import mapped, without_reports
from dagster_unified.engine.events import EpochCommitted
from dagster_unified.engine.streaming.checkpoint import last_number
from dagster_unified.engine.streaming.control import ControlFile
from dagster_unified.engine.streaming.epoch import EpochRunner, Outcome
from dagster_unified.engine.streaming.query import Deployment, Query
from dagster_unified.errors import PipelineError, UnsupportedError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.execution_graph import ExecutionGraph
from dagster_unified.graph.nodes import Port
from dagster_unified.graph.topology import TAIL
from dagster_unified.operators.drivers.key_groups import ControlEvent
from dagster_unified.operators.layout import TIMESTAMP
from dagster_unified.operators.program.step import Program
from dagster_unified.operators.time import to_millis

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
        """Return rows with Spark's watermark, by the strategy of the one assigner.

        At the end of input a row of the control stream moves it to its end.
        A query of Spark has one watermark, the latest of all its sources', so there can be only one assigner.
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
        """Return how far a window's records may be out of order, in milliseconds."""
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


class NativeRunner(EpochRunner):
    """Takes an aggregate's output to the sinks."""

    def run(self, frame: DataFrame, epoch: int, ends: bool) -> Outcome:
        return Outcome(*self.writer.commit(frame, epoch, lambda rows, port: rows))


class NativeQuery(Query):
    """The query of one native aggregate.

    The query of key groups reads the sources in `beside` as well, and counts and keeps their malformed rows.
    """

    epochs_after_end = 1  # Spark closes windows in the epoch after the one that moves the watermark
    several_stateful = False
    """With more than one Spark would take late records for a micro-batch longer."""

    def __init__(
        self, deployment: Deployment, name: str, sinks: tuple[int, ...], aggregate: int, beside: Collection[int]
    ) -> None:
        upstream = deployment.plan.graph.upstream(aggregate)
        after = sorted(deployment.plan.graph.upstream(*sinks) - upstream)
        super().__init__(deployment, name, ExecutionGraph(deployment.plan, TAIL, tuple(after), sinks=sinks))
        node = self.plan.graph.node(aggregate)
        self.aggregate, self.beside = aggregate, beside
        self.graph = ExecutionGraph(self.plan, node.name, tuple(sorted(upstream)))
        self.windowed = node.has_native_windows
        self.output_mode = "append" if self.windowed else "update"
        self._events = ControlFile(str(self.folder / "control" / name))
        self._events.claim(deployment.token)
        self.runner = NativeRunner(self.writer)
        latest = self._events.read()
        if latest is not None and latest.end:
            self.goes_on_at_end()
            self._have_windows_closed()

    def frame(self) -> DataFrame:
        sources = self.folder / "sources"
        streams = NativeStreams(self.graph, self.spark, sources, self.tables, self.log, self._events)
        built = streams.port(Port(self.aggregate))
        for node in streams.drops_malformed:
            if node.id not in self.beside:
                raise UnsupportedError(
                    f"{self.plan.name}: source '{node.name}' drops or diverts malformed rows, and only native"
                    " aggregates read it, which STREAMING cannot run; use on_malformed='fail', or aggregate with"
                    " reduce(...) or a function"
                )
        return built

    def committed(self, outcome: Outcome, epoch: int, started: float) -> EpochCommitted:
        metrics = outcome.metrics
        rows, state_rows, state_bytes = self.measured()
        late = self._late()
        if late:
            metrics.count("late records", late)
        return EpochCommitted(
            self.name,
            epoch,
            rows,
            time.monotonic() - started,
            self._watermark(),
            metrics,
            outcome.written,
            state_rows,
            state_bytes,
        )

    def end(self) -> bool:
        if self.windowed:
            before = self._events.read() or ControlEvent()
            self._events.write(ControlEvent(before.number + 1, end=True))
        return self.windowed

    def _have_windows_closed(self) -> None:
        """After the end of the input is logged, make sure that an epoch follows, in which windows close.

        A query that was started anew gets no epoch without data, unless Spark had planned it before.
        """
        logged = self.directory.last_epoch(self.name)
        planned = last_number(self.folder / "spark" / self.name / "offsets")
        if self.has_end and not self.over and planned == logged:
            self.end()

    def _late(self) -> int:
        """Return how many rows the previous micro-batch dropped because their windows had closed."""
        progress = self.progress()
        return 0 if progress is None else sum(s["numRowsDroppedByWatermark"] for s in progress["stateOperators"])

    def _watermark(self) -> int | None:
        """Return Spark's watermark in the previous micro-batch; None before the first, for which Spark says 1970."""
        progress = self.progress()
        text = None if progress is None else progress["eventTime"].get("watermark")
        millis = None if text is None else to_millis(datetime.fromisoformat(text))
        return millis or None
