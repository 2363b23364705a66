"""State that runs hand to each other as a savepoint, in either mode: no matter where the input is cut, and by whom it
is read, the table is that of one run over all of it.
"""

from datetime import timedelta
from typing import NamedTuple

import pytest
from deltalake import DeltaTable

from dagster_unified.api import (
    CollectionSource,
    DeltaSink,
    EventTimeSessionWindows,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    Pipeline,
    ReducingStateDescriptor,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from dagster_unified.engine.batch.intermediates.store import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.records import record_type

HOUR = 3_600_000
BOUND = timedelta(hours=2)


class Event(NamedTuple):
    key: str
    at: int
    value: int


class Out(NamedTuple):
    branch: str
    key: str
    at: int
    value: int


class Latest(NamedTuple):
    at: int
    value: int | None


class Sessions(KeyedProcessFunction):
    """Every kind of state, timers and elements that are held back."""

    requires_time_sorted_input = True

    def open(self, context):
        self.until = context.get_state(ValueStateDescriptor("until", int))
        self.latest = context.get_state(ValueStateDescriptor("latest", Latest))
        self.seen = context.get_map_state(MapStateDescriptor("seen", int, Latest))
        self.values = context.get_list_state(ListStateDescriptor("values", tuple[int, str]))
        self.sum = context.get_reducing_state(ReducingStateDescriptor("sum", lambda a, b: a + b, int))

    def process_element(self, value, ctx):
        until = self.until.value()
        if until is not None:
            ctx.timer_service().delete_event_time_timer(until)
        until = value.at + 5 * HOUR
        self.until.update(until)
        self.latest.update(Latest(value.at, None if value.value % 2 else value.value))
        self.seen.put(value.at, self.latest.value())
        self.values.add((value.value, value.key))
        self.sum.add(value.value)
        ctx.timer_service().register_event_time_timer(until)

    def on_timer(self, timestamp, ctx):
        order = sum(n * number for n, (number, _) in enumerate(self.values.get(), 1))
        known = sum(latest.value or 0 for latest in self.seen.values())
        yield Out("sessions", ctx.get_current_key(), timestamp, self.sum.get() * 10_000 + order * 100 + known)
        for state in (self.until, self.latest, self.seen, self.values, self.sum):
            state.clear()


def add(a, b):
    return Out(a.branch, a.key, max(a.at, b.at), a.value + b.value)


def zoo(events, path):
    """Keyed operators of all kinds over one stream, and behind each other."""
    pipeline = Pipeline("zoo")
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(BOUND).with_timestamp_assigner("at")
    source = CollectionSource("events", record_type(Event, "events"), tuple(events))
    stream = pipeline.from_source(source).assign_timestamps_and_watermarks(strategy)
    sessions = stream.key_by("key").process(Sessions(), output_type=Out).uid("sessions")
    counted = (
        sessions.key_by(lambda o: len(o.key), key_type=int)
        .reduce(lambda a, b: Out("sums", a.key, 0, a.value + b.value))
        .uid("sums")
        .map(lambda o: Out("sums", "", 0, o.value), output_type=Out)
    )
    tumbling = (
        stream.map(lambda e: Out("tumbling", e.key, e.at, e.value), output_type=Out)
        .key_by("key")
        .window(TumblingEventTimeWindows.of(timedelta(hours=3)))
        .reduce(add)
        .uid("tumbling")
        .map(lambda o: Out(o.branch, o.key, o.at // (3 * HOUR), o.value), output_type=Out)
    )
    session_windows = (
        stream.map(lambda e: Out("gaps", e.key, e.at, e.value), output_type=Out)
        .key_by("branch", "key")
        .window(EventTimeSessionWindows.with_gap(timedelta(hours=4)))
        .reduce(add)
        .uid("gaps")
    )
    largest = stream.key_by("key").max_by("value").uid("largest")
    named = largest.map(lambda e: Out("largest", e.key, 0, e.value), output_type=Out)
    sink = DeltaSink(path, name="table", mode="upsert", key=("branch", "key", "at"))
    sessions.union(counted, tumbling, session_windows, named).sink_to(sink)
    return pipeline


def events_of(pairs):
    """Events whose times go up but for less than the bound."""
    return [Event(key, max(0, n * HOUR - early), value) for n, (key, early, value) in enumerate(pairs)]


EVENTS = events_of(
    [
        ("a", 0, 1),
        ("b", 0, 2),
        ("a", HOUR, 3),
        ("a", 0, 4),
        ("cc", 0, 5),
        ("b", 0, 6),
        ("b", HOUR, 6),
        ("a", 0, 7),
        ("cc", 0, 8),
        ("a", 0, 9),
        ("dd", 0, 10),
        ("a", 0, 11),
    ]
)


class Cut:
    """Runs a pipeline over pieces of its input, each from the savepoint of the one before."""

    def __init__(self, spark, folder):
        self.spark, self.folder, self.count = spark, folder, 0

    def run(self, pipeline, mode, options=None):
        self.count += 1
        launched = {
            "execution.runtime-mode": mode,
            "execution.checkpointing.dir": f"{self.folder}/checkpoints {self.count}",
            "pipeline.max-parallelism": 4,
            **(options or {}),
        }
        plan = pipeline.plan(launched)
        if mode == "STREAMING":
            return StreamingJob(plan, self.spark, Start("test")).run()
        store = IntermediateStore(f"{self.folder}/store {self.count}")
        return run_all(Run(plan, self.spark, store, f"run-{self.count}", f"run-{self.count}"))

    def in_pieces(self, build, pieces, modes, parallelism=(4, 4, 4)):
        path, before = f"{self.folder}/table", None
        for number, (events, mode) in enumerate(zip(pieces, modes, strict=True)):
            options = {"pipeline.max-parallelism": parallelism[number]}
            if before is not None:
                options["execution.state-recovery.path"] = before
            before = f"{self.folder}/savepoint {number}"
            if number < len(pieces) - 1:
                options["execution.savepoint.path"] = before
            self.run(build(events, path), mode, options)
        return table(path)


def table(path):
    return sorted(tuple(r.values()) for r in DeltaTable(path).to_pyarrow_table().to_pylist())


@pytest.fixture(scope="module")
def whole(spark, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    Cut(spark, folder).run(zoo(EVENTS, f"{folder}/table"), "BATCH")
    return table(f"{folder}/table")


@pytest.mark.parametrize(
    "modes",
    [("BATCH", "STREAMING"), ("STREAMING", "STREAMING"), ("STREAMING", "BATCH"), ("BATCH", "BATCH")],
    ids="-".join,
)
def test_a_run_goes_on_where_another_of_either_mode_has_left_its_state(spark, tmp_path, whole, modes):
    assert Cut(spark, tmp_path).in_pieces(zoo, [EVENTS[:6], EVENTS], modes, (4, 3)) == whole
