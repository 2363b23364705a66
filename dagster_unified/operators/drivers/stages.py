"""The stages of a STREAMING query in one task: a pass through programs, and a level of keyed operators.

An engine gives a stage the records of a micro-batch by lane and group, and takes what leaves it along routes, and a
report. It also says what the stage asks of the epoch. Knows no engine: Spark's workers bring packed rows, the harness
brings batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

import msgspec
import pyarrow as pa

from dagster_unified.operators.drivers.key_groups import KeyGroups, MicroBatch
from dagster_unified.operators.functions.base import Subtask
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.operator import PageStore
from dagster_unified.operators.program.blocks import close_each
from dagster_unified.operators.program.run import RunningProgram
from dagster_unified.operators.program.step import CompiledProgram, Program, compile_program
from dagster_unified.operators.routing import Route, RoutedProgram
from dagster_unified.operators.state.pages import KEYS_PER_PAGE
from dagster_unified.operators.watermarks import Kept, Mark, slowest

HEAD = 0
"""What stands for the lane of a source's rows, which have none yet."""

Leave = Callable[[Route, pa.RecordBatch, bool, "int | None"], None]
"""Takes a batch that goes along a route, before the micro-batch's control event or after it.

It comes from a group, or from None where an exchange did not choose one.
"""


Value = TypeVar("Value", covariant=True)


class Shipped(Protocol[Value]):
    """Something that was shipped to where it runs."""

    def load(self) -> Value:
        """Return it; what an author's function may keep is in no other that was loaded."""


@dataclass(frozen=True)
class Programs:
    """The programs of a stage, by lane."""

    shared: Mapping[int, RoutedProgram] = field(default_factory=dict)
    """Those of which a task has one instance."""

    in_subtasks: Mapping[int, Shipped[RoutedProgram]] = field(default_factory=dict)
    """Those of which each subtask that an exchange chose has an instance, with functions of its own."""

    compiled: dict[int, CompiledProgram] = field(default_factory=dict)
    """Those that have been opened, which outlive a micro-batch where a process goes on with this."""

    def __contains__(self, lane: int) -> bool:
        return lane in self.shared or lane in self.in_subtasks

    def load(self, lane: int) -> RoutedProgram:
        """The program of a lane."""
        return self.shared[lane] if lane in self.shared else self.in_subtasks[lane].load()

    def compile(self, lane: int, program: Program) -> CompiledProgram:
        """Compile the program of a lane, if it is not compiled yet."""
        compiled = self.compiled[lane] = compile_program(program, self.compiled.get(lane))
        return compiled


class Epoch(Protocol):
    """What a stage asks about the epoch that it works on."""

    @property
    def subtask(self) -> Subtask:
        """The task."""

    def clock(self) -> int:
        """The processing time, in milliseconds since the epoch of Unix."""

    def committed(self) -> int | None:
        """The epoch that was committed last; None before the first."""

    def remembered(self) -> Mapping[str, Kept]:
        """What watermark generators kept in the micro-batch before."""

    def watermark(self, uid: str, before_event: bool) -> int:
        """How far event time is for an operator; `before_event`, how far it was before the control event."""


class Report(msgspec.Struct):
    """The report of one partition, or merged from many.

    `due` is the earliest pending processing-time timer, in milliseconds since the epoch.
    """

    metrics: Metrics = msgspec.field(default_factory=Metrics)
    due: int | None = None
    read: dict[str, int] = {}
    """The records that were read from each source, by its uid."""

    marks: dict[str, Mark] = {}
    """The marks of watermark generators, by their assigner's uid."""

    parts: dict[str, dict[str, int]] = {}
    """The last event time of each part of a source, such as a partition of a topic, by the assigner's uid.

    '' stands for sources without parts.
    """

    @property
    def rows(self) -> int:
        """The records that were read from all sources."""
        return sum(self.read.values())

    def read_from(self, source: str, records: int) -> None:
        """Count records that were read from a source."""
        if records:
            self.read[source] = self.read.get(source, 0) + records

    def saw_part(self, part: str, last_event_times: Mapping[str, int]) -> None:
        """Note the last event times that assigners saw in one part of a source."""
        for uid, moment in last_event_times.items():
            times = self.parts.setdefault(uid, {})
            times[part] = max(moment, times.get(part, moment))

    def mark(self, marks: Mapping[str, Mark]) -> None:
        """Note the marks of more watermark generators."""
        self.marks = {uid: slowest(m[uid] for m in (self.marks, marks) if uid in m) for uid in {**self.marks, **marks}}

    def add(self, other: Report) -> None:
        """Add the report of another partition."""
        self.metrics.add(other.metrics)
        self.due = min((due for due in (self.due, other.due) if due is not None), default=None)
        for source, records in other.read.items():
            self.read_from(source, records)
        self.mark(other.marks)
        for uid, times in other.parts.items():
            for part, moment in times.items():
                self.saw_part(part, {uid: moment})

    def empty(self) -> bool:
        """Whether there is nothing to report."""
        return self.due is None and not self.read and not self.marks and self.metrics.empty()

    def encode(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self)


def merge_reports(reports: Iterable[bytes | Report]) -> Report:
    """The totals over several reports, as they are or as they were encoded."""
    total = Report()
    for report in reports:
        total.add(report if isinstance(report, Report) else msgspec.json.decode(report, type=Report))
    return total


Instance = TypeVar("Instance", RunningProgram, KeyGroups)


class _Stage(ABC, Generic[Instance]):
    """The instances of a stage's programs, each opened where it is first asked for."""

    def __init__(self, programs: Programs, epoch: Epoch, leave: Leave) -> None:
        self.programs, self._epoch, self._leave = programs, epoch, leave
        self._instances: dict[tuple[int, int | None], Instance] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def close(self, failure: BaseException | None = None) -> None:
        """Close the author's functions, also after a failure."""
        close_each(self._instances.values(), failure)

    def open(self) -> None:
        """Open the programs that do not wait for the records of a subtask."""
        for lane in self.programs.shared:
            self.of(lane)

    def of(self, lane: int, group: int = 0) -> Instance:
        """The instance of a lane's program; where subtasks have one each, that of the subtask `group`."""
        number = group if lane in self.programs.in_subtasks else None
        instance = self._instances.get((lane, number))
        if instance is None:
            subtask = self._epoch.subtask if number is None else self._epoch.subtask._replace(number=number)
            routed = self.programs.load(lane)
            compiled = self.programs.compile(lane, routed.program)
            instance = self._instances[lane, number] = self._opened(routed, compiled, number, subtask)
        return instance

    @abstractmethod
    def _opened(
        self, routed: RoutedProgram, compiled: CompiledProgram, number: int | None, subtask: Subtask
    ) -> Instance:
        """An instance of a program; its `number` where subtasks have one each."""

    def _notify(self, running: RunningProgram) -> None:
        """Tell the functions that need it which epoch was committed last."""
        if running.program.counts_epochs and (committed := self._epoch.committed()) is not None:
            running.notify(committed)


class Pass(_Stage[RunningProgram]):
    """Programs without a key, through which the records of a micro-batch pass."""

    def __init__(self, programs: Programs, epoch: Epoch, leave: Leave, report: Report | None = None) -> None:
        """What is measured is added to `report`, if there is one already."""
        super().__init__(programs, epoch, leave)
        self._before_event = False
        self.report = Report() if report is None else report

    def push(self, lane: int, group: int, batch: pa.RecordBatch, before_event: bool = False) -> None:
        """Run a batch through the program of its lane."""
        if before_event is not self._before_event:
            self._flush()
            self._before_event = before_event
        self.of(lane, group).push(batch)

    def finish(self, part: str | None = None) -> Report:
        """End the micro-batch, and return its report; `part` is that of the source behind which the pass is."""
        self._flush()
        for running in self._instances.values():
            metrics = running.report()
            if part is not None:
                self.report.saw_part(part, metrics.last_event_times)
            self.report.metrics.add(metrics)
            self.report.mark(running.end_of_batch())
        return self.report

    def _flush(self) -> None:
        for running in self._instances.values():
            running.flush()

    def _opened(
        self, routed: RoutedProgram, compiled: CompiledProgram, number: int | None, subtask: Subtask
    ) -> RunningProgram:
        def emit(output: int, batch: pa.RecordBatch) -> None:
            for route in routed.routes[output]:
                self._leave(route, batch, self._before_event, number)

        def watermark(uid: str) -> int:
            return self._epoch.watermark(uid, self._before_event)

        remembered = self._epoch.remembered() if any(step.remembers for step in routed.program.steps) else None
        running = RunningProgram(
            routed.program, emit, self._epoch.clock, subtask, True, remembered, watermark, compiled
        )
        self._notify(running)
        return running


class Level(_Stage[KeyGroups]):
    """Keyed operators, each over one key group after another."""

    def __init__(self, programs: Programs, epoch: Epoch, leave: Leave, keys_per_page: int = KEYS_PER_PAGE) -> None:
        super().__init__(programs, epoch, leave)
        self._keys_per_page = keys_per_page
        self._group = 0

    def run(self, lane: int, group: int, store: PageStore, micro_batch: MicroBatch) -> Report:
        """Run a micro-batch of one key group of a lane, and return its report."""
        groups, self._group = self.of(lane, group), group
        groups.running.enter(group)
        due = groups.run(store, micro_batch)
        return Report(groups.running.report(), due)

    def _opened(
        self, routed: RoutedProgram, compiled: CompiledProgram, number: int | None, subtask: Subtask
    ) -> KeyGroups:
        def emit(output: int, batch: pa.RecordBatch) -> None:
            for route in routed.routes[output]:
                self._leave(route, batch, groups.before_event, self._group)

        groups = KeyGroups(routed.program, emit, self._epoch.clock, subtask, self._keys_per_page, compiled)
        self._notify(groups.running)
        return groups
