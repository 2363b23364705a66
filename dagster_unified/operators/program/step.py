"""A program as it ships: its steps; each is one operator and how it is opened where it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa

from dagster_unified.operators.failures import RAISED, user_failure
from dagster_unified.operators.functions.base import Function, RuntimeContext
from dagster_unified.operators.functions.checkpoints import CheckpointListener, checkpointed, listeners
from dagster_unified.operators.keys import KeyedInput
from dagster_unified.operators.layout import CARRIED, StreamLayout
from dagster_unified.operators.operator import KeyedOperator, KeyedOptions, OperatorContext
from dagster_unified.operators.program.blocks import Block, Consumer
from dagster_unified.operators.program.fusion import Clause
from dagster_unified.operators.state.backend import KeyedStateBackend
from dagster_unified.operators.watermarks import Generated, Kept
from dagster_unified.records import RecordType


@dataclass(frozen=True, kw_only=True)
class StepContext(OperatorContext):
    """A step's place in a running program, and what it is opened with."""

    before: str
    """How an error names the operator whose function emitted the records that reach the step."""

    watermark: Callable[[], int]
    """Returns the current event time."""

    runtime_context: Callable[[KeyedStateBackend | None], RuntimeContext]
    """Creates the context that a function is opened with."""

    closing: list[tuple[str, Any]]
    """Objects that are closed with the program, the last first, and how an error names each."""

    flushing: list[Callable[[], None]]
    """Called where a micro-batch or a partition ends, in order: steps emit what they hold back."""

    generated: list[tuple[str, Generated]] | None
    """Collects the running watermark generators, by their assigner's uid; None where no driver asks them."""

    remembered: Mapping[str, Kept]
    """The memories of watermark generators from the last micro-batch, by their assigner's uid."""

    subtask: int
    """The number of the parallel instance."""

    table: Callable[[], pa.Table]
    """The broadcast records of a head that takes them as a table."""

    send: Callable[[str | None, Block], None]
    """Sends the step's results: to its main output (None), or to the side output of this tag."""

    def open(self, function: Any) -> None:
        """Open an author's function, if it has `open`."""
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
    """The attributes that its watermark generator keeps from record to record."""

    def listeners(self) -> Iterable[CheckpointListener]:
        """The functions in its function that are notified of committed epochs."""
        return listeners(self.function)

    def emitted(self, collected: list[Any], timestamps: list[int | None], where: str) -> Block:
        """The results of a function's `IterationListener`, as the step's output."""
        return Block(collected, None, timestamps, None)


@dataclass(frozen=True)
class FusedStep(Step):
    """An operator of single records without state: neighbours become one function."""

    operator: type[Clause] | None = None

    def clause(self, context: StepContext) -> Clause:
        """Open the step, as a clause of the function that it becomes part of."""
        assert self.operator is not None
        context.open(self.function)
        return self.operator(getattr(self.function, self.operator.method, self.function))

    def times_of(self, batch: pa.RecordBatch) -> list[int] | None:
        """The event times of records in columns, if the step does and needs no more than that; else None."""
        return None


class BlockStep(Step):
    """An operator that takes whole blocks of records, and has no state."""

    def consumer(self, context: StepContext) -> Consumer:
        """Open the step."""
        raise NotImplementedError


@dataclass(frozen=True)
class KeyedStep(Step):
    """An operator with state and timers at the head of its program; a driver drives it.

    `operator` is created with the function, its context, and `arguments`.
    """

    operator: type[KeyedOperator] = KeyedOperator
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def created(self, context: OperatorContext) -> KeyedOperator:
        """The operator, not yet open."""
        return self.operator(self.function, context, **self.arguments)

    def listeners(self) -> Iterable[CheckpointListener]:
        return () if self.operator.tells_listeners else super().listeners()


@dataclass(frozen=True)
class Output:
    """A stream that leaves the program: a step's main output, or one of its side outputs."""

    step: int
    layout: StreamLayout
    tag: str | None = None


@dataclass(frozen=True)
class BroadcastInput:
    """The broadcast input of a program's head: the records of a small stream, all of them in every partition."""

    layout: StreamLayout
    data: tuple[bytes, ...] = ()
    """In BATCH, where they are there before the program starts: encoded batches."""

    leads: bool = True
    """Whether the operator's results for them are emitted; only one partition of all emits them."""

    alone: bool = False
    """Whether the partition has nothing else: its other input is not read."""


@dataclass(frozen=True)
class CarryOver:
    """How a partition starts and ends.

    `watermark` is the watermark at the end of the partition before; `end` is the encoded control event that ends this
    one.
    """

    watermark: int
    end: bytes


@dataclass(frozen=True)
class Program:
    """Everything that a worker needs to run a task's Python operators."""

    pipeline: str
    stage: str
    input: StreamLayout
    steps: tuple[Step, ...]
    outputs: tuple[Output, ...]
    keyed: KeyedInput | None = None
    options: KeyedOptions = field(default_factory=KeyedOptions)
    broadcast: BroadcastInput | None = None
    carry: tuple[CarryOver, ...] = ()
    """In BATCH with carried state, of each partition. The input then has the columns of `carried` as well."""

    export: CarryOver | None = None
    """In BATCH where the state goes to a savepoint and nowhere else: the input is sorted by key, as without."""

    last_event_times: tuple[int | None, ...] = ()
    """In BATCH over several partitions, the last event time of each, in their order.

    The input then has the column `PARTITION_INDEX` as well.
    """

    in_subtasks: bool = False
    """Whether an exchange chose the subtask of its records. In BATCH the input then has the column `SUBTASK` as well.
    """

    @property
    def carried(self) -> int:
        """The number of the output with the exported state."""
        return next(number for number, output in enumerate(self.outputs) if output.tag == CARRIED)

    @cached_property
    def counts_epochs(self) -> bool:
        """Whether a function is notified of committed epochs, or saves operator state, and so needs the epoch."""
        functions = [step.function for step in self.steps]
        return any(any(listeners(function)) or checkpointed(function) is not None for function in functions)

    def where(self, step: Step) -> str:
        """How an error names the place."""
        return f"{self.pipeline}: stage '{self.stage}', operator '{step.name}'"
