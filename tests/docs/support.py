"""The support matrix: each operator in a pipeline of its own, and what planning, the lint and the harness say of it.

`python -m tests.docs.support` writes the pages that are made from code. A test holds that they are up to date.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from dagster_unified import UnifiedPipelineComponent
from dagster_unified.api import (
    AggregateFunction,
    AsyncDataStream,
    AsyncFunction,
    BroadcastProcessFunction,
    CheckpointedFunction,
    CoMapFunction,
    ContinuousEventTimeTrigger,
    CoProcessFunction,
    CountEvictor,
    CountSlidingWindowAssigner,
    CountTrigger,
    CountTumblingWindowAssigner,
    DataStream,
    DeltaTrigger,
    EventTimeSessionWindows,
    FunctionInitializationContext,
    FunctionSnapshotContext,
    GlobalWindows,
    IngestionTimeAssigner,
    KeyedBatchFunction,
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapFunction,
    MapStateDescriptor,
    OutputTag,
    Pipeline,
    ProcessFunction,
    ProcessJoinFunction,
    ProcessWindowFunction,
    PurgingTrigger,
    RuntimeContext,
    SlidingEventTimeWindows,
    StateTtlConfig,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    ValueStateDescriptor,
    WatermarkGenerator,
    WatermarkOutput,
    WatermarkStrategy,
    iterations,
)
from dagster_unified.api import functions as F
from dagster_unified.cli import app
from dagster_unified.connectors import ParquetSource
from dagster_unified.errors import UnifiedError
from dagster_unified.graph.drawing import as_svg
from dagster_unified.graph.nodes import IterationNode
from dagster_unified.graph.operator_state import carrying
from dagster_unified.graph.options import OPTIONS, Option, written
from dagster_unified.testing import run_pipeline
from jobs.flight_delays import pipeline as flights
from tests.docs.reference import OUTLINES, reference_page

DOCS = Path(__file__).parents[2] / "docs"
SECOND = timedelta(seconds=1)
IN_ORDER = WatermarkStrategy.for_bounded_out_of_orderness(SECOND).with_timestamp_assigner("at")
BY_CLOCK = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(IngestionTimeAssigner())


class Event(NamedTuple):
    """What every pipeline of the matrix reads."""

    key: str
    at: int
    value: int


class Sum(NamedTuple):
    """A native aggregate's row."""

    key: str
    value: int


class WindowSum(NamedTuple):
    """A native window's row."""

    key: str
    window_start: int
    value: int


EVENTS = [Event("a", 1000, 1), Event("b", 2000, 2), Event("a", 12_000, 3)]
SIDE = OutputTag("side", Event)
RULES = MapStateDescriptor("rules", str, Event)


def same(event: Event) -> Event:
    return event


def twice(event: Event) -> Iterable[Event]:
    return [event, event]


def add(a: Event, b: Event) -> Event:
    return Event(a.key, max(a.at, b.at), a.value + b.value)


def pair(a: Event, b: Event) -> Event:
    return Event(a.key, max(a.at, b.at), a.value + b.value)


def both(a: Iterable[Event], b: Iterable[Event]) -> Iterable[Event]:
    return [*a, *b]


class Whole(AggregateFunction):
    def create_accumulator(self) -> int:
        return 0

    def add(self, value: Event, accumulator: int) -> int:
        return accumulator + value.value

    def get_result(self, accumulator: int) -> int:
        return accumulator

    def merge(self, a: int, b: int) -> int:
        return a + b


class Counting(MapFunction):
    def open(self, context: Any) -> None:
        self.count = context.get_state(ValueStateDescriptor("count", int))

    def map(self, value: Event) -> Event:
        self.count.update((self.count.value() or 0) + 1)
        return value


class Batched(KeyedBatchFunction[str]):
    def open(self, runtime_context: RuntimeContext) -> None:
        self.count = runtime_context.get_state(ValueStateDescriptor("count", int))

    def process_batch(self, batch: pa.RecordBatch, ctx: KeyedBatchFunction.Context[str]) -> pa.RecordBatch:
        self.count.update((self.count.value() or 0) + batch.num_rows)
        return batch


class Remembering(MapFunction, CheckpointedFunction):
    def initialize_state(self, context: FunctionInitializationContext) -> None:
        store = context.get_operator_state_store()
        self.keys = store.get_list_state(ListStateDescriptor("keys", str))

    def snapshot_state(self, context: FunctionSnapshotContext) -> None:
        pass

    def map(self, value: Event) -> Event:
        self.keys.update([value.key])
        return value


class Plain(ProcessFunction):
    def process_element(self, value: Event, ctx: Any) -> Iterable[Event]:
        yield value
        yield SIDE, value


class WithTimers(KeyedProcessFunction):
    def open(self, context: Any) -> None:
        self.last = context.get_state(ValueStateDescriptor("last", Event))

    def process_element(self, value: Event, ctx: Any) -> Iterable[Event]:
        self.last.update(value)
        ctx.timer_service().register_event_time_timer(value.at + 1000)
        return []

    def on_timer(self, timestamp: int, ctx: Any) -> Iterable[Event]:
        yield self.last.value()


class Sorted(WithTimers):
    requires_time_sorted_input = True


class ByClock(WithTimers):
    def process_element(self, value: Event, ctx: Any) -> Iterable[Event]:
        self.last.update(value)
        ctx.timer_service().register_processing_time_timer(1)
        return []


class Forgetting(WithTimers):
    def open(self, context: Any) -> None:
        descriptor = ValueStateDescriptor("last", Event)
        descriptor.enable_time_to_live(StateTtlConfig(timedelta(days=1)))
        self.last = context.get_state(descriptor)


class Join(ProcessJoinFunction):
    def process_element(self, left: Event, right: Event, ctx: Any) -> Iterable[Event]:
        yield left


class OfWindow(ProcessWindowFunction):
    def process(self, key: str, context: Any, elements: Iterable[Event]) -> Iterable[Event]:
        yield max(elements)


class CoPlain(CoProcessFunction):
    def process_element1(self, value: Event, ctx: Any) -> Iterable[Event]:
        yield value

    def process_element2(self, value: Event, ctx: Any) -> Iterable[Event]:
        yield value


class CoKeyed(KeyedCoProcessFunction):
    def process_element1(self, value: Event, ctx: Any) -> Iterable[Event]:
        yield value

    def process_element2(self, value: Event, ctx: Any) -> Iterable[Event]:
        yield value


class CoMapped(CoMapFunction):
    def map1(self, value: Event) -> Event:
        return value

    def map2(self, value: Event) -> Event:
        return value


class WithRules(BroadcastProcessFunction):
    def process_element(self, value: Event, ctx: Any) -> Iterable[Event]:
        yield value

    def process_broadcast_element(self, value: Event, ctx: Any) -> Iterable[Event]:
        ctx.get_broadcast_state(RULES).put(value.key, value)
        return []


class KeyedWithRules(KeyedBroadcastProcessFunction):
    def process_element(self, value: Event, ctx: Any) -> Iterable[Event]:
        yield value

    def process_broadcast_element(self, value: Event, ctx: Any) -> Iterable[Event]:
        ctx.get_broadcast_state(RULES).put(value.key, value)
        return []


class Fetch(AsyncFunction):
    async def async_invoke(self, value: Event) -> list[Event]:
        await asyncio.sleep(0)
        return [value]


class Halving(iterations.IterationBody):
    """What is fed back gets smaller, until it is nothing."""

    def process(self, variables: Any, data: Any) -> iterations.IterationBodyResult:
        halved = variables[0].union(data[0]).map(lambda e: e._replace(value=e.value // 2), Event)
        return iterations.IterationBodyResult([halved.filter(lambda e: e.value > 0)], [halved])


class Larger(iterations.DeltaFunction[Event, Event]):
    """The solution set has the largest of each key."""

    def update(self, solution: Event | None, workset: Sequence[Event]) -> tuple[Event | None, Sequence[Event]]:
        found = max(workset, key=lambda event: event.value)
        return (found if solution is None or found.value > solution.value else None), []


def by_key(stream: DataStream) -> Any:
    return stream.key_by("key")


def windows(stream: DataStream, assigner: Any = TumblingEventTimeWindows.of(10 * SECOND)) -> Any:
    return by_key(stream).window(assigner)


NATIVE = (F.sum("value").alias("value"),)


class Complete(WatermarkGenerator[Event]):
    def on_event(self, event: Event, event_timestamp: int, output: WatermarkOutput) -> None:
        output.emit_watermark(event_timestamp)


GENERATED = WatermarkStrategy.for_generator(Complete).with_timestamp_assigner("at")


def timed(stream: DataStream, strategy: WatermarkStrategy[Any]) -> DataStream:
    return stream.assign_timestamps_and_watermarks(strategy)


Build = Callable[[DataStream, DataStream], DataStream]
OPERATORS: dict[str, dict[str, Build]] = {
    "Event time": {
        "`for_bounded_out_of_orderness`, `for_monotonous_timestamps`": lambda s, o: timed(s, IN_ORDER),
        "`with_idleness`": lambda s, o: timed(s, IN_ORDER.with_idleness(SECOND)),
        "`for_generator`": lambda s, o: timed(s, GENERATED),
        "`IngestionTimeAssigner`": lambda s, o: timed(s, BY_CLOCK),
        "`with_watermark_alignment`": lambda s, o: timed(s, IN_ORDER.with_watermark_alignment("group", SECOND)),
    },
    "Streams without a key": {
        "`map`": lambda s, o: s.map(same),
        "`flat_map`": lambda s, o: s.flat_map(twice),
        "`filter`": lambda s, o: s.filter(lambda e: e.value > 0),
        "`map_batches`": lambda s, o: s.map_batches(lambda batch: batch, output_type=Event),
        "`process` (`ProcessFunction`)": lambda s, o: s.process(Plain(), output_type=Event),
        "`get_side_output`": lambda s, o: s.process(Plain(), output_type=Event).get_side_output(SIDE),
        "`AsyncDataStream`": lambda s, o: AsyncDataStream.unordered_wait(s, Fetch(), SECOND, output_type=Event),
        "`select`": lambda s, o: s.select(F.col("key"), F.col("value"), output_type=Sum),
        "`with_columns`": lambda s, o: s.with_columns({"value": F.col("value") + 1}, output_type=Event),
        "`where`": lambda s, o: s.where("value > 0"),
        "`map`, `flat_map`, `filter`, `map_batches`, `process` with operator state": lambda s, o: s.map(Remembering()),
        "`union`": lambda s, o: s.union(o),
        "`connect`": lambda s, o: s.connect(o).map(CoMapped()),
        "`connect` with a broadcast stream": (
            lambda s, o: s.connect(o.broadcast(RULES)).process(WithRules(), output_type=Event)
        ),
        "`connect` with a broadcast stream, `map_batches`": (
            lambda s, o: s.connect(o.broadcast()).map_batches(lambda batch, table: batch, output_type=Event)
        ),
        "`rebalance`, `rescale`, `shuffle`": lambda s, o: (
            s.rebalance().map(same).rescale().map(same).shuffle().map(same)
        ),
        "`global_`": lambda s, o: s.global_().map(same),
        "`broadcast()`": lambda s, o: s.broadcast().map(same).set_parallelism(2),
        "`partition_custom`": lambda s, o: (
            s.partition_custom(lambda key, count: len(key) % count, "key").map(same).set_parallelism(2)
        ),
        "`window_all`": lambda s, o: s.window_all(TumblingEventTimeWindows.of(10 * SECOND)).sum("value"),
    },
    "Keyed streams": {
        "`reduce`": lambda s, o: by_key(s).reduce(add),
        "`sum`, `min`, `max`": lambda s, o: by_key(s).sum("value"),
        "`min_by`, `max_by`": lambda s, o: by_key(s).max_by("value"),
        "`agg`": lambda s, o: by_key(s).agg(*NATIVE, output_type=Sum),
        "`map` with state": lambda s, o: by_key(s).map(Counting()),
        "`map_batches` (`KeyedBatchFunction`)": lambda s, o: by_key(s).map_batches(Batched(), output_type=Event),
        "`process`, event-time timers": lambda s, o: by_key(s).process(WithTimers(), output_type=Event),
        "`process`, time-sorted input": lambda s, o: by_key(s).process(Sorted(), output_type=Event),
        "`process`, processing-time timers": lambda s, o: by_key(s).process(ByClock(), output_type=Event),
        "`process`, state with a time to live": lambda s, o: by_key(s).process(Forgetting(), output_type=Event),
        "`connect` of two keyed streams": lambda s, o: (
            by_key(s).connect(by_key(o)).process(CoKeyed(), output_type=Event)
        ),
        "`connect` of a keyed stream and one without a key": lambda s, o: (
            by_key(s).connect(o).process(CoPlain(), output_type=Event)
        ),
        "`connect` with a broadcast stream": lambda s, o: (
            by_key(s).connect(o.broadcast(RULES)).process(KeyedWithRules(), output_type=Event)
        ),
        "`interval_join`": lambda s, o: (
            by_key(s).interval_join(by_key(o)).between(-SECOND, SECOND).process(Join(), output_type=Event)
        ),
        "an operator behind `global_`, `broadcast()` or `partition_custom`": lambda s, o: by_key(
            s.global_().map(same)
        ).sum("value"),
        "an operator behind a native `agg`": lambda s, o: by_key(by_key(s).agg(*NATIVE, output_type=Sum)).sum("value"),
    },
    "Windows": {
        "tumbling, by event time": lambda s, o: windows(s).sum("value"),
        "sliding, by event time": (
            lambda s, o: windows(s, SlidingEventTimeWindows.of(10 * SECOND, 5 * SECOND)).sum("value")
        ),
        "session, by event time": lambda s, o: windows(s, EventTimeSessionWindows.with_gap(SECOND)).sum("value"),
        "by processing time": lambda s, o: windows(s, TumblingProcessingTimeWindows.of(SECOND)).sum("value"),
        "`count_window`": lambda s, o: by_key(s).count_window(2).sum("value"),
        "`CountTumblingWindowAssigner`": lambda s, o: windows(s, CountTumblingWindowAssigner.of(2)).sum("value"),
        "`CountSlidingWindowAssigner`": lambda s, o: windows(s, CountSlidingWindowAssigner.of(3, 1)).sum("value"),
        "`reduce`": lambda s, o: windows(s).reduce(add),
        "`aggregate`": lambda s, o: windows(s).aggregate(Whole()),
        "`process`, `apply`": lambda s, o: windows(s).process(OfWindow(), output_type=Event),
        "`agg`": lambda s, o: windows(s).agg(*NATIVE, output_type=WindowSum),
        "`agg`, session": (
            lambda s, o: windows(s, EventTimeSessionWindows.with_gap(SECOND)).agg(*NATIVE, output_type=WindowSum)
        ),
        "`GlobalWindows` with `CountTrigger`": lambda s, o: (
            windows(s, GlobalWindows.create()).trigger(PurgingTrigger.of(CountTrigger.of(2))).sum("value")
        ),
        "`DeltaTrigger`": lambda s, o: (
            windows(s, GlobalWindows.create())
            .trigger(DeltaTrigger.of(1.0, lambda a, b: float(b.value - a.value), Event))
            .sum("value")
        ),
        "`ContinuousEventTimeTrigger`": lambda s, o: (
            windows(s).trigger(ContinuousEventTimeTrigger.of(SECOND)).sum("value")
        ),
        "evictors": lambda s, o: windows(s).evictor(CountEvictor.of(1)).sum("value"),
        "`allowed_lateness`": lambda s, o: windows(s).allowed_lateness(SECOND).sum("value"),
        "`side_output_late_data`": lambda s, o: windows(s).side_output_late_data(SIDE).sum("value"),
        "`join`": lambda s, o: (
            s.join(o).where("key").equal_to("key").window(TumblingEventTimeWindows.of(10 * SECOND)).apply(pair)
        ),
        "`co_group`": lambda s, o: (
            s.co_group(o)
            .where("key")
            .equal_to("key")
            .window(TumblingEventTimeWindows.of(10 * SECOND))
            .apply(both, output_type=Event)
        ),
    },
    "Iterations": {
        "`iterate_bounded_streams_until_termination`": (
            lambda s, o: iterations.iterate_bounded_streams_until_termination([s], [o], Halving())[0]
        ),
        "`iterate_delta`": lambda s, o: iterations.iterate_delta(
            by_key(s.filter(lambda e: False)), by_key(o), Larger()
        ),
        "`iterate_unbounded_streams`": lambda s, o: iterations.iterate_unbounded_streams([s], [o], Halving())[0],
    },
}


LINT = {
    "broadcast": "records meet the broadcast records that came before them, which in BATCH are all of them",
    "clock": "the function reads a clock",
    "counts-updates": "what follows sees every update in STREAMING, and only the final result in BATCH",
    "expiry": "state expires in STREAMING only",
    "late-records": "a record that comes after the watermark is late in STREAMING; nothing is late in BATCH",
    "operator-state": "which records a subtask gets, and when its function is restored, is the mode's affair",
    "other-fields": "fields that are not aggregated come from whichever record is first",
    "rounds": "a round has what has come by then, which in BATCH is everything",
    "watermark": "the function reads the watermark",
    "windows": "windows close by arrival, by the clock, or early",
}
"""What each rule of the lint warns of."""


class Row(NamedTuple):
    """What is known of an operator. A mode has the reason why it refuses the operator, or None."""

    label: str
    batch: str | None
    streaming: str | None
    carried: str | None
    runs_in: str
    rules: tuple[str, ...]


def pipeline_of(build: Build) -> Pipeline:
    pipeline = Pipeline("matrix")
    first, second = (
        pipeline.from_source(
            ParquetSource(f"in/{name}/{{key}}.parquet", Event, name=name)
        ).assign_timestamps_and_watermarks(IN_ORDER)
        for name in ("events", "others")
    )
    build(first, second).print()
    return pipeline


def row(label: str, build: Build) -> Row:
    try:
        pipeline = pipeline_of(build)
    except UnifiedError as error:
        return Row(label, str(error), str(error), str(error), "", ())
    planned = pipeline.plan()
    warnings = sorted({finding.rule for finding in planned.findings if finding.severity == "warning"})
    return Row(
        label,
        refusal(lambda: run(pipeline, "BATCH")),
        refusal(lambda: run(pipeline, "STREAMING")),
        refusal(lambda: carrying(planned.graph, planned.execution)),
        "Python"
        if any(node.needs_worker or isinstance(node, IterationNode) for node in planned.graph.nodes)
        else "Catalyst",
        tuple(warnings),
    )


def refusal(attempt: Callable[[], object]) -> str | None:
    try:
        attempt()
    except UnifiedError as error:
        return str(error)
    return None


def run(pipeline: Pipeline, mode: str) -> None:
    present = {node.name for node in pipeline.plan().graph.sources}
    run_pipeline(pipeline, mode, inputs={name: EVENTS for name in ("events", "others") if name in present})


def support_page() -> str:
    """The page `reference/support.md`."""
    lines = [
        "# Support matrix",
        "",
        (
            "This page is generated: each row is a pipeline that is planned, checked by the lint, and run by the"
            " harness in both modes."
        ),
        "[Semantics](../semantics.md) says what each operator does.",
        "",
        "* **carried state**: BATCH by partitions with `carry_state=True`.",
        "* **runs in**: Catalyst needs no Python worker.",
        "* **the lint warns**: the rules that warn of the operator as it stands in its row. They are explained below.",
    ]
    reasons: list[str] = []

    def cell(reason: str | None) -> str:
        if reason is None:
            return "yes"
        if reason not in reasons:
            reasons.append(reason)
        return f"no ({reasons.index(reason) + 1})"

    used: set[str] = set()
    for group, operators in OPERATORS.items():
        lines += [
            "",
            f"## {group}",
            "",
            "| operator | BATCH | STREAMING | carried state | runs in | the lint warns |",
            "|---|---|---|---|---|---|",
        ]
        for label, build in operators.items():
            found = row(label, build)
            used.update(found.rules)
            cells = (
                label,
                cell(found.batch),
                cell(found.streaming),
                cell(found.carried),
                found.runs_in,
                ", ".join(found.rules),
            )
            lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Why not",
        "",
        *[f"{number}. {reason.removeprefix('matrix: ')}" for number, reason in enumerate(reasons, 1)],
    ]
    lines += [
        "",
        "## What the lint warns of",
        "",
        "| rule | the result depends on the mode, because |",
        "|---|---|",
        *[f"| {rule} | {LINT[rule]} |" for rule in sorted(used)],
    ]
    return "\n".join(lines) + "\n"


def options_page() -> str:
    """The page `reference/options.md`."""
    lines = [
        "# Options",
        "",
        (
            "This page is generated. [Settings](../guides/settings.md) says where options are set. Keys are Flink's"
            " where Flink has the option."
        ),
        "",
        "| key | values | default | what it does |",
        "|---|---|---|---|",
        *[
            f"| `{option.key}` | {option.expected()} | {_default(option)} | {option.description} |"
            for option in OPTIONS
        ],
    ]
    return "\n".join(lines) + "\n"


def _default(option: Option) -> str:
    return "" if option.default is None else f"`{written(option.default)}`"


def commands_page() -> str:
    """The page `reference/commands.md`."""
    shown = [(name, app[name]) for name in app if not name.startswith("-") and app[name].show]
    lines = [
        "# Commands",
        "",
        "This page is generated. `dagster-unified COMMAND --help` shows the parameters of a command.",
        "",
        "| command | what it does |",
        "|---|---|",
        *[
            f"| `dagster-unified {name}` | {' '.join(command.help.split(chr(10) * 2)[0].split())} |"
            for name, command in shown
        ],
    ]
    return "\n".join(lines) + "\n"


def component_page() -> str:
    """The page `reference/component.md`."""
    schema = UnifiedPipelineComponent.get_model_cls().model_json_schema()
    models = schema["$defs"]
    lines = [
        "# Component",
        "",
        "This page is generated. It lists what a `defs.yaml` of `dagster_unified.UnifiedPipelineComponent` may say."
        " [Coming from Dagster](../coming-from/dagster.md#in-a-project-of-dg) shows how to write one with `dg`, and a"
        " whole example.",
    ]
    for title, properties in (
        ("attributes", schema["properties"]),
        ("batch", models["BatchModel"]["properties"]),
        ("batch.schedule", models["ScheduleModel"]["properties"]),
        ("batch.retention", models["KeptModel"]["properties"]),
        ("streaming", models["StreamingModel"]["properties"]),
        ("checks", models["SinkChecksModel"]["properties"]),
    ):
        lines += ["", f"## `{title}`", "", "| attribute | default | what it says |", "|---|---|---|"]
        lines += [
            f"| `{name}` | {_default_of(attribute)} | {attribute['description']} |"
            for name, attribute in properties.items()
        ]
    return "\n".join(lines) + "\n"


def _default_of(attribute: Mapping[str, Any]) -> str:
    default = attribute.get("default")
    return "" if default in (None, "__DAGSTER_UNSET_DEFAULT__") else f"`{json.dumps(default)}`"


def picture() -> str:
    """The stages of the example pipeline, as Dagster shows them beside one of them."""
    plan = flights.plan({"execution.runtime-mode": "BATCH"})
    return as_svg(plan, next(stage for stage in plan.regions if stage.name == "propagation")) + "\n"


PAGES: dict[Path, Callable[[], str]] = {
    **{DOCS / "reference" / outline.name: partial(reference_page, outline) for outline in OUTLINES.iterdir()},
    DOCS / "images" / "flights.svg": picture,
    DOCS / "reference" / "commands.md": commands_page,
    DOCS / "reference" / "component.md": component_page,
    DOCS / "reference" / "options.md": options_page,
    DOCS / "reference" / "support.md": support_page,
}


def main() -> None:
    """Write the pages."""
    for path, page in PAGES.items():
        path.write_text(page())


if __name__ == "__main__":
    main()
