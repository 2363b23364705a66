"""An iteration, which is one operator of its graph, and the ends of its body, which is a graph of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from typing import Any, TypeVar

from dagster_unified.graph.nodes.base import Chaining, Finding, Node
from dagster_unified.graph.nodes.graph import Graph, edge_parts, own_parts
from dagster_unified.operators.layout import StreamLayout

T = TypeVar("T")


class LifeCycle(Enum):
    """How long an operator of a body lives (FLIP-176: `OperatorLifeCycle`)."""

    ALL_ROUND = "ALL_ROUND"
    """Over all rounds: its state lives on."""

    PER_ROUND = "PER_ROUND"
    """For one epoch: each has a new operator, whose input ends with the epoch."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EndNode(Node):
    """Where records come into a body, or leave it."""

    number: int
    """Its place: of an input among all, the variables first; of a stream that is returned among those of its role."""

    @property
    def layout(self) -> StreamLayout:
        """Its columns outside of the body."""
        assert self.records is not None
        return StreamLayout(self.records, self.timestamped)


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadNode(EndNode):
    """An input of a body: a variable, whose feedback comes back to it, or a data stream."""

    variable: bool
    replayed: bool = False
    """Whether its records come again in every epoch."""

    def describe(self) -> str:
        if self.variable:
            return "variable"
        return "data, replayed" if self.replayed else "data"


class Role(Enum):
    """The purpose of a stream that a body returns."""

    FEEDBACK = "feedback"
    OUTPUT = "output"
    CRITERIA = "termination criteria"


@dataclass(frozen=True, kw_only=True, eq=False)
class TailNode(EndNode):
    """A stream that a body returns."""

    role: Role
    keeps_records = True

    def describe(self) -> str:
        return self.role.value


def output_tag(number: int) -> str:
    """Return the side output that is an iteration's output of this number."""
    return f"output-{number}"


@dataclass(frozen=True, kw_only=True, eq=False)
class IterationNode(Node):
    """An iteration. Its outputs are side outputs, tagged with their numbers."""

    body: Graph
    author: Any
    """The author's `IterationBody`, which has built the body."""

    inputs: tuple[int, ...]
    """How many edges lead to each input, the variables first."""

    life_cycle: LifeCycle
    per_round: frozenset[int]
    """The operators of the body that live for one epoch."""

    is_unbounded: bool = False
    """Whether records come in while it goes round, as in an unbounded iteration; else the first epoch has them all."""

    staleness: int = 0
    """How many epochs a subtask may be ahead of the slowest."""

    chaining: Chaining = Chaining.NEVER
    has_side_outputs = True
    sees_all_partitions = True  # its epochs are those of one partition
    product = "outputs are"

    @property
    def heads(self) -> list[HeadNode]:
        """The inputs of the body, the variables first."""
        return [node for node in self.body.nodes if isinstance(node, HeadNode)]

    def by_input(self, edges: Iterable[T]) -> list[list[T]]:
        """Split what comes over the edges that lead to the iteration, in their order, by input."""
        remaining = iter(edges)
        return [list(islice(remaining, count)) for count in self.inputs]

    @property
    def tails(self) -> list[TailNode]:
        """The streams that the body returns."""
        return [node for node in self.body.nodes if isinstance(node, TailNode)]

    @property
    def outputs(self) -> list[TailNode]:
        """The streams that leave the iteration, in their order."""
        return sorted((tail for tail in self.tails if tail.role is Role.OUTPUT), key=lambda tail: tail.number)

    @property
    def has_criteria(self) -> bool:
        """Whether a stream decides when the iteration ends."""
        return any(tail.role is Role.CRITERIA for tail in self.tails)

    @property
    def carries_state(self) -> bool:
        # a bounded one has an end, with each partition
        return self.is_unbounded and any(node.runs_by_key and node.id not in self.per_round for node in self.body.nodes)

    @property
    def resource_keys(self) -> frozenset[str]:
        return self.body.resource_keys

    def connected(self, resources: Mapping[str, object]) -> Node:
        return replace(self, body=self.body.connected(resources))

    def code(self) -> tuple[Any, ...]:
        return (*self._functions(), *(code for node in self.body.nodes for code in node.code()))

    def settings(self, with_input: bool = True) -> list[object]:
        nodes = [own_parts(node, with_input) for node in self.body.nodes]
        edges = [(edge.source, edge.target, edge_parts(edge)) for edge in self.body.edges]
        life_cycle = [self.life_cycle.value, sorted(self.per_round), self.is_unbounded]
        return [self.inputs, *life_cycle, *([self.staleness] if self.staleness else []), nodes, edges]

    def describe(self) -> str:
        variables = sum(head.variable for head in self.heads)
        data = len(self.heads) - variables
        replayed = sum(head.replayed for head in self.heads)
        streams = f"{data} data stream{'' if data == 1 else 's'}" + (f" ({replayed} replayed)" if replayed else "")
        ends = "until its criteria are met" if self.has_criteria else "until nothing is fed back"
        ends = "unbounded" if self.is_unbounded else ends
        stale = f"staleness {self.staleness}, " if self.staleness else ""
        return f"{variables} variable{'' if variables == 1 else 's'}, {streams}, {self.life_cycle.value}, {stale}{ends}"

    def state(self) -> list[dict[str, str]]:
        return [{**state, "name": f"{n.name}.{state['name']}"} for n in self.body.nodes for state in n.state()]

    def parity(self) -> list[Finding]:
        """Return the findings of the body's operators, which run in both modes epoch by epoch."""
        findings = [replace(finding, node=self.id) for node in self.body.nodes for finding in node.parity()]
        if self.staleness:
            late = "has records that come late, and which do depends on the number of its subtasks"
            findings.append(
                self.note("staleness", f"{late}; make its result independent of that, or set its parallelism")
            )
        if not self.is_unbounded:
            return findings
        return [
            self.warning(
                "rounds",
                "takes records in each epoch, and in STREAMING it depends on when they come which of them share one;"
                " make its result independent of that, or use iterate_bounded_streams_until_termination",
            ),
            *findings,
        ]

    def _functions(self) -> Iterator[Any]:
        """Return the functions that say where the records of the body go."""
        for edge in self.body.edges:
            key = edge.partitioning.key
            if key is not None and key.computed is not None:
                yield key.computed.function
            if edge.partitioning.partitioner is not None:
                yield edge.partitioning.partitioner
