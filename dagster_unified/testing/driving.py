"""Drives one operator of a plan in memory, as STREAMING drives it: records and control events in, records out.

It runs as a stage of Spark's workers does; a keyed operator with one key group, whose state is encoded into pages as in
a checkpoint, so that what a checkpoint would refuse is refused here. Its functions are shipped as to Spark's workers,
and live for a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from dagster_unified.graph import nodes as g
from dagster_unified.graph.execution_graph import Link, program
from dagster_unified.graph.nodes import Port
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.drivers.group import MemoryStore
from dagster_unified.operators.drivers.key_groups import ControlEvent, GroupInput, KeyGroups, MicroBatch
from dagster_unified.operators.drivers.stages import HEAD, Level, Pass
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.program.step import Output, Program
from dagster_unified.operators.routing import Route, RoutedProgram
from dagster_unified.operators.state.pages import Block
from dagster_unified.operators.watermarks import Mark
from dagster_unified.testing.records import Timed, to_batch, to_timed
from dagster_unified.testing.streaming import KEYS_PER_PAGE, InMemoryEpoch, Stage

Emit = Callable[["str | None", list[Timed]], None]
"""Takes the records of an output, or of a side output by its tag."""


def single(plan: Plan, node: g.Node) -> Program:
    """The program of one node alone, with an output for each of its tags that something reads."""
    outputs = [Output(0, plan.layout(Port(node.id, tag)).without_keys, tag) for tag in tags(plan, node)]
    alone = program(plan, node.name, (Link(node.id),), outputs)
    return replace(alone, in_subtasks=node.id in plan.subtasks)


def tags(plan: Plan, node: g.Node) -> list[str | None]:
    """The outputs of a node that something reads, by their tags; the main one where nothing does."""
    read = dict.fromkeys(e.side_output for e in plan.graph.outputs(node.id))
    return list(read) or [None]


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

    def take(self, timed: Sequence[Timed], event: ControlEvent | None = None, broadcast: Sequence[Timed] = ()) -> None:
        """Records behind a control event, which ends the input if it says so."""
        program = self.program
        batches = [to_batch(program.pipeline, program.input, timed)] if timed else []
        around: list[pa.RecordBatch] = []
        if program.broadcast is not None and broadcast:
            around.append(to_batch(program.pipeline, program.broadcast.layout, broadcast))
        self._epoch.begin(event)
        running = self.begin()
        if isinstance(running, Level):
            micro_batch = MicroBatch(event=event, after_event=GroupInput(batches, around))
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

    def _take(self, route: Route, batch: pa.RecordBatch, before_event: bool, group: int | None) -> None:
        output = self.program.outputs[route.target]
        self._emit(output.tag, to_timed(output.layout, batch))
