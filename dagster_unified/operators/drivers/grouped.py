"""A keyed operator, driven over one key group after another as in STREAMING.

What is current is a group: its keys' state, its timers, and the elements that wait for the watermark come from its
pages, and go back when it is left. Knows operators and pages; no program, no Arrow.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dagster_unified.operators.drivers.group import Group, GroupStore
from dagster_unified.operators.functions.iterations import IterationListener
from dagster_unified.operators.operator import KeyedOperator
from dagster_unified.operators.state.descriptors import StateDescriptor
from dagster_unified.operators.state.pages import KEYS_PER_PAGE, Block, Content, PageCodec
from dagster_unified.operators.state.value import ValueStateDescriptor
from dagster_unified.operators.time import MAX_TIMESTAMP, MIN_TIMESTAMP
from dagster_unified.operators.timers import TimerQueue

_CAME = ValueStateDescriptor("came", bool)
"""Whether a record of a key has come to a function that is to hear, for each key, of the end of its iteration."""


def _waits(operator: KeyedOperator) -> bool:
    """Whether a function of the operator does something at the end of an iteration."""
    ignored = IterationListener.on_iteration_terminated
    return any(type(listener).on_iteration_terminated is not ignored for listener in operator.listeners)


class GroupedOperator:
    """A keyed operator and the group that is current; `after` is called when a key's records are processed."""

    def __init__(
        self,
        operator: KeyedOperator,
        key_type: Any,
        record_type: Any,
        holds_back: bool,
        after: Callable[[], None],
        keys_per_page: int = KEYS_PER_PAGE,
    ) -> None:
        self.operator, self.holds_back, self.after = operator, holds_back, after
        self._remembers_keys = operator.subtask_key is None and not operator.state.descriptors and _waits(operator)
        """Whether the keys of an iteration have to be kept: its function has no state of them that would be there."""

        if self._remembers_keys:
            operator.state.register(_CAME)
        self.codec = PageCodec(operator.where, key_type, record_type, operator.state.descriptors)
        self.keys_per_page = keys_per_page
        operator.state.on_register = self._declared_late
        self._group: Group | None = None

    @contextmanager
    def opened(self, store: GroupStore, watermark: int = MIN_TIMESTAMP) -> Iterator[Group]:
        """Makes a group current. One that has not seen a later one begins with `watermark`."""
        group = self._group = Group(store, self.codec, self.keys_per_page)
        operator = self.operator
        operator.state.keys, operator.state.created = group.keys, group.created
        operator.event_timers, operator.processing_timers = TimerQueue(), TimerQueue()
        operator.watermark = max(group.index.watermark, watermark)
        operator.at_end = operator.ended = False
        operator.restored = group.before is not None
        try:
            yield group
        finally:
            operator.state.keys, operator.state.column = {}, None
            self._group = None

    def process(
        self,
        group: Group,
        keys: Sequence[Hashable],
        starts: Sequence[int],
        records: Sequence[Any],
        timestamps: Sequence[int | None],
    ) -> None:
        """Processes runs of several keys' records, each of which begins where `starts` says."""
        name = self.operator.one_value
        if name is not None and not self.holds_back and group.load_column(name, keys):
            self.operator.state.column = group.column
        else:
            self._load(group, group.load(keys))
        if not self.holds_back:
            self.operator.process_runs(keys, starts, records, timestamps, self.after)
            return
        for key, start, end in zip(keys, starts, [*starts[1:], len(records)], strict=True):
            self._hold_early(group, key, records[start:end], timestamps[start:end])

    def process_unfinished(
        self, group: Group, key: Hashable, records: Sequence[Any], timestamps: Sequence[int | None]
    ) -> None:
        """Processes some of one key's records, of which more follow, so that its bundle is not over."""
        self._load(group, group.load([key]))
        if self.holds_back:
            self._hold_early(group, key, records, timestamps)
            return
        self.operator.select(key)
        self.operator.process(records, timestamps)
        self.after()

    def advance(self, group: Group, watermark: int, now: int) -> None:
        """Moves event time and the clock forward."""
        operator = self.operator
        watermark = max(watermark, operator.watermark)
        self._load(group, group.load_due(watermark, now))
        self._release(group, watermark)
        if watermark > operator.watermark:
            operator.advance_watermark(watermark)
        operator.advance_processing_time(now)

    def end(self, group: Group, last_event_time: int | None) -> None:
        """Ends the input: what is held back is processed, and all timers fire."""
        self._load(group, group.load_due(MAX_TIMESTAMP, MAX_TIMESTAMP))
        self._release(group, MAX_TIMESTAMP)
        self.operator.last_event_time = last_event_time
        self.operator.end_of_input()

    def end_of_epoch(self, group: Group, keys: Iterable[Hashable], epoch: int) -> None:
        """Ends an epoch of an iteration, in which these keys had records; a subtask without keys is told in each."""
        if not self.operator.listeners:
            return
        own = self.operator.subtask_key
        told = list(dict.fromkeys(keys)) if own is None else [own]
        self._load(group, group.load(told))
        for key in told:
            self.operator.select(key)
            self.operator.end_of_epoch(epoch)
            if self._remembers_keys:
                self.operator.state.current[_CAME.name] = True
            self.after()

    def end_of_iteration(self, group: Group) -> None:
        """Ends an iteration, for all keys that have state."""
        if not self.operator.listeners and not self.operator.ends_iterations:
            return
        self.load_all(group)
        own = self.operator.subtask_key
        for key in list(group.keys) if own is None else [own]:
            self.operator.select(key)
            self.operator.end_of_iteration()
            self.after()

    def save(self, group: Group) -> None:
        """Writes back what has changed."""
        operator = self.operator
        self._settle(group)
        group.save(operator.event_timers, operator.processing_timers, operator.watermark)

    def left(self, group: Group) -> Block:
        """All that a group holds which is not saved: what else would go back to its pages."""
        operator = self.operator
        if group.column is None:
            self.load_all(group)
        self._settle(group)
        return group.left(operator.event_timers, operator.processing_timers)

    def _settle(self, group: Group) -> None:
        self.operator.snapshot()
        self.operator.state.forget_expired(group.keys.values())

    def load_all(self, group: Group) -> None:
        """Reads all that has not been read."""
        self._load(group, group.load_all())

    def contents(self, store: GroupStore) -> Iterator[Block]:
        """What a group's blocks hold, one after another, by column where they can be."""
        return Group(store, self.codec, self.keys_per_page).contents()

    def _load(self, group: Group, contents: Iterable[Content]) -> None:
        """Takes what was read."""
        self.operator.state.column = group.column
        for content in contents:
            for timestamp, key, generation in content.event_timers:
                self.operator.event_timers.register(key, timestamp, generation)
            for timestamp, key, generation in content.processing_timers:
                self.operator.processing_timers.register(key, timestamp, generation)

    def _hold_early(
        self, group: Group, key: Hashable, records: Sequence[Any], timestamps: Sequence[int | None]
    ) -> None:
        """Elements before the watermark, and those without a time, are processed at once; the others wait for it."""
        operator = self.operator
        timed = list(zip(records, timestamps, strict=True))
        early = [(t, r) for r, t in timed if t is not None and t > operator.watermark]
        if early:
            group.hold(key, early)
        now = [(r, t) for r, t in timed if t is None or t <= operator.watermark]
        if now:
            operator.select(key)
            operator.process([r for r, _ in now], [t for _, t in now])
            operator.finish_bundle()
            self.after()

    def _release(self, group: Group, watermark: int) -> None:
        """Processes the held-back elements that the watermark passes."""
        for timestamp, key, record in group.release(watermark):
            self.operator.process_in_time_order(key, [record], [timestamp])
            self.operator.finish_bundle()
            self.after()

    def _declared_late(self, descriptor: StateDescriptor[Any]) -> None:
        """A state that is declared only now: what was read of it before is decoded."""
        if self._group is None:
            return
        self.codec.check_layouts(self._group.index)
        for state in self._group.keys.values():
            self.codec.declare(descriptor, state)
