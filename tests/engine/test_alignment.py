"""Parts of a source that get too far ahead of others wait for them (FLIP-217)."""

import json
from datetime import timedelta
from pathlib import Path
from time import monotonic

import pytest
from deltalake import DeltaTable
from upath import UPath

from dagster_unified.api import KeyedProcessFunction, Pipeline, WatermarkStrategy, iterations
from dagster_unified.connectors import DeltaSink
from dagster_unified.connectors.protocol.positions import Range, Watermarks
from dagster_unified.engine.job_time import JobTime
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.engine.streaming.sources import Alignment
from dagster_unified.errors import UnsupportedError
from dagster_unified.graph.event_time import aligned
from dagster_unified.graph.queries import plan_queries, segments
from dagster_unified.graph.topology import Lanes
from dagster_unified.operators.drivers.stages import Report
from dagster_unified.operators.metrics import Metrics
from dagster_unified.testing import run_pipeline
from tests.connectors.log_source import Event, LogSource, append
from tests.depth import rotated
from tests.iterations.support import Body

STREAMING = {"execution.runtime-mode": "STREAMING"}
BY_TIME = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(milliseconds=9)).with_timestamp_assigner("at")
ALIGNED = BY_TIME.with_watermark_alignment("group", timedelta(milliseconds=100))


class Log(LogSource):
    def part_of(self, split):
        return split[0]


@pytest.mark.parametrize(
    ("told", "waiting"),
    [
        (Watermarks(100), set()),
        (Watermarks(100, {"a": 0, "b": 100, "c": 101}), {"c"}),
        (Watermarks(100, {"a": 0, "b": 100, "c": 101}, frozenset("a")), set()),
        (Watermarks(100, {"b": 100, "c": 101}, others=0), {"c"}),
        (Watermarks(100, {"": 101}, others=0), {"a", "b", "c"}),
        (Watermarks(100, {"b": 150}, frozenset("b"), others=10), {"b"}),
        (Watermarks(0, {"a": 1, "b": 1, "c": 2}), {"c"}),
    ],
)
def test_what_is_further_ahead_than_the_drift_waits(told, waiting):
    assert told.waiting(["a", "b", "c"]) == waiting


def test_nobody_waits_for_a_part_that_is_finished():
    assert Watermarks(100, {"a": 0, "b": 50, "c": 151}).waiting(["b", "c"], finished={"a"}) == {"c"}
    assert Watermarks(100, {"a": 0, "b": 51, "c": 151}).waiting(["b", "c"], finished={"a"}) == set()


def joined(first=ALIGNED, second=ALIGNED, folder="logs"):
    pipeline = Pipeline("p")
    streams = [
        pipeline.from_source(Log(folder, name=name)).assign_timestamps_and_watermarks(strategy)
        for name, strategy in (("one", first), ("two", second))
    ]
    streams[0].union(streams[1]).print("out")
    return pipeline.plan(STREAMING)


def told(folder, source):
    return json.loads((folder / source / "watermarks.json").read_text())


def saw(time, uid, now, **moments):
    report = Report(Metrics())
    for part, moment in moments.items():
        report.saw_part(part, {uid: moment})
    time.after(report, now)


@pytest.mark.parametrize("group", ["group", "another"])
def test_sources_of_one_group_wait_for_each_other(tmp_path, group):
    idle = ALIGNED.with_idleness(timedelta(seconds=5))
    plan = joined(idle, BY_TIME.with_watermark_alignment(group, timedelta(milliseconds=70)))
    one, two = plan.graph.sources
    first, second = plan.graph.assigners
    alignment = Alignment(plan, {one.id, two.id}, UPath(tmp_path))
    time = JobTime(plan, None, 0)
    alignment.tell(time, 0)
    assert told(tmp_path, one.uid)["parts"] == {}
    saw(time, first.uid, 1, p0=1_000, p1=500)
    saw(time, second.uid, 1, p0=2_000)
    alignment.tell(time, 1)
    assert told(tmp_path, one.uid) == {
        "drift": 100, "parts": {"p0": 990, "p1": 490}, "idle": [], "others": 1_990 if group == "group" else None,
    }  # fmt: skip
    assert told(tmp_path, two.uid)["drift"] == 70
    assert told(tmp_path, two.uid)["others"] == (490 if group == "group" else None)
    saw(time, first.uid, 3_000, p0=1_100)
    alignment.tell(time, 5_500)
    assert told(tmp_path, one.uid)["idle"] == ["p1"]
    assert told(tmp_path, two.uid)["others"] == (1_090 if group == "group" else None)
    alignment.end()
    alignment.tell(time, 5_600)
    assert told(tmp_path, one.uid) == {"drift": 100, "parts": {}, "idle": [], "others": None}


def test_no_other_source_waits_for_what_has_ended(tmp_path):
    plan = joined()
    one, two = plan.graph.sources
    first, second = plan.graph.assigners
    alignment = Alignment(plan, {one.id, two.id}, UPath(tmp_path))
    time = JobTime(plan, None, 0)
    saw(time, first.uid, 1, p0=2_000)
    saw(time, second.uid, 1, p0=1_000, p1=1_500)
    two_ends = Range({"p0": 0, "p1": 0}, {"p0": 5, "p1": 5})

    def others(position):
        alignment.ended({two.id: two_ends.parts_read(None, position)})
        alignment.tell(time, 2)
        return told(tmp_path, one.uid)["others"]

    assert others("-") == 990
    assert others('{"p0":4,"p1":4}') == 990
    assert others('{"p0":5,"p1":4}') == 1_490
    assert others('{"p0":5,"p1":5}') is None
    assert told(tmp_path, two.uid)["others"] == 1_990


def test_a_source_without_parts_ends_with_all_of_it(tmp_path):
    plan = joined()
    one, two = plan.graph.sources
    _, second = plan.graph.assigners
    alignment = Alignment(plan, {one.id, two.id}, UPath(tmp_path))
    time = JobTime(plan, None, 0)
    report = Report(Metrics())
    report.saw_part("", {second.uid: 1_000})
    time.after(report, 1)
    for start, others in ((0, 990), (1, None)):
        alignment.ended({two.id: Range({"rows": start}, {"rows": 1}).parts_read(None, None)})
        alignment.tell(time, 2)
        assert told(tmp_path, one.uid)["others"] == others


class Keep(KeyedProcessFunction):
    def process_element(self, value, ctx):
        yield value


def refused(build):
    pipeline = Pipeline("p")
    build(pipeline).key_by("key").process(Keep(), output_type=Event).print("out")
    run_pipeline(pipeline, "BATCH")
    with pytest.raises(UnsupportedError) as raised:
        run_pipeline(pipeline, "STREAMING")
    return str(raised.value)


def test_a_source_that_cannot_wait_is_refused_in_streaming_only():
    events = [Event("a", 1, 1)]
    says = refused(lambda p: p.from_collection(events, Event, name="some").assign_timestamps_and_watermarks(ALIGNED))
    assert "source 'some' cannot wait for others" in says
    assert "in watermark group 'group'" in says


def test_timestamps_are_assigned_to_each_aligned_source_by_itself(tmp_path):
    append(tmp_path / "logs", "a", Event("a", 1, 1))

    def united(pipeline):
        one, two = (pipeline.from_source(Log(tmp_path / "logs", name=name)) for name in ("one", "two"))
        return one.union(two).assign_timestamps_and_watermarks(ALIGNED)

    def twice(pipeline):
        one = pipeline.from_source(Log(tmp_path / "logs"))
        streams = [one.assign_timestamps_and_watermarks(ALIGNED) for _ in range(2)]
        return streams[0].union(streams[1])

    for made, says in ((united, "assign timestamps to each source by itself"), (twice, "align it once")):
        pipeline = Pipeline("p")
        made(pipeline).print("out")
        with pytest.raises(UnsupportedError, match=says):
            plan_queries(pipeline.plan(STREAMING), Lanes())


def test_a_source_that_an_iteration_reads_too_is_aligned_in_its_query(tmp_path):
    pipeline = Pipeline("p")
    events = pipeline.from_source(Log(tmp_path / "logs"))
    body = Body(lambda variables, data: iterations.IterationBodyResult(variables, variables))
    (out,) = iterations.iterate_unbounded_streams([events], [], body)
    again, own = out.assign_timestamps_and_watermarks(BY_TIME), events.assign_timestamps_and_watermarks(ALIGNED)
    again.union(own).key_by("key").process(Keep(), output_type=Event).print("out")
    first, second = segments(pipeline.plan(STREAMING))
    (one,) = aligned(first.graph)
    assert first.graph.node(one.source).name == "log"
    assert aligned(second.graph) == []


def read_by_epoch(checkpoints):
    """How far each part was read, epoch after epoch, as Spark has logged it."""
    (folder,) = Path(checkpoints).glob("*/spark/main/offsets")
    logs = sorted((file for file in folder.iterdir() if file.name.isdigit()), key=lambda file: int(file.name))
    return [json.loads(log.read_text().splitlines()[2]) for log in logs]


@pytest.mark.parametrize(
    ("select", "strategy", "waits"),
    rotated(
        [
            (lambda events: events, BY_TIME, False),
            (lambda events: events, ALIGNED, True),
            (lambda events: events.where("number >= 0").map(lambda event: event, Event), ALIGNED, True),
        ],
        1,
    ),
)
def test_a_part_that_is_ahead_is_not_read_further(run_streaming, tmp_path, select, strategy, waits):
    slow = [Event("slow", n, n * 10) for n in range(40)]
    fast = [Event("fast", n, n * 1_000) for n in range(20)]
    append(tmp_path / "logs", "fast", *fast)
    append(tmp_path / "logs", "slow", *slow)
    pipeline = Pipeline("p")
    events = pipeline.from_source(Log(tmp_path / "logs", most=12))
    timed = select(events).assign_timestamps_and_watermarks(strategy)
    timed.key_by("key").process(Keep(), output_type=Event).print("out")
    run_streaming(pipeline)
    read = read_by_epoch(tmp_path / "checkpoints")
    assert read[-1] == {"fast": 20, "slow": 40}
    behind = [offsets["fast"] for offsets in read if offsets["slow"] < 40]
    assert len(behind) > 2
    assert len(set(behind)) == (1 if waits else len(behind))


@pytest.mark.parametrize("restarted", rotated([False, True], 1))
def test_an_endless_source_goes_on_after_a_bounded_one_has_ended(spark, tmp_path, restarted):
    append(tmp_path / "ended", "old", *[Event("old", n, n) for n in range(4)])
    new = [Event("new", n, 1_000 + n * 1_000) for n in range(9)]
    append(tmp_path / "endless", "new", *new[:2])

    def run(until):
        pipeline = Pipeline("p")
        ended = Log(tmp_path / "ended", name="ended", until={"old": 4})
        endless = Log(tmp_path / "endless", name="endless", bounded=False, most=2)
        streams = [pipeline.from_source(one).assign_timestamps_and_watermarks(ALIGNED) for one in (ended, endless)]
        kept = streams[0].union(streams[1]).key_by("key").process(Keep(), output_type=Event)
        kept.sink_to(DeltaSink(str(tmp_path / "table"), name="table"))
        place = str(tmp_path / "checkpoints")
        options = {**STREAMING, "execution.checkpointing.dir": place, "pipeline.max-parallelism": 4}
        deadline = monotonic() + 300
        job = StreamingJob(pipeline.plan(options), spark, Start("test"))
        assert job.run(lambda: until() or monotonic() > deadline) == "stopped"
        assert monotonic() < deadline

    def rows():
        place = str(tmp_path / "table")
        return DeltaTable(place).to_pyarrow_table().num_rows if DeltaTable.is_deltatable(place) else 0

    if restarted:
        run(lambda: rows() == 6)
    append(tmp_path / "endless", "new", *new[2:])
    run(lambda: rows() == 13)
