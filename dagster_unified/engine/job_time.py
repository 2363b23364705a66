"""The job's time, kept on the driver.

Watermarks come from what each micro-batch reported, and processing-time timers from the clock.

An operator's watermark is the smallest of its nearest assigners'; an assigner's is its latest event time less the
strategy's bound, or what its watermark generator emitted. That of a stream which another query hands on was handed on
with it. Directly behind a source with parts, such as the partitions of a topic, the latest event time is that of the
part which is furthest behind. An assigner that is idle, by its generator or for longer than its strategy allows, does
not hold others back; nor does a part, nor a stream that is handed on while all assigners before it are idle. Knows the
plan, not Spark; a control event is what it returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock

import msgspec

from dagster_unified.graph.nodes import RelayNode
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.drivers.key_groups import ControlEvent
from dagster_unified.operators.drivers.report import Report
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.time import MIN_TIMESTAMP, to_span
from dagster_unified.operators.watermarks import Generated, Mark


class JobTime:
    """Computes control events from reports and the wall clock. Safe for several threads."""

    def __init__(self, plan: Plan, latest: ControlEvent | None, now: int, native_windows: bool = False) -> None:
        """Starts from the `latest` control event.

        With `native_windows` it also keeps the watermarks of windows that Catalyst collects, which in a streaming query
        are Spark's own.
        """
        graph = plan.graph
        self._assigners = {n.uid: n for n in graph.timed}
        waiting = [n for n in graph.nodes if n.has_timers or (native_windows and n.has_native_windows)]
        self._before = {n.uid: plan.assigners_before(n.id) for n in waiting}
        self._handed_on = [n.uid for n in graph.nodes if isinstance(n, RelayNode) and self._before[n.uid]]
        self._latest = latest or ControlEvent()
        self._moved = dict.fromkeys(self._assigners, now)
        self._seen = Metrics(last_event_times=dict(self._latest.assigned))
        self._parts = {uid: dict(times) for uid, times in self._latest.parts.items()}
        self._part_moved = {(uid, part): now for uid, times in self._parts.items() for part in times}
        self._generated = dict(self._latest.generated)
        self._remembered = {uid: dict(kept) for uid, kept in self._latest.remembered.items()}
        self._idle: set[str] = set()
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
        """The smallest watermark of all operators, or None before the first."""
        marks = [m for m in self._latest.watermarks.values() if m > MIN_TIMESTAMP]
        return min(marks, default=None)

    def after(self, report: Report, now: int) -> ControlEvent | None:
        """The control event to emit after a micro-batch, if any."""
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

    def relayed(self, uid: str, watermark: int | None, last_event_time: int | None, idle: bool = False) -> None:
        """Take what another query has handed on with the records that this one has processed."""
        with self._lock:
            (self._idle.add if idle else self._idle.discard)(uid)
            self._emitted(uid, Mark(watermark))
            if last_event_time is not None:
                self._seen.saw_event_time(uid, last_event_time)

    def tick(self, now: int) -> ControlEvent | None:
        """The control event to emit because time has passed, if any."""
        with self._lock:
            if self._periodic and self._interval and now - self._asked >= self._interval:
                self._ask(now)
            return self._next(now)

    def _ask(self, now: int) -> None:
        """Takes the periodic watermarks of generators that see no records, and so cannot know whether to be idle."""
        self._asked = now
        for uid, generated in self._periodic.items():
            mark = generated.periodic()
            if mark is not None:
                self._emitted(uid, mark)

    def wake(self) -> None:
        """Have the next control event come at once: something waits for an epoch."""
        with self._lock:
            self._wake = True

    def end(self, now: int) -> ControlEvent:
        """The input has ended."""
        with self._lock:
            last = {
                uid: moment
                for uid, before in self._before.items()
                if (moment := self._seen.last_event_time(before)) is not None
            }
            self._latest = ControlEvent(
                self._latest.number + 1,
                self._latest.watermarks,
                now,
                True,
                last,
                dict(self._seen.last_event_times),
                {uid: dict(times) for uid, times in self._parts.items()},
                dict(self._generated),
                remembered=self._kept(),
            )
            return self._latest

    def parts(self, uid: str, now: int) -> tuple[dict[str, int], frozenset[str]]:
        """The watermark of each part of a source, as an assigner behind it has seen them, and those that are idle."""
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
        idle = [uid for uid in self._handed_on if all(self._is_idle(one, now) for one in self._before[uid])]
        moved = any(m > self._latest.watermarks.get(uid, MIN_TIMESTAMP) for uid, m in marks.items())
        keeps = self._remembered != self._latest.remembered
        if self._latest.end or not (self._wake or due or moved or keeps or idle != self._latest.idle):
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
            remembered=self._kept(),
        )
        return self._latest

    def _emitted(self, uid: str, mark: Mark) -> None:
        if mark.watermark is not None:
            self._generated[uid] = max(mark.watermark, self._generated.get(uid, MIN_TIMESTAMP))

    def _keep(self, uid: str, mark: Mark) -> None:
        """Take what an assigner's generators keep for the next micro-batch."""
        for subtask, data in mark.kept.items():
            if data is not None:
                self._remembered.setdefault(uid, {})[subtask] = data
            elif subtask in self._remembered.get(uid, {}):
                del self._remembered[uid][subtask]

    def _kept(self) -> dict[str, dict[int, bytes]]:
        return {uid: dict(kept) for uid, kept in self._remembered.items()}

    def _mark(self, assigners: tuple[str, ...], now: int) -> int:
        marks: list[int] = []
        idle: list[int] = []
        for uid in assigners:
            (idle if self._is_idle(uid, now) else marks).append(self._own_mark(uid, now))
        return min(marks) if marks else max(idle, default=MIN_TIMESTAMP)

    def _own_mark(self, uid: str, now: int) -> int:
        """The watermark of one assigner."""
        node = self._assigners[uid]
        if node.says_watermarks:
            return self._generated.get(uid, MIN_TIMESTAMP)
        seen = self._slowest(uid, now)
        if seen is None or node.max_out_of_orderness_ms is None:
            return MIN_TIMESTAMP
        return seen - node.max_out_of_orderness_ms - 1

    def _slowest(self, uid: str, now: int) -> int | None:
        """The last event time of the part that is behind all others, of those that are not idle."""
        parts = self._parts.get(uid)
        if not parts:
            return self._seen.last_event_times.get(uid)
        active = [moment for part, moment in parts.items() if not self._part_is_idle(uid, part, now)]
        return min(active) if active else max(parts.values())

    def _part_is_idle(self, uid: str, part: str, now: int) -> bool:
        timeout = self._assigners[uid].idleness_ms
        return timeout is not None and now - self._part_moved[uid, part] >= timeout

    def _is_idle(self, uid: str, now: int) -> bool:
        timeout = self._assigners[uid].idleness_ms
        return uid in self._idle or (timeout is not None and now - self._moved[uid] >= timeout)
