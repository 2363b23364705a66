"""The logical graph as the author wrote it: frozen, typed nodes without behaviour, and the edges between them.

The authoring API builds these; planning reads them; engines interpret them through one dispatch table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

from dagster_unified.graph.connectors import Sink, Source
from dagster_unified.operators.functions.base import OutputTag
from dagster_unified.operators.layout import ComputedKey
from dagster_unified.operators.windows.assigners import WindowAssigner
from dagster_unified.records import RecordType

BOUNDS = ("window_start", "window_end")
"""The fields of a record in which a native window tells its bounds."""


@dataclass(frozen=True)
class Location:
    """A line of the author's program."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Chaining(Enum):
    """Flink's chaining strategy: whether an operator may be chained to the one before it, and the one after to it."""

    ALWAYS = "always"
    HEAD = "head"
    NEVER = "never"


class Naming(IntEnum):
    """Where an operator's name comes from.

    The higher, the more it says of what the operator makes: stages are named after it.
    """

    LIBRARY = 0
    """The library's word for the operator, such as `map`."""
    SOURCE = 1
    """What a source is called: it says what is read."""
    FUNCTION = 2
    """The name of the operator's function or class."""
    AUTHOR = 3
    """Given with `name(...)`, or the name of a sink."""


class ExchangeKind(Enum):
    """How records travel along an edge."""

    FORWARD = "FORWARD"
    HASH = "HASH"
    REBALANCE = "REBALANCE"
    RESCALE = "RESCALE"
    SHUFFLE = "SHUFFLE"
    BROADCAST = "BROADCAST"
    GLOBAL = "GLOBAL"
    CUSTOM = "CUSTOM"


@dataclass(frozen=True)
class Key:
    """What a stream is keyed by: fields of the record, or what a function gives."""

    fields: tuple[str, ...] = ()
    computed: ComputedKey | None = None

    def describe(self) -> str:
        """For plans and messages."""
        if self.computed is None:
            return ", ".join(self.fields)
        return getattr(self.computed.function, "__name__", type(self.computed.function).__name__)


@dataclass(frozen=True)
class Partitioning:
    """The exchange that an author asked for; FORWARD stands for "not said", unless `explicit`."""

    kind: ExchangeKind = ExchangeKind.FORWARD
    key: Key | None = None
    partitioner: Any = None
    explicit: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Node:
    """A transformation. `records` is its output type; `timestamped` says whether its records carry event times."""

    id: int
    name: str
    naming: Naming = Naming.LIBRARY
    uid: str = ""
    given_uid: bool = False
    location: Location | None = None
    records: RecordType | None = None
    timestamped: bool = False
    parallelism: int | None = None
    chaining: Chaining = Chaining.ALWAYS


@dataclass(frozen=True, kw_only=True, eq=False)
class SourceNode(Node):
    """Where records come from."""

    source: Source[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class AssignTimestampsNode(Node):
    """Gives records their event times: `assigner` is a function, an assigner object, or a field's name."""

    assigner: Any
    max_out_of_orderness_ms: int | None
    idleness_ms: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class FunctionNode(Node):
    """An operator that runs a Python function on records."""

    function: Any


class MapNode(FunctionNode):
    """One record in, one out."""


class FlatMapNode(FunctionNode):
    """One record in, any number out."""


class FilterNode(FunctionNode):
    """Keeps or drops a record."""


class MapBatchesNode(FunctionNode):
    """An Arrow batch in, an Arrow batch out."""


class ProcessNode(FunctionNode):
    """A `ProcessFunction` on a stream that is not keyed."""


class AsyncNode(FunctionNode):
    """Asynchronous calls; `function` is their `AsyncCalls`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyedNode(Node):
    """An operator on a keyed stream."""

    key: Key


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyedProcessNode(KeyedNode):
    """A `KeyedProcessFunction`."""

    function: Any


class BroadcastNode(KeyedProcessNode):
    """A function with broadcast state; `function` is its `Broadcasting`. With a key of no fields its stream is not
    keyed.

    What comes over BROADCAST exchanges is its broadcast stream.
    """


class WindowNode(KeyedProcessNode):
    """Windows; `function` is their `Windowing`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReduceNode(KeyedNode):
    """A rolling combination: a reduce function, or a built-in one as (kind, field)."""

    function: Any = None
    rolling: tuple[str, str | int | None] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class NativeKeyedNode(KeyedNode):
    """Column aggregates on a keyed stream, left to Catalyst."""

    columns: tuple[Any, ...]


class AggregateNode(NativeKeyedNode):
    """Column aggregates per key."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowAggregateNode(NativeKeyedNode):
    """Column aggregates per key and window."""

    assigner: WindowAssigner[Any, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class NativeNode(Node):
    """An operation on columns, left to Catalyst."""

    columns: tuple[Any, ...]


class SelectNode(NativeNode):
    """Projects to new columns."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WithColumnsNode(NativeNode):
    """Adds or replaces columns; `names` are theirs."""

    names: tuple[str, ...]


class WhereNode(NativeNode):
    """Keeps the rows for which a condition holds."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LookupNode(NativeNode):
    """Joins each record with the rows of a small table that have its key."""

    source: Source[Any]
    """The table."""

    on: tuple[tuple[str, str], ...]
    """The record's fields and the table's columns that have to be equal."""

    found: tuple[tuple[str, str], ...]
    """The fields that come from the table, and its columns."""

    inner: bool
    """Whether a record without a row is dropped."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SinkNode(Node):
    """Where records go."""

    sink: Sink[Any]


def functions_of(node: Node) -> list[Any]:
    """What a node was given of the author's code, and how it is to be called."""
    names = ("function", "assigner", "rolling", "names")
    holder = node.sink if isinstance(node, SinkNode) else node
    return [found for name in names if (found := getattr(holder, name, None)) is not None]


@dataclass(frozen=True)
class Edge:
    """Records of `source` (or of its side output `tag`) going to `target`."""

    source: int
    target: int
    partitioning: Partitioning = field(default_factory=Partitioning)
    tag: OutputTag[Any] | None = None


@dataclass(frozen=True, eq=False)
class Graph:
    """A pipeline's nodes in the order they were written, and its edges."""

    name: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    def node(self, node_id: int) -> Node:
        """The node with this id."""
        return self.nodes[node_id]

    def inputs(self, node_id: int) -> list[Edge]:
        """The edges that lead to a node."""
        return [e for e in self.edges if e.target == node_id]

    def main_inputs(self, node_id: int) -> list[Edge]:
        """The edges that lead to a node, without those of a broadcast stream."""
        broadcast = self.broadcast_inputs(node_id)
        return [e for e in self.inputs(node_id) if e not in broadcast]

    def broadcast_inputs(self, node_id: int) -> list[Edge]:
        """The edges of a node's broadcast stream, where it has one."""
        if not isinstance(self.node(node_id), BroadcastNode):
            return []
        return [e for e in self.inputs(node_id) if e.partitioning.kind is ExchangeKind.BROADCAST]

    def outputs(self, node_id: int) -> list[Edge]:
        """The edges that leave a node."""
        return [e for e in self.edges if e.source == node_id]

    def port_type(self, node_id: int, tag: str | None) -> RecordType | None:
        """The record type of a node's output or side output."""
        if tag is None:
            return self.node(node_id).records
        edge = next(e for e in self.outputs(node_id) if e.tag is not None and e.tag.name == tag)
        found: RecordType = edge.tag.output_type  # type: ignore[union-attr]
        return found
