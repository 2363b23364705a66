"""The STREAMING driver: micro-batches of a key group through one keyed operator, with the group's state read and
written once.

A micro-batch brings a group records and possibly a control event: the watermark has moved, the clock has, the input has
ended. The event tells what the micro-batches before led to, so it comes first; ahead of it come only the records that
operators upstream emitted for it, and the end of the input comes last. Knows no engine; where a group's pages are kept
is a `GroupStore`'s affair.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from dagster_unified.errors import UnifiedError
from dagster_unified.operators.broadcast import BroadcastOperator
from dagster_unified.operators.keys import key_hash, runs
from dagster_unified.operators.layout import TIMESTAMP
from dagster_unified.operators.program.run import FLUSH, RunningProgram
from dagster_unified.operators.program.spec import Program
from dagster_unified.operators.state.pages import (
    BROADCAST,
    KEYS_PER_PAGE,
    BroadcastCodec,
    Content,
    Index,
    Page,
    PageCodec,
    decode_index,
    encode_index,
)
from dagster_unified.operators.state.state import StateDescriptor
from dagster_unified.operators.time import MAX_TIMESTAMP, MIN_TIMESTAMP
from dagster_unified.operators.timers import TimerQueue


class ControlEvent(msgspec.Struct, frozen=True):
    """What a driver tells all key groups between micro-batches. Times are milliseconds since the epoch, by operator
    uid.

    `assigned` is the driver's own: the latest event time of each assigner, from which it goes on after a restart.
    """

    number: int = 0
    watermarks: dict[str, int] = {}
    now: int = MIN_TIMESTAMP
    end: bool = False
    last_event_times: dict[str, int] = {}
    assigned: dict[str, int] = {}


def decode_event(data: bytes) -> ControlEvent:
    """The inverse of `msgspec.json.encode`."""
    return msgspec.json.decode(data, type=ControlEvent)


class Arrived(NamedTuple):
    """Records that reach a key group together: its own, and broadcast ones, which come before them."""

    own: Sequence[pa.RecordBatch] = ()
    broadcast: Sequence[pa.RecordBatch] = ()


_NOTHING = Arrived()


class GroupStore(Protocol):
    """Where one group's state is kept."""

    def read_index(self) -> bytes | None: ...
    def write_index(self, data: bytes) -> None: ...
    def read_page(self, number: int) -> bytes | None: ...
    def write_page(self, number: int, data: bytes) -> None: ...
    def remove_page(self, number: int) -> None: ...


class KeyGroups:
    """One keyed program, driven over one key group after another."""

    def __init__(
        self,
        program: Program,
        emit: Callable[[int, pa.RecordBatch], None],
        clock: Callable[[], int],
        subtask: int = 0,
        keys_per_page: int = KEYS_PER_PAGE,
    ) -> None:
        assert program.keyed is not None
        self.keys_per_page = keys_per_page
        self.program, self.keyed = program, program.keyed
        self.running = RunningProgram(program, emit, clock, subtask)
        operator = self.running.keyed
        assert operator is not None
        self.operator = operator
        self.codec = PageCodec(
            operator.where, self.keyed.python, program.input.records.python, operator.state.descriptors
        )
        self.broadcast = (
            BroadcastCodec(operator.where, operator.descriptors) if isinstance(operator, BroadcastOperator) else None
        )
        operator.state.on_register = self._declared_late
        self.ahead = False
        """Whether what is emitted now is ahead of the micro-batch's control event for the operators downstream."""

        self._group: _Group | None = None

    def run(
        self,
        store: GroupStore,
        ahead: Arrived,
        event: ControlEvent | None = None,
        behind: Arrived = _NOTHING,
        leads: bool = True,
        in_order: bool = False,
        unfinished: bool = False,
        watermark: int = MIN_TIMESTAMP,
    ) -> int | None:
        """Processes a micro-batch of one group: the records ahead of the control event, the event, those behind it, and
        the end of input.

        Returns the group's earliest processing-time timer. Of all groups one `leads`: what comes of broadcast records
        is emitted there. Records that are `in_order` are sorted by key already; where the batch is `unfinished`, more
        of its one key's come with the next. A group that does not know better begins with `watermark`.
        """
        group = self._group = _Group(store, self.codec, self.keys_per_page)
        operator = self.operator
        operator.state.keys, operator.state.created = group.keys, group.created
        operator.event_timers, operator.processing_timers = TimerQueue(), TimerQueue()
        operator.watermark = max(group.index.watermark, watermark)
        operator.at_end = operator.ended = False
        try:
            self.ahead = True
            if isinstance(operator, BroadcastOperator):
                self._begin_broadcast(operator, group)
            self._take(group, ahead, leads, in_order, unfinished)
            if event is not None:
                self._advance(group, event)
            self.running.drain()
            self.ahead = False
            self._take(group, behind, leads, in_order, unfinished)
            if event is not None and event.end:
                self._end(group, event)
            self.running.drain()
            operator.state.forget_expired(group.keys.values())
            group.save(operator.event_timers, operator.processing_timers, operator.watermark)
            return min((p.processing_timer for p in group.index.pages if p.processing_timer is not None), default=None)
        finally:
            operator.state.keys = {}
            self._group = None

    def contents(self, store: GroupStore) -> list[Content]:
        """What a group's pages hold: state, timers and held-back elements of its keys."""
        group = _Group(store, self.codec, self.keys_per_page)
        return group.load(range(len(group.index.pages)))

    def close(self) -> None:
        """Closes the operator's functions."""
        self.running.close()

    def _take(self, group: _Group, arrived: Arrived, leads: bool, in_order: bool, unfinished: bool) -> None:
        """Processes broadcast records, then the group's own."""
        if arrived.broadcast:
            self._broadcast(group, arrived.broadcast, leads)
        if arrived.own:
            self._records(group, arrived.own, in_order, unfinished)

    def _begin_broadcast(self, operator: BroadcastOperator, group: _Group) -> None:
        """Makes the group's copy of the broadcast state current."""
        assert self.broadcast is not None
        data = group.store.read_page(BROADCAST)
        operator.broadcast = {} if data is None else self.broadcast.decode(data)

        def all_keys() -> Iterable[Hashable]:
            self._load(group, range(len(group.index.pages)))
            return group.keys

        operator.keys = all_keys

    def _broadcast(self, group: _Group, batches: Sequence[pa.RecordBatch], leads: bool) -> None:
        """Takes broadcast records into the group's copy of the state."""
        assert isinstance(self.operator, BroadcastOperator)
        assert self.broadcast is not None
        for batch in batches:
            self.running.broadcast(batch, leads)
            self.running.drain(FLUSH)
        group.store.write_page(BROADCAST, self.broadcast.encode(self.operator.broadcast))

    def _records(self, group: _Group, batches: Sequence[pa.RecordBatch], in_order: bool, unfinished: bool) -> None:
        layout = self.program.input
        batch = pa.Table.from_batches(batches).combine_chunks()
        if self.keyed.columns and not in_order:
            batch = (
                batch.take(pc.sort_indices(batch, [(name, "ascending") for name in self.keyed.columns]))
                if self._sortable(batch)
                else self._sorted_in_python(batch)
            )
        (batch,) = batch.combine_chunks().to_batches()
        keys, starts = runs(batch, self.keyed, layout, self.operator.where)
        records = layout.records.from_batch(batch.select(list(layout.records.names)))
        timestamps: Sequence[int | None] = (
            batch.column(TIMESTAMP).to_pylist() if layout.timestamped else [None] * len(records)
        )
        if self.operator.watermark > MIN_TIMESTAMP:
            late = sum(1 for t in timestamps if t is not None and t <= self.operator.watermark)
            if late:
                self.running.metrics.count("late records", late)
        self._load(group, group.pages_of(keys))
        if self.operator.time_sorted and layout.timestamped:
            for key, start, end in zip(keys, starts, [*starts[1:], len(records)], strict=True):
                self._hold_early(group, key, records[start:end], timestamps[start:end])
        elif unfinished:
            self.operator.select(keys[0])
            self.operator.process(records, timestamps)
            self.running.drain(FLUSH)
        else:
            self.operator.process_runs(keys, starts, records, timestamps, lambda: self.running.drain(FLUSH))

    def _hold_early(
        self, group: _Group, key: Hashable, records: Sequence[Any], timestamps: Sequence[int | None]
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
            self.running.drain(FLUSH)

    def _advance(self, group: _Group, event: ControlEvent) -> None:
        """Moves event time and the clock to where the event says they are."""
        operator = self.operator
        watermark = max(event.watermarks.get(self.program.steps[0].uid, MIN_TIMESTAMP), operator.watermark)
        self._load(group, group.pages_due(watermark, event.now))
        self._release(group, watermark)
        if watermark > operator.watermark:
            operator.advance_watermark(watermark)
        operator.advance_processing_time(event.now)

    def _end(self, group: _Group, event: ControlEvent) -> None:
        """Ends the input: what is held back is processed, and all timers fire."""
        self._load(group, group.pages_due(MAX_TIMESTAMP, MAX_TIMESTAMP))
        self._release(group, MAX_TIMESTAMP)
        self.operator.last_event_time = event.last_event_times.get(self.program.steps[0].uid)
        self.operator.end_of_input()

    def _release(self, group: _Group, watermark: int) -> None:
        """Processes the held-back elements that the watermark passes."""
        for timestamp, key, record in group.release(watermark):
            self.operator.process_in_time_order(key, [record], [timestamp])
            self.operator.finish_bundle()
            self.running.drain(FLUSH)

    def _load(self, group: _Group, pages: Iterable[int]) -> None:
        for content in group.load(pages):
            for timestamp, key, generation in content.event_timers:
                self.operator.event_timers.register(key, timestamp, generation)
            for timestamp, key, generation in content.processing_timers:
                self.operator.processing_timers.register(key, timestamp, generation)

    def _declared_late(self, descriptor: StateDescriptor[Any]) -> None:
        """A state that is declared only now: what was read of it before is decoded."""
        for state in self._group.keys.values() if self._group is not None else ():
            self.codec.declare(descriptor, state)

    def _sortable(self, batch: pa.Table) -> bool:
        return not any(pa.types.is_nested(batch.schema.field(name).type) for name in self.keyed.columns)

    def _sorted_in_python(self, batch: pa.Table) -> pa.Table:
        """Nested keys, which Arrow does not sort; any order will do that brings equal ones together."""
        columns = [batch.column(name).to_pylist() for name in self.keyed.columns]
        texts = [repr(values) for values in zip(*columns, strict=True)]
        return batch.take(pa.array(sorted(range(len(texts)), key=texts.__getitem__), pa.int64()))


class _Group:
    """The pages of one group, as far as they have been read, and the state of all their keys."""

    def __init__(self, store: GroupStore, codec: PageCodec, keys_per_page: int) -> None:
        self.store, self.codec, self.keys_per_page = store, codec, keys_per_page
        data = store.read_index()
        self.before = data
        self.index = decode_index(data) if data is not None else Index(MIN_TIMESTAMP, [Page()])
        self.keys: dict[Hashable, dict[str, Any]] = {}
        self.created: list[Hashable] = []
        self.pages: dict[int, Content] = {}
        self.held: dict[Hashable, list[tuple[int, Any]]] = {}
        self.loaded: dict[int, bytes | None] = {}
        self.parts: set[int] = set()
        """The parts of large lists and maps in the pages that were read."""

        self.read: dict[int, bytes] = {}
        self._hashes: dict[Hashable, int] = {}

    def page_of(self, key: Hashable) -> int:
        """The page that a key is in. The hash's lowest part chose the group already, so that the rest is used."""
        found = self._hashes.get(key)
        if found is None:
            found = self._hashes[key] = key_hash(key) >> 12
        return found & (len(self.index.pages) - 1)

    def pages_of(self, keys: Sequence[Hashable]) -> set[int]:
        """The pages that some keys are in; where that will be nearly all of them, all."""
        count = len(self.index.pages)
        return set(range(count)) if len(keys) >= 4 * count else {self.page_of(key) for key in keys}

    def pages_due(self, watermark: int, now: int) -> list[int]:
        """The pages with a timer or a held-back element that is due."""

        def due(moment: int | None, until: int) -> bool:
            return moment is not None and moment <= until

        return [
            i
            for i, p in enumerate(self.index.pages)
            if due(p.event_timer, watermark) or due(p.held, watermark) or due(p.processing_timer, now)
        ]

    def load(self, pages: Iterable[int]) -> list[Content]:
        """Reads pages that have not been read."""
        found = []
        for number in sorted(pages):
            if number in self.loaded:
                continue
            data = self.index.inline if len(self.index.pages) == 1 else self.store.read_page(number)
            self.loaded[number] = data
            if data is None:
                if self.index.pages[number] != Page():
                    raise UnifiedError(
                        f"{self.codec.where}: page {number} of a key group's state is missing in the checkpoint;"
                        " restore from an earlier one"
                    )
                continue
            content = self.pages[number] = self.codec.decode(data, self._read_part)
            self.parts |= content.parts()
            self.keys.update(content.keys)
            for timestamp, key, record in content.held:
                self.held.setdefault(key, []).append((timestamp, record))
            found.append(content)
        return found

    def hold(self, key: Hashable, elements: list[tuple[int, Any]]) -> None:
        """Keeps elements until the watermark passes them."""
        self.held.setdefault(key, []).extend(elements)

    def release(self, watermark: int) -> list[tuple[int, Hashable, Any]]:
        """The held-back elements that the watermark passes, in event-time order, equal ones as they arrived."""
        due = [(t, key, record) for key, elements in self.held.items() for t, record in elements if t <= watermark]
        if due:
            waiting = {key: [e for e in elements if e[0] > watermark] for key, elements in self.held.items()}
            self.held = {key: elements for key, elements in waiting.items() if elements}
            due.sort(key=lambda e: e[0])
        return due

    def save(self, event_timers: TimerQueue, processing_timers: TimerQueue, watermark: int) -> None:
        """Writes back what has changed."""
        count = sum(p.keys for i, p in enumerate(self.index.pages) if i not in self.loaded) + len(self.keys)
        if count > self.keys_per_page * len(self.index.pages):
            for content in self.load(range(len(self.index.pages))):
                for queue, timers in (
                    (event_timers, content.event_timers),
                    (processing_timers, content.processing_timers),
                ):
                    for timestamp, key, generation in timers:
                        queue.register(key, timestamp, generation)
            while count > self.keys_per_page * len(self.index.pages):
                self.index.pages = [Page() for _ in range(2 * len(self.index.pages))]
            self.loaded = dict.fromkeys(range(len(self.index.pages)))
            self.pages, self.created = {}, list(self.keys)
        self._write(event_timers, processing_timers)
        self.index.watermark = watermark
        index = encode_index(self.index)
        if index != self.before:
            self.store.write_index(index)

    def _write(self, event_timers: TimerQueue, processing_timers: TimerQueue) -> None:
        pages: dict[int, Content] = {number: Content(large=bool(self.parts)) for number in self.loaded}
        for number, content in self.pages.items():
            pages[number].keys = (
                content.keys
                if all(content.keys.values())
                else {key: state for key, state in content.keys.items() if state}
            )
        for key in self.created:
            state = self.keys[key]
            if state:
                pages[self.page_of(key)].keys[key] = state
        for timer in event_timers.pending():
            pages[self.page_of(timer[1])].event_timers.append(timer)
        for timer in processing_timers.pending():
            pages[self.page_of(timer[1])].processing_timers.append(timer)
        for key, elements in self.held.items():
            pages[self.page_of(key)].held += [(timestamp, key, record) for timestamp, record in elements]
        single = len(self.index.pages) == 1
        self.index.inline = self.index.inline if single else None
        for number, content in pages.items():
            self.index.pages[number] = content.entry()
            data = self.codec.encode(content, self._write_part, self._read_part)
            if single:
                self.index.inline = data
            elif data != self.loaded[number]:
                self.store.write_page(number, data)
        for gone in (
            self.parts - {number for content in pages.values() for number in content.parts()} if self.parts else ()
        ):
            self.store.remove_page(gone)

    def _read_part(self, number: int) -> bytes:
        data = self.store.read_page(number)
        if data is None:
            raise UnifiedError(
                f"{self.codec.where}: a part of a key group's state is missing in the checkpoint; restore from an"
                " earlier one"
            )
        self.read[number] = data
        return data

    def _write_part(self, number: int | None, data: bytes) -> int:
        if number is None:
            self.index.parts += 1
            number = -self.index.parts
        if self.read.get(number) != data:
            self.store.write_page(number, data)
        return number
