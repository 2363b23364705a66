"""A program as it ships: its steps; each is one operator and how it is opened where it runs.

What follows from the steps' places, whatever their functions, is compiled once, and outlives the micro-batches that
open the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import pyarrow as pa

from dagster_unified.operators.failures import RAISED, user_failure
from dagster_unified.operators.functions.base import Function, RuntimeContext
from dagster_unified.operators.functions.checkpoints import CheckpointListener, checkpointed, listeners
from dagster_unified.operators.functions.iterations import hears_of_epochs
from dagster_unified.operators.keys import KeyedInput
from dagster_unified.operators.layout import CARRIED, StreamLayout
from dagster_unified.operators.operator import KeyedOperator, KeyedOptions, OperatorContext
from dagster_unified.operators.program.blocks import Block, Consumer, Copies
from dagster_unified.operators.program.fusion import ChainCode, Clause
from dagster_unified.operators.program.inlined import Inlined
from dagster_unified.operators.state.backend import KeyedStateBackend
from dagster_unified.operators.watermarks import Generated, Kept
from dagster_unified.records import Copy, RecordType


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
    inlined: Inlined | None = None
    """What its function computes, on columns, where that is known."""

    reads_columns: ClassVar[bool] = False
    """Whether `times_of` may do without the records."""

    def clause(self, context: StepContext) -> Clause:
        """Open the step, as a clause of the function that it becomes part of."""
        assert self.operator is not None
        context.open(self.function)
        return self.operator(getattr(self.function, self.operator.method, self.function))

    @property
    def takes_columns(self) -> bool:
        """Whether it may do without the records, and leave them in columns."""
        return self.inlined is not None

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
    keys: tuple[Inlined | None, ...] = ()
    """What the functions of its computed keys compute, on columns, where that is known."""


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

    event_time_unit: int | None = None
    """In STREAMING, the milliseconds of the units in which assigners count records by their event time, if they do."""

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


@dataclass(frozen=True, eq=False)
class CompiledStep:
    """What its place in the program decides for a step."""

    index: int
    where: str
    """How an error names it."""

    before: str
    """How an error names the operator whose function emitted the records that reach it."""

    copy: Copy | None
    """Copies an input record; None where records are immutable, or are not to be copied."""

    copies: Copies
    """Copiers of the records that it emits, for the outputs that are read."""

    normal_in_chain: RecordType | None
    """The type to whose normal form its function's records are brought, where only the next step of a chain reads them.
    """


@dataclass(frozen=True, eq=False)
class StepChain:
    """Steps that take a stream's records together: one alone, or a chain of fused ones."""

    steps: tuple[CompiledStep, ...]
    normal: RecordType | None
    """The type to whose normal form the records are brought first, since it is the first reader."""

    copy: Copy | None
    """Copies the records first, which others read after it."""

    is_cut: bool = False
    """Whether it goes on with another one's records only because one of the two runs on columns."""

    code: dict[bool, ChainCode] = field(default_factory=dict)
    """The code of a chain of fused steps that has run, for records with timestamps and without."""


@dataclass(frozen=True, eq=False)
class Export:
    """How the records of an output become batches."""

    schema: pa.Schema
    where: str
    """How an error names the operator whose function made the records."""

    is_normal: bool
    """Whether the records are brought to their normal form first, as keys are computed from them."""


@dataclass(frozen=True, eq=False)
class CompiledProgram:
    """What the places of a program's steps decide: what is fused, copied, brought to its normal form, and exported.

    It holds nothing of an author's functions: copies of a program with the same `types` of records may share it.
    """

    types: tuple[RecordType | None, ...]

    exports: tuple[Export, ...]
    """Of the program's outputs, in their order."""

    chains: tuple[StepChain, ...]
    """Each behind the one whose records it takes."""

    head: str
    """How an error names the place of the input's records."""


def compile_program(program: Program, before: CompiledProgram | None = None) -> CompiledProgram:
    """Work out what the places of a program's steps decide; `before` is of another copy of the program.

    A copy may have classes of records of its own, as those that cannot be imported where they are used.
    """
    return before if before is not None and before.types == _types(program) else _Compiler(program).compiled()


def _types(program: Program) -> tuple[RecordType | None, ...]:
    steps = [records for step in program.steps for records in (step.input, step.output)]
    return program.input.records, *steps, *(output.layout.records for output in program.outputs)


class _Compiler:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.children: dict[int, list[int]] = {}
        for index, step in enumerate(program.steps):
            self.children.setdefault(step.parent, []).append(index)
        self.exported = [(output.step, output.tag) for output in program.outputs]

    def compiled(self) -> CompiledProgram:
        program = self.program
        return CompiledProgram(
            types=_types(program),
            exports=tuple(map(self._export, program.outputs)),
            chains=tuple(self._chains(-1)),
            head=program.where(program.steps[0]) if program.steps else program.pipeline,
        )

    def _export(self, output: Output) -> Export:
        is_normal = bool(output.layout.keys) and self._makes(output.step, output.tag)
        return Export(output.layout.schema, self._made_by(output.step, output.tag), is_normal)

    def _chains(self, parent: int) -> Iterator[StepChain]:
        for index in self.children.get(parent, ()):
            indices = self._chain_from(index)
            yield self._chain(indices)
            yield from self._chains(indices[-1])

    def _chain(self, indices: list[int]) -> StepChain:
        """Each of several readers of one output gets records of its own, so that it may change them.

        Exported batches come before them, and are encoded by then.
        """
        first = self.program.steps[indices[0]]
        readers = [i for i in self.children[first.parent] if self.program.steps[i].tag == first.tag]
        records = self.program.steps[readers[0]].input
        steps = tuple(self._step(index, index == indices[-1]) for index in indices)
        if records is None:
            return StepChain(steps, None, None)
        is_first, is_last = indices[0] == readers[0], indices[0] == readers[-1]
        normal = records if is_first and self._makes(first.parent, first.tag) else None
        is_cut = first.parent >= 0 and self._goes_on(first.parent) is not None
        return StepChain(steps, normal, None if is_last else self._copier(records), is_cut)

    def _step(self, index: int, ends_chain: bool) -> CompiledStep:
        step = self.program.steps[index]
        makes = not ends_chain and self._makes(index, None)
        return CompiledStep(
            index,
            self.program.where(step),
            self._made_by(step.parent, step.tag),
            None if step.input is None else self._copier(step.input),
            self._copies(index),
            step.output if makes else None,
        )

    def _chain_from(self, index: int) -> list[int]:
        """The longest chain of fusable steps from `index` where only the next step reads each output.

        A function that listens to epochs ends the chain: it also emits where no record came.
        """
        chain = [index]
        while True:
            following = self._goes_on(index)
            if following is None or self._on_columns.get(index) != self._on_columns.get(following):
                return chain
            chain.append(following)
            index = following

    def _goes_on(self, index: int) -> int | None:
        """Return the fusable step that alone reads the output of one, if there is one."""
        step, children = self.program.steps[index], self.children.get(index, [])
        if not isinstance(step, FusedStep) or hears_of_epochs(step.function):
            return None
        if len(children) != 1 or (index, None) in self.exported:
            return None
        child = self.program.steps[children[0]]
        return children[0] if isinstance(child, FusedStep) and child.tag is None else None

    @cached_property
    def _on_columns(self) -> dict[int, int]:
        """For each step that records reach in columns, and leave in columns, the chain of those it is in.

        A step that only reads event times off a column is in one of its own, unless no function is inlined behind it.
        """
        chain_of: dict[int, int] = {}
        for index, step in enumerate(self.program.steps):
            reached = step.parent < 0 or step.parent in chain_of
            if step.tag is not None or not reached or not isinstance(step, FusedStep) or not step.takes_columns:
                continue
            before = self.program.steps[step.parent] if step.parent >= 0 else None
            joins = step.inlined is not None and isinstance(before, FusedStep) and before.inlined is not None
            chain_of[index] = chain_of[step.parent] if joins else index
        leads = {step.parent for index, step in enumerate(self.program.steps) if index in chain_of}
        inlined = {i for i in chain_of if getattr(self.program.steps[i], "inlined", None) is not None}
        return {i: chain for i, chain in chain_of.items() if i in inlined or i in leads}

    def _makes(self, index: int, tag: str | None) -> bool:
        """Whether a step's function makes the records of an output, so that they may be in any form."""
        if index < 0:
            return False
        step = self.program.steps[index]
        return tag is not None or (step.output is not None and not getattr(step.function, "keeps_form", False))

    def _copier(self, records: RecordType) -> Copy | None:
        return None if self.program.options.object_reuse else records.copier

    def _copies(self, index: int) -> Copies:
        read = {output.tag: output.layout.records for output in self.program.outputs if output.step == index}
        for child in map(self.program.steps.__getitem__, self.children.get(index, ())):
            if child.input is not None:
                read[child.tag] = child.input
        if self.program.steps[index].output is None:  # it passes on the records of others
            read.pop(None, None)
        copies = {tag: self._copier(records) for tag, records in read.items()}
        return {tag: copy for tag, copy in copies.items() if copy is not None}

    def _made_by(self, index: int, tag: str | None) -> str:
        """How an error names the operator whose function emitted a step's records.

        Filters and assigners pass other operators' records on.
        """
        steps = self.program.steps
        while index >= 0 and steps[index].output is None and steps[index].tag is None:
            index = steps[index].parent
        name = "input" if index < 0 else steps[index].name
        return f"{self.program.pipeline}: stage '{self.program.stage}', operator '{name}'" + (
            f", side output '{tag}'" if tag else ""
        )
