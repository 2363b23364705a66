"""Windows with column aggregates: Catalyst gives what the Python operator gives, in both modes and in the harness."""

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings

from dagster_unified.api import (
    EventTimeSessionWindows,
    GlobalWindows,
    Pipeline,
    ProcessWindowFunction,
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
    WatermarkGenerator,
    WatermarkStrategy,
)
from dagster_unified.api import functions as F
from dagster_unified.connectors import DeltaSink, FileSink, ParquetSource
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.errors import PipelineError, UnifiedError, UnsupportedError
from dagster_unified.testing import run_pipeline
from tests.depth import examples
from tests.operators.support import ASSIGNERS, EVENTS, ms
from tests.support import Event, arrive, committed, run_stages, streaming, table_rows


class Total(NamedTuple):
    key: str
    window_start: int
    window_end: int
    total: int
    most: int


class Complete(WatermarkGenerator[Event]):
    def on_event(self, event, event_timestamp, output):
        output.emit_watermark(event_timestamp)


class Totals(ProcessWindowFunction):
    def process(self, key, context, elements) -> Iterable[Total]:
        values = [e.value for e in elements]
        yield Total(key, context.window().start, context.window().end, sum(values), max(values))


BY_AT = WatermarkStrategy.for_bounded_out_of_orderness(ms(100)).with_timestamp_assigner("at")


def windowed(stream, assigner, native: bool):
    windows = stream.key_by("key").window(assigner)
    return (
        windows.agg(F.sum("value").alias("total"), F.max("value").alias("most"), output_type=Total)
        if native
        else windows.process(Totals())
    )


def built(events, assigner, native: bool) -> Pipeline:
    pipeline = Pipeline("p")
    windowed(pipeline.from_collection(events, Event).assign_timestamps_and_watermarks(BY_AT), assigner, native).print(
        "out"
    )
    return pipeline


@given(assigner=ASSIGNERS, events=EVENTS)
def test_the_harness_gives_what_the_python_operator_gives(assigner, events):
    results = [
        sorted(run_pipeline(built(events, assigner, native), mode, watermark_interval=None).only())
        for native in (True, False)
        for mode in ("BATCH", "STREAMING")
    ]
    assert results[0] == results[1] == results[2] == results[3]


@settings(max_examples=examples(3), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(assigner=ASSIGNERS, events=EVENTS)
def test_catalyst_gives_what_the_python_operator_gives(spark, tmp_path, assigner, events):
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    pipeline = Pipeline("p")
    windowed(
        pipeline.from_collection(events, Event).assign_timestamps_and_watermarks(BY_AT), assigner, native=True
    ).sink_to(FileSink(str(folder / "out")))
    run_stages(pipeline.plan(), spark, folder)
    rows = [Total(*row) for row in spark.read.parquet(str(folder / "out")).collect()]
    assert sorted(rows) == sorted(run_pipeline(built(events, assigner, native=False), "BATCH").only())


PARTS = [
    [Event("a", 5, 1), Event("a", 130, 2), Event("b", 20, 3), Event("a", 31, 9)],
    [Event("a", 300, 4), Event("b", 220, 5)],
    [Event("b", 305, 7), Event("a", 290, 8), Event("b", 120, 60)],  # b at 120 is late since the file before
    [Event("b", 21, 6), Event("a", 310, 6)],  # b at 21 is late
]


@pytest.fixture
def files(tmp_path):
    arrive(tmp_path / "in", *PARTS)
    return ParquetSource(str(tmp_path / "in"), Event, name="events", max_files_per_trigger=1)


WINDOWS = {
    "tumbling": TumblingEventTimeWindows.of(ms(50)),
    "sliding": SlidingEventTimeWindows.of(ms(60), ms(30)),
    "sessions": EventTimeSessionWindows.with_gap(ms(40)),
}


def test_streaming_gives_each_window_once_also_what_the_end_of_input_closes(files, tmp_path, spark):
    """In one job: a query for each kind of native windows, and one for all Python ones."""

    pipeline = Pipeline("p")
    events = pipeline.from_source(files).assign_timestamps_and_watermarks(BY_AT)
    for name, assigner in WINDOWS.items():
        for native in (True, False):
            sink = f"{name}_native" if native else f"{name}_python"
            totals = windowed(events, assigner, native).uid(sink).map(lambda t: t._replace(most=t.most + 1), Total)
            totals.sink_to(DeltaSink(str(tmp_path / sink), mode="append", name=sink))
    options = streaming(tmp_path, 2)
    plan = pipeline.plan(options)
    epochs = []
    observe = committed(epochs)
    StreamingJob(plan, spark, Start("one"), observe).run(lambda: bool(epochs))
    assert StreamingJob(plan, spark, Start("two"), observe).run() == "finished"

    late = Counter()
    for epoch in epochs:
        late[epoch.query] += epoch.counters.get("late records", 0)
    assert set(late) == {"main", *(f"{name}_native" for name in WINDOWS)}
    assert all(late.values())
    for name in WINDOWS:
        native, python = (table_rows(tmp_path / sink) for sink in (f"{name}_native", f"{name}_python"))
        assert native == python != []


def test_bounds_as_moments_and_by_results_windowed_again():
    class Hour(NamedTuple):
        key: str
        window_start: datetime
        n: int

    class Day(NamedTuple):
        key: str
        window_end: int
        n: int

    hour = 3_600_000
    events = [Event("a", 0, 1), Event("a", hour - 1, 1), Event("a", 5 * hour, 1), Event("a", 24 * hour, 1)]
    pipeline = Pipeline("p")
    hours = (
        pipeline.from_collection(events, Event)
        .assign_timestamps_and_watermarks(BY_AT)
        .key_by("key")
        .window(TumblingEventTimeWindows.of(timedelta(hours=1)))
    )
    counted = hours.agg(F.count("value").alias("n"), output_type=Hour)
    counted.print("hours")
    counted.key_by("key").window(TumblingEventTimeWindows.of(timedelta(days=1))).agg(
        F.sum("n").alias("n"), output_type=Day
    ).print("days")
    result = run_pipeline(pipeline, "BATCH").sinks
    moments = [datetime(1970, 1, 1, tzinfo=UTC), datetime(1970, 1, 1, 5, tzinfo=UTC), datetime(1970, 1, 2, tzinfo=UTC)]
    assert sorted(result["hours"]) == [Hour("a", m, n) for m, n in zip(moments, (2, 1, 1), strict=True)]
    assert sorted(result["days"]) == [Day("a", 24 * hour, 3), Day("a", 48 * hour, 1)]


def test_windows_of_windows_have_their_own_bounds(run_on_spark, spark, tmp_path):
    events = [Event("a", at, 1) for at in (0, 15, 25, 31)]

    def build(sink):
        pipeline = Pipeline("p")
        small = windowed(
            pipeline.from_collection(events, Event).assign_timestamps_and_watermarks(BY_AT),
            TumblingEventTimeWindows.of(ms(10)),
            native=True,
        )
        large = (
            small.key_by("key")
            .window(TumblingEventTimeWindows.of(ms(30)))
            .agg(F.sum("total").alias("total"), F.min("window_start").alias("most"), output_type=Total)
        )
        sink(large)
        return pipeline

    run_on_spark(build(lambda s: s.sink_to(FileSink(str(tmp_path / "out")))))
    rows = sorted(Total(*row) for row in spark.read.parquet(str(tmp_path / "out")).collect())
    assert (
        rows
        == sorted(run_pipeline(build(lambda s: s.print("out")), "BATCH").only())
        == [Total("a", 0, 30, 3, 0), Total("a", 30, 60, 1, 30)]
    )


class Place(NamedTuple):
    pos: tuple[int, int]
    at: int


class Visits(NamedTuple):
    pos: tuple[int, int]
    window_start: int
    n: int


def test_a_key_that_is_a_tuple():
    pipeline = Pipeline("p")
    places = pipeline.from_collection(
        [Place((1, 2), 0), Place((1, 2), 5), Place((2, 1), 5)], Place
    ).assign_timestamps_and_watermarks(BY_AT)
    places.key_by("pos").window(TumblingEventTimeWindows.of(ms(10))).agg(
        F.count("*").alias("n"), output_type=Visits
    ).print("out")
    assert sorted(run_pipeline(pipeline, "BATCH").only()) == [Visits((1, 2), 0, 2), Visits((2, 1), 0, 1)]


@pytest.mark.parametrize(
    "assigner",
    [TumblingEventTimeWindows.of(ms(10)), SlidingEventTimeWindows.of(ms(20), ms(10))],
    ids=["tumbling", "sliding"],
)
def test_the_harness_drops_late_records_of_native_windows_as_of_python_ones(assigner):
    events = [Event("a", 5, 1), Event("a", 130, 2), Event("a", 6, 4), Event("a", 12, 8), Event("a", 140, 16)]
    found = [
        run_pipeline(built(events, assigner, native), "STREAMING", watermark_interval=1) for native in (True, False)
    ]
    assert sorted(found[0].only()) == sorted(found[1].only())
    assert found[0].metrics.counters["late records"] == 2


def test_sessions_do_not_grow_together_with_what_is_over():
    monotonous = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    found = []
    for native in (True, False):
        pipeline = Pipeline("p")
        events = pipeline.from_collection(
            [Event("a", 0, 1), Event("b", 13, 1), Event("a", 9, 2)], Event
        ).assign_timestamps_and_watermarks(monotonous)
        windowed(events, EventTimeSessionWindows.with_gap(ms(10)), native).print("out")
        found.append(sorted(run_pipeline(pipeline, "STREAMING", watermark_interval=1).only()))
    assert found[0] == found[1] == [Total("a", 0, 10, 1, 1), Total("a", 9, 19, 2, 2), Total("b", 13, 23, 1, 1)]


def test_a_missing_key_is_an_error_in_both_modes_of_the_harness():
    class Keyless(NamedTuple):
        key: str | None
        at: int
        value: int

    pipeline = Pipeline("p")
    windowed(
        pipeline.from_collection([Keyless(None, 1, 1)], Keyless).assign_timestamps_and_watermarks(BY_AT),
        TumblingEventTimeWindows.of(ms(10)),
        native=True,
    ).print("out")
    for mode in ("BATCH", "STREAMING"):
        with pytest.raises(PipelineError, match="operator 'agg': the key 'key' is None"):
            run_pipeline(pipeline, mode)


def test_what_spark_would_lose_before_1970_is_an_error_in_streaming(run_streaming, tmp_path):
    pipeline = Pipeline("p")
    events = pipeline.from_collection([Event("a", -5, 1)], Event).assign_timestamps_and_watermarks(BY_AT)
    windowed(events, TumblingEventTimeWindows.of(ms(10)), native=True).sink_to(FileSink(str(tmp_path / "out")))
    with pytest.raises(UnifiedError, match="a record is from before 1970, where Spark's watermark begins"):
        run_streaming(pipeline)


def test_a_record_without_an_event_time_is_an_error(run_on_spark, tmp_path):
    class Maybe(NamedTuple):
        key: str
        at: int | None
        value: int

    pipeline = Pipeline("p")
    events = pipeline.from_collection([Maybe("a", None, 1)], Maybe).assign_timestamps_and_watermarks(BY_AT)
    windowed(events, TumblingEventTimeWindows.of(ms(1)), native=True).sink_to(FileSink(str(tmp_path / "out")))
    with pytest.raises(
        UnifiedError, match="operator 'agg': a record has no event time; assign timestamps before the window"
    ):
        run_on_spark(pipeline)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.allowed_lateness(ms(1)), "needs no allowed lateness"),
        (lambda w: w.trigger(w._assigner.get_default_trigger()), "needs no trigger"),
        (
            lambda w: w._stream.window(EventTimeSessionWindows.with_dynamic_gap(lambda e: e.value)),
            "needs one gap for all sessions",
        ),
        (
            lambda w: w._stream.window(SlidingEventTimeWindows.of(ms(1), ms(2))),
            "needs a slide that is not longer than the window",
        ),
        (
            lambda w: w._stream.window(GlobalWindows.create()),
            "needs tumbling, sliding or session windows by event time",
        ),
        (lambda w: w._stream.window_all(TumblingEventTimeWindows.of(ms(1))), "needs a key"),
    ],
)
def test_what_catalyst_cannot_do_is_an_error_that_says_what_can(change, message):
    events = Pipeline("p").from_collection([Event("a", 1, 1)], Event).assign_timestamps_and_watermarks(BY_AT)
    with pytest.raises(UnsupportedError, match=rf"operator 'agg': a native window {message}.*; or use aggregate"):
        change(events.key_by("key").window(TumblingEventTimeWindows.of(ms(1)))).agg(
            F.sum("value").alias("total"), output_type=Total
        )


def test_a_bound_is_a_moment_or_milliseconds():
    class Bad(NamedTuple):
        key: str
        window_start: str
        total: int

    events = Pipeline("p").from_collection([Event("a", 1, 1)], Event).assign_timestamps_and_watermarks(BY_AT)
    with pytest.raises(
        PipelineError,
        match="field 'window_start' is a string; a window's bound is a datetime, or an int in milliseconds",
    ):
        events.key_by("key").window(TumblingEventTimeWindows.of(ms(1))).agg(
            F.sum("value").alias("total"), output_type=Bad
        )


def test_several_watermarks_or_none_are_errors_in_streaming(spark, tmp_path):
    def run(strategies, message):
        pipeline = Pipeline("p")
        streams = [
            pipeline.from_collection([Event("a", 1, 1)], Event, f"s{i}").assign_timestamps_and_watermarks(s)
            for i, s in enumerate(strategies)
        ]
        windowed(streams[0].union(*streams[1:]), TumblingEventTimeWindows.of(ms(1)), native=True).sink_to(
            FileSink(str(tmp_path / "out"))
        )
        plan = pipeline.plan(
            {
                "execution.runtime-mode": "STREAMING",
                "execution.checkpointing.dir": str(tmp_path / f"of {len(strategies)}"),
            }
        )
        with pytest.raises(UnsupportedError, match=message):
            StreamingJob(plan, spark, Start("one")).run()

    run([BY_AT, BY_AT], "one watermark in STREAMING; assign timestamps once, after the union, or use aggregate")
    run([WatermarkStrategy.for_generator(Complete).with_timestamp_assigner("at")], "has a watermark generator, and")
    run(
        [WatermarkStrategy.no_watermarks().with_timestamp_assigner("at")],
        "emits no watermarks, which a native window needs in STREAMING",
    )
