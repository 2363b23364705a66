"""The query of one native aggregate: each epoch has the keys that changed, or the windows that closed."""

from __future__ import annotations

import time
from collections.abc import Collection
from datetime import datetime
from typing import TYPE_CHECKING

from dagster_unified.engine.events import EpochCommitted
from dagster_unified.engine.streaming.checkpoint import last_number
from dagster_unified.engine.streaming.control import ControlFile
from dagster_unified.engine.streaming.epoch import EpochRunner, Outcome
from dagster_unified.engine.streaming.native_streams import NativeStreams
from dagster_unified.engine.streaming.query import Deployment, Query
from dagster_unified.errors import UnsupportedError
from dagster_unified.graph.execution_graph import ExecutionGraph
from dagster_unified.graph.plan import Port
from dagster_unified.graph.topology import TAIL
from dagster_unified.operators.drivers.key_groups import ControlEvent
from dagster_unified.operators.time import to_millis

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class NativeRunner(EpochRunner):
    """Takes what an aggregate emits to the sinks."""

    def run(self, frame: DataFrame, epoch: int, ends: bool) -> Outcome:
        return Outcome(*self.writer.commit(frame, epoch, lambda rows, port: rows))


class NativeQuery(Query):
    """The query of one native aggregate.

    The query of lanes reads the sources in `packed` as well, and counts and keeps their malformed rows.
    """

    epochs_after_end = 1  # Spark closes windows in the epoch after the one that moves the watermark
    several_stateful = False
    """With more than one Spark would take late records for a micro-batch longer."""

    def __init__(
        self, deployment: Deployment, name: str, sinks: tuple[int, ...], aggregate: int, packed: Collection[int]
    ) -> None:
        upstream = deployment.plan.upstream(aggregate)
        after = sorted(deployment.plan.upstream(*sinks) - upstream)
        super().__init__(deployment, name, ExecutionGraph(deployment.plan, TAIL, tuple(after), sinks=sinks))
        node = self.plan.graph.node(aggregate)
        self.aggregate, self.packed = aggregate, packed
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
            if node.id not in self.packed:
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
        """The end of the input is logged: see that the epoch after it comes, in which windows close.

        A query that was started anew gets no epoch without data, unless Spark had planned it before.
        """
        logged = self.directory.last_epoch(self.name)
        planned = last_number(self.folder / "spark" / self.name / "offsets")
        if self.has_end and not self.over and planned == logged:
            self.end()

    def _late(self) -> int:
        """How many rows the micro-batch before dropped because their windows had closed."""
        progress = self.progress()
        return 0 if progress is None else sum(s["numRowsDroppedByWatermark"] for s in progress["stateOperators"])

    def _watermark(self) -> int | None:
        """Spark's watermark in the micro-batch before; None before the first, for which Spark says 1970."""
        progress = self.progress()
        text = None if progress is None else progress["eventTime"].get("watermark")
        millis = None if text is None else to_millis(datetime.fromisoformat(text))
        return millis or None
