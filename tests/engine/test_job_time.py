"""Watermarks of several assigners, idleness, processing-time timers and the end of input, as the driver tells them."""

from collections.abc import Iterable
from datetime import timedelta

import pytest

from dagster_unified.api import KeyedProcessFunction, Pipeline, WatermarkGenerator, WatermarkStrategy, iterations
from dagster_unified.connectors.protocol.positions import ALL
from dagster_unified.engine.job_time import JobTime
from dagster_unified.graph.nodes import QueryOutputNode
from dagster_unified.graph.queries import segments
from dagster_unified.operators.drivers.key_groups import ControlEvent
from dagster_unified.operators.drivers.stages import Report, merge_reports
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.time import MAX_TIMESTAMP
from dagster_unified.operators.watermarks import Mark
from tests.iterations.support import Body


class Keep(KeyedProcessFunction):
    def process_element(self, value: int, ctx) -> Iterable[int]:
        yield value


AT_ONCE = 0.001
"""Seconds after which a source is idle that has never had a record."""


def joined(**idle):
    """Two sources, each with its assigner; `idle` says after how many seconds each of them holds nothing back."""
    pipeline = Pipeline("p")

    def source(name):
        strategy = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(milliseconds=10)).with_timestamp_assigner(
            lambda v: v
        )
        if name in idle:
            strategy = strategy.with_idleness(timedelta(seconds=idle[name]))
        return pipeline.from_collection([1], int).assign_timestamps_and_watermarks(strategy).uid(name)

    source("left").union(source("right")).key_by(lambda v: v, key_type=int).process(Keep()).uid("keep").print()
    return pipeline.plan({"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": "/nowhere"})


class Lagging(WatermarkGenerator[int]):
    """Ten behind the clock, which its tests set."""

    now = 0

    def on_event(self, event, event_timestamp, output):
        """Tells nothing."""

    def on_periodic_emit(self, output):
        output.emit_watermark(self.now - 10)


def generated(**options):
    """Two sources, the left one with a watermark generator."""
    pipeline = Pipeline("p")

    def source(name, strategy):
        timed = strategy.with_timestamp_assigner(lambda v: v)
        return pipeline.from_collection([1], int).assign_timestamps_and_watermarks(timed).uid(name)

    left = source("left", WatermarkStrategy.for_generator(Lagging))
    right = source("right", WatermarkStrategy.for_monotonous_timestamps())
    left.union(right).key_by(lambda v: v, key_type=int).process(Keep()).uid("keep").print()
    return pipeline.plan({"execution.runtime-mode": "STREAMING", **options})


def marked(*marks, right=None):
    """What the tasks of a micro-batch report together, each with the mark of its generator."""
    seen = {} if right is None else {"right": right}
    return merge_reports(Report(Metrics(last_event_times=seen), marks={"left": m}).encode() for m in marks)


def saw(due=None, **moments):
    return Report(Metrics(last_event_times=moments), due)


def test_the_slower_assigner_holds_the_watermark_back():
    time = JobTime(joined(), None, now=0)
    assert time.after(saw(left=100), 1) is None
    assert time.after(saw(right=50), 2).watermarks == {"keep": 39}
    assert time.after(saw(left=200), 3) is None
    assert time.after(saw(right=300), 4).watermarks == {"keep": 189}
    assert time.after(saw(right=20), 5) is None  # it never goes back


def test_an_idle_assigner_holds_nothing_back_until_it_speaks_again():
    time = JobTime(joined(right=5), None, now=0)
    assert time.after(saw(left=100), 1) is None
    assert time.tick(4_999) is None
    assert time.tick(5_000).watermarks == {"keep": 89}
    assert time.after(saw(left=200), 6_000).watermarks == {"keep": 189}
    assert time.after(saw(right=150), 7_000) is None  # late by then, and held back by it
    assert time.after(saw(left=400), 8_000) is None
    assert time.tick(12_000).watermarks == {"keep": 389}


def test_where_all_are_idle_the_furthest_counts():
    time = JobTime(joined(left=5, right=5), None, now=0)
    time.after(saw(left=100, right=50), 1)
    assert time.tick(5_001).watermarks == {"keep": 89}


def test_a_stream_that_is_handed_on_is_idle_where_all_before_it_are():
    pipeline = Pipeline("p")
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(lambda v: v)
    quiet = pipeline.from_collection([1], int, name="quiet")
    quiet = quiet.assign_timestamps_and_watermarks(strategy.with_idleness(timedelta(seconds=5))).uid("quiet")
    other = pipeline.from_collection([1], int, name="other").assign_timestamps_and_watermarks(strategy).uid("other")
    body = Body(lambda v, d: iterations.IterationBodyResult([v[0].filter(lambda n: False)], v))
    (out,) = iterations.iterate_unbounded_streams([quiet], [], body)
    out.union(other).key_by(lambda v: v, key_type=int).process(Keep()).uid("keep").print()
    first, second = segments(pipeline.plan({"execution.runtime-mode": "STREAMING"}))
    (relay,) = (node.uid for node in first.graph.nodes if isinstance(node, QueryOutputNode))

    before, behind = JobTime(first, None, now=0), JobTime(second, None, now=0)
    assert before.after(saw(quiet=50), 1).idle == []
    behind.reached(relay, 49, None)
    assert behind.after(saw(other=100), 2).watermarks == {"keep": 49}
    event = before.tick(5_001)
    assert (event.idle, event.watermarks) == ([relay], {relay: 49})
    assert before.tick(5_002) is None
    behind.reached(relay, 49, None, idle=True)
    assert behind.tick(5_003).watermarks == {"keep": 99}
    assert before.after(saw(quiet=150), 5_004).idle == []
    behind.reached(relay, 149, None)
    assert behind.after(saw(other=300), 5_005).watermarks == {"keep": 149}


def parts(**moments):
    """What the tasks of a micro-batch report of one source, each of a part of its own; of the other source nothing."""
    reports = [Report(Metrics(last_event_times={"left": moment})) for moment in moments.values()]
    for report, (part, moment) in zip(reports, moments.items(), strict=True):
        report.saw_part(part, {"left": moment})
    return merge_reports(report.encode() for report in reports)


def test_the_slowest_part_of_a_source_holds_the_watermark_back():
    time = JobTime(joined(right=AT_ONCE), None, now=0)
    assert time.after(parts(p0=1_000, p1=100), 1).watermarks == {"keep": 89}
    assert time.after(parts(p0=2_000), 2) is None
    assert time.after(parts(p1=1_500, p2=300), 3).watermarks == {"keep": 289}  # a new part that is behind
    time.after(parts(p2=5_000), 4)
    assert time.latest.watermarks == {"keep": 1_489}


def test_an_idle_part_holds_nothing_back_until_it_has_records_again():
    time = JobTime(joined(left=5, right=AT_ONCE), None, now=0)
    time.after(parts(p0=1_000, p1=100), 1)
    assert time.after(parts(p0=2_000), 4_000) is None
    assert time.tick(5_001).watermarks == {"keep": 1_989}
    assert time.after(parts(p0=3_000, p1=2_500), 6_000).watermarks == {"keep": 2_489}
    assert time.tick(11_000).watermarks == {"keep": 2_989}  # where all are idle the furthest counts


def test_a_part_that_has_been_read_to_its_end_holds_nothing_back():
    plan = joined(right=AT_ONCE)
    time = JobTime(plan, None, now=0)
    assert time.after(parts(p0=1_000, p1=100), 1).watermarks == {"keep": 89}
    time.ended({plan.graph.sources[0].uid: {"p1"}})
    assert time.after(parts(p0=2_000), 2).watermarks == {"keep": 1_989}


def test_an_operator_whose_input_has_ended_does_not_count_for_the_watermark_of_the_job():
    pipeline = Pipeline("p")
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(lambda v: v)
    for name in ("ended", "live"):
        stream = pipeline.from_collection([1], int, name=name).assign_timestamps_and_watermarks(strategy).uid(name)
        stream.key_by(lambda v: v, key_type=int).process(Keep()).uid(f"keep {name}").print(name)
    plan = pipeline.plan({"execution.runtime-mode": "STREAMING"})
    time = JobTime(plan, None, now=0)
    time.after(saw(ended=10, live=100), 1)
    assert time.watermark() == 9
    time.ended({plan.graph.sources[0].uid: {ALL}})
    event = time.after(saw(live=200), 2)
    assert (event.ended, event.last_event_times, time.watermark()) == (["keep ended"], {"keep ended": 10}, 199)


@pytest.mark.parametrize(("idle", "watermark"), [({}, 39), ({"right": 3_600}, 189), ({"left": 3_600}, 39)])
def test_where_another_run_goes_on_a_source_that_has_ended_holds_others_back_unless_it_may_be_idle(idle, watermark):
    plan = joined(**idle)
    time = JobTime(plan, None, now=0, goes_on=True)
    assert time.after(saw(left=100, right=50), 1).watermarks == {"keep": 39}
    time.ended({plan.graph.sources[1].uid: {ALL}})
    time.after(saw(left=200), 2)
    assert (time.latest.watermarks, time.latest.ended) == ({"keep": watermark}, [])


def test_after_a_restart_the_parts_are_known():
    first = JobTime(joined(right=AT_ONCE), None, now=0)
    before = first.after(parts(p0=1_000, p1=100), 1)
    second = JobTime(joined(right=AT_ONCE), before, now=2)
    assert second.after(parts(p0=3_000), 3).watermarks == before.watermarks
    assert second.after(parts(p1=2_000), 4).watermarks == {"keep": 1_989}


def test_a_timer_of_processing_time_is_told_once_when_it_is_due():
    time = JobTime(joined(), None, now=0)
    assert time.after(saw(due=1_000), 10) is None
    assert time.tick(999) is None
    event = time.tick(1_000)
    assert (event.now, event.end) == (1_000, False)
    assert time.tick(1_001) is None


def test_the_end_is_told_once_and_is_the_last_event():
    time = JobTime(joined(), None, now=0)
    time.after(saw(left=100), 1)
    event = time.end(2)
    assert (event.end, event.last_event_times) == (True, {"keep": 100})
    assert time.after(saw(left=500, right=500), 3) is None
    assert time.latest == event


@pytest.mark.parametrize("now", [0, 10_000_000])
def test_a_restart_wakes_every_group_once_and_goes_on_from_the_same_watermark(now):
    first = JobTime(joined(), None, now=0)
    before = first.after(saw(left=100, right=50), 1)
    second = JobTime(joined(), before, now)
    woken = second.tick(now)
    assert (woken.number, woken.watermarks) == (before.number + 1, before.watermarks)
    assert second.tick(now + 1) is None
    assert second.after(saw(right=300), now + 2).watermarks == {"keep": 89}


def test_of_parallel_generators_the_slowest_counts():
    time = JobTime(generated(), None, now=0)
    assert time.after(marked(Mark(50), Mark(20), Mark(), right=100), 1).watermarks == {"keep": 20}
    assert time.after(marked(Mark(30, idle=True), Mark(40)), 2).watermarks == {"keep": 40}
    assert time.after(marked(Mark(10)), 3) is None  # it never goes back
    assert time.after(saw(left=500), 4) is None  # the generator decides, not the records


def test_a_generator_that_is_idle_holds_nothing_back_until_it_emits_again():
    time = JobTime(generated(), None, now=0)
    assert time.after(marked(Mark(50), right=100), 1).watermarks == {"keep": 50}
    assert time.after(marked(Mark(60, idle=True), Mark(70, idle=True)), 2).watermarks == {"keep": 99}
    assert time.after(saw(left=80, right=200), 3).watermarks == {"keep": 199}
    assert time.after(marked(Mark(90), right=300), 4) is None


def test_a_restart_goes_on_from_what_a_generator_has_emitted():
    before = JobTime(generated(), None, now=0).after(marked(Mark(50), right=20), 1)
    time = JobTime(generated(), before, now=2)
    assert time.after(saw(right=100), 3).watermarks == {"keep": 50}


def test_a_generator_is_asked_for_periodic_watermarks_while_no_records_come(monkeypatch):
    monkeypatch.setattr(Lagging, "now", 500)
    time = JobTime(generated(**{"pipeline.auto-watermark-interval": "200 ms"}), None, now=0)
    assert time.after(saw(right=1_000), 100) is None
    assert time.tick(299) is None
    assert time.tick(300).watermarks == {"keep": 490}
    monkeypatch.setattr(Lagging, "now", 600)
    assert time.tick(499) is None
    assert time.tick(500).watermarks == {"keep": 590}


def test_with_no_interval_no_generator_is_asked_while_no_records_come():
    time = JobTime(generated(**{"pipeline.auto-watermark-interval": "0 s"}), None, now=0)
    assert time.after(saw(right=1_000), 100) is None
    assert time.tick(1_000_000) is None


def test_a_sink_is_complete_as_far_as_what_comes_before_it_was_told():
    time = JobTime(joined(), None, 0)
    time.after(saw(left=50, right=30), 0)
    told = time.latest
    time.after(saw(left=90, right=80), 0)
    both = ("left", "right")
    assert time.complete_until(both, ("keep",), told, 0) == 19
    assert time.complete_until(both, ("keep",), time.latest, 0) == 69
    assert time.complete_until(both, (), ControlEvent(), 0) == 69
    assert time.complete_until(("left",), (), ControlEvent(), 0) == 79
    assert time.complete_until(both, ("keep",), time.end(0), 0) == MAX_TIMESTAMP
