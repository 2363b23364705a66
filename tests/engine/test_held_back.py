"""Where a run leaves its state to another one, an idle source holds nobody back, and what waits is told."""

from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest
from upath import UPath

from dagster_unified.api import (
    KeyedBroadcastProcessFunction,
    MapStateDescriptor,
    Pipeline,
    TumblingEventTimeWindows,
    WatermarkStrategy,
)
from dagster_unified.connectors import CollectionSource, DeltaSink, FileSink
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run, time_after, time_before, waiting
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.events import RecordsWait
from dagster_unified.graph.connectors import Slice, TimeRange
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import plan
from dagster_unified.operators.metrics import Metrics
from dagster_unified.orchestration.assets import _observer
from dagster_unified.orchestration.metadata import stage_metadata
from tests.engine.test_carried_state import DAYS, Days
from tests.support import table_rows

BEGIN = int(datetime(2024, 1, 1, tzinfo=timezone.utc).timestamp() * 1000)
HOUR = 3_600_000


class Order(NamedTuple):
    shop: str
    at: int


class Rule(NamedTuple):
    name: str
    at: int


RULES = MapStateDescriptor("rules", str, int)


class Checked(KeyedBroadcastProcessFunction):
    """Takes orders in the order of time, with the rules of that time."""

    requires_time_sorted_input = True

    def process_element(self, value, ctx):
        yield value

    def process_broadcast_element(self, value, ctx):
        ctx.get_broadcast_state(RULES).put(value.name, value.at)


BY_AT = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
IDLE = BY_AT.with_idleness(timedelta(minutes=1))
ORDERS = [Order("north", BEGIN + hour * HOUR) for hour in range(1, 10)]


def pipeline(rules, orders=BY_AT, sink="/nowhere", given=(Rule("all", BEGIN),)):
    made = Pipeline("orders")
    ruled = made.from_source(CollectionSource(given, Rule, "rules")).assign_timestamps_and_watermarks(rules).uid("r")
    ordered = made.from_source(CollectionSource(ORDERS, Order, "orders"))
    ordered = ordered.assign_timestamps_and_watermarks(orders).uid("o")
    checked = ordered.key_by("shop").connect(ruled.broadcast(RULES)).process(Checked(), output_type=Order)
    checked.uid("checked").name("checked").sink_to(FileSink(str(sink), name="out"))
    return made


def carried(**strategies):
    return plan(pipeline(**strategies).graph(), Configuration.of({}), carry_state=True)


@pytest.mark.parametrize(
    ("rules", "orders", "seen", "watermark"),
    [
        (BY_AT, BY_AT, {"r": 10, "o": 90}, 9),
        (IDLE, BY_AT, {"r": 10, "o": 90}, 89),
        (IDLE, BY_AT, {"r": 200, "o": 90}, 89),
        (IDLE, BY_AT, {"o": 90}, 89),
        (IDLE, IDLE, {"r": 10, "o": 90}, 89),
        (BY_AT, IDLE, {"r": 10, "o": 90}, 9),
    ],
)
def test_at_the_end_of_a_partition_a_source_that_may_be_idle_holds_nobody_back(rules, orders, seen, watermark):
    event = time_after(carried(rules=rules, orders=orders), Metrics(last_event_times=seen))
    assert event.watermarks == {"checked": watermark}


DAY = Slice("2024-01-01", {"": TimeRange(*(datetime(2024, 1, day, tzinfo=timezone.utc) for day in (1, 2)))})


@pytest.mark.parametrize(
    ("field", "before", "after"), [("at", BEGIN - 1, BEGIN + 24 * HOUR - 1), ("day", -HOUR, 9 * HOUR)]
)
def test_a_partition_by_event_time_ends_with_the_watermark_of_its_end(field, before, after):
    """What comes in a later partition is later; of a partition by another field the strategies say it."""

    class Event(NamedTuple):
        at: int
        day: int

    made = Pipeline("p")
    source = CollectionSource([Event(BEGIN, BEGIN)], Event, "events").partitioned_by(field)
    for_ten = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(hours=1))
    for assigner in ("at", lambda event: event.at):
        events = (
            made.from_source(source)
            .where("at > 0")
            .assign_timestamps_and_watermarks(for_ten.with_timestamp_assigner(assigner))
        )
        events.window_all(TumblingEventTimeWindows.of(timedelta(days=1))).reduce(lambda a, b: b).print()
    daily = plan(made.graph().bounded_to(DAY), Configuration.of({}), carry_state=True)
    for moment, time_at, watermark in ((0, time_before, before), (10 * HOUR, time_after, after)):
        seen = {node.uid: moment for node in daily.graph.assigners}
        assert set(time_at(daily, Metrics(last_event_times=seen)).watermarks.values()) == {
            watermark if field == "at" else watermark - 1
        }


@pytest.mark.parametrize(("strategy", "given"), [(BY_AT, 1), (IDLE, 1), (BY_AT, 0)])
def test_a_run_that_leaves_a_savepoint_says_how_many_records_wait_and_for_which_source(
    spark, tmp_path, strategy, given
):
    made = pipeline(rules=strategy, sink=tmp_path / "out", given=[Rule("all", BEGIN)][:given])
    options = {"execution.runtime-mode": "BATCH", "execution.savepoint.path": str(tmp_path / "savepoint")}
    told = []
    run = Run(made.plan(options), spark, IntermediateStore(str(tmp_path / "store")), "run", "run", observe=told.append)
    manifests = run_all(run)
    written = pq.read_table(tmp_path / "out").num_rows if (tmp_path / "out").exists() else 0
    waits = [event for event in told if isinstance(event, RecordsWait)]
    if strategy is IDLE:
        assert (written, waits) == (8, [])  # the last one waits for later ones of its own source
        return
    assert (written, len(waits)) == (0, 1)
    says = waits[0].describe()
    assert "9 records of operator 'checked' wait in its state, because source 'rules' holds the watermark" in says
    assert ("at 2023-12-31T23:59:59.999000+00:00" if given else "before its first record") in says
    assert "with_idleness" in says
    region = next(one for one in run.plan.regions if one.carried)
    manifest = next(one for one in manifests if one.stage == region.name)
    assert waiting(run.plan, region, manifest) == waits
    metadata = stage_metadata(run.plan, region, manifest, UPath(tmp_path), lambda node: None)
    assert metadata["records held back"].text == says
    assert metadata["records that wait for the watermark at 'checked'"] == 9


def test_what_waits_is_counted_for_its_operator_where_another_has_its_name(spark, tmp_path):
    made = Pipeline("p")
    by_shop = (
        made.from_collection([Order("a", BEGIN)], name="orders").assign_timestamps_and_watermarks(BY_AT).key_by("shop")
    )
    by_shop.reduce(lambda a, b: b).uid("rolling").print("rolling")
    daily = by_shop.window(TumblingEventTimeWindows.of(timedelta(days=1))).reduce(lambda a, b: b).uid("daily")
    daily.print("daily")
    options = {"execution.runtime-mode": "BATCH", "execution.savepoint.path": str(tmp_path / "savepoint")}
    manifests = run_all(Run(made.plan(options), spark, IntermediateStore(str(tmp_path / "store")), "run", "run"))
    counted = {name for manifest in manifests for name in manifest.counters if "wait for the watermark" in name}
    assert counted == {"timers that wait for the watermark at 'daily'"}


def test_the_lint_says_which_stream_may_hold_others_back_where_a_run_leaves_its_state():
    def said(**strategies):
        return [one.message for one in carried(**strategies).findings if one.rule == "held-back"]

    (message,) = said(rules=BY_AT, orders=IDLE)
    assert "later than the last record of 'rules' stays in the state" in message
    (message,) = said(rules=BY_AT)
    assert "of 'rules' and 'orders' stays" in message
    assert said(rules=IDLE, orders=IDLE) == []
    alone = pipeline(rules=BY_AT).plan({"execution.runtime-mode": "BATCH"})
    assert [one for one in alone.findings if one.rule == "held-back"] == []


class Recorded(NamedTuple):
    shop: str
    at: int
    day: int


def ruled(folder):
    """Orders of three days and a rule of the first, partitioned by event time, and by another field."""
    made = Pipeline("ruled")
    for field, strategy in (("at", BY_AT), ("day", IDLE)):
        recorded = [Recorded("north", BEGIN + hour * HOUR, BEGIN + hour // 24 * 24 * HOUR) for hour in (3, 20, 30, 50)]
        rules = [Recorded("all", BEGIN, BEGIN)]
        orders, rules = (
            made.from_source(CollectionSource(rows, Recorded, f"{name} by {field}").partitioned_by(field))
            .assign_timestamps_and_watermarks(given)
            .uid(f"{name} {field}")
            for name, rows, given in (("orders", recorded, BY_AT), ("rules", rules, strategy))
        )
        checked = orders.key_by("shop").connect(rules.broadcast(RULES)).process(Checks(), output_type=Recorded)
        sink = DeltaSink(f"{folder}/{field}", name=f"out {field}", mode="upsert", key="at")
        checked.uid(f"checked {field}").sink_to(sink)
    return made


class Checks(Checked):
    def process_broadcast_element(self, value, ctx):
        ctx.get_broadcast_state(RULES).put(value.shop, value.at)


def test_days_with_a_sparse_stream_give_their_own_records_and_in_the_end_what_one_run_gives(
    spark, tmp_path, run_on_spark
):
    days = Days(spark, tmp_path)
    days.run(ruled(tmp_path / "days"), DAYS[0])
    hours = {
        field: [(row[1] - BEGIN) // HOUR for row in table_rows(str(tmp_path / "days" / field))]
        for field in ("at", "day")
    }
    assert hours == {"at": [3, 20], "day": [3]}  # the strategy waits for what comes behind the last record of the day
    days.run(ruled(tmp_path / "days"), *DAYS[1:])
    run_on_spark(ruled(tmp_path / "once"))
    for field in ("at", "day"):
        assert table_rows(str(tmp_path / "days" / field)) == table_rows(str(tmp_path / "once" / field))


def test_the_log_of_a_partition_says_first_of_which_partition_records_wait():
    told = []
    log = SimpleNamespace(warning=told.append)
    waits = RecordsWait("checked", "checked", 9, 0, ("rules",), BEGIN)
    _observer(SimpleNamespace(log=log), DAY, {})(waits)
    _observer(SimpleNamespace(log=log), None, {})(waits)
    assert told == [f"partition 2024-01-01: {waits.describe()}", waits.describe()]
