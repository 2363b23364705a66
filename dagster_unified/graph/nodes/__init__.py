"""The logical graph as the author wrote it: frozen, typed nodes, a file for each family, and the edges between them.

The authoring API builds these; planning reads them; engines ask them what they are.
"""

from dagster_unified.graph.nodes.base import Chaining, ExchangeKind, Key, Lineage, Location, Naming, Node, Partitioning
from dagster_unified.graph.nodes.functions import (
    AssignTimestampsNode,
    AsyncNode,
    BroadcastBatchesNode,
    FilterNode,
    FlatMapNode,
    FunctionNode,
    MapBatchesNode,
    MapNode,
    ProcessNode,
)
from dagster_unified.graph.nodes.graph import Edge, Graph, TimedNode
from dagster_unified.graph.nodes.iteration import HeadNode, IterationNode, LifeCycle, Role, TailNode, output_tag
from dagster_unified.graph.nodes.keyed import (
    BroadcastNode,
    BroadcastTableNode,
    CheckpointedBatchesNode,
    CheckpointedNode,
    DeltaNode,
    KeyedBatchesNode,
    KeyedNode,
    KeyedProcessNode,
    ReduceNode,
    WindowNode,
)
from dagster_unified.graph.nodes.lookup import LookupNode
from dagster_unified.graph.nodes.native import (
    BOUNDS,
    AggregateNode,
    NativeKeyedNode,
    NativeNode,
    SelectNode,
    WhereNode,
    WindowAggregateNode,
    WithColumnsNode,
)
from dagster_unified.graph.nodes.query_ends import QueryInputNode, QueryOutputNode
from dagster_unified.graph.nodes.sources_and_sinks import ReadingNode, SinkNode, SourceNode

__all__ = [
    "BOUNDS",
    "AggregateNode",
    "AssignTimestampsNode",
    "AsyncNode",
    "BroadcastBatchesNode",
    "BroadcastNode",
    "BroadcastTableNode",
    "Chaining",
    "CheckpointedBatchesNode",
    "CheckpointedNode",
    "DeltaNode",
    "Edge",
    "ExchangeKind",
    "FilterNode",
    "FlatMapNode",
    "FunctionNode",
    "Graph",
    "HeadNode",
    "IterationNode",
    "Key",
    "KeyedBatchesNode",
    "KeyedNode",
    "KeyedProcessNode",
    "LifeCycle",
    "Lineage",
    "Location",
    "LookupNode",
    "MapBatchesNode",
    "MapNode",
    "Naming",
    "NativeKeyedNode",
    "NativeNode",
    "Node",
    "Partitioning",
    "ProcessNode",
    "QueryInputNode",
    "QueryOutputNode",
    "ReadingNode",
    "ReduceNode",
    "Role",
    "SelectNode",
    "SinkNode",
    "SourceNode",
    "TailNode",
    "TimedNode",
    "WhereNode",
    "WindowAggregateNode",
    "WindowNode",
    "WithColumnsNode",
    "output_tag",
]
