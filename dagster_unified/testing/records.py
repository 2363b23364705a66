"""Records as the harness has them, with their event times, and copies of programs, as Spark's workers get them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import pyarrow as pa

from dagster_unified.by_value import InThisProcess, sent
from dagster_unified.operators.drivers.stages import Shipped
from dagster_unified.operators.layout import TIMESTAMP, StreamLayout
from dagster_unified.operators.program.run import RunningProgram
from dagster_unified.operators.program.step import Output, Program

Timed = tuple[Any, "int | None"]
"""A record and its event time."""

T = TypeVar("T")


class OfTheLibrary(Generic[T]):
    """What holds no code of an author's, and needs no copies."""

    def __init__(self, value: T) -> None:
        self._value = value

    def load(self) -> T:
        """Return it."""
        return self._value


def shipped(value: T, programs: Sequence[Program], where: str) -> Shipped[T]:
    """Return what makes copies of programs, as Spark's workers get them; raise `PipelineError` as Spark would.

    What its functions keep is not in the next copy, and not in the process's own. The library's need no copies.
    """
    if all(is_library(program) for program in programs):
        return OfTheLibrary(value)
    return sent(programs, lambda: InThisProcess(value), where)


def is_library(program: Program) -> bool:
    """Whether there is no code of the author's in a program."""
    keyed = any(layout.keys for layout in (program.input, *[output.layout for output in program.outputs]))
    return not keyed and all(step.function is None for step in program.steps)


def to_batch(pipeline: str, layout: StreamLayout, timed: Sequence[Timed]) -> pa.RecordBatch:
    """Records as Arrow, with their event times and the keys that functions compute."""
    bare = layout.without_keys
    columns = list(layout.records.to_batch([record for record, _ in timed]).columns)
    if layout.timestamped:
        columns.append(pa.array([time for _, time in timed], pa.int64()))
    batch = pa.RecordBatch.from_arrays(columns, schema=bare.schema)
    return with_keys(Program(pipeline, "key_by", bare, (), (Output(-1, layout),)), batch) if layout.keys else batch


def with_keys(program: Program, batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch with the keys that functions compute."""
    if not batch.num_rows:
        return pa.RecordBatch.from_pylist([], program.outputs[0].layout.schema)
    batches: list[pa.RecordBatch] = []
    with RunningProgram(program, lambda _, keyed: batches.append(keyed), lambda: 0) as keying:
        keying.push(batch)
    return batches[0]


def to_timed(layout: StreamLayout, batch: pa.RecordBatch) -> list[Timed]:
    """The inverse, without keys."""
    times = batch.column(TIMESTAMP).to_pylist() if layout.timestamped else [None] * batch.num_rows
    return list(zip(layout.records.from_batch(batch.select(list(layout.records.names))), times, strict=True))
