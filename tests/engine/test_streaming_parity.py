"""BATCH and STREAMING end with the same tables.

Pipelines and micro-batches are generated, and the job restarts in the middle.
"""

from collections.abc import Iterable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_unified.api import (
    BroadcastProcessFunction,
    CoFlatMapFunction,
    CoGroupFunction,
    CoMapFunction,
    EventTimeSessionWindows,
    FilterFunction,
    KeyedBatchFunction,
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    MapFunction,
    MapStateDescriptor,
    OutputTag,
    Pipeline,
    ProcessJoinFunction,
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from dagster_unified.api import functions as F
from dagster_unified.connectors import CollectionSource, DeltaSink, ParquetSource
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.testing import final_result, run_pipeline
from tests.depth import examples
from tests.support import Event, arrive, committed, run_stages, streaming, table_rows

ALARM = OutputTag("alarm", Event)


class Gaps(KeyedProcessFunction):
    """The time since the key's last event; and an alarm when it has been silent for 50."""

    requires_time_sorted_input = True

    def open(self, context):
        self.last = context.get_state(ValueStateDescriptor("last", Event))

    def process_element(self, value: Event, ctx) -> Iterable[Event]:
        last = self.last.value()
        if last is not None and value.at < last.at + 50:
            ctx.timer_service().delete_event_time_timer(last.at + 50)
        self.last.update(value)
        ctx.timer_service().register_event_time_timer(value.at + 50)
        yield Event(value.key, value.at, value.at - (last.at if last else 0))

    def on_timer(self, timestamp, ctx) -> Iterable[Event]:
        yield ALARM, Event(ctx.get_current_key(), timestamp, self.last.value().value)


def last_of(key: str):
    """Keeps the latest event of a key, whatever comes first."""
    return lambda s: s.key_by(key).reduce(lambda a, b: max(a, b, key=lambda e: (e.at, e.value)))


class Name(NamedTuple):
    of: str
    name: str


class Named(NamedTuple):
    key: str
    at: int
    value: int
    name: str | None


NAMES = CollectionSource([Name("a", "A"), Name("b", "B")], Name, "names")

STATELESS = {
    "map": lambda s: s.map(lambda e: Event(e.key, e.at, e.value + 1), Event),
    "filter": lambda s: s.filter(lambda e: e.value % 3 != 0),
    "where": lambda s: s.where("value > 2"),
    "with_columns": lambda s: s.with_columns({"value": F.col("value") * 2}, Event),
    "select": lambda s: s.select("key", "at", (F.col("value") + F.col("at")).alias("v"), output_type=Event),
    "map_batches": lambda s: s.map_batches(lambda b: b.set_column(2, "value", pc.add(b["value"], 1)), Event),
    "key_by": lambda s: s.key_by("key").map(lambda e: e, Event),
    "lookup": (
        lambda s: s.lookup_join(NAMES, {"key": "of"}, {"name": "name"}, Named).map(
            lambda n: Event(n.name or n.key, n.at, n.value), Event
        )
    ),
    "flat_map": lambda s: s.flat_map(lambda e: [e, e._replace(key=e.key + "'")] if e.value % 2 else [], Event),
}


def latest(a: Event, b: Event) -> Event:
    return max(a, b, key=lambda e: (e.at, e.value))


class Near(ProcessJoinFunction):
    def process_element(self, left, right, ctx) -> Iterable[Event]:
        if left.at < right.at:
            yield Event(left.key, ctx.get_timestamp(), left.value * 10 + right.value)


class Counted(CoGroupFunction):
    def co_group(self, first, second) -> Iterable[Event]:
        both = [*first, *second]
        yield Event(both[0].key, max(e.at for e in both), len(list(first)) * 10 + len(list(second)))


class Sides(KeyedCoProcessFunction):
    def process_element1(self, value, ctx) -> Iterable[Event]:
        yield value

    def process_element2(self, value, ctx) -> Iterable[Event]:
        ctx.timer_service().register_event_time_timer(value.at + 7)

    def on_timer(self, timestamp, ctx) -> Iterable[Event]:
        yield Event(ctx.get_current_key(), timestamp, 1)


class Change(MapFunction):
    """The difference to the key's last value."""

    requires_time_sorted_input = True

    def open(self, context):
        self.last = context.get_state(ValueStateDescriptor("last", int))

    def map(self, value: Event) -> Event:
        last = self.last.value() or 0
        self.last.update(value.value)
        return value._replace(value=value.value - last)


class Since(KeyedBatchFunction[str]):
    """The time since the key's last event, of Arrow batches."""

    requires_time_sorted_input = True

    def open(self, runtime_context):
        self.last = runtime_context.get_state(ValueStateDescriptor("last", int))

    def process_batch(self, batch, ctx):
        times = batch["at"].to_pylist()
        before = [self.last.value() or 0, *times[:-1]]
        self.last.update(times[-1])
        return batch.set_column(2, "value", pc.subtract(batch["at"], pa.array(before)))


class Rising(FilterFunction):
    """Keeps what is above the key's last value."""

    requires_time_sorted_input = True

    def open(self, context):
        self.last = context.get_state(ValueStateDescriptor("last", int))

    def filter(self, value):
        last = self.last.value() or 0
        self.last.update(value.value)
        return value.value > last


class Totals(CoMapFunction):
    """The key's total so far, of both streams."""

    requires_time_sorted_input = True

    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", int))

    def map1(self, value) -> Event:
        self.total.update((self.total.value() or 0) + value.value)
        return value._replace(value=self.total.value())

    def map2(self, value) -> Event:
        return self.map1(value)


class NumberedBeside(CoFlatMapFunction):
    """The key's count so far; the records without a key as they are."""

    requires_time_sorted_input = True

    def open(self, context):
        self.count = context.get_state(ValueStateDescriptor("count", int))

    def flat_map1(self, value) -> Iterable[Event]:
        self.count.update((self.count.value() or 0) + 1)
        yield value._replace(value=self.count.value())

    def flat_map2(self, value) -> Iterable[Event]:
        yield value


IN_ORDER = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(milliseconds=1000)).with_timestamp_assigner("at")
BY_KEY = MapStateDescriptor("by key", str, int)
RULES = [Event("a", 0, 5), Event("c", 0, 7)]  # of each key one, since their order is not defined


def rules(stream):
    """A collection comes whole in the first micro-batch, and so before everything else in both modes."""
    source = stream._pipeline.from_collection(RULES, Event, f"rules {len(stream._pipeline._nodes)}")
    return source.assign_timestamps_and_watermarks(IN_ORDER)


class Enriched(BroadcastProcessFunction):
    def process_element(self, value, ctx) -> Iterable[Event]:
        yield value._replace(value=value.value + (ctx.get_broadcast_state(BY_KEY).get(value.key) or 0))

    def process_broadcast_element(self, value, ctx) -> Iterable[Event]:
        ctx.get_broadcast_state(BY_KEY).put(value.key, value.value)
        yield value


def tabled(batch, table):
    """As `Enriched`, of Arrow batches."""
    latest = {row["key"]: row["value"] for row in sorted(table.to_pylist(), key=lambda row: row["at"])}
    more = pa.array([latest.get(key) or 0 for key in batch["key"].to_pylist()], pa.int64())
    return batch.set_column(2, "value", pc.add(batch["value"], more))


class Limited(KeyedBroadcastProcessFunction):
    """Lets a key's records below its limit through, and says at their end how many there were."""

    def open(self, context):
        self.count = context.get_state(ValueStateDescriptor("count", int))

    def process_element(self, value, ctx) -> Iterable[Event]:
        self.count.update((self.count.value() or 0) + 1)
        ctx.timer_service().register_event_time_timer(10_000)
        if value.value < (ctx.get_broadcast_state(BY_KEY).get(value.key) or 9):
            yield value

    def process_broadcast_element(self, value, ctx):
        ctx.get_broadcast_state(BY_KEY).put(value.key, value.value)

    def on_timer(self, timestamp, ctx) -> Iterable[Event]:
        yield Event(
            ctx.get_current_key(),
            timestamp,
            self.count.value() * 10 + (ctx.get_broadcast_state(BY_KEY).get(ctx.get_current_key()) or 0),
        )


KEYED = {
    "gaps": lambda s: s.key_by("key").process(Gaps()),
    "windows": lambda s: s.key_by("key").window(TumblingEventTimeWindows.of(timedelta(milliseconds=40))).reduce(latest),
    "sliding": lambda s: (
        s.key_by("key")
        .window(SlidingEventTimeWindows.of(timedelta(milliseconds=50), timedelta(milliseconds=30)))
        .reduce(latest)
    ),
    "sessions": lambda s: (
        s.key_by("key").window(EventTimeSessionWindows.with_gap(timedelta(milliseconds=20))).reduce(latest)
    ),
    "interval_join": lambda s: (
        s.key_by("key").interval_join(s.key_by("key")).between(timedelta(0), timedelta(milliseconds=60)).process(Near())
    ),
    "join": lambda s: (
        s.join(s.filter(lambda e: e.value > 4))
        .where("key")
        .equal_to("key")
        .window(TumblingEventTimeWindows.of(timedelta(milliseconds=30)))
        .apply(lambda a, b: Event(a.key, max(a.at, b.at), a.value * 10 + b.value), Event)
    ),
    "co_group": lambda s: (
        s.co_group(s.where("value > 4"))
        .where("key")
        .equal_to("key")
        .window(TumblingEventTimeWindows.of(timedelta(milliseconds=30)))
        .apply(Counted())
    ),
    "enriched": lambda s: s.connect(rules(s).broadcast(BY_KEY)).process(Enriched()),
    "tabled": lambda s: s.connect(rules(s).broadcast()).map_batches(tabled, Event),
    "limited": lambda s: s.key_by("key").connect(rules(s).broadcast(BY_KEY)).process(Limited()),
    "change": lambda s: s.key_by("key").map(Change()),
    "since": lambda s: s.key_by("key").map_batches(Since(), Event),
    "rising": lambda s: s.key_by("key").filter(Rising()),
    "totals": lambda s: (
        s.where("value > 3").connect(s.filter(lambda e: e.value <= 3)).key_by("key", "key").map(Totals())
    ),
    "beside": lambda s: (
        s.where("value > 3").key_by("key").connect(s.filter(lambda e: e.value <= 3)).flat_map(NumberedBeside())
    ),
    "connect": lambda s: (
        s.where("value > 3").connect(s.filter(lambda e: e.value <= 3)).key_by("key", "key").process(Sides())
    ),
}
BUILD = {
    **STATELESS,
    **KEYED,
    "union": lambda s: s.filter(lambda e: e.value % 2 == 0).union(s.where("value % 2 = 1")).map(lambda e: e, Event),
}


def defined(operations) -> bool:
    """Whether the result is: what goes by order needs events of a key at different times.

    And whether it is small enough to run.
    """
    ordered = {"gaps", "change", "since", "rising", "totals", "beside"}
    several_at_once = [
        i
        for i, name in enumerate(operations)
        if name in ("interval_join", "connect", "join", "co_group", "limited", "enriched")
    ]
    return sum(name in KEYED for name in operations) <= 2 and not (
        several_at_once and ordered & set(operations[several_at_once[0] :])
    )


def build(folder: Path, operations, target: Path) -> Pipeline:
    pipeline = Pipeline("generated")
    stream = pipeline.from_source(
        ParquetSource(str(folder / "in"), Event, name="events", max_files_per_trigger=1)
    ).assign_timestamps_and_watermarks(IN_ORDER)
    alarmed = False
    for name in operations:
        stream = BUILD[name](stream)
        if name == "gaps" and not alarmed:
            alarmed = True
            stream.get_side_output(ALARM).sink_to(
                DeltaSink(str(target / "alarms"), mode="upsert", key=("key", "at"), name="alarms")
            )
    stream.sink_to(DeltaSink(str(target / "all"), mode="upsert", key=("key", "at", "value"), name="all"))
    last_of("key")(stream).name("latest").sink_to(
        DeltaSink(str(target / "latest"), mode="upsert", key="key", name="latest")
    )
    return pipeline


def tables(folder: Path):
    return {p.name: table_rows(p) for p in sorted(folder.iterdir())}


def in_both_modes(spark, folder, operations, parts, interrupt=False):
    """The tables, which are the same in both modes; a job that is interrupted goes on after its first epoch."""
    arrive(folder / "in", *parts, of=Event)
    run_stages(build(folder, operations, folder / "batch").plan({}), spark, folder)
    plan = build(folder, operations, folder / "streaming").plan(streaming(folder, 3))
    if interrupt:
        epochs = []
        StreamingJob(plan, spark, Start("first"), committed(epochs)).run(lambda: bool(epochs))
    assert StreamingJob(plan, spark, Start("second")).run() == "finished"
    batch = tables(folder / "batch")
    assert tables(folder / "streaming") == batch
    return batch


@settings(max_examples=examples(2), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    operations=st.lists(st.sampled_from(sorted(BUILD)), min_size=1, max_size=4).filter(defined),
    # No two events of a key at one time: their order would not be defined.
    events=st.lists(
        st.builds(Event, st.sampled_from("abc"), st.integers(0, 300), st.integers(0, 9)),
        min_size=1,
        max_size=20,
        unique_by=lambda e: (e.key, e.at),
    ),
    cuts=st.lists(st.integers(0, 19), max_size=2),
    interrupt=st.booleans(),
)
def test_streaming_ends_with_the_tables_of_batch(spark, tmp_path, operations, events, cuts, interrupt):
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    points = sorted({0, len(events), *(c % len(events) for c in cuts)})
    batch = in_both_modes(spark, folder, operations, [events[a:b] for a, b in pairwise(points)], interrupt)
    for mode in (
        ("BATCH", "STREAMING") if not {"enriched", "limited", "tabled"} & set(operations) else ("BATCH",)
    ):  # the harness has rules come last, as they may
        pipeline = build(folder, operations, folder / "harness")
        harness = final_result(pipeline.graph(), run_pipeline(pipeline, mode, inputs={"events": events}))
        assert {name: set(records) for name, records in harness.items()} == {
            name: {repr(Event(*row)) for row in rows} for name, rows in batch.items()
        }


@pytest.mark.a_day(1)
@pytest.mark.parametrize(
    ("operations", "interrupt"),
    [
        pytest.param(
            ["where", "map", "with_columns", "union", "gaps", "select", "flat_map", "where"], False,
            id="native operators behind a source, between Python and keyed ones, and behind a union",
        ),
        pytest.param(
            ["gaps", "enriched", "map", "limited"], True,
            id="broadcast state that reaches every group and survives a restart",
        ),
    ],
)  # fmt: skip
def test_what_stands_where_ends_with_the_tables_of_batch(spark, tmp_path, operations, interrupt):
    events = [Event(k, at, at % 7) for k in "abc" for at in range(0, 300, 13)]
    in_both_modes(spark, tmp_path, operations, (events[:20], events[20:]), interrupt)


def test_broadcast_elements_are_emitted_once_also_without_any_other_record(
    run_on_spark, run_streaming, spark, tmp_path
):
    for run, name in ((run_on_spark, "batch"), (run_streaming, "streaming")):
        pipeline = Pipeline("p")
        rules_alone = pipeline.from_collection(RULES, Event, "rules").broadcast(BY_KEY)
        nothing = pipeline.from_collection([], Event, "nothing").connect(rules_alone).process(Enriched())
        nothing.map(lambda e: e, Event).sink_to(DeltaSink(str(tmp_path / name / "out"), mode="append"))
        run(pipeline)
    assert tables(tmp_path / "batch") == tables(tmp_path / "streaming") == {"out": sorted(map(tuple, RULES))}
