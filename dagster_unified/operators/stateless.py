"""Operators of single records without state: `map`, `filter`, `flat_map`, `process` without a key, and event times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dagster_unified.errors import RecordTypeError
from dagster_unified.operators.failures import RAISED, user_failure
from dagster_unified.operators.functions.base import NoTimers, OutputTag, ProcessFunction, TimerService
from dagster_unified.operators.functions.event_time import IngestionTimeAssigner
from dagster_unified.operators.program.blocks import Block, Collector, Consumer
from dagster_unified.operators.program.fusion import Clause
from dagster_unified.operators.program.step import BlockStep, FusedStep, StepContext
from dagster_unified.operators.time import to_millis
from dagster_unified.operators.watermarks import Generated, Memory, Supplier
from dagster_unified.records import shorten


class Map(Clause):
    """A function that returns a record for a record."""

    method = "map"
    one_to_one = True

    def lines(self, call: str, value: str, result: str) -> list[str]:
        return [f"for {result} in ({call}({value}),)"]


class Filter(Clause):
    """A function that decides whether a record goes on."""

    method = "filter"
    gives_records = False

    def lines(self, call: str, value: str, result: str) -> list[str]:
        return [f"for passes in ({call}({value}),) if passes or passes is None and no_answer()"]


class FlatMap(Clause):
    """A function that returns any number of records for a record."""

    method = "flat_map"
    iterates = True

    def lines(self, call: str, value: str, result: str) -> list[str]:
        records = "results if results is not None and results.__class__ is not str else no_records(results)"
        return [f"for results in ({call}({value}),) for {result} in ({records})"]


class Assign(Clause):
    """A function that returns the timestamp of a record."""

    gives_records = False
    assigns = True

    def lines(self, call: str, value: str, result: str) -> list[str]:
        return [f"for t in ({call}({value}, t),)"]


@dataclass(frozen=True)
class AssignTimestampsStep(FusedStep):
    """`assign_timestamps_and_watermarks`; the drivers decide the watermark."""

    generator: Supplier | None = None
    """Creates its watermark generator, if it has one."""

    column: str | None = None
    """The field that it reads, where an author only named one."""

    reads_columns = True

    @property
    def takes_columns(self) -> bool:
        return self.column is not None and self.generator is None

    def times_of(self, batch: pa.RecordBatch) -> list[int] | None:
        if self.column is None or self.generator is not None:
            return None
        moments = batch.column(self.column)
        if moments.null_count or not (pa.types.is_int64(moments.type) or pa.types.is_timestamp(moments.type)):
            return None  # left to the function: what is no moment is its error
        return _millis_of(moments)

    def clause(self, context: StepContext) -> Clause:
        assigner = self.function
        context.open(assigner)
        if isinstance(assigner, IngestionTimeAssigner):
            assigner = assigner.reading(context.options.readable(context.clock))
        extract = getattr(assigner, "extract_timestamp", assigner)
        if self.generator is None or context.generated is None:
            return Assign(lambda value, timestamp: _event_time(extract(value, timestamp), value))
        memory = Memory(self.remembers, context.remembered.get(self.uid, {}), context.subtask)
        generated = Generated(context.where, self.generator, memory)
        context.generated.append((self.uid, generated))

        def assign(value: Any, timestamp: int | None) -> int:
            moment = _event_time(extract(value, timestamp), value)
            generated.on_event(value, moment)
            return moment

        return Assign(assign)


def _millis_of(moments: pa.Array) -> list[int]:
    """As `to_millis`, for a column."""
    import pyarrow.compute as pc  # slow to load, and a pipeline is built without it

    if pa.types.is_timestamp(moments.type):
        moments = pc.floor_temporal(moments, unit="millisecond").cast(pa.timestamp("ms", moments.type.tz))
    millis: list[int] = moments.cast(pa.int64()).to_pylist()
    return millis


def _event_time(moment: Any, record: Any) -> int:
    millis = to_millis(moment)
    if not isinstance(millis, int):
        raise RecordTypeError(
            f"a timestamp assigner must give milliseconds (int) or a datetime, not {shorten(moment)}, which it gave for"
            f" {shorten(record)}"
        )
    return millis


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
