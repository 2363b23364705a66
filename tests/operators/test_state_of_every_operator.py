"""Each keyed operator goes on where it was when its state has become rows of a savepoint, and pages of other groups."""

from collections.abc import Iterable
from io import BytesIO
from typing import NamedTuple
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dagster_unified.api import (
    AggregateFunction,
    AggregatingStateDescriptor,
    ArrowListStateDescriptor,
    ContinuousEventTimeTrigger,
    ContinuousProcessingTimeTrigger,
    CountEvictor,
    CountSlidingWindowAssigner,
    CountTrigger,
    CountTumblingWindowAssigner,
    DeltaTrigger,
    EventTimeSessionWindows,
    GlobalWindows,
    KeyedBatchFunction,
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    OutputTag,
    Pipeline,
    ProcessingTimeSessionWindows,
    ProcessJoinFunction,
    ProcessWindowFunction,
    PurgingTrigger,
    ReducingStateDescriptor,
    SlidingEventTimeWindows,
    SlidingProcessingTimeWindows,
    StateTtlConfig,
    StateVisibility,
    TimeEvictor,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    UpdateType,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from dagster_unified.api import functions as F
from dagster_unified.api.connected import BroadcastProcessFunction
from dagster_unified.api.windows import Firing, Trigger, TriggerResult
from dagster_unified.by_value import InThisProcess
from dagster_unified.engine.shipping import Payload
from dagster_unified.engine.state_tables import worker
from dagster_unified.operators.drivers.batch import rows_of
from dagster_unified.operators.drivers.group import MemoryStore
from dagster_unified.operators.drivers.key_groups import ControlEvent
from dagster_unified.operators.state import chunks
from dagster_unified.operators.time import MIN_TIMESTAMP
from dagster_unified.testing.driving import DrivenOperator, single
from dagster_unified.testing.operators import ManualClock
from tests.depth import examples
from tests.operators.support import ms

LATE, LATE_TOO = OutputTag("late", str), OutputTag("late too", str)


class Event(NamedTuple):
    key: str
    number: int
    at: int
    value: int


class Pair(NamedTuple):
    left: int
    right: int


class Totals(AggregateFunction):
    def create_accumulator(self) -> tuple[int, str]:
        return (0, "")

    def add(self, value, accumulator):
        return (accumulator[0] + value.value, accumulator[1] + value.key)

    def get_result(self, accumulator) -> str:
        return f"{accumulator[0]} {accumulator[1]}"

    def merge(self, a, b):
        return (a[0] + b[0], a[1] + b[1])


class Lists(ProcessWindowFunction):
    """Tells a window's elements, and how often the window and its key have fired."""

    def process(self, key, context, elements) -> Iterable[str]:
        times = context.window_state().get_state(ValueStateDescriptor("times", int))
        times.update((times.value() or 0) + 1)
        values = context.global_state().get_list_state(ListStateDescriptor("values", int))
        values.add_all([e.value for e in elements])
        yield f"{key} {context.window()} {[e.value for e in elements]} {times.value()} {list(values.get())}"

    def clear(self, context) -> None:
        context.window_state().get_state(ValueStateDescriptor("times", int)).clear()


class Enough(Trigger):
    """Fires once a window's values are so many, with state of its own and a timer that fires again."""

    firing = Firing.EARLY
    total = ReducingStateDescriptor("total", lambda a, b: a + b, int)

    def on_element(self, element, timestamp, window, ctx):
        total = ctx.get_partitioned_state(self.total)
        total.add(element.value)
        ctx.register_event_time_timer(window.max_timestamp())
        ctx.register_processing_time_timer(ctx.get_current_processing_time() + 7)
        if total.get() < 10:
            return TriggerResult.CONTINUE
        total.clear()
        return TriggerResult.FIRE

    def on_event_time(self, time, window, ctx):
        return TriggerResult.FIRE

    def on_processing_time(self, time, window, ctx):
        return TriggerResult.FIRE

    def clear(self, window, ctx):
        ctx.get_partitioned_state(self.total).clear()


class Everything(KeyedProcessFunction):
    """Every kind of state, with or without a time to live, and timers of both kinds."""

    def __init__(self, ttl=None, sorted_input=False):
        self.ttl, self.requires_time_sorted_input = ttl, sorted_input

    def open(self, context):
        ttl = self.ttl
        self.value = context.get_state(ValueStateDescriptor("value", Event, ttl))
        self.values = context.get_list_state(ListStateDescriptor("values", tuple[int, str | None], ttl))
        self.seen = context.get_map_state(MapStateDescriptor("seen", int, Pair | None, ttl))
        self.sum = context.get_reducing_state(ReducingStateDescriptor("sum", lambda a, b: a + b, int, ttl))
        self.total = context.get_aggregating_state(AggregatingStateDescriptor("total", Totals(), tuple[int, str], ttl))

    def process_element(self, value, ctx) -> Iterable[str]:
        yield self.told("element", ctx)
        if value.value == 0:
            self.values.clear()
            self.seen.remove(value.at)
        self.value.update(value)
        self.values.add((value.value, value.key if value.value % 2 else None))
        self.seen.put(value.at, None if value.value % 3 else Pair(value.at, value.value))
        self.sum.add(value.value)
        self.total.add(value)
        service = ctx.timer_service()
        service.register_event_time_timer(value.at + value.value)
        service.register_processing_time_timer(service.current_processing_time() + value.value)
        if value.value == 5:
            service.delete_event_time_timer(value.at + 1)
        yield LATE, value.key

    def on_timer(self, timestamp, ctx) -> Iterable[str]:
        yield self.told(f"{ctx.time_domain().name} {timestamp}", ctx)
        if timestamp % 5 == 0:
            self.sum.clear()
            ctx.timer_service().register_event_time_timer(timestamp + 3)

    def told(self, what, ctx):
        seen = sorted(self.seen.items())
        values = list(self.values.get())
        return (
            f"{ctx.get_current_key()} {what} {self.value.value()} {values} {seen} {self.sum.get()} {self.total.get()}"
        )


class Undeclared(KeyedProcessFunction):
    """Asks for its state only while it runs."""

    def open(self, context):
        self.context = context

    def process_element(self, value, ctx) -> Iterable[str]:
        values = self.context.get_list_state(ListStateDescriptor("values", Pair))
        yield f"{value.key} {list(values.get())}"
        values.add(Pair(value.at, value.value))
        if value.value % 3 == 0:
            counts = self.context.get_map_state(MapStateDescriptor("counts", str, int))
            counts.put(value.key, len(list(counts.keys())) + value.at)
            yield f"{sorted(counts.items())}"


class Rows(KeyedBatchFunction):
    """Keeps rows as Arrow batches, in a state that it asks for at once or only while it runs."""

    def __init__(self, late):
        self.late = late

    def open(self, context):
        self.context = context
        if not self.late:
            self.rows()

    def rows(self):
        return self.context.get_state(ArrowListStateDescriptor("rows", Amounts))

    def process_batch(self, batch, ctx) -> pa.RecordBatch:
        rows = self.rows()
        amounts = pa.array([list(range(value)) for value in batch["value"].to_pylist()], pa.list_(pa.int64()))
        rows.add(batch.select(["number"]).append_column("amounts", amounts))
        ctx.timer_service().register_event_time_timer(batch["at"][0].as_py() + 2)
        return pa.RecordBatch.from_pydict({"value": [str(rows.get().to_pylist())] * batch.num_rows})

    def on_timer(self, timestamp, ctx) -> pa.RecordBatch:
        told = f"{ctx.get_current_key()} {self.rows().get().to_pylist()}"
        if timestamp % 5 == 0:
            self.rows().clear()
        return pa.RecordBatch.from_pydict({"value": [told]})


class Amounts(NamedTuple):
    number: int
    amounts: list[int]


class WindowRows(ProcessWindowFunction):
    """Keeps rows of a window, and of its key."""

    def process(self, key, context, elements) -> Iterable[str]:
        rows = pa.RecordBatch.from_pylist([{"left": e.at, "right": e.value} for e in elements])
        kept = ArrowListStateDescriptor("rows", Pair)
        for state in (context.window_state().get_state(kept), context.global_state().get_state(kept)):
            state.add(rows)
            yield f"{key} {context.window()} {state.get().to_pylist()}"

    def clear(self, context) -> None:
        context.window_state().get_state(ArrowListStateDescriptor("rows", Pair)).clear()


def beside_table(batch: pa.RecordBatch, table: pa.Table) -> pa.RecordBatch:
    told = str(sorted(map(repr, table.to_pylist())))
    return pa.RecordBatch.from_pydict({"value": [told] * batch.num_rows})


class Both(KeyedCoProcessFunction):
    def open(self, context):
        self.first = context.get_list_state(ListStateDescriptor("first", Event))
        self.second = context.get_state(ValueStateDescriptor("second", int))

    def process_element1(self, value, ctx) -> Iterable[str]:
        self.first.add(value)
        ctx.timer_service().register_event_time_timer(value.at + 2)
        yield f"{value.key} first {self.second.value()}"

    def process_element2(self, value, ctx) -> Iterable[str]:
        self.second.update(value.value)
        yield f"{value.key} second {[e.value for e in self.first.get()]}"

    def on_timer(self, timestamp, ctx) -> Iterable[str]:
        yield f"{ctx.get_current_key()} {timestamp} {[e.value for e in self.first.get()]} {self.second.value()}"


class Joined(ProcessJoinFunction):
    def process_element(self, left, right, ctx) -> Iterable[str]:
        yield f"{left} {right} {ctx.get_left_timestamp()} {ctx.get_right_timestamp()}"


RULES, NAMES = MapStateDescriptor("rules", str, Pair), MapStateDescriptor("names", int, str | int)


class Ruled(KeyedBroadcastProcessFunction):
    def __init__(self, sorted_input=False):
        self.requires_time_sorted_input = sorted_input

    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", int))

    def process_element(self, value, ctx) -> Iterable[str]:
        self.total.update((self.total.value() or 0) + value.value)
        ctx.timer_service().register_event_time_timer(value.at + 2)
        yield f"{value.key} {self.total.value()} {ctx.get_broadcast_state(RULES).get(value.key)}"

    def process_broadcast_element(self, value, ctx) -> Iterable[str]:
        rules = ctx.get_broadcast_state(RULES)
        if value.value == 0:
            rules.remove(value.key)
        else:
            rules.put(value.key, Pair(value.at, value.value))
        ctx.get_broadcast_state(NAMES).put(value.at, value.key if value.value % 2 else value.value)
        yield f"rule {len(rules.keys())}"

    def on_timer(self, timestamp, ctx) -> Iterable[str]:
        names = sorted(ctx.get_broadcast_state(NAMES).items(), key=repr)
        yield f"{ctx.get_current_key()} {timestamp} {self.total.value()} {names}"


class Unkeyed(BroadcastProcessFunction):
    def process_element(self, value, ctx) -> Iterable[str]:
        yield f"{value.value} {ctx.get_broadcast_state(RULES).get(value.key)}"

    def process_broadcast_element(self, value, ctx) -> Iterable[str]:
        ctx.get_broadcast_state(RULES).put(value.key, Pair(value.at, value.value))
        yield "rule"


# Operators


def a_key(draw, stream):
    kind = draw(st.sampled_from(["field", "fields", "function", "tuple"]))
    if kind == "field":
        return stream.key_by("key")
    if kind == "fields":
        return stream.key_by("key", "number")
    if kind == "function":
        return stream.key_by(lambda e: e.number * 2, key_type=int)
    return stream.key_by(lambda e: (e.key, e.number), key_type=tuple[str, int])


def a_ttl(draw):
    if draw(st.booleans()):
        return None
    return StateTtlConfig(
        ms(draw(st.integers(1, 30))), draw(st.sampled_from(UpdateType)), StateVisibility.NEVER_RETURN_EXPIRED
    )


def processed(draw, first, second):
    return a_key(draw, first).process(Everything(a_ttl(draw), draw(st.booleans())))


def undeclared(draw, first, second):
    return a_key(draw, first).process(Undeclared())


def rows(draw, first, second):
    return a_key(draw, first).map_batches(Rows(draw(st.booleans())), str)


def rows_of_windows(draw, first, second):
    windows = a_key(draw, first).window(draw(st.sampled_from([TumblingEventTimeWindows.of(ms(4)), SESSIONS])))
    return windows.allowed_lateness(ms(draw(st.integers(0, 8)))).process(WindowRows())


SESSIONS = EventTimeSessionWindows.with_gap(ms(3))


def broadcast_table(draw, first, second):
    return first.connect(second.broadcast()).map_batches(beside_table, str)


def rolling(draw, first, second):
    keyed = a_key(draw, first)
    kind = draw(st.sampled_from(["sum", "min", "max", "min_by", "max_by", "reduce"]))
    if kind == "reduce":
        return keyed.reduce(lambda a, b: Event(a.key, a.number, max(a.at, b.at), a.value + b.value))
    return getattr(keyed, kind)("value")


def windowed(draw, first, second):
    span = st.integers(2, 12).map(ms)
    size, slide, gap = draw(span), draw(span), draw(span)
    count, step = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    assigner = draw(
        st.sampled_from(
            [
                TumblingEventTimeWindows.of(size),
                SlidingEventTimeWindows.of(size, slide),
                EventTimeSessionWindows.with_gap(gap),
                TumblingProcessingTimeWindows.of(size),
                SlidingProcessingTimeWindows.of(size, slide),
                ProcessingTimeSessionWindows.with_gap(gap),
                CountTumblingWindowAssigner.of(count),
                CountSlidingWindowAssigner.of(count, step),
                GlobalWindows.create(),
            ]
        )
    )
    windows = a_key(draw, first).window(assigner)
    merging = isinstance(assigner, (EventTimeSessionWindows, ProcessingTimeSessionWindows))
    by_time = assigner.is_event_time
    triggers = [None, CountTrigger.of(count), PurgingTrigger.of(CountTrigger.of(count))]
    if by_time:
        triggers += [ContinuousEventTimeTrigger.of(gap)]
    if assigner.is_processing_time:
        triggers += [ContinuousProcessingTimeTrigger.of(gap)]
    if not merging:
        triggers += [DeltaTrigger.of(3, lambda a, b: abs(a.value - b.value), Event)]
    if not merging and isinstance(assigner, (TumblingEventTimeWindows, SlidingEventTimeWindows)):
        triggers += [Enough()]
    trigger = draw(st.sampled_from(triggers))
    if trigger is not None:
        windows.trigger(trigger)
    evictor = draw(st.sampled_from([None, None, CountEvictor.of(count), TimeEvictor.of(gap)]))
    if evictor is not None:
        windows.evictor(evictor)
    if by_time:
        windows.allowed_lateness(ms(draw(st.integers(0, 8))))
        windows.side_output_late_data(OutputTag("late", Event))
    made = draw(st.sampled_from(["reduce", "aggregate", "process"]))
    if made == "reduce":
        return windows.reduce(lambda a, b: Event(a.key, a.number, max(a.at, b.at), a.value + b.value))
    return windows.aggregate(Totals()) if made == "aggregate" else windows.process(Lists())


def counted(draw, first, second):
    count, step = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return first.key_by("key").count_window(count, draw(st.sampled_from([None, step]))).process(Lists())


def all_windows(draw, first, second):
    return first.window_all(TumblingEventTimeWindows.of(ms(5))).process(Lists())


def connected(draw, first, second):
    return first.connect(second).key_by("key", "key").process(Both())


def window_join(draw, first, second):
    pairs = first.join(second).where("key").equal_to("key").window(TumblingEventTimeWindows.of(ms(6)))
    return pairs.allowed_lateness(ms(2)).apply(lambda a, b: f"{a} {b}", output_type=str)


def co_group(draw, first, second):
    groups = first.co_group(second).where("key").equal_to("key").window(EventTimeSessionWindows.with_gap(ms(3)))
    return groups.apply(lambda a, b: [f"{a} {b}"], output_type=str)


def interval_join(draw, first, second):
    joined = first.key_by("key").interval_join(second.key_by("key")).between(ms(-4), ms(draw(st.integers(0, 5))))
    joined.side_output_left_late_data(OutputTag("late", Event)).side_output_right_late_data(
        OutputTag("late too", Event)
    )
    return joined.process(Joined())


def ruled(draw, first, second):
    return a_key(draw, first).connect(second.broadcast(RULES, NAMES)).process(Ruled(draw(st.booleans())))


def unkeyed(draw, first, second):
    return first.connect(second.broadcast(RULES)).process(Unkeyed())


AGGREGATES = [F.count("*").alias("count"), F.sum("value").alias("value"), F.min("at").alias("at")]


class Summary(NamedTuple):
    key: str
    count: int
    value: int
    at: int


def aggregated(draw, first, second):
    return first.key_by("key").agg(*AGGREGATES, output_type=Summary)


def aggregated_windows(draw, first, second):
    assigners = [
        TumblingEventTimeWindows.of(ms(5)),
        SlidingEventTimeWindows.of(ms(6), ms(4)),
        EventTimeSessionWindows.with_gap(ms(3)),
    ]
    return first.key_by("key").window(draw(st.sampled_from(assigners))).agg(*AGGREGATES, output_type=Summary)


OPERATORS = [
    processed,
    aggregated,
    aggregated_windows,
    undeclared,
    rolling,
    windowed,
    counted,
    all_windows,
    connected,
    window_join,
    co_group,
    interval_join,
    ruled,
    unkeyed,
    rows,
    rows_of_windows,
    broadcast_table,
]


class Given(Payload):
    """A program that is shipped within one process."""

    def __init__(self, program):
        self.shipped = InThisProcess(program)

    def load(self):
        return self.shipped.load()


class Driving:
    """One operator of a pipeline, driven in STREAMING, with a savepoint whenever it is asked for."""

    def __init__(self, build, draw):
        pipeline = Pipeline("p")
        strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
        first, second = (
            pipeline.from_collection([], Event, name).assign_timestamps_and_watermarks(strategy) for name in "ab"
        )
        made = build(draw, first, second).uid("operator")
        made.print("main")
        self.plan = pipeline.plan({"execution.runtime-mode": "STREAMING", "state.native-aggregates": "PORTABLE"})
        self.node = next(node for node in self.plan.graph.nodes if node.uid == "operator")
        self.payload = Given(single(self.plan, self.node))

    def run(self, batches, savepoints):
        """What comes of micro-batches; before some of them is a savepoint, with so many groups."""
        out, clock, store, watermark = [], ManualClock(), MemoryStore(), MIN_TIMESTAMP
        clock.now = 0

        def emit(tag, timed):
            out.extend((tag, repr(record), time) for record, time in timed)

        driven = DrivenOperator(self.plan, self.node, emit, clock, store)
        found = []
        try:
            for place, batch in enumerate([*batches, None]):
                if place in savepoints:
                    driven.close()
                    with patch.object(worker, "wall_clock", clock):
                        store = self.restored(driven.store, savepoints[place], watermark)
                    driven = DrivenOperator(self.plan, self.node, emit, clock, store)
                if batch is None:
                    driven.take([], ControlEvent(watermarks={"operator": watermark}, now=clock.now, end=True))
                else:
                    events, watermark, clock.now = batch[0], max(watermark, batch[1]), clock.now + batch[2]
                    event = ControlEvent(watermarks={"operator": watermark}, now=clock.now)
                    driven.take(*self.inputs(driven.program, events)[:1], event, self.inputs(driven.program, events)[1])
                found.append(sorted(out, key=repr))
                out.clear()
        finally:
            driven.close()
        return found

    def inputs(self, program, events):
        """The records of the operator's own input, and of its broadcast one. An odd number is the second stream's."""
        kind = program.input.records.python
        first = [e for e in events if e.number % 2 == 0]
        second = [e for e in events if e.number % 2]
        if program.broadcast is not None:
            return [(e, e.at) for e in first], [(e, e.at) for e in second]
        if kind.__name__ == "Partials":
            carry = {name: 0 for name in program.input.records.names if name.endswith("_carry")}
            return [(kind(e.key, count=1, sum_value=e.value, min_at=e.at, **carry), e.at) for e in events], []
        if kind.__name__ != "Event":
            return [(kind(2, None, e) if e.number % 2 else kind(1, e, None), e.at) for e in events], []
        return [(e, e.at) for e in events], []

    def restored(self, store, groups, watermark):
        """The store after a way through rows, pages of so many groups, rows again, and pages of one group."""
        (pages,) = rows_of(0, store)
        for count in (groups, 1):
            pages = self.pages(self.rows(pages), count, watermark)
        found = MemoryStore()
        found.pages.update(zip(pages["page"].to_pylist(), pages["state"].to_pylist(), strict=True))
        return found

    def rows(self, pages):
        found = list(worker.to_rows(self.payload, [pages]))
        if not found:
            return []
        file = BytesIO()
        pq.write_table(pa.Table.from_batches(found), file, store_schema=False)
        file.seek(0)
        return pq.read_table(file).to_batches(max_chunksize=2)

    def pages(self, rows, groups, watermark):
        stored = rows[0].schema if rows else pa.schema([])
        slices = list(worker.to_slices(self.payload, groups, False, rows))
        slices.append(pa.RecordBatch.from_pylist([{"group": n} for n in range(groups)], worker.SLICES))
        by_group = pa.Table.from_batches(slices).sort_by("group").combine_chunks().to_batches(max_chunksize=3)
        made = list(worker.to_pages(self.payload, stored, watermark, by_group))
        return pa.Table.from_batches(made).combine_chunks().to_batches()[0]


@st.composite
def micro_batches(draw):
    event = st.builds(
        Event, st.sampled_from(["a", "b", "cc"]), st.integers(0, 3), st.integers(0, 30), st.integers(0, 9)
    )
    batch = st.tuples(st.lists(event, max_size=6), st.integers(0, 30), st.integers(0, 10))
    return draw(st.lists(batch, min_size=1, max_size=5))


@pytest.fixture(params=[2, chunks.ENTRIES_PER_CHUNK], ids="parts of {}".format)
def part(request, monkeypatch):
    """How large a list or map may be before it is in parts."""
    if request.param < chunks.ENTRIES_PER_CHUNK:
        monkeypatch.setattr(chunks, "ENTRIES_PER_CHUNK", request.param)
        monkeypatch.setattr(chunks, "SMALL", 600)
        monkeypatch.setattr(chunks, "BYTES", 1200)


@pytest.mark.usefixtures("part")
@pytest.mark.parametrize("build", OPERATORS, ids=lambda build: build.__name__)
@settings(
    phases=[Phase.generate, Phase.shrink],
    max_examples=examples(4),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data(), batches=micro_batches())
def test_an_operator_goes_on_from_a_savepoint_as_if_there_had_been_none(build, data, batches):
    driving = Driving(build, data.draw)
    whole = driving.run(batches, {})
    savepoints = data.draw(st.dictionaries(st.integers(0, len(batches)), st.integers(1, 5), min_size=1, max_size=3))
    assert driving.run(batches, savepoints) == whole


@pytest.mark.usefixtures("part")
def test_a_large_list_that_is_declared_only_while_the_operator_runs_is_in_a_savepoint():
    driving = Driving(lambda _, first, __: first.key_by("key").process(Undeclared()), None)
    batches = [([Event("a", 0, 0, value)], 0, 0) for value in (1, 2, 4, 5, 7)]
    *_, told, _ = driving.run(batches, {4: 3, 5: 2})
    assert told == [(None, repr(f"a {[Pair(0, value) for value in (1, 2, 4, 5)]}"), 0)]
