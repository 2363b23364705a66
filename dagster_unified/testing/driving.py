"""Drives one operator of a plan in memory, as STREAMING drives it: records and control events in, records out.

A keyed operator runs under the driver of Spark's workers, with one key group whose state is encoded into pages as in a
checkpoint, so that what a checkpoint would refuse is refused here. What both harnesses, of a pipeline and of an
operator, are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, replace
from typing import Any

import pyarrow as pa

from dagster_unified.engine.translate import broadcast_input, input_layout, keyed_input, keyed_options, step
from dagster_unified.errors import UnsupportedError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import Plan, plan
from dagster_unified.operators.drivers.group import MemoryStore
from dagster_unified.operators.drivers.key_groups import Arrived, ControlEvent, KeyGroups, MicroBatch
from dagster_unified.operators.functions.base import Subtask
from dagster_unified.operators.layout import TIMESTAMP, StreamLayout
from dagster_unified.operators.program.run import RunningProgram
from dagster_unified.operators.program.spec import Output, Program

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


def instances(plan: Plan, node: g.Node) -> list[g.Node]:
    """A node for each subtask that an exchange may choose for its records, with a function of its own.

    Elsewhere the harness has one subtask.
    """
    return [node, *(_with_a_function_of_its_own(node) for _ in range(1, plan.subtasks.get(node.id, 1)))]


def _with_a_function_of_its_own(node: g.Node) -> g.Node:
    code = [id(given) for given in node.code()]
    given = {f.name: getattr(node, f.name) for f in fields(node)}
    return replace(node, **{name: deepcopy(value) for name, value in given.items() if id(value) in code})


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


class Driven:
    """One Python operator of a plan, opened; `emit` is given what leaves it."""

    def __init__(
        self,
        plan: Plan,
        node: g.Node,
        emit: Emit,
        clock: Callable[[], int],
        store: MemoryStore | None = None,
        subtask: int = 0,
    ) -> None:
        self.program = single(plan, node)
        self.node = node
        self.store = store or MemoryStore()
        self._emit, self._leads = emit, subtask == 0
        self._groups = (
            KeyGroups(self.program, self._leave, clock, Subtask(subtask), _KEYS_PER_PAGE)
            if self.program.keyed is not None
            else None
        )
        if self._groups is not None:
            self.running = self._groups.running
        else:
            self.running = RunningProgram(self.program, self._leave, clock, Subtask(subtask), generating=True)

    def run(
        self, own: Sequence[Timed], event: ControlEvent | None = None, broadcast: Sequence[Timed] = ()
    ) -> int | None:
        """Broadcast records, the operator's own, then a control event.

        Returns when its earliest processing-time timer is due.
        """
        if self._groups is None:
            if own:
                self.running.push(to_batch(self.program.pipeline, self.program.input, own))
            self.running.flush()
            return None
        batches = [to_batch(self.program.pipeline, self.program.input, own)] if own else []
        around = []
        if broadcast:
            assert self.program.broadcast is not None
            around = [to_batch(self.program.pipeline, self.program.broadcast.layout, broadcast)]
        return self._groups.run(self.store, MicroBatch(Arrived(batches, around), event, leads=self._leads))

    def notify(self, epoch: int) -> None:
        """Tells the operator's functions that an epoch is committed."""
        self.running.notify(epoch)

    @property
    def groups(self) -> KeyGroups:
        """The driver of a keyed operator."""
        assert self._groups is not None
        return self._groups

    def close(self, failure: BaseException | None = None) -> None:
        """Closes the operator's functions, also after a failure."""
        self.running.close(failure)

    def _leave(self, number: int, batch: pa.RecordBatch) -> None:
        output = self.program.outputs[number]
        self._emit(output.tag, to_timed(output.layout, batch))
