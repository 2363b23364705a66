"""Operators that hold state of a key and run in Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from dagster_unified.graph.code import declared_lists, declared_states, names_used, reads_watermark
from dagster_unified.graph.nodes.base import Chaining, Finding, Key, Lineage, Node
from dagster_unified.operators.arrow_functions import (
    BroadcastTableOperator,
    CheckpointedBatchOperator,
    KeyedBatchOperator,
)
from dagster_unified.operators.broadcast import BroadcastOperator
from dagster_unified.operators.deltas import SOLUTION, BatchDeltaOperator, DeltaOperator, Solutions
from dagster_unified.operators.functions.iterations import BatchDeltaFunction
from dagster_unified.operators.keyed import KeyedProcessOperator, ReduceOperator
from dagster_unified.operators.operator import KeyedOperator
from dagster_unified.operators.operator_state import CheckpointedOperator
from dagster_unified.operators.program.step import KeyedStep
from dagster_unified.operators.windows import Firing
from dagster_unified.operators.windows.contents import CONTENTS
from dagster_unified.operators.windows.operator import WindowOperator


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyedNode(Node):
    """An operator on a keyed stream."""

    key: Key = field()

    operator: ClassVar[type[KeyedOperator]]
    """The operator that its step creates."""

    def operator_arguments(self) -> dict[str, Any]:
        """What its operator is created with, beyond what all are."""
        return {}

    def step_arguments(self) -> dict[str, Any]:
        return {"operator": self.operator, "arguments": self.operator_arguments()}


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyedProcessNode(KeyedNode):
    """A `KeyedProcessFunction`."""

    function: Any

    step = KeyedStep
    operator: ClassVar[type[KeyedOperator]] = KeyedProcessOperator
    has_side_outputs = True
    has_timers = True

    @property
    def user_function(self) -> Any:
        return self.function

    @property
    def depends_on_order(self) -> bool:
        return not getattr(self.function, "requires_time_sorted_input", False)

    @property
    def drops_late_records(self) -> object | None:
        return _dropping(self.function)

    def state(self) -> list[dict[str, str]]:
        return declared_states(self.function)


class KeyedBatchesNode(KeyedProcessNode):
    """A `KeyedBatchFunction`."""

    operator = KeyedBatchOperator


class BroadcastNode(KeyedProcessNode):
    """A function with broadcast state; `function` is its `Broadcasting`.

    With a key of no fields its stream is not keyed. What comes over BROADCAST exchanges is its broadcast stream.
    """

    operator = BroadcastOperator
    has_broadcast_input = True

    sees_all_partitions = True  # its broadcast records travel with the program

    def state(self) -> list[dict[str, str]]:
        broadcast = {d.name for d in self.function.descriptors}
        keyed = [state for state in super().state() if state["name"] not in broadcast]
        return [{"name": d.name, "kind": "broadcast"} for d in self.function.descriptors] + keyed

    def parity(self) -> list[Finding]:
        findings = [
            self.warning(
                "broadcast",
                "sees every broadcast record before its other records in BATCH, and in STREAMING only those that came"
                " before; make its result independent of that, or join with an interval",
            )
        ]
        if "apply_to_keyed_state" in names_used(self.function):
            findings.append(
                self.warning(
                    "broadcast",
                    "uses apply_to_keyed_state, which in BATCH is called for no key: there is none yet when broadcast"
                    " records come",
                )
            )
        return findings


class BroadcastTableNode(BroadcastNode):
    """`map_batches` with the records of a broadcast stream at hand, which is not in the body of an iteration."""

    operator = BroadcastTableOperator
    has_side_outputs = False
    has_timers = False

    depends_on_order = False


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckpointedNode(KeyedProcessNode):
    """A function with operator state, on a stream that is not keyed."""

    chaining: Chaining = Chaining.HEAD  # a driver runs it, so that it stands at the head of its task

    operator = CheckpointedOperator
    holds_subtask_state = True
    has_timers = False

    depends_on_order = False  # what it depends on more is which records its subtask gets

    @property
    def is_told_watermark(self) -> bool:
        return reads_watermark(self.function)

    def state(self) -> list[dict[str, str]]:
        return declared_lists(self.function)

    def parity(self) -> list[Finding]:
        return [
            self.warning(
                "operator-state",
                "has operator state, and which records a subtask gets, and when it is restored, differs by mode; make"
                " its result independent of that, or use keyed state",
            )
        ]


class CheckpointedBatchesNode(CheckpointedNode):
    """`map_batches` with operator state."""

    operator = CheckpointedBatchOperator


class WindowNode(KeyedProcessNode):
    """Windows; `function` is their `Windowing`."""

    operator = WindowOperator

    depends_on_order = False  # each kind of window says itself what it depends on

    def describe(self) -> str:
        return str(self.function.describe())

    def state(self) -> list[dict[str, str]]:
        return [{"name": CONTENTS, "kind": "map"}]

    def parity(self) -> list[Finding]:
        spec, findings = self.function, []
        firing, assigner = spec.trigger.firing, spec.assigner
        if firing is Firing.UNDECLARED:
            name = type(spec.trigger).__name__
            findings.append(
                self.note(
                    "windows",
                    f"has the trigger {name}, which does not say whether it fires alike in BATCH and STREAMING; set"
                    f" {name}.firing",
                )
            )
        if firing is Firing.ELEMENTS or assigner.is_by_order:
            findings.append(
                self.warning(
                    "windows",
                    "closes its windows by the elements that have come, which come in event-time order in BATCH and as"
                    " they arrive in STREAMING; use windows by event time",
                )
            )
        if firing is Firing.CLOCK or assigner.is_processing_time:
            findings.append(
                self.warning(
                    "windows",
                    "goes by processing time, so that its windows depend on when it runs; use windows by event time",
                )
            )
        if firing is Firing.CLOCK and assigner.is_event_time:
            findings.append(
                self.warning(
                    "windows",
                    "gives the results that the clock fires and none at a window's end, and so none at all in BATCH;"
                    " use a trigger by event time, such as ContinuousEventTimeTrigger",
                )
            )
        if firing is Firing.EARLY:
            findings.append(
                self.warning(
                    "windows",
                    "gives early results in STREAMING and each window's last one in BATCH; use a sink that upserts by"
                    " key and window",
                )
            )
        if spec.evictor is not None or (spec.reduce is None and spec.aggregate is None):
            findings.append(
                self.note(
                    "windows",
                    "is given a window's elements in event-time order in BATCH and as they arrived in STREAMING; sort"
                    " them if its result depends on order",
                )
            )
        return findings


@dataclass(frozen=True, kw_only=True, eq=False)
class ReduceNode(KeyedNode):
    """A rolling combination: a reduce function, or a built-in one as (kind, field)."""

    function: Any = None
    rolling: tuple[str, str | int | None] | None = None

    step = KeyedStep
    operator: ClassVar[type[KeyedOperator]] = ReduceOperator
    emits_updates = True

    @property
    def user_function(self) -> Any:
        return self.function

    def operator_arguments(self) -> dict[str, Any]:
        return {} if self.rolling is None else {"builtin": self.rolling}

    def describe(self) -> str:
        if self.rolling is None:
            return ""
        kind, field = self.rolling
        return f"{kind}({'' if field is None else field})"

    def state(self) -> list[dict[str, str]]:
        return [{"name": "value", "kind": "value"}]

    def lineage(self, before: Lineage) -> Lineage | None:
        return None if self.rolling is None else before

    def parity(self) -> list[Finding]:
        if self.rolling is None or self.records is None:
            return []
        kind, field = self.rolling
        if kind not in ("sum", "min", "max") or field is None:
            return []
        name = self.records.names[field] if isinstance(field, int) else field
        others = [n for n in self.records.names if n != name and n not in self.key.fields]
        if not others:
            return []
        instead = "reduce" if kind == "sum" else f"{kind}_by or reduce"
        return [
            self.warning(
                "other-fields",
                f"keeps {', '.join(others)} of whichever record comes first, which is the earliest in BATCH and the"
                f" first to arrive in STREAMING; use {instead}",
            )
        ]


@dataclass(frozen=True, kw_only=True, eq=False)
class DeltaNode(KeyedNode):
    """The join of workset and solution set in a delta iteration, with a `DeltaFunction`."""

    function: Any
    types: Solutions

    step = KeyedStep
    has_side_outputs = True

    @property
    def user_function(self) -> Any:
        return self.function

    @property
    def operator(self) -> type[KeyedOperator]:  # type: ignore[override]
        return BatchDeltaOperator if isinstance(self.function, BatchDeltaFunction) else DeltaOperator

    def operator_arguments(self) -> dict[str, Any]:
        return {"types": self.types}

    def code(self) -> tuple[Any, ...]:
        computed = self.types.computed
        return (self.function,) if computed is None else (self.function, computed.function)

    def settings(self, with_input: bool = True) -> list[object]:
        return [self.types.fields, str(self.types.solution.schema), str(self.types.work.schema)]

    def describe(self) -> str:
        return "workset joined with the solution set"

    def state(self) -> list[dict[str, str]]:
        return [{"name": SOLUTION, "kind": "value"}]


def _dropping(function: object) -> object | None:
    """Return the function that drops late records: itself, or one that it wraps."""
    if getattr(function, "drops_late_records", False):
        return function
    return next((f for f in map(_dropping, getattr(function, "wrapped_functions", ())) if f is not None), None)
