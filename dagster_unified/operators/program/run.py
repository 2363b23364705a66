"""A program that runs: the connected Python operators of one task, as one pass over Arrow batches.

Its head takes the stream's batches (or, where it is
a keyed operator, runs of one key's records); records are pushed from operator to operator in whole lists, stateless
neighbours fused into one function; outputs leave as Arrow batches. Knows no driver and no engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from dagster_unified.errors import RecordTypeError, UserFunctionError
from dagster_unified.operators.async_io import AsyncCalls
from dagster_unified.operators.broadcast import BroadcastOperator
from dagster_unified.operators.failures import user_failure
from dagster_unified.operators.functions.base import (
    Function,
    NoTimers,
    OutputTag,
    ProcessFunction,
    RuntimeContext,
    TimerService,
)
from dagster_unified.operators.functions.event_time import IngestionTimeAssigner
from dagster_unified.operators.keyed import (
    Collector,
    KeyedOperator,
    KeyedProcessOperator,
    ReduceOperator,
    rolling,
)
from dagster_unified.operators.layout import TIMESTAMP, StreamLayout
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.program.checks import checked_batch
from dagster_unified.operators.program.chunks import Chunk, Consumer, encoded
from dagster_unified.operators.program.fusion import Clause, FusedChain, fuse
from dagster_unified.operators.program.spec import Output, Program, Step
from dagster_unified.operators.state.state import KeyedStateBackend
from dagster_unified.operators.time import MIN_TIMESTAMP, to_millis
from dagster_unified.operators.windows.operator import WindowOperator
from dagster_unified.records import RecordType, shorten

FUSED_KINDS = ("map", "filter", "flat_map", "assign")

FLUSH = 8192
"""Records that a keyed operator collects before they go down the chain."""


class RunningProgram:
    """A program opened for one partition. `emit` is given (output number, batch) for whatever leaves it."""

    def __init__(
        self, program: Program, emit: Callable[[int, pa.RecordBatch], None], clock: Callable[[], int], subtask: int = 0
    ) -> None:
        self.program = program
        self.metrics = Metrics()
        self._emit, self._clock, self._subtask = emit, clock, subtask
        self._closing: list[Any] = []
        self._consumers: dict[tuple[int, str | None], list[Consumer]] = {}
        self.keyed: KeyedOperator | None = None
        for number, output in enumerate(program.outputs):
            self._consumers.setdefault((output.step, output.tag), []).append(self._leave(number, output))
        try:
            self._build(-1)
        except BaseException:
            self.close()
            raise

    def push(self, batch: pa.RecordBatch) -> None:
        """Runs one batch of the input stream through the program."""
        self._send(-1, None, self._chunk(batch, self.program.input))

    def push_records(self, records: list[Any], timestamps: Sequence[int | None]) -> None:
        """As `push`, for records that are Python's already."""
        self._send(
            -1,
            None,
            Chunk(records, None, timestamps if self.program.input.timestamped else None, self.program.input.records),
        )

    def broadcast(self, batch: pa.RecordBatch, leads: bool) -> None:
        """Gives the head a batch of broadcast records."""
        assert isinstance(self.keyed, BroadcastOperator)
        assert self.program.broadcast is not None
        chunk = self._chunk(batch, self.program.broadcast.layout)
        self.keyed.process_broadcast(chunk.records(), chunk.timestamps or [None] * chunk.size, leads)

    def run_of(self, key: Hashable, records: Sequence[Any], timestamps: Sequence[int | None]) -> None:
        """Gives a keyed head a run of one key's records."""
        assert self.keyed is not None
        if self.keyed.time_sorted:
            self.keyed.process_in_time_order(key, records, timestamps)
        else:
            self.keyed.select(key)
            self.keyed.process(records, timestamps)

    def drain(self, at_least: int = 1) -> None:
        """Sends what the keyed head has collected down the chain, once it is `at_least` so many records."""
        assert self.keyed is not None
        if at_least == 1:
            self.keyed.check_state()
        out = self.keyed.out
        if len(out.records) + sum(len(records) for records, _ in out.side.values()) >= at_least:
            self.keyed.out = Collector()
            if self._emits_state:
                self._check_emitted(out.records)
            self._send_collected(0, out)

    @property
    def _emits_state(self) -> bool:
        """Whether what the head emits is its state as well, and goes to other operators, which do not check it."""
        return isinstance(self.keyed, ReduceOperator) and bool(self._children(0))

    def _check_emitted(self, records: list[Any]) -> None:
        head = self.program.steps[0]
        assert head.output is not None
        try:
            head.output.check(records)
        except RecordTypeError as error:
            raise RecordTypeError(f"{self.program.where(head)}: {error}") from error

    def close(self) -> None:
        """Closes every function that was opened, also after a failure."""
        while self._closing:
            self._closing.pop().close()

    def _chunk(self, batch: pa.RecordBatch, layout: StreamLayout) -> Chunk:
        timestamps = batch.column(TIMESTAMP).to_pylist() if layout.timestamped else None
        return Chunk(None, batch.select(list(layout.records.names)), timestamps, layout.records)

    def _send(self, step: int, tag: str | None, chunk: Chunk) -> None:
        if chunk.size:
            for consumer in self._consumers.get((step, tag), ()):
                consumer(chunk)

    def _send_collected(self, step: int, out: Collector) -> None:
        self._send(step, None, Chunk(out.records, None, out.timestamps, None))
        for tag, (records, timestamps) in out.side.items():
            self._send(step, tag, Chunk(records, None, timestamps, None))

    def _children(self, parent: int) -> list[int]:
        return [i for i, s in enumerate(self.program.steps) if s.parent == parent]

    def _build(self, parent: int) -> None:
        for index in self._children(parent):
            step = self.program.steps[index]
            consumer: Consumer | None
            if step.kind in FUSED_KINDS:
                run = self._fusable_from(index)
                consumer = self._fused(run)
                last = run[-1]
            else:
                consumer, last = self._single(index, step), index
            if consumer is not None:
                self._consumers.setdefault((parent, step.tag), []).append(consumer)
            self._build(last)

    def _fusable_from(self, index: int) -> list[int]:
        """The longest run of fusable steps from `index` in which no one but the next step reads what is between."""
        run = [index]
        while True:
            children = self._children(run[-1])
            if len(children) != 1 or (run[-1], None) in self._consumers:
                return run
            child = self.program.steps[children[0]]
            if child.kind not in FUSED_KINDS or child.tag is not None:
                return run
            run.append(children[0])

    def _fused(self, run: list[int]) -> Consumer:
        steps = [self.program.steps[i] for i in run]
        clauses = [Clause(s.kind, self._callable(s)) for s in steps]
        compiled: dict[bool, FusedChain] = {}
        last = run[-1]

        def saw(clause: int, timestamps: list[int]) -> None:
            if timestamps:
                self.metrics.saw_event_time(steps[clause].uid, max(timestamps))

        def consume(chunk: Chunk) -> None:
            timestamped = chunk.timestamps is not None
            chain = compiled.get(timestamped)
            if chain is None:
                chain = compiled[timestamped] = fuse(clauses, timestamped, saw)
            try:
                records, timestamps = chain.run(chunk.records(), chunk.timestamps)
            except UserFunctionError:
                raise
            except Exception as error:
                found = chain.locate(error.__traceback__)
                if found is None:
                    raise
                step = steps[found[0]]
                raise user_failure(error, self.program.where(step), step.function, found[1]) from error
            self._send(last, None, Chunk(records, None, timestamps, None))

        return consume

    def _callable(self, step: Step) -> Callable[..., Any]:
        function = step.function
        self._open(step)
        if step.kind == "assign":
            if isinstance(function, IngestionTimeAssigner):
                function = function.reading(self.program.options.readable(self._clock))
            extract = getattr(function, "extract_timestamp", function)
            return lambda value, timestamp: _event_time(extract(value, timestamp))
        method: Callable[..., Any] = getattr(function, step.kind, function)
        return method

    def _context(self, step: Step, state: KeyedStateBackend | None) -> RuntimeContext:
        return RuntimeContext(step.name, self._subtask, step.parallelism, self.metrics, state)

    def _open(self, step: Step) -> None:
        if isinstance(step.function, Function):
            self._closing.append(step.function)
            try:
                step.function.open(self._context(step, None))
            except Exception as error:
                raise user_failure(error, self.program.where(step), step.function.open, "open()") from error

    def _single(self, index: int, step: Step) -> Consumer | None:
        where = self.program.where(step)
        if step.kind == "map_batches":
            return self._map_batches(index, step, where)
        if step.kind == "process":
            return self._process(index, step, where)
        if step.kind == "async":
            return self._async(index, step, where)
        self.keyed = self._keyed_operator(step, where)
        self._closing.append(self.keyed)
        try:
            self.keyed.open(lambda state: self._context(step, state))
        except Exception as error:
            raise user_failure(error, where, getattr(step.function, "open", None), "open()") from error
        return None

    def _keyed_operator(self, step: Step, where: str) -> KeyedOperator:
        options = self.program.options
        if step.kind == "keyed_process":
            return KeyedProcessOperator(where, step.function, options, self._clock, self.metrics)
        if step.kind == "window":
            return WindowOperator(where, step.function, options, self._clock, self.metrics)
        if step.kind == "broadcast":
            return BroadcastOperator(where, step.function, options, self._clock, self.metrics)
        combine = rolling(*step.rolling) if step.rolling else getattr(step.function, "reduce", step.function)
        assert step.output is not None
        return ReduceOperator(where, combine, step.function, step.output.python, options, self._clock)

    def _map_batches(self, index: int, step: Step, where: str) -> Consumer:
        self._open(step)
        output = step.output
        assert output is not None

        before = self.program.steps[index].parent
        made_by = self._made_by(before, step.tag)

        def consume(chunk: Chunk) -> None:
            given = encoded(chunk, self._kind_before(index), made_by)
            if chunk.timestamps is not None:
                given = given.append_column(TIMESTAMP, pa.array(chunk.timestamps, pa.int64()))
            try:
                result = step.function(given)
            except Exception as error:
                raise user_failure(error, where, step.function, given.slice(0, 3).to_pylist()) from error
            batch, timestamps = checked_batch(result, output, chunk.timestamps, where)
            self._send(index, None, Chunk(None, batch, timestamps, output))

        return consume

    def _made_by(self, index: int, tag: str | None) -> str:
        """How an error names the operator whose function made a step's records: filters and assigners pass theirs
        on.
        """
        steps = self.program.steps
        while index >= 0 and steps[index].output is None and steps[index].tag is None:
            index = steps[index].parent
        name = "input" if index < 0 else steps[index].name
        return f"{self.program.pipeline}: stage '{self.program.stage}', operator '{name}'" + (
            f", side output '{tag}'" if tag else ""
        )

    def _kind_before(self, index: int) -> RecordType:
        """The record type that reaches a step: its parent's, with filters and assigners passing theirs on."""
        parent = self.program.steps[index].parent
        while parent >= 0 and self.program.steps[parent].output is None:
            parent = self.program.steps[parent].parent
        kind = self.program.input.records if parent < 0 else self.program.steps[parent].output
        assert kind is not None
        return kind

    def _process(self, index: int, step: Step, where: str) -> Consumer:
        self._open(step)
        context = _ProcessContext(where, self.program.options.readable(self._clock))
        function: ProcessFunction[Any, Any] = step.function

        def consume(chunk: Chunk) -> None:
            out = context.out = Collector()
            timestamps = chunk.timestamps or [None] * chunk.size
            record = None
            try:
                for record, timestamp in zip(chunk.records(), timestamps, strict=True):
                    context.current = timestamp
                    out.emit_all(function.process_element(record, context), timestamp)
            except Exception as error:
                raise user_failure(error, where, function.process_element, record) from error
            self._send_collected(index, out)

        return consume

    def _async(self, index: int, step: Step, where: str) -> Consumer:
        calls: AsyncCalls = step.function
        loop = asyncio.new_event_loop()
        self._closing.append(loop)
        self._open(replace(step, function=calls.function))

        def failed(error: Exception, record: Any) -> Exception:
            return user_failure(error, where, calls.function.async_invoke, record)

        def consume(chunk: Chunk) -> None:
            out = Collector()
            timestamps = chunk.timestamps or [None] * chunk.size
            loop.run_until_complete(
                calls.run(chunk.records(), lambda number, found: out.emit_all(found, timestamps[number]), failed)
            )
            self._send_collected(index, out)

        return consume

    def _leave(self, number: int, output: Output) -> Consumer:
        layout = output.layout
        schema = layout.schema
        where = self._made_by(output.step, output.tag)

        def consume(chunk: Chunk) -> None:
            arrays = list(encoded(chunk, layout.records, where).columns)
            if layout.timestamped:
                arrays.append(
                    pa.nulls(chunk.size, pa.int64())
                    if chunk.timestamps is None
                    else pa.array(chunk.timestamps, pa.int64())
                )
            arrays += [key.column(chunk.records()) for key in layout.keys]
            self._emit(number, pa.RecordBatch.from_arrays(arrays, schema=schema))

        return consume


class _ProcessContext(ProcessFunction.Context, NoTimers):
    """The context of a non-keyed process function: time, side outputs, and no timers."""

    def __init__(self, where: str, clock: Callable[[], int]) -> None:
        self._where, self._clock = where, clock
        self.current: int | None = None
        self.out = Collector()

    def timestamp(self) -> int | None:
        return self.current

    def timer_service(self) -> TimerService:
        return self

    def output(self, tag: OutputTag[Any], value: Any) -> None:
        self.out.emit_side(tag, value, self.current)

    def current_processing_time(self) -> int:
        return self._clock()

    def current_watermark(self) -> int:
        return MIN_TIMESTAMP


def _event_time(moment: Any) -> int:
    millis = to_millis(moment)
    if not isinstance(millis, int):
        raise RecordTypeError(f"a timestamp assigner must give milliseconds (int) or a datetime, not {shorten(moment)}")
    return millis
