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
from dagster_unified.operators.event_times import by_unit
from dagster_unified.operators.failures import RAISED, computed_from, placed, user_failure
from dagster_unified.operators.functions.base import FIRST, RuntimeContext, Subtask
from dagster_unified.operators.functions.iterations import IterationListener, iteration_listeners
from dagster_unified.operators.layout import TIMESTAMP, StreamLayout, declared
from dagster_unified.operators.metrics import Metrics, Registry
from dagster_unified.operators.operator import KeyedOperator
from dagster_unified.operators.program.blocks import (
    Block,
    Closing,
    Collector,
    Consumer,
    Emitting,
    close_each,
    encoded,
    tell,
)
from dagster_unified.operators.program.fusion import ChainCode, Clause, FusedChain, compile_chain
from dagster_unified.operators.program.inlined import InlinedChain
from dagster_unified.operators.program.step import (
    BlockStep,
    CompiledProgram,
    CompiledStep,
    FusedStep,
    KeyedStep,
    Output,
    Program,
    StepChain,
    StepContext,
    compile_program,
)
from dagster_unified.operators.state.backend import KeyedStateBackend
from dagster_unified.operators.time import MIN_TIMESTAMP
from dagster_unified.operators.watermarks import Generated, Kept, Mark, slowest
from dagster_unified.records import Copy, RecordType, record_type

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
        compiled: CompiledProgram | None = None,
    ) -> None:
        self.program, self._compiled = program, compiled or compile_program(program)
        self._watermark = watermark
        self.registry = Registry()
        self.metrics = self.registry.metrics
        self._emit, self._clock, self._subtask = emit, clock, subtask
        self._closing: list[tuple[str, Any]] = []
        self._flushing: list[Callable[[], None]] = []
        self._table: pa.Table | None = None
        self._generated: list[tuple[str, Generated]] | None = [] if generating else None
        self._remembered = remembered or {}
        self._consumers: dict[tuple[int, str | None], list[Consumer]] = {}
        self.keyed: KeyedOperator | None = None
        self._keys = list(map(_keys_on_columns, program.outputs))
        for number, output in enumerate(program.outputs):
            self._consume(output.step, output.tag, partial(self._export, number))
        try:
            for chain in self._compiled.chains:
                self._open(chain)
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
        with placed(self._compiled.head):
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
            self.keyed.out = Collector(self.keyed.copies)
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
        for last in (chain.steps[-1] for chain in self._compiled.chains):
            step = self.program.steps[last.index]
            for listener in () if isinstance(step, KeyedStep) else iteration_listeners(step.function):
                emitted = Emitting(Collector(last.copies))
                try:
                    call(listener, emitted)
                except RAISED as error:
                    called = listener.on_epoch_watermark_incremented
                    raise user_failure(error, last.where, called, what) from error
                out = emitted.out
                self._send(last.index, None, step.emitted(out.records, out.timestamps, last.where))
                for tag, (records, timestamps) in out.side.items():
                    self._send(last.index, tag, Block(records, None, timestamps, None))
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
        if closing:
            close_each([Closing(where, closable) for where, closable in reversed(closing)], failure)

    def _block(self, batch: pa.RecordBatch, layout: StreamLayout) -> Block:
        timestamps = batch.column(TIMESTAMP).to_pylist() if layout.timestamped else None
        return Block(None, batch.select(list(layout.records.names)), timestamps, layout.records, self._compiled.head)

    def _send(self, step: int, tag: str | None, block: Block) -> None:
        if block.size:
            for consumer in self._consumers.get((step, tag), ()):
                consumer(block)

    def _consume(self, step: int, tag: str | None, consumer: Consumer) -> None:
        self._consumers.setdefault((step, tag), []).append(consumer)

    def _open(self, chain: StepChain) -> None:
        first = chain.steps[0]
        step = self.program.steps[first.index]
        if isinstance(step, KeyedStep):
            self._open_keyed(step, self._context(first))
            return
        consumer = step.consumer(self._context(first)) if isinstance(step, BlockStep) else self._fused(chain)
        if chain.normal is not None:
            consumer = partial(_normal, consumer, chain.normal, first.before, chain.is_cut)
        if chain.copy is not None:
            consumer = partial(_copied, consumer, chain.copy)
        self._consume(step.parent, step.tag, consumer)

    def _context(self, compiled: CompiledStep) -> StepContext:
        step = self.program.steps[compiled.index]

        def runtime_context(state: KeyedStateBackend | None) -> RuntimeContext:
            return RuntimeContext(step.name, self._subtask, step.parallelism, self.registry, state)

        return StepContext(
            where=compiled.where,
            before=compiled.before,
            options=self.program.options,
            clock=self._clock,
            watermark=partial(self._watermark, step.uid),
            metrics=self.metrics,
            input=step.input,
            output=step.output,
            runtime_context=runtime_context,
            closing=self._closing,
            flushing=self._flushing,
            copy=compiled.copy,
            copies=compiled.copies,
            generated=self._generated,
            remembered=self._remembered,
            subtask=self._subtask.number,
            broadcast=None if self.program.broadcast is None else self.program.broadcast.layout,
            table=lambda: self._table,
            send=partial(self._send, compiled.index),
        )

    def _open_keyed(self, step: KeyedStep, context: StepContext) -> None:
        self.keyed = step.created(context)
        self._closing.append((context.where, self.keyed))
        try:
            self.keyed.open(context.runtime_context)
        except RAISED as error:
            raise user_failure(error, context.where, getattr(step.function, "open", None), "open()") from error

    def _fused(self, chain: StepChain) -> Consumer:
        compiled = chain.steps
        steps = [self._fused_step(each) for each in compiled]
        clauses = [self._clause(step, each) for step, each in zip(steps, compiled, strict=True)]
        alone = steps[0] if len(steps) == 1 and steps[0].reads_columns else None
        functions: dict[bool, FusedChain] = {}
        last = compiled[-1].index
        output = next((step.output for step in reversed(steps) if step.output is not None), None)
        unit = self.program.event_time_unit
        inlined = _inlined(steps, output)

        def saw(clause: int, timestamps: list[int]) -> None:
            if timestamps:
                self.metrics.saw_event_time(steps[clause].uid, max(timestamps))
                if unit is not None:
                    self.metrics.count_event_times(steps[clause].uid, by_unit(timestamps, unit))

        def consume(block: Block) -> None:
            times = alone.times_of(block.columns) if alone is not None and block.columns is not None else None
            if times is not None:
                saw(0, times)
                self._send(last, None, block.at(times))
                return
            on_columns = None if inlined is None else inlined.run(block)
            if on_columns is not None:
                self._send(last, None, on_columns)
                return
            timestamped = block.timestamps is not None
            function = functions.get(timestamped)
            if function is None:
                function = functions[timestamped] = self._chain_code(chain, clauses, timestamped).bind(clauses, saw)
            try:
                records, timestamps = function.run(block.records(), block.timestamps)
            except UserFunctionError:
                raise
            except RAISED as error:
                maker = function.made_by(error.__traceback__) if isinstance(error, RecordTypeError) else None
                if maker is not None and output is not None:
                    odd = RecordTypeError(f"{compiled[maker].where}: {error}")
                    raise computed_from(odd, output, partial(_run_alone, function), block.records()) from error
                located = function.locate(error.__traceback__)
                if located is None:
                    raise
                number, record = located
                raise user_failure(error, compiled[number].where, steps[number].function, record) from error
            try:
                self._send(last, None, Block(records, None, timestamps, None))
            except RecordTypeError as error:
                if output is None:
                    raise
                raise computed_from(error, output, partial(_run_alone, function), block.records()) from error

        return consume

    def _chain_code(self, chain: StepChain, clauses: Sequence[Clause], timestamped: bool) -> ChainCode:
        if timestamped not in chain.code:
            chain.code[timestamped] = compile_chain(clauses, timestamped)
        return chain.code[timestamped]

    def _fused_step(self, compiled: CompiledStep) -> FusedStep:
        step = self.program.steps[compiled.index]
        assert isinstance(step, FusedStep)
        return step

    def _clause(self, step: FusedStep, compiled: CompiledStep) -> Clause:
        """A step's clause. Records that only the chain's own functions take get their normal form in it."""
        clause = replace(step.clause(self._context(compiled)), copy=compiled.copies.get(None))
        normal = compiled.normal_in_chain
        if normal is None:
            return clause
        copy = None if clause.copy is None else normal.fit.copied
        return replace(clause, copy=copy, normal=normal.normal, fit=normal.fit)

    def _export(self, number: int, block: Block) -> None:
        export, layout = self._compiled.exports[number], self.program.outputs[number].layout
        if export.is_normal and not block.encode_plain(layout.records):
            block.normal(layout.records, export.where)
        batch = encoded(block, layout.records, export.where)
        arrays = [batch.column(number) for number in layout.numbers]
        if layout.timestamped:
            arrays.append(
                pa.nulls(block.size, pa.int64()) if block.timestamps is None else pa.array(block.timestamps, pa.int64())
            )
        for key, on_columns in zip(layout.keys, self._keys[number], strict=True):
            keys = None if on_columns is None else on_columns.run(block)
            arrays.append(key.column(block.records()) if keys is None else keys.batch(layout.records).column(0))
        self._emit(number, declared(arrays, export.schema))


def _normal(consumer: Consumer, kind: RecordType, where: str, in_chain: bool, block: Block) -> None:
    consumer(block.normal(kind, where, in_chain))


def _keys_on_columns(output: Output) -> list[InlinedChain | None]:
    """For each computed key of an output, what computes it on columns, if anything does."""
    layout = output.layout
    inlined = output.keys or (None,) * len(layout.keys)
    return [
        None if known is None else InlinedChain([known], layout.records, record_type(key.python))
        for known, key in zip(inlined, layout.keys, strict=True)
    ]


def _inlined(steps: Sequence[FusedStep], output: RecordType | None) -> InlinedChain | None:
    """The chain on columns that steps are, if all their functions are inlined."""
    parts = [step.inlined for step in steps if step.inlined is not None]
    taken = steps[0].input
    if len(parts) < len(steps) or taken is None:
        return None
    return InlinedChain(parts, taken, output or taken)


def _run_alone(function: FusedChain, record: Any) -> list[Any]:
    """A chain's results for one record, with any event time."""
    return function.run([record], [0])[0]


def _copied(consumer: Consumer, copy: Copy, block: Block) -> None:
    consumer(block.copied(copy))
