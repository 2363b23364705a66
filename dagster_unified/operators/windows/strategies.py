"""How a run of a key's elements gets into its windows: one by one or, where possible, many at a time.

Elements may be taken many at a time where the assigner says which of them are in the same windows, where the trigger
only registers each window's end until that has come, and where no evictor needs their times. What may be late is always
taken one by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from dagster_unified.errors import RecordTypeError
from dagster_unified.operators.failures import RAISED, user_failure
from dagster_unified.operators.time import MIN_TIMESTAMP
from dagster_unified.operators.windows.assigners import MergingWindowAssigner
from dagster_unified.operators.windows.contexts import OperatorTriggerContext
from dagster_unified.operators.windows.merging import MergingWindows
from dagster_unified.operators.windows.scope import WindowingOperator
from dagster_unified.operators.windows.window import TimeWindow


class Strategy(ABC):
    """Puts elements of the current key into windows."""

    @abstractmethod
    def process(self, records: Sequence[Any], timestamps: Sequence[int | None]) -> None:
        """Takes a run of elements, in order."""


class PerElement(Strategy):
    """One by one, which serves every assigner, trigger and evictor."""

    def __init__(
        self, operator: WindowingOperator, triggers: OperatorTriggerContext, merging: MergingWindows | None
    ) -> None:
        self._operator, self._triggers, self._merging = operator, triggers, merging
        self._event_time = operator.spec.assigner.is_event_time

    def process(self, records: Sequence[Any], timestamps: Sequence[int | None]) -> None:
        record = None
        try:
            for record, timestamp in zip(records, timestamps, strict=True):
                self._element(record, timestamp)
        except RAISED as error:
            raise user_failure(error, self._operator.where, self._operator.spec.suspect, record) from error

    def _element(self, record: Any, timestamp: int | None) -> None:
        operator = self._operator
        spec, merging = operator.spec, self._merging
        moment = timestamp
        if moment is None:
            if self._event_time:
                raise RecordTypeError(
                    f"{operator.where}: a record has no event time: {record!r}; assign timestamps before the window"
                )
            moment = MIN_TIMESTAMP
        operator.at(timestamp)
        skipped = True
        assigned_windows = spec.assigner.assign_windows(record, moment, operator.assigning)
        copy = operator.copy if len(assigned_windows) > 1 else None
        for assigned in assigned_windows:
            window = assigned if merging is None else merging.merged(assigned)
            if operator.is_late(window):
                continue
            skipped = False
            windows = operator.windows()
            held = windows.get(window)
            added = operator.contents.add(held, record if copy is None else copy(record), timestamp)
            if added is not held:
                windows[window] = added
            operator.act(spec.trigger.on_element(record, timestamp, window, self._triggers.of(window)), window)
            operator.register_cleanup(window)
        if skipped and self._event_time:
            operator.late(record, moment)


class _ManyAtOnce(Strategy):
    """Many at a time; elements without an event time one by one."""

    def __init__(self, operator: WindowingOperator, one_by_one: PerElement) -> None:
        self._operator, self._one_by_one = operator, one_by_one

    def process(self, records: Sequence[Any], timestamps: Sequence[int | None]) -> None:
        if None in timestamps:
            self._one_by_one.process(records, timestamps)
        else:
            self._timed(records, timestamps)  # type: ignore[arg-type]

    @abstractmethod
    def _timed(self, records: Sequence[Any], timestamps: Sequence[int]) -> None:
        """Takes elements that all have an event time."""


class Panes(_ManyAtOnce):
    """Elements of one pane, which are in the same windows, in one go."""

    def __init__(self, operator: WindowingOperator, one_by_one: PerElement, panes: tuple[int, int]) -> None:
        super().__init__(operator, one_by_one)
        self._length, self._offset = panes

    def _timed(self, records: Sequence[Any], timestamps: Sequence[int]) -> None:
        operator, length, offset = self._operator, self._length, self._offset
        assign, assigning = operator.spec.assigner.assign_windows, operator.assigning
        panes = [t - (t - offset) % length for t in timestamps]
        start, size = 0, len(panes)
        while start < size:
            pane, end = panes[start], start + 1
            while end < size and panes[end] == pane:
                end += 1
            windows: Sequence[Any] = assign(records[start], timestamps[start], assigning)
            if windows and windows[0].max_timestamp() > operator.watermark:
                copy, run = operator.copy if len(windows) > 1 else None, records[start:end]
                for window in windows:
                    operator.add_all(window, run if copy is None else list(map(copy, run)))
            else:
                self._one_by_one.process(records[start:end], timestamps[start:end])
            start = end


class Sessions(_ManyAtOnce):
    """Elements that follow one another in one session, in one go."""

    def __init__(self, operator: WindowingOperator, one_by_one: PerElement, merging: MergingWindows, gap: int) -> None:
        super().__init__(operator, one_by_one)
        self._merging, self._gap = merging, gap

    def _timed(self, records: Sequence[Any], timestamps: Sequence[int]) -> None:
        operator, gap, watermark = self._operator, self._gap, self._operator.watermark
        first: int | None = None
        low = high = 0
        for number, moment in enumerate(timestamps):
            if first is not None and moment <= high and low <= moment + gap and moment + gap - 1 > watermark:
                low, high = min(low, moment), max(high, moment + gap)
                continue
            if first is not None:
                operator.add_all(self._merging.merged(TimeWindow(low, high)), records[first:number])
            if moment + gap - 1 > watermark:
                first, low, high = number, moment, moment + gap
            else:
                first = None
                self._one_by_one.process(records[number : number + 1], timestamps[number : number + 1])
        if first is not None:
            operator.add_all(self._merging.merged(TimeWindow(low, high)), records[first:])


def strategy_of(
    operator: WindowingOperator, triggers: OperatorTriggerContext, merging: MergingWindows | None
) -> Strategy:
    """The fastest strategy that assigner, trigger and evictor allow."""
    spec = operator.spec
    one_by_one = PerElement(operator, triggers, merging)
    if spec.evictor is not None or not spec.only_registers_end:
        return one_by_one
    panes = spec.assigner.panes()
    if panes is not None:
        return Panes(operator, one_by_one, panes)
    gap = spec.assigner.fixed_gap() if isinstance(spec.assigner, MergingWindowAssigner) else None
    if gap is not None and merging is not None:
        return Sessions(operator, one_by_one, merging, gap)
    return one_by_one
