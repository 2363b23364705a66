"""Functions without a key are told the watermark in STREAMING, as keyed ones are."""

from datetime import timedelta
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest

from dagster_unified.api import (
    BroadcastProcessFunction,
    CheckpointedFunction,
    CoProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    OutputTag,
    Pipeline,
    ProcessFunction,
    TumblingEventTimeWindows,
    WatermarkStrategy,
    iterations,
)
from dagster_unified.connectors import FileSink, ParquetSource
from dagster_unified.testing import OneInputHarness, run_pipeline
from tests.iterations.support import Body
from tests.support import arrive, file_rows


class Row(NamedTuple):
    key: str
    at: int
    seen: int = 0
    """The watermark that it met, -1 where there was none."""


def met(value, watermark):
    return Row(value.key, value.at, max(-1, watermark))


class Plain(ProcessFunction):
    def process_element(self, value: Row, ctx) -> list[Row]:
        return [met(value, ctx.timer_service().current_watermark())]


ASIDE = OutputTag("aside", Row)


class Aside(ProcessFunction):
    def process_element(self, value: Row, ctx) -> list[Row]:
        ctx.output(ASIDE, met(value, ctx.timer_service().current_watermark()))
        return []


class Counted(ProcessFunction, CheckpointedFunction):
    def initialize_state(self, context):
        self.state = context.get_operator_state_store().get_list_state(ListStateDescriptor("n", int))

    def snapshot_state(self, context):
        self.state.update([1])

    def process_element(self, value: Row, ctx) -> list[Row]:
        return [met(value, ctx.timer_service().current_watermark())]


class Both(CoProcessFunction):
    def process_element1(self, value: Row, ctx) -> list[Row]:
        return [met(value, ctx.timer_service().current_watermark())]

    def process_element2(self, value: Row, ctx) -> list[Row]:
        return []


RULES = MapStateDescriptor("rules", str, int)


class Ruled(BroadcastProcessFunction):
    def process_element(self, value: Row, ctx) -> list[Row]:
        return [met(value, ctx.current_watermark())]

    def process_broadcast_element(self, value, ctx):
        return []


def windowed(rows):
    """Behind windows, what they emit comes before the watermark that closes them."""
    windows = rows.key_by("key").window(TumblingEventTimeWindows.of(timedelta(milliseconds=10)))
    return windows.reduce(lambda a, b: b).process(Plain())


def looped(rows):
    body = Body(lambda v, d: iterations.IterationBodyResult([v[0].filter(lambda row: False)], v))
    config = iterations.IterationConfig(parallelism=1, name="once")
    (out,) = iterations.iterate_unbounded_streams([rows], [], body, config)
    return out.process(Plain())


STREAMS = {
    "plain": lambda rows: rows.process(Plain()),
    "between columns": lambda rows: rows.where("at >= 0").process(Plain()).where("at >= 0"),
    "on a keyed stream": lambda rows: rows.key_by("key").process(Plain()),
    "exchanged": lambda rows: rows.global_().process(Plain()),
    "aside": lambda rows: rows.process(Aside()).get_side_output(ASIDE),
    "counted": lambda rows: rows.process(Counted()),
    "connected": lambda rows: rows.connect(rows).process(Both()),
    "broadcast": lambda rows: rows.connect(rows.broadcast(RULES)).process(Ruled()),
}

PARTS = [[1, 12], [20, 3], [31]]
MET = [("a", 1, -1), ("a", 3, 11), ("a", 12, -1), ("a", 20, 11), ("a", 31, 19)]
WINDOWS = [("a", 1, -1), ("a", 12, 11), ("a", 20, 19), ("a", 31, 30)]


def timed(rows):
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    return rows.assign_timestamps_and_watermarks(strategy)


def in_harness(build, mode="STREAMING"):
    pipeline = Pipeline("p")
    build(timed(pipeline.from_collection([Row("a", at) for part in PARTS for at in part], Row))).print("out")
    return sorted(map(tuple, run_pipeline(pipeline, mode, watermark_interval=2, micro_batch=2, seed=None).only()))


@pytest.mark.parametrize("name", STREAMS)
def test_a_function_without_a_key_is_told_the_watermark(name):
    assert in_harness(STREAMS[name]) == MET
    assert [seen for _, _, seen in in_harness(STREAMS[name], "BATCH")] == [-1] * 5


def test_what_windows_emit_comes_before_the_watermark_that_has_closed_them():
    assert in_harness(windowed) == WINDOWS


def test_a_function_behind_an_iteration_is_told_the_watermark():
    assert {seen for _, _, seen in in_harness(looped)} == {-1, 11}


def test_the_harness_of_one_operator_tells_a_function_without_a_key_the_watermark():
    harness = OneInputHarness(lambda rows: rows.process(Plain()), Row)
    assert harness.process_element(Row("a", 1), timestamp=1) == [Row("a", 1, -1)]
    harness.process_watermark(5)
    assert harness.process_element(Row("a", 7), timestamp=7) == [Row("a", 7, 5)]


def test_on_spark_functions_without_a_key_are_told_the_watermark(run_streaming, tmp_path):
    arrive(tmp_path / "in", *[[Row("a", at) for at in part] for part in PARTS])
    pipeline = Pipeline("p")
    rows = timed(pipeline.from_source(ParquetSource(str(tmp_path / "in"), Row, max_files_per_trigger=1)))
    found = {name: build(rows) for name, build in {**STREAMS, "windowed": windowed, "looped": looped}.items()}
    for name, stream in found.items():
        stream.sink_to(FileSink(str(tmp_path / name), name=name))
    assert run_streaming(pipeline) == "finished"

    def written(name):
        return file_rows(tmp_path / name)

    assert {name: written(name) for name in STREAMS} == dict.fromkeys(STREAMS, MET)
    assert written("windowed") == WINDOWS
    assert [row[:2] for row in written("looped")] == [row[:2] for row in MET]
    assert {seen for _, _, seen in written("looped")} > {-1}


def test_on_spark_a_pipeline_without_keys_has_watermarks(run_streaming, tmp_path):
    pipeline = Pipeline("p")
    rows = timed(pipeline.from_collection([Row("a", 1)], Row))
    rows.process(Plain()).sink_to(FileSink(str(tmp_path / "out"), name="out"))
    assert run_streaming(pipeline) == "finished"
    assert pq.read_table(tmp_path / "out").to_pylist() == [{"key": "a", "at": 1, "seen": -1}]
