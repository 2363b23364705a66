"""The base of every keyed operator: an object with state, timers and a current key, which a driver drives.

Knows no kind of operator and no driver. A driver selects a key, passes a run of that key's records, advances the
watermark or the clock, and ends a bundle (a key in BATCH, a micro-batch in STREAMING) or the input. Rules: FLIP-134,
FLIP-140.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from numbers import Integral
from typing import Any, Protocol

import pyarrow as pa

from dagster_unified.errors import StateError, UnsupportedError
from dagster_unified.operators.functions.base import RuntimeContext
from dagster_unified.operators.functions.iterations import IterationListener
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.program.blocks import Collector, Copies
from dagster_unified.operators.state.backend import KeyedStateBackend
from dagster_unified.operators.time import MAX_TIMESTAMP, MIN_TIMESTAMP, TimeDomain
from dagster_unified.records import Copy, RecordType, shorten, type_name


@dataclass(frozen=True)
class KeyedOptions:
    """The options that change a keyed operator's behaviour (the option keys are in `graph/options.py`)."""

    incremental_updates: bool = False
    object_reuse: bool = False
    """Whether operators get the very records that others emitted, also mutable ones."""

    processing_time: str = "ALLOW"
    processing_time_at_end: str = "FIRE_AND_QUIESCE"
    end_of_input_chain: int = 16
    expiry: bool = True
    """Whether state with a time to live expires, as it does in STREAMING."""

    last_event_time: int | None = None
    """The last event time that was assigned upstream, where the driver knows it.

    Beyond it, chains of timers are bounded.
    """

    def readable(self, clock: Callable[[], int]) -> Callable[[], int]:
        """The clock for functions to read (`pipeline.processing-time.allow`)."""
        return _forbidden if self.processing_time == "FAIL" else clock


def _forbidden() -> int:
    raise UnsupportedError(
        "the processing time was read, and pipeline.processing-time.allow is FAIL; use event time, or launch with ALLOW"
        " or IGNORE"
    )


def timer_time(moment: Any) -> int:
    """The time of a timer as an int; raises `StateError` for anything that is no time."""
    if type(moment) is int and MIN_TIMESTAMP <= moment <= MAX_TIMESTAMP:
        return moment
    if not isinstance(moment, Integral) or isinstance(moment, bool):
        raise StateError(
            f"a timer's time is an int, in milliseconds since the epoch, and was given {shorten(moment)}"
            f" ({type_name(type(moment))}); round a float, and use to_millis(moment) for a datetime"
        )
    if not MIN_TIMESTAMP <= moment <= MAX_TIMESTAMP:  # type: ignore[operator]
        raise StateError(
            f"a timer's time is an int of 64 bits, in milliseconds since the epoch, and was given {moment}"
        )
    return int(moment)


class TimerQueue:
    """The timers of one keyed operator, for one time domain: each (key, timestamp) at most once.

    They are popped in the order of timestamps and, at one timestamp, of registration. A timer carries its *generation*:
    how many timers, each registered by the callback of the one before it and beyond the input's last event time, led to
    it. That is what ends a timer that re-registers itself for ever.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Hashable]] = []
        self._pending: dict[tuple[Hashable, int], tuple[int, int]] = {}
        self._registered = 0

    def __len__(self) -> int:
        return len(self._pending)

    def register(self, key: Hashable, timestamp: int, generation: int = 0) -> None:
        """Add a timer; one that is already pending stays, with the smaller generation."""
        slot = (key, timestamp)
        entry = self._pending.get(slot)
        if entry is None:
            self._registered += 1
            self._pending[slot] = (self._registered, generation)
            heappush(self._heap, (timestamp, self._registered, key))
        elif generation < entry[1]:
            self._pending[slot] = (entry[0], generation)

    def delete(self, key: Hashable, timestamp: int) -> None:
        """Remove a timer; does nothing where it is not pending."""
        self._pending.pop((key, timestamp), None)

    def pending(self) -> Iterator[tuple[int, Hashable, int]]:
        """All `(timestamp, key, generation)`, in the order of registration."""
        for (key, timestamp), (_, generation) in self._pending.items():
            yield timestamp, key, generation

    def due(self, until: int) -> Iterator[tuple[int, Hashable, int]]:
        """Pop `(timestamp, key, generation)` up to and including `until`, among them those registered meanwhile."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            timestamp, number, key = heappop(heap)
            entry = self._pending.get((key, timestamp))
            if entry is not None and entry[0] == number:
                del self._pending[(key, timestamp)]
                yield timestamp, key, entry[1]


class PageStore(Protocol):
    """Where a group's pages are kept. Entries that are no pages, such as its index, have numbers of their own."""

    def read_page(self, number: int) -> bytes | None: ...
    def write_page(self, number: int, data: bytes) -> None: ...
    def remove_page(self, number: int) -> None: ...


INDEX = 2**31 - 2
"""The number of the group's index, where it lies among the pages."""

BROADCAST = 2**31 - 1
"""The number of the group's copy of broadcast state."""

COLUMNS = 2**30
"""The number of the first column of the group's solution set, in a delta iteration."""


@dataclass(frozen=True, kw_only=True)
class OperatorContext:
    """The surroundings of a running operator."""

    where: str
    """How an error names it."""

    options: KeyedOptions = field(default_factory=KeyedOptions)
    clock: Callable[[], int]
    metrics: Metrics
    input: RecordType | None = None
    output: RecordType | None = None
    broadcast: StreamLayout | None = None
    """The columns of the broadcast stream of a head that has one."""

    copy: Copy | None = None
    """Copies an input record; None where records are immutable."""

    copies: Copies = field(default_factory=dict)
    """Copiers of the records that it emits."""


class KeyedOperator:
    """A keyed operator: state, timers of both domains, a watermark, a clock, and the current key."""

    takes_batches = False
    """Whether it takes records as an Arrow batch of many keys, and keeps state in pages of its own."""

    tells_listeners = False
    """Whether it notifies `CheckpointListener`s itself, so that its driver need not."""

    @property
    def subtask_key(self) -> Hashable | None:
        """The key of a subtask's state, where the stream has no keys."""
        return None

    @property
    def one_value(self) -> str | None:
        """The name of its only state, if that is one value for each key, which `process_runs` takes and puts."""
        return None

    def __init__(self, function: Any, context: OperatorContext) -> None:
        self.function = function
        options, clock = context.options, context.clock
        self.where = context.where
        self.options = options
        self.clock = clock
        self.copies = context.copies
        self.read_clock = options.readable(clock)
        """The clock, as the author's function may read it."""

        self.key: Hashable = None
        self.watermark = MIN_TIMESTAMP
        self.state = KeyedStateBackend(clock, options.expiry)
        self.event_timers = TimerQueue()
        self.processing_timers = TimerQueue()
        self.out = Collector(context.copies)
        self.at_end = False
        self.ended = False
        self.last_event_time = options.last_event_time
        self.restored = False
        """Whether the current state was saved before."""

        self.committed: int | None = None
        """The latest committed epoch, if any."""

    def open(self, context: Callable[[KeyedStateBackend | None], RuntimeContext]) -> None:
        """Called once before the first record, with a function that creates a runtime context."""

    def close(self) -> None:
        """Called once after the last record, and after a failure."""

    def check_state(self) -> None:
        """Check values written to state that have not been checked yet.

        A driver calls it before it commits anything.
        """
        try:
            self.state.check()
        except StateError as error:
            raise StateError(f"{self.where}: {error}") from error

    def select(self, key: Hashable) -> None:
        self.key = key
        self.state.select(key)

    def read(self, batch: pa.RecordBatch, layout: StreamLayout) -> Sequence[Any]:
        return layout.records.from_batch(batch.select(list(layout.records.names)))

    def combined(
        self, batch: pa.RecordBatch, layout: StreamLayout, starts: Sequence[int], goes_on: bool
    ) -> Sequence[Any] | None:
        """What each run of a batch becomes, to be processed instead of its records, if that is known.

        The first run is of the current key where it goes on.
        """
        return None

    def takes_columns(self, count: int) -> bool:
        """Whether `process_columns` is worth trying for so many records."""
        return False

    def process_columns(
        self,
        keys: Sequence[Hashable],
        starts: Sequence[int],
        batch: pa.RecordBatch,
        timestamps: Sequence[int | None],
        after: Callable[[], None],
    ) -> bool:
        """Process runs as `process_runs` does, on columns; return False, and change nothing, where it needs records."""
        return False

    def process(self, records: Sequence[Any], timestamps: Sequence[int | None]) -> None:
        """Process a run of records of the current key, in order."""
        raise NotImplementedError

    def process_batch(self, batch: pa.RecordBatch, store: PageStore) -> None:
        """Process the records of the current group, if it takes batches; its pages are in the store."""
        raise NotImplementedError

    def end_of_group(self, store: PageStore) -> None:
        """Called in an iteration when no record can come any more for the current group, if it takes batches."""

    def process_runs(
        self,
        keys: Sequence[Hashable],
        starts: Sequence[int],
        records: Sequence[Any],
        timestamps: Sequence[int | None],
        after: Callable[[], None],
    ) -> None:
        """Process runs of several keys, one for each, each a bundle; `after` is called after each."""
        for key, start, end in zip(keys, starts, [*starts[1:], len(records)], strict=True):
            self.select(key)
            self.process(records[start:end], timestamps[start:end])
            self.finish_bundle()
            after()

    @property
    def time_sorted(self) -> bool:
        """Whether records have to come in event-time order, and event time with them."""
        return False

    def process_in_time_order(self, key: Hashable, records: Sequence[Any], timestamps: Sequence[int | None]) -> None:
        """Process records sorted by event time; before each, event time advances to it and fires due timers.

        So a timer sees the state of its time in every driver, also in BATCH, whose watermark moves for nothing else.
        """
        for record, timestamp in zip(records, timestamps, strict=True):
            if timestamp is not None and timestamp - 1 > self.watermark:
                self.advance_watermark(timestamp - 1)
            self.select(key)
            self.process((record,), (timestamp,))

    def finish_bundle(self) -> None:
        """End the current key's bundle: emit the results held back for it."""

    @property
    def listeners(self) -> Sequence[IterationListener[Any]]:
        """The listeners to the epochs of an iteration."""
        return ()

    def end_of_epoch(self, epoch: int) -> None:
        """Called in an iteration when no record of this epoch, or an earlier one, can come for the current key."""

    def end_of_iteration(self) -> None:
        """Called in an iteration when no record can come any more for the current key."""

    def snapshot(self) -> None:
        """Called when the current state is about to be saved."""

    def on_timer(self, timestamp: int, generation: int, domain: TimeDomain) -> None:
        """Called for a timer of the current key."""

    def advance_watermark(self, watermark: int) -> None:
        """Advance event time and fire due timers."""
        self.watermark = watermark
        for timestamp, key, generation in self.event_timers.due(watermark):
            self.select(key)
            self.on_timer(timestamp, generation, TimeDomain.EVENT_TIME)

    def advance_processing_time(self, now: int) -> None:
        """Fire the processing-time timers that are due at `now`."""
        for timestamp, key, generation in self.processing_timers.due(now):
            self.select(key)
            self.on_timer(timestamp, generation, TimeDomain.PROCESSING_TIME)

    def end_of_input(self) -> None:
        """Advance event time to its end; then fire or drop pending processing-time timers, as configured.

        Event-time timers that a processing-time timer's callback registers fire as well; new processing-time timers are
        ignored (quiesced).
        """
        self.at_end = True
        self.advance_watermark(MAX_TIMESTAMP)
        self.ended = True
        if self.options.processing_time_at_end == "FIRE_AND_QUIESCE":
            self.advance_processing_time(MAX_TIMESTAMP)
            self.advance_watermark(MAX_TIMESTAMP)

    def forget(self, key: Hashable) -> None:
        """Drop all state of `key` and go back to the beginning of time: in BATCH, at the end of a key."""
        self.state.drop(key)
        self.processing_timers = TimerQueue()
        self.watermark = MIN_TIMESTAMP
        self.at_end = self.ended = False
