"""The operators between the last operator with state and the sinks, over the output of one epoch.

Knows Spark's DataFrame API. Lazy: nothing runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from dagster_unified.engine.dataframe.native import Natives
from dagster_unified.engine.dataframe.passes import Reports, mapped
from dagster_unified.engine.dataframe.streams import Streams
from dagster_unified.engine.shipping import Shipments
from dagster_unified.engine.streaming.iterations import IterationsInEpoch
from dagster_unified.errors import PipelineError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.execution_graph import ExecutionGraph, Vertex
from dagster_unified.graph.plan import Port
from dagster_unified.operators.metrics import Metrics, merge
from dagster_unified.operators.program.spec import Program

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Tail:
    """The lazy DataFrames of one epoch's tail. `output` gives the streams of the query's output.

    Epochs share their `shipments`, so that each program is sent to workers once.
    """

    def __init__(
        self,
        graph: ExecutionGraph,
        spark: SparkSession,
        output: Callable[[Port], DataFrame],
        shipments: Shipments,
        iterations: IterationsInEpoch | None = None,
    ) -> None:
        self.graph, self.plan = graph, graph.plan
        self._streams = Streams(graph, self, output, shipments=shipments)
        self._natives = Natives(self.plan.name, graph.name, spark)
        self._reports = Reports()
        self._persisted: list[DataFrame] = []
        self._iterations = iterations
        self._iterated: dict[Port, DataFrame] = {}
        self._in_iterations = Metrics()

    def sink_input(self, sink: int) -> DataFrame:
        """What a sink writes."""
        return self._streams.inputs.of_sink(sink)

    def handed_on(self, relay: int) -> DataFrame:
        """What goes to another query, with its event times."""
        return self._streams.inputs.of(relay)

    def metrics(self) -> Metrics:
        """What the operators reported; call it after all sinks were written."""
        return merge([*self._reports.metrics(), self._in_iterations])

    def release(self) -> None:
        """Free the DataFrames that were persisted for several readers."""
        for frame in self._persisted:
            frame.unpersist()

    def run_vertex(self, vertex: Vertex) -> DataFrame:
        combined = self.run_program(*self._streams.head_of(vertex), vertex.members)
        if self.graph.is_computed_again(vertex):
            self._persisted.append(combined.persist())
        return combined

    def run_program(self, frame: DataFrame, program: Program, place: Hashable) -> DataFrame:
        return self._reports.taken_from(mapped(frame, program, self._streams.shipments, place, self._streams.axis))

    def run_natively(self, node: g.Node, port: Port) -> DataFrame:
        if isinstance(node, g.IterationNode):
            return self._output_of(node, port)
        if node.holds_state:
            raise PipelineError(
                f"{self.plan.name}: '{node.name}' cannot run in STREAMING behind an operator with state"
            )
        return self._natives.run(node, self._streams.inputs.of(node.id))

    def _output_of(self, node: g.IterationNode, port: Port) -> DataFrame:
        """An output of an iteration, which runs when the first of them is asked for."""
        if port not in self._iterated:
            assert self._iterations is not None
            inputs, reported = self._reports.take(lambda: self._streams.inputs.of_iteration(node))
            found, metrics = self._iterations.outputs(node, inputs, lambda: merge(reported()))
            self._iterated.update(found)
            self._in_iterations.add(metrics)
        return self._iterated[port]
