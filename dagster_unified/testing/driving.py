"""Drives one operator of a plan in memory, as STREAMING drives it: records and control events in, records out.

A keyed operator runs under the driver of Spark's workers, with one key group whose state is encoded into pages as in a
checkpoint, so that what a checkpoint would refuse is refused here. Its functions are shipped as to Spark's workers, and
live for a micro-batch. What both harnesses, of a pipeline and of an operator, are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from dagster_unified.by_value import InThisProcess, sent
from dagster_unified.errors import UnsupportedError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import Plan, plan
from dagster_unified.graph.programs import broadcast_input, input_layout, keyed_input, keyed_options, step
from dagster_unified.operators.drivers.group import MemoryStore
from dagster_unified.operators.drivers.key_groups import Arrived, ControlEvent, KeyGroups, MicroBatch
from dagster_unified.operators.functions.base import Subtask
from dagster_unified.operators.keys import key_groups
from dagster_unified.operators.layout import TIMESTAMP, StreamLayout
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.program.run import RunningProgram
from dagster_unified.operators.program.spec import Output, Program
from dagster_unified.operators.rounds.spec import Level
from dagster_unified.operators.state.pages import Block
from dagster_unified.operators.time import MIN_TIMESTAMP
from dagster_unified.operators.watermarks import Mark

Timed = tuple[Any, "int | None"]
"""A record and its event time."""

Emit = Callable[["str | None", list[Timed]], None]
"""Takes the records of an output, or of a side output by its tag."""


def planned(graph: g.Graph, mode: str, options: Mapping[str, Any] | None) -> Plan:
    """Return the plan that a harness runs; raise `UnsupportedError` where it starts from a savepoint or leaves one."""
    decided = plan(graph, Configuration.of({**(options or {}), "execution.runtime-mode": mode}))
    if decided.execution.has_savepoint:
        key = "execution.savepoint.path" if decided.execution.goes_on else "execution.state-recovery.path"
        raise UnsupportedError(
            f"{decided.name}: {key} is set, and the harness has neither source positions nor savepoints; leave the"
            " option out, or run the pipeline on Spark with Pipeline.execute()"
        )
    return decided


def single(plan: Plan, node: g.Node, last_event_time: int | None = None) -> Program:
    """The program of one node alone, with an output for each of its tags that something reads."""
    layout = input_layout(plan, node.id)
    outputs = []
    for tag in tags(plan, node):
        records = plan.graph.port_type(node.id, tag) if tag or node.records else layout.records
        assert records is not None
        outputs.append(Output(0, StreamLayout(records, node.timestamped), tag))
    keyed = keyed_input(node, layout.records) if node.key is not None else None
    return Program(
        plan.name,
        node.name,
        layout,
        (step(plan, node, -1, None),),
        tuple(outputs),
        keyed,
        keyed_options(plan.execution, last_event_time),
        broadcast_input(plan, node),
    )


Value = TypeVar("Value", Program, Level)


def shipped(value: Value, programs: Sequence[Program], where: str) -> Callable[[], Value]:
    """Return what makes copies of programs, as Spark's workers get them; raise `PipelineError` as Spark would.

    What its functions keep is not in the next copy, and not in the process's own. The library's need no copies.
    """
    if all(is_library(program) for program in programs):
        return lambda: value
    return sent(programs, lambda: InThisProcess(value), where).load


def is_library(program: Program) -> bool:
    """Whether there is no code of the author's in a program."""
    return not program.input.keys and all(step.function is None for step in program.steps)


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
    if not layout.keys:
        return batch
    if not timed:
        return pa.RecordBatch.from_pylist([], layout.schema)
    found: list[pa.RecordBatch] = []
    program = Program(pipeline, "key_by", bare, (), (Output(-1, layout),))
    with RunningProgram(program, lambda _, keyed: found.append(keyed), lambda: 0) as keying:
        keying.push(batch)
    return found[0]


def to_timed(layout: StreamLayout, batch: pa.RecordBatch) -> list[Timed]:
    """The inverse, without keys."""
    times = batch.column(TIMESTAMP).to_pylist() if layout.timestamped else [None] * batch.num_rows
    return list(zip(layout.records.from_batch(batch.select(list(layout.records.names))), times, strict=True))


_KEYS_PER_PAGE = 8
"""A harness's micro-batches are of a record or two: small pages keep what is read and written for each small."""


_FIRST = -1
"""The key group that leads. Where key groups are apart it has no key, and else all of them."""


class Driven:
    """One Python operator of a plan, and its state; `emit` is given what leaves it.

    As on Spark, its functions are new ones in each micro-batch: they are opened where the first record or event of it
    comes, or where `begin` says so, and closed by `end`.
    """

    def __init__(
        self,
        plan: Plan,
        node: g.Node,
        emit: Emit,
        clock: Callable[[], int],
        store: MemoryStore | None = None,
        subtask: int = 0,
        apart: bool = False,
    ) -> None:
        self.program = single(plan, node)
        self.metrics = Metrics()
        """What has been measured until the end of the last micro-batch."""

        self.store = store or MemoryStore()
        self._apart = apart and node.has_broadcast_input and node.key not in (None, g.Key())
        self._stores = {_FIRST: self.store}
        """The state of each key group; it shows where there is broadcast state that there are several."""

        self._key_groups = plan.execution.streaming.max_parallelism
        self._emit, self._clock, self._subtask = emit, clock, subtask
        self._load = shipped(self.program, [self.program], self.program.pipeline)
        self._groups: KeyGroups | None = None
        self._running: RunningProgram | None = None
        self._remembered: dict[str, bytes] = {}
        self._uid, self._watermark = node.uid, MIN_TIMESTAMP

    @property
    def listens(self) -> bool:
        """Whether a function of it hears of committed epochs."""
        return any(True for step in self.program.steps for _ in step.listeners())

    def begin(self, committed: int | None = None) -> None:
        """Open the operator for a micro-batch; its functions hear of the epoch that was committed before, if any.

        Watermark generators go on from what they kept in the micro-batch before.
        """
        if self._running is not None:
            return
        program = self._load()
        if program.keyed is not None:
            self._groups = KeyGroups(program, self._leave, self._clock, Subtask(self._subtask), _KEYS_PER_PAGE)
            self._running = self._groups.running
        else:
            place, kept = Subtask(self._subtask), {uid: {self._subtask: data} for uid, data in self._remembered.items()}
            self._running = RunningProgram(
                program, self._leave, self._clock, place, True, kept, lambda _: self._watermark
            )
        if committed is not None:
            self._running.notify(committed)

    def end(self) -> dict[str, Mark]:
        """End a micro-batch: close the operator, and return what its watermark generators emitted."""
        running = self._running
        if running is None:
            return {}
        marks = running.end_of_batch()
        for uid, mark in marks.items():
            if self._subtask in mark.kept:
                self._remembered[uid] = mark.kept[self._subtask] or b""
        self.metrics.add_later(running.report())
        self._running = None
        running.close()
        return marks

    def run(
        self,
        own: Sequence[Timed],
        event: ControlEvent | None = None,
        broadcast: Sequence[Timed] = (),
        committed: int | None = None,
    ) -> int | None:
        """Broadcast records, the operator's own, then a control event.

        Returns when its earliest processing-time timer is due.
        """
        self.begin(committed)
        running = self._running
        assert running is not None
        program = running.program
        batches = [to_batch(program.pipeline, program.input, own)] if own else []
        if program.keyed is None:
            for batch in batches:
                running.push(batch)
            running.flush()
            if event is not None:
                self._watermark = max(self._watermark, event.watermarks.get(self._uid, MIN_TIMESTAMP))
            return None
        around = []
        if broadcast:
            assert program.broadcast is not None
            around = [to_batch(program.pipeline, program.broadcast.layout, broadcast)]
        return self._run_groups(batches, event, around)

    def contents(self) -> Iterator[Block]:
        """What the state of all keys holds."""
        if self.program.keyed is not None:
            yield from self.groups.contents(self.store)

    @property
    def groups(self) -> KeyGroups:
        """The driver of a keyed operator, of the last micro-batch."""
        if self._groups is None:
            self.begin()
            self.end()
        assert self._groups is not None
        return self._groups

    def close(self, failure: BaseException | None = None) -> None:
        """Closes the operator's functions, also after a failure."""
        running, self._running = self._running, None
        if running is not None:
            running.close(failure)

    def _run_groups(
        self, batches: Sequence[pa.RecordBatch], event: ControlEvent | None, broadcast: Sequence[pa.RecordBatch]
    ) -> int | None:
        assert self._groups is not None
        own: Mapping[int, Sequence[pa.RecordBatch]] = {_FIRST: batches}
        if self._apart:
            own = self._by_group(self._groups, batches)
            for number in own.keys() - self._stores.keys():
                self._stores[number] = MemoryStore(self.store.pages)
        dues = []
        for number in sorted(self._stores):
            arrived = Arrived(own.get(number, ()), broadcast)
            leads = number == _FIRST and self._subtask == 0
            dues.append(self._groups.run(self._stores[number], MicroBatch(arrived, event, leads=leads)))
        return min((due for due in dues if due is not None), default=None)

    def _by_group(self, groups: KeyGroups, batches: Sequence[pa.RecordBatch]) -> dict[int, list[pa.RecordBatch]]:
        found: dict[int, list[pa.RecordBatch]] = {}
        for batch in batches:
            numbers = key_groups(batch, groups.keyed, groups.program.input, groups.operator.where, self._key_groups, {})
            for number in numbers.unique():
                found.setdefault(number.as_py(), []).append(batch.filter(pc.equal(numbers, number)))
        return found

    def _leave(self, number: int, batch: pa.RecordBatch) -> None:
        output = self.program.outputs[number]
        self._emit(output.tag, to_timed(output.layout, batch))
