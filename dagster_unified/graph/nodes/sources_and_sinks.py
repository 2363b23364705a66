"""Where records come from, and where they go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dagster_unified.graph.connectors import Sink, Source
from dagster_unified.graph.nodes.base import Node


@dataclass(frozen=True, kw_only=True, eq=False)
class SourceNode(Node):
    """Where records come from."""

    source: Source[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class SinkNode(Node):
    """Where records go."""

    sink: Sink[Any]
