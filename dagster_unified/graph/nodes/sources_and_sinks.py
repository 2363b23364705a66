"""Where records come from, where they go, and the two ends of a stream from one query of a STREAMING job to another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dagster_unified.errors import ConfigurationError, nearest
from dagster_unified.graph.connectors import Sink, Source
from dagster_unified.graph.nodes.base import Finding, Node


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadingNode(Node):
    """An operator that reads a source, as its input or apart from it."""

    source: Source[Any]

    @property
    def reads(self) -> str:
        """The name of what it reads, in assets and in the harness."""
        return self.source.name

    @property
    def resource_keys(self) -> frozenset[str]:
        return self.source.resource_keys

    def connected(self, resources: Mapping[str, object]) -> Node:
        if not self.resource_keys:
            return self
        _check_given(self.resource_keys, resources, f"source '{self.reads}' ({self.source.describe()}) reads")
        return replace(self, source=self.source.connected(resources))


@dataclass(frozen=True, kw_only=True, eq=False)
class SourceNode(ReadingNode):
    """Where records come from."""

    counts_records = False

    @property
    def reads(self) -> str:
        return self.name

    def settings(self, with_input: bool = True) -> list[object]:
        settings: list[object] = [self.source.describe()]
        return [*settings, self.source.settings(), self.source.snapshot()] if with_input else settings

    def describe(self) -> str:
        shared = ", all of it in every partition" if self.source.in_every_partition else ""
        return f"{self.source.describe()}, {self.source.boundedness.value}{shared}"

    def parity(self) -> list[Finding]:
        if not self.source.in_every_partition:
            return []
        return [
            self.note(
                "every-partition",
                "is read by each partition of a BATCH run, and once by STREAMING; what counts or sums up its records"
                " over partitions ends differently, what keeps the last one of a key does not",
            )
        ]

    def disorder(self, field: str | int) -> int | None:
        return self.source.disorder(self.source.records.names[field] if isinstance(field, int) else field)


@dataclass(frozen=True, kw_only=True, eq=False)
class SinkNode(Node):
    """Where records go."""

    sink: Sink[Any]
    keeps_records = True

    @property
    def counts_records(self) -> bool:
        return not self.sink.upserts  # of updates, an upserted table holds the last for each key

    def code(self) -> tuple[Any, ...]:
        function = getattr(self.sink, "function", None)
        return () if function is None else (function,)

    @property
    def resource_keys(self) -> frozenset[str]:
        return self.sink.resource_keys

    def connected(self, resources: Mapping[str, object]) -> Node:
        if not self.resource_keys:
            return self
        _check_given(self.resource_keys, resources, f"sink '{self.name}' ({self.sink.describe()}) writes")
        return replace(self, sink=self.sink.connected(resources))

    def settings(self, with_input: bool = True) -> list[object]:
        return [self.sink.describe()]

    def describe(self) -> str:
        return f"{self.sink.describe()}, {self.sink.capabilities.describe()}"


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


def _check_given(keys: frozenset[str], resources: Mapping[str, object], who: str) -> None:
    for key in sorted(keys - set(resources)):
        raise ConfigurationError(
            f"{who} by the resource '{key}', and there is none{nearest(key, resources)}; add it under Dagster with"
            f" Definitions(resources={{'{key}': ...}}), and elsewhere with Pipeline.execute(resources={{'{key}': ...}})"
        )
