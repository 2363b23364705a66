"""A source that has been read to its end holds nobody back, as in Flink, where it is at the end of time."""

from datetime import timedelta
from time import monotonic
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest

from dagster_unified.api import (
    FlatMapFunction,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    Pipeline,
    ProcessWindowFunction,
    TumblingEventTimeWindows,
    WatermarkStrategy,
    iterations,
)
from dagster_unified.connectors import CollectionSource, CsvSource, FileSink
from dagster_unified.connectors.structured import StructuredSource
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.testing import run_pipeline
from tests.connectors.log_source import Event, LogSource, append
from tests.iterations.behind import Rec, looped
from tests.iterations.support import Body
from tests.support import streaming


class Row(NamedTuple):
    key: str
    at: int
    value: int = 0


BY_AT = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
TENS = TumblingEventTimeWindows.of(timedelta(milliseconds=10))


def live(pipeline, name="live"):
    """A source without an end, whose records a test gives."""
    return pipeline.from_source(StructuredSource("rate", Row, name=name)).assign_timestamps_and_watermarks(BY_AT)


def given(pipeline, *rows, name="given"):
    """A source that ends."""
    return pipeline.from_collection(rows, Row, name=name).assign_timestamps_and_watermarks(BY_AT)


def streamed(pipeline, *at, **others):
    """What reaches the sinks, with these moments in the live stream."""
    return run_pipeline(pipeline, "STREAMING", {"live": [Row("live", one) for one in at]}, **others).sinks


class Seen(KeyedProcessFunction):
    """Says which watermark each record meets."""

    def process_element(self, value, ctx):
        yield value.at, max(-1, ctx.timer_service().current_watermark())


class SeenByBoth(KeyedCoProcessFunction):
    def process_element1(self, value, ctx):
        yield value.at, max(-1, ctx.timer_service().current_watermark())

    process_element2 = process_element1


def united(one, other):
    return one.union(other).key_by("key").process(Seen(), output_type=tuple[int, int])


def connected(one, other):
    return one.key_by("key").connect(other.key_by("key")).process(SeenByBoth(), output_type=tuple[int, int])


@pytest.mark.parametrize("build", [united, connected])
@pytest.mark.parametrize("rows", [[], [Row("a", 5)], [Row("a", 5), Row("a", 1_000)]])
def test_a_source_that_is_empty_or_has_ended_holds_no_live_stream_back(build, rows):
    pipeline = Pipeline("p")
    build(given(pipeline, *rows), live(pipeline)).print("out")
    found = streamed(pipeline, 10, 20, 30)["out"]
    assert found[len(rows) :] == [(10, -1), (20, 9), (30, 19)]


class Total(ProcessWindowFunction):
    """A window's end, its total, and the watermark that has closed it."""

    def process(self, key, context, elements):
        yield context.window().end, sum(row.value for row in elements), context.current_watermark()


def test_windows_of_a_file_and_a_live_stream_close_while_that_goes_on():
    pipeline = Pipeline("p")
    both = given(pipeline, Row("a", 1, 1), Row("a", 12, 2)).union(live(pipeline))
    both.window_all(TENS).process(Total(), output_type=tuple[int, int, int]).print("out")
    assert streamed(pipeline, 3, 14, 35)["out"][:2] == [(10, 1, 13), (20, 2, 34)]


class AtEnd(KeyedProcessFunction):
    """Emits what it is given a minute later, by the clock or by event time."""

    def __init__(self, by_clock=False, again=False):
        self.by_clock, self.again = by_clock, again

    def process_element(self, value, ctx):
        timers = ctx.timer_service()
        if self.by_clock:
            timers.register_processing_time_timer(timers.current_processing_time() + 60_000)
        else:
            timers.register_event_time_timer(value.at + 60_000)
        return []

    def on_timer(self, timestamp, ctx):
        if self.again:
            ctx.timer_service().register_event_time_timer(timestamp + 1)
        yield Row(ctx.get_current_key(), 5, 1)


@pytest.mark.parametrize("by_clock", [True, False])
def test_an_operator_whose_sources_have_ended_is_at_the_end_of_its_input_while_others_go_on(by_clock):
    pipeline = Pipeline("p")
    ended = given(pipeline, Row("a", 1)).key_by("key").process(AtEnd(by_clock), output_type=Row)
    again = ended.assign_timestamps_and_watermarks(BY_AT)
    united(again, live(pipeline)).print("out")
    assert dict(streamed(pipeline, 10, 20, 30)["out"]) == {5: -1, 10: -1, 20: 9, 30: 19}


@pytest.mark.parametrize("by_clock", [True, False])
def test_nothing_that_an_operator_emits_at_the_end_of_its_input_is_late_where_it_meets_a_live_stream(by_clock):
    pipeline = Pipeline("p")
    events = live(pipeline)
    ended = given(pipeline, Row("a", 1)).key_by("key").process(AtEnd(by_clock), output_type=Row)
    both = events.union(ended.assign_timestamps_and_watermarks(BY_AT))
    both.window_all(TENS).process(Total(), output_type=tuple[int, int, int]).print("out")
    assert streamed(pipeline, 10, 20, 30)["out"][0] == (10, 1, 29)


def test_timers_that_register_themselves_come_to_an_end_where_a_source_does():
    pipeline = Pipeline("p")
    given(pipeline, Row("a", 1)).key_by("key").process(AtEnd(again=True), output_type=Row).print("out")
    live(pipeline).print("live")
    assert len(streamed(pipeline, 10, 20)["out"]) == 17


def test_an_iteration_whose_sources_have_ended_ends_and_holds_no_live_stream_back_behind_it():
    pipeline = Pipeline("p")
    recs = pipeline.from_collection([Rec(1, 10, 1)], Rec, name="given").assign_timestamps_and_watermarks(BY_AT)
    rows = looped(recs, False, "down").map(lambda r: Row("a", r.at, r.value), Row)
    united(rows, live(pipeline)).print("out")
    assert sorted(streamed(pipeline, 10, 20, 30)["out"]) == [(1, -1), (1, -1), (10, -1), (20, 9), (30, 19)]


class Last(FlatMapFunction, iterations.IterationListener):
    """Emits a record when the iteration has ended."""

    def flat_map(self, value: Row) -> list[Row]:
        return [value]

    def on_epoch_watermark_incremented(self, epoch_watermark, context, collector):
        """Emits nothing."""

    def on_iteration_terminated(self, context, collector):
        collector.collect(Row("last", 7, 100))


def ending(rows):
    """Passes records on, and one more behind the last."""

    def build(variables, data):
        return iterations.IterationBodyResult(
            [variables[0].filter(lambda r: False)], [variables[0].global_().flat_map(Last())]
        )

    config = iterations.IterationConfig(parallelism=1, name="ending")
    (out,) = iterations.iterate_unbounded_streams([rows], [], Body(build), config)
    return out.assign_timestamps_and_watermarks(BY_AT)


def test_what_an_iteration_emits_at_its_end_comes_once_and_is_not_late_for_a_live_stream():
    pipeline = Pipeline("p")
    events = live(pipeline)
    both = events.union(ending(given(pipeline, Row("a", 1, 1))))
    both.window_all(TENS).process(Total(), output_type=tuple[int, int, int]).print("out")
    assert streamed(pipeline, 10, 20, 30)["out"][0] == (10, 101, 9)


class Ended(KeyedProcessFunction):
    """Emits what it was given when its input has ended."""

    def process_element(self, value, ctx):
        ctx.timer_service().register_event_time_timer(1_000_000 + value.at)
        return []

    def on_timer(self, timestamp, ctx):
        yield (timestamp, 0, 0)


def written(folder):
    return sorted(tuple(row.values()) for row in pq.read_table(folder).to_pylist()) if folder.exists() else []


def test_on_spark_a_live_stream_goes_on_without_files_collections_and_logs_that_have_ended(spark, tmp_path):
    """Also behind an iteration, and after a restart."""
    append(tmp_path / "live", "live", *[Event("live", 1, at) for at in (3, 14)])
    append(tmp_path / "log", "log", Event("log", 1, 4))
    append(tmp_path / "empty", "empty")
    (tmp_path / "file.csv").write_text("key,number,at\ncsv,1,5\n")

    def run(until):
        pipeline = Pipeline("p")

        def read(source):
            return pipeline.from_source(source).assign_timestamps_and_watermarks(BY_AT)

        events = read(LogSource(tmp_path / "live", "live", bounded=False))
        log, empty = (
            read(LogSource(tmp_path / name, name, until={name: count})) for name, count in (("log", 1), ("empty", 0))
        )
        file, collection = (
            read(CsvSource(str(tmp_path / "file.csv"), Event)),
            read(CollectionSource([Event("c", 1, 6)], Event)),
        )
        counted = events.union(log, empty, file, collection).map(lambda e: Row(e.key, e.at, e.number), Row)
        rows = ending(log.union(file).map(lambda e: Row("a", e.at, 10), Row))
        results = {
            "united": counted.window_all(TENS).process(Total(), output_type=tuple[int, int, int]),
            "looped": rows.union(counted).window_all(TENS).process(Total(), output_type=tuple[int, int, int]),
            "ended": collection.key_by("key").process(Ended(), output_type=tuple[int, int, int]),
        }
        for name, stream in results.items():
            stream.sink_to(FileSink(str(tmp_path / name), name=name))
        options = streaming(tmp_path, 1)
        deadline = monotonic() + 240
        job = StreamingJob(pipeline.plan(options), spark, Start("test"))
        assert job.run(lambda: until() or monotonic() > deadline) == "stopped"
        assert monotonic() < deadline

    def found():
        return {name: written(tmp_path / name) for name in ("united", "looped", "ended")}

    expected = {"united": [(10, 4, 13)], "looped": [(10, 124, 13)], "ended": [(1_000_006, 0, 0)]}
    run(lambda: found() == expected)
    append(tmp_path / "live", "live", Event("live", 1, 35))
    more = {"united": [(10, 4, 13), (20, 1, 34)], "looped": [(10, 124, 13), (20, 1, 34)], "ended": [(1_000_006, 0, 0)]}
    run(lambda: found() == more)


class Line(NamedTuple):
    value: str


def test_on_spark_a_bounded_source_of_sparks_ends_where_an_epoch_finds_no_more_of_it(spark, tmp_path):
    append(tmp_path / "live", "live", *[Event("live", 1, at) for at in (3, 14)])
    (tmp_path / "lines").mkdir()
    for number, text in enumerate(("5\n", "", "6\n")):
        (tmp_path / "lines" / f"{number}.txt").write_text(text)
    pipeline = Pipeline("p")
    options = {"path": str(tmp_path / "lines"), "maxFilesPerTrigger": "1"}
    lines = pipeline.from_source(StructuredSource("text", Line, options, name="lines", bounded=True))
    events = pipeline.from_source(LogSource(tmp_path / "live", "live", bounded=False))
    rows = [lines.map(lambda line: Row("line", int(line.value)), Row), events.map(lambda e: Row(e.key, e.at, 1), Row)]
    one, other = [stream.assign_timestamps_and_watermarks(BY_AT) for stream in rows]
    totals = one.union(other).window_all(TENS).process(Total(), output_type=tuple[int, int, int])
    totals.sink_to(FileSink(str(tmp_path / "out"), name="out"))
    launched = streaming(tmp_path, 1)
    deadline = monotonic() + 120
    job = StreamingJob(pipeline.plan(launched), spark, Start("test"))
    assert job.run(lambda: bool(written(tmp_path / "out")) or monotonic() > deadline) == "stopped"
    assert written(tmp_path / "out") == [(10, 1, 13)]
