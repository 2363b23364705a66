"""Broadcast state in the harness: what each mode's rules give, contexts, and errors that say what to do."""

from collections.abc import Iterable
from datetime import timedelta
from random import random
from typing import NamedTuple

import pytest

from dagster_unified.api import (
    BroadcastProcessFunction,
    KeyedBroadcastProcessFunction,
    MapStateDescriptor,
    OutputTag,
    Pipeline,
    StateTtlConfig,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from dagster_unified.errors import PipelineError, UnsupportedError, UserFunctionError
from dagster_unified.graph.nodes import SinkNode
from dagster_unified.graph.topology import Lanes, topology
from dagster_unified.operators.drivers.key_groups import GroupInput, KeyGroups, MicroBatch
from dagster_unified.testing import run_pipeline
from tests.operators.support import Memory
from tests.support import MODES


class Flight(NamedTuple):
    carrier: str
    delay: int


class Rule(NamedTuple):
    carrier: str
    limit: int


LIMITS = MapStateDescriptor("limits", str, int)
SEEN = ValueStateDescriptor("seen", int)
NEW = OutputTag("new rules", str)


class Flag(BroadcastProcessFunction):
    def open(self, context):
        self.context = context

    def process_element(self, value: Flight, ctx) -> Iterable[str]:
        limit = ctx.get_broadcast_state(LIMITS).get(value.carrier)
        if limit is not None and value.delay > limit:
            yield f"{value.carrier} {value.delay} > {limit}"

    def process_broadcast_element(self, value: Rule, ctx) -> Iterable[str]:
        state = ctx.get_broadcast_state(LIMITS)
        self.context.count("rules")
        if value.limit < 0:
            state.remove(value.carrier)
        else:
            state.put(value.carrier, value.limit)
        yield f"rules: {len(state.keys())}"
        ctx.output(NEW, value.carrier)


FLIGHTS = [Flight("AA", 10), Flight("DL", 50), Flight("UA", 5)]
RULES = [Rule("AA", 5), Rule("DL", 20), Rule("UA", 1), Rule("UA", -1)]


def flagged(function=None, keyed=False, flights=None, rules=None):
    pipeline = Pipeline("p")
    limits = pipeline.from_collection(RULES if rules is None else rules, Rule, "rules").broadcast(LIMITS)
    stream = pipeline.from_collection(FLIGHTS if flights is None else flights, Flight, "flights")
    made = (stream.key_by("carrier") if keyed else stream).connect(limits).process(function or Flag())
    return pipeline, made


@MODES
def test_every_rule_is_there_before_the_first_record(mode):
    pipeline, made = flagged()
    made.print("out")
    made.get_side_output(NEW).print("new")
    result = run_pipeline(pipeline, mode)
    assert result.sinks["out"] == ["rules: 1", "rules: 2", "rules: 3", "rules: 2", "AA 10 > 5", "DL 50 > 20"]
    assert result.sinks["new"] == ["AA", "DL", "UA", "UA"]
    assert result.metrics.counters == {"rules": 4}


class Count(KeyedBroadcastProcessFunction):
    """Counts a carrier's flights; a rule with limit 0 asks for the counts so far, and sets them back."""

    def open(self, context):
        self.seen = context.get_state(SEEN)

    def process_element(self, value: Flight, ctx) -> Iterable[str]:
        self.seen.update((self.seen.value() or 0) + 1)
        ctx.timer_service().register_event_time_timer(100)
        yield from ()

    def process_broadcast_element(self, value: Rule, ctx):
        ctx.get_broadcast_state(LIMITS).put(value.carrier, value.limit)

        def tell(key, state):
            yield f"{key} had {state.value()}"
            state.clear()

        if value.limit == 0:
            ctx.apply_to_keyed_state(SEEN, tell)

    def on_timer(self, timestamp, ctx) -> Iterable[str]:
        yield (
            f"{ctx.get_current_key()} {self.seen.value()} limit"
            f" {ctx.get_broadcast_state(LIMITS).get(ctx.get_current_key())} at {ctx.timestamp()}"
            f" {ctx.time_domain().name}"
        )


def test_rules_meet_the_keys_that_there_are_in_streaming_and_none_in_batch():
    pipeline = Pipeline("p")
    flights = pipeline.from_collection([Flight("AA", 1), Flight("AA", 2), Flight("DL", 3)], Flight, "flights")
    limits = pipeline.from_collection([Rule("AA", 0)], Rule, "rules")
    flights.key_by("carrier").connect(limits.broadcast(LIMITS)).process(Count()).print("out")
    assert sorted(run_pipeline(pipeline, "STREAMING").only()) == [
        "AA None limit 0 at 100 EVENT_TIME",
        "AA had 2",
        "DL None limit None at 100 EVENT_TIME",
        "DL had 1",
    ]
    assert run_pipeline(pipeline, "BATCH").only() == [
        "AA 2 limit 0 at 100 EVENT_TIME",
        "DL 1 limit None at 100 EVENT_TIME",
    ]


def test_batch_takes_broadcast_records_in_the_order_of_their_event_time():
    pipeline = Pipeline("p")
    by_limit = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(seconds=1)).with_timestamp_assigner("limit")
    limits = pipeline.from_collection([Rule("AA", 9), Rule("AA", 3)], Rule, "rules").assign_timestamps_and_watermarks(
        by_limit
    )
    pipeline.from_collection(FLIGHTS, Flight, "flights").connect(limits.broadcast(LIMITS)).process(Flag()).print("out")
    assert run_pipeline(pipeline, "BATCH").only() == ["rules: 1", "rules: 1", "AA 10 > 9"]


def test_the_lint_says_what_depends_on_who_comes_first():
    pipeline, made = flagged(Count(), keyed=True)
    made.print("out")
    warnings = [f.message for f in pipeline.plan().findings if f.severity == "warning"]
    assert len(warnings) == 3
    assert "sees every broadcast record before its other records in BATCH" in warnings[0]
    assert "apply_to_keyed_state" in warnings[1]
    assert "in no defined order in BATCH, since they have no event times" in warnings[2]


class Wrong(Flag):
    def __init__(self, what):
        self.what = what

    def process_element(self, value: Flight, ctx) -> Iterable[str]:
        getattr(self, self.what)(ctx)
        yield ""

    def another(self, ctx):
        ctx.get_broadcast_state(MapStateDescriptor("others", str, int))

    def write(self, ctx):
        ctx.get_broadcast_state(LIMITS).put("AA", 1)

    def state(self, ctx):
        self.context.get_state(SEEN)

    def timer(self, ctx):
        ctx.timer_service()

    def key(self, ctx):
        ctx.get_current_key()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("another", "there is no broadcast state 'others'; the stream was broadcast with limits"),
        ("write", "has no attribute 'put'"),
        ("state", "state 'seen' needs a keyed stream"),
        ("timer", "timers need a keyed stream; call key_by before connect"),
        ("key", "there is no key; call key_by before connect"),
    ],
)
def test_what_a_function_must_not_do(what, message):
    pipeline, made = flagged(Wrong(what))
    made.print("out")
    with pytest.raises((UserFunctionError, PipelineError, UnsupportedError), match=message):
        run_pipeline(pipeline, "BATCH")


def test_errors_while_the_graph_is_built():
    pipeline = Pipeline("p")
    flights, rules = (
        pipeline.from_collection(FLIGHTS, Flight, "flights"),
        pipeline.from_collection(RULES, Rule, "rules"),
    )
    limits = rules.broadcast(LIMITS)
    with pytest.raises(
        PipelineError, match=r"expected a BroadcastProcessFunction, got .*Count.*; call key_by before connect"
    ):
        flights.connect(limits).process(Count())
    with pytest.raises(PipelineError, match="expected a KeyedBroadcastProcessFunction"):
        flights.key_by("carrier").connect(limits).process(Flag())
    with pytest.raises(PipelineError, match="both streams are broadcast"):
        flights.broadcast().connect(limits)
    with pytest.raises(PipelineError, match="different pipelines, 'q' and 'p'"):
        Pipeline("q").from_collection(FLIGHTS, Flight).connect(limits)
    with pytest.raises(PipelineError, match="broadcast state is a map"):
        rules.broadcast(SEEN)
    with pytest.raises(PipelineError, match="'limits' cannot have a time to live"):
        rules.broadcast(MapStateDescriptor("limits", str, int, StateTtlConfig(timedelta(seconds=1))))
    with pytest.raises(PipelineError, match="two broadcast states named 'limits'"):
        rules.broadcast(LIMITS, LIMITS)


def test_a_failure_names_the_operator_and_the_rule():
    class Broken(Flag):
        def process_broadcast_element(self, value: Rule, ctx) -> Iterable[str]:
            raise ValueError("no such carrier")

    pipeline, made = flagged(Broken())
    made.print("out")
    with pytest.raises(UserFunctionError, match=r"operator 'Broken'.*no such carrier.*Rule\(carrier='AA', limit=5\)"):
        run_pipeline(pipeline, "BATCH")


class Tells(Count):
    """Emits and counts for each key that a rule meets."""

    def open(self, context):
        super().open(context)
        self.context = context

    def process_broadcast_element(self, value: Rule, ctx) -> Iterable[str]:
        def tell(key, state):
            ctx.output(NEW, key)
            self.context.count("met")
            yield f"{key} has {state.value()}"

        self.context.count("rules")
        ctx.apply_to_keyed_state(SEEN, tell)
        yield "rule"


def in_groups(function, rules=(Rule("a", 0),)):
    """What rules lead to that meet the keys a to h in four key groups: the outputs by tag, and the counters."""
    pipeline = Pipeline("p")
    flights = pipeline.from_collection([Flight(c, 1) for c in "abcdefgh"], Flight, "flights")
    made = flights.key_by("carrier").connect(pipeline.from_collection([], Rule, "rules").broadcast(LIMITS))
    made = made.process(function)
    made.print("out")
    made.get_side_output(NEW).print("new")
    planned = pipeline.plan({"execution.runtime-mode": "STREAMING"})
    sinks = tuple(n.id for n in planned.graph.nodes if isinstance(n, SinkNode))
    (routed,) = topology(planned, sinks, Lanes()).levels[0].values()
    emitted = {number: [] for number in range(len(routed.program.outputs))}
    driver = KeyGroups(
        routed.program, lambda number, batch: emitted[number].extend(batch.column(0).to_pylist()), lambda: 0
    )
    with driver:
        stores = [Memory() for _ in range(5)]  # the last one has no key
        layout = routed.program.input
        for number, key in enumerate("abcdefgh"):
            driver.run(stores[number % 4], MicroBatch(GroupInput([layout.records.to_batch([Flight(key, 1)])])))
        for rule in rules:
            batch = routed.program.broadcast.layout.records.to_batch([rule])
            for group, store in enumerate(stores):
                driver.run(store, MicroBatch(GroupInput(broadcast=[batch]), leads=group == 0))
        outputs = {output.tag: sorted(emitted[number]) for number, output in enumerate(routed.program.outputs)}
        return outputs, driver.running.metrics.counters


def test_what_a_rule_leads_to_for_keys_comes_from_every_group_and_the_rest_from_one():
    outputs, counters = in_groups(Tells())
    assert outputs == {None: [*(f"{c} has 1" for c in "abcdefgh"), "rule"], NEW.name: list("abcdefgh")}
    assert counters == {"rules": 1, "met": 8}


class Finds(Count):
    """Emits itself what it has found out about the keys."""

    def process_broadcast_element(self, value: Rule, ctx) -> Iterable[str]:
        found = []
        limits = ctx.get_broadcast_state(LIMITS)
        limits.put("rules", (limits.get("rules") or 0) + 1)
        ctx.apply_to_keyed_state(SEEN, lambda key, state: found.append(key))
        yield f"rule {limits.get('rules')}"
        yield from found
        for key in found:
            ctx.output(NEW, key)
        if limits.get("rules") == 2:
            limits.remove("rules")


def test_what_a_function_collects_over_the_keys_is_emitted_of_each_group():
    outputs, _ = in_groups(Finds(), [Rule("a", 0)] * 3)
    twice = [f"rule {n}" for n in (1, 1, 2)]
    assert outputs == {None: sorted(list("abcdefgh") * 3 + twice), NEW.name: sorted(list("abcdefgh") * 3)}


class Sums(Count):
    def process_broadcast_element(self, value: Rule, ctx) -> Iterable[str]:
        found = []
        ctx.apply_to_keyed_state(SEEN, lambda key, state: found.append(state.value()))
        yield f"{sum(found)} at {ctx.current_processing_time()}"


def test_a_sum_over_the_keys_is_one_of_each_group_with_keys_and_that_over_none():
    assert in_groups(Sums())[0] == {None: ["0 at 0", *["2 at 0"] * 4], NEW.name: []}


class Quiet(Count):
    def process_broadcast_element(self, value: Rule, ctx) -> Iterable[str]:
        met = []
        ctx.apply_to_keyed_state(SEEN, lambda key, state: met.append(state.clear()))
        return [] if met else ["nobody"]


def test_what_is_emitted_where_there_is_no_key_is_emitted_once():
    assert in_groups(Quiet())[0] == {None: ["nobody"], NEW.name: []}


class Draws(Count):
    def process_broadcast_element(self, value: Rule, ctx) -> Iterable[str]:
        ctx.apply_to_keyed_state(SEEN, lambda key, state: state.clear())
        yield str(random())


def test_chance_in_what_follows_the_keys_is_refused():
    with pytest.raises(
        UnsupportedError, match=r"'Draws': what process_broadcast_element emits for Rule\(.*differs from"
    ):
        in_groups(Draws())


def test_a_rule_has_no_keyed_state():
    class Touches(Count):
        def process_broadcast_element(self, value: Rule, ctx):
            self.seen.update(7)

    for mode in ("BATCH", "STREAMING"):
        pipeline, made = flagged(Touches(), keyed=True)
        made.print("out")
        with pytest.raises(
            UnsupportedError,
            match=r"a broadcast record has no key, and so no keyed state; use ctx\.apply_to_keyed_state",
        ):
            run_pipeline(pipeline, mode)


def test_both_methods_have_to_agree_and_timers_give_event_times():
    class Disagrees(Count):
        def process_broadcast_element(self, value: Rule, ctx) -> Iterable[int]:
            yield 1

    class Optional(Count):
        def process_broadcast_element(self, value: Rule, ctx) -> Iterable[str] | None:
            return None

    class NotIterable(Count):
        def process_element(self, value: Flight, ctx) -> str:
            return ""

    with pytest.raises(
        PipelineError, match="process_element gives str and process_broadcast_element gives int; make them the same"
    ):
        flagged(Disagrees(), keyed=True)
    with pytest.raises(
        PipelineError,
        match=(
            r"process_element is annotated to give str, and has to give an iterable of records, such as Iterable\[str\]"
        ),
    ):
        flagged(NotIterable(), keyed=True)
    assert flagged(Optional(), keyed=True)
    pipeline, made = flagged(Count(), keyed=True)
    made.key_by(lambda text: text[:2], key_type=str).window(TumblingEventTimeWindows.of(timedelta(seconds=1))).reduce(
        lambda a, b: a + b
    ).print("out")
    assert len(run_pipeline(pipeline, "BATCH").only()) == 3


def test_more_subtasks_than_copies_of_the_broadcast_state_are_an_error():
    pipeline = Pipeline("p")
    rules = pipeline.from_collection(RULES, Rule, "rules").broadcast(LIMITS)
    flights = pipeline.from_collection(FLIGHTS, Flight, "flights").partition_custom(lambda key, n: 0, "carrier")
    flights.connect(rules).process(Flag()).set_parallelism(3).print("out")
    assert run_pipeline(pipeline, "STREAMING", options={"pipeline.max-parallelism": 3}).only()
    with pytest.raises(PipelineError, match="'Flag' has 3 subtasks, and broadcast state for 2; launch with"):
        run_pipeline(pipeline, "STREAMING", options={"pipeline.max-parallelism": 2})
