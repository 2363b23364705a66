"""Operators that run a Python function on the records of a stream, one by one or in batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dagster_unified.graph.code import changed_by_objects_of, classes_used, reads_watermark
from dagster_unified.graph.nodes.base import Finding, Node
from dagster_unified.operators.arrow_functions import BroadcastBatchesStep, MapBatchesStep
from dagster_unified.operators.async_io import AsyncStep
from dagster_unified.operators.functions.event_time import (
    CallableTimestamp,
    FieldTimestamp,
    IngestionTimeAssigner,
    WatermarkGenerator,
)
from dagster_unified.operators.program.fusion import Clause
from dagster_unified.operators.program.step import FusedStep
from dagster_unified.operators.stateless import AssignTimestampsStep, Filter, FlatMap, Map, ProcessStep
from dagster_unified.operators.watermarks import Supplier


@dataclass(frozen=True, kw_only=True, eq=False)
class AssignTimestampsNode(Node):
    """Gives records their event times: `assigner` is a function, an assigner object, or a field's name."""

    assigner: Any
    max_out_of_orderness_ms: int | None
    idleness_ms: int | None = None
    generator: Supplier | None = None
    """Creates a watermark generator, which replaces a bound."""

    watermark_group: str | None = None
    """The group of sources whose parts wait for the slowest of it, in STREAMING."""

    max_drift_ms: int = 0
    """How far ahead of it they may be."""

    step = AssignTimestampsStep
    keeps_records = True
    counts_records = False
    product = "timestamps are"

    @property
    def user_function(self) -> Any:
        return self.assigner

    @property
    def runnable(self) -> Any:
        if isinstance(self.assigner, str):
            assert self.records is not None
            return FieldTimestamp(self.records.getter(self.assigner))
        return self.assigner if hasattr(self.assigner, "extract_timestamp") else CallableTimestamp(self.assigner)

    @property
    def needs_worker(self) -> bool:
        return not isinstance(self.assigner, str)

    @property
    def not_carried(self) -> str | None:
        if self.generator is None:
            return None
        return (
            f"cannot hand on the watermark of '{self.name}', because BATCH asks no watermark generator; use"
            " for_bounded_out_of_orderness, or run it in STREAMING"
        )

    @property
    def is_field(self) -> bool:
        """Whether event times are a field of the record, and a bound computes the watermarks, if anything does."""
        return isinstance(self.assigner, str) and self.generator is None

    @property
    def says_watermarks(self) -> bool:
        """Whether a generator says the watermarks, and no bound computes them."""
        return self.generator is not None

    def step_arguments(self) -> dict[str, Any]:
        column = self.assigner if isinstance(self.assigner, str) else None
        return {"generator": self.generator, "column": column, "remembers": self.remembers}

    @property
    def remembers(self) -> tuple[str, ...]:
        """The attributes that its watermark generator keeps from record to record, by its text."""
        classes = [cls for cls in classes_used(self.generator) if issubclass(cls, WatermarkGenerator)]
        changed = {name for cls in classes for name in changed_by_objects_of(cls) if name.startswith("self.")}
        return tuple(sorted(name.removeprefix("self.") for name in changed))

    def code(self) -> tuple[Any, ...]:
        return tuple(part for part in (self.assigner, self.generator) if part is not None)

    def describe(self) -> str:
        if self.generator is not None:
            made_by = getattr(self.generator, "__name__", type(self.generator).__name__)
            return f"event time, watermarks of {made_by}"
        bound = self.max_out_of_orderness_ms
        if bound is None:
            return "event time, no watermarks"
        group = f", aligned in '{self.watermark_group}' within {self.max_drift_ms} ms" if self.watermark_group else ""
        return f"event time, out of order by up to {bound} ms{group}"

    def parity(self) -> list[Finding]:
        findings = []
        if isinstance(self.assigner, IngestionTimeAssigner):
            what = "takes event times from the clock, so that windows and timers depend on when it runs"
            findings.append(self.warning("clock", f"{what}; take them from a field of the record"))
        if self.remembers:
            names = ", ".join(f"self.{name}" for name in self.remembers)
            what = f"has a watermark generator that keeps {names} for each parallel instance"
            findings.append(
                self.note("generator", f"{what}; what it emits depends on how records are spread over them")
            )
        return findings


@dataclass(frozen=True, kw_only=True, eq=False)
class FunctionNode(Node):
    """An operator that runs a Python function on records."""

    function: Any

    @property
    def user_function(self) -> Any:
        return self.function


class FusedNode(FunctionNode):
    """A function of single records, which its neighbours are fused with."""

    step = FusedStep
    clause: ClassVar[type[Clause]]
    """The code that it becomes."""

    def step_arguments(self) -> dict[str, Any]:
        return {"operator": self.clause}


class MapNode(FusedNode):
    """One record in, one out."""

    clause = Map
    keyed_form = "map"
    counts_records = False


class FlatMapNode(FusedNode):
    """One record in, any number out."""

    clause = FlatMap
    keyed_form = "flat_map"


class FilterNode(FusedNode):
    """Keeps or drops a record."""

    clause = Filter
    keyed_form = "filter"
    keeps_records = True


class MapBatchesNode(FunctionNode):
    """An Arrow batch in, an Arrow batch out."""

    step = MapBatchesStep


class BroadcastBatchesNode(MapBatchesNode):
    """`map_batches` in the body of an iteration, with an epoch's records of a broadcast stream at hand."""

    step = BroadcastBatchesStep
    has_broadcast_input = True


class ProcessNode(FunctionNode):
    """A `ProcessFunction` on a stream that is not keyed."""

    step = ProcessStep
    keyed_form = "process"
    has_side_outputs = True

    @property
    def is_told_watermark(self) -> bool:
        return reads_watermark(self.function)


class AsyncNode(FunctionNode):
    """Asynchronous calls; `function` is their `AsyncCalls`."""

    step = AsyncStep
