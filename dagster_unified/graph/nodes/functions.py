"""Operators that run a Python function on the records of a stream, one by one or in batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dagster_unified.graph.nodes.base import Node


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
