"""The STREAMING driver: micro-batches of a key group through one keyed operator.

A group's state is read once and written once per micro-batch. A micro-batch brings a group records and possibly a
control event: the watermark has moved, the clock has, the input has ended. The event says what the micro-batches before
led to, so it comes first; ahead of it come only the records that operators upstream emitted for it, and the end of the
input comes last. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import msgspec
import pyarrow as pa

from dagster_unified.operators.broadcast import BroadcastOperator
from dagster_unified.operators.drivers.group import Group, GroupStore
from dagster_unified.operators.drivers.grouped import GroupedOperator
from dagster_unified.operators.failures import placed
from dagster_unified.operators.functions.base import FIRST, Subtask
from dagster_unified.operators.keys import runs, sorted_runs
from dagster_unified.operators.layout import TIMESTAMP
from dagster_unified.operators.numbers import BROADCAST
from dagster_unified.operators.operator_state import CheckpointedOperator
from dagster_unified.operators.program.run import FLUSH, RunningProgram
from dagster_unified.operators.program.spec import Program
from dagster_unified.operators.state.pages import KEYS_PER_PAGE, Block, BroadcastCodec
from dagster_unified.operators.state.table import SUBTASK_KEY, KeyShape, StateTable
from dagster_unified.operators.time import MIN_TIMESTAMP


class ControlEvent(msgspec.Struct, frozen=True):
    """What a driver sends to all key groups between micro-batches.

    Times are milliseconds since the epoch, by operator uid. `assigned`, `parts` and `generated` are the driver's own,
    from which it goes on after a restart: each assigner's latest event time, over all and by part of its source, and
    the watermark that its generator has emitted, if it has one; `remembered` is what generators keep, by assigner and
    subtask, for those of the next micro-batch; `idle` are the streams, of those that are handed on to
    another query, of which nothing is expected for now. `ended` are the operators all of whose sources have been read
    to their end, while others have not.
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
        """Whether the input of an operator has ended."""
        return self.end or uid in self.ended


def decode_event(data: bytes) -> ControlEvent:
    """The inverse of `msgspec.json.encode`."""
    return msgspec.json.decode(data, type=ControlEvent)


class Arrived(NamedTuple):
    """Records that reach a key group together: its own, and broadcast ones, which come before them."""

    own: Sequence[pa.RecordBatch] = ()
    broadcast: Sequence[pa.RecordBatch] = ()


NOTHING = Arrived()


class MicroBatch(NamedTuple):
    """What a key group processes together, in this order; the end of the input, if the event says so, comes last."""

    ahead: Arrived = NOTHING
    """What operators upstream emitted for the control event."""

    event: ControlEvent | None = None
    behind: Arrived = NOTHING
    sorted_by_key: bool = False
    """Whether equal keys stand together already."""

    leads: bool = True
    """Whether what comes of broadcast records is emitted; so it is in one group of all."""

    epoch: int | None = None
    """The epoch of an iteration that ends with it."""

    terminated: bool = False
    """Whether the iteration has ended with the epoch before."""


def records_waiting(operator: str) -> str:
    """The counter of the elements that an operator holds back at the end of a partition, until the watermark passes."""
    return f"records that wait for the watermark at '{operator}'"


def timers_waiting(operator: str) -> str:
    """As above, of event-time timers, of which an open window has one."""
    return f"timers that wait for the watermark at '{operator}'"


_PLAIN = (str, int, bytes, bool)
"""Types of keys of which Arrow holds the same ones to be equal as Python does."""


class KeyGroups:
    """One keyed program, driven over one key group after another."""

    def __init__(
        self,
        program: Program,
        emit: Callable[[int, pa.RecordBatch], None],
        clock: Callable[[], int],
        subtask: Subtask = FIRST,
        keys_per_page: int = KEYS_PER_PAGE,
    ) -> None:
        assert program.keyed is not None
        self.program, self.keyed = program, program.keyed
        self.running = RunningProgram(program, emit, clock, subtask)
        operator = self.running.keyed
        assert operator is not None
        self.operator = operator
        self.grouped = GroupedOperator(
            operator,
            self.keyed.python,
            program.input.records.python,
            holds_back=operator.time_sorted and program.input.timestamped,
            after=lambda: self.running.drain(FLUSH),
            keys_per_page=keys_per_page,
        )
        self.broadcast: BroadcastCodec | None = None
        if isinstance(operator, BroadcastOperator):
            self.broadcast = BroadcastCodec(operator.where, operator.descriptors)
        self._touched: list[Hashable] = []
        """The keys of the group that have had records in this micro-batch, where it ends an epoch."""

        self._waiting = (0, 0)
        """The elements and event-time timers that waited for the watermark after the last micro-batch."""

        self.ahead = False
        """Whether what is emitted now is ahead of the micro-batch's control event for the operators downstream."""

    def run(self, store: GroupStore, given: MicroBatch, watermark: int = MIN_TIMESTAMP) -> int | None:
        """Processes a micro-batch of one group, and returns when its earliest processing-time timer is due.

        A group that has not seen a later one begins with `watermark`.
        """
        with self._opened(store, watermark) as group:
            self._process(group, given)
            self._waiting = self._waits(group)
            self.grouped.save(group)
        return min((p.processing_timer for p in group.index.pages if p.processing_timer is not None), default=None)

    def run_and_leave(self, store: GroupStore, given: MicroBatch, watermark: int) -> Block:
        """As `run`, and return what the group then holds instead of writing it to the store."""
        with self._opened(store, watermark) as group:
            self._process(group, given)
            self._waiting = self._waits(group)
            return self.grouped.left(group)

    def count_waiting(self) -> None:
        """Counts what waits for the watermark of the keys that the last micro-batch had to do with."""
        name = self.program.steps[0].name
        for counter, count in zip((records_waiting(name), timers_waiting(name)), self._waiting, strict=True):
            if count:
                self.running.metrics.count(counter, count)

    def _waits(self, group: Group) -> tuple[int, int]:
        return sum(map(len, group.held.values())), len(self.operator.event_timers)

    def run_unfinished(self, store: GroupStore, batch: pa.RecordBatch, watermark: int = MIN_TIMESTAMP) -> None:
        """Processes some records of one key, of which more follow, so that its bundle is not over."""
        with self._opened(store, watermark) as group:
            (key,), _ = runs(batch, self.keyed, self.program.input, self.operator.where)
            records, timestamps = self._read(batch)
            self.grouped.process_unfinished(group, key, records, timestamps)
            self.running.drain()
            self.running.flush()
            self.grouped.save(group)

    def contents(self, store: GroupStore) -> Iterator[Block]:
        """What a group's blocks hold, one after another, by column where they can be."""
        return self.grouped.contents(store)

    def table(self) -> StateTable:
        """The table of the operator's state, with the columns of what it has declared so far."""
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
        """Closes the operator's functions, also after a failure."""
        self.running.close(failure)

    def _process(self, group: Group, given: MicroBatch) -> None:
        event, uid = given.event, self.program.steps[0].uid
        self._touched.clear()
        self.ahead = True
        self._take(group, given.ahead, given)
        if event is not None:
            self.grouped.advance(group, event.watermarks.get(uid, MIN_TIMESTAMP), event.now)
        self.running.drain()
        self.ahead = False
        self._take(group, given.behind, given)
        if event is not None and event.ends(uid):
            self.grouped.end(group, event.last_event_times.get(uid))
        if given.epoch is not None:
            self.grouped.end_of_epoch(group, self._touched, given.epoch)
        if given.terminated:
            self.grouped.end_of_iteration(group)
            self.operator.end_of_group(group.store)
        self.running.drain()
        self.running.flush()

    def _take(self, group: Group, arrived: Arrived, given: MicroBatch) -> None:
        """Processes broadcast records, then the group's own."""
        if arrived.broadcast:
            self._broadcast(group, arrived.broadcast, given.leads)
        if arrived.own:
            self._records(group, arrived.own, given)

    @contextmanager
    def _opened(self, store: GroupStore, watermark: int) -> Iterator[Group]:
        """Makes a group current, with its copy of the broadcast state."""
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
        """Takes broadcast records into the group's copy of the state."""
        assert isinstance(self.operator, BroadcastOperator)
        assert self.broadcast is not None
        for batch in batches:
            self.running.broadcast(batch, leads)
            self.running.drain(FLUSH)
        group.store.write_page(BROADCAST, self.broadcast.encode(self.operator.broadcast))

    def _records(self, group: Group, batches: Sequence[pa.RecordBatch], given: MicroBatch) -> None:
        batch = pa.concat_batches(batches)
        layout, where = self.program.input, self.operator.where
        if self.operator.takes_batches:
            self.operator.process_batch(batch, group.store)
            self.running.drain(FLUSH)
            return
        if given.sorted_by_key:
            keys, starts = runs(batch, self.keyed, layout, where)
        else:
            batch, keys, starts = sorted_runs(batch, self.keyed, layout, where)
        records, timestamps = self._read(batch)
        if given.epoch is not None:
            self._touched += keys
        if type(keys[0]) in _PLAIN or len(set(keys)) == len(keys):
            self.grouped.process(group, keys, starts, records, timestamps)
            return
        for key, start, end in zip(keys, starts, (*starts[1:], len(records)), strict=True):
            self.grouped.process(group, [key], [0], records[start:end], timestamps[start:end])

    def _read(self, batch: pa.RecordBatch) -> tuple[Sequence[Any], Sequence[int | None]]:
        """The records of a batch and their event times."""
        layout = self.program.input
        with placed(self.operator.where):
            records = self.operator.read(batch, layout)
        timestamps: Sequence[int | None] = [None] * len(records)
        if layout.timestamped:
            timestamps = batch.column(TIMESTAMP).to_pylist()
        if self.operator.watermark > MIN_TIMESTAMP:
            late = sum(1 for t in timestamps if t is not None and t <= self.operator.watermark)
            if late:
                self.running.metrics.count("late records", late)
        return records, timestamps
