"""Runs an iteration in memory, in several subtasks: as Spark runs it, with the records themselves for files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import pyarrow as pa

from dagster_unified.engine.iterations.loop import (
    Arrived,
    EndedEpoch,
    FeedbackGuard,
    IterationLoop,
    Levels,
    outputs_of,
)
from dagster_unified.graph import nodes as g
from dagster_unified.graph.loops import compile_loop
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.drivers.group import MemoryStore
from dagster_unified.operators.functions.base import Subtask
from dagster_unified.operators.iteration import (
    LevelResult,
    Loop,
    Message,
    SubtaskEpoch,
    into,
    run_subtask,
)
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.operators.metrics import Metrics, merge
from dagster_unified.operators.operator import PageStore
from dagster_unified.operators.routing import Sender, in_columns
from dagster_unified.testing.records import shipped

SUBTASKS = 2
"""Where an iteration has no parallelism of its own: what works in one subtask only is found."""


class HarnessLoop(IterationLoop[Message]):
    """The loop of an iteration in the harness."""

    def __init__(self, plan: Plan, node: g.IterationNode, clock: Callable[[], int]) -> None:
        self._node = node
        loop = compile_loop(plan, node, node.parallelism or plan.execution.parallelism or SUBTASKS)
        super().__init__(InMemory(loop, clock), not node.is_unbounded)
        multiplies = node.is_unbounded and plan.execution.mode == "STREAMING"
        self._guard = FeedbackGuard(loop.where, plan.execution.streaming.max_feedback) if multiplies else None
        self._last: EndedEpoch[Message] | None = None
        self._once: list[Message] = []
        self._replayed: list[Message] = []
        self._outputs: list[Message] = []
        self._micro_batches = 0
        self.metrics = Metrics()
        """What its operators have reported."""

    @property
    def last(self) -> EndedEpoch[Message] | None:
        return self._last

    @property
    def circulates(self) -> bool:
        """Whether something waits for the next epoch."""
        return bool(self._once) or (not self.is_bounded and self._last is not None and bool(self._last.fed_back))

    def arrived(self) -> Arrived[Message]:
        once, self._once = self._once, []
        return Arrived(once, self._replayed)

    def commit(self, ended: EndedEpoch[Message]) -> None:
        self._last = ended
        self._outputs += ended.outputs
        self.metrics.add_later(merge([ended.metrics]))
        if self._guard is not None:
            self._guard.check(ended.feedback)

    def micro_batch(self, inputs: Iterable[pa.RecordBatch | None], ends: bool) -> Iterator[list[pa.RecordBatch]]:
        """Run a micro-batch with what has come to each input, and yield what leaves by each output: BATCH has one."""
        self._take(inputs)
        ended = self.run(self._micro_batches, ends)
        self._micro_batches += 1
        self.metrics.add_later(ended.metrics)
        outputs, self._outputs = self._outputs + outputs_of(self.loop, ended.sent), []
        for buffer, tail in zip(self.loop.outputs, self._node.outputs, strict=True):
            schema = StreamLayout(tail.layout.records, self._node.timestamped).schema
            columns = tuple(name if name in tail.layout.schema.names else None for name in schema.names)
            yield [in_columns(message.batch, columns, schema) for message in outputs if message.buffer == buffer.number]

    def _take(self, inputs: Iterable[pa.RecordBatch | None]) -> None:
        """Send the records of the inputs to where they are read."""
        for number, (input_route, batch) in enumerate(zip(self.loop.inputs, inputs, strict=True)):
            if batch is None:
                continue
            taken = self._replayed if number in self.loop.replayed else self._once
            for subtask in range(self.loop.parallelism):
                rows = batch.take(pa.array(range(subtask, batch.num_rows, self.loop.parallelism), pa.int64()))
                if rows.num_rows:
                    taken += into(input_route, rows, Sender(subtask))


class _States:
    """The state of all key groups."""

    def __init__(self) -> None:
        self._stores: dict[tuple[int, int], MemoryStore] = {}
        self.subtask, self.subtasks = 0, 1

    def group(self, pass_number: int, group: int) -> PageStore:
        return self._stores.setdefault((pass_number, group), MemoryStore())

    def groups(self, pass_number: int) -> Sequence[int]:
        groups = sorted(group for number, group in self._stores if number == pass_number)
        return [group for group in groups if group % self.subtasks == self.subtask]


class InMemory(Levels[Message]):
    """Runs levels subtask after subtask, each with functions of its own, as if they had come to a worker."""

    def __init__(self, loop: Loop, clock: Callable[[], int]) -> None:
        self.loop, self._clock, self._states = loop, clock, _States()
        self._levels = [
            shipped(level, [body_pass.program for body_pass in level.passes], loop.where) for level in loop.levels
        ]

    def run(
        self, level: int, epoch: int, terminated: bool, inbox: Sequence[Message], replayed: Sequence[Message] = ()
    ) -> LevelResult[Message]:
        result: LevelResult[Message] = LevelResult()
        for subtask in range(self.loop.levels[level].subtasks):
            result.add(self.run_subtask(level, subtask, epoch, terminated, [*replayed, *inbox]))
        return result

    def run_subtask(
        self, number: int, subtask: int, epoch: int, terminated: bool, messages: Sequence[Message]
    ) -> LevelResult[Message]:
        """Run a level of an epoch in one subtask, of what was sent to all."""
        level = self.loop.levels[number]
        self._states.subtask, self._states.subtasks = subtask, level.subtasks
        inbox: dict[int, list[tuple[int, pa.RecordBatch]]] = defaultdict(list)
        for buffer, target, batch in messages:
            if level.is_for(subtask, buffer, target):
                inbox[buffer].append((target, batch))
        return run_subtask(
            SubtaskEpoch(
                self._levels[number].load(),
                Subtask(subtask),
                epoch,
                terminated,
                inbox,
                self._states,
                self._clock,
                is_stale=self.loop.staleness > 0,
            )
        )
