"""Windows against Flink's rules: which elements are together, when they fire, what is late, what merges."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import (
    ContinuousEventTimeTrigger,
    ContinuousProcessingTimeTrigger,
    CountEvictor,
    CountTrigger,
    DeltaEvictor,
    DeltaTrigger,
    EventTimeSessionWindows,
    GlobalWindows,
    OutputTag,
    Pipeline,
    ProcessingTimeSessionWindows,
    ProcessWindowFunction,
    ReducingStateDescriptor,
    SlidingEventTimeWindows,
    TimeEvictor,
    TimeWindow,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
    WindowFunction,
)
from dagster_unified.api.windows import Trigger, TriggerResult
from dagster_unified.errors import PipelineError, RecordTypeError, UnsupportedError, UserFunctionError
from dagster_unified.operators.drivers.key_groups import ControlEvent, GroupInput, KeyGroups, MicroBatch
from dagster_unified.operators.keys import KeyedInput
from dagster_unified.operators.operator import KeyedOptions
from dagster_unified.operators.program.step import KeyedStep, Output, Program
from dagster_unified.operators.state.pages import decode_index
from dagster_unified.operators.windows.assigners import SlidingEventTimeWindows as Sliding
from dagster_unified.operators.windows.contents import Windowing
from dagster_unified.operators.windows.operator import WindowOperator
from dagster_unified.testing import run_pipeline
from dagster_unified.testing.operators import ManualClock
from tests.operators.support import ROWS, TEXTS, Memory, Row, Sum, batch, ms
from tests.support import MODES, results


class Dump(ProcessWindowFunction):
    def process(self, key, context, elements) -> Iterable[str]:
        window = context.window()
        yield f"{key} {getattr(window, 'start', 'all')} {getattr(window, 'end', '')} {[e.amount for e in elements]}"


class Spanned(ProcessWindowFunction):
    """Puts the window's span before the one value that it was aggregated to."""

    def process(self, key, context, elements) -> Iterable[str]:
        (value,) = elements
        yield f"{key} [{context.window().start},{context.window().end}) {value}"


class Whole(ProcessWindowFunction):
    """Puts the window's span, where it has one, before the one value that it was aggregated to."""

    def process(self, key, context, elements) -> Iterable[str]:
        window = context.window()
        span = f" [{window.start},{window.end})" if isinstance(window, TimeWindow) else ""
        yield f"{key}{span} {next(iter(elements))}"


def stream(rows, bound=1000, pipeline=None):
    by_at = WatermarkStrategy.for_bounded_out_of_orderness(ms(bound)).with_timestamp_assigner("at")
    return (pipeline or Pipeline("p")).from_collection(rows, Row).assign_timestamps_and_watermarks(by_at)


# Which elements are together


@given(st.integers(-100, 100), st.integers(1, 20), st.integers(1, 20), st.integers(-19, 19))
def test_sliding_windows_are_all_those_that_have_the_moment_in_them(moment, size, slide, offset):
    offset %= slide
    found = Sliding.of(ms(size), ms(slide), ms(offset)).windows_at(moment)
    expected = [
        (start, start + size)
        for start in range(-300, 300)
        if (start - offset) % slide == 0 and start <= moment < start + size
    ]
    assert [tuple(w) for w in found] == expected


def fold_sessions(times, gap):
    sessions = []
    for t in sorted(times):
        if sessions and t <= sessions[-1][-1] + gap:
            sessions[-1].append(t)
        else:
            sessions.append([t])
    return sessions


rows_of = st.lists(
    st.builds(Row, st.sampled_from("ab"), st.integers(0, 60), st.integers(0, 9)), min_size=1, max_size=25
)


@given(rows_of, st.integers(1, 12), st.sampled_from([None, 1]))
def test_sessions_are_the_same_in_whatever_order_elements_come(rows, gap, interval):
    expected = Counter(
        f"{key} [{s[0]},{s[-1] + gap}) {sum(r.amount for r in rows if r.key == key and s[0] <= r.at <= s[-1])}"
        for key in {r.key for r in rows}
        for s in fold_sessions([r.at for r in rows if r.key == key], gap)
    )
    for mode in ("BATCH", "STREAMING"):
        windowed = (
            stream(rows).key_by("key").window(EventTimeSessionWindows.with_gap(ms(gap))).aggregate(Sum(), Spanned())
        )
        assert Counter(results(windowed, mode, watermark_interval=interval)) == expected


BUILD = {
    "tumbling sum": lambda s: s.window(TumblingEventTimeWindows.of(ms(7), ms(2))).aggregate(Sum(), Spanned()),
    "sliding reduce": lambda s: s.window(SlidingEventTimeWindows.of(ms(9), ms(3))).reduce(
        lambda a, b: a._replace(amount=a.amount + b.amount, at=0)
    ),
    "sliding, not a multiple": lambda s: (
        s.window(SlidingEventTimeWindows.of(ms(8), ms(3)))
        .sum("amount")
        .map(lambda r: (r.key, r.amount), tuple[str, int])
    ),
    "with gaps": lambda s: (
        s.window(SlidingEventTimeWindows.of(ms(3), ms(8)))
        .max("amount")
        .map(lambda r: (r.key, r.amount), tuple[str, int])
    ),
    "sessions of a key's own gap": lambda s: s.window(
        EventTimeSessionWindows.with_dynamic_gap(lambda r: 1 + r.amount)
    ).aggregate(Sum(), Spanned()),
    "all": lambda s: s.window_all(TumblingEventTimeWindows.of(ms(7))).aggregate(Sum(), Spanned()),
}


@given(rows_of, st.sampled_from(sorted(BUILD)))
def test_both_modes_give_the_same_windows(rows, name):
    found = [
        Counter(results(BUILD[name](stream(rows).key_by("key")), mode, watermark_interval=n))
        for mode, n in (("BATCH", 1), ("STREAMING", None), ("STREAMING", 1))
    ]
    assert found[0] == found[1] == found[2]


# When they fire, and what is late

LATE = OutputTag("late", Row)


def test_lateness_fires_again_and_what_is_later_goes_to_the_side():
    rows = [Row("a", 1, 1), Row("a", 12, 2), Row("a", 3, 4), Row("a", 25, 8), Row("a", 4, 16)]
    windowed = (
        stream(rows, bound=0)
        .key_by("key")
        .window(TumblingEventTimeWindows.of(ms(10)))
        .allowed_lateness(ms(5))
        .side_output_late_data(LATE)
        .aggregate(Sum(), Spanned())
    )
    windowed.get_side_output(LATE).print("late")
    windowed.print("out")
    streamed = run_pipeline(windowed._pipeline, "STREAMING").sinks
    assert streamed == {"out": ["a [0,10) 1", "a [0,10) 5", "a [10,20) 2", "a [20,30) 8"], "late": [Row("a", 4, 16)]}
    assert run_pipeline(windowed._pipeline, "BATCH").sinks == {
        "out": ["a [0,10) 21", "a [10,20) 2", "a [20,30) 8"],
        "late": [],
    }


def test_what_is_late_and_has_no_side_is_counted():
    windowed = (
        stream([Row("a", 1, 1), Row("a", 30, 2), Row("a", 2, 4)], bound=0)
        .key_by("key")
        .window(TumblingEventTimeWindows.of(ms(10)))
        .aggregate(Sum())
    )
    windowed.print("out")
    result = run_pipeline(windowed._pipeline, "STREAMING")
    assert result.only() == [1, 2]
    assert result.metrics.counters["late records dropped"] == 1


def test_a_late_element_joins_a_session_that_is_still_open():
    rows = [Row("a", 0, 1), Row("a", 20, 2), Row("a", 14, 4), Row("a", 9, 8)]
    windowed = (
        stream(rows, bound=5).key_by("key").window(EventTimeSessionWindows.with_gap(ms(8))).aggregate(Sum(), Spanned())
    )
    assert results(windowed) == ["a [0,8) 1", "a [9,28) 14"]


@MODES
def test_what_a_window_emits_has_its_last_moment_as_event_time(mode):
    hourly = (
        stream([Row("a", 1, 1), Row("a", 12, 2)])
        .key_by("key")
        .window(TumblingEventTimeWindows.of(ms(10)))
        .sum("amount")
    )
    again = hourly.key_by("key").window(TumblingEventTimeWindows.of(ms(20))).aggregate(Sum(), Spanned())
    assert results(again, mode) == ["a [0,20) 3"]


def test_early_results_by_a_continuous_trigger():
    rows = [Row("a", t, 1) for t in (0, 4, 9, 14, 19, 24)]
    windowed = (
        stream(rows, bound=0)
        .key_by("key")
        .window(TumblingEventTimeWindows.of(ms(20)))
        .trigger(ContinuousEventTimeTrigger.of(ms(5)))
        .aggregate(Sum(), Spanned())
    )
    assert results(windowed) == [f"a [0,20) {n}" for n in (3, 4, 5, 5)] + ["a [20,40) 1"] * 4


@pytest.mark.parametrize(
    ("assigner", "expected"),
    [
        (TumblingEventTimeWindows.of(ms(20)), ["a [0,20) 5", "a [20,40) 1"]),
        (EventTimeSessionWindows.with_gap(ms(6)), ["a [0,30) 6"]),
        (GlobalWindows.create(), ["a 6"]),
    ],
    ids=["tumbling", "sessions", "global"],
)
def test_in_batch_a_continuous_trigger_gives_each_window_once(assigner, expected):
    rows = [Row("a", t, 1) for t in (0, 4, 9, 14, 19, 24)]
    windowed = stream(rows).key_by("key").window(assigner).trigger(ContinuousEventTimeTrigger.of(ms(5)))
    assert results(windowed.aggregate(Sum(), Whole()), "BATCH") == expected


def test_with_incremental_updates_batch_gives_early_results_too():
    windowed = (
        stream([Row("a", 1, 1)])
        .key_by("key")
        .window(TumblingEventTimeWindows.of(ms(20)))
        .trigger(ContinuousEventTimeTrigger.of(ms(5)))
    )
    assert (
        results(windowed.aggregate(Sum(), Whole()), "BATCH", options={"execution.incremental-updates": True})
        == ["a [0,20) 1"] * 4
    )


def test_a_continuous_trigger_on_a_global_window_ends_with_the_input():
    rows = [Row("a", t, 1) for t in (0, 4, 9, 14)]
    windowed = (
        stream(rows, bound=0).key_by("key").window(GlobalWindows.create()).trigger(ContinuousEventTimeTrigger.of(ms(5)))
    )
    assert results(windowed.aggregate(Sum(), Whole())) == ["a 3", "a 4", "a 4"]


def by_the_clock(assigner):
    """Drives windows with a continuous trigger of ten, as STREAMING does: elements, the clock, and the end of input."""
    spec = Windowing(
        assigner,
        ContinuousProcessingTimeTrigger.of(ms(10)),
        Row,
        aggregate=Sum(),
        accumulator_type=int,
        function=Whole(),
    )
    clock = ManualClock(3)
    layouts = KeyedInput(("key",), str), KeyedOptions(incremental_updates=True)
    out, store = [], Memory()
    driver = KeyGroups(
        Program(
            "p",
            "s",
            ROWS,
            (KeyedStep("op", spec, uid="op", output=TEXTS.records, operator=WindowOperator),),
            (Output(0, TEXTS),),
            *layouts,
        ),
        lambda _, b: out.extend(TEXTS.records.from_batch(b)),
        clock,
    )

    def step(rows=(), now=None, mark=None, end=False):
        out.clear()
        clock.now = now if now is not None else clock.now
        event = ControlEvent(watermarks={} if mark is None else {"op": mark}, now=clock.now, end=end)
        driver.run(store, MicroBatch(GroupInput(), event, GroupInput([batch(rows)] if rows else [])))
        return list(out)

    return step


def test_a_continuous_trigger_by_the_clock_fires_at_its_multiples():
    step = by_the_clock(GlobalWindows.create())
    assert step([Row("a", 1, 1)]) == []
    assert step(now=9) == []
    assert step(now=10) == ["a 1"]
    assert step([Row("a", 2, 2)], now=15) == []
    assert step(now=35) == ["a 3", "a 3"]  # at 20 and at 30
    assert step(end=True) == ["a 3"]  # what was to come at 40


def test_a_continuous_trigger_by_the_clock_gives_nothing_when_event_time_closes_its_window():
    step = by_the_clock(TumblingEventTimeWindows.of(ms(20)))
    assert step([Row("a", 1, 1)]) == []
    assert step(now=10) == ["a [0,20) 1"]
    assert step([Row("a", 2, 2)]) == []
    assert step(mark=19) == []
    assert step(end=True) == []


def test_a_continuous_trigger_by_the_clock_fires_at_the_end_of_its_window():
    step = by_the_clock(TumblingProcessingTimeWindows.of(ms(15)))
    assert step([Row("a", 1, 1)]) == []
    assert step(now=14) == ["a [0,15) 1", "a [0,15) 1"]  # at 10 and at the end
    assert step(end=True) == []


@MODES
def test_a_continuous_trigger_by_the_clock_fires_once_at_the_end_of_the_input(mode):
    for assigner, expected in (
        (GlobalWindows.create(), ["a 5", "b 2"]),
        (TumblingProcessingTimeWindows.of(ms(100)), ["a [1000,1100) 5", "b [1000,1100) 2"]),
    ):
        rows = [Row("a", 1, 1), Row("b", 2, 2), Row("a", 3, 4)]
        windowed = stream(rows).key_by("key").window(assigner).trigger(ContinuousProcessingTimeTrigger.of(ms(4)))
        assert sorted(results(windowed.aggregate(Sum(), Whole()), mode, clock=lambda: 1005)) == expected


@MODES
def test_windows_by_the_clock_fire_at_the_end_of_the_input(mode):
    for assigner in (TumblingProcessingTimeWindows.of(ms(10)), ProcessingTimeSessionWindows.with_gap(ms(10))):
        windowed = (
            stream([Row("a", 1, 1), Row("b", 2, 2), Row("a", 3, 4)])
            .key_by("key")
            .window(assigner)
            .aggregate(Sum(), Spanned())
        )
        found = results(windowed, mode, clock=lambda: 1005)
        assert [line.split()[-1] for line in sorted(found)] == ["5", "2"]


# The paper's policies, from assigner, trigger and evictor


class Punctuation(Trigger):
    """Closes a window at an element with amount 0."""

    def on_element(self, element, timestamp, window, ctx):
        return TriggerResult.FIRE_AND_PURGE if element.amount == 0 else TriggerResult.CONTINUE

    def on_event_time(self, time, window, ctx):
        return TriggerResult.CONTINUE

    def on_processing_time(self, time, window, ctx):
        return TriggerResult.CONTINUE

    def clear(self, window, ctx):
        pass


@MODES
def test_punctuation_windows(mode):
    rows = [Row("a", i, amount) for i, amount in enumerate([1, 2, 0, 3, 0, 4])]
    assert results(
        stream(rows).key_by("key").window(GlobalWindows.create()).trigger(Punctuation()).process(Dump()), mode
    ) == ["a all  [1, 2, 0]", "a all  [3, 0]"]


@MODES
def test_landmark_windows_grow_from_a_fixed_beginning(mode):
    rows = [Row("a", i, 1) for i in range(6)]
    windowed = stream(rows).key_by("key").window(GlobalWindows.create()).trigger(CountTrigger.of(2)).aggregate(Sum())
    assert results(windowed, mode) == [2, 4, 6]


@MODES
def test_delta_windows(mode):
    rows = [Row("a", i, amount) for i, amount in enumerate([0, 3, 9, 12, 30])]
    far = DeltaTrigger.of(8, lambda last, new: new.amount - last.amount, Row)
    near = DeltaEvictor.of(5, lambda e, last: last.amount - e.amount)
    windowed = stream(rows).key_by("key").window(GlobalWindows.create()).trigger(far).evictor(near).process(Dump())
    assert results(windowed, mode) == ["a all  [9]", "a all  [30]"]


@MODES
@pytest.mark.parametrize(
    ("evictor", "expected"),
    [
        (CountEvictor.of(2), ["a 0 10 [2, 3]"]),
        (CountEvictor.of(2, do_evict_after=True), ["a 0 10 [1, 2, 3]"]),
        (TimeEvictor.of(ms(3)), ["a 0 10 [3]"]),
    ],
)
def test_evictors(mode, evictor, expected):
    rows = [Row("a", 1, 1), Row("a", 4, 2), Row("a", 8, 3)]
    assert (
        results(
            stream(rows).key_by("key").window(TumblingEventTimeWindows.of(ms(10))).evictor(evictor).process(Dump()),
            mode,
        )
        == expected
    )


@MODES
def test_count_windows_over_everything(mode):
    rows = [Row(k, i, i) for i, k in enumerate("abcab")]
    assert results(stream(rows).count_window_all(2).process(Dump()), mode) == ["0 all  [0, 1]", "0 all  [2, 3]"]
    assert results(stream(rows).count_window_all(3, 2).process(Dump()), mode) == [
        "0 all  [0, 1, 2]",
        "0 all  [2, 3, 4]",
    ]


# Functions and their state


class Numbered(ProcessWindowFunction):
    """Counts a key's windows, and the firings of each."""

    def process(self, key, context, elements) -> Iterable[str]:
        fired = context.window_state().get_state(ValueStateDescriptor("fired", int))
        fired.update((fired.value() or 0) + 1)
        windows = context.global_state().get_reducing_state(ReducingStateDescriptor("windows", lambda a, b: a + b, int))
        if fired.value() == 1:
            windows.add(1)
        yield f"{key} window {windows.get()}, firing {fired.value()}: {sum(e.amount for e in elements)}"

    def clear(self, context):
        context.window_state().get_state(ValueStateDescriptor("fired", int)).clear()


def test_state_of_a_window_and_of_its_key():
    rows = [Row("a", 1, 1), Row("a", 12, 2), Row("a", 3, 4), Row("a", 40, 8)]
    windowed = (
        stream(rows, bound=0)
        .key_by("key")
        .window(TumblingEventTimeWindows.of(ms(10)))
        .allowed_lateness(ms(10))
        .process(Numbered())
    )
    assert results(windowed) == [
        "a window 1, firing 1: 1",
        "a window 1, firing 2: 5",
        "a window 2, firing 1: 2",
        "a window 3, firing 1: 8",
    ]


class Text(WindowFunction):
    def apply(self, key, window, inputs) -> Iterable[str]:
        yield f"{key}: {sum(r.amount for r in inputs)} until {window.end}"


@MODES
def test_a_reduced_window_gives_its_function_one_value(mode):
    rows = [Row("a", 1, 1), Row("a", 4, 2)]
    windowed = (
        stream(rows)
        .key_by("key")
        .window(TumblingEventTimeWindows.of(ms(10)))
        .reduce(lambda a, b: a._replace(amount=a.amount * 10 + b.amount), Text())
    )
    assert results(windowed, mode) == ["a: 12 until 10"]


SMALL = OutputTag("small", str)


class Sides(ProcessWindowFunction):
    def process(self, key, context, elements) -> Iterable[int]:
        total = sum(e.amount for e in elements)
        if total < 3:
            context.output(SMALL, f"{key} {total}")
        else:
            yield total


@MODES
def test_a_window_function_has_side_outputs(mode):
    windowed = (
        stream([Row("a", 1, 1), Row("a", 12, 5)])
        .key_by("key")
        .window(TumblingEventTimeWindows.of(ms(10)))
        .process(Sides())
    )
    windowed.get_side_output(SMALL).print("small")
    windowed.print("out")
    assert run_pipeline(windowed._pipeline, mode).sinks == {"small": ["a 1"], "out": [5]}


def test_a_window_that_is_over_leaves_no_state():

    assigner = EventTimeSessionWindows.with_gap(ms(5))
    spec = Windowing(assigner, assigner.get_default_trigger(), Row, function=Dump())
    program = Program(
        "p",
        "s",
        ROWS,
        (KeyedStep("op", spec, uid="op", output=TEXTS.records, operator=WindowOperator),),
        (Output(0, TEXTS),),
        KeyedInput(("key",), str),
        KeyedOptions(),
    )
    out, stores = [], defaultdict(Memory)
    keys = []
    for rows, mark in (([Row("a", 1, 1), Row("a", 20, 2)], 4), ([Row("a", 4, 3)], 9), ([], 30)):
        driver = KeyGroups(program, lambda number, b: out.extend(TEXTS.records.from_batch(b)), lambda: 0)
        event = ControlEvent(watermarks={"op": mark})
        driver.run(stores[0], MicroBatch(GroupInput([batch(rows)] if rows else []), event))
        driver.close()
        keys.append(sum(page.keys for page in decode_index(stores[0].index).pages))
    assert out == ["a 1 9 [1, 3]", "a 20 25 [2]"]
    assert keys == [1, 1, 0]


# Errors


class Failing(Sum):
    def add(self, value, accumulator):
        return accumulator + 1 // value.amount


@MODES
def test_a_function_that_fails_names_the_element(mode):
    windowed = (
        stream([Row("a", 1, 1), Row("a", 2, 0)])
        .key_by("key")
        .window(TumblingEventTimeWindows.of(ms(10)))
        .aggregate(Failing())
    )
    with pytest.raises(
        UserFunctionError, match=r"operator 'Failing': ZeroDivisionError: .* in add, on Row\(key='a', at=2, amount=0\)"
    ):
        results(windowed, mode)


def keyed():
    return stream([Row("a", 1, 1)]).key_by("key")


class Untyped(Sum):
    def create_accumulator(self):
        return 0


HOUR = TumblingEventTimeWindows.of(timedelta(hours=1))


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: TumblingEventTimeWindows.of(5), PipelineError, "the size is a timedelta, not 5"),
        (
            lambda: TumblingEventTimeWindows.of(ms(5), ms(5)),
            PipelineError,
            "the offset has to be smaller than the period",
        ),
        (lambda: SlidingEventTimeWindows.of(ms(5), ms(0)), PipelineError, "the slide has to be at least 1 ms"),
        (
            lambda: keyed().window(HOUR).trigger(CountTrigger.of(0)),
            PipelineError,
            "the count must be a whole number of at least 1",
        ),
        (
            lambda: Pipeline("p").from_collection([1]).key_by(lambda v: v, key_type=int).window(HOUR),
            PipelineError,
            "the stream has none; call assign_timestamps_and_watermarks",
        ),
        (
            lambda: keyed().window(EventTimeSessionWindows.with_gap(ms(1))).trigger(Punctuation()),
            UnsupportedError,
            "Punctuation does not work with windows that merge",
        ),
        (
            lambda: keyed().window(GlobalWindows.create()).allowed_lateness(ms(1)),
            PipelineError,
            "allowed lateness is of event time, and GlobalWindows does not go by it",
        ),
        (
            lambda: keyed().window(HOUR).aggregate(Untyped()),
            RecordTypeError,
            "the accumulator's type is not known; annotate Untyped.create_accumulator",
        ),
        (lambda: keyed().window(HOUR).process(Text()), PipelineError, "use apply for a WindowFunction"),
        (lambda: keyed().window(HOUR).sum("amuont"), PipelineError, "no field 'amuont'.*amount"),
        (
            lambda: keyed().window(timedelta(hours=1)),
            PipelineError,
            "expected a window assigner such as TumblingEventTimeWindows",
        ),
    ],
)
def test_what_cannot_be_is_an_error_when_the_graph_is_built(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_the_lint_warns_of_windows_by_the_clock():
    windowed = keyed().window(TumblingProcessingTimeWindows.of(ms(5))).sum("amount")
    windowed.print()
    said = [f.message for f in windowed._pipeline.plan().findings if f.severity == "warning"]
    assert any("goes by processing time" in message for message in said)
