"""The streams of an execution graph as lazy DataFrames, each built once.

Knows how streams, inputs and passes fit together; how an operator runs in a mode, its `Operators` know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import TYPE_CHECKING, Protocol

from dagster_unified.engine.dataframe.inputs import Inputs
from dagster_unified.engine.dataframe.partitions import PartitionAxis
from dagster_unified.engine.dataframe.passes import stream_of
from dagster_unified.engine.failures import naming_operator
from dagster_unified.engine.shipping import Shipments
from dagster_unified.graph import nodes as g
from dagster_unified.graph.execution_graph import ExecutionGraph, Runs, Vertex
from dagster_unified.graph.plan import Port
from dagster_unified.graph.programs import keys_program
from dagster_unified.operators.program.spec import Program

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Operators(Protocol):
    """How a mode runs operators."""

    def run_natively(self, node: g.Node, port: Port) -> DataFrame:
        """The stream of an operator that runs in Catalyst."""

    def run_vertex(self, vertex: Vertex) -> DataFrame:
        """The combined DataFrame of a vertex of Python."""

    def run_program(self, frame: DataFrame, program: Program, place: Hashable) -> DataFrame:
        """Rows through a program, without its reports; `place` identifies it in the plan."""


class Streams:
    """The streams of an execution graph; `outside` gives those that come from elsewhere."""

    def __init__(
        self,
        graph: ExecutionGraph,
        operators: Operators,
        outside: Callable[[Port], DataFrame],
        axis: PartitionAxis | None = None,
        shipments: Shipments | None = None,
    ) -> None:
        self.graph, self.plan = graph, graph.plan
        self.axis = axis or PartitionAxis()
        self.shipments = Shipments() if shipments is None else shipments
        self.inputs = Inputs(graph, self.axis, self.shipments, self.port)
        self._operators, self._outside = operators, outside
        self._ports: dict[Port, DataFrame] = {}
        self._combined: dict[Vertex, DataFrame] = {}

    def port(self, port: Port) -> DataFrame:
        """A stream of the graph or from outside of it, in the columns of its layout."""
        if port.node not in self.graph.vertex_of:
            return self._outside(port)
        if port not in self._ports:
            self._ports[port] = self._build(port)
        return self._ports[port]

    def emitter_of(self, ports: Collection[Port]) -> Vertex | None:
        """The vertex of Python that emits exactly these streams, several of them, if there is one."""
        wanted = set(ports)
        found = (v for v in self.graph.vertices if v.runs is Runs.PYTHON and len(v.outputs) > 1)
        return next((vertex for vertex in found if set(vertex.outputs) == wanted), None)

    def combined(self, vertex: Vertex) -> DataFrame:
        """The combined DataFrame of a vertex of Python."""
        if vertex not in self._combined:
            self._combined[vertex] = self._operators.run_vertex(vertex)
        return self._combined[vertex]

    def head_of(self, vertex: Vertex) -> tuple[DataFrame, Program]:
        """The input of a vertex of Python, in the columns of its program, and that program."""
        program = self.graph.program(vertex)
        return self.inputs.of(vertex.head).select(*program.input.schema.names, *self.axis.columns), program

    def _build(self, port: Port) -> DataFrame:
        layout, vertex = self.plan.layout(port), self.graph.vertex_of[port.node]
        if vertex.runs is Runs.PYTHON:
            return stream_of(vertex, self.combined(vertex), port, layout, self.axis.columns)
        node = self.plan.graph.node(port.node)
        with naming_operator(self.plan.name, node):
            frame = self._operators.run_natively(node, port)
        if not layout.keys:
            return frame
        keys = self.axis.timed(keys_program(self.plan, self.graph.name, layout))
        return self._operators.run_program(self.axis.in_order(frame), keys, port)
