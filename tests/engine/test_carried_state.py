"""Partition after partition with carried state gives what one run over all input gives, and what STREAMING gives."""

import subprocess
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

import pyarrow as pa
import pytest
from dagster import DailyPartitionsDefinition
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_unified.api import (
    ArrowListStateDescriptor,
    CheckpointedFunction,
    EventTimeSessionWindows,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapFunction,
    MapStateDescriptor,
    Pipeline,
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from dagster_unified.api import functions as F
from dagster_unified.connectors import CollectionSource, DeltaSink
from dagster_unified.engine.batch.intermediates import Address, IntermediateStore
from dagster_unified.engine.batch.run import Carrying, Run
from dagster_unified.engine.batch.savepoint import begun, leave_savepoint, run_all
from dagster_unified.engine.batch.stage import run_partitions
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.errors import CarriedStateError, StateError, UnsupportedError
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import plan
from dagster_unified.operators.layout import CARRIED
from dagster_unified.orchestration.partitions import slice_of
from dagster_unified.records import record_type
from dagster_unified.state import Savepoint, manifest
from tests.depth import examples, rotated
from tests.engine.savepoints.killed import command
from tests.support import table_rows

DAYS = ("2024-01-01", "2024-01-02", "2024-01-03")
PARTITIONS = DailyPartitionsDefinition(DAYS[0], end_date="2024-01-04")
DAY = 86_400_000
BEGIN = int(datetime(2024, 1, 1, tzinfo=timezone.utc).timestamp() * 1000)
BOUND = timedelta(hours=6)


class Event(NamedTuple):
    key: str
    day: int
    """When it was recorded: what tells its partition."""
    at: int
    """When it happened."""
    value: int


class Out(NamedTuple):
    key: str
    at: int
    value: int


def event(key, day, hour, value, earlier=0):
    recorded = BEGIN + day * DAY + int(hour * 3_600_000)
    return Event(key, recorded, recorded - int(earlier * 3_600_000), value)


class Sessions(KeyedProcessFunction):
    """Sums values until nothing has come for twenty hours; sorted by time, with timers over several days."""

    requires_time_sorted_input = True

    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", int))
        self.until = context.get_state(ValueStateDescriptor("until", int))
        self.seen = context.get_map_state(MapStateDescriptor("seen", int, int))

    def process_element(self, value, ctx):
        until = self.until.value()
        if until is not None:
            ctx.timer_service().delete_event_time_timer(until)
        until = value.at + 20 * 3_600_000
        self.until.update(until)
        self.total.update((self.total.value() or 0) + value.value)
        self.seen.put(value.at, value.value)
        ctx.timer_service().register_event_time_timer(until)

    def on_timer(self, timestamp, ctx):
        yield Out(ctx.get_current_key(), timestamp, self.total.value() * 1000 + len(list(self.seen.keys())))
        self.total.clear()
        self.until.clear()
        self.seen.clear()


def add(a, b):
    return Out(a.key, max(a.at, b.at), a.value + b.value)


def events_of(pipeline, events):
    source = CollectionSource(events, Event, "events").partitioned_by("day")
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(BOUND).with_timestamp_assigner("at")
    return pipeline.from_source(source).rebalance().assign_timestamps_and_watermarks(strategy)


def sink(path):
    return DeltaSink(path, name="table", mode="upsert", key=("key", "at"))


def sessions(events, path):
    pipeline = Pipeline("sessions")
    found = events_of(pipeline, events).key_by("key").process(Sessions(), output_type=Out).uid("sessions")
    found.sink_to(sink(path))
    return pipeline


def chained(events, path):
    """A keyed operator behind another, by another key."""
    pipeline = Pipeline("chained")
    found = events_of(pipeline, events).key_by("key").process(Sessions(), output_type=Out).uid("sessions")
    doubled = found.map(lambda o: Out("all", 0, o.value), output_type=Out).key_by("key").reduce(add).uid("sum")
    doubled.sink_to(sink(path))
    return pipeline


class Between(KeyedProcessFunction):
    """Says, an hour after each event, which one was the last."""

    requires_time_sorted_input = True

    def open(self, context):
        self.last = context.get_state(ValueStateDescriptor("last", int))

    def process_element(self, value, ctx):
        self.last.update(value.value)
        ctx.timer_service().register_event_time_timer(value.at + 3_600_000)
        return ()

    def on_timer(self, timestamp, ctx):
        yield Out(ctx.get_current_key(), timestamp, self.last.value())


def beside(events, path):
    """A stream goes around the operator with state, and joins the two in one region."""
    pipeline = Pipeline("beside")
    timed = events_of(pipeline, events)
    found = timed.key_by("key").process(Between(), output_type=Out).uid("between")
    around = timed.map(lambda e: Out(f"{e.key} itself", e.at, e.value), output_type=Out).uid("around")
    found.map(lambda out: out, output_type=Out).union(around).sink_to(sink(path))
    return pipeline


def windows(events, path):
    pipeline = Pipeline("windows")
    outs = events_of(pipeline, events).map(lambda e: Out(e.key, e.at // (2 * DAY), e.value), output_type=Out)
    outs.key_by("key").window(TumblingEventTimeWindows.of(timedelta(days=2))).reduce(add).uid("w").sink_to(sink(path))
    return pipeline


def session_windows(events, path):
    pipeline = Pipeline("session_windows")
    outs = events_of(pipeline, events).map(lambda e: Out(e.key, e.at, e.value), output_type=Out)
    outs.key_by("key").window(EventTimeSessionWindows.with_gap(timedelta(hours=18))).reduce(add).uid("w").sink_to(
        sink(path)
    )
    return pipeline


class Counted(NamedTuple):
    key: str
    window_start: int
    count: int


class Totals(NamedTuple):
    key: str
    at: int
    count: int
    total: int
    mean: float
    largest: int
    spread: int


def totals(events, path):
    pipeline = Pipeline("totals")
    outs = events_of(pipeline, events).map(lambda e: Out(e.key, 0, e.value), output_type=Out)
    columns = [
        F.count("*").alias("count"),
        F.sum("value").alias("total"),
        F.avg("value").alias("mean"),
        F.max("value").alias("largest"),
        (F.max("value") - F.min(F.col("value"))).alias("spread"),
    ]
    outs.key_by("key", "at").agg(*columns, output_type=Totals).uid("totals").sink_to(sink(path))
    return pipeline


class Window(NamedTuple):
    key: str
    window_start: int
    at: int
    value: int


def native_windows(events, path):
    """Of two and a half days, every twelve hours, so that each is open over several partitions."""
    pipeline = Pipeline("native_windows")
    sliding = SlidingEventTimeWindows.of(timedelta(hours=60), timedelta(hours=12))
    counted = (
        events_of(pipeline, events)
        .key_by("key")
        .window(sliding)
        .agg(F.sum("value").alias("value"), F.max("at").alias("at"), output_type=Window)
        .uid("w")
    )
    counted.map(lambda w: Out(w.key, w.window_start, w.value * 1000 + w.at % 1000), output_type=Out).sink_to(sink(path))
    return pipeline


def native_sessions(events, path):
    """In columns, and open over several partitions: they are local-global."""
    pipeline = Pipeline("native_sessions")
    sessions = events_of(pipeline, events).key_by("key").window(EventTimeSessionWindows.with_gap(timedelta(hours=18)))
    counted = sessions.agg(F.sum("value").alias("value"), F.max("at").alias("at"), output_type=Window).uid("w")
    counted.map(lambda w: Out(w.key, w.window_start, w.value * 1000 + w.at % 1000), output_type=Out).sink_to(sink(path))
    return pipeline


class Days:
    """Runs a pipeline partition by partition."""

    def __init__(self, spark, tmp_path, **options):
        self.spark, self.store, self.last = spark, IntermediateStore(str(tmp_path / "store")), DAYS[-1]
        self.options = {"execution.runtime-mode": "BATCH", "pipeline.max-parallelism": 4, **options}

    def run(self, pipeline, *days, run_id="run"):
        """Each day by itself."""
        for day in days:
            run_all(self._run(pipeline, day, run_id))

    def run_together(self, pipeline, *days, run_id="run"):
        """Stage by stage, all days in one Spark job."""
        runs = [begun(self._run(pipeline, day, run_id)) for day in days]
        finds = [lambda region, run=run: self.store.find(run.address(region)) for run in runs]
        for region in runs[0].plan.regions:
            run_partitions(runs, region.name, finds)
            leave_savepoint(runs[-1], [region], finds[-1])

    def _run(self, pipeline, day, run_id):
        part = slice_of(PARTITIONS, day)
        at = DAYS.index(day)
        before = (
            None
            if at == 0
            else (lambda region: self.store.find(Address(pipeline.name, region.name, run_id, DAYS[at - 1])))
        )
        carry = Carrying(before, DAYS[at - 1] if at else "", last=day == self.last)
        return Run(
            plan(pipeline.graph().bounded_to(part), Configuration.of(self.options), carry_state=True),
            self.spark,
            self.store,
            run_id,
            f"{run_id} {day}",
            part.name,
            carry=carry,
        )

    def left(self, pipeline, run_id="run"):
        """What every stage's manifest says of every day."""
        regions = self._run(pipeline, DAYS[0], run_id).plan.regions
        found = {
            (r.name, day): self.store.find(Address(pipeline.name, r.name, run_id, day)) for r in regions for day in DAYS
        }
        return {
            key: (
                m.rows,
                [(s.uid, s.tag, s.rows) for s in m.streams if s.tag != CARRIED],
                m.last_event_times,
                m.carried_from,
            )
            for key, m in found.items()
        }


def go_live(spark, folder, pipeline, savepoint, groups):
    """Runs a stream from a savepoint, to the end of its input."""
    options = {
        "execution.runtime-mode": "STREAMING",
        "execution.checkpointing.dir": str(folder / "checkpoints"),
        "execution.state-recovery.path": str(savepoint),
        "pipeline.max-parallelism": groups,
    }
    StreamingJob(pipeline.plan(options), spark, Start("live")).run()


EVENTS = [
    event("a", 0, 1, 1),
    event("a", 0, 23, 2),
    event("a", 1, 1, 4, earlier=3),
    event("b", 0, 5, 8),
    event("b", 2, 5, 16),
    event("a", 2, 23, 32),
    event("c", 1, 12, 64),
    event("b", 2, 6, 128, earlier=5),
    event("a", 1, 2, 256, earlier=5),
]


BUILDS = [sessions, chained, windows, session_windows, totals, native_windows, native_sessions]


@pytest.mark.parametrize("build", rotated(BUILDS, 1))
def test_days_with_carried_state_give_what_one_spark_job_for_all_one_run_and_streaming_give(
    spark, tmp_path, run_on_spark, run_streaming, build
):
    days, together = Days(spark, tmp_path / "days"), Days(spark, tmp_path / "together")
    paths = {name: str(tmp_path / f"table {name}") for name in ("of days", "together", "once", "streaming")}
    days.run(build(EVENTS, paths["of days"]), *DAYS)
    together.run_together(build(EVENTS, paths["together"]), *DAYS)
    run_on_spark(build(EVENTS, paths["once"]))
    run_streaming(build(EVENTS, paths["streaming"]))
    assert (
        table_rows(paths["of days"])
        == table_rows(paths["together"])
        == table_rows(paths["once"])
        == table_rows(paths["streaming"])
    )
    assert table_rows(paths["of days"])
    built = build(EVENTS, "/tmp/nowhere")
    assert days.left(built) == together.left(built)


def test_state_goes_on_where_a_stream_goes_around_its_operator(spark, tmp_path, run_on_spark):
    days, together = Days(spark, tmp_path / "days"), Days(spark, tmp_path / "together")
    events = [event("a", day, hour, 100 * day + hour) for day in range(3) for hour in (1, 3, 23)]
    days.run(beside(events, str(tmp_path / "by days")), *DAYS)
    together.run_together(beside(events, str(tmp_path / "together")), *DAYS)
    once = beside(events, str(tmp_path / "once"))
    run_on_spark(once)
    assert table_rows(tmp_path / "by days") == table_rows(tmp_path / "once") == table_rows(tmp_path / "together")
    at_once, by_days = (plan(once.graph(), Configuration(), carry_state=carried) for carried in (False, True))
    assert [len(planned.regions) for planned in (at_once, by_days)] == [2, 4]


@pytest.mark.parametrize("build", rotated([sessions, totals, native_windows], 1))
def test_days_in_one_spark_job_go_on_from_the_day_before_them_and_leave_state_for_any_after(
    spark, tmp_path, run_on_spark, build
):
    path = str(tmp_path / "table")
    days = Days(spark, tmp_path)
    days.run(build(EVENTS, path), DAYS[0])
    days.run_together(build(EVENTS, path), *DAYS[1:])
    whole = table_rows(path)
    days.run(build(EVENTS, path), *DAYS[1:])  # each goes on once more from the state before it
    run_on_spark(build(EVENTS, str(tmp_path / "once")))
    assert table_rows(path) == whole == table_rows(tmp_path / "once")


event_lists = st.lists(
    st.builds(
        event, st.sampled_from("abc"), st.integers(0, 2), st.floats(0, 23.9), st.integers(1, 9), st.floats(0, 5.9)
    ),
    min_size=1,
    max_size=25,
)


@pytest.mark.parametrize("build", rotated([sessions, session_windows, native_windows], 1))
@settings(max_examples=examples(2), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=event_lists)
def test_any_events_give_the_same_by_days_and_at_once(spark, tmp_path_factory, build, events):
    folder = tmp_path_factory.mktemp("any")
    Days(spark, folder).run(build(events, f"{folder}/table of days"), *DAYS)
    once = build(events, f"{folder}/table once").plan({"execution.runtime-mode": "BATCH"})
    run_all(Run(once, spark, IntermediateStore(f"{folder}/once"), "run", "run"))
    Days(spark, folder / "together").run_together(build(events, f"{folder}/table together"), *DAYS)
    assert (
        table_rows(f"{folder}/table of days")
        == table_rows(f"{folder}/table once")
        == table_rows(f"{folder}/table together")
    )


AGGREGATES = [(totals, False), (native_windows, True), (totals, True), (native_windows, False)]


@pytest.mark.parametrize(("build", "together"), rotated(AGGREGATES, 1))
def test_a_stream_goes_on_from_the_aggregates_that_days_with_carried_state_have_left(
    spark, tmp_path, run_on_spark, build, together
):
    path, savepoint = str(tmp_path / "table"), str(tmp_path / "savepoint")
    days = Days(spark, tmp_path, **{"execution.savepoint.path": savepoint})
    if together:
        days.run_together(build(EVENTS, path), *DAYS[:2])
    else:
        days.run(build(EVENTS, path), *DAYS[:2])
    assert Savepoint.read(savepoint).operators
    go_live(spark, tmp_path, build(EVENTS, path), savepoint, groups=3)
    run_on_spark(build(EVENTS, str(tmp_path / "once")))
    assert table_rows(path) == table_rows(tmp_path / "once")


@pytest.mark.parametrize(("build", "together"), rotated(AGGREGATES, 1))
def test_days_may_hand_on_local_global_aggregates_and_not_change_the_form(
    spark, tmp_path, run_on_spark, build, together
):
    path, kept = str(tmp_path / "table"), {"state.native-aggregates": "PORTABLE"}
    local_global, catalyst = Days(spark, tmp_path, **kept), Days(spark, tmp_path)
    if together:
        local_global.run_together(build(EVENTS, path), *DAYS)
    else:
        local_global.run(build(EVENTS, path), *DAYS)
    run_on_spark(build(EVENTS, str(tmp_path / "once")))
    assert table_rows(path) == table_rows(tmp_path / "once")
    with pytest.raises(StateError, match=r"in the local-global form, and this run takes Catalyst's form"):
        catalyst.run(build(EVENTS, path), DAYS[1])
    catalyst.run(build(EVENTS, path), DAYS[0])
    with pytest.raises(StateError, match=r"in Catalyst's form, and this run takes the local-global form"):
        local_global.run(build(EVENTS, path), DAYS[1])


class Numbered(MapFunction, CheckpointedFunction):
    """Numbers the records of its subtask, through all days."""

    def initialize_state(self, context):
        self.state = context.get_operator_state_store().get_list_state(ListStateDescriptor("last", int))
        self.last = sum(self.state.get())

    def snapshot_state(self, context):
        self.state.update([self.last])

    def map(self, value: Event) -> Out:
        self.last += 1
        return Out(value.key, value.at, self.last)


def numbered(events, path, subtasks=1):
    pipeline = Pipeline("numbered")
    found = events_of(pipeline, events).map(Numbered()).uid("numbered").set_parallelism(subtasks)
    found.sink_to(sink(path))
    return pipeline


def test_operator_state_goes_from_day_to_day_in_one_spark_job_and_in_several(spark, tmp_path):
    days, together = Days(spark, tmp_path / "days"), Days(spark, tmp_path / "together")
    days.run(numbered(EVENTS, str(tmp_path / "of days")), *DAYS)
    together.run_together(numbered(EVENTS, str(tmp_path / "at once")), *DAYS)
    recorded = {(e.key, e.at): (e.day - BEGIN) // DAY for e in EVENTS}
    for path in ("of days", "at once"):
        numbers = sorted((value, recorded[key, at]) for key, at, value in table_rows(tmp_path / path))
        assert numbers == list(enumerate(sorted(recorded.values()), 1))
    with pytest.raises(StateError, match="'Numbered' has 2 subtasks, and its state of the partition before is of 1"):
        days.run(numbered(EVENTS, str(tmp_path / "of days"), 2), DAYS[1])


class Kept(NamedTuple):
    value: int


class KeptSince(NamedTuple):
    """The next version of what is kept."""

    value: float
    since: str = "before"


class Rows(KeyedProcessFunction):
    """Keeps the values of a key as Arrow rows, and emits how many there are and their sum."""

    def __init__(self, kind):
        self.kind = kind

    def open(self, context):
        self.rows = context.get_state(ArrowListStateDescriptor("rows", self.kind))

    def process_element(self, value, ctx):
        self.rows.add(record_type(self.kind).to_batch([self.kind(value.value)]))
        rows = self.rows.get().to_pylist()
        assert all(tuple(row) == self.kind._fields for row in rows)
        yield Out(f"rows {value.key}", value.at, 1000 * len(rows) + int(sum(row["value"] for row in rows)))


def rows_and_table(events, path, kind):
    """State of rows: of a key, and of a broadcast stream."""

    def beside(batch: pa.RecordBatch, table: pa.Table) -> pa.RecordBatch:
        assert tuple(table.schema.names) == (*kind._fields, "__ts")
        keys = [f"table {key}" for key in batch["key"].to_pylist()]
        values = [1000 * table.num_rows + int(sum(table["value"].to_pylist()))] * batch.num_rows
        return pa.RecordBatch.from_pydict({"key": keys, "at": batch["at"], "value": values})

    pipeline = Pipeline("rows")
    stream = events_of(pipeline, events)
    rows = stream.key_by("key").process(Rows(kind), output_type=Out).uid("rows")
    values = stream.map(lambda e: kind(e.value), kind).broadcast()
    rows.union(stream.connect(values).map_batches(beside, Out).uid("table")).sink_to(sink(path))
    return pipeline


def test_rows_and_a_broadcast_table_go_from_day_to_day_also_when_their_type_has_changed(spark, tmp_path):
    same, changed = Days(spark, tmp_path / "same"), Days(spark, tmp_path / "changed")
    same.run(rows_and_table(EVENTS, str(tmp_path / "of one type"), Kept), *DAYS)
    changed.run(rows_and_table(EVENTS, str(tmp_path / "of two"), Kept), DAYS[0])
    changed.run(rows_and_table(EVENTS, str(tmp_path / "of two"), KeptSince), *DAYS[1:])
    found = table_rows(tmp_path / "of one type")
    assert max(value for key, _, value in found if key == "rows a") == 5000 + 1 + 2 + 4 + 32 + 256
    assert max(value for key, _, value in found if key.startswith("table")) == 9000 + 511
    assert table_rows(tmp_path / "of two") == found


def test_the_row_count_of_a_partition_is_of_its_records_and_not_of_its_state(spark, tmp_path):
    days = Days(spark, tmp_path)
    days.run(totals(EVENTS, str(tmp_path / "days")), *DAYS)
    last = days.store.find(Address("totals", "table", "run", DAYS[2]))
    assert [s.tag for s in last.streams] == [CARRIED, None]
    assert (last.rows, [s.rows for s in last.streams]) == (2, [3, 2])


def run_day(spark, folder, day):
    """Runs a day, and replaces the savepoint of the day before."""
    days = Days(spark, folder, **{"execution.savepoint.path": f"{folder}/savepoint"})
    days.run(sessions(EVENTS, f"{folder}/table"), day)


@pytest.mark.rotates("kills")
@pytest.mark.parametrize("point", rotated(["tables", "manifest", "replaced"], 1))
def test_a_day_that_is_killed_while_it_replaces_the_savepoint_leaves_one_that_is_whole(
    spark, tmp_path, run_on_spark, point
):
    run_day(spark, tmp_path, DAYS[0])
    done = subprocess.run(command("day", tmp_path, point), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == -9, done.stderr[-2000:]
    savepoint, found = manifest.read(tmp_path / "savepoint")
    assert found.partition == DAYS[point == "replaced"]
    assert Savepoint.read(str(savepoint)).keyed_state("sessions").num_rows > 0
    run_day(spark, tmp_path, DAYS[1])
    _, found = manifest.read(savepoint)
    assert found.partition == DAYS[1]
    folders = {path.name for path in savepoint.iterdir() if path.is_dir()}
    assert folders == {one.folder.split("/")[0] for one in found.operators}
    go_live(spark, tmp_path, sessions(EVENTS, f"{tmp_path}/table"), savepoint, groups=4)
    run_on_spark(sessions(EVENTS, f"{tmp_path}/once"))
    assert table_rows(f"{tmp_path}/table") == table_rows(f"{tmp_path}/once")


def test_a_day_whose_predecessor_has_not_run_is_an_error(spark, tmp_path):
    with pytest.raises(
        CarriedStateError,
        match=r"sessions: stage '.*' goes on from the state of partition 2024-01-01, which is not there",
    ):
        Days(spark, tmp_path).run(sessions(EVENTS, str(tmp_path / "days")), DAYS[1])


def test_a_day_whose_predecessor_left_its_state_in_a_savepoint_only_is_an_error(spark, tmp_path):
    days = Days(spark, tmp_path, **{"execution.savepoint.path": str(tmp_path / "savepoint")})
    pipeline = sessions(EVENTS, str(tmp_path / "days"))
    run_all(replace(days._run(pipeline, DAYS[0], "run"), carry=None))
    with pytest.raises(StateError, match="has left its state in a savepoint only, as carry_state was off; run a backf"):
        days.run(pipeline, DAYS[1])


def test_state_of_an_operator_that_has_another_uid_is_an_error_and_not_forgotten(spark, tmp_path):
    days = Days(spark, tmp_path)
    days.run(sessions(EVENTS, str(tmp_path / "days")), DAYS[0])
    renamed = sessions(EVENTS, str(tmp_path / "days"))
    node = next(n for n in renamed._nodes if n.uid == "sessions")
    renamed._change(node.id, uid="others")
    with pytest.raises(StateError, match=r"the partition before has no state of operator '.*' \(uid 'others'\)"):
        days.run(renamed, DAYS[1])


def test_what_cannot_be_carried_is_named_before_anything_runs():
    def planned(build):
        pipeline = Pipeline("p")
        build(events_of(pipeline, EVENTS)).print()
        plan(pipeline.graph(), Configuration.of({"state.native-aggregates": "SPARK"}), carry_state=True)

    with pytest.raises(
        UnsupportedError, match=r"carry_state cannot hand on the open sessions of '.*', which Catalyst keeps with"
    ):
        planned(
            lambda e: (
                e.key_by("key")
                .window(EventTimeSessionWindows.with_gap(timedelta(days=1)))
                .agg(F.count("*").alias("count"), output_type=Counted)
            )
        )
    whole = Configuration.of({"execution.batch-shuffle-mode": "ALL_EXCHANGES_PIPELINED"})
    graph = sessions(EVENTS, "/tmp/nowhere").graph()
    with pytest.raises(UnsupportedError, match="ALL_EXCHANGES_PIPELINED has no stages"):
        plan(graph, whole, carry_state=True)


def test_an_aggregate_without_parts_is_named(spark, tmp_path):
    pipeline = Pipeline("p")
    counted = (
        events_of(pipeline, EVENTS)
        .key_by("key")
        .agg(F.lit(0).alias("at"), F.count_distinct("value").alias("value"), output_type=Out)
    )
    counted.name("distinct").sink_to(sink(str(tmp_path / "t")))
    with pytest.raises(
        UnsupportedError,
        match=(
            r"p: operator 'distinct': carry_state cannot hand on count_distinct\('value'\) from partition to partition;"
            r" it can avg, bit_and"
        ),
    ):
        Days(spark, tmp_path).run(pipeline, DAYS[0])


def test_no_day_goes_on_from_one_with_which_the_input_had_ended(spark, tmp_path):
    days = Days(spark, tmp_path)
    days.last = DAYS[1]
    for build in (windows, totals):
        days.run(build(EVENTS, str(tmp_path / build.__name__)), *DAYS[:2])
    days.last = DAYS[2]
    again = windows(EVENTS, str(tmp_path / "windows"))
    with pytest.raises(CarriedStateError, match=f"partition {DAYS[1]}, with which the input ended .* with {DAYS[1]}"):
        days.run(again, DAYS[2])
    days.run(again, *DAYS[1:])
    days.run(totals(EVENTS, str(tmp_path / "totals")), DAYS[2])  # which no end makes a difference to
