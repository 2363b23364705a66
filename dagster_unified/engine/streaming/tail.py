"""The operators between the last operator with state and the sinks, over the output of one epoch.

Knows Spark's DataFrame API. Lazy: nothing runs here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dagster_unified.engine.dataframe.frames import Frames
from dagster_unified.engine.dataframe.native import Natives
from dagster_unified.engine.shipping import Shipments
from dagster_unified.engine.streaming.iterations import IterationsInEpoch
from dagster_unified.errors import PipelineError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.execution_graph import ExecutionGraph
from dagster_unified.graph.plan import Port
from dagster_unified.operators.metrics import Metrics, merge

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


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
        """What the operators reported; call it after all sinks were written."""
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
        """An output of an iteration, which runs when the first of them is asked for."""
        if port not in self._iterated:
            assert self._iterations is not None
            inputs, reported = self.reports.take(lambda: self.inputs_of_iteration(node))
            found, metrics = self._iterations.outputs(node, inputs, lambda: merge(reported()))
            self._iterated.update(found)
            self._in_iterations.add(metrics)
        return self._iterated[port]
