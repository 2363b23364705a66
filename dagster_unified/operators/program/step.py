"""A step: one operator of a program, as it ships, and how it is opened where it runs.

A step names its operator and says what that is created with; one of whole blocks is a class of its own, next to its
node's other code. A program knows the three families below and no kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from dagster_unified.operators.failures import RAISED, user_failure
from dagster_unified.operators.functions.base import Function, RuntimeContext
from dagster_unified.operators.functions.checkpoints import CheckpointListener, listeners
from dagster_unified.operators.operator import KeyedOperator, OperatorContext
from dagster_unified.operators.program.blocks import Block, Consumer
from dagster_unified.operators.program.fusion import Clause
from dagster_unified.operators.state.backend import KeyedStateBackend
from dagster_unified.operators.watermarks import Generated, Kept
from dagster_unified.records import RecordType


@dataclass(frozen=True, kw_only=True)
class StepContext(OperatorContext):
    """Where a step stands in a running program, and what it is opened with."""

    before: str
    """How an error names the operator whose function emitted the records that reach the step."""

    watermark: Callable[[], int]
    """How far event time is."""

    runtime_context: Callable[[KeyedStateBackend | None], RuntimeContext]
    """Creates the context that a function is opened with."""

    closing: list[tuple[str, Any]]
    """What is closed with the program, the last first, and how an error names it."""

    flushing: list[Callable[[], None]]
    """What is called where a micro-batch or a partition ends, the first first: steps emit what they hold of it."""

    generated: list[tuple[str, Generated]] | None
    """Takes the watermark generators that run, by the uid of their assigner; None where no driver asks them."""

    remembered: Mapping[str, Kept]
    """What watermark generators kept in the micro-batch before, by the uid of their assigner."""

    subtask: int
    """The number of the parallel instance."""

    table: Callable[[], pa.Table]
    """The broadcast records of a head that takes them as a table."""

    send: Callable[[str | None, Block], None]
    """Takes what the step emits: on its main output (None), or on the side output of this tag."""

    def open(self, function: Any) -> None:
        """Opens an author's function, where it is one that is opened."""
        if isinstance(function, Function):
            self.closing.append((self.where, function))
            try:
                function.open(self.runtime_context(None))
            except RAISED as error:
                raise user_failure(error, self.where, function.open, "open()") from error


@dataclass(frozen=True)
class Step:
    """One operator of a program.

    `parent` is a step's index, or -1 for the program's input; `tag` a side output of it.
    """

    name: str
    function: Any
    uid: str = ""
    parent: int = -1
    tag: str | None = None
    input: RecordType | None = None
    output: RecordType | None = None
    """None where the records that reach the step go on as they are."""
    parallelism: int = 0
    remembers: tuple[str, ...] = ()
    """The attributes that a watermark generator of its own keeps from record to record."""

    def listeners(self) -> Iterable[CheckpointListener]:
        """What of its function hears of committed epochs."""
        return listeners(self.function)

    def emitted(self, collected: list[Any], timestamps: list[int | None], where: str) -> Block:
        """What a function's `IterationListener` emitted, as the step's output."""
        return Block(collected, None, timestamps, None)


@dataclass(frozen=True)
class FusedStep(Step):
    """An operator of single records without state: neighbours become one function."""

    operator: type[Clause] | None = None

    def clause(self, context: StepContext) -> Clause:
        """Opens the step, as a clause of the function that it becomes part of."""
        assert self.operator is not None
        context.open(self.function)
        return self.operator(getattr(self.function, self.operator.method, self.function))

    def times_of(self, batch: pa.RecordBatch) -> list[int] | None:
        """The event times of records in columns, where that is all that the step does and needs; else None."""
        return None


class BlockStep(Step):
    """An operator that takes whole blocks of records, and has no state."""

    def consumer(self, context: StepContext) -> Consumer:
        """Opens the step."""
        raise NotImplementedError


@dataclass(frozen=True)
class KeyedStep(Step):
    """An operator with state and timers, which a driver drives. It stands at the head of its program.

    `operator` is created with the function, with its context, and with `arguments`.
    """

    operator: type[KeyedOperator] = KeyedOperator
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def created(self, context: OperatorContext) -> KeyedOperator:
        """The operator, not yet open."""
        return self.operator(self.function, context, **self.arguments)

    def listeners(self) -> Iterable[CheckpointListener]:
        return () if self.operator.tells_listeners else super().listeners()
