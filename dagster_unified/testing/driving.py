"""Drives one operator of a plan in memory, as STREAMING drives it: records and control events in, records out.

It runs as a stage of Spark's workers does; a keyed operator with one key group, whose state is encoded into pages as in
a checkpoint, so that what a checkpoint would refuse is refused here. Its functions are shipped as to Spark's workers,
and live for a micro-batch. What both harnesses, of a pipeline and of an operator, are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Generic, TypeVar

import pyarrow as pa

from dagster_unified.by_value import InThisProcess, sent
from dagster_unified.errors import UnsupportedError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.execution_graph import Link, program
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import Plan, Port, plan_in_one
from dagster_unified.operators.drivers.group import MemoryStore
from dagster_unified.operators.drivers.key_groups import Arrived, ControlEvent, KeyGroups, MicroBatch
from dagster_unified.operators.drivers.stages import HEAD, Level, Pass, Programs, Shipped
from dagster_unified.operators.functions.base import FIRST
from dagster_unified.operators.layout import TIMESTAMP, StreamLayout
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.program.run import RunningProgram
from dagster_unified.operators.program.step import CompiledProgram, Output, Program
from dagster_unified.operators.routing import Route, RoutedProgram
from dagster_unified.operators.state.pages import Block
from dagster_unified.operators.time import MIN_TIMESTAMP
from dagster_unified.operators.watermarks import Kept, Mark

Timed = tuple[Any, "int | None"]
"""A record and its event time."""

Emit = Callable[["str | None", list[Timed]], None]
"""Takes the records of an output, or of a side output by its tag."""


def planned(graph: g.Graph, mode: str, options: Mapping[str, Any] | None) -> Plan:
    """Return the plan that a harness runs; raise `UnsupportedError` where it starts from a savepoint or leaves one."""
    decided = plan_in_one(graph, Configuration.of({**(options or {}), "execution.runtime-mode": mode}))
    if decided.execution.has_savepoint:
        key = "execution.savepoint.path" if decided.execution.goes_on else "execution.state-recovery.path"
        raise UnsupportedError(
            f"{decided.name}: {key} is set, and the harness has neither source positions nor savepoints; leave the"
            " option out, or run the pipeline on Spark with Pipeline.execute()"
        )
    return decided


def single(plan: Plan, node: g.Node) -> Program:
    """The program of one node alone, with an output for each of its tags that something reads."""
    outputs = [Output(0, plan.layout(Port(node.id, tag)).without_keys, tag) for tag in tags(plan, node)]
    alone = program(plan, node.name, (Link(node.id),), outputs)
    return replace(alone, in_subtasks=node.id in plan.subtasks)


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


def tags(plan: Plan, node: g.Node) -> list[str | None]:
    """The outputs of a node that something reads, by their tags; the main one where nothing does."""
    found = dict.fromkeys(e.side_output for e in plan.graph.outputs(node.id))
    return list(found) or [None]


def to_batch(pipeline: str, layout: StreamLayout, timed: Sequence[Timed]) -> pa.RecordBatch:
    """Records as Arrow, with their event times and the keys that functions compute."""
    bare = StreamLayout(layout.records, layout.timestamped)
    columns = list(layout.records.to_batch([record for record, _ in timed]).columns)
    if layout.timestamped:
        columns.append(pa.array([time for _, time in timed], pa.int64()))
    batch = pa.RecordBatch.from_arrays(columns, schema=bare.schema)
    return with_keys(Program(pipeline, "key_by", bare, (), (Output(-1, layout),)), batch) if layout.keys else batch


def with_keys(program: Program, batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch with the keys that functions compute."""
    if not batch.num_rows:
        return pa.RecordBatch.from_pylist([], program.outputs[0].layout.schema)
    found: list[pa.RecordBatch] = []
    with RunningProgram(program, lambda _, keyed: found.append(keyed), lambda: 0) as keying:
        keying.push(batch)
    return found[0]


def to_timed(layout: StreamLayout, batch: pa.RecordBatch) -> list[Timed]:
    """The inverse, without keys."""
    times = batch.column(TIMESTAMP).to_pylist() if layout.timestamped else [None] * batch.num_rows
    return list(zip(layout.records.from_batch(batch.select(list(layout.records.names))), times, strict=True))


KEYS_PER_PAGE = 8
"""A harness's micro-batches are of a record or two: small pages keep what is read and written for each small."""


class Stage:
    """Programs that run as one stage of a query, shipped as to Spark's workers, by lane."""

    def __init__(self, programs: Mapping[int, RoutedProgram], where: str) -> None:
        self.programs = {lane: routed.program for lane, routed in programs.items()}
        counting = [program for program in self.programs.values() if program.counts_epochs]
        steps = chain.from_iterable(program.steps for program in counting)
        self.listens = any(True for step in steps for _ in step.listeners())
        """Whether a function hears of committed epochs."""

        shared = {lane: routed for lane, routed in programs.items() if not routed.in_subtasks}
        self._shared = shipped(shared, [routed.program for routed in shared.values()], where)
        self._in_subtasks = {
            lane: shipped(routed, [routed.program], where) for lane, routed in programs.items() if routed.in_subtasks
        }

        self._compiled: dict[int, CompiledProgram] = {}

    def load(self) -> Programs:
        """The programs, with functions that nobody has used."""
        return Programs(self._shared.load(), self._in_subtasks, self._compiled)


class InMemoryEpoch:
    """The epochs of a harness, one after another."""

    subtask = FIRST

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        self.number = 0
        self.event = ControlEvent()
        """The latest event that a micro-batch has had."""

        self._before = ControlEvent()
        self._remembered: dict[str, dict[int, bytes]] = {}

    def begin(self, event: ControlEvent | None) -> None:
        """Begin an epoch, with its control event if it has one."""
        self._before, self.event = self.event, event or self.event

    def end(self, marks: Mapping[str, Mark]) -> None:
        """End an epoch, in which watermark generators emitted these marks."""
        for uid, mark in marks.items():
            kept = {**self._remembered.get(uid, {}), **mark.kept}
            self._remembered[uid] = {subtask: data for subtask, data in kept.items() if data is not None}
        self.number += 1

    def committed(self) -> int | None:
        return self.number - 1 if self.number else None

    def remembered(self) -> Mapping[str, Kept]:
        return self._remembered

    def watermark(self, uid: str, ahead: bool) -> int:
        event = self._before if ahead else self.event
        return event.watermarks.get(uid, MIN_TIMESTAMP)


class DrivenOperator:
    """One Python operator of a plan, and its state; `emit` is given records of an output by its tag.

    As on Spark, its functions are new ones in each micro-batch. They are opened where the first record or event of it
    comes, or where `begin` says so, and closed by `end`.
    """

    def __init__(
        self, plan: Plan, node: g.Node, emit: Emit, clock: Callable[[], int], store: MemoryStore | None = None
    ) -> None:
        self.program = single(plan, node)
        self.store = store or MemoryStore()
        self.metrics = Metrics()
        """What has been measured until the end of the last micro-batch."""

        self._emit, self._epoch = emit, InMemoryEpoch(clock)
        schemas = [output.layout.schema for output in self.program.outputs]
        routes = tuple((Route(number, schema, tuple(schema.names)),) for number, schema in enumerate(schemas))
        self._stage = Stage({HEAD: RoutedProgram(self.program, routes)}, self.program.pipeline)
        self._running: Pass | Level | None = None
        self._level: Level | None = None

    def begin(self) -> Pass | Level:
        """Open the program for a micro-batch."""
        if self._running is None:
            programs = self._stage.load()
            if self.program.keyed is None:
                self._running = Pass(programs, self._epoch, self._take)
            else:
                self._running = self._level = Level(programs, self._epoch, self._take, KEYS_PER_PAGE)
            self._running.open()
        return self._running

    def end(self) -> None:
        """End a micro-batch: close the program."""
        running, self._running = self._running, None
        if running is None:
            return
        marks: Mapping[str, Mark] = {}
        if isinstance(running, Pass):
            report = running.finish()
            self.metrics.add_later(report.metrics)
            marks = report.marks
        self._epoch.end(marks)
        running.close()

    def take(self, own: Sequence[Timed], event: ControlEvent | None = None, broadcast: Sequence[Timed] = ()) -> None:
        """Records behind a control event, which ends the input if it says so."""
        program, given = self.program, self.program.broadcast
        batches = [to_batch(program.pipeline, program.input, own)] if own else []
        around = [to_batch(program.pipeline, given.layout, broadcast)] if broadcast and given is not None else []
        self._epoch.begin(event)
        running = self.begin()
        if isinstance(running, Level):
            micro_batch = MicroBatch(event=event, behind=Arrived(batches, around))
            self.metrics.add_later(running.run(HEAD, 0, self.store, micro_batch).metrics)
            return
        for batch in batches:
            running.push(HEAD, 0, batch)

    def contents(self) -> Iterator[Block]:
        """What the state of all keys holds."""
        if self.program.keyed is not None:
            yield from self.groups.contents(self.store)

    @property
    def groups(self) -> KeyGroups:
        """The driver of a keyed operator, of the last micro-batch."""
        if self._level is None:
            self.begin()
            self.end()
        assert self._level is not None
        return self._level.of(HEAD)

    def close(self, failure: BaseException | None = None) -> None:
        """Close the program's functions, also after a failure."""
        running, self._running = self._running, None
        if running is not None:
            running.close(failure)

    def _take(self, route: Route, batch: pa.RecordBatch, ahead: bool, group: int | None) -> None:
        output = self.program.outputs[route.target]
        self._emit(output.tag, to_timed(output.layout, batch))
