"""State behind an iteration: in STREAMING it is in a query of its own, and the result is that of BATCH."""

from datetime import timedelta
from threading import Event, Thread
from time import monotonic

import pyarrow as pa
import pytest
from upath import UPath

from dagster_unified.api import Pipeline, TumblingEventTimeWindows, WatermarkGenerator, WatermarkStrategy, iterations
from dagster_unified.connectors import FileSink
from dagster_unified.engine.iterations.files import Block, StoredMessage
from dagster_unified.engine.streaming.cross_query import CrossQueryLog, CrossQuerySource, LoggedOutput, QueryOutputs
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.graph.nodes import QueryOutputNode
from dagster_unified.graph.queries import key_group_queries, segments
from dagster_unified.graph.topology import Lanes
from dagster_unified.operators.drivers.key_groups import ControlEvent
from dagster_unified.records import record_type
from dagster_unified.testing import run_pipeline
from tests.connectors import log_source
from tests.connectors.log_source import LogSource
from tests.depth import rotated
from tests.iterations.behind import BOUND, EVERY, GIVEN, PIPELINES, Rec, added, built, looped, together
from tests.iterations.support import Body
from tests.support import file_rows


def in_harness(name, bounded, mode, **options):
    pipeline, found, passed = built(name, bounded)
    found.print("found")
    passed.print("passed")
    result = run_pipeline(pipeline, mode, **options)
    assert not result.metrics.counters.get("late records")
    return {sink: sorted(records) for sink, records in result.sinks.items()}


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("micro_batch", [1, 4, None])
def test_state_behind_an_iteration_has_in_streaming_what_it_has_in_batch(name, bounded, micro_batch):
    expected = in_harness(name, bounded, "BATCH")
    assert expected["found"]
    assert in_harness(name, bounded, "STREAMING", micro_batch=micro_batch) == expected


def test_a_log_is_listed_while_files_of_it_are_deleted(tmp_path):
    log = CrossQueryLog(str(tmp_path))
    for epoch in (3, 4):
        log.commit(epoch, LoggedOutput([]))
    stop = Event()

    def come_and_go():
        while not stop.is_set():
            for number in range(20):
                (tmp_path / f"handed-3-{number}").touch()
            for number in range(20):
                (tmp_path / f"handed-3-{number}").unlink()

    other = Thread(target=come_and_go)
    other.start()
    try:
        assert all(log.epochs() == [3, 4] for _ in range(3000))
    finally:
        stop.set()
        other.join()
    log.forget(before=9)
    assert log.epochs() == [4]


def test_records_of_a_key_are_in_order_where_it_has_gone_to_another_subtask(tmp_path):
    def message(epoch, subtask):
        return StoredMessage(0, subtask, Block(f"handed-{epoch}", 0, 0), 1)

    log = CrossQueryLog(str(tmp_path))
    for epoch, subtasks in enumerate([2, 2, 3]):
        log.commit(epoch, LoggedOutput([message(epoch, n) for n in range(subtasks)], epoch - 1, subtasks=(subtasks,)))
    source = CrossQuerySource("loop", record_type(int, "test"), pa.schema([]), str(tmp_path))

    def read(start, end):
        splits = source.splits({"": start}, {"": end})
        return [[(one.block.file[-1], one.target) for one in split.messages] for split in splits]

    assert read(0, 2) == [[("0", 0), ("1", 0)], [("0", 1), ("1", 1)]]
    assert read(1, 3) == [[("1", 0), ("1", 1), ("2", 0), ("2", 1), ("2", 2)]]


TOGETHER = [(True, ["beside", "between"]), (False, ["joined", "between"])]


@pytest.mark.parametrize(("bounded", "names"), rotated(TOGETHER, 1))
def test_state_behind_an_iteration_on_spark(run_streaming, tmp_path, bounded, names):
    pipeline, found = together(names, bounded)
    for name, stream in found.items():
        stream.sink_to(FileSink(str(tmp_path / name), name=name))
    assert run_streaming(pipeline, {"parallelism.default": 2}) == "finished"
    assert {name: file_rows(tmp_path / name) for name in found} == {
        name: in_harness(name, bounded, "BATCH")["found"] for name in found
    }


STREAMING = {"execution.runtime-mode": "STREAMING"}


def behind_loop(given):
    return [looped(given.assign_timestamps_and_watermarks(BOUND), False, "down")]


def behind_loop_and_state(given):
    first = given.key_by("key").reduce(added).assign_timestamps_and_watermarks(BOUND)
    return [looped(first, False, "down")]


def between_loops(given):
    return [looped(looped(given, False, "one").assign_timestamps_and_watermarks(BOUND), False, "two")]


def beside_loop(given):
    own = given.map(lambda r: r, Rec).assign_timestamps_and_watermarks(BOUND)
    return [looped(given, False, "down").assign_timestamps_and_watermarks(BOUND), own]


@pytest.mark.parametrize("build", [behind_loop, behind_loop_and_state, between_loops, beside_loop])
def test_event_time_that_is_handed_on_is_reported_where_it_is_assigned(build):
    """Not in the tail, of which time is told nothing."""
    pipeline = Pipeline("timed")
    first, *others = build(pipeline.from_collection(GIVEN, Rec, name="given"))
    first.union(*others).key_by("key").window(EVERY).reduce(added).print("found")
    plan = pipeline.plan(STREAMING)
    topologies = [query.stages for query in key_group_queries(plan, Lanes())]
    programs = [head.routed for one in topologies for head in one.heads]
    programs += [routed for one in topologies for lanes in one.passes for routed in lanes.values()]
    reported = {step.uid for routed in programs for step in routed.program.steps}
    assert {node.uid for node in plan.graph.assigners} <= reported


SECOND = timedelta(seconds=1)


class Punctuated(WatermarkGenerator):
    def on_event(self, event, event_timestamp, output):
        output.emit_watermark(event_timestamp - 1)


def test_a_window_behind_an_endless_iteration_fires_while_the_job_runs(spark, tmp_path):
    """Its watermark is the smaller one of two streams, of a bound and of a generator; a third one has become idle."""
    log_source.append(tmp_path / "quiet", "quiet", log_source.Event("a", 1, 50))
    for part in ("bound", "generated"):
        log_source.append(tmp_path / part, part, *[log_source.Event("a", 1, at) for at in (100, 2_500)])
    pipeline = Pipeline("endless")
    strategies = [WatermarkStrategy.for_monotonous_timestamps(), WatermarkStrategy.for_generator(Punctuated)]
    bound, generated = (
        pipeline.from_source(LogSource(tmp_path / name, name=name, bounded=False)).assign_timestamps_and_watermarks(
            strategy.with_timestamp_assigner("at")
        )
        for name, strategy in zip(("bound", "generated"), strategies, strict=True)
    )
    idle = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at").with_idleness(SECOND)
    quiet = pipeline.from_source(LogSource(tmp_path / "quiet", name="quiet", bounded=False))
    quiet = quiet.assign_timestamps_and_watermarks(idle)
    body = Body(
        lambda variables, data: iterations.IterationBodyResult([variables[0].filter(lambda event: False)], variables)
    )
    (out,), (late) = (
        iterations.iterate_unbounded_streams([stream], [], body, iterations.IterationConfig(name=name))
        for name, stream in (("same", bound.union(generated)), ("idle", quiet))
    )
    windows = out.union(*late).key_by("key").window(TumblingEventTimeWindows.of(SECOND))
    totals = windows.reduce(lambda a, b: a._replace(number=a.number + b.number))
    totals.sink_to(FileSink(str(tmp_path / "out"), name="out"))
    options = {"execution.checkpointing.dir": str(tmp_path / "checkpoints"), "pipeline.max-parallelism": 1}
    deadline = monotonic() + 90
    job = StreamingJob(pipeline.plan({**STREAMING, **options}), spark, Start("test"))
    assert job.run(lambda: fired(tmp_path / "out") or monotonic() > deadline) == "stopped"
    assert [(key, number) for key, number, _ in fired(tmp_path / "out")] == [("a", 3)]


def fired(folder):
    return file_rows(folder) if any(folder.glob("**/*.parquet")) else []


def test_a_stream_that_is_idle_says_so_in_the_epoch_after_its_last_records(tmp_path):
    pipeline = Pipeline("p")
    body = Body(lambda v, d: iterations.IterationBodyResult([v[0].filter(lambda n: False)], v))
    (out,) = iterations.iterate_unbounded_streams([pipeline.from_collection([1], int)], [], body)
    out.key_by(lambda v: v, key_type=int).reduce(max).print()
    first, _ = segments(pipeline.plan({"execution.runtime-mode": "STREAMING"}))
    (relay,) = (node for node in first.graph.nodes if isinstance(node, QueryOutputNode))
    outputs = QueryOutputs(first, (relay.id,), UPath(tmp_path), UPath(tmp_path))
    outputs.begin(None)
    idle = ControlEvent(idle=[relay.uid])
    outputs.commit(relay, 0, [StoredMessage(0, 0, Block("records", 0, 1), 1)], idle, False, (2,), lambda: None)
    assert (outputs.must_announce_idle, outputs.read(relay, 0).idle) == (True, False)
    outputs.must_announce_idle = False  # the query has an epoch for it
    outputs.commit(relay, 1, [], idle, False, (2,), lambda: None)
    assert (outputs.must_announce_idle, outputs.read(relay, 1).idle) == (False, True)
