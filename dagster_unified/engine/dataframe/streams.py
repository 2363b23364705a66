"""The streams of a fragment as lazy DataFrames, each built once.

Knows how streams, inputs and passes fit together; how an operator runs in a mode, its `Operators` know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import TYPE_CHECKING, Protocol

from dagster_unified.engine.dataframe.exchanges import Exchanges
from dagster_unified.engine.dataframe.fragment import Fragment
from dagster_unified.engine.dataframe.inputs import Inputs
from dagster_unified.engine.dataframe.partitions import PartitionAxis
from dagster_unified.engine.dataframe.passes import stream_of
from dagster_unified.engine.failures import naming_operator
from dagster_unified.engine.passes import Pass, find_passes, keys_program
from dagster_unified.engine.shipping import Shipments
from dagster_unified.engine.translate import program
from dagster_unified.graph import nodes as g
from dagster_unified.graph.plan import Plan, Port
from dagster_unified.operators.program.spec import Program

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Operators(Protocol):
    """How a mode runs operators."""

    def run_natively(self, node: g.Node, port: Port) -> DataFrame:
        """The stream of an operator that runs in Catalyst."""

    def run_pass(self, one: Pass) -> DataFrame:
        """The combined DataFrame of a Python pass."""

    def run_program(self, frame: DataFrame, program: Program, place: Hashable) -> DataFrame:
        """Rows through a program, without its reports; `place` identifies it in the plan."""


class Streams:
    """The streams of a fragment."""

    def __init__(
        self,
        plan: Plan,
        fragment: Fragment,
        operators: Operators,
        outside: Callable[[Port], DataFrame],
        axis: PartitionAxis | None = None,
        shipments: Shipments | None = None,
    ) -> None:
        self.plan, self.fragment = plan, fragment
        self.axis = axis or PartitionAxis()
        self.shipments = Shipments() if shipments is None else shipments
        self.exchanges = Exchanges(plan, fragment, self.axis, self.shipments)
        self.inputs = Inputs(plan, self.exchanges, self.port)
        self.passes = find_passes(plan, fragment)
        self._operators, self._outside = operators, outside
        self._ports: dict[Port, DataFrame] = {}
        self._combined: dict[Pass, DataFrame] = {}

    def port(self, port: Port) -> DataFrame:
        """A stream of this fragment or from outside of it, in the columns of its layout."""
        if port.node not in self.fragment.nodes:
            return self._outside(port)
        if port not in self._ports:
            self._ports[port] = self._build(port)
        return self._ports[port]

    def pass_of(self, ports: Collection[Port]) -> Pass | None:
        """The pass that emits exactly these streams, several of them, if there is one."""
        return next((one for one in self.passes if len(one.outputs) > 1 and set(one.outputs) == set(ports)), None)

    def combined(self, one: Pass) -> DataFrame:
        """The combined DataFrame of a pass."""
        if one not in self._combined:
            self._combined[one] = self._operators.run_pass(one)
        return self._combined[one]

    def head_of(self, one: Pass) -> tuple[DataFrame, Program]:
        """The input of a pass, in the columns of its program, and that program."""
        found = program(self.plan, self.fragment.name, one.members, one.outputs)
        frame = self.inputs.of(one.members[0])
        return frame.select(*found.input.schema.names, *self.axis.columns), found

    def _build(self, port: Port) -> DataFrame:
        layout = self.plan.layout(port)
        one = next((p for p in self.passes if port.node in p.members), None)
        if one is not None:
            return stream_of(one, self.combined(one), port, layout, self.axis.columns)
        node = self.plan.graph.node(port.node)
        with naming_operator(self.plan.name, node):
            frame = self._operators.run_natively(node, port)
        if not layout.keys:
            return frame
        keys = self.axis.timed(keys_program(self.plan, self.fragment.name, layout))
        return self._operators.run_program(self.axis.in_order(frame), keys, port)
