"""The STREAMING drivers: micro-batches of a key group, and one group after another, through a keyed operator."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Self

import msgspec
import pyarrow as pa

from dagster_unified.operators.broadcast import BroadcastOperator
from dagster_unified.operators.drivers.group import Group
from dagster_unified.operators.failures import placed
from dagster_unified.operators.functions.base import FIRST, Subtask
from dagster_unified.operators.functions.iterations import IterationListener
from dagster_unified.operators.keys import runs, sorted_runs
from dagster_unified.operators.layout import TIMESTAMP
from dagster_unified.operators.operator import BROADCAST, KeyedOperator, PageStore, TimerQueue
from dagster_unified.operators.operator_state import CheckpointedOperator
from dagster_unified.operators.program.run import FLUSH, RunningProgram
from dagster_unified.operators.program.step import CompiledProgram, Program
from dagster_unified.operators.state.descriptors import StateDescriptor
from dagster_unified.operators.state.handles import ValueStateDescriptor
from dagster_unified.operators.state.pages import KEYS_PER_PAGE, Block, BroadcastCodec, Content, PageCodec
from dagster_unified.operators.state.table import SUBTASK_KEY, KeyShape, StateTable
from dagster_unified.operators.time import MAX_TIMESTAMP, MIN_TIMESTAMP

_CAME = ValueStateDescriptor("came", bool)
"""Whether a key had records, for a function that is called for each key at the end of its iteration."""


def _waits(operator: KeyedOperator) -> bool:
    """Whether a function of the operator acts at the end of an iteration."""
    ignored = IterationListener.on_iteration_terminated
    return any(type(listener).on_iteration_terminated is not ignored for listener in operator.listeners)


class GroupedOperator:
    """A keyed operator and its current group; `after` is called when a key's records are processed."""

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
        self._remembers_keys = not operator.state.descriptors and operator.subtask_key is None and _waits(operator)
        """Whether the keys of an iteration have to be stored, as its function has no state that would do it."""

        if self._remembers_keys:
            operator.state.register(_CAME)
        self.codec = PageCodec(operator.where, key_type, record_type, operator.state.descriptors)
        self.keys_per_page = keys_per_page
        operator.state.on_register = self._declared_late
        self._group: Group | None = None

    @contextmanager
    def opened(self, store: PageStore, watermark: int = MIN_TIMESTAMP) -> Iterator[Group]:
        """Make a group current. A group that has not seen a later watermark starts from `watermark`."""
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

    def process_columns(
        self,
        group: Group,
        keys: Sequence[Hashable],
        starts: Sequence[int],
        batch: pa.RecordBatch,
        timestamps: Sequence[int | None],
    ) -> bool:
        """Process runs of several keys' records in columns; return False where `process` has to."""
        self._load_runs(group, keys)
        return self.operator.process_columns(keys, starts, batch, timestamps, self.after)

    def _load_runs(self, group: Group, keys: Sequence[Hashable]) -> None:
        name = self.operator.one_value
        if name is not None and not self.holds_back and group.load_column(name, keys):
            self.operator.state.column = group.column
        else:
            self._load(group, group.load(keys))

    def process(
        self,
        group: Group,
        keys: Sequence[Hashable],
        starts: Sequence[int],
        records: Sequence[Any],
        timestamps: Sequence[int | None],
    ) -> None:
        """Process runs of several keys' records; each run starts where `starts` says."""
        self._load_runs(group, keys)
        if not self.holds_back:
            self.operator.process_runs(keys, starts, records, timestamps, self.after)
            return
        for key, start, end in zip(keys, starts, [*starts[1:], len(records)], strict=True):
            self._hold_early(group, key, records[start:end], timestamps[start:end])

    def process_unfinished(
        self, group: Group, key: Hashable, records: Sequence[Any], timestamps: Sequence[int | None]
    ) -> None:
        """Process some of one key's records, of which more follow, so that its bundle is not over."""
        self._load(group, group.load([key]))
        if self.holds_back:
            self._hold_early(group, key, records, timestamps)
            return
        self.operator.select(key)
        self.operator.process(records, timestamps)
        self.after()

    def advance(self, group: Group, watermark: int, now: int) -> None:
        """Move event time and the clock forward."""
        operator = self.operator
        watermark = max(watermark, operator.watermark)
        self._load(group, group.load_due(watermark, now))
        self._release(group, watermark)
        if watermark > operator.watermark:
            operator.advance_watermark(watermark)
        operator.advance_processing_time(now)

    def end(self, group: Group, last_event_time: int | None) -> None:
        """End the input: held-back elements are processed, and all timers fire."""
        self._load(group, group.load_due(MAX_TIMESTAMP, MAX_TIMESTAMP))
        self._release(group, MAX_TIMESTAMP)
        self.operator.last_event_time = last_event_time
        self.operator.end_of_input()

    def end_of_epoch(self, group: Group, keys: Iterable[Hashable], epoch: int) -> None:
        """End an epoch of an iteration, for the keys with records in it; for a subtask without keys in every epoch."""
        if not self.operator.listeners:
            return
        subtask_key = self.operator.subtask_key
        keys_in_epoch = list(dict.fromkeys(keys)) if subtask_key is None else [subtask_key]
        self._load(group, group.load(keys_in_epoch))
        for key in keys_in_epoch:
            self.operator.select(key)
            self.operator.end_of_epoch(epoch)
            if self._remembers_keys:
                self.operator.state.current[_CAME.name] = True
            self.after()

    def end_of_iteration(self, group: Group) -> None:
        """End an iteration, for all keys that have state."""
        if not self.operator.listeners:
            return
        self.load_all(group)
        subtask_key = self.operator.subtask_key
        for key in list(group.keys) if subtask_key is None else [subtask_key]:
            self.operator.select(key)
            self.operator.end_of_iteration()
            self.after()

    def save(self, group: Group) -> None:
        operator = self.operator
        self._settle(group)
        group.save(operator.event_timers, operator.processing_timers, operator.watermark)

    def all_content(self, group: Group) -> Block:
        """Everything in a group, instead of writing it back to its pages."""
        operator = self.operator
        if group.column is None:
            self.load_all(group)
        self._settle(group)
        return group.all_content(operator.event_timers, operator.processing_timers)

    def _settle(self, group: Group) -> None:
        self.operator.snapshot()
        self.operator.state.forget_expired(group.keys.values())

    def load_all(self, group: Group) -> None:
        self._load(group, group.load_all())

    def contents(self, store: PageStore) -> Iterator[Block]:
        """The contents of a group's blocks, one after another, by column where possible."""
        return Group(store, self.codec, self.keys_per_page).contents()

    def _load(self, group: Group, contents: Iterable[Content]) -> None:
        self.operator.state.column = group.column
        for content in contents:
            for timestamp, key, generation in content.event_timers:
                self.operator.event_timers.register(key, timestamp, generation)
            for timestamp, key, generation in content.processing_timers:
                self.operator.processing_timers.register(key, timestamp, generation)

    def _hold_early(
        self, group: Group, key: Hashable, records: Sequence[Any], timestamps: Sequence[int | None]
    ) -> None:
        """Hold back elements after the watermark; process the others, and those without a time, at once."""
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
        for timestamp, key, record in group.release(watermark):
            self.operator.process_in_time_order(key, [record], [timestamp])
            self.operator.finish_bundle()
            self.after()

    def _declared_late(self, descriptor: StateDescriptor[Any]) -> None:
        """Decode the state that was read before its descriptor was declared."""
        if self._group is None:
            return
        self.codec.check_layouts(self._group.index)
        for state in self._group.keys.values():
            self.codec.declare(descriptor, state)


class ControlEvent(msgspec.Struct, frozen=True):
    """The event that a driver sends to all key groups between micro-batches.

    Times are milliseconds since the epoch, by operator uid. `assigned`, `parts` and `generated` are the driver's own,
    from which it continues after a restart: each assigner's latest event time, over all and by part of its source, and
    the watermark that its generator has emitted, if it has one. `remembered` is what generators keep for the next
    micro-batch, by assigner and subtask. `idle` are the streams handed on to another query that expect nothing for now.
    `ended` are the operators whose sources have all been read to their end, while others have not.
    """

    number: int = 0
    watermarks: dict[str, int] = {}
    now: int = MIN_TIMESTAMP
    end: bool = False
    last_event_times: dict[str, int] = {}
    assigned: dict[str, int] = {}
    parts: dict[str, dict[str, int]] = {}
    generated: dict[str, int] = {}
    idle: list[str] = []
    remembered: dict[str, dict[int, bytes]] = {}
    ended: list[str] = []

    def ends(self, uid: str) -> bool:
        return self.end or uid in self.ended


def decode_event(data: bytes) -> ControlEvent:
    """The inverse of `msgspec.json.encode`."""
    return msgspec.json.decode(data, type=ControlEvent)


class GroupInput(NamedTuple):
    """Records that reach a key group together: broadcast records, which come first, and the group's own."""

    keyed: Sequence[pa.RecordBatch] = ()
    broadcast: Sequence[pa.RecordBatch] = ()


NOTHING = GroupInput()


class MicroBatch(NamedTuple):
    """The input that a key group processes together, in this order; the end of the input, if any, comes last."""

    before_event: GroupInput = NOTHING
    """The records that operators upstream emitted for the control event."""

    event: ControlEvent | None = None
    after_event: GroupInput = NOTHING
    sorted_by_key: bool = False
    """Whether equal keys stand together already."""

    leads: bool = True
    """Whether results of broadcast records are emitted; only one group of all emits them."""

    epoch: int | None = None
    """The epoch of an iteration that ends with this micro-batch."""

    terminated: bool = False
    """Whether the iteration has ended with the epoch before."""


def records_waiting(uid: str) -> str:
    """The counter of the elements that an operator holds back at the end of a partition, until the watermark passes."""
    return f"records that wait for the watermark at '{uid}'"


def timers_waiting(uid: str) -> str:
    """The counter of event-time timers that wait; an open window has one."""
    return f"timers that wait for the watermark at '{uid}'"


_PLAIN = (str, int, bytes, bool)
"""Types of keys that Arrow compares as Python does."""


class KeyGroups:
    """One keyed program, driven over one key group after another."""

    def __init__(
        self,
        program: Program,
        emit: Callable[[int, pa.RecordBatch], None],
        clock: Callable[[], int],
        subtask: Subtask = FIRST,
        keys_per_page: int = KEYS_PER_PAGE,
        compiled: CompiledProgram | None = None,
    ) -> None:
        assert program.keyed is not None
        self.program, self.keyed = program, program.keyed
        self.running = RunningProgram(program, emit, clock, subtask, compiled=compiled)
        operator = self.running.keyed
        assert operator is not None
        self.operator = operator
        self.grouped = GroupedOperator(
            operator,
            self.keyed.python,
            program.input.records.python,
            holds_back=operator.time_sorted and program.input.timestamped,
            after=partial(self.running.drain, FLUSH),
            keys_per_page=keys_per_page,
        )
        self.broadcast: BroadcastCodec | None = None
        if isinstance(operator, BroadcastOperator):
            self.broadcast = BroadcastCodec(operator.where, operator.descriptors)
        self._touched: list[Hashable] = []
        """The group's keys that had records in this micro-batch, where it ends an epoch."""

        self._waiting = (0, 0)
        """The elements and event-time timers that waited for the watermark after the last micro-batch."""

        self.before_event = False
        """Whether downstream operators get what is emitted now before the micro-batch's control event."""

    def run(self, store: PageStore, micro_batch: MicroBatch, watermark: int = MIN_TIMESTAMP) -> int | None:
        """Process a micro-batch of one group, and return when its earliest processing-time timer is due.

        A group that has not seen a later watermark starts from `watermark`.
        """
        with self._opened(store, watermark) as group:
            self._process(group, micro_batch)
            self._waiting = self._waits(group)
            self.grouped.save(group)
        return min((p.processing_timer for p in group.index.pages if p.processing_timer is not None), default=None)

    def run_and_leave(self, store: PageStore, micro_batch: MicroBatch, watermark: int) -> Block:
        """As `run`, but return the group's content instead of writing it to the store."""
        with self._opened(store, watermark) as group:
            self._process(group, micro_batch)
            self._waiting = self._waits(group)
            return self.grouped.all_content(group)

    def count_waiting(self) -> None:
        """Count what waits for the watermark among the keys of the last micro-batch."""
        uid = self.program.steps[0].uid  # several operators may have one name
        for counter, count in zip((records_waiting(uid), timers_waiting(uid)), self._waiting, strict=True):
            if count:
                self.running.metrics.count(counter, count)

    def _waits(self, group: Group) -> tuple[int, int]:
        return sum(map(len, group.held_back.values())), len(self.operator.event_timers)

    def run_unfinished(self, store: PageStore, batch: pa.RecordBatch, watermark: int = MIN_TIMESTAMP) -> None:
        """Process some of one key's records, of which more follow, so that its bundle is not over."""
        with self._opened(store, watermark) as group:
            (key,), _ = runs(batch, self.keyed, self.program.input, self.operator.where)
            timestamps, records = self._timestamps(batch), self._read(batch)
            self.grouped.process_unfinished(group, key, records, timestamps)
            self.running.drain()
            self.running.flush()
            self.grouped.save(group)

    def contents(self, store: PageStore) -> Iterator[Block]:
        """The contents of a group's blocks, one after another, by column where possible."""
        return self.grouped.contents(store)

    def table(self) -> StateTable:
        """The table of the operator's state, with the columns declared so far."""
        operator, program = self.operator, self.program
        states, where = operator.state.descriptors, f"{program.pipeline}: operator '{program.steps[0].name}'"
        if isinstance(operator, CheckpointedOperator):
            operator.declare()
            subtask = KeyShape((SUBTASK_KEY,), int)
            return StateTable(where, subtask, program.input.records.python, dict(states), {}, operator.kinds)
        columns = self.keyed.columns
        named = len(columns) > 0 and not columns[0].startswith("__")
        broadcast = dict(operator.descriptors) if isinstance(operator, BroadcastOperator) else {}
        shape = KeyShape(columns if named else ("key",), self.keyed.python)
        return StateTable(where, shape, program.input.records.python, dict(states), broadcast)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def close(self, failure: BaseException | None = None) -> None:
        self.running.close(failure)

    def _process(self, group: Group, micro_batch: MicroBatch) -> None:
        event, uid = micro_batch.event, self.program.steps[0].uid
        self._touched.clear()
        self.before_event = True
        self._take(group, micro_batch.before_event, micro_batch)
        if event is not None:
            self.grouped.advance(group, event.watermarks.get(uid, MIN_TIMESTAMP), event.now)
        if event is not None or any(micro_batch.before_event):
            self.running.drain()
        self.before_event = False
        self._take(group, micro_batch.after_event, micro_batch)
        if event is not None and event.ends(uid):
            self.grouped.end(group, event.last_event_times.get(uid))
        if micro_batch.epoch is not None:
            self.grouped.end_of_epoch(group, self._touched, micro_batch.epoch)
        if micro_batch.terminated:
            self.grouped.end_of_iteration(group)
            self.operator.end_of_group(group.store)
        self.running.drain()
        self.running.flush()

    def _take(self, group: Group, arrived: GroupInput, micro_batch: MicroBatch) -> None:
        if arrived.broadcast:
            self._broadcast(group, arrived.broadcast, micro_batch.leads)
        if arrived.keyed:
            self._records(group, arrived.keyed, micro_batch)

    @contextmanager
    def _opened(self, store: PageStore, watermark: int) -> Iterator[Group]:
        """Make a group current, with its copy of the broadcast state."""
        with self.grouped.opened(store, watermark) as group:
            if isinstance(self.operator, BroadcastOperator):
                self._begin_broadcast(self.operator, group)
            yield group

    def _begin_broadcast(self, operator: BroadcastOperator, group: Group) -> None:
        assert self.broadcast is not None
        data = group.store.read_page(BROADCAST)
        operator.broadcast = {} if data is None else self.broadcast.decode(data)

        def all_keys() -> Iterable[Hashable]:
            self.grouped.load_all(group)
            return group.keys

        operator.keys = all_keys

    def _broadcast(self, group: Group, batches: Sequence[pa.RecordBatch], leads: bool) -> None:
        """Apply broadcast records to the group's copy of the state."""
        assert isinstance(self.operator, BroadcastOperator)
        assert self.broadcast is not None
        for batch in batches:
            self.running.broadcast(batch, leads)
            self.running.drain(FLUSH)
        group.store.write_page(BROADCAST, self.broadcast.encode(self.operator.broadcast))

    def _records(self, group: Group, batches: Sequence[pa.RecordBatch], micro_batch: MicroBatch) -> None:
        batch = pa.concat_batches(batches)
        layout, where = self.program.input, self.operator.where
        if self.operator.takes_batches:
            self.operator.process_batch(batch, group.store)
            self.running.drain(FLUSH)
            return
        if micro_batch.sorted_by_key:
            keys, starts = runs(batch, self.keyed, layout, where)
        else:
            batch, keys, starts = sorted_runs(batch, self.keyed, layout, where)
        if micro_batch.epoch is not None:
            self._touched += keys
        timestamps = self._timestamps(batch)
        has_each_once = type(keys[0]) in _PLAIN or len(set(keys)) == len(keys)
        if has_each_once and not self.grouped.holds_back and self.operator.takes_columns(batch.num_rows):
            columns = batch.select(list(layout.records.names))
            if self.grouped.process_columns(group, keys, starts, columns, timestamps):
                return
        records = self._read(batch)
        if has_each_once:
            self.grouped.process(group, keys, starts, records, timestamps)
            return
        for key, start, end in zip(keys, starts, (*starts[1:], len(records)), strict=True):
            self.grouped.process(group, [key], [0], records[start:end], timestamps[start:end])

    def _read(self, batch: pa.RecordBatch) -> Sequence[Any]:
        with placed(self.operator.where):
            return self.operator.read(batch, self.program.input)

    def _timestamps(self, batch: pa.RecordBatch) -> Sequence[int | None]:
        """The event times of a batch, of which late ones are counted."""
        if not self.program.input.timestamped:
            return [None] * batch.num_rows
        timestamps: Sequence[int | None] = batch.column(TIMESTAMP).to_pylist()
        if self.operator.watermark > MIN_TIMESTAMP:
            late = sum(1 for t in timestamps if t is not None and t <= self.operator.watermark)
            if late:
                self.running.metrics.count("late records", late)
        return timestamps
