"""The graph: nodes, the edges between them, and the parts of both that decide what a fingerprint is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self, TypeAlias

from dagster_unified.errors import ConfigurationError, PipelineError
from dagster_unified.graph.connectors import Dimensions, Slice
from dagster_unified.graph.fingerprint import digest, fingerprint_of
from dagster_unified.graph.nodes.base import ExchangeKind, Node, Partitioning
from dagster_unified.graph.nodes.functions import AssignTimestampsNode
from dagster_unified.graph.nodes.sources_and_sinks import (
    QueryInputNode,
    QueryOutputNode,
    ReadingNode,
    SinkNode,
    SourceNode,
)
from dagster_unified.operators.functions.base import OutputTag
from dagster_unified.records import UNITED, RecordType

TimedNode: TypeAlias = AssignTimestampsNode | QueryInputNode
"""The nodes that event times, and watermarks, come from."""


@dataclass(frozen=True)
class Port:
    """A stream: a node's output, or one of its side outputs."""

    node: int
    tag: str | None = None


@dataclass(frozen=True)
class Edge:
    """Records of `source` (or of its side output `tag`) going to `target`."""

    source: int
    target: int
    partitioning: Partitioning = field(default_factory=Partitioning)
    tag: OutputTag[Any] | None = None

    @cached_property
    def side_output(self) -> str | None:
        """The name of the side output that it takes; None for the main output."""
        return self.tag.name if self.tag is not None else None

    @cached_property
    def port(self) -> Port:
        """The stream that comes over it."""
        return Port(self.source, self.side_output)


@dataclass(frozen=True, eq=False)
class Graph:
    """A pipeline's nodes in the order they were written, and its edges."""

    name: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    @cached_property
    def sources(self) -> list[SourceNode]:
        """Its sources."""
        return [n for n in self.nodes if isinstance(n, SourceNode)]

    @cached_property
    def sinks(self) -> list[SinkNode]:
        """Its sinks."""
        return [n for n in self.nodes if isinstance(n, SinkNode)]

    @cached_property
    def ends(self) -> list[SinkNode | QueryOutputNode]:
        """Where streams leave it: its sinks, and what it hands on to other queries."""
        return [n for n in self.nodes if isinstance(n, SinkNode | QueryOutputNode)]

    @cached_property
    def timed(self) -> list[TimedNode]:
        """What the event times of its records come from."""
        return [
            n
            for n in self.nodes
            if isinstance(n, AssignTimestampsNode) or (isinstance(n, QueryInputNode) and n.is_timed)
        ]

    @cached_property
    def assigners(self) -> list[AssignTimestampsNode]:
        """Its timestamp assigners."""
        return [n for n in self.nodes if isinstance(n, AssignTimestampsNode)]

    @cached_property
    def readers(self) -> list[ReadingNode]:
        """The operators that read a source: its sources, and lookups."""
        return [n for n in self.nodes if isinstance(n, ReadingNode)]

    @cached_property
    def resource_keys(self) -> frozenset[str]:
        """The keys of the resources that its sources and sinks connect by."""
        return frozenset(key for node in self.nodes for key in node.resource_keys)

    def connected(self, resources: Mapping[str, object]) -> Self:
        """The graph whose sources and sinks connect by these resources; it has the same fingerprints.

        Raises `ConfigurationError` that names the source or the sink whose resource is missing.
        """
        if not self.resource_keys:
            return self
        try:
            return replace(self, nodes=tuple(node.connected(resources) for node in self.nodes))
        except ConfigurationError as error:
            raise ConfigurationError(f"{self.name}: {error}") from error

    def bounded_to(self, partition: Slice | Dimensions) -> Self:
        """The graph with every source bounded to a partition, or to one of which only the dimensions are known yet.

        Tables of lookups are read whole. Raises `PipelineError` that names the source which cannot be bounded, or the
        sink which would replace what other partitions have written.
        """
        try:
            for sink in self.sinks:
                sink.sink.check_partitioned()
            bounded = {n.id: replace(n, source=n.source.bounded_to(partition)) for n in self.sources}
        except PipelineError as error:
            raise PipelineError(f"{self.name}: {error}") from error
        return replace(self, nodes=tuple(bounded.get(n.id, n) for n in self.nodes))

    def node(self, node_id: int) -> Node:
        """Return the node with this id."""
        return self.nodes[node_id]

    def emitter(self, node_id: int, tag: str | None) -> tuple[int, str | None]:
        """Whose records a node emits: its own, or those of the node before it, which it makes ready to meet others."""
        records, inputs = self.node(node_id).records, self.inputs(node_id)
        if records is not None and hasattr(records.python, UNITED) and len(inputs) == 1:
            return inputs[0].source, inputs[0].side_output
        return node_id, tag

    def inputs(self, node_id: int) -> list[Edge]:
        """Return the edges that lead to a node."""
        return [e for e in self.edges if e.target == node_id]

    def main_inputs(self, node_id: int) -> list[Edge]:
        """Return the edges that lead to a node, without those of a broadcast stream."""
        broadcast = self.broadcast_inputs(node_id)
        return [e for e in self.inputs(node_id) if e not in broadcast]

    def broadcast_inputs(self, node_id: int) -> list[Edge]:
        """Return the edges of a node's broadcast stream, where it has one."""
        if not self.node(node_id).has_broadcast_input:
            return []
        return [e for e in self.inputs(node_id) if e.partitioning.kind is ExchangeKind.BROADCAST]

    def outputs(self, node_id: int) -> list[Edge]:
        """Return the edges that leave a node."""
        return [e for e in self.edges if e.source == node_id]

    def upstream(self, *nodes: int) -> set[int]:
        """Return some nodes and everything upstream of them."""
        seen, pending = set(nodes), list(nodes)
        while pending:
            for edge in self.inputs(pending.pop()):
                if edge.source not in seen:
                    seen.add(edge.source)
                    pending.append(edge.source)
        return seen

    def records_of(self, edge: Edge) -> RecordType | None:
        """Return the record type of what comes over an edge."""
        return self.port_type(edge.source, edge.side_output)

    def written_to(self, sink: int) -> RecordType:
        """Return the record type of what a sink is given."""
        edge = self.inputs(sink)[0]
        records = self.records_of(edge)
        assert records is not None
        return records

    def port_type(self, node_id: int, tag: str | None) -> RecordType | None:
        """Return the record type of a node's output or side output."""
        if tag is None:
            return self.node(node_id).records
        edge = next(e for e in self.outputs(node_id) if e.tag is not None and e.tag.name == tag)
        output_type: RecordType = edge.tag.output_type  # type: ignore[union-attr]
        return output_type


def own_parts(node: Node, with_input: bool = True) -> dict[str, str]:
    """Return what decides what a node does, part by part: its settings under '', the author's code by its place.

    Without `with_input` it leaves out what a source holds just now.
    """
    described: list[object] = [
        type(node).__name__,
        node.uid,
        node.records.describe() if node.records else "",
        node.timestamped,
        node.parallelism,
    ]
    parts = {"": digest(*described, *node.settings(with_input))}
    return {**parts, **fingerprint_of(*node.code()).parts}


def edge_parts(edge: Edge) -> dict[str, str]:
    """Return what decides where an edge's records go, as `own_parts` does for a node."""
    key = edge.partitioning.key
    tag = edge.tag.name if edge.tag else ""
    parts = {"": digest(edge.partitioning.kind, key.fields if key else "", tag)}
    functions = [
        key.computed.function if key is not None and key.computed is not None else None,
        edge.partitioning.partitioner,
    ]
    return {**parts, **fingerprint_of(*(f for f in functions if f is not None)).parts}
