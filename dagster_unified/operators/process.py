"""`process` on a stream that is not keyed: side outputs and the time of each record, no state, no timers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dagster_unified.operators.failures import RAISED, user_failure
from dagster_unified.operators.functions.base import NoTimers, OutputTag, ProcessFunction, TimerService
from dagster_unified.operators.program.blocks import Block, Collector, Consumer
from dagster_unified.operators.program.step import BlockStep, StepContext


class ProcessStep(BlockStep):
    """`process`."""

    def consumer(self, context: StepContext) -> Consumer:
        function: ProcessFunction[Any, Any] = self.function
        context.open(function)
        runtime = _Context(context.options.readable(context.clock), context.watermark, Collector(context.copies))

        def consume(block: Block) -> None:
            out = runtime.out = Collector(context.copies)
            timestamps = block.timestamps or [None] * block.size
            record = None
            try:
                for record, timestamp in zip(block.records(), timestamps, strict=True):
                    runtime.current = timestamp
                    out.emit_all(function.process_element(record, runtime), timestamp)
            except RAISED as error:
                raise user_failure(error, context.where, function.process_element, record) from error
            for tag, emitted in out.blocks():
                context.send(tag, emitted)

        return consume


class _Context(ProcessFunction.Context, NoTimers):
    """The context of a non-keyed process function: time, side outputs, and no timers."""

    def __init__(self, clock: Callable[[], int], watermark: Callable[[], int], out: Collector) -> None:
        self._clock, self._watermark = clock, watermark
        self.current: int | None = None
        self.out = out

    def timestamp(self) -> int | None:
        return self.current

    def timer_service(self) -> TimerService:
        return self

    def output(self, tag: OutputTag[Any], value: Any) -> None:
        self.out.emit_side(tag, value, self.current)

    def current_processing_time(self) -> int:
        return self._clock()

    def current_watermark(self) -> int:
        return self._watermark()
