"""A running program: the connected Python operators of one task, as one pass over Arrow batches.

Its head takes the stream's batches (or, for a keyed operator, runs of one key's records). Records are pushed from
operator to operator in whole lists, stateless neighbours are fused into one function, and outputs leave as Arrow
batches. Knows no kind of step, no driver and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import pyarrow as pa

from dagster_unified.errors import RecordTypeError, UserFunctionError
from dagster_unified.operators.broadcast import BroadcastOperator
from dagster_unified.operators.failures import RAISED, computed_from, placed, user_failure
from dagster_unified.operators.functions.base import FIRST, RuntimeContext, Subtask
from dagster_unified.operators.functions.iterations import IterationListener, hears_of_epochs, iteration_listeners
from dagster_unified.operators.layout import TIMESTAMP, StreamLayout, declared
from dagster_unified.operators.metrics import Metrics, Registry
from dagster_unified.operators.operator import KeyedOperator
from dagster_unified.operators.program.blocks import (
    Block,
    Closing,
    Collector,
    Consumer,
    Copies,
    Emitting,
    close_each,
    encoded,
    tell,
)
from dagster_unified.operators.program.fusion import Clause, FusedChain, fuse
from dagster_unified.operators.program.step import BlockStep, FusedStep, KeyedStep, Output, Program, StepContext
from dagster_unified.operators.state.backend import KeyedStateBackend
from dagster_unified.operators.time import MIN_TIMESTAMP
from dagster_unified.operators.watermarks import Generated, Kept, Mark, slowest
from dagster_unified.records import Copy, RecordType

FLUSH = 8192
"""Records that a keyed operator collects before they go down the chain."""


def _beginning(uid: str) -> int:
    return MIN_TIMESTAMP


class RunningProgram:
    """A program opened for one partition. `emit` is called with (output number, batch) for each output batch.

    With `generating` watermark generators run, and their driver calls `end_of_batch`; `remembered` is what they kept.
    `watermark` returns the event time of an operator without a key, by its uid.
    """

    def __init__(
        self,
        program: Program,
        emit: Callable[[int, pa.RecordBatch], None],
        clock: Callable[[], int],
        subtask: Subtask = FIRST,
        generating: bool = False,
        remembered: Mapping[str, Kept] | None = None,
        watermark: Callable[[str], int] = _beginning,
    ) -> None:
        self.program = program
        self._watermark = watermark
        self.registry = Registry()
        self.metrics = self.registry.metrics
        self._emit, self._clock, self._subtask = emit, clock, subtask
        self._first = program.where(program.steps[0]) if program.steps else program.pipeline
        self._closing: list[tuple[str, Any]] = []
        self._flushing: list[Callable[[], None]] = []
        self._table: pa.Table | None = None
        self._listening: list[tuple[int, IterationListener[Any]]] = []
        self._generated: list[tuple[str, Generated]] | None = [] if generating else None
        self._remembered = remembered or {}
        self._consumers: dict[tuple[int, str | None], list[Consumer]] = {}
        self.keyed: KeyedOperator | None = None
        for number, output in enumerate(program.outputs):
            self._consumers.setdefault((output.step, output.tag), []).append(self._leave(number, output))
        try:
            self._build(-1)
            self._keep_apart()
        except BaseException as error:
            self.close(error)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def push(self, batch: pa.RecordBatch) -> None:
        """Run one batch of the input stream through the program."""
        self._send(-1, None, self._block(batch, self.program.input))

    def broadcast(self, batch: pa.RecordBatch, leads: bool) -> None:
        """Pass a batch of broadcast records to the head."""
        assert isinstance(self.keyed, BroadcastOperator)
        assert self.program.broadcast is not None
        layout = self.program.broadcast.layout
        with placed(self._first):
            records = self.keyed.read_broadcast(batch, layout)
        timestamps = batch.column(TIMESTAMP).to_pylist() if layout.timestamped else [None] * len(records)
        self.keyed.process_broadcast(records, timestamps, leads)

    def give(self, broadcast: pa.Table) -> None:
        """Pass all broadcast records to a head that takes them as a table."""
        self._table = broadcast

    def enter(self, subtask: int) -> None:
        """Note the group of the next records; where it is a subtask, functions opened from now on see it."""
        self._subtask = self._subtask._replace(number=subtask)

    def run_of(self, key: Hashable, records: Sequence[Any], timestamps: Sequence[int | None]) -> None:
        """Pass a run of one key's records to a keyed head."""
        assert self.keyed is not None
        if self.keyed.time_sorted:
            self.keyed.process_in_time_order(key, records, timestamps)
        else:
            self.keyed.select(key)
            self.keyed.process(records, timestamps)

    def drain(self, at_least: int = 1) -> None:
        """Send the keyed head's records down the chain, once there are `at_least` this many."""
        assert self.keyed is not None
        if at_least == 1:
            self.keyed.check_state()
        out = self.keyed.out
        count = len(out.records) + out.rows
        if out.side:
            count += sum(len(records) for records, _ in out.side.values())
        if count >= at_least:
            self.keyed.out = self.keyed.collector()
            for tag, block in out.blocks():
                self._send(0, tag, block)

    def flush(self) -> None:
        """Emit what steps hold of a micro-batch or a partition that ends now."""
        for flush in self._flushing:
            flush()

    def end_of_epoch(self, epoch: int) -> None:
        """End an epoch of an iteration: functions that listen emit what they have for it."""

        def ended(listener: IterationListener[Any], emitted: Emitting) -> None:
            tell(listener.on_epoch_watermark_incremented, epoch, emitted=emitted)

        self._tell(ended, f"the end of epoch {epoch}")

    def end_of_iteration(self) -> None:
        """End the iteration that the program is part of."""
        self._tell(
            lambda listener, emitted: tell(listener.on_iteration_terminated, emitted=emitted),
            "the end of the iteration",
        )

    def _tell(self, call: Callable[[IterationListener[Any], Emitting], None], what: str) -> None:
        """Call the functions that listen, in the order of the chain; a driver calls a keyed head."""
        self.flush()
        for index, listener in self._listening:
            step, emitted = self.program.steps[index], Emitting(Collector(self._copies(index)))
            where = self.program.where(step)
            try:
                call(listener, emitted)
            except RAISED as error:
                called = listener.on_epoch_watermark_incremented
                raise user_failure(error, where, called, what) from error
            out = emitted.out
            self._send(index, None, step.emitted(out.records, out.timestamps, where))
            for tag, (records, timestamps) in out.side.items():
                self._send(index, tag, Block(records, None, timestamps, None))
            self.flush()

    def notify(self, epoch: int) -> None:
        """Tell the functions that an epoch is committed."""
        if self.keyed is not None:
            self.keyed.committed = epoch
        for step in self.program.steps:
            for listener in step.listeners():
                try:
                    listener.notify_checkpoint_complete(epoch)
                except RAISED as error:
                    notified = listener.notify_checkpoint_complete
                    raise user_failure(error, self.program.where(step), notified, f"epoch {epoch}") from error

    def end_of_batch(self) -> dict[str, Mark]:
        """The watermarks that generators emitted in the micro-batch that ends now, by their assigner's uid."""
        marks: dict[str, list[Mark]] = {}
        for uid, generated in self._generated or ():
            mark = generated.end_of_batch()
            if mark is not None:
                marks.setdefault(uid, []).append(mark)
        return {uid: slowest(reported) for uid, reported in marks.items()}

    def read_gauges(self) -> None:
        """Read the gauges' values; to be called while the functions are open."""
        for name, gauge in self.registry.gauges.items():
            try:
                self.registry.read(name)
            except RAISED as error:
                where = f"{self.program.pipeline}: stage '{self.program.stage}', gauge '{name}'"
                raise user_failure(error, where, gauge, "its report") from error

    def report(self) -> Metrics:
        """The metrics since the last report."""
        self.read_gauges()
        return self.metrics.take()

    def close(self, failure: BaseException | None = None) -> None:
        """Close every opened function, also after a failure, which is then the error that is raised."""
        closing, self._closing = self._closing, []
        close_each([Closing(where, closable) for where, closable in reversed(closing)], failure)

    def _block(self, batch: pa.RecordBatch, layout: StreamLayout) -> Block:
        timestamps = batch.column(TIMESTAMP).to_pylist() if layout.timestamped else None
        return Block(None, batch.select(list(layout.records.names)), timestamps, layout.records, self._first)

    def _send(self, step: int, tag: str | None, block: Block) -> None:
        if block.size:
            for consumer in self._consumers.get((step, tag), ()):
                consumer(block)

    def _children(self, parent: int) -> list[int]:
        return [i for i, s in enumerate(self.program.steps) if s.parent == parent]

    def _build(self, parent: int) -> None:
        for index in self._children(parent):
            step = self.program.steps[index]
            last = index
            if isinstance(step, KeyedStep):
                self._open_keyed(step, self._step_context(index))
            elif isinstance(step, BlockStep):
                self._consumers.setdefault((parent, step.tag), []).append(step.consumer(self._step_context(index)))
                self._listen(index)
            elif isinstance(step, FusedStep):
                chain = self._fusable_from(index, step)
                self._consumers.setdefault((parent, step.tag), []).append(self._fused(chain))
                last = next(reversed(chain))
                self._listen(last)
            self._build(last)

    def _keep_apart(self) -> None:
        """Give each of several operators that read one output its own records, so that it may change them.

        Exported batches come before them, and are encoded by then.
        """
        for (parent, tag), consumers in self._consumers.items():
            records = next((self.program.steps[i].input for i in self._children(parent) if self._reads(i, tag)), None)
            if records is None:
                continue
            exported = sum((output.step, output.tag) == (parent, tag) for output in self.program.outputs)
            if self._makes(parent, tag):
                consumers[exported] = partial(_normal, consumers[exported], records, self._made_by(parent, tag))
            copy = self._copier(records)
            if copy is None:
                continue
            for number in range(exported, len(consumers) - 1):
                consumers[number] = partial(_copied, consumers[number], copy)

    def _makes(self, index: int, tag: str | None) -> bool:
        """Whether a step's function makes the records of an output, so that they may be in any form."""
        if index < 0:
            return False
        step = self.program.steps[index]
        return tag is not None or (step.output is not None and not getattr(step.function, "keeps_form", False))

    def _reads(self, index: int, tag: str | None) -> bool:
        return self.program.steps[index].tag == tag

    def _copier(self, records: RecordType) -> Copy | None:
        return None if self.program.options.object_reuse else records.copier

    def _copies(self, index: int) -> Copies:
        """Copiers for the records that a step emits, for the outputs that are read."""
        read = {output.tag: output.layout.records for output in self.program.outputs if output.step == index}
        for child in map(self.program.steps.__getitem__, self._children(index)):
            if child.input is not None:
                read[child.tag] = child.input
        step = self.program.steps[index]
        if step.output is None:  # it passes on the records of others
            read.pop(None, None)
        copies = {tag: self._copier(records) for tag, records in read.items()}
        return {tag: copy for tag, copy in copies.items() if copy is not None}

    def _listen(self, index: int) -> None:
        self._listening += [(index, listener) for listener in iteration_listeners(self.program.steps[index].function)]

    def _step_context(self, index: int) -> StepContext:
        step = self.program.steps[index]

        def runtime_context(state: KeyedStateBackend | None) -> RuntimeContext:
            return RuntimeContext(step.name, self._subtask, step.parallelism, self.registry, state)

        return StepContext(
            where=self.program.where(step),
            before=self._made_by(step.parent, step.tag),
            options=self.program.options,
            clock=self._clock,
            watermark=partial(self._watermark, step.uid),
            metrics=self.metrics,
            input=step.input,
            output=step.output,
            runtime_context=runtime_context,
            closing=self._closing,
            flushing=self._flushing,
            copy=None if step.input is None else self._copier(step.input),
            copies=self._copies(index),
            generated=self._generated,
            remembered=self._remembered,
            subtask=self._subtask.number,
            broadcast=None if self.program.broadcast is None else self.program.broadcast.layout,
            table=lambda: self._table,
            send=partial(self._send, index),
        )

    def _open_keyed(self, step: KeyedStep, context: StepContext) -> None:
        self.keyed = step.created(context)
        self._closing.append((context.where, self.keyed))
        try:
            self.keyed.open(context.runtime_context)
        except RAISED as error:
            raise user_failure(error, context.where, getattr(step.function, "open", None), "open()") from error

    def _fusable_from(self, index: int, step: FusedStep) -> dict[int, FusedStep]:
        """The longest chain of fusable steps from `index` where only the next step reads each output.

        A function that listens to epochs ends the chain: it also emits where no record came.
        """
        chain = {index: step}
        while True:
            children = self._children(index)
            listens = hears_of_epochs(self.program.steps[index].function)
            if len(children) != 1 or listens or (index, None) in self._consumers:
                return chain
            (index,) = children
            child = self.program.steps[index]
            if not isinstance(child, FusedStep) or child.tag is not None:
                return chain
            chain[index] = child

    def _fused(self, chain: dict[int, FusedStep]) -> Consumer:
        steps = list(chain.values())
        clauses = [self._clause(index, step, index == next(reversed(chain))) for index, step in chain.items()]
        alone = steps[0] if len(steps) == 1 else None
        compiled: dict[bool, FusedChain] = {}
        last = next(reversed(chain))
        output = next((step.output for step in reversed(steps) if step.output is not None), None)

        def saw(clause: int, timestamps: list[int]) -> None:
            if timestamps:
                self.metrics.saw_event_time(steps[clause].uid, max(timestamps))

        def consume(block: Block) -> None:
            times = alone.times_of(block.columns) if alone is not None and block.columns is not None else None
            if times is not None:
                saw(0, times)
                self._send(last, None, block.at(times))
                return
            timestamped = block.timestamps is not None
            function = compiled.get(timestamped)
            if function is None:
                function = compiled[timestamped] = fuse(clauses, timestamped, saw)
            try:
                records, timestamps = function.run(block.records(), block.timestamps)
            except UserFunctionError:
                raise
            except RAISED as error:
                maker = function.made_by(error.__traceback__) if isinstance(error, RecordTypeError) else None
                if maker is not None and output is not None:
                    odd = RecordTypeError(f"{self.program.where(steps[maker])}: {error}")
                    raise computed_from(odd, output, partial(_run_alone, function), block.records()) from error
                located = function.locate(error.__traceback__)
                if located is None:
                    raise
                step = steps[located[0]]
                raise user_failure(error, self.program.where(step), step.function, located[1]) from error
            try:
                self._send(last, None, Block(records, None, timestamps, None))
            except RecordTypeError as error:
                if output is None:
                    raise
                raise computed_from(error, output, partial(_run_alone, function), block.records()) from error

        return consume

    def _clause(self, index: int, step: FusedStep, is_last: bool) -> Clause:
        """A step's clause. Records that only the chain's own functions take get their normal form in it."""
        clause = replace(step.clause(self._step_context(index)), copy=self._copies(index).get(None))
        if is_last or step.output is None or not self._makes(index, None):
            return clause
        copy = None if clause.copy is None else step.output.fit.copied
        return replace(clause, copy=copy, normal=step.output.normal, fit=step.output.fit)

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

    def _leave(self, number: int, output: Output) -> Consumer:
        layout = output.layout
        schema = layout.schema
        where = self._made_by(output.step, output.tag)
        for_keys = bool(layout.keys) and self._makes(output.step, output.tag)

        def consume(block: Block) -> None:
            if for_keys and not block.encode_plain(layout.records):
                block.normal(layout.records, where)
            arrays = list(encoded(block, layout.records, where).columns)
            if layout.timestamped:
                arrays.append(
                    pa.nulls(block.size, pa.int64())
                    if block.timestamps is None
                    else pa.array(block.timestamps, pa.int64())
                )
            arrays += [key.column(block.records()) for key in layout.keys]
            self._emit(number, declared(arrays, schema))

        return consume


def _normal(consumer: Consumer, kind: RecordType, where: str, block: Block) -> None:
    consumer(block.normal(kind, where))


def _run_alone(function: FusedChain, record: Any) -> list[Any]:
    """A chain's results for one record, with any event time."""
    return function.run([record], [0])[0]


def _copied(consumer: Consumer, copy: Copy, block: Block) -> None:
    consumer(block.copied(copy))
