"""Drives one operator of a plan in memory, as STREAMING drives it: records and control events in, records out.

A keyed operator runs under the driver of Spark's workers, with one key group whose state is encoded into pages as in a
checkpoint, so that what a checkpoint would refuse is refused here. Its functions are shipped as to Spark's workers, and
live for a micro-batch. What both harnesses, of a pipeline and of an operator, are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from random import Random
from typing import Any, TypeVar

import pyarrow as pa

from dagster_unified.by_value import InThisProcess, sent
from dagster_unified.errors import UnsupportedError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.execution_graph import (
    ExecutionEdge,
    ExecutionGraph,
    channel_selector,
    channels,
    keys_program,
    program,
    route,
)
from dagster_unified.graph.nodes import ExchangeKind, IterationNode
from dagster_unified.graph.operator_state import CHOOSING
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import Plan, Port, plan_in_one
from dagster_unified.operators.drivers.group import MemoryStore
from dagster_unified.operators.drivers.key_groups import NOTHING, Arrived, ControlEvent, KeyGroups, MicroBatch
from dagster_unified.operators.functions.base import Subtask
from dagster_unified.operators.iteration import Level
from dagster_unified.operators.layout import TIMESTAMP, StreamLayout
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.program.run import RunningProgram
from dagster_unified.operators.program.step import Output, Program
from dagster_unified.operators.routing import ByKey, ChannelSelector, Rebalance, Route, Sender
from dagster_unified.operators.state.pages import Block
from dagster_unified.operators.time import MIN_TIMESTAMP
from dagster_unified.operators.watermarks import Mark

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
    ports = tuple(Port(node.id, tag) for tag in tags(plan, node))
    made = program(plan, node.name, (node.id,), ports)
    bare = tuple(
        replace(output, layout=StreamLayout(output.layout.records, output.layout.timestamped))
        for output in made.outputs
    )
    return replace(made, outputs=bare)


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


_KEYS_PER_PAGE = 8
"""A harness's micro-batches are of a record or two: small pages keep what is read and written for each small."""


_FIRST = -1
"""The key group that leads. Where key groups are apart it has no key, and else all of them."""


class Driven:
    """A program of a plan in one subtask, and its state.

    `emit` is given what leaves it: whether it is ahead of the micro-batch's control event, an output's number, a batch.
    As on Spark, its functions are new ones in each micro-batch: they are opened where the first record or event of it
    comes, or where `begin` says so, and closed by `end`. With `key_groups` there are so many, each with its own copy of
    the broadcast state.
    """

    def __init__(
        self,
        program: Program,
        emit: Callable[[bool, int, pa.RecordBatch], None],
        clock: Callable[[], int],
        store: MemoryStore | None = None,
        subtask: int = 0,
        key_groups: int = 0,
    ) -> None:
        self.program = program
        self.metrics = Metrics()
        """What has been measured until the end of the last micro-batch."""

        self.store = store or MemoryStore()
        self._stores = {_FIRST: self.store}
        """The state of each key group; it shows where there is broadcast state that there are several."""

        self._key_groups = key_groups
        self._emit, self._clock, self._subtask = emit, clock, subtask
        self._load = shipped(self.program, [self.program], self.program.pipeline)
        self._groups: KeyGroups | None = None
        self._running: RunningProgram | None = None
        self._remembered: dict[str, bytes] = {}
        self._event = ControlEvent()
        """The latest that a micro-batch has had."""

        self._ahead = False

        self.listens = any(True for step in self.program.steps for _ in step.listeners())
        """Whether a function of it hears of committed epochs."""

    def begin(self, committed: int | None = None) -> None:
        """Open the program for a micro-batch; its functions hear of the epoch that was committed before, if any.

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
            self._running = RunningProgram(program, self._leave, self._clock, place, True, kept, self._watermark)
        if committed is not None:
            self._running.notify(committed)

    def end(self) -> dict[str, Mark]:
        """End a micro-batch: close the program, and return what its watermark generators emitted."""
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
        self, ahead: Arrived, event: ControlEvent | None = None, behind: Arrived = NOTHING, committed: int | None = None
    ) -> int | None:
        """Records ahead of a control event, the event, and records behind it; the end of the input comes last.

        Returns when its earliest processing-time timer is due.
        """
        self.begin(committed)
        running = self._running
        assert running is not None
        if self._groups is not None:
            return self._run_groups(self._groups, ahead, event, behind)
        for self._ahead, arrived in ((True, ahead), (False, behind)):
            for batch in arrived.keyed:
                running.push(batch)
            running.flush()
            self._event = event or self._event
        return None

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
        """Closes the program's functions, also after a failure."""
        running, self._running = self._running, None
        if running is not None:
            running.close(failure)

    def _watermark(self, uid: str) -> int:
        return self._event.watermarks.get(uid, MIN_TIMESTAMP)

    def _leave(self, number: int, batch: pa.RecordBatch) -> None:
        self._emit(self._ahead if self._groups is None else self._groups.ahead, number, batch)

    def _run_groups(self, groups: KeyGroups, ahead: Arrived, event: ControlEvent | None, behind: Arrived) -> int | None:
        sides = [self._by_group(groups, ahead.keyed), self._by_group(groups, behind.keyed)]
        for number in set().union(*sides) - self._stores.keys():
            self._stores[number] = MemoryStore(self.store.pages)
        dues = []
        for number in sorted(self._stores):
            before, after = (side.get(number, ()) for side in sides)
            leads = number == _FIRST and self._subtask == 0
            given = MicroBatch(Arrived(before, ahead.broadcast), event, Arrived(after, behind.broadcast), leads=leads)
            dues.append(groups.run(self._stores[number], given))
        return min((due for due in dues if due is not None), default=None)

    def _by_group(self, groups: KeyGroups, batches: Sequence[pa.RecordBatch]) -> Mapping[int, Sequence[pa.RecordBatch]]:
        if not self._key_groups or not batches:
            return {_FIRST: batches}
        where = groups.operator.where
        selector, sender = ByKey(groups.keyed, groups.program.input, where, self._key_groups), Sender(self._subtask)
        found: dict[int, list[pa.RecordBatch]] = {}
        for batch in batches:
            for number, part in selector.split(batch, sender):
                found.setdefault(number, []).append(part)
        return found


class DrivenOperator(Driven):
    """One Python operator of a plan; it takes records, and `emit` is given those of an output by its tag."""

    def __init__(
        self, plan: Plan, node: g.Node, emit: Emit, clock: Callable[[], int], store: MemoryStore | None = None
    ) -> None:
        self._emit_records = emit
        super().__init__(single(plan, node), self._take, clock, store)

    def take(
        self, own: Sequence[Timed], event: ControlEvent | None = None, broadcast: Sequence[Timed] = ()
    ) -> int | None:
        """As `run`."""
        program, given = self.program, self.program.broadcast
        batches = [to_batch(program.pipeline, program.input, own)] if own else []
        around = [to_batch(program.pipeline, given.layout, broadcast)] if broadcast and given is not None else []
        return self.run(Arrived(batches, around), event)

    def _take(self, ahead: bool, number: int, batch: pa.RecordBatch) -> None:
        output = self.program.outputs[number]
        self._emit_records(output.tag, to_timed(output.layout, batch))


Streams = dict[Port, dict[int, list[pa.RecordBatch]]]
"""The batches of streams, in the columns of their layouts, by subtask. Where no exchange chose it, that is the first.
"""


class Order:
    """Shuffles records that come in no defined order."""

    def __init__(self, seed: int | None) -> None:
        self._random = None if seed is None else Random(seed)

    def shuffled(self, records: Iterable[Any]) -> list[Any]:
        """The records in any order."""
        found = list(records)
        if self._random is not None:
            self._random.shuffle(found)
        return found

    def merged(self, streams: Iterable[Sequence[Any]]) -> list[Any]:
        """The records of several streams in any order that keeps that of each."""
        streams = [stream for stream in streams if stream]
        if len(streams) < 2:
            return list(streams[0]) if streams else []
        whose = self.shuffled([number for number, stream in enumerate(streams) for _ in stream])
        nexts = [iter(stream) for stream in streams]
        return [next(nexts[number]) for number in whose]


class Inputs:
    """What reaches the vertices of an execution graph.

    In BATCH (`spreads`) a stream that is forwarded keeps its own order, one that is spread does not; in STREAMING each
    keeps its own in a micro-batch.
    """

    def __init__(self, graph: ExecutionGraph, order: Order, spreads: bool) -> None:
        self.plan, self.order = graph.plan, order
        edges = graph.edges
        self.layouts = {head: self.plan.input_layout(head) for head, found in edges.items() if found}
        """The columns of each vertex's main input."""

        self._made: dict[Port, tuple[StreamLayout, Callable[[], Program] | None]] = {}
        """How records of a stream become Arrow: their columns, and what computes their keys."""

        self._edges = {
            head: [(edge.port, self.plan.layout(edge.port)) for edge in found]
            for head, found in edges.items()
            if isinstance(self.plan.graph.node(head), IterationNode)
        }
        self._main = {head: self._routes(found, False) for head, found in edges.items()}
        self._broadcast = {head: self._routes(found, True) for head, found in edges.items()}
        self._shuffled = {
            head
            for head, found in edges.items()
            if spreads and any(e.kind is not ExchangeKind.FORWARD for e in found if not e.is_broadcast)
        }

    def batch(self, port: Port, timed: Sequence[Timed]) -> pa.RecordBatch:
        """Records of a stream as Arrow, with the keys that copies of functions compute."""
        if port not in self._made:
            layout = self.plan.layout(port)
            bare = StreamLayout(layout.records, layout.timestamped)
            keys = keys_program(self.plan, "key_by", layout)
            self._made[port] = bare, shipped(keys, [keys], self.plan.name) if layout.keys else None
        bare, keying = self._made[port]
        batch = to_batch(self.plan.name, bare, timed)
        return batch if keying is None else with_keys(keying(), batch)

    def _routes(self, edges: Iterable[ExecutionEdge], broadcast: bool) -> list[tuple[Port, Route]]:
        layout_of = self.plan.broadcast_layout if broadcast else self.plan.input_layout
        return [
            (e.port, route(self.plan, e.edge, 0, layout_of(e.edge.target), _selector(self.plan, e)))
            for e in edges
            if e.is_broadcast == broadcast
        ]

    def of(self, head: int, streams: Streams) -> dict[int, pa.RecordBatch]:
        """The main input of a vertex, by subtask."""
        arrived = [_arrived(way, streams.get(port, {})) for port, way in self._main[head]]
        found = {}
        for subtask in sorted(set().union(*arrived)):
            found[subtask] = self._united([own[subtask] for own in arrived if subtask in own], head in self._shuffled)
        return found

    def records(self, head: int, streams: Streams) -> list[Timed]:
        """The main input of a vertex as records, of all subtasks."""
        return [timed for batch in self.of(head, streams).values() for timed in to_timed(self.layouts[head], batch)]

    def of_iteration(self, head: int, streams: Streams) -> list[list[Timed]]:
        """What comes to an iteration over each edge."""
        return [
            [timed for batch in in_one(streams.get(port, {})) for timed in to_timed(layout, batch)]
            for port, layout in self._edges[head]
        ]

    def broadcast(self, head: int, streams: Streams) -> pa.RecordBatch | None:
        """The broadcast records of a vertex, if there are any; each of its subtasks gets all of them."""
        arrived = [_arrived(way, streams.get(port, {})) for port, way in self._broadcast[head]]
        united = [pa.concat_batches(list(own.values())) for own in arrived if own]
        return self._united(united, False) if united else None

    def _united(self, batches: Sequence[pa.RecordBatch], shuffled: bool) -> pa.RecordBatch:
        starts = [sum(batch.num_rows for batch in batches[:number]) for number in range(len(batches))]
        rows = [range(start, start + batch.num_rows) for start, batch in zip(starts, batches, strict=True)]
        order = self.order.shuffled(chain.from_iterable(rows)) if shuffled else self.order.merged(rows)
        whole = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        return whole if order == list(range(len(order))) else whole.take(pa.array(order, pa.int64()))


def in_one(stream: Mapping[int, Sequence[pa.RecordBatch]]) -> list[pa.RecordBatch]:
    """The batches of all subtasks."""
    return [batch for subtask in sorted(stream) for batch in stream[subtask]]


def _selector(plan: Plan, edge: ExecutionEdge) -> ChannelSelector | None:
    """The subtask of what comes over an edge: where no exchange chooses it, there is one only."""
    if edge.kind is ExchangeKind.FORWARD and {edge.edge.source, edge.edge.target} <= set(plan.subtasks):
        return None
    if edge.is_broadcast or edge.kind not in CHOOSING:
        return Rebalance(1)
    return channel_selector(plan, edge.edge, channels(plan, edge.edge))


def _arrived(way: Route, stream: Mapping[int, Sequence[pa.RecordBatch]]) -> dict[int, pa.RecordBatch]:
    """What comes of a stream along a route, by subtask."""
    found: dict[int, list[pa.RecordBatch]] = {}
    for subtask in sorted(stream):
        sender = Sender(subtask)
        for batch in stream[subtask]:
            for channel, part in way.split(way.aligned(batch), sender):
                found.setdefault(channel, []).append(part)
    return {channel: parts[0] if len(parts) == 1 else pa.concat_batches(parts) for channel, parts in found.items()}
