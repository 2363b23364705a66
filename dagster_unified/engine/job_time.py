"""The job's time, kept on the driver.

Watermarks come from what each micro-batch reported, and processing-time timers from the clock.

An operator's watermark is the smallest of its nearest assigners'; an assigner's is its latest event time less the
strategy's bound, or what its watermark generator emitted. That of a stream which another query hands on was handed on
with it. Directly behind a source with parts, such as the partitions of a topic, the latest event time is that of the
part which is furthest behind. An assigner that is idle, by its generator or for longer than its strategy allows, does
not hold others back; nor does a part, nor a stream that is handed on while all assigners before it are idle.

A source that has been read to its end is at the end of time, as in Flink: it holds nobody back, and an operator all of
whose sources have ended is at the end of its input. Where the run leaves its state to another run, which goes on behind
the end of its sources, such a source may still speak: it holds others back, unless its strategy lets it be idle. Knows
the plan, not Spark; a control event is what it returns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from threading import Lock

import msgspec

from dagster_unified.connectors.protocol.positions import ALL
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.graph.nodes import IterationNode, Node, QueryInputNode, QueryOutputNode
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.drivers.key_groups import ControlEvent
from dagster_unified.operators.drivers.stages import Report
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.time import MAX_TIMESTAMP, MIN_TIMESTAMP, to_span
from dagster_unified.operators.watermarks import Generated, Mark


class JobTime:
    """Computes control events from reports and the wall clock. Safe for several threads."""

    def __init__(
        self,
        plan: Plan,
        latest: ControlEvent | None,
        now: int,
        native_windows: bool = False,
        goes_on: bool = False,
        reached: Mapping[str, int] | None = None,
    ) -> None:
        """Starts from the `latest` control event.

        With `native_windows` it also keeps the watermarks of windows that Catalyst collects, which in a streaming query
        are Spark's own. With `goes_on`, or where the run leaves a savepoint at the end of its data, another run goes on
        behind the end of the sources. `reached` are watermarks of assigners that are known whatever they see.
        """
        graph = plan.graph
        self._assigners = {n.uid: n for n in graph.timed}
        waiting = [n for n in graph.nodes if n.is_told_watermark or (native_windows and n.has_native_windows)]
        self._before = {n.uid: plan.assigners_before(n.id) for n in waiting}
        self._handed_on = [n.uid for n in graph.nodes if isinstance(n, QueryOutputNode) and self._before[n.uid]]
        self._latest = latest or ControlEvent()
        self._moved = dict.fromkeys(self._assigners, now)
        self._seen = Metrics(last_event_times=dict(self._latest.assigned))
        self._parts = {uid: dict(times) for uid, times in self._latest.parts.items()}
        self._part_moved = {(uid, part): now for uid, times in self._parts.items() for part in times}
        self._generated = dict(self._latest.generated)
        self._remembered = {uid: dict(by_subtask) for uid, by_subtask in self._latest.remembered.items()}
        self._reached = reached or {}
        self._idle: set[str] = set()
        self._goes_on = goes_on or plan.execution.goes_on
        upstream = {n.id: graph.upstream(n.id) for n in graph.nodes}
        sources = {n.id: n.uid for n in graph.sources}
        self._sources = {n.uid: {sources[i] for i in upstream[n.id] & sources.keys()} for n in graph.nodes}
        waits = {n.id for n in graph.nodes if n.aggregates_natively}
        waits |= {n.id for n in graph.nodes if isinstance(n, IterationNode) and not n.is_unbounded}
        """The operators that emit something only at the end of the job's input."""

        emitting = {n.id: n.uid for n in graph.nodes if n.has_timers or _goes_round(n) or n.id in waits}
        self._operators = {n.uid: {emitting[i] for i in upstream[n.id] & emitting.keys()} for n in graph.timed}
        """The operators before each assigner that may emit something when their input ends."""

        self._ending = [n.uid for n in graph.nodes if n.id in emitting and not upstream[n.id] & waits]
        """The operators, by uid, that are told of the end of their input before the job's has come."""

        self._loops = {n.uid for n in graph.nodes if _goes_round(n)}

        is_cut = any(isinstance(n, (QueryOutputNode, QueryInputNode)) for n in graph.nodes)
        is_bounded = plan.execution.boundedness is Boundedness.BOUNDED
        self._last = set(sources.values()) if is_bounded and not is_cut else set[str]()
        """The sources behind which the job's own end comes at once."""

        self._ended: dict[str, Collection[str]] = {}
        """The parts of sources, by uid, that have been processed to their end."""

        self._closed: set[str] = set()
        """The operators that have been told of the end of their input, and have emitted all."""

        self._periodic = {
            uid: Generated(f"{plan.name}: operator '{n.name}'", n.generator)
            for uid, n in self._assigners.items()
            if n.generator is not None
        }
        self._interval = to_span(plan.execution.streaming.watermark_interval)
        self._asked = now
        self._due: set[int] = set()
        self._lock = Lock()
        self._wake = latest is not None  # after a restart every group is asked once when its timers are due

    @property
    def latest(self) -> ControlEvent:
        """The latest event."""
        return self._latest

    def watermark(self) -> int | None:
        """Return the smallest watermark of all operators whose input has not ended, or None before the first."""
        marks = {uid: mark for uid, mark in self._latest.watermarks.items() if mark > MIN_TIMESTAMP}
        return min((mark for uid, mark in marks.items() if uid not in self._latest.ended), default=None)

    def after(self, report: Report, now: int) -> ControlEvent | None:
        """Return the control event to emit after a micro-batch, if any."""
        with self._lock:
            if report.metrics.last_event_times:
                self._asked = now
            for uid, moment in report.metrics.last_event_times.items():
                if moment > self._seen.last_event_times.get(uid, MIN_TIMESTAMP):
                    self._seen.saw_event_time(uid, moment)
                    self._moved[uid] = now
            for uid, times in report.parts.items():
                self._saw_parts(uid, times, now)
            for uid, mark in report.marks.items():
                (self._idle.add if mark.idle else self._idle.discard)(uid)
                self._emitted(uid, mark)
                self._keep(uid, mark)
            if report.due is not None:
                self._due.add(report.due)
            return self._next(now)

    def reached(self, uid: str, watermark: int | None, last_event_time: int | None, idle: bool = False) -> None:
        """Take the event time that another query has handed on with the records that this one has processed."""
        with self._lock:
            (self._idle.add if idle else self._idle.discard)(uid)
            self._emitted(uid, Mark(watermark))
            if last_event_time is not None:
                self._seen.saw_event_time(uid, last_event_time)

    def ended(self, parts: Mapping[str, Collection[str]]) -> None:
        """Take the parts of some sources that have been processed to their end; `ALL` is among them where all has."""
        with self._lock:
            self._ended |= parts

    def delivered(self, event: ControlEvent) -> None:
        """Take the event of a micro-batch that has been processed."""
        with self._lock:
            self._closed.update(event.ended)

    @property
    def awaits_delivery(self) -> bool:
        """Whether operators were sent the end of their input, and may not have received it."""
        return not self._closed.issuperset(self._latest.ended)

    def tick(self, now: int) -> ControlEvent | None:
        """Return the control event to emit because time has passed, if any."""
        with self._lock:
            if self._periodic and self._interval and now - self._asked >= self._interval:
                self._ask(now)
            return self._next(now)

    def _ask(self, now: int) -> None:
        """Take the periodic watermarks of generators that see no records, and so cannot tell whether to be idle."""
        self._asked = now
        for uid, generated in self._periodic.items():
            mark = generated.periodic()
            if mark is not None:
                self._emitted(uid, mark)

    def wake(self) -> None:
        """Let the next control event come at once: something waits for an epoch."""
        with self._lock:
            self._wake = True

    def end(self, now: int) -> ControlEvent:
        """The input has ended."""
        with self._lock:
            self._latest = ControlEvent(
                self._latest.number + 1,
                self._latest.watermarks,
                now,
                True,
                self._last_event_times(self._before),
                dict(self._seen.last_event_times),
                {uid: dict(times) for uid, times in self._parts.items()},
                dict(self._generated),
                remembered=self._remembered_now(),
            )
            return self._latest

    def complete_until(self, assigners: tuple[str, ...], waiting: Iterable[str], event: ControlEvent, now: int) -> int:
        """Return the event time up to which a sink has what belongs to it, as far as watermarks tell.

        It is that of some assigners, and of the operators before it that wait for watermarks: of those, what they were
        told in a micro-batch, with its control event.
        """
        if event.end:
            return MAX_TIMESTAMP
        told = [event.watermarks.get(uid, MIN_TIMESTAMP) for uid in waiting if uid not in event.ended]
        with self._lock:
            return min([self._mark(assigners, now), *told])

    def waits_for_watermarks(self, uid: str) -> bool:
        """Return whether an operator is told of watermarks."""
        return uid in self._before

    def holding_back(self, uid: str, now: int) -> tuple[str, ...]:
        """Return the assigners that keep an operator's watermark behind its other assigners."""
        with self._lock:
            before = self._before[uid]
            waited_for = [
                assigner for assigner in before if not (self._has_ended(assigner) or self._is_idle(assigner, now))
            ]
            marks = {assigner: self._own_mark(assigner, now) for assigner in before}
            slowest = min((marks[assigner] for assigner in waited_for), default=MIN_TIMESTAMP)
            is_behind = any(mark > slowest for mark in marks.values())
            return tuple(assigner for assigner in waited_for if is_behind and marks[assigner] == slowest)

    def parts(self, uid: str, now: int) -> tuple[dict[str, int], frozenset[str]]:
        """Return the watermark of each part of a source, as an assigner behind it has seen it, and the idle parts."""
        bound = self._assigners[uid].max_out_of_orderness_ms or 0
        with self._lock:
            marks = {part: moment - bound - 1 for part, moment in self._parts.get(uid, {}).items()}
            return marks, frozenset(part for part in marks if self._part_is_idle(uid, part, now))

    def _saw_parts(self, uid: str, times: Mapping[str, int], now: int) -> None:
        known = self._parts.setdefault(uid, {})
        for part, moment in times.items():
            known[part] = max(moment, known.get(part, moment))
            self._part_moved[uid, part] = now
        self._moved[uid] = now

    def _next(self, now: int) -> ControlEvent | None:
        marks = {
            uid: max(self._mark(before, now), self._latest.watermarks.get(uid, MIN_TIMESTAMP))
            for uid, before in self._before.items()
        }
        due = {moment for moment in self._due if moment <= now}
        idle = [uid for uid in self._handed_on if all(self._is_idle(assigner, now) for assigner in self._before[uid])]
        ended = self._latest.ended
        if not self._leaves_end_to_job:
            ended = sorted({*filter(self._input_has_ended, self._ending), *self._loops.intersection(ended)})
        moved = any(m > self._latest.watermarks.get(uid, MIN_TIMESTAMP) for uid, m in marks.items())
        keeps = self._remembered != self._latest.remembered
        changed = keeps or idle != self._latest.idle or ended != self._latest.ended
        if self._latest.end or not (self._wake or due or moved or changed):
            return None
        self._wake = False
        self._due -= due
        self._latest = msgspec.structs.replace(
            self._latest,
            number=self._latest.number + 1,
            watermarks=marks,
            now=now,
            assigned=dict(self._seen.last_event_times),
            parts={uid: dict(times) for uid, times in self._parts.items()},
            generated=dict(self._generated),
            idle=idle,
            remembered=self._remembered_now(),
            ended=ended,
            last_event_times=self._last_event_times(ended),
        )
        return self._latest

    def _last_event_times(self, operators: Collection[str]) -> dict[str, int]:
        """Return the last event time of the input of each of some operators that had one."""
        times = {uid: self._seen.last_event_time(self._before.get(uid, ())) for uid in operators}
        return {uid: moment for uid, moment in times.items() if moment is not None}

    def _input_has_ended(self, uid: str) -> bool:
        return not self._leaves_end_to_job and self._are_read(self._sources[uid])

    def _are_read(self, sources: Collection[str]) -> bool:
        """Return whether there are such sources, and all are read to their end."""
        return bool(sources) and all(ALL in self._ended.get(uid, ()) for uid in sources)

    @property
    def _leaves_end_to_job(self) -> bool:
        """Whether no input ends by itself: a run goes on behind it, or the whole job is at its end."""
        return self._goes_on or self._are_read(self._last)

    def _has_ended(self, uid: str) -> bool:
        return self._input_has_ended(uid) and self._operators[uid] <= self._closed

    def _emitted(self, uid: str, mark: Mark) -> None:
        if mark.watermark is not None:
            self._generated[uid] = max(mark.watermark, self._generated.get(uid, MIN_TIMESTAMP))

    def _keep(self, uid: str, mark: Mark) -> None:
        """Keep the state of an assigner's generators for the next micro-batch."""
        for subtask, data in mark.kept.items():
            if data is not None:
                self._remembered.setdefault(uid, {})[subtask] = data
            elif subtask in self._remembered.get(uid, {}):
                del self._remembered[uid][subtask]

    def _remembered_now(self) -> dict[str, dict[int, bytes]]:
        return {uid: dict(by_subtask) for uid, by_subtask in self._remembered.items()}

    def _mark(self, assigners: tuple[str, ...], now: int) -> int:
        marks: list[int] = []
        idle: list[int] = []
        ended: list[int] = []
        for uid in assigners:
            kind = ended if self._has_ended(uid) else idle if self._is_idle(uid, now) else marks
            kind.append(self._own_mark(uid, now))
        return min(marks) if marks else max(idle or ended, default=MIN_TIMESTAMP)

    def _own_mark(self, uid: str, now: int) -> int:
        node = self._assigners[uid]
        if node.says_watermarks:
            return self._generated.get(uid, MIN_TIMESTAMP)
        seen = self._slowest(uid, now)
        reached = self._reached.get(uid, MIN_TIMESTAMP)
        if seen is None or node.max_out_of_orderness_ms is None:
            return reached
        return max(seen - node.max_out_of_orderness_ms - 1, reached)

    def _slowest(self, uid: str, now: int) -> int | None:
        """Return the last event time of the slowest part that is not idle."""
        parts = self._parts.get(uid)
        if not parts:
            return self._seen.last_event_times.get(uid)
        active = [moment for part, moment in parts.items() if not self._part_is_idle(uid, part, now)]
        return min(active) if active else max(parts.values())

    def _part_is_idle(self, uid: str, part: str, now: int) -> bool:
        timeout = self._assigners[uid].idleness_ms
        if any(part in self._ended.get(source, ()) for source in self._sources[uid]):
            return not self._goes_on or timeout is not None
        return timeout is not None and now - self._part_moved[uid, part] >= timeout

    def _is_idle(self, uid: str, now: int) -> bool:
        timeout = self._assigners[uid].idleness_ms
        if timeout is None or uid in self._idle:
            return uid in self._idle
        return now - self._moved[uid] >= timeout or (self._goes_on and self._are_read(self._sources[uid]))


def _goes_round(node: Node) -> bool:
    return isinstance(node, IterationNode) and node.is_unbounded
