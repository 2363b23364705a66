"""The two ends of a stream that one query of a STREAMING job hands on to another.

Authors do not write them: `graph/segments.py` puts them where it cuts a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dagster_unified.graph.nodes.base import Node
from dagster_unified.graph.nodes.sources_and_sinks import SourceNode


@dataclass(frozen=True, kw_only=True, eq=False)
class QueryOutputNode(Node):
    """Where a stream leaves a query. It is told the time, which it hands on with the records."""

    after_iteration: bool
    """Whether an iteration of its query comes before it."""

    waits_for_end: bool
    """Whether records may come at the end of the input whose event time has long been passed."""

    keeps_records = True
    has_timers = True


@dataclass(frozen=True, kw_only=True, eq=False)
class QueryInputNode(SourceNode):
    """Where it comes into another query. Its watermarks are those that were handed on."""

    is_timed: bool
    """Whether there are timestamp assigners before it."""

    idleness_ms: int | None = None
    max_out_of_orderness_ms: int | None = None
    generator: Any = None
    says_watermarks = True
