"""What a worker needs to run a task's Python operators: plain data that ships.

Knows no driver and no engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dagster_unified.operators.functions.checkpoints import checkpointed, listeners
from dagster_unified.operators.keys import KeyedInput
from dagster_unified.operators.layout import CARRIED, StreamLayout
from dagster_unified.operators.operator import KeyedOptions
from dagster_unified.operators.program.step import Step


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
    """Whether what the operator emits for them is kept; so it is in one partition of all."""

    alone: bool = False
    """Whether there is nothing else in the partition: its other input is not read."""


@dataclass(frozen=True)
class CarryOver:
    """How a partition begins and ends.

    `watermark` is that with which the partition before ended; `end` is the encoded control event that ends this one.
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
        """The number of the output by which state leaves."""
        return next(number for number, output in enumerate(self.outputs) if output.tag == CARRIED)

    @property
    def counts_epochs(self) -> bool:
        """Whether a function hears of committed epochs, or saves operator state, which tells it the epoch."""
        functions = [step.function for step in self.steps]
        return any(any(listeners(one)) or checkpointed(one) is not None for one in functions)

    def where(self, step: Step) -> str:
        """How an error names the place."""
        return f"{self.pipeline}: stage '{self.stage}', operator '{step.name}'"
