"""The lazy DataFrames of an execution graph, each built once.

Knows how streams, inputs and passes fit together. A runtime says in a subclass how operators run that are not Python's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable
from typing import TYPE_CHECKING

from dagster_unified.engine.dataframe.inputs import Inputs
from dagster_unified.engine.dataframe.partitions import PartitionAxis
from dagster_unified.engine.dataframe.passes import Reports, mapped, stream_of
from dagster_unified.engine.failures import naming_operator
from dagster_unified.engine.shipping import Shipments
from dagster_unified.graph import nodes as g
from dagster_unified.graph.execution_graph import ExecutionGraph, Runs, Vertex
from dagster_unified.graph.plan import Port
from dagster_unified.graph.programs import keys_program
from dagster_unified.operators.program.spec import Program

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Frames(Inputs):
    """The lazy DataFrames of an execution graph; `outside` gives the streams that come from elsewhere.

    In STREAMING `log` is Spark's log of the query's offsets.
    """

    def __init__(
        self,
        graph: ExecutionGraph,
        outside: Callable[[Port], DataFrame],
        axis: PartitionAxis | None = None,
        shipments: Shipments | None = None,
        log: str | None = None,
    ) -> None:
        super().__init__(graph, axis, shipments)
        self.log = log
        self.reports = Reports(self.axis)
        self._outside = outside
        self._ports: dict[Port, DataFrame] = {}
        self._combined: dict[Vertex, DataFrame] = {}
        self._persisted: list[DataFrame] = []

    @abstractmethod
    def run_natively(self, node: g.Node, port: Port) -> DataFrame:
        """The stream of an operator that does not run in Python."""

    def run_vertex(self, vertex: Vertex) -> DataFrame:
        """The combined DataFrame of a vertex of Python."""
        program = self.graph.program(vertex)
        frame = self.input_of(vertex.head).select(*program.input.schema.names, *self.axis.columns)
        return self.persisted(vertex, self.run_program(frame, program, vertex.members))

    def run_program(self, frame: DataFrame, program: Program, place: Hashable) -> DataFrame:
        """Rows through a program, whose reports are observed; `place` identifies it in the plan."""
        return self.reports.taken_from(mapped(frame, program, self.shipments, place, self.axis, self.log))

    def persisted(self, vertex: Vertex, combined: DataFrame) -> DataFrame:
        """What a vertex of Python emits, persisted where several readers would compute it again."""
        return self.persist(combined) if self.graph.is_computed_again(vertex) else combined

    def persist(self, frame: DataFrame) -> DataFrame:
        """A DataFrame that is computed once, until `release`."""
        self._persisted.append(frame.persist())
        return self._persisted[-1]

    def release(self) -> None:
        """Free the DataFrames that were persisted for several readers."""
        for frame in self._persisted:
            frame.unpersist()

    def port(self, port: Port) -> DataFrame:
        if port.node not in self.graph.vertex_of:
            return self._outside(port)
        if port not in self._ports:
            self._ports[port] = self._build(port)
        return self._ports[port]

    def combined(self, ports: Collection[Port]) -> tuple[DataFrame, tuple[Port, ...]] | None:
        """Several streams in one DataFrame, in the order of their numbers, if one vertex emits exactly these."""
        wanted = set(ports)
        found = (v for v in self.graph.vertices if v.runs is Runs.PYTHON and len(v.outputs) > 1)
        vertex = next((vertex for vertex in found if set(vertex.outputs) == wanted), None)
        return None if vertex is None else (self._combined_of(vertex), vertex.outputs)

    def _combined_of(self, vertex: Vertex) -> DataFrame:
        if vertex not in self._combined:
            self._combined[vertex] = self.run_vertex(vertex)
        return self._combined[vertex]

    def _build(self, port: Port) -> DataFrame:
        layout, vertex = self.plan.layout(port), self.graph.vertex_of[port.node]
        if vertex.runs is Runs.PYTHON:
            return stream_of(vertex, self._combined_of(vertex), port, layout, self.axis.columns)
        node = self.plan.graph.node(port.node)
        with naming_operator(self.plan.name, node):
            frame = self.run_natively(node, port)
        if not layout.keys:
            return frame
        keys = self.axis.timed(keys_program(self.plan, self.graph.name, layout))
        return self.run_program(self.axis.in_order(frame), keys, port)
