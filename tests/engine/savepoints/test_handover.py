"""State that runs hand to each other as a savepoint, in either mode.

No matter where the input is cut, and by whom it is read, the table is that of one run over all of it.
"""

import os
import shutil
import subprocess
import time
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_unified.api import (
    AggregateFunction,
    AggregatingStateDescriptor,
    ArrowListStateDescriptor,
    BroadcastProcessFunction,
    EventTimeSessionWindows,
    KeyedBatchFunction,
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    Pipeline,
    ProcessJoinFunction,
    ProcessWindowFunction,
    ReducingStateDescriptor,
    SlidingEventTimeWindows,
    StateTtlConfig,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from dagster_unified.api import functions as F
from dagster_unified.connectors import CollectionSource, DeltaSink, ParquetSource
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.events import EpochCommitted
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.errors import StateError
from dagster_unified.operators.state.chunks import ENTRIES_PER_CHUNK
from dagster_unified.records import record_type
from dagster_unified.state import Savepoint, manifest
from dagster_unified.testing import run_pipeline
from tests.depth import NIGHTLY, SEED, examples, rotated
from tests.engine.savepoints.killed import command
from tests.support import MODES, Event, table_rows

ROOT = Path(__file__).parents[3]
HOUR = 3_600_000
BOUND = timedelta(hours=2)
SIX_HOURS = TumblingEventTimeWindows.of(timedelta(hours=6))
SESSIONS = EventTimeSessionWindows.with_gap(timedelta(hours=4))


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


LIMITS = MapStateDescriptor("limits", str, int)
RULES = ("a", "b", "cc", "dd")


class Weighted(KeyedBroadcastProcessFunction):
    """Sums the values of a key, each times what the broadcast state says of the key."""

    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", int))

    def process_element(self, value, ctx):
        weight = ctx.get_broadcast_state(LIMITS).get(value.key)
        self.total.update((self.total.value() or 0) + value.value * weight)
        yield Out("weighted", value.key, 0, self.total.value())

    def process_broadcast_element(self, value, ctx):
        limits = ctx.get_broadcast_state(LIMITS)
        limits.put(value, 10 + RULES.index(value))
        yield Out("rules", value, 0, limits.get(value))


def add(a, b):
    return Out(a.branch, a.key, max(a.at, b.at), a.value + b.value)


def timed(pipeline, events):
    """The stream of some events, or of a source of them, with their times."""
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(BOUND).with_timestamp_assigner("at")
    source = events if isinstance(events, ParquetSource) else CollectionSource(events, Event, "events")
    return pipeline.from_source(source).assign_timestamps_and_watermarks(strategy)


# Keyed operators of all kinds, each over one stream of events. What it emits names its rows by branch, key and time.


def sessions(pipeline, stream):
    return stream.key_by("key").process(Sessions(), output_type=Out).uid("sessions")


def behind_each_other(pipeline, stream):
    return (
        stream.key_by("key")
        .process(Sessions(), output_type=Out)
        .uid("ahead")
        .key_by(lambda o: len(o.key), key_type=int)
        .reduce(lambda a, b: Out("behind", a.key, 0, a.value + b.value))
        .uid("behind")
        .map(lambda o: Out("behind", str(len(o.key)), 0, o.value), output_type=Out)
    )


def totals(stream, branch, hours, lateness):
    return (
        stream.map(lambda e: Out(branch, e.key, e.at, e.value), output_type=Out)
        .key_by("key")
        .window(TumblingEventTimeWindows.of(timedelta(hours=hours)))
        .allowed_lateness(lateness)
        .reduce(add)
        .uid(branch)
        .map(lambda o: Out(o.branch, o.key, o.at // (hours * HOUR), o.value), output_type=Out)
    )


def tumbling(pipeline, stream):
    return totals(stream, "tumbling", 3, timedelta(hours=1))


class Window(ProcessWindowFunction):
    """A window's elements, and how many windows of the key there were."""

    def process(self, key, context, elements):
        windows = context.global_state().get_state(ValueStateDescriptor("windows", int))
        windows.update((windows.value() or 0) + 1)
        total = sum(place * e.value for place, e in enumerate(sorted(elements), 1))
        yield Out(f"windows {windows.value()}", key, context.window().max_timestamp(), total)


def sliding(pipeline, stream):
    windows = stream.key_by("key").window(SlidingEventTimeWindows.of(timedelta(hours=4), timedelta(hours=2)))
    return windows.process(Window(), output_type=Out).uid("sliding")


def session_windows(pipeline, stream):
    return (
        stream.map(lambda e: Out("gaps", e.key, e.at, e.value), output_type=Out)
        .key_by("branch", "key")
        .window(SESSIONS)
        .reduce(add)
        .uid("gaps")
    )


def rolling(pipeline, stream):
    largest = stream.key_by("key").max_by("value").uid("largest")
    return largest.map(lambda e: Out("largest", e.key, 0, e.value), output_type=Out)


def weighted(pipeline, stream):
    rules = pipeline.from_source(CollectionSource(RULES, str, "rules")).broadcast(LIMITS)
    return stream.key_by("key").connect(rules).process(Weighted(), output_type=Out).uid("weighted")


class Pairs(ProcessJoinFunction):
    def process_element(self, left, right, ctx):
        yield Out(f"pairs {left.value} {right.at} {right.value}", left.key, left.at, 10 * left.value + right.value)


def even(stream):
    return stream.filter(lambda e: e.value % 2 == 0)


def interval_join(pipeline, stream):
    both = stream.key_by("key").interval_join(even(stream).key_by("key"))
    return both.between(timedelta(hours=-3), timedelta(hours=2)).process(Pairs(), output_type=Out).uid("pairs")


def window_join(pipeline, stream):
    windows = stream.join(even(stream)).where("key").equal_to("key").window(SIX_HOURS)
    joined = windows.apply(lambda a, b: Out(f"joined {a.value} {b.at}", a.key, a.at, b.value), output_type=Out)
    return joined.uid("joined")


def co_group(pipeline, stream):
    windows = stream.co_group(even(stream)).where("key").equal_to("key").window(SESSIONS)

    def grouped(every, evens):
        every = list(every)
        value = 100 * sum(e.value for e in every) + sum(e.value for e in evens)
        return [Out("groups", every[0].key, min(e.at for e in every), value)]

    return windows.apply(grouped, output_type=Out).uid("groups")


class Spread(AggregateFunction):
    """How far apart the largest and the smallest number are."""

    def create_accumulator(self) -> tuple[int, int]:
        return (100, 0)

    def add(self, value, accumulator):
        return min(value, accumulator[0]), max(value, accumulator[1])

    def get_result(self, accumulator):
        return accumulator[1] - accumulator[0]

    def merge(self, a, b):
        return min(a[0], b[0]), max(a[1], b[1])


class Living(KeyedProcessFunction):
    """State with a time to live of an hour."""

    ttl = StateTtlConfig(timedelta(hours=1))

    def open(self, context):
        self.count = context.get_state(ValueStateDescriptor("count", int, self.ttl))
        self.values = context.get_map_state(MapStateDescriptor("values", int, list[int], self.ttl))
        self.spread = context.get_aggregating_state(AggregatingStateDescriptor("spread", Spread(), tuple[int, int]))

    def process_element(self, value, ctx):
        self.count.update((self.count.value() or 0) + 1)
        self.spread.add(value.value)
        self.values.put(value.at, sorted([*(self.values.get(value.at) or []), value.value]))
        order = sum(place * n for place, (_, v) in enumerate(sorted(self.values.items()), 1) for n in v)
        yield Out("living", value.key, 0, 1_000 * order + 100 * self.spread.get() + self.count.value())


def living(pipeline, stream):
    return stream.key_by("key").process(Living(), output_type=Out).uid("living")


class Rows(KeyedBatchFunction):
    """Keeps the rows of a key as Arrow batches, and emits what they come to."""

    def open(self, context):
        self.rows = context.get_state(ArrowListStateDescriptor("rows", Latest))

    def process_batch(self, batch, ctx):
        self.rows.add(batch)
        rows = self.rows.get().to_pylist()
        value = 1_000 * len(rows) + sum(row["at"] // HOUR * row["value"] for row in rows)
        made = record_type(Out).to_batch([Out("rows", ctx.get_current_key(), 0, value)])
        return made.append_column("__ts", batch["__ts"].slice(0, 1))


def rows(pipeline, stream):
    return stream.key_by("key").map_batches(Rows(), Out).uid("rows")


class Totals(NamedTuple):
    key: str
    window_end: int
    total: int
    most: int


class Whole(NamedTuple):
    key: str
    total: int
    mean: float


def window_columns(pipeline, stream):
    hours = stream.key_by("key").window(SIX_HOURS)
    found = hours.agg(F.sum("value").alias("total"), F.max("value").alias("most"), output_type=Totals).uid("columns")
    return found.map(lambda t: Out("columns", t.key, t.window_end, 100 * t.total + t.most), output_type=Out)


def session_columns(pipeline, stream):
    found = stream.key_by("key").window(SESSIONS)
    found = found.agg(F.sum("value").alias("total"), F.count("at").alias("most"), output_type=Totals).uid("spans")
    return found.map(lambda t: Out("spans", t.key, t.window_end, 100 * t.total + t.most), output_type=Out)


def all_columns(pipeline, stream):
    """Aggregates without a window, and a keyed operator behind them."""
    found = stream.key_by("key").agg(F.sum("value").alias("total"), F.avg("value").alias("mean"), output_type=Whole)
    last = found.uid("whole").key_by("key").reduce(lambda a, b: b).uid("last")
    return last.map(lambda t: Out("whole", t.key, 0, 1_000 * t.total + round(100 * t.mean)), output_type=Out)


class Full(ProcessWindowFunction):
    """How many windows of a key were full."""

    def process(self, key, context, elements):
        windows = context.global_state().get_state(ValueStateDescriptor("windows", int))
        windows.update((windows.value() or 0) + 1)
        yield Out("full", key, 0, 10 * windows.value() + len(list(elements)))


def count_windows(pipeline, stream):
    return stream.key_by("key").count_window(3).process(Full(), output_type=Out).uid("full")


def by_the_clock(pipeline, stream):
    """Windows of processing time; what they come to in the end does not depend on where they are cut."""
    return (
        stream.map(lambda e: Out("clock", e.key, 0, e.value), output_type=Out)
        .key_by("key")
        .window(TumblingProcessingTimeWindows.of(timedelta(seconds=1)))
        .reduce(add)
        .uid("clock")
        .key_by("key")
        .reduce(add)
        .uid("clocked")
    )


def late(pipeline, stream):
    """Events that come behind the watermark, within the lateness that their windows allow."""
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    return totals(stream.assign_timestamps_and_watermarks(strategy), "late", 2, timedelta(hours=6))


def exchanged(pipeline, stream):
    """Records that have gone different ways to a keyed operator, by one of them twice."""
    ways = {
        "rebalanced": stream.rebalance(),
        "copied": stream.broadcast(),
        "collected": stream.global_(),
        "chosen": stream.partition_custom(lambda key, count: len(key) % count, "key"),
    }
    first, *others = [
        way.map(lambda e, name=name: Out(name, e.key, 0, e.value), output_type=Out).set_parallelism(2)
        for name, way in ways.items()
    ]
    return first.union(*others).key_by("branch", "key").reduce(add).uid("exchanged")


class SixHours(KeyedCoProcessFunction):
    """Sums of two streams for every six hours, which timers emit."""

    def open(self, context):
        self.sums = context.get_map_state(MapStateDescriptor("sums", int, tuple[int, int]))

    def added(self, event, ctx, first, second):
        end = event.at - event.at % (6 * HOUR) + 6 * HOUR - 1
        before = self.sums.get(end) or (0, 0)
        self.sums.put(end, (before[0] + first, before[1] + second))
        ctx.timer_service().register_event_time_timer(end)
        return ()

    def process_element1(self, value, ctx):
        return self.added(value, ctx, value.value, 0)

    def process_element2(self, value, ctx):
        return self.added(value, ctx, 0, value.value)

    def on_timer(self, timestamp, ctx):
        first, second = self.sums.get(timestamp)
        self.sums.remove(timestamp)
        yield Out("connected", ctx.get_current_key(), timestamp, 1_000 * first + second)


def connected(pipeline, stream):
    both = stream.key_by("key").connect(even(stream).key_by("key"))
    return both.process(SixHours(), output_type=Out).uid("connected")


MANY = ENTRIES_PER_CHUNK * 3 // 5


class Large(KeyedProcessFunction):
    """A list and a map of a key that two events make so large that they get parts of their own."""

    def open(self, context):
        self.values = context.get_list_state(ListStateDescriptor("values", int))
        self.seen = context.get_map_state(MapStateDescriptor("seen", int, int))

    def process_element(self, value, ctx):
        self.values.add_all([value.value * n for n in range(MANY)])
        for n in range(value.at, value.at + MANY):
            self.seen.put(n, (self.seen.get(n) or 0) + value.value)
        found = sum(self.values.get()) + sum(at % 1_000 * count for at, count in self.seen.items())
        yield Out("large", value.key, 0, 2 * found + len(list(self.values.get())))


def large(pipeline, stream):
    return stream.key_by("key").process(Large(), output_type=Out).uid("large")


GROUPS = (
    (sessions, tumbling, weighted),
    (behind_each_other, interval_join, session_windows),
    (living, co_group, rolling),
    (sliding, window_join, rows),
    (window_columns, count_windows, late),
    (all_columns, session_columns, by_the_clock),
    (exchanged, connected, large),
)
BRANCHES = list(dict.fromkeys(chain(*GROUPS)))


def zoo(*branches):
    """A pipeline of these operators over one stream, into one table."""

    def build(events, path):
        pipeline = Pipeline("zoo")
        stream = timed(pipeline, events)
        first, *others = [branch(pipeline, stream) for branch in branches]
        sink = DeltaSink(path, name="table", mode="upsert", key=("branch", "key", "at"))
        (first.union(*others) if others else first).sink_to(sink)
        return pipeline

    return build


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

    def plan(self, pipeline, mode, options):
        self.count += 1
        launched = {
            "execution.runtime-mode": mode,
            "execution.checkpointing.dir": f"{self.folder}/checkpoints {self.count}",
            "pipeline.max-parallelism": 4,
            **options,
        }
        return pipeline.plan(launched)

    def run(self, pipeline, mode, options=None, patience=20.0):
        plan = self.plan(pipeline, mode, options or {})
        if mode == "STREAMING":
            return StreamingJob(plan, self.spark, Start(uuid4().hex, patience=patience)).run()
        store, run = IntermediateStore(f"{self.folder}/store {self.count}"), uuid4().hex
        return run_all(Run(plan, self.spark, store, run, run))

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
            if "execution.savepoint.path" in options:
                left = Savepoint.read(before)
                for operator in left.operators:
                    left.with_state(operator.uid, left.keyed_state(operator.uid))  # what a run leaves may be given
        return table_rows(path)


def test_a_run_without_data_hands_on_what_it_was_given(spark, tmp_path):
    once = str(tmp_path / "once")
    Cut(spark, tmp_path / "whole").run(zoo(sessions)(EVENTS, once), "BATCH")
    pieces, modes = [EVENTS[:0], EVENTS[:6], EVENTS[:6], EVENTS], ("STREAMING", "BATCH", "STREAMING", "STREAMING")
    assert Cut(spark, tmp_path).in_pieces(zoo(sessions), pieces, modes, (4, 4, 4, 4)) == table_rows(once)


events = st.lists(
    st.tuples(st.sampled_from(["a", "b", "cc"]), st.integers(0, 2 * HOUR - 1), st.integers(1, 9)),
    min_size=2,
    max_size=20,
)


@settings(max_examples=examples(1), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=events, data=st.data())
def test_any_events_may_be_cut_anywhere_and_read_in_any_mode(spark, tmp_path_factory, pairs, data):
    folder, found = tmp_path_factory.mktemp("any"), events_of(pairs)
    build = zoo(*data.draw(st.lists(st.sampled_from(BRANCHES), min_size=1, max_size=3, unique=True)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(found)), min_size=2, max_size=2)))
    modes = data.draw(st.lists(st.sampled_from(["BATCH", "STREAMING"]), min_size=3, max_size=3))
    groups = data.draw(st.lists(st.integers(1, 6), min_size=3, max_size=3))
    Cut(spark, folder / "once").run(build(found, f"{folder}/once"), "BATCH")
    once = table_rows(f"{folder}/once")
    written = run_pipeline(build(found, f"{folder}/harness"), "BATCH").sinks["table"]
    assert sorted({(o.branch, o.key, o.at): o for o in written}.values()) == once
    pieces = [found[: cuts[0]], found[: cuts[1]], found]
    assert Cut(spark, folder).in_pieces(build, pieces, modes, groups) == once


PAIRS = [("BATCH", "STREAMING"), ("STREAMING", "STREAMING"), ("STREAMING", "BATCH"), ("BATCH", "BATCH")]
HANDOVERS = [
    pytest.param(modes, group, id="-".join([*modes, *(branch.__name__ for branch in group)]))
    for place, modes in enumerate(PAIRS)
    for number, group in enumerate(GROUPS)
    if NIGHTLY or number == (place + SEED) % len(GROUPS)
]
"""Each pair of modes with a group of operators, another one from day to day."""


@pytest.mark.parametrize(("modes", "group"), rotated(HANDOVERS, 1))
def test_a_run_goes_on_where_another_of_either_mode_has_left_its_state(spark, tmp_path, modes, group):
    build, once = zoo(*group), f"{tmp_path}/once"
    Cut(spark, tmp_path / "whole").run(build(EVENTS, once), "BATCH")
    assert table_rows(once)
    assert Cut(spark, tmp_path).in_pieces(build, [EVENTS[:6], EVENTS], modes, (4, 3)) == table_rows(once)


@pytest.mark.parametrize("modes", rotated(PAIRS, 1), ids="-".join)
def test_a_time_to_live_runs_on_between_two_runs_and_ends_in_a_stream_only(spark, tmp_path, modes):
    def aged(values, by):
        """State of one key, as if it had been renewed earlier."""
        if isinstance(values, dict):
            return values | {"renewed": values["renewed"] - by}
        return [(key, aged(value, by)) for key, value in values]

    cut, build, path = Cut(spark, tmp_path), zoo(living), f"{tmp_path}/table"
    cut.run(build(EVENTS[:6], path), modes[0], {"execution.savepoint.path": f"{tmp_path}/left"})
    left = Savepoint.read(f"{tmp_path}/left")
    held = left.keyed_state("living")
    rows = held.to_pylist()
    for row in rows:
        by = HOUR if row["key"] == "a" else HOUR // 3
        row.update({name: aged(row[name], by) for name in ("count", "values")})
    left.with_state("living", pa.Table.from_pylist(rows, held.schema)).write(f"{tmp_path}/aged")
    cut.run(build(EVENTS, path), modes[1], {"execution.state-recovery.path": f"{tmp_path}/aged"})
    once = f"{tmp_path}/once"
    cut.run(build(EVENTS, once), "BATCH")
    expected = {key: value for _, key, _, value in table_rows(once)}
    if modes[1] == "STREAMING":
        order, spread, count = 7 + 2 * 9 + 3 * 11, 11 - 1, 3
        expected["a"] = 1_000 * order + 100 * spread + count
    assert {key: value for _, key, _, value in table_rows(path)} == expected


def arrive(folder, names, events, age):
    """Each event becomes a file, the later one with the older time."""
    for number, (name, event) in enumerate(zip(names, events, strict=True)):
        staged = folder / f".{name}"
        pq.write_table(pa.Table.from_pylist([event._asdict()]), staged)
        os.utime(staged, (1_700_000_000 - age - number,) * 2)
        staged.rename(folder / f"{name}.parquet")


@pytest.mark.rotates("stories")
@pytest.mark.parametrize("group", rotated(GROUPS, 1), ids=lambda group: "-".join(one.__name__ for one in group))
def test_a_job_that_watches_a_folder_goes_on_where_one_over_what_was_there_has_ended(spark, tmp_path, group):
    cut, folder = Cut(spark, tmp_path), tmp_path / "in"
    folder.mkdir()
    path, once, savepoint = f"{tmp_path}/table", f"{tmp_path}/once", f"{tmp_path}/savepoint"

    def build(table, **options):
        return zoo(*group)(ParquetSource(str(folder), Event, name="events", **options), table)

    arrive(folder, ["m1", "m2", "m3", "m4", "m5", "m6"], EVENTS[:6], age=0)
    assert cut.run(build(path), "STREAMING", {"execution.savepoint.path": savepoint}) == "finished"
    arrive(folder, ["a3", "a2", "a1"], EVENTS[6:9], age=1_000_000)
    plan = cut.plan(build(path, monitor=True), "STREAMING", {"execution.state-recovery.path": savepoint})
    epochs, stops = [], time.monotonic() + 120

    def observe(event):
        if isinstance(event, EpochCommitted) and event.rows_in:
            if not epochs:
                arrive(folder, ["z3", "z2", "m0"], EVENTS[9:], age=500)
            epochs.append(event.rows_in)
            if sum(epochs) >= 6:
                job.drain()

    job = StreamingJob(plan, spark, Start("watching", patience=0.5), observe)
    assert job.run(lambda: time.monotonic() > stops, 0.02) == "finished"
    assert sum(epochs) == 6
    cut.run(build(once), "BATCH")
    assert table_rows(path) == table_rows(once)


WORDS = MapStateDescriptor("words", str, int)


class Word(NamedTuple):
    word: str


class WordSince(NamedTuple):
    """The next version of a word."""

    word: str
    since: str = "the savepoint"


def beside(numbers: pa.RecordBatch, words: pa.Table) -> pa.RecordBatch:
    held = sorted(" ".join(word.values()) for word in words.to_pylist())
    return pa.RecordBatch.from_pydict({"value": [f"{number} {held}" for number in numbers["value"].to_pylist()]})


class Worded(BroadcastProcessFunction):
    """Emits what the broadcast state holds."""

    def process_element(self, value, ctx):
        yield f"{value} {sorted(ctx.get_broadcast_state(WORDS).items())}"

    def process_broadcast_element(self, value, ctx):
        ctx.get_broadcast_state(WORDS).put(value, len(value))


def worded(numbers, words, path, kind=Word):
    """Two operators with broadcast state: a map, and a table with rows of a kind."""
    pipeline = Pipeline("worded")
    source = CollectionSource(numbers, int, "numbers")
    rules = pipeline.from_source(CollectionSource(words, str, "words"))
    stream = pipeline.from_source(source)
    ruled = stream.connect(rules.broadcast(WORDS)).process(Worded(), output_type=str).uid("worded")
    rows = rules.map(lambda word: kind(word), kind).broadcast()
    ruled.union(stream.connect(rows).map_batches(beside, str).uid("beside")).sink_to(DeltaSink(path, name="table"))
    return pipeline


@pytest.mark.parametrize("modes", rotated(PAIRS, 1), ids="-".join)
def test_broadcast_state_of_an_operator_without_keys_is_handed_over(spark, tmp_path, modes):
    cut, path, savepoint = Cut(spark, tmp_path), f"{tmp_path}/table", f"{tmp_path}/savepoint"
    cut.run(worded((1, 2), ("a",), path), modes[0], {"execution.savepoint.path": savepoint})
    cut.run(worded((1, 2, 3), ("a", "bb"), path, WordSince), modes[1], {"execution.state-recovery.path": savepoint})
    assert table_rows(path) == [("3 ['a the savepoint', 'bb the savepoint']",), ("3 [('a', 1), ('bb', 2)]",)]


class Held(NamedTuple):
    value: int


class HeldSince(NamedTuple):
    value: float
    since: str | None = "the savepoint"


class Remembering(KeyedProcessFunction):
    """Emits what it holds of a key, then holds the value of the record, by itself and as a row."""

    def __init__(self, held):
        self.type = held

    def open(self, context):
        self.held = context.get_state(ValueStateDescriptor("held", self.type))
        self.rows = context.get_state(ArrowListStateDescriptor("rows", self.type))

    def process_element(self, value, ctx):
        yield f"{value.key} {self.held.value()} {[tuple(row.values()) for row in self.rows.get().to_pylist()]}"
        if self.type in (Held, HeldSince):
            held = self.type(value.value)
            self.held.update(held)
            self.rows.add(record_type(self.type).to_batch([held]))


def remembering(held, path, uid="memory", events=EVENTS[:2]):
    pipeline = Pipeline("memory")
    source = CollectionSource(events, Event, "events")
    keyed = pipeline.from_source(source).key_by("key")
    found = keyed.process(Remembering(held), output_type=str).uid(uid)
    found.sink_to(DeltaSink(path, name="table"))
    return pipeline


@pytest.fixture(scope="module")
def left(spark, tmp_path_factory):
    """A savepoint that holds a `Held` for each of the keys `a` and `b`."""
    folder = tmp_path_factory.mktemp("left")
    options = {"execution.savepoint.path": f"{folder}/savepoint"}
    Cut(spark, folder).run(remembering(Held, f"{folder}/out"), "BATCH", options)
    return folder / "savepoint"


def started(spark, folder, left, pipeline, mode="BATCH", **options):
    Cut(spark, folder).run(pipeline, mode, {"execution.state-recovery.path": str(left), **options})


@pytest.mark.a_day(1)
@MODES
def test_a_field_may_be_added_with_a_default_and_widened(spark, tmp_path, left, mode):
    events = [*EVENTS[:2], Event("a", 0, 5), Event("new", 0, 5)]
    started(spark, tmp_path, left, remembering(HeldSince, f"{tmp_path}/out", events=events), mode)
    assert table_rows(f"{tmp_path}/out") == [
        ("a HeldSince(value=1.0, since='the savepoint') [(1.0, 'the savepoint')]",),
        ("new None []",),
    ]


@pytest.mark.a_day(1)
@MODES
def test_a_type_that_does_not_fit_is_an_error_that_names_it_before_anything_runs(spark, tmp_path, left, mode):
    with pytest.raises(StateError, match=r"memory: operator 'Remembering': state 'held' is declared str, and the"):
        started(spark, tmp_path, left, remembering(str, f"{tmp_path}/out"), mode)
    assert not (tmp_path / "out").exists()


def test_a_start_that_failed_may_be_tried_again_from_another_savepoint(spark, tmp_path, left):
    events = [*EVENTS[:2], Event("a", 0, 5)]
    kept = {"execution.checkpointing.dir": f"{tmp_path}/kept"}
    program = remembering(Held, f"{tmp_path}/out", events=events)
    with pytest.raises(StateError, match="there is no savepoint"):
        started(spark, tmp_path, tmp_path / "misspelt", program, "STREAMING", **kept)
    started(spark, tmp_path, left, program, "STREAMING", **kept)
    assert table_rows(f"{tmp_path}/out") == [("a Held(value=1) [(1,)]",)]


def test_state_that_no_operator_claims_is_an_error_unless_it_is_to_be_dropped(spark, tmp_path, left):
    other = remembering(Held, f"{tmp_path}/out", "another", [*EVENTS[:2], Event("a", 0, 5)])
    with pytest.raises(StateError, match=r"state of operator 'Remembering' \(uid 'memory'\), and no operator has that"):
        started(spark, tmp_path, left, other)
    started(spark, tmp_path, left, other, **{"execution.savepoint.ignore-unclaimed-state": True})
    assert table_rows(f"{tmp_path}/out") == [("a None []",)]


def test_a_savepoint_that_is_not_whole_is_an_error_that_names_the_file(spark, tmp_path, left):
    copy = tmp_path / "copy"
    shutil.copytree(left, copy)
    (file, *_) = copy.glob("operators-*/memory/*.parquet")
    data = file.read_bytes()
    file.write_bytes(data[:-10])
    with pytest.raises(StateError, match=rf"{file.name} has {len(data) - 10} bytes, and the savepoint's manifest says"):
        started(spark, tmp_path, copy, remembering(Held, f"{tmp_path}/out"))
    file.unlink()
    with pytest.raises(StateError, match=rf"{file.name} is missing, which the savepoint's manifest names"):
        started(spark, tmp_path, copy, remembering(Held, f"{tmp_path}/out"))
    (copy / "manifest.json").unlink()
    with pytest.raises(StateError, match=r"there is no savepoint in .*: it has no manifest.json"):
        started(spark, tmp_path, copy, remembering(Held, f"{tmp_path}/out"))


def test_a_savepoint_is_not_written_over_another(spark, tmp_path, left):
    with pytest.raises(StateError, match=r"there is a savepoint in .* already; give another path, or remove it"):
        Cut(spark, tmp_path).run(remembering(Held, f"{tmp_path}/out"), "BATCH", {"execution.savepoint.path": str(left)})
    assert not (tmp_path / "out").exists()


KILLED = zoo(sessions, tumbling, weighted)


def leave_state(spark, folder):
    """Reads half of the events, and leaves a savepoint."""
    options = {"execution.savepoint.path": f"{folder}/savepoint"}
    Cut(spark, folder).run(KILLED(EVENTS[:6], f"{folder}/table"), "BATCH", options)


def start_from_state(spark, folder):
    """Reads all events, from that savepoint on."""
    options = {"execution.state-recovery.path": f"{folder}/savepoint"}
    Cut(spark, folder).run(KILLED(EVENTS, f"{folder}/table"), "STREAMING", options, patience=0.5)


@pytest.mark.rotates("kills")
@pytest.mark.parametrize(
    ("what", "point", "calls"),
    [
        ("leaves", "tables", 1),
        ("leaves", "manifest", 1),
        ("starts", "restored", 1),
        ("starts", "committed", 1),
        ("starts", "committed", 2),
    ],
)
def test_a_run_that_is_killed_while_it_leaves_or_takes_state_is_run_again_and_nothing_is_lost(
    spark, tmp_path, what, point, calls
):
    once = f"{tmp_path}/once"
    Cut(spark, tmp_path / "whole").run(KILLED(EVENTS, once), "BATCH")

    def killed():
        started = command(what, tmp_path, point, calls)
        done = subprocess.run(started, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
        assert done.returncode == -9, done.stderr[-2000:]

    if what == "leaves":
        killed()
        with pytest.raises(StateError, match="there is no savepoint"):
            manifest.read(f"{tmp_path}/savepoint")
    leave_state(spark, tmp_path)
    if what == "starts":
        killed()
    start_from_state(spark, tmp_path)
    assert table_rows(f"{tmp_path}/table") == table_rows(once)
    _, written = manifest.read(f"{tmp_path}/savepoint")
    folders = {path.name for path in (tmp_path / "savepoint").iterdir() if path.is_dir()}
    assert folders == {one.folder.split("/")[0] for one in written.operators}


def test_each_source_has_its_own_position(spark, tmp_path):
    pipeline = Pipeline("several")
    streams = []
    for name, count in (("second", 2), ("first", 1), ("third", 3)):
        for number in range(count):
            (tmp_path / name).mkdir(exist_ok=True)
            rows = pa.Table.from_pylist([Event(name, number, number)._asdict()])
            pq.write_table(rows, tmp_path / name / f"{name}{number}.parquet")
        streams.append(pipeline.from_source(ParquetSource(f"{tmp_path}/{name}", Event, name=name)).uid(name))
    joined = streams[2].union(streams[0]).key_by("key").max_by("value").uid("largest")
    joined.union(streams[1]).sink_to(DeltaSink(f"{tmp_path}/out", name="table"))
    Cut(spark, tmp_path).run(pipeline, "STREAMING", {"execution.savepoint.path": f"{tmp_path}/savepoint"})
    _, written = manifest.read(f"{tmp_path}/savepoint")
    read = {uid: sorted(position.files()) for uid, position in written.positions.items()}
    assert read == {
        "first": ["first0.parquet"],
        "second": ["second0.parquet", "second1.parquet"],
        "third": ["third0.parquet", "third1.parquet", "third2.parquet"],
    }
