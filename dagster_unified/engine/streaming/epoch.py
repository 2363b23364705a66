"""Commits one micro-batch: what the query computed goes through the last operators to all sinks, as one epoch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from dagster_unified.connectors.protocol.commits import STREAMED, WriteIdentity
from dagster_unified.engine.commit import SinkCommits, WriteContext, spark_sink, write
from dagster_unified.engine.dataframe.frames import Frames
from dagster_unified.engine.dataframe.native import Natives
from dagster_unified.engine.events import Written
from dagster_unified.engine.shipping import Shipments, by_value_afresh
from dagster_unified.engine.streaming.cross_query import QueryOutputsInEpoch
from dagster_unified.engine.streaming.iterations import Host, IterationsInEpoch
from dagster_unified.errors import PipelineError, UnifiedError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.execution_graph import ExecutionGraph
from dagster_unified.graph.nodes import Port, QueryOutputNode, SinkNode
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.drivers.stages import Report
from dagster_unified.operators.metrics import Metrics, merge
from dagster_unified.storage.paths import children, for_spark, load, remove_tree

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from upath import UPath

    from dagster_unified.engine.state_tables.savepoints import StartingState


class Tail(Frames):
    """The lazy DataFrames of one epoch's tail. `output` gives the streams of the query's output.

    Epochs share their `shipments`, so that each program is sent to workers once. `log` is Spark's log of the query's
    offsets.
    """

    def __init__(
        self,
        graph: ExecutionGraph,
        spark: SparkSession,
        output: Callable[[Port], DataFrame],
        shipments: Shipments,
        log: str,
        iterations: IterationsInEpoch | None = None,
    ) -> None:
        super().__init__(graph, output, shipments=shipments, log=log)
        self._natives = Natives(self.plan.name, graph.name, spark)
        self._iterations = iterations
        self._iterated: dict[Port, DataFrame] = {}
        self._in_iterations = Metrics()

    def metrics(self) -> Metrics:
        """Return what the operators reported; call it after all sinks were written."""
        return merge([*self.reports.metrics(), self._in_iterations])

    def run_natively(self, node: g.Node, port: Port) -> DataFrame:
        if isinstance(node, g.IterationNode):
            return self._output_of(node, port)
        if node.holds_state:
            raise PipelineError(
                f"{self.plan.name}: '{node.name}' cannot run in STREAMING behind an operator with state"
            )
        return self._natives.run(node, self.input_of(node.id))

    def _output_of(self, node: g.IterationNode, port: Port) -> DataFrame:
        """Return an output of an iteration; asking for the first one runs it."""
        if port not in self._iterated:
            assert self._iterations is not None
            inputs, reported = self.reports.take(lambda: self.inputs_of_iteration(node))
            outputs, metrics = self._iterations.outputs(node, inputs, lambda: merge(reported()))
            self._iterated.update(outputs)
            self._in_iterations.add(metrics)
        return self._iterated[port]


StreamOf = Callable[["DataFrame", Port], "DataFrame"]
"""Returns one stream of the rows of a query."""

Keep = Callable[["DataFrame", int], None]
"""Keeps rows of an epoch that go to no sink."""


_STAGED = "epoch-"
"""The prefix of the folders of epochs' rows."""


class StoppedError(UnifiedError):
    """The job is being stopped; not an error to anyone."""


class Outcome(msgspec.Struct, frozen=True):
    """The result of an epoch, for the job."""

    written: dict[str, Written]
    """By sink."""

    metrics: Metrics
    """Of the operators before the sinks."""

    report: Report = msgspec.field(default_factory=Report)
    """Of the operators that Spark ran in the query itself."""

    diverted: dict[str, int] = {}
    """Malformed rows that were set aside, by source."""

    circulates: bool = False
    """Whether something was fed back in an iteration that waits for the next epoch."""

    must_announce_idle: bool = False
    """Whether a stream that is handed on went idle in an epoch with records: a further epoch must announce it."""


class EpochRunner(ABC):
    """Runs the epochs of one query: takes its rows to the sinks. Another process that receives it calls `begin`."""

    def __init__(self, writer: EpochWriter) -> None:
        self.writer = writer

    def begin(self, host: Host, start: StartingState | None = None) -> None:
        """Go on in this process with the state of the previous job, or of a savepoint."""
        self.writer.check = host.check

    @abstractmethod
    def run(self, frame: DataFrame, epoch: int, ends: bool) -> Outcome:
        """Commit one micro-batch; `ends` says that it brings the end of the input."""

    def close(self) -> None:
        """Close what is kept open between epochs."""
        self.writer.close()


def _never() -> bool:
    return False


@dataclass
class EpochWriter:
    """Writes the epochs of one query."""

    plan: Plan
    spark: SparkSession | None
    """The session that writes; None for that of an epoch's rows, with no other of which they can be joined."""

    tail: ExecutionGraph
    deployment: str
    timeline: int
    staging: UPath
    check: Callable[[], None]
    """Raises where this job may not write any more."""

    token: int
    """Of the job's lease: a job that has lost it, and does not know it yet, stages its rows elsewhere."""

    log: str
    """Spark's log of the query's offsets, as workers read it."""

    _begun: bool = False
    _swept: bool = False
    _shipments: Shipments = field(default_factory=Shipments)
    _commits: dict[str, SinkCommits[Any]] = field(default_factory=dict)

    def commit(
        self,
        frame: DataFrame,
        epoch: int,
        stream_of: StreamOf,
        lanes_kept: Mapping[int, Keep] | None = None,
        is_empty: Callable[[], bool] = _never,
        iterations: IterationsInEpoch | None = None,
        query_outputs: QueryOutputsInEpoch | None = None,
    ) -> tuple[dict[str, Written], Metrics]:
        """Commit the rows of a micro-batch; returns what each sink wrote, and what the operators of the tail reported.

        `lanes_kept` says what happens to the lanes that go to no sink, such as malformed rows. `is_empty` says, once
        the rows are computed, whether sinks may be spared an epoch without rows.
        """
        self.check()
        spark = self.spark or frame.sparkSession
        if self._reads_once() and not lanes_kept and iterations is None:
            return self._write(spark, epoch, partial(stream_of, frame))
        target = self.staging / f"{_STAGED}{epoch}-{self.token}"
        if not self._swept:
            self._sweep()
        frame.write.mode("overwrite").option("compression", "lz4_raw").parquet(for_spark(target))
        results: dict[str, Written] = {}
        metrics = Metrics()
        # The first epoch creates the tables, or undoes what went back to a savepoint, even if it has no rows.
        is_first = epoch == 0 or (self.timeline and not self._begun)
        if is_first or not is_empty() or (iterations is not None and iterations.has_run()):
            staged = load(spark.read.format("parquet").schema(frame.schema), [target])
            for lane, keep in (lanes_kept or {}).items():
                keep(staged.where(f"lane = {lane}"), epoch)
            results, metrics = self._write(spark, epoch, partial(stream_of, staged), iterations, query_outputs)
            self._begun = True
        remove_tree(target)
        return results, metrics

    def close(self) -> None:
        """Close what the sinks keep open between epochs."""
        with ExitStack() as stack:
            for commits in self._commits.values():
                stack.callback(commits.close)

    def _sweep(self) -> None:
        """Remove the rows that earlier jobs have staged."""
        for name in children(self.staging):
            token = name.removeprefix(_STAGED).partition("-")[2]
            if name.startswith(_STAGED) and int(token or 0) < self.token:
                with suppress(OSError):  # a job that lost its lease may still write there
                    remove_tree(self.staging / name)
        self._swept = True

    def _reads_once(self) -> bool:
        """Return whether the query's rows are read once: by one sink, with no union before it."""
        return len(self.tail.sinks) == 1 and all(len(self.plan.graph.inputs(node)) == 1 for node in self.tail.nodes)

    def _write(
        self,
        spark: SparkSession,
        epoch: int,
        output: Callable[[Port], DataFrame],
        iterations: IterationsInEpoch | None = None,
        query_outputs: QueryOutputsInEpoch | None = None,
    ) -> tuple[dict[str, Written], Metrics]:
        tail = Tail(self.tail, spark, output, self._shipments, self.log, iterations)
        results = {}
        try:
            for number in self.tail.sinks:
                node = self.plan.graph.node(number)
                if isinstance(node, QueryOutputNode):
                    assert query_outputs is not None
                    query_outputs.write(node, tail.input_of(number))
                    continue
                assert isinstance(node, SinkNode)
                result = write(node, self._commits_of(node), tail.sink_input(number), self._context(node, epoch))
                results[node.name] = Written(result.rows, result.bytes, result.version)
        finally:
            tail.release()
        if query_outputs is not None:
            query_outputs.commit()
        return results, tail.metrics()

    def _context(self, node: SinkNode, epoch: int) -> WriteContext:
        identity = WriteIdentity(self.plan.name, node.uid, self.deployment, STREAMED, epoch, self.timeline)
        staging = str(self.staging / "sinks")
        return WriteContext(identity, self.tail.name, self.check, self._shipping(node.uid), staging)

    def _commits_of(self, node: SinkNode) -> SinkCommits[Any]:
        if node.uid not in self._commits:
            self._commits[node.uid] = SinkCommits(spark_sink(self.plan.name, node))
        return self._commits[node.uid]

    def _shipping(self, uid: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Ship a sink's functions: in every epoch those of the first."""
        numbers = count()

        def ship(function: Callable[..., Any]) -> Callable[..., Any]:
            return self._shipments.once(
                (uid, next(numbers), type(function).__qualname__), partial(by_value_afresh, function)
            )

        return ship
